//! What is read from small files: functions, branches, sequences, states, sizes, modules.

use crate::common::*;
use ir::StateKind;
use lighterage_onnx::{Options, Trainable, read_bytes};

fn text(bytes: &[u8]) -> String {
    let model = read_bytes(bytes, "m", &fixed()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(ir::verify::graph(&model.graph), []);
    ir::text::print_graph(&model.graph)
}

fn body(nodes: &[Vec<u8>], output: &str) -> Vec<u8> {
    let nodes: Vec<u8> = nodes.iter().flat_map(|node| bytes(1, node)).collect();
    [nodes, bytes(12, self::output(output))].concat()
}

fn graph_attribute(name: &str, graph: &[u8]) -> Vec<u8> {
    bytes(5, [bytes(1, name), bytes(6, graph), int(20, 5)].concat())
}

#[test]
fn a_function_is_read_with_the_attributes_of_its_call() {
    // leak(a; slope) = LeakyRelu(a; alpha = slope), and an input that the call leaves out.
    let reference = [bytes(1, "alpha"), bytes(21, "slope"), int(20, 1)].concat();
    let inner = node("LeakyRelu", &["a"], &["r"], &bytes(5, reference));
    let clip = node("Clip", &["r", "absent"], &["s"], &[]);
    let function = [
        bytes(1, "leak"),
        bytes(4, "a"),
        bytes(4, "absent"),
        bytes(5, "s"),
        bytes(6, "slope"),
        bytes(7, inner),
        bytes(7, clip),
        bytes(9, int(2, 18)),
        bytes(10, "mine"),
    ]
    .concat();
    let slope = [
        bytes(1, "slope"),
        vec![0x15],
        0.5f32.to_le_bytes().to_vec(),
        int(20, 1),
    ]
    .concat();
    let call = node(
        "leak",
        &["x"],
        &["y"],
        &[bytes(5, slope), bytes(7, "mine")].concat(),
    );
    let graph = [
        bytes(1, call),
        bytes(11, info("x", &[4])),
        bytes(12, output("y")),
    ];
    let text = text(&model(&graph, &bytes(25, function)));
    assert!(text.contains("mul_scalar %x value=0.5"), "{text}");
    assert!(text.contains("output y = "), "{text}");
}

#[test]
fn a_branch_is_chosen_by_a_shape() {
    // if size(x) == 6: -x, else |x|
    let then_branch = body(&[node("Neg", &["x"], &["r"], &[])], "r");
    let else_branch = body(&[node("Abs", &["x"], &["r"], &[])], "r");
    let branches = [
        graph_attribute("then_branch", &then_branch),
        graph_attribute("else_branch", &else_branch),
    ];
    let six = tensor(7, &[], "six", &bytes(9, 6i64.to_le_bytes()));
    let graph = [
        bytes(5, six),
        bytes(1, node("Size", &["x"], &["n"], &[])),
        bytes(1, node("Equal", &["n", "six"], &["c"], &[])),
        bytes(1, node("If", &["c"], &["y"], &branches.concat())),
        bytes(11, info("x", &[2, 3])),
        bytes(12, output("y")),
    ];
    let text = text(&model(&graph, &[]));
    assert!(text.contains("neg %x") && !text.contains("abs"), "{text}");
}

#[test]
fn a_branch_by_data_is_refused() {
    let branch = body(&[node("Neg", &["x"], &["r"], &[])], "r");
    let branches = [
        graph_attribute("then_branch", &branch),
        graph_attribute("else_branch", &branch),
    ];
    let graph = [
        node("ReduceSum", &["x"], &["s"], &int_attribute("keepdims", 0)),
        node("Greater", &["s", "s"], &["c"], &[]),
        node(
            "If",
            &["c"],
            &["y"],
            &[branches.concat(), bytes(3, "choice")].concat(),
        ),
    ];
    let error = read_bytes(&nodes(&graph), "m", &fixed())
        .unwrap_err()
        .to_string();
    let expected = "m: node choice (If): the condition must be known when the file is read, but \
                    depends on data";
    assert_eq!(error, expected);
}

#[test]
fn a_split_into_a_sequence_is_slices() {
    let graph = [
        node("SplitToSequence", &["x"], &["s"], &int_attribute("axis", 1)),
        node("SequenceLength", &["s"], &["n"], &[]),
        node("Sub", &["n", "n"], &["first"], &[]),
        node("SequenceAt", &["s", "first"], &["y"], &[]),
    ];
    let text = text(&nodes(&graph));
    assert!(
        text.contains("slice %x dim=1 end=1 start=0 step=1 : f32[2,1]"),
        "{text}"
    );
    assert!(!text.contains("const"), "{text}");
}

#[test]
fn unneeded_nodes_are_left_out() {
    let graph = [
        node("NonZero", &["x"], &["places"], &[]),
        node("Neg", &["x"], &["y"], &[]),
    ];
    assert!(!text(&nodes(&graph)).contains("NonZero"));
}

#[test]
fn what_no_op_expresses_is_an_error_or_an_extern_node() {
    let graph = |info: Vec<u8>| {
        let unknown = node("Det", &["x"], &["d"], &bytes(3, "the_node"));
        let graph = [
            bytes(1, unknown),
            bytes(1, node("Neg", &["d"], &["y"], &[])),
            info,
            bytes(11, self::info("x", &[2, 2])),
            bytes(12, output("y")),
        ];
        model(&graph, &[])
    };
    let error = read_bytes(&graph(vec![]), "m", &fixed()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "m: node the_node (Det): there is no op for it"
    );
    let declared = bytes(13, info("d", &[]));
    let model = read_bytes(&graph(declared), "m", &fixed()).unwrap();
    assert_eq!(model.unsupported.len(), 1);
    assert_eq!(model.unsupported[0].node, "the_node");
}

#[test]
fn an_attribute_or_input_that_nothing_reads_is_an_error() {
    let unknown = node("Relu", &["x"], &["y"], &int_attribute("shift", 1));
    let error = read_bytes(&nodes(&[unknown]), "m", &fixed()).unwrap_err();
    assert!(error.to_string().contains("shift is not known"), "{error}");
    let more = node("Relu", &["x", "x"], &["y"], &[]);
    let error = read_bytes(&nodes(&[more]), "m", &fixed()).unwrap_err();
    assert!(
        error.to_string().contains("input 1 is not known"),
        "{error}"
    );
}

#[test]
fn initializers_become_states_by_choice() {
    let weight = |name: &str| {
        let data: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
        bytes(5, tensor(1, &[3, 2], name, &bytes(9, data)))
    };
    let graph = [
        weight("fc.weight"),
        weight("plain"),
        bytes(1, node("MatMul", &["x", "fc.weight"], &["a"], &[])),
        bytes(1, node("MatMul", &["x", "plain"], &["b"], &[])),
        bytes(1, node("Add", &["a", "b"], &["y"], &[])),
        bytes(11, info("x", &[2, 3])),
        bytes(12, output("y")),
    ];
    let file = model(&graph, &[]);
    let kinds = |trainable: &str| {
        let options = Options {
            trainable: Trainable::parse(trainable),
            ..fixed()
        };
        let model = read_bytes(&file, "m", &options).unwrap();
        let states = model.graph.states.values();
        let mut kinds: Vec<(String, StateKind)> =
            states.map(|s| (s.path.clone(), s.kind)).collect();
        kinds.sort();
        assert!(
            kinds
                .iter()
                .all(|(path, _)| model.tensors[path].data.len() == 24)
        );
        (kinds, model.notes.len())
    };
    let pair = |a, b| vec![("fc.weight".to_string(), a), ("plain".to_string(), b)];
    let (param, constant) = (StateKind::Param, StateKind::Const);
    assert_eq!(kinds("named"), (pair(param, constant), 1));
    assert_eq!(kinds("all"), (pair(param, param), 0));
    assert_eq!(kinds("pl*"), (pair(constant, param), 0));
    assert_eq!(kinds("pl*,*.weight"), (pair(param, param), 0));
}

#[test]
fn half_precision_is_read_from_both_fields() {
    for (dtype, one) in [(10, 0x3c00u64), (16, 0x3f80)] {
        for field in [int(5, one), bytes(9, (one as u16).to_le_bytes())] {
            let graph = [
                bytes(5, tensor(dtype, &[1], "one", &field)),
                bytes(1, node("Cast", &["one"], &["f"], &int_attribute("to", 1))),
                bytes(1, node("Add", &["x", "f"], &["y"], &[])),
                bytes(11, info("x", &[2])),
                bytes(12, output("y")),
            ];
            let text = text(&model(&graph, &[]));
            assert!(text.contains("add_scalar %x value=1.0"), "{text}");
        }
    }
}

#[test]
fn versions_are_named() {
    let with = |version: u64| {
        let graph = [
            bytes(1, node("Neg", &["x"], &["y"], &[])),
            bytes(11, info("x", &[2])),
            bytes(12, output("y")),
        ];
        let opset = bytes(8, int(2, version));
        [int(1, 8), bytes(7, graph.concat()), opset].concat()
    };
    let error = |version| {
        read_bytes(&with(version), "m", &fixed())
            .unwrap_err()
            .to_string()
    };
    assert!(
        error(12).contains("onnx.version_converter"),
        "{}",
        error(12)
    );
    assert!(error(29).contains("opset_version=28"), "{}", error(29));
    assert!(
        [13, 28]
            .iter()
            .all(|&version| read_bytes(&with(version), "m", &fixed()).is_ok())
    );
}

#[test]
fn symbolic_sizes_are_asked_for() {
    let path = data("resnet.onnx");
    let error = lighterage_onnx::read(&path, &fixed())
        .unwrap_err()
        .to_string();
    assert!(
        error.ends_with("has symbolic sizes: batch; choose with --dim batch=8"),
        "{error}"
    );
    let mut options = batched();
    options.dims.insert("width".into(), 2);
    let error = lighterage_onnx::read(&path, &options)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("has no symbolic size width; it has batch"),
        "{error}"
    );
}

#[test]
fn dots_in_names_of_inputs_become_underscores() {
    let graph = [
        bytes(1, node("Neg", &["input.1"], &["out.1"], &[])),
        bytes(11, info("input.1", &[2])),
        bytes(12, output("out.1")),
    ];
    let text = text(&model(&graph, &[]));
    assert!(text.contains("input  %input_1 : f32[2]"), "{text}");
    assert!(text.contains("output out.1 = %out_1"), "{text}");
}

#[test]
fn modules_are_those_of_the_exporter() {
    let model = lighterage_onnx::read(&data("gpt2.onnx"), &fixed()).unwrap();
    let modules: Vec<&str> = model
        .graph
        .nodes
        .values()
        .map(|n| n.module.as_str())
        .collect();
    assert!(
        modules.contains(&"model.transformer.h.1.mlp.c_fc"),
        "{modules:?}"
    );
}
