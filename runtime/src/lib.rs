//! Runs an artifact; knows nothing of the compiler.

pub mod kernel;
pub mod kernels;
