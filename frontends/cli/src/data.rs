//! Tensors in files: batches, initial values, saved states. And files that are either old or whole.

use crate::failure::Failure;
use crate::size;
use artifact::{DType, Operand};
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, Metadata, TensorInfo, View};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Reads a whole file. A named pipe is refused, because reading it could wait forever. The file of
/// the shell's `<(..)` is read.
pub(crate) fn read_whole(path: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |e: io::Error| Failure::Input(format!("{}: {e}", path.display()));
    if !is_open_already(path) {
        check_regular(path)?;
    }
    fs::read(path).map_err(failed)
}

/// True for the file of the shell's `<(..)`, and for standard input.
fn is_open_already(path: &Path) -> bool {
    path.starts_with("/dev/fd")
        || path.starts_with("/proc/self/fd")
        || path == Path::new("/dev/stdin")
}

fn check_regular(path: &Path) -> Result<(), Failure> {
    let metadata =
        fs::metadata(path).map_err(|e| Failure::Input(format!("{}: {e}", path.display())))?;
    if metadata.is_file() {
        return Ok(());
    }
    Err(Failure::Input(format!(
        "{}: not a regular file",
        path.display()
    )))
}

/// The type of a tensor, and the range of its bytes after the header.
struct Entry {
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: Range<u64>,
}

/// The source of the tensors' bytes.
enum Source {
    /// An open file, which may be larger than memory; each tensor is read when it is needed.
    File(File),
    /// The whole file, from a pipe.
    Memory(Vec<u8>),
}

/// A safetensors file. Only its header is in memory, unless it comes from a pipe.
pub(crate) struct Tensors {
    path: PathBuf,
    source: Source,
    /// Bytes of the header, after which the tensors lie.
    header: u64,
    entries: BTreeMap<String, Entry>,
}

impl Tensors {
    /// Opens a file; a cut or damaged file is an error.
    pub(crate) fn open(path: &Path) -> Result<Tensors, Failure> {
        let failed = |e: io::Error| Failure::Input(format!("{}: {e}", path.display()));
        let (source, length) = if is_open_already(path) {
            let bytes = read_whole(path)?;
            let length = bytes.len() as u64;
            (Source::Memory(bytes), length)
        } else {
            // Before it is opened: opening a named pipe waits for a writer.
            check_regular(path)?;
            let file = File::open(path).map_err(failed)?;
            let length = file.metadata().map_err(failed)?.len();
            (Source::File(file), length)
        };
        let (header, metadata) = read_header(path, &source, length)?;
        let entry = |(name, info): (String, &TensorInfo)| {
            let (start, end) = info.data_offsets;
            let entry = Entry {
                dtype: info.dtype,
                shape: info.shape.iter().map(|&d| d as u64).collect(),
                bytes: start as u64..end as u64,
            };
            (name, entry)
        };
        Ok(Tensors {
            path: path.to_path_buf(),
            source,
            header,
            entries: metadata.tensors().into_iter().map(entry).collect(),
        })
    }

    /// The file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
    /// All names, sorted.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }
    /// True if there is a tensor with this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }
    /// The bytes of a tensor that must have an operand's type.
    pub(crate) fn get(&self, name: &str, operand: &Operand) -> Result<Cow<'_, [u8]>, Failure> {
        let entry = self.entry(name, operand)?;
        let start = self.header + entry.bytes.start;
        let length = (entry.bytes.end - entry.bytes.start) as usize;
        self.source.read(start, length).map_err(|e| {
            let path = self.path.display();
            Failure::System(format!("{path}: {name} cannot be read: {e}"))
        })
    }
    /// A tensor that must have an operand's type. The error names the expected and the actual
    /// type.
    fn entry(&self, name: &str, operand: &Operand) -> Result<&Entry, Failure> {
        let path = self.path.display();
        let expected = type_name(&dtype_name(operand.dtype), &operand.shape);
        let Some(entry) = self.entries.get(name) else {
            let near = passes::explain::nearest(name, self.names());
            let near = if near.is_empty() {
                String::new()
            } else {
                format!("; it has {}", near.join(", "))
            };
            return Err(Failure::Input(format!(
                "{path}: there is no {name}, which should be {expected}{near}"
            )));
        };
        if file_dtype(operand.dtype) != entry.dtype || operand.shape != entry.shape {
            let known = ALL_DTYPES
                .into_iter()
                .find(|&dtype| file_dtype(dtype) == entry.dtype);
            let found = type_name(
                &known.map_or(format!("{:?}", entry.dtype), dtype_name),
                &entry.shape,
            );
            return Err(Failure::Input(format!(
                "{path}: {name} is {found}, it should be {expected}"
            )));
        }
        Ok(entry)
    }
}

impl Source {
    fn read(&self, start: u64, length: usize) -> io::Result<Cow<'_, [u8]>> {
        match self {
            Source::Memory(bytes) => Ok(bytes[start as usize..][..length].into()),
            Source::File(file) => {
                let mut bytes = vec![0; length];
                file.read_exact_at(&mut bytes, start)?;
                Ok(bytes.into())
            }
        }
    }
}

/// The number of bytes of the header with its length field, and its contents. `length` is the
/// file's.
fn read_header(path: &Path, source: &Source, length: u64) -> Result<(u64, Metadata), Failure> {
    let read = |start: u64, length: usize| {
        let bytes = source.read(start, length);
        bytes.map_err(|e| Failure::Input(format!("{}: {e}", path.display())))
    };
    let damaged = |e: SafeTensorError| {
        let path = path.display();
        Failure::Input(format!("{path}: not a whole safetensors file: {e}"))
    };
    if length < LENGTH_BYTES as u64 {
        return Err(damaged(SafeTensorError::HeaderTooSmall));
    }
    let json_bytes = read(0, LENGTH_BYTES)?;
    let json_bytes = u64::from_le_bytes(json_bytes[..].try_into().expect("8 bytes"));
    if json_bytes > MOST_HEADER_BYTES {
        return Err(damaged(SafeTensorError::HeaderTooLarge));
    }
    let header = LENGTH_BYTES as u64 + json_bytes;
    if header > length {
        return Err(damaged(SafeTensorError::InvalidHeaderLength));
    }
    let json = read(LENGTH_BYTES as u64, json_bytes as usize)?;
    let metadata: Metadata = serde_json::from_slice(&json)
        .map_err(|e| damaged(SafeTensorError::InvalidHeaderDeserialization(e)))?;
    if header.checked_add(metadata.data_len() as u64) != Some(length) {
        return Err(damaged(SafeTensorError::MetadataIncompleteBuffer));
    }
    Ok((header, metadata))
}

/// Bytes of the length that a safetensors file begins with.
const LENGTH_BYTES: usize = 8;
/// The longest header that the format allows.
const MOST_HEADER_BYTES: u64 = 100_000_000;

/// A data set: batch `K` has a tensor `batch.K.INPUT` for each input.
pub(crate) struct Batches {
    tensors: Tensors,
    count: u64,
}

impl Batches {
    /// Opens a file and checks that every batch has every input, of the right type.
    pub(crate) fn open(path: &Path, inputs: &[(String, Operand)]) -> Result<Batches, Failure> {
        let tensors = Tensors::open(path)?;
        let mut numbers: Vec<u64> = tensors.names().filter_map(batch_number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let count = numbers.len() as u64;
        let wanted = || {
            inputs
                .iter()
                .map(|(name, _)| format!("batch.0.{name}"))
                .collect::<Vec<_>>()
                .join(", ")
        };
        if count == 0 && !inputs.is_empty() {
            let found: Vec<&str> = tensors.names().take(5).collect();
            let found = if found.is_empty() {
                "nothing".to_string()
            } else {
                found.join(", ")
            };
            let message = format!(
                "{}: there is no batch; expected {}; found {found}",
                path.display(),
                wanted()
            );
            return Err(Failure::Input(message));
        }
        if let Some(gap) = numbers
            .iter()
            .zip(0..)
            .find_map(|(&number, k)| (number != k).then_some(k))
        {
            let last = numbers[numbers.len() - 1];
            let message = format!(
                "{}: batches are numbered from 0 without gaps: batch.{gap} is missing, \
                 batch.{last} is there",
                path.display()
            );
            return Err(Failure::Input(message));
        }
        for number in 0..count {
            for (name, operand) in inputs {
                tensors.entry(&format!("batch.{number}.{name}"), operand)?;
            }
        }
        Ok(Batches { tensors, count })
    }

    /// The number of batches.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// The bytes of an input in a batch; after the last batch the first follows.
    pub(crate) fn get(
        &self,
        step: u64,
        name: &str,
        operand: &Operand,
    ) -> Result<Cow<'_, [u8]>, Failure> {
        self.tensors.get(
            &format!("batch.{}.{name}", step % self.count.max(1)),
            operand,
        )
    }
}

/// `K` of `batch.K.NAME`.
fn batch_number(name: &str) -> Option<u64> {
    let (number, _) = name.strip_prefix("batch.")?.split_once('.')?;
    // "007" and "+7" are not batch numbers.
    number
        .parse()
        .ok()
        .filter(|parsed: &u64| parsed.to_string() == number)
}

/// A tensor to be saved.
pub(crate) struct Saved {
    /// Its element type.
    pub(crate) dtype: DType,
    /// Its shape.
    pub(crate) shape: Vec<usize>,
    /// Its bytes.
    pub(crate) bytes: Vec<u8>,
}

impl View for Saved {
    fn dtype(&self) -> Dtype {
        file_dtype(self.dtype)
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }
    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Saves tensors by name; the same tensors give the same bytes.
pub(crate) fn save(path: &Path, tensors: BTreeMap<String, Saved>) -> Result<(), Failure> {
    let bytes = safetensors::serialize(tensors, None)
        .map_err(|e| Failure::System(format!("{}: {e}", path.display())))?;
    save_atomically(path, &[&bytes])
}

/// Writes a file atomically: at every moment `path` is either the old file or the whole new one.
pub(crate) fn save_atomically(path: &Path, parts: &[&[u8]]) -> Result<(), Failure> {
    artifact::replace_file(path, parts)
        .map_err(|e| Failure::System(format!("{}: {e}", path.display())))
}

/// Checks that a file can be written, before hours of work on its contents.
pub(crate) fn check_writable(option: &str, path: &Path) -> Result<(), Failure> {
    let refused = |why: String| {
        Err(Failure::Input(format!(
            "{option} {}: {why}",
            path.display()
        )))
    };
    if path.is_dir() {
        return refused("a folder; name a file".into());
    }
    let folder = path
        .parent()
        .filter(|folder| *folder != Path::new(""))
        .unwrap_or(Path::new("."));
    match fs::metadata(folder) {
        Ok(metadata) if metadata.is_dir() => Ok(()),
        Ok(_) => refused(format!("{} is not a folder", folder.display())),
        Err(e) => refused(format!("folder {}: {e}", folder.display())),
    }
}

/// Every element type.
const ALL_DTYPES: [DType; 12] = [
    DType::Bool,
    DType::U8,
    DType::I8,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::F16,
    DType::BF16,
    DType::F32,
    DType::F64,
    DType::F8E4M3,
    DType::F8E5M2,
];

fn file_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::Bool => Dtype::BOOL,
        DType::U8 => Dtype::U8,
        DType::I8 => Dtype::I8,
        DType::I16 => Dtype::I16,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::F8E4M3 => Dtype::F8_E4M3,
        DType::F8E5M2 => Dtype::F8_E5M2,
    }
}

/// The name in text: `f32`.
fn dtype_name(dtype: DType) -> String {
    format!("{dtype:?}").to_lowercase()
}

/// `f32[2,32]`.
pub(crate) fn type_name(dtype: &str, shape: &[u64]) -> String {
    let shape: Vec<String> = shape.iter().map(u64::to_string).collect();
    format!("{}[{}]", dtype.to_lowercase(), shape.join(","))
}

/// The size of a file as text, for notes.
pub(crate) fn file_size(path: &Path) -> String {
    fs::metadata(path).map_or("?".into(), |metadata| size::short(metadata.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use artifact::Place;

    #[test]
    fn batches_are_numbered() {
        assert_eq!(batch_number("batch.12.input_ids"), Some(12));
        assert_eq!(batch_number("batch.0.a.b"), Some(0));
        for name in ["batch.x.a", "batch.1", "batch.+1.a", "batch.01.a", "loss"] {
            assert_eq!(batch_number(name), None, "{name}");
        }
    }

    #[test]
    fn a_file_that_is_cut_while_it_is_read_is_an_error() {
        let path = std::env::temp_dir().join(format!("lighterage-cut-{}", std::process::id()));
        let operand = Operand {
            dtype: DType::U8,
            shape: vec![8],
            place: Place { pool: 0, offset: 0 },
        };
        let saved = Saved {
            dtype: DType::U8,
            shape: vec![8],
            bytes: vec![7; 8],
        };
        save(&path, BTreeMap::from([("w".to_string(), saved)])).unwrap();
        let tensors = Tensors::open(&path).unwrap();
        assert_eq!(*tensors.get("w", &operand).unwrap(), [7; 8]);

        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(fs::metadata(&path).unwrap().len() - 1)
            .unwrap();
        fs::remove_file(&path).unwrap();
        let Err(Failure::System(message)) = tensors.get("w", &operand) else {
            panic!("bytes of a cut file were read");
        };
        assert!(message.contains("w cannot be read"), "{message}");
    }
}
