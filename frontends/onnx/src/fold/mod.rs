//! What is computed while the file is read: shapes, axes, positions and other small tensors that
//! depend on constants and shapes alone.
//!
//! A function returns `None` for what it does not know; the node is then lowered like any other,
//! which also finds its errors.

mod elementwise;
mod shape;

use crate::attributes::Attributes;
use crate::builder::SMALL;
use crate::tensor::{Elements, Numbers};
use ir::TensorType;

/// A node whose inputs are known, as far as they are read.
pub(crate) struct Folding<'n, 'a> {
    pub(crate) inputs: Vec<Option<&'n Numbers>>,
    pub(crate) types: Vec<Option<&'n TensorType>>,
    pub(crate) attributes: &'n Attributes<'a>,
    pub(crate) n_results: usize,
}

/// Computes a node's results.
pub(crate) type Fold = fn(&Folding<'_, '_>) -> Option<Vec<Numbers>>;

/// The function of an operator, and the number of inputs, from the first on, whose elements it
/// reads. Of the others it reads only the types.
pub(crate) fn find(op: &str) -> Option<(Fold, usize)> {
    let row = shape::OPS
        .iter()
        .chain(elementwise::OPS)
        .find(|(name, _)| *name == op)?;
    let n_read = match op {
        "Shape" | "Size" => 0,
        "CastLike" => 1,
        _ => usize::MAX,
    };
    Some((row.1, n_read))
}

/// The names of the operators, sorted.
pub(crate) fn names() -> Vec<&'static str> {
    let mut names: Vec<&str> = shape::OPS
        .iter()
        .chain(elementwise::OPS)
        .map(|(name, _)| *name)
        .collect();
    names.sort_unstable();
    names
}

impl<'n> Folding<'n, '_> {
    fn at(&self, i: usize) -> Option<&'n Numbers> {
        self.inputs.get(i).copied().flatten()
    }
    /// True if the input is given.
    fn has(&self, i: usize) -> bool {
        self.at(i).is_some()
    }
    fn ints(&self, i: usize) -> Option<&'n [i64]> {
        self.at(i)?.as_ints()
    }
    fn int(&self, i: usize) -> Option<i64> {
        match self.ints(i)? {
            &[one] => Some(one),
            _ => None,
        }
    }
    /// Dimensions from an input, or, in older versions, an attribute; sorted.
    fn axes(&self, i: usize, rank: usize) -> Option<Option<Vec<usize>>> {
        let given = if self.has(i) {
            Some(self.ints(i)?)
        } else {
            self.attributes.ints("axes")
        };
        let Some(given) = given else {
            return Some(None);
        };
        let mut axes = vec![];
        for &axis in given {
            axes.push(lower::wrap(axis, rank).ok()?);
        }
        axes.sort_unstable();
        axes.dedup();
        Some(Some(axes))
    }
}

/// The number of elements of a small shape.
fn small(shape: &[u64]) -> Option<usize> {
    let n = lower::count(shape).ok().filter(|&n| n <= SMALL)?;
    usize::try_from(n).ok()
}

/// The elements at these places.
fn picked(x: &Elements, places: &[usize]) -> Option<Elements> {
    Some(match x {
        Elements::Ints(list) => {
            let at = |&i: &usize| list.get(i).copied();
            Elements::Ints(places.iter().map(at).collect::<Option<_>>()?)
        }
        Elements::Floats(list) => {
            let at = |&i: &usize| list.get(i).copied();
            Elements::Floats(places.iter().map(at).collect::<Option<_>>()?)
        }
    })
}

/// The indices of all elements of a small shape, in order.
fn indices(shape: &[u64]) -> Option<Vec<Vec<u64>>> {
    let n = small(shape)?;
    let mut all = Vec::with_capacity(n);
    let mut index = vec![0; shape.len()];
    for _ in 0..n {
        all.push(index.clone());
        for d in (0..shape.len()).rev() {
            index[d] += 1;
            if index[d] < shape[d] {
                break;
            }
            index[d] = 0;
        }
    }
    Some(all)
}

/// The place of an element. An index broadcasts: dimensions of size 1 count as often as needed, and
/// leading ones may be missing.
fn place(shape: &[u64], index: &[u64]) -> Option<usize> {
    let index = &index[index.len().checked_sub(shape.len())?..];
    let mut place = 0u64;
    for (&i, &size) in index.iter().zip(shape) {
        place = place * size + if size == 1 { 0 } else { i };
    }
    usize::try_from(place).ok()
}

/// A tensor of `shape` whose elements are those of `x` at the indices that `source` gives.
fn mapped(
    x: &Numbers,
    shape: &[u64],
    source: &dyn Fn(&[u64]) -> Option<Vec<u64>>,
) -> Option<Numbers> {
    let mut places = vec![];
    for index in indices(shape)? {
        places.push(place(x.ty.shape(), &source(&index)?)?);
    }
    Numbers::of(x.ty.dtype(), shape, picked(&x.elements, &places)?)
}
