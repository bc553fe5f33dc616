//! Forwards of `torch.export`, without a backward, train to the losses of PyTorch in eager mode.

use ir::Graph;
use lighterage_tests::evaluate::{self, Tensors};
use passes::cost::Roofline;
use passes::graph::autodiff;
use passes::graph::criterion::{self, Criterion, Loss};
use passes::graph::optimizer::{self, HYPER, Optimizer};
use passes::pipeline::{self, Kernels, Options};
use runtime::{Machine, StateInit};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const STEPS: usize = 10;
const BATCHES: usize = 3;
/// AdamW's defaults in PyTorch: lr, betas, eps, weight decay.
const DEFAULTS: [f64; 5] = [1e-3, 0.9, 0.999, 1e-8, 0.01];

fn path(file: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/forward");
    folder.join(file)
}

fn read(name: &str) -> torch::Model {
    let model = torch::read(&path(&format!("{name}.pt2")), &BTreeMap::new()).unwrap();
    assert_eq!(model.unsupported, []);
    model
}

fn floats(bytes: &[u8]) -> Vec<f64> {
    let numbers = bytes
        .chunks(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    numbers.map(f64::from).collect()
}

/// The step of a forward with its loss.
fn step(forward: &Graph, criterion: &Criterion) -> Machine {
    let mut graph = forward.clone();
    criterion::attach(&mut graph, criterion).unwrap();
    let options = Options {
        optimizer: Optimizer::AdamW,
        kernels: Kernels::Plain,
        differentiate: true,
        ..Options::default()
    };
    let device = passes::devices::named("cpu").unwrap();
    let cost = Roofline::new(&device);
    let compiled = pipeline::compile(graph, &options, &device, &cost, &mut |_| ()).unwrap();
    let none = codegen::Data::new();
    let artifact = codegen::emit(&compiled, &none, codegen::Target::host()).unwrap();
    Machine::new(artifact, runtime::Options::default()).unwrap()
}

/// Trains as the generator does, and compares the losses and the states.
fn equals_eager(name: &str, criterion: &Criterion) {
    let model = read(name);
    let bytes = std::fs::read(path(&format!("{name}.safetensors"))).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |name: &str| file.tensor(name).unwrap().data().to_vec();

    let mut machine = step(&model.graph, criterion);
    machine
        .initialise(&StateInit { seed: 0, std: None })
        .unwrap();
    for (path, tensor) in &model.tensors {
        machine.write_state(path, &tensor.data).unwrap();
    }
    for (i, expected) in floats(&tensor("losses"))
        .into_iter()
        .enumerate()
        .take(STEPS)
    {
        let names: Vec<String> = machine.inputs().map(|input| input.name.clone()).collect();
        for name in names {
            let bytes = match &*name {
                HYPER => DEFAULTS.iter().flat_map(|x| x.to_le_bytes()).collect(),
                name => tensor(&format!("batch.{}.{name}", i % BATCHES)),
            };
            machine.write_input(&name, &bytes).unwrap();
        }
        machine.step().unwrap();
        let found = floats(&machine.read_output("loss").unwrap())[0];
        let off = (found / expected - 1.0).abs();
        assert!(off <= 1e-5, "{name}: loss {i} is {found}, not {expected}");
    }
    let n_after = file
        .names()
        .iter()
        .filter(|name| name.starts_with("after."))
        .count();
    let constants = model.graph.states.values();
    let constants: Vec<&str> = constants
        .filter(|state| state.kind == ir::StateKind::Const)
        .map(|state| state.path.as_str())
        .collect();
    assert!(n_after + constants.len() >= model.tensors.len());
    let paths = model.tensors.keys();
    for path in paths.filter(|path| !constants.contains(&path.as_str())) {
        let (found, expected) = (
            machine.read_state(path).unwrap(),
            tensor(&format!("after.{path}")),
        );
        if path.ends_with("num_batches_tracked") {
            assert_eq!(found, expected, "{name}: {path}");
            continue;
        }
        for (found, expected) in floats(&found).iter().zip(floats(&expected)) {
            assert!(
                (found - expected).abs() <= 2e-5,
                "{name}: {path}: {found}, {expected}"
            );
        }
    }
}

#[test]
fn logits_with_an_attached_loss_train_as_in_eager_mode() {
    let criterion = Criterion {
        loss: Loss::CrossEntropy,
        shift: true,
        ..Criterion::default()
    };
    equals_eager("lm", &criterion);
}

#[test]
fn a_forward_with_its_loss_trains_as_in_eager_mode() {
    equals_eager("cnn", &Criterion::default());
}

#[test]
fn functions_have_derivatives_where_their_formulas_have_none() {
    equals_eager("edges", &Criterion::default());
}

#[test]
fn activations_have_pytorchs_derivatives() {
    equals_eager("activations", &Criterion::default());
}

#[test]
fn images_in_other_sizes_train_as_in_eager_mode() {
    equals_eager("images", &Criterion::default());
}

#[test]
fn recurrent_layers_train_as_in_eager_mode() {
    equals_eager("recurrent", &Criterion::default());
}

#[test]
fn losses_of_torch_train_as_in_eager_mode() {
    equals_eager("losses", &Criterion::default());
}

#[test]
fn complex_numbers_train_as_in_eager_mode() {
    equals_eager("complexes", &Criterion::default());
}

#[test]
fn functions_of_functions_train_as_in_eager_mode() {
    equals_eager("functions", &Criterion::default());
}

#[test]
fn writes_into_views_train_as_in_eager_mode() {
    equals_eager("writes", &Criterion::default());
}

/// Where a slope is infinite or jumps, it is PyTorch's.
#[test]
fn slopes_at_ends_are_pytorchs() {
    let mut graph = read("ends").graph;
    criterion::attach(&mut graph, &Criterion::default()).unwrap();
    autodiff::run(&mut graph, true).unwrap();
    optimizer::run(&mut graph, Optimizer::None).unwrap();
    let bytes = std::fs::read(path("ends.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut states: Tensors = read("ends")
        .tensors
        .into_iter()
        .map(|(path, tensor)| (path, tensor.data))
        .collect();
    let inputs = Tensors::from([("x".to_string(), file.tensor("x").unwrap().data().to_vec())]);
    let found = evaluate::step(&graph, &mut states, &inputs).unwrap();
    for (name, expected) in file.tensors().into_iter().filter(|(name, _)| name != "x") {
        let (found, expected) = (floats(&found[&name]), floats(expected.data()));
        for (a, b) in found.iter().zip(&expected) {
            let is_close = (a - b).abs() <= 1e-6 * b.abs();
            assert!(a == b || is_close, "{name}: {found:?}, not {expected:?}");
        }
    }
}

#[test]
fn tied_and_frozen_parameters_are_known() {
    let model = read("lm");
    assert_eq!(model.tied, [["head.weight", "words.weight"]]);
    let kind = |path: &str| {
        let mut states = model.graph.states.values();
        states
            .find(|state| state.path == path)
            .map(|state| state.kind)
    };
    assert_eq!(kind("out.bias"), Some(ir::StateKind::Buffer));
    assert_eq!(kind("out.weight"), Some(ir::StateKind::Param));
    let tied = ["head.weight", "words.weight"].map(kind);
    assert_eq!(tied.iter().flatten().count(), 1, "{tied:?}");
}
