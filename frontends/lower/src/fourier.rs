//! Fourier transforms, as products with matrices of cosines and sines.

use crate::{Call, Operand, Ref, Result, Scalar, ensure};
use ir::DType;
use ir::op::OpKind;
use std::f64::consts::PI;

/// The longest transform: its matrix has this many rows and columns.
const LONGEST: u64 = 1 << 14;

/// A transform along one dimension.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Transform {
    /// The length of the signal.
    pub n: u64,
    /// By `e^(-2 pi i jk / n)`, not by `e^(2 pi i jk / n)`.
    pub is_forward: bool,
    /// The operand is the first half of the spectrum of a real signal, `n / 2 + 1` numbers, and the
    /// result is that signal.
    pub from_half: bool,
    /// The result is the first half of the spectrum.
    pub to_half: bool,
    /// The result is multiplied by this number.
    pub factor: f64,
}

impl Transform {
    /// The real and the imaginary part of the transform of `x`, whose parts are given; a real
    /// signal has no second part.
    pub fn along(
        &self,
        c: &mut Call<'_>,
        x: (Ref, Option<Ref>),
        dim: usize,
    ) -> Result<(Ref, Option<Ref>)> {
        ensure(
            (1..=LONGEST).contains(&self.n),
            "a transform of this length",
        )?;
        let half = self.n / 2 + 1;
        let size = |is_half: bool| if is_half { half } else { self.n };
        let rows = size(self.from_half);
        ensure(
            c.shape_of(x.0)[dim] == rows,
            "transforms another number of elements than there are",
        )?;
        let [cos, sin] = self.matrices(c, rows, size(self.to_half), c.dtype(x.0))?;
        let mut real = c.along(x.0, dim, cos)?;
        if let Some(imaginary) = x.1 {
            let turned = c.along(imaginary, dim, sin)?;
            real = c.step(OpKind::Sub, &[], &[real, turned])?;
        }
        if self.from_half {
            return Ok((real, None));
        }
        let mut turned = c.along(x.0, dim, sin)?;
        if let Some(imaginary) = x.1 {
            let kept = c.along(imaginary, dim, cos)?;
            turned = c.step(OpKind::Add, &[], &[turned, kept])?;
        }
        Ok((real, Some(turned)))
    }

    /// The cosines and, with its sign, the sines of `2 pi jk / n`, as matrices.
    fn matrices(
        &self,
        c: &mut Call<'_>,
        rows: u64,
        columns: u64,
        dtype: DType,
    ) -> Result<[Ref; 2]> {
        let j = c.arange(DType::I64, rows, Scalar::Int(0), Scalar::Int(1))?;
        let j = c.reshape(j, &[rows, 1])?;
        let k = c.arange(DType::I64, columns, Scalar::Int(0), Scalar::Int(1))?;
        let turns = c.step(OpKind::Mul, &[], &[j, k])?;
        let n = Operand::Scalar(Scalar::Int(self.n as i64));
        let turns = c.remainder(Operand::Tensor(turns), n, DType::I64)?;
        let turns = c.cast(turns, DType::F64)?;
        let sign = if self.is_forward { -1.0 } else { 1.0 };
        let step = Scalar::Float(sign * 2.0 * PI / self.n as f64);
        let angle = c.scalar_step(OpKind::MulScalar, turns, step)?;
        let mut both = [c.map(OpKind::Cos, angle)?, c.map(OpKind::Sin, angle)?];
        for matrix in &mut both {
            if self.factor != 1.0 {
                let factor = Scalar::Float(self.factor);
                *matrix = c.scalar_step(OpKind::MulScalar, *matrix, factor)?;
            }
            if self.from_half {
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

impl Call<'_> {
    /// `x` cut along a dimension, or with zeros after it.
    pub fn resized(&mut self, x: Ref, dim: usize, size: u64) -> Result<Ref> {
        let shape = self.shape_of(x);
        if shape[dim] == size {
            return Ok(x);
        }
        let mut pad = vec![0; 2 * (shape.len() - dim)];
        let last = pad.len() - 1;
        pad[last] = size as i64 - shape[dim] as i64;
        self.pad(x, &pad, Scalar::Int(0))
    }
}
