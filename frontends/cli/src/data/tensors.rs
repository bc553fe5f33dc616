//! Tensors in safetensors files: initial values, batches, saved states.

use super::files::{Input, save_atomically};
use crate::failure::Failure;
use artifact::{DType, Operand};
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, Metadata, TensorInfo, View};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// The type of a tensor, and the range of its bytes after the header.
struct Entry {
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: Range<u64>,
}

/// A safetensors file. Only its header is in memory, unless it comes from a pipe.
pub(crate) struct Tensors {
    input: Input,
    /// Bytes of the header, after which the tensors lie.
    header: u64,
    entries: BTreeMap<String, Entry>,
}

impl Tensors {
    /// Opens a file; a cut or damaged file is an error.
    pub(crate) fn open(path: &Path) -> Result<Tensors, Failure> {
        let input = Input::open(path)?;
        let (header, metadata) = read_header(&input)?;
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
            input,
            header,
            entries: metadata.tensors().into_iter().map(entry).collect(),
        })
    }

    /// The file.
    pub(crate) fn path(&self) -> &Path {
        self.input.path()
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
    pub(crate) fn get(&self, name: &str, operand: &Operand) -> Result<Vec<u8>, Failure> {
        self.read(name, self.entry(name, operand)?)
    }
    /// The type and the bytes of a tensor of floating-point numbers; `None` if there is no such
    /// tensor.
    pub(crate) fn floats(&self, name: &str) -> Result<Option<(DType, Vec<u8>)>, Failure> {
        let entry = self.entries.get(name);
        let floats = [DType::F32, DType::BF16, DType::F16, DType::F64];
        let dtype = |entry: &&Entry| floats.into_iter().find(|&t| file_dtype(t) == entry.dtype);
        let found = entry.and_then(|entry| Some((dtype(&entry)?, entry)));
        found
            .map(|(dtype, entry)| Ok((dtype, self.read(name, entry)?)))
            .transpose()
    }
    fn read(&self, name: &str, entry: &Entry) -> Result<Vec<u8>, Failure> {
        let start = self.header + entry.bytes.start;
        let length = (entry.bytes.end - entry.bytes.start) as usize;
        self.input.read(start, length).map_err(|e| {
            let path = self.path().display();
            Failure::System(format!("{path}: {name} cannot be read: {e}"))
        })
    }
    /// Checks that there is a tensor of an operand's type.
    pub(crate) fn check(&self, name: &str, operand: &Operand) -> Result<(), Failure> {
        self.entry(name, operand).map(|_| ())
    }
    /// A tensor that must have an operand's type. The error names the expected and the actual
    /// type.
    fn entry(&self, name: &str, operand: &Operand) -> Result<&Entry, Failure> {
        let path = self.path().display();
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

/// The number of bytes of the header with its length field, and its contents.
fn read_header(input: &Input) -> Result<(u64, Metadata), Failure> {
    let (path, length) = (input.path(), input.length());
    let read = |start: u64, length: usize| {
        let bytes = input.read(start, length);
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
pub(super) fn dtype_name(dtype: DType) -> String {
    format!("{dtype:?}").to_lowercase()
}

/// `f32[2,32]`.
pub(crate) fn type_name(dtype: &str, shape: &[u64]) -> String {
    let shape: Vec<String> = shape.iter().map(u64::to_string).collect();
    format!("{}[{}]", dtype.to_lowercase(), shape.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;
    use artifact::Place;
    use std::fs::{self, File};

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
        assert_eq!(tensors.get("w", &operand).unwrap(), [7; 8]);

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
