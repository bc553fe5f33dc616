//! Imports files of the exporter and of unmodified torch.

use crate::common::{archive, bytes, data, edited, entries, fixed};
use ir::graph::Def;
use ir::{Attr, DType, Graph, Phase, State, StateKind};
use lighterage_torch::Model;
use std::collections::{BTreeMap, BTreeSet};

const TINY: [&str; 5] = [
    "gpt2-tiny",
    "llama-tiny",
    "bert-tiny",
    "resnet-tiny",
    "moe-tiny",
];

fn read(path: &str) -> Model {
    let model = lighterage_torch::read(&data(path), &fixed()).unwrap_or_else(|e| panic!("{e}"));
    verify(&model);
    model
}

fn verify(model: &Model) {
    assert_eq!(model.unsupported, [], "{}", model.graph.name);
    let findings = ir::verify::graph(&model.graph);
    assert!(findings.is_empty(), "{}: {}", model.graph.name, findings[0]);
}

/// The files of a tiny model, at each level.
fn files(name: &str) -> Vec<String> {
    let paths = ["core", "coarse"].map(|level| format!("models/{name}/joint_{level}.pt2"));
    paths
        .into_iter()
        .filter(|path| data(path).exists())
        .collect()
}

fn meta(name: &str) -> serde_json::Value {
    serde_json::from_slice(&bytes(&format!("models/{name}/meta.json"))).unwrap()
}

fn strings(value: &serde_json::Value) -> BTreeSet<String> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|s| s.as_str().unwrap().to_string())
        .collect()
}

/// Each value's node's phase and module.
fn places(graph: &Graph) -> BTreeMap<&str, (Phase, &str)> {
    let nodes = graph.values.iter().filter_map(|(_, data)| match data.def {
        Def::Node(node, _) => Some((
            data.name.as_str(),
            (graph.nodes[node].phase, graph.nodes[node].module.as_str()),
        )),
        _ => None,
    });
    nodes.collect()
}

#[test]
fn tiny_models_are_read_whole() {
    for name in TINY {
        let meta = meta(name);
        let parameters = strings(&meta["parameters"]);
        for path in files(name) {
            let model = read(&path);
            let graph = &model.graph;
            assert!(
                !graph
                    .order
                    .iter()
                    .any(|&node| graph.nodes[node].op.is_extern()),
                "{path}"
            );

            let inputs: BTreeSet<String> = graph
                .inputs
                .iter()
                .map(|&v| graph.values[v].name.clone())
                .collect();
            assert_eq!(
                inputs,
                meta["inputs"]
                    .as_object()
                    .unwrap()
                    .keys()
                    .cloned()
                    .collect(),
                "{path}"
            );
            let graded = graph
                .gradients
                .iter()
                .map(|&(state, _)| graph.states[state].path.clone())
                .collect();
            assert_eq!(parameters, graded, "{path}");
            let params = graph
                .states
                .values()
                .filter(|state| state.kind == StateKind::Param);
            assert_eq!(
                parameters,
                params.map(|state| state.path.clone()).collect(),
                "{path}"
            );
            let mutated = graph
                .states
                .values()
                .filter(|state| state.before != state.after);
            assert_eq!(
                strings(&meta["mutated_buffers"]),
                mutated.map(|state| state.path.clone()).collect(),
                "{path}"
            );

            let names: Vec<&str> = graph
                .outputs
                .iter()
                .map(|output| output.name.as_str())
                .collect();
            assert_eq!(names, ["loss"], "{path}");
            assert_eq!(graph.values[graph.outputs[0].value].ty.to_string(), "f32[]");

            // Parameters are in the file only at level core; buffers always are.
            for state in graph.states.values() {
                let tensor = model.tensors.get(&state.path);
                let present = path.contains("core") || state.kind != StateKind::Param;
                assert_eq!(tensor.is_some(), present, "{path}: {}", state.path);
                if let Some(tensor) = tensor {
                    assert_eq!(tensor.ty, graph.values[state.before].ty);
                    assert_eq!(tensor.data.len() as u64, tensor.ty.bytes());
                }
            }
            let tied: BTreeSet<BTreeSet<String>> = meta["tied"]
                .as_array()
                .unwrap()
                .iter()
                .map(strings)
                .collect();
            assert_eq!(
                tied,
                model
                    .tied
                    .iter()
                    .map(|group| group.iter().cloned().collect())
                    .collect(),
                "{path}"
            );

            let text = ir::text::print_graph(graph);
            assert_eq!(
                ir::text::print_graph(&ir::text::parse_graph(&text).unwrap()),
                text,
                "{path}"
            );
        }
    }
}

#[test]
fn every_known_operator_has_its_type() {
    // The importer compares the type of each result with the file's.
    let model = read("ops/ops.pt2");
    assert_eq!(model.graph.gradients, []);
    assert!(
        model
            .graph
            .order
            .iter()
            .all(|&node| model.graph.nodes[node].phase == Phase::Forward)
    );
}

#[test]
fn random_operators_share_one_state() {
    let model = read("ops/random.pt2");
    let graph = &model.graph;
    let rng = graph
        .states
        .values()
        .find(|state| state.kind == StateKind::Rng)
        .unwrap();
    assert_eq!(
        (
            rng.path.as_str(),
            graph.values[rng.before].ty.to_string().as_str()
        ),
        ("rng", "i64[2]")
    );
    let random: Vec<i64> = graph
        .order
        .iter()
        .filter_map(|&node| match graph.nodes[node].op.attr("stream") {
            Some(Attr::Int(stream)) => Some(stream),
            _ => None,
        })
        .collect();
    assert_eq!(random, (0..14).collect::<Vec<i64>>());
    let last = &graph.nodes[*graph.order.last().unwrap()];
    assert_eq!(
        (last.op.name(), last.phase, last.outputs[0]),
        ("rng_next", Phase::Optimizer, rng.after)
    );
}

#[test]
fn symbolic_sizes_take_values() {
    let path = data("models/gpt2-dynbatch/joint_coarse.pt2");
    let error = lighterage_torch::read(&path, &fixed()).unwrap_err();
    assert_eq!(
        (error.message.as_str(), error.help.as_str()),
        (
            "has symbolic sizes: s72 in 2..=64",
            "choose with --dim s72=4"
        )
    );
    for (batch, fits) in [(2, true), (7, true), (64, true), (1, false), (65, false)] {
        let dims = BTreeMap::from([("s72".to_string(), batch)]);
        match lighterage_torch::read(&path, &dims) {
            Ok(model) => {
                assert!(fits);
                verify(&model);
                let labels = model.graph.inputs[1];
                assert_eq!(
                    model.graph.values[labels].ty.to_string(),
                    format!("i64[{batch},32]")
                );
            }
            Err(error) => {
                assert!(!fits, "{error}");
                assert_eq!(error.message, format!("s72={batch} is not in 2..=64"));
            }
        }
    }
    let dims = BTreeMap::from([("s72".to_string(), 4), ("batch".to_string(), 4)]);
    let error = lighterage_torch::read(&path, &dims).unwrap_err();
    assert_eq!(
        error.message,
        "has no symbolic size batch; it has s72 in 2..=64"
    );
}

#[test]
fn modules_come_from_the_metadata() {
    let model = read("models/gpt2-tiny/joint_coarse.pt2");
    let places = places(&model.graph);
    assert_eq!(
        places["addmm"],
        (Phase::Forward, "model.transformer.h.0.attn.c_attn")
    );
    // It has no path: it adds the gradients of the layer norm and of the residual connection.
    assert_eq!(places["add_10"].0, Phase::Backward);
    assert!(
        places["add_10"].1.starts_with("model.transformer.h.1"),
        "{}",
        places["add_10"].1
    );
    assert!(
        places
            .values()
            .all(|(_, module)| module.starts_with("model"))
    );
}

#[test]
fn stock_files_have_nearly_the_same_places() {
    for name in TINY {
        for path in files(name) {
            let whole = read(&path);
            let bare = edited(&bytes(&path), |model| {
                for node in model["graph_module"]["graph"]["nodes"]
                    .as_array_mut()
                    .unwrap()
                {
                    node["metadata"] = serde_json::json!({});
                }
            });
            let bare = lighterage_torch::read_bytes(&bare, name, &fixed()).unwrap();
            let (tagged, guessed) = (places(&whole.graph), places(&bare.graph));
            assert_eq!(tagged.len(), guessed.len());
            let share = |n: usize| n as f64 / tagged.len() as f64;
            let pairs = || tagged.iter().map(|(name, place)| (place, &guessed[name]));
            let phases = share(pairs().filter(|(a, b)| a.0 == b.0).count());
            assert!(0.97 < phases, "{path}: {phases}");
            // For a planner only the layer matters: the path up to its first number.
            let layer = |path: &str| {
                let parts: Vec<&str> = path.split('.').collect();
                let number = parts.iter().position(|part| part.parse::<u64>().is_ok());
                number.map(|i| parts[..=i].join("."))
            };
            let modules = share(pairs().filter(|(a, b)| layer(a.1) == layer(b.1)).count());
            assert!(0.8 < modules, "{path}: {modules}");
        }
    }
}

#[test]
fn big_models_are_read_if_present() {
    let folder = data("models/big");
    let Ok(files) = std::fs::read_dir(&folder) else {
        eprintln!("skipped: {} is not there", folder.display());
        return;
    };
    for file in files {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "pt2") {
            verify(&lighterage_torch::read(&path, &fixed()).unwrap_or_else(|e| panic!("{e}")));
        }
    }
}

#[test]
fn compressed_archives_are_read_too() {
    let bytes = bytes("models/gpt2-tiny/joint_core.pt2");
    let stored = lighterage_torch::read_bytes(&bytes, "gpt2", &fixed()).unwrap();
    let deflated = archive(&entries(&bytes), true);
    assert!(deflated.len() < bytes.len());
    assert_eq!(
        lighterage_torch::read_bytes(&deflated, "gpt2", &fixed()).unwrap(),
        stored
    );
}

/// Replaces the signature's `i`th output of a kind by another value.
fn output_spec(model: &mut serde_json::Value, kind: &str, i: usize, name: &str) {
    let specs = model["graph_module"]["signature"]["output_specs"]
        .as_array_mut()
        .unwrap();
    let spec = specs
        .iter_mut()
        .filter(|spec| spec.get(kind).is_some())
        .nth(i)
        .unwrap();
    spec[kind]["arg"]["name"] = name.into();
}

#[test]
fn states_that_keep_their_value_or_share_one() {
    let bytes = bytes("models/resnet-tiny/joint_coarse.pt2");
    let before = lighterage_torch::read_bytes(&bytes, "resnet", &fixed())
        .unwrap()
        .graph;
    let is_buffer = |&state: &State| before.states[state].before != before.states[state].after;
    let ty = |state: State| before.values[before.states[state].before].ty.to_string();
    let buffers: Vec<State> = before
        .states
        .ids()
        .filter(is_buffer)
        .filter(|&state| ty(state) == "f32[8]")
        .take(4)
        .collect();
    let name = |value: ir::Value| before.values[value].name.as_str();
    let (old, new) = (
        name(before.states[buffers[0]].before),
        name(before.states[buffers[0]].after),
    );
    let edited = edited(&bytes, |model| {
        for (&buffer, value) in buffers.iter().zip([old, new, new, old]) {
            mutate(model, &before.states[buffer].path, value);
        }
    });
    let model = lighterage_torch::read_bytes(&edited, "resnet", &fixed()).unwrap();
    verify(&model);
    let state = |i: usize| &model.graph.states[buffers[i]];
    // Its own old value: no change. A new value: used directly. A value that is used already, or
    // belongs to another state: a copy.
    assert_eq!(state(0).before, state(0).after);
    assert_eq!(model.graph.values[state(1).after].name, new);
    for i in [2, 3] {
        let node = model.graph.def_node(state(i).after).unwrap();
        assert_eq!(model.graph.nodes[node].op.name(), "cast");
    }
}

/// Makes a step leave another value in a buffer.
fn mutate(model: &mut serde_json::Value, path: &str, value: &str) {
    let specs = model["graph_module"]["signature"]["output_specs"]
        .as_array_mut()
        .unwrap();
    let mut specs = specs
        .iter_mut()
        .filter_map(|spec| spec.get_mut("buffer_mutation"));
    let spec = specs.find(|spec| spec["buffer_name"] == path).unwrap();
    spec["arg"]["name"] = value.into();
}

#[test]
fn a_gradient_may_be_used_twice() {
    let bytes = bytes("models/gpt2-tiny/joint_coarse.pt2");
    let graph = lighterage_torch::read_bytes(&bytes, "gpt2", &fixed())
        .unwrap()
        .graph;
    let alike = |i: usize| {
        let ty = |(state, _): (State, _)| &graph.values[graph.states[state].before].ty;
        (0..i).find(|&j| ty(graph.gradients[j]) == ty(graph.gradients[i]))
    };
    let (i, j) = (0..graph.gradients.len())
        .find_map(|i| Some((i, alike(i)?)))
        .unwrap();
    let name = graph.values[graph.gradients[j].1].name.clone();
    let edited = edited(&bytes, |model| {
        output_spec(model, "gradient_to_parameter", i, &name)
    });
    let model = lighterage_torch::read_bytes(&edited, "gpt2", &fixed()).unwrap();
    verify(&model);
    assert_eq!(model.graph.gradients[i].1, model.graph.gradients[j].1);
}

#[test]
fn unknown_operators_become_extern_nodes() {
    let bytes = bytes("models/gpt2-tiny/joint_coarse.pt2");
    let edited = edited(&bytes, |model| {
        for node in model["graph_module"]["graph"]["nodes"]
            .as_array_mut()
            .unwrap()
        {
            if node["target"] == "torch.ops.aten.native_layer_norm.default" {
                node["target"] = "torch.ops.mylib.fast_norm.default".into();
            } else if node["target"] == "torch.ops.aten.tanh.default" {
                node["inputs"]
                    .as_array_mut()
                    .unwrap()
                    .push(serde_json::json!(
                        {"name": "fast", "arg": {"as_bool": true}, "kind": 2}
                    ));
            }
        }
    });
    let model = lighterage_torch::read_bytes(&edited, "gpt2", &fixed()).unwrap();
    let findings = ir::verify::graph(&model.graph);
    assert!(findings.is_empty(), "{}", findings[0]);
    let norm = &model.unsupported[0];
    let (target, why) = (norm.target.as_str(), norm.why.as_str());
    assert_eq!(
        (target, why),
        ("torch.ops.mylib.fast_norm.default", "no op for it")
    );
    let tanh = model
        .unsupported
        .iter()
        .find(|u| u.target.contains("tanh"))
        .unwrap();
    assert_eq!(tanh.why, "the argument fast is not known");
    let node = model
        .graph
        .order
        .iter()
        .find(|&&node| model.graph.nodes[node].op.is_extern())
        .unwrap();
    let node = &model.graph.nodes[*node];
    assert_eq!(
        (node.op.attr("name"), node.inputs.len(), node.outputs.len()),
        (
            Some(Attr::Str("torch.ops.mylib.fast_norm.default".into())),
            3,
            3
        )
    );
    assert_eq!(model.graph.values[node.outputs[0]].ty.dtype(), DType::F32);
}

/// torch names the gradient of an input that needs none, and the mask leaves it out.
#[test]
fn a_result_that_the_mask_leaves_out_may_have_a_name() {
    let bytes = bytes("models/resnet-tiny/joint_coarse.pt2");
    let with = |wanted: bool, output: Option<&str>| {
        edited(&bytes, |model| {
            let graph = &mut model["graph_module"]["graph"];
            let nodes = graph["nodes"].as_array_mut().unwrap();
            let is_backward = |node: &&serde_json::Value| {
                node["target"].as_str().unwrap().contains("norm_backward")
            };
            let mut node = nodes.iter().find(is_backward).unwrap().clone();
            let mask = node["inputs"].as_array_mut().unwrap().last_mut().unwrap();
            assert_eq!(mask["name"], "output_mask");
            mask["arg"]["as_bools"] = vec![false, wanted, wanted].into();
            let inputs = node["inputs"].as_array_mut().unwrap();
            let train = inputs.iter_mut().find(|input| input["name"] == "train");
            train.unwrap()["arg"]["as_bool"] = wanted.into();
            for (i, result) in node["outputs"]
                .as_array_mut()
                .unwrap()
                .iter_mut()
                .enumerate()
            {
                let name = format!("second_{i}");
                let old = result["as_tensor"]["name"].as_str().unwrap().to_string();
                graph["tensor_values"][&name] = graph["tensor_values"][&old].clone();
                result["as_tensor"]["name"] = name.into();
            }
            let place = |node: &serde_json::Value| is_backward(&node);
            let at = graph["nodes"]
                .as_array()
                .unwrap()
                .iter()
                .position(place)
                .unwrap();
            graph["nodes"].as_array_mut().unwrap().insert(at, node);
            if let Some(name) = output {
                graph["outputs"][0]["as_tensor"]["name"] = name.into();
            }
        })
    };
    let model = lighterage_torch::read_bytes(&with(true, None), "resnet", &fixed()).unwrap();
    verify(&model);
    let names: Vec<&str> = model
        .graph
        .values
        .values()
        .map(|data| data.name.as_str())
        .collect();
    let there = ["second_0", "second_1", "second_2"].map(|name| names.contains(&name));
    assert_eq!(there, [false, true, true]);
    let error = lighterage_torch::read_bytes(&with(true, Some("second_0")), "resnet", &fixed());
    let error = error.unwrap_err().to_string();
    assert!(
        error.ends_with("result second_0 is not computed"),
        "{error}"
    );
    // In evaluation no operator refuses such a mask: the call computes nothing, for nobody.
    let model = lighterage_torch::read_bytes(&with(false, None), "resnet", &fixed()).unwrap();
    verify(&model);
}
