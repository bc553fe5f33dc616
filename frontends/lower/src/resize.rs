//! Tensors in another size along a dimension: result `i` lies at the place `start + i step` of the
//! operand.

use crate::{Call, Indexed, Range, Ref, Result, Rounding, Scalar, ensure};
use ir::DType;
use ir::op::OpKind;

/// The largest size of a dimension that is made: the places of all elements are compared.
pub const LARGEST: f64 = 65536.0;

/// One dimension: its size, the size of the result, and the place of the results.
#[derive(Clone, Copy, PartialEq, Debug)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub struct Axis {
    pub dim: usize,
    pub size: u64,
    pub wanted: u64,
    pub scale: f64,
    pub start: f64,
    pub step: f64,
}

/// How an element's weight follows from its distance.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Kernel {
    /// Keys' factor, for the interpolation between four elements instead of two.
    pub cubic: Option<f64>,
    /// The kernel of a smaller image is as wide as its elements.
    pub antialias: bool,
    /// Elements beside the image have no weight. Else they are the nearest in it.
    pub exclude_outside: bool,
}

/// How the place of the nearest element is rounded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Nearest {
    PreferFloor,
    PreferCeil,
    Floor,
    Ceil,
}

impl Axis {
    /// True if nothing changes.
    pub fn stays(&self) -> bool {
        self.size == self.wanted && (self.start, self.step) == (0.0, 1.0)
    }
}

impl Call<'_> {
    /// The elements nearest to the places.
    pub fn nearest(&mut self, x: Ref, axis: Axis, rounding: Nearest) -> Result<Ref> {
        let (shift, how) = match rounding {
            Nearest::PreferFloor => (-0.5, Rounding::Ceil),
            Nearest::PreferCeil => (0.5, Rounding::Floor),
            Nearest::Floor => (0.0, Rounding::Floor),
            Nearest::Ceil => (0.0, Rounding::Ceil),
        };
        let last = axis.size as f64 - 1.0;
        let place = |i: u64| {
            let place = axis.start + shift + i as f64 * axis.step;
            let whole = if how == Rounding::Floor {
                place.floor()
            } else {
                place.ceil()
            };
            whole.clamp(0.0, last) as u64
        };
        // Each element several times, or each few elements one.
        let times = axis.wanted / axis.size;
        if times * axis.size == axis.wanted
            && (0..axis.wanted).all(|i| place(i) == i / times.max(1))
        {
            return self.repeated(x, axis, times);
        }
        let step = axis.size / axis.wanted.max(1);
        let first = place(0);
        if step > 0 && (0..axis.wanted).all(|i| place(i) == first + i * step) {
            let range = Range {
                start: Some(first as i64),
                end: Some((first + axis.wanted.saturating_sub(1) * step + 1) as i64),
                step: step as i64,
            };
            return self.slice(x, axis.dim, range);
        }
        let at = self.places(axis, shift)?;
        let at = self.rounded(at, how)?;
        let (least, most) = (Scalar::Float(0.0), Scalar::Float(last));
        let at = self.clamp(at, Some(least), Some(most), DType::F64)?;
        let at = self.cast(at, DType::I64)?;
        Indexed::along(self, x, axis.dim, at)?.get(self)
    }

    /// The places as numbers, shifted.
    pub fn places(&mut self, axis: Axis, shift: f64) -> Result<Ref> {
        let start = Scalar::Float(axis.start + shift);
        self.arange(DType::F64, axis.wanted, start, Scalar::Float(axis.step))
    }

    /// Each element of a dimension several times.
    fn repeated(&mut self, x: Ref, axis: Axis, times: u64) -> Result<Ref> {
        let mut shape = self.shape_of(x);
        let (before, after) = (shape[..=axis.dim].to_vec(), shape[axis.dim + 1..].to_vec());
        let x = self.reshape(x, &[&before[..], &[1], &after].concat())?;
        let x = self.expand(x, &[&before[..], &[times], &after].concat())?;
        shape[axis.dim] = axis.wanted;
        self.reshape(x, &shape)
    }

    /// Means of the elements beside each place, as a product with the matrix of their weights.
    pub fn interpolated(
        &mut self,
        x: Ref,
        axis: Axis,
        kernel: Kernel,
        is_cut: bool,
    ) -> Result<Ref> {
        ensure(self.dtype(x).is_float(), "an interpolation of integers")?;
        let mut at = self.places(axis, 0.0)?;
        let last = Scalar::Float(axis.size as f64 - 1.0);
        let shrinks = kernel.antialias && axis.scale < 1.0;
        let narrow = if shrinks { axis.scale } else { 1.0 };
        // Between two elements, a place beside the image has the weights of the nearest in it.
        let is_plain = kernel.cubic.is_none() && narrow == 1.0 && !kernel.exclude_outside;
        if is_plain || is_cut {
            at = self.clamp(at, Some(Scalar::Float(0.0)), Some(last), DType::F64)?;
        }
        let radius = if kernel.cubic.is_some() { 2.0 } else { 1.0 };
        let beside = match is_plain || kernel.exclude_outside {
            true => 0,
            false => (radius / narrow).ceil().min(LARGEST) as u64 + 1,
        };
        let n = axis.size + 2 * beside;
        let element = self.arange(DType::F64, n, Scalar::Int(-(beside as i64)), Scalar::Int(1))?;
        let element = self.reshape(element, &[n, 1])?;
        let distance = self.step(OpKind::Sub, &[], &[at, element])?;
        let mut distance = self.map(OpKind::Abs, distance)?;
        if narrow != 1.0 {
            distance = self.scalar_step(OpKind::MulScalar, distance, Scalar::Float(narrow))?;
        }
        let mut weight = match kernel.cubic {
            Some(factor) => self.keys(distance, factor)?,
            None => {
                let weight = self.scalar_step(OpKind::RsubScalar, distance, Scalar::Float(1.0))?;
                self.map(OpKind::Relu, weight)?
            }
        };
        if narrow != 1.0 || kernel.exclude_outside {
            let sum = self.reduce(OpKind::Sum, weight, &[0], true)?;
            weight = self.step(OpKind::Div, &[], &[weight, sum])?;
        }
        if beside > 0 {
            weight = self.folded(weight, axis.size, beside)?;
        }
        let weight = self.cast(weight, self.dtype(x))?;
        self.along(x, axis.dim, weight)
    }

    /// Keys' kernel at a distance.
    fn keys(&mut self, distance: Ref, a: f64) -> Result<Ref> {
        let near = self.cubic_polynomial(distance, [a + 2.0, -(a + 3.0), 0.0, 1.0])?;
        let far = self.cubic_polynomial(distance, [a, -5.0 * a, 8.0 * a, -4.0 * a])?;
        let is_near = self.scalar_step(OpKind::LeScalar, distance, Scalar::Float(1.0))?;
        let is_seen = self.scalar_step(OpKind::LtScalar, distance, Scalar::Float(2.0))?;
        let far = self.masked(is_seen, far)?;
        self.step(OpKind::Where, &[], &[is_near, near, far])
    }

    /// The weights of `beside` rows before and after the image, added to those of its first and
    /// last.
    fn folded(&mut self, weight: Ref, size: u64, beside: u64) -> Result<Ref> {
        let (size, beside) = (size as i64, beside as i64);
        if size == 1 {
            return self.reduce(OpKind::Sum, weight, &[0], true);
        }
        let first = self.slice(weight, 0, Range::new(0, beside + 1))?;
        let first = self.reduce(OpKind::Sum, first, &[0], true)?;
        let end = beside + size;
        let inner = self.slice(weight, 0, Range::new(beside + 1, end - 1))?;
        let last = self.slice(weight, 0, Range::new(end - 1, end + beside))?;
        let last = self.reduce(OpKind::Sum, last, &[0], true)?;
        if size == 2 {
            return self.cat(&[first, last], 0);
        }
        self.cat(&[first, inner, last], 0)
    }

    /// A polynomial of degree three, from the highest factor to the lowest.
    pub fn cubic_polynomial(&mut self, x: Ref, factors: [f64; 4]) -> Result<Ref> {
        let mut y = self.scalar_step(OpKind::MulScalar, x, Scalar::Float(factors[0]))?;
        for (i, factor) in factors.into_iter().enumerate().skip(1) {
            y = self.scalar_step(OpKind::AddScalar, y, Scalar::Float(factor))?;
            if i < 3 {
                y = self.step(OpKind::Mul, &[], &[y, x])?;
            }
        }
        Ok(y)
    }
}
