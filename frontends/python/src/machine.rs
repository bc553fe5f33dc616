//! A loaded step: the runtime's machine, with its tensors as views.

use crate::dlpack::View;
use crate::errors::error;
use crate::foreign::Calls;
use crate::openmp::Lasted;
use crate::process::{Threaded, needs_threads};
use artifact::Artifact;
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use runtime::{Foreign, Options, Port, StateInit};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A step in memory. Its pools are allocated once, and live as long as the machine or any view.
#[pyclass(frozen, module = "lighterage._lighterage")]
pub(crate) struct Machine {
    machine: Threaded<Mutex<runtime::Machine>>,
    inputs: Vec<String>,
    loss: String,
    /// What PyTorch computes of it.
    calls: Option<Arc<Calls>>,
    /// The last time of a step.
    lasted: Lasted,
}

impl Machine {
    pub(crate) fn new(
        machine: runtime::Machine,
        lasted: Lasted,
        calls: Option<Arc<Calls>>,
    ) -> PyResult<Machine> {
        let inputs = machine.inputs().map(|input| input.name.clone()).collect();
        let numbers: Vec<_> = machine
            .outputs()
            .filter(|output| output.operand.shape.iter().product::<u64>() == 1)
            .collect();
        let named = numbers.iter().find(|output| output.name == "loss");
        let loss = named.or(numbers.first());
        let loss = loss.ok_or_else(|| error("the step has no loss"))?;
        Ok(Machine {
            inputs,
            loss: loss.name.clone(),
            calls,
            lasted,
            machine: Threaded::new(Mutex::new(machine)),
        })
    }

    /// Loads another step on this one's memory.
    pub(crate) fn another(
        &self,
        artifact: Artifact,
        options: Options,
        foreign: Option<Arc<dyn Foreign>>,
    ) -> Result<runtime::Machine, runtime::Error> {
        self.locked().another(artifact, options, foreign)
    }

    /// The machine, for this thread. A thread that panicked left no half-done change in it: the
    /// machine itself reports a failed step.
    fn locked(&self) -> MutexGuard<'_, runtime::Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(failure: runtime::Error) -> PyErr {
    error(failure)
}

fn port<'a>(kind: &str, name: &'a str) -> PyResult<Port<'a>> {
    match kind {
        "input" => Ok(Port::Input(name)),
        "output" => Ok(Port::Output(name)),
        "state" => Ok(Port::State(name)),
        _ => Err(error(format!("{kind:?} is no input, output or state"))),
    }
}

#[pymethods]
impl Machine {
    /// Names of the inputs.
    #[getter]
    fn inputs(&self) -> Vec<String> {
        self.inputs.clone()
    }

    /// The name of the output that is the loss.
    #[getter]
    fn loss(&self) -> &str {
        &self.loss
    }

    /// Path and kind of each state: `param`, `buffer`, `const`, `moment` or `rng`.
    #[getter]
    fn states(&self, py: Python<'_>) -> Vec<(String, String)> {
        let kind = |state: &artifact::State| format!("{:?}", state.kind).to_lowercase();
        py.detach(|| {
            let machine = self.locked();
            let states = machine.states();
            states
                .map(|state| (state.path.clone(), kind(state)))
                .collect()
        })
    }

    /// The tensor of an input, an output or a state, where it lies.
    fn view(&self, py: Python<'_>, kind: &str, name: &str) -> PyResult<View> {
        let port = port(kind, name)?;
        let lent = py.detach(|| self.locked().lend(port));
        View::new(lent.ok_or_else(|| PyKeyError::new_err(format!("{kind} {name}")))?)
    }

    /// Says that a state has its value now.
    fn written(&self, py: Python<'_>, path: &str) -> PyResult<()> {
        py.detach(|| self.locked().written(Port::State(path)))
            .map_err(failed)
    }

    /// Gives moments zeros and random numbers their seed.
    fn initialise(&self, py: Python<'_>, seed: u64) -> PyResult<()> {
        let init = StateInit { seed, std: None };
        py.detach(|| self.locked().initialise(&init))
            .map_err(failed)
    }

    /// Runs one step on the inputs as they are, without the GIL. Returns its time, ms. Ctrl-C is
    /// answered after the step, so states are never half new because of it.
    fn step(&self, py: Python<'_>) -> PyResult<f64> {
        needs_threads()?;
        let report = py.detach(|| {
            let mut machine = self.locked();
            for name in &self.inputs {
                machine.written(Port::Input(name))?;
            }
            self.lasted.alone(|| machine.step())
        });
        let report = report.map_err(|failure| match &self.calls {
            Some(calls) => calls.raised(&failure),
            None => failed(failure),
        })?;
        self.lasted.note(report.ms);
        py.check_signals()?;
        Ok(report.ms)
    }

    /// One past the last byte of the device's pool that was touched: equal to the planned peak.
    #[getter]
    fn measured_peak_bytes(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.locked().measured_peak_bytes())
    }

    /// Bytes of the device's pool, allocated once.
    #[getter]
    fn pool_bytes(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.locked().device_pool_bytes())
    }
}
