//! Losses.

use crate::{Call, Ref, Result, count};
use ir::Attr;
use ir::op::OpKind;
use ir::op::attrs::NllLoss;

impl Call<'_> {
    /// Log-probabilities `[N,C,d..]` as rows `[N d.., C]`.
    pub fn class_rows(&mut self, x: Ref) -> Result<Ref> {
        let shape = self.shape_of(x);
        match shape.len() {
            0 => Err("there are no classes".into()),
            1 => self.reshape(x, &[1, shape[0]]),
            2 => Ok(x),
            rank => {
                let dims: Vec<usize> = [0].into_iter().chain(2..rank).chain([1]).collect();
                let x = self.permute(x, &dims)?;
                self.reshape(x, &[count(&shape)? / shape[1].max(1), shape[1]])
            }
        }
    }

    /// The negative log likelihood of targets `[N,d..]` with log-probabilities `[N,C,d..]`, and the
    /// number of targets that count: those that are not `ignore`. `reduction` is a number of
    /// [`NllLoss`].
    pub fn nll_loss(
        &mut self,
        x: Ref,
        target: Ref,
        reduction: i64,
        ignore: i64,
    ) -> Result<Vec<Ref>> {
        let shape = self.shape_of(target);
        let x = self.class_rows(x)?;
        let n = self.ty(target).numel();
        let target = self.reshape(target, &[n])?;
        let attrs = [
            ("ignore", Attr::Int(ignore)),
            ("reduction", Attr::Int(reduction)),
        ];
        let mut made = self.steps(OpKind::NllLoss, &attrs, &[x, target])?;
        if reduction == NllLoss::NONE {
            made[0] = self.reshape(made[0], &shape)?;
        }
        Ok(made)
    }
}
