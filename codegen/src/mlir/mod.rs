//! MLIR with types: what both emitters of kernels write.
//!
//! A `Builder` appends operations to the blocks of a function. Each operation checks its operands
//! when it is built, and values know their type, so that a mistake is found here, with the name of
//! the operation and the line that built it, and not by the parser of the program that compiles
//! (`lighterage-mlir`). The first mistake is kept and returned by `Builder::finish`; the value of
//! a wrong operation has the type that was asked for, so building goes on.
//!
//! Only the operations that kernels use exist. `print` turns them into text, and is the only place
//! that knows MLIR's syntax: text is what goes to the other process.

mod builder;
mod error;
mod ops;
mod print;
#[cfg(test)]
mod tests;
mod types;

pub(crate) use builder::{
    Body, Builder, Cache, Emit, Function, Layout, Module, Parameter, Shared, Step, Value,
};
pub use error::{Error, Mismatch};
pub(crate) use ops::{Arith, Convert, Predicate, Special, select};
pub use types::{Kind, Space, Type};
