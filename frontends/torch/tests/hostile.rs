//! Damaged and hostile files give errors: no panic, no hang, no allocation out of proportion to the
//! file.

use crate::common::{MODEL, Numbers, archive, bytes, data, edited, entries, fixed};
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn small() -> Vec<u8> {
    bytes("models/gpt2-tiny/joint_coarse.pt2")
}

fn error(bytes: &[u8]) -> String {
    lighterage_torch::read_bytes(bytes, "x.pt2", &fixed())
        .unwrap_err()
        .to_string()
}

/// Reads bytes that may be wrong; if the result is a graph, it is well formed.
fn survives(bytes: &[u8]) {
    if let Ok(model) = lighterage_torch::read_bytes(bytes, "x.pt2", &fixed()) {
        let findings = ir::verify::graph(&model.graph);
        assert!(findings.is_empty(), "{}", findings[0]);
    }
}

#[test]
fn truncated_files_are_refused() {
    let bytes = small();
    let mut numbers = Numbers(1);
    let near = |end: usize| end.saturating_sub(200)..end;
    let lengths = (0..200)
        .chain(near(bytes.len()))
        .chain((0..300).map(|_| numbers.below(bytes.len())));
    for length in lengths {
        assert!(
            lighterage_torch::read_bytes(&bytes[..length], "x.pt2", &fixed()).is_err(),
            "{length}"
        );
    }
}

#[test]
fn flipped_bits_do_no_harm() {
    let mut bytes = small();
    let mut numbers = Numbers(2);
    let end = bytes.len();
    for i in 0..1000 {
        // An archive depends on the directory at its end.
        let at = if i % 2 == 0 {
            end - 1 - numbers.below(1500)
        } else {
            numbers.below(end)
        };
        let bit = 1 << numbers.below(8);
        bytes[at] ^= bit;
        survives(&bytes);
        bytes[at] ^= bit;
    }
}

#[test]
fn random_bytes_are_refused() {
    let mut numbers = Numbers(3);
    for i in 0..300 {
        let mut bytes: Vec<u8> = (0..numbers.below(5000))
            .map(|_| numbers.below(256) as u8)
            .collect();
        if i % 2 == 0 {
            // End records everywhere.
            for chunk in bytes.chunks_mut(22) {
                let n = chunk.len().min(4);
                chunk[..n].copy_from_slice(&b"PK\x05\x06"[..n]);
            }
        }
        assert!(lighterage_torch::read_bytes(&bytes, "x.pt2", &fixed()).is_err());
    }
    let ends = b"PK\x05\x06".repeat(1 << 18);
    assert!(lighterage_torch::read_bytes(&ends, "x.pt2", &fixed()).is_err());
}

/// All places of a JSON value.
fn visit(value: &mut Value, f: &mut dyn FnMut(&mut Value)) {
    f(value);
    match value {
        Value::Array(list) => list.iter_mut().for_each(|v| visit(v, f)),
        Value::Object(map) => map.iter_mut().for_each(|(_, v)| visit(v, f)),
        _ => (),
    }
}

#[test]
fn edited_models_do_no_harm() {
    let files = [
        small(),
        bytes("models/resnet-tiny/joint_coarse.pt2"),
        bytes("ops/random.pt2"),
        bytes("ops/ops.pt2"),
        bytes("forward/complexes.pt2"),
        bytes("forward/functions.pt2"),
    ];
    let mut numbers = Numbers(4);
    for (file, rounds) in files.iter().zip([80, 80, 200, 30, 150, 50]) {
        let entries = entries(file);
        let model: Value = serde_json::from_slice(&entries[MODEL]).unwrap();
        let mut n_values = 0;
        visit(&mut model.clone(), &mut |_| n_values += 1);
        let names: Vec<String> = model["graph_module"]["graph"]["tensor_values"]
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect();
        for _ in 0..rounds {
            let mut model = model.clone();
            // Several values at once, so that some edits combine.
            let chosen: Vec<usize> = (0..1 + numbers.below(4))
                .map(|_| numbers.below(n_values))
                .collect();
            let mut i = 0;
            visit(&mut model, &mut |value| {
                if chosen.contains(&i) {
                    const NUMBERS: [i64; 10] =
                        [0, -1, 1, 2, 3, 64, 1 << 31, 1 << 40, i64::MAX, i64::MIN];
                    *value = match value {
                        Value::Number(_) => NUMBERS[numbers.below(10)].into(),
                        Value::String(_) => names[numbers.below(names.len())].clone().into(),
                        Value::Bool(b) => (!*b).into(),
                        Value::Array(list) if numbers.below(2) == 0 => {
                            list.iter().rev().cloned().collect()
                        }
                        Value::Array(list) => list.iter().skip(1).cloned().collect(),
                        _ => Value::Null,
                    };
                }
                i += 1;
            });
            let mut entries = entries.clone();
            entries.insert(MODEL.into(), serde_json::to_vec(&model).unwrap());
            survives(&archive(&entries, false));
        }
    }
}

#[test]
fn edited_sizes_and_numbers_do_no_harm() {
    // Only numbers, and more of them: shapes, dimensions, paddings.
    let files = [
        small(),
        bytes("models/resnet-tiny/joint_coarse.pt2"),
        bytes("ops/ops.pt2"),
    ];
    let mut numbers = Numbers(5);
    for file in files {
        let entries = entries(&file);
        let model: Value = serde_json::from_slice(&entries[MODEL]).unwrap();
        for round in 0..36 {
            let mut model = model.clone();
            let rarity = 20 << (round % 6);
            visit(&mut model["graph_module"]["graph"]["nodes"], &mut |value| {
                let is_int = value.get("as_int").is_some() || value.get("as_ints").is_some();
                if is_int && numbers.below(rarity) == 0 {
                    visit(value, &mut |value| {
                        if value.is_number() {
                            const NUMBERS: [i64; 9] =
                                [0, -1, 1, 7, 64, 1 << 32, 1 << 49, i64::MAX, i64::MIN];
                            *value = NUMBERS[numbers.below(9)].into();
                        }
                    });
                }
            });
            let mut entries = entries.clone();
            entries.insert(MODEL.into(), serde_json::to_vec(&model).unwrap());
            survives(&archive(&entries, false));
        }
    }
}

#[test]
fn broken_json_is_refused() {
    let file = small();
    let entries = entries(&file);
    let mut numbers = Numbers(6);
    for name in [
        MODEL,
        "data/weights/model_weights_config.json",
        "extra/joint_step.json",
    ] {
        for _ in 0..60 {
            let mut entries = entries.clone();
            let text = entries.get_mut(name).unwrap();
            let start = numbers.below(text.len());
            let end = (start + 1 + numbers.below(40)).min(text.len());
            text.drain(start..end);
            survives(&archive(&entries, false));
        }
        let mut entries = entries.clone();
        entries.insert(name.into(), "[".repeat(1 << 20).into_bytes());
        assert!(error(&archive(&entries, false)).contains("JSON"));
    }
}

#[test]
fn deep_arguments_are_refused() {
    let deep = "{\"a\":".repeat(1 << 18) + "1" + &"}".repeat(1 << 18);
    let mut entries = entries(&small());
    let text = String::from_utf8(entries[MODEL].clone()).unwrap();
    let text = text.replacen(
        "\"arg\": {",
        &format!("\"arg\": {{\"as_graph\": {deep}, "),
        1,
    );
    entries.insert(MODEL.into(), text.into_bytes());
    survives(&archive(&entries, false));
}

#[test]
fn weights_lie_within_their_bytes() {
    let file = bytes("models/gpt2-tiny/joint_core.pt2");
    let config = "data/weights/model_weights_config.json";
    let broken = |edit: &dyn Fn(&mut Value)| {
        let mut entries = entries(&file);
        let mut value: Value = serde_json::from_slice(&entries[config]).unwrap();
        edit(&mut value["config"]["model.transformer.wpe.weight"]);
        entries.insert(config.into(), serde_json::to_vec(&value).unwrap());
        error(&archive(&entries, false))
    };
    let far =
        broken(&|payload| payload["tensor_meta"]["storage_offset"] = json!({"as_int": i64::MAX}));
    assert!(far.contains("reach beyond"), "{far}");
    let wide = broken(&|payload| {
        payload["tensor_meta"]["strides"] = json!([{"as_int": i64::MAX}, {"as_int": 1}])
    });
    assert!(wide.contains("reach beyond"), "{wide}");
    let negative = broken(&|payload| {
        payload["tensor_meta"]["strides"] = json!([{"as_int": -1}, {"as_int": 1}])
    });
    assert!(negative.contains("should not be negative"), "{negative}");
    let short = broken(&|payload| payload["tensor_meta"]["strides"] = json!([{"as_int": 1}]));
    assert!(short.contains("2 sizes and 1 strides"), "{short}");
    let other = broken(&|payload| {
        payload["tensor_meta"]["sizes"] = json!([{"as_int": 1u64 << 40}, {"as_int": 2}])
    });
    assert!(other.contains("but the graph takes f32[32,64]"), "{other}");
    let pickle = broken(&|payload| payload["use_pickle"] = json!(true));
    assert!(pickle.contains("pickle"), "{pickle}");
    let lost = broken(&|payload| payload["path_name"] = json!("weight_999"));
    assert!(lost.contains("weight_999, are missing"), "{lost}");
}

#[test]
fn small_files_do_not_unfold_into_large_ones() {
    // A parameter of 2^40 elements that share one storage element.
    let size = 1u64 << 40;
    let meta = json!({
        "dtype": 7,
        "sizes": [{"as_int": size}],
        "requires_grad": true,
        "strides": [{"as_int": 0}],
        "storage_offset": {"as_int": 0},
        "layout": 7,
        "device": {"type": "cpu", "index": null},
    });
    let model = json!({
        "schema_version": {"major": 8, "minor": 17},
        "graph_module": {
            "graph": {"nodes": [], "tensor_values": {"p_w": meta}},
            "signature": {
                "input_specs": [{"parameter": {"arg": {"name": "p_w"}, "parameter_name": "w"}}],
                "output_specs": [],
            },
        },
    });
    let weight = json!({
        "path_name": "weight_0",
        "is_param": true,
        "use_pickle": false,
        "tensor_meta": meta,
    });
    let config = json!({"config": {"w": weight}});
    let mut entries = BTreeMap::from([
        (MODEL.to_string(), model.to_string().into_bytes()),
        ("byteorder".to_string(), b"little".to_vec()),
        (
            "data/weights/model_weights_config.json".to_string(),
            config.to_string().into_bytes(),
        ),
        ("data/weights/weight_0".to_string(), vec![0; 4]),
    ]);
    let expanded = error(&archive(&entries, false));
    assert!(
        expanded.contains("more than a file of this length warrants"),
        "{expanded}"
    );
    // 64 MiB of zeros in 64 KiB.
    entries.insert("data/weights/weight_0".to_string(), vec![0; 64 << 20]);
    let bomb = archive(&entries, true);
    assert!(bomb.len() < 1 << 20);
    let bomb = error(&bomb);
    assert!(bomb.contains("claims 67108864 bytes"), "{bomb}");
}

#[test]
fn errors_say_what_is_wrong() {
    assert!(error(b"").contains("is not a whole zip archive"));
    let path = data("models/no-such-file.pt2");
    let missing = lighterage_torch::read(&path, &fixed())
        .unwrap_err()
        .to_string();
    assert!(
        missing.starts_with(&path.display().to_string()) && missing.contains("cannot be opened"),
        "{missing}"
    );
    assert!(
        lighterage_torch::read(&data("models"), &fixed())
            .unwrap_err()
            .to_string()
            .ends_with("is not a file")
    );

    let without = |name: &str, bytes: Option<&[u8]>| {
        let mut entries = entries(&small());
        entries.remove(name);
        if let Some(bytes) = bytes {
            entries.insert(name.into(), bytes.to_vec());
        }
        error(&archive(&entries, false))
    };
    assert!(
        without(MODEL, None).contains(
            "has no entry models/model.json; a .pt2 file is what torch.export.save writes"
        )
    );
    assert_eq!(
        without("byteorder", Some(b"big")),
        "x.pt2: byteorder: is \"big\", should be \"little\""
    );
    assert_eq!(
        without("byteorder", None),
        "x.pt2: byteorder: the entry is missing"
    );

    let old = edited(&small(), |model| {
        model["schema_version"]["major"] = 7.into()
    });
    let old = error(&old);
    assert!(
        old.contains("has schema version 7.17") && old.contains("export it again"),
        "{old}"
    );

    let sizes = |edit: &dyn Fn(&mut Value)| {
        error(&edited(&small(), |model| {
            edit(&mut model["graph_module"]["graph"]["tensor_values"]["addmm"])
        }))
    };
    let other = sizes(&|meta| meta["sizes"] = json!([{"as_int": 64}, {"as_int": 7}]));
    assert!(
        other.contains("node addmm (torch.ops.aten.addmm.default)"),
        "{other}"
    );
    assert!(
        other.contains("the file gives addmm the type f32[64,7], its operands give f32[64,192]"),
        "{other}"
    );
    let data = sizes(&|meta| {
        meta["sizes"][0] = json!({"as_expr": {"expr_str": "Symbol('u0', integer=True)"}})
    });
    assert!(
        data.contains("u0 depends on the data of each step"),
        "{data}"
    );
    let complex = sizes(&|meta| meta["dtype"] = json!(9));
    assert!(
        complex.contains("element type 9 has no counterpart"),
        "{complex}"
    );
    let huge = sizes(&|meta| meta["sizes"][0] = json!({"as_int": 1u64 << 60}));
    assert!(huge.contains("is larger than"), "{huge}");

    let undefined = edited(&small(), |model| {
        let nodes = model["graph_module"]["graph"]["nodes"]
            .as_array_mut()
            .unwrap();
        nodes.remove(0);
    });
    let undefined = error(&undefined);
    assert!(
        undefined.contains("is used but never defined"),
        "{undefined}"
    );
    let twice = edited(&small(), |model| {
        let nodes = model["graph_module"]["graph"]["nodes"]
            .as_array_mut()
            .unwrap();
        nodes.push(nodes[0].clone());
    });
    let twice = error(&twice);
    assert!(twice.contains("the name is defined twice"), "{twice}");
    let odd = edited(&small(), |model| {
        let text = serde_json::to_string(model)
            .unwrap()
            .replace("\"addmm\"", "\"add mm\"");
        *model = serde_json::from_str(&text).unwrap();
    });
    assert!(error(&odd).contains("\"add mm\" is not an identifier"));
}
