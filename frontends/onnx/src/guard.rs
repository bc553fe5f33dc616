//! Checks a file before it is decoded: messages lie in the bytes, are not nested too deeply, and
//! need memory in proportion to the file. An empty message of two bytes takes hundreds when it is
//! decoded, and a number of one byte takes eight.

use crate::Error;
use crate::proto;
use crate::tight::{SHORT, Tight};
use std::mem::size_of;

/// The deepest nesting of messages; prost's limit is 100.
const DEPTH: usize = 96;
/// Decoded messages and numbers may take this many bytes for each byte of the file, and `FREE`
/// bytes more. Beside them are the file itself and the texts in it: four times the file together.
/// Exporters write 3 to 4 bytes of messages for each byte of nodes, so `FREE` suffices for 10 MB of
/// nodes without weights: more than 50,000 nodes.
const TIMES: u64 = 2;
const FREE: u64 = 1 << 24;
/// A list that grows has room for twice its elements.
const GROWTH: u64 = 2;

/// The messages that are decoded, and `Text`.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Model,
    Graph,
    Node,
    Attribute,
    Function,
    Info,
    Type,
    TensorType,
    Shape,
    Dim,
    Tensor,
    Entry,
    Text,
}

use Kind::*;

/// The kind of a field that is a message or a text; `None` for numbers, bytes, and what is not
/// decoded.
pub(crate) fn field(kind: Kind, number: u64) -> Option<Kind> {
    Some(match (kind, number) {
        (Model, 7) => Graph,
        (Model, 8) | (Function, 9) | (Node, 9) | (Info, 4) => Entry,
        // Raw data of tensors, field 9, is not copied.
        (Tensor, 13 | 16) => Entry,
        (Model, 25) => Function,
        (Graph, 1) | (Function, 7) => Node,
        (Graph, 5) => Tensor,
        (Graph, 11..=13) => Info,
        (Graph, 15) => Entry,
        (Node, 5) | (Function, 11) => Attribute,
        (Attribute, 5) => Tensor,
        (Attribute, 6) => Graph,
        (Info, 2) => Type,
        (Type, 1) => TensorType,
        (TensorType, 2) => Shape,
        (Shape, 1) => Dim,
        (Node, 1 | 2) | (Function, 4..=6) | (Attribute, 9) => Text,
        _ => return None,
    })
}

/// How numbers are stored in a file, with the bytes that each takes when it is decoded.
#[derive(Clone, Copy)]
enum Stored {
    /// One to ten bytes each.
    Varint(u64),
    /// As many bytes as decoded.
    Fixed(u64),
}

/// The numbers of a field that is a list of numbers.
fn list(kind: Kind, number: u64) -> Option<Stored> {
    Some(match (kind, number) {
        (Attribute, 7) | (Tensor, 4) => Stored::Fixed(4),
        (Tensor, 5) => Stored::Varint(4),
        (Attribute, 8) | (Tensor, 1 | 7 | 11) => Stored::Varint(8),
        (Tensor, 10) => Stored::Fixed(8),
        _ => return None,
    })
}

impl Stored {
    /// The decoded bytes of numbers: one, or all that `packed` has.
    fn bytes(self, packed: Option<&[u8]>) -> u64 {
        match (self, packed) {
            (Stored::Varint(size) | Stored::Fixed(size), None) => size,
            (Stored::Fixed(_), Some(packed)) => packed.len() as u64,
            (Stored::Varint(size), Some(packed)) => {
                size * packed.iter().filter(|&&byte| byte < 0x80).count() as u64
            }
        }
    }
}

/// The bytes of a decoded message.
fn bytes(kind: Kind) -> u64 {
    let bytes = match kind {
        Model => size_of::<proto::ModelProto>(),
        Graph => size_of::<proto::GraphProto>(),
        Node => size_of::<Tight>(),
        Attribute => size_of::<proto::AttributeProto>(),
        Function => size_of::<proto::FunctionProto>(),
        Info => size_of::<proto::ValueInfoProto>(),
        Type | TensorType | Shape => size_of::<proto::TypeProto>(),
        Dim => size_of::<proto::tensor_shape_proto::Dimension>(),
        Tensor => size_of::<proto::TensorProto>(),
        Entry => size_of::<proto::StringStringEntryProto>(),
        Text => size_of::<String>(),
    };
    bytes as u64
}

/// Checks the bytes of a model.
pub(crate) fn check(model: &[u8]) -> Result<(), Error> {
    let mut left = FREE + TIMES * model.len() as u64;
    take(&mut left, bytes(Model))?;
    walk(model, Model, 0, &mut left)
}

pub(crate) fn damaged() -> Error {
    Error::new("", "is no ONNX file, or is damaged").help("check that it was copied as a whole")
}

/// Takes bytes off what is left.
fn take(left: &mut u64, bytes: u64) -> Result<(), Error> {
    let more = left.checked_sub(bytes);
    let message =
        "has so many small messages or numbers that reading it would take too much memory";
    let help = "large tensors are read from raw_data, as onnx.numpy_helper.from_array writes them";
    *left = more.ok_or_else(|| Error::new("", message).help(help))?;
    Ok(())
}

fn walk(mut rest: &[u8], kind: Kind, depth: usize, left: &mut u64) -> Result<(), Error> {
    if depth > DEPTH {
        return Err(Error::new("", format!("nests more than {DEPTH} messages")));
    }
    if matches!(kind, Text) {
        return Ok(());
    }
    let mut n_short = 0;
    while !rest.is_empty() {
        let (number, contents) = next_field(&mut rest)?;
        if let Some(numbers) = list(kind, number) {
            take(left, GROWTH * numbers.bytes(contents))?;
        }
        if let Some((inner, inner_kind)) = contents.zip(field(kind, number)) {
            // The lists of a node have no room, unless they are long.
            n_short += 1;
            let is_tight = matches!(kind, Node) && n_short <= SHORT;
            let growth = if is_tight { 1 } else { GROWTH };
            take(left, growth * bytes(inner_kind))?;
            walk(inner, inner_kind, depth + 1, left)?;
        }
    }
    Ok(())
}

/// Takes the next field off a message: its number, and its bytes if it is a message, a text, or
/// bytes.
pub(crate) fn next_field<'m>(rest: &mut &'m [u8]) -> Result<(u64, Option<&'m [u8]>), Error> {
    let tag = varint(rest).ok_or_else(damaged)?;
    let number = tag >> 3;
    let size = match tag & 7 {
        0 => {
            varint(rest).ok_or_else(damaged)?;
            return Ok((number, None));
        }
        1 => 8,
        2 => varint(rest).ok_or_else(damaged)?,
        5 => 4,
        _ => return Err(damaged()),
    };
    let size = usize::try_from(size).map_err(|_| damaged())?;
    let (inner, after) = rest.split_at_checked(size).ok_or_else(damaged)?;
    *rest = after;
    Ok((number, (tag & 7 == 2).then_some(inner)))
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, after) = rest.split_first()?;
        *rest = after;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}
