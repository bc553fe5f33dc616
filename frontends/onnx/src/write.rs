//! Writes trained values back into the file that they came from.
//!
//! Before: a file that [`crate::read`] accepts as bytes. After: the same bytes, except the data of
//! tensors with another value and the places of external data. The messages are copied field by
//! field and never encoded again, so fields that the reader does not know stay too.

use crate::Error;
use crate::external::Files;
use crate::guard::{self, Kind};
use crate::proto::{ModelProto, NodeProto, TensorProto};
use crate::tensor;
use ir::TensorType;
use prost::Message;
use prost::bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Data of a tensor of at least `LARGE` bytes begins at a multiple of `PAGE`, as ONNX recommends
/// for mapping files into memory. Other data begins at a multiple of 8, the largest element.
const LARGE: usize = 1 << 16;
const PAGE: usize = 4096;
const ELEMENT: usize = 8;

/// The fields of a tensor, by number.
const RAW_DATA: u64 = 9;
const EXTERNAL_DATA: u64 = 13;
/// `float_data`, `int32_data`, `string_data`, `int64_data`, `raw_data`, `double_data` and
/// `uint64_data`.
const DATA: [u64; 7] = [4, 5, 6, 7, RAW_DATA, 10, 11];

/// A file whose tensors get other values.
pub struct Original {
    path: PathBuf,
    bytes: Bytes,
    proto: ModelProto,
}

/// A file with other values. Its external data is in memory as a whole.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Written {
    /// The bytes of the file.
    pub model: Vec<u8>,
    /// The bytes of the file beside it; `None` if the original has no external data.
    pub data: Option<Vec<u8>>,
    /// The files from which external data was read.
    pub read: BTreeSet<PathBuf>,
}

impl Original {
    /// Reads a file. External data is read by [`Original::with`].
    ///
    /// # Errors
    /// The file cannot be read, or is damaged.
    pub fn open(path: &Path) -> Result<Original, Error> {
        let bytes = Bytes::from(crate::file(path)?);
        let proto = crate::decode(bytes.clone()).map_err(|error| named(path, error))?;
        Ok(Original {
            path: path.to_path_buf(),
            bytes,
            proto,
        })
    }

    /// The types of the graph's initializers, by name. Those of types without a counterpart are
    /// left out.
    pub fn initializers(&self) -> BTreeMap<&str, TensorType> {
        let graph = self.proto.graph.iter();
        let tensors = graph.flat_map(|graph| &graph.initializer);
        tensors
            .filter_map(|proto| Some((proto.name(), tensor::tensor_type(proto).ok()?)))
            .collect()
    }

    /// The names of all results of nodes, also in functions and bodies.
    pub fn results(&self) -> BTreeSet<&str> {
        let mut names = BTreeSet::new();
        let graph = self.proto.graph.iter().flat_map(|graph| &graph.node);
        let functions = self.proto.functions.iter().flat_map(|f| &f.node);
        for node in graph.chain(functions) {
            results(node, &mut names);
        }
        names
    }

    /// The file with other values for initializers, which have the types of
    /// [`Original::initializers`]. A value that is in the file already changes no byte. External
    /// data goes to one new file, which is called `data_name`.
    ///
    /// # Errors
    /// External data cannot be read, or a value has too few or too many bytes.
    pub fn with(
        &self,
        values: &BTreeMap<String, Vec<u8>>,
        data_name: &str,
    ) -> Result<Written, Error> {
        let mut writer = Writer {
            values,
            data_name,
            files: Files::beside(Some(&self.path)),
            data: None,
        };
        let changed = writer.message(&self.bytes, Kind::Model, false);
        let changed = changed.map_err(|error| named(&self.path, error))?;
        Ok(Written {
            model: changed.unwrap_or_else(|| self.bytes.to_vec()),
            data: writer.data,
            read: writer.files.paths().cloned().collect(),
        })
    }
}

fn named(path: &Path, error: Error) -> Error {
    error.of(path.display().to_string())
}

/// The names of a node's results, and of those in its bodies. The nesting is limited.
fn results<'n>(node: &'n NodeProto, names: &mut BTreeSet<&'n str>) {
    names.extend(node.output.iter().map(String::as_str));
    let bodies = node.attribute.iter().filter_map(|a| a.g.as_ref());
    for node in bodies.flat_map(|body| &body.node) {
        results(node, names);
    }
}

struct Writer<'a> {
    values: &'a BTreeMap<String, Vec<u8>>,
    data_name: &'a str,
    files: Files,
    /// The external data so far.
    data: Option<Vec<u8>>,
}

impl Writer<'_> {
    /// A message with other values; `None` if it stays. `is_main` says that it is the graph of the
    /// model.
    fn message(
        &mut self,
        message: &[u8],
        kind: Kind,
        is_main: bool,
    ) -> Result<Option<Vec<u8>>, Error> {
        let mut out = Edit::of(message);
        while let Some(field) = out.next()? {
            let Some((contents, inner)) = field
                .contents
                .zip(guard::field(kind, field.number))
                .filter(|(_, inner)| has_tensors(*inner))
            else {
                continue;
            };
            let changed = match inner {
                Kind::Tensor => self.tensor(contents, is_main)?,
                _ => self.message(contents, inner, matches!(kind, Kind::Model))?,
            };
            if let Some(changed) = changed {
                out.replace(&[(field.number, &changed)]);
            }
        }
        Ok(out.finish())
    }

    /// A tensor with another value, or with its data in the new file; `None` if it stays.
    fn tensor(&mut self, message: &[u8], is_initializer: bool) -> Result<Option<Vec<u8>>, Error> {
        let proto = TensorProto::decode(message).map_err(|_| guard::damaged())?;
        let value = self.values.get(proto.name()).filter(|_| is_initializer);
        let is_external = tensor::is_external(&proto);
        if value.is_none() && !is_external {
            return Ok(None);
        }
        let ty = tensor::tensor_type(&proto)?;
        let stored = tensor::bytes(&proto, &ty, &mut self.files)?;
        let value = value.unwrap_or(&stored);
        if value.len() != stored.len() {
            let (needed, given) = (stored.len(), value.len());
            let message = format!("needs {needed} bytes, but its new value has {given}");
            return Err(Error::new(proto.name(), message));
        }
        if is_external {
            let fields = self.store(value);
            let fields: Vec<(u64, &[u8])> =
                fields.iter().map(|f| (EXTERNAL_DATA, &f[..])).collect();
            exchange(message, &[EXTERNAL_DATA], &fields)
        } else if *value != stored {
            exchange(message, &DATA, &[(RAW_DATA, value)])
        } else {
            Ok(None)
        }
    }

    /// Adds a tensor's data to the new file. Returns the entries that say where it lies.
    fn store(&mut self, value: &[u8]) -> [Vec<u8>; 3] {
        let step = if value.len() >= LARGE { PAGE } else { ELEMENT };
        let data = self.data.get_or_insert_default();
        let offset = data.len().next_multiple_of(step);
        data.resize(offset, 0);
        data.extend_from_slice(value);
        let entry = |key: &str, value: &str| {
            let mut entry = vec![];
            push(&mut entry, 1, key.as_bytes());
            push(&mut entry, 2, value.as_bytes());
            entry
        };
        [
            entry("location", self.data_name),
            entry("offset", &offset.to_string()),
            entry("length", &value.len().to_string()),
        ]
    }
}

/// The messages that may have tensors within them.
fn has_tensors(kind: Kind) -> bool {
    match kind {
        Kind::Graph | Kind::Node | Kind::Attribute | Kind::Function | Kind::Tensor => true,
        Kind::Model | Kind::Info | Kind::Type | Kind::TensorType => false,
        Kind::Shape | Kind::Dim | Kind::Entry | Kind::Text => false,
    }
}

/// Replaces all fields of some numbers by others, which come at the place of the first.
fn exchange(
    message: &[u8],
    numbers: &[u64],
    fields: &[(u64, &[u8])],
) -> Result<Option<Vec<u8>>, Error> {
    let mut out = Edit::of(message);
    let mut new = fields;
    while let Some(field) = out.next()? {
        if numbers.contains(&field.number) {
            out.replace(new);
            new = &[];
        }
    }
    out.insert(new);
    Ok(out.finish())
}

/// A field of a message.
struct Field<'m> {
    number: u64,
    /// Its bytes, if it is a message, a text, or bytes.
    contents: Option<&'m [u8]>,
}

/// A message that is copied field by field. It is one piece until a field is replaced.
struct Edit<'m> {
    message: &'m [u8],
    /// Where the last field begins, and the next one.
    at: usize,
    next: usize,
    /// What is before the last field, once something was replaced.
    out: Option<Vec<u8>>,
    /// True if the last field is not copied.
    is_replaced: bool,
}

impl<'m> Edit<'m> {
    fn of(message: &'m [u8]) -> Edit<'m> {
        Edit {
            message,
            at: 0,
            next: 0,
            out: None,
            is_replaced: false,
        }
    }

    /// Copies the last field, unless it was replaced, and goes to the next one.
    fn next(&mut self) -> Result<Option<Field<'m>>, Error> {
        self.copy_last();
        let mut rest = &self.message[self.next..];
        if rest.is_empty() {
            return Ok(None);
        }
        let (number, contents) = guard::next_field(&mut rest)?;
        self.next = self.message.len() - rest.len();
        Ok(Some(Field { number, contents }))
    }

    fn copy_last(&mut self) {
        if let (Some(out), false) = (&mut self.out, self.is_replaced) {
            out.extend_from_slice(&self.message[self.at..self.next]);
        }
        self.at = self.next;
        self.is_replaced = false;
    }

    /// Puts fields in the place of the last one.
    fn replace(&mut self, fields: &[(u64, &[u8])]) {
        self.insert(fields);
        self.is_replaced = true;
    }

    /// Puts fields before the last one; at the end there is none.
    fn insert(&mut self, fields: &[(u64, &[u8])]) {
        let before = &self.message[..self.at];
        let out = self.out.get_or_insert_with(|| before.to_vec());
        for (number, contents) in fields {
            push(out, *number, contents);
        }
    }

    /// The copy; `None` if nothing was replaced. After the last field.
    fn finish(self) -> Option<Vec<u8>> {
        self.out
    }
}

/// Adds a field of bytes.
fn push(out: &mut Vec<u8>, number: u64, contents: &[u8]) {
    const BYTES: u64 = 2;
    prost::encoding::encode_varint(number << 3 | BYTES, out);
    prost::encoding::encode_varint(contents.len() as u64, out);
    out.extend_from_slice(contents);
}
