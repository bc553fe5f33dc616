//! Why an op does not fit its operands.

use super::OpKind;
use crate::body::BodyError;
use crate::types::{DType, TensorType, TypeError};
use std::fmt;
use thiserror::Error;

/// An op, the types of the operands it was given, and why they do not fit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShapeError {
    /// The op.
    pub op: OpKind,
    /// Types of the operands.
    pub operands: Vec<TensorType>,
    /// What does not fit.
    pub kind: Misfit,
}

impl ShapeError {
    /// The operand that does not fit, if it is a single one.
    pub fn operand(&self) -> Option<usize> {
        match self.kind {
            Misfit::ElementType { operand, .. }
            | Misfit::NoIndex { operand }
            | Misfit::NotReal { operand }
            | Misfit::Shape { operand, .. }
            | Misfit::Rank { operand, .. }
            | Misfit::Type { operand, .. }
            | Misfit::Operand { operand, .. } => Some(operand),
            _ => None,
        }
    }
}

impl fmt::Display for ShapeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.op.name())?;
        if let Misfit::Count { .. } = self.kind {
            return write!(f, " {}", self.kind);
        }
        for (i, ty) in self.operands.iter().enumerate() {
            write!(f, "{}{ty}", if i == 0 { " of " } else { ", " })?;
        }
        write!(f, ": {}", self.kind)
    }
}

impl std::error::Error for ShapeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.kind.source()
    }
}

impl From<ShapeError> for String {
    fn from(error: ShapeError) -> String {
        error.to_string()
    }
}

impl From<Misfit> for String {
    fn from(misfit: Misfit) -> String {
        misfit.to_string()
    }
}

/// What does not fit. Operands are counted from 0.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum Misfit {
    #[error("takes {least} to {most} operands, not {given}")]
    Count {
        least: usize,
        most: usize,
        given: usize,
    },
    #[error("operand {operand} should be {wanted}")]
    ElementType { operand: usize, wanted: DType },
    #[error("operand {operand} should be i64 or i32")]
    NoIndex { operand: usize },
    #[error("operand {operand} should be of a floating-point type")]
    NotReal { operand: usize },
    #[error("operands {} and {} should have one type", .operands.0, .operands.1)]
    Types { operands: (usize, usize) },
    #[error("operands {} and {} should have one element type", .operands.0, .operands.1)]
    ElementTypes { operands: (usize, usize) },
    #[error("operand {operand} should have the shape {wanted:?}")]
    Shape { operand: usize, wanted: Vec<u64> },
    #[error("operand {operand} should have rank {wanted}")]
    Rank {
        operand: usize,
        wanted: &'static str,
    },
    #[error("operand {operand} should be {wanted}")]
    Type { operand: usize, wanted: TensorType },
    #[error("operand {operand} {why}")]
    Operand { operand: usize, why: &'static str },
    #[error("{0:?} and {1:?} do not broadcast")]
    Broadcast(Vec<u64>, Vec<u64>),
    /// An attribute; the message begins with its name.
    #[error("{key}{why}")]
    Attribute { key: &'static str, why: String },
    /// Operands that do not fit each other, or the attributes.
    #[error("{0}")]
    Operands(String),
    #[error("{0}")]
    Result(#[from] TypeError),
    /// No kernel computes the body of a fused op over these operands.
    #[error("{0}")]
    Body(#[from] Box<BodyError>),
}
