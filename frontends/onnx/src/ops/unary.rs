//! Functions of one operand, element by element.

use super::inputs::{Inputs, Row, flag, op};
use crate::tensor;
use ir::op::OpKind;
use ir::{Attr, DType};
use lower::{Call, Ref, Result, Results, Rounding, Scalar, one};

pub(super) const OPS: &[Row] = &[
    op("Abs", |c, x| function(c, x, OpKind::Abs)),
    op("Neg", |c, x| function(c, x, OpKind::Neg)),
    op("Sign", |c, x| function(c, x, OpKind::Sign)),
    op("Exp", |c, x| function(c, x, OpKind::Exp)),
    op("Log", |c, x| function(c, x, OpKind::Log)),
    op("Sqrt", |c, x| function(c, x, OpKind::Sqrt)),
    op("Reciprocal", |c, x| function(c, x, OpKind::Reciprocal)),
    op("Tanh", |c, x| function(c, x, OpKind::Tanh)),
    op("Sigmoid", |c, x| function(c, x, OpKind::Sigmoid)),
    op("Sin", |c, x| function(c, x, OpKind::Sin)),
    op("Cos", |c, x| function(c, x, OpKind::Cos)),
    op("Erf", |c, x| function(c, x, OpKind::Erf)),
    op("Relu", |c, x| function(c, x, OpKind::Relu)),
    op("Not", |c, x| function(c, x, OpKind::LogicalNot)),
    op("BitwiseNot", |c, x| function(c, x, OpKind::BitwiseNot)),
    op("Identity", |c, x| one(x.at(c, 0)?)),
    op("Gelu", gelu),
    op("Cast", cast),
    op("CastLike", cast_like),
    op("Clip", clip),
    op("IsNaN", is_nan),
    op("IsInf", is_infinite),
    op("Floor", |c, x| rounded(c, x, Rounding::Floor)),
    op("Ceil", |c, x| rounded(c, x, Rounding::Ceil)),
    op("Round", round),
    op("LeakyRelu", leaky_relu),
    op("PRelu", prelu),
    op("ThresholdedRelu", thresholded_relu),
    op("Elu", |c, x| {
        let alpha = c.float_or("alpha", 1.0)?;
        exponential(c, x, [1.0, alpha, 1.0])
    }),
    op("Selu", |c, x| {
        let alpha = c.float_or("alpha", 1.673_263_192_176_818_8)?;
        let gamma = c.float_or("gamma", 1.050_701_022_148_132_3)?;
        exponential(c, x, [gamma, alpha * gamma, 1.0])
    }),
    op("Celu", |c, x| {
        let alpha = c.float_or("alpha", 1.0)?;
        exponential(c, x, [1.0, alpha, alpha])
    }),
    op("Softplus", |c, x| {
        let x = x.at(c, 0)?;
        one(softplus(c, x)?)
    }),
    op("Softsign", softsign),
    op("HardSigmoid", |c, x| {
        let (alpha, beta) = (c.float_or("alpha", 0.2)?, c.float_or("beta", 0.5)?);
        let x = x.at(c, 0)?;
        one(hard_sigmoid(c, x, alpha, beta)?)
    }),
    op("HardSwish", |c, x| {
        let x = x.at(c, 0)?;
        let gate = hard_sigmoid(c, x, 1.0 / 6.0, 0.5)?;
        one(c.step(OpKind::Mul, &[], &[x, gate])?)
    }),
    op("Mish", mish),
    op("Swish", swish),
    op("SwiGLU", swiglu),
    op("Shrink", shrink),
    op("Sinh", |c, x| hyperbolic(c, x, OpKind::Sub)),
    op("Cosh", |c, x| hyperbolic(c, x, OpKind::Add)),
    op("Tan", tan),
    op("Atan", |c, x| function(c, x, OpKind::Atan)),
    op("Asin", |c, x| {
        let x = x.at(c, 0)?;
        one(c.asin(x)?)
    }),
    op("Acos", |c, x| {
        let x = x.at(c, 0)?;
        one(c.acos(x)?)
    }),
    op("Asinh", asinh),
    op("Acosh", acosh),
    op("Atanh", atanh),
];

fn function(c: &mut Call<'_>, inputs: &Inputs<'_>, op: OpKind) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    one(c.map(op, x)?)
}

fn float(x: f64) -> Scalar {
    Scalar::Float(x)
}

fn gelu(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let tanh = match c.string_or("approximate", "none")?.as_str() {
        "none" => false,
        "tanh" => true,
        other => return Err(format!("no approximation {other}").into()),
    };
    let x = inputs.at(c, 0)?;
    one(c.step(OpKind::Gelu, &[("tanh", Attr::Bool(tanh))], &[x])?)
}

// --- types and bounds ---

fn cast(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    // These concern types of eight bits.
    c.ignore(&["saturate", "round_mode"]);
    let dtype = tensor::dtype(c.int("to")?)?;
    converted(c, inputs, dtype)
}

fn cast_like(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    c.ignore(&["saturate", "round_mode"]);
    let like = inputs.get(1).ok_or("input 1 is missing")?;
    converted(c, inputs, like.ty.dtype())
}

fn converted(c: &mut Call<'_>, inputs: &Inputs<'_>, dtype: DType) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    // Any number but 0 is true; a cast keeps only its integer part.
    if dtype == DType::Bool {
        return one(c.truth(x)?);
    }
    one(c.cast(x, dtype)?)
}

fn clip(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let mut x = inputs.at(c, 0)?;
    let dtype = c.dtype(x);
    let is_known = |i: usize| inputs.get(i).is_none_or(|bound| bound.known.is_some());
    if is_known(1) && is_known(2) {
        let (min, max) = (inputs.opt_number(1)?, inputs.opt_number(2)?);
        return match (min, max) {
            (None, None) => one(x),
            // The upper bound wins.
            (Some(low), Some(high)) if low.float() > high.float() => {
                let shape = c.shape_of(x);
                one(c.full(high, dtype, &shape)?)
            }
            _ => one(c.clamp(x, min, max, dtype)?),
        };
    }
    for (op, i) in [(OpKind::Maximum, 1), (OpKind::Minimum, 2)] {
        if let Some(bound) = inputs.opt(c, i)? {
            x = c.step(op, &[], &[x, bound])?;
        }
    }
    one(x)
}

fn is_nan(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    one(c.step(OpKind::Ne, &[], &[x, x])?)
}

fn is_infinite(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (below, above) = (
        flag(c, "detect_negative", true)?,
        flag(c, "detect_positive", true)?,
    );
    let x = inputs.at(c, 0)?;
    one(match (below, above) {
        (true, true) => c.beside_infinity(OpKind::EqScalar, x)?,
        (true, false) => c.scalar_step(OpKind::EqScalar, x, float(f64::NEG_INFINITY))?,
        (false, true) => c.scalar_step(OpKind::EqScalar, x, float(f64::INFINITY))?,
        (false, false) => {
            let shape = c.shape_of(x);
            c.full(Scalar::Bool(false), DType::Bool, &shape)?
        }
    })
}

fn rounded(c: &mut Call<'_>, inputs: &Inputs<'_>, how: Rounding) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    one(c.rounded(x, how)?)
}

fn round(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    one(c.rounded_to_even(x)?)
}

// --- rectifiers ---

fn leaky_relu(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let slope = c.float_or("alpha", 0.01)?;
    let x = inputs.at(c, 0)?;
    one(c.leaky(x, x, float(slope))?)
}

fn prelu(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (x, slope) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    let low = c.step(OpKind::Mul, &[], &[x, slope])?;
    let negative = c.scalar_step(OpKind::LtScalar, x, Scalar::Int(0))?;
    one(c.step(OpKind::Where, &[], &[negative, low, x])?)
}

fn thresholded_relu(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let alpha = c.float_or("alpha", 1.0)?;
    let x = inputs.at(c, 0)?;
    let kept = c.scalar_step(OpKind::GtScalar, x, float(alpha))?;
    one(c.masked(kept, x)?)
}

/// `high x` for positive x, else `low (exp(x / scale) - 1)`.
fn exponential(
    c: &mut Call<'_>,
    inputs: &Inputs<'_>,
    [high, low, scale]: [f64; 3],
) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let times = |c: &mut Call<'_>, x: Ref, factor: f64| match factor {
        1.0 => Ok(x),
        _ => c.scalar_step(OpKind::MulScalar, x, float(factor)),
    };
    // The exponential of a large number would be infinite, and so would be its gradient times 0.
    let below = c.clamp(x, None, Some(Scalar::Int(0)), c.dtype(x))?;
    let below = if scale == 1.0 {
        below
    } else {
        c.scalar_step(OpKind::DivScalar, below, float(scale))?
    };
    let below = c.expm1(below)?;
    let below = times(c, below, low)?;
    let above = times(c, x, high)?;
    let positive = c.scalar_step(OpKind::GtScalar, x, Scalar::Int(0))?;
    one(c.step(OpKind::Where, &[], &[positive, above, below])?)
}

/// `log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|))`
fn softplus(c: &mut Call<'_>, x: Ref) -> Result<Ref> {
    let size = c.map(OpKind::Abs, x)?;
    let small = c.map(OpKind::Neg, size)?;
    let small = c.map(OpKind::Exp, small)?;
    let small = c.log1p(small)?;
    // Of two equal numbers each has half of the derivative: at 0 it is that of a sigmoid.
    let zero = c.full(Scalar::Int(0), c.dtype(x), &[])?;
    let large = c.step(OpKind::Maximum, &[], &[x, zero])?;
    c.step(OpKind::Add, &[], &[large, small])
}

fn softsign(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let size = c.map(OpKind::Abs, x)?;
    let size = c.scalar_step(OpKind::AddScalar, size, Scalar::Int(1))?;
    one(c.step(OpKind::Div, &[], &[x, size])?)
}

pub(super) fn hard_sigmoid(c: &mut Call<'_>, x: Ref, alpha: f64, beta: f64) -> Result<Ref> {
    let y = c.scalar_step(OpKind::MulScalar, x, float(alpha))?;
    let y = c.scalar_step(OpKind::AddScalar, y, float(beta))?;
    let dtype = c.dtype(x);
    c.clamp(y, Some(Scalar::Int(0)), Some(Scalar::Int(1)), dtype)
}

fn mish(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let y = softplus(c, x)?;
    let y = c.map(OpKind::Tanh, y)?;
    one(c.step(OpKind::Mul, &[], &[x, y])?)
}

/// `x sigmoid(alpha x)`
fn swished(c: &mut Call<'_>, x: Ref, alpha: f64) -> Result<Ref> {
    if alpha == 1.0 {
        return c.map(OpKind::Silu, x);
    }
    let y = c.scalar_step(OpKind::MulScalar, x, float(alpha))?;
    let y = c.map(OpKind::Sigmoid, y)?;
    c.step(OpKind::Mul, &[], &[x, y])
}

fn swish(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let alpha = c.float_or("alpha", 1.0)?;
    let x = inputs.at(c, 0)?;
    one(swished(c, x, alpha)?)
}

/// The swish of the gate, times the value.
fn swiglu(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let alpha = c.float_or("alpha", 1.0)?;
    let (gate, value) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    let gate = swished(c, gate, alpha)?;
    one(c.step(OpKind::Mul, &[], &[gate, value])?)
}

fn shrink(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (bias, lambda) = (c.float_or("bias", 0.0)?, c.float_or("lambd", 0.5)?);
    let x = inputs.at(c, 0)?;
    let above = c.scalar_step(OpKind::GtScalar, x, float(lambda))?;
    let below = c.scalar_step(OpKind::LtScalar, x, float(-lambda))?;
    let less = c.scalar_step(OpKind::AddScalar, x, float(-bias))?;
    let more = c.scalar_step(OpKind::AddScalar, x, float(bias))?;
    let less = c.masked(above, less)?;
    one(c.step(OpKind::Where, &[], &[below, more, less])?)
}

// --- hyperbolic and trigonometric functions ---

/// `(exp(x) op exp(-x)) / 2`
fn hyperbolic(c: &mut Call<'_>, inputs: &Inputs<'_>, op: OpKind) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let up = c.map(OpKind::Exp, x)?;
    let down = c.map(OpKind::Neg, x)?;
    let down = c.map(OpKind::Exp, down)?;
    let y = c.step(op, &[], &[up, down])?;
    one(c.scalar_step(OpKind::MulScalar, y, float(0.5))?)
}

fn tan(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let (sin, cos) = (c.map(OpKind::Sin, x)?, c.map(OpKind::Cos, x)?);
    one(c.step(OpKind::Div, &[], &[sin, cos])?)
}

/// `sign(x) log(|x| + sqrt(x^2 + 1))`
fn asinh(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let size = c.map(OpKind::Abs, x)?;
    let y = c.step(OpKind::Mul, &[], &[x, x])?;
    let y = c.scalar_step(OpKind::AddScalar, y, Scalar::Int(1))?;
    let y = c.map(OpKind::Sqrt, y)?;
    let y = c.step(OpKind::Add, &[], &[size, y])?;
    let y = c.map(OpKind::Log, y)?;
    let sign = c.map(OpKind::Sign, x)?;
    one(c.step(OpKind::Mul, &[], &[sign, y])?)
}

/// `log(x + sqrt(x^2 - 1))`
fn acosh(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let y = c.step(OpKind::Mul, &[], &[x, x])?;
    let y = c.scalar_step(OpKind::AddScalar, y, Scalar::Int(-1))?;
    let y = c.map(OpKind::Sqrt, y)?;
    let y = c.step(OpKind::Add, &[], &[x, y])?;
    one(c.map(OpKind::Log, y)?)
}

/// `log((1 + x) / (1 - x)) / 2`
fn atanh(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let up = c.scalar_step(OpKind::AddScalar, x, Scalar::Int(1))?;
    let down = c.scalar_step(OpKind::RsubScalar, x, Scalar::Int(1))?;
    let y = c.step(OpKind::Div, &[], &[up, down])?;
    let y = c.map(OpKind::Log, y)?;
    one(c.scalar_step(OpKind::MulScalar, y, float(0.5))?)
}
