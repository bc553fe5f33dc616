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
    op("PRelu", |c, x| {
        let (x, slope) = (x.at(c, 0)?, x.at(c, 1)?);
        one(c.parametric_leaky(x, slope)?)
    }),
    op("ThresholdedRelu", |c, x| {
        let alpha = c.float_or("alpha", 1.0)?;
        let x = x.at(c, 0)?;
        one(c.above(x, float(alpha), Scalar::Int(0))?)
    }),
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
    op("Softplus", |c, x| composed(c, x, Call::softplus)),
    op("Softsign", |c, x| composed(c, x, Call::softsign)),
    op("HardSigmoid", |c, x| {
        let (alpha, beta) = (c.float_or("alpha", 0.2)?, c.float_or("beta", 0.5)?);
        let x = x.at(c, 0)?;
        one(c.hard_sigmoid(x, alpha, beta)?)
    }),
    op("HardSwish", |c, x| composed(c, x, Call::hard_swish)),
    op("Mish", |c, x| composed(c, x, Call::mish)),
    op("Swish", |c, x| {
        let alpha = c.float_or("alpha", 1.0)?;
        let x = x.at(c, 0)?;
        one(c.swish(x, alpha)?)
    }),
    op("SwiGLU", swiglu),
    op("Shrink", |c, x| {
        let (bias, lambda) = (c.float_or("bias", 0.0)?, c.float_or("lambd", 0.5)?);
        let x = x.at(c, 0)?;
        one(c.shrink(x, bias, lambda)?)
    }),
    op("Sinh", |c, x| composed(c, x, Call::sinh)),
    op("Cosh", |c, x| composed(c, x, Call::cosh)),
    op("Tan", |c, x| composed(c, x, Call::tan)),
    op("Atan", |c, x| function(c, x, OpKind::Atan)),
    op("Asin", |c, x| composed(c, x, Call::asin)),
    op("Acos", |c, x| composed(c, x, Call::acos)),
    op("Asinh", |c, x| composed(c, x, Call::asinh)),
    op("Acosh", |c, x| composed(c, x, Call::acosh)),
    op("Atanh", |c, x| composed(c, x, Call::atanh)),
];

fn function(c: &mut Call<'_>, inputs: &Inputs<'_>, op: OpKind) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    one(c.map(op, x)?)
}

/// A function that is a composition of ops.
fn composed<'a>(
    c: &mut Call<'a>,
    inputs: &Inputs<'_>,
    function: fn(&mut Call<'a>, Ref) -> Result<Ref>,
) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    one(function(c, x)?)
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

/// `high x` for positive x, else `low (exp(x / scale) - 1)`.
fn exponential(c: &mut Call<'_>, inputs: &Inputs<'_>, factors: [f64; 3]) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    one(c.exponential_unit(x, factors)?)
}

/// The swish of the gate, times the value.
fn swiglu(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let alpha = c.float_or("alpha", 1.0)?;
    let (gate, value) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    let gate = c.swish(gate, alpha)?;
    one(c.step(OpKind::Mul, &[], &[gate, value])?)
}
