//! Why a kernel refuses a signature, and why it stops.

use artifact::DType;
use thiserror::Error;

/// Why a kernel does not run, or stops.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum KernelError {
    /// There is no kernel for the op.
    #[error("there is no kernel for {0}")]
    NoKernel(String),
    /// The kernel cannot run the signature: counts, types, shapes, attributes, scratch.
    #[error("{op}: {why}")]
    Refused {
        /// The op.
        op: &'static str,
        /// The reason.
        why: String,
    },
    /// The operands' data do not allow the kernel to go on.
    #[error("{op}: {source}")]
    Stopped {
        /// The op.
        op: &'static str,
        /// What is wrong with the data.
        source: DataError,
    },
    /// The kernel cannot write a result over an operand.
    #[error("{op} cannot have result {result} on operand {operand}")]
    NotInPlace {
        /// The op.
        op: &'static str,
        /// The result, from 0.
        result: usize,
        /// The operand, from 0.
        operand: usize,
    },
    /// The scratch is larger than the machine can address.
    #[error("too much scratch")]
    Scratch,
    /// A bug in the kernel, with the panic's message.
    #[error("its kernel panicked: {0}")]
    Panicked(String),
}

/// What is wrong with operands' data, or with a call that was not checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum DataError {
    /// An index is not a position along its dimension.
    #[error("index {index} is not in 0..{size}")]
    Index {
        /// The index.
        index: i64,
        /// The dimension's size.
        size: usize,
    },
    /// The same, where negative indices count from the end.
    #[error("index {index} is not in -{size}..{size}")]
    SignedIndex {
        /// The index.
        index: i64,
        /// The dimension's size.
        size: usize,
    },
    /// The kernel's check refuses this element type.
    #[error("no kernel for {0:?}")]
    NoKernel(DType),
    /// The kernel's check refuses any other rank.
    #[error("{tensor} should have rank 2")]
    NoMatrix {
        /// `operand 0` or `result 0`.
        tensor: &'static str,
    },
}
