//! Normalisations and their derivatives.

use super::Family;
use ir::DType;
use ir::op::OpKind;
use lower::{Call, Error, Ref, Result, Results, Saved, Weights};

pub(super) const OPS: Family = &[
    ("layer_norm", layer_norm),
    ("rms_norm", rms_norm),
    ("group_norm", group_norm),
    ("instance_norm", instance_norm),
    ("_weight_norm", |c| {
        Ok(weight_norm(c)?.into_iter().take(1).collect())
    }),
    ("_weight_norm_interface", weight_norm),
    ("batch_norm", batch_norm_module),
    ("native_layer_norm", layer_norm),
    ("native_layer_norm_backward", layer_norm_backward),
    ("_fused_rms_norm", rms_norm),
    ("_fused_rms_norm_backward", rms_norm_backward),
    ("native_group_norm", group_norm),
    ("native_group_norm_backward", group_norm_backward),
    ("_native_batch_norm_legit_functional", batch_norm_functional),
    ("_batch_norm_with_update_functional", batch_norm_with_update),
    ("_native_batch_norm_legit_no_training", batch_norm_eval),
    ("native_batch_norm_backward", batch_norm_backward),
    ("batch_norm_backward", batch_norm_backward),
];

/// torch's default.
const EPS: f64 = 1e-5;

fn weights(c: &mut Call<'_>) -> Result<Weights> {
    Ok(Weights {
        weight: c.opt_tensor("weight")?,
        bias: c.opt_tensor("bias")?,
    })
}

fn saved(c: &mut Call<'_>, mean: &str, spread: &str) -> Result<Saved> {
    Ok(Saved {
        mean: c.tensor(mean)?,
        spread: c.tensor(spread)?,
    })
}

/// The gradient of the result, and the operand.
fn gradient_and_operand(c: &mut Call<'_>) -> Result<(Ref, Ref)> {
    Ok((c.tensor("grad_out")?, c.tensor("input")?))
}

fn layer_norm(c: &mut Call<'_>) -> Result<Results> {
    let (x, shape) = (c.tensor("input")?, c.shape("normalized_shape")?);
    let (weights, eps) = (weights(c)?, c.float_or("eps", EPS)?);
    c.ignore(&["cudnn_enable"]);
    c.layer_norm(x, &shape, weights, eps)
}

fn layer_norm_backward(c: &mut Call<'_>) -> Result<Results> {
    let operands = gradient_and_operand(c)?;
    let n_dims = c.shape("normalized_shape")?.len();
    let (saved, weight) = (saved(c, "mean", "rstd")?, c.opt_tensor("weight")?);
    c.ignore(&["bias"]);
    let mask = c.bools("output_mask")?;
    c.layer_norm_backward(operands, n_dims, saved, weight, &mask)
}

fn rms_norm(c: &mut Call<'_>) -> Result<Results> {
    let (x, n_dims) = (c.tensor("input")?, c.shape("normalized_shape")?.len());
    let weight = c.opt_tensor("weight")?;
    let eps = match (c.opt_scalar("eps")?, lower::statistics(c.dtype(x))) {
        (Some(eps), _) => eps.float(),
        (None, DType::F64) => f64::EPSILON,
        (None, _) => f32::EPSILON.into(),
    };
    c.rms_norm(x, n_dims, weight, eps)
}

fn rms_norm_backward(c: &mut Call<'_>) -> Result<Results> {
    let operands = gradient_and_operand(c)?;
    let n_dims = c.shape("normalized_shape")?.len();
    let (rstd, weight) = (c.tensor("rstd")?, c.opt_tensor("weight")?);
    let mask = c.bools("output_mask")?;
    c.rms_norm_backward(operands, n_dims, rstd, weight, &mask)
}

/// The number of groups. The other sizes follow from the operand.
fn groups(c: &mut Call<'_>) -> Result<u64> {
    c.ignore(&["N", "C", "HxW", "cudnn_enabled"]);
    let negative = |_| Error::from("the number of groups is negative");
    let groups = match c.int("group") {
        Err(Error::Missing(_)) => c.int("num_groups")?,
        groups => groups?,
    };
    u64::try_from(groups).map_err(negative)
}

fn group_norm(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("input")?;
    let (weights, eps) = (weights(c)?, c.float_or("eps", EPS)?);
    let groups = groups(c)?;
    c.group_norm(x, groups, weights, eps)
}

/// Normalises each channel of each example.
fn instance_norm(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("input")?;
    let (weights, eps) = (weights(c)?, c.float_or("eps", EPS)?);
    c.ignore(&["momentum", "cudnn_enabled"]);
    let mean = c.opt_tensor("running_mean")?;
    let var = c.opt_tensor("running_var")?;
    let results = match (c.bool_or("use_input_stats", true)?, mean, var) {
        (false, Some(mean), Some(spread)) => {
            c.batch_norm_eval(x, weights, Saved { mean, spread }, eps)?
        }
        (true, None, None) => {
            let channels = *c.ty(x).shape().get(1).ok_or("there are no channels")?;
            c.group_norm(x, channels, weights, eps)?
        }
        _ => return Err("updates running statistics of single examples".into()),
    };
    Ok(results.into_iter().take(1).collect())
}

/// `g v / |v|`, and the norms, over all dimensions but one.
fn weight_norm(c: &mut Call<'_>) -> Result<Results> {
    let (v, g) = (c.tensor("v")?, c.tensor("g")?);
    let rank = c.rank(v);
    let kept = match c.int_or("dim", 0)? {
        -1 => None,
        dim => Some(lower::wrap(dim, rank)?),
    };
    let dims: Vec<usize> = (0..rank).filter(|&d| Some(d) != kept).collect();
    let norm = c.norm(v, 2.0, &dims, true)?;
    let scale = c.step(OpKind::Div, &[], &[g, norm])?;
    lower::all(vec![c.step(OpKind::Mul, &[], &[v, scale])?, norm])
}

fn group_norm_backward(c: &mut Call<'_>) -> Result<Results> {
    let operands = gradient_and_operand(c)?;
    let (saved, weight) = (saved(c, "mean", "rstd")?, c.opt_tensor("weight")?);
    let mask = c.bools("output_mask")?;
    let groups = groups(c)?;
    c.group_norm_backward(operands, groups, saved, weight, &mask)
}

fn batch_norm_functional(c: &mut Call<'_>) -> Result<Results> {
    if c.bool_or("training", true)? {
        let results = batch_norm(c)?;
        c.as_wanted(results)
    } else {
        batch_norm_eval(c)
    }
}

fn batch_norm(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("input")?;
    let (weights, running) = (weights(c)?, saved(c, "running_mean", "running_var")?);
    let (momentum, eps) = (c.float("momentum")?, c.float("eps")?);
    c.batch_norm(x, weights, running, momentum, eps)
}

/// This overload has one more result, before the running statistics.
fn batch_norm_with_update(c: &mut Call<'_>) -> Result<Results> {
    let mut results = batch_norm(c)?;
    results.insert(3, c.placeholder(3)?);
    c.as_wanted(results)
}

fn batch_norm_eval(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("input")?;
    let (weights, running) = (weights(c)?, saved(c, "running_mean", "running_var")?);
    let eps = c.float("eps")?;
    c.ignore(&["momentum"]);
    c.batch_norm_eval(x, weights, running, eps)
}

/// `torch.nn.functional.batch_norm`, which writes the running statistics itself.
fn batch_norm_module(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("input")?;
    let weights = weights(c)?;
    let (training, eps) = (c.bool_or("training", false)?, c.float_or("eps", EPS)?);
    c.ignore(&["cudnn_enabled"]);
    let mean = c.opt_tensor("running_mean")?;
    let var = c.opt_tensor("running_var")?;
    if let (false, Some(mean), Some(spread)) = (training, mean, var) {
        c.ignore(&["momentum"]);
        let results = c.batch_norm_eval(x, weights, Saved { mean, spread }, eps)?;
        return Ok(results.into_iter().take(1).collect());
    }
    let momentum = c.float("momentum")?;
    let running = Saved {
        mean: c.per_channel(mean, x, 0)?,
        spread: c.per_channel(var, x, 1)?,
    };
    let mut results = c.batch_norm(x, weights, running, momentum, eps)?;
    let statistics = results.split_off(3);
    if let (true, &[Some(mean), Some(var)]) = (mean.is_some(), &statistics[..]) {
        c.write("running_mean", mean)?;
        c.write("running_var", var)?;
    }
    results.truncate(1);
    c.as_wanted(results)
}

/// A tensor that two overloads name differently.
fn either(c: &mut Call<'_>, name: &str, other: &str) -> Result<Ref> {
    match c.opt_tensor(name)? {
        Some(x) => Ok(x),
        None => c.tensor(other),
    }
}

fn batch_norm_backward(c: &mut Call<'_>) -> Result<Results> {
    let dy = either(c, "grad_out", "grad_output")?;
    let x = c.tensor("input")?;
    let weight = c.opt_tensor("weight")?;
    let weight = c.per_channel(weight, x, 1)?;
    let training = c.bool_or("train", true)? && c.bool_or("update", true)?;
    let eps = c.float("eps")?;
    c.ignore(&["reserve"]);
    let mask = c.bools("output_mask")?;
    if training {
        c.ignore(&["running_mean", "running_var"]);
        let mean = c.tensor("save_mean")?;
        let spread = either(c, "save_invstd", "save_var")?;
        let saved = Saved { mean, spread };
        return c.batch_norm_backward((dy, x), weight, saved, &mask);
    }
    c.ignore(&["save_mean", "save_invstd", "save_var"]);
    let running = saved(c, "running_mean", "running_var")?;
    c.batch_norm_eval_backward((dy, x), weight, running, eps, &mask)
}
