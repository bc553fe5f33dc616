//! Damaged and hostile files give errors: no panic, no hang, no allocation out of proportion to the
//! file.

use crate::common::*;
use lighterage_onnx::Options;
use std::path::Path;

fn error(bytes: &[u8]) -> String {
    match lighterage_onnx::read_bytes(bytes, "x", &fixed()) {
        Ok(model) => panic!("was read:\n{}", ir::text::print_graph(&model.graph)),
        Err(error) => error.to_string(),
    }
}

/// Reads bytes that may be wrong; if the result is a graph, it is well formed.
fn survives(bytes: &[u8], options: &Options) {
    if let Ok(model) = lighterage_onnx::read_bytes(bytes, "x", options) {
        let findings = ir::verify::graph(&model.graph);
        assert!(findings.is_empty(), "{}", findings[0]);
    }
}

fn fails(bytes: &[u8], with: &str) {
    let error = error(bytes);
    assert!(error.contains(with), "{error}");
}

/// A file without external data, so that its bytes are all of it.
pub(crate) fn small() -> Vec<u8> {
    nodes(&[
        node("Add", &["x", "x"], &["a"], &[]),
        node("ReduceSum", &["a"], &["b"], &int_attribute("keepdims", 0)),
        node("Relu", &["b"], &["y"], &[]),
    ])
}

#[test]
fn a_small_file_is_read() {
    let model = lighterage_onnx::read_bytes(&small(), "x", &Default::default()).unwrap();
    assert_eq!(model.graph.order.len(), 3);
}

#[test]
fn truncated_files_are_refused() {
    let gpt2 = std::fs::read(data("gpt2.onnx")).unwrap();
    let mut numbers = Numbers(1);
    let lengths: Vec<usize> = (0..300).map(|_| numbers.below(gpt2.len())).collect();
    let small = small();
    for (file, lengths) in [(&small, (0..small.len()).collect()), (&gpt2, lengths)] {
        for length in lengths {
            let read = lighterage_onnx::read_bytes(&file[..length], "x", &fixed());
            assert!(read.is_err(), "{length}");
        }
    }
}

#[test]
fn mutants_do_no_harm() {
    let mut numbers = Numbers(2);
    for (name, rounds) in [("resnet", 1500), ("gpt2-inference", 150), ("bert", 150)] {
        let file = std::fs::read(data(&format!("{name}.onnx"))).unwrap();
        for _ in 0..rounds {
            let mutant = mutant(&file, 4, &mut numbers);
            let options = if name == "resnet" { batched() } else { fixed() };
            survives(&mutant, &options);
        }
    }
    for _ in 0..2000 {
        let n = numbers.below(200);
        let random: Vec<u8> = (0..n).map(|_| numbers.below(256) as u8).collect();
        survives(&random, &fixed());
    }
    // Mutants of small texts hit the nodes more often.
    let small = small();
    for _ in 0..10_000 {
        let mut mutant = small.clone();
        let at = numbers.below(mutant.len());
        mutant[at] = numbers.below(256) as u8;
        survives(&mutant, &fixed());
    }
}

/// A file with some bytes changed, and, of four kinds of changes instead of two, removed or
/// repeated.
pub(crate) fn mutant(file: &[u8], kinds: usize, numbers: &mut Numbers) -> Vec<u8> {
    let mut mutant = file.to_vec();
    for _ in 0..1 + numbers.below(4) {
        let at = numbers.below(mutant.len());
        match numbers.below(kinds) {
            0 => mutant[at] ^= 1 << numbers.below(8),
            1 => mutant[at] = [0, 1, 0x7f, 0x80, 0xff][numbers.below(5)],
            2 => {
                let end = (at + numbers.below(16)).min(mutant.len());
                mutant.drain(at..end);
            }
            _ => {
                let end = (at + numbers.below(64)).min(mutant.len());
                let part = mutant[at..end].to_vec();
                mutant.splice(at..at, part);
            }
        }
    }
    mutant
}

/// Files whose mutants are read.
pub(crate) const FILES: [&str; 9] = [
    "bert",
    "gpt2",
    "gpt2-inference",
    "llama",
    "resnet",
    "keras-mlp",
    "keras-cnn",
    "tf2onnx-mlp",
    "tf2onnx-cnn",
];

/// 100,000 mutants of ten files, if `LIGHTERAGE_LONG_TESTS=1` asks for them; else 100. Those that
/// are read are also written back, with another value for a tensor. They take minutes in a release
/// build.
#[test]
fn mutants_are_read_and_written_back() {
    let is_long = std::env::var_os("LIGHTERAGE_LONG_TESTS").is_some_and(|value| value == "1");
    let rounds = if is_long { 10_000 } else { 10 };
    let folder = folder("onnx-mutants");
    std::fs::copy(data("resnet.weights"), folder.join("resnet.weights")).unwrap();
    let mut numbers = Numbers(3);
    let mut n_written = 0;
    let files = FILES.map(|name| std::fs::read(data(&format!("{name}.onnx"))).unwrap());
    for file in files.into_iter().chain([small()]) {
        let mut options = fixed();
        if let Err(error) = lighterage_onnx::read_bytes(&file, "x", &options) {
            for dim in ["batch", "unk__15", "unk__45"] {
                if error.to_string().contains(dim) {
                    options.dims.insert(dim.to_string(), 4);
                }
            }
        }
        let path = folder.join("mutant.onnx");
        for round in 0..rounds {
            // Removed bytes mostly end the reading early.
            let mutant = mutant(&file, if round % 2 == 0 { 2 } else { 4 }, &mut numbers);
            survives(&mutant, &options);
            std::fs::write(&path, &mutant).unwrap();
            let Ok(original) = lighterage_onnx::Original::open(&path) else {
                continue;
            };
            let first = original.initializers().into_iter().next();
            let values = first.filter(|(_, ty)| ty.bytes() < 1 << 20);
            let values = values.map(|(name, ty)| (name.to_string(), vec![7; ty.bytes() as usize]));
            let values = values.into_iter().collect();
            if let Ok(written) = original.with(&values, "data") {
                n_written += 1;
                std::fs::write(folder.join("data"), written.data.unwrap_or_default()).unwrap();
                survives(&written.model, &options);
            }
        }
    }
    // Of the ten files' mutants, more than a fifth have the form of a file.
    assert!(n_written > 2 * rounds, "{n_written} of {}", 10 * rounds);
}

#[test]
fn deep_nesting_is_refused() {
    // Graphs in attributes in nodes in graphs, from the inside out.
    let mut parts: Vec<Vec<u8>> = vec![];
    let mut length = 0u64;
    for i in 0..30_000u64 {
        let field = [6, 5, 1][(i % 3) as usize];
        let head = [varint(field << 3 | 2), varint(length)].concat();
        length += head.len() as u64;
        parts.push(head);
    }
    parts.reverse();
    fails(&model(&parts, &[]), "nests more than");
}

#[test]
fn branches_within_branches_are_read_down_to_a_depth() {
    let leaf = [
        bytes(1, node("Neg", &["x"], &["r"], &[])),
        bytes(12, output("r")),
    ]
    .concat();
    let nested = |depth: usize| {
        let mut body = leaf.clone();
        for i in 0..depth {
            let result = if i + 1 == depth { "y" } else { "r" };
            let branch = |name: &str, body: &[u8]| {
                bytes(5, [bytes(1, name), bytes(6, body), int(20, 5)].concat())
            };
            let both = [branch("then_branch", &body), branch("else_branch", &leaf)].concat();
            let taken = node("If", &["c"], &[result], &both);
            body = [bytes(1, taken), bytes(12, output(result))].concat();
        }
        let condition = bytes(5, tensor(9, &[], "c", &bytes(9, [1])));
        model(&[body, condition, bytes(11, info("x", &[2]))], &[])
    };
    let model = lighterage_onnx::read_bytes(&nested(30), "x", &fixed()).unwrap();
    assert_eq!(model.graph.order.len(), 1);
    fails(&nested(33), "nests more than");
}

#[test]
fn functions_that_call_themselves_are_refused() {
    let function = |name: &str, nodes: &[Vec<u8>]| {
        let body: Vec<u8> = nodes.iter().flat_map(|node| bytes(7, node)).collect();
        let names = [bytes(1, name), bytes(4, "a"), bytes(5, "r"), bytes(10, "d")].concat();
        bytes(25, [names, body].concat())
    };
    let call =
        |name: &str, input: &str, output: &str| node(name, &[input], &[output], &bytes(7, "d"));
    let graph = [
        bytes(1, call("f0", "x", "y")),
        bytes(11, info("x", &[2])),
        bytes(12, output("y")),
    ];
    let cycle = [
        function("f0", &[call("f1", "a", "r")]),
        function("f1", &[call("f0", "a", "r")]),
    ];
    fails(&model(&graph, &cycle.concat()), "nested more than");
    // Each function calls the next one twice.
    let doubling: Vec<u8> = (0..36)
        .flat_map(|i| {
            let next = format!("f{}", i + 1);
            function(
                &format!("f{i}"),
                &[call(&next, "a", "b"), call(&next, "b", "r")],
            )
        })
        .collect();
    let last = function("f36", &[node("Neg", &["a"], &["r"], &[])]);
    fails(
        &model(&graph, &[doubling, last].concat()),
        "functions and loops have more than",
    );
}

#[test]
fn loops_end() {
    let body = [
        bytes(11, info("i", &[])),
        bytes(11, info("c", &[])),
        bytes(11, info("v", &[2])),
        bytes(1, node("Neg", &["v"], &["w"], &[])),
        bytes(12, output("c")),
        bytes(12, output("w")),
    ];
    let body = bytes(
        5,
        [bytes(1, "body"), bytes(6, body.concat()), int(20, 5)].concat(),
    );
    let graph = |n: i64| {
        model(
            &[
                bytes(1, node("Loop", &["n", "", "x"], &["y"], &body)),
                bytes(5, tensor(7, &[], "n", &bytes(9, n.to_le_bytes()))),
                bytes(11, info("x", &[2])),
                bytes(12, output("y")),
            ],
            &[],
        )
    };
    let three = lighterage_onnx::read_bytes(&graph(3), "x", &Default::default()).unwrap();
    assert_eq!(three.graph.order.len(), 3);
    fails(&graph(i64::MAX), "iterations");
}

#[test]
fn work_that_multiplies_ends() {
    // Loops of empty loops, and a loop over a branch that is large and never taken.
    let passes = [
        bytes(11, info("i", &[])),
        bytes(11, info("c", &[])),
        bytes(12, output("c")),
    ];
    let attribute =
        |name: &str, graph: &[u8]| bytes(5, [bytes(1, name), bytes(6, graph), int(20, 5)].concat());
    let looped = |body: &[u8]| {
        let inner = node("Loop", &["n", ""], &["r"], &attribute("body", body));
        let rows = [bytes(1, inner), bytes(12, output("r"))].concat();
        [passes.concat(), rows].concat()
    };
    let start = |body: &[u8]| {
        model(
            &[
                bytes(
                    1,
                    node("Loop", &["n", ""], &["y"], &attribute("body", body)),
                ),
                bytes(5, tensor(7, &[], "n", &bytes(9, 4000i64.to_le_bytes()))),
                bytes(5, tensor(9, &[], "no", &bytes(9, [0]))),
                bytes(11, info("x", &[2])),
                bytes(12, output("y")),
            ],
            &[],
        )
    };
    let leaf = [passes.concat(), bytes(12, output("x"))].concat();
    fails(&start(&looped(&looped(&leaf))), "more than");

    let many: Vec<u8> = (0..20_000)
        .flat_map(|_| bytes(1, node("Neg", &["x"], &["z"], &[])))
        .collect();
    let large = [many, bytes(12, output("x"))].concat();
    let small = bytes(12, output("x"));
    let both = [
        attribute("then_branch", &large),
        attribute("else_branch", &small),
    ]
    .concat();
    let chosen = node("If", &["no"], &["r"], &both);
    let body = [passes.concat(), bytes(1, chosen), bytes(12, output("r"))].concat();
    fails(&start(&body), "more than");
}

#[test]
fn sequences_take_memory_in_proportion() {
    let insert = |i: usize| {
        let (from, to) = (format!("s{i}"), format!("s{}", i + 1));
        node("SequenceInsert", &[&from, "x"], &[&to], &[])
    };
    let mut list = vec![node("SequenceConstruct", &["x"], &["s0"], &[])];
    list.extend((0..10_000).map(insert));
    list.push(node("SequenceLength", &["s10000"], &["n"], &[]));
    list.push(node("Cast", &["n"], &["y"], &int_attribute("to", 1)));
    fails(&nodes(&list), "too many elements");
}

#[test]
fn names_are_unique() {
    let relu = node("Relu", &["x"], &["y"], &[]);
    fails(&nodes(&[relu.clone(), relu]), "defined twice");
    fails(&nodes(&[node("Relu", &["x"], &["x", "y"], &[])]), "");
    let twice = [int_attribute("axis", 0), int_attribute("axis", 1)].concat();
    fails(
        &nodes(&[node("Softmax", &["x"], &["y"], &twice)]),
        "two attributes axis",
    );
    let weight = bytes(5, tensor(1, &[1], "w", &bytes(9, [0; 4])));
    let relu = bytes(1, node("Relu", &["w"], &["y"], &[]));
    let graph = [weight.clone(), weight, relu.clone(), bytes(12, output("y"))];
    fails(&model(&graph, &[]), "defined twice");
    let x = bytes(11, info("w", &[1]));
    let graph = [x.clone(), x, relu.clone(), bytes(12, output("y"))];
    fails(&model(&graph, &[]), "defined twice");
    let y = bytes(12, output("y"));
    let graph = [bytes(11, info("w", &[1])), relu, y.clone(), y];
    fails(&model(&graph, &[]), "two outputs");
    fails(
        &nodes(&[node("Relu", &["z"], &["y"], &[])]),
        "never defined",
    );
}

#[test]
fn impossible_sizes_are_refused() {
    let with = |sizes: &[u64], more: &[u8]| {
        let weight = bytes(5, tensor(1, sizes, "w", more));
        let relu = bytes(1, node("Relu", &["w"], &["y"], &[]));
        model(&[weight, relu, bytes(12, output("y"))], &[])
    };
    fails(&with(&[1 << 63], &[]), "negative size");
    fails(&with(&[1 << 62, 4], &[]), "larger than");
    fails(&with(&[1 << 40], &bytes(9, [0; 4])), "bytes");
    fails(&with(&[0, 1 << 62], &[]), "larger than");
    fails(&with(&[2; 65], &[]), "dimensions");
    let input = |size: u64| {
        let relu = bytes(1, node("Relu", &["x"], &["y"], &[]));
        model(
            &[bytes(11, info("x", &[size])), relu, bytes(12, output("y"))],
            &[],
        )
    };
    fails(&input(1 << 63), "negative size");
    fails(&input(1 << 62), "larger than");
    for op in ["ConstantOfShape", "Expand", "Tile", "Reshape"] {
        let inputs: &[&str] = if op == "ConstantOfShape" {
            &["s"]
        } else {
            &["x", "s"]
        };
        for sizes in [[i64::MAX, 2], [i64::MIN, 2], [1 << 40, 1 << 40], [-1, -1]] {
            let graph = [
                bytes(1, node(op, inputs, &["y"], &[])),
                bytes(5, ints("s", &sizes)),
                bytes(11, info("x", &[1, 1])),
                bytes(12, output("y")),
            ];
            error(&model(&graph, &[]));
        }
    }
}

#[test]
fn many_attributes_take_memory_in_proportion() {
    for (n, why) in [(20_000, "is not known"), (1_000_000, "too much memory")] {
        let names = (0..n).flat_map(|i| int_attribute(&format!("a{i}"), 1));
        let named: Vec<u8> = names.collect();
        fails(&nodes(&[node("Relu", &["x"], &["y"], &named)]), why);
    }
    // Two bytes each, which would become hundreds.
    let empty = [0x2a, 0].repeat(1_000_000);
    fails(
        &nodes(&[node("Relu", &["x"], &["y"], &empty)]),
        "too much memory",
    );
    let many: Vec<Vec<u8>> = (0..20_000)
        .map(|i| {
            let (from, to) = (format!("v{i}"), format!("v{}", i + 1));
            node("Neg", &[if i == 0 { "x" } else { &from }], &[&to], &[])
        })
        .chain([node("Relu", &["v20000"], &["y"], &[])])
        .collect();
    let model = lighterage_onnx::read_bytes(&nodes(&many), "x", &Default::default()).unwrap();
    assert_eq!(model.graph.order.len(), 20_001);
}

/// A model whose weight lies in another file.
fn outside(entries: &[(&str, &str)]) -> Vec<u8> {
    let external: Vec<u8> = entries
        .iter()
        .flat_map(|(key, value)| bytes(13, [bytes(1, key), bytes(2, value)].concat()))
        .collect();
    let weight = tensor(1, &[2], "w", &[external, int(14, 1)].concat());
    let relu = bytes(1, node("Relu", &["w"], &["y"], &[]));
    model(&[bytes(5, weight), relu, bytes(12, output("y"))], &[])
}

fn read_beside(folder: &Path, entries: &[(&str, &str)]) -> Result<(), String> {
    let path = folder.join("m.onnx");
    std::fs::write(&path, outside(entries)).unwrap();
    let read = lighterage_onnx::read(&path, &Default::default());
    read.map(|_| ()).map_err(|error| error.to_string())
}

#[test]
fn external_data_lies_in_the_models_folder() {
    let root = folder("onnx-external");
    let folder = root.join("model");
    std::fs::create_dir_all(folder.join("sub")).unwrap();
    std::fs::write(root.join("secret"), [1; 8]).unwrap();
    std::fs::write(folder.join("sub/w"), [0; 12]).unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink(root.join("secret"), folder.join("link")).unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink(folder.join("sub/w"), folder.join("inside")).unwrap();

    let read = |location: &str| read_beside(&folder, &[("location", location)]);
    let ranges = [
        ("0", "8", ""),
        ("4", "8", ""),
        ("5", "8", "which has 12 bytes"),
        ("18446744073709551615", "8", "which has 12 bytes"),
        ("0", "9", "needs 8 bytes"),
        ("0", "18446744073709551616", "no number of bytes"),
        ("-1", "8", "no number of bytes"),
        ("one", "8", "no number of bytes"),
    ];
    for (offset, length, why) in ranges {
        let entries = [
            ("location", "sub/w"),
            ("offset", offset),
            ("length", length),
        ];
        match read_beside(&folder, &entries) {
            Ok(()) => assert_eq!(why, "", "{offset} + {length}"),
            Err(error) => assert!(!why.is_empty() && error.contains(why), "{error}"),
        }
    }
    #[cfg(unix)]
    assert!(read_beside(&folder, &[("location", "inside"), ("length", "8")]).is_ok());
    let secret = root.join("secret");
    for location in [
        "../secret",
        "sub/../../secret",
        secret.to_str().unwrap(),
        "link",
        "",
    ] {
        let error = read(location).unwrap_err();
        assert!(
            error.contains("outside of the model's folder"),
            "{location}: {error}"
        );
    }
    for location in ["missing", "sub", "."] {
        assert!(read(location).is_err(), "{location}");
    }
    assert!(
        read_beside(&folder, &[])
            .unwrap_err()
            .contains("no location")
    );
    let alone = error(&outside(&[("location", "sub/w")]));
    assert!(alone.contains("has no folder"), "{alone}");
}

#[test]
fn odd_numbers_in_attributes_and_inputs_do_no_harm() {
    const NUMBERS: [i64; 9] = [0, 1, -1, 2, 7, 1 << 31, 1 << 52, i64::MAX, i64::MIN];
    const ATTRIBUTES: [&str; 20] = [
        "axis",
        "k",
        "p",
        "size",
        "group",
        "blocksize",
        "num_groups",
        "batch_dims",
        "num_outputs",
        "axes",
        "perm",
        "pads",
        "strides",
        "dilations",
        "kernel_shape",
        "output_shape",
        "output_padding",
        "num_heads",
        "q_num_heads",
        "kv_num_heads",
    ];
    let operators = lighterage_onnx::operators();
    let mut numbers = Numbers(5);
    for round in 0..8_000 {
        let op = operators[round % operators.len()].name;
        let mut number = || NUMBERS[numbers.below(NUMBERS.len())];
        let lists: Vec<Vec<i64>> = (0..3)
            .map(|i| (0..i + 1).map(|_| number()).collect())
            .collect();
        let mut attributes = vec![];
        for _ in 0..3 {
            let name = ATTRIBUTES[numbers.below(ATTRIBUTES.len())];
            let list: Vec<u8> = (0..1 + numbers.below(4))
                .flat_map(|_| int(8, NUMBERS[numbers.below(NUMBERS.len())] as u64))
                .collect();
            let list = bytes(5, [bytes(1, name), list, int(20, 7)].concat());
            let single = int_attribute(name, NUMBERS[numbers.below(NUMBERS.len())] as u64);
            attributes.push(if numbers.below(2) == 0 { list } else { single });
        }
        const INPUTS: [&str; 8] = ["x", "a", "b", "c", "image", "index", "w", ""];
        let inputs: Vec<&str> = (0..1 + numbers.below(4))
            .map(|_| INPUTS[numbers.below(INPUTS.len())])
            .collect();
        let graph = [
            bytes(1, node(op, &inputs, &["y", "z"], &attributes.concat())),
            bytes(5, ints("a", &lists[0])),
            bytes(5, ints("b", &lists[1])),
            bytes(5, ints("c", &lists[2])),
            bytes(
                5,
                tensor(7, &[], "index", &bytes(9, lists[0][0].to_le_bytes())),
            ),
            bytes(11, info("x", &[2, 3])),
            bytes(11, info("image", &[1, 4, 5, 5])),
            bytes(11, info("w", &[4, 2, 3, 3])),
            bytes(12, output("y")),
        ];
        survives(&model(&graph, &[]), &fixed());
    }
}
