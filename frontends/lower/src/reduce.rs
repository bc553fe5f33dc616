//! Reductions over dimensions.

use crate::dims::{count, dim_attr};
use crate::{Call, Ref, Result, Scalar, ensure};
use ir::Attr;
use ir::op::OpKind;

impl Call<'_> {
    /// The `k` largest or smallest elements along a dimension, sorted, and their positions.
    pub fn topk(&mut self, x: Ref, dim: usize, k: i64, largest: bool) -> Result<Vec<Ref>> {
        let attrs = [
            dim_attr(dim),
            ("k", Attr::Int(k)),
            ("largest", Attr::Bool(largest)),
        ];
        self.steps(OpKind::TopK, &attrs, &[x])
    }

    /// The largest or smallest elements along a dimension, and their positions.
    pub fn extreme(
        &mut self,
        x: Ref,
        dim: usize,
        keepdim: bool,
        largest: bool,
    ) -> Result<Vec<Ref>> {
        let found = self.topk(x, dim, 1, largest)?;
        let mut shape = self.shape_of(found[0]);
        if !keepdim {
            shape.remove(dim);
        }
        found.into_iter().map(|y| self.reshape(y, &shape)).collect()
    }

    /// True if all elements are true, or if any is.
    pub fn any_or_all(&mut self, x: Ref, dims: &[usize], keepdim: bool, all: bool) -> Result<Ref> {
        let x = self.truth(x)?;
        if !all {
            return self.reduce(OpKind::Any, x, dims, keepdim);
        }
        let x = self.map(OpKind::LogicalNot, x)?;
        let x = self.reduce(OpKind::Any, x, dims, keepdim)?;
        self.map(OpKind::LogicalNot, x)
    }

    /// Variance and mean. `correction` is subtracted from the number of elements in the divisor.
    pub fn variance(
        &mut self,
        x: Ref,
        dims: &[usize],
        keepdim: bool,
        correction: f64,
    ) -> Result<(Ref, Ref)> {
        let shape = self.shape_of(x);
        let n: u64 = dims.iter().map(|&d| shape[d]).product();
        let mean = self.reduce(OpKind::Mean, x, dims, true)?;
        let d = self.step(OpKind::Sub, &[], &[x, mean])?;
        let d = self.step(OpKind::Mul, &[], &[d, d])?;
        let sum = self.reduce(OpKind::Sum, d, dims, keepdim)?;
        let divisor = Scalar::Float((n as f64 - correction).max(0.0));
        Ok((self.scalar_step(OpKind::DivScalar, sum, divisor)?, mean))
    }

    /// The logarithm of the sum of exponentials, in `shape`.
    pub fn logsumexp(&mut self, x: Ref, dims: &[usize], shape: &[u64]) -> Result<Ref> {
        let max = self.reduce(OpKind::Amax, x, dims, true)?;
        // A row of -inf has no finite maximum that can be subtracted.
        let finite = self.beside_infinity(OpKind::LtScalar, max)?;
        let max = self.masked(finite, max)?;
        let y = self.step(OpKind::Sub, &[], &[x, max])?;
        let y = self.map(OpKind::Exp, y)?;
        let y = self.reduce(OpKind::Sum, y, dims, true)?;
        let y = self.map(OpKind::Log, y)?;
        let y = self.step(OpKind::Add, &[], &[y, max])?;
        ensure(self.ty(y).numel() == count(shape)?, "the shapes do not fit")?;
        self.reshape(y, shape)
    }

    /// The norm of order 1, 2 or infinity.
    pub fn norm(&mut self, x: Ref, order: f64, dims: &[usize], keepdim: bool) -> Result<Ref> {
        if order == 2.0 {
            let y = self.step(OpKind::Mul, &[], &[x, x])?;
            let y = self.reduce(OpKind::Sum, y, dims, keepdim)?;
            return self.root_of_sum(y);
        }
        let reduction = if order == 1.0 {
            OpKind::Sum
        } else if order == f64::INFINITY {
            OpKind::Amax
        } else {
            return Err(format!("no norm of order {order}").into());
        };
        let y = self.map(OpKind::Abs, x)?;
        self.reduce(reduction, y, dims, keepdim)
    }

    /// The square root of a number that is not negative. At 0 it has the derivative 0, as a norm
    /// has in PyTorch, and not an infinite one.
    pub fn root_of_sum(&mut self, x: Ref) -> Result<Ref> {
        let is_zero = self.scalar_step(OpKind::EqScalar, x, Scalar::Int(0))?;
        let one = self.full(Scalar::Int(1), self.dtype(x), &[])?;
        let zero = self.full(Scalar::Int(0), self.dtype(x), &[])?;
        let apart = self.step(OpKind::Where, &[], &[is_zero, one, x])?;
        let root = self.map(OpKind::Sqrt, apart)?;
        self.step(OpKind::Where, &[], &[is_zero, zero, root])
    }

    /// The squared differences: their mean (`Some(true)`), their sum (`Some(false)`) or all of them
    /// (`None`).
    pub fn squared_difference(&mut self, x: Ref, y: Ref, mean: Option<bool>) -> Result<Ref> {
        let d = self.step(OpKind::Sub, &[], &[x, y])?;
        let squares = self.step(OpKind::Mul, &[], &[d, d])?;
        let dims: Vec<usize> = (0..self.rank(squares)).collect();
        match mean {
            None => Ok(squares),
            Some(true) => self.reduce(OpKind::Mean, squares, &dims, false),
            Some(false) => self.reduce(OpKind::Sum, squares, &dims, false),
        }
    }
}
