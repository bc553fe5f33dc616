//! Signals: window functions, and Fourier transforms. A complex number is a last dimension of size
//! 2.

use super::inputs::{Inputs, Row, flag, op_with};
use crate::tensor;
use ir::DType;
use ir::op::OpKind;
use lower::{Call, Indexed, Ref, Result, Results, Scalar, Transform, ensure, one, wrap};
use std::f64::consts::PI;

pub(super) const OPS: &[Row] = &[
    op_with("HannWindow", &[0], |c, x| cosines(c, x, [0.5, -0.5, 0.0])),
    op_with("HammingWindow", &[0], |c, x| {
        cosines(c, x, [25.0 / 46.0, 25.0 / 46.0 - 1.0, 0.0])
    }),
    op_with("BlackmanWindow", &[0], |c, x| {
        cosines(c, x, [0.42, -0.5, 0.08])
    }),
    op_with("DFT", &[1, 2], transform),
    op_with("STFT", &[1, 3], frames),
];

/// `a + b cos(2 pi i / n) + c cos(4 pi i / n)`
fn cosines(c: &mut Call<'_>, inputs: &Inputs<'_>, factors: [f64; 3]) -> Result<Results> {
    let periodic = flag(c, "periodic", true)?;
    let dtype = tensor::dtype(c.int_or("output_datatype", 1)?)?;
    let size = inputs.opt_int(0)?.ok_or("the size is missing")?;
    ensure(
        (0..1 << 40).contains(&size),
        "the size is negative or too large",
    )?;
    let n = if periodic { size } else { size - 1 };
    let mut sum = c.full(Scalar::Float(factors[0]), DType::F64, &[size as u64])?;
    for (i, factor) in factors.into_iter().enumerate().skip(1) {
        let step = Scalar::Float(2.0 * PI * i as f64 / n.max(1) as f64);
        let angle = c.arange(DType::F64, size as u64, Scalar::Int(0), step)?;
        let wave = c.map(OpKind::Cos, angle)?;
        let wave = c.scalar_step(OpKind::MulScalar, wave, Scalar::Float(factor))?;
        sum = c.step(OpKind::Add, &[], &[sum, wave])?;
    }
    one(c.cast(sum, dtype)?)
}

fn transform(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (inverse, onesided) = (flag(c, "inverse", false)?, flag(c, "onesided", false)?);
    let x = inputs.at(c, 0)?;
    let axis = match inputs.opt_int(2)? {
        Some(axis) => axis,
        None if inputs.opset < 20 => c.int_or("axis", 1)?,
        None => -2,
    };
    let axis = wrap(axis, c.rank(x))?;
    let size = c.shape_of(x)[axis];
    let n = match inputs.opt_int(1)? {
        Some(n) => u64::try_from(n).unwrap_or(0),
        None if inverse && onesided => 2 * size.saturating_sub(1),
        None => size,
    };
    let transform = Transform {
        n,
        is_forward: !inverse,
        from_half: inverse && onesided,
        to_half: !inverse && onesided,
        factor: if inverse { 1.0 / n.max(1) as f64 } else { 1.0 },
    };
    one(spectrum(c, transform, x, axis)?)
}

/// The transform of complex numbers, or of real ones, whose last dimension has the size 1. The
/// signal is cut or followed by zeros.
fn spectrum(c: &mut Call<'_>, it: Transform, x: Ref, axis: usize) -> Result<Ref> {
    let last = c.rank(x) - 1;
    let parts = c.shape_of(x)[last];
    ensure(axis < last, "transforms the parts of complex numbers")?;
    ensure(
        (1..=2).contains(&parts),
        "the last dimension is no complex number",
    )?;
    let size = if it.from_half { it.n / 2 + 1 } else { it.n };
    let x = c.resized(x, axis, size)?;
    let real = c.select(x, last, 0)?;
    let imaginary = (parts == 2).then(|| c.select(x, last, 1)).transpose()?;
    let (real, imaginary) = it.along(c, (real, imaginary), axis)?;
    let parts = std::iter::once(real).chain(imaginary).collect();
    c.stack(parts, last, c.dtype(real))
}

/// The transforms of parts of a signal, which may overlap.
fn frames(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let onesided = flag(c, "onesided", true)?;
    let x = inputs.at(c, 0)?;
    let &[_, length, _] = &c.shape_of(x)[..] else {
        return Err("the signal does not have three dimensions".into());
    };
    let step = inputs.opt_int(1)?.ok_or("the step is missing")?;
    let window = inputs.opt(c, 2)?;
    let size = match (inputs.opt_int(3)?, window) {
        (Some(size), _) => u64::try_from(size).unwrap_or(0),
        (None, Some(window)) => c.ty(window).numel(),
        (None, None) => length,
    };
    let fits = step > 0 && (1..=length).contains(&size) && length < 1 << 40;
    ensure(fits, "the frames do not fit the signal")?;
    let n = (length - size) / step as u64 + 1;
    let start = c.arange(DType::I64, n, Scalar::Int(0), Scalar::Int(step))?;
    let start = c.reshape(start, &[n, 1])?;
    let inner = c.arange(DType::I64, size, Scalar::Int(0), Scalar::Int(1))?;
    let at = c.step(OpKind::Add, &[], &[start, inner])?;
    let mut x = Indexed::new(c, x, &[None, Some(at)])?.get(c)?;
    if let Some(window) = window {
        let window = c.reshape(window, &[size, 1])?;
        x = c.step(OpKind::Mul, &[], &[x, window])?;
    }
    let transform = Transform {
        n: size,
        is_forward: true,
        from_half: false,
        to_half: onesided,
        factor: 1.0,
    };
    one(spectrum(c, transform, x, 2)?)
}
