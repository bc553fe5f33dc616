//! Compares the simulator with a simple one without interference: on a machine where lines do not
//! slow each other, both give the same steady state.

use ir::graph::Def;
use ir::{Graph, Schedule};
use lighterage_tests::{forced, generate};
use passes::cost::{Cost, Roofline};
use passes::decide::Problem;
use passes::devices;
use passes::schedule::lives::Variant;
use passes::sim::simulate;
use proptest::prelude::*;

const STEPS: usize = 40;

/// The ends of steps: lines in list order, each as early as possible.
fn ends(graph: &Graph, schedule: &Schedule, cost: &dyn Cost) -> Vec<f64> {
    let outputs: Vec<_> = schedule.exit[graph.states.len()..]
        .iter()
        .map(|(_, loc)| loc.buffer)
        .collect();
    let inputs = schedule
        .entry
        .iter()
        .filter(|(value, _)| matches!(graph.values[*value].def, Def::Input(_)));
    let inputs: Vec<_> = inputs.map(|(_, loc)| loc.buffer).collect();
    let mut free = vec![0.0f64; schedule.streams.len()];
    let (mut before, mut launch, mut ends) = (vec![0.0; schedule.instrs.len()], 0.0f64, vec![]);
    for _ in 0..STEPS {
        let mut now = vec![0.0; schedule.instrs.len()];
        let mut next_launch = launch;
        for (instr, data) in schedule.instrs.iter() {
            let stream = ir::Id::index(data.stream);
            let dep = |dep: &ir::schedule::Dep| {
                let ends = if dep.previous { &before } else { &now };
                ends[ir::Id::index(dep.instr)]
            };
            let start = data
                .after
                .iter()
                .map(dep)
                .fold(free[stream].max(launch), f64::max);
            let end = start + cost.line(graph, schedule, instr);
            (now[ir::Id::index(instr)], free[stream]) = (end, end);
            let io = schedule.accesses(graph, instr).into_iter();
            let mut io = io.map(|access| (access.loc.buffer, access.write));
            if io.any(|(buffer, write)| {
                inputs.contains(&buffer) || write && outputs.contains(&buffer)
            }) {
                next_launch = next_launch.max(end);
            }
        }
        ends.push(now.iter().copied().fold(0.0, f64::max));
        (before, launch) = (now, next_launch);
    }
    ends
}

proptest! {
    #![proptest_config(generate::config(200))]
    #[test]
    fn it_agrees_with_a_plain_one(recipe in generate::recipes(40), choices in generate::choices()) {
        let device = devices::named("test").unwrap();
        let cost = Roofline::new(&device);
        let mut graph = generate::graph(&recipe);
        passes::graph::canonical::run(&mut graph);
        passes::schedule::order::run(&mut graph, Default::default());
        let graph = graph.compact();
        let problem = Problem::new(&graph, &device, &cost);
        let decisions = generate::decisions(&problem, &choices);
        for variant in Variant::ALL {
            let compiled = forced::finish(&problem, decisions.clone(), variant).unwrap();
            let schedule = &compiled.program.schedule;
            let ends = ends(&graph, schedule, &cost);
            let period = (ends[STEPS - 1] - ends[STEPS - 1 - 12]) / 12.0;
            let timeline = simulate(&graph, schedule, &cost);
            let text = || {
                let program = ir::text::print_program(&compiled.program);
                format!("{period} {timeline:?} {ends:?}\n{program}")
            };
            prop_assert!(
                (timeline.micros - period).abs() <= 1e-6 * period,
                "{}",
                text()
            );
            for instr in schedule.instrs.ids() {
                let micros = timeline.end[instr] - timeline.start[instr];
                prop_assert!(
                    (micros - cost.line(&graph, schedule, instr)).abs() <= 1e-6 * micros.max(1.0),
                    "{}",
                    text()
                );
            }
        }
    }
}
