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

/// The loss of log-probabilities, and the number of targets that count, or the sum of their
/// weights.
fn losses(c: &mut Call<'_>, x: Ref) -> Result<Results> {
    let target = c.tensor("target")?;
    let reduction = c.int_or("reduction", MEAN)?;
    let ignore = c.int_or("ignore_index", IGNORED)?;
    let Some(classes) = c.opt_tensor("weight")? else {
        return all(c.nll_loss(x, target, reduction, ignore)?);
    };
    let weights = weights(c, classes, target, ignore)?;
    let rows = c.nll_loss(x, target, NO_REDUCTION, ignore)?[0];
    let (shape, n) = (c.shape_of(target), c.ty(target).numel());
    let rows = c.reshape(rows, &[n])?;
    let rows = c.step(OpKind::Mul, &[], &[rows, weights])?;
    let total = c.reduce(OpKind::Sum, weights, &[0], false)?;
    let loss = match reduction {
        NO_REDUCTION => c.reshape(rows, &shape)?,
        _ => c.reduce(OpKind::Sum, rows, &[0], false)?,
    };
    let loss = match reduction {
        MEAN => c.step(OpKind::Div, &[], &[loss, total])?,
        _ => loss,
    };
    all(vec![loss, total])
}

/// The weights of the classes that are targets, in a row; 0 where a target is ignored.
fn weights(c: &mut Call<'_>, classes: Ref, target: Ref, ignore: i64) -> Result<Ref> {
    let (n, dtype) = (c.ty(target).numel(), c.dtype(classes));
    let target = c.reshape(target, &[n])?;
    let counts = c.scalar_step(OpKind::NeScalar, target, Scalar::Int(ignore))?;
    let first = c.full(Scalar::Int(0), c.dtype(target), &[1])?;
    let at = c.step(OpKind::Where, &[], &[counts, target, first])?;
    let n_classes = c.ty(classes).numel();
    let table = c.reshape(classes, &[n_classes, 1])?;
    let found = c.step(
        OpKind::Embedding,
        &[("padding", Attr::Int(-1))],
        &[table, at],
    )?;
    let found = c.reshape(found, &[n])?;
    let counts = c.cast(counts, dtype)?;
    c.step(OpKind::Mul, &[], &[found, counts])
}

fn nll_loss_backward(c: &mut Call<'_>) -> Result<Results> {
    let dy = c.tensor("grad_output")?;
    let (x, target) = (c.tensor("self")?, c.tensor("target")?);
    let (mut reduction, ignore) = (c.int("reduction")?, c.int("ignore_index")?);
    let (mut dy, weight) = (dy, c.tensor("total_weight")?);
    if let Some(classes) = c.opt_tensor("weight")? {
        let weights = weights(c, classes, target, ignore)?;
        if reduction == MEAN {
            dy = c.step(OpKind::Div, &[], &[dy, weight])?;
        }
        let n = c.ty(target).numel();
        if reduction == NO_REDUCTION {
            dy = c.reshape(dy, &[n])?;
        }
        dy = c.step(OpKind::Mul, &[], &[weights, dy])?;
        reduction = NO_REDUCTION;
    }
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
