//! The number of micro-batches, chosen among plans that Python makes.

use passes::micro_batches::{consider, divisors, fastest};
use pyo3::prelude::*;

/// The most micro-batches of a step: each adds its own lines to the program.
const MOST: u64 = 4096;

/// The number of micro-batches of a batch with the fastest plan; none if no plan fits. `least(n)`:
/// the time that the kernels of `n` micro-batches take at least, µs. `plan(n)`: the predicted time
/// of the plan for `n`, µs, or `None` if nothing fits.
#[pyfunction]
pub(crate) fn fastest_micro_batches(
    batch: u64,
    least: Bound<'_, PyAny>,
    plan: Bound<'_, PyAny>,
) -> PyResult<Option<u64>> {
    let considered = consider(
        &divisors(batch, MOST),
        |n| least.call1((n,))?.extract(),
        |n| plan.call1((n,))?.extract(),
    )?;
    Ok(fastest(&considered))
}
