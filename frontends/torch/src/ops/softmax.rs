//! Softmaxes and their derivatives.

use super::Family;
use ir::Attr;
use ir::op::OpKind;
use lower::{Call, Ref, Result, Results, Scalar, one};

pub(super) const OPS: Family = &[
    ("_softmax", |c| one(softmax(c, OpKind::Softmax)?.1)),
    ("softmax", |c| one(softmax(c, OpKind::Softmax)?.1)),
    ("_log_softmax", |c| one(softmax(c, OpKind::LogSoftmax)?.1)),
    ("log_softmax", |c| one(softmax(c, OpKind::LogSoftmax)?.1)),
    ("_safe_softmax", safe_softmax),
    ("_softmax_backward_data", |c| {
        backward(c, OpKind::SoftmaxBwd)
    }),
    ("_log_softmax_backward_data", |c| {
        backward(c, OpKind::LogSoftmaxBwd)
    }),
];

/// The operand in the type of the result, and the softmax along a dimension.
fn softmax(c: &mut Call<'_>, op: OpKind) -> Result<(Ref, Ref)> {
    let x = c.tensor("self")?;
    let dim = c.dim("dim", None, c.rank(x))?;
    c.bool_or("half_to_float", false)?;
    c.opt_dtype("dtype")?;
    let x = c.cast(x, c.result()?.dtype())?;
    Ok((x, c.step(op, &[("dim", Attr::Int(dim as i64))], &[x])?))
}

/// A softmax in which a row of -inf gives zeros instead of NaN.
fn safe_softmax(c: &mut Call<'_>) -> Result<Results> {
    let (x, y) = softmax(c, OpKind::Softmax)?;
    let dim = c.dim("dim", None, c.rank(x))?;
    let live = c.scalar_step(OpKind::NeScalar, x, Scalar::Float(f64::NEG_INFINITY))?;
    let live = c.reduce(OpKind::Any, live, &[dim], true)?;
    one(c.masked(live, y)?)
}

fn backward(c: &mut Call<'_>, op: OpKind) -> Result<Results> {
    let (dy, y) = (c.tensor("grad_output")?, c.tensor("output")?);
    let dim = c.dim("dim", None, c.rank(y))?;
    c.opt_dtype("input_dtype")?;
    let dx = c.step(op, &[("dim", Attr::Int(dim as i64))], &[dy, y])?;
    one(c.cast(dx, c.result()?.dtype())?)
}
