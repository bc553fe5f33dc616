//! Why a checkpoint cannot be written or read.

use std::io;
use std::path::{Path, PathBuf};

/// Why a checkpoint cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refuses.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file differs from what was written.
    #[error("{}: {why}", path.display())]
    Damaged {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// Another process writes checkpoints to the folder.
    #[error(
        "{}: another process{holder} writes checkpoints there; end it, or name another folder",
        path.display()
    )]
    Locked {
        /// The folder.
        path: PathBuf,
        /// ` (4711)`: its number, if that is known.
        holder: String,
    },
}

impl Error {
    pub(crate) fn damaged(path: &Path, why: impl Into<String>) -> Error {
        Error::Damaged {
            path: path.to_path_buf(),
            why: why.into(),
        }
    }
}

/// Adds the path to a system's error.
pub(crate) fn at(path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Io {
        path: path.to_path_buf(),
        source,
    }
}
