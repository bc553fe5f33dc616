//! Functions of one operand, element by element, and their derivatives.

use super::Family;
use ir::op::OpKind;
use ir::{Attr, DType};
use lower::{Call, Operand, Ref, Result, Results, Rounding, Scalar, ensure, one};
use std::f64::consts::{LN_2, LN_10};

pub(super) const OPS: Family = &[
    ("abs", |c| function(c, OpKind::Abs)),
    ("acos", |c| composed(c, Call::acos)),
    ("acosh", |c| composed(c, Call::acosh)),
    ("asin", |c| composed(c, Call::asin)),
    ("asinh", |c| composed(c, Call::asinh)),
    ("atan", |c| function(c, OpKind::Atan)),
    ("atanh", |c| composed(c, Call::atanh)),
    ("cos", |c| function(c, OpKind::Cos)),
    ("cosh", |c| composed(c, Call::cosh)),
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
    ("sinh", |c| composed(c, Call::sinh)),
    ("sqrt", |c| function(c, OpKind::Sqrt)),
    ("tan", |c| composed(c, Call::tan)),
    ("tanh", |c| function(c, OpKind::Tanh)),
    ("gelu", gelu),
    ("square", square),
    ("exp2", |c| composed(c, Call::exp2)),
    ("log1p", |c| composed(c, Call::log1p)),
    ("expm1", |c| composed(c, Call::expm1)),
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
    ("round", rounded_to_even),
    ("clamp", clamp),
    ("clip", clamp),
    ("clamp_min", clamp),
    ("clamp_max", clamp),
    ("clip.Tensor", |c| clamp_by_tensors(c, true, true)),
    ("clamp.Tensor", |c| clamp_by_tensors(c, true, true)),
    ("clamp_min.Tensor", |c| clamp_by_tensors(c, true, false)),
    ("clamp_max.Tensor", |c| clamp_by_tensors(c, false, true)),
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

/// A function that is a composition of ops.
pub(super) fn composed<'a>(
    c: &mut Call<'a>,
    function: fn(&mut Call<'a>, Ref) -> Result<Ref>,
) -> Result<Results> {
    let x = c.tensor("self")?;
    let x = c.cast(x, c.result()?.dtype())?;
    one(function(c, x)?)
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
fn float_operand(c: &mut Call<'_>) -> Result<Ref> {
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

fn rounded_to_even(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let decimals = c.int_or("decimals", 0)?;
    ensure(decimals == 0, "rounds to decimals")?;
    one(c.rounded_to_even(x)?)
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
    let operands = derived(c, "output")?;
    one(c.step(op, &[], &operands)?)
}

/// The gradient of a function's result and the function's own operand or result, in the shape of
/// the derivative. Derivatives of derivatives may have fewer elements of one of them.
fn derived(c: &mut Call<'_>, of: &str) -> Result<[Ref; 2]> {
    let shape = c.result()?.shape().to_vec();
    let (dy, x) = (c.tensor("grad_output")?, c.tensor(of)?);
    Ok([c.expand(dy, &shape)?, c.expand(x, &shape)?])
}

fn silu_backward(c: &mut Call<'_>) -> Result<Results> {
    let operands = derived(c, "self")?;
    one(c.step(OpKind::SiluBwd, &[], &operands)?)
}

fn gelu_backward(c: &mut Call<'_>) -> Result<Results> {
    let (operands, tanh) = (derived(c, "self")?, approximation(c)?);
    one(c.step(OpKind::GeluBwd, &[tanh], &operands)?)
}

fn threshold_backward(c: &mut Call<'_>) -> Result<Results> {
    let operands = derived(c, "self")?;
    let value = c.scalar("threshold")?.attr(c.dtype(operands[1]))?;
    one(c.step(OpKind::ThresholdBwd, &[("value", value)], &operands)?)
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
