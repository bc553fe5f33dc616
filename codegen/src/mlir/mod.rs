//! Types and operations of MLIR that kernels are made of, and which operands an operation takes.

#![allow(
    dead_code,
    reason = "some operations are written by the emitters' text so far"
)]

mod error;
mod ops;
mod types;

pub use error::{Error, Mismatch};
pub(crate) use ops::{Arith, Convert, Predicate, select};
pub use types::{Kind, Space, Type};
