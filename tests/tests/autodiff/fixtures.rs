//! The backward of a cut-off forward against PyTorch's: the files have both.

use ir::{Graph, text};
use lighterage_tests::evaluate::{self, Tensors};
use passes::cost::Roofline;
use passes::decide::Planner;
use passes::graph::optimizer::{self, Optimizer};
use passes::graph::{attention, autodiff, canonical, simplify};
use passes::pipeline::{self, Budget, Compiled, Kernels, Options};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A file, and how its gradients compare with PyTorch's.
#[derive(Clone, Copy)]
struct Fixture {
    model: &'static str,
    level: &'static str,
    /// The least number of gradients' elements that have PyTorch's bits, in percent: of the
    /// forward as it was traced, and of the simplified one.
    equal: [f64; 2],
}

const fn fixture(model: &'static str, level: &'static str, equal: [f64; 2]) -> Fixture {
    Fixture {
        model,
        level,
        equal,
    }
}

const FIXTURES: [Fixture; 11] = [
    fixture("gpt2-tiny", "coarse", [100.0, 100.0]),
    fixture("gpt2-tiny", "core", [100.0, 100.0]),
    fixture("bert-tiny", "coarse", [100.0, 100.0]),
    fixture("bert-tiny", "core", [100.0, 100.0]),
    fixture("llama-tiny", "coarse", [100.0, 100.0]),
    fixture("llama-tiny", "core", [53.2, 100.0]),
    fixture("resnet-tiny", "coarse", [100.0, 100.0]),
    fixture("resnet-tiny", "core", [100.0, 100.0]),
    fixture("moe-tiny", "core", [77.0, 100.0]),
    fixture("dropout-tiny", "coarse", [100.0, 100.0]),
    fixture("dropout-tiny", "core", [100.0, 100.0]),
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
        let mut states: Tensors = weights
            .into_iter()
            .map(|(path, t)| (path, t.data))
            .collect();
        for state in graph.states.values() {
            let ty = &graph.values[state.before].ty;
            let zeros = || vec![0; ty.bytes() as usize];
            states.entry(state.path.clone()).or_insert_with(zeros);
        }
        let file = ["ref.safetensors", "batches.safetensors"];
        let file = file
            .into_iter()
            .map(|name| self.path(name))
            .find(|path| path.exists());
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
    assert_eq!(
        ir::verify::graph(&graph),
        [],
        "{}",
        text::print_graph(&graph)
    );
    optimizer::run(&mut graph, Optimizer::None).unwrap();
    let found = evaluate::step(&graph, &mut states.clone(), inputs).unwrap();
    let gradients = found
        .into_iter()
        .filter(|(name, _)| name.starts_with("grad."));
    let f32s = |bytes: Vec<u8>| {
        let numbers = bytes
            .chunks(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        numbers.collect()
    };
    gradients.map(|(name, bytes)| (name, f32s(bytes))).collect()
}

/// A plan for the budget that keeping everything needs, with AdamW.
fn planned(graph: &Graph, differentiate: bool, planner: Planner) -> Compiled {
    let device = passes::devices::named("cpu").unwrap();
    let options = Options {
        optimizer: Optimizer::AdamW,
        budget: Budget::Share(1.0),
        kernels: Kernels::Generated,
        planner,
        differentiate,
        ..Options::default()
    };
    let cost = Roofline::new(&device);
    pipeline::compile(graph.clone(), &options, &device, &cost, &mut |_| ()).unwrap()
}

/// The allowed difference of a gradient's element, as a share of the model's largest: some
/// gradients are 0 except for rounding.
const CLOSE: f32 = 1e-6;

#[test]
fn the_backward_of_a_forward_is_pytorchs() {
    let modes = |fixture| [false, true].map(|simplified| (fixture, simplified));
    let mut misses = vec![];
    for (fixture, simplified) in FIXTURES.into_iter().flat_map(modes) {
        let name = format!("{} {} {simplified}", fixture.model, fixture.level);
        let traced = fixture.read(fixture.level).graph;
        let mut own = forward(&traced);
        autodiff::run(&mut own, simplified).unwrap_or_else(|e| panic!("{name}: {e}"));
        let mut again = forward(&traced);
        autodiff::run(&mut again, simplified).unwrap();
        assert_eq!(text::print_graph(&again), text::print_graph(&own), "{name}");
        let (states, inputs) = fixture.tensors(&traced);
        let expected = gradients(&traced, &states, &inputs);
        let found = gradients(&own, &states, &inputs);
        assert!(found.keys().eq(expected.keys()), "{name}");
        let largest = expected
            .values()
            .flatten()
            .fold(0f32, |m, x| m.max(x.abs()));
        let (mut n, mut n_equal) = (0f64, 0f64);
        for (path, expected) in &expected {
            for (expected, found) in expected.iter().zip(&found[path]) {
                let error = (found - expected).abs();
                assert!(
                    error <= CLOSE * largest,
                    "{name} {path}: {found}, {expected}"
                );
                n += 1.0;
                n_equal += f64::from(u8::from(expected.to_bits() == found.to_bits()));
            }
        }
        let equal = 100.0 * n_equal / n;
        if equal < fixture.equal[usize::from(simplified)] {
            misses.push(format!("{name}: {equal} % of the bits are equal"));
        }
    }
    assert!(misses.is_empty(), "{misses:#?}");
}

#[test]
fn it_needs_no_more_memory_or_time_than_pytorchs() {
    for fixture in FIXTURES {
        let name = format!("{} {}", fixture.model, fixture.level);
        let traced = fixture.read(fixture.level).graph;
        let own = forward(&traced);
        for planner in [Planner::Auto, Planner::Keep] {
            let most = planned(&traced, false, planner).live_peak;
            let peak = planned(&own, true, planner).live_peak;
            assert!(peak <= most, "{name}: {peak} bytes alive, PyTorch's {most}");
        }
        let expected = planned(&traced, false, Planner::Auto);
        let found = planned(&own, true, Planner::Auto);
        let (most, peak) = (expected.decided.keep_peak, found.decided.keep_peak);
        assert!(peak <= most, "{name}: {peak} bytes, PyTorch's {most}");
        let (most, micros) = (expected.timeline.micros, found.timeline.micros);
        assert!(micros <= most, "{name}: {micros} us, PyTorch's {most}");
    }
}
