//! The CPU machine: pools are memory, streams are threads, events are counters, copies are memcpys.
//!
//! A machine is made of an artifact, which is validated first; from then on it does what the
//! artifact says, or returns an error. In steady state a step allocates nothing: everything is
//! resolved, reserved and started in [`Machine::new`], but for a thread's workspace for products,
//! which its first product makes.
//!
//! The host and the steps take turns: it writes inputs, launches one step or several, waits, reads
//! outputs. Launched together, steps overlap as far as events permit. The host need not wait for
//! all of a step: once what touches inputs and outputs is done, see [`Machine::wait_io`], it may
//! have its turn while updates and offloads still run.

mod dead;
mod shuffle;
mod threads;

use crate::access::{Access, accesses};
use crate::code::{self, Loaded};
use crate::init::{self, StateInit};
use crate::kernel::Tensor;
use crate::link::{Link, Pace};
use crate::memory::{self, Arena};
use crate::program::{self, Instruction};
use crate::sync::unpoisoned;
use crate::team::{Team, caught};
use crate::trace::{self, Ring, Span, Trace};
use crate::{Error, validate};
use artifact::{Artifact, Binding, Initial, Line, MemorySpace, Pool, State, Summary};
use dead::Dead;
use shuffle::Shuffle;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use threads::Threads;

/// How a machine runs what it is given.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Options {
    /// Slows copies between the device's pool and the others to so many bytes per second, each way:
    /// a machine with a slow link, played on this one.
    pub link_bandwidth: Option<f64>,
    /// What each of those copies takes besides; counts only with a bandwidth.
    pub link_latency: Duration,
    /// Notes when each command ran, for [`Machine::trace`].
    pub trace: bool,
    /// Runs on one thread, in an order drawn from this seed among those that events permit, and
    /// fills dead bytes with NaNs: a test of the plan.
    pub shuffle: Option<u64>,
    /// How many threads share a kernel's run, whatever stream it is on; `None`: as many as the
    /// system lends this process. Results do not depend on it. A shuffled run has one thread for
    /// everything.
    pub threads: Option<usize>,
}

impl Options {
    /// How many threads share a kernel's run.
    pub(crate) fn team(&self) -> usize {
        let available = || std::thread::available_parallelism().map_or(1, |n| n.get());
        if self.shuffle.is_some() {
            1
        } else {
            self.threads.unwrap_or_else(available).min(MOST_THREADS)
        }
    }
}

/// The most threads of a team.
const MOST_THREADS: usize = 1024;

/// What a step, or several launched together, took.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepReport {
    /// The number of the last step, counted from 1.
    pub step: u64,
    /// From the first launch until all was done.
    pub ms: f64,
}

/// A compiled step, loaded.
pub struct Machine {
    // Dropped first: it ends the threads that use the rest.
    executor: Executor,
    core: Arc<Core>,
    name: String,
    streams: Vec<String>,
    summary: Summary,
    inputs: Vec<Slot<Binding>>,
    outputs: Vec<Slot<Binding>>,
    states: Vec<Slot<State>>,
    /// How many steps have been launched.
    launched: u64,
    /// When the first of those that run was, or when the host's last turn began if that is later.
    running_since: Option<Instant>,
    /// Whether what still runs leaves inputs and outputs alone.
    io_done: bool,
}

enum Executor {
    Threads(Threads),
    Shuffle(Box<Shuffle>),
}

/// A tensor that the host reaches, and whether a step may find it.
struct Slot<T> {
    what: T,
    tensor: Tensor,
    has_value: bool,
    /// False if a command overwrites it, so that it must be written before each step.
    survives: bool,
}

/// What executors share: programs, memory, and whether to go on.
pub(crate) struct Core {
    programs: Vec<Box<[Instruction]>>,
    /// In each stream's program, the position of the last instruction that the host waits for in
    /// `wait_io`.
    last_io: Vec<Option<usize>>,
    /// Threads that share kernels' runs, one run at a time: streams with teams of their own would
    /// only take turns on the cores.
    team: Option<Team>,
    pools: Vec<Pool>,
    /// The pools' memory.
    _arenas: Vec<Arena>,
    lines: Vec<Line>,
    link: Link,
    trace: Option<Trace>,
    /// One past the last byte of the device's pool that was touched.
    touched: AtomicU64,
    /// True once no command shall start: something failed, or the machine is dropped.
    halted: AtomicBool,
    /// The first failure.
    failure: Mutex<Option<Error>>,
}

/// A command failed; the core knows why.
pub(crate) struct Stopped;

impl Core {
    fn halted(&self) -> bool {
        self.halted.load(Ordering::SeqCst)
    }
    fn halt(&self) {
        self.halted.store(true, Ordering::SeqCst);
    }
    fn trace_ring(&self, stream: usize) -> Option<MutexGuard<'_, Ring>> {
        self.trace.as_ref().map(|trace| trace.ring(stream))
    }

    /// Runs the launch or copy at a position of a stream's program.
    fn run(
        &self,
        stream: usize,
        at: usize,
        step: u64,
        ring: Option<&mut Ring>,
    ) -> Result<(), Stopped> {
        let instruction = &self.programs[stream][at];
        let start = ring.is_some().then(Instant::now);
        // Kernels return errors. A panic is a bug in one; it must not leave the other streams
        // waiting for this one.
        let outcome = caught(|| {
            instruction
                .action
                .run(&self.link, self.team.as_ref(), || self.halted())
        });
        if let Err(why) = outcome {
            self.fail(&self.lines[instruction.line as usize].name, why);
            return Err(Stopped);
        }
        self.touch(instruction.device_end);
        if let (Some(ring), Some(start)) = (ring, start) {
            ring.note(at, step, start);
        }
        Ok(())
    }

    /// Stops the machine. The first failure is the one that is told.
    fn fail(&self, line: &str, why: String) {
        unpoisoned(&self.failure).get_or_insert(Error::Failed {
            line: line.into(),
            why,
        });
        self.halt();
    }

    fn touch(&self, device_end: u64) {
        self.touched.fetch_max(device_end, Ordering::Relaxed);
    }
}

impl Machine {
    /// Loads an artifact: validates it, allocates its pools, gives states what the artifact has for
    /// them, starts a thread for each stream.
    pub fn new(mut artifact: Artifact, options: Options) -> Result<Machine, Error> {
        validate::validate(&artifact)?;
        let pace = pace(&options)?;
        let objects = Loaded::all(&artifact)?;
        code::check(&artifact, &objects)?;
        let mut arenas = Vec::new();
        for pool in &artifact.pools {
            let arena = Arena::new(pool.bytes);
            let lacking = || {
                Error::Resources(format!(
                    "no memory for pool {}: {} bytes",
                    pool.name, pool.bytes
                ))
            };
            arenas.push(arena.ok_or_else(lacking)?);
        }
        let survives = survivors(&artifact);
        let programs = program::resolve(&artifact, &objects, &arenas);
        let last_io = last_io(&artifact, &programs);
        let threads = options.team();
        let launches: Vec<_> = programs
            .iter()
            .flatten()
            .filter_map(|instruction| instruction.action.launch())
            .collect();
        let team = match 1 < threads
            && programs
                .iter()
                .flatten()
                .any(|instruction| instruction.action.is_split())
        {
            true => {
                let prepare = move || launches.iter().for_each(|launch| launch.prepare());
                Some(Team::prepared(threads, prepare)?)
            }
            false => None,
        };
        let slots = |bindings: &[Binding]| -> Vec<Slot<Binding>> {
            let slot = |b: &Binding| (b.clone(), program::tensor(&arenas, &b.operand));
            bindings
                .iter()
                .map(slot)
                .map(|(what, tensor)| Slot {
                    what,
                    tensor,
                    has_value: false,
                    survives: true,
                })
                .collect()
        };
        let mut inputs = slots(&artifact.inputs);
        inputs
            .iter_mut()
            .zip(&survives)
            .for_each(|(input, &survives)| input.survives = survives);
        let outputs = slots(&artifact.outputs);
        let dead = match options.shuffle {
            Some(seed) => Some((seed, Dead::new(&artifact, &survives, &arenas)?)),
            None => None,
        };
        if dead.is_some() {
            arenas
                .iter()
                .for_each(|arena| memory::fill(&arena.range(0, arena.bytes()), 0xFF));
        }
        let mut touched = 0;
        let mut states = Vec::new();
        for state in &artifact.states {
            let tensor = program::tensor(&arenas, &state.operand);
            match state.initial {
                Initial::Zeros => memory::fill(&tensor, 0),
                Initial::Data { start, bytes } => {
                    memory::write(&tensor, &artifact.data[start as usize..][..bytes as usize])
                }
                Initial::Absent => {}
            }
            let has_value = state.initial != Initial::Absent;
            touched = touched.max(device_end(&artifact.pools, &state.operand));
            states.push(Slot {
                what: state.clone(),
                tensor,
                has_value,
                survives: true,
            });
        }
        // The states have them now.
        artifact.data = Vec::new();
        let core = Arc::new(Core {
            trace: options.trace.then(|| Trace::new(&programs)),
            programs,
            last_io,
            team,
            pools: artifact.pools,
            _arenas: arenas,
            lines: artifact.lines,
            link: Link::new(pace),
            touched: AtomicU64::new(touched),
            halted: AtomicBool::new(false),
            failure: Mutex::new(None),
        });
        let n_events = artifact.events as usize;
        let executor = match dead {
            Some((seed, dead)) => Executor::Shuffle(Box::new(Shuffle::new(
                seed,
                dead,
                n_events,
                artifact.streams.len(),
            ))),
            None => Executor::Threads(Threads::new(&core, &artifact.streams, n_events)?),
        };
        Ok(Machine {
            executor,
            core,
            name: artifact.name,
            streams: artifact.streams,
            summary: artifact.summary,
            inputs,
            outputs,
            states,
            launched: 0,
            running_since: None,
            io_done: true,
        })
    }

    /// The model's name.
    pub fn name(&self) -> &str {
        &self.name
    }
    /// What the plan promises.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }
    /// What to write before each step.
    pub fn inputs(&self) -> impl ExactSizeIterator<Item = &Binding> {
        self.inputs.iter().map(|slot| &slot.what)
    }
    /// What to read after each step.
    pub fn outputs(&self) -> impl ExactSizeIterator<Item = &Binding> {
        self.outputs.iter().map(|slot| &slot.what)
    }
    /// What a step finds and leaves.
    pub fn states(&self) -> impl ExactSizeIterator<Item = &State> {
        self.states.iter().map(|slot| &slot.what)
    }
    /// Whether a state has a value.
    pub fn has_state(&self, path: &str) -> bool {
        self.states
            .iter()
            .any(|slot| slot.what.path == path && slot.has_value)
    }

    /// Writes an input of the next step.
    pub fn write_input(&mut self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        self.io_idle()?;
        let slot = find(&mut self.inputs, |b| b.name == name)
            .ok_or_else(|| Error::Host(format!("no input {name}")))?;
        write(&self.core, slot, bytes, |b| (&b.name, &b.operand))
    }
    /// Reads an output of the last step.
    pub fn read_output(&mut self, name: &str) -> Result<Vec<u8>, Error> {
        self.io_idle()?;
        let slot = find(&mut self.outputs, |b| b.name == name)
            .ok_or_else(|| Error::Host(format!("no output {name}")))?;
        Ok(read(&slot.tensor))
    }
    /// Reads an output of the last step into bytes of the caller's, as many as the output has.
    pub fn read_output_into(&mut self, name: &str, bytes: &mut [u8]) -> Result<(), Error> {
        self.io_idle()?;
        let slot = find(&mut self.outputs, |b| b.name == name)
            .ok_or_else(|| Error::Host(format!("no output {name}")))?;
        size(name, &slot.tensor, bytes.len())?;
        memory::read(&slot.tensor, bytes);
        Ok(())
    }
    /// Gives a state a value.
    pub fn write_state(&mut self, path: &str, bytes: &[u8]) -> Result<(), Error> {
        self.idle()?;
        let slot = find(&mut self.states, |s| s.path == path)
            .ok_or_else(|| Error::Host(format!("no state {path}")))?;
        write(&self.core, slot, bytes, |s| (&s.path, &s.operand))
    }
    /// Reads a state as the last step left it. After a failed step, states that the step had begun
    /// to update may be half new; the machine still lets them be read.
    pub fn read_state(&mut self, path: &str) -> Result<Vec<u8>, Error> {
        self.idle()?;
        let slot = find(&mut self.states, |s| s.path == path)
            .ok_or_else(|| Error::Host(format!("no state {path}")))?;
        match slot.has_value {
            true => Ok(read(&slot.tensor)),
            false => Err(Error::Host(format!("state {path} has no value yet"))),
        }
    }
    /// Gives values to states that have none, see [`StateInit`].
    pub fn initialise(&mut self, init: &StateInit) -> Result<(), Error> {
        self.idle()?;
        for slot in &mut self.states {
            let given = init::initialise(init, &slot.what, slot.has_value, &slot.tensor);
            slot.has_value =
                given.map_err(|e| Error::Host(format!("state {}: {e}", slot.what.path)))?;
        }
        Ok(())
    }

    /// Runs one step.
    pub fn step(&mut self) -> Result<StepReport, Error> {
        self.launch()?;
        self.wait()
    }
    /// Starts one step, or appends it to those that run: it overlaps them as far as events permit.
    /// Such a step finds the inputs of the one before, so all inputs must survive a step.
    pub fn launch(&mut self) -> Result<(), Error> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        let mut lacking = self.states.iter().filter(|slot| !slot.has_value);
        if let Some(slot) = lacking.next() {
            let others = match lacking.count() {
                0 => String::new(),
                n => format!(", nor do {n} others"),
            };
            let path = &slot.what.path;
            return Err(Error::Host(format!(
                "state {path} has no value{others}: load or initialise it before the first step"
            )));
        }
        if let Some(slot) = self.inputs.iter().find(|slot| !slot.has_value) {
            let why = if self.running_since.is_some() {
                "; the steps that run overwrite it"
            } else {
                ""
            };
            return Err(Error::Host(format!(
                "input {} must be written before this step{why}",
                slot.what.name
            )));
        }
        self.inputs
            .iter_mut()
            .for_each(|slot| slot.has_value = slot.survives);
        self.running_since.get_or_insert_with(Instant::now);
        self.launched += 1;
        self.io_done = false;
        if let Executor::Threads(threads) = &self.executor {
            threads.launch(self.launched);
        }
        Ok(())
    }
    /// Waits until everything that was launched is done.
    pub fn wait(&mut self) -> Result<StepReport, Error> {
        match &mut self.executor {
            Executor::Threads(threads) => threads.wait(),
            Executor::Shuffle(shuffle) if !self.core.halted() => {
                shuffle.run(&self.core, self.launched)
            }
            Executor::Shuffle(_) => {}
        }
        self.io_done = true;
        let since = self.running_since.take();
        match self.failure() {
            Some(failure) => Err(failure),
            None => Ok(StepReport {
                step: self.launched,
                ms: since.map_or(0.0, |t| t.elapsed().as_secs_f64() * 1e3),
            }),
        }
    }

    /// Waits until everything that was launched has read its inputs and written its outputs. The
    /// host may then read outputs, write inputs and launch the next step, while the rest of this
    /// one still runs: updates, offloads. The report's time is from the host's last turn to this
    /// one.
    pub fn wait_io(&mut self) -> Result<StepReport, Error> {
        if self.running_since.is_none() {
            return self.wait();
        }
        match &mut self.executor {
            Executor::Threads(threads) => threads.wait_io(),
            Executor::Shuffle(shuffle) if !self.core.halted() => {
                shuffle.run_io(&self.core, self.launched)
            }
            Executor::Shuffle(_) => {}
        }
        if self.core.halted() {
            // Nothing goes on, and the failure is the one that is told.
            return self.wait();
        }
        self.io_done = true;
        let now = Instant::now();
        let since = self.running_since.replace(now);
        let ms = since.map_or(0.0, |since| {
            now.saturating_duration_since(since).as_secs_f64() * 1e3
        });
        Ok(StepReport {
            step: self.launched,
            ms,
        })
    }

    /// One past the last byte of the device's pool that anything touched, rounded up to the 64
    /// bytes that places are multiples of: commands that ran, states and inputs that were written.
    /// It is taken from what really happened, so it equals the planned peak only if the plan is
    /// exact.
    pub fn measured_peak_bytes(&self) -> u64 {
        let touched = self.core.touched.load(Ordering::Relaxed);
        touched
            .next_multiple_of(validate::ALIGN)
            .min(self.device_pool_bytes())
    }
    /// The size of the device pool's one allocation.
    pub fn device_pool_bytes(&self) -> u64 {
        let is_device = |pool: &&Pool| pool.space == MemorySpace::Device(0);
        let pool = self.core.pools.iter().find(is_device);
        pool.map_or(0, |pool| pool.bytes)
    }

    /// What ran when, stream by stream; empty without [`Options::trace`]. The last steps, if there
    /// were many.
    pub fn trace(&mut self) -> Result<Vec<Span<'_>>, Error> {
        self.idle()?;
        let Core {
            trace,
            programs,
            lines,
            ..
        } = &*self.core;
        Ok(trace.as_ref().map_or(Vec::new(), |trace| {
            trace.spans(programs, lines, &self.streams)
        }))
    }
    /// Writes the trace in Chrome's format, for <https://ui.perfetto.dev>.
    pub fn write_trace(&mut self, path: impl AsRef<Path>) -> Result<(), Error> {
        let streams = self.streams.clone();
        let spans = self.trace()?;
        let io = |e: std::io::Error| Error::Host(format!("{}: {e}", path.as_ref().display()));
        let mut out = BufWriter::new(File::create(path.as_ref()).map_err(io)?);
        trace::write(&spans, &streams, &mut out)
            .and_then(|()| out.flush())
            .map_err(io)
    }

    /// The host may touch inputs and outputs: nothing that runs does. They alone ask here.
    fn io_idle(&self) -> Result<(), Error> {
        if self.io_done { Ok(()) } else { self.idle() }
    }
    /// The host may touch pools: nothing runs. Everything else that touches them asks here first.
    fn idle(&self) -> Result<(), Error> {
        match self.running_since {
            None => Ok(()),
            Some(_) => Err(Error::Host("steps are running; wait for them first".into())),
        }
    }
    fn failure(&self) -> Option<Error> {
        if !self.core.halted() {
            return None;
        }
        let ended = || Error::Failed {
            line: "?".into(),
            why: "a stream's thread ended".into(),
        };
        Some(unpoisoned(&self.core.failure).clone().unwrap_or_else(ended))
    }
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Machine")
            .field("name", &self.name)
            .field("steps", &self.launched)
            .finish_non_exhaustive()
    }
}

fn pace(options: &Options) -> Result<Option<Pace>, Error> {
    let Some(bandwidth) = options.link_bandwidth else {
        return Ok(None);
    };
    let latency = options.link_latency;
    // From a byte a second to as fast as a number goes, so that no time that is computed from it
    // leaves a clock's range.
    if !(bandwidth.is_finite() && 1.0 <= bandwidth) || Duration::from_secs(1) < latency {
        return Err(Error::Host(format!(
            "a link of {bandwidth} bytes per second and {latency:?} latency cannot be played: at \
             least 1 byte per second, \
             at most 1 s"
        )));
    }
    Ok(Some(Pace { bandwidth, latency }))
}

/// Which inputs no command overwrites.
fn survivors(artifact: &Artifact) -> Vec<bool> {
    let written = Spans::new(
        artifact
            .commands
            .iter()
            .flat_map(accesses)
            .filter(|access| access.write),
    );
    let survives = |input: &Binding| {
        Access::of(&input.operand, true).is_none_or(|access| !written.meet(&access))
    };
    artifact.inputs.iter().map(survives).collect()
}

/// In each stream's program, the last instruction that touches an input's bytes, for the host will
/// write them, or writes an output's, for it will read them.
fn last_io(artifact: &Artifact, programs: &[Box<[Instruction]>]) -> Vec<Option<usize>> {
    let spans = |bindings: &[Binding]| {
        Spans::new(bindings.iter().filter_map(|b| Access::of(&b.operand, true)))
    };
    let (inputs, outputs) = (spans(&artifact.inputs), spans(&artifact.outputs));
    let is_io = |instruction: &Instruction| {
        let touched = accesses(&artifact.commands[instruction.command as usize]);
        touched
            .iter()
            .any(|access| inputs.meet(access) || access.write && outputs.meet(access))
    };
    programs
        .iter()
        .map(|program| program.iter().rposition(is_io))
        .collect()
}

/// Bytes as disjoint intervals: pool and start to end.
struct Spans(BTreeMap<(usize, u64), u64>);

impl Spans {
    fn new(accesses: impl Iterator<Item = Access>) -> Spans {
        let mut sorted: Vec<Access> = accesses.collect();
        sorted.sort_by_key(|access| (access.pool, access.start));
        let mut spans: BTreeMap<(usize, u64), u64> = BTreeMap::new();
        for Access {
            pool, start, end, ..
        } in sorted
        {
            match spans.range_mut(..=(pool, start)).next_back() {
                Some((&(p, _), last)) if p == pool && start <= *last => *last = end.max(*last),
                _ => {
                    spans.insert((pool, start), end);
                }
            }
        }
        Spans(spans)
    }
    /// Whether a byte of the access is in one of them.
    fn meet(
        &self,
        &Access {
            pool, start, end, ..
        }: &Access,
    ) -> bool {
        let last = self.0.range(..(pool, end)).next_back();
        last.is_some_and(|(&(p, _), &to)| p == pool && start < to)
    }
}

fn find<T>(slots: &mut [Slot<T>], is: impl Fn(&T) -> bool) -> Option<&mut Slot<T>> {
    slots.iter_mut().find(|slot| is(&slot.what))
}

fn size(name: &str, tensor: &Tensor, given: usize) -> Result<(), Error> {
    match tensor.bytes == given {
        true => Ok(()),
        false => Err(Error::Host(format!(
            "{name} has {} bytes ({:?}{:?}), not {given}",
            tensor.bytes, tensor.dtype, tensor.shape
        ))),
    }
}

fn write<T>(
    core: &Core,
    slot: &mut Slot<T>,
    bytes: &[u8],
    what: impl Fn(&T) -> (&String, &artifact::Operand),
) -> Result<(), Error> {
    let (name, operand) = what(&slot.what);
    size(name, &slot.tensor, bytes.len())?;
    memory::write(&slot.tensor, bytes);
    core.touch(device_end(&core.pools, operand));
    slot.has_value = true;
    Ok(())
}

/// One past the last byte of device 0's memory that a tensor has.
fn device_end(pools: &[Pool], operand: &artifact::Operand) -> u64 {
    Access::of(operand, true)
        .filter(|access| pools[access.pool].space == MemorySpace::Device(0))
        .map_or(0, |access| access.end)
}

fn read(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; tensor.bytes];
    memory::read(tensor, &mut bytes);
    bytes
}
