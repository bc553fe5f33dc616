//! Fourier transforms. A short one is a product with a matrix of cosines and sines. A long one is
//! two shorter ones, of the factors of its length (Cooley and Tukey, 1965), so the matrices stay
//! small.

use crate::{Call, Operand, Ref, Result, Scalar, ensure};
use ir::DType;
use ir::op::OpKind;
use std::f64::consts::PI;

/// Up to this length a transform is one product: its work is little more than that of moving the
/// elements.
const SHORT: u64 = 128;

/// The longest transform that is one product, if its length has no factors: its matrix has this
/// many rows and columns.
const LONGEST: u64 = 1 << 14;

/// A tensor of complex numbers: the real part, and the imaginary part if it is not 0.
pub type ComplexParts = (Ref, Option<Ref>);

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
    /// The transform of `x`.
    pub fn along(&self, c: &mut Call<'_>, x: ComplexParts, dim: usize) -> Result<ComplexParts> {
        let half = self.n / 2 + 1;
        let rows = if self.from_half { half } else { self.n };
        ensure(
            c.shape_of(x.0)[dim] == rows,
            "transforms another number of elements than there are",
        )?;
        if self.n <= SHORT || divisor(self.n).is_none() {
            let columns = if self.to_half { half } else { self.n };
            return self.product(c, x, dim, columns);
        }
        let mut x = x;
        if self.from_half {
            x.0 = self.whole(c, x.0, dim)?;
            x.1 = x.1.map(|part| self.whole(c, part, dim)).transpose()?;
        }
        let (real, imaginary) = self.in_two(c, x, dim)?;
        if self.from_half {
            return Ok((real, None));
        }
        if !self.to_half {
            return Ok((real, imaginary));
        }
        let imaginary = imaginary.map(|part| c.resized(part, dim, half));
        Ok((c.resized(real, dim, half)?, imaginary.transpose()?))
    }

    /// One product with a matrix.
    fn product(
        &self,
        c: &mut Call<'_>,
        x: ComplexParts,
        dim: usize,
        columns: u64,
    ) -> Result<ComplexParts> {
        ensure(
            (1..=LONGEST).contains(&self.n),
            "a transform of this length",
        )?;
        let rows = c.shape_of(x.0)[dim];
        let [mut cos, mut sin] = self.waves(c, [rows, columns], self.factor)?;
        let dtype = c.dtype(x.0);
        for matrix in [&mut cos, &mut sin] {
            if self.from_half {
                let weights = self.weights(c, DType::F64)?;
                let weights = c.reshape(weights, &[rows, 1])?;
                *matrix = c.step(OpKind::Mul, &[], &[*matrix, weights])?;
            }
            *matrix = c.cast(*matrix, dtype)?;
        }
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

    /// Element `j = n2 j1 + j2` of the signal and `k = k1 + n1 k2` of the spectrum, where
    /// `n = n1 n2`: a transform from `j1` to `k1`, a factor of `e^(-2 pi i j2 k1 / n)`, and a
    /// transform from `j2` to `k2`.
    fn in_two(&self, c: &mut Call<'_>, x: ComplexParts, dim: usize) -> Result<ComplexParts> {
        let n1 = divisor(self.n).ok_or("the length is prime")?;
        let n2 = self.n / n1;
        let shape = c.shape_of(x.0);
        let (before, after) = (&shape[..dim], &shape[dim + 1..]);
        let matrix = [before, &[n1, n2], after].concat();
        let each = |c: &mut Call<'_>, part: Ref| c.reshape(part, &matrix);
        let imaginary = x.1.map(|part| each(c, part)).transpose()?;
        let x = (each(c, x.0)?, imaginary);
        let part = |n: u64, factor: f64| Transform {
            n,
            is_forward: self.is_forward,
            from_half: false,
            to_half: false,
            factor,
        };
        let x = part(n1, 1.0).along(c, x, dim)?;

        let mut shape = vec![n1, n2];
        shape.extend(after.iter().map(|_| 1));
        let dtype = c.dtype(x.0);
        let [mut cos, mut sin] = self.waves(c, [n1, n2], 1.0)?;
        for wave in [&mut cos, &mut sin] {
            *wave = c.cast(*wave, dtype)?;
            *wave = c.reshape(*wave, &shape)?;
        }
        let mut real = c.step(OpKind::Mul, &[], &[x.0, cos])?;
        let mut turned = c.step(OpKind::Mul, &[], &[x.0, sin])?;
        if let Some(imaginary) = x.1 {
            let lost = c.step(OpKind::Mul, &[], &[imaginary, sin])?;
            real = c.step(OpKind::Sub, &[], &[real, lost])?;
            let kept = c.step(OpKind::Mul, &[], &[imaginary, cos])?;
            turned = c.step(OpKind::Add, &[], &[turned, kept])?;
        }

        let x = part(n2, self.factor).along(c, (real, Some(turned)), dim + 1)?;
        let mut order: Vec<usize> = (0..=before.len() + 1 + after.len()).collect();
        order.swap(dim, dim + 1);
        let flat = [before, &[self.n], after].concat();
        let mut each = |part: Ref| {
            let part = c.permute(part, &order)?;
            c.reshape(part, &flat)
        };
        Ok((each(x.0)?, x.1.map(each).transpose()?))
    }

    /// `factor` times the cosines and, with its sign, the sines of `2 pi jk / n`, as f64 matrices.
    fn waves(&self, c: &mut Call<'_>, [rows, columns]: [u64; 2], factor: f64) -> Result<[Ref; 2]> {
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
        if factor != 1.0 {
            for matrix in &mut both {
                *matrix = c.scalar_step(OpKind::MulScalar, *matrix, Scalar::Float(factor))?;
            }
        }
        Ok(both)
    }

    /// How often each number of half a spectrum is in the whole one: the second half mirrors the
    /// first, except the ends, which stand alone.
    fn weights(&self, c: &mut Call<'_>, dtype: DType) -> Result<Ref> {
        let ends = if self.n.is_multiple_of(2) { 2 } else { 1 };
        let half = self.n / 2 + 1;
        let inner = half.saturating_sub(ends);
        let twice = c.full(Scalar::Int(2), dtype, &[inner])?;
        c.pad(twice, &[1, (half - inner) as i64 - 1], Scalar::Int(1))
    }

    /// A spectrum whose real signal is that of half a spectrum.
    fn whole(&self, c: &mut Call<'_>, half: Ref, dim: usize) -> Result<Ref> {
        let weights = self.weights(c, c.dtype(half))?;
        let mut shape = vec![1; c.rank(half)];
        shape[dim] = self.n / 2 + 1;
        let weights = c.reshape(weights, &shape)?;
        let twice = c.step(OpKind::Mul, &[], &[half, weights])?;
        c.resized(twice, dim, self.n)
    }
}

/// The largest divisor of a number up to its root, other than 1.
fn divisor(n: u64) -> Option<u64> {
    let most = n.isqrt().min(LONGEST);
    (2..=most).rev().find(|&d| n.is_multiple_of(d))
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

#[cfg(test)]
mod tests {
    use super::divisor;

    #[test]
    fn lengths_are_divided_as_evenly_as_they_can() {
        let found = [1024, 1000, 130, 2 * 1009, 1009, 1].map(divisor);
        assert_eq!(found, [Some(32), Some(25), Some(10), Some(2), None, None]);
    }
}
