//! Checkpoints: all states of a training run in a folder, which is whole or absent whatever happens
//! to the process, the machine or the disk. docs/checkpoints.md describes the files.
//!
//! A [`Store`] writes checkpoints to a folder, one process at a time. A [`Checkpoint`] reads one,
//! and trusts nothing in it: every tensor has a checksum. [`newest_first`] lists those of a folder.
//!
//! No decision depends on a clock: checkpoints are ordered by the step in their names.
//!
//! Source of the order of writes: Pillai et al., "All File Systems Are Not Created Equal: On the
//! Complexity of Crafting Crash-Consistent Applications", OSDI 2014.

mod error;
mod manifest;
mod read;
pub mod tensors;
mod write;

pub use error::Error;
pub use manifest::{FileRecord, Manifest};
pub use read::{Checkpoint, Entry, newest_first, verify_file};
pub use tensors::{Part, Source, Tensor};
pub use write::{Kept, Saved, Store, write_model};

/// The file with everything that is no tensor.
pub const MANIFEST: &str = "checkpoint.json";
/// The file that names the file of each of the model's tensors, as Hugging Face's libraries do.
pub const INDEX: &str = "model.safetensors.index.json";
/// The link to the newest checkpoint of a folder.
pub const LATEST: &str = "latest";

/// The name of a step's folder.
pub fn folder_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step of a folder's name.
pub(crate) fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (folder_name(step) == name).then_some(step)
}
