//! The memory of updates, and that their placement changes no results: in backward or after it,
//! with gradients clipped to a norm over all of them, over micro-batches, on masters in halves.

use codegen::Data;
use ir::graph::{Output, StateData};
use ir::op::Op;
use ir::schedule::Why;
use ir::{DType, Device, Graph, Id, Node, Phase, State, StateKind, TensorType};
use lighterage_tests::evaluate::{self, Tensors};
use lighterage_tests::linears::linears;
use lighterage_tests::{forced, run};
use passes::cost::Roofline;
use passes::decide::{Decisions, Gap, Means, Planner, Problem, Reason};
use passes::graph::optimizer::{Attach, HYPER, Master, Optimizer, Rounding};
use passes::graph::reduction::Combination;
use passes::pipeline::{self, Budget, Compiled, Error, Kernels, Options};
use passes::schedule::lives::Variant;
use passes::schedule::order::{self, Update};
use passes::{devices, graph};
use runtime::kernels::owned::{OwnedTensor, run_op};
use safetensors::SafeTensors;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const ADAMW: [f64; 5] = [1e-2, 0.9, 0.999, 1e-8, 1e-2];

fn cpu() -> Device {
    devices::named("cpu").unwrap()
}

/// Compiles a graph with the `keep` plan.
fn compile(graph: &Graph, options: &Options) -> Compiled {
    let device = cpu();
    let options = Options {
        planner: Planner::Keep,
        ..options.clone()
    };
    pipeline::compile(
        graph.clone(),
        &options,
        &device,
        &Roofline::new(&device),
        &mut |_| (),
    )
    .unwrap()
}

fn bytes(x: impl IntoIterator<Item = f32>) -> Vec<u8> {
    x.into_iter().flat_map(f32::to_le_bytes).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

fn doubles(x: &[f64]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Numbers between -1 and 1 that are the same in every run.
fn noise(seed: u64, n: u64) -> impl Iterator<Item = f32> {
    let mix = move |i: u64| {
        (i ^ seed.wrapping_mul(0x9E37_79B9)).wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 40
    };
    (0..n).map(move |i| mix(i * 7919 + 1) as f32 / (1 << 23) as f32 - 1.0)
}

/// Values for a model's parameters.
fn start(graph: &Graph, scale: f32) -> Data {
    let value = |(id, state): (State, &StateData)| {
        let n = graph.values[state.before].ty.numel();
        (
            state.path.clone(),
            bytes(noise(id.index() as u64, n).map(|x| x * scale)),
        )
    };
    graph.states.iter().map(value).collect()
}

/// A batch for each of a step's inputs.
fn feed(compiled: &Graph, step: u64, hyper: &[f64]) -> Tensors {
    let input = |(i, &value): (usize, &ir::Value)| {
        let data = &compiled.values[value];
        let bytes = match &*data.name {
            HYPER => doubles(hyper),
            _ => bytes(noise(1000 * step + i as u64 + 77, data.ty.numel())),
        };
        (data.name.clone(), bytes)
    };
    compiled.inputs.iter().enumerate().map(input).collect()
}

/// Runs `steps` steps; returns the states after them, and the losses.
fn train(compiled: &Compiled, start: &Data, hyper: &[f64], steps: u64) -> run::Outcome {
    let artifact = codegen::emit(compiled, start, codegen::Target::host()).unwrap();
    let feeds: Vec<_> = (0..steps)
        .map(|step| feed(&compiled.program.graph, step, hyper))
        .collect();
    let (outcome, measured) =
        run::compiled(&artifact, runtime::Options::default(), &feeds).unwrap();
    assert_eq!(measured.device, compiled.planned_peak);
    assert_eq!(measured, run::Peaks::planned(&artifact));
    let shuffled = run::compiled(&artifact, run::shuffled(steps), &feeds).unwrap();
    assert!(shuffled.0 == outcome, "shuffled");
    outcome
}

// --- every optimizer ---

fn optimizers() -> impl Iterator<Item = Optimizer> {
    let all = Optimizer::ALL.into_iter();
    all.filter(|&optimizer| optimizer != Optimizer::None)
}

fn defaults(optimizer: Optimizer) -> Vec<f64> {
    let options = optimizer.options().iter();
    options.map(|&(_, value)| value).collect()
}

/// A plan in as few bytes as the planner finds.
fn compile_smallest(graph: &Graph, options: &Options) -> Compiled {
    let (device, cost) = (cpu(), Roofline::new(&cpu()));
    let compile = |bytes| {
        let options = Options {
            budget: Budget::Bytes(bytes),
            ..options.clone()
        };
        pipeline::compile(graph.clone(), &options, &device, &cost, &mut |_| ())
    };
    match compile(1) {
        Err(Error::Infeasible(infeasible)) => compile(infeasible.smallest).unwrap(),
        other => panic!("a budget of 1 byte gives {:?}", other.map(|_| ())),
    }
}

/// Every optimizer changes every parameter to finite numbers, and to the same bits for any position
/// of its updates and any home of states.
#[test]
fn every_optimizer_updates_every_parameter() {
    // Weights of more than 4096 elements, in blocks of which the last one is not whole; biases.
    let graph = linears(2, 72, 8);
    let start = start(&graph, 0.1);
    for optimizer in optimizers() {
        let (name, hyper) = (optimizer.name(), defaults(optimizer));
        let [inside, after] = [Update::Backward, Update::After].map(|update| Options {
            optimizer,
            update,
            ..Options::default()
        });
        let expected = train(&compile(&graph, &inside), &start, &hyper, 3);
        for (what, compiled) in [
            ("updates after backward", compile(&graph, &after)),
            ("the smallest plan", compile_smallest(&graph, &inside)),
        ] {
            let outcome = train(&compiled, &start, &hyper, 3);
            assert!(outcome == expected, "{name}: other bits with {what}");
        }
        for (path, before) in &start {
            let after = &expected.states[path];
            assert_ne!(after, before, "{name} does not update {path}");
            let is_finite = floats(after).iter().all(|x| x.is_finite());
            assert!(is_finite, "{name} makes {path} infinite or NaN");
        }
    }
}

/// Each option changes each parameter or its moments, and so does a bound on the norm: no node of
/// an update forgets to read one.
#[test]
fn every_option_of_every_optimizer_counts() {
    // Weights of more than 4096 elements, in blocks of which the last one is not whole; biases.
    let graph = linears(2, 72, 8);
    let start = start(&graph, 0.1);
    for optimizer in optimizers() {
        let hyper = defaults(optimizer);
        let [free, clipped] = [None, Some(1e-3)].map(|clip_norm| {
            let options = Options {
                optimizer,
                clip_norm,
                ..Options::default()
            };
            compile(&graph, &options)
        });
        let usual = train(&free, &start, &hyper, 3).states;
        let check = |what: &str, states: &Tensors| {
            let counts = |path: &&String| match (optimizer, what) {
                // Muon has momentum for matrices, and AdamW for other parameters.
                (Optimizer::Muon, "momentum") => path.ends_with("weight"),
                (Optimizer::Muon, "beta1" | "beta2" | "eps") => !path.ends_with("weight"),
                _ => true,
            };
            for path in start.keys().filter(counts) {
                // A sign or a direction does not change with the size of a gradient; moments do.
                let own = |state: &&String| *state == path || state.ends_with(&format!(".{path}"));
                let differs = |state: &String| states[state] != usual[state];
                let name = optimizer.name();
                let any = usual.keys().filter(own).any(differs);
                assert!(any, "{name}: {path} without {what}");
            }
        };
        check("clip_norm", &train(&clipped, &start, &hyper, 3).states);
        for (i, &(option, value)) in optimizer.options().iter().enumerate() {
            // Options are the same with a momentum buffer and without one.
            if (optimizer, option) == (Optimizer::Sgd, "momentum") {
                continue;
            }
            let mut hyper = hyper.clone();
            hyper[i] = match option {
                // A floor, which most parameters are above.
                "eps2" => 1.0,
                // A step that is below the largest one.
                "warmup_init" => 1e-6,
                "relative_step" => 100.0,
                _ => value / 2.0 + 0.01,
            };
            check(option, &train(&free, &start, &hyper, 3).states);
        }
    }
}

/// Moments in codes take two bytes for each element, and eight for each block of 256. Parameters of
/// fewer than 4096 elements have moments in f32. The plan has these bytes and no others: an update
/// decodes no moment into memory.
#[test]
fn moments_in_codes_take_two_bytes_and_scales() {
    // 72 * 72 elements are 20 blocks and a quarter.
    let (graph, layers) = (linears(3, 72, 8), 3);
    let of = |optimizer| {
        let options = Options {
            optimizer,
            update: Update::After,
            ..Options::default()
        };
        compile(&graph, &options)
    };
    let moments = |compiled: &Compiled| {
        let graph = &compiled.program.graph;
        let states = graph.states.values();
        let moments = states.filter(|state| state.kind == ir::StateKind::Moment);
        let bytes = moments.map(|state| graph.values[state.before].ty.bytes());
        bytes.sum::<u64>() - 8
    };
    let (codes, plain) = (of(Optimizer::AdamW8bit), of(Optimizer::AdamW));
    let (weight, bias) = (72 * 72, 72);
    assert_eq!(moments(&plain), layers * 8 * (weight + bias));
    assert_eq!(moments(&codes), layers * (2 * weight + 8 * 21 + 8 * bias));
    let saved = moments(&plain) - moments(&codes);
    // Each state is rounded up to 64 bytes.
    let rounding = codes.program.graph.states.len() as u64 * 64;
    let less = plain.planned_peak - codes.planned_peak;
    assert!(
        less.abs_diff(saved) <= rounding,
        "{less} less, {saved} saved"
    );
    // A group whose moments are numbers, and all others with codes.
    let options = Options {
        optimizer: Optimizer::AdamW8bit,
        groups: BTreeMap::from([("0.weight".to_string(), 1)]),
        whole_groups: BTreeSet::from([1]),
        ..Options::default()
    };
    let (whole, in_codes) = (8 * weight, 2 * weight + 8 * 21);
    let expected = whole + (layers - 1) * in_codes + layers * 8 * bias;
    assert_eq!(moments(&compile(&graph, &options)), expected);
}

// --- updates in backward ---

/// The toy of "Faster PyTorch Training by Reducing Peak Memory" (Lightning, 2023): 20 linear
/// layers. The article saves 20 % with AdamW, and over 40 % with SGD.
#[test]
fn updates_in_backward_need_less() {
    let graph = linears(20, 128, 4);
    let start = start(&graph, 0.1);
    for (optimizer, hyper, most) in [
        (Optimizer::AdamW, &ADAMW[..], 0.80),
        (Optimizer::Sgd, &[1e-2, 0.0, 0.0][..], 0.60),
    ] {
        let [inside, after] = [Update::Backward, Update::After].map(|update| {
            let compiled = compile(
                &graph,
                &Options {
                    optimizer,
                    update,
                    ..Options::default()
                },
            );
            let outcome = train(&compiled, &start, hyper, 3);
            (compiled.planned_peak, outcome)
        });
        assert!(
            inside.1 == after.1,
            "{optimizer:?}: the bits do not depend on where updates stand"
        );
        assert_ne!(inside.1.states["0.weight"], start["0.weight"]);
        let share = inside.0 as f64 / after.0 as f64;
        assert!(
            share <= most,
            "{optimizer:?}: {} in backward, {} after it: {share}",
            inside.0,
            after.0
        );
    }
}

/// Updates of small parameters are only a few kernels, with the same bits for any home of states.
#[test]
fn small_updates_are_grouped() {
    let layers = 12;
    let graph = linears(layers, 16, 8192);
    let start = start(&graph, 0.1);
    let (device, momentum) = (cpu(), [1e-2, 0.9, 1e-2]);
    let cost = Roofline::new(&device);
    for (optimizer, hyper, clip_norm, update) in [
        (Optimizer::AdamW, &ADAMW[..], None, Update::Backward),
        (Optimizer::AdamW, &ADAMW[..], Some(1e-3), Update::Backward),
        (
            Optimizer::SgdMomentum,
            &momentum[..],
            None,
            Update::Backward,
        ),
        (Optimizer::Sgd, &momentum[..], None, Update::After),
    ] {
        let options = Options {
            optimizer,
            clip_norm,
            update,
            ..Options::default()
        };
        let [plain, grouped] = Kernels::ALL.map(|kernels| {
            compile(
                &graph,
                &Options {
                    kernels,
                    ..options.clone()
                },
            )
        });
        let updates = |compiled: &Compiled| {
            let nodes = compiled.program.graph.nodes.values();
            nodes
                .filter(|data| data.phase == Phase::Optimizer && !data.op.inplace().is_empty())
                .count()
        };
        // Weights are updated separately: their gradients are too large to keep.
        let (before, after) = (updates(&plain), updates(&grouped));
        assert!(
            after <= before - layers + 3,
            "{options:?}: {after} of {before}"
        );
        let expected = train(&grouped, &start, hyper, 3);
        let others = train(&plain, &start, hyper, 3);
        for (path, x) in expected
            .states
            .iter()
            .filter(|(path, _)| *path != "optimizer.step")
        {
            let (x, y) = (floats(x), floats(&others.states[path]));
            let off: f32 = x.iter().zip(&y).map(|(x, y)| (x - y).powi(2)).sum();
            let norm: f32 = y.iter().map(|y| y * y).sum();
            assert!(
                off <= 1e-8 * norm,
                "{options:?}: {path} is off by {off} of {norm}"
            );
        }
        for (planner, above) in [(Planner::Auto, 0), (Planner::Protrain, 2)] {
            let make = |budget| {
                let options = Options {
                    planner,
                    budget,
                    ..options.clone()
                };
                pipeline::compile(graph.clone(), &options, &device, &cost, &mut |_| ())
            };
            let smallest = match make(Budget::Bytes(1)) {
                Err(Error::Infeasible(infeasible)) => infeasible.smallest,
                other => panic!(
                    "{options:?}: {:?}",
                    other.map(|compiled| compiled.planned_peak)
                ),
            };
            let bytes = smallest + (grouped.planned_peak - smallest) * above / 4;
            let outcome = train(&make(Budget::Bytes(bytes)).unwrap(), &start, hyper, 3);
            assert!(outcome == expected, "{options:?}, {planner:?} at {bytes}");
        }
    }
}

/// A chunk with parameters that one kernel updates for several blocks has no others: a block would
/// fetch them, and wait for the update.
#[test]
fn chunks_are_updated_for_one_block_or_by_one_kernel() {
    let graph = linears(12, 16, 8192);
    let grouped = compile(
        &graph,
        &Options {
            optimizer: Optimizer::AdamW,
            kernels: Kernels::Generated,
            ..Options::default()
        },
    );
    let graph = &grouped.program.graph;
    let device = devices::named("a100-80g").unwrap();
    let cost = Roofline::new(&device);
    let problem = Problem::new(graph, &device, &cost);
    let update = |state: State| {
        graph
            .def_node(graph.root(graph.states[state].after))
            .unwrap()
    };
    let block = |state: State| graph.states[state].path.split('.').next().unwrap();
    let params = graph
        .states
        .ids()
        .filter(|&state| graph.states[state].kind == StateKind::Param);
    let mut blocks: BTreeMap<Node, BTreeSet<&str>> = BTreeMap::new();
    for state in params {
        blocks
            .entry(update(state))
            .or_default()
            .insert(block(state));
    }
    assert!(blocks.values().any(|blocks| 1 < blocks.len()));
    let chunks: Vec<&Vec<State>> = problem.groups.values().flat_map(|g| &g.chunks).collect();
    assert!(chunks.iter().any(|chunk| 1 < chunk.len()));
    for chunk in chunks {
        let updates: BTreeSet<Node> = chunk.iter().map(|&state| update(state)).collect();
        let is_alone = updates.iter().all(|node| blocks[node].len() == 1);
        assert!(updates.len() == 1 || is_alone, "{chunk:?}: {updates:?}");
    }
}

// --- clipping ---

/// PyTorch's losses and parameters: `tests/data/clip/gen_clip.py`.
#[test]
fn clipping_is_pytorchs() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/clip/clip.safetensors");
    let file = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let tensor = |name: &str| file.tensor(name).unwrap().data().to_vec();
    let graph = linears(3, 8, 4);
    let start: Data = graph
        .states
        .values()
        .map(|s| (s.path.clone(), tensor(&format!("start.{}", s.path))))
        .collect();
    let norms = floats(&tensor("norms"));
    assert!(
        norms.iter().any(|&norm| norm < 1.0) && norms.iter().any(|&norm| 1.0 < norm),
        "both kinds of steps"
    );
    let feeds: Vec<Tensors> = (0..norms.len())
        .map(|k| {
            let batch =
                ["x", "t"].map(|input| (input.to_string(), tensor(&format!("batch.{k}.{input}"))));
            batch
                .into_iter()
                .chain([(HYPER.to_string(), doubles(&ADAMW))])
                .collect()
        })
        .collect();
    let close = |what: &str, ours: &[f32], theirs: &[f32]| {
        assert_eq!(ours.len(), theirs.len());
        for (a, b) in ours.iter().zip(theirs) {
            assert!(
                (a - b).abs() <= 1e-5 * (1.0 + b.abs()),
                "{what}: {a}, PyTorch has {b}"
            );
        }
    };
    for update in [Update::Backward, Update::After] {
        let options = Options {
            optimizer: Optimizer::AdamW,
            clip_norm: Some(1.0),
            update,
            ..Options::default()
        };
        let compiled = compile(&graph, &options);
        let artifact = codegen::emit(&compiled, &start, codegen::Target::host()).unwrap();
        let (outcome, _) = run::compiled(&artifact, runtime::Options::default(), &feeds).unwrap();
        let losses: Vec<f32> = outcome
            .outputs
            .iter()
            .map(|output| floats(&output["loss"])[0])
            .collect();
        close("losses", &losses, &floats(&tensor("losses")));
        for state in graph.states.values() {
            close(
                &state.path,
                &floats(&outcome.states[&state.path]),
                &floats(&tensor(&format!("end.{}", state.path))),
            );
        }
    }
}

/// A kernel of a GPU reads a few hundred numbers at most, and a model may have more parameters.
#[test]
fn the_norm_of_many_gradients_is_added_up_in_parts() {
    let model = linears(140, 4, 2);
    let (rate, norm) = (1.0, 0.05);
    let options = Options {
        optimizer: Optimizer::Sgd,
        clip_norm: Some(norm),
        ..Options::default()
    };
    let compiled = compile(&model, &options);
    let operands = |graph: &Graph| graph.nodes.values().map(|node| node.inputs.len()).max();
    let (parameters, most) = (2 * 140, operands(&compiled.program.graph).unwrap());
    assert!(most < parameters, "{most} operands");

    let start = start(&model, 0.2);
    let states = train(&compiled, &start, &[rate, 0.0, 0.0], 1).states;
    let moved = start.iter().flat_map(|(path, before)| {
        let after = floats(&states[path]);
        let pairs = floats(before).into_iter().zip(after);
        pairs.map(|(before, after)| f64::from(before - after).powi(2))
    });
    let moved = moved.sum::<f64>().sqrt();
    assert!((moved - rate * norm).abs() < 1e-3 * norm, "{moved}");

    let gpu = devices::named("h100").unwrap();
    let cost = Roofline::new(&gpu);
    let compiled = pipeline::compile(model, &options, &gpu, &cost, &mut |_| ()).unwrap();
    codegen::emit(&compiled, &start, Some(codegen::Target::SM_90)).unwrap();
}

/// Clipping in two phases needs only decisions: gradients leave memory after their squares are
/// summed, and are recomputed for their updates.
#[test]
fn gradients_may_be_computed_again_after_the_norm() {
    let (model, device, optimizer) = (linears(6, 64, 4), cpu(), Optimizer::Sgd);
    let cost = Roofline::new(&device);
    let clip_norm = Some(0.05);
    let hyper = [1e-1, 0.0, 0.0];
    let start = start(&model, 0.2);
    let plain = compile(
        &model,
        &Options {
            optimizer,
            clip_norm,
            kernels: Kernels::Plain,
            ..Options::default()
        },
    );
    let expected = train(&plain, &start, &hyper, 3);
    let unclipped = compile(
        &model,
        &Options {
            optimizer,
            kernels: Kernels::Plain,
            ..Options::default()
        },
    );
    assert_ne!(
        train(&unclipped, &start, &hyper, 3).states,
        expected.states,
        "the norm is above the bound"
    );

    let mut graph = model.clone();
    graph::canonical::run(&mut graph);
    let gradients = graph.gradients.clone();
    graph::optimizer::run(
        &mut graph,
        Attach {
            optimizer,
            clip_norm,
            ..Attach::default()
        },
    )
    .unwrap();
    let names: Vec<String> = gradients
        .iter()
        .map(|&(_, value)| graph.values[value].name.clone())
        .collect();
    order::run(&mut graph, Update::Backward);
    let graph = graph.compact();
    let problem = Problem::new(&graph, &device, &cost);
    let reason = Reason {
        bytes: 0,
        swap: None,
        recompute: None,
        line: 0,
    };
    let mut decisions = Decisions::default();
    for value in graph.values.ids().filter(|&v| graph.root(v) == v) {
        let data = &graph.values[value];
        let phase = |at: u32| graph.nodes[problem.lines[at as usize]].phase;
        let accesses = &problem.accesses[value];
        for (gap, pair) in accesses.windows(2).enumerate() {
            let means = match (phase(pair[0]), phase(pair[1])) {
                // The definition, the squares, the update.
                (Phase::Optimizer, Phase::Optimizer) if names.contains(&data.name) => {
                    Means::Recompute
                }
                // Layers' inputs are on the host, for the recomputation of gradients.
                (Phase::Forward, Phase::Backward) => Means::Swap,
                _ => continue,
            };
            if graph.def_node(value).is_some() {
                decisions.cuts.insert(
                    Gap {
                        value,
                        gap: gap as u32,
                    },
                    (means, reason),
                );
            }
        }
    }
    let again = forced::finish(&problem, decisions, Variant::ByTime)
        .unwrap_or_else(|text| panic!("{text}"));
    let reruns = again
        .program
        .schedule
        .instrs
        .values()
        .filter(|line| line.why == Why::Recompute)
        .count();
    assert!(gradients.len() <= reruns, "{reruns} reruns");
    assert!(train(&again, &start, &hyper, 3) == expected, "the bits");
    // Parameters and gradients, compared with parameters and one gradient.
    let share = again.planned_peak as f64 / plain.planned_peak as f64;
    assert!(
        share <= 0.70,
        "{} computed again, {} kept: {share}",
        again.planned_peak,
        plain.planned_peak
    );
}

// --- micro-batches ---

fn f32s(shape: &[u64], bytes: &[u8]) -> OwnedTensor {
    let shape: Vec<usize> = shape.iter().map(|&d| d as usize).collect();
    OwnedTensor::from_bytes(artifact::DType::F32, &shape, bytes)
}

/// The mean of numbers, added in order.
fn mean(all: &[Vec<u8>]) -> Vec<u8> {
    let mut sum = floats(&all[0]);
    for x in &all[1..] {
        sum.iter_mut().zip(floats(x)).for_each(|(sum, x)| *sum += x);
    }
    bytes(sum.into_iter().map(|sum| sum / all.len() as f32))
}

/// Steps over `n` micro-batches by hand: the graph computes the gradients of each batch; then their
/// mean and AdamW.
fn by_hand(model: &Graph, start: &Data, feeds: &[Tensors], n: usize) -> (Vec<Vec<u8>>, Tensors) {
    let mut one = model.clone();
    graph::canonical::run(&mut one);
    // Other formulas round differently.
    graph::simplify::run(&mut one);
    graph::accumulate::run(&mut one);
    graph::optimizer::run(&mut one, Optimizer::None).unwrap();
    let mut states: Tensors = start.clone();
    let mut losses = vec![];
    for (step, feed) in feeds.iter().enumerate() {
        let mut outputs = vec![];
        for k in 0..n {
            let batch: Tensors = one
                .inputs
                .iter()
                .map(|&input| &one.values[input].name)
                .map(|name| (name.clone(), feed[&format!("{name}.{k}")].clone()))
                .collect();
            outputs.push(evaluate::step(&one, &mut states, &batch).unwrap());
        }
        let of = |name: &str| {
            outputs
                .iter()
                .map(|output| output[name].clone())
                .collect::<Vec<_>>()
        };
        losses.push(mean(&of("loss")));
        for &(state, _) in &model.gradients {
            let (path, shape) = (
                &model.states[state].path,
                model.values[model.states[state].before].ty.shape(),
            );
            let tensor = |path: &str| match states.get(path) {
                Some(bytes) => f32s(shape, bytes),
                None => OwnedTensor::zeros(
                    artifact::DType::F32,
                    &shape.iter().map(|&d| d as usize).collect::<Vec<_>>(),
                ),
            };
            let (m, v) = (format!("exp_avg.{path}"), format!("exp_avg_sq.{path}"));
            let gradient = f32s(shape, &mean(&of(&format!("grad.{path}"))));
            let count = OwnedTensor::from_i64s(artifact::DType::I64, &[], &[step as i64 + 1]);
            let hyper = OwnedTensor::from_f64s(artifact::DType::F64, &[5], &ADAMW);
            let ins = [tensor(path), gradient, tensor(&m), tensor(&v), count, hyper];
            let outs = vec![(artifact::DType::F32, ins[0].shape().to_vec()); 3];
            let new = run_op("adamw", &[], &ins.each_ref(), &outs, 0).unwrap();
            for (path, new) in [path, &m, &v].into_iter().zip(new) {
                states.insert(path.clone(), new.bytes());
            }
        }
    }
    (losses, states)
}

/// On real models, with an advancing generator and running statistics.
#[test]
fn micro_batches_are_batches_one_after_the_other() {
    for name in ["dropout-tiny", "resnet-tiny"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("data/models")
            .join(name);
        let model = torch::read(&folder.join("joint_core.pt2"), &BTreeMap::new()).unwrap();
        let file = ["ref.safetensors", "batches.safetensors"]
            .map(|f| folder.join(f))
            .into_iter()
            .find(|f| f.exists());
        let file = std::fs::read(file.unwrap()).unwrap();
        let file = SafeTensors::deserialize(&file).unwrap();
        let mut start: Data = model
            .tensors
            .iter()
            .map(|(path, t)| (path.clone(), t.data.clone()))
            .collect();
        for state in model.graph.states.values() {
            let zeros = || vec![0; model.graph.values[state.before].ty.bytes() as usize];
            start.entry(state.path.clone()).or_insert_with(zeros);
        }
        let one: Vec<String> = model
            .graph
            .inputs
            .iter()
            .map(|&v| model.graph.values[v].name.clone())
            .collect();
        for n in [1, 2, 3] {
            let feeds: Vec<Tensors> = (0..2)
                .map(|step| {
                    let batch = |k: usize, input: &str| {
                        let tensor = file
                            .tensor(&format!("batch.{}.{input}", (step * n + k) % 2))
                            .unwrap();
                        (format!("{input}.{k}"), tensor.data().to_vec())
                    };
                    (0..n)
                        .flat_map(|k| one.iter().map(move |input| batch(k, input)))
                        .collect()
                })
                .collect();
            let (losses, states) = by_hand(&model.graph, &start, &feeds, n);
            let kernels = Kernels::Plain;
            let options = Options {
                optimizer: Optimizer::AdamW,
                micro_batches: Some(n),
                reduction: Combination::Mean,
                kernels,
                ..Options::default()
            };
            let compiled = compile(&model.graph, &options);
            let known: Vec<&String> = compiled
                .program
                .graph
                .states
                .values()
                .map(|state| &state.path)
                .collect();
            let kept: Data = start
                .clone()
                .into_iter()
                .filter(|(path, _)| known.contains(&path))
                .collect();
            let artifact = codegen::emit(&compiled, &kept, codegen::Target::host()).unwrap();
            let feeds: Vec<Tensors> = feeds
                .into_iter()
                .map(|feed| {
                    let name = |name: String| {
                        if n == 1 {
                            name.trim_end_matches(".0").to_string()
                        } else {
                            name
                        }
                    };
                    let batch = feed.into_iter().map(|(input, bytes)| (name(input), bytes));
                    batch
                        .chain([(HYPER.to_string(), doubles(&ADAMW))])
                        .collect()
                })
                .collect();
            let (outcome, _) =
                run::compiled(&artifact, runtime::Options::default(), &feeds).unwrap();
            for (step, loss) in losses.iter().enumerate() {
                assert_eq!(
                    floats(&outcome.outputs[step]["loss"]),
                    floats(loss),
                    "{name}, {n}: loss {step}"
                );
            }
            for (path, bytes) in outcome
                .states
                .iter()
                .filter(|(path, _)| *path != "optimizer.step")
            {
                assert!(*bytes == states[path], "{name}, {n} micro-batches: {path}");
            }
        }
    }
}

/// One micro-batch gives the unchanged step.
#[test]
fn one_micro_batch_is_none() {
    let graph = linears(3, 8, 4);
    let compiled = |micro_batches| {
        let options = Options {
            optimizer: Optimizer::AdamW,
            micro_batches,
            ..Options::default()
        };
        ir::text::print_program(&compile(&graph, &options).program)
    };
    assert_eq!(compiled(Some(1)), compiled(None));
}

/// Memory does not grow with the number of micro-batches, except for the sums of gradients.
#[test]
fn micro_batches_need_one_more_set_of_gradients() {
    let graph = linears(10, 64, 256);
    let peak = |n| {
        let options = Options {
            optimizer: Optimizer::AdamW,
            micro_batches: Some(n),
            ..Options::default()
        };
        compile(&graph, &options).planned_peak
    };
    let gradients: u64 = graph
        .gradients
        .iter()
        .map(|&(_, value)| graph.values[value].ty.bytes())
        .sum();
    let [one, two, four, eight] = [1, 2, 4, 8].map(peak);
    assert!(
        one < two && two <= one + gradients + 4096,
        "one {one}, two {two}, gradients {gradients}"
    );
    // A loss is a number, and takes 64 bytes.
    assert!(
        four <= two + 4096 && eight <= two + 4096,
        "two {two}, four {four}, eight {eight}"
    );
}

#[test]
fn nothing_to_accumulate_is_told() {
    let mut graph = linears(1, 4, 2);
    graph.gradients.clear();
    let error = graph::microbatch::run(&mut graph, 2, Combination::Auto).unwrap_err();
    assert_eq!(
        error.to_string(),
        "micro-batches accumulate gradients, and the graph names none"
    );
}

// --- masters in halves ---

/// A bf16 parameter with a nonzero gradient.
fn half_precision() -> Graph {
    let mut graph = Graph::new("half");
    let ty = || TensorType::new(DType::BF16, [32]).unwrap();
    let x = graph.add_input("x", ty());
    let w = graph.add_state("w", "fc.weight", ir::StateKind::Param, ty());
    let mut node = |op, inputs: &[ir::Value], name: &str, phase| {
        graph
            .add_node(
                Op::new(op, []).unwrap(),
                inputs,
                &[name.to_string()],
                phase,
                "fc",
            )
            .unwrap()[0]
    };
    let y = node("mul", &[w, x], "y", Phase::Forward);
    let dw = node("add", &[y, x], "dw", Phase::Backward);
    graph.outputs.push(Output {
        name: "y".into(),
        value: y,
    });
    graph.gradients.push((State::new(0), dw));
    graph
}

/// Moments in f32 and 16 more bits of the parameter: steps that are too small for bf16 add up; 12
/// bytes a parameter.
#[test]
fn masters_do_not_lose_small_steps() {
    let graph = half_precision();
    let half = |x: f32| half::bf16::from_f32(x).to_le_bytes();
    let start: Data = [("fc.weight".to_string(), half(1.0).repeat(32))].into();
    let feed: Tensors = [
        (
            "x".to_string(),
            (0..32).flat_map(|i| half(2.0 + i as f32 / 64.0)).collect(),
        ),
        (HYPER.to_string(), doubles(&[1e-4, 0.9, 0.999, 1e-8, 0.0])),
    ]
    .into();
    let train = |master| {
        let compiled = compile(
            &graph,
            &Options {
                optimizer: Optimizer::AdamW,
                master,
                ..Options::default()
            },
        );
        let artifact = codegen::emit(&compiled, &start, codegen::Target::host()).unwrap();
        let outcome = run::compiled(
            &artifact,
            runtime::Options::default(),
            &vec![feed.clone(); 200],
        )
        .unwrap()
        .0;
        let graph = &compiled.program.graph;
        let state_bytes: u64 = graph
            .states
            .values()
            .map(|state| graph.values[state.before].ty.bytes())
            .sum();
        (outcome, state_bytes - 8)
    };
    let ((plain, plain_bytes), (split, split_bytes)) = (train(Master::None), train(Master::Split));
    let (full, full_bytes) = train(Master::Full);
    assert_eq!(
        (plain_bytes, split_bytes, full_bytes),
        (6 * 32, 12 * 32, 14 * 32),
        "bytes of 32 parameters and their states"
    );
    let value = |outcome: &run::Outcome| {
        let bytes = &outcome.states["fc.weight"];
        half::bf16::from_le_bytes([bytes[62], bytes[63]]).to_f32()
    };
    // The bf16 next to 1 is 1/256 away: steps of 1e-4 are lost, and 200 of them are 0.02.
    assert_eq!(value(&plain), 1.0);
    assert!(
        (0.975..=0.985).contains(&value(&split)),
        "{}",
        value(&split)
    );
    assert!(split.states["low.fc.weight"].iter().any(|&byte| byte != 0));
    // Both are one f32.
    let (high, low) = (&split.states["fc.weight"], &split.states["low.fc.weight"]);
    let halves = high.as_chunks().0.iter().zip(low.as_chunks().0);
    let joined = halves.flat_map(|(high, low)| {
        let high = u32::from(u16::from_le_bytes(*high)) << 16;
        let low = i16::from_le_bytes(*low);
        high.wrapping_add_signed(low.into()).to_le_bytes()
    });
    assert_eq!(full.states["master.fc.weight"], joined.collect::<Vec<_>>());
    assert_eq!(full.states["fc.weight"], *high);
}

/// Rounded at random, updates that are too small for bf16 add up on average; the draws follow from
/// the seed alone.
#[test]
fn random_rounding_does_not_lose_small_steps() {
    let graph = half_precision();
    let half = |x: f32| half::bf16::from_f32(x).to_le_bytes();
    let start: Data = [("fc.weight".to_string(), half(1.0).repeat(32))].into();
    let feed: Tensors = [
        ("x".to_string(), half(2.0).repeat(32)),
        (HYPER.to_string(), doubles(&[1e-4, 0.9, 0.999, 1e-8, 0.0])),
    ]
    .into();
    let feeds = vec![feed.clone(); 200];
    for (optimizer, bytes) in [(Optimizer::AdamWBf16, 6), (Optimizer::AdamW, 10)] {
        let train = |rounding, kernels, seed| {
            let options = Options {
                optimizer,
                rounding,
                kernels,
                ..Options::default()
            };
            let compiled = compile(&graph, &options);
            let (values, states) = (&compiled.program.graph, &compiled.program.graph.states);
            let own = states.values().filter(|s| s.path.ends_with("fc.weight"));
            let own: u64 = own
                .map(|state| values.values[state.before].ty.bytes())
                .sum();
            let artifact = codegen::emit(&compiled, &start, codegen::Target::host()).unwrap();
            let options = run::shuffled(seed);
            let outcome = run::compiled(&artifact, options, &feeds).unwrap().0;
            (outcome.states["fc.weight"].clone(), own)
        };
        let mean = |bytes: &[u8]| {
            let numbers = bytes.as_chunks().0.iter();
            let sum: f32 = numbers
                .map(|b| half::bf16::from_le_bytes(*b).to_f32())
                .sum();
            sum / 32.0
        };
        for kernels in [Kernels::Plain, Kernels::Generated] {
            let (nearest, _) = train(Rounding::Nearest, kernels, 1);
            assert_eq!(mean(&nearest), 1.0);
            let (random, own) = train(Rounding::Stochastic, kernels, 1);
            assert_eq!(own, bytes * 32);
            // 200 steps of 1e-4; the mean of 32 has a deviation of 1.3e-3.
            let found = mean(&random);
            assert!((found - 0.98).abs() < 6e-3, "{}: {found}", optimizer.name());
            assert_eq!(train(Rounding::Stochastic, kernels, 2).0, random);
        }
    }
}

#[test]
fn what_does_not_go_together_is_told() {
    let run = |attach| {
        let attached = graph::optimizer::run(&mut linears(1, 4, 2), attach);
        attached.unwrap_err().to_string()
    };
    let attach = |optimizer| Attach {
        optimizer,
        ..Attach::default()
    };
    let split = Attach {
        master: Master::Split,
        ..attach(Optimizer::AdamW)
    };
    assert_eq!(
        run(split),
        "--master split is for parameters in bf16 (full is also for f16), and the model has none"
    );
    let split = Attach {
        master: Master::Split,
        ..attach(Optimizer::Sgd)
    };
    assert_eq!(
        run(split),
        "--master split is for adamw alone, not for sgd; --master full is for all optimizers"
    );
    let random = Attach {
        rounding: Rounding::Stochastic,
        ..attach(Optimizer::AdamW)
    };
    assert_eq!(
        run(random.clone()),
        "--rounding stochastic is for bf16 parameters, and the model has none"
    );
    let random = Attach {
        master: Master::Full,
        ..random
    };
    assert_eq!(
        run(random),
        "--rounding stochastic is for parameters without masters; leave --master out"
    );
    let clip = |norm| Attach {
        clip_norm: Some(norm),
        ..attach(Optimizer::AdamW)
    };
    for norm in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(
            run(clip(norm)).contains("it should be a positive number"),
            "{norm}"
        );
    }
    let clip = Attach {
        clip_norm: Some(1.0),
        ..Attach::default()
    };
    assert_eq!(
        run(clip),
        "the norm over all gradients is computed for an optimizer's updates, and there is none"
    );
}
