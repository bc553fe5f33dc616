//! What can go wrong between an artifact and its tensors, in the user's words.

use artifact::ReadError;

/// Why the runtime refuses or stops.
#[derive(Clone, PartialEq, Debug)]
pub enum Error {
    /// The artifact's file cannot be read.
    Read(ReadError),
    /// The artifact is not one that the compiler would write: running it could corrupt memory or
    /// never end.
    Invalid(String),
    /// The artifact asks for what this machine cannot do.
    Unsupported(String),
    /// The machine has too little memory, or too few threads, for the artifact.
    Resources(String),
    /// The host asked for what does not exist or is not ready: an unknown name, a wrong size, a
    /// state without a value.
    Host(String),
    /// A command failed while a step ran. The machine is stopped from then on.
    Failed {
        /// The schedule's line.
        line: String,
        /// What its kernel says.
        why: String,
    },
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Read(e) => e.fmt(f),
            Error::Invalid(why) => write!(f, "invalid artifact: {why}"),
            Error::Unsupported(what) => write!(f, "unsupported: {what}"),
            Error::Resources(what) | Error::Host(what) => f.write_str(what),
            Error::Failed { line, why } => write!(f, "line {line} failed: {why}"),
        }
    }
}

impl std::error::Error for Error {}

impl From<ReadError> for Error {
    fn from(e: ReadError) -> Error {
        Error::Read(e)
    }
}
