//! Losses and their derivatives.

use super::Family;
use ir::Attr;
use ir::op::OpKind;
use lower::{Call, Ref, Result, Results, Scalar, all, attr_ints, ensure, one};

pub(super) const OPS: Family = &[
    ("cross_entropy_loss", cross_entropy),
    ("nll_loss", nll_loss),
    ("nll_loss_nd", nll_loss),
    ("nll_loss2d", nll_loss),
    ("nll_loss_forward", nll_loss),
    ("nll_loss2d_forward", nll_loss),
    ("nll_loss_backward", nll_loss_backward),
    ("nll_loss2d_backward", nll_loss_backward),
    ("mse_loss", mse_loss),
    ("mse_loss_backward", mse_loss_backward),
];

/// torch's numbers for reductions; any other number means a sum.
const NO_REDUCTION: i64 = 0;
const MEAN: i64 = 1;
/// The target that does not count, torch's default.
const IGNORED: i64 = -100;

fn nll_loss(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    losses(c, x)
}

/// The loss of logits whose targets are classes, not probabilities.
fn cross_entropy(c: &mut Call<'_>) -> Result<Results> {
    let (x, target) = (c.tensor("self")?, c.tensor("target")?);
    ensure(!c.dtype(target).is_float(), "the targets are probabilities")?;
    let smoothing = c.float_or("label_smoothing", 0.0)?;
    ensure(smoothing == 0.0, "smooths the labels")?;
    let x = c.class_rows(x)?;
    let x = c.step(OpKind::LogSoftmax, &[("dim", Attr::Int(1))], &[x])?;
    Ok(losses(c, x)?.into_iter().take(1).collect())
}

/// The loss of log-probabilities, and the number of targets that count.
fn losses(c: &mut Call<'_>, x: Ref) -> Result<Results> {
    let target = c.tensor("target")?;
    ensure(c.opt_tensor("weight")?.is_none(), "weighs the classes")?;
    let reduction = c.int_or("reduction", MEAN)?;
    let ignore = c.int_or("ignore_index", IGNORED)?;
    all(c.nll_loss(x, target, reduction, ignore)?)
}

fn nll_loss_backward(c: &mut Call<'_>) -> Result<Results> {
    let dy = c.tensor("grad_output")?;
    let (x, target) = (c.tensor("self")?, c.tensor("target")?);
    ensure(c.opt_tensor("weight")?.is_none(), "weighs the classes")?;
    let (reduction, ignore) = (c.int("reduction")?, c.int("ignore_index")?);
    let weight = c.tensor("total_weight")?;
    let (shape, n) = (c.shape_of(x), c.ty(target).numel());
    let classes = shape.get(1).or(shape.first());
    let classes = *classes.ok_or("there are no classes")?;
    let target = c.reshape(target, &[n])?;
    let dy = if reduction == NO_REDUCTION {
        c.reshape(dy, &[n])?
    } else {
        dy
    };
    let attrs = [
        ("dtype", Attr::Type(c.dtype(x))),
        ("ignore", Attr::Int(ignore)),
        ("reduction", Attr::Int(reduction)),
        ("shape", attr_ints(&[n, classes])?),
    ];
    let dx = c.step(OpKind::NllLossBwd, &attrs, &[dy, target, weight])?;
    if shape.len() <= 2 {
        return one(c.reshape(dx, &shape)?);
    }
    // [N d.., C] -> [N, d.., C] -> [N, C, d..]
    let rank = shape.len();
    let last = [&shape[..1], &shape[2..], &[classes]].concat();
    let dx = c.reshape(dx, &last)?;
    let dims: Vec<usize> = [0, rank - 1].into_iter().chain(1..rank - 1).collect();
    one(c.permute(dx, &dims)?)
}

fn mse_loss(c: &mut Call<'_>) -> Result<Results> {
    let (x, t) = (c.tensor("self")?, c.tensor("target")?);
    let mean = match c.int_or("reduction", MEAN)? {
        NO_REDUCTION => None,
        reduction => Some(reduction == MEAN),
    };
    one(c.squared_difference(x, t, mean)?)
}

fn mse_loss_backward(c: &mut Call<'_>) -> Result<Results> {
    let dy = c.tensor("grad_output")?;
    let (x, t) = (c.tensor("self")?, c.tensor("target")?);
    let reduction = c.int("reduction")?;
    let d = c.step(OpKind::Sub, &[], &[x, t])?;
    let scale = if reduction == MEAN {
        2.0 / c.ty(d).numel() as f64
    } else {
        2.0
    };
    let d = c.scalar_step(OpKind::MulScalar, d, Scalar::Float(scale))?;
    one(c.step(OpKind::Mul, &[], &[d, dy])?)
}
