//! Ops that PyTorch computes while a step runs: a launch becomes a call of a Python function, with
//! the operands and results as capsules over the plan's memory.
//!
//! The runtime calls this on the thread of a stream. That thread attaches to Python for the call
//! alone, so it holds the GIL only then. Whoever runs a step has left the GIL to others, and so
//! never keeps it from the streams that it waits for.

use crate::dlpack::View;
use crate::errors::error;
use pyo3::prelude::*;
use runtime::{Foreign, ForeignCall, Lent};
use std::sync::{Mutex, PoisonError};

/// The Python function that computes the calls of a step: `compute(node, operands, results)`.
pub(crate) struct Calls {
    compute: Py<PyAny>,
    /// The first exception of a call.
    failure: Mutex<Option<PyErr>>,
}

impl Calls {
    pub(crate) fn new(compute: Py<PyAny>) -> Calls {
        Calls {
            compute,
            failure: Mutex::new(None),
        }
    }

    /// What a failed step raises: the exception of a call, if one failed.
    pub(crate) fn raised(&self, failure: &runtime::Error) -> PyErr {
        let mut raised = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        raised.take().unwrap_or_else(|| error(failure))
    }

    fn call(&self, py: Python<'_>, call: &ForeignCall<'_>) -> PyResult<()> {
        let capsules = |tensors: &[Lent]| -> PyResult<Vec<Py<PyAny>>> {
            let capsule =
                |lent: &Lent| Ok(View::new(lent.clone())?.capsule().into_python(py)?.into());
            tensors.iter().map(capsule).collect()
        };
        let (operands, results) = (capsules(call.ins)?, capsules(call.outs)?);
        self.compute.call1(py, (call.node, operands, results))?;
        Ok(())
    }
}

impl Foreign for Calls {
    fn compute(&self, call: &ForeignCall<'_>) -> Result<(), String> {
        Python::attach(|py| {
            self.call(py, call).map_err(|raised| {
                let why = format!("{}: {raised}", call.name);
                let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
                failure.get_or_insert(raised);
                why
            })
        })
    }
}
