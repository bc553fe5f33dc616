//! Measures a machine: the time of each op of a step, the speed of copies, and how much they slow
//! each other down when they run at the same time.
//!
//! An op's time depends on whether its operands are in a cache (just written) or in memory. So ops
//! do not run in hot loops. They are *replayed* in the order of the step, on the addresses of a
//! plan, so that the cache holds the same data as in a step. The replay needs little memory:
//! addresses are folded into a window. If another op has overwritten the bytes of an operand, the
//! operand is made again, with numbers that its op accepts, and is then driven out of the cache. A
//! window as large as the plan's pool folds nothing. The smallest window has the size of the
//! largest op: profiling on demand, as in "ProTrain: Efficient LLM Training via Memory-Aware
//! Techniques" (Yao et al., 2024), section 3.2. Ops that a step has many times need not all be run,
//! so a model may be larger than memory.
//!
//! Concurrent work is measured in pairs: both loop for a while, and the progress of each is
//! compared with its progress alone.

mod disk;
#[cfg(feature = "cuda")]
mod gpu;

use crate::code::{self, CodeLaunch, Loaded};
use crate::init::{mix, normal};
use crate::kernel::Tensor;
use crate::kernels::{self, KernelError};
use crate::launch::Launch;
use crate::link::{Link, Pace, Way};
use crate::memory::{self, Arena};
use crate::sync::Bell;
use crate::team::{Team, caught};
use crate::validate::{self, ALIGN};
use crate::{Error, Options, kernel};
use artifact::{Artifact, Attr, DType, Kernel, MemorySpace, Object, Operand, Place, Pool, Range};
pub use disk::{DiskRates, disk};
#[cfg(feature = "cuda")]
pub use gpu::{drawn, gpu, index_bound, link};
use ops::OpKind;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// An op of a step. Places are addresses in one pool, as in a plan; the number of the pool is
/// ignored.
#[derive(Clone, PartialEq, Debug)]
pub struct Op {
    /// What runs.
    pub kernel: Kernel,
    /// Operands.
    pub ins: Vec<Operand>,
    /// Results.
    pub outs: Vec<Operand>,
    /// Bytes that the kernel may use while it runs.
    pub scratch: Option<Range>,
}

/// The data of an operand that no op of the step has made.
#[derive(Clone, PartialEq, Debug)]
pub enum Content {
    /// Zeros, for a moment.
    Zeros,
    /// These bytes, repeated.
    Bytes(Vec<u8>),
}

/// An op's time, µs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Micros {
    /// The median of all rounds.
    pub median: f64,
    /// The time in the fastest round. If the sum of these times is far below the sum of the
    /// medians, the machine was busy with other work.
    pub fastest: f64,
    /// The shortest time in any round: the time with the least disturbance by other work.
    pub least: f64,
}

/// The times of a step's ops.
#[derive(Clone, PartialEq, Debug)]
pub struct Times {
    /// Each op's time, or why it could not be run.
    pub micros: Vec<Result<Micros, String>>,
    /// The memory that was used, bytes.
    pub bytes: u64,
    /// The memory that the largest op needs alone, bytes.
    pub largest_op: u64,
}

/// Runs a step's ops again and again.
pub struct Replay {
    ops: Vec<Result<Ready, String>>,
    draws: Draws,
    times: Vec<Vec<f64>>,
    bytes: u64,
    largest_op: u64,
    /// Read to drive everything else out of the cache; made at its first use.
    others: Vec<u64>,
    /// As many threads as a machine uses by default.
    team: Team,
    // Dropped last: the ops' tensors lie in it.
    _window: Arena,
}

/// An op that can be run.
struct Ready {
    launch: Run,
    ins: Vec<Tensor>,
    /// The operands to make again before the op, in the first round and in later ones.
    missing: [Vec<usize>; 2],
    /// How, for each operand.
    fills: Vec<Fill>,
}

/// What runs: a kernel of the runtime, or a generated one.
enum Run {
    Kernel(Arc<Launch>),
    Code(CodeLaunch),
}

#[derive(Clone)]
enum Fill {
    Given(Content),
    /// Drawn numbers. Integers are at least 0 and below this number.
    Drawn(u64),
}

/// The cache is cleared only after at least this many bytes were made.
const COOLED: usize = 1 << 20;
/// More than the last-level cache has for one core of today's servers, bytes.
const CACHE: usize = 64 << 20;

impl Replay {
    /// Prepares ops, in the order of the step; `objects` has the code of generated kernels.
    /// `contents` has the data at an address when the step begins, where the data matter. The
    /// window has at most `memory` bytes, but always enough for the largest op.
    pub fn new(
        ops: &[Op],
        objects: &[Object],
        contents: &BTreeMap<u64, Content>,
        memory: u64,
    ) -> Result<Replay, Error> {
        let bounds = bounds(ops);
        let needs = |op: &Op| {
            touched(op)
                .iter()
                .map(|&(_, bytes)| bytes.next_multiple_of(ALIGN))
                .sum::<u64>()
        };
        let largest_op = ops.iter().map(needs).max().unwrap_or(0);
        let pool = ops
            .iter()
            .flat_map(touched)
            .map(|(start, bytes)| start.saturating_add(bytes))
            .max()
            .unwrap_or(0);
        let bytes = pool
            .min(memory)
            .max(largest_op.min(pool))
            .next_multiple_of(ALIGN);
        let lacking =
            || Error::Resources(format!("no memory to replay the step in: {bytes} bytes"));
        let window = Arena::new(bytes).ok_or_else(lacking)?;
        let kernels = ops.iter().map(|op| op.kernel.clone()).collect();
        let pools = vec![Pool {
            name: "window".into(),
            space: MemorySpace::Device(0),
            bytes,
            lent: false,
        }];
        let artifact = Artifact {
            pools,
            kernels,
            objects: objects.to_vec(),
            ..Artifact::default()
        };
        let loaded = code::load_all(&artifact)?;
        // The window's contents: start to end, and the address of the bytes in the plan.
        let mut holds = Holds::default();
        let mut ready: Vec<Result<Ready, String>> = vec![];
        for round in 0..2 {
            for (at, op) in ops.iter().enumerate() {
                let folded = fold(op, bytes);
                let missing = holds.run(op, &folded);
                match ready.get_mut(at) {
                    Some(Ok(ready)) => ready.missing[round] = missing,
                    Some(Err(_)) => {}
                    None => {
                        let fill = |x: &Operand| match contents.get(&x.place.offset) {
                            Some(content) => Fill::Given(content.clone()),
                            None => Fill::Drawn(
                                bounds.get(&(x.place.offset, x.dtype)).copied().unwrap_or(2),
                            ),
                        };
                        ready.push(prepare(&folded, &window, &artifact, &loaded).map(
                            |(launch, ins)| Ready {
                                launch,
                                ins,
                                missing: [missing, vec![]],
                                fills: op.ins.iter().map(fill).collect(),
                            },
                        ));
                    }
                }
            }
        }
        let times = vec![vec![]; ops.len()];
        let team = Team::new(Options::default().team())?;
        Ok(Replay {
            ops: ready,
            draws: Draws::default(),
            times,
            bytes,
            largest_op,
            others: vec![],
            team,
            _window: window,
        })
    }

    /// Runs `rounds` rounds after one round to warm up. Calls `progress` after each op; it returns
    /// whether to go on.
    pub fn run(&mut self, rounds: usize, progress: &mut dyn FnMut() -> bool) -> Times {
        'rounds: for round in 0..=rounds {
            let mut last = Instant::now();
            for at in 0..self.ops.len() {
                if self.fill(at, round.min(1)) {
                    last = Instant::now();
                }
                let outcome = match &self.ops[at] {
                    Ok(op) => op.run(&self.team),
                    Err(_) => Ok(()),
                };
                let now = Instant::now();
                match outcome {
                    Ok(()) if 0 < round => self.times[at].push((now - last).as_secs_f64() * 1e6),
                    Ok(()) => {}
                    Err(why) => self.ops[at] = Err(why.to_string()),
                }
                if !progress() {
                    break 'rounds;
                }
                last = Instant::now();
            }
        }
        let ran = || {
            self.ops
                .iter()
                .zip(&self.times)
                .filter(|(op, _)| op.is_ok())
                .map(|(_, times)| times)
        };
        let n_rounds = ran().map(Vec::len).min().unwrap_or(0);
        let sum = |round: usize| ran().map(|times| times[round]).sum::<f64>();
        let fastest = (0..n_rounds).min_by(|&a, &b| sum(a).total_cmp(&sum(b)));
        let micros = |(op, times): (&Result<Ready, String>, &Vec<f64>)| match (op, fastest) {
            (Ok(_), Some(fastest)) => Ok(Micros {
                median: median(times).unwrap_or(0.0),
                fastest: times[fastest],
                least: times.iter().copied().reduce(f64::min).unwrap_or(0.0),
            }),
            (Ok(_), None) => Err("it was not run".to_string()),
            (Err(why), _) => Err(why.clone()),
        };
        let micros = self.ops.iter().zip(&self.times).map(micros).collect();
        Times {
            micros,
            bytes: self.bytes,
            largest_op: self.largest_op,
        }
    }

    /// Makes an op's missing operands; false if none is missing.
    fn fill(&mut self, at: usize, round: usize) -> bool {
        let Ok(op) = &self.ops[at] else { return false };
        let mut made = 0;
        for &i in &op.missing[round] {
            self.draws.fill(&op.ins[i], &op.fills[i]);
            made += op.ins[i].bytes;
        }
        if COOLED <= made {
            self.others.resize(CACHE / size_of::<u64>(), 1);
            std::hint::black_box(self.others.iter().sum::<u64>());
        }
        !op.missing[round].is_empty()
    }
}

impl Ready {
    /// An op in a pool of its own.
    fn new(op: &Op, pool: &Arena) -> Result<Ready, String> {
        let pools = vec![Pool {
            name: "op".into(),
            space: MemorySpace::Device(0),
            bytes: pool.bytes(),
            lent: false,
        }];
        let artifact = Artifact {
            pools,
            ..Artifact::default()
        };
        let (launch, ins) = prepare(op, pool, &artifact, &[])?;
        Ok(Ready {
            launch,
            ins,
            missing: [vec![], vec![]],
            fills: vec![],
        })
    }

    /// Runs it as a machine whose streams share one team. A bug in a kernel is an error of this op.
    fn run(&self, team: &Team) -> Result<(), KernelError> {
        caught(|| match &self.launch {
            Run::Kernel(launch) => launch.run(Some(team)),
            Run::Code(launch) => launch.run(Some(team)),
        })
    }
}

/// The ranges that an op touches, each once.
fn touched(op: &Op) -> Vec<(u64, u64)> {
    let operands = op
        .ins
        .iter()
        .chain(&op.outs)
        .map(|x| (x.place.offset, x.bytes().unwrap_or(u64::MAX)));
    let mut ranges: Vec<(u64, u64)> = operands
        .chain(
            op.scratch
                .map(|scratch| (scratch.place.offset, scratch.bytes)),
        )
        .collect();
    ranges.sort_unstable();
    ranges.dedup();
    ranges
}

/// The op with its places in a window of `bytes` bytes: each address modulo the window's size; or
/// one place after the other, if the op's places would overlap otherwise.
fn fold(op: &Op, bytes: u64) -> Op {
    let ranges = touched(op);
    let modulo = |(start, size): (u64, u64)| match start % bytes.max(1) {
        at if at + size <= bytes => at,
        _ => bytes.saturating_sub(size) / ALIGN * ALIGN,
    };
    let mut places: Vec<(u64, u64)> = ranges
        .iter()
        .map(|&range| (modulo(range), range.1))
        .collect();
    let apart = |a: &(u64, u64), b: &(u64, u64)| {
        a.0.saturating_add(a.1) <= b.0 || b.0.saturating_add(b.1) <= a.0
    };
    let fits = (0..places.len())
        .all(|i| (0..i).all(|j| apart(&places[i], &places[j]) || !apart(&ranges[i], &ranges[j])));
    if !fits {
        let mut next = 0;
        for place in &mut places {
            place.0 = next;
            next += place.1.next_multiple_of(ALIGN);
        }
    }
    let place = |start: u64, size: u64| {
        let found = ranges
            .binary_search(&(start, size))
            .map_or(0, |i| places[i].0);
        Place {
            pool: 0,
            offset: found,
        }
    };
    let operand = |x: &Operand| Operand {
        place: place(x.place.offset, x.bytes().unwrap_or(u64::MAX)),
        ..x.clone()
    };
    Op {
        kernel: op.kernel.clone(),
        ins: op.ins.iter().map(operand).collect(),
        outs: op.outs.iter().map(operand).collect(),
        scratch: op.scratch.map(|range| Range {
            place: place(range.place.offset, range.bytes),
            ..range
        }),
    }
}

/// The window's contents: for the start of a range, its end and its address in the plan.
#[derive(Default)]
struct Holds(BTreeMap<u64, (u64, u64)>);

impl Holds {
    /// Records that an op runs; returns the operands that are missing.
    fn run(&mut self, op: &Op, folded: &Op) -> Vec<usize> {
        let mut missing = vec![];
        for (i, (x, at)) in op.ins.iter().zip(&folded.ins).enumerate() {
            let (start, bytes) = (at.place.offset, x.bytes().unwrap_or(0));
            if 0 < bytes && self.0.get(&start) != Some(&(start + bytes, x.place.offset)) {
                self.put(start, bytes, x.place.offset);
                missing.push(i);
            }
        }
        for (y, at) in op.outs.iter().zip(&folded.outs) {
            self.put(at.place.offset, y.bytes().unwrap_or(0), y.place.offset);
        }
        if let (Some(scratch), Some(at)) = (op.scratch, folded.scratch) {
            self.put(at.place.offset, scratch.bytes, scratch.place.offset);
        }
        missing
    }

    fn put(&mut self, start: u64, bytes: u64, address: u64) {
        if bytes == 0 {
            return;
        }
        // Ranges are disjoint: the overlapping ones are the last ranges that start before the end.
        while let Some((&from, &(to, _))) = self.0.range(..start + bytes).next_back() {
            if to <= start {
                break;
            }
            self.0.remove(&from);
        }
        self.0.insert(start, (start + bytes, address));
    }
}

type Prepared = (Run, Vec<Tensor>);

/// Proves that an op may run in the window, then resolves it to the window's memory. The artifact
/// has the window as its pool, and the objects.
fn prepare(
    op: &Op,
    window: &Arena,
    artifact: &Artifact,
    loaded: &[Arc<Loaded>],
) -> Result<Prepared, String> {
    validate::launch(
        artifact,
        &op.kernel.op,
        &op.kernel,
        &op.ins,
        &op.outs,
        op.scratch,
    )
    .map_err(|e| match e {
        Error::Invalid(why) | Error::Unsupported(why) => why,
        other => other.to_string(),
    })?;
    let tensor = |x: &Operand| {
        let bytes = x.bytes().expect("a validated tensor should have a size");
        window.tensor(x.place.offset, bytes, x.dtype, &x.shape)
    };
    let scratch = op
        .scratch
        .map(|range| window.range(range.place.offset, range.bytes));
    let (ins, outs): (Vec<Tensor>, Box<[Tensor]>) = (
        op.ins.iter().map(tensor).collect(),
        op.outs.iter().map(tensor).collect(),
    );
    if let Some(code) = &op.kernel.code {
        let tensors: Vec<Tensor> = ins.iter().cloned().chain(outs).chain(scratch).collect();
        return Ok((
            Run::Code(CodeLaunch::new(
                code,
                &loaded[code.object as usize],
                &tensors,
            )),
            ins,
        ));
    }
    let kernel = kernels::find(&op.kernel.op)
        .ok_or_else(|| format!("there is no kernel for {}", op.kernel.op))?;
    let launch = Launch::new(
        kernel,
        op.kernel.attrs.clone().into(),
        ins.clone().into(),
        outs,
        scratch,
    );
    Ok((Run::Kernel(Arc::new(launch)), ins))
}

/// For the place and type of each operand that some op uses as indices: the upper bound of the
/// indices.
fn bounds(ops: &[Op]) -> BTreeMap<(u64, DType), u64> {
    let mut bounds = BTreeMap::new();
    for op in ops {
        for (i, x) in op.ins.iter().enumerate() {
            if let Some(below) = below(op, i) {
                let bound = bounds.entry((x.place.offset, x.dtype)).or_insert(below);
                *bound = below.min(*bound);
            }
        }
    }
    bounds
}

/// The upper bound of an op's indices in operand `i`; `None` if the operand has no indices.
fn below(op: &Op, i: usize) -> Option<u64> {
    let number = |key: &str| match kernel::attr(&op.kernel.attrs, key) {
        Some(&Attr::Int(n)) => u64::try_from(n).ok(),
        _ => None,
    };
    let size = |of: usize, dim: usize| op.ins.get(of)?.shape.get(dim).copied();
    match (OpKind::from_name(&op.kernel.op)?, i) {
        (OpKind::Embedding, 1) => size(0, 0),
        (OpKind::EmbeddingBwd, 1) => number("rows"),
        (OpKind::NllLoss | OpKind::NllSum, 1) => size(0, 1),
        (OpKind::NllLossBwd, 1) => op.outs.first()?.shape.get(1).copied(),
        (OpKind::Gather | OpKind::Scatter | OpKind::ScatterAdd | OpKind::ScatterValue, 1) => {
            size(0, usize::try_from(number("dim")?).ok()?)
        }
        (OpKind::GroupedMatmul | OpKind::GroupedOuter, 2) => Some(size(0, 0)?.saturating_add(1)),
        (OpKind::Index, 1..) => size(0, i - 1),
        (OpKind::IndexPut, 2..) => size(0, i - 2),
        _ => None,
    }
}

/// Drawn numbers, for each type and bound.
#[derive(Default)]
struct Draws(Vec<(DType, u64, Vec<u8>)>);

/// The number of drawn numbers before they repeat; a prime, so that rows of a tensor differ.
const DRAWN: u64 = 65_537;

impl Draws {
    fn fill(&mut self, tensor: &Tensor, fill: &Fill) {
        let bytes = match fill {
            Fill::Given(Content::Zeros) => return memory::fill(tensor, 0),
            Fill::Given(Content::Bytes(bytes)) => bytes,
            &Fill::Drawn(below) => {
                let known = self
                    .0
                    .iter()
                    .position(|(dtype, bound, _)| (*dtype, *bound) == (tensor.dtype, below));
                let at = known.unwrap_or_else(|| {
                    self.0
                        .push((tensor.dtype, below, draw(tensor.dtype, below)));
                    self.0.len() - 1
                });
                &self.0[at].2
            }
        };
        let mut from = 0;
        while from < tensor.bytes && !bytes.is_empty() {
            let part = bytes.len().min(tensor.bytes - from);
            memory::write_part(tensor, from, &bytes[..part]);
            from += part;
        }
    }
}

/// Small normal numbers, or integers from 0 to below `below`.
fn draw(dtype: DType, below: u64) -> Vec<u8> {
    let float = |i: u64| 0.02 * normal(mix(1), i);
    let whole = |i: u64| mix(i) % below.max(1);
    let encode = |i: u64| match dtype {
        DType::F64 => float(i).to_le_bytes().to_vec(),
        DType::F32 => (float(i) as f32).to_le_bytes().to_vec(),
        DType::F16 => half::f16::from_f64(float(i)).to_le_bytes().to_vec(),
        DType::BF16 => half::bf16::from_f64(float(i)).to_le_bytes().to_vec(),
        DType::Bool => vec![(mix(i) & 1) as u8],
        other => whole(i).to_le_bytes()[..other.bytes() as usize].to_vec(),
    };
    (0..DRAWN).flat_map(encode).collect()
}

/// The median of some times; `None` if there are none.
fn median(times: &[f64]) -> Option<f64> {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    let n = times.len();
    match n {
        0 => None,
        n if n % 2 == 1 => Some(times[n / 2]),
        n => Some((times[n / 2 - 1] + times[n / 2]) / 2.0),
    }
}

// --- the machine ---

/// Work that can run at the same time as other work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Load {
    /// The step's ops.
    Compute,
    /// Copies to the device.
    In,
    /// Copies from the device.
    Out,
    /// An optimizer's updates on the host's cores.
    Host,
}

impl Load {
    /// Every load; its position is its index in [`Figures::keeps`].
    pub const ALL: [Load; 4] = [Load::Compute, Load::In, Load::Out, Load::Host];
}

/// Measurements of the machine other than ops.
#[derive(Clone, PartialEq, Debug)]
pub struct Figures {
    /// Bytes per second over the link, to the device and from it, while the other direction is
    /// idle.
    pub link_bandwidth: [f64; 2],
    /// The fixed time of a copy over the link, µs.
    pub link_micros: f64,
    /// Bytes per second of a copy without a link.
    pub copy_bandwidth: f64,
    /// The bytes that AdamW reads and writes per second on the host's cores.
    pub host_bandwidth: f64,
    /// `keeps[a][b]`: the share of its speed that load `a` keeps while load `b` runs.
    pub keeps: [[f64; 4]; 4],
    /// The time from the end of a line to the start of a waiting line on another stream, µs.
    pub handoff: f64,
    /// The memory that was used, bytes.
    pub bytes: u64,
}

/// Bytes of one copy of a load. So large that the cost of its start does not matter.
const COPY: usize = 1 << 20;
/// Size of the buffer, on each side, that a load's copies cycle through.
const AROUND: usize = 16 << 20;
/// Elements of one update of the host's load.
const UPDATE: u64 = 1 << 18;

/// Does some work, the `i`-th of a load, and returns how much it was.
type Work<'a> = dyn Fn(usize) -> Result<f64, Error> + Sync + 'a;

/// The number of comparisons of two loads; the median counts. Each is measured between runs of the
/// loads alone, because other work on the machine changes slowly.
const TURNS: usize = 3;

/// Measures the machine, with the ops of a replay that has run; each measurement takes about
/// `seconds`. `step` has the ops of a step in order, by their numbers in the replay.
pub fn machine(
    replay: &Replay,
    step: &[usize],
    link: Option<(f64, Duration)>,
    seconds: f64,
) -> Result<Figures, Error> {
    let pace = link.map(|(bandwidth, latency)| Pace { bandwidth, latency });
    let lacking = || Error::Resources("no memory to measure copies in".into());
    let arenas = [(); 4].map(|()| Arena::new(AROUND as u64));
    let [Some(a), Some(b), Some(c), Some(d)] = arenas else {
        return Err(lacking());
    };
    let update = Update::new().map_err(Error::Host)?;
    let free = Link::new(None);
    let paced = Link::new(pace);
    let n = AROUND / COPY;
    let copies = |from: &Arena, to: &Arena| -> Vec<(Tensor, Tensor)> {
        let part = |arena: &Arena, i: usize| arena.range((i * COPY) as u64, COPY as u64);
        (0..n).map(|i| (part(from, i), part(to, i))).collect()
    };
    let (inwards, outwards) = (copies(&a, &b), copies(&c, &d));
    let medians: Vec<f64> = replay
        .times
        .iter()
        .map(|times| median(times).unwrap_or(0.0))
        .collect();

    // A load is a loop: it calls the function with 0, 1, … and adds up the work that each call
    // returns. The step continues where the last measurement ended, so that all ops are measured.
    let next_op = AtomicUsize::new(0);
    let compute = |_: usize| {
        let at = next_op.fetch_add(1, Ordering::Relaxed) % step.len().max(1);
        let Some(&i) = step.get(at) else {
            return Ok(0.0);
        };
        Ok(match replay.ops.get(i) {
            Some(Ok(op)) if op.run(&replay.team).is_ok() => medians[i] * 1e-6,
            _ => 0.0,
        })
    };
    let copying = |link: &Link, way: Way, copies: &[(Tensor, Tensor)], i: usize| {
        let (src, dst) = &copies[i % n];
        link.copy(way, src, dst, || false);
        Ok(COPY as f64)
    };
    let to_device = |i: usize| copying(&paced, Way::ToDevice, &inwards, i);
    let to_host = |i: usize| copying(&paced, Way::FromDevice, &outwards, i);
    let updating = |_: usize| Ok(update.run(&replay.team));
    let loads: [&Work<'_>; 4] = [&compute, &to_device, &to_host, &updating];

    let copy_bandwidth = alone(&|i| copying(&free, Way::ToDevice, &inwards, i), seconds)?;
    let (rates, keeps) = loads_alone_and_together(loads, seconds)?;
    let small = (a.range(0, ALIGN), b.range(0, ALIGN));
    let start = |_: usize| {
        paced.copy(Way::ToDevice, &small.0, &small.1, || false);
        Ok(1.0)
    };
    let link_micros = 1e6 / alone(&start, seconds / 10.0)?.max(1.0);
    Ok(Figures {
        link_bandwidth: link_bandwidth(&rates, COPY as f64, link_micros),
        link_micros,
        copy_bandwidth,
        host_bandwidth: update.rate_from_memory(&replay.team, || {
            let copies = inwards.iter().chain(&outwards);
            copies.for_each(|(src, dst)| memory::copy(src, dst, 0, COPY));
        }),
        keeps,
        handoff: handoff(),
        bytes: 4 * AROUND as u64 + update.bytes(),
    })
}

/// Bytes per second of copies to the device and from it. A measured rate includes the start of each
/// copy; a bandwidth does not.
fn link_bandwidth(rates: &[f64; 4], copy: f64, link_micros: f64) -> [f64; 2] {
    [Load::In, Load::Out].map(|load| {
        let taken = copy / rates[load as usize].max(1.0) - link_micros * 1e-6;
        copy / taken.max(1e-12)
    })
}

/// The work that each load does in a second alone, and the share of that which it does beside each
/// other one.
fn loads_alone_and_together(
    loads: [&Work<'_>; 4],
    seconds: f64,
) -> Result<([f64; 4], [[f64; 4]; 4]), Error> {
    let mut rates = [0.0; 4];
    for (rate, load) in rates.iter_mut().zip(loads) {
        *rate = alone(load, seconds)?;
    }
    let mut keeps = [[1.0; 4]; 4];
    for (i, one) in loads.into_iter().enumerate() {
        for (j, other) in loads.into_iter().enumerate().skip(i + 1) {
            let mut shares = [vec![], vec![]];
            for _ in 0..TURNS {
                let one_alone = alone(one, seconds)?;
                let both = together([one, other], seconds)?;
                shares[0].push(share(both[0], one_alone));
                shares[1].push(share(both[1], alone(other, seconds)?));
            }
            let [one, other] = shares.map(|shares| median(&shares).unwrap_or(1.0));
            (keeps[i][j], keeps[j][i]) = (one, other);
        }
    }
    Ok((rates, keeps))
}

/// What is left of a rate. A share above 1 is noise, and a share of 0 would stop a simulation.
fn share(rate: f64, alone: f64) -> f64 {
    match 0.0 < alone {
        true => (rate / alone).clamp(0.01, 1.0),
        false => 1.0,
    }
}

/// The work that a load does in a second alone.
fn alone(load: &Work<'_>, seconds: f64) -> Result<f64, Error> {
    // To warm up.
    run_for(load, seconds / 10.0, &AtomicBool::new(false))?;
    run_for(load, seconds, &AtomicBool::new(false))
}

/// The work that each of some loads does in a second while the others run.
fn together<const N: usize>(loads: [&Work<'_>; N], seconds: f64) -> Result<[f64; N], Error> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = &stop;
        let run = |load| scope.spawn(move || run_for(load, f64::INFINITY, stop));
        let others: Vec<_> = loads[1..].iter().copied().map(run).collect();
        let first = run_for(loads[0], seconds, stop);
        stop.store(true, Ordering::SeqCst);
        let mut rates = [first?; N];
        for (rate, other) in rates[1..].iter_mut().zip(others) {
            // A load that panicked did nothing.
            *rate = other.join().unwrap_or(Ok(0.0))?;
        }
        Ok(rates)
    })
}

/// The work that a load does in a second.
fn run_for(load: &Work<'_>, seconds: f64, stop: &AtomicBool) -> Result<f64, Error> {
    let start = Instant::now();
    let mut done = 0.0;
    let mut i = 0;
    loop {
        done += load(i)?;
        i += 1;
        let elapsed = start.elapsed().as_secs_f64();
        if seconds <= elapsed || stop.load(Ordering::SeqCst) {
            return Ok(done / elapsed.max(1e-9));
        }
    }
}

/// The time from a store until a thread that sleeps and waits for it continues, µs.
fn handoff() -> f64 {
    const ROUNDS: u64 = 64;
    let (bell, reached, woken) = (Bell::default(), AtomicU64::new(0), Mutex::new(Vec::new()));
    let mut rung = vec![];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                bell.wait(|| round <= reached.load(Ordering::SeqCst));
                crate::sync::unpoisoned(&woken).push(Instant::now());
            }
        });
        for round in 1..=ROUNDS {
            // The thread sleeps by then.
            std::thread::sleep(Duration::from_millis(1));
            rung.push(Instant::now());
            reached.store(round, Ordering::SeqCst);
            bell.ring();
        }
    });
    let woken = crate::sync::unpoisoned(&woken);
    let micros = woken
        .iter()
        .zip(&rung)
        .map(|(woken, rung)| woken.saturating_duration_since(*rung).as_secs_f64() * 1e6);
    median(&micros.collect::<Vec<f64>>()).unwrap_or(0.0)
}

/// The host's load: AdamW on tensors of its own.
struct Update {
    op: Ready,
    touched: u64,
    arena: Arena,
}

impl Update {
    /// Bytes of the parameter, of the gradient and of each moment.
    const TENSOR: u64 = 4 * UPDATE;

    /// AdamW of one tensor: parameter, gradient and moments one after the other, then the step
    /// and the options.
    fn op() -> Op {
        let tensor = Update::TENSOR;
        let operand = |offset: u64, dtype: DType, shape: &[u64]| Operand {
            place: Place { pool: 0, offset },
            dtype,
            shape: shape.to_vec(),
        };
        let large = |i: u64| operand(i * tensor, DType::F32, &[UPDATE]);
        Op {
            kernel: Kernel {
                op: "adamw".into(),
                attrs: vec![],
                code: None,
            },
            ins: (0..4)
                .map(large)
                .chain([
                    operand(4 * tensor, DType::I64, &[]),
                    operand(4 * tensor + ALIGN, DType::F64, &[5]),
                ])
                .collect(),
            outs: [0, 2, 3].map(large).to_vec(),
            scratch: None,
        }
    }
    fn new() -> Result<Update, String> {
        let tensor = Update::TENSOR;
        let op = Update::op();
        let arena = Arena::new(4 * tensor + 2 * ALIGN).ok_or("no memory to measure updates in")?;
        let ready = Ready::new(&op, &arena)?;
        memory::write(&ready.ins[4], &1i64.to_le_bytes());
        let hyper = [1e-3f64, 0.9, 0.999, 1e-8, 1e-2].map(f64::to_le_bytes);
        memory::write(&ready.ins[5], hyper.as_flattened());
        let mut draws = Draws::default();
        draws.fill(&ready.ins[0], &Fill::Drawn(2));
        draws.fill(&ready.ins[1], &Fill::Drawn(2));
        Ok(Update {
            op: ready,
            touched: 7 * tensor,
            arena,
        })
    }
    fn run(&self, team: &Team) -> f64 {
        if self.op.run(team).is_ok() {
            self.touched as f64
        } else {
            0.0
        }
    }
    /// The bytes that it reads and writes in a second if they come from memory, as those of a model
    /// do: its own lie in a cache. `evict` touches so many others that they do not. The median of a
    /// few updates.
    fn rate_from_memory(&self, team: &Team, evict: impl Fn()) -> f64 {
        const UPDATES: usize = 7;
        let seconds = (0..UPDATES).map(|_| {
            evict();
            let start = Instant::now();
            self.run(team);
            start.elapsed().as_secs_f64()
        });
        let seconds = median(&seconds.collect::<Vec<f64>>()).unwrap_or(0.0);
        self.touched as f64 / seconds.max(1e-9)
    }
    fn bytes(&self) -> u64 {
        self.arena.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operand(offset: u64, dtype: DType, shape: &[u64]) -> Operand {
        Operand {
            place: Place { pool: 0, offset },
            dtype,
            shape: shape.to_vec(),
        }
    }
    fn op(name: &str, attrs: &[(&str, Attr)], ins: Vec<Operand>, outs: Vec<Operand>) -> Op {
        let attrs = attrs
            .iter()
            .map(|(key, attr)| (key.to_string(), attr.clone()))
            .collect();
        Op {
            kernel: Kernel {
                op: name.into(),
                attrs,
                code: None,
            },
            ins,
            outs,
            scratch: None,
        }
    }
    /// An embedding of 16 tokens from a table of 4 rows, then its square, in place.
    fn step() -> Vec<Op> {
        let x = || operand(4096, DType::F32, &[16, 16]);
        vec![
            op(
                "embedding",
                &[],
                vec![
                    operand(0, DType::F32, &[4, 16]),
                    operand(1024, DType::I64, &[16]),
                ],
                vec![x()],
            ),
            op("mul", &[], vec![x(), x()], vec![x()]),
        ]
    }

    #[test]
    fn operands_are_ones_that_ops_accept() {
        let mut replay = Replay::new(&step(), &[], &BTreeMap::new(), u64::MAX).unwrap();
        let mut n = 0;
        let times = replay.run(3, &mut || {
            n += 1;
            true
        });
        assert_eq!(
            (n, times.bytes, times.largest_op),
            (8, 5120, 256 + 128 + 1024)
        );
        assert!(
            times.micros.iter().all(|micros| micros
                .as_ref()
                .is_ok_and(|m| 0.0 <= m.least && m.least <= m.fastest.min(m.median))),
            "{times:?}"
        );
        // Drawn tokens are below the number of rows, and not all equal.
        let Ok(embedding) = &replay.ops[0] else {
            panic!("it should be ready")
        };
        let mut bytes = vec![0; 128];
        memory::read(&embedding.ins[1], &mut bytes);
        let tokens: Vec<u8> = bytes.iter().step_by(8).copied().collect();
        assert!(
            tokens.iter().all(|&t| t < 4) && tokens.iter().any(|&t| t != tokens[0]),
            "{tokens:?}"
        );
    }

    #[test]
    fn the_least_window_is_the_largest_op() {
        let mut ops = step();
        let y = || operand(8192, DType::F32, &[20, 16]);
        ops.push(op("neg", &[], vec![y()], vec![y()]));
        let mut replay = Replay::new(&ops, &[], &BTreeMap::new(), 0).unwrap();
        let times = replay.run(2, &mut || true);
        assert_eq!(times.bytes, times.largest_op);
        assert!(times.micros.iter().all(Result::is_ok), "{times:?}");
        // Both operands of the first op are made again in each round, because the last op has
        // overwritten their bytes.
        let Ok(embedding) = &replay.ops[0] else {
            panic!("it should be ready")
        };
        assert_eq!(embedding.missing, [vec![0, 1], vec![0, 1]]);
    }

    #[test]
    fn what_cannot_run_is_told_and_the_rest_is_measured() {
        let mut ops = step();
        ops.push(op(
            "extern",
            &[("name", Attr::Str("aten.foo".into()))],
            vec![],
            vec![],
        ));
        ops.push(op(
            "mul",
            &[],
            vec![operand(0, DType::F32, &[4]), operand(64, DType::F32, &[5])],
            vec![],
        ));
        let times = Replay::new(&ops, &[], &BTreeMap::new(), 0)
            .unwrap()
            .run(1, &mut || true);
        let refused: Vec<usize> = (0..4).filter(|&i| times.micros[i].is_err()).collect();
        assert_eq!(refused, [2, 3]);
        assert!(times.micros[2].as_ref().unwrap_err().contains("aten.foo"));
    }

    #[test]
    fn contents_that_are_given_are_used() {
        let contents = BTreeMap::from([(1024, Content::Bytes(9i64.to_le_bytes().to_vec()))]);
        let times = Replay::new(&step(), &[], &contents, 0)
            .unwrap()
            .run(1, &mut || true);
        assert!(
            times.micros[0].as_ref().unwrap_err().contains('9'),
            "{times:?}"
        );
        let contents = BTreeMap::from([(1024, Content::Zeros)]);
        assert!(
            Replay::new(&step(), &[], &contents, 0)
                .unwrap()
                .run(1, &mut || true)
                .micros[0]
                .is_ok()
        );
    }

    #[test]
    fn a_machine_is_measured() {
        let mut replay = Replay::new(&step(), &[], &BTreeMap::new(), 0).unwrap();
        replay.run(1, &mut || true);
        let figures = machine(
            &replay,
            &[0, 1],
            Some((1e9, Duration::from_micros(10))),
            0.002,
        )
        .unwrap();
        assert!(
            figures
                .keeps
                .iter()
                .flatten()
                .all(|&share| 0.0 < share && share <= 1.0),
            "{figures:?}"
        );
        // A paced link is never faster than its pace.
        assert!(
            figures.link_bandwidth.iter().all(|&rate| 0.0 < rate),
            "{figures:?}"
        );
        assert!(
            10.0 <= figures.link_micros && 0.0 < figures.host_bandwidth && 0.0 <= figures.handoff,
            "{figures:?}"
        );
    }
}
