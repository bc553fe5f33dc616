//! What is wrong with a file: where, what, and what would help.

use std::fmt;

/// Why a file could not be read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    /// The file's name as the caller gave it; may be empty.
    pub file: String,
    /// The part of the file: a line, a byte, an event; may be empty.
    pub place: String,
    /// What is wrong there.
    pub message: String,
    /// What would help; may be empty.
    pub help: String,
}

impl Error {
    pub(crate) fn new(place: impl Into<String>, message: impl Into<String>) -> Error {
        Error {
            file: String::new(),
            place: place.into(),
            message: message.into(),
            help: String::new(),
        }
    }
    /// An error on a line, the first of which is 1.
    pub(crate) fn line(line: usize, message: impl Into<String>) -> Error {
        Error::new(format!("line {line}"), message)
    }
    pub(crate) fn help(self, help: impl Into<String>) -> Error {
        Error {
            help: help.into(),
            ..self
        }
    }
    pub(crate) fn of(self, file: &str) -> Error {
        Error {
            file: file.into(),
            ..self
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in [&self.file, &self.place] {
            if !part.is_empty() {
                write!(f, "{part}: ")?;
            }
        }
        f.write_str(&self.message)?;
        if !self.help.is_empty() {
            write!(f, "; {}", self.help)?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}
