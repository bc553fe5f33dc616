//! The decisions about blocks' activations: swapped, computed again, or kept.
//!
//! Before: the blocks of a problem, and a decision for each. After: cuts of the values that the
//! blocks' forwards leave for their backwards (ProTrain, section 3.1.2). The input of a block that
//! is computed again stays, and so does what cannot be computed again.

use crate::cost::is_product;
use crate::plan::{Decisions, Gap, Means, Problem, Reason};
use ir::{Graph, Node, Phase, Table, Value};
use papers::protrain::Activation;
use std::collections::BTreeSet;

/// Cuts the values that swapped and recomputed blocks leave for their backward. With `parts`,
/// repeated blocks also compute again everything that needs no product.
pub(super) fn cut(
    problem: &Problem<'_>,
    block_of: &Table<Node, Option<usize>>,
    activation: &[Option<Activation>],
    parts: bool,
    decisions: &mut Decisions,
) {
    let graph = problem.graph;
    let mut at_hand = AtHand {
        graph,
        block_of,
        kept: Table::filled(graph.values.len(), false),
        again: Table::filled(graph.values.len(), false),
    };
    for &node in &problem.lines {
        let data = &graph.nodes[node];
        let (Some(block), Phase::Forward) = (block_of[node], data.phase) else {
            continue;
        };
        let cheap = !parts || !is_product(graph, node);
        let possible = cheap && at_hand.can_rerun(node, block);
        for &value in &data.outputs {
            at_hand.again[value] = possible;
            let Some(gap) = forward_to_backward(problem, value) else {
                continue;
            };
            let (owner, is_input) = owner(problem, block_of, value, block);
            let means = match owner.and_then(|owner| activation[owner]) {
                Some(_) if parts && !is_input && possible => Some(Means::Recompute),
                Some(Activation::Swap) => Some(Means::Swap),
                Some(Activation::Recompute) if !is_input && possible => Some(Means::Recompute),
                _ => None,
            };
            at_hand.kept[value] = means != Some(Means::Recompute);
            let bytes = graph.values[value].ty.bytes();
            if let Some(means) = means.filter(|_| bytes > 0) {
                let reason = Reason {
                    bytes,
                    swap: Some(2.0 * problem.cost.link(bytes)),
                    recompute: possible.then(|| problem.cost.run(graph, node)),
                    line: problem.accesses[value][gap],
                };
                let gap = gap as u32;
                decisions.cuts.insert(Gap { value, gap }, (means, reason));
            }
        }
    }
}

/// The values that are available to a backward.
struct AtHand<'a> {
    graph: &'a Graph,
    block_of: &'a Table<Node, Option<usize>>,
    /// Values that stay, or come back.
    kept: Table<Value, bool>,
    /// Values that the block that computes them can compute again.
    again: Table<Value, bool>,
}

impl AtHand<'_> {
    /// True if the backward of `block` can run a node of the forward again.
    fn can_rerun(&self, node: Node, block: usize) -> bool {
        let data = &self.graph.nodes[node];
        let mut inputs = data.inputs.iter().map(|&input| self.graph.root(input));
        data.op.is_pure() && inputs.all(|root| self.is_available(root, block))
    }

    fn is_available(&self, root: Value, block: usize) -> bool {
        let graph = self.graph;
        let Some(def) = graph.def_node(root) else {
            return true;
        };
        let given = |&input: &Value| graph.def_node(graph.root(input)).is_none();
        let alone = || graph.nodes[def].inputs.iter().all(given);
        self.kept[root] || self.again[root] && (self.block_of[def] == Some(block) || alone())
    }
}

/// The gap between the last access of a value in forward and the first in backward.
fn forward_to_backward(problem: &Problem<'_>, value: Value) -> Option<usize> {
    let phase = |at: u32| problem.graph.nodes[problem.lines[at as usize]].phase;
    let mut gaps = problem.accesses[value].windows(2);
    gaps.position(|pair| phase(pair[0]) == Phase::Forward && phase(pair[1]) == Phase::Backward)
}

/// The block that decides about a value that `block` computes, and whether the value is an input of
/// that block. An input belongs to the block that reads it. A value that several blocks read
/// belongs to no block, and stays.
fn owner(
    problem: &Problem<'_>,
    block_of: &Table<Node, Option<usize>>,
    value: Value,
    block: usize,
) -> (Option<usize>, bool) {
    let readers = problem.uses[value]
        .iter()
        .map(|&at| problem.lines[at as usize]);
    let others: BTreeSet<usize> = readers
        .filter(|&reader| problem.graph.nodes[reader].phase == Phase::Forward)
        .filter_map(|reader| block_of[reader])
        .filter(|&reader| reader != block)
        .collect();
    match (others.len(), others.first()) {
        (0, _) => (Some(block), false),
        (1, Some(&reader)) => (Some(reader), true),
        _ => (None, false),
    }
}
