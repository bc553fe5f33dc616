//! The backward of a cut-off forward against PyTorch's: the files have both.

use ir::{Graph, text};
use lighterage_tests::evaluate::{self, Tensors};
use passes::cost::Roofline;
use passes::graph::optimizer::{self, Optimizer};
use passes::graph::{attention, autodiff, canonical, simplify};
use passes::pipeline::{self, Budget, Compiled, Kernels, Options};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A file, and how its gradients compare with PyTorch's.
struct Fixture {
    model: &'static str,
    level: &'static str,
    /// The least number of gradients' elements that have PyTorch's bits, in percent.
    equal: f64,
}

const fn fixture(model: &'static str, level: &'static str, equal: f64) -> Fixture {
    Fixture { model, level, equal }
}

const FIXTURES: [Fixture; 11] = [
    fixture("gpt2-tiny", "coarse", 100.0),
    fixture("gpt2-tiny", "core", 100.0),
    fixture("bert-tiny", "coarse", 66.8),
    fixture("bert-tiny", "core", 66.8),
    fixture("llama-tiny", "coarse", 100.0),
    fixture("llama-tiny", "core", 100.0),
    fixture("resnet-tiny", "coarse", 100.0),
    fixture("resnet-tiny", "core", 100.0),
    fixture("moe-tiny", "core", 89.6),
    fixture("dropout-tiny", "coarse", 100.0),
    fixture("dropout-tiny", "core", 100.0),
];

impl Fixture {
    fn path(&self, file: &str) -> PathBuf {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/models");
        models.join(self.model).join(file)
    }
    fn read(&self, level: &str) -> torch::Model {
        let path = self.path(&format!("joint_{level}.pt2"));
        torch::read(&path, &BTreeMap::new()).unwrap()
    }
    /// Values of states and inputs. Only the core file has weights.
    fn tensors(&self, graph: &Graph) -> (Tensors, Tensors) {
        let weights = self.read("core").tensors;
        let mut states: Tensors = weights.into_iter().map(|(path, t)| (path, t.data)).collect();
        for state in graph.states.values() {
            let ty = &graph.values[state.before].ty;
            let zeros = || vec![0; ty.bytes() as usize];
            states.entry(state.path.clone()).or_insert_with(zeros);
        }
        let file = ["ref.safetensors", "batches.safetensors"];
        let file = file.into_iter().map(|name| self.path(name)).find(|path| path.exists());
        let bytes = std::fs::read(file.unwrap()).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let inputs = graph.inputs.iter().map(|&input| {
            let name = graph.values[input].name.clone();
            let tensor = file.tensor(&format!("batch.0.{name}")).unwrap();
            (name, tensor.data().to_vec())
        });
        (states, inputs.collect())
    }
}

/// The forward of a step: what its outputs and the new values of its states need.
fn forward(graph: &Graph) -> Graph {
    let mut graph = graph.clone();
    graph.gradients.clear();
    canonical::run(&mut graph);
    graph
}

/// The gradients of a step, as later passes leave its graph.
fn gradients(graph: &Graph, states: &Tensors, inputs: &Tensors) -> BTreeMap<String, Vec<f32>> {
    let mut graph = graph.clone();
    canonical::run(&mut graph);
    simplify::run(&mut graph);
    attention::run(&mut graph);
    assert_eq!(ir::verify::graph(&graph), [], "{}", text::print_graph(&graph));
    optimizer::run(&mut graph, Optimizer::None).unwrap();
    let found = evaluate::step(&graph, &mut states.clone(), inputs).unwrap();
    let gradients = found.into_iter().filter(|(name, _)| name.starts_with("grad."));
    let f32s = |bytes: Vec<u8>| {
        let numbers = bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        numbers.collect()
    };
    gradients.map(|(name, bytes)| (name, f32s(bytes))).collect()
}

/// The plan that keeps everything, with AdamW.
fn kept(graph: &Graph, differentiate: bool) -> Compiled {
    let device = passes::devices::named("cpu").unwrap();
    let options = Options {
        optimizer: Optimizer::AdamW,
        budget: Budget::Share(1.0),
        kernels: Kernels::Generated,
        differentiate,
        ..Options::default()
    };
    let cost = Roofline::new(&device);
    pipeline::compile(graph.clone(), &options, &device, &cost, &mut |_| ()).unwrap()
}

#[test]
fn table() {
    for fixture in FIXTURES {
        let traced = fixture.read(fixture.level).graph;
        let forward = forward(&traced);
        let mut own = forward.clone();
        autodiff::run(&mut own, true).unwrap_or_else(|e| panic!("{}: {e}", fixture.model));
        if let Ok(dir) = std::env::var("DUMP") {
            let mut t = traced.clone();
            let mut o = own.clone();
            for g in [&mut t, &mut o] {
                canonical::run(g); simplify::run(g); attention::run(g);
            }
            std::fs::write(format!("{dir}/{}.{}.own.ir", fixture.model, fixture.level), text::print_graph(&o)).unwrap();
            std::fs::write(format!("{dir}/{}.{}.traced.ir", fixture.model, fixture.level), text::print_graph(&t)).unwrap();
        }
        let (states, inputs) = fixture.tensors(&traced);
        let expected = gradients(&traced, &states, &inputs);
        let found = gradients(&own, &states, &inputs);
        assert_eq!(expected.keys().collect::<Vec<_>>(), found.keys().collect::<Vec<_>>());
        let largest = expected.values().flatten().fold(0f32, |m, x| m.max(x.abs()));
        let (mut n, mut equal, mut worst) = (0, 0, 0f32);
        for (path, expected) in &expected {
            for (a, b) in expected.iter().zip(&found[path]) {
                n += 1;
                equal += i32::from(a.to_bits() == b.to_bits());
                worst = worst.max((a - b).abs() / largest);
            }
        }
        let (a, b) = (kept(&traced, false), kept(&forward, true));
        println!(
            "{} {}: equal {:.1} % of {n}, worst {worst:.1e}; nodes {} {}; keep {:.4}, time {:.4}",
            fixture.model, fixture.level, 100.0 * f64::from(equal) / f64::from(n),
            a.program.graph.order.len(), b.program.graph.order.len(),
            b.decided.keep_peak as f64 / a.decided.keep_peak as f64,
            b.timeline.micros / a.timeline.micros,
        );
    }
}
