//! Properties of the parts on random problems.

use super::profile::Profile;
use super::*;
use proptest::prelude::*;

/// Random problems: nodes with one or two results, reads among what is made before, some kept, some that may not rerun.
fn problems(n_nodes: std::ops::Range<usize>) -> impl Strategy<Value = Problem> {
    let node = (0u32..20, 0u64..3, prop::collection::vec(any::<prop::sample::Index>(), 0..4), 0u32..12, 1usize..3);
    let sizes = prop::collection::vec((0u64..40, prop::bool::weighted(0.1)), 1..80);
    (prop::collection::vec(node, n_nodes), sizes, prop::collection::vec(0u64..10, 80)).prop_map(
        |(list, sizes, fixed)| {
            let mut values: Vec<Value> = vec![];
            let mut nodes: Vec<Node> = vec![];
            let n = list.len();
            for (line, (micros, scratch, reads, until, n_results)) in list.into_iter().enumerate() {
                let reads = if values.is_empty() {
                    vec![]
                } else {
                    // Mostly from nearby.
                    reads.iter().map(|index| (values.len() - 1 - index.index(values.len())) as u32).collect()
                };
                let until = match until {
                    0 => 0,
                    1 => line as u32 + 2,
                    _ => u32::MAX,
                };
                nodes.push(Node { micros: f64::from(micros), scratch, reads, until });
                for k in 0..n_results {
                    let (bytes, kept) = sizes[(3 * line + k) % sizes.len()];
                    values.push(super::Value { bytes, maker: line as u32, kept });
                }
            }
            Problem::new(nodes, values, fixed[..n].to_vec()).expect("a generated problem should be one")
        },
    )
}

proptest! {
    /// Whatever comes and goes, the kept profile is what the set means.
    #[test]
    fn profile_is_what_evaluate_says(
        problem in problems(2..40),
        toggles in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..120),
    ) {
        let mut profile = Profile::new(&problem);
        prop_assert_eq!(profile.peak(), evaluate(&problem, &[]).peak as i64);
        for (line, node) in toggles {
            let line = 1 + line.index(problem.nodes().len() - 1) as u32;
            let rerun = Rerun { line, node: node.index(line as usize) as u32 };
            if !problem.may_rerun(rerun) {
                continue;
            }
            profile.toggle(rerun);
            let evaluation = evaluate(&problem, profile.reruns());
            prop_assert_eq!(profile.peak(), evaluation.peak as i64);
            prop_assert_eq!(profile.bytes_at(profile.peak_step()), evaluation.peak as i64);
            prop_assert!((profile.micros() + problem.base_micros() - evaluation.micros).abs() < 1e-6);
        }
    }
}
