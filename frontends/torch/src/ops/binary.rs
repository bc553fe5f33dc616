//! Functions of two operands and more, element by element, with promotion.

use super::Family;
use lower::{Call, Operand, Result, Results, Rounding, Scalar, one};

pub(super) const OPS: Family = &[
    ("add", |c| sum(c, "add")),
    ("sub", |c| sum(c, "sub")),
    ("rsub", rsub),
    ("mul", |c| arithmetic(c, "mul")),
    ("maximum", |c| arithmetic(c, "maximum")),
    ("minimum", |c| arithmetic(c, "minimum")),
    ("max.other", |c| arithmetic(c, "maximum")),
    ("min.other", |c| arithmetic(c, "minimum")),
    ("div", div),
    ("true_divide", div),
    ("floor_divide", floor_divide),
    ("remainder", remainder),
    ("pow", pow),
    ("eq", |c| compare(c, "eq", "eq_scalar")),
    ("ne", |c| compare(c, "ne", "ne_scalar")),
    ("lt", |c| compare(c, "lt", "lt_scalar")),
    ("le", |c| compare(c, "le", "le_scalar")),
    ("gt", |c| compare(c, "gt", "gt_scalar")),
    ("ge", |c| compare(c, "ge", "ge_scalar")),
    ("bitwise_and", |c| bitwise(c, "bitwise_and")),
    ("bitwise_or", |c| bitwise(c, "bitwise_or")),
    ("bitwise_xor", |c| bitwise(c, "bitwise_xor")),
    ("__and__", |c| bitwise(c, "bitwise_and")),
    ("__or__", |c| bitwise(c, "bitwise_or")),
    ("__xor__", |c| bitwise(c, "bitwise_xor")),
    ("logical_and", |c| logical(c, "logical_and")),
    ("logical_or", |c| logical(c, "logical_or")),
    // Booleans differ where one of them alone is true.
    ("logical_xor", |c| logical(c, "ne")),
    ("where", select),
    ("masked_fill", masked_fill),
    ("addcmul", |c| add_combined(c, "mul")),
    ("addcdiv", |c| add_combined(c, "div")),
    ("lerp", lerp),
];

fn operands(c: &mut Call<'_>) -> Result<(Operand, Operand)> {
    Ok((c.operand("self")?, c.operand("other")?))
}

/// `a op alpha b`
fn sum(c: &mut Call<'_>, op: &str) -> Result<Results> {
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
    one(c.arithmetic("sub", b, a, dtype)?)
}

fn arithmetic(c: &mut Call<'_>, op: &str) -> Result<Results> {
    let (a, b) = operands(c)?;
    let dtype = c.result()?.dtype();
    one(c.arithmetic(op, a, b, dtype)?)
}

fn div(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = operands(c)?;
    let dtype = c.result()?.dtype();
    one(match c.string_or("rounding_mode", "")?.as_str() {
        "" => c.arithmetic("div", a, b, dtype)?,
        "floor" => c.quotient(a, b, dtype, Rounding::Floor)?,
        "trunc" => c.quotient(a, b, dtype, Rounding::Trunc)?,
        other => return Err(format!("no rounding {other}").into()),
    })
}

fn floor_divide(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = operands(c)?;
    let dtype = c.result()?.dtype();
    one(c.quotient(a, b, dtype, Rounding::Floor)?)
}

fn remainder(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = operands(c)?;
    let dtype = c.result()?.dtype();
    one(c.remainder(a, b, dtype)?)
}

fn pow(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.operand("self")?, c.operand("exponent")?);
    let dtype = c.result()?.dtype();
    one(c.arithmetic("pow", a, b, dtype)?)
}

fn compare(c: &mut Call<'_>, op: &str, op_scalar: &str) -> Result<Results> {
    let (a, b) = operands(c)?;
    one(c.compare(op, op_scalar, a, b)?)
}

fn bitwise(c: &mut Call<'_>, op: &str) -> Result<Results> {
    let (a, b) = operands(c)?;
    let dtype = c.result()?.dtype();
    let (a, b) = (c.whole(a, dtype)?, c.whole(b, dtype)?);
    one(c.step(op, &[], &[a, b])?)
}

fn logical(c: &mut Call<'_>, op: &str) -> Result<Results> {
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
    one(c.step("where", &[], &[condition, a, b])?)
}

fn masked_fill(c: &mut Call<'_>) -> Result<Results> {
    let (x, mask, value) = (c.tensor("self")?, c.tensor("mask")?, c.operand("value")?);
    let mask = c.truth(mask)?;
    let value = c.whole(value, c.dtype(x))?;
    one(c.step("where", &[], &[mask, value, x])?)
}

/// `x + value (a op b)`
fn add_combined(c: &mut Call<'_>, op: &str) -> Result<Results> {
    let x = c.tensor("self")?;
    let (a, b) = (c.tensor("tensor1")?, c.tensor("tensor2")?);
    let value = c.scalar_or("value", Scalar::Int(1))?;
    let dtype = c.result()?.dtype();
    let y = c.arithmetic(op, Operand::Tensor(a), Operand::Tensor(b), dtype)?;
    let y = c.scaled(Operand::Tensor(y), value, dtype)?;
    one(c.arithmetic("add", Operand::Tensor(x), y, dtype)?)
}

fn lerp(c: &mut Call<'_>) -> Result<Results> {
    let (x, end, weight) = (c.tensor("self")?, c.tensor("end")?, c.operand("weight")?);
    let dtype = c.result()?.dtype();
    one(c.lerp(x, end, weight, dtype)?)
}
