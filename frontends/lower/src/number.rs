//! Numbers among a call's arguments, and common element types of operands.

use crate::{Error, Ref, Result};
use ir::{Attr, DType};

/// A number in a call.
#[derive(Clone, Copy, PartialEq, Debug)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Scalar {
    Bool(bool),
    Int(i64),
    Float(f64),
}

impl Scalar {
    /// The number as a float.
    pub fn float(self) -> f64 {
        match self {
            Scalar::Bool(b) => f64::from(u8::from(b)),
            Scalar::Int(i) => i as f64,
            Scalar::Float(x) => x,
        }
    }
    /// The number's element type in Python.
    pub(crate) fn dtype(self) -> DType {
        match self {
            Scalar::Bool(_) => DType::Bool,
            Scalar::Int(_) => DType::I64,
            Scalar::Float(_) => DType::F32,
        }
    }
    /// As an attribute of an op on `dtype`: an integer for integers, a float for floats.
    pub fn attr(self, dtype: DType) -> Result<Attr> {
        match self {
            _ if dtype.is_float() => Ok(Attr::Float(self.float())),
            Scalar::Bool(b) => Ok(Attr::Int(b.into())),
            Scalar::Int(i) if dtype == DType::Bool => Ok(Attr::Int((i != 0).into())),
            Scalar::Int(i) => Ok(Attr::Int(i)),
            Scalar::Float(x) if x.fract() == 0.0 && x.abs() < 9e15 => Ok(Attr::Int(x as i64)),
            Scalar::Float(x) => {
                let why = format!("the number {x} is no {dtype}");
                Err(Error::Inexpressible(why.into()))
            }
        }
    }
}

/// A tensor or a number.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Operand {
    Tensor(Ref),
    Scalar(Scalar),
}

/// The smallest and the largest number of a type.
pub fn bounds(dtype: DType) -> (Scalar, Scalar) {
    let ints = |least: i64, most: i64| (Scalar::Int(least), Scalar::Int(most));
    match dtype {
        DType::Bool => ints(0, 1),
        DType::U8 => ints(0, u8::MAX.into()),
        DType::I8 => ints(i8::MIN.into(), i8::MAX.into()),
        DType::I16 => ints(i16::MIN.into(), i16::MAX.into()),
        DType::I32 => ints(i32::MIN.into(), i32::MAX.into()),
        DType::I64 => ints(i64::MIN, i64::MAX),
        _ => (
            Scalar::Float(f64::NEG_INFINITY),
            Scalar::Float(f64::INFINITY),
        ),
    }
}

/// The common element type of tensors of two types.
pub fn promote(a: DType, b: DType) -> DType {
    let rank = |d: DType| match d {
        DType::Bool => 0,
        DType::U8 | DType::I8 => 1,
        DType::I16 => 2,
        DType::I32 => 3,
        DType::I64 => 4,
        DType::F8E4M3 | DType::F8E5M2 => 5,
        DType::F16 | DType::BF16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
    };
    match (a, b) {
        _ if a == b => a,
        (DType::U8, DType::I8) | (DType::I8, DType::U8) => DType::I16,
        (DType::F16, DType::BF16) | (DType::BF16, DType::F16) => DType::F32,
        _ if rank(a) < rank(b) => b,
        _ => a,
    }
}
