//! A column of integers, or of lists of integers, of a Parquet or an Arrow file, from its first row
//! to its last: the ids of tokens, as data sets of Hugging Face have them.
//!
//! Files may come from anywhere: they are read in pieces, in the order of their rows. A reader
//! gives every integer of the column or an error that says what is wrong. It does not panic. Memory
//! is that of a page of Parquet, and of some buffers of Arrow, however large the file is; what a
//! page inflates to is never larger than its stated size, and nothing is allocated for a stated
//! size before its bytes are there.
//!
//! The readers are ours, because the published ones are general. `parquet` and `arrow-ipc` add 3.4
//! MB to the command and some 30 crates. They inflate a page to its end, whatever its size, and
//! allocate what a file states. What compresses pages comes from crates.
//!
//! `parquet` follows <https://parquet.apache.org/docs/file-format/>, `arrow`
//! <https://arrow.apache.org/docs/format/Columnar.html>.

mod arrow;
mod bits;
mod codec;
mod parquet;
mod section;

use std::io;

/// Bytes that may be read anywhere.
pub trait Source {
    /// Their number.
    fn length(&self) -> u64;

    /// Reads `length` bytes from a position.
    fn read(&self, start: u64, length: usize) -> io::Result<Vec<u8>>;
}

/// What takes a column.
pub trait Sink {
    /// The next integer.
    fn integer(&mut self, integer: i64) -> io::Result<()>;

    /// The end of a list. A column of integers has none.
    fn list_ends(&mut self) -> io::Result<()>;
}

/// Why a column could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is not what it should be, or has no such column.
    #[error("{0}")]
    File(String),
    /// The system cannot read the file.
    #[error("{0}")]
    Read(io::Error),
    /// The sink failed.
    #[error("{0}")]
    Sink(io::Error),
}

impl Error {
    fn file(why: impl Into<String>) -> Error {
        Error::File(why.into())
    }
}

impl From<io::Error> for Error {
    /// An error of the system has a number; those of decoders have none.
    fn from(error: io::Error) -> Error {
        match (error.raw_os_error(), error.kind()) {
            (Some(_), _) => Error::Read(error),
            (None, io::ErrorKind::UnexpectedEof) => Error::file("the file is cut, or damaged"),
            (None, _) => Error::File(format!("the file is damaged: {error}")),
        }
    }
}

/// Reads the column of this name. Without a name it is `input_ids`, or else the only one of
/// integers or lists of integers. What the file begins with says what it is.
pub fn read(source: &dyn Source, name: Option<&str>, sink: &mut dyn Sink) -> Result<(), Error> {
    let head = source.read(0, source.length().min(8) as usize)?;
    match &*head {
        [b'P', b'A', b'R', b'1', ..] => parquet::read(source, name, sink),
        [b'P', b'A', b'R', b'E', ..] => Err(Error::file("the file is encrypted")),
        b"ARROW1\0\0" => arrow::read_file(source, name, sink),
        [0xFF, 0xFF, 0xFF, 0xFF, ..] => arrow::read_stream(source, name, sink),
        [b'F', b'E', b'A', b'1', ..] => Err(Error::file(
            "a Feather file of version 1; write version 2, which is an Arrow file",
        )),
        _ => Err(Error::file("neither a Parquet nor an Arrow file")),
    }
}

/// A column of the file, for the choice.
struct Named {
    name: String,
    /// Its type, for people.
    text: String,
    /// Whether it can be read: integers, or lists of them.
    fits: bool,
}

/// The name that data sets of Hugging Face give to ids.
const USUAL: &str = "input_ids";
/// Columns in a message.
const MOST_NAMED: usize = 20;

/// The number of the column to read.
fn choose(columns: &[Named], wanted: Option<&str>) -> Result<usize, Error> {
    let called = |name: &str| columns.iter().position(|column| column.name == name);
    let fits = |&at: &usize| columns[at].fits;
    let refused = |why: String| {
        let mut named: Vec<String> = columns
            .iter()
            .take(MOST_NAMED)
            .map(|Named { name, text, .. }| format!("{name} ({text})"))
            .collect();
        if MOST_NAMED < columns.len() {
            named.push(format!("{} more", columns.len() - MOST_NAMED));
        }
        let has = match named.is_empty() {
            true => "no column".to_string(),
            false => named.join(", "),
        };
        Err(Error::File(format!("{why}; the file has {has}")))
    };
    if let Some(wanted) = wanted {
        return match called(wanted) {
            Some(at) if columns[at].fits => Ok(at),
            Some(_) => refused(format!(
                "the column {wanted} has neither integers nor lists of integers"
            )),
            None => refused(format!("there is no column {wanted}")),
        };
    }
    if let Some(at) = called(USUAL).filter(fits) {
        return Ok(at);
    }
    let all: Vec<usize> = (0..columns.len()).filter(fits).collect();
    match all[..] {
        [at] => Ok(at),
        [] => refused("no column has integers or lists of integers".into()),
        _ => refused(format!(
            "there is no column {USUAL}, and several have integers: name one with --token-column"
        )),
    }
}

/// A place in a column, for errors.
struct Place<'a> {
    column: &'a str,
    row: u64,
}

impl Place<'_> {
    fn is_null(&self) -> Error {
        Error::File(format!("row {} of {} is null", self.row, self.column))
    }

    fn has_null(&self) -> Error {
        Error::File(format!("row {} of {} has a null", self.row, self.column))
    }

    fn too_large(&self) -> Error {
        let Place { column, row } = self;
        Error::File(format!(
            "row {row} of {column} has an integer that is larger than 63 bits"
        ))
    }
}
