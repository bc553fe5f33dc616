//! Sequences of different lengths in bins.

use papers::packing;
use pyo3::prelude::*;

/// The numbers of the sequences in each bin; none if one is longer than a bin.
#[pyfunction]
pub(crate) fn first_fit_decreasing(lengths: Vec<u64>, limit: u64) -> Option<Vec<Vec<usize>>> {
    packing::first_fit_decreasing(&lengths, limit)
}
