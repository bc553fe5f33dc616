//! Runs an artifact; knows nothing of the compiler.
//!
//! ```no_run
//! # fn main() -> Result<(), lighterage_runtime::Error> {
//! use lighterage_runtime::{Machine, Options, StateInit};
//!
//! let mut machine = Machine::new(artifact::read_file("gpt2.lit")?, Options::default())?;
//! machine.initialise(&StateInit { seed: 1, std: Some(0.02) })?;
//! machine.write_input("tokens", &[0; 4096])?;
//! let report = machine.step()?;
//! let loss = machine.read_output("loss")?;
//! # Ok(()) }
//! ```
//!
//! From top to bottom: [`validate`](validate()) proves that an artifact may be run; [`Machine`]
//! runs it on threads (or shuffled, to test the plan), on a [`Backend`], which has the memory; on
//! the CPU, [`kernels`] compute on a [`Team`]. **Invariant:** unsafe code is only in `memory`, in
//! [`kernel`], in one call of the kernels' `product`, in `code`, which loads and calls generated
//! kernels, and in `cuda`, at the border to a GPU's driver. All of it relies on the proofs of
//! `validate`.

mod access;
mod code;
#[cfg(feature = "cuda")]
pub mod cuda;
mod disk;
mod error;
mod float;
mod foreign;
mod init;
pub mod kernel;
pub mod kernels;
mod launch;
mod link;
mod machine;
mod memory;
pub mod profile;
mod ranges;
mod sync;
mod team;
mod trace;
mod validate;

pub use code::{Function, Loaded, ObjectError};
pub use disk::nameless;
pub use error::Error;
pub use foreign::{Foreign, ForeignCall};
pub use init::StateInit;
pub use machine::{
    Backend, CommandError, CommandId, Copy, Evaluation, EventId, Files, Holder, Launch, Lent,
    LentPlace, Machine, NotEvaluable, Options, Part, Port, Ran, StepReport, Steps, StreamId,
};
#[cfg(feature = "cuda")]
pub use machine::{Cuda, CudaOptions, ProductLibrary};
pub use memory::Borrowed;
pub use team::Team;
pub use trace::Span;
pub use validate::validate;
