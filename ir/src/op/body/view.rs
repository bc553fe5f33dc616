//! Views: tensors whose elements are those of another, in another order or only some of them.

use crate::op::Op;
use crate::op::attrs::Dims;

/// The elements of a tensor as places in another, the base.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct View {
    /// The place of the first element in the base, in elements.
    pub first: i64,
    /// The dimensions, outermost first.
    pub dims: Vec<Strided>,
}

/// A dimension of a view.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Strided {
    /// The number of elements.
    pub size: u64,
    /// The distance between neighbours in the base, in elements. It is negative if their order is
    /// reversed. Without neighbours it has no meaning.
    pub stride: i64,
}

impl View {
    /// A tensor of this shape as itself.
    pub fn whole(shape: &[u64]) -> View {
        let mut dims: Vec<Strided> = vec![];
        for &size in shape.iter().rev() {
            let inner = dims.last().copied();
            let stride = inner.map_or(1, |inner| inner.stride.wrapping_mul(inner.size as i64));
            dims.push(Strided { size, stride });
        }
        dims.reverse();
        View { first: 0, dims }
    }

    /// True for an op whose result is a view of its operand.
    pub fn is_made_by(op: &Op) -> bool {
        op.is_alias() || matches!(op, Op::Permute(_) | Op::Slice(_) | Op::Flip(_))
    }

    /// What an op makes of this view, with a result of this shape. None if the op computes
    /// something else, or if the distances between the result's elements are not equal.
    pub fn then(mut self, op: &Op, shape: &[u64]) -> Option<View> {
        match op {
            Op::Permute(Dims { dims }) => {
                self.dims = dims.iter().map(|&d| self.dims[d as usize]).collect();
            }
            Op::Flip(Dims { dims }) => {
                for &d in dims {
                    let dim = &mut self.dims[d as usize];
                    let last = dim.size.saturating_sub(1) as i64;
                    self.first = self.first.wrapping_add(last.wrapping_mul(dim.stride));
                    dim.stride = dim.stride.wrapping_neg();
                }
            }
            Op::Slice(slice) => {
                let dim = &mut self.dims[slice.dim as usize];
                let start = slice.start.wrapping_mul(dim.stride);
                self.first = self.first.wrapping_add(start);
                dim.stride = dim.stride.wrapping_mul(slice.step);
                dim.size = shape[slice.dim as usize];
            }
            _ if op.is_alias() => return self.reshaped(shape),
            _ => return None,
        }
        Some(self)
    }

    /// The same elements with another shape.
    pub fn reshaped(&self, shape: &[u64]) -> Option<View> {
        // Dimensions whose elements follow each other are one.
        let mut whole: Vec<Strided> = vec![];
        for &dim in self.dims.iter().filter(|dim| dim.size != 1) {
            match whole.last_mut() {
                Some(last) if last.stride == dim.stride.wrapping_mul(dim.size as i64) => {
                    *last = Strided {
                        size: last.size.wrapping_mul(dim.size),
                        stride: dim.stride,
                    };
                }
                _ => whole.push(dim),
            }
        }
        let one = Strided { size: 1, stride: 1 };
        let mut left = whole.pop().unwrap_or(one);
        let mut dims = vec![];
        for &size in shape.iter().rev() {
            if left.size == 1 && size != 1 {
                left = whole.pop()?;
            }
            if size == 0 || !left.size.is_multiple_of(size) {
                return None;
            }
            let stride = left.stride;
            dims.push(Strided { size, stride });
            left.size /= size;
            left.stride = stride.wrapping_mul(size as i64);
        }
        dims.reverse();
        let first = self.first;
        Some(View { first, dims })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::attrs::{Sizes, Slice};

    fn view(shape: &[u64], ops: &[(Op, &[u64])]) -> Option<String> {
        let mut view = View::whole(shape);
        for (op, shape) in ops {
            view = view.then(op, shape)?;
        }
        let dims = view.dims.iter();
        let dims: Vec<String> = dims.map(|d| format!("{}:{}", d.size, d.stride)).collect();
        Some(format!("{} {}", view.first, dims.join(" ")))
    }

    #[test]
    fn chains_are_one_view() {
        let reshape = |shape: &[i64]| {
            let shape = shape.to_vec();
            Op::Reshape(Sizes { shape })
        };
        let permute = |dims: &[i64]| Op::Permute(Dims { dims: dims.into() });
        let flip = |dim: i64| Op::Flip(Dims { dims: vec![dim] });
        let slice = |dim: i64, start: i64, end: i64, step: i64| {
            Op::Slice(Slice {
                dim,
                end,
                start,
                step,
            })
        };
        let is = |shape: &[u64], ops: &[(Op, &[u64])], wanted: &str| {
            assert_eq!(view(shape, ops).as_deref(), Some(wanted));
        };
        is(&[6, 4], &[], "0 6:4 4:1");
        let heads: (Op, &[u64]) = (reshape(&[2, 3, 4]), &[2, 3, 4]);
        let swapped: (Op, &[u64]) = (permute(&[1, 0, 2]), &[3, 2, 4]);
        is(&[6, 4], &[heads.clone(), swapped.clone()], "0 3:4 2:12 4:1");
        let halves: (Op, &[u64]) = (reshape(&[3, 2, 2, 2]), &[3, 2, 2, 2]);
        let exchanged: (Op, &[u64]) = (flip(2), &[3, 2, 2, 2]);
        let ops = [heads.clone(), swapped.clone(), halves, exchanged];
        is(&[6, 4], &ops, "2 3:4 2:12 2:-2 2:1");
        is(&[6, 4], &[(slice(1, 1, 4, 2), &[6, 2])], "1 6:4 2:2");
        // A row of the permutation has no equal distances.
        let flat: (Op, &[u64]) = (reshape(&[3, 8]), &[3, 8]);
        assert_eq!(view(&[6, 4], &[heads, swapped, flat]), None);
    }
}
