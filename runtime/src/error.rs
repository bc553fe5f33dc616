//! Errors of loading and running an artifact, in the user's words.

use artifact::ReadError;

/// Why the runtime refuses or stops.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum Error {
    /// The artifact's file cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The artifact is not one that the compiler would write: running it could corrupt memory or
    /// never end.
    #[error("invalid artifact: {0}")]
    Invalid(String),
    /// The artifact needs something that this machine cannot do.
    #[error("unsupported: {0}")]
    Unsupported(String),
    /// The machine has too little memory, or too few threads, for the artifact.
    #[error("{0}")]
    Resources(String),
    /// The host asked for something that does not exist or is not ready: an unknown name, a wrong
    /// size, a state without a value.
    #[error("{0}")]
    Host(String),
    /// The device failed while a step ran, or is stuck. The machine is stopped from then on.
    #[error("line {line} failed: {why}")]
    Device {
        /// The schedule's line, as far as it is known.
        line: String,
        /// The driver's reason.
        why: String,
    },
    /// A command failed while a step ran. The machine is stopped from then on.
    #[error("line {line} failed: {why}")]
    Failed {
        /// The schedule's line.
        line: String,
        /// The kernel's reason.
        why: String,
    },
}
