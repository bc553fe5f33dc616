//! Convolutions.

use crate::call::Attrs;
use crate::{Call, Ref, Result, Scalar};
use ir::Attr;
use ir::op::OpKind;

impl Call<'_> {
    /// A transposed convolution with a result of this shape: the gradient of a convolution's
    /// operand. Of this operand only the shape counts.
    pub fn transposed_convolution(
        &mut self,
        attrs: Attrs<'_>,
        [x, w]: [Ref; 2],
        bias: Option<Ref>,
        shape: &[u64],
    ) -> Result<Ref> {
        let operand = self.full(Scalar::Int(0), self.dtype(x), shape)?;
        let mask = [("mask", Attr::Ints(vec![1, 0, 0]))];
        let attrs = [attrs, &mask].concat();
        let y = self.step(OpKind::ConvolutionBwd, &attrs, &[x, operand, w])?;
        let Some(bias) = bias else { return Ok(y) };
        let mut beside = vec![1; shape.len()];
        beside[1] = *shape.get(1).ok_or("there are no channels")?;
        let bias = self.reshape(bias, &beside)?;
        self.step(OpKind::Add, &[], &[y, bias])
    }
}
