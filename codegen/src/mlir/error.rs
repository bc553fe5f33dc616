//! An error in an operation.

use super::Type;
use std::panic::Location;

/// An operation that does not fit its operands, and the line of this crate that built it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{op}: {why} ({place})")]
pub struct Error {
    /// The operation's name: `arith.addf`.
    pub op: &'static str,
    /// The error.
    pub why: Mismatch,
    /// Where it was built.
    pub place: &'static Location<'static>,
}

/// How an operation does not fit its operands.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Mismatch {
    /// Too few or too many operands.
    #[error("it takes {wanted} operands, not {given}")]
    Count {
        /// The number that it takes.
        wanted: usize,
        /// The number of given operands.
        given: usize,
    },
    /// Operands that should have one type have two.
    #[error("its operands are of different types, {0} and {1}")]
    Different(Type, Type),
    /// Integers or addresses where floating-point numbers are needed.
    #[error("it is for floating-point numbers, not {0}")]
    NotFloat(Type),
    /// Floating-point numbers or addresses where integers are needed.
    #[error("it is for integers, not {0}")]
    NotInteger(Type),
    /// A type other than the operation needs.
    #[error("it needs {wanted}, not {given}")]
    Wants {
        /// The needed type.
        wanted: &'static str,
        /// The given type.
        given: Type,
    },
    /// A type cannot be converted to another in this way.
    #[error("it does not convert {0} to {1}")]
    Conversion(Type, Type),
    /// A value is used outside the block that defines it.
    #[error("its operand %{0} is not visible here")]
    Hidden(u32),
    /// Blocks were opened and not closed, or closed without being open.
    #[error("{0} blocks are open, not 1")]
    Open(usize),
}
