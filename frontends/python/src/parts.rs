//! Steps in two parts, for `torch.compile`: forward and backward of one plan. A plan may have
//! several machines: each forward takes one, and keeps it until its backward has run, or until
//! PyTorch drops the ticket that it saved for the backward.

use crate::dlpack::{self, Capsule};
use crate::errors::error;
use crate::foreign::Calls;
use crate::openmp::Lasted;
use crate::process::{Threaded, needs_threads};
use artifact::{Artifact, CommandKind, Operand, Place, StateKind};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use runtime::cuda::{Device, DeviceBlock, Driver, DriverError};
use runtime::{Foreign, Machine, Part, Port};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The states of the random generator, as the artifact has them: seed and step. Kernels rely on the
/// alignment.
#[repr(align(64))]
struct Numbers([i64; 2]);

/// Their memory, where the kernels run.
enum Generator {
    Host(Box<Numbers>),
    Gpu(DeviceBlock),
}

impl Generator {
    const BYTES: usize = size_of::<[i64; 2]>();

    /// On the host, or on the GPU of this number.
    fn new(gpu: Option<u32>) -> Result<Generator, DriverError> {
        let Some(number) = gpu else {
            return Ok(Generator::Host(Box::new(Numbers([0; 2]))));
        };
        let device = Device::new(Driver::open(None)?, number)?;
        let block = DeviceBlock::new(&device, Generator::BYTES as u64)?;
        Ok(Generator::Gpu(block))
    }

    fn address(&mut self) -> usize {
        match self {
            Generator::Host(numbers) => (&raw mut numbers.0).expose_provenance(),
            Generator::Gpu(block) => block.range(0, Generator::BYTES as u64).address() as usize,
        }
    }
}

/// A machine, with the addresses where it finds its states.
struct Loaded {
    states: Vec<usize>,
    machine: Threaded<Machine>,
    /// Dropped after the machine, which works on it.
    _generators: Vec<Generator>,
}

/// Machines that no forward holds.
type Free = Mutex<Vec<Loaded>>;

/// A forward that waits for its backward.
struct Turn {
    number: Box<i64>,
    /// What tells the storages apart that its states lie in.
    storages: Vec<usize>,
    /// Absent after the backward.
    loaded: Mutex<Option<Loaded>>,
    free: Arc<Free>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(loaded) = locked(&self.loaded).take() {
            locked(&self.free).push(loaded);
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What PyTorch keeps from forward to backward: a tensor with one number, whose memory gives the
/// machine back when it is freed.
#[pyclass(frozen, module = "lighterage._lighterage")]
pub(crate) struct Ticket {
    turn: Arc<Turn>,
    /// The time of the first part, ms.
    ms: f64,
}

#[pymethods]
impl Ticket {
    #[pyo3(signature = (**_options))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        _options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let capsule = Capsule::number(&self.turn.number, Box::new(self.turn.clone()));
        capsule.into_python(py)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::CPU
    }

    /// The time of the first part, in milliseconds.
    #[getter]
    fn ms(&self) -> f64 {
        self.ms
    }
}

/// A tensor of the caller: its name and its size.
struct Tensor {
    name: String,
    bytes: usize,
}

impl Tensor {
    fn new(name: &str, operand: &Operand) -> Tensor {
        let bytes = operand.bytes().unwrap_or(0) as usize;
        let name = name.to_string();
        Tensor { name, bytes }
    }
}

fn names(tensors: &[Tensor]) -> Vec<&str> {
    tensors.iter().map(|tensor| &*tensor.name).collect()
}

/// The machines of one step in two parts.
#[pyclass(frozen, module = "lighterage._lighterage")]
pub(crate) struct Arenas {
    artifact: Artifact,
    options: runtime::Options,
    /// What PyTorch computes of it.
    calls: Option<Arc<Calls>>,
    /// The caller's states, without those of random generators, which are the machine's.
    states: Vec<Tensor>,
    generators: Vec<String>,
    /// Those of the first part, and those of the second: inputs that come at the pause and all that
    /// it reads again.
    inputs: [Vec<Tensor>; 2],
    outputs: [Vec<Tensor>; 2],
    /// Whether the second part reads each state.
    read_late: Vec<bool>,
    free: Arc<Free>,
    turns: Mutex<BTreeMap<i64, Weak<Turn>>>,
    next: AtomicI64,
    /// How many machines there are.
    made: AtomicI64,
    /// The last time of each part.
    lasted: [Lasted; 2],
}

impl Arenas {
    pub(crate) fn new(
        artifact: Artifact,
        options: runtime::Options,
        calls: Option<Arc<Calls>>,
    ) -> PyResult<Arenas> {
        let pause = artifact
            .pause
            .ok_or_else(|| error("the step has no parts"))? as usize;
        let reads = |operand: &Operand, commands: &[artifact::Command]| {
            let end = operand.place.offset + operand.bytes().unwrap_or(0);
            let is_in = |place: Place| {
                place.pool == operand.place.pool
                    && (operand.place.offset..end).contains(&place.offset)
            };
            commands.iter().any(|command| match &command.kind {
                CommandKind::Launch { ins, .. } => ins.iter().any(|x| is_in(x.place)),
                CommandKind::Copy { src, dst, .. } => is_in(*src) || is_in(*dst),
                CommandKind::Record { .. } | CommandKind::Wait { .. } => false,
            })
        };
        let parts = artifact.commands.split_at(pause);
        let of = |bindings: &[artifact::Binding]| {
            [parts.0, parts.1].map(|commands| -> Vec<Tensor> {
                let touched = bindings.iter().filter(|b| reads(&b.operand, commands));
                touched.map(|b| Tensor::new(&b.name, &b.operand)).collect()
            })
        };
        let (inputs, outputs) = (of(&artifact.inputs), of(&artifact.outputs));
        let is_generator = |state: &&artifact::State| state.kind == StateKind::Rng;
        let own = artifact.states.iter().filter(is_generator);
        let generators = own.map(|state| state.path.clone()).collect();
        let lent = || artifact.states.iter().filter(|state| !is_generator(state));
        Ok(Arenas {
            states: lent().map(|s| Tensor::new(&s.path, &s.operand)).collect(),
            read_late: lent().map(|s| reads(&s.operand, parts.1)).collect(),
            generators,
            inputs,
            outputs,
            options,
            calls,
            free: Arc::default(),
            turns: Mutex::default(),
            next: AtomicI64::new(1),
            made: AtomicI64::new(0),
            lasted: [Lasted::of(&artifact), Lasted::of(&artifact)],
            artifact,
        })
    }

    /// A machine that finds its states at these addresses: preferably a free one that does so
    /// already, such as that of the same layer in the step before.
    fn take(&self, states: &[usize]) -> PyResult<Loaded> {
        let mut free = locked(&self.free);
        let known = free.iter().rposition(|loaded| loaded.states == states);
        let at = known.or_else(|| free.len().checked_sub(1));
        if let Some(mut loaded) = at.map(|at| free.remove(at)) {
            drop(free);
            self.point(&mut loaded, states.iter().copied().enumerate())?;
            return Ok(loaded);
        }
        drop(free);
        let mut borrowed = BTreeMap::new();
        for (tensor, &address) in self.states.iter().zip(states) {
            let memory = dlpack::borrowed(address, tensor.bytes);
            let memory = memory.ok_or_else(|| error(format!("{} has no memory", tensor.name)))?;
            borrowed.insert(tensor.name.clone(), memory);
        }
        let names = &self.generators;
        let gpu = self.artifact.gpu().map(|_| self.options.gpu);
        let mut generators = vec![];
        for path in names {
            let mut generator = Generator::new(gpu).map_err(error)?;
            let memory = dlpack::borrowed(generator.address(), Generator::BYTES);
            generators.push(generator);
            borrowed.insert(path.clone(), memory.ok_or_else(|| error("no memory"))?);
        }
        let foreign = self.calls.clone().map(|calls| calls as Arc<dyn Foreign>);
        let machine = Machine::borrowing(self.artifact.clone(), self.options, &borrowed, foreign);
        self.made.fetch_add(1, Ordering::Relaxed);
        Ok(Loaded {
            states: states.to_vec(),
            machine: Threaded::new(machine.map_err(error)?),
            _generators: generators,
        })
    }

    /// Has a machine find states elsewhere: each by its number, with its address.
    fn point(
        &self,
        loaded: &mut Loaded,
        states: impl Iterator<Item = (usize, usize)>,
    ) -> PyResult<()> {
        for (i, address) in states {
            if loaded.states[i] == address {
                continue;
            }
            let Tensor { name, bytes } = &self.states[i];
            let memory = dlpack::borrowed(address, *bytes);
            let memory = memory.ok_or_else(|| error(format!("{name} has no memory")))?;
            loaded
                .machine
                .point(Port::State(name), memory)
                .map_err(error)?;
            loaded.states[i] = address;
        }
        Ok(())
    }

    /// Runs a part on the caller's memory. Returns its time, ms.
    fn run(&self, machine: &mut Machine, part: Part, at: [&[usize]; 2]) -> PyResult<f64> {
        let which = (part == Part::Second) as usize;
        let ports = [
            (&self.inputs[which], at[0], true),
            (&self.outputs[which], at[1], false),
        ];
        for (tensors, addresses, is_input) in ports {
            if tensors.len() != addresses.len() {
                let (n, given) = (tensors.len(), addresses.len());
                return Err(error(format!("{n} tensors are needed, {given} are given")));
            }
            for (tensor, &address) in tensors.iter().zip(addresses) {
                let port = match is_input {
                    true => Port::Input(&tensor.name),
                    false => Port::Output(&tensor.name),
                };
                if let Some(memory) = dlpack::borrowed(address, tensor.bytes) {
                    machine.point(port, memory).map_err(error)?;
                }
            }
        }
        let ran = self.lasted[which].alone(|| machine.run_part(part));
        let report = ran.map_err(|failure| match &self.calls {
            Some(calls) => calls.raised(&failure),
            None => error(failure),
        })?;
        self.lasted[which].note(report.ms);
        Ok(report.ms)
    }
}

#[pymethods]
impl Arenas {
    /// Names of the caller's states, in the order of `forward`.
    #[getter]
    fn states(&self) -> Vec<&str> {
        names(&self.states)
    }

    /// Names of the states that the second part reads.
    #[getter]
    fn read_late(&self) -> Vec<&str> {
        let read = self.states.iter().zip(&self.read_late);
        read.filter(|(_, read)| **read)
            .map(|(tensor, _)| &*tensor.name)
            .collect()
    }

    /// Names of the inputs of each part, in the order of its call.
    #[getter]
    fn inputs(&self) -> (Vec<&str>, Vec<&str>) {
        (names(&self.inputs[0]), names(&self.inputs[1]))
    }

    /// Names of the outputs of each part.
    #[getter]
    fn outputs(&self) -> (Vec<&str>, Vec<&str>) {
        (names(&self.outputs[0]), names(&self.outputs[1]))
    }

    /// Whether the step draws random numbers.
    #[getter]
    fn is_random(&self) -> bool {
        !self.generators.is_empty()
    }

    /// Number of machines, and of those that wait for a backward.
    #[getter]
    fn counts(&self) -> (i64, usize) {
        let mut turns = locked(&self.turns);
        turns.retain(|_, turn| turn.strong_count() > 0);
        (self.made.load(Ordering::Relaxed), turns.len())
    }

    /// Gives back the memory of machines that wait for a forward. The next forward makes another.
    fn release(&self, py: Python<'_>) {
        let free = std::mem::take(&mut *locked(&self.free));
        self.made.fetch_sub(free.len() as i64, Ordering::Relaxed);
        // Freeing large blocks takes a while.
        py.detach(|| drop(free));
    }

    /// Runs the first part, without the GIL, on tensors at these addresses. `storages`: a number
    /// for each state, which tells its storage from others. Dropping the ticket gives the machine
    /// to the next forward.
    fn forward(
        &self,
        py: Python<'_>,
        states: Vec<usize>,
        storages: Vec<usize>,
        inputs: Vec<usize>,
        outputs: Vec<usize>,
        seed: i64,
    ) -> PyResult<Ticket> {
        needs_threads()?;
        let ticket = py.detach(|| -> PyResult<Ticket> {
            let mut loaded = self.take(&states)?;
            for path in &self.generators {
                let bytes: Vec<u8> = [seed, 0].iter().flat_map(|n| n.to_ne_bytes()).collect();
                loaded.machine.write_state(path, &bytes).map_err(error)?;
            }
            // A machine that failed is dropped, and the next forward makes another.
            let ms = self.run(&mut loaded.machine, Part::First, [&inputs, &outputs])?;
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let turn = Arc::new(Turn {
                number: Box::new(number),
                storages,
                loaded: Mutex::new(Some(loaded)),
                free: self.free.clone(),
            });
            let mut turns = locked(&self.turns);
            turns.retain(|_, turn| turn.strong_count() > 0);
            turns.insert(number, Arc::downgrade(&turn));
            Ok(Ticket { turn, ms })
        });
        py.check_signals()?;
        ticket
    }

    /// Runs the second part of a forward, by the number in its ticket. `states` and `storages`:
    /// where the states that it reads are now. A storage may have other memory than it had in the
    /// forward: sharded parameters are gathered again. Returns the part's time, ms.
    fn backward(
        &self,
        py: Python<'_>,
        number: i64,
        states: Vec<usize>,
        storages: Vec<usize>,
        inputs: Vec<usize>,
        outputs: Vec<usize>,
    ) -> PyResult<f64> {
        needs_threads()?;
        let ran = py.detach(|| -> PyResult<f64> {
            let turn = locked(&self.turns).get(&number).and_then(Weak::upgrade);
            let loaded = turn.as_ref().and_then(|turn| locked(&turn.loaded).take());
            let (Some(turn), Some(mut loaded)) = (turn, loaded) else {
                return Err(error(
                    "backward a second time through one forward: its memory is planned for one \
                     backward; retain_graph=True has no effect here, call the model again",
                ));
            };
            let late = (0..self.states.len()).filter(|&i| self.read_late[i]);
            let now: Vec<_> = late.zip(states.into_iter().zip(storages)).collect();
            let is_other = |&&(i, (at, storage)): &&(usize, (usize, usize))| {
                loaded.states[i] != at && turn.storages[i] != storage
            };
            if let Some(&(i, _)) = now.iter().find(is_other) {
                let name = &self.states[i].name;
                return Err(error(format!(
                    "{name} moved between forward and backward: give it other values before a \
                     forward, or after the backward"
                )));
            }
            self.point(&mut loaded, now.into_iter().map(|(i, (at, _))| (i, at)))?;
            let ms = self.run(&mut loaded.machine, Part::Second, [&inputs, &outputs])?;
            locked(&self.free).push(loaded);
            Ok(ms)
        });
        py.check_signals()?;
        ran
    }
}
