//! Products of matrices and vectors.

use crate::dims::count;
use crate::{Call, Ref, Result, ensure};
use ir::Attr;
use ir::op::OpKind;

/// The attributes of a product, which say whether factors are transposed.
pub fn transposed(a: bool, b: bool) -> [(&'static str, Attr); 2] {
    [("ta", Attr::Bool(a)), ("tb", Attr::Bool(b))]
}

impl Call<'_> {
    /// A product of two matrices, or of two equally long batches of them.
    pub fn product(&mut self, a: Ref, b: Ref) -> Result<Ref> {
        self.step(OpKind::Matmul, &transposed(false, false), &[a, b])
    }

    /// A product of any ranks: vectors become matrices, batches broadcast.
    pub fn general_product(&mut self, a: Ref, b: Ref) -> Result<Ref> {
        let (mut x, mut y) = (self.shape_of(a), self.shape_of(b));
        ensure(!x.is_empty() && !y.is_empty(), "a factor has no dimension")?;
        let (is_row, is_column) = (x.len() == 1, y.len() == 1);
        if is_row {
            x.insert(0, 1);
        }
        if is_column {
            y.push(1);
        }
        let (x_lead, x_last) = x.split_at(x.len() - 2);
        let (y_lead, y_last) = y.split_at(y.len() - 2);
        let mut shape;
        let made = if y_lead.is_empty() {
            // One matrix on the right: the batch becomes more rows.
            shape = [x_lead, &[x_last[0]]].concat();
            let a = self.reshape(a, &[count(&shape)?, x_last[1]])?;
            let b = self.reshape(b, y_last)?;
            self.product(a, b)?
        } else {
            let lead = ir::op::broadcast_shapes(x_lead, y_lead)?;
            shape = [&lead[..], &[x_last[0]]].concat();
            let n = count(&lead)?;
            let (a, b) = (self.reshape(a, &x)?, self.reshape(b, &y)?);
            let (a, b) = (
                self.expand(a, &[&lead[..], x_last].concat())?,
                self.expand(b, &[&lead[..], y_last].concat())?,
            );
            let (a, b) = (
                self.reshape(a, &[n, x_last[0], x_last[1]])?,
                self.reshape(b, &[n, y_last[0], y_last[1]])?,
            );
            self.product(a, b)?
        };
        if is_row {
            shape.pop();
        }
        if !is_column {
            shape.push(y_last[1]);
        }
        self.reshape(made, &shape)
    }

    /// The product along a dimension of `x` with a matrix `[old size, new size]`.
    pub fn along(&mut self, x: Ref, dim: usize, matrix: Ref) -> Result<Ref> {
        // The dimension becomes the last one.
        let rank = self.rank(x);
        let others = (0..rank).filter(|&d| d != dim);
        let order: Vec<usize> = others.chain([dim]).collect();
        let mut back: Vec<usize> = (0..rank - 1).collect();
        back.insert(dim, rank - 1);
        let x = self.permute(x, &order)?;
        let y = self.general_product(x, matrix)?;
        self.permute(y, &back)
    }

    /// `x w^T + bias`, where `x` has any number of leading dimensions.
    pub fn linear(&mut self, x: Ref, w: Ref, bias: Option<Ref>) -> Result<Ref> {
        ensure(
            self.rank(w) == 2 && self.rank(x) >= 1,
            "the weight is no matrix",
        )?;
        let mut shape = self.shape_of(x);
        shape.pop();
        let inner = self.ty(w).shape()[1];
        let rows = self.reshape(x, &[count(&shape)?, inner])?;
        let y = match bias {
            Some(bias) => self.step(OpKind::Addmm, &transposed(false, true), &[bias, rows, w])?,
            None => self.step(OpKind::Matmul, &transposed(false, true), &[rows, w])?,
        };
        shape.push(self.ty(w).shape()[0]);
        self.reshape(y, &shape)
    }

    /// Each row of `x[S,K]` times the matrix of its group in `w[G,K,N]`, or `w[G,N,K]` if `tb`,
    /// where group g ends before row `ends[g]`.
    pub fn grouped_product(&mut self, x: Ref, w: Ref, ends: Ref, tb: bool) -> Result<Ref> {
        let attrs = [("tb", Attr::Bool(tb))];
        self.step(OpKind::GroupedMatmul, &attrs, &[x, w, ends])
    }

    /// `x^T y` of each group's rows.
    pub fn grouped_outer(&mut self, x: Ref, y: Ref, ends: Ref) -> Result<Ref> {
        self.step(OpKind::GroupedOuter, &[], &[x, y, ends])
    }

    /// Images for an op on batches: `x[C,H,W]` becomes a batch of one image.
    pub fn images(&mut self, x: Ref) -> Result<Ref> {
        let shape = self.shape_of(x);
        if shape.len() == 3 {
            self.reshape(x, &[&[1], &shape[..]].concat())
        } else {
            Ok(x)
        }
    }
}
