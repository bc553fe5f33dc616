//! The whole pipeline on random graphs at budgets from generous to infeasible: the planned peak is
//! at most the budget and equals the bytes that the machine touches; a lower budget never plans
//! more; the bits stay the same; and below the smallest budget there is no plan. A plan for one
//! budget alone is the same as with the plans of all budgets.

use ir::Graph;
use lighterage_tests::run::Peaks;
use lighterage_tests::{generate, run};
use passes::cost::Roofline;
use passes::decide::Extent;
use passes::devices;
use passes::pipeline::{self, Budget, Compiled, Error, Options};
use proptest::prelude::*;

fn compile(graph: &Graph, budget: Budget) -> Result<Compiled, Error> {
    compile_to(graph, budget, Extent::Curve)
}

fn compile_to(graph: &Graph, budget: Budget, extent: Extent) -> Result<Compiled, Error> {
    let device = devices::named("test").unwrap();
    let options = Options {
        budget,
        extent,
        ..Options::default()
    };
    pipeline::compile(
        graph.clone(),
        &options,
        &device,
        &Roofline::new(&device),
        &mut |_| (),
    )
}

proptest! {
    #![proptest_config(generate::config(40))]
    #[test]
    fn budgets_hold_and_change_no_bit(recipe in generate::recipes(50), seed: u64) {
        let graph = generate::graph(&recipe);
        let exact = graph.values.values().all(|data| 0 < data.ty.bytes());
        let start = generate::states(&graph, seed);
        let feeds: Vec<_> = (0..3)
            .map(|step| generate::feed(&graph, seed, step))
            .collect();
        let expected = run::plain(&graph, &start, &feeds);
        let roomy =
            compile(&graph, Budget::Share(1.0)).map_err(|e| TestCaseError::fail(e.to_string()))?;
        let (keep, smallest) = (roomy.decided.keep_peak, roomy.decided.smallest.unwrap());
        prop_assert!(smallest <= keep);
        let mut higher = keep;
        const BUDGETS: u64 = 4;
        for k in 0..=BUDGETS {
            let budget = smallest + (keep - smallest) * (BUDGETS - k) / BUDGETS;
            let compiled = compile(&graph, Budget::Bytes(budget))
                .map_err(|e| TestCaseError::fail(e.to_string()))?;
            let peak = compiled.planned_peak;
            prop_assert!(
                peak <= budget && peak <= higher,
                "{peak} planned for {budget}, {higher} \
                for more"
            );
            prop_assert!(
                compiled.live_peak <= peak,
                "{} alive in {peak}",
                compiled.live_peak
            );
            higher = peak;
            let plan = compile_to(&graph, Budget::Bytes(budget), Extent::Plan);
            let plan = plan.map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert!(
                plan.program == compiled.program,
                "the plan alone is another than that \
                of a curve"
            );
            let (bound, micros) = (
                compiled.certificate.as_ref().unwrap().lower_bound,
                compiled.timeline.micros,
            );
            prop_assert!(
                bound <= micros * (1.0 + 1e-9),
                "no plan beats {bound} us, this takes \
                {micros}"
            );
            let artifact = codegen::emit(&compiled, &start, codegen::Target::host()).unwrap();
            for options in [runtime::Options::default(), run::shuffled(seed)] {
                let (outcome, measured) = run::compiled(&artifact, options, &feeds).unwrap();
                prop_assert!(
                    outcome == expected,
                    "{options:?}:\n\
                    {}",
                    ir::text::print_program(&compiled.program)
                );
                let planned = Peaks::planned(&artifact);
                prop_assert_eq!(planned.device, peak);
                prop_assert!(
                    measured == planned || !exact && measured.within(&planned),
                    "{measured:?} measured, {planned:?} planned"
                );
            }
        }
        prop_assert_eq!(
            higher,
            smallest,
            "the smallest budget should be met exactly"
        );
        for extent in [Extent::Curve, Extent::Plan] {
            match compile_to(&graph, Budget::Bytes(smallest - 1), extent) {
                Err(Error::Infeasible(infeasible)) => {
                    prop_assert_eq!(infeasible.smallest, smallest)
                }
                other => prop_assert!(
                    false,
                    "{:?} fits below the smallest \
                    budget",
                    other.map(|c| c.planned_peak)
                ),
            }
        }
    }
}
