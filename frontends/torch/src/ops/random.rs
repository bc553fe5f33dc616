//! Random numbers and dropout.

use super::Family;
use ir::op::OpKind;
use ir::{Attr, DType};
use lower::{Call, Operand, Ref, Result, Results, Scalar, all, one};

pub(super) const OPS: Family = &[
    ("rand", |c| plain(c, OpKind::Rand)),
    ("rand_like", |c| plain(c, OpKind::Rand)),
    ("randn", |c| plain(c, OpKind::Randn)),
    ("randn_like", |c| plain(c, OpKind::Randn)),
    ("uniform", uniform),
    ("normal_functional", normal),
    ("exponential", exponential),
    ("randint", integers),
    ("randint_like", integers),
    ("bernoulli", |c| bernoulli(c, None)),
    ("bernoulli.p", |c| {
        let p = Operand::Scalar(c.scalar("p")?);
        bernoulli(c, Some(p))
    }),
    ("bernoulli.Tensor", |c| {
        let p = Operand::Tensor(c.tensor("p")?);
        bernoulli(c, Some(p))
    }),
    ("native_dropout", native_dropout),
    ("dropout", |c| dropout(c, "input")),
    // The operator that writes has another name for its operand.
    ("dropout_", |c| {
        let y = dropout(c, "self")?;
        if let Some(y) = y[0] {
            c.write("self", y)?;
        }
        Ok(y)
    }),
    ("native_dropout_backward", dropout_backward),
    ("feature_dropout", |c| whole_dropout(c, true, false)),
    ("alpha_dropout", |c| whole_dropout(c, false, true)),
    ("feature_alpha_dropout", |c| whole_dropout(c, true, true)),
    ("normal.Tensor_float", |c| {
        let (mean, std) = (c.tensor("mean")?, c.scalar_or("std", Scalar::Int(1))?);
        around(c, Operand::Tensor(mean), Operand::Scalar(std))
    }),
    ("normal.float_Tensor", |c| {
        let (mean, std) = (c.scalar_or("mean", Scalar::Int(0))?, c.tensor("std")?);
        around(c, Operand::Scalar(mean), Operand::Tensor(std))
    }),
    ("normal.Tensor_Tensor", |c| {
        let (mean, std) = (c.tensor("mean")?, c.tensor("std")?);
        around(c, Operand::Tensor(mean), Operand::Tensor(std))
    }),
    ("randperm", randperm),
];

/// The type of the result; other arguments that give it are only checked.
fn result(c: &mut Call<'_>) -> Result<(DType, Vec<u64>)> {
    c.opt_dtype("dtype")?;
    c.ignore(&["self", "size"]);
    let ty = c.result()?;
    Ok((ty.dtype(), ty.shape().to_vec()))
}

fn plain(c: &mut Call<'_>, op: OpKind) -> Result<Results> {
    let (dtype, shape) = result(c)?;
    one(c.random(op, dtype, &shape)?)
}

fn uniform(c: &mut Call<'_>) -> Result<Results> {
    let (dtype, shape) = result(c)?;
    let (low, high) = (c.float_or("from", 0.0)?, c.float_or("to", 1.0)?);
    one(c.random_between(OpKind::Rand, dtype, &shape, (low, high - low))?)
}

fn normal(c: &mut Call<'_>) -> Result<Results> {
    let (dtype, shape) = result(c)?;
    let (mean, std) = (c.float_or("mean", 0.0)?, c.float_or("std", 1.0)?);
    one(c.random_between(OpKind::Randn, dtype, &shape, (mean, std))?)
}

fn exponential(c: &mut Call<'_>) -> Result<Results> {
    let (dtype, shape) = result(c)?;
    let lambda = c.float_or("lambd", 1.0)?;
    one(c.exponential(dtype, &shape, lambda)?)
}

fn integers(c: &mut Call<'_>) -> Result<Results> {
    let (low, high) = (c.int_or("low", 0)?, c.int("high")?);
    let (dtype, shape) = result(c)?;
    one(c.random_integers(dtype, &shape, low, high)?)
}

/// True with the probability `p`, or with the operand's probabilities.
fn bernoulli(c: &mut Call<'_>, p: Option<Operand>) -> Result<Results> {
    let x = c.tensor("self")?;
    let dtype = c.result()?.dtype();
    let shape = c.shape_of(x);
    let precise = lower::statistics(dtype);
    let u = c.random(OpKind::Rand, precise, &shape)?;
    let hit = match p.unwrap_or(Operand::Tensor(x)) {
        Operand::Scalar(p) => c.scalar_step(OpKind::LtScalar, u, p)?,
        Operand::Tensor(p) => {
            let p = c.cast(p, precise)?;
            c.step(OpKind::Lt, &[], &[u, p])?
        }
    };
    one(c.cast(hit, dtype)?)
}

// --- dropout ---

fn dropout_steps(c: &mut Call<'_>, x: Ref, p: f64) -> Result<Vec<Ref>> {
    let attrs = [("p", Attr::Float(p)), ("stream", c.stream())];
    c.steps(OpKind::Dropout, &attrs, &[x, Ref::Rng])
}

fn native_dropout(c: &mut Call<'_>) -> Result<Results> {
    let (x, p, train) = (c.tensor("input")?, c.float("p")?, c.bool_or("train", true)?);
    if train {
        return all(dropout_steps(c, x, p)?);
    }
    let shape = c.shape_of(x);
    let mask = c.full(Scalar::Bool(true), DType::Bool, &shape)?;
    all(vec![x, mask])
}

fn dropout(c: &mut Call<'_>, operand: &str) -> Result<Results> {
    let (x, p) = (c.tensor(operand)?, c.float("p")?);
    if c.bool_or("train", true)? {
        one(dropout_steps(c, x, p)?[0])
    } else {
        one(x)
    }
}

fn dropout_backward(c: &mut Call<'_>) -> Result<Results> {
    let (dy, mask) = (c.tensor("grad_output")?, c.tensor("mask")?);
    let scale = c.float("scale")?;
    let attrs = [("scale", Attr::Float(scale))];
    one(c.step(OpKind::DropoutBwd, &attrs, &[dy, mask])?)
}

/// Dropout of whole channels, or dropout that keeps mean and variance of what SELU gives, or both.
fn whole_dropout(c: &mut Call<'_>, channels: bool, alpha: bool) -> Result<Results> {
    let (x, p) = (c.tensor("input")?, c.float("p")?);
    if !c.bool_or("train", true)? || p == 0.0 {
        return one(x);
    }
    lower::ensure((0.0..1.0).contains(&p), "drops everything")?;
    let dtype = c.dtype(x);
    let mut shape = c.shape_of(x);
    if channels {
        lower::ensure(shape.len() >= 2, "has no channels")?;
        shape[2..].fill(1);
    }
    let u = c.random(OpKind::Rand, lower::statistics(dtype), &shape)?;
    let kept = c.scalar_step(OpKind::GeScalar, u, Scalar::Float(p))?;
    if !alpha {
        let kept = c.cast(kept, dtype)?;
        let kept = c.scalar_step(OpKind::MulScalar, kept, Scalar::Float(1.0 / (1.0 - p)))?;
        return one(c.step(OpKind::Mul, &[], &[x, kept])?);
    }
    // The value that SELU goes to, with a scale and a shift (Klambauer et al., 2017, section 3).
    let least = 1.758_099_340_847_376_6;
    let scale = 1.0 / ((least * least * p + 1.0) * (1.0 - p)).sqrt();
    let low = c.full(Scalar::Float(-least), dtype, &[])?;
    let y = c.step(OpKind::Where, &[], &[kept, x, low])?;
    let y = c.scalar_step(OpKind::MulScalar, y, Scalar::Float(scale))?;
    let shift = Scalar::Float(least * scale * p);
    one(c.scalar_step(OpKind::AddScalar, y, shift)?)
}

/// Normally distributed numbers around `mean`. torch passes no gradient to it.
fn around(c: &mut Call<'_>, mean: Operand, std: Operand) -> Result<Results> {
    let (dtype, shape) = result(c)?;
    let x = c.random(OpKind::Randn, dtype, &shape)?;
    let x = c.arithmetic(OpKind::Mul, Operand::Tensor(x), std, dtype)?;
    let x = c.arithmetic(OpKind::Add, Operand::Tensor(x), mean, dtype)?;
    one(c.map(OpKind::Detach, x)?)
}

/// The numbers below `n` in a random order: that of as many random numbers.
fn randperm(c: &mut Call<'_>) -> Result<Results> {
    let n = c.int("n")?;
    let (dtype, shape) = result(c)?;
    let x = c.random(OpKind::Rand, DType::F64, &shape)?;
    let order = c.topk(x, 0, n, false)?[1];
    one(c.cast(order, dtype)?)
}
