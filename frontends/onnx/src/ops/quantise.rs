//! Integers as numbers with a scale and a zero point. Rounding has no gradient, so these are for
//! weights and activations that stay as they are.

use super::inputs::{Inputs, Row, op};
use crate::tensor;
use ir::DType;
use ir::op::OpKind;
use lower::{Call, Ref, Result, Results, Scalar, bounds, ensure, one, wrap};

pub(super) const OPS: &[Row] = &[
    op("DequantizeLinear", dequantise),
    op("QuantizeLinear", quantise),
    op("DynamicQuantizeLinear", dynamic),
    op("MatMulInteger", integer_product),
    op("QLinearMatMul", quantised_product),
];

/// Scales and zero points beside `x`: single numbers, one for each place along a dimension, or one
/// for each block along it.
fn beside(c: &mut Call<'_>, x: Ref, factor: Ref, axis: i64, block: i64) -> Result<Ref> {
    let shape = c.shape_of(x);
    match c.rank(factor) {
        0 => return Ok(factor),
        1 if block == 0 && c.shape_of(factor) == [1] => return c.reshape(factor, &[]),
        1 if block == 0 => {
            let axis = wrap(axis, shape.len())?;
            let mut beside = vec![1; shape.len()];
            beside[axis] = c.ty(factor).numel();
            return c.reshape(factor, &beside);
        }
        _ => (),
    }
    let axis = wrap(axis, shape.len())?;
    let own = c.shape_of(factor);
    ensure(
        block > 0 && own.len() == shape.len(),
        "the scales do not fit the tensor",
    )?;
    // Each block's number, as often as the block has elements.
    let mut wide = own.clone();
    wide.insert(axis + 1, 1);
    let factor = c.reshape(factor, &wide)?;
    wide[axis + 1] = block as u64;
    let factor = c.expand(factor, &wide)?;
    let mut flat = own;
    flat[axis] = flat[axis].checked_mul(block as u64).ok_or("is too large")?;
    let factor = c.reshape(factor, &flat)?;
    c.slice(factor, axis, lower::Range::new(0, shape[axis] as i64))
}

/// `(x - zero) scale`, in f32 at least.
fn widened(c: &mut Call<'_>, x: Ref, scale: Ref, zero: Option<Ref>) -> Result<Ref> {
    let wide = match c.dtype(scale) {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let mut y = c.cast(x, wide)?;
    if let Some(zero) = zero {
        let zero = c.cast(zero, wide)?;
        y = c.step(OpKind::Sub, &[], &[y, zero])?;
    }
    let scale = c.cast(scale, wide)?;
    c.step(OpKind::Mul, &[], &[y, scale])
}

/// `round(x / scale) + zero`, within the bounds of the type.
fn narrowed(c: &mut Call<'_>, x: Ref, scale: Ref, zero: Option<Ref>, to: DType) -> Result<Ref> {
    let y = c.step(OpKind::Div, &[], &[x, scale])?;
    if to.is_float() {
        return c.cast(y, to);
    }
    let mut y = c.rounded_to_even(y)?;
    if let Some(zero) = zero {
        let zero = c.cast(zero, c.dtype(y))?;
        y = c.step(OpKind::Add, &[], &[y, zero])?;
    }
    let (low, high) = bounds(to);
    let dtype = c.dtype(y);
    let y = c.clamp(y, Some(low), Some(high), dtype)?;
    c.cast(y, to)
}

fn dequantise(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (axis, block) = (c.int_or("axis", 1)?, c.int_or("block_size", 0)?);
    let wanted = c.opt_int("output_dtype")?.filter(|&number| number != 0);
    let (x, scale) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    let to = wanted.map_or(Ok(c.dtype(scale)), tensor::dtype)?;
    let scale = beside(c, x, scale, axis, block)?;
    let zero = match inputs.opt(c, 2)? {
        Some(zero) => Some(beside(c, x, zero, axis, block)?),
        None => None,
    };
    let y = widened(c, x, scale, zero)?;
    one(c.cast(y, to)?)
}

fn quantise(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (axis, block) = (c.int_or("axis", 1)?, c.int_or("block_size", 0)?);
    let saturates = c.int_or("saturate", 1)? != 0;
    let wanted = c.opt_int("output_dtype")?.filter(|&number| number != 0);
    c.ignore(&["precision"]);
    let (x, scale) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    let zero = inputs.opt(c, 2)?;
    let to = match (zero, wanted) {
        (Some(zero), _) => c.dtype(zero),
        (None, Some(number)) => tensor::dtype(number)?,
        (None, None) => DType::U8,
    };
    ensure(
        saturates || !to.is_float(),
        "numbers of eight bits without saturation",
    )?;
    let scale = beside(c, x, scale, axis, block)?;
    let scale = c.cast(scale, c.dtype(x))?;
    let zero = match zero {
        Some(zero) => Some(beside(c, x, zero, axis, block)?),
        None => None,
    };
    one(narrowed(c, x, scale, zero, to)?)
}

/// Bytes whose scale and zero point follow from the smallest and the largest element.
fn dynamic(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let all: Vec<usize> = (0..c.rank(x)).collect();
    let high = c.reduce(OpKind::Amax, x, &all, false)?;
    let high = c.map(OpKind::Relu, high)?;
    let low = c.reduce(OpKind::Amin, x, &all, false)?;
    let dtype = c.dtype(x);
    let low = c.clamp(low, None, Some(Scalar::Int(0)), dtype)?;
    let span = c.step(OpKind::Sub, &[], &[high, low])?;
    let scale = c.scalar_step(OpKind::DivScalar, span, Scalar::Float(255.0))?;
    let zero = c.map(OpKind::Neg, low)?;
    let zero = narrowed(c, zero, scale, None, DType::U8)?;
    let y = narrowed(c, x, scale, Some(zero), DType::U8)?;
    lower::all(vec![y, scale, zero])
}

/// Integers of eight bits as floats that hold them exactly, less their zero point: one for each
/// row of the left factor, or for each column of the right one.
fn centred(c: &mut Call<'_>, x: Ref, zero: Option<Ref>, by_rows: bool) -> Result<Ref> {
    let x = c.cast(x, DType::F64)?;
    let Some(mut zero) = zero else { return Ok(x) };
    if by_rows && c.rank(zero) == 1 && c.ty(zero).numel() > 1 {
        let n = c.ty(zero).numel();
        zero = c.reshape(zero, &[n, 1])?;
    }
    let zero = c.cast(zero, DType::F64)?;
    c.step(OpKind::Sub, &[], &[x, zero])
}

fn integer_product(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (a, b) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    let (a_zero, b_zero) = (inputs.opt(c, 2)?, inputs.opt(c, 3)?);
    let (a, b) = (centred(c, a, a_zero, true)?, centred(c, b, b_zero, false)?);
    let y = c.general_product(a, b)?;
    one(c.cast(y, DType::I32)?)
}

fn quantised_product(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let mut factors = vec![];
    for i in [0, 3] {
        let (x, scale) = (inputs.at(c, i)?, inputs.at(c, i + 1)?);
        let zero = inputs.at(c, i + 2)?;
        let x = centred(c, x, Some(zero), i == 0)?;
        let mut scale = c.cast(scale, DType::F64)?;
        if i == 0 && c.rank(scale) == 1 && c.ty(scale).numel() > 1 {
            let n = c.ty(scale).numel();
            scale = c.reshape(scale, &[n, 1])?;
        }
        factors.push(c.step(OpKind::Mul, &[], &[x, scale])?);
    }
    let y = c.general_product(factors[0], factors[1])?;
    let (scale, zero) = (inputs.at(c, 6)?, inputs.at(c, 7)?);
    let to = c.dtype(zero);
    let scale = c.cast(scale, DType::F64)?;
    one(narrowed(c, y, scale, Some(zero), to)?)
}
