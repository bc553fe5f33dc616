//! Compares planners, and tests ProTrain's layouts as plans: proved, run, and with the same bits.

use ir::schedule::{InstrKind, Why};
use ir::{Graph, Phase, Schedule};
use lighterage_tests::gpt2::gpt2;
use lighterage_tests::{chain, forced};
use papers::protrain::{Activation, Config, Fixed, Layout};
use passes::cost::{Roofline, Tabled};
use passes::decide::choose::{Aim, Asked};
use passes::decide::figures::instance;
use passes::decide::{
    Extent, Means, Planner, Problem, blocks, choose, chunks, decide, decide_among, greedy, layout,
    record,
};
use passes::graph::optimizer::{HYPER, Optimizer};
use passes::graph::{canonical, optimizer};
use passes::pipeline::{self, Budget, Error, Options};
use passes::plan::Limits;
use passes::plan::machine::DEVICE;
use passes::plan::tuning::{HALVED, Heuristics, RUNGS};
use passes::schedule::lives::Variant;
use passes::schedule::order::{self, Update};
use passes::{alloc, devices, realise};
use runtime::{Machine, StateInit};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data/models")
        .join(name)
}

fn read(name: &str) -> Graph {
    torch::read(&folder(name), &BTreeMap::new()).unwrap().graph
}

fn prepared(mut graph: Graph) -> Graph {
    canonical::run(&mut graph);
    optimizer::run(&mut graph, Optimizer::AdamW).unwrap();
    order::run(&mut graph, Update::Backward);
    graph.compact()
}

fn with_problem<T>(graph: &Graph, device: &str, f: impl FnOnce(&Problem<'_>) -> T) -> T {
    let device = passes::devices::named(device).unwrap();
    let roofline = Roofline::new(&device);
    let cost = Tabled::new(&roofline, graph);
    f(&Problem::new(graph, &device, &cost))
}

/// A small GPT-2, with three chunks of blocks at the smallest chunk size.
fn small() -> Graph {
    prepared(gpt2(6, 64, 4, 2, 32, 257))
}

/// At every budget at which another planner finds a plan, `auto` finds one that is not slower.
#[test]
fn auto_is_never_worse() {
    let graphs = [
        read("gpt2-tiny/joint_coarse.pt2"),
        read("llama-tiny/joint_coarse.pt2"),
        read("resnet-tiny/joint_coarse.pt2"),
        gpt2(6, 64, 4, 2, 32, 257),
    ];
    for (graph, device) in graphs
        .into_iter()
        .zip(["rtx3090", "gh200", "cpu", "a100-80g"])
    {
        let graph = prepared(graph);
        with_problem(&graph, device, |problem| {
            let of = |planner| decide(problem, planner, Budget::Bytes(u64::MAX)).unwrap();
            let auto = of(Planner::Auto);
            let others = Planner::ALL.into_iter();
            for planner in others.filter(|&planner| planner != Planner::Auto) {
                let other = of(planner);
                assert!(
                    auto.smallest <= other.smallest,
                    "{} {}",
                    graph.name,
                    planner.name()
                );
                for &(peak, micros) in &other.curve {
                    let fits = auto.curve.iter().filter(|point| point.0 <= peak);
                    let best = fits
                        .map(|point| point.1)
                        .min_by(f64::total_cmp)
                        .unwrap_or(f64::INFINITY);
                    assert!(
                        best <= micros,
                        "{} {} at {peak}: {micros}, auto {best}",
                        graph.name,
                        planner.name()
                    );
                }
            }
        });
    }
}

/// For one budget, ladders of a large graph end early, with the same plan as the full ladders.
/// No plan needs less than its neediest line. A trajectory gets near that, though states begin in
/// chunks, at home, and with their updates on the device.
#[test]
fn the_smallest_plan_is_near_its_neediest_line() {
    for name in ["gpt2-tiny", "llama-tiny", "bert-tiny"] {
        let graph = prepared(read(&format!("{name}/joint_coarse.pt2")));
        let (smallest, neediest) = with_problem(&graph, "cpu", |problem| {
            let of = |budget| decide(problem, Planner::Auto, budget).unwrap();
            let smallest = of(Budget::Share(1.0)).smallest.unwrap();
            let decisions = of(Budget::Bytes(smallest)).decisions;
            let schedule = realise::unnamed(problem, &decisions).unwrap();
            (smallest, alloc::neediest(&schedule, DEVICE))
        });
        assert!(smallest as f64 <= 1.01 * neediest as f64, "{name}");
    }
}

#[test]
fn ladders_end_early() {
    let graph = prepared(chain::chain(140));
    with_problem(&graph, "a100-80g", |problem| {
        let plan = |budget: Budget, extent: Extent| {
            let problems = std::slice::from_ref(problem);
            decide_among(problems, Planner::Protrain, budget, extent)
                .unwrap()
                .1
        };
        let drafts = |wanted: &record::Wanted| {
            layout::drafts(problem, layout::Gradients::ByChunk, RUNGS, wanted).len()
        };
        let all = drafts(&record::Wanted::ALL);
        for share in [0.7, 0.4] {
            let [curve, plan] =
                [Extent::Curve, Extent::Plan].map(|extent| plan(Budget::Share(share), extent));
            assert_eq!(
                (curve.decisions, curve.variant),
                (plan.decisions, plan.variant),
                "{share}"
            );
            let limits = Limits {
                device: plan.budget.unwrap(),
                ..Limits::NONE
            };
            let wanted = drafts(&record::Wanted {
                limits: Some(limits),
                ..record::Wanted::ALL
            });
            assert!(wanted < all, "{share}: {wanted} of {all}");
        }
    });
}

/// In a graph of many lines, taking back tries targets by halves, and finds as fast a plan.
#[test]
fn targets_by_halves_miss_nothing() {
    let graph = prepared(chain::chain(140));
    let device = devices::named("a100-80g").unwrap();
    let roofline = Roofline::new(&device);
    let cost = Tabled::new(&roofline, &graph);
    let micros = |halve_fills: bool| {
        let problem = Problem::new(&graph, &device, &cost).with_heuristics(Heuristics {
            halve_fills,
            ..Heuristics::ALL
        });
        assert!(HALVED <= problem.lines.len(), "{}", problem.lines.len());
        let (problems, budget) = (std::slice::from_ref(&problem), Budget::Share(0.4));
        let (_, decided, _) = decide_among(problems, Planner::Auto, budget, Extent::Plan).unwrap();
        decided.figures.micros
    };
    let (halved, all) = (micros(true), micros(false));
    assert!(
        halved <= all * (1.0 + 1e-9),
        "{halved} µs, {all} with all targets"
    );
}

/// The first result among drafts is the best of all their records, for any request and any number
/// of threads, although only a few drafts are placed.
#[test]
fn the_first_is_the_best_of_all() {
    let graphs = [
        (prepared(read("gpt2-tiny/joint_core.pt2")), "rtx3090"),
        (prepared(read("moe-tiny/joint_core.pt2")), "cpu"),
        (small(), "gh200"),
    ];
    for (graph, device) in graphs {
        with_problem(&graph, device, |problem| {
            let mut drafts = greedy::keep(problem);
            for hosted in [0.0, 0.5] {
                drafts.extend(greedy::jumps(
                    problem,
                    hosted,
                    greedy::Taste::Cheaper,
                    &record::Wanted::ALL,
                ));
            }
            let records = record::judge(problem, &drafts);
            let drafts = [drafts];
            let problems = std::slice::from_ref(problem);
            let keep = records[0].peak;
            for share in [2.0, 0.9, 0.7, 0.5, 0.3, 0.0] {
                for host in [u64::MAX, keep / 4] {
                    let limits = Limits {
                        device: (share * keep as f64) as u64,
                        host,
                    };
                    let fits =
                        |r: &&record::Record| r.peak <= limits.device && r.host <= limits.host;
                    for aim in [Aim::Fastest, Aim::Smallest, Aim::LeastOnHost] {
                        let of = |r: &record::Record| match aim {
                            Aim::Fastest => r.micros,
                            Aim::Smallest => r.peak as f64,
                            Aim::LeastOnHost => r.host as f64,
                        };
                        let best = records.iter().filter(fits).map(of).min_by(f64::total_cmp);
                        let on = |threads: usize| {
                            let pool = rayon::ThreadPoolBuilder::new()
                                .num_threads(threads)
                                .build()
                                .unwrap();
                            let asked = Asked {
                                aim,
                                limits,
                                as_fast: 0.0,
                            };
                            pool.install(|| {
                                choose::best(problems, &drafts, asked).map(|(_, record)| record)
                            })
                        };
                        let found = on(1);
                        let told = (found.as_ref().map(of), best);
                        let same = match told {
                            (Some(found), Some(best)) => (found - best).abs() <= 2e-9 * best,
                            (found, best) => found == best,
                        };
                        assert!(same, "{} {aim:?} {limits:?}: {told:?}", graph.name);
                        let key = |r: &record::Record| {
                            (
                                r.peak,
                                r.host,
                                r.micros.to_bits(),
                                r.variant,
                                r.decisions.clone(),
                            )
                        };
                        assert_eq!(
                            on(3).as_ref().map(key),
                            found.as_ref().map(key),
                            "{} {aim:?}",
                            graph.name
                        );
                    }
                }
            }
        });
    }
}

/// Every plan of the ladder is proved, and so are plans that recompute parts of blocks; together
/// they use every feature of a layout.
#[test]
fn layouts_are_legal_plans() {
    let mut means = [0, 0];
    let mut hosted = 0;
    for (graph, device) in [
        (prepared(read("gpt2-tiny/joint_core.pt2")), "rtx3090"),
        (prepared(read("llama-tiny/joint_coarse.pt2")), "gh200"),
        (prepared(read("moe-tiny/joint_core.pt2")), "cpu"),
        (prepared(read("dropout-tiny/joint_coarse.pt2")), "a100-80g"),
        (prepared(chain::chain(24)), "gh200"),
        (small(), "rtx3090"),
    ] {
        with_problem(&graph, device, |problem| {
            let parts = layout::parts(problem);
            assert!(1 < parts.len(), "{}", graph.name);
            for draft in parts.iter().step_by(7) {
                let proved = forced::finish(problem, (*draft.decisions).clone(), Variant::ByTime);
                assert!(proved.is_ok(), "parts: {}", proved.unwrap_err());
            }
            let model = layout::Model::new(problem, layout::Gradients::ByChunk).unwrap();
            let ladder = model.ladder(&Fixed::default(), 24);
            assert!(1 < ladder.len(), "{}", graph.name);
            for (config, _) in ladder {
                let decisions = model.decisions(problem, &config);
                for (used, _) in decisions.cuts.values() {
                    means[usize::from(*used == Means::Swap)] += 1;
                }
                hosted += decisions.hosted.len();
                for variant in Variant::ALL {
                    let proved = forced::finish(problem, decisions.clone(), variant);
                    assert!(
                        proved.is_ok(),
                        "{config:?} {variant:?}: {}",
                        proved.unwrap_err()
                    );
                }
            }
        });
    }
    assert!(
        0 < means[0] && 0 < means[1] && 0 < hosted,
        "{means:?} {hosted}"
    );
}

/// If the host is full, copies to it wait for its bytes. A step is faster if its buffers live as
/// long as their copies really take, because compute need not wait, too.
#[test]
fn a_full_host_delays_copies_more_than_compute() {
    let graph = small();
    let device = devices::named("gh200").unwrap();
    let cost = Roofline::new(&device);
    let problem = Problem::new(&graph, &device, &cost);
    let drafts = [0.5, 1.0].map(|hosted| {
        greedy::jumps(
            &problem,
            hosted,
            greedy::Taste::Cheaper,
            &record::Wanted::ALL,
        )
    });
    let drafts = drafts.concat();
    let most = drafts.iter().map(|draft| draft.host).max().unwrap();
    let problem = Problem::new(&graph, &device, &cost).with_host_limit(most / 2);
    let faster = drafts.iter().filter(|draft| {
        let records = record::judge(&problem, std::slice::from_ref(draft));
        let of = |variant| records.iter().find(|record| record.variant == variant);
        match (of(Variant::WhereFree), of(Variant::AsPlayed)) {
            (Some(free), Some(played)) => played.micros < 0.95 * free.micros,
            _ => false,
        }
    });
    assert!(0 < faster.count());
}

/// Numbers that the user gives are those of the plan; the others are searched. Impossible numbers
/// are refused in the paper's words.
#[test]
fn protrain_keeps_the_numbers_that_are_given() {
    let graph = small();
    let plan = |text: &str, budget: Budget| {
        let fixed = Fixed::parse(text).unwrap();
        let device = devices::named("a100-80g").unwrap();
        let cost = Roofline::new(&device);
        let problem = Problem::new(&graph, &device, &cost).with_fixed(fixed);
        decide(&problem, Planner::Protrain, budget)
    };
    let free = Budget::Bytes(u64::MAX);
    for (text, numbers) in [
        ("n_persist=0,n_buffer=3,n_swap=0,n_ckpt=0", [0, 3, 0, 0]),
        ("n_persist=1,n_buffer=4,n_swap=0,n_ckpt=3", [1, 4, 0, 3]),
    ] {
        let layout = plan(text, free).unwrap().layout.unwrap();
        let config = layout.config;
        let found = [
            config.n_persist,
            config.n_buffer,
            config.n_swap,
            config.n_recompute,
        ];
        assert_eq!(found, numbers);
        assert_eq!(layout.chunks.matches('P').count(), numbers[0]);
        assert_eq!(layout.chunks.matches('B').count(), numbers[1]);
        assert_eq!(layout.blocks.matches('R').count(), numbers[3]);
        assert_eq!(
            (layout.chunks.len(), layout.blocks.len()),
            (layout.n_chunk, layout.n_block)
        );
    }
    let searched = plan("n_ckpt=2", free).unwrap();
    assert_eq!(searched.layout.unwrap().config.n_recompute, 2);
    // Keeping everything is not among the plans, even if it is faster.
    assert!(matches!(
        plan("n_persist=0", Budget::Bytes(1 << 20)),
        Err(Error::Infeasible(_))
    ));
    let error = plan("n_persist=99", free).unwrap_err().to_string();
    assert!(error.contains("n_persist=99: the model has"), "{error}");
}

/// Lines of a kind, with their buffers' sizes.
fn copies(schedule: &Schedule, why: Why) -> Vec<u64> {
    let of = schedule.instrs.values().filter(|data| data.why == why);
    of.filter_map(|data| {
        if let InstrKind::Copy { bytes, .. } = data.kind {
            Some(bytes)
        } else {
            None
        }
    })
    .collect()
}

/// The lines of a layout of the small model: all chunks on the host, each as large as a block.
fn lines_of(activation: Option<Activation>, n_cached: usize) -> (Schedule, usize, Graph) {
    let graph = small();
    let (schedule, n) = with_problem(&graph, "a100-80g", |problem| {
        let blocks = blocks::find(&graph);
        let packing = chunks::grid_search(&chunks::sizes(&graph, &blocks), 0).unwrap();
        let instance = instance(problem, &blocks, &packing, 1e4).unwrap();
        let n = packing.chunks.len();
        let of_block = |b: &blocks::Block| {
            if b.repeated {
                activation.or(Some(Activation::Keep))
            } else {
                None
            }
        };
        let layout = Layout {
            activation: blocks.iter().map(of_block).collect(),
            cached: (0..n).map(|c| n - n_cached <= c).collect(),
            ..Config::default().layout(&instance)
        };
        assert_eq!(layout.persistent, vec![false; n]);
        let decisions = passes::plan::Decisions {
            gradients_by_chunk: true,
            ..layout::decisions(problem, &blocks, &packing, &layout)
        };
        (realise::lines(problem, &decisions).unwrap(), n)
    });
    (schedule, n, graph)
}

/// With updates on the host, the gradients of a chunk leave in one copy, with the bytes that they
/// have alone; the only gradient of a chunk leaves by itself.
#[test]
fn gradients_leave_by_chunk() {
    let (schedule, n, graph) = lines_of(Some(Activation::Recompute), 0);
    let mut sent = copies(&schedule, Why::Offload);
    // The number of the step, which all updates read.
    sent.retain(|&bytes| bytes != 8);
    assert_eq!(sent.len(), n);
    let params = graph.states.values();
    let params = params.filter(|state| state.kind == ir::StateKind::Param);
    let bytes = params.map(|state| graph.values[state.before].ty.bytes());
    // Copies are of padded tensors.
    let padded: u64 = bytes.map(ir::schedule::buffer_bytes).sum();
    let sent: u64 = sent.iter().sum();
    assert!(
        (padded - 64 * n as u64..=padded).contains(&sent),
        "{sent} of {padded}"
    );
}

/// A block's chunk is copied in once for the forward and once for the backward, unless it is
/// cached; reruns of blocks need no further copies. The table of tokens is copied in for the start
/// and for the head; the last norm, whose backward follows at once, only once.
#[test]
fn each_chunk_comes_once_in_a_pass() {
    let counts = |activation, cached| {
        let (schedule, n, graph) = lines_of(activation, cached);
        let on_host = schedule.instrs.values().filter(|data| match data.kind {
            InstrKind::Run { node, .. } => {
                graph.nodes[node].op.name() == "adamw"
                    && schedule.streams[data.stream].name == "host"
            }
            InstrKind::Copy { .. } => false,
        });
        assert_eq!(
            on_host.count(),
            graph
                .states
                .values()
                .filter(|s| s.kind == ir::StateKind::Param)
                .count()
        );
        (copies(&schedule, Why::Gather).len(), n)
    };
    let (all, n) = counts(None, 0);
    assert!(4 < n, "{n} chunks");
    for activation in [None, Some(Activation::Recompute), Some(Activation::Swap)] {
        assert_eq!(counts(activation, 0).0, all, "{activation:?}");
        assert_eq!(counts(activation, 3).0, all - 2, "{activation:?}");
    }
    assert_eq!(all, 2 * n - 1);
}

/// Persistent chunks are those at the start of the model. No line copies them, and the device
/// updates them: with `n_persist` of n chunks, 2 (n - n_persist) - n_buffer gathers are left.
#[test]
fn persistent_chunks_stay_on_the_device() {
    let graph = small();
    with_problem(&graph, "a100-80g", |problem| {
        let model = layout::Model::new(problem, layout::Gradients::ByChunk).unwrap();
        let n = model.instance().chunks.len();
        assert!(4 < n, "{n} chunks");
        for n_persist in [0, 1, 2, n] {
            let n_buffer = (n - n_persist).min(3);
            let config = Config {
                n_persist,
                n_buffer,
                ..Config::default()
            };
            assert!(
                model
                    .describe(&config)
                    .chunks
                    .starts_with(&"P".repeat(n_persist))
            );
            let schedule = realise::lines(problem, &model.decisions(problem, &config)).unwrap();
            let gathers = copies(&schedule, Why::Gather).len();
            assert_eq!(
                gathers,
                2 * (n - n_persist) - n_buffer,
                "{n_persist} of {n}"
            );
            let on_host =
                |data: &&ir::schedule::InstrData| schedule.streams[data.stream].name == "host";
            let updated = schedule.instrs.values().filter(on_host).count();
            assert_eq!(
                updated == 0,
                n_persist == n,
                "{n_persist}: {updated} on the host"
            );
        }
    });
}

/// A swapped block sends each byte once out and once in; a recomputed one computes each line of its
/// forward at most once again, sends nothing, and keeps its input.
#[test]
fn blocks_swap_and_run_again() {
    let (kept, ..) = lines_of(None, 0);
    assert_eq!(copies(&kept, Why::SwapOut).len(), 0);
    let (swapped, ..) = lines_of(Some(Activation::Swap), 0);
    let (out, back) = (
        copies(&swapped, Why::SwapOut),
        copies(&swapped, Why::SwapIn),
    );
    assert!(!out.is_empty());
    assert_eq!(out.iter().sum::<u64>(), back.iter().sum::<u64>());
    let reruns = |schedule: &Schedule| {
        let mut times: BTreeMap<ir::Node, usize> = BTreeMap::new();
        for data in schedule
            .instrs
            .values()
            .filter(|data| data.why == Why::Recompute)
        {
            if let InstrKind::Run { node, .. } = data.kind {
                *times.entry(node).or_default() += 1;
            }
        }
        times
    };
    assert!(reruns(&swapped).is_empty());
    let (recomputed, _, graph) = lines_of(Some(Activation::Recompute), 0);
    assert_eq!(copies(&recomputed, Why::SwapOut).len(), 0);
    let times = reruns(&recomputed);
    assert!(times.values().all(|&n| n == 1), "{times:?}");
    let in_blocks = |node: ir::Node| {
        graph.nodes[node].phase == Phase::Forward && graph.nodes[node].module.contains("h.")
    };
    assert!(times.keys().all(|&node| in_blocks(node)));
    let products = times
        .keys()
        .filter(|&&node| graph.nodes[node].op.name() == "addmm")
        .count();
    // Three of a block's four products; no backward reads the last product's result.
    assert_eq!(products, 3 * 6);
}

/// The generator's blocks equal the trace's, op by op; but the trace computes a part of its mask in
/// its first block.
#[test]
fn generated_blocks_are_those_of_a_trace() {
    let mix = |mut graph: Graph| {
        canonical::run(&mut graph);
        let mut mix: BTreeMap<(&str, bool), usize> = BTreeMap::new();
        for &node in &graph.order {
            let data = &graph.nodes[node];
            let in_block = ["h.0", "h.1"]
                .iter()
                .any(|block| data.module.contains(block));
            if in_block && !data.op.is_alias() && !["full", "where"].contains(&data.op.name()) {
                *mix.entry((data.op.name(), data.phase == Phase::Forward))
                    .or_default() += 1;
            }
        }
        mix
    };
    let (trace, generated) = (
        mix(read("gpt2-tiny/joint_coarse.pt2")),
        mix(gpt2(2, 64, 4, 2, 32, 257)),
    );
    assert!(10 < trace.len());
    assert_eq!(trace, generated);
}

/// Losses, states after the last step, and the planned peak.
type Trained = (Vec<Vec<u8>>, Vec<Vec<u8>>, u64);

/// Some steps on the CPU.
fn train(name: &str, planner: Planner, budget: Budget) -> Result<Trained, Error> {
    let model = torch::read(&folder(name).join("joint_core.pt2"), &BTreeMap::new()).unwrap();
    let device = passes::devices::named("cpu").unwrap();
    let options = Options {
        optimizer: Optimizer::AdamW,
        budget,
        planner,
        ..Options::default()
    };
    let compiled = pipeline::compile(
        model.graph,
        &options,
        &device,
        &Roofline::new(&device),
        &mut |_| (),
    )?;
    let paths: Vec<&str> = compiled
        .program
        .graph
        .states
        .values()
        .map(|s| s.path.as_str())
        .collect();
    let tensors = model
        .tensors
        .into_iter()
        .filter(|(path, _)| paths.contains(&path.as_str()));
    let data = tensors.map(|(path, tensor)| (path, tensor.data)).collect();
    let artifact = codegen::emit(&compiled, &data, codegen::Target::host()).unwrap();
    let mut machine = Machine::new(artifact, runtime::Options::default()).unwrap();
    machine
        .initialise(&StateInit { seed: 7, std: None })
        .unwrap();
    let reference = std::fs::read(folder(name).join("ref.safetensors")).unwrap();
    let reference = SafeTensors::deserialize(&reference).unwrap();
    let mut losses = vec![];
    for step in 0..4 {
        let names: Vec<String> = machine.inputs().map(|input| input.name.clone()).collect();
        for name in names {
            let bytes = match name.as_str() {
                HYPER => [1e-3f64, 0.9, 0.999, 1e-8, 0.01]
                    .iter()
                    .flat_map(|x| x.to_le_bytes())
                    .collect(),
                _ => reference
                    .tensor(&format!("batch.{step}.{name}"))
                    .unwrap()
                    .data()
                    .to_vec(),
            };
            machine.write_input(&name, &bytes).unwrap();
        }
        machine.step().unwrap();
        losses.push(machine.read_output("loss").unwrap());
    }
    let paths: Vec<String> = machine.states().map(|state| state.path.clone()).collect();
    let states = paths
        .iter()
        .map(|path| machine.read_state(path).unwrap())
        .collect();
    assert_eq!(machine.measured_peak_bytes(), compiled.planned_peak);
    Ok((losses, states, compiled.planned_peak))
}

/// ProTrain's plans give the same bits as keeping everything, at three budgets down to the
/// smallest.
#[test]
fn protrain_changes_no_bit() {
    for name in ["gpt2-tiny", "llama-tiny"] {
        let (losses, states, keep) = train(name, Planner::Keep, Budget::Share(1.0)).unwrap();
        assert_ne!(losses[0], losses[3]);
        let Err(Error::Infeasible(infeasible)) = train(name, Planner::Protrain, Budget::Bytes(1))
        else {
            panic!("{name} should not fit one byte");
        };
        let smallest = infeasible.smallest;
        assert!(
            smallest as f64 <= 0.9 * keep as f64,
            "{name}: {smallest} of {keep}"
        );
        for k in 0..3 {
            let budget = smallest + (keep - smallest) * k / 3;
            let (run, after, peak) = train(name, Planner::Protrain, Budget::Bytes(budget)).unwrap();
            assert!(peak <= budget && peak < keep, "{name}: {peak} of {budget}");
            assert_eq!(run, losses, "{name} at {budget}");
            assert_eq!(after, states, "{name} at {budget}");
        }
    }
}
