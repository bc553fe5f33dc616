//! Signals: window functions, and Fourier transforms as products with matrices of cosines and
//! sines. A complex number is a last dimension of size 2.

use super::inputs::{Inputs, Row, flag, op_with};
use crate::tensor;
use ir::DType;
use ir::op::OpKind;
use lower::{Call, Indexed, Operand, Ref, Result, Results, Scalar, ensure, one, wrap};
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

/// The longest transform: its matrix has this many rows and columns.
const LONGEST: u64 = 1 << 14;

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

/// A transform along one dimension.
struct Transform {
    /// Its length. The signal is cut or followed by zeros.
    n: u64,
    inverse: bool,
    /// Of a real signal, only the first half of the spectrum is given or made.
    onesided: bool,
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
        inverse,
        onesided,
    };
    one(transform.along(c, x, axis)?)
}

impl Transform {
    fn along(&self, c: &mut Call<'_>, x: Ref, axis: usize) -> Result<Ref> {
        let rank = c.rank(x);
        let parts = c.shape_of(x)[rank - 1];
        ensure(axis + 1 < rank, "transforms the parts of complex numbers")?;
        ensure(
            (1..=2).contains(&parts),
            "the last dimension is no complex number",
        )?;
        ensure(
            (1..=LONGEST).contains(&self.n),
            "a transform of this length",
        )?;
        let half = self.n / 2 + 1;
        let is_half = |given: bool| self.onesided && given;
        let wanted = if is_half(self.inverse) { half } else { self.n };
        let x = sized(c, x, axis, wanted)?;
        // The transformed dimension becomes the last one.
        let others: Vec<usize> = (0..rank - 1).filter(|&d| d != axis).collect();
        let order: Vec<usize> = others.iter().copied().chain([axis, rank - 1]).collect();
        let x = c.permute(x, &order)?;
        let made = if is_half(!self.inverse) { half } else { self.n };
        let [cos, sin] = self.matrices(c, wanted, made, c.dtype(x))?;
        let part = |c: &mut Call<'_>, i: i64| c.select(x, rank - 1, i);
        let real = part(c, 0)?;
        let mut y = [c.general_product(real, cos)?, c.general_product(real, sin)?];
        if parts == 2 {
            let imaginary = part(c, 1)?;
            let turned = c.general_product(imaginary, sin)?;
            y[0] = c.step(OpKind::Sub, &[], &[y[0], turned])?;
            let kept = c.general_product(imaginary, cos)?;
            y[1] = c.step(OpKind::Add, &[], &[y[1], kept])?;
        }
        let is_real = is_half(self.inverse);
        let list = if is_real { vec![y[0]] } else { y.to_vec() };
        let y = c.stack(list, rank - 1, c.dtype(x))?;
        let back: Vec<usize> = (0..rank)
            .map(|d| order.iter().position(|&o| o == d).unwrap_or(d))
            .collect();
        c.permute(y, &back)
    }

    /// The cosines and, with its sign, the sines of `2 pi i j / n`, as matrices.
    fn matrices(
        &self,
        c: &mut Call<'_>,
        rows: u64,
        columns: u64,
        dtype: DType,
    ) -> Result<[Ref; 2]> {
        let i = c.arange(DType::I64, rows, Scalar::Int(0), Scalar::Int(1))?;
        let i = c.reshape(i, &[rows, 1])?;
        let j = c.arange(DType::I64, columns, Scalar::Int(0), Scalar::Int(1))?;
        let turns = c.step(OpKind::Mul, &[], &[i, j])?;
        let n = Operand::Scalar(Scalar::Int(self.n as i64));
        let turns = c.remainder(Operand::Tensor(turns), n, DType::I64)?;
        let turns = c.cast(turns, DType::F64)?;
        let sign = if self.inverse { 1.0 } else { -1.0 };
        let step = Scalar::Float(sign * 2.0 * PI / self.n as f64);
        let angle = c.scalar_step(OpKind::MulScalar, turns, step)?;
        let mut both = [c.map(OpKind::Cos, angle)?, c.map(OpKind::Sin, angle)?];
        for matrix in &mut both {
            if self.inverse {
                let share = Scalar::Float(1.0 / self.n as f64);
                *matrix = c.scalar_step(OpKind::MulScalar, *matrix, share)?;
            }
            if self.inverse && self.onesided {
                // The second half mirrors the first, except the ends, which stand alone.
                let ends = if self.n.is_multiple_of(2) { 2 } else { 1 };
                let inner = rows.saturating_sub(ends);
                let twice = c.full(Scalar::Int(2), DType::F64, &[inner, 1])?;
                let pad = [0, 0, 1, rows as i64 - inner as i64 - 1];
                let times = c.pad(twice, &pad, Scalar::Int(1))?;
                *matrix = c.step(OpKind::Mul, &[], &[*matrix, times])?;
            }
            *matrix = c.cast(*matrix, dtype)?;
        }
        Ok(both)
    }
}

/// `x` cut along a dimension, or with zeros after it.
fn sized(c: &mut Call<'_>, x: Ref, axis: usize, size: u64) -> Result<Ref> {
    let shape = c.shape_of(x);
    if shape[axis] == size {
        return Ok(x);
    }
    let mut pad = vec![0; 2 * (shape.len() - axis)];
    let last = pad.len() - 1;
    pad[last] = size as i64 - shape[axis] as i64;
    c.pad(x, &pad, Scalar::Int(0))
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
        inverse: false,
        onesided,
    };
    one(transform.along(c, x, 2)?)
}
