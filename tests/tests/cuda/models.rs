//! Tiny models, planned for a GPU at several budgets, on a machine with one.

use super::machine::{Watched, none, standin, threads};
use super::steps::in_list_order;
use super::watched::Watch;
use artifact::Artifact;
use codegen::{Data, Target};
use lighterage_tests::evaluate::Tensors;
use passes::cost::Roofline;
use passes::devices;
use passes::graph::optimizer::{HYPER, Optimizer};
use passes::pipeline::{self, Budget, Compiled, Options};
use runtime::{Machine, StateInit};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const INIT: StateInit = StateInit { seed: 7, std: None };

/// A model, what it starts from, and a batch.
struct Model {
    model: torch::Model,
    data: Data,
    reference: Vec<u8>,
}

impl Model {
    fn read(name: &str) -> Model {
        let folder: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("data/models")
            .join(name);
        let model = torch::read(&folder.join("joint_core.pt2"), &BTreeMap::new()).unwrap();
        let tensors = model.tensors.clone().into_iter();
        let data = tensors.map(|(path, tensor)| (path, tensor.data)).collect();
        let files = ["ref.safetensors", "batches.safetensors"].map(|file| folder.join(file));
        let file = files.into_iter().find(|file| file.exists());
        Model {
            model,
            data,
            reference: std::fs::read(file.unwrap()).unwrap(),
        }
    }

    fn compile(&self, device: &str, budget: Budget) -> Compiled {
        let device = devices::named(device).unwrap();
        let options = Options {
            optimizer: Optimizer::AdamW,
            budget,
            ..Options::default()
        };
        let graph = self.model.graph.clone();
        let cost = Roofline::new(&device);
        pipeline::compile(graph, &options, &device, &cost, &mut |_| ()).unwrap()
    }

    fn emit(&self, compiled: &Compiled, target: Target) -> Artifact {
        let states = compiled.program.graph.states.values();
        let paths: Vec<&str> = states.map(|s| s.path.as_str()).collect();
        let kept = self
            .data
            .iter()
            .filter(|(path, _)| paths.contains(&path.as_str()));
        let data = kept
            .map(|(path, bytes)| (path.clone(), bytes.clone()))
            .collect();
        codegen::emit(compiled, &data, Some(target)).unwrap_or_else(|e| panic!("{e}"))
    }

    fn feed(&self, artifact: &Artifact) -> Tensors {
        let file = SafeTensors::deserialize(&self.reference).unwrap();
        let inputs = artifact.inputs.iter().map(|input| {
            let bytes = if input.name == HYPER {
                let hyper = [1e-3f64, 0.9, 0.999, 1e-8, 0.01];
                hyper.iter().flat_map(|x| x.to_le_bytes()).collect()
            } else {
                let batch = file.tensor(&format!("batch.0.{}", input.name)).unwrap();
                batch.data().to_vec()
            };
            (input.name.clone(), bytes)
        });
        inputs.collect()
    }
}

/// Two steps, and what they leave.
fn run(watched: &mut Watched, feed: &Tensors) -> (Tensors, Tensors) {
    watched.machine.initialise(&INIT).unwrap();
    watched.write(feed).unwrap();
    watched.launch().unwrap();
    watched.launch().unwrap();
    watched.machine.wait().unwrap();
    (watched.read().unwrap(), watched.states().unwrap())
}

/// Whatever the budget and the order of streams, two steps leave the same bits; nothing is touched
/// that nothing orders, the measured peak is the planned one, and the loss is the processor's.
fn check(name: &str) {
    let model = Model::read(name);
    let mut all = vec![];
    for (share, seed) in [(1.0, 1), (0.7, 2)] {
        let compiled = model.compile("h100", Budget::Share(share));
        let artifact = model.emit(&compiled, Target::SM_90);
        let feed = model.feed(&artifact);
        let mut left = |artifact: &Artifact| {
            let watch = Watch::new(&standin(seed));
            let mut watched = Watched::new(&watch, artifact, threads()).unwrap();
            all.push(run(&mut watched, &feed));
            assert_eq!(
                watch.standin.findings(),
                none(),
                "{name}, {share}, seed {seed}"
            );
            let touched = watch.standin.facts().touched_bytes.next_multiple_of(64);
            assert_eq!(
                touched, artifact.summary.planned_peak_bytes,
                "{name}, {share}"
            );
        };
        left(&artifact);
        if share < 1.0 {
            left(&in_list_order(&artifact));
            let host = Target::host().unwrap();
            let compiled = model.compile("cpu", Budget::Share(share));
            let mut cpu = Machine::new(model.emit(&compiled, host), threads()).unwrap();
            cpu.initialise(&INIT).unwrap();
            for _ in 0..2 {
                feed.iter()
                    .for_each(|(name, bytes)| cpu.write_input(name, bytes).unwrap());
                cpu.step().unwrap();
            }
            let loss = |bytes: &[u8]| f32::from_le_bytes(bytes[..4].try_into().unwrap());
            let on_cpu = loss(&cpu.read_output("loss").unwrap());
            let on_gpu = loss(&all[0].0["loss"]);
            let is_near = (on_cpu - on_gpu).abs() <= 1e-4 * on_cpu.abs();
            assert!(is_near, "{name}: {on_cpu} on the processor, {on_gpu}");
        }
    }
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{name}");
}

#[test]
fn gpt2_leaves_the_same_bits_at_any_budget_and_order() {
    check("gpt2-tiny");
}

#[test]
fn llama_leaves_the_same_bits_at_any_budget_and_order() {
    check("llama-tiny");
}

/// The same for the other models: two minutes.
#[test]
#[ignore = "the interpreter takes minutes; `cargo test cuda::models -- --ignored`"]
fn other_models_leave_the_same_bits_at_any_budget_and_order() {
    for name in ["bert-tiny", "dropout-tiny", "moe-tiny", "resnet-tiny"] {
        check(name);
    }
}
