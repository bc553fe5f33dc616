//! Functions of one element that are not in the table of ops: activations, and hyperbolic and
//! trigonometric functions. Where a function has no derivative, that of the formula is PyTorch's.

use crate::norm::statistics;
use crate::{Call, Ref, Result, Scalar};
use ir::op::OpKind;
use std::f64::consts::{FRAC_PI_2, PI};

fn float(x: f64) -> Scalar {
    Scalar::Float(x)
}

// --- activations ---

impl Call<'_> {
    /// `x` where `sign` is greater than zero, `slope x` elsewhere.
    pub fn leaky(&mut self, x: Ref, sign: Ref, slope: Scalar) -> Result<Ref> {
        let low = self.scalar_step(OpKind::MulScalar, x, slope)?;
        let positive = self.scalar_step(OpKind::GtScalar, sign, float(0.0))?;
        self.step(OpKind::Where, &[], &[positive, x, low])
    }

    /// `x` where it is greater than zero, `slope x` elsewhere; the slope is a tensor.
    pub fn parametric_leaky(&mut self, x: Ref, slope: Ref) -> Result<Ref> {
        let low = self.step(OpKind::Mul, &[], &[x, slope])?;
        let positive = self.scalar_step(OpKind::GtScalar, x, float(0.0))?;
        self.step(OpKind::Where, &[], &[positive, x, low])
    }

    /// `x` where it is greater than `threshold`, a number elsewhere.
    pub fn above(&mut self, x: Ref, threshold: Scalar, value: Scalar) -> Result<Ref> {
        let kept = self.scalar_step(OpKind::GtScalar, x, threshold)?;
        let value = self.full(value, self.dtype(x), &[])?;
        self.step(OpKind::Where, &[], &[kept, x, value])
    }

    /// `x` between two numbers. Unlike [`Call::clamp`], it has no gradient at the numbers.
    pub fn bounded(&mut self, x: Ref, low: Scalar, high: Scalar) -> Result<Ref> {
        let dtype = self.dtype(x);
        let mut y = x;
        for (op, bound) in [(OpKind::LeScalar, low), (OpKind::GeScalar, high)] {
            let is_beyond = self.scalar_step(op, x, bound)?;
            let bound = self.full(bound, dtype, &[])?;
            y = self.step(OpKind::Where, &[], &[is_beyond, bound, y])?;
        }
        Ok(y)
    }

    /// `high x` for positive x, else `low (exp(x / scale) - 1)`.
    pub fn exponential_unit(&mut self, x: Ref, [high, low, scale]: [f64; 3]) -> Result<Ref> {
        // The exponential of a large number would be infinite, and so would be its gradient times
        // 0.
        let below = self.clamp(x, None, Some(Scalar::Int(0)), self.dtype(x))?;
        let below = if scale == 1.0 {
            below
        } else {
            self.scalar_step(OpKind::DivScalar, below, float(scale))?
        };
        let below = self.expm1(below)?;
        let below = self.times(below, low)?;
        let above = self.times(x, high)?;
        let positive = self.scalar_step(OpKind::GtScalar, x, Scalar::Int(0))?;
        self.step(OpKind::Where, &[], &[positive, above, below])
    }

    fn times(&mut self, x: Ref, factor: f64) -> Result<Ref> {
        match factor {
            1.0 => Ok(x),
            _ => self.scalar_step(OpKind::MulScalar, x, float(factor)),
        }
    }

    /// `log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|))`
    pub fn softplus(&mut self, x: Ref) -> Result<Ref> {
        let size = self.map(OpKind::Abs, x)?;
        let small = self.map(OpKind::Neg, size)?;
        let small = self.map(OpKind::Exp, small)?;
        let small = self.log1p(small)?;
        // Of two equal numbers each has half of the derivative: at 0 it is that of a sigmoid.
        let zero = self.full(Scalar::Int(0), self.dtype(x), &[])?;
        let large = self.step(OpKind::Maximum, &[], &[x, zero])?;
        self.step(OpKind::Add, &[], &[large, small])
    }

    /// `log(sigmoid(x)) = -log(1 + exp(-x))`
    pub fn log_sigmoid(&mut self, x: Ref) -> Result<Ref> {
        let x = self.map(OpKind::Neg, x)?;
        let y = self.softplus(x)?;
        self.map(OpKind::Neg, y)
    }

    /// `x / (1 + |x|)`
    pub fn softsign(&mut self, x: Ref) -> Result<Ref> {
        let size = self.map(OpKind::Abs, x)?;
        let size = self.scalar_step(OpKind::AddScalar, size, Scalar::Int(1))?;
        self.step(OpKind::Div, &[], &[x, size])
    }

    /// `alpha x + beta` between 0 and 1.
    pub fn hard_sigmoid(&mut self, x: Ref, alpha: f64, beta: f64) -> Result<Ref> {
        let y = self.scalar_step(OpKind::MulScalar, x, float(alpha))?;
        let y = self.scalar_step(OpKind::AddScalar, y, float(beta))?;
        let dtype = self.dtype(x);
        self.clamp(y, Some(Scalar::Int(0)), Some(Scalar::Int(1)), dtype)
    }

    /// `x` times its hard sigmoid.
    pub fn hard_swish(&mut self, x: Ref) -> Result<Ref> {
        let gate = self.hard_sigmoid(x, 1.0 / 6.0, 0.5)?;
        self.step(OpKind::Mul, &[], &[x, gate])
    }

    /// `x tanh(softplus(x))`
    pub fn mish(&mut self, x: Ref) -> Result<Ref> {
        let y = self.softplus(x)?;
        let y = self.map(OpKind::Tanh, y)?;
        self.step(OpKind::Mul, &[], &[x, y])
    }

    /// `x sigmoid(alpha x)`
    pub fn swish(&mut self, x: Ref, alpha: f64) -> Result<Ref> {
        if alpha == 1.0 {
            return self.map(OpKind::Silu, x);
        }
        let y = self.scalar_step(OpKind::MulScalar, x, float(alpha))?;
        let y = self.map(OpKind::Sigmoid, y)?;
        self.step(OpKind::Mul, &[], &[x, y])
    }

    /// 0 between `-lambda` and `lambda`; beyond them `x`, moved towards 0 by `bias`.
    pub fn shrink(&mut self, x: Ref, bias: f64, lambda: f64) -> Result<Ref> {
        let above = self.scalar_step(OpKind::GtScalar, x, float(lambda))?;
        let below = self.scalar_step(OpKind::LtScalar, x, float(-lambda))?;
        let less = self.scalar_step(OpKind::AddScalar, x, float(-bias))?;
        let more = self.scalar_step(OpKind::AddScalar, x, float(bias))?;
        let less = self.masked(above, less)?;
        self.step(OpKind::Where, &[], &[below, more, less])
    }
}

// --- hyperbolic and trigonometric functions ---

impl Call<'_> {
    /// `(exp(x) - exp(-x)) / 2`
    pub fn sinh(&mut self, x: Ref) -> Result<Ref> {
        self.hyperbolic(x, OpKind::Sub)
    }

    /// `(exp(x) + exp(-x)) / 2`
    pub fn cosh(&mut self, x: Ref) -> Result<Ref> {
        self.hyperbolic(x, OpKind::Add)
    }

    fn hyperbolic(&mut self, x: Ref, op: OpKind) -> Result<Ref> {
        let up = self.map(OpKind::Exp, x)?;
        let down = self.map(OpKind::Neg, x)?;
        let down = self.map(OpKind::Exp, down)?;
        let y = self.step(op, &[], &[up, down])?;
        self.scalar_step(OpKind::MulScalar, y, float(0.5))
    }

    /// The tangent.
    pub fn tan(&mut self, x: Ref) -> Result<Ref> {
        let (sin, cos) = (self.map(OpKind::Sin, x)?, self.map(OpKind::Cos, x)?);
        self.step(OpKind::Div, &[], &[sin, cos])
    }

    /// `sign(x) log(|x| + sqrt(x^2 + 1))`
    pub fn asinh(&mut self, x: Ref) -> Result<Ref> {
        let size = self.map(OpKind::Abs, x)?;
        let y = self.step(OpKind::Mul, &[], &[x, x])?;
        let y = self.scalar_step(OpKind::AddScalar, y, Scalar::Int(1))?;
        let y = self.map(OpKind::Sqrt, y)?;
        let y = self.step(OpKind::Add, &[], &[size, y])?;
        let y = self.map(OpKind::Log, y)?;
        let sign = self.map(OpKind::Sign, x)?;
        let y = self.step(OpKind::Mul, &[], &[sign, y])?;
        // At 0 the sign hides the slope, which is 1.
        let is_zero = self.scalar_step(OpKind::EqScalar, x, float(0.0))?;
        self.step(OpKind::Where, &[], &[is_zero, x, y])
    }

    /// `log(x + sqrt(x^2 - 1))`
    pub fn acosh(&mut self, x: Ref) -> Result<Ref> {
        let y = self.step(OpKind::Mul, &[], &[x, x])?;
        let y = self.scalar_step(OpKind::AddScalar, y, Scalar::Int(-1))?;
        let y = self.map(OpKind::Sqrt, y)?;
        let y = self.step(OpKind::Add, &[], &[x, y])?;
        self.map(OpKind::Log, y)
    }

    /// `(log(1 + x) - log(1 - x)) / 2`. The logarithm of the quotient would have no slope at ±1.
    pub fn atanh(&mut self, x: Ref) -> Result<Ref> {
        let up = self.scalar_step(OpKind::AddScalar, x, Scalar::Int(1))?;
        let down = self.scalar_step(OpKind::RsubScalar, x, Scalar::Int(1))?;
        let (up, down) = (self.map(OpKind::Log, up)?, self.map(OpKind::Log, down)?);
        let y = self.step(OpKind::Sub, &[], &[up, down])?;
        self.scalar_step(OpKind::MulScalar, y, float(0.5))
    }

    /// For angles: the size of `x`, and where it is 1. `x` apart from there, with its distances
    /// from 1 below and above.
    fn sides_of_one(&mut self, x: Ref) -> Result<([Ref; 2], [Ref; 3])> {
        let size = self.map(OpKind::Abs, x)?;
        let at_end = self.scalar_step(OpKind::EqScalar, size, float(1.0))?;
        let inner = self.apart(at_end, x)?;
        let [below, above] = self.distances_from_one(inner)?;
        Ok(([size, at_end], [inner, below, above]))
    }

    /// The angle in -π/2..π/2 whose sine is `x`.
    pub fn asin(&mut self, x: Ref) -> Result<Ref> {
        let dtype = self.dtype(x);
        let x = self.cast(x, statistics(dtype))?;
        let ([size, at_end], [inner, below, above]) = self.sides_of_one(x)?;
        let square = self.step(OpKind::Mul, &[], &[below, above])?;
        let cosine = self.map(OpKind::Sqrt, square)?;
        let tangent = self.step(OpKind::Div, &[], &[inner, cosine])?;
        let y = self.map(OpKind::Atan, tangent)?;
        // At the ends the angle is ±π/2, and its slope infinite.
        let rest = self.rest_of_angle(size)?;
        let end = self.scalar_step(OpKind::RsubScalar, rest, float(FRAC_PI_2))?;
        let sign = self.map(OpKind::Sign, x)?;
        let end = self.step(OpKind::Mul, &[], &[sign, end])?;
        let y = self.step(OpKind::Where, &[], &[at_end, end, y])?;
        self.cast(y, dtype)
    }

    /// The angle in 0..π whose cosine is `x`: twice that of the tangent of its half.
    pub fn acos(&mut self, x: Ref) -> Result<Ref> {
        let dtype = self.dtype(x);
        let x = self.cast(x, statistics(dtype))?;
        let ([size, at_end], [_, below, above]) = self.sides_of_one(x)?;
        let square = self.step(OpKind::Div, &[], &[below, above])?;
        let tangent = self.map(OpKind::Sqrt, square)?;
        let half = self.map(OpKind::Atan, tangent)?;
        let y = self.scalar_step(OpKind::MulScalar, half, float(2.0))?;
        // At the ends the angle is 0 or π, and its slope infinite.
        let rest = self.rest_of_angle(size)?;
        let opposite = self.scalar_step(OpKind::RsubScalar, rest, float(PI))?;
        let is_first = self.scalar_step(OpKind::GtScalar, x, float(0.0))?;
        let end = self.step(OpKind::Where, &[], &[is_first, rest, opposite])?;
        let y = self.step(OpKind::Where, &[], &[at_end, end, y])?;
        self.cast(y, dtype)
    }

    /// 0 where a function of `x` has another formula, so that this one has a finite slope there.
    fn apart(&mut self, is_other: Ref, x: Ref) -> Result<Ref> {
        let zero = self.full(float(0.0), self.dtype(x), &[])?;
        self.step(OpKind::Where, &[], &[is_other, zero, x])
    }

    /// `sqrt(2 (1 - x))`: near 1, the angle whose cosine is `x`.
    fn rest_of_angle(&mut self, x: Ref) -> Result<Ref> {
        let rest = self.scalar_step(OpKind::RsubScalar, x, float(1.0))?;
        let rest = self.scalar_step(OpKind::MulScalar, rest, float(2.0))?;
        self.map(OpKind::Sqrt, rest)
    }

    /// `1 - x` and `1 + x`.
    fn distances_from_one(&mut self, x: Ref) -> Result<[Ref; 2]> {
        Ok([
            self.scalar_step(OpKind::RsubScalar, x, float(1.0))?,
            self.scalar_step(OpKind::AddScalar, x, float(1.0))?,
        ])
    }
}
