//! Losses and their derivatives.

use super::Family;
use ir::Attr;
use ir::op::OpKind;
use lower::{Call, Ref, Result, Results, Scalar, attr_ints, count, ensure, one};

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

/// Log-probabilities `[N,C,d..]` as rows `[N d.., C]`.
fn class_rows(c: &mut Call<'_>, x: Ref) -> Result<Ref> {
    let shape = c.shape_of(x);
    match shape.len() {
        0 => Err("there are no classes".into()),
        1 => c.reshape(x, &[1, shape[0]]),
        2 => Ok(x),
        rank => {
            let dims: Vec<usize> = [0].into_iter().chain(2..rank).chain([1]).collect();
            let x = c.permute(x, &dims)?;
            c.reshape(x, &[count(&shape)? / shape[1].max(1), shape[1]])
        }
    }
}

fn nll_loss(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let x = class_rows(c, x)?;
    losses_of_rows(c, x)
}

/// The loss of logits whose targets are classes, not probabilities.
fn cross_entropy(c: &mut Call<'_>) -> Result<Results> {
    let (x, target) = (c.tensor("self")?, c.tensor("target")?);
    ensure(!c.dtype(target).is_float(), "the targets are probabilities")?;
    let smoothing = c.float_or("label_smoothing", 0.0)?;
    ensure(smoothing == 0.0, "smooths the labels")?;
    let x = class_rows(c, x)?;
    let x = c.step(OpKind::LogSoftmax, &[("dim", Attr::Int(1))], &[x])?;
    Ok(losses_of_rows(c, x)?.into_iter().take(1).collect())
}

/// The loss of log-probabilities `[N,C]`, and the number of targets that count.
fn losses_of_rows(c: &mut Call<'_>, x: Ref) -> Result<Results> {
    let target = c.tensor("target")?;
    ensure(c.opt_tensor("weight")?.is_none(), "weighs the classes")?;
    let reduction = c.int_or("reduction", MEAN)?;
    let ignore = c.int_or("ignore_index", IGNORED)?;
    let shape = c.shape_of(target);
    let n = c.ty(target).numel();
    let target = c.reshape(target, &[n])?;
    let attrs = [
        ("ignore", Attr::Int(ignore)),
        ("reduction", Attr::Int(reduction)),
    ];
    let made = c.steps(OpKind::NllLoss, &attrs, &[x, target])?;
    let loss = if reduction == NO_REDUCTION {
        c.reshape(made[0], &shape)?
    } else {
        made[0]
    };
    Ok(vec![Some(loss), Some(made[1])])
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
