//! Safetensors files, written and read piece by piece: no tensor is in memory as a whole.

use crate::{Error, error::at};
use artifact::DType;
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

/// Bytes that are read and written at a time: few calls, and little memory beside the states.
pub const CHUNK_BYTES: usize = 1 << 20;
/// Bytes of the length that a safetensors file begins with.
const LENGTH_BYTES: usize = 8;
/// The longest header that the format allows.
const MOST_HEADER_BYTES: u64 = 100_000_000;

/// The files of a checkpoint in which a tensor lies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Part {
    /// A parameter or a buffer that training changes.
    Model,
    /// One that it does not change.
    Frozen,
    /// A constant of the step.
    Constants,
    /// What only training needs: moments, masters, random states.
    Training,
}

impl Part {
    /// All.
    pub const ALL: [Part; 4] = [Part::Model, Part::Frozen, Part::Constants, Part::Training];

    /// The first word of its files' names.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Part::Model => "model",
            Part::Frozen => "frozen",
            Part::Constants => "constants",
            Part::Training => "training",
        }
    }

    /// Whether no step changes its tensors.
    pub fn is_frozen(self) -> bool {
        matches!(self, Part::Frozen | Part::Constants)
    }

    /// Whether its tensors are the model's, so that the index for other programs names them.
    pub fn is_model(self) -> bool {
        matches!(self, Part::Model | Part::Frozen)
    }
}

/// A tensor to be written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Where it is written.
    pub part: Part,
}

impl Tensor {
    /// Its size. A state of a validated step has one.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.bytes()
    }
}

/// Where the bytes of tensors come from: the tensor's position in the list of all, the first byte,
/// and the bytes to fill, whose number is a multiple of 8 except at a tensor's end.
pub type Source<'a> = dyn FnMut(usize, u64, &mut [u8]) -> io::Result<()> + 'a;

/// The checksums of what was written.
pub(crate) struct Written {
    pub(crate) header: u32,
    /// In the order of the tensors.
    pub(crate) tensors: Vec<u32>,
}

#[derive(Serialize)]
struct Header<'a> {
    #[serde(rename = "__metadata__", skip_serializing_if = "Option::is_none")]
    metadata: Option<BTreeMap<&'a str, &'a str>>,
    #[serde(flatten)]
    tensors: BTreeMap<&'a str, TensorInfo>,
}

/// Writes tensors as a safetensors file, in their order: those with the largest elements should be
/// first, so that all are aligned. `all`: the list in which `numbers` are positions. `framework`:
/// says `"format": "pt"`, without which transformers does not load a file.
pub(crate) fn write(
    out: &mut impl Write,
    all: &[Tensor],
    numbers: &[usize],
    framework: bool,
    source: &mut Source<'_>,
) -> io::Result<Written> {
    let mut infos = BTreeMap::new();
    let mut end = 0;
    for &number in numbers {
        let tensor = &all[number];
        let start = end;
        end += tensor.bytes() as usize;
        let info = TensorInfo {
            dtype: file_dtype(tensor.dtype),
            shape: tensor.shape.iter().map(|&d| d as usize).collect(),
            data_offsets: (start, end),
        };
        infos.insert(tensor.name.as_str(), info);
    }
    let json = serde_json::to_vec(&Header {
        metadata: framework.then(|| BTreeMap::from([("format", "pt")])),
        tensors: infos,
    })?;
    let length = json.len().next_multiple_of(LENGTH_BYTES);
    let mut header = (length as u64).to_le_bytes().to_vec();
    header.extend(json);
    header.resize(LENGTH_BYTES + length, b' ');
    out.write_all(&header)?;

    let mut chunk = vec![0; CHUNK_BYTES.min(end)];
    let mut checksums = Vec::with_capacity(numbers.len());
    for &number in numbers {
        let mut checksum = crc32fast::Hasher::new();
        for range in chunks(all[number].bytes()) {
            let chunk = &mut chunk[..(range.end - range.start) as usize];
            source(number, range.start, chunk)?;
            checksum.update(chunk);
            out.write_all(chunk)?;
        }
        checksums.push(checksum.finalize());
    }
    Ok(Written {
        header: crc32fast::hash(&header),
        tensors: checksums,
    })
}

/// Writes all tensors to one safetensors file, as the library `safetensors` orders them.
pub fn write_all(
    out: &mut impl Write,
    tensors: &[Tensor],
    source: &mut Source<'_>,
) -> io::Result<()> {
    let mut numbers: Vec<usize> = (0..tensors.len()).collect();
    numbers.sort_by(|&a, &b| by_alignment(&tensors[a], &tensors[b]));
    write(out, tensors, &numbers, false, source).map(|_| ())
}

/// The order of tensors in a file: larger elements first, then by name.
pub(crate) fn by_alignment(a: &Tensor, b: &Tensor) -> std::cmp::Ordering {
    let size = |tensor: &Tensor| file_dtype(tensor.dtype);
    size(b).cmp(&size(a)).then_with(|| a.name.cmp(&b.name))
}

/// The pieces of a tensor's bytes; an empty tensor has one.
pub(crate) fn chunks(bytes: u64) -> impl Iterator<Item = Range<u64>> {
    let starts = (0..bytes.max(1)).step_by(CHUNK_BYTES);
    starts.map(move |start| start..(start + CHUNK_BYTES as u64).min(bytes))
}

/// Reads the header of a file of `length` bytes by `read`, which returns the bytes from a position.
/// Returns the header's bytes, with the length that comes before them, and its contents.
pub fn read_header(
    path: &Path,
    length: u64,
    read: impl Fn(u64, usize) -> io::Result<Vec<u8>>,
) -> Result<(Vec<u8>, Metadata), Error> {
    let damaged = |e: SafeTensorError| {
        let why = format!("not a whole safetensors file: {e}");
        Error::damaged(path, why)
    };
    if length < LENGTH_BYTES as u64 {
        return Err(damaged(SafeTensorError::HeaderTooSmall));
    }
    let json_bytes = read(0, LENGTH_BYTES).map_err(at(path))?;
    let json_bytes = u64::from_le_bytes(json_bytes[..].try_into().expect("8 bytes"));
    if json_bytes > MOST_HEADER_BYTES {
        return Err(damaged(SafeTensorError::HeaderTooLarge));
    }
    let header = LENGTH_BYTES as u64 + json_bytes;
    if header > length {
        return Err(damaged(SafeTensorError::InvalidHeaderLength));
    }
    let bytes = read(0, header as usize).map_err(at(path))?;
    let metadata: Metadata = serde_json::from_slice(&bytes[LENGTH_BYTES..])
        .map_err(|e| damaged(SafeTensorError::InvalidHeaderDeserialization(e)))?;
    if header.checked_add(metadata.data_len() as u64) != Some(length) {
        return Err(damaged(SafeTensorError::MetadataIncompleteBuffer));
    }
    Ok((bytes, metadata))
}

/// The type in files.
pub fn file_dtype(dtype: DType) -> Dtype {
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

/// The type of a file's type; `None` if steps have no such type.
pub fn dtype(dtype: Dtype) -> Option<DType> {
    DType::ALL.into_iter().find(|&d| file_dtype(d) == dtype)
}
