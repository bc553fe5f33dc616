//! Random graphs and random legal decisions: what the passes build is proved by `check`, and allocations of it do not
//! meet.

use ir::Program;
use passes::cost::Roofline;
use passes::decide::Problem;
use passes::schedule::sync;
use passes::{alloc, devices, realise};
use proptest::prelude::*;
use tests::generate;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn what_the_passes_build_is_proved(recipe in generate::recipes(40), choices in prop::collection::vec(any::<u8>(), 1..200)) {
        let device = devices::named("test").unwrap();
        let cost = Roofline::new(&device);
        let mut graph = generate::graph(&recipe);
        passes::graph::canonical::run(&mut graph);
        passes::schedule::order::run(&mut graph, Default::default());
        let graph = graph.compact();
        prop_assert_eq!(ir::verify::graph(&graph), vec![]);
        let problem = Problem::new(&graph, &device, &cost);
        let decisions = generate::decisions(&problem, &choices);
        let mut schedule = realise::lines(&problem, &decisions).expect("every op of the generator is pure");
        for variant in 0..realise::VARIANTS {
            let lives = realise::lives(&graph, &schedule, &cost, variant);
            let plan = alloc::allocate(&schedule, &lives);
            sync::run(&graph, &mut schedule, &plan);
            let program = Program { graph: graph.clone(), schedule: schedule.clone(), plan: Some(plan) };
            let findings = ir::verify::program(&program);
            prop_assert!(findings.is_empty(), "{}", ir::text::print_program_with_findings(&program, &findings));
            if let Err(findings) = ir::check::check(&program) {
                prop_assert!(false, "{}", ir::text::print_program_with_findings(&program, &findings));
            }
        }
    }
}

/// The property above tests something: most random programs have waits, reruns and swaps, and are refused without waits.
#[test]
fn random_programs_are_not_trivial() {
    use ir::schedule::Why;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let device = devices::named("test").unwrap();
    let cost = Roofline::new(&device);
    let mut runner = TestRunner::deterministic();
    let strategy = (generate::recipes(40), prop::collection::vec(any::<u8>(), 1..200));
    let (mut reruns, mut swaps, mut refused) = (0, 0, 0);
    for _ in 0..40 {
        let (recipe, choices) = strategy.new_tree(&mut runner).unwrap().current();
        let mut graph = generate::graph(&recipe);
        passes::graph::canonical::run(&mut graph);
        let graph = graph.compact();
        let problem = Problem::new(&graph, &device, &cost);
        let mut schedule = realise::lines(&problem, &generate::decisions(&problem, &choices)).unwrap();
        let plan = alloc::allocate(&schedule, &realise::lives(&graph, &schedule, &cost, 1));
        let has = |why| schedule.instrs.values().any(|data| data.why == why);
        reruns += usize::from(has(Why::Recompute));
        swaps += usize::from(has(Why::SwapIn));
        sync::run(&graph, &mut schedule, &plan);
        for instr in schedule.instrs.ids() {
            schedule.instrs[instr].after.clear();
        }
        refused += usize::from(ir::check::check(&Program { graph, schedule, plan: Some(plan) }).is_err());
    }
    assert!(20 <= reruns && 20 <= swaps && 35 <= refused, "{reruns} with reruns, {swaps} with swaps, {refused} refused");
}
