//! Why there is no such body, or no kernel for it.

use super::MOST_RESULTS;
use crate::op::ShapeError;
use thiserror::Error;

/// Why there is no such body, or why it does not fit its operands. Steps, operands and values are
/// counted from 0.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum BodyError {
    #[error("a body may have {MOST_RESULTS} results, not {given}")]
    ManyResults { given: usize },
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

/// Why no kernel goes over some values row by row.
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
