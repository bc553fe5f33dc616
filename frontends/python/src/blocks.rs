//! Numbers as codes, for states that Python gives a step or reads from it.

use crate::errors::error;
use ir::op::maps::{DYNAMIC, UNSIGNED};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use runtime::kernels::blocks::Nf4;

/// The numbers of 8-bit codes, of both signs or not negative.
#[pyfunction]
pub(crate) fn dynamic_map(signed: bool) -> Vec<f32> {
    if signed { DYNAMIC } else { UNSIGNED }.to_vec()
}

/// The four states of a matrix in NF4, from the bytes of its numbers in f32.
#[pyfunction]
pub(crate) fn nf4<'p>(py: Python<'p>, numbers: &[u8]) -> [Bound<'p, PyBytes>; 4] {
    let stored = py.detach(|| Nf4::of(&floats(numbers)));
    let largest: Vec<u8> = bytes(&stored.largest);
    let offset = stored.offset.to_ne_bytes();
    [&stored.codes, &stored.sizes, &largest, &offset[..]].map(|state| PyBytes::new(py, state))
}

/// The bytes of the first `n` numbers, in f32, that the four states of a matrix stand for.
#[pyfunction]
pub(crate) fn nf4_numbers<'p>(
    py: Python<'p>,
    n: usize,
    codes: Vec<u8>,
    sizes: Vec<u8>,
    largest: &[u8],
    offset: f32,
) -> PyResult<Bound<'p, PyBytes>> {
    let stored = Nf4 {
        codes,
        sizes,
        largest: floats(largest),
        offset,
    };
    let numbers = py.detach(|| stored.numbers(n));
    let numbers = numbers.ok_or_else(|| error(format!("too few codes for {n} numbers")))?;
    Ok(PyBytes::new(py, &bytes(&numbers)))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let (numbers, _) = bytes.as_chunks();
    numbers.iter().map(|&x| f32::from_ne_bytes(x)).collect()
}

fn bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_ne_bytes()).collect()
}
