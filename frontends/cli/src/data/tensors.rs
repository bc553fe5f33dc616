//! Tensors in safetensors files: initial values, batches.

use super::files::Input;
use crate::failure::Failure;
use artifact::{DType, Operand};
use checkpoint::tensors::{dtype, file_dtype, read_header};
use safetensors::tensor::{Dtype, TensorInfo};
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
        let read = |start: u64, length: usize| input.read(start, length);
        let (header, metadata) =
            read_header(path, input.length(), read).map_err(|e| Failure::Input(e.to_string()))?;
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
            header: header.len() as u64,
            input,
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
        let entry = self.entry(name, operand)?;
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
            let found = type_name(
                &dtype(entry.dtype).map_or(format!("{:?}", entry.dtype), dtype_name),
                &entry.shape,
            );
            return Err(Failure::Input(format!(
                "{path}: {name} is {found}, it should be {expected}"
            )));
        }
        Ok(entry)
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
    use checkpoint::{Part, Tensor};
    use std::fs::{self, File};

    #[test]
    fn a_file_that_is_cut_while_it_is_read_is_an_error() {
        let path = std::env::temp_dir().join(format!("lighterage-cut-{}", std::process::id()));
        let operand = Operand {
            dtype: DType::U8,
            shape: vec![8],
            place: Place { pool: 0, offset: 0 },
        };
        let tensor = Tensor {
            name: "w".into(),
            dtype: DType::U8,
            shape: vec![8],
            part: Part::Model,
        };
        let mut file = File::create(&path).unwrap();
        checkpoint::tensors::write_all(&mut file, &[tensor], &mut |_, _, bytes| {
            bytes.fill(7);
            Ok(())
        })
        .unwrap();
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
