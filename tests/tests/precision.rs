//! Precisions: fp16 against `torch.amp.GradScaler`, casts of weights, refusals.

use codegen::Data;
use ir::graph::NodeData;
use ir::text::parse_graph;
use ir::{DType, Graph, Op, Phase, StateKind, Value};
use lighterage_tests::evaluate::Tensors;
use lighterage_tests::run;
use passes::cost::Roofline;
use passes::decide::Planner;
use passes::devices;
use passes::graph::optimizer::{FOUND_INF, HYPER, LOSS_SCALE, Optimizer};
use passes::graph::precision::Precision;
use passes::graph::scale::{LossScale, SCALE};
use passes::pipeline::{self, Compiled, Error, Kernels, Options};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::Path;

pub(crate) const STEP: &str = include_str!("../data/fp16/step.ir");
const PARAMETERS: [&str; 2] = ["first.weight", "second.weight"];

fn options() -> Options {
    Options {
        optimizer: Optimizer::Sgd,
        precision: Precision::Fp16,
        planner: Planner::Keep,
        loss_scale: LossScale {
            init: 16384.0,
            interval: 13,
            ..LossScale::default()
        },
        ..Options::default()
    }
}

fn compile(graph: Graph, options: &Options) -> Result<Compiled, Error> {
    let device = devices::named("cpu").unwrap();
    let cost = Roofline::new(&device);
    pipeline::compile(graph, options, &device, &cost, &mut |_| ())
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let chunks = bytes.as_chunks().0.iter();
    chunks.map(|b| f32::from_le_bytes(*b)).collect()
}

/// What PyTorch did: `tests/data/fp16`.
struct Theirs(Vec<u8>);

impl Theirs {
    fn read() -> Theirs {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/fp16/fp16.safetensors");
        Theirs(std::fs::read(path).unwrap())
    }

    fn tensor(&self, name: &str) -> Vec<u8> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        file.tensor(name).unwrap().data().to_vec()
    }

    fn start(&self) -> Data {
        let start = |path: &&str| (path.to_string(), self.tensor(&format!("start.{path}")));
        PARAMETERS.iter().map(start).collect()
    }

    /// The inputs of each step.
    fn feeds(&self) -> Vec<Tensors> {
        let rate = [2f64.powi(-7), 0.0, 0.0];
        let hyper: Vec<u8> = rate.into_iter().flat_map(f64::to_le_bytes).collect();
        let (x, y) = (self.tensor("x"), self.tensor("y"));
        let batches = x.chunks(16).zip(y.chunks(16));
        let feed = |(x, y): (&[u8], &[u8])| {
            [("x", x), ("y", y), (HYPER, &hyper)]
                .map(|(name, bytes)| (name.to_string(), bytes.to_vec()))
                .into()
        };
        batches.map(feed).collect()
    }
}

/// Scales, skipped steps and weights have the bits of PyTorch's in each of 500 steps.
#[test]
fn fp16_does_what_grad_scaler_does() {
    let theirs = Theirs::read();
    let (scales, weights) = (floats(&theirs.tensor("scale")), theirs.tensor("weights"));
    for kernels in [Kernels::Plain, Kernels::Generated] {
        let options = Options {
            kernels,
            ..options()
        };
        let compiled = compile(parse_graph(STEP).unwrap(), &options).unwrap();
        let artifact = codegen::emit(&compiled, &theirs.start(), codegen::Target::host()).unwrap();
        let feeds = theirs.feeds();
        let mut machine =
            runtime::Machine::new(artifact.clone(), runtime::Options::default()).unwrap();
        let mut before = 16384.0;
        let mut n_skipped = 0;
        for (k, feed) in feeds.iter().enumerate() {
            for (name, bytes) in feed {
                machine.write_input(name, bytes).unwrap();
            }
            machine.step().unwrap();
            let number = |bytes: Vec<u8>| floats(&bytes)[0];
            let used = number(machine.read_output(LOSS_SCALE).unwrap());
            let found = number(machine.read_output(FOUND_INF).unwrap());
            let after = number(machine.read_state(SCALE).unwrap());
            assert_eq!((used, after), (before, scales[k]), "scales of step {k}");
            assert_eq!(found == 1.0, after < before, "step {k}");
            n_skipped += u32::from(found == 1.0);
            for (path, theirs) in PARAMETERS.iter().zip(weights[32 * k..].chunks(16)) {
                let ours = machine.read_state(path).unwrap();
                assert_eq!(ours, theirs, "{path} after step {k}");
            }
            before = after;
        }
        assert!((20..200).contains(&n_skipped), "{n_skipped} skipped");
    }
}

/// A step whose update is left out changes no moment and does not count, whatever updates it.
#[test]
fn an_overflow_changes_no_state_of_any_optimizer() {
    let theirs = Theirs::read();
    let feeds = theirs.feeds();
    // Batch 2 moves both parameters, batch 11 overflows.
    let (good, bad) = (&feeds[2], &feeds[11]);
    for optimizer in Optimizer::ALL {
        let defaults = optimizer.options().iter();
        let hyper: Vec<u8> = defaults.flat_map(|o| o.1.to_le_bytes()).collect();
        let with = |feed: &Tensors| {
            let mut feed = feed.clone();
            match optimizer {
                Optimizer::None => feed.remove(HYPER),
                _ => feed.insert(HYPER.into(), hyper.clone()),
            };
            feed
        };
        let options = Options {
            optimizer,
            clip_norm: (optimizer != Optimizer::None).then_some(1.0),
            ..options()
        };
        let compiled = compile(parse_graph(STEP).unwrap(), &options).unwrap();
        let artifact = codegen::emit(&compiled, &theirs.start(), codegen::Target::host()).unwrap();
        let states = |feeds: &[Tensors]| {
            let options = runtime::Options::default();
            let mut states = run::compiled(&artifact, options, feeds).unwrap().0.states;
            let scale = states.remove(SCALE).unwrap();
            states.remove("optimizer.growth_tracker").unwrap();
            (states, floats(&scale)[0])
        };
        let once = states(&[with(good)]);
        let twice = states(&[with(good), with(bad)]);
        let name = optimizer.name();
        assert_eq!(once.0, twice.0, "{name}");
        assert_eq!((once.1, twice.1), (16384.0, 8192.0), "{name}");
        let moved = PARAMETERS.iter().any(|p| once.0[*p] != theirs.start()[*p]);
        assert_eq!(moved, optimizer != Optimizer::None, "{name}");
    }
}

/// Each parameter that products read in half precision is cast by one node, and with everything
/// kept by one line, whatever the number of readers, of phases and of micro-batches.
#[test]
fn a_weight_is_cast_once_a_step() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/models");
    let path = folder.join("gpt2-tiny/joint_coarse.pt2");
    let model = torch::read(&path, &BTreeMap::new()).unwrap();
    for precision in [Precision::Bf16, Precision::Fp16] {
        for kernels in [Kernels::Plain, Kernels::Generated] {
            for micro_batches in [None, Some(3)] {
                let options = Options {
                    precision,
                    kernels,
                    micro_batches,
                    planner: Planner::Keep,
                    optimizer: Optimizer::AdamW,
                    ..Options::default()
                };
                let compiled = compile(model.graph.clone(), &options).unwrap();
                let casts = casts(&compiled);
                let what = format!("{}, {}", precision.name(), kernels.name());
                assert!(casts.len() > 8, "{what}: {casts:?}");
                assert!(casts.values().all(|&n| n == 1), "{what}: {casts:?}");
            }
        }
    }
}

/// In half precision, too, each update comes as soon as its gradient is complete. (In f16 all
/// gradients must be finite before the first update.)
#[test]
fn updates_run_within_a_backward_in_half_precision() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/models");
    for name in ["gpt2-tiny", "llama-tiny"] {
        let path = folder.join(name).join("joint_coarse.pt2");
        let model = torch::read(&path, &BTreeMap::new()).unwrap();
        for (precision, kernels) in [
            (Precision::F32, Kernels::Plain),
            (Precision::Bf16, Kernels::Plain),
            (Precision::Bf16, Kernels::Generated),
        ] {
            let options = Options {
                precision,
                kernels,
                planner: Planner::Keep,
                optimizer: Optimizer::AdamW,
                ..Options::default()
            };
            let compiled = compile(model.graph.clone(), &options).unwrap();
            let lines = lines(&compiled);
            let is_update = |line: &&NodeData| line.phase == Phase::Optimizer;
            let is_product = |line: &&NodeData| matches!(line.op, Op::Matmul(_));
            let last = lines.iter().rposition(is_product).unwrap();
            let early = lines[..last].iter().copied().filter(is_update).count();
            let all = lines.iter().copied().filter(is_update);
            let (precision, kernels) = (precision.name(), kernels.name());
            let what = format!("{name} in {precision}, {kernels}: {early} before the end");
            assert!(all.count() / 2 < early, "{what}");
            // Nothing else widens a gradient of a product.
            let graph = &compiled.program.graph;
            let is_half = |value: &Value| graph.values[*value].ty.dtype() == DType::BF16;
            let widen = lines.iter().copied().filter(is_update);
            let widen = widen.filter(|line| line.inputs.iter().any(is_half)).count();
            assert_eq!(
                8 < widen,
                options.precision == Precision::Bf16,
                "{what}: {widen}"
            );
        }
    }
}

/// The node of each line that computes.
fn lines(compiled: &Compiled) -> Vec<&NodeData> {
    let (graph, schedule) = (&compiled.program.graph, &compiled.program.schedule);
    let runs = schedule
        .instrs
        .values()
        .filter_map(|instr| match instr.kind {
            ir::schedule::InstrKind::Run { node, .. } => Some(&graph.nodes[node]),
            _ => None,
        });
    runs.collect()
}

/// How often lines of the schedule cast each parameter to half precision.
fn casts(compiled: &Compiled) -> BTreeMap<String, usize> {
    let (graph, schedule) = (&compiled.program.graph, &compiled.program.schedule);
    let mut casts = BTreeMap::new();
    for instr in schedule.instrs.values() {
        let ir::schedule::InstrKind::Run { node, .. } = instr.kind else {
            continue;
        };
        let data = &graph.nodes[node];
        let is_half = |op: &Op| match op {
            Op::Cast(cast) => cast.dtype.bytes() == 2,
            _ => false,
        };
        let mut read = vec![];
        match &data.op {
            Op::Fused(fused) => {
                let steps = fused.body.steps().iter();
                let cast = steps.filter(|step| is_half(&step.op));
                read.extend(
                    cast.flat_map(|step| &step.inputs)
                        .filter_map(|&i| data.inputs.get(i)),
                );
            }
            op if is_half(op) => read.extend(&data.inputs),
            _ => {}
        }
        for &value in read {
            let states = graph.states.values();
            let of = states.filter(|state| state.before == graph.root(value));
            for state in of.filter(|state| state.kind == StateKind::Param) {
                *casts.entry(state.path.clone()).or_default() += 1;
            }
        }
    }
    casts
}

/// A step whose gradients are not linear in a constant of its backward is refused.
#[test]
fn a_backward_without_a_start_is_refused() {
    let message = |from: &str, to: &str| {
        assert!(STEP.contains(from), "{from}");
        let graph = parse_graph(&STEP.replace(from, to)).unwrap();
        let error = compile(graph, &options()).map(|_| ()).unwrap_err();
        error.to_string()
    };
    // It is not scaled before the function.
    let function = message(
        "%dp = mul %e, %one : f32[2,2]",
        "%du = mul %e, %one : f32[2,2]\n  bwd - %dp = tanh %du : f32[2,2]",
    );
    assert!(
        function.contains("%dp, tanh, is not linear in %one"),
        "{function}"
    );
    assert!(function.contains("--differentiate"), "{function}");
    let sum = message(
        "%dp = mul %e, %one : f32[2,2]",
        "%du = mul %e, %one : f32[2,2]\n  bwd - %dp = add %du, %y : f32[2,2]",
    );
    assert!(sum.contains("%dp, add, is not linear"), "{sum}");
    let none = message("%dp = mul %e, %one : f32[2,2]", "%dp = relu %e : f32[2,2]");
    assert!(none.contains("does not depend on %one"), "{none}");
}

/// Tokens of experts: their features, and a row for each token of an expert.
const EXPERTS: &str = r#"graph experts {
  input  %x : f32[6,16]
  input  %at : i64[9]
  input  %ends : i64[3]
  state  param  %w -> %w : f32[3,8,16] "experts.up.weight"
  state  param  %g -> %g : f32[16] "norm.weight"
  fwd experts %t = mul %x, %g : f32[6,16]
  fwd experts %rows = index %t, %at : f32[9,16]
  fwd experts %y = grouped_matmul %rows, %w, %ends tb=true : f32[9,8]
  fwd experts %q = mul %y, %y : f32[9,8]
  fwd experts %loss = sum %q dims=[0,1] keepdim=false : f32[]
  output loss = %loss
}"#;

/// Rows of experts are never in f32: tokens are cast, of which there are fewer. A larger table is
/// not cast for a few rows.
#[test]
fn rows_of_experts_are_taken_in_half_precision() {
    let mut options = options();
    options.precision = Precision::Bf16;
    options.differentiate = true;
    let few = EXPERTS
        .replace("i64[9]", "i64[3]")
        .replace("f32[9,", "f32[3,");
    for (graph, taken) in [(EXPERTS, DType::BF16), (&few, DType::F32)] {
        let compiled = compile(parse_graph(graph).unwrap(), &options).unwrap();
        let graph = &compiled.program.graph;
        let dtype = |&value: &Value| graph.values[value].ty.dtype();
        let lines = lines(&compiled);
        let named = |name: &'static str| lines.iter().filter(move |line| line.op.name() == name);
        let of = |name| {
            let results = named(name).map(|line| dtype(&line.outputs[0]));
            results.collect::<Vec<_>>()
        };
        assert_eq!(of("index"), [taken]);
        assert_eq!(of("grouped_matmul"), [DType::BF16; 2]);
        assert_eq!(of("grouped_outer"), [DType::BF16]);
        // Their gradients are added up in f32, and not copied to it first.
        let added = named("index_put").map(|line| [0, 1].map(|i| dtype(&line.inputs[i])));
        assert_eq!(added.collect::<Vec<_>>(), [[DType::F32, DType::BF16]]);
    }
}
