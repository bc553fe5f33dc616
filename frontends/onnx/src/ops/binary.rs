//! Functions of two or more operands, element by element. Operands have one element type.

use super::inputs::{Inputs, Row, flag, op};
use ir::DType;
use ir::op::OpKind;
use lower::{Call, Operand, Ref, Result, Results, Rounding, Scalar, one};

pub(super) const OPS: &[Row] = &[
    op("Add", |c, x| arithmetic(c, x, OpKind::Add)),
    op("Sub", |c, x| arithmetic(c, x, OpKind::Sub)),
    op("Mul", |c, x| arithmetic(c, x, OpKind::Mul)),
    op("Div", div),
    op("Pow", pow),
    op("Mod", modulo),
    op("Max", |c, x| all(c, x, OpKind::Maximum)),
    op("Min", |c, x| all(c, x, OpKind::Minimum)),
    op("Sum", |c, x| all(c, x, OpKind::Add)),
    op("Mean", mean),
    op("Equal", |c, x| compare(c, x, OpKind::Eq, OpKind::EqScalar)),
    op("Less", |c, x| compare(c, x, OpKind::Lt, OpKind::LtScalar)),
    op("LessOrEqual", |c, x| {
        compare(c, x, OpKind::Le, OpKind::LeScalar)
    }),
    op("Greater", |c, x| {
        compare(c, x, OpKind::Gt, OpKind::GtScalar)
    }),
    op("GreaterOrEqual", |c, x| {
        compare(c, x, OpKind::Ge, OpKind::GeScalar)
    }),
    op("And", |c, x| tensors(c, x, OpKind::LogicalAnd)),
    op("Or", |c, x| tensors(c, x, OpKind::LogicalOr)),
    // Booleans differ if exactly one of them is true.
    op("Xor", |c, x| tensors(c, x, OpKind::Ne)),
    op("BitwiseAnd", |c, x| tensors(c, x, OpKind::BitwiseAnd)),
    op("BitwiseOr", |c, x| tensors(c, x, OpKind::BitwiseOr)),
    op("BitwiseXor", |c, x| tensors(c, x, OpKind::BitwiseXor)),
    op("BitShift", shift),
    op("Where", select),
];

/// Two operands, the second or the first as a number if it is one and does not add dimensions. Also
/// their element type.
fn operands(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<(Operand, Operand, DType)> {
    let types = (inputs.get(0), inputs.get(1));
    let (Some(a), Some(b)) = types else {
        return Err("an input is missing".into());
    };
    let (rank_a, rank_b) = (a.ty.rank(), b.ty.rank());
    let dtype = a.ty.dtype();
    if b.ty.dtype() != dtype {
        let message = format!("the operands are {dtype} and {}", b.ty.dtype());
        return Err(message.into());
    }
    if rank_b <= rank_a
        && let y @ Operand::Scalar(_) = inputs.operand(c, 1)?
    {
        return Ok((Operand::Tensor(inputs.at(c, 0)?), y, dtype));
    }
    if rank_a <= rank_b
        && let x @ Operand::Scalar(_) = inputs.operand(c, 0)?
    {
        return Ok((x, Operand::Tensor(inputs.at(c, 1)?), dtype));
    }
    let (a, b) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    Ok((Operand::Tensor(a), Operand::Tensor(b), dtype))
}

fn arithmetic(c: &mut Call<'_>, inputs: &Inputs<'_>, op: OpKind) -> Result<Results> {
    let (a, b, dtype) = operands(c, inputs)?;
    one(c.arithmetic(op, a, b, dtype)?)
}

/// The quotient of integers is rounded towards zero.
fn div(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (a, b, dtype) = operands(c, inputs)?;
    if dtype.is_float() {
        one(c.arithmetic(OpKind::Div, a, b, dtype)?)
    } else {
        one(c.quotient(a, b, dtype, Rounding::Trunc)?)
    }
}

/// The result has the element type of the base.
fn pow(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (a, b) = (inputs.at(c, 0)?, inputs.operand(c, 1)?);
    let dtype = c.dtype(a);
    let adds_dimensions = inputs.get(1).is_some_and(|b| b.ty.rank() > c.rank(a));
    let b = if adds_dimensions {
        Operand::Tensor(inputs.at(c, 1)?)
    } else {
        b
    };
    if let Operand::Scalar(power) = b
        && (dtype.is_float() || (power.float() >= 0.0 && power.float().fract() == 0.0))
    {
        return one(c.arithmetic(OpKind::Pow, Operand::Tensor(a), b, dtype)?);
    }
    // Powers of integers are computed with floats, which are exact below 2^53.
    let wide = if dtype.is_float() { dtype } else { DType::F64 };
    let power_is_float = inputs.get(1).is_some_and(|b| b.ty.dtype().is_float());
    let (a, b) = (c.cast(a, wide)?, c.whole(b, wide)?);
    let mut y = c.step(OpKind::Pow, &[], &[a, b])?;
    if !dtype.is_float() && !power_is_float {
        y = c.rounded_to_even(y)?;
    }
    one(c.cast(y, dtype)?)
}

fn modulo(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let as_c = flag(c, "fmod", false)?;
    let (a, b, dtype) = operands(c, inputs)?;
    if dtype.is_float() {
        return one(float_remainder(c, (a, b), dtype, as_c)?);
    }
    if !as_c {
        return one(c.remainder(a, b, dtype)?);
    }
    let whole = c.quotient(a, b, dtype, Rounding::Trunc)?;
    let product = c.arithmetic(OpKind::Mul, Operand::Tensor(whole), b, dtype)?;
    one(c.arithmetic(OpKind::Sub, a, Operand::Tensor(product), dtype)?)
}

/// The remainder of a quotient that is rounded towards zero, as in C, or down. It is exact if the
/// quotient in f64 is.
fn float_remainder(
    c: &mut Call<'_>,
    (a, b): (Operand, Operand),
    dtype: DType,
    as_c: bool,
) -> Result<Ref> {
    let (a, b) = (c.whole(a, DType::F64)?, c.whole(b, DType::F64)?);
    let y = c.step(OpKind::Div, &[], &[a, b])?;
    let y = c.rounded(y, Rounding::Trunc)?;
    let y = c.step(OpKind::Mul, &[], &[y, b])?;
    let y = c.step(OpKind::Sub, &[], &[a, y])?;
    // Infinity goes no time into a number.
    let is_infinite = c.beside_infinity(OpKind::EqScalar, b)?;
    let is_finite = c.beside_infinity(OpKind::LtScalar, a)?;
    let is_all = c.step(OpKind::LogicalAnd, &[], &[is_infinite, is_finite])?;
    let mut y = c.step(OpKind::Where, &[], &[is_all, a, y])?;
    if !as_c {
        // It has the divisor's sign.
        let product = c.step(OpKind::Mul, &[], &[y, b])?;
        let differs = c.scalar_step(OpKind::LtScalar, product, Scalar::Int(0))?;
        let other = c.step(OpKind::Add, &[], &[y, b])?;
        y = c.step(OpKind::Where, &[], &[differs, other, y])?;
    }
    c.cast(y, dtype)
}

/// All inputs, combined from the first to the last.
fn combined(c: &mut Call<'_>, inputs: &Inputs<'_>, op: OpKind) -> Result<Ref> {
    let mut y = inputs.at(c, 0)?;
    for i in 1..inputs.len() {
        let x = inputs.at(c, i)?;
        y = c.step(op, &[], &[y, x])?;
    }
    Ok(y)
}

fn all(c: &mut Call<'_>, inputs: &Inputs<'_>, op: OpKind) -> Result<Results> {
    one(combined(c, inputs, op)?)
}

fn mean(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let y = combined(c, inputs, OpKind::Add)?;
    one(c.scalar_step(OpKind::DivScalar, y, Scalar::Int(inputs.len() as i64))?)
}

fn compare(
    c: &mut Call<'_>,
    inputs: &Inputs<'_>,
    op: OpKind,
    op_scalar: OpKind,
) -> Result<Results> {
    let (a, b, dtype) = operands(c, inputs)?;
    match (a, b) {
        (Operand::Tensor(x), Operand::Scalar(value)) if dtype != DType::Bool => {
            one(c.scalar_step(op_scalar, x, value)?)
        }
        _ => {
            let (a, b) = (c.whole(a, dtype)?, c.whole(b, dtype)?);
            one(c.step(op, &[], &[a, b])?)
        }
    }
}

/// Bits moved up or down, as products and quotients with powers of two. Shifts by the width of the
/// type or more leave zeros, or the sign; negative ones are taken as such, too.
fn shift(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let is_left = match c.string_or("direction", "")?.as_str() {
        "LEFT" => true,
        "RIGHT" => false,
        other => return Err(format!("no direction {other}").into()),
    };
    let (x, by) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    let dtype = c.dtype(x);
    let bits = 8 * dtype.bytes() as i64;
    lower::ensure(bits <= 32, "integers of 64 bits are not shifted")?;
    let by = c.cast(by, DType::I64)?;
    let is_within = c.scalar_step(OpKind::GeScalar, by, Scalar::Int(0))?;
    let is_below = c.scalar_step(OpKind::LtScalar, by, Scalar::Int(bits))?;
    let is_within = c.step(OpKind::LogicalAnd, &[], &[is_within, is_below])?;
    let by = c.masked(is_within, by)?;
    let by = c.cast(by, DType::F64)?;
    let power = c.exp2(by)?;
    let power = c.rounded_to_even(power)?;
    let power = c.cast(power, DType::I64)?;
    let wide = c.cast(x, DType::I64)?;
    if is_left {
        let y = c.step(OpKind::Mul, &[], &[wide, power])?;
        let y = c.masked(is_within, y)?;
        return one(c.cast(y, dtype)?);
    }
    let (a, b) = (Operand::Tensor(wide), Operand::Tensor(power));
    let y = c.quotient(a, b, DType::I64, Rounding::Floor)?;
    // Only the sign is left.
    let sign = c.scalar_step(OpKind::LtScalar, wide, Scalar::Int(0))?;
    let sign = c.cast(sign, DType::I64)?;
    let sign = c.map(OpKind::Neg, sign)?;
    let y = c.step(OpKind::Where, &[], &[is_within, y, sign])?;
    one(c.cast(y, dtype)?)
}

fn tensors(c: &mut Call<'_>, inputs: &Inputs<'_>, op: OpKind) -> Result<Results> {
    let (a, b) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    one(c.step(op, &[], &[a, b])?)
}

fn select(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let operands = [inputs.at(c, 0)?, inputs.at(c, 1)?, inputs.at(c, 2)?];
    one(c.step(OpKind::Where, &[], &operands)?)
}
