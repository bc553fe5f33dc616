//! ProTrain as a planner: turns its [`Layout`]s into [`Decisions`], and makes its drafts.
//!
//! Before: a problem. After: drafts, one or a few for each configuration that no other one beats in
//! memory and time. The four numbers are searched with figures of blocks and chunks
//! ([`protrain`]). The real bytes and times are measured later, when drafts are judged. All
//! configurations that are the answer for some budget are proposed, so the search ends at the
//! budget itself, and yet no draft depends on it.
//!
//! A swapped block sends everything that its forward leaves for its backward to the host, including
//! its input. A recomputed block keeps its input and computes the rest again. Values that cannot be
//! computed again stay. A chunk that is not persistent lives on the host with its optimizer states,
//! arrives in one copy for each pass, its gradients leave in one copy, and it is updated on the
//! host. (The planner `auto` sends each gradient alone.) A cached chunk stays from forward
//! to backward (ProTrain, sections 3.1 and 3.2).

use super::activations;
use super::chunks::{self, Packing};
use super::figures;
use super::record::{Draft, Wanted, propose};
use crate::plan::blocks::Block;
use crate::plan::tuning::{FAR_TOO_LARGE, LAYOUT_HOSTS, LAYOUT_SHARES};
use crate::plan::{Decisions, Gap, Means, Problem};
use ir::{Node, Phase, State, Table, Value};
use papers::protrain::{
    self, Activation, Config, ConfigError, Fixed, Instance, Layout, Predicted, Times,
};
use std::collections::BTreeSet;

/// A configuration in the paper's words, with the numbers that the paper derives before its search.
#[derive(Clone, PartialEq, Debug)]
pub struct Described {
    /// `n_persist`, `n_buffer`, `n_swap`, `n_ckpt`.
    pub config: Config,
    /// `N_chunk`.
    pub n_chunk: usize,
    /// The size of a chunk's buffer, bytes of parameters.
    pub chunk_bytes: u64,
    /// The share of the chunks that no parameter fills, in percent.
    pub waste_percent: f64,
    /// `N_block`.
    pub n_block: usize,
    /// `N_interval`; `usize::MAX` if no number of blocks hides a swap.
    pub n_interval: usize,
    /// A letter for each block, first to last: S swaps, R is computed again, K is kept.
    pub blocks: String,
    /// A letter for each chunk, first to last: P is persistent, B stays in its buffer from forward
    /// to backward, `.` is fetched for each.
    pub chunks: String,
    /// Times by the formulas (Eqs 2 to 7).
    pub times: Times,
    /// Peak memory by the formulas (Eqs 8 to 11), bytes.
    pub memory: u64,
}

/// The letter of a block.
fn letter(activation: &Activation) -> char {
    match activation {
        Activation::Keep => 'K',
        Activation::Swap => 'S',
        Activation::Recompute => 'R',
    }
}

/// The description of a plan that ProTrain's layout made; `None` for other decisions.
pub fn described(problem: &Problem<'_>, decisions: &Decisions) -> Option<Described> {
    let config = decisions.layout?;
    let gradients = match decisions.gradients_by_chunk {
        true => Gradients::ByChunk,
        false => Gradients::Alone,
    };
    Model::new(problem, gradients).map(|model| model.describe(&config))
}

/// How the gradients for updates on the host go there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gradients {
    /// A chunk in one copy, as in ProTrain.
    ByChunk,
    /// Each when it is complete. This takes less memory, and the updates begin earlier.
    Alone,
}

/// A planner's view of a model: its chunks, and the figures of blocks and chunks.
pub struct Model {
    packing: Packing,
    instance: Instance,
}

impl Model {
    /// The model of a problem; `None` if it has no parameters.
    pub fn new(problem: &Problem<'_>, gradients: Gradients) -> Option<Model> {
        let sizes = chunks::sizes(problem.graph, &problem.blocks);
        let packing = chunks::grid_search(&sizes, chunks::range(&sizes))?;
        let instance = figures::instance(problem, &problem.blocks, &packing, host_rate(problem))?;
        Some(Model {
            packing,
            instance: Instance {
                gradients_by_chunk: gradients == Gradients::ByChunk,
                ..instance
            },
        })
    }

    /// The configurations that no other one beats in memory and time by the formulas, most memory
    /// first; of more than `most`, those for `most` capacities from the largest to the smallest
    /// memory, evenly spaced by ratio.
    pub fn ladder(&self, fixed: &Fixed, most: usize) -> Vec<(Config, Predicted)> {
        let front = protrain::front(&self.instance, fixed);
        let (Some(first), Some(last)) = (front.first(), front.last()) else {
            return front;
        };
        if front.len() <= most {
            return front;
        }
        let (keep, least) = (first.1.memory.max(1), last.1.memory);
        let ratio = least as f64 / keep as f64;
        let mut ladder: Vec<(Config, Predicted)> = vec![];
        for rung in 0..most {
            let share = ratio.powf(rung as f64 / (most.max(2) - 1) as f64);
            // The last rung is exactly the least, even if the power is rounded.
            let capacity = ((keep as f64 * share).ceil() as u64).max(least);
            let fits = front.partition_point(|(_, predicted)| capacity < predicted.memory);
            if ladder.last().is_none_or(|last| last.0 != front[fits].0) {
                ladder.push(front[fits]);
            }
        }
        ladder
    }

    /// Checks that the model has configurations with these numbers.
    ///
    /// # Errors
    ///
    /// The first number that none has.
    pub fn check(&self, fixed: &Fixed) -> Result<(), ConfigError> {
        fixed.check(&self.instance)
    }

    /// The figures that are searched.
    pub fn instance(&self) -> &Instance {
        &self.instance
    }

    /// The decisions of any layout, not only of one that four numbers describe.
    pub fn carried_out(&self, problem: &Problem<'_>, layout: &Layout) -> Decisions {
        decisions(problem, &problem.blocks, &self.packing, layout)
    }

    /// A configuration in the paper's words.
    pub fn describe(&self, config: &Config) -> Described {
        let layout = config.layout(&self.instance);
        let blocks = layout.activation.iter().flatten();
        let chunk = |c: usize| match (layout.persistent[c], layout.cached[c]) {
            (true, _) => 'P',
            (false, true) => 'B',
            (false, false) => '.',
        };
        Described {
            config: *config,
            n_chunk: self.packing.chunks.len(),
            chunk_bytes: self.packing.capacity,
            waste_percent: self.packing.waste_percent(),
            n_block: self.instance.n_repeated(),
            n_interval: self.instance.interval(),
            blocks: blocks.map(letter).collect(),
            chunks: (0..self.packing.chunks.len()).map(chunk).collect(),
            times: protrain::times(&self.instance, config),
            memory: protrain::memory(&self.instance, config),
        }
    }

    /// The decisions of a configuration.
    pub fn decisions(&self, problem: &Problem<'_>, config: &Config) -> Decisions {
        let layout = config.layout(&self.instance);
        Decisions {
            layout: Some(*config),
            gradients_by_chunk: self.instance.gradients_by_chunk,
            ..decisions(problem, &problem.blocks, &self.packing, &layout)
        }
    }
}

/// Drafts for at most `most` configurations, as far as they are wanted; none for a graph without
/// parameters. For one budget of a large graph, configurations that are far too large by the
/// formula are left out. If drafts exceed the host's limit, there are as many again for each of
/// several shares of it.
pub fn drafts(
    problem: &Problem<'_>,
    gradients: Gradients,
    most: usize,
    wanted: &Wanted,
) -> Vec<Draft> {
    let mut drafts = vec![];
    let Some(mut model) = Model::new(problem, gradients) else {
        return drafts;
    };
    let limit = match wanted.limits {
        Some(limits) if problem.is_large() && problem.heuristics.end_ladders => {
            limits.device as f64 * FAR_TOO_LARGE
        }
        _ => f64::INFINITY,
    };
    // What the formula does not count in the host's memory: gradients on their way to updates.
    let mut uncounted = 0;
    let mut ladder = |model: &Model, drafts: &mut Vec<Draft>| {
        for (config, predicted) in model.ladder(&problem.fixed, most) {
            if limit < predicted.memory as f64 {
                continue;
            }
            let known = drafts.len();
            propose(problem, &model.decisions(problem, &config), drafts);
            let counted = protrain::host_memory(&model.instance, &config);
            let hosts = drafts[known..].iter().map(|draft| draft.host);
            let more = hosts.map(|host| host.saturating_sub(counted)).max();
            uncounted = uncounted.max(more.unwrap_or(0));
            if wanted.end(problem, drafts).is_some() {
                break;
            }
        }
        uncounted
    };
    let uncounted = ladder(&model, &mut drafts);
    // By the formula, a chunk on the host costs no time while the link has room. So all
    // configurations fill a small host.
    if drafts.iter().any(|draft| !problem.host_holds(draft.host)) {
        let left = problem.capacity_beyond().saturating_sub(uncounted);
        for share in LAYOUT_HOSTS {
            model.instance.host_capacity = Some((left as f64 * share) as u64);
            ladder(&model, &mut drafts);
        }
    }
    drafts
}

/// Drafts that ProTrain's structure cannot express. Every block computes again everything that
/// needs no product (activations, norms): most of its bytes, and little of its time. Some blocks
/// swap their other values, and the rest keep them. The first blocks swap, so that what is kept is
/// kept for a short time, or evenly spaced ones, so that the link has time for each. Chunks are as
/// in ProTrain. Drafts are made for several shares of both.
pub fn parts(problem: &Problem<'_>) -> Vec<Draft> {
    let mut drafts = vec![];
    let Some(model) = Model::new(problem, Gradients::Alone) else {
        return drafts;
    };
    let Model {
        packing, instance, ..
    } = model;
    let (n_blocks, n_chunks) = (instance.n_repeated(), instance.chunks.len());
    let shares = |n: usize| {
        (0..=LAYOUT_SHARES)
            .map(move |k| n * k / LAYOUT_SHARES)
            .collect::<BTreeSet<usize>>()
    };
    for n_persist in shares(n_chunks) {
        for n_swap in shares(n_blocks) {
            for is_spread in [false, true] {
                let (n_buffer, _) = instance.buffers(n_persist);
                let config = Config {
                    n_persist,
                    n_buffer,
                    ..Config::default()
                };
                let mut layout = config.layout(&instance);
                let swaps = |block: usize| match is_spread {
                    true => block * n_swap / n_blocks != (block + 1) * n_swap / n_blocks,
                    false => block < n_swap,
                };
                for (block, activation) in layout.activation.iter_mut().flatten().enumerate() {
                    if swaps(block) {
                        *activation = Activation::Swap;
                    }
                }
                let mut decisions = plan(problem, &problem.blocks, &packing, &layout, true);
                problem.feed_again(&mut decisions);
                propose(problem, &decisions, &mut drafts);
            }
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
        // Parameters and moments, which the update changes, and gradients.
        for state in states_of(problem, node) {
            bytes += graph.values[graph.states[state].before].ty.bytes();
            if graph.states[state].kind == ir::StateKind::Param {
                bytes += figures::gradient(graph, state, node);
            }
        }
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
    activations::cut(
        problem,
        &block_of,
        &layout.activation,
        parts,
        &mut decisions,
    );
    states(problem, &block_of, blocks, packing, layout, &mut decisions);
    decisions
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
    if !problem.device.host_is_disk {
        decisions.on_host.insert(update);
    }
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
