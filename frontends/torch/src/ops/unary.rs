//! Functions of one operand, element by element, and their derivatives.

use super::Family;
use ir::op::OpKind;
use ir::{Attr, DType};
use lower::{Call, Operand, Result, Results, Rounding, Scalar, ensure, one};
use std::f64::consts::{LN_2, LN_10};

pub(super) const OPS: Family = &[
    ("abs", |c| function(c, OpKind::Abs)),
    ("acos", acos),
    ("asin", asin),
    ("atan", |c| function(c, OpKind::Atan)),
    ("cos", |c| function(c, OpKind::Cos)),
    ("erf", |c| function(c, OpKind::Erf)),
    ("exp", |c| function(c, OpKind::Exp)),
    ("log", |c| function(c, OpKind::Log)),
    ("neg", |c| function(c, OpKind::Neg)),
    ("reciprocal", |c| function(c, OpKind::Reciprocal)),
    ("relu", |c| function(c, OpKind::Relu)),
    ("rsqrt", |c| function(c, OpKind::Rsqrt)),
    ("sgn", |c| function(c, OpKind::Sign)),
    ("sigmoid", |c| function(c, OpKind::Sigmoid)),
    ("sign", |c| function(c, OpKind::Sign)),
    ("silu", |c| function(c, OpKind::Silu)),
    ("sin", |c| function(c, OpKind::Sin)),
    ("sqrt", |c| function(c, OpKind::Sqrt)),
    ("tanh", |c| function(c, OpKind::Tanh)),
    ("gelu", gelu),
    ("square", square),
    ("exp2", exp2),
    ("log1p", log1p),
    ("expm1", expm1),
    ("log2", |c| log_to(c, LN_2)),
    ("log10", |c| log_to(c, LN_10)),
    ("bitwise_not", bitwise_not),
    ("logical_not", logical_not),
    ("isnan", isnan),
    ("isinf", |c| beside_infinity(c, OpKind::EqScalar)),
    ("isfinite", |c| beside_infinity(c, OpKind::LtScalar)),
    ("floor", |c| rounded(c, Rounding::Floor)),
    ("ceil", |c| rounded(c, Rounding::Ceil)),
    ("trunc", |c| rounded(c, Rounding::Trunc)),
    ("leaky_relu", leaky_relu),
    ("clamp", clamp),
    ("clamp_min", clamp),
    ("clamp_max", clamp),
    ("clamp.Tensor", |c| clamp_by_tensors(c, true, true)),
    ("clamp_min.Tensor", |c| clamp_by_tensors(c, true, false)),
    ("clamp_max.Tensor", |c| clamp_by_tensors(c, false, true)),
    ("hardtanh", hardtanh),
    ("relu6", relu6),
    // Derivatives.
    ("tanh_backward", |c| by_result(c, OpKind::TanhBwd)),
    ("sigmoid_backward", |c| by_result(c, OpKind::SigmoidBwd)),
    ("silu_backward", silu_backward),
    ("gelu_backward", gelu_backward),
    ("threshold_backward", threshold_backward),
    ("leaky_relu_backward", leaky_relu_backward),
    ("hardtanh_backward", hardtanh_backward),
];

/// A function in the table of ops.
fn function(c: &mut Call<'_>, op: OpKind) -> Result<Results> {
    let x = c.tensor("self")?;
    let x = c.cast(x, c.result()?.dtype())?;
    one(c.map(op, x)?)
}

fn log1p(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let x = c.cast(x, c.result()?.dtype())?;
    one(c.log1p(x)?)
}

fn asin(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let x = c.cast(x, c.result()?.dtype())?;
    one(c.asin(x)?)
}

fn acos(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let x = c.cast(x, c.result()?.dtype())?;
    one(c.acos(x)?)
}

fn expm1(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let x = c.cast(x, c.result()?.dtype())?;
    one(c.expm1(x)?)
}

/// The attribute of gelu.
fn approximation(c: &mut Call<'_>) -> Result<(&'static str, Attr)> {
    match c.string_or("approximate", "none")?.as_str() {
        "none" => Ok(("tanh", Attr::Bool(false))),
        "tanh" => Ok(("tanh", Attr::Bool(true))),
        other => Err(format!("no approximation {other}").into()),
    }
}

fn gelu(c: &mut Call<'_>) -> Result<Results> {
    let (x, tanh) = (c.tensor("self")?, approximation(c)?);
    one(c.step(OpKind::Gelu, &[tanh], &[x])?)
}

fn square(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    one(c.step(OpKind::Mul, &[], &[x, x])?)
}

fn exp2(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let x = c.cast(x, c.result()?.dtype())?;
    one(c.exp2(x)?)
}

fn log_to(c: &mut Call<'_>, ln_base: f64) -> Result<Results> {
    let x = c.tensor("self")?;
    let x = c.cast(x, c.result()?.dtype())?;
    one(c.log_to(x, ln_base)?)
}

fn bitwise_not(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let op = if c.dtype(x) == DType::Bool {
        OpKind::LogicalNot
    } else {
        OpKind::BitwiseNot
    };
    one(c.map(op, x)?)
}

fn logical_not(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let x = c.truth(x)?;
    one(c.map(OpKind::LogicalNot, x)?)
}

/// The operand as floats, which may be infinite or NaN.
fn float_operand(c: &mut Call<'_>) -> Result<lower::Ref> {
    let x = c.tensor("self")?;
    if c.dtype(x).is_float() {
        Ok(x)
    } else {
        c.cast(x, DType::F32)
    }
}

fn isnan(c: &mut Call<'_>) -> Result<Results> {
    let x = float_operand(c)?;
    one(c.step(OpKind::Ne, &[], &[x, x])?)
}

fn beside_infinity(c: &mut Call<'_>, op: OpKind) -> Result<Results> {
    let x = float_operand(c)?;
    one(c.beside_infinity(op, x)?)
}

fn rounded(c: &mut Call<'_>, how: Rounding) -> Result<Results> {
    let x = c.tensor("self")?;
    one(c.rounded(x, how)?)
}

fn leaky_relu(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let slope = c.scalar_or("negative_slope", Scalar::Float(0.01))?;
    one(c.leaky(x, x, slope)?)
}

// --- bounds ---

fn between(c: &mut Call<'_>, min: Option<Scalar>, max: Option<Scalar>) -> Result<Results> {
    let x = c.tensor("self")?;
    let dtype = c.result()?.dtype();
    one(c.clamp(x, min, max, dtype)?)
}

fn clamp(c: &mut Call<'_>) -> Result<Results> {
    let (min, max) = (c.opt_scalar("min")?, c.opt_scalar("max")?);
    between(c, min, max)
}

fn hardtanh(c: &mut Call<'_>) -> Result<Results> {
    let min = c.scalar_or("min_val", Scalar::Float(-1.0))?;
    let max = c.scalar_or("max_val", Scalar::Float(1.0))?;
    between(c, Some(min), Some(max))
}

fn relu6(c: &mut Call<'_>) -> Result<Results> {
    between(c, Some(Scalar::Int(0)), Some(Scalar::Int(6)))
}

/// Each bound of an overload is a tensor. Only the overload with both may lack one.
fn clamp_by_tensors(c: &mut Call<'_>, below: bool, above: bool) -> Result<Results> {
    let mut x = c.tensor("self")?;
    let (min, max) = match (below, above) {
        (true, true) => (c.opt_tensor("min")?, c.opt_tensor("max")?),
        (true, false) => (Some(c.tensor("min")?), None),
        _ => (None, Some(c.tensor("max")?)),
    };
    let dtype = c.result()?.dtype();
    for (op, bound) in [(OpKind::Maximum, min), (OpKind::Minimum, max)] {
        if let Some(bound) = bound {
            x = c.arithmetic(op, Operand::Tensor(x), Operand::Tensor(bound), dtype)?;
        }
    }
    one(x)
}

// --- derivatives ---

/// A derivative computed from the function's result.
fn by_result(c: &mut Call<'_>, op: OpKind) -> Result<Results> {
    let (dy, y) = (c.tensor("grad_output")?, c.tensor("output")?);
    one(c.step(op, &[], &[dy, y])?)
}

fn silu_backward(c: &mut Call<'_>) -> Result<Results> {
    let (dy, x) = (c.tensor("grad_output")?, c.tensor("self")?);
    one(c.step(OpKind::SiluBwd, &[], &[dy, x])?)
}

fn gelu_backward(c: &mut Call<'_>) -> Result<Results> {
    let (dy, x) = (c.tensor("grad_output")?, c.tensor("self")?);
    let tanh = approximation(c)?;
    one(c.step(OpKind::GeluBwd, &[tanh], &[dy, x])?)
}

fn threshold_backward(c: &mut Call<'_>) -> Result<Results> {
    let (dy, x) = (c.tensor("grad_output")?, c.tensor("self")?);
    let value = c.scalar("threshold")?.attr(c.dtype(x))?;
    one(c.step(OpKind::ThresholdBwd, &[("value", value)], &[dy, x])?)
}

fn leaky_relu_backward(c: &mut Call<'_>) -> Result<Results> {
    let (dy, x) = (c.tensor("grad_output")?, c.tensor("self")?);
    let slope = c.scalar("negative_slope")?;
    // The result has the operand's sign, unless the slope is negative.
    let of_result = c.bool_or("self_is_result", false)?;
    ensure(
        !of_result || slope.float() >= 0.0,
        "a negative slope hides the operand's sign",
    )?;
    one(c.leaky(dy, x, slope)?)
}

fn hardtanh_backward(c: &mut Call<'_>) -> Result<Results> {
    let (dy, x) = (c.tensor("grad_output")?, c.tensor("self")?);
    let (min, max) = (c.scalar("min_val")?, c.scalar("max_val")?);
    let above = c.scalar_step(OpKind::GtScalar, x, min)?;
    let below = c.scalar_step(OpKind::LtScalar, x, max)?;
    let inside = c.step(OpKind::LogicalAnd, &[], &[above, below])?;
    one(c.masked(inside, dy)?)
}
