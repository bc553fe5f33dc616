//! Normalisations.

use super::inputs::{Inputs, Row, flag, op};
use crate::BatchNorm;
use ir::Attr;
use ir::op::OpKind;
use lower::{Call, Error, Ref, Result, Results, Saved, Scalar, Weights, ensure, one};

pub(super) const OPS: &[Row] = &[
    op("LayerNormalization", layer_norm),
    op("RMSNormalization", rms_norm),
    op("BatchNormalization", batch_norm),
    op("GroupNormalization", group_norm),
    op("InstanceNormalization", instance_norm),
    op("MeanVarianceNormalization", mean_variance),
    op("LpNormalization", lp_norm),
    op("LRN", local_response),
];

/// The statistics are computed in f32 at least, which is the only `stash_type`.
fn ignore_stash(c: &mut Call<'_>) {
    c.ignore(&["stash_type"]);
}

/// `x` normalised over the dimensions from `axis` on. Weights of another shape are applied after
/// it.
fn layer_norm(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    ignore_stash(c);
    let eps = c.float_or("epsilon", 1e-5)?;
    let x = inputs.at(c, 0)?;
    let axis = c.dim("axis", Some(-1), c.rank(x))?;
    let (shape, dtype) = (c.shape_of(x), c.dtype(x));
    let inner = &shape[axis..];
    let (w, b) = (inputs.opt(c, 1)?, inputs.opt(c, 2)?);
    let fits = |c: &Call<'_>, x: Option<Ref>| x.is_none_or(|x| c.ty(x).shape() == inner);
    let mut results = if fits(c, w) && fits(c, b) {
        c.layer_norm(x, inner, Weights { weight: w, bias: b }, eps)?
    } else {
        let weights = Weights {
            weight: None,
            bias: None,
        };
        let mut results = c.layer_norm(x, inner, weights, eps)?;
        for (op, factor) in [(OpKind::Mul, w), (OpKind::Add, b)] {
            if let (Some(y), Some(factor)) = (results[0], factor) {
                results[0] = Some(c.step(op, &[], &[y, factor])?);
            }
        }
        results
    };
    if let Some(y) = results[0] {
        results[0] = Some(c.cast(y, dtype)?);
    }
    Ok(results)
}

fn rms_norm(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    ignore_stash(c);
    let eps = c.float_or("epsilon", 1e-5)?;
    let x = inputs.at(c, 0)?;
    let axis = c.dim("axis", Some(-1), c.rank(x))?;
    let (n, dtype) = (c.rank(x) - axis, c.dtype(x));
    let w = inputs.opt(c, 1)?;
    let y = c.rms_norm(x, n, w, eps)?[0].ok_or("has no result")?;
    one(c.cast(y, dtype)?)
}

/// In training, the results are y and the new running statistics; else y alone.
fn batch_norm(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (eps, momentum) = (c.float_or("epsilon", 1e-5)?, c.float_or("momentum", 0.9)?);
    let training = flag(c, "training_mode", false)?;
    let x = inputs.at(c, 0)?;
    let weights = Weights {
        weight: inputs.opt(c, 1)?,
        bias: inputs.opt(c, 2)?,
    };
    let running = Saved {
        mean: inputs.at(c, 3)?,
        spread: inputs.at(c, 4)?,
    };
    let dtypes = [c.dtype(x), c.dtype(running.mean), c.dtype(running.spread)];
    if !training && inputs.batch_norm != Some(BatchNorm::Train) {
        ensure(
            inputs.batch_norm.is_some(),
            "normalises with stored statistics, although the step trains: choose --batch-norm \
             train or --batch-norm frozen",
        )?;
        let y = c.batch_norm_eval(x, weights, running, eps)?[0].ok_or("has no result")?;
        return one(c.cast(y, dtypes[0])?);
    }
    let rows = c.ty(x).numel() / c.shape_of(x).get(1).copied().unwrap_or(1).max(1);
    ensure(rows > 1 || !inputs.wants(2), "one element has no variance")?;
    // ONNX's momentum is the share of the old statistics.
    let made = c.batch_norm(x, weights, running, 1.0 - momentum, eps)?;
    let [y, _, _, mean, var] = made[..] else {
        return Err("has other results".into());
    };
    // The file's variance is divided by the number of rows, ours by one less: old m + new (1 - m)
    // (n - 1) / n.
    let var = match var {
        Some(var) if training => {
            let share = (rows as f64 - 1.0) / rows as f64;
            let old = c.cast(running.spread, c.dtype(var))?;
            let old = c.scalar_step(OpKind::MulScalar, old, Scalar::Float(momentum))?;
            let new = c.step(OpKind::Sub, &[], &[var, old])?;
            let new = c.scalar_step(OpKind::MulScalar, new, Scalar::Float(share))?;
            Some(c.step(OpKind::Add, &[], &[old, new])?)
        }
        var => var,
    };
    let mut results = vec![];
    for (result, dtype) in [y, mean, var].into_iter().zip(dtypes) {
        results.push(Some(c.cast(result.ok_or("has no result")?, dtype)?));
    }
    Ok(results)
}

fn group_norm(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    ignore_stash(c);
    let (eps, groups) = (c.float_or("epsilon", 1e-5)?, c.int("num_groups")?);
    let groups = u64::try_from(groups).map_err(|_| Error::from("the groups are negative"))?;
    let x = inputs.at(c, 0)?;
    let channels = *c.ty(x).shape().get(1).ok_or("there are no channels")?;
    let (mut w, mut b) = (inputs.at(c, 1)?, inputs.at(c, 2)?);
    // Before version 21, each group has one weight.
    if inputs.opset < 21 && groups > 0 && channels.is_multiple_of(groups) {
        for factor in [&mut w, &mut b] {
            let wide = c.reshape(*factor, &[groups, 1])?;
            let wide = c.expand(wide, &[groups, channels / groups])?;
            *factor = c.reshape(wide, &[channels])?;
        }
    }
    let weights = Weights {
        weight: Some(w),
        bias: Some(b),
    };
    let y = c.group_norm(x, groups, weights, eps)?[0];
    one(y.ok_or("has no result")?)
}

fn instance_norm(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let eps = c.float_or("epsilon", 1e-5)?;
    let x = inputs.at(c, 0)?;
    let channels = *c.ty(x).shape().get(1).ok_or("there are no channels")?;
    let weights = Weights {
        weight: Some(inputs.at(c, 1)?),
        bias: Some(inputs.at(c, 2)?),
    };
    let y = c.group_norm(x, channels, weights, eps)?[0];
    one(y.ok_or("has no result")?)
}

/// `(x - mean) / std`, over batch and space by default.
fn mean_variance(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let axes = c.opt_ints("axes")?.unwrap_or_else(|| vec![0, 2, 3]);
    let axes: Result<Vec<usize>> = axes.iter().map(|&d| lower::wrap(d, c.rank(x))).collect();
    let axes = axes?;
    let (variance, mean) = c.variance(x, &axes, true, 0.0)?;
    let spread = c.map(OpKind::Sqrt, variance)?;
    let spread = c.scalar_step(OpKind::AddScalar, spread, Scalar::Float(1e-9))?;
    let y = c.step(OpKind::Sub, &[], &[x, mean])?;
    one(c.step(OpKind::Div, &[], &[y, spread])?)
}

fn lp_norm(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let (axis, p) = (c.dim("axis", Some(-1), c.rank(x))?, c.int_or("p", 2)?);
    let norm = c.norm(x, p as f64, &[axis], true)?;
    let y = c.step(OpKind::Div, &[], &[x, norm])?;
    // A row of zeros stays.
    let is_zero = c.scalar_step(OpKind::EqScalar, norm, Scalar::Int(0))?;
    one(c.step(OpKind::Where, &[], &[is_zero, x, y])?)
}

/// `x / (bias + alpha / size * s)^beta`, where s sums the squares of `size` channels around each.
fn local_response(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (alpha, beta) = (c.float_or("alpha", 1e-4)?, c.float_or("beta", 0.75)?);
    let (bias, size) = (c.float_or("bias", 1.0)?, c.int("size")?);
    let x = inputs.at(c, 0)?;
    let shape = c.shape_of(x);
    let channels = *shape.get(1).ok_or("there are no channels")?;
    ensure(
        size > 0 && size as u64 <= channels.saturating_mul(2) + 1,
        "the window does not fit",
    )?;
    let square = c.step(OpKind::Mul, &[], &[x, x])?;
    // Channels become columns of an image, and the window a convolution of ones.
    let inner: u64 = shape[2..].iter().product();
    let rows = c.reshape(square, &[shape[0], channels, inner])?;
    let rows = c.permute(rows, &[0, 2, 1])?;
    let rows = c.reshape(rows, &[shape[0] * inner, 1, channels])?;
    let before = (size - 1) / 2;
    let rows = c.pad(rows, &[before, size - 1 - before], Scalar::Int(0))?;
    let ones = c.full(Scalar::Int(1), c.dtype(x), &[1, 1, size as u64])?;
    let sum = c.step(
        OpKind::Convolution,
        &lower::convolution_attrs(&[1], &[1], &[0], 1),
        &[rows, ones],
    )?;
    let sum = c.reshape(sum, &[shape[0], inner, channels])?;
    let sum = c.permute(sum, &[0, 2, 1])?;
    let sum = c.reshape(sum, &shape)?;
    let sum = c.scalar_step(OpKind::MulScalar, sum, Scalar::Float(alpha / size as f64))?;
    let sum = c.scalar_step(OpKind::AddScalar, sum, Scalar::Float(bias))?;
    let sum = c.step(OpKind::PowScalar, &[("value", Attr::Float(beta))], &[sum])?;
    one(c.step(OpKind::Div, &[], &[x, sum])?)
}
