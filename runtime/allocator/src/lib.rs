//! Serves an address plan to a training framework.
//!
//! [`Plan`] is the file that the compiler writes; [`Allocator`] serves it; [`Recorder`] makes the
//! trace from which a plan is made. PyTorch calls `abi`. `docs/allocator.md` says how to use it.

pub mod abi;
mod allocator;
mod caching;
mod cuda;
mod error;
pub mod plan;
pub mod pool;
mod profile;
pub mod sequence;
mod spans;

pub use allocator::{Allocator, Stats};
pub use cuda::Cuda;
pub use error::AllocError;
pub use plan::Plan;
pub use pool::{Host, Pool, PoolError};
pub use profile::Recorder;
pub use sequence::Mismatches;
