//! Why a call cannot be lowered, and why a file cannot be read.

use std::borrow::Cow;

/// Results of lowering.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call cannot be expressed by the ops of the table.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No lowering is known for the operator.
    #[error("no op for it")]
    NoOp,
    /// An argument that the operator needs is not given.
    #[error("the argument {0} is missing")]
    Missing(String),
    /// An argument is of another kind than the operator takes.
    #[error("the argument {name} is not {expected}")]
    Kind {
        /// The argument's name.
        name: String,
        /// The expected kind, with its article.
        expected: String,
    },
    /// An argument that may change the result was not read.
    #[error("the argument {0} is not known")]
    Unread(String),
    /// The operands or the attributes do not fit an op.
    #[error("{0}")]
    Op(String),
    /// The nodes do not fit the graph.
    #[error(transparent)]
    Graph(#[from] ir::graph::Error),
    /// A result's type differs from the file's.
    #[error("the file gives {name} the type {declared}, its operands give {inferred}")]
    Type {
        /// The result's name.
        name: String,
        /// The type in the file.
        declared: String,
        /// The type that follows from the operands.
        inferred: String,
    },
    /// A result that the file names is not computed.
    #[error("result {0} is not computed")]
    NotComputed(String),
    /// This form of the operator is not supported.
    #[error("{0}")]
    Inexpressible(Cow<'static, str>),
}

impl From<&'static str> for Error {
    fn from(why: &'static str) -> Error {
        Error::Inexpressible(why.into())
    }
}

impl From<ir::op::AttrError> for Error {
    fn from(error: ir::op::AttrError) -> Error {
        Error::Op(error.to_string())
    }
}

impl From<ir::op::ShapeError> for Error {
    fn from(error: ir::op::ShapeError) -> Error {
        Error::Op(error.to_string())
    }
}

impl From<ir::op::Misfit> for Error {
    fn from(error: ir::op::Misfit) -> Error {
        Error::Op(error.to_string())
    }
}

impl From<ir::types::TypeError> for Error {
    fn from(error: ir::types::TypeError) -> Error {
        Error::Op(error.to_string())
    }
}

/// Errors of other kinds are text.
impl From<String> for Error {
    fn from(error: String) -> Error {
        Error::Op(error)
    }
}

/// Why a file could not be read: the place, the error, and a hint.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{}{}{message}{}", prefix(.file), prefix(.place), suffix(.help))]
pub struct FileError {
    /// The file's name as the caller gave it; may be empty.
    pub file: String,
    /// The part of the file: an entry of an archive, a node, a line, a byte; may be empty.
    pub place: String,
    /// What is wrong there.
    pub message: String,
    /// A hint; may be empty.
    pub help: String,
}

fn prefix(part: &str) -> String {
    if part.is_empty() {
        String::new()
    } else {
        format!("{part}: ")
    }
}

fn suffix(help: &str) -> String {
    if help.is_empty() {
        String::new()
    } else {
        format!("; {help}")
    }
}

impl FileError {
    /// An error at a place; [`FileError::of`] adds the file.
    pub fn new(place: impl Into<String>, message: impl Into<String>) -> FileError {
        FileError {
            file: String::new(),
            place: place.into(),
            message: message.into(),
            help: String::new(),
        }
    }
    /// An error on a line. Lines are counted from 1.
    pub fn line(line: usize, message: impl Into<String>) -> FileError {
        FileError::new(format!("line {line}"), message)
    }
    /// The same error with a hint.
    pub fn help(self, help: impl Into<String>) -> FileError {
        FileError {
            help: help.into(),
            ..self
        }
    }
    /// The same error, in this file.
    pub fn of(self, file: impl Into<String>) -> FileError {
        FileError {
            file: file.into(),
            ..self
        }
    }
    /// The same error, in a part of this place.
    pub fn within(self, place: &str) -> FileError {
        let place = if self.place.is_empty() {
            place.to_string()
        } else {
            format!("{place}: {}", self.place)
        };
        FileError { place, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_file_the_place_and_what_helps() {
        let error = FileError::new("line 3", "no number");
        assert_eq!(error.to_string(), "line 3: no number");
        let error = error.of("a.csv").help("remove it");
        assert_eq!(error.to_string(), "a.csv: line 3: no number; remove it");
        assert_eq!(FileError::new("", "is empty").to_string(), "is empty");
        let within = |place: &str| {
            FileError::new(place, "is wrong")
                .within("node add")
                .to_string()
        };
        assert_eq!(within("x"), "node add: x: is wrong");
        assert_eq!(within(""), "node add: is wrong");
    }
}
