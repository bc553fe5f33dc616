//! What a stream runs: an artifact's commands with every index, name and place resolved to a
//! function, a slice or an address. It is made once, when an artifact is loaded, so that a step
//! looks nothing up and allocates nothing.

use crate::access::accesses;
use crate::code::{CodeLaunch, Loaded};
use crate::kernel::{Call, Tensor};
use crate::kernels::{self, Cut};
use crate::link::{Link, Way};
use crate::memory::{self, Arena};
use crate::team::{Parts, Team};
use artifact::{Artifact, Attr, CommandKind, MemorySpace, Operand, Place, Range};
use std::sync::Arc;

/// One command.
pub(crate) struct Instruction {
    /// Its position in the artifact's list.
    pub(crate) command: u32,
    /// Its line in the schedule.
    pub(crate) line: u32,
    /// One past the last byte of the device's pool that it touches.
    pub(crate) device_end: u64,
    /// How many bytes it reads and writes.
    pub(crate) bytes: u64,
    /// What it does.
    pub(crate) action: Action,
}

/// What an instruction does.
pub(crate) enum Action {
    /// Runs a kernel.
    Launch(Arc<Launch>),
    /// Runs a generated kernel.
    Code(CodeLaunch),
    /// Copies; over the link, if a way is given.
    Copy {
        src: Tensor,
        dst: Tensor,
        way: Option<Way>,
    },
    /// Marks an event as reached.
    Record { event: usize },
    /// Waits for an event of this step or of the one before.
    Wait { event: usize, previous: bool },
    /// What no kernel should do, for tests of what happens then.
    #[cfg(test)]
    Misbehave(fn() -> Result<(), String>),
}

/// A kernel and what it runs on.
pub(crate) struct Launch {
    kernel: &'static kernels::Kernel,
    attrs: Arc<[(String, Attr)]>,
    ins: Box<[Tensor]>,
    outs: Box<[Tensor]>,
    scratch: Option<Tensor>,
    cut: Cut,
}

impl Launch {
    /// A launch of a checked kernel; the caller answers for the tensors, see [`Call::new`].
    pub(crate) fn new(
        kernel: &'static kernels::Kernel,
        attrs: Arc<[(String, Attr)]>,
        ins: Box<[Tensor]>,
        outs: Box<[Tensor]>,
        scratch: Option<Tensor>,
    ) -> Launch {
        let cut = kernel.cut(&Call::new(&attrs, &ins, &outs, scratch.as_ref()));
        Launch {
            kernel,
            attrs,
            ins,
            outs,
            scratch,
            cut,
        }
    }
    fn call(&self) -> Call<'_> {
        Call::new(&self.attrs, &self.ins, &self.outs, self.scratch.as_ref())
    }
    /// Makes the workspace that this thread needs for it.
    pub(crate) fn prepare(&self) {
        // A kernel that cannot be prepared says so when it runs.
        let _ = self.kernel.prepare(&self.call());
    }
    /// Runs it: in parts on a team if there is one and the kernel can be cut, else at once.
    pub(crate) fn run(self: &Arc<Self>, team: Option<&Team>) -> Result<(), String> {
        let parts = team.map_or(1, |team| self.cut.parts(team.threads()));
        match team {
            Some(team) if 1 < parts => {
                self.kernel.begin(&self.call())?;
                team.run(self.clone(), parts)?;
                self.kernel.end(&self.call())
            }
            _ => self.kernel.run(&self.call()),
        }
    }
}

impl Launch {
    /// Runs it in parts of `lengths` aligned units, in turn, the last one first. How many parts
    /// there were.
    pub(crate) fn run_in_parts(&self, lengths: &[usize]) -> Result<usize, String> {
        let (units, align) = (self.cut.units, self.cut.align);
        let mut starts = vec![0];
        for length in lengths.iter().cycle() {
            let next = starts[starts.len() - 1] + length.max(&1) * align;
            if units <= next {
                break;
            }
            starts.push(next);
        }
        if starts.len() == 1 {
            return self.kernel.run(&self.call()).map(|()| 1);
        }
        self.kernel.begin(&self.call())?;
        let mut end = units;
        for &start in starts.iter().rev() {
            self.kernel.run_part(&self.call().only(units, start..end))?;
            end = start;
        }
        self.kernel.end(&self.call())?;
        Ok(starts.len())
    }
}

impl Parts for Launch {
    fn run(&self, part: usize, parts: usize) -> Result<(), String> {
        self.kernel
            .run_part(&self.call().only(self.cut.units, self.cut.part(part, parts)))
    }
}

impl Action {
    /// True for a launch that threads can share.
    pub(crate) fn is_split(&self) -> bool {
        match self {
            Action::Launch(launch) => 1 < launch.cut.parts(2),
            Action::Code(launch) => launch.is_split(),
            _ => false,
        }
    }
    /// The launch that it is.
    pub(crate) fn launch(&self) -> Option<Arc<Launch>> {
        match self {
            Action::Launch(launch) => Some(launch.clone()),
            _ => None,
        }
    }
    /// Runs a launch, on a team if there is one, or a copy. Records and waits are the executor's.
    pub(crate) fn run(
        &self,
        link: &Link,
        team: Option<&Team>,
        stopped: impl Fn() -> bool,
    ) -> Result<(), String> {
        match self {
            Action::Launch(launch) => Launch::run(launch, team),
            Action::Code(launch) => launch.run(team),
            Action::Copy {
                src,
                dst,
                way: Some(way),
            } => {
                link.copy(*way, src, dst, stopped);
                Ok(())
            }
            Action::Copy {
                src,
                dst,
                way: None,
            } => {
                memory::copy(src, dst, 0, src.bytes);
                Ok(())
            }
            Action::Record { .. } | Action::Wait { .. } => Ok(()),
            #[cfg(test)]
            Action::Misbehave(run) => run(),
        }
    }
}

/// Each stream's instructions. The artifact is validated, its objects are loaded, and the arenas
/// are its pools.
pub(crate) fn resolve(
    artifact: &Artifact,
    objects: &[Arc<Loaded>],
    arenas: &[Arena],
) -> Vec<Box<[Instruction]>> {
    let attrs: Vec<Arc<[_]>> = artifact
        .kernels
        .iter()
        .map(|kernel| kernel.attrs.clone().into())
        .collect();
    let space = |pool: usize| artifact.pools[pool].space;
    let is_device = |place: &Place| matches!(space(place.pool as usize), MemorySpace::Device(_));
    let mut programs: Vec<Vec<Instruction>> = artifact.streams.iter().map(|_| Vec::new()).collect();
    for (i, command) in artifact.commands.iter().enumerate() {
        let touched = accesses(command);
        let device_end = touched
            .iter()
            .filter(|access| space(access.pool) == MemorySpace::Device(0))
            .map(|access| access.end)
            .max()
            .unwrap_or(0);
        let bytes = touched.iter().map(|access| access.end - access.start).sum();
        let action = match &command.kind {
            CommandKind::Launch {
                kernel,
                ins,
                outs,
                scratch,
            } => {
                let artifact::Kernel { op, code, .. } = &artifact.kernels[*kernel as usize];
                let all = |operands: &[Operand]| {
                    operands
                        .iter()
                        .map(|x| tensor(arenas, x))
                        .collect::<Box<[_]>>()
                };
                let scratch = scratch.map(|Range { place, bytes }| {
                    arenas[place.pool as usize].range(place.offset, bytes)
                });
                match code {
                    Some(code) => {
                        let tensors: Vec<Tensor> = all(ins)
                            .into_iter()
                            .chain(all(outs))
                            .chain(scratch)
                            .collect();
                        Action::Code(CodeLaunch::new(
                            code,
                            &objects[code.object as usize],
                            &tensors,
                        ))
                    }
                    None => Action::Launch(Arc::new(Launch::new(
                        kernels::find(op).expect("a validated launch should have a kernel"),
                        attrs[*kernel as usize].clone(),
                        all(ins),
                        all(outs),
                        scratch,
                    ))),
                }
            }
            &CommandKind::Copy { src, dst, bytes } => Action::Copy {
                src: arenas[src.pool as usize].range(src.offset, bytes),
                dst: arenas[dst.pool as usize].range(dst.offset, bytes),
                way: match (is_device(&src), is_device(&dst)) {
                    (false, true) => Some(Way::ToDevice),
                    (true, false) => Some(Way::FromDevice),
                    (true, true) | (false, false) => None,
                },
            },
            &CommandKind::Record { event } => Action::Record {
                event: event as usize,
            },
            &CommandKind::Wait { event, previous } => Action::Wait {
                event: event as usize,
                previous,
            },
        };
        let instruction = Instruction {
            command: i as u32,
            line: command.line,
            device_end,
            bytes,
            action,
        };
        programs[command.stream as usize].push(instruction);
    }
    programs.into_iter().map(Vec::into_boxed_slice).collect()
}

/// A validated tensor's memory.
pub(crate) fn tensor(arenas: &[Arena], operand: &Operand) -> Tensor {
    let bytes = operand
        .bytes()
        .expect("a validated tensor should have a size");
    arenas[operand.place.pool as usize].tensor(
        operand.place.offset,
        bytes,
        operand.dtype,
        &operand.shape,
    )
}
