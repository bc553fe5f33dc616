//! Tensors in safetensors files: initial values, batches.

mod four_bits;
mod published;

use super::files::{Input, read_whole};
use crate::failure::Failure;
use artifact::{DType, Operand};
use checkpoint::newest_first;
use checkpoint::tensors::{dtype, file_dtype, read_header};
use four_bits::FourBits;
use published::EightBits;
use safetensors::tensor::Dtype;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The type of a tensor, and where its bytes are.
#[derive(Clone)]
struct Entry {
    dtype: Dtype,
    shape: Vec<u64>,
    stored: Stored,
}

/// How a tensor is stored.
#[derive(Clone)]
enum Stored {
    /// As it is, in pieces that lie behind each other.
    Pieces(Vec<Piece>),
    /// As numbers of 4 bits, and a scale for each 32 of them.
    Mxfp4 { codes: Piece, scales: Piece },
    /// As matrices of numbers of 8 bits that lie behind each other.
    EightBits(Vec<EightBits>),
    /// As codes of 4 bits, and the size of each block.
    FourBits(FourBits),
}

/// A range of bytes in a file.
#[derive(Clone)]
struct Piece {
    file: usize,
    bytes: Range<u64>,
}

/// A safetensors file, or a folder with several. Only headers are in memory, unless a file comes
/// from a pipe.
pub(crate) struct Tensors {
    path: PathBuf,
    files: Vec<Input>,
    entries: BTreeMap<String, Entry>,
}

impl Tensors {
    /// Opens a file, or the model of a folder of Hugging Face's libraries or of a checkpoint; a cut
    /// or damaged file is an error.
    pub(crate) fn open(path: &Path) -> Result<Tensors, Failure> {
        let mut tensors = Tensors {
            path: path.to_path_buf(),
            files: vec![],
            entries: BTreeMap::new(),
        };
        if path.is_dir() {
            for file in files_of(path)? {
                tensors.add(&file)?;
            }
        } else {
            tensors.add(path)?;
        }
        Ok(tensors)
    }

    /// Opens a file or a folder that has a model's states. A checkpoint's must match its checksums.
    pub(crate) fn open_states(path: &Path) -> Result<Tensors, Failure> {
        let tensors = Tensors::open(path)?;
        for file in &tensors.files {
            let verified = checkpoint::verify_file(file.path());
            verified.map_err(|e| Failure::Input(e.to_string()))?;
        }
        Ok(tensors)
    }

    fn add(&mut self, path: &Path) -> Result<(), Failure> {
        let input = Input::open(path)?;
        let read = |start: u64, length: usize| input.read(start, length);
        let (header, metadata) =
            read_header(path, input.length(), read).map_err(|e| Failure::Input(e.to_string()))?;
        for (name, info) in metadata.tensors() {
            let (start, end) = info.data_offsets;
            let entry = Entry {
                dtype: info.dtype,
                shape: info.shape.iter().map(|&d| d as u64).collect(),
                stored: Stored::Pieces(vec![Piece {
                    file: self.files.len(),
                    bytes: (header.len() + start) as u64..(header.len() + end) as u64,
                }]),
            };
            self.entries.insert(name, entry);
        }
        self.files.push(input);
        Ok(())
    }

    /// The file or folder.
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
    pub(crate) fn get(&self, name: &str, operand: &Operand) -> Result<Vec<u8>, Failure> {
        self.read(name, self.entry(name, operand, &[])?)
    }
    /// The shape and the bytes of a tensor whose dimensions that vary may be smaller than the
    /// operand's.
    pub(crate) fn get_within(
        &self,
        name: &str,
        operand: &Operand,
        varies: &[bool],
    ) -> Result<(Vec<u64>, Vec<u8>), Failure> {
        let entry = self.entry(name, operand, varies)?;
        Ok((entry.shape.clone(), self.read(name, entry)?))
    }
    /// The type of a tensor, if there is one of this name and the compiler knows its type.
    pub(crate) fn dtype(&self, name: &str) -> Option<DType> {
        dtype(self.entries.get(name)?.dtype)
    }
    /// The type and the bytes of a tensor of floating-point numbers, which the file has.
    pub(crate) fn floats(&self, name: &str) -> Result<(DType, Vec<u8>), Failure> {
        let entry = &self.entries[name];
        let mut floats = [DType::F32, DType::BF16, DType::F16, DType::F64].into_iter();
        match floats.find(|&float| file_dtype(float) == entry.dtype) {
            Some(dtype) => Ok((dtype, self.read(name, entry)?)),
            None => Err(Failure::Input(format!(
                "{}: {name} is {}, and should be floating-point numbers{}",
                self.path().display(),
                entry.type_name(),
                self.help(name, entry.dtype)
            ))),
        }
    }
    /// The bytes of a matrix that the file has in NF4 as a step stores it: codes, sizes, the
    /// largest of them, and the offset.
    pub(crate) fn in_nf4(&self, name: &str) -> Result<Option<[Vec<u8>; 4]>, Failure> {
        match self.entries.get(name).map(|entry| &entry.stored) {
            Some(Stored::FourBits(matrix)) if matrix.has_blocks_of_nf4() => {
                Ok(matrix.in_nf4(matrix.bytes(|piece| self.piece(name, piece))?))
            }
            _ => Ok(None),
        }
    }
    fn piece(&self, name: &str, piece: &Piece) -> Result<Vec<u8>, Failure> {
        let length = (piece.bytes.end - piece.bytes.start) as usize;
        let file = &self.files[piece.file];
        file.read(piece.bytes.start, length).map_err(|e| {
            let path = file.path().display();
            Failure::System(format!("{path}: {name} cannot be read: {e}"))
        })
    }
    fn read(&self, name: &str, entry: &Entry) -> Result<Vec<u8>, Failure> {
        let piece = |piece: &Piece| self.piece(name, piece);
        match &entry.stored {
            Stored::Pieces(pieces) => {
                let mut bytes = vec![];
                for one in pieces {
                    match bytes.is_empty() {
                        true => bytes = piece(one)?,
                        false => bytes.append(&mut piece(one)?),
                    }
                }
                Ok(bytes)
            }
            Stored::Mxfp4 { codes, scales } => {
                let [codes, scales] = [piece(codes)?, piece(scales)?];
                Ok(published::numbers_of_4_bits(&entry.shape, &codes, &scales))
            }
            Stored::FourBits(matrix) => Ok(matrix.numbers(&matrix.bytes(piece)?)),
            Stored::EightBits(matrices) => {
                let mut bytes = vec![];
                for matrix in matrices {
                    let (codes, scales) = (piece(&matrix.codes)?, piece(&matrix.scales)?);
                    matrix.decode(&codes, &scales, &mut bytes);
                }
                Ok(bytes)
            }
        }
    }
    /// Checks that there is a tensor of an operand's type, whose dimensions that vary may be
    /// smaller.
    pub(crate) fn check(
        &self,
        name: &str,
        operand: &Operand,
        varies: &[bool],
    ) -> Result<(), Failure> {
        self.entry(name, operand, varies).map(|_| ())
    }
    /// A tensor that must have an operand's type. The error names the expected and the actual
    /// type.
    fn entry(&self, name: &str, operand: &Operand, varies: &[bool]) -> Result<&Entry, Failure> {
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
        if file_dtype(operand.dtype) != entry.dtype || !is_within(entry, operand, varies) {
            return Err(Failure::Input(format!(
                "{path}: {name} is {}, it should be {expected}{}{}",
                entry.type_name(),
                if varies.contains(&true) {
                    " or smaller"
                } else {
                    ""
                },
                self.help(name, entry.dtype)
            )));
        }
        Ok(entry)
    }
}

impl Entry {
    /// Its type in text.
    fn type_name(&self) -> String {
        let dtype = dtype(self.dtype).map_or(format!("{:?}", self.dtype), dtype_name);
        type_name(&dtype, &self.shape)
    }
}

/// Whether a tensor has an operand's shape, or is smaller in dimensions that vary.
fn is_within(entry: &Entry, operand: &Operand, varies: &[bool]) -> bool {
    let fits = |(i, (&size, &most)): (usize, (&u64, &u64))| {
        let varies = varies.get(i).is_some_and(|&varies| varies);
        size == most || varies && (1..most).contains(&size)
    };
    let sizes = entry.shape.iter().zip(&operand.shape);
    entry.shape.len() == operand.shape.len() && sizes.enumerate().all(fits)
}

/// The files with a model's tensors in a folder.
fn files_of(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let refused = |path: &Path, why: String| Failure::Input(format!("{}: {why}", path.display()));
    let index = folder.join(checkpoint::INDEX);
    let single = folder.join("model.safetensors");
    if !index.exists() {
        if single.exists() {
            return Ok(vec![single]);
        }
        let newest = newest_first(folder).unwrap_or_default();
        let newest = newest.first().map(|(_, path)| path.display());
        let why = match newest {
            Some(newest) => format!("a folder of checkpoints; name one of them, as {newest}"),
            None => format!(
                "a folder without {} and model.safetensors",
                checkpoint::INDEX
            ),
        };
        return Err(refused(folder, why));
    }
    let read: Index = serde_json::from_slice(&read_whole(&index)?)
        .map_err(|e| refused(&index, format!("not an index of tensors: {e}")))?;
    let names: BTreeSet<String> = read.weight_map.into_values().collect();
    let files = names.into_iter().map(|name| match name.contains('/') {
        true => Err(refused(
            &index,
            format!("{name:?} is outside of the folder"),
        )),
        false => Ok(folder.join(name)),
    });
    files.collect()
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
