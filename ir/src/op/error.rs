//! Why an op does not fit its operands, why a body is impossible, and why a body has no kernel. The
//! three types are in one file because they contain each other: a body does not fit if one of its
//! steps does not, and a fused op does not fit if its body does not.

use super::{Elements, OpKind};
use crate::types::{DType, TensorType, TypeError};
use std::fmt;
use thiserror::Error;

/// An op, the types of its operands, and why they do not fit.
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
    /// The operand that does not fit, if it is only one.
    pub fn operand(&self) -> Option<usize> {
        match self.kind {
            Misfit::ElementType { operand, .. }
            | Misfit::NoIndex { operand }
            | Misfit::NoKernel { operand, .. }
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
    /// No kernel supports elements of this type.
    #[error("operand {operand} should hold {}", described(*.wanted))]
    NoKernel { operand: usize, wanted: Elements },
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
    /// Operands that do not fit each other or the attributes.
    #[error("{0}")]
    Operands(String),
    #[error("{0}")]
    Result(#[from] TypeError),
    /// No kernel computes the body of a fused op over these operands.
    #[error("{0}")]
    Body(#[from] Box<BodyError>),
}

/// Why a body is impossible, or does not fit its operands. Steps, operands and values are counted
/// from 0.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum BodyError {
    #[error("a body may have {most} results, not {given}")]
    ManyResults { most: usize, given: usize },
    #[error("a body should have a result")]
    NoResults,
    #[error("%{value} is no step's result")]
    NoResult { value: usize },
    #[error("%{value} stands twice among the results")]
    Twice { value: usize },
    #[error("step {step}: {op} may not be part of a kernel")]
    Whole { step: usize, op: &'static str },
    #[error("step {step}: {op} uses %{value}, and {before} values come before it")]
    Later {
        step: usize,
        op: &'static str,
        value: usize,
        before: usize,
    },
    #[error("step {step}: in a kernel, {op} is a view of an operand, not of a computed value")]
    ViewOfComputed { step: usize, op: &'static str },
    #[error("%{value} is a view of an operand, and no kernel writes views")]
    WritesView { value: usize },
    #[error("step {step}: {op} should have a result")]
    Nothing { step: usize, op: &'static str },
    #[error("the body has {has} operands, not {given}")]
    Operands { has: usize, given: usize },
    #[error("step {step}: {source}")]
    Step { step: usize, source: ShapeError },
    #[error("step {step}: {op} has {has} results, not {given}")]
    Results {
        step: usize,
        op: &'static str,
        has: usize,
        given: usize,
    },
    #[error(transparent)]
    Space(#[from] SpaceError),
}

impl From<BodyError> for String {
    fn from(error: BodyError) -> String {
        error.to_string()
    }
}

impl From<SpaceError> for String {
    fn from(error: SpaceError) -> String {
        error.to_string()
    }
}

/// Why no kernel can process some values row by row.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum SpaceError {
    #[error("a value has no elements")]
    NoElements,
    #[error("options are computed")]
    OptionsComputed,
    #[error("the result %{value} is the same in several rows")]
    SameInRows { value: usize },
    #[error("{op} uses %{value}, which is a sum over rows and known after the last one alone")]
    UsesSum { op: &'static str, value: usize },
    #[error("too many dimensions")]
    ManyDimensions,
    #[error("a value is repeated along the others in a way that rows and columns do not show")]
    Unsettled,
    #[error("ops combine elements of different rows")]
    DifferentRows,
    #[error("an operand is repeated within the rows that an op combines")]
    RepeatedInRows,
    #[error("a reshape cuts rows where they were not cut")]
    CutRows,
    #[error("a value is repeated along rows here and along columns there")]
    RowsAndColumns,
    #[error("neighbours in a row of a view are not neighbours in its operand")]
    ScatteredColumns,
    #[error("the elements of a view are at no equal distances")]
    NoStrides,
    #[error("a value has more dimensions than it is repeated along")]
    MoreDimensions,
    #[error("it combines elements of what is not whole")]
    CombinesParts,
    #[error("it normalises what is not whole")]
    NormalisesParts,
    #[error("it repeats a value that is itself repeated")]
    RepeatedTwice,
    #[error("its rows have one element")]
    SingleElements,
    #[error("it combines neither whole rows nor whole columns")]
    NeitherRowsNorColumns,
    #[error(transparent)]
    Steps(Box<BodyError>),
}

impl From<BodyError> for SpaceError {
    fn from(error: BodyError) -> SpaceError {
        match error {
            BodyError::Space(error) => error,
            error => SpaceError::Steps(Box::new(error)),
        }
    }
}

/// Element types in words.
fn described(elements: Elements) -> &'static str {
    match elements {
        Elements::Any => "numbers of any type",
        Elements::Computed => "bools, integers or floating-point numbers of 16 bits or more",
        Elements::Numbers => "integers or floating-point numbers of 16 bits or more",
        Elements::Bits => "bools or integers",
        Elements::Floats => "floating-point numbers of 16 bits or more",
    }
}
