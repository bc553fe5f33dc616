//! Tests the checker with mutants of real programs: drop a wait, move a buffer, swap two lines.
//! Either `check` or the machine's own validation refuses the mutant, or it is harmless: shuffled
//! runs still compute the graph's results.

use ir::schedule::{Dep, InstrKind};
use ir::{Buffer, Id, Instr, Plan, Program};
use lighterage_tests::evaluate::Tensors;
use lighterage_tests::run::Outcome;
use lighterage_tests::{forced, generate, run};
use passes::cost::Roofline;
use passes::decide::Problem;
use passes::devices;
use passes::pipeline::Compiled;
use passes::schedule::lives::Variant;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use runtime::Error;
use std::collections::BTreeMap;

/// A real program and its results.
struct Original {
    compiled: Compiled,
    start: Tensors,
    feed: Tensors,
    expected: Outcome,
}

/// Steps of a run: each overlaps the previous one, and the third uses the states of both.
const STEPS: usize = 3;

fn original(recipe: &generate::Recipe, choices: &[u8], seed: u64) -> Original {
    let device = devices::named("test").unwrap();
    let cost = Roofline::new(&device);
    let mut graph = generate::graph(recipe);
    passes::graph::canonical::run(&mut graph);
    passes::schedule::order::run(&mut graph, Default::default());
    let graph = graph.compact();
    let problem = Problem::new(&graph, &device, &cost);
    let decisions = generate::decisions(&problem, choices);
    let compiled = forced::finish(&problem, decisions, Variant::ALL[(seed % 3) as usize])
        .unwrap_or_else(|text| panic!("{text}"));
    let (start, feed) = (
        generate::states(&graph, seed),
        generate::feed(&graph, seed, 0),
    );
    let mut expected = run::plain(&graph, &start, &vec![feed.clone(); STEPS]);
    expected.outputs.drain(..STEPS - 1);
    Original {
        compiled,
        start,
        feed,
        expected,
    }
}

/// Every program with one wait less.
fn without_a_wait(program: &Program) -> Vec<Program> {
    let waits = program
        .schedule
        .instrs
        .iter()
        .flat_map(|(instr, data)| (0..data.after.len()).map(move |k| (instr, k)));
    let drop = |(instr, k): (Instr, usize)| {
        let mut mutant = program.clone();
        mutant.schedule.instrs[instr].after.remove(k);
        mutant
    };
    waits.map(drop).collect()
}

/// Every program with one buffer at the place of another, or a cache line higher or lower.
fn with_a_buffer_moved(program: &Program) -> Vec<Program> {
    let plan = program.plan.as_ref().unwrap();
    let mut mutants = vec![];
    for (buffer, data) in program.schedule.buffers.iter() {
        let at = plan.offset[buffer];
        let beside = |other: Buffer| {
            program.schedule.buffers[other].pool == data.pool && plan.offset[other] != at
        };
        let others = program
            .schedule
            .buffers
            .ids()
            .filter(|&other| beside(other))
            .map(|other| plan.offset[other]);
        let mut places: Vec<u64> = others.chain([at + 64]).chain(at.checked_sub(64)).collect();
        places.sort_unstable();
        places.dedup();
        for place in places {
            let mut offset = plan.offset.clone();
            offset[buffer] = place;
            mutants.push(Program {
                plan: Some(Plan::new(&program.schedule, offset)),
                ..program.clone()
            });
        }
    }
    mutants
}

/// Every program with two neighbouring lines swapped; waits keep naming the same lines.
fn with_lines_swapped(program: &Program) -> Vec<Program> {
    let n = program.schedule.instrs.len();
    let swap = |first: usize| {
        let (a, b) = (Instr::new(first), Instr::new(first + 1));
        let mut mutant = program.clone();
        let instrs = &mut mutant.schedule.instrs;
        let (at_a, at_b) = (instrs[a].clone(), instrs[b].clone());
        (instrs[a], instrs[b]) = (at_b, at_a);
        for instr in instrs.ids() {
            for Dep { instr: dep, .. } in &mut instrs[instr].after {
                *dep = if *dep == a {
                    b
                } else if *dep == b {
                    a
                } else {
                    *dep
                };
            }
            instrs[instr]
                .after
                .sort_unstable_by_key(|dep| (dep.previous, dep.instr));
        }
        mutant
    };
    (0..n.saturating_sub(1)).map(swap).collect()
}

#[derive(PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Fate {
    Refused,
    Harmless,
}

/// The fate of a mutant. Panics if it is accepted and computes other results.
fn fate(original: &Original, mutant: Program, seed: u64) -> Fate {
    if ir::check::check(&mutant).is_err() {
        return Fate::Refused;
    }
    let peak = mutant.plan.as_ref().unwrap().peak[ir::Pool::new(0)];
    let compiled = Compiled {
        program: mutant,
        planned_peak: peak,
        ..original.compiled.clone()
    };
    let artifact = codegen::emit(&compiled, &original.start, codegen::Target::host()).unwrap();
    // `check` assumes that the host waits between two steps; the machine also launches steps
    // without waiting, and validates this.
    if runtime::validate(&artifact).is_err() {
        return Fate::Refused;
    }
    let program = || ir::text::print_program(&compiled.program);
    for seed in [seed, seed ^ 1] {
        let feeds = vec![original.feed.clone(); STEPS];
        let apart =
            run::compiled(&artifact, run::shuffled(seed), &feeds).map(|(mut outcome, _)| {
                outcome.outputs.drain(..STEPS - 1);
                outcome
            });
        let together = match run::together(&artifact, run::shuffled(seed), &original.feed, STEPS) {
            // An input without later readers may be overwritten; then steps cannot be launched
            // together.
            Err(Error::Host(_)) => None,
            other => Some(other),
        };
        for outcome in together.into_iter().chain([apart]) {
            let outcome = outcome.unwrap_or_else(|e| {
                panic!("check accepts what the machine refuses: {e}\n{}", program())
            });
            assert!(
                outcome == original.expected,
                "check accepts a mutant that computes something else:\n{}",
                program()
            );
        }
    }
    Fate::Harmless
}

type Mutation = fn(&Program) -> Vec<Program>;

#[test]
fn mutants_are_refused_or_harmless() {
    let mut runner = TestRunner::new(generate::config(20));
    let strategy = (generate::recipes(20), generate::choices(), any::<u64>());
    let mutations: [(&str, Mutation); 3] = [
        ("wait dropped", without_a_wait),
        ("buffer moved", with_a_buffer_moved),
        ("lines swapped", with_lines_swapped),
    ];
    let mut fates: BTreeMap<(&str, Fate), usize> = BTreeMap::new();
    for _ in 0..runner.config().cases {
        let (recipe, choices, seed) = strategy.new_tree(&mut runner).unwrap().current();
        let original = original(&recipe, &choices, seed);
        for (name, mutation) in mutations {
            let mutants = mutation(&original.compiled.program);
            // Enough of each kind, spread over the program.
            let stride = mutants.len().div_ceil(40).max(1);
            for mutant in mutants.into_iter().step_by(stride) {
                *fates
                    .entry((name, fate(&original, mutant, seed)))
                    .or_default() += 1;
            }
        }
    }
    let count = |name, fate| fates.get(&(name, fate)).copied().unwrap_or(0);
    // Every wait that `sync` writes is needed: none can be dropped.
    assert_eq!(count("wait dropped", Fate::Harmless), 0, "{fates:?}");
    assert!(200 <= count("wait dropped", Fate::Refused), "{fates:?}");
    for name in ["buffer moved", "lines swapped"] {
        assert!(
            100 <= count(name, Fate::Refused) && 20 <= count(name, Fate::Harmless),
            "{fates:?}"
        );
    }
}

/// The mutations on a simple program.
#[test]
fn mutations_change_what_they_say() {
    let recipe = generate::Recipe {
        nodes: vec![(0, 0, 0, 0), (4, 0, 0, 0), (2, 0, 1, 0)],
        n_states: 1,
        n_inputs: 1,
    };
    let program = original(&recipe, &[3], 1).compiled.program;
    let waits = |p: &Program| {
        p.schedule
            .instrs
            .values()
            .map(|data| data.after.len())
            .sum::<usize>()
    };
    assert!(0 < waits(&program));
    assert!(
        without_a_wait(&program)
            .iter()
            .all(|mutant| waits(mutant) + 1 == waits(&program))
    );
    let copies = |p: &Program| {
        p.schedule
            .instrs
            .values()
            .filter(|i| matches!(i.kind, InstrKind::Copy { .. }))
            .count()
    };
    assert!(
        with_lines_swapped(&program)
            .iter()
            .all(|m| m != &program && copies(m) == copies(&program))
    );
    assert!(
        with_a_buffer_moved(&program)
            .iter()
            .all(|m| m.plan != program.plan && m.schedule == program.schedule)
    );
}
