//! Whether Python's objects are still those that they were: a look before each step at what the
//! step shares with a program, hundreds of objects in a few microseconds.
//!
//! Nothing here owns an object. PyTorch frees a tensor without the GIL, and memory of a machine,
//! which has Python's objects too, may go with it: that must not happen inside of a call of ours.
//! References are borrowed even for a moment, because counting them takes most of the time.

#![allow(
    unsafe_code,
    reason = "PyO3's iterators count references to each object that they meet"
)]

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString};
use std::ptr;

type Object = *mut ffi::PyObject;

/// The objects of a list, borrowed. Nothing may run meanwhile that changes the list.
fn borrowed(list: &Bound<'_, PyList>) -> impl Iterator<Item = Object> {
    // SAFETY: the index is within the list, which has an object there.
    (0..list.len()).map(|i| unsafe { ffi::PyList_GetItem(list.as_ptr(), i as ffi::Py_ssize_t) })
}

/// Whether some dicts, and then some lists, have these objects in this order. Only identities
/// count.
#[pyfunction]
pub(crate) fn have(
    tables: &Bound<'_, PyList>,
    lists: &Bound<'_, PyList>,
    objects: &Bound<'_, PyList>,
) -> PyResult<bool> {
    let mut noted = borrowed(objects);
    for table in borrowed(tables) {
        let (mut at, mut value) = (0, ptr::null_mut());
        // SAFETY: the list has the table, and no code of Python's runs that could change either.
        // `PyDict_Next` takes any object, and finds nothing in what is no dict.
        while unsafe { ffi::PyDict_Next(table, &raw mut at, ptr::null_mut(), &raw mut value) } != 0
        {
            if noted.next() != Some(value) {
                return Ok(false);
            }
        }
    }
    for list in lists {
        if !borrowed(list.cast()?).all(|object| noted.next() == Some(object)) {
            return Ok(false);
        }
    }
    Ok(noted.next().is_none())
}

/// Whether each of some dicts has the value with its number under a key. Only identities count.
#[pyfunction]
pub(crate) fn have_at(
    tables: &Bound<'_, PyList>,
    key: &Bound<'_, PyString>,
    values: &Bound<'_, PyList>,
) -> PyResult<bool> {
    for (table, was) in borrowed(tables).zip(borrowed(values)) {
        // SAFETY: the list has the table. The comparison of a key that is a string runs no code of
        // Python's unless another key has the same hash and a method of its own to compare it.
        let found = unsafe { ffi::PyDict_GetItemWithError(table, key.as_ptr()) };
        if found != was {
            return PyErr::take(tables.py()).map_or(Ok(false), Err);
        }
    }
    Ok(true)
}
