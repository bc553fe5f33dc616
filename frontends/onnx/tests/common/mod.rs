//! Files for tests, written field by field: the reader's messages are private, and hostile files
//! are no messages.

use lighterage_onnx::{BatchNorm, Options};
use std::path::PathBuf;

/// A file below `tests/data/onnx`.
pub(crate) fn data(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/data/onnx")
        .join(path)
}

/// An empty folder of this name.
pub(crate) fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Options for files without symbolic sizes.
pub(crate) fn fixed() -> Options {
    Options {
        batch_norm: Some(BatchNorm::Train),
        ..Options::default()
    }
}

/// Options for `resnet.onnx`.
pub(crate) fn batched() -> Options {
    Options {
        dims: [("batch".to_string(), 4)].into(),
        ..fixed()
    }
}

pub(crate) fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = vec![];
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// A field that is a number.
pub(crate) fn int(field: u64, value: u64) -> Vec<u8> {
    [varint(field << 3), varint(value)].concat()
}

/// A field that is a message, a text or bytes.
pub(crate) fn bytes(field: u64, value: impl AsRef<[u8]>) -> Vec<u8> {
    let value = value.as_ref();
    [
        varint(field << 3 | 2),
        varint(value.len() as u64),
        value.to_vec(),
    ]
    .concat()
}

/// The type of a value: f32 of these sizes.
pub(crate) fn info(name: &str, sizes: &[u64]) -> Vec<u8> {
    let dims: Vec<u8> = sizes.iter().flat_map(|&d| bytes(1, int(1, d))).collect();
    let tensor = [int(1, 1), bytes(2, dims)].concat();
    [bytes(1, name), bytes(2, bytes(1, tensor))].concat()
}

/// A node: its operator, inputs and outputs, and the bytes of other fields.
pub(crate) fn node(op: &str, inputs: &[&str], outputs: &[&str], more: &[u8]) -> Vec<u8> {
    let list = |field: u64, names: &[&str]| -> Vec<u8> {
        names.iter().flat_map(|name| bytes(field, name)).collect()
    };
    [
        list(1, inputs),
        list(2, outputs),
        bytes(4, op),
        more.to_vec(),
    ]
    .concat()
}

/// An attribute of a node that is an integer.
pub(crate) fn int_attribute(name: &str, value: u64) -> Vec<u8> {
    bytes(5, [bytes(1, name), int(3, value), int(20, 2)].concat())
}

/// A tensor: its element type, sizes, name, and the bytes of other fields.
pub(crate) fn tensor(dtype: u64, sizes: &[u64], name: &str, more: &[u8]) -> Vec<u8> {
    let dims: Vec<u8> = sizes.iter().flat_map(|&d| int(1, d)).collect();
    [dims, int(2, dtype), bytes(8, name), more.to_vec()].concat()
}

/// A known vector of integers.
pub(crate) fn ints(name: &str, list: &[i64]) -> Vec<u8> {
    let raw: Vec<u8> = list.iter().flat_map(|x| x.to_le_bytes()).collect();
    tensor(7, &[list.len() as u64], name, &bytes(9, raw))
}

/// A model: the fields of its graph, and other fields.
pub(crate) fn model(graph: &[Vec<u8>], more: &[u8]) -> Vec<u8> {
    let opset = bytes(8, int(2, 18));
    [int(1, 8), bytes(7, graph.concat()), more.to_vec(), opset].concat()
}

/// A model of these nodes, from an input `x: f32[2,3]` to an output `y`.
pub(crate) fn nodes(nodes: &[Vec<u8>]) -> Vec<u8> {
    let mut graph: Vec<Vec<u8>> = nodes.iter().map(|node| bytes(1, node)).collect();
    graph.push(bytes(11, info("x", &[2, 3])));
    graph.push(bytes(12, output("y")));
    model(&graph, &[])
}

/// An output whose shape is not stated.
pub(crate) fn output(name: &str) -> Vec<u8> {
    [bytes(1, name), bytes(2, bytes(1, int(1, 1)))].concat()
}

/// A generator of numbers with a seed, for tests that try many inputs.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    /// A number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }
}
