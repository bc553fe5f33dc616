//! ProTrain as a planner: turns its [`Layout`]s into [`Decisions`], and makes its drafts.
//!
//! Before: a problem. After: drafts, one or a few for each of a ladder of capacities. The four
//! numbers are searched with estimated figures of blocks and chunks ([`protrain`]). The real bytes
//! and times are measured later, when drafts are judged. So a formula with an error of some per
//! cent only moves a rung of the ladder. No rung depends on the budget.
//!
//! A swapped block sends everything that its forward leaves for its backward to the host, including
//! its input. A recomputed block keeps its input and computes the rest again. Values that cannot be
//! computed again stay. A chunk that is not persistent lives on the host with its optimizer states,
//! arrives in one copy for each pass, and is updated on the host. A cached chunk stays from forward
//! to backward (ProTrain, sections 3.1 and 3.2).

use super::chunks::{self, Packing};
use super::figures;
use super::record::{Draft, Wanted, propose};
use crate::cost::is_product;
use crate::plan::blocks::Block;
use crate::plan::tuning::LAYOUT_SHARES;
use crate::plan::{Decisions, Gap, Means, Problem, Reason};
use ir::{Graph, Node, Phase, State, Table, Value};
use papers::protrain::{self, Activation, Config, Instance, Layout, Outline};
use std::collections::BTreeSet;

/// A planner's view of a model: its chunks, and the figures of blocks and chunks.
pub struct Model {
    packing: Packing,
    instance: Instance,
}

impl Model {
    /// The model of a problem; `None` if it has no parameters.
    pub fn new(problem: &Problem<'_>) -> Option<Model> {
        let packing = chunks::grid_search(
            &chunks::sizes(problem.graph, &problem.blocks),
            chunks::RANGE,
        )?;
        let instance = figures::instance(problem, &problem.blocks, &packing, host_rate(problem))?;
        Some(Model { packing, instance })
    }

    /// The configurations of a ladder of `rungs` capacities, largest first, each once.
    pub fn ladder(&self, rungs: usize) -> impl Iterator<Item = Config> {
        let n_chunks = self.instance.chunks.len();
        let keep = protrain::memory(
            &self.instance,
            &Config {
                n_persist: n_chunks,
                ..Config::default()
            },
        );
        let outlines = protrain::outlines(&self.instance);
        let least = self.least(&outlines).min(keep).max(1);
        let ratio = least as f64 / keep as f64;
        let mut seen = BTreeSet::new();
        (0..rungs).filter_map(move |rung| {
            let share = ratio.powf(rung as f64 / (rungs.max(2) - 1) as f64);
            // The last rung is exactly the least, even if the power is rounded.
            let capacity = ((keep as f64 * share).ceil() as u64).max(least);
            let instance = Instance {
                capacity,
                ..self.instance.clone()
            };
            let (config, _) = protrain::search_among(&instance, &outlines)?;
            seen.insert(config).then_some(config)
        })
    }

    /// The least memory that any configuration takes.
    fn least(&self, outlines: &[Vec<Outline>]) -> u64 {
        let (n_buffer, _) = self.instance.buffers(0);
        let memory =
            |outline: &Outline| protrain::total(&self.instance, outline.activations, 0, n_buffer);
        outlines.iter().flatten().map(memory).min().unwrap_or(0)
    }

    /// The decisions of a configuration.
    pub fn decisions(&self, problem: &Problem<'_>, config: &Config) -> Decisions {
        decisions(
            problem,
            &problem.blocks,
            &self.packing,
            &config.layout(&self.instance),
        )
    }
}

/// Drafts for a ladder of `rungs` capacities, as far as they are wanted; none for a graph without
/// parameters.
pub fn drafts(problem: &Problem<'_>, rungs: usize, wanted: &Wanted) -> Vec<Draft> {
    let mut drafts = vec![];
    let Some(model) = Model::new(problem) else {
        return drafts;
    };
    for config in model.ladder(rungs) {
        propose(problem, &model.decisions(problem, &config), &mut drafts);
        if wanted.end(problem, &drafts).is_some() {
            break;
        }
    }
    drafts
}

/// Drafts that ProTrain's structure cannot express. Every block computes again everything that
/// needs no product (activations, norms): most of its bytes, and little of its time. The first
/// blocks swap their other values, and the later blocks keep them. Chunks are as in ProTrain.
/// Drafts are made for several shares of both.
pub fn parts(problem: &Problem<'_>) -> Vec<Draft> {
    let mut drafts = vec![];
    let Some(Model { packing, instance }) = Model::new(problem) else {
        return drafts;
    };
    let (n_blocks, n_chunks) = (instance.n_repeated(), instance.chunks.len());
    let shares = |n: usize| {
        (0..=LAYOUT_SHARES)
            .map(move |k| n * k / LAYOUT_SHARES)
            .collect::<BTreeSet<usize>>()
    };
    for n_persist in shares(n_chunks) {
        for n_swap in shares(n_blocks) {
            let (n_buffer, _) = instance.buffers(n_persist);
            let config = Config {
                n_persist,
                n_buffer,
                ..Config::default()
            };
            let mut layout = config.layout(&instance);
            for activation in layout.activation.iter_mut().flatten().take(n_swap) {
                *activation = Activation::Swap;
            }
            let decisions = plan(problem, &problem.blocks, &packing, &layout, true);
            propose(problem, &decisions, &mut drafts);
        }
    }
    drafts
}

/// Bytes of states and gradients that the host updates in a µs, as [`figures::instance`] counts
/// them.
fn host_rate(problem: &Problem<'_>) -> f64 {
    let graph = problem.graph;
    let (mut bytes, mut micros) = (0u64, 0.0);
    for &node in problem.groups.values().flat_map(|group| &group.updates) {
        // Parameters and moments, which the update changes, and gradients, which have the size of
        // the parameters.
        let states = states_of(problem, node);
        let of = |param: bool| {
            let states = states
                .iter()
                .filter(move |&&s| (graph.states[s].kind == ir::StateKind::Param) == param);
            states
                .map(|&s| graph.values[graph.states[s].before].ty.bytes())
                .sum::<u64>()
        };
        bytes += 2 * of(true) + of(false);
        micros += problem.cost.host(graph, node);
    }
    // Without updates, no rate matters.
    if 0.0 < micros {
        bytes as f64 / micros
    } else {
        1.0
    }
}

/// The states that a node updates.
fn states_of(problem: &Problem<'_>, node: Node) -> Vec<State> {
    let mut states: Vec<State> = problem.graph.nodes[node]
        .outputs
        .iter()
        .flat_map(|&value| &problem.renews[value])
        .copied()
        .collect();
    states.sort_unstable();
    states
}

/// The decisions of a layout of these blocks and chunks.
pub fn decisions(
    problem: &Problem<'_>,
    blocks: &[Block],
    packing: &Packing,
    layout: &Layout,
) -> Decisions {
    plan(problem, blocks, packing, layout, false)
}

/// The same. With `parts`, repeated blocks also compute again everything that needs no product.
fn plan(
    problem: &Problem<'_>,
    blocks: &[Block],
    packing: &Packing,
    layout: &Layout,
    parts: bool,
) -> Decisions {
    let mut block_of: Table<Node, Option<usize>> = Table::filled(problem.graph.nodes.len(), None);
    for (i, block) in blocks.iter().enumerate() {
        for &node in block.forward.iter().chain(&block.backward) {
            block_of[node] = Some(i);
        }
    }
    let mut decisions = Decisions::default();
    activations(problem, &block_of, layout, parts, &mut decisions);
    states(problem, &block_of, blocks, packing, layout, &mut decisions);
    decisions
}

/// Cuts the values that swapped and recomputed blocks leave for their backward.
fn activations(
    problem: &Problem<'_>,
    block_of: &Table<Node, Option<usize>>,
    layout: &Layout,
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
            let means = match owner.and_then(|owner| layout.activation[owner]) {
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

/// Lets chunks that are not persistent live on the host.
fn states(
    problem: &Problem<'_>,
    block_of: &Table<Node, Option<usize>>,
    blocks: &[Block],
    packing: &Packing,
    layout: &Layout,
    decisions: &mut Decisions,
) {
    let graph = problem.graph;
    for (c, chunk) in packing.chunks.iter().enumerate() {
        if layout.persistent[c] {
            continue;
        }
        let params: Vec<State> = blocks[chunk.blocks.clone()]
            .iter()
            .flat_map(|b| &b.states)
            .copied()
            .collect();
        for &state in &params {
            decisions.hosted.insert(state, problem.hosted_reason(state));
            update_on_host(problem, state, decisions);
            // A cached chunk stays on the device until its backward.
            let value = graph.states[state].before;
            for (gap, after) in stage_changes(problem, block_of, blocks.len(), value) {
                let stays = layout.cached[c] && after != Phase::Optimizer;
                if !stays {
                    let reason = problem.hosted_reason(state);
                    let cut = (Means::Swap, reason);
                    decisions.cuts.insert(Gap { value, gap }, cut);
                }
            }
        }
        if params.len() > 1 {
            decisions.chunks.push(params);
        }
    }
}

/// Lets the host update a state, with the moments that the update needs. States without an update
/// by the optimizer are left out.
fn update_on_host(problem: &Problem<'_>, state: State, decisions: &mut Decisions) {
    let graph = problem.graph;
    let update = graph.def_node(graph.root(graph.states[state].after));
    let Some(update) = update.filter(|&node| graph.nodes[node].phase == Phase::Optimizer) else {
        return;
    };
    decisions.on_host.insert(update);
    for state in states_of(problem, update) {
        if graph.states[state].kind == ir::StateKind::Moment {
            decisions.hosted.insert(state, problem.hosted_reason(state));
        }
    }
}

/// The gaps between uses of a value in different passes or blocks, with the phase after each. The
/// last block's backward directly follows its forward, so for this block both are one pass.
fn stage_changes(
    problem: &Problem<'_>,
    block_of: &Table<Node, Option<usize>>,
    n_blocks: usize,
    value: Value,
) -> impl Iterator<Item = (u32, Phase)> {
    let stage = move |at: u32| {
        let node = problem.lines[at as usize];
        let last = block_of[node] == Some(n_blocks - 1);
        match problem.graph.nodes[node].phase {
            Phase::Backward if last => (Phase::Forward, block_of[node]),
            phase => (phase, block_of[node]),
        }
    };
    let pairs = (0..).zip(problem.uses[value].windows(2));
    pairs.filter_map(move |(gap, pair)| {
        let (before, after) = (stage(pair[0]), stage(pair[1]));
        (before != after).then_some((gap, after.0))
    })
}
