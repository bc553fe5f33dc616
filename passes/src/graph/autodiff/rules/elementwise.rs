//! Functions of single elements: of one tensor, of a tensor and a number, of two tensors.

use super::{Call, Fault, Given, only};
use crate::graph::autodiff::adjoints::Adjoint;
use crate::graph::autodiff::tape::{Made, Tape};
use ir::op::Number;
use ir::op::attrs::{Clamp, Dropout, DropoutBwd, Gelu, Scalar};
use ir::{Op, Value};
use std::f64::consts::FRAC_2_SQRT_PI;

/// y = f(x).
pub(in super::super) fn unary(t: &mut Tape<'_>, c: &Call<'_>) -> Given {
    let (x, y, dy) = (c.inputs[0], c.outputs[0], c.dy);
    let dx = match c.op {
        Op::Neg => t.neg(dy)?,
        Op::Abs => {
            let sign = t.one(Op::Sign, &[x])?;
            t.mul(dy, sign)?
        }
        Op::Exp => t.mul(dy, y)?,
        Op::Log => t.div(dy, x)?,
        Op::Sqrt => {
            let twice = t.with(Op::MulScalar, y, 2.0)?;
            t.div(dy, twice)?
        }
        Op::Rsqrt => {
            let half = t.with(Op::MulScalar, dy, -0.5)?;
            let cube = t.with(Op::PowScalar, y, 3.0)?;
            t.mul(half, cube)?
        }
        Op::Reciprocal => {
            let square = t.mul(y, y)?;
            let minus = t.neg(dy)?;
            t.mul(minus, square)?
        }
        Op::Tanh => t.one(Op::TanhBwd, &[dy, y])?,
        Op::Sigmoid => t.one(Op::SigmoidBwd, &[dy, y])?,
        Op::Sin => {
            let cos = t.one(Op::Cos, &[x])?;
            t.mul(dy, cos)?
        }
        Op::Cos => {
            let sin = t.one(Op::Sin, &[x])?;
            let minus = t.neg(sin)?;
            t.mul(dy, minus)?
        }
        Op::Atan => {
            let square = t.mul(x, x)?;
            let slope = t.with(Op::AddScalar, square, 1.0)?;
            t.div(dy, slope)?
        }
        Op::Erf => {
            let square = t.mul(x, x)?;
            let minus = t.neg(square)?;
            let exp = t.one(Op::Exp, &[minus])?;
            let slope = t.with(Op::MulScalar, exp, FRAC_2_SQRT_PI)?;
            t.mul(slope, dy)?
        }
        // y > 0 where x > 0.
        Op::Relu => {
            let value = Number::Float(0.0);
            t.one(Op::ThresholdBwd(Scalar { value }), &[dy, y])?
        }
        Op::Silu => t.one(Op::SiluBwd, &[dy, x])?,
        &Op::Gelu(Gelu { tanh }) => t.one(Op::GeluBwd(Gelu { tanh }), &[dy, x])?,
        Op::Cast(_) => t.cast(dy, t.dtype(x))?,
        Op::Clamp(bounds) => clamp(t, bounds, x, dy)?,
        _ => return Err(Fault::STRAY),
    };
    only(dx)
}

/// dy where x is within the bounds, which are included. A bound that is infinite is none.
fn clamp(t: &mut Tape<'_>, bounds: &Clamp, x: Value, dy: Value) -> Made {
    let (min, max) = (bounds.min.to_f64(), bounds.max.to_f64());
    let mut within = None;
    if min > f64::NEG_INFINITY {
        within = Some(t.with(Op::GeScalar, x, min)?);
    }
    if max < f64::INFINITY {
        let below = t.with(Op::LeScalar, x, max)?;
        within = Some(match within {
            Some(above) => t.one(Op::LogicalAnd, &[above, below])?,
            None => below,
        });
    }
    match within {
        Some(within) => {
            let zero = t.full(dy, &[], 0.0)?;
            t.select(within, dy, zero)
        }
        None => Ok(dy),
    }
}

/// y = f(x, number).
pub(in super::super) fn scalar(t: &mut Tape<'_>, c: &Call<'_>) -> Given {
    let (x, dy) = (c.inputs[0], c.dy);
    let dx = match c.op {
        Op::AddScalar(_) => dy,
        Op::MulScalar(by) => t.with(Op::MulScalar, dy, by.value.to_f64())?,
        Op::DivScalar(by) => t.with(Op::DivScalar, dy, by.value.to_f64())?,
        Op::RsubScalar(_) => t.neg(dy)?,
        Op::PowScalar(by) => match by.value.to_f64() {
            // x^0 is 1 everywhere, also at 0.
            0.0 => return Ok(vec![None]),
            1.0 => dy,
            power => {
                let lower = match power {
                    2.0 => x,
                    _ => t.with(Op::PowScalar, x, power - 1.0)?,
                };
                let slope = t.with(Op::MulScalar, lower, power)?;
                t.mul(dy, slope)?
            }
        },
        _ => return Err(Fault::STRAY),
    };
    only(dx)
}

/// y = f(a, b), broadcast.
pub(in super::super) fn binary(t: &mut Tape<'_>, c: &Call<'_>) -> Given {
    if let Op::Where = c.op {
        return choice(t, c);
    }
    let [a, b] = [c.inputs[0], c.inputs[1]];
    let mut given: Vec<Option<Adjoint>> = vec![None, None];
    if c.needs[0] {
        let da = left(t, c, a, b)?;
        given[0] = Some(t.unbroadcast(da, &t.shape(a))?.into());
    }
    if c.needs[1] {
        let db = right(t, c, a, b)?;
        given[1] = Some(t.unbroadcast(db, &t.shape(b))?.into());
    }
    Ok(given)
}

/// The adjoint of operand 0, in the shape of the result.
fn left(t: &mut Tape<'_>, c: &Call<'_>, a: Value, b: Value) -> Result<Value, Fault> {
    let dy = c.dy;
    Ok(match c.op {
        Op::Add | Op::Sub => dy,
        Op::Mul => t.mul(dy, b)?,
        Op::Div => t.div(dy, b)?,
        // b a^(b-1), and 0 for b = 0, where a^-1 may be infinite.
        Op::Pow => {
            let lower = t.with(Op::AddScalar, b, -1.0)?;
            let power = t.one(Op::Pow, &[a, lower])?;
            let slope = t.mul(b, power)?;
            let slope = t.mul(dy, slope)?;
            let is_zero = t.with(Op::EqScalar, b, 0.0)?;
            let zero = t.full(dy, &[], 0.0)?;
            t.select(is_zero, zero, slope)?
        }
        Op::Maximum => extreme(t, [a, b], dy, Op::Lt)?,
        Op::Minimum => extreme(t, [a, b], dy, Op::Gt)?,
        _ => return Err(Fault::STRAY),
    })
}

/// The adjoint of operand 1, in the shape of the result.
fn right(t: &mut Tape<'_>, c: &Call<'_>, a: Value, b: Value) -> Result<Value, Fault> {
    let (y, dy) = (c.outputs[0], c.dy);
    Ok(match c.op {
        Op::Add => dy,
        Op::Sub => t.neg(dy)?,
        Op::Mul => t.mul(dy, a)?,
        // -dy y / b, y being a / b.
        Op::Div => {
            let minus = t.neg(dy)?;
            let slope = t.div(y, b)?;
            t.mul(minus, slope)?
        }
        // y log a, and 0 for a = 0 and b >= 0, where the logarithm is infinite.
        Op::Pow => {
            let log = t.one(Op::Log, &[a])?;
            let slope = t.mul(y, log)?;
            let base = t.with(Op::EqScalar, a, 0.0)?;
            let exponent = t.with(Op::GeScalar, b, 0.0)?;
            let is_zero = t.one(Op::LogicalAnd, &[base, exponent])?;
            let zero = t.full(dy, &[], 0.0)?;
            let slope = t.select(is_zero, zero, slope)?;
            t.mul(dy, slope)?
        }
        Op::Maximum => extreme(t, [b, a], dy, Op::Lt)?,
        Op::Minimum => extreme(t, [b, a], dy, Op::Gt)?,
        _ => return Err(Fault::STRAY),
    })
}

/// The adjoint of the first of two operands whose maximum or minimum was taken: half of it if they
/// are equal, none if the other one is `beyond` it.
fn extreme(t: &mut Tape<'_>, [x, other]: [Value; 2], dy: Value, beyond: Op) -> Made {
    let equal = t.one(Op::Eq, &[x, other])?;
    let half = t.with(Op::DivScalar, dy, 2.0)?;
    let taken = t.select(equal, half, dy)?;
    let is_lost = t.one(beyond, &[x, other])?;
    let zero = t.full(dy, &[], 0.0)?;
    t.select(is_lost, zero, taken)
}

/// where(condition, a, b).
fn choice(t: &mut Tape<'_>, c: &Call<'_>) -> Given {
    let [condition, a, b] = [c.inputs[0], c.inputs[1], c.inputs[2]];
    let zero = t.full(c.dy, &[], 0.0)?;
    let mut given: Vec<Option<Adjoint>> = vec![None; 3];
    if c.needs[1] {
        let da = t.select(condition, c.dy, zero)?;
        given[1] = Some(t.unbroadcast(da, &t.shape(a))?.into());
    }
    if c.needs[2] {
        let db = t.select(condition, zero, c.dy)?;
        given[2] = Some(t.unbroadcast(db, &t.shape(b))?.into());
    }
    Ok(given)
}

/// y = x mask / (1 - p); the mask is the second result.
pub(in super::super) fn dropout(t: &mut Tape<'_>, c: &Call<'_>) -> Given {
    let &Op::Dropout(Dropout { p, .. }) = c.op else {
        return Err(Fault::STRAY);
    };
    // All elements are dropped if p is 1.
    let scale = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
    only(t.one(Op::DropoutBwd(DropoutBwd { scale }), &[c.dy, c.outputs[1]])?)
}
