//! Reductions over dimensions.

use crate::dims::{count, dim_attr};
use crate::{Call, Ref, Result, Scalar, ensure};
use ir::Attr;

impl Call<'_> {
    /// The `k` greatest or least elements along a dimension, sorted, and their positions.
    pub fn topk(&mut self, x: Ref, dim: usize, k: i64, largest: bool) -> Result<Vec<Ref>> {
        let attrs = [
            dim_attr(dim),
            ("k", Attr::Int(k)),
            ("largest", Attr::Bool(largest)),
        ];
        self.steps("topk", &attrs, &[x])
    }

    /// The greatest or least elements along a dimension, and their positions.
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

    /// True where every element is, or where some element is.
    pub fn any_or_all(&mut self, x: Ref, dims: &[usize], keepdim: bool, all: bool) -> Result<Ref> {
        let x = self.truth(x)?;
        if !all {
            return self.reduce("any", x, dims, keepdim);
        }
        let x = self.map("logical_not", x)?;
        let x = self.reduce("any", x, dims, keepdim)?;
        self.map("logical_not", x)
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
        let mean = self.reduce("mean", x, dims, true)?;
        let d = self.step("sub", &[], &[x, mean])?;
        let d = self.step("mul", &[], &[d, d])?;
        let sum = self.reduce("sum", d, dims, keepdim)?;
        let divisor = Scalar::Float((n as f64 - correction).max(0.0));
        Ok((self.scalar_step("div_scalar", sum, divisor)?, mean))
    }

    /// The logarithm of the sum of exponentials, in `shape`.
    pub fn logsumexp(&mut self, x: Ref, dims: &[usize], shape: &[u64]) -> Result<Ref> {
        let max = self.reduce("amax", x, dims, true)?;
        // A row of -inf has no finite maximum to subtract.
        let finite = self.beside_infinity("lt_scalar", max)?;
        let max = self.masked(finite, max)?;
        let y = self.step("sub", &[], &[x, max])?;
        let y = self.map("exp", y)?;
        let y = self.reduce("sum", y, dims, true)?;
        let y = self.map("log", y)?;
        let y = self.step("add", &[], &[y, max])?;
        ensure(self.ty(y).numel() == count(shape)?, "the shapes do not fit")?;
        self.reshape(y, shape)
    }

    /// The norm of order 1, 2 or infinity.
    pub fn norm(&mut self, x: Ref, order: f64, dims: &[usize], keepdim: bool) -> Result<Ref> {
        if order == 2.0 {
            let y = self.step("mul", &[], &[x, x])?;
            let y = self.reduce("sum", y, dims, keepdim)?;
            return self.map("sqrt", y);
        }
        let reduction = if order == 1.0 {
            "sum"
        } else if order == f64::INFINITY {
            "amax"
        } else {
            return Err(format!("no norm of order {order}").into());
        };
        let y = self.map("abs", x)?;
        self.reduce(reduction, y, dims, keepdim)
    }

    /// The mean (`Some(true)`), the sum (`Some(false)`) or all of the squared differences.
    pub fn squared_difference(&mut self, x: Ref, y: Ref, mean: Option<bool>) -> Result<Ref> {
        let d = self.step("sub", &[], &[x, y])?;
        let squares = self.step("mul", &[], &[d, d])?;
        let dims: Vec<usize> = (0..self.rank(squares)).collect();
        match mean {
            None => Ok(squares),
            Some(true) => self.reduce("mean", squares, &dims, false),
            Some(false) => self.reduce("sum", squares, &dims, false),
        }
    }
}
