//! Functions of elements that are compositions of others: remainders of floats, logarithms of sums,
//! functions with an exception at 0.

use super::Family;
use ir::DType;
use ir::op::OpKind;
use lower::{Call, Operand, Ref, Result, Results, Rounding, Scalar, ensure, one};
use std::f64::consts::{LN_2, PI};

pub(super) const OPS: Family = &[
    ("positive", |c| one(c.tensor("self")?)),
    ("frac", frac),
    ("fmod", |c| {
        let (x, y) = (c.operand("self")?, c.operand("other")?);
        let dtype = c.result()?.dtype();
        one(rest(c, x, y, dtype, Rounding::Trunc)?)
    }),
    ("hypot", hypot),
    ("logaddexp", |c| log_of_sum(c, 1.0)),
    ("logaddexp2", |c| log_of_sum(c, LN_2)),
    ("xlogy", |c| times_log(c, 0.0)),
    ("special_xlogy", |c| times_log(c, 0.0)),
    ("special_xlog1py", |c| times_log(c, 1.0)),
    ("special_entr", entropy),
    ("special_expit", |c| {
        let x = c.tensor("self")?;
        one(c.map(OpKind::Sigmoid, x)?)
    }),
    ("logit", logit),
    ("special_logit", logit),
    ("deg2rad", |c| scaled(c, PI / 180.0)),
    ("rad2deg", |c| scaled(c, 180.0 / PI)),
    ("sinc", sinc),
    ("special_sinc", sinc),
    ("heaviside", heaviside),
    ("copysign", copysign),
    ("signbit", |c| {
        let x = c.tensor("self")?;
        one(c.has_sign(x)?)
    }),
    ("ldexp", ldexp),
    ("float_power", float_power),
    ("fmax", |c| of_numbers(c, OpKind::Ge)),
    ("fmin", |c| of_numbers(c, OpKind::Le)),
    ("nan_to_num", nan_to_num),
    ("isclose", isclose),
    ("isin.Tensor_Tensor", isin),
    ("bucketize", |c| bucketize(c, "self", "boundaries")),
    ("searchsorted", |c| bucketize(c, "self", "sorted_sequence")),
];

/// Both operands in the type of the result.
fn both(c: &mut Call<'_>) -> Result<[Ref; 2]> {
    let (a, b) = (c.operand("self")?, c.operand("other")?);
    let dtype = c.result()?.dtype();
    Ok([c.whole(a, dtype)?, c.whole(b, dtype)?])
}

fn is_zero(c: &mut Call<'_>, x: Ref) -> Result<Ref> {
    c.scalar_step(OpKind::EqScalar, x, Scalar::Int(0))
}

/// `y` where the condition holds, `x` elsewhere.
fn instead(c: &mut Call<'_>, condition: Ref, y: f64, x: Ref) -> Result<Ref> {
    let y = c.full(Scalar::Float(y), c.dtype(x), &[])?;
    c.step(OpKind::Where, &[], &[condition, y, x])
}

fn scaled(c: &mut Call<'_>, factor: f64) -> Result<Results> {
    let x = c.tensor("self")?;
    let x = c.cast(x, c.result()?.dtype())?;
    one(c.scalar_step(OpKind::MulScalar, x, Scalar::Float(factor))?)
}

fn frac(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let whole = c.rounded(x, Rounding::Trunc)?;
    let whole = c.map(OpKind::Detach, whole)?;
    one(c.step(OpKind::Sub, &[], &[x, whole])?)
}

/// What a rounded quotient leaves of `x`. Of floats it is computed in f64, and is exact if the
/// quotient is below 2^29. The quotient has no derivative.
pub(super) fn rest(
    c: &mut Call<'_>,
    x: Operand,
    y: Operand,
    dtype: DType,
    how: Rounding,
) -> Result<Ref> {
    if !dtype.is_float() {
        let whole = c.quotient(x, y, dtype, how)?;
        let whole = c.arithmetic(OpKind::Mul, Operand::Tensor(whole), y, dtype)?;
        return c.arithmetic(OpKind::Sub, x, Operand::Tensor(whole), dtype);
    }
    let [x, y] = wide(c, x, y, dtype)?;
    let whole = float_quotient(c, x, y, how)?;
    let product = c.step(OpKind::Mul, &[], &[whole, y])?;
    // Nothing is taken from an element that is smaller than an infinite divisor.
    let none = is_zero(c, whole)?;
    let product = instead(c, none, 0.0, product)?;
    let mut rest = c.step(OpKind::Sub, &[], &[x, product])?;
    if how == Rounding::Floor {
        let signs = [rest, y].map(|x| c.scalar_step(OpKind::LtScalar, x, Scalar::Int(0)));
        let [a, b] = signs;
        let apart = c.step(OpKind::Ne, &[], &[a?, b?])?;
        let some = c.scalar_step(OpKind::NeScalar, rest, Scalar::Int(0))?;
        let passed = c.step(OpKind::LogicalAnd, &[], &[apart, some])?;
        let next = c.step(OpKind::Add, &[], &[rest, y])?;
        rest = c.step(OpKind::Where, &[], &[passed, next, rest])?;
    }
    c.cast(rest, dtype)
}

/// A rounded quotient of floats in their type; see [`rest`].
pub(super) fn rounded_quotient(
    c: &mut Call<'_>,
    x: Operand,
    y: Operand,
    dtype: DType,
    how: Rounding,
) -> Result<Ref> {
    if !dtype.is_float() {
        return c.quotient(x, y, dtype, how);
    }
    let [x, y] = wide(c, x, y, dtype)?;
    let whole = float_quotient(c, x, y, how)?;
    c.cast(whole, dtype)
}

/// Operands, rounded to their common type, in f64.
fn wide(c: &mut Call<'_>, x: Operand, y: Operand, dtype: DType) -> Result<[Ref; 2]> {
    ensure(dtype != DType::F64, "a rounded quotient of f64")?;
    let (x, y) = (c.whole(x, dtype)?, c.whole(y, dtype)?);
    Ok([c.cast(x, DType::F64)?, c.cast(y, DType::F64)?])
}

/// A rounded quotient in f64 of shorter floats. It has no derivative.
fn float_quotient(c: &mut Call<'_>, x: Ref, y: Ref, how: Rounding) -> Result<Ref> {
    let quotient = c.step(OpKind::Div, &[], &[x, y])?;
    let whole = c.rounded(quotient, how)?;
    c.map(OpKind::Detach, whole)
}

fn hypot(c: &mut Call<'_>) -> Result<Results> {
    let [x, y] = both(c)?;
    one(c.hypot(x, y)?)
}

/// `log(e^a + e^b)` of `a` and `b` times `unit`, divided by it.
fn log_of_sum(c: &mut Call<'_>, unit: f64) -> Result<Results> {
    let [a, b] = both(c)?;
    one(log_of_two(c, a, b, unit)?)
}

/// `log(e^a + e^b)`: the larger of both plus `log(1 + e^-|a - b|)`. Equal infinities have no
/// difference.
pub(super) fn log_of_two(c: &mut Call<'_>, a: Ref, b: Ref, unit: f64) -> Result<Ref> {
    let larger = c.step(OpKind::Maximum, &[], &[a, b])?;
    let equal = c.step(OpKind::Eq, &[], &[a, b])?;
    let difference = c.step(OpKind::Sub, &[], &[a, b])?;
    let difference = instead(c, equal, 0.0, difference)?;
    let distance = c.map(OpKind::Abs, difference)?;
    let below = c.scalar_step(OpKind::MulScalar, distance, Scalar::Float(-unit))?;
    let share = c.map(OpKind::Exp, below)?;
    let more = c.log1p(share)?;
    let more = c.scalar_step(OpKind::DivScalar, more, Scalar::Float(unit))?;
    c.step(OpKind::Add, &[], &[larger, more])
}

/// `x log(y + plus)`, and 0 where `x` is 0 and the logarithm is not finite.
fn times_log(c: &mut Call<'_>, plus: f64) -> Result<Results> {
    let [x, y] = both(c)?;
    let none = is_zero(c, x)?;
    let below = c.scalar_step(OpKind::LeScalar, y, Scalar::Float(-plus))?;
    let beyond = c.scalar_step(OpKind::EqScalar, y, Scalar::Float(f64::INFINITY))?;
    let outside = c.step(OpKind::LogicalOr, &[], &[below, beyond])?;
    let skip = c.step(OpKind::LogicalAnd, &[], &[none, outside])?;
    let y = instead(c, skip, 1.0 - plus, y)?;
    let log = if plus == 0.0 {
        c.map(OpKind::Log, y)?
    } else {
        c.log1p(y)?
    };
    one(c.step(OpKind::Mul, &[], &[x, log])?)
}

/// `-x log x`, 0 at 0, and -inf below it.
fn entropy(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let outside = c.scalar_step(OpKind::LeScalar, x, Scalar::Int(0))?;
    let inside = instead(c, outside, 1.0, x)?;
    let log = c.map(OpKind::Log, inside)?;
    let product = c.step(OpKind::Mul, &[], &[inside, log])?;
    let y = c.map(OpKind::Neg, product)?;
    let below = c.scalar_step(OpKind::LtScalar, x, Scalar::Int(0))?;
    one(instead(c, below, f64::NEG_INFINITY, y)?)
}

/// `log(x / (1 - x))`, of `x` between `eps` and `1 - eps` if it is given.
fn logit(c: &mut Call<'_>) -> Result<Results> {
    let mut x = c.tensor("self")?;
    if let Some(eps) = c.opt_scalar("eps")? {
        let most = Scalar::Float(1.0 - eps.float());
        x = c.clamp(x, Some(eps), Some(most), c.dtype(x))?;
    }
    let rest = c.scalar_step(OpKind::RsubScalar, x, Scalar::Int(1))?;
    let odds = c.step(OpKind::Div, &[], &[x, rest])?;
    one(c.map(OpKind::Log, odds)?)
}

/// `sin(pi x) / (pi x)`, and 1 at 0
fn sinc(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let none = is_zero(c, x)?;
    let angle = c.scalar_step(OpKind::MulScalar, x, Scalar::Float(PI))?;
    let angle = instead(c, none, 1.0, angle)?;
    let sin = c.map(OpKind::Sin, angle)?;
    let y = c.step(OpKind::Div, &[], &[sin, angle])?;
    one(instead(c, none, 1.0, y)?)
}

/// 0 below 0, 1 above it, `values` at it.
fn heaviside(c: &mut Call<'_>) -> Result<Results> {
    let (x, values) = (c.tensor("self")?, c.tensor("values")?);
    let none = is_zero(c, x)?;
    let above = c.scalar_step(OpKind::GtScalar, x, Scalar::Int(0))?;
    let above = c.cast(above, c.dtype(x))?;
    one(c.step(OpKind::Where, &[], &[none, values, above])?)
}

fn copysign(c: &mut Call<'_>) -> Result<Results> {
    let [x, y] = both(c)?;
    let size = c.map(OpKind::Abs, x)?;
    let negative = c.map(OpKind::Neg, size)?;
    let sign = c.has_sign(y)?;
    one(c.step(OpKind::Where, &[], &[sign, negative, size])?)
}

fn ldexp(c: &mut Call<'_>) -> Result<Results> {
    let [x, power] = both(c)?;
    let power = c.exp2(power)?;
    one(c.step(OpKind::Mul, &[], &[x, power])?)
}

fn float_power(c: &mut Call<'_>) -> Result<Results> {
    let (x, power) = (c.operand("self")?, c.operand("exponent")?);
    one(c.arithmetic(OpKind::Pow, x, power, DType::F64)?)
}

/// The larger or smaller operand; NaN only if both are. Of equal ones it is the first.
fn of_numbers(c: &mut Call<'_>, first: OpKind) -> Result<Results> {
    let [x, y] = both(c)?;
    let wins = c.step(first, &[], &[x, y])?;
    let alone = c.step(OpKind::Ne, &[], &[y, y])?;
    let is_first = c.step(OpKind::LogicalOr, &[], &[wins, alone])?;
    one(c.step(OpKind::Where, &[], &[is_first, x, y])?)
}

fn nan_to_num(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let nan = c.float_or("nan", 0.0)?;
    let largest = match c.dtype(x) {
        DType::F64 => f64::MAX,
        DType::F32 => f64::from(f32::MAX),
        // (2 - 2^-7) 2^127
        DType::BF16 => 1.9921875 * 2f64.powi(127),
        DType::F16 => 65504.0,
        _ => return one(x),
    };
    let (high, low) = (
        c.float_or("posinf", largest)?,
        c.float_or("neginf", -largest)?,
    );
    let is_nan = c.step(OpKind::Ne, &[], &[x, x])?;
    let mut y = instead(c, is_nan, nan, x)?;
    for (infinity, finite) in [(f64::INFINITY, high), (f64::NEG_INFINITY, low)] {
        let there = c.scalar_step(OpKind::EqScalar, x, Scalar::Float(infinity))?;
        y = instead(c, there, finite, y)?;
    }
    one(y)
}

/// `|a - b| <= atol + rtol |b|`, or both are equal.
fn isclose(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.tensor("self")?, c.tensor("other")?);
    let (rtol, atol) = (c.float_or("rtol", 1e-5)?, c.float_or("atol", 1e-8)?);
    let equal_nan = c.bool_or("equal_nan", false)?;
    let equal = c.step(OpKind::Eq, &[], &[a, b])?;
    let [distance, size] = {
        let (a, b) = (c.cast(a, DType::F64)?, c.cast(b, DType::F64)?);
        let difference = c.step(OpKind::Sub, &[], &[a, b])?;
        [c.map(OpKind::Abs, difference)?, c.map(OpKind::Abs, b)?]
    };
    let allowed = c.scalar_step(OpKind::MulScalar, size, Scalar::Float(rtol))?;
    let allowed = c.scalar_step(OpKind::AddScalar, allowed, Scalar::Float(atol))?;
    let near = c.step(OpKind::Le, &[], &[distance, allowed])?;
    let finite = c.scalar_step(OpKind::LtScalar, distance, Scalar::Float(f64::INFINITY))?;
    let near = c.step(OpKind::LogicalAnd, &[], &[near, finite])?;
    let mut y = c.step(OpKind::LogicalOr, &[], &[equal, near])?;
    if equal_nan {
        let a_is = c.step(OpKind::Ne, &[], &[a, a])?;
        let b_is = c.step(OpKind::Ne, &[], &[b, b])?;
        let both = c.step(OpKind::LogicalAnd, &[], &[a_is, b_is])?;
        y = c.step(OpKind::LogicalOr, &[], &[y, both])?;
    }
    one(y)
}

/// Compares each element of `x`, along a new last dimension, with a vector.
fn with_each(c: &mut Call<'_>, op: OpKind, x: Ref, vector: Ref) -> Result<Ref> {
    let beside = [&c.shape_of(x)[..], &[1]].concat();
    let dtype = c.promoted(&[Operand::Tensor(x), Operand::Tensor(vector)]);
    let (x, vector) = (c.cast(x, dtype)?, c.cast(vector, dtype)?);
    let n = c.ty(vector).numel();
    let (x, vector) = (c.reshape(x, &beside)?, c.reshape(vector, &[n])?);
    c.step(op, &[], &[vector, x])
}

fn isin(c: &mut Call<'_>) -> Result<Results> {
    let (x, among) = (c.tensor("elements")?, c.tensor("test_elements")?);
    c.ignore(&["assume_unique"]);
    let invert = c.bool_or("invert", false)?;
    let rank = c.rank(x);
    let equal = with_each(c, OpKind::Eq, x, among)?;
    let y = c.reduce(OpKind::Any, equal, &[rank], false)?;
    one(if invert {
        c.map(OpKind::LogicalNot, y)?
    } else {
        y
    })
}

/// The number of sorted boundaries below each element, or, with `right`, not above it.
fn bucketize(c: &mut Call<'_>, x: &str, boundaries: &str) -> Result<Results> {
    let (x, boundaries) = (c.tensor(x)?, c.tensor(boundaries)?);
    ensure(c.rank(boundaries) == 1, "several rows of boundaries")?;
    let is_right = match c.bool_or("right", false)? {
        true => true,
        false => c.string_or("side", "left")? == "right",
    };
    ensure(c.opt_tensor("sorter")?.is_none(), "boundaries in any order")?;
    c.ignore(&["out_int32"]);
    // NaN is above all boundaries, and compares with none.
    let op = if is_right { OpKind::Gt } else { OpKind::Ge };
    let rank = c.rank(x);
    let ahead = with_each(c, op, x, boundaries)?;
    let passed = c.map(OpKind::LogicalNot, ahead)?;
    let passed = c.cast(passed, c.result()?.dtype())?;
    one(c.reduce(OpKind::Sum, passed, &[rank], false)?)
}
