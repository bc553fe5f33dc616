//! Functions of two or more operands, element by element, with promotion.

use super::Family;
use super::special::{rest, rounded_quotient};
use ir::op::OpKind;
use lower::{Call, Operand, Result, Results, Rounding, Scalar, one};

pub(super) const OPS: Family = &[
    ("add", |c| sum(c, OpKind::Add)),
    ("sub", |c| sum(c, OpKind::Sub)),
    ("rsub", rsub),
    ("mul", |c| arithmetic(c, OpKind::Mul)),
    ("maximum", |c| arithmetic(c, OpKind::Maximum)),
    ("minimum", |c| arithmetic(c, OpKind::Minimum)),
    ("max.other", |c| arithmetic(c, OpKind::Maximum)),
    ("min.other", |c| arithmetic(c, OpKind::Minimum)),
    ("div", div),
    ("true_divide", div),
    ("floor_divide", floor_divide),
    ("remainder", remainder),
    ("pow", pow),
    ("atan2", |c| {
        let (y, x) = (c.tensor("self")?, c.tensor("other")?);
        one(c.atan2(y, x)?)
    }),
    ("eq", |c| compare(c, OpKind::Eq, OpKind::EqScalar)),
    ("ne", |c| compare(c, OpKind::Ne, OpKind::NeScalar)),
    ("lt", |c| compare(c, OpKind::Lt, OpKind::LtScalar)),
    ("le", |c| compare(c, OpKind::Le, OpKind::LeScalar)),
    ("gt", |c| compare(c, OpKind::Gt, OpKind::GtScalar)),
    ("ge", |c| compare(c, OpKind::Ge, OpKind::GeScalar)),
    ("bitwise_and", |c| bitwise(c, OpKind::BitwiseAnd)),
    ("bitwise_or", |c| bitwise(c, OpKind::BitwiseOr)),
    ("bitwise_xor", |c| bitwise(c, OpKind::BitwiseXor)),
    ("__and__", |c| bitwise(c, OpKind::BitwiseAnd)),
    ("__or__", |c| bitwise(c, OpKind::BitwiseOr)),
    ("__xor__", |c| bitwise(c, OpKind::BitwiseXor)),
    ("logical_and", |c| logical(c, OpKind::LogicalAnd)),
    ("logical_or", |c| logical(c, OpKind::LogicalOr)),
    // Booleans differ if exactly one of them is true.
    ("logical_xor", |c| logical(c, OpKind::Ne)),
    ("where", select),
    ("masked_fill", masked_fill),
    ("addcmul", |c| add_combined(c, OpKind::Mul)),
    ("addcdiv", |c| add_combined(c, OpKind::Div)),
    ("lerp", lerp),
];

fn operands(c: &mut Call<'_>) -> Result<(Operand, Operand)> {
    Ok((c.operand("self")?, c.operand("other")?))
}

/// `a op alpha b`
fn sum(c: &mut Call<'_>, op: OpKind) -> Result<Results> {
    let (a, b) = operands(c)?;
    let alpha = c.scalar_or("alpha", Scalar::Int(1))?;
    let dtype = c.result()?.dtype();
    let b = c.scaled(b, alpha, dtype)?;
    one(c.arithmetic(op, a, b, dtype)?)
}

/// `b - alpha a`
fn rsub(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = operands(c)?;
    let alpha = c.scalar_or("alpha", Scalar::Int(1))?;
    let dtype = c.result()?.dtype();
    let a = c.scaled(a, alpha, dtype)?;
    one(c.arithmetic(OpKind::Sub, b, a, dtype)?)
}

fn arithmetic(c: &mut Call<'_>, op: OpKind) -> Result<Results> {
    let (a, b) = operands(c)?;
    let dtype = c.result()?.dtype();
    one(c.arithmetic(op, a, b, dtype)?)
}

fn div(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = operands(c)?;
    let dtype = c.result()?.dtype();
    one(match c.string_or("rounding_mode", "")?.as_str() {
        "" => c.arithmetic(OpKind::Div, a, b, dtype)?,
        "floor" => rounded_quotient(c, a, b, dtype, Rounding::Floor)?,
        "trunc" => rounded_quotient(c, a, b, dtype, Rounding::Trunc)?,
        other => return Err(format!("no rounding {other}").into()),
    })
}

fn floor_divide(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = operands(c)?;
    let dtype = c.result()?.dtype();
    one(rounded_quotient(c, a, b, dtype, Rounding::Floor)?)
}

fn remainder(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = operands(c)?;
    let dtype = c.result()?.dtype();
    one(rest(c, a, b, dtype, Rounding::Floor)?)
}

fn pow(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.operand("self")?, c.operand("exponent")?);
    let dtype = c.result()?.dtype();
    one(c.arithmetic(OpKind::Pow, a, b, dtype)?)
}

fn compare(c: &mut Call<'_>, op: OpKind, op_scalar: OpKind) -> Result<Results> {
    let (a, b) = operands(c)?;
    one(c.compare(op, op_scalar, a, b)?)
}

fn bitwise(c: &mut Call<'_>, op: OpKind) -> Result<Results> {
    let (a, b) = operands(c)?;
    let dtype = c.result()?.dtype();
    let (a, b) = (c.whole(a, dtype)?, c.whole(b, dtype)?);
    one(c.step(op, &[], &[a, b])?)
}

fn logical(c: &mut Call<'_>, op: OpKind) -> Result<Results> {
    let (a, b) = (c.tensor("self")?, c.tensor("other")?);
    let (a, b) = (c.truth(a)?, c.truth(b)?);
    one(c.step(op, &[], &[a, b])?)
}

fn select(c: &mut Call<'_>) -> Result<Results> {
    let condition = c.tensor("condition")?;
    let (a, b) = operands(c)?;
    let dtype = c.result()?.dtype();
    let condition = c.truth(condition)?;
    let (a, b) = (c.whole(a, dtype)?, c.whole(b, dtype)?);
    one(c.step(OpKind::Where, &[], &[condition, a, b])?)
}

fn masked_fill(c: &mut Call<'_>) -> Result<Results> {
    let (x, mask, value) = (c.tensor("self")?, c.tensor("mask")?, c.operand("value")?);
    let mask = c.truth(mask)?;
    let value = c.whole(value, c.dtype(x))?;
    one(c.step(OpKind::Where, &[], &[mask, value, x])?)
}

/// `x + value (a op b)`
fn add_combined(c: &mut Call<'_>, op: OpKind) -> Result<Results> {
    let x = c.tensor("self")?;
    let (a, b) = (c.tensor("tensor1")?, c.tensor("tensor2")?);
    let value = c.scalar_or("value", Scalar::Int(1))?;
    let dtype = c.result()?.dtype();
    let y = c.arithmetic(op, Operand::Tensor(a), Operand::Tensor(b), dtype)?;
    let y = c.scaled(Operand::Tensor(y), value, dtype)?;
    one(c.arithmetic(OpKind::Add, Operand::Tensor(x), y, dtype)?)
}

fn lerp(c: &mut Call<'_>) -> Result<Results> {
    let (x, end, weight) = (c.tensor("self")?, c.tensor("end")?, c.operand("weight")?);
    let dtype = c.result()?.dtype();
    one(c.lerp(x, end, weight, dtype)?)
}
