//! Whether Python's objects are still those that they were: a look before each step at what the
//! step shares with a program, hundreds of objects in a few microseconds.
//!
//! Nothing here owns an object. PyTorch frees a tensor without the GIL, and memory of a machine,
//! which has Python's objects too, may go with it: that must not happen inside of a call of ours.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// Whether some dicts, and then some lists, have these objects in this order. Only identities
/// count.
#[pyfunction]
pub(crate) fn have(
    tables: &Bound<'_, PyList>,
    lists: &Bound<'_, PyList>,
    objects: &Bound<'_, PyList>,
) -> PyResult<bool> {
    let mut noted = objects.iter();
    let mut is_next = |found: Bound<'_, PyAny>| noted.next().is_some_and(|was| was.is(&found));
    for table in tables {
        if !table
            .cast::<PyDict>()?
            .iter()
            .all(|(_, value)| is_next(value))
        {
            return Ok(false);
        }
    }
    for list in lists {
        if !list.cast::<PyList>()?.iter().all(&mut is_next) {
            return Ok(false);
        }
    }
    Ok(noted.next().is_none())
}
