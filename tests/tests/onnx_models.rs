//! Models that torch exports to ONNX give PyTorch's loss: `tests/data/onnx/gen_models.py` exports
//! them and writes their inputs and losses.

use codegen::Data;
use ir::Graph;
use lighterage_tests::run;
use onnx::{BatchNorm, Model, Options, Trainable};
use passes::cost::Roofline;
use passes::decide::Extent;
use passes::graph::criterion::{self, Criterion, Loss};
use passes::graph::optimizer::{HYPER, Optimizer};
use passes::pipeline::{self, Budget, Kernels};
use runtime::Machine;
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/onnx")
}

fn read(name: &str, options: &Options) -> Model {
    let model = onnx::read(&folder().join(format!("{name}.onnx")), options);
    let model = model.unwrap_or_else(|e| panic!("{e}"));
    assert!(model.unsupported.is_empty(), "{:?}", model.unsupported);
    assert_eq!(ir::verify::graph(&model.graph), []);
    model
}

/// A machine that has run one step on the inputs of a model.
fn stepped(name: &str, model: &Model, file: &SafeTensors<'_>) -> (Machine, String) {
    let device = passes::devices::named("cpu").unwrap();
    let options = pipeline::Options {
        budget: Budget::Share(1.0),
        kernels: Kernels::Plain,
        ..pipeline::Options::default()
    };
    let graph = model.graph.clone();
    let cost = Roofline::new(&device);
    let compiled = pipeline::compile(graph, &options, &device, &cost, &mut |_| ()).unwrap();
    let states = compiled.program.graph.states.values();
    let data: Data = states
        .filter_map(|s| Some((s.path.clone(), model.tensors.get(&s.path)?.data.clone())))
        .collect();
    let artifact = codegen::emit(&compiled, &data, codegen::Target::host()).unwrap();
    let output = artifact.outputs[0].name.clone();
    let mut machine = Machine::new(artifact, runtime::Options::default()).unwrap();
    let inputs: Vec<String> = machine.inputs().map(|input| input.name.clone()).collect();
    assert!(!inputs.is_empty());
    for input in inputs {
        let given = file.tensor(&format!("{name}/in/{input}")).unwrap();
        machine.write_input(&input, given.data()).unwrap();
    }
    machine.step().unwrap();
    (machine, output)
}

/// How a model is trained.
#[derive(Clone)]
struct Training {
    steps: usize,
    optimizer: Optimizer,
    /// The learning rate; `None` for the optimizer's own.
    lr: Option<f64>,
    criterion: Criterion,
    /// The budget, as a share of what keeping everything needs.
    share: f64,
}

/// The losses of steps on the inputs of a model.
fn losses(name: &str, model: &Model, file: &SafeTensors<'_>, training: &Training) -> Vec<f32> {
    losses_of((&model.graph, &model.tensors), name, file, training)
}

/// The same for a forward with its tensors.
fn losses_of(
    (forward, tensors): (&Graph, &BTreeMap<String, torch::Tensor>),
    name: &str,
    file: &SafeTensors<'_>,
    training: &Training,
) -> Vec<f32> {
    let device = passes::devices::named("cpu").unwrap();
    let options = pipeline::Options {
        budget: Budget::Share(training.share),
        kernels: Kernels::Plain,
        optimizer: training.optimizer,
        differentiate: true,
        ..pipeline::Options::default()
    };
    let mut graph = forward.clone();
    criterion::attach(&mut graph, &training.criterion).unwrap();
    let cost = Roofline::new(&device);
    let compiled = pipeline::compile(graph, &options, &device, &cost, &mut |_| ()).unwrap();
    let tensors = tensors.iter();
    let data: Data = tensors
        .map(|(path, t)| (path.clone(), t.data.clone()))
        .collect();
    let artifact = codegen::emit(&compiled, &data, codegen::Target::host()).unwrap();
    let hyper = training.optimizer.options().iter();
    let given = |&(name, value): &(&str, f64)| match (name, training.lr) {
        ("lr", Some(lr)) => lr,
        _ => value,
    };
    let hyper: Vec<u8> = hyper
        .flat_map(|option| given(option).to_le_bytes())
        .collect();
    let inputs = artifact.inputs.iter().map(|input| {
        let bytes = match &*input.name {
            HYPER => hyper.clone(),
            name_of_input => {
                let given = file.tensor(&format!("{name}/in/{name_of_input}")).unwrap();
                given.data().to_vec()
            }
        };
        (input.name.clone(), bytes)
    });
    let feeds = vec![inputs.collect(); training.steps];
    let (outcome, _) = run::compiled(&artifact, runtime::Options::default(), &feeds).unwrap();
    let losses = outcome
        .outputs
        .iter()
        .map(|output| floats(&output["loss"])[0]);
    losses.collect()
}

#[test]
fn steps_are_pytorchs_at_every_budget() {
    let bytes = std::fs::read(folder().join("models.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (name, _) in TWICE {
        let model = read(name, &options_of(name));
        let mut training = Training {
            steps: 20,
            optimizer: Optimizer::AdamW,
            lr: None,
            criterion: Criterion::default(),
            share: 1.0,
        };
        let all = losses(name, &model, &file, &training);
        training.share = 0.7;
        assert_eq!(all, losses(name, &model, &file, &training), "{name}");
        are_theirs(name, &all, &file, 1e-5);
    }
}

/// Checks that losses are those in the file, except for a relative error.
fn are_theirs(name: &str, ours: &[f32], file: &SafeTensors<'_>, bound: f32) {
    let theirs = floats(file.tensor(&format!("{name}/losses")).unwrap().data());
    are_close(name, ours, &theirs, bound);
}

fn are_close(name: &str, ours: &[f32], theirs: &[f32], bound: f32) {
    assert_eq!(ours.len(), theirs.len());
    for (our, their) in ours.iter().zip(theirs) {
        assert!(
            (our - their).abs() <= bound * their,
            "{name}: {ours:?}, not {theirs:?}"
        );
    }
}

/// What torch.export writes of a model.
fn exported(name: &str) -> torch::Model {
    let path = folder().join(format!("{name}.pt2"));
    let model = torch::read(&path, &BTreeMap::new()).unwrap();
    assert_eq!(model.unsupported, [], "{name}");
    model
}

/// How a model's ONNX files are read, so that they are what torch.export writes of it.
fn options_of(name: &str) -> Options {
    match name {
        "resnet" => Options {
            dims: BTreeMap::from([("batch".to_string(), 4)]),
            batch_norm: Some(BatchNorm::Train),
            ..Options::default()
        },
        _ => Options::default(),
    }
}

/// The same models by torch.export, and for the versions 18 and 24 of the operators.
const TWICE: [(&str, [&str; 2]); 5] = [
    ("gpt2", ["gpt2", "gpt2-24"]),
    ("llama", ["llama", "llama-24"]),
    ("bert", ["bert", "bert-24"]),
    ("resnet", ["resnet", "resnet-24"]),
    ("moe", ["moe", "moe-24"]),
];

#[test]
fn steps_are_those_of_the_same_model_by_torch_export() {
    let bytes = std::fs::read(folder().join("models.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (name, files) in TWICE {
        let theirs = exported(name);
        for optimizer in [Optimizer::AdamW, Optimizer::SgdMomentum] {
            let training = Training {
                steps: 20,
                optimizer,
                lr: None,
                criterion: Criterion::default(),
                share: 1.0,
            };
            // The file has no weights; those of the first ONNX file have the same names.
            let mut weights = read(files[0], &options_of(name)).tensors;
            weights.extend(theirs.tensors.clone());
            for tied in &theirs.tied {
                let weight = tied.iter().find_map(|path| weights.get(path)).cloned();
                let weight = weight.unwrap_or_else(|| panic!("{name}: {tied:?}"));
                weights.extend(tied.iter().map(|path| (path.clone(), weight.clone())));
            }
            let theirs = losses_of((&theirs.graph, &weights), name, &file, &training);
            for model_name in files {
                let model = read(model_name, &options_of(name));
                let ours = losses_of((&model.graph, &model.tensors), name, &file, &training);
                are_close(model_name, &ours, &theirs, 1e-5);
            }
        }
    }
}

/// The bytes that a differentiated forward needs to keep everything, and the plans that no other
/// plan beats: bytes and microseconds.
fn curve(graph: &Graph) -> (u64, Vec<(u64, f64)>) {
    let device = passes::devices::named("cpu").unwrap();
    let options = pipeline::Options {
        budget: Budget::Share(0.7),
        optimizer: Optimizer::AdamW,
        extent: Extent::Curve,
        differentiate: true,
        ..pipeline::Options::default()
    };
    let mut graph = graph.clone();
    criterion::attach(&mut graph, &Criterion::default()).unwrap();
    let cost = Roofline::new(&device);
    let compiled = pipeline::compile(graph, &options, &device, &cost, &mut |_| ()).unwrap();
    (compiled.decided.keep_peak, compiled.decided.curve)
}

/// For each plan of the model by torch.export, an ONNX file has one that takes no more time and at
/// most 5 % more memory.
#[test]
fn plans_are_as_good_as_those_of_the_same_model_by_torch_export() {
    for (name, files) in TWICE {
        let (their_keep, theirs) = curve(&exported(name).graph);
        for model_name in files {
            let (keep, ours) = curve(&read(model_name, &options_of(name)).graph);
            assert!(keep as f64 <= 1.01 * their_keep as f64, "{model_name}");
            for &(bytes, micros) in &theirs {
                let mut near = ours.iter().filter(|plan| plan.1 <= micros);
                assert!(
                    near.any(|plan| plan.0 as f64 <= 1.05 * bytes as f64),
                    "{model_name}: no plan for {bytes} bytes takes {micros} us: {ours:?}"
                );
            }
        }
    }
}

/// `tests/data/onnx/gen_keras.py` exports the models and trains them by Keras.
#[test]
fn steps_are_keras_steps() {
    let bytes = std::fs::read(folder().join("keras.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let training = Training {
        steps: 10,
        optimizer: Optimizer::Sgd,
        lr: Some(0.1),
        criterion: Criterion {
            loss: Loss::CrossEntropy,
            ..Criterion::default()
        },
        share: 0.8,
    };
    // Keras gives a size of a result a name, though it is known.
    for (name, dim) in [
        ("keras-mlp", Some("unk__15")),
        ("keras-cnn", Some("unk__45")),
        ("tf2onnx-mlp", None),
        ("tf2onnx-cnn", None),
    ] {
        let options = Options {
            dims: dim.map(|dim| (dim.to_string(), 8)).into_iter().collect(),
            trainable: Trainable::All,
            ..Options::default()
        };
        let model = read(name, &options);
        assert_eq!(model.trained.len(), 6, "{name}");
        let all = losses(name, &model, &file, &training);
        are_theirs(name, &all, &file, 1e-4);
        assert!(all[9] < 0.9 * all[0], "{name}: {all:?}");
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|&b| f32::from_le_bytes(b))
        .collect()
}

fn close(name: &str, got: &[u8], wanted: &[u8]) {
    let (got, wanted) = (floats(got), floats(wanted));
    assert_eq!(got.len(), wanted.len(), "{name}");
    for (a, b) in got.iter().zip(&wanted) {
        assert!(
            (a - b).abs() <= 1e-5 * b.abs().max(1.0),
            "{name}: {got:?}, not {wanted:?}"
        );
    }
}

#[test]
fn losses_are_pytorchs() {
    let bytes = std::fs::read(folder().join("models.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (name, n_trained) in [("gpt2", 28), ("llama", 21), ("bert", 41), ("moe", 6)] {
        let model = read(name, &Options::default());
        assert_eq!(model.trained.len(), n_trained, "{name}");
        let (mut machine, loss) = stepped(name, &model, &file);
        let wanted = file.tensor(&format!("{name}/loss")).unwrap();
        close(name, &machine.read_output(&loss).unwrap(), wanted.data());
    }
}

#[test]
fn batch_normalisation_is_a_choice() {
    let bytes = std::fs::read(folder().join("models.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut options = Options {
        dims: BTreeMap::from([("batch".to_string(), 4)]),
        ..Options::default()
    };
    let refused = onnx::read(&folder().join("resnet.onnx"), &options).unwrap_err();
    assert!(refused.to_string().contains("--batch-norm"), "{refused}");
    for (choice, loss) in [
        (BatchNorm::Frozen, "resnet/frozen"),
        (BatchNorm::Train, "resnet/loss"),
    ] {
        options.batch_norm = Some(choice);
        let model = read("resnet", &options);
        // Statistics are never trained.
        assert_eq!(model.trained.len(), 8);
        let (mut machine, output) = stepped("resnet", &model, &file);
        let wanted = file.tensor(loss).unwrap();
        close(loss, &machine.read_output(&output).unwrap(), wanted.data());
        let updated = [
            "bn1.running_mean",
            "bn1.running_var",
            "bn2.running_mean",
            "bn2.running_var",
        ];
        for path in updated {
            // Stored statistics that stay are constants.
            if choice == BatchNorm::Train {
                let wanted = file.tensor(&format!("resnet/after/{path}")).unwrap();
                close(path, &machine.read_state(path).unwrap(), wanted.data());
            }
        }
    }
}

#[test]
fn a_file_for_inference_is_recognised() {
    let model = read("gpt2-inference", &Options::default());
    // Of 28 parameters, 8 biases of zeros are left out, 8 norms are merged with the first, and one
    // table is cut.
    assert_eq!(model.trained.len(), 11);
    let note = &model.notes[0];
    for said in [
        "2 of the model's weights are constants and are not trained (embedding_1, val_312)",
        "8 others are merged with equal ones, such as model.transformer.h.0.ln_1.bias",
        "optimize=False",
    ] {
        assert!(note.contains(said), "{note}");
    }
    for name in ["gpt2", "llama-24", "bert", "resnet", "moe"] {
        assert_eq!(read(name, &options_of(name)).notes, [""; 0], "{name}");
    }
}

#[test]
fn an_attached_loss_is_that_of_the_forward_bit_for_bit() {
    let bytes = std::fs::read(folder().join("models.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let own = Training {
        steps: 8,
        optimizer: Optimizer::AdamW,
        lr: None,
        criterion: Criterion::default(),
        share: 1.0,
    };
    let attached = Training {
        criterion: Criterion {
            loss: Loss::CrossEntropy,
            shift: true,
            ..Criterion::default()
        },
        ..own.clone()
    };
    let with_loss = losses("gpt2", &read("gpt2", &Options::default()), &file, &own);
    let logits = read("gpt2-logits", &Options::default());
    for share in [1.0, 0.6] {
        let attached = Training {
            share,
            ..attached.clone()
        };
        assert_eq!(losses("gpt2", &logits, &file, &attached), with_loss);
    }
}
