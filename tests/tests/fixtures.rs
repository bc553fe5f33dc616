//! Compares real models with PyTorch, and with themselves at every budget.
//!
//! `tests/data/models/*/ref.safetensors` has the results of PyTorch eager: batches, the first loss
//! and gradients, the buffers after one step, 20 losses of AdamW, the parameters' norms after them.

use artifact::Artifact;
use codegen::Data;
use ir::Device;
use lighterage_tests::run::Peaks;
use passes::cost::Roofline;
use passes::decide::Extent;
use passes::graph::optimizer::{HYPER, LOW, MASTER, Master, Optimizer};
use passes::graph::precision::Precision;
use passes::pipeline::{self, Budget, Compiled, Error, Kernels, Options};
use placement::gap;
use runtime::kernels::halves::join;
use runtime::{Machine, StateInit};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const STEPS: usize = 20;
/// The largest allowed ratio of the smallest budget to the memory of `keep`.
const SMALLEST: f64 = 0.65;

/// A fixture at one level, with one kind of kernels.
struct Fixture {
    kernels: Kernels,
    precision: Precision,
    master: Master,
    /// The model is a forward alone.
    differentiate: bool,
    model: torch::Model,
    data: Data,
    reference: Vec<u8>,
    meta: serde_json::Value,
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data/models")
        .join(name)
}

impl Fixture {
    fn read(name: &str, level: &str, kernels: Kernels) -> Fixture {
        let read = |level: &str| {
            torch::read(
                &folder(name).join(format!("joint_{level}.pt2")),
                &BTreeMap::new(),
            )
            .unwrap()
        };
        let model = read(level);
        assert!(
            model.unsupported.is_empty(),
            "{name} {level}: {:?}",
            model.unsupported
        );
        // Only the core file has weights.
        let mut tensors = read("core").tensors;
        tensors.extend(model.tensors.clone());
        let data = tensors
            .into_iter()
            .map(|(path, tensor)| (path, tensor.data))
            .collect();
        let file = ["ref.safetensors", "batches.safetensors"]
            .map(|f| folder(name).join(f))
            .into_iter()
            .find(|f| f.exists());
        let meta = std::fs::read(folder(name).join("meta.json")).unwrap();
        Fixture {
            kernels,
            precision: Precision::F32,
            master: Master::None,
            differentiate: false,
            model,
            data,
            reference: std::fs::read(file.unwrap()).unwrap(),
            meta: serde_json::from_slice(&meta).unwrap(),
        }
    }

    /// The same with the forward alone: its backward is ours.
    fn forward(name: &str, level: &str, kernels: Kernels) -> Fixture {
        let mut fixture = Fixture::read(name, level, kernels);
        fixture.model.graph.gradients.clear();
        fixture.differentiate = true;
        fixture
    }

    fn compile(&self, optimizer: Optimizer, budget: Budget) -> Result<(Compiled, Artifact), Error> {
        self.compile_to(optimizer, budget, Extent::Plan)
    }

    fn compile_to(
        &self,
        optimizer: Optimizer,
        budget: Budget,
        extent: Extent,
    ) -> Result<(Compiled, Artifact), Error> {
        let device = cpu();
        let options = Options {
            optimizer,
            budget,
            kernels: self.kernels,
            precision: self.precision,
            master: self.master,
            tf32: self.precision == Precision::Tf32,
            differentiate: self.differentiate,
            extent,
            ..Options::default()
        };
        let graph = self.model.graph.clone();
        let compiled = pipeline::compile(
            graph,
            &options,
            &device,
            &Roofline::new(&device),
            &mut |_| (),
        )?;
        let graph = &compiled.program.graph;
        let states = graph.states.values();
        let data = states.filter_map(|state| {
            let given = self.data.get(&state.path)?;
            let bytes = match graph.values[state.before].ty.bytes() {
                // The upper halves of f32.
                half if 2 * half == given.len() as u64 => {
                    let upper = given.chunks(4).flat_map(|x| &x[2..]);
                    upper.copied().collect()
                }
                _ => given.clone(),
            };
            Some((state.path.clone(), bytes))
        });
        let data = data.collect();
        let artifact = codegen::emit(&compiled, &data, codegen::Target::host()).unwrap();
        Ok((compiled, artifact))
    }

    fn tensor(&self, name: &str) -> Option<Vec<u8>> {
        let file = SafeTensors::deserialize(&self.reference).unwrap();
        file.tensor(name).ok().map(|tensor| tensor.data().to_vec())
    }

    /// The reference tensor `name`.
    fn floats(&self, name: &str) -> Vec<f64> {
        floats(
            &self
                .tensor(name)
                .unwrap_or_else(|| panic!("the reference should have {name}")),
        )
    }

    fn list(&self, key: &str) -> Vec<String> {
        let list = self.meta[key].as_array().cloned().unwrap_or_default();
        list.iter()
            .map(|v| v.as_str().unwrap().to_string())
            .collect()
    }

    /// Feeds step `step`'s batch.
    fn feed(&self, machine: &mut Machine, step: usize) {
        let batch = step % self.meta["batches"].as_u64().unwrap() as usize;
        let names: Vec<String> = machine.inputs().map(|input| input.name.clone()).collect();
        for name in names {
            let bytes = if name == HYPER {
                [1e-3f64, 0.9, 0.999, 1e-8, 0.01]
                    .iter()
                    .flat_map(|x| x.to_le_bytes())
                    .collect()
            } else {
                self.tensor(&format!("batch.{batch}.{name}")).unwrap()
            };
            machine.write_input(&name, &bytes).unwrap();
        }
    }

    /// Runs `steps` steps; returns the losses and every state's bytes.
    fn train(&self, artifact: &Artifact, steps: usize, shuffle: Option<u64>) -> Trained {
        let options = runtime::Options {
            shuffle,
            ..runtime::Options::default()
        };
        let mut machine = Machine::new(artifact.clone(), options).unwrap();
        machine
            .initialise(&StateInit { seed: 7, std: None })
            .unwrap();
        let mut losses = vec![];
        for step in 0..steps {
            self.feed(&mut machine, step);
            machine.step().unwrap();
            losses.push(machine.read_output("loss").unwrap());
        }
        let paths: Vec<String> = machine.states().map(|state| state.path.clone()).collect();
        let states = paths
            .into_iter()
            .map(|path| (path.clone(), machine.read_state(&path).unwrap()))
            .collect();
        Trained {
            losses,
            states,
            measured: Peaks::measured(&machine),
        }
    }
}

struct Trained {
    losses: Vec<Vec<u8>>,
    states: BTreeMap<String, Vec<u8>>,
    measured: Peaks,
}

fn cpu() -> Device {
    passes::devices::named("cpu").unwrap()
}

fn floats(bytes: &[u8]) -> Vec<f64> {
    bytes
        .chunks(4)
        .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
        .collect()
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// |a - b| / |b|
fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    norm(&a.iter().zip(b).map(|(a, b)| a - b).collect::<Vec<_>>()) / norm(b)
}

/// Loss, gradients, buffers and 20 losses are the same as PyTorch's.
fn equals_pytorch(name: &str, level: &str, kernels: Kernels) {
    compare_with_pytorch(&Fixture::read(name, level, kernels), name, level);
}

fn compare_with_pytorch(fixture: &Fixture, name: &str, level: &str) {
    let noise = fixture.list("noise_parameters");
    let (_, artifact) = fixture.compile(Optimizer::None, Budget::Device).unwrap();
    let mut machine = Machine::new(artifact, runtime::Options::default()).unwrap();
    fixture.feed(&mut machine, 0);
    machine.step().unwrap();
    let loss = floats(&machine.read_output("loss").unwrap());
    assert!(
        distance(&loss, &fixture.floats("loss")) <= 1e-5,
        "{name} {level}: loss {loss:?}"
    );
    for path in fixture
        .list("parameters")
        .iter()
        .filter(|path| !noise.contains(path))
    {
        let gradient = floats(&machine.read_output(&format!("grad.{path}")).unwrap());
        let distance = distance(&gradient, &fixture.floats(&format!("grad.{path}")));
        assert!(
            distance <= 1e-4,
            "{name} {level}: gradient of {path} is off by {distance:e}"
        );
    }
    for path in fixture.list("mutated_buffers") {
        let state = machine.read_state(&path).unwrap();
        let expected = fixture.tensor(&format!("buffer.{path}")).unwrap();
        if path.ends_with("num_batches_tracked") {
            assert_eq!(state, expected, "{name} {level}: {path}");
        } else {
            assert!(
                distance(&floats(&state), &floats(&expected)) <= 1e-5,
                "{name} {level}: {path}"
            );
        }
    }

    let (_, artifact) = fixture.compile(Optimizer::AdamW, Budget::Device).unwrap();
    let trained = fixture.train(&artifact, STEPS, None);
    let losses = fixture.floats("losses");
    assert_eq!(losses.len(), STEPS);
    for (step, (loss, expected)) in trained.losses.iter().zip(&losses).enumerate() {
        let off = (floats(loss)[0] / expected - 1.0).abs();
        assert!(
            off <= 1e-4,
            "{name} {level}: loss {step} is {:?}, not {expected}: off by {off:e}",
            floats(loss)
        );
    }
    let parameters = fixture.list("parameters");
    for (path, expected) in parameters
        .iter()
        .zip(fixture.floats("final_l2"))
        .filter(|(path, _)| !noise.contains(path))
    {
        let off = (norm(&floats(&trained.states[path])) / expected - 1.0).abs();
        assert!(
            off <= 1e-3,
            "{name} {level}: the norm of {path} is off by {off:e}"
        );
    }
}

/// At every budget: measured = planned <= budget, almost no gaps between tensors, and the same
/// bits; a lower budget never plans a higher peak.
fn same_at_every_budget(name: &str, level: &str, kernels: Kernels) {
    let fixture = Fixture::read(name, level, kernels);
    let (roomy, artifact) = fixture
        .compile_to(Optimizer::AdamW, Budget::Share(1.0), Extent::Curve)
        .unwrap();
    let expected = fixture.train(&artifact, STEPS, None);
    let (keep, smallest) = (roomy.decided.keep_peak, roomy.decided.smallest.unwrap());
    assert!(
        smallest as f64 <= SMALLEST * keep as f64,
        "{name} {level}: smallest {smallest}, keep {keep}"
    );
    let mut higher = u64::MAX;
    const BUDGETS: u64 = 6;
    for k in 0..=BUDGETS {
        let budget = smallest + (keep - smallest) * (BUDGETS - k) / BUDGETS;
        let (compiled, artifact) = fixture
            .compile(Optimizer::AdamW, Budget::Bytes(budget))
            .unwrap();
        let peak = compiled.planned_peak;
        assert!(
            peak <= budget && peak <= higher,
            "{name} {level}: {peak} planned for {budget}, {higher} for more"
        );
        higher = peak;
        for (pool, &bound) in compiled.bounds.iter() {
            let peak = compiled
                .program
                .plan
                .as_ref()
                .map_or(0, |plan| plan.peak[pool]);
            assert!(
                gap(peak, bound) <= 0.005,
                "{name} {level}: {pool:?} needs {bound} and has {peak} at {budget}"
            );
        }
        for shuffle in [None, Some(k)] {
            let trained = fixture.train(&artifact, STEPS, shuffle);
            let planned = Peaks::planned(&artifact);
            assert_eq!(
                (planned.device, trained.measured),
                (peak, planned),
                "{name} {level}: measured at {budget}"
            );
            assert_eq!(
                trained.losses, expected.losses,
                "{name} {level}: losses at {budget}, shuffle {shuffle:?}"
            );
            assert_eq!(
                trained.states, expected.states,
                "{name} {level}: states at {budget}, shuffle {shuffle:?}"
            );
        }
    }
    assert_eq!(
        higher, smallest,
        "{name} {level}: the smallest budget is met exactly"
    );
    match fixture.compile(Optimizer::AdamW, Budget::Bytes(smallest - 1)) {
        Err(Error::Infeasible(infeasible)) => assert_eq!(infeasible.smallest, smallest),
        other => panic!(
            "{name} {level}: below the smallest budget: {:?}",
            other.map(|(c, _)| c.planned_peak)
        ),
    }
}

macro_rules! fixtures {
    ($($test:ident: $name:literal $level:literal;)*) => {$(
        mod $test {
            use super::Kernels;
            #[test]
            fn equals_pytorch() {
                super::equals_pytorch($name, $level, Kernels::Plain);
            }
            #[test]
            fn same_at_every_budget() {
                super::same_at_every_budget($name, $level, Kernels::Plain);
            }
            #[test]
            fn generated_equals_pytorch() {
                super::equals_pytorch($name, $level, Kernels::Generated);
            }
            #[test]
            fn forward_equals_pytorch() {
                let fixture = super::Fixture::forward($name, $level, Kernels::Generated);
                super::compare_with_pytorch(&fixture, $name, $level);
            }
            #[test]
            fn generated_same_at_every_budget() {
                super::same_at_every_budget($name, $level, Kernels::Generated);
            }
        }
    )*};
}

fixtures! {
    gpt2_core: "gpt2-tiny" "core";
    gpt2_coarse: "gpt2-tiny" "coarse";
    llama_core: "llama-tiny" "core";
    llama_coarse: "llama-tiny" "coarse";
    bert_core: "bert-tiny" "core";
    bert_coarse: "bert-tiny" "coarse";
    resnet_core: "resnet-tiny" "core";
    resnet_coarse: "resnet-tiny" "coarse";
    moe_core: "moe-tiny" "core";
}

/// In every precision: measured = planned, and the same bits at the smallest budget and between.
/// The models have attention, convolutions, batch norm and a tied head.
#[test]
fn every_precision_has_the_same_bits_at_every_budget() {
    const STEPS: usize = 4;
    for precision in Precision::ALL {
        for name in ["gpt2-tiny", "resnet-tiny"] {
            let mut fixture = Fixture::read(name, "coarse", Kernels::Generated);
            fixture.precision = precision;
            let (roomy, artifact) = fixture
                .compile_to(Optimizer::AdamW, Budget::Share(1.0), Extent::Curve)
                .unwrap();
            let expected = fixture.train(&artifact, STEPS, None);
            let (keep, smallest) = (roomy.decided.keep_peak, roomy.decided.smallest.unwrap());
            for budget in [smallest, (smallest + keep) / 2] {
                let what = format!("{name} in {}, {budget} bytes", precision.name());
                let budget = Budget::Bytes(budget);
                let (compiled, artifact) = fixture.compile(Optimizer::AdamW, budget).unwrap();
                let trained = fixture.train(&artifact, STEPS, Some(3));
                let planned = Peaks::planned(&artifact);
                assert_eq!(planned.device, compiled.planned_peak, "{what}");
                assert_eq!(trained.measured, planned, "{what}");
                assert_eq!(trained.losses, expected.losses, "{what}");
                assert_eq!(trained.states, expected.states, "{what}");
            }
        }
    }
}

/// A parameter in bf16 with its master trains as a parameter in f32 does of which products read a
/// cast, bit by bit, if it begins as a number of bf16.
#[test]
fn masters_have_the_bits_of_parameters_in_f32() {
    for (name, kernels) in [
        ("gpt2-tiny", Kernels::Generated),
        ("llama-tiny", Kernels::Plain),
        ("resnet-tiny", Kernels::Generated),
    ] {
        let mut fixture = Fixture::read(name, "coarse", kernels);
        fixture.precision = Precision::Bf16;
        for path in fixture.list("parameters") {
            let bytes = fixture.data.get_mut(&path).into_iter().flatten();
            let lower = bytes.enumerate().filter(|(i, _)| i % 4 < 2);
            lower.for_each(|(_, byte)| *byte = 0);
        }
        // A split parameter between two numbers of bf16 is the larger one, a cast the even one. So
        // only the first step has the same bits for certain.
        for (master, steps) in [(Master::Full, 5), (Master::Split, 1)] {
            let mut train = |master, budget| {
                fixture.master = master;
                let (_, artifact) = fixture.compile(Optimizer::AdamW, budget).unwrap();
                fixture.train(&artifact, steps, Some(5))
            };
            let expected = train(Master::None, Budget::Share(1.0));
            let (mut n_halves, what) = (0, format!("{name}, {}", master.name()));
            for budget in [Budget::Share(1.0), Budget::Share(0.8)] {
                let mut found = train(master, budget);
                assert_eq!(found.losses, expected.losses, "{what}");
                for (path, own) in &expected.states {
                    let mut of = |start: &str| found.states.remove(&format!("{start}.{path}"));
                    let (whole, low) = (of(MASTER), of(LOW));
                    let half = &found.states[path];
                    n_halves += usize::from(half.len() < own.len());
                    let words = |bytes: &[u8]| bytes.as_chunks().0.to_vec();
                    let joined = low.map(|low| {
                        let word = u16::from_le_bytes;
                        let pairs = words(half).into_iter().zip(words(&low));
                        let pairs = pairs.flat_map(|(h, l)| join(word(h), word(l)).to_le_bytes());
                        pairs.collect()
                    });
                    let found = whole.or(joined).unwrap_or_else(|| half.clone());
                    assert_eq!(&found, own, "{what}: {path}");
                }
            }
            assert!(
                8 < n_halves,
                "{what}: {n_halves} parameters in half precision"
            );
        }
    }
}

/// Dropout draws the same bits when its block runs again: losses do not depend on recomputation.
#[test]
fn dropout_is_reproduced_by_recompute() {
    for level in ["core", "coarse"] {
        same_at_every_budget("dropout-tiny", level, Kernels::Plain);
        same_at_every_budget("dropout-tiny", level, Kernels::Generated);
        // Forced: every forward value whose node is pure is computed again.
        let fixture = Fixture::read("dropout-tiny", level, Kernels::Plain);
        let kept = fixture
            .compile(Optimizer::AdamW, Budget::Share(1.0))
            .unwrap()
            .1;
        let recomputed =
            lighterage_tests::forced::recompute_all(&fixture.model.graph, Optimizer::AdamW, &cpu());
        let reruns = recomputed
            .program
            .schedule
            .instrs
            .values()
            .filter(|i| i.why == ir::schedule::Why::Recompute);
        let random = ["dropout", "rand"];
        let graph = &recomputed.program.graph;
        let random_reruns = reruns.filter(|instr| match instr.kind {
            ir::schedule::InstrKind::Run { node, .. } => {
                random.contains(&graph.nodes[node].op.name())
            }
            ir::schedule::InstrKind::Copy { .. } => false,
        });
        assert!(
            0 < random_reruns.count(),
            "{level}: some random op should run again"
        );
        let recomputed =
            codegen::emit(&recomputed, &fixture.data, codegen::Target::host()).unwrap();
        let (kept, recomputed) = (
            fixture.train(&kept, STEPS, None),
            fixture.train(&recomputed, STEPS, None),
        );
        assert_eq!(kept.losses, recomputed.losses, "{level}");
        assert_eq!(kept.states, recomputed.states, "{level}");
        assert_ne!(
            kept.losses[0], kept.losses[4],
            "{level}: the same batch, other masks"
        );
    }
}
