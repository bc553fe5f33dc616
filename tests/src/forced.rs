//! Programs from decisions that do not come from a planner.

use ir::{Device, Disk, Graph, Phase, Program};
use passes::alloc;
use passes::cost::Roofline;
use passes::decide::record::Origin;
use passes::decide::{Decided, Decisions, Gap, Means, Problem, Reason};
use passes::graph::optimizer::Optimizer;
use passes::graph::reduction::Kind;
use passes::pipeline::{Compiled, Kernels, Options};
use passes::plan::machine::HOST;
use passes::realise::Finished;
use passes::schedule::lives::{Variant, lives};
use passes::schedule::{order, sync};
use passes::sim::simulate;
use passes::{graph, realise};

/// The step in which every forward value runs again before its first use in backward.
pub fn recompute_all(model: &Graph, optimizer: Optimizer, device: &Device) -> Compiled {
    let cost = Roofline::new(device);
    let mut graph = model.clone();
    graph::canonical::run(&mut graph);
    graph::simplify::run(&mut graph);
    graph::optimizer::run(&mut graph, optimizer).expect("the model should have gradients");
    order::run(&mut graph, order::Update::Backward);
    let graph = graph.compact();
    let problem = Problem::new(&graph, device, &cost);
    let reason = Reason {
        bytes: 0,
        swap: None,
        recompute: None,
        line: 0,
    };
    let mut decisions = Decisions::default();
    for value in graph.values.ids().filter(|&v| graph.root(v) == v) {
        let Some(node) = graph.def_node(value) else {
            continue;
        };
        if graph.nodes[node].phase != Phase::Forward {
            continue;
        }
        let accesses = &problem.accesses[value];
        let phase = |at: u32| graph.nodes[problem.lines[at as usize]].phase;
        for (gap, pair) in accesses.windows(2).enumerate() {
            if phase(pair[0]) == Phase::Forward && phase(pair[1]) == Phase::Backward {
                decisions.cuts.insert(
                    Gap {
                        value,
                        gap: gap as u32,
                    },
                    (Means::Recompute, reason),
                );
            }
        }
    }
    let mut compiled =
        finish(&problem, decisions, Variant::ByTime).unwrap_or_else(|text| panic!("{text}"));
    compiled.options.optimizer = optimizer;
    compiled
}

/// A disk behind the host: twice as slow as the link of the device `test`.
pub fn disk() -> Disk {
    Disk {
        bytes: 1 << 30,
        read_bandwidth: 2.5e8,
        write_bandwidth: 2.5e8,
        read_keeps: 0.5,
        write_keeps: 0.5,
        kernels_keep: 1.0,
        micros: 1.0,
    }
}

/// The same problem on a host that holds little of what leaves the device: the least that a plan
/// needs there, and this share of the rest. The device should have a disk.
pub fn with_little_host<'a>(
    problem: Problem<'a>,
    decisions: &Decisions,
    share: f64,
) -> Problem<'a> {
    let peak = |problem: &Problem<'_>| {
        let schedule = realise::lines(problem, decisions).expect("the decisions should be legal");
        let lives = alloc::lifetimes(&schedule);
        alloc::peak_in(&schedule, &lives, problem.unit, HOST)
    };
    let all = peak(&problem);
    let problem = problem.with_host_limit(0);
    let least = peak(&problem);
    let rest = share * all.saturating_sub(least) as f64;
    problem.with_host_limit(least + rest as u64)
}

/// A proved program from decisions, in one of the variants. If the proof fails, the
/// error is the text with the findings.
pub fn finish(
    problem: &Problem<'_>,
    decisions: Decisions,
    variant: Variant,
) -> Result<Compiled, String> {
    let graph = problem.graph;
    let mut schedule = realise::lines(problem, &decisions).expect("the decisions should be legal");
    let lives = lives(problem, &schedule, variant);
    let plan = alloc::allocate(&schedule, &lives);
    sync::run(graph, &mut schedule, &plan);
    let program = Program {
        graph: graph.clone(),
        schedule,
        plan: Some(plan),
    };
    let mut findings = ir::verify::program(&program);
    findings.extend(ir::check::check(&program).err().unwrap_or_default());
    if !findings.is_empty() {
        return Err(ir::text::print_program_with_findings(&program, &findings));
    }
    let timeline = simulate(graph, &program.schedule, problem.cost);
    let peak = program
        .plan
        .as_ref()
        .map_or(0, |plan| plan.peak[ir::table::Id::new(0)]);
    let decided = Decided {
        decisions,
        origin: Origin::Keep,
        layout: None,
        variant,
        figures: Finished {
            peak,
            host: program.plan.as_ref().map_or(0, |plan| plan.peak[HOST]),
            micros: timeline.micros,
        },
        budget: None,
        keep_peak: peak,
        smallest: Some(peak),
        curve: vec![],
    };
    let certificate = passes::decide::bound::certificate(problem, u64::MAX, timeline.micros);
    let bounds = program
        .schedule
        .pools
        .ids()
        .map(|pool| alloc::live_peak(&program.schedule, &lives, pool))
        .collect();
    Ok(Compiled {
        program,
        options: Options {
            kernels: Kernels::Plain,
            ..Options::default()
        },
        timeline,
        loss_kind: Kind::default(),
        loss_chunks: 1,
        loss_variants: vec![],
        decided,
        certificate: Some(certificate),
        planned_peak: peak,
        live_peak: peak,
        bounds,
    })
}
