//! Losses.

use super::inputs::{Inputs, Row, op};
use ir::op::OpKind;
use ir::op::attrs::NllLoss;
use ir::{Attr, DType};
use lower::{Call, Ref, Result, Results, Scalar, ensure, one};

pub(super) const OPS: &[Row] = &[
    op("NegativeLogLikelihoodLoss", |c, inputs| {
        let x = inputs.at(c, 0)?;
        one(nll_loss(c, inputs, x)?)
    }),
    op("SoftmaxCrossEntropyLoss", cross_entropy),
];

/// A class that no label has: torch's default.
const NO_CLASS: i64 = -100;

fn cross_entropy(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    ensure(c.rank(x) >= 2, "there are no classes")?;
    let log = c.step(OpKind::LogSoftmax, &[("dim", Attr::Int(1))], &[x])?;
    let loss = nll_loss(c, inputs, log)?;
    Ok(vec![Some(loss), Some(log)])
}

/// The loss of labels `[N,d..]` with log-probabilities `x[N,C,d..]`.
fn nll_loss(c: &mut Call<'_>, inputs: &Inputs<'_>, x: Ref) -> Result<Ref> {
    let ignore = c.int_or("ignore_index", NO_CLASS)?;
    let reduction = match c.string_or("reduction", "mean")?.as_str() {
        "none" => NllLoss::NONE,
        "mean" => NllLoss::MEAN,
        "sum" => NllLoss::SUM,
        other => return Err(format!("no reduction {other}").into()),
    };
    let target = inputs.at(c, 1)?;
    let Some(weight) = inputs.opt(c, 2)? else {
        return Ok(c.nll_loss(x, target, reduction, ignore)?[0]);
    };

    // Each label has the weight of its class; labels that do not count have none.
    let shape = c.shape_of(target);
    let losses = c.nll_loss(x, target, NllLoss::NONE, ignore)?[0];
    let counts = c.scalar_step(OpKind::NeScalar, target, Scalar::Int(ignore))?;
    let class = c.cast(target, DType::I64)?;
    let class = c.masked(counts, class)?;
    let n = c.ty(class).numel();
    let class = c.reshape(class, &[n])?;
    let weights = c.step(OpKind::Index, &[], &[weight, class])?;
    let weights = c.reshape(weights, &shape)?;
    let weights = c.masked(counts, weights)?;
    let losses = c.step(OpKind::Mul, &[], &[losses, weights])?;
    let dims: Vec<usize> = (0..shape.len()).collect();
    if reduction == NllLoss::NONE {
        return Ok(losses);
    }
    let sum = c.reduce(OpKind::Sum, losses, &dims, false)?;
    if reduction == NllLoss::SUM {
        return Ok(sum);
    }
    let whole = c.reduce(OpKind::Sum, weights, &dims, false)?;
    c.step(OpKind::Div, &[], &[sum, whole])
}
