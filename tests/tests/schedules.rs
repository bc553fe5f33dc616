//! No decision of a planner can change results: random graphs with random legal decisions become
//! programs that `check` proves, and that compute the graph's results on the machine, threaded and
//! shuffled, bit for bit.

use codegen::Data;
use ir::schedule::{InstrKind, MemorySpace, Why};
use lighterage_tests::run::Peaks;
use lighterage_tests::{forced, generate, run};
use passes::cost::Roofline;
use passes::decide::Problem;
use passes::schedule::lives::{Variant, lives};
use passes::{alloc, devices, realise};
use proptest::prelude::*;
use runtime::Options;

proptest! {
    #![proptest_config(generate::config(150))]
    #[test]
    fn decisions_change_no_bit(
        recipe in generate::recipes(40),
        choices in generate::choices(),
        seed: u64,
        // The share of what leaves the device that the host holds, if there is a disk.
        share in proptest::option::of(0.0..1.0),
    ) {
        let mut device = devices::named("test").unwrap();
        device.disk = share.map(|_: f64| forced::disk());
        let cost = Roofline::new(&device);
        let traced = generate::graph(&recipe);
        prop_assert_eq!(ir::verify::graph(&traced), vec![]);
        let mut graph = traced.clone();
        passes::graph::canonical::run(&mut graph);
        passes::schedule::order::run(&mut graph, Default::default());
        let graph = graph.compact();
        prop_assert_eq!(ir::verify::graph(&graph), vec![]);

        let start: Data = generate::states(&traced, seed);
        let feeds: Vec<_> = (0..3)
            .map(|step| generate::feed(&traced, seed, step))
            .collect();
        let expected = run::plain(&traced, &start, &feeds);
        let still = run::plain(&traced, &start, &vec![feeds[0].clone(); 3]);
        let problem = Problem::new(&graph, &device, &cost);
        let decisions = generate::decisions(&problem, &choices);
        let problem = match share {
            Some(share) => forced::with_little_host(problem, &decisions, share),
            None => problem,
        };
        // An empty tensor has a place, which nothing touches.
        let exact = graph.values.values().all(|data| 0 < data.ty.bytes());
        for variant in Variant::ALL {
            let compiled = forced::finish(&problem, decisions.clone(), variant);
            let compiled = compiled.map_err(|text| {
                TestCaseError::fail(format!(
                    "variant \
                {variant:?}:\n{text}"
                ))
            })?;
            let artifact = codegen::emit(&compiled, &start, codegen::Target::host()).unwrap();
            let text = || ir::text::print_program(&compiled.program);
            for options in [
                Options::default(),
                run::shuffled(seed),
                run::shuffled(seed ^ 1),
            ] {
                let (outcome, measured) = run::compiled(&artifact, options, &feeds).unwrap();
                prop_assert!(
                    outcome == expected,
                    "variant {variant:?}, {options:?}:\n{}",
                    text()
                );
                let planned = Peaks::planned(&artifact);
                prop_assert_eq!(planned.device, compiled.planned_peak);
                prop_assert!(measured.within(&planned), "{}", text());
                prop_assert!(
                    !exact || measured == planned,
                    "{measured:?} measured, {planned:?} planned:\n{}",
                    text()
                );
                // Inputs are written and outputs read while the previous step still runs.
                let outcome = run::overlapped(&artifact, options, &feeds).unwrap();
                prop_assert!(
                    outcome == expected,
                    "overlapped, variant {variant:?}, \
                    {options:?}:\n{}",
                    text()
                );
                // Steps that are launched together overlap.
                let outcome = run::together(&artifact, options, &feeds[0], 3).unwrap();
                prop_assert_eq!(outcome.outputs.last(), still.outputs.last(), "{}", text());
                prop_assert!(
                    outcome.states == still.states,
                    "variant {variant:?}, \
                    {options:?}:\n{}",
                    text()
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(generate::config(300))]
    #[test]
    fn graph_passes_change_no_bit(recipe in generate::recipes(60), seed: u64) {
        let traced = generate::graph(&recipe);
        let start = generate::states(&traced, seed);
        let feeds: Vec<_> = (0..2)
            .map(|step| generate::feed(&traced, seed, step))
            .collect();
        let expected = run::plain(&traced, &start, &feeds);
        let mut canonical = traced.clone();
        passes::graph::canonical::run(&mut canonical);
        prop_assert_eq!(ir::verify::graph(&canonical), vec![]);
        prop_assert!(
            run::plain(&canonical, &start, &feeds) == expected,
            "{}",
            ir::text::print_graph(&canonical)
        );
        let mut simple = canonical.clone();
        passes::graph::simplify::run(&mut simple);
        prop_assert_eq!(ir::verify::graph(&simple), vec![]);
        prop_assert!(
            run::plain(&simple, &start, &feeds) == expected,
            "{}",
            ir::text::print_graph(&simple)
        );
        use passes::schedule::order::{self, Update};
        for update in [Update::Backward, Update::After] {
            let mut ordered = canonical.clone();
            order::run(&mut ordered, update);
            prop_assert_eq!(ir::verify::graph(&ordered), vec![]);
            prop_assert!(
                run::plain(&ordered, &start, &feeds) == expected,
                "{}",
                ir::text::print_graph(&ordered)
            );
        }
    }
}

proptest! {
    #![proptest_config(generate::config(100))]
    /// Buffers that live on where a pool has room raise no peak, and live no longer than until
    /// their copies have ended.
    #[test]
    fn longer_lives_raise_no_peak(recipe in generate::recipes(40), choices in generate::choices()) {
        let device = devices::named("test").unwrap();
        let cost = Roofline::new(&device);
        let mut graph = generate::graph(&recipe);
        passes::graph::canonical::run(&mut graph);
        let graph = graph.compact();
        let problem = Problem::new(&graph, &device, &cost);
        let schedule = realise::lines(&problem, &generate::decisions(&problem, &choices)).unwrap();
        let [most, free, played] = Variant::ALL.map(|variant| lives(&problem, &schedule, variant));
        let least = alloc::lifetimes(&schedule);
        for buffer in schedule.buffers.ids() {
            prop_assert_eq!(free[buffer].start, least[buffer].start);
            prop_assert!(least[buffer].end <= free[buffer].end);
            prop_assert!(free[buffer].end <= most[buffer].end);
            prop_assert_eq!(played[buffer].start, least[buffer].start);
            prop_assert!(least[buffer].end <= played[buffer].end);
        }
        for (pool, data) in schedule.pools.iter() {
            let peak = |lives| alloc::live_peak(&schedule, lives, pool);
            // Without a limit, the host has room for all of them.
            if data.space == MemorySpace::Host {
                prop_assert_eq!(peak(&free), peak(&most));
            } else {
                prop_assert_eq!(peak(&free), peak(&least));
                let more = peak(&least) + peak(&least) / 100;
                prop_assert!(peak(&least) <= peak(&played) && peak(&played) <= more);
            }
        }
    }
}

/// The tests above are not trivial: most random programs have waits, reruns, swaps, scratch, hosted
/// states, results in place; and they are refused without waits.
#[test]
fn random_programs_are_not_trivial() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let device = devices::named("test").unwrap();
    let cost = Roofline::new(&device);
    let mut runner = TestRunner::deterministic();
    let strategy = (generate::recipes(40), generate::choices());
    let mut count = std::collections::BTreeMap::new();
    for _ in 0..40 {
        let (recipe, choices) = strategy.new_tree(&mut runner).unwrap().current();
        let mut graph = generate::graph(&recipe);
        passes::graph::canonical::run(&mut graph);
        let graph = graph.compact();
        let problem = Problem::new(&graph, &device, &cost);
        let mut program = forced::finish(
            &problem,
            generate::decisions(&problem, &choices),
            Variant::WhereFree,
        )
        .unwrap()
        .program;
        let schedule = &program.schedule;
        let mut note =
            |what: &'static str, has: bool| *count.entry(what).or_insert(0) += usize::from(has);
        for why in [
            Why::Recompute,
            Why::SwapOut,
            Why::SwapIn,
            Why::Gather,
            Why::Offload,
            Why::Update,
        ] {
            note(
                why.name(),
                schedule.instrs.values().any(|data| data.why == why),
            );
        }
        let states_in = |buffer| {
            let states = schedule
                .entry
                .iter()
                .filter(|(_, loc)| loc.buffer == buffer);
            states.count()
        };
        let gathers_several = |i: &ir::schedule::InstrData| match i.kind {
            InstrKind::Copy { src, .. } => i.why == Why::Gather && states_in(src.buffer) > 1,
            _ => false,
        };
        note("chunk", schedule.instrs.values().any(gathers_several));
        note("on the host", schedule.streams.len() == 4);
        let runs = |is: fn(&InstrKind) -> bool| schedule.instrs.values().any(|data| is(&data.kind));
        note(
            "scratch",
            runs(|kind| {
                matches!(
                    kind,
                    InstrKind::Run {
                        scratch: Some(_),
                        ..
                    }
                )
            }),
        );
        note(
            "in place",
            runs(|kind| match kind {
                InstrKind::Run { args, outs, .. } => outs.iter().any(|out| args.contains(out)),
                InstrKind::Copy { .. } => false,
            }),
        );
        note(
            "previous",
            schedule
                .instrs
                .values()
                .flat_map(|data| &data.after)
                .any(|dep| dep.previous),
        );
        for instr in program.schedule.instrs.ids() {
            program.schedule.instrs[instr].after.clear();
        }
        note("refused", ir::check::check(&program).is_err());
    }
    assert!(count.values().all(|&n| 10 <= n), "{count:?}");
}
