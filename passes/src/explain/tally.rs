//! Decisions by kind, and in words.

use crate::plan::machine::beyond;
use crate::plan::{Decisions, Gap, Means, Problem};
use ir::graph::Def;
use ir::{Table, Value};
use std::collections::BTreeSet;

/// Decisions by kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// Values that stay on the device over at least one gap, all of their life.
    pub kept: Count,
    /// Gaps over which a value waits on the host.
    pub swap: Count,
    /// Gaps after which a value is computed again.
    pub recompute: Count,
    /// States that live on the host.
    pub hosted: Count,
}

/// How many, and how many bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Count {
    /// How many.
    pub count: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Count {
    fn add(&mut self, bytes: u64) {
        self.count += 1;
        self.bytes += bytes;
    }
}

/// Counts what was decided.
pub fn tally(problem: &Problem<'_>, decisions: &Decisions) -> Tally {
    let graph = problem.graph;
    let mut tally = Tally::default();
    let hosted = hosted_values(problem, decisions);
    let mut cut = Table::filled(graph.values.len(), false);
    for (gap, (means, _)) in &decisions.cuts {
        cut[gap.value] = true;
        // Not the reason's bytes: those are of all that was decided together.
        let bytes = graph.values[gap.value].ty.bytes();
        match (means, hosted.contains(&gap.value)) {
            // It is counted among the states on the host.
            (Means::Swap, true) => {}
            (Means::Swap, false) => tally.swap.add(bytes),
            (Means::Recompute, _) => tally.recompute.add(bytes),
        }
    }
    for gap in decisions.solved(problem).keys() {
        cut[gap.value] = true;
        tally.recompute.add(graph.values[gap.value].ty.bytes());
    }
    for &state in decisions.hosted.keys() {
        tally
            .hosted
            .add(graph.values[graph.states[state].before].ty.bytes());
    }
    for (value, data) in graph
        .values
        .iter()
        .filter(|&(value, _)| graph.root(value) == value && !cut[value])
        .filter(|(value, _)| !hosted.contains(value))
    {
        let bytes = data.ty.bytes();
        let kept = match data.def {
            Def::State(_) => true,
            Def::Input(_) | Def::Node(..) => problem.accesses[value]
                .windows(2)
                .any(|pair| pair[0] + 1 < pair[1]),
        };
        if kept && 0 < bytes {
            tally.kept.add(bytes);
        }
    }
    tally
}

/// The values of states that live on the host, before and after their updates. Such a state comes
/// for its uses, perhaps more than once: these copies are no swaps of their own.
pub fn hosted_values(problem: &Problem<'_>, decisions: &Decisions) -> BTreeSet<Value> {
    let graph = problem.graph;
    let states = decisions.hosted.keys().map(|&state| &graph.states[state]);
    states
        .flat_map(|state| [state.before, graph.root(state.after)])
        .collect()
}

/// What was decided for a value, in words.
pub fn decided(decisions: &Decisions, problem: &Problem<'_>, value: Value) -> String {
    let (mut swaps, mut reruns) = (0, 0);
    for (_, (means, _)) in decisions.cuts.range(
        Gap { value, gap: 0 }..=Gap {
            value,
            gap: u32::MAX,
        },
    ) {
        match means {
            Means::Swap => swaps += 1,
            Means::Recompute => reruns += 1,
        }
    }
    reruns += decisions
        .solved(problem)
        .keys()
        .filter(|gap| gap.value == value)
        .count() as u32;
    let times = |n: u32, what: &str| match n {
        0 => None,
        1 => Some(what.to_string()),
        n => Some(format!("{what} {n} times")),
    };
    let is_hosted = hosted_values(problem, decisions).contains(&problem.graph.root(value));
    let hosted = is_hosted.then(|| {
        swaps = 0;
        format!("lives on the {}", beyond(problem.device).name())
    });
    let what: Vec<String> = [hosted, times(swaps, "swapped"), times(reruns, "recomputed")]
        .into_iter()
        .flatten()
        .collect();
    if what.is_empty() {
        "kept".into()
    } else {
        what.join(", ")
    }
}
