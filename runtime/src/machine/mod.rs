//! A compiled step, loaded: what the host writes, launches, waits for and reads.
//!
//! A machine is made of an artifact, which is validated first; from then on it does what the
//! artifact says, or returns an error. In steady state a step allocates nothing: everything is
//! resolved, reserved and started in [`Machine::new`], except for a thread's workspace for
//! products, which its first product makes.
//!
//! The host and the steps take turns: it writes inputs, launches one step or several, waits, reads
//! outputs. Launched together, steps overlap as far as events permit. The host need not wait for
//! all of a step: once what touches inputs and outputs is done, see [`Machine::wait_io`], it may
//! have its turn while updates and offloads still run.
//!
//! Everything here is written over two traits. A [`Backend`] has the memory and runs commands: the
//! [CPU](cpu) is one, a GPU by CUDA another. An [`Executor`] brings each stream's commands to it in
//! some order that events permit: [`Threads`] overlap streams, [`Inline`] runs them in turn, and
//! [`Shuffle`] is for tests of plans.

pub(crate) mod backend;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cuda_graphs;
#[cfg(feature = "cuda")]
mod cuda_indices;
#[cfg(feature = "cuda")]
mod cuda_products;
#[cfg(feature = "cuda")]
mod cuda_times;
mod dead;
mod evaluation;
mod executor;
mod host;
mod inline;
mod lent;
mod options;
pub(crate) mod program;
mod shared;
mod shuffle;
mod steps;
mod threads;

use crate::access::Reach;
use crate::foreign::Foreign;
use crate::init::StateInit;
use crate::memory::Borrowed;
use crate::trace::{self, Span, Trace};
use crate::{Error, init, validate};
use artifact::{
    Artifact, Binding, CommandKind, Initial, MemorySpace, Operand, Place, Pool, Range, Sm, State,
    StateKind, Summary,
};
pub use backend::{
    Backend, CommandError, CommandId, Copy, EventId, Launch, LentPlace, Ran, StreamId,
};
use cpu::Cpu;
#[cfg(feature = "cuda")]
pub use cuda::{Cuda, CudaOptions};
#[cfg(feature = "cuda")]
pub use cuda_products::ProductLibrary;
use dead::Dead;
pub use evaluation::{Evaluation, NotEvaluable};
use executor::Executor;
pub use executor::Part;
use inline::Inline;
pub use lent::{Holder, Lent, Port};
pub use options::{Files, Options};
use shared::Core;
use shuffle::Shuffle;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
pub use steps::Steps;
use threads::Threads;

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
    executor: Box<dyn Executor>,
    core: Arc<Core>,
    name: String,
    notes: Vec<String>,
    streams: Vec<String>,
    summary: Summary,
    pools: Vec<Pool>,
    inputs: Vec<Slot<Binding>>,
    outputs: Vec<Slot<Binding>>,
    states: Vec<Slot<State>>,
    /// Number of steps launched.
    launched: u64,
    /// When the first of those that run was, or when the host's last turn began if that is later.
    running_since: Option<Instant>,
    /// True if what still runs leaves inputs and outputs alone.
    io_done: bool,
}

/// The memory that a machine runs on.
enum Memory<'a> {
    /// It is allocated.
    Own,
    /// States, by path, are the caller's.
    Borrowed(&'a BTreeMap<String, Borrowed>),
    /// All of it is another machine's, with values of the states.
    Shared,
}

/// A tensor that the host reaches.
struct Slot<T> {
    what: T,
    /// How far it reaches into its pool; `None` if it has no bytes of the machine's.
    reach: Option<Reach>,
    /// True if a step may find it.
    has_value: bool,
    /// False if a command overwrites it, so that it must be written before each step.
    survives: bool,
}

impl<T> Slot<T> {
    fn new(what: T, reach: Option<Reach>) -> Slot<T> {
        Slot {
            what,
            reach,
            has_value: false,
            survives: true,
        }
    }
}

impl Machine {
    /// Loads an artifact: validates it, allocates its pools, gives states what the artifact has for
    /// them, starts threads. If it has code for a GPU, it runs on this machine's GPU of
    /// [`Options::gpu`], and else on the processor.
    pub fn new(artifact: Artifact, options: Options) -> Result<Machine, Error> {
        Machine::beside(artifact, options, Files::default())
    }

    /// The same, with files.
    pub fn beside(
        artifact: Artifact,
        options: Options,
        files: Files<'_>,
    ) -> Result<Machine, Error> {
        validate::validate(&artifact)?;
        let backend: Box<dyn Backend> = match artifact.gpu() {
            None => Box::new(Cpu::new(&options, None)?.with_disk(files.disk)),
            Some(sm) => gpu((sm, artifact.tf32), &options, files, None)?,
        };
        Machine::validated(backend, artifact, options, Memory::Own)
    }

    /// The same for a step with ops that have no kernel: `foreign` computes them.
    pub fn calling(
        artifact: Artifact,
        options: Options,
        foreign: Arc<dyn Foreign>,
    ) -> Result<Machine, Error> {
        Machine::with(artifact, options, Memory::Own, Some(foreign))
    }

    /// Loads a step in two parts, whose states lie in memory of the caller, by path. Its inputs and
    /// outputs get theirs by [`Machine::point`]. `foreign` computes ops that have no kernel.
    pub fn borrowing(
        artifact: Artifact,
        options: Options,
        states: &BTreeMap<String, Borrowed>,
        foreign: Option<Arc<dyn Foreign>>,
    ) -> Result<Machine, Error> {
        if options.shuffle.is_some() {
            let what = "a step in two parts does not run shuffled";
            return Err(Error::Unsupported(what.into()));
        }
        Machine::with(artifact, options, Memory::Borrowed(states), foreign)
    }

    fn with(
        artifact: Artifact,
        options: Options,
        memory: Memory<'_>,
        foreign: Option<Arc<dyn Foreign>>,
    ) -> Result<Machine, Error> {
        match foreign {
            Some(_) => validate::validate_calls(&artifact)?,
            None => validate::validate(&artifact)?,
        }
        let backend: Box<dyn Backend> = match artifact.gpu() {
            None => Box::new(Cpu::new(&options, foreign)?),
            Some(sm) => gpu((sm, artifact.tf32), &options, Files::default(), foreign)?,
        };
        Machine::validated(backend, artifact, options, memory)
    }

    /// The same on any backend. Of the options, `trace` and `shuffle` count; the others are the
    /// [CPU's](Machine::new).
    pub fn on(
        backend: Box<dyn Backend>,
        artifact: Artifact,
        options: Options,
    ) -> Result<Machine, Error> {
        validate::validate(&artifact)?;
        Machine::validated(backend, artifact, options, Memory::Own)
    }

    fn validated(
        mut backend: Box<dyn Backend>,
        mut artifact: Artifact,
        options: Options,
        memory: Memory<'_>,
    ) -> Result<Machine, Error> {
        let survives = program::survivors(&artifact);
        let dead = match options.shuffle {
            Some(seed) => Some((seed, Dead::new(&artifact, &survives)?)),
            None => None,
        };
        let (none, is_shared) = (BTreeMap::new(), matches!(memory, Memory::Shared));
        let borrowed = match memory {
            Memory::Borrowed(states) => states,
            Memory::Own | Memory::Shared => &none,
        };
        load(&artifact, &mut *backend, borrowed)?;
        if dead.is_some() && !is_shared {
            fill_all(&artifact, &*backend)?;
        }

        let reach = |operand: &Operand| program::reach(&artifact.pools, operand);
        let slot = |binding: &Binding| Slot::new(binding.clone(), reach(&binding.operand));
        let mut inputs: Vec<_> = artifact.inputs.iter().map(slot).collect();
        for (input, &survives) in inputs.iter_mut().zip(&survives) {
            input.survives = survives;
        }
        let outputs = artifact.outputs.iter().map(slot).collect();
        let mut states = Vec::new();
        for state in &artifact.states {
            let mut slot = Slot::new(state.clone(), reach(&state.operand));
            let is_lent = artifact.pools[state.operand.place.pool as usize].lent;
            slot.has_value = is_lent || start_state(state, &artifact.data, &*backend)?;
            states.push(slot);
        }
        // The states have them now.
        artifact.data = Vec::new();

        let programs = program::programs(&artifact);
        let last_io = program::last_io(&artifact, &programs);
        let notes = backend.notes();
        let trace = options.trace.then(|| Trace::new(&programs));
        let cuts = program::cuts(&artifact, &programs);
        let mut core = Core::new(
            backend,
            programs,
            last_io,
            artifact.lines,
            artifact.pools.len(),
            trace,
        );
        core.cuts = cuts;
        let core = Arc::new(core);
        states.iter().for_each(|slot| core.touch(&slot.reach));
        let n_events = artifact.events as usize;
        let is_inline = core.backend.is_inline();
        let executor: Box<dyn Executor> = match dead {
            Some((seed, dead)) => Box::new(Shuffle::new(&core, seed, dead, n_events)),
            None if is_inline => Box::new(Inline::new(&core)),
            None => Box::new(Threads::new(&core, &artifact.streams, n_events)?),
        };
        Ok(Machine {
            executor,
            core,
            name: artifact.name,
            notes,
            streams: artifact.streams,
            summary: artifact.summary,
            pools: artifact.pools,
            inputs,
            outputs,
            states,
            launched: 0,
            running_since: None,
            io_done: true,
        })
    }

    /// What a person should know of how it runs: which library computes products, say.
    pub fn notes(&self) -> &[String] {
        &self.notes
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
        let slot = self.inputs.iter_mut().find(|slot| slot.what.name == name);
        let slot = slot.ok_or_else(|| Error::Host(format!("no input {name}")))?;
        write(&self.core, name, &slot.what.operand, bytes, slot.reach)?;
        slot.has_value = true;
        Ok(())
    }

    /// Reads an output of the last step.
    pub fn read_output(&mut self, name: &str) -> Result<Vec<u8>, Error> {
        read(&self.core, &self.output(name)?.operand)
    }

    /// Reads an output of the last step into bytes of the caller's, whose number is the output's.
    pub fn read_output_into(&mut self, name: &str, bytes: &mut [u8]) -> Result<(), Error> {
        let operand = &self.output(name)?.operand;
        size(name, operand, bytes.len())?;
        self.core.backend.read(operand.place, bytes)
    }

    /// An output that the host may read now.
    fn output(&self, name: &str) -> Result<&Binding, Error> {
        self.io_idle()?;
        let slot = self.outputs.iter().find(|slot| slot.what.name == name);
        slot.map(|slot| &slot.what)
            .ok_or_else(|| Error::Host(format!("no output {name}")))
    }

    /// Gives a state a value.
    pub fn write_state(&mut self, path: &str, bytes: &[u8]) -> Result<(), Error> {
        self.idle()?;
        let slot = self.states.iter_mut().find(|slot| slot.what.path == path);
        let slot = slot.ok_or_else(|| Error::Host(format!("no state {path}")))?;
        write(&self.core, path, &slot.what.operand, bytes, slot.reach)?;
        slot.has_value = true;
        Ok(())
    }

    /// Reads a state as the last step left it. After a failed step, states that the step had begun
    /// to update may be half new; the machine still lets them be read.
    pub fn read_state(&mut self, path: &str) -> Result<Vec<u8>, Error> {
        self.idle()?;
        let slot = self.states.iter().find(|slot| slot.what.path == path);
        let slot = slot.ok_or_else(|| Error::Host(format!("no state {path}")))?;
        if slot.has_value {
            read(&self.core, &slot.what.operand)
        } else {
            Err(Error::Host(format!("state {path} has no value yet")))
        }
    }

    /// Reads the bytes of a state from byte `start` on, as [`Machine::read_state`] does.
    pub fn read_state_part(
        &mut self,
        path: &str,
        start: u64,
        bytes: &mut [u8],
    ) -> Result<(), Error> {
        self.idle()?;
        let slot = self.states.iter().find(|slot| slot.what.path == path);
        let slot = slot.ok_or_else(|| Error::Host(format!("no state {path}")))?;
        if !slot.has_value {
            return Err(Error::Host(format!("state {path} has no value yet")));
        }
        let place = part(path, &slot.what.operand, start, bytes.len())?;
        self.core.backend.read(place, bytes)
    }

    /// Writes the bytes of a state from byte `start` on. The caller writes all of them; with the
    /// last one the state has a value.
    pub fn write_state_part(&mut self, path: &str, start: u64, bytes: &[u8]) -> Result<(), Error> {
        self.idle()?;
        let slot = self.states.iter_mut().find(|slot| slot.what.path == path);
        let slot = slot.ok_or_else(|| Error::Host(format!("no state {path}")))?;
        let operand = &slot.what.operand;
        let place = part(path, operand, start, bytes.len())?;
        self.core.backend.write(place, bytes)?;
        slot.has_value |= start + bytes.len() as u64 == self::bytes(operand);
        self.core.touch(&slot.reach);
        Ok(())
    }

    /// Lends a tensor, to be read and written where it lies: see [`Lent`]. `None` for an unknown
    /// name, and for memory without addresses.
    pub fn lend(&self, port: Port<'_>) -> Option<Lent> {
        let binding = |slots: &[Slot<Binding>], name: &str| {
            let slot = slots.iter().find(|slot| slot.what.name == name)?;
            self.core.backend.tensor(&slot.what.operand)
        };
        let tensor = match port {
            Port::Input(name) => binding(&self.inputs, name),
            Port::Output(name) => binding(&self.outputs, name),
            Port::State(path) => {
                let slot = self.states.iter().find(|slot| slot.what.path == path)?;
                self.core.backend.tensor(&slot.what.operand)
            }
        };
        tensor.map(|tensor| Lent::new(tensor, self.core.clone()))
    }

    /// Says that the host wrote a lent input of the next step, or a lent state.
    pub fn written(&mut self, port: Port<'_>) -> Result<(), Error> {
        let (reach, has_value) = match port {
            Port::Input(name) => {
                self.io_idle()?;
                let slot = self.inputs.iter_mut().find(|slot| slot.what.name == name);
                slot.map(|slot| (slot.reach, &mut slot.has_value))
            }
            Port::State(path) => {
                self.idle()?;
                let slot = self.states.iter_mut().find(|slot| slot.what.path == path);
                slot.map(|slot| (slot.reach, &mut slot.has_value))
            }
            Port::Output(_) => None,
        }
        .ok_or_else(|| Error::Host(format!("nothing to write at {port:?}")))?;
        *has_value = true;
        self.core.touch(&reach);
        Ok(())
    }

    /// Gives values to states that have none, see [`StateInit`].
    pub fn initialise(&mut self, init: &StateInit) -> Result<(), Error> {
        self.idle()?;
        let backend = &*self.core.backend;
        let paths: BTreeSet<String> = self.states.iter().map(|s| s.what.path.clone()).collect();
        let drawn = self.states.iter().filter(|slot| !slot.has_value);
        let drawn = drawn.filter(|slot| slot.what.kind == StateKind::Param);
        let drawn: BTreeSet<String> = drawn.map(|slot| slot.what.path.clone()).collect();
        for slot in &mut self.states {
            let stored = init::Stored::of(&slot.what, &paths, &drawn);
            let has_value = slot.has_value;
            slot.has_value = init::initialise(init, &slot.what, stored, has_value, backend)?;
        }
        Ok(())
    }

    /// Runs one step.
    pub fn step(&mut self) -> Result<StepReport, Error> {
        self.launch()?;
        self.wait()
    }

    /// Says where a tensor of a step in two parts lies from now on. A state that is moved between
    /// the parts has the same value there.
    pub fn point(&mut self, port: Port<'_>, to: Borrowed) -> Result<(), Error> {
        self.idle()?;
        let of = |slots: &[Slot<Binding>], name: &str| {
            let slot = slots.iter().find(|slot| slot.what.name == name)?;
            Some(slot.what.operand.clone())
        };
        let operand = match port {
            Port::Input(name) => of(&self.inputs, name),
            Port::Output(name) => of(&self.outputs, name),
            Port::State(path) => {
                let slot = self.states.iter().find(|slot| slot.what.path == path);
                slot.map(|slot| slot.what.operand.clone())
            }
        };
        let operand = operand.ok_or_else(|| Error::Host(format!("there is no {port:?}")))?;
        match port {
            Port::Input(name) | Port::Output(name) => size(name, &operand, to.bytes())?,
            Port::State(path) => fits(path, &operand, &to)?,
        }
        self.core.backend.point(operand.place, to)
    }

    /// Runs one part of a step that pauses, to its end. The second part goes on where the first one
    /// has left off; a first part begins a new step. A part fails if it needs memory that no
    /// [`Machine::point`] gave.
    pub fn run_part(&mut self, part: Part) -> Result<StepReport, Error> {
        if let Some(failure) = self.core.failure() {
            return Err(failure);
        }
        if self.core.cuts.is_none() {
            return Err(Error::Host("the step has no parts".into()));
        }
        self.running_since.get_or_insert_with(Instant::now);
        self.launched += 1;
        self.executor.launch_part(self.launched, part);
        self.wait()
    }

    /// Starts one step, or appends it to those that run: it overlaps them as far as events permit.
    /// Such a step finds the inputs of the one before, so all inputs must survive a step. A machine
    /// that runs on the calling thread has done the step when this returns.
    pub fn launch(&mut self) -> Result<(), Error> {
        if self.core.cuts.is_some() {
            return Err(Error::Host("the step runs in parts".into()));
        }
        if let Some(failure) = self.core.failure() {
            return Err(failure);
        }
        self.check_states()?;
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
        self.executor.launch(self.launched);
        Ok(())
    }

    /// An error if a state has no value.
    fn check_states(&self) -> Result<(), Error> {
        let mut lacking = self.states.iter().filter(|slot| !slot.has_value);
        let Some(slot) = lacking.next() else {
            return Ok(());
        };
        let others = match lacking.count() {
            0 => String::new(),
            n => format!(", nor do {n} others"),
        };
        let path = &slot.what.path;
        Err(Error::Host(format!(
            "state {path} has no value{others}: load or initialise it before the first step"
        )))
    }

    /// Computes the output of an [`Evaluation`] of this machine's artifact, and changes no state.
    /// Waits for all steps first. The inputs that it reads must be written before it; afterwards
    /// all inputs are as after a step.
    pub fn evaluate(&mut self, evaluation: &Evaluation) -> Result<Vec<u8>, Error> {
        self.wait()?;
        if !evaluation.is_of(&self.core.programs) {
            return Err(Error::Host("the evaluation is of another artifact".into()));
        }
        if !self.core.backend.submits_alone() {
            let what = "an evaluation with graphs of launches; unset LIGHTERAGE_CUDA_GRAPHS";
            return Err(Error::Unsupported(what.into()));
        }
        self.check_states()?;
        let mut read = evaluation.inputs().filter_map(|at| self.inputs.get(at));
        if let Some(slot) = read.find(|slot| !slot.has_value) {
            let name = &slot.what.name;
            let why = format!("input {name} must be written before this evaluation");
            return Err(Error::Host(why));
        }
        for slot in &mut self.inputs {
            slot.has_value &= slot.survives;
        }
        // A failure stops the machine, which keeps it.
        let _ = self.core.run_alone(evaluation.commands());
        match self.core.failure() {
            Some(failure) => Err(failure),
            None => self.read_output(evaluation.output()),
        }
    }

    /// Waits until everything that was launched is done.
    pub fn wait(&mut self) -> Result<StepReport, Error> {
        self.executor.wait();
        let backend = &self.core.backend;
        self.core.synchronize(|stream| backend.synchronize(stream));
        self.core.note_last(self.launched);
        self.io_done = true;
        let since = self.running_since.take();
        match self.core.failure() {
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
        self.executor.wait_io();
        let (backend, step) = (&self.core.backend, self.launched);
        self.core
            .synchronize(|stream| backend.synchronize_io(stream, step));
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
        self.measured_in(MemorySpace::Device(0))
    }

    /// The same of any pool: 0 if there is none in this memory.
    pub fn measured_in(&self, space: MemorySpace) -> u64 {
        self.pool_in(space).map_or(0, |(number, pool)| {
            let touched = self.core.touched[number].load(Ordering::Relaxed);
            touched.next_multiple_of(validate::ALIGN).min(pool.bytes)
        })
    }

    /// The planned peak of the pool in a memory, which is what it has: 0 if there is none.
    pub fn planned_in(&self, space: MemorySpace) -> u64 {
        self.pool_in(space).map_or(0, |(_, pool)| pool.bytes)
    }

    /// The machine's own pool in a memory, and its number.
    fn pool_in(&self, space: MemorySpace) -> Option<(usize, &Pool)> {
        let mut pools = self.pools.iter().enumerate();
        pools.find(|(_, pool)| pool.space == space && !pool.lent)
    }

    /// The size of the device pool's one allocation.
    pub fn device_pool_bytes(&self) -> u64 {
        self.planned_in(MemorySpace::Device(0))
    }

    /// What ran when, stream by stream; empty without [`Options::trace`]. The last steps, if there
    /// were many.
    pub fn trace(&mut self) -> Result<Vec<Span<'_>>, Error> {
        self.spans(None)
    }

    /// The same, with starts counted from a moment; without one, from this machine's start.
    fn spans(&self, began: Option<Instant>) -> Result<Vec<Span<'_>>, Error> {
        self.idle()?;
        let Core {
            trace,
            programs,
            lines,
            ..
        } = &*self.core;
        Ok(trace.as_ref().map_or(Vec::new(), |trace| {
            let began = began.unwrap_or(trace.began());
            trace.spans(programs, lines, &self.streams, began)
        }))
    }

    /// The machine in a trace: its name says which sizes its inputs have.
    fn traced(&self, began: Option<Instant>) -> Result<trace::Process<'_>, Error> {
        let input = |input: &Slot<Binding>| {
            let Binding { name, operand } = &input.what;
            format!("{name} {:?}", operand.shape)
        };
        let inputs: Vec<String> = self.inputs.iter().map(input).collect();
        Ok(trace::Process {
            name: format!("{}: {}", self.name, inputs.join(", ")),
            streams: &self.streams,
            spans: self.spans(began)?,
        })
    }

    /// Writes the trace in Chrome's format, for <https://ui.perfetto.dev>.
    pub fn write_trace(&mut self, path: impl AsRef<Path>) -> Result<(), Error> {
        write_traces(std::slice::from_ref(self), path.as_ref())
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
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Machine")
            .field("name", &self.name)
            .field("steps", &self.launched)
            .finish_non_exhaustive()
    }
}

/// Writes the traces of machines that run in turn, on the clock of the first.
fn write_traces(machines: &[Machine], path: &Path) -> Result<(), Error> {
    let began = machines.first().and_then(|first| first.core.trace.as_ref());
    let began = began.map(Trace::began);
    let processes = machines.iter().map(|machine| machine.traced(began));
    let processes = processes.collect::<Result<Vec<_>, Error>>()?;
    let io = |e: std::io::Error| Error::Host(format!("{}: {e}", path.display()));
    let mut out = BufWriter::new(File::create(path).map_err(io)?);
    trace::write(&processes, &mut out)
        .and_then(|()| out.flush())
        .map_err(io)
}

/// The backend for code that is for a GPU.
#[cfg(feature = "cuda")]
fn gpu(
    (sm, tf32): (Sm, bool),
    options: &Options,
    files: Files<'_>,
    foreign: Option<Arc<dyn Foreign>>,
) -> Result<Box<dyn Backend>, Error> {
    let cuda = CudaOptions {
        device: options.gpu,
        tf32,
        algorithms: files.choices.map(Path::to_path_buf),
        disk: files.disk.map(Path::to_path_buf),
        ..CudaOptions::default()
    };
    match Cuda::new(options, cuda) {
        Ok(cuda) => Ok(Box::new(cuda.calling(foreign))),
        Err(Error::Unsupported(why)) => Err(Error::Unsupported(format!(
            "{why}; the artifact's kernels are for {sm}, a GPU: compile it with --target cpu to \
             run it on this processor"
        ))),
        Err(error) => Err(error),
    }
}
#[cfg(not(feature = "cuda"))]
fn gpu(
    (sm, _): (Sm, bool),
    _: &Options,
    _: Files<'_>,
    _: Option<Arc<dyn Foreign>>,
) -> Result<Box<dyn Backend>, Error> {
    Err(Error::Unsupported(format!(
        "the artifact's kernels are for {sm}, a GPU; this program was built without `cuda`"
    )))
}

/// Has a backend load all of an artifact. What can be refused without memory comes first.
fn load(
    artifact: &Artifact,
    backend: &mut dyn Backend,
    borrowed: &BTreeMap<String, Borrowed>,
) -> Result<(), Error> {
    for (stream, name) in artifact.streams.iter().enumerate() {
        backend.create_stream(StreamId(stream), name)?;
    }
    for (event, stream) in program::recorders(artifact).into_iter().enumerate() {
        backend.create_event(EventId(event), stream)?;
    }
    for object in &artifact.objects {
        backend.load_object(object)?;
    }
    for kernel in &artifact.kernels {
        backend.load_kernel(kernel)?;
    }
    for (number, pool) in (0..).zip(&artifact.pools) {
        match pool.lent {
            true => backend.borrow(pool, &lent_places(artifact, number, borrowed)?)?,
            false => backend.allocate(pool)?,
        }
    }
    for (i, command) in artifact.commands.iter().enumerate() {
        let (id, stream) = (CommandId(i), StreamId(command.stream as usize));
        match &command.kind {
            CommandKind::Launch {
                kernel,
                ins,
                outs,
                scratch,
            } => {
                let launch = Launch {
                    kernel: *kernel as usize,
                    ins,
                    outs,
                    scratch: *scratch,
                };
                backend.prepare_launch(id, stream, launch)?;
            }
            &CommandKind::Copy { src, dst, bytes } => {
                backend.prepare_copy(id, stream, Copy { src, dst, bytes })?;
            }
            &CommandKind::Wait { event, .. } => {
                backend.prepare_wait(id, stream, EventId(event as usize))?;
            }
            &CommandKind::Record { event } => {
                backend.prepare_record(id, stream, EventId(event as usize))?;
            }
        }
    }
    backend.start()
}

/// The tensors in a pool that is the caller's memory.
fn lent_places(
    artifact: &Artifact,
    pool: u32,
    borrowed: &BTreeMap<String, Borrowed>,
) -> Result<Vec<LentPlace>, Error> {
    let is_here = |operand: &&Operand| operand.place.pool == pool;
    let mut places = Vec::new();
    for state in artifact.states.iter().filter(|s| is_here(&&s.operand)) {
        let path = &state.path;
        let memory = borrowed.get(path);
        let memory = memory.ok_or_else(|| Error::Host(format!("state {path} has no memory")))?;
        fits(path, &state.operand, memory)?;
        places.push(LentPlace {
            place: state.operand.place,
            bytes: bytes(&state.operand),
            memory: Some(*memory),
        });
    }
    let io = artifact.inputs.iter().chain(&artifact.outputs);
    let io = io.map(|binding| &binding.operand).filter(is_here);
    places.extend(io.map(|operand| LentPlace {
        place: operand.place,
        bytes: bytes(operand),
        memory: None,
    }));
    Ok(places)
}

/// Fills every pool with NaNs.
fn fill_all(artifact: &Artifact, backend: &dyn Backend) -> Result<(), Error> {
    for (pool, &artifact::Pool { bytes, .. }) in (0..).zip(&artifact.pools) {
        let place = Place { pool, offset: 0 };
        backend.fill(Range { place, bytes }, 0xFF)?;
    }
    Ok(())
}

/// Gives a state what the artifact has for it; false if that is nothing.
fn start_state(state: &State, data: &[u8], backend: &dyn Backend) -> Result<bool, Error> {
    let place = state.operand.place;
    match state.initial {
        Initial::Zeros => {
            let bytes = bytes(&state.operand);
            backend.fill(Range { place, bytes }, 0)?;
        }
        Initial::Data { start, bytes } => {
            backend.write(place, &data[start as usize..][..bytes as usize])?;
        }
        Initial::Absent => return Ok(false),
    }
    Ok(true)
}

/// A tensor's size in bytes.
fn bytes(operand: &Operand) -> u64 {
    operand
        .bytes()
        .expect("a validated tensor should have a size")
}

/// An error if kernels cannot work on a state there.
fn fits(path: &str, operand: &Operand, memory: &Borrowed) -> Result<(), Error> {
    size(path, operand, memory.bytes())?;
    if memory.is_aligned() {
        return Ok(());
    }
    let align = validate::ALIGN;
    let why = format!("state {path} does not start at a multiple of {align} bytes");
    Err(Error::Host(why))
}

fn size(name: &str, operand: &Operand, given: usize) -> Result<(), Error> {
    let bytes = bytes(operand);
    if bytes == given as u64 {
        return Ok(());
    }
    let Operand { dtype, shape, .. } = operand;
    Err(Error::Host(format!(
        "{name} has {bytes} bytes ({dtype:?}{shape:?}), not {given}"
    )))
}

/// Where a part of a tensor's bytes lies.
fn part(name: &str, operand: &Operand, start: u64, length: usize) -> Result<Place, Error> {
    let bytes = bytes(operand);
    let end = start.checked_add(length as u64);
    if end.is_none_or(|end| end > bytes) {
        return Err(Error::Host(format!(
            "{name} has {bytes} bytes; {length} from {start} on are not in it"
        )));
    }
    Ok(Place {
        offset: operand.place.offset + start,
        ..operand.place
    })
}

fn write(
    core: &Core,
    name: &str,
    operand: &Operand,
    bytes: &[u8],
    reach: Option<Reach>,
) -> Result<(), Error> {
    size(name, operand, bytes.len())?;
    core.backend.write(operand.place, bytes)?;
    core.touch(&reach);
    Ok(())
}

fn read(core: &Core, operand: &Operand) -> Result<Vec<u8>, Error> {
    let mut read = vec![0; bytes(operand) as usize];
    core.backend.read(operand.place, &mut read)?;
    Ok(read)
}
