//! Functions of elements: arithmetic with promotion, rounding, masks, and functions that are not in
//! the table of ops.

use crate::norm::statistics;
use crate::number::bounds;
use crate::{Call, Operand, Ref, Result, Scalar, ensure};
use ir::DType;
use ir::op::OpKind;
use std::f64::consts::PI;

/// How a number is rounded to an integer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Rounding {
    Floor,
    Ceil,
    Trunc,
}

impl Call<'_> {
    /// An operand as a tensor of `dtype`.
    pub fn whole(&mut self, x: Operand, dtype: DType) -> Result<Ref> {
        match x {
            Operand::Tensor(x) => self.cast(x, dtype),
            Operand::Scalar(value) => self.full(value, dtype, &[]),
        }
    }

    /// `x` where `kept`, 0 elsewhere.
    pub fn masked(&mut self, kept: Ref, x: Ref) -> Result<Ref> {
        let zero = self.full(Scalar::Int(0), self.dtype(x), &[])?;
        self.step(OpKind::Where, &[], &[kept, x, zero])
    }

    /// `x` times `factor`, in `dtype`.
    pub fn scaled(&mut self, x: Operand, factor: Scalar, dtype: DType) -> Result<Operand> {
        match (x, factor) {
            (x, factor) if factor.float() == 1.0 => Ok(x),
            (Operand::Tensor(x), factor) => {
                let x = self.cast(x, dtype)?;
                self.scalar_step(OpKind::MulScalar, x, factor)
                    .map(Operand::Tensor)
            }
            (Operand::Scalar(Scalar::Int(x)), Scalar::Int(factor)) => {
                let product = x.checked_mul(factor);
                let product = product.ok_or("a product of numbers overflows")?;
                Ok(Operand::Scalar(Scalar::Int(product)))
            }
            (Operand::Scalar(x), factor) => {
                Ok(Operand::Scalar(Scalar::Float(x.float() * factor.float())))
            }
        }
    }

    /// `x` rounded to an integer, through an integer type. Numbers beyond 2^52 have no fraction and
    /// stay unchanged, like infinities and NaN.
    pub fn rounded(&mut self, x: Ref, how: Rounding) -> Result<Ref> {
        let dtype = self.dtype(x);
        if !dtype.is_float() {
            return Ok(x);
        }
        let whole = self.cast(x, DType::I64)?;
        let whole = self.cast(whole, dtype)?;
        // The cast rounds towards zero, so it may differ from a floor or a ceiling by one.
        let (passed, back) = match how {
            Rounding::Floor => (OpKind::Gt, OpKind::Sub),
            Rounding::Ceil => (OpKind::Lt, OpKind::Add),
            Rounding::Trunc => return self.where_fraction(x, whole),
        };
        let passed = self.step(passed, &[], &[whole, x])?;
        let passed = self.cast(passed, dtype)?;
        let y = self.step(back, &[], &[whole, passed])?;
        self.where_fraction(x, y)
    }

    /// `x` rounded to the nearest integer; halves to the even one.
    pub fn rounded_to_even(&mut self, x: Ref) -> Result<Ref> {
        if !self.dtype(x).is_float() {
            return Ok(x);
        }
        let floor = self.rounded(x, Rounding::Floor)?;
        let rest = self.step(OpKind::Sub, &[], &[x, floor])?;
        let half = self.scalar_step(OpKind::MulScalar, floor, Scalar::Float(0.5))?;
        let whole = self.rounded(half, Rounding::Floor)?;
        let is_odd = self.step(OpKind::Ne, &[], &[half, whole])?;
        let is_half = self.scalar_step(OpKind::EqScalar, rest, Scalar::Float(0.5))?;
        let is_above = self.scalar_step(OpKind::GtScalar, rest, Scalar::Float(0.5))?;
        let up = self.step(OpKind::LogicalAnd, &[], &[is_half, is_odd])?;
        let up = self.step(OpKind::LogicalOr, &[], &[is_above, up])?;
        let next = self.scalar_step(OpKind::AddScalar, floor, Scalar::Int(1))?;
        // Infinities have no rest, and stay.
        let y = self.step(OpKind::Where, &[], &[up, next, floor])?;
        self.where_fraction(x, y)
    }

    /// `y` where `x` can have a fraction, `x` elsewhere.
    fn where_fraction(&mut self, x: Ref, y: Ref) -> Result<Ref> {
        let size = self.map(OpKind::Abs, x)?;
        let limit = Scalar::Float((1u64 << 52) as f64);
        let has_fraction = self.scalar_step(OpKind::LtScalar, size, limit)?;
        self.step(OpKind::Where, &[], &[has_fraction, y, x])
    }

    /// A rounded quotient of integers, exact if both are below 2^52. Floats are not supported: the
    /// exact quotient would have to be rounded, not the float quotient.
    pub fn quotient(&mut self, a: Operand, b: Operand, dtype: DType, how: Rounding) -> Result<Ref> {
        let is_integer = !dtype.is_float() && dtype != DType::Bool;
        ensure(is_integer, "a rounded quotient of floats")?;
        let (a, b) = (self.whole(a, DType::F64)?, self.whole(b, DType::F64)?);
        let y = self.step(OpKind::Div, &[], &[a, b])?;
        let y = self.rounded(y, how)?;
        self.cast(y, dtype)
    }

    /// The remainder of a quotient that is rounded down; it has the sign of `b`.
    pub fn remainder(&mut self, a: Operand, b: Operand, dtype: DType) -> Result<Ref> {
        let whole_times = self.quotient(a, b, dtype, Rounding::Floor)?;
        let product = self.arithmetic(OpKind::Mul, Operand::Tensor(whole_times), b, dtype)?;
        self.arithmetic(OpKind::Sub, a, Operand::Tensor(product), dtype)
    }

    /// An operation of two operands in the element type of the result: `add`, `sub`, `mul`, `div`,
    /// `pow`, `maximum` or `minimum`.
    pub fn arithmetic(&mut self, op: OpKind, a: Operand, b: Operand, dtype: DType) -> Result<Ref> {
        // Booleans are added and multiplied by logic.
        let op = match (op, dtype) {
            (OpKind::Add, DType::Bool) => OpKind::BitwiseOr,
            (OpKind::Mul, DType::Bool) => OpKind::BitwiseAnd,
            _ => op,
        };
        let by_number = match (op, a, b) {
            (OpKind::Add, Operand::Tensor(x), Operand::Scalar(value))
            | (OpKind::Add, Operand::Scalar(value), Operand::Tensor(x)) => {
                Some((OpKind::AddScalar, x, value))
            }
            (OpKind::Mul, Operand::Tensor(x), Operand::Scalar(value))
            | (OpKind::Mul, Operand::Scalar(value), Operand::Tensor(x)) => {
                Some((OpKind::MulScalar, x, value))
            }
            (OpKind::Div, Operand::Tensor(x), Operand::Scalar(value)) => {
                Some((OpKind::DivScalar, x, value))
            }
            (OpKind::Pow, Operand::Tensor(x), Operand::Scalar(value)) => {
                Some((OpKind::PowScalar, x, value))
            }
            (OpKind::Sub, Operand::Tensor(x), Operand::Scalar(value)) => {
                Some((OpKind::AddScalar, x, negative(value)?))
            }
            (OpKind::Sub, Operand::Scalar(value), Operand::Tensor(x)) => {
                Some((OpKind::RsubScalar, x, value))
            }
            _ => None,
        };
        if let Some((op, x, value)) = by_number {
            let x = self.cast(x, dtype)?;
            return self.scalar_step(op, x, value);
        }
        let (a, b) = (self.whole(a, dtype)?, self.whole(b, dtype)?);
        self.step(op, &[], &[a, b])
    }

    /// `sqrt(x^2 + y^2)`, of numbers whose squares may be too large or too small. The derivative at
    /// (0, 0) is 0.
    pub fn hypot(&mut self, x: Ref, y: Ref) -> Result<Ref> {
        let scale = self.larger_size(x, y)?;
        let mut squares = [x, y];
        for part in &mut squares {
            let share = self.step(OpKind::Div, &[], &[*part, scale])?;
            *part = self.step(OpKind::Mul, &[], &[share, share])?;
        }
        let sum = self.step(OpKind::Add, &[], &squares)?;
        let root = self.root_of_sum(sum)?;
        self.step(OpKind::Mul, &[], &[root, scale])
    }

    /// The larger one of `|x|` and `|y|`, or 1 if it is 0 or not finite. It has no derivative: what
    /// is divided by it is multiplied by it later.
    pub fn larger_size(&mut self, x: Ref, y: Ref) -> Result<Ref> {
        let sizes = [self.map(OpKind::Abs, x)?, self.map(OpKind::Abs, y)?];
        let size = self.step(OpKind::Maximum, &[], &sizes)?;
        let size = self.map(OpKind::Detach, size)?;
        let some = self.scalar_step(OpKind::GtScalar, size, Scalar::Int(0))?;
        let finite = self.scalar_step(OpKind::LtScalar, size, Scalar::Float(f64::INFINITY))?;
        let fits = self.step(OpKind::LogicalAnd, &[], &[some, finite])?;
        let one = self.full(Scalar::Int(1), self.dtype(size), &[])?;
        self.step(OpKind::Where, &[], &[fits, size, one])
    }

    /// Where `x` is below 0 or is -0, whose reciprocal is below 0.
    pub fn has_sign(&mut self, x: Ref) -> Result<Ref> {
        let zero = [("value", Scalar::Int(0).attr(self.dtype(x))?)];
        let reciprocal = self.map(OpKind::Reciprocal, x)?;
        let is_below = self.step(OpKind::LtScalar, &zero, &[x])?;
        let is_zero = self.step(OpKind::LtScalar, &zero, &[reciprocal])?;
        self.step(OpKind::LogicalOr, &[], &[is_below, is_zero])
    }

    /// The angle of the point `(x, y)`: `atan(y / x)`, or its complement where `y` is larger, so
    /// that neither the quotient nor its derivative is infinite.
    pub fn atan2(&mut self, y: Ref, x: Ref) -> Result<Ref> {
        let dtype = self.promoted(&[Operand::Tensor(y), Operand::Tensor(x)]);
        let shape = ir::op::broadcast_shapes(self.ty(y).shape(), self.ty(x).shape())?;
        let mut both = [y, x];
        for part in &mut both {
            *part = self.cast(*part, dtype)?;
            *part = self.expand(*part, &shape)?;
        }
        let [y, x] = both;
        let size = [self.map(OpKind::Abs, y)?, self.map(OpKind::Abs, x)?];
        let is_flat = self.step(OpKind::Le, &[], &size)?;
        let quotient = {
            let above = self.step(OpKind::Where, &[], &[is_flat, y, x])?;
            let below = self.step(OpKind::Where, &[], &[is_flat, x, y])?;
            let (zero, one) = (Scalar::Int(0).attr(dtype)?, Scalar::Int(1));
            let is_zero = self.step(OpKind::EqScalar, &[("value", zero)], &[below])?;
            let one = self.full(one, dtype, &[])?;
            let below = self.step(OpKind::Where, &[], &[is_zero, one, below])?;
            // The angle of (0, 0) has no derivative.
            let none = self.full(Scalar::Int(0), dtype, &[])?;
            let above = self.step(OpKind::Where, &[], &[is_zero, none, above])?;
            self.step(OpKind::Div, &[], &[above, below])?
        };
        let angle = self.map(OpKind::Atan, quotient)?;
        let (is_below, is_left) = (self.has_sign(y)?, self.has_sign(x)?);
        let turn = |it: &mut Self, turns: f64| {
            let there = it.full(Scalar::Float(-turns * PI), dtype, &[])?;
            let other = it.full(Scalar::Float(turns * PI), dtype, &[])?;
            it.step(OpKind::Where, &[], &[is_below, there, other])
        };
        let (half, quarter) = (turn(self, 1.0)?, turn(self, 0.5)?);
        let turned = self.step(OpKind::Add, &[], &[angle, half])?;
        let flat = self.step(OpKind::Where, &[], &[is_left, turned, angle])?;
        let steep = self.step(OpKind::Sub, &[], &[quarter, angle])?;
        self.step(OpKind::Where, &[], &[is_flat, flat, steep])
    }

    /// A comparison of two operands in their common type: `op` with a tensor, `op_scalar` with a
    /// number.
    pub fn compare(
        &mut self,
        op: OpKind,
        op_scalar: OpKind,
        a: Operand,
        b: Operand,
    ) -> Result<Ref> {
        let mut dtype = self.promoted(&[a, b]);
        if let (Operand::Tensor(x), Operand::Scalar(value)) = (a, b) {
            // Booleans that are compared with a number become integers.
            if dtype == DType::Bool {
                dtype = DType::I64;
            }
            let x = self.cast(x, dtype)?;
            return self.scalar_step(op_scalar, x, value);
        }
        let (a, b) = (self.whole(a, dtype)?, self.whole(b, dtype)?);
        self.step(op, &[], &[a, b])
    }

    /// `x` clamped between two numbers, each of which may be absent.
    pub fn clamp(
        &mut self,
        x: Ref,
        min: Option<Scalar>,
        max: Option<Scalar>,
        dtype: DType,
    ) -> Result<Ref> {
        let x = self.cast(x, dtype)?;
        let (least, most) = bounds(dtype);
        let attrs = [
            ("max", max.unwrap_or(most).attr(dtype)?),
            ("min", min.unwrap_or(least).attr(dtype)?),
        ];
        self.step(OpKind::Clamp, &attrs, &[x])
    }

    /// The logarithm to a base, given by the base's natural logarithm.
    pub fn log_to(&mut self, x: Ref, ln_base: f64) -> Result<Ref> {
        let y = self.map(OpKind::Log, x)?;
        self.scalar_step(OpKind::DivScalar, y, Scalar::Float(ln_base))
    }

    /// Two to the power `x`.
    pub fn exp2(&mut self, x: Ref) -> Result<Ref> {
        let x = self.scalar_step(OpKind::MulScalar, x, Scalar::Float(std::f64::consts::LN_2))?;
        self.map(OpKind::Exp, x)
    }

    /// `log(1 + x)`, also where `1 + x` loses most of `x`: `u = 1 + x` is exact but for a rounding,
    /// and `log(u) x / (u - 1)` takes that rounding out (Goldberg, What every computer scientist
    /// should know about floating-point arithmetic, 1991, theorem 4).
    pub fn log1p(&mut self, x: Ref) -> Result<Ref> {
        let dtype = self.dtype(x);
        let x = self.cast(x, statistics(dtype))?;
        let u = self.scalar_step(OpKind::AddScalar, x, Scalar::Float(1.0))?;
        let log = self.map(OpKind::Log, u)?;
        // A division by 1 where the step is 0, so that the branch that is not taken has a gradient.
        let step = self.scalar_step(OpKind::AddScalar, u, Scalar::Float(-1.0))?;
        let is_zero = self.scalar_step(OpKind::EqScalar, u, Scalar::Float(1.0))?;
        let one = self.full(Scalar::Float(1.0), self.dtype(x), &[])?;
        let step = self.step(OpKind::Where, &[], &[is_zero, one, step])?;
        let ratio = self.step(OpKind::Div, &[], &[x, step])?;
        let mut y = self.step(OpKind::Mul, &[], &[log, ratio])?;
        // There the ratio would be 0 / 0, or infinity by itself, and the result is `x`.
        for special in [1.0, f64::INFINITY] {
            let is_special = self.scalar_step(OpKind::EqScalar, u, Scalar::Float(special))?;
            y = self.step(OpKind::Where, &[], &[is_special, x, y])?;
        }
        self.cast(y, dtype)
    }

    /// `exp(x) - 1`, also where `exp(x)` is close to 1: with `t = tanh(x / 2)` it is `2t / (1 -
    /// t)`.
    pub fn expm1(&mut self, x: Ref) -> Result<Ref> {
        let dtype = self.dtype(x);
        let x = self.cast(x, statistics(dtype))?;
        // Beyond -1..1 the exponential is exact enough, and `t` may be 1.
        let size = Some(Scalar::Float(1.0));
        let small = self.clamp(x, Some(Scalar::Float(-1.0)), size, self.dtype(x))?;
        let half = self.scalar_step(OpKind::MulScalar, small, Scalar::Float(0.5))?;
        let t = self.map(OpKind::Tanh, half)?;
        let double = self.scalar_step(OpKind::MulScalar, t, Scalar::Float(2.0))?;
        let rest = self.scalar_step(OpKind::RsubScalar, t, Scalar::Float(1.0))?;
        let near = self.step(OpKind::Div, &[], &[double, rest])?;
        let exp = self.map(OpKind::Exp, x)?;
        let far = self.scalar_step(OpKind::AddScalar, exp, Scalar::Float(-1.0))?;
        let size = self.map(OpKind::Abs, x)?;
        let is_near = self.scalar_step(OpKind::LtScalar, size, Scalar::Float(1.0))?;
        let y = self.step(OpKind::Where, &[], &[is_near, near, far])?;
        self.cast(y, dtype)
    }

    /// Compares the size of each element with infinity: `eq_scalar` finds infinities, `lt_scalar`
    /// finite numbers.
    pub fn beside_infinity(&mut self, op: OpKind, x: Ref) -> Result<Ref> {
        let x = self.map(OpKind::Abs, x)?;
        self.scalar_step(op, x, Scalar::Float(f64::INFINITY))
    }

    /// `x + weight (end - x)`
    pub fn lerp(&mut self, x: Ref, end: Ref, weight: Operand, dtype: DType) -> Result<Ref> {
        let span = self.step(OpKind::Sub, &[], &[end, x])?;
        let part = self.arithmetic(OpKind::Mul, Operand::Tensor(span), weight, dtype)?;
        self.step(OpKind::Add, &[], &[x, part])
    }
}

fn negative(value: Scalar) -> Result<Scalar> {
    match value {
        Scalar::Float(value) => Ok(Scalar::Float(-value)),
        Scalar::Int(value) => {
            let negative = value.checked_neg().ok_or("a number overflows")?;
            Ok(Scalar::Int(negative))
        }
        Scalar::Bool(_) => Err("subtracts a boolean".into()),
    }
}
