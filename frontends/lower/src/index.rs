//! Indexing by tensors, where any dimensions may be indexed.

use crate::{Call, Ref, Result, Scalar, ensure};
use ir::op::OpKind;
use ir::{Attr, DType};

/// A tensor whose indexed dimensions come first, as in the table of ops.
#[derive(Clone, Debug)]
pub struct Indexed {
    /// The tensor, permuted.
    x: Ref,
    /// The old position of each dimension of `x`.
    order: Vec<usize>,
    indices: Vec<Ref>,
    /// The rank of the indices together.
    n_index: usize,
    /// The position of the indices' dimensions in the result.
    at: usize,
}

impl Indexed {
    /// A tensor with an index for each of its first dimensions; indices may be absent. The result's
    /// dimensions have the same order as in NumPy and PyTorch.
    pub fn new(call: &mut Call<'_>, x: Ref, indices: &[Option<Ref>]) -> Result<Indexed> {
        let rank = call.rank(x);
        ensure(indices.len() <= rank, "more indices than dimensions")?;
        let is_indexed = |d: &usize| indices.get(*d).is_some_and(Option::is_some);
        let indexed: Vec<usize> = (0..rank).filter(is_indexed).collect();
        let (Some(&first), Some(&last)) = (indexed.first(), indexed.last()) else {
            return Err("no index".into());
        };
        let rest = (0..rank).filter(|d| !is_indexed(d));
        let order: Vec<usize> = indexed.iter().copied().chain(rest).collect();
        let list: Vec<Ref> = indices.iter().copied().flatten().collect();
        for &i in &list {
            ensure(
                matches!(call.dtype(i), DType::I64 | DType::I32),
                "a mask is used as an index: the size of the result depends on the data",
            )?;
        }
        // Indices that are not neighbours come first in the result.
        let are_neighbours = last - first + 1 == indexed.len();
        Ok(Indexed {
            x: if is_identity(&order) {
                x
            } else {
                call.permute(x, &order)?
            },
            n_index: list.iter().map(|&i| call.rank(i)).max().unwrap_or(0),
            at: if are_neighbours { first } else { 0 },
            order,
            indices: list,
        })
    }

    /// A tensor with one index. The index counts as a vector.
    pub fn along(call: &mut Call<'_>, x: Ref, dim: usize, index: Ref) -> Result<Indexed> {
        let n = call.ty(index).numel();
        let index = call.reshape(index, &[n])?;
        let mut indices = vec![None; dim];
        indices.push(Some(index));
        Indexed::new(call, x, &indices)
    }

    /// The elements at the indices.
    pub fn get(&self, call: &mut Call<'_>) -> Result<Ref> {
        let operands = [&[self.x], &self.indices[..]].concat();
        let y = call.step(OpKind::Index, &[], &operands)?;
        let order = self.result_order();
        if is_identity(&order) {
            Ok(y)
        } else {
            call.permute(y, &order)
        }
    }

    /// The tensor with `values` at the indices: they replace the old elements or are added to them.
    /// `values` broadcast to the shape of [`Indexed::get`].
    pub fn put(&self, call: &mut Call<'_>, values: Ref, accumulate: bool) -> Result<Ref> {
        let order = self.result_order();
        let mut values = values;
        if !is_identity(&order) {
            let mut lead = vec![];
            for &i in &self.indices {
                lead = ir::op::broadcast_shapes(&lead, call.ty(i).shape())?;
            }
            let rest = &call.ty(self.x).shape()[self.indices.len()..];
            let ours = [&lead[..], rest].concat();
            let theirs: Vec<u64> = order.iter().map(|&d| ours[d]).collect();
            values = call.expand(values, &theirs)?;
            values = call.permute(values, &inverse(&order))?;
        }
        let operands = [&[self.x, values], &self.indices[..]].concat();
        let attrs = [("accumulate", Attr::Bool(accumulate))];
        let y = call.step(OpKind::IndexPut, &attrs, &operands)?;
        if is_identity(&self.order) {
            Ok(y)
        } else {
            call.permute(y, &inverse(&self.order))
        }
    }

    /// For each dimension of the result, its position in the op's result.
    fn result_order(&self) -> Vec<usize> {
        let (n, rest) = (self.n_index, self.order.len() - self.indices.len());
        (n..n + self.at)
            .chain(0..n)
            .chain(n + self.at..n + rest)
            .collect()
    }
}

impl Call<'_> {
    /// True where the index along a dimension of size 1 is the place in this dimension of `size`.
    pub fn is_class(&mut self, index: Ref, dim: usize, size: u64) -> Result<Ref> {
        let at = self.arange(DType::I64, size, Scalar::Int(0), Scalar::Int(1))?;
        let mut beside = vec![1; self.rank(index)];
        beside[dim] = size;
        let at = self.reshape(at, &beside)?;
        self.step(OpKind::Eq, &[], &[index, at])
    }
}

fn is_identity(order: &[usize]) -> bool {
    order.iter().enumerate().all(|(i, &d)| i == d)
}

fn inverse(order: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; order.len()];
    for (i, &d) in order.iter().enumerate() {
        inverse[d] = i;
    }
    inverse
}
