//! Trained values in a file: what changes, and what stays.

use crate::common::*;
use lighterage_onnx::{Error, Options, Original, Trainable, Written};
use std::collections::BTreeMap;
use std::path::Path;

/// A file's bytes with these values.
fn with(folder: &Path, model: &[u8], values: &[(&str, [u8; 8])]) -> Result<Written, Error> {
    let path = folder.join("m.onnx");
    std::fs::write(&path, model).unwrap();
    let values: BTreeMap<String, Vec<u8>> = values
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_vec()))
        .collect();
    Original::open(&path)?.with(&values, "new.data")
}

/// An external tensor.
fn external(name: &str, location: &str, offset: usize) -> Vec<u8> {
    let entry = |key: &str, value: &str| bytes(13, [bytes(1, key), bytes(2, value)].concat());
    let offset = offset.to_string();
    let entries = [
        entry("location", location),
        entry("offset", &offset),
        entry("length", "8"),
        int(14, 1),
    ];
    tensor(1, &[2], name, &entries.concat())
}

/// A model whose graph has these tensors and a field that the reader does not know.
fn graph(tensors: &[Vec<u8>], more: &[u8]) -> Vec<u8> {
    let mut fields: Vec<Vec<u8>> = tensors.iter().map(|t| bytes(5, t)).collect();
    fields.push(bytes(1, node("Add", &["a", "b"], &["y"], &[])));
    fields.push(bytes(99, "unknown"));
    fields.push(bytes(12, output("y")));
    model(&fields, more)
}

#[test]
fn only_the_data_of_a_tensor_changes() {
    let folder = folder("onnx-write-inline");
    let note = bytes(12, "a note");
    let raw = |value: [u8; 8]| tensor(1, &[2], "a", &[bytes(9, value), note.clone()].concat());
    let b = tensor(1, &[2], "b", &bytes(4, [0; 8]));
    let before = graph(&[raw([1; 8]), b.clone()], &bytes(2, "producer"));
    let after = graph(&[raw([2; 8]), b.clone()], &bytes(2, "producer"));
    let written = with(&folder, &before, &[("a", [2; 8])]).unwrap();
    assert_eq!(written.model, after);
    assert_eq!(written.data, None);
    // Numbers in fields of their own become raw data if they change.
    let same = with(&folder, &before, &[("b", [0; 8]), ("a", [1; 8])]).unwrap();
    assert_eq!(same.model, before);
    let other = with(&folder, &before, &[("b", [3; 8])]).unwrap();
    let b = tensor(1, &[2], "b", &bytes(9, [3; 8]));
    assert_eq!(other.model, graph(&[raw([1; 8]), b], &bytes(2, "producer")));
}

#[test]
fn external_data_stays_external() {
    let folder = folder("onnx-write-external");
    let bytes_of = |range: std::ops::Range<u8>| range.collect::<Vec<u8>>();
    std::fs::write(folder.join("old"), bytes_of(0..24)).unwrap();
    // The last one is a constant in a node, which has no trained value though it is called `a`.
    let constant = |t: Vec<u8>| {
        let value = bytes(5, [bytes(1, "value"), bytes(5, t), int(20, 4)].concat());
        bytes(1, node("Constant", &[], &["c"], &value))
    };
    let whole = |location: &str, offsets: [usize; 3]| {
        let [a, b, c] = offsets;
        let mut fields = vec![constant(external("a", location, c))];
        fields.push(bytes(5, external("a", location, a)));
        fields.push(bytes(5, external("b", location, b)));
        fields.push(bytes(1, node("Add", &["a", "b"], &["y"], &[])));
        fields.push(bytes(12, output("y")));
        model(&fields, &[])
    };
    // Both initializers share bytes; they get values of their own.
    let before = whole("old", [8, 8, 16]);
    let written = with(&folder, &before, &[("a", [9; 8])]).unwrap();
    let data = [bytes_of(16..24), vec![9; 8], bytes_of(8..16)].concat();
    assert_eq!(written.data.as_ref(), Some(&data));
    let place = |entry: &[u8]| written.model.windows(entry.len()).any(|w| w == entry);
    assert!(place(b"new.data") && !place(b"old"));
    assert!(written.read.iter().all(|path| path.ends_with("old")));
    std::fs::write(folder.join("new.data"), &data).unwrap();
    std::fs::write(folder.join("m.onnx"), &written.model).unwrap();
    let options = Options {
        trainable: Trainable::All,
        ..Options::default()
    };
    let model = lighterage_onnx::read(&folder.join("m.onnx"), &options);
    assert_eq!(model.unwrap().tensors["b"].data, bytes_of(8..16));

    let outside = graph(&[external("a", "../old", 0), external("b", "old", 0)], &[]);
    let refused = with(&folder, &outside, &[]).unwrap_err().to_string();
    assert!(
        refused.contains("outside of the model's folder"),
        "{refused}"
    );
}

#[test]
fn large_data_begins_at_a_page() {
    let folder = folder("onnx-write-large");
    let large = vec![5; 1 << 16];
    std::fs::write(folder.join("old"), &large).unwrap();
    let entry = bytes(13, [bytes(1, "location"), bytes(2, "old")].concat());
    let b = tensor(1, &[1 << 14], "b", &[entry, int(14, 1)].concat());
    let model = graph(&[external("a", "old", 0), b], &[]);
    let written = with(&folder, &model, &[]).unwrap();
    let data = written.data.unwrap();
    assert_eq!(data.len(), 4096 + large.len());
    assert_eq!(data[4096..], large);
}

#[test]
fn a_value_of_another_size_is_refused() {
    let folder = folder("onnx-write-size");
    let a = tensor(1, &[1], "a", &bytes(9, [0; 4]));
    let b = tensor(1, &[1], "b", &bytes(9, [0; 4]));
    let refused = with(&folder, &graph(&[a, b], &[]), &[("a", [0; 8])]);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("needs 4 bytes"), "{refused}");
}

#[test]
fn a_constant_of_a_function_does_not_take_an_initializers_name() {
    let constant = |value: [f32; 2]| {
        value
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect::<Vec<_>>()
    };
    let of = |value: [f32; 2]| tensor(1, &[2], "w", &bytes(9, constant(value)));
    let value = [bytes(1, "value"), bytes(5, of([1.0, 2.0])), int(20, 4)].concat();
    let body = [
        bytes(7, node("Constant", &[], &["w"], &bytes(5, value))),
        bytes(7, node("Add", &["a", "w"], &["r"], &[])),
    ];
    let names = [bytes(1, "f"), bytes(4, "a"), bytes(5, "r"), bytes(10, "d")];
    let function = bytes(25, [names.concat(), body.concat()].concat());
    let fields = [
        bytes(1, node("f", &["x"], &["z"], &bytes(7, "d"))),
        bytes(1, node("Add", &["z", "w"], &["y"], &[])),
        bytes(5, of([3.0, 4.0])),
        bytes(11, info("x", &[2])),
        bytes(12, output("y")),
    ];
    let model = model(&fields, &function);
    let read = lighterage_onnx::read_bytes(&model, "x", &Options::default()).unwrap();
    assert_eq!(read.tensors["w"].data, constant([3.0, 4.0]));
    assert_eq!(read.tensors["w.2"].data, constant([1.0, 2.0]));
}
