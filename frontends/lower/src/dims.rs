//! Dimensions, sizes and ranges as numbers: counted, wrapped, and made into attributes.

use crate::{Error, Result};
use ir::Attr;

/// A part along a dimension, with Python's rules for negative and large bounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// The first position; 0 if absent.
    pub start: Option<i64>,
    /// The position after the last; the size if absent.
    pub end: Option<i64>,
    /// The distance between two positions.
    pub step: i64,
}

impl Range {
    /// All positions from `start` to before `end`.
    pub fn new(start: i64, end: i64) -> Range {
        Range {
            start: Some(start),
            end: Some(end),
            step: 1,
        }
    }
}

/// A shape as an attribute.
pub fn attr_ints(shape: &[u64]) -> Result<Attr> {
    let one =
        |&d: &u64| i64::try_from(d).map_err(|_| Error::from(format!("the size {d} is too large")));
    shape.iter().map(one).collect::<Result<_>>().map(Attr::Ints)
}

/// A dimension counted from the front.
pub fn wrap(dim: i64, rank: usize) -> Result<usize> {
    let front = if dim < 0 {
        dim.checked_add(rank as i64)
    } else {
        Some(dim)
    };
    let front = front.and_then(|d| usize::try_from(d).ok());
    let front = front.filter(|&d| d < rank);
    front.ok_or_else(|| format!("dimension {dim} is not below rank {rank}").into())
}

/// The number of elements of a shape.
pub fn count(shape: &[u64]) -> Result<u64> {
    let n = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
    n.ok_or_else(|| "too large".into())
}

pub(crate) fn dim_attr(dim: usize) -> (&'static str, Attr) {
    ("dim", Attr::Int(dim as i64))
}
