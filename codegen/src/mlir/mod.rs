//! MLIR with types. Both emitters of kernels use it.
//!
//! A `Builder` appends operations to the blocks of a function. Each operation checks its operands
//! when it is built, and values have types. So an error is found here, with the name of the
//! operation and the line that built it, and not later by the parser of `lighterage-mlir`. The
//! first error is stored, and `Builder::finish` returns it. The value of a wrong operation has the
//! requested type, so building continues.
//!
//! Only the operations that kernels use exist. `print` turns them into text, which is sent to the
//! other process. Only `print` knows MLIR's syntax.

mod builder;
mod error;
mod ops;
mod print;
#[cfg(test)]
mod tests;
mod types;

pub(crate) use builder::{
    Body, Builder, Cache, Emit, Factors, Function, Layout, Module, Parameter, Shared, Step, Value,
};
pub use error::{Error, Mismatch};
pub(crate) use ops::{Arith, Convert, Predicate, Special, select};
pub use types::{Kind, Space, Type};
