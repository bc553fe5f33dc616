//! Work on the host: pools in its memory, the runtime's kernels and generated ones, shared by a
//! team of threads.
//!
//! The CPU backend is this and a link. A backend for a device uses it for the streams that stay on
//! the host, such as an optimizer's updates of parameters that live there.
//!
//! **Invariant:** every tensor of a launch lies in an arena of the same [`HostWork`], which
//! outlives the launch.

use super::backend::{CommandError, CommandId, Launch as Prepared, LentPlace};
use super::lent::{Holder, Lent};
use crate::Error;
use crate::code::{self, CodeLaunch, Loaded};
use crate::foreign::{Foreign, ForeignCall};
use crate::kernel::Tensor;
use crate::kernels::{self, KernelError};
use crate::launch::Launch;
use crate::memory::{self, Arena, Borrowed};
use crate::sync::unpoisoned;
use crate::team::{Parts, Team};
use crate::validate::calls;
use artifact::{Attr, Code, Kernel, Object, Operand, Place, Pool, Range};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Pools, kernels and launches of the host.
pub(crate) struct HostWork {
    /// Memory of each pool; `None` for a pool that lies elsewhere.
    arenas: Vec<Option<Arena>>,
    /// Pools of another step, by number, which are allocated already.
    given: Vec<Option<Arena>>,
    /// Tensors in memory of the caller, by where the plan has them.
    lent: Mutex<BTreeMap<Place, LentPlace>>,
    /// By the artifact's numbers, as are kernels; `None` for those of a device.
    objects: Vec<Option<Arc<Loaded>>>,
    kernels: Vec<Option<HostKernel>>,
    /// By the command's number; `None` for commands that are no launches here. Only the command's
    /// stream locks one, and the machine's front between steps.
    launches: Vec<Option<Mutex<Work>>>,
    /// Computes what has no kernel.
    foreign: Option<Arc<dyn Foreign>>,
    /// The most threads that share a launch.
    threads: usize,
    /// All streams and all machines share one team, which has one launch at a time: teams of their
    /// own would only take turns on the cores.
    team: Option<Arc<Team>>,
}

/// A kernel of an artifact.
enum HostKernel {
    /// One of the runtime's.
    Own {
        kernel: &'static kernels::Kernel,
        attrs: Arc<[(String, Attr)]>,
    },
    /// Generated.
    Generated(Code),
    /// Of the caller.
    Foreign { name: String, node: String },
}

/// A launch, resolved.
enum Work {
    Own(Arc<Launch>),
    Generated(CodeLaunch),
    Foreign(ForeignLaunch),
}

/// A launch that the caller computes.
pub(crate) struct ForeignLaunch {
    name: String,
    node: String,
    ins: Box<[Lent]>,
    outs: Box<[Lent]>,
    compute: Arc<dyn Foreign>,
}

impl ForeignLaunch {
    pub(crate) fn run(&self) -> Result<(), CommandError> {
        let call = ForeignCall {
            name: &self.name,
            node: &self.node,
            ins: &self.ins,
            outs: &self.outs,
        };
        self.compute.compute(&call).map_err(CommandError::from)
    }

    /// Has it find an operand, or a result, elsewhere from now on.
    pub(crate) fn point(&mut self, operand: usize, to: *mut u8) {
        let mut all = self.ins.iter_mut().chain(&mut self.outs);
        let lent = all.nth(operand).expect("a launch should have its operands");
        lent.point(to);
    }
}

/// Where a copy's bytes come from, and where they go.
#[derive(Clone)]
pub(crate) struct Ends {
    pub(crate) src: Tensor,
    pub(crate) dst: Tensor,
}

impl Ends {
    /// False if an end is memory of the caller that nobody gave.
    pub(crate) fn have_memory(&self) -> bool {
        self.src.has_memory() && self.dst.has_memory()
    }
}

impl Parts for Ends {
    fn run(&self, part: usize, _parts: usize) -> Result<(), KernelError> {
        let from = part * PIECE;
        memory::copy(&self.src, &self.dst, from, self.src.bytes.min(from + PIECE));
        Ok(())
    }
}

/// Bytes of a copy that one thread moves at a time.
const PIECE: usize = 1 << 18;
/// A copy of fewer pieces is one thread's. It takes about 80 µs, and waking a thread 26 to 100.
const FEW_PIECES: usize = 4;

/// What commands read or write in memory of the caller, by the place of its tensor.
#[derive(Default)]
pub(crate) struct LentEnds(BTreeMap<Place, Vec<LentEnd>>);

/// A part of a tensor of the caller that a command reads or writes.
#[derive(Clone, Copy)]
pub(crate) struct LentEnd {
    pub(crate) command: CommandId,
    /// Its number among the operands and results of a launch; the source of a copy is 0, its
    /// destination 1.
    pub(crate) operand: usize,
    /// Where it begins in the tensor, and its size.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl LentEnds {
    /// Adds those of a command with these operands.
    pub(crate) fn add(
        &mut self,
        host: &HostWork,
        command: CommandId,
        operands: impl IntoIterator<Item = Range>,
    ) {
        for (operand, Range { place, bytes }) in operands.into_iter().enumerate() {
            if let Some((lent, offset)) = host.lent(place) {
                self.0.entry(lent.place).or_default().push(LentEnd {
                    command,
                    operand,
                    offset,
                    bytes,
                });
            }
        }
    }

    /// Those in a tensor.
    pub(crate) fn of(&self, place: Place) -> &[LentEnd] {
        self.0.get(&place).map_or(&[], Vec::as_slice)
    }
}

impl HostWork {
    /// No pools and no kernels yet. At most `threads` threads will share a launch.
    pub(crate) fn new(threads: usize) -> HostWork {
        HostWork {
            foreign: None,
            arenas: Vec::new(),
            given: Vec::new(),
            lent: Mutex::default(),
            objects: Vec::new(),
            kernels: Vec::new(),
            launches: Vec::new(),
            threads,
            team: None,
        }
    }

    /// Takes the caller's functions for what has no kernel.
    pub(crate) fn call(&mut self, foreign: Option<Arc<dyn Foreign>>) {
        self.foreign = foreign;
    }

    /// Takes the pools of other work, which does nothing meanwhile.
    pub(crate) fn share(&mut self, other: &HostWork) {
        self.given.clone_from(&other.arenas);
    }

    /// Allocates the next pool in the host's memory, unless it is given.
    pub(crate) fn allocate(&mut self, pool: &Pool) -> Result<(), Error> {
        if let Some(Some(arena)) = self.given.get(self.arenas.len()) {
            self.arenas.push(Some(arena.clone()));
            return Ok(());
        }
        let arena = Arena::new(pool.bytes).ok_or_else(|| {
            let Pool { name, bytes, .. } = pool;
            Error::Resources(format!("no memory for pool {name}: {bytes} bytes"))
        })?;
        self.arenas.push(Some(arena));
        Ok(())
    }
    /// The next pool is the caller's memory.
    pub(crate) fn borrow(&mut self, lent: &[LentPlace]) {
        self.skip_pool();
        let lent = lent.iter().map(|lent| (lent.place, *lent));
        unpoisoned(&self.lent).extend(lent);
    }
    /// The tensor of the caller that a place lies in, and the place's offset in it.
    pub(crate) fn lent(&self, place: Place) -> Option<(LentPlace, u64)> {
        let all = unpoisoned(&self.lent);
        let (_, lent) = all.range(..=place).next_back()?;
        let is_same = lent.place.pool == place.pool;
        is_same.then(|| (*lent, place.offset - lent.place.offset))
    }
    /// Says where the tensor of the caller at a place lies from now on.
    pub(crate) fn lend_at(&self, place: Place, to: Borrowed) {
        if let Some(lent) = unpoisoned(&self.lent).get_mut(&place) {
            lent.memory = Some(to);
        }
    }
    /// Has a launch find an operand there from now on.
    pub(crate) fn point(&self, end: &LentEnd, to: &Borrowed) {
        let work = self.launches[end.command.0].as_ref();
        let mut work = unpoisoned(work.expect("a launch should be prepared before it is changed"));
        let address = to.at(end.offset, end.bytes);
        match &mut *work {
            Work::Own(launch) => Arc::make_mut(launch).point(end.operand, address),
            Work::Generated(launch) => launch.point(end.operand, address),
            Work::Foreign(launch) => launch.point(end.operand, address),
        }
    }

    /// The next pool lies elsewhere.
    pub(crate) fn skip_pool(&mut self) {
        self.arenas.push(None);
    }

    /// Loads the next object.
    pub(crate) fn load_object(&mut self, object: &Object) -> Result<(), Error> {
        let loaded = code::load(self.objects.len(), object)?;
        self.objects.push(Some(loaded));
        Ok(())
    }
    /// The next object is a device's.
    pub(crate) fn skip_object(&mut self) {
        self.objects.push(None);
    }

    /// Loads the next kernel.
    pub(crate) fn load_kernel(&mut self, kernel: &Kernel) -> Result<(), Error> {
        let found = match &kernel.code {
            Some(code) => {
                let object = self.objects.get(code.object as usize);
                code::check(kernel, code, object.and_then(Option::as_deref))?;
                HostKernel::Generated(code.clone())
            }
            None if self.foreign.is_some() && calls::is_foreign(kernel) => {
                let text = |key| calls::text(kernel, key).unwrap_or_default().to_string();
                HostKernel::Foreign {
                    name: text("name"),
                    node: text("node"),
                }
            }
            None => HostKernel::Own {
                kernel: kernels::find(&kernel.op).ok_or_else(|| {
                    Error::Unsupported(format!("{}: there is no kernel for it", kernel.op))
                })?,
                attrs: kernel.attrs.clone().into(),
            },
        };
        self.kernels.push(Some(found));
        Ok(())
    }
    /// The next kernel is a device's.
    pub(crate) fn skip_kernel(&mut self) {
        self.kernels.push(None);
    }

    /// A launch of a kernel of the caller, whose tensors `lend` lends; `None` for other kernels.
    pub(crate) fn foreign(
        &self,
        launch: &Prepared<'_>,
        lend: impl Fn(&Operand) -> Lent,
    ) -> Option<ForeignLaunch> {
        let Some(HostKernel::Foreign { name, node }) = &self.kernels[launch.kernel] else {
            return None;
        };
        let foreign = self.foreign.clone();
        Some(ForeignLaunch {
            name: name.clone(),
            node: node.clone(),
            ins: launch.ins.iter().map(&lend).collect(),
            outs: launch.outs.iter().map(&lend).collect(),
            compute: foreign.expect("such a kernel should have been refused"),
        })
    }

    /// Resolves a launch.
    pub(crate) fn prepare(&mut self, command: CommandId, launch: Prepared<'_>) {
        if let Some(foreign) = self.foreign(&launch, |operand| self.lend(operand)) {
            let work = Mutex::new(Work::Foreign(foreign));
            return put(&mut self.launches, command, work);
        }
        let all = |operands: &[Operand]| -> Box<[Tensor]> {
            operands.iter().map(|x| self.tensor(x)).collect()
        };
        let (ins, outs) = (all(launch.ins), all(launch.outs));
        let scratch = launch.scratch.map(|range| self.range(range));
        let kernel = self.kernels[launch.kernel].as_ref();
        let work = match kernel.expect("a kernel of the host should run there") {
            HostKernel::Own { kernel, attrs } => {
                let launch = Launch::new(kernel, attrs.clone(), ins, outs, scratch);
                Work::Own(Arc::new(launch))
            }
            HostKernel::Generated(code) => {
                let tensors: Vec<Tensor> = ins.into_iter().chain(outs).chain(scratch).collect();
                let object = self.objects[code.object as usize].as_ref();
                let object = object.expect("a checked kernel should have its object");
                Work::Generated(CodeLaunch::new(code, object, &tensors))
            }
            HostKernel::Foreign { .. } => unreachable!("its launch was made above"),
        };
        put(&mut self.launches, command, Mutex::new(work));
    }

    /// A tensor with what keeps its memory. The caller keeps its own.
    pub(crate) fn lend(&self, operand: &Operand) -> Lent {
        let arena = self.own(operand.place);
        let keeper = arena.map_or_else(|| Arc::new(()) as Arc<dyn Send + Sync>, Arena::keeper);
        Lent::new((self.tensor(operand), Holder::Host), keeper)
    }

    /// Whether the caller computes some of it.
    pub(crate) fn has_foreign(&self) -> bool {
        let mut kernels = self.kernels.iter().flatten();
        kernels.any(|kernel| matches!(kernel, HostKernel::Foreign { .. }))
    }

    /// Starts the team, if a launch can be shared.
    pub(crate) fn start(&mut self) -> Result<(), Error> {
        let mut launches = self.launches.iter().flatten();
        if self.threads > 1 && launches.any(|work| unpoisoned(work).is_split()) {
            let own: Vec<Arc<Launch>> = self.own_launches().collect();
            let prepare = move || own.iter().for_each(|launch| launch.prepare());
            self.team = Some(Team::shared(self.threads, prepare)?);
        }
        Ok(())
    }

    /// Makes the workspaces that the calling thread needs for the launches.
    pub(crate) fn enter(&self) {
        self.own_launches().for_each(|launch| launch.prepare());
    }

    fn own_launches(&self) -> impl Iterator<Item = Arc<Launch>> {
        let launches = self.launches.iter().flatten();
        launches.filter_map(|work| match &*unpoisoned(work) {
            Work::Own(launch) => Some(launch.clone()),
            Work::Generated(_) | Work::Foreign(_) => None,
        })
    }

    /// Runs a prepared launch, on the team if that helps.
    pub(crate) fn launch(&self, command: CommandId) -> Result<(), CommandError> {
        let work = self.launches[command.0].as_ref();
        let team = self.team.as_deref();
        let work = work.expect("a launch should be prepared before it runs");
        match &*unpoisoned(work) {
            Work::Own(launch) => launch.run(team)?,
            Work::Generated(launch) => launch.run(team)?,
            Work::Foreign(launch) => launch.run()?,
        }
        Ok(())
    }

    /// Copies bytes, on the team if they are many.
    pub(crate) fn copy(&self, ends: &Arc<Ends>) -> Result<(), CommandError> {
        let bytes = ends.src.bytes;
        match &self.team {
            Some(team) if bytes >= FEW_PIECES * PIECE => {
                team.run(ends.clone(), bytes.div_ceil(PIECE))?;
            }
            Some(_) | None => memory::copy(&ends.src, &ends.dst, 0, bytes),
        }
        Ok(())
    }

    /// Bytes of a pool on the host.
    pub(crate) fn range(&self, Range { place, bytes }: Range) -> Tensor {
        if let Some(arena) = &self.arenas[place.pool as usize] {
            return arena.range(place.offset, bytes);
        }
        let (lent, offset) = self
            .lent(place)
            .expect("work on the host should stay in its pools");
        match lent.memory {
            Some(memory) => memory.range(offset, bytes),
            None => memory::nowhere(bytes),
        }
    }

    /// A tensor in a pool on the host.
    pub(crate) fn tensor(&self, operand: &Operand) -> Tensor {
        let bytes = operand
            .bytes()
            .expect("a validated tensor should have a size");
        let place = operand.place;
        if let Some(arena) = &self.arenas[place.pool as usize] {
            return arena.tensor(place.offset, bytes, operand.dtype, &operand.shape);
        }
        let shape = operand.shape.iter().map(|&d| d as usize);
        Tensor {
            dtype: operand.dtype,
            shape: shape.collect(),
            ..self.range(Range { place, bytes })
        }
    }

    /// The memory that a place lies in, if it is the machine's own.
    pub(crate) fn own(&self, place: Place) -> Option<&Arena> {
        self.arenas[place.pool as usize].as_ref()
    }

    /// The memory of a pool on the host that is not lent.
    pub(crate) fn arena(&self, place: Place) -> &Arena {
        let arena = self.arenas[place.pool as usize].as_ref();
        arena.expect("work on the host should stay in its pools")
    }
}

impl Work {
    /// True if threads can share it.
    fn is_split(&self) -> bool {
        match self {
            Work::Own(launch) => launch.is_split(),
            Work::Generated(launch) => launch.is_split(),
            Work::Foreign(_) => false,
        }
    }
}

/// Puts what was prepared for a command where its number finds it.
pub(crate) fn put<T>(list: &mut Vec<Option<T>>, command: CommandId, what: T) {
    if list.len() <= command.0 {
        list.resize_with(command.0 + 1, || None);
    }
    list[command.0] = Some(what);
}
