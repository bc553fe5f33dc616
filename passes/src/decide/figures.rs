//! The figures that ProTrain's planner uses: an [`Instance`] from a problem's blocks and the
//! packing of its states into chunks.

use super::activations;
use super::chunks::{Chunk, Packing};
use crate::alloc::{lifetimes, live_bytes};
use crate::plan::blocks::Block;
use crate::plan::machine::DEVICE;
use crate::plan::users::users;
use crate::plan::{Decisions, Means, Problem};
use crate::realise;
use ir::graph::Def;
use ir::schedule::{InstrKind, Why};
use ir::{Graph, Id, Node, Phase, State, StateKind, Table, TensorType, Value};
use papers::protrain::{Activation, BlockCost, ChunkCost, Instance};
use std::collections::BTreeSet;
use std::ops::Range;

/// Bytes that are reserved for each used byte. Gaps between addresses are at most half a per cent
/// in most plans; gradients that are on their way to the host take the rest.
const ALPHA: f64 = 1.01;

/// The instance of a graph on one device. `host_rate`: bytes of states that the host updates in a
/// µs, each byte of parameters, gradients and optimizer's states counted once. `None` if the
/// packing does not belong to these blocks, or has no parameter.
///
/// Times are the problem's costs. A block's activation consists of the values that its forward
/// computes, or gets from the block before, and that a backward node reads. Values that several
/// blocks read (masks, tables) always stay.
pub fn instance(
    problem: &Problem<'_>,
    blocks: &[Block],
    packing: &Packing,
    host_rate: f64,
) -> Option<Instance> {
    let graph = problem.graph;
    let last_chunk = packing.chunks.last()?;
    if blocks.len() < last_chunk.blocks.end {
        return None;
    }
    let mut block_of: Table<Node, Option<usize>> = Table::filled(graph.nodes.len(), None);
    for (i, block) in blocks.iter().enumerate() {
        for &node in block.forward.iter().chain(&block.backward) {
            block_of[node] = Some(i);
        }
    }
    let held = held(problem, blocks, &block_of);
    let kept = Trace::new(problem, blocks, &block_of, &held, Activation::Keep)?;
    let again = Trace::new(problem, blocks, &block_of, &held, Activation::Recompute)?;
    let chunk_of = packing.chunk_of(blocks.len());
    let run = |nodes: &[Node]| {
        nodes
            .iter()
            .map(|&node| problem.cost.run(graph, node))
            .sum::<f64>()
    };
    let mut chunk = 0;
    let costs = blocks.iter().enumerate().map(|(i, block)| {
        chunk = chunk_of[i].unwrap_or(chunk);
        BlockCost {
            repeated: block.repeated,
            chunk,
            forward: run(&block.forward),
            backward: run(&block.backward),
            recompute: again.reruns[i],
            activation: held.activation[i],
            input: again.held[i],
            transient: kept.needs[i]
                .max(again.needs[i])
                .saturating_sub(held.activation[i]),
            swap_out: held.swap[i],
            swap_in: held.swap[i],
        }
    });
    let costs = costs.collect();
    let updates = updates(graph);
    let waits = waits(problem, &block_of);
    let last = packing.chunks.len() - 1;
    let chunks = packing.chunks.iter().enumerate().map(|(c, chunk)| {
        // The blocks of this chunk and of its neighbours.
        let first = c
            .checked_sub(1)
            .map_or(0, |c| packing.chunks[c].blocks.start);
        let end = match c {
            _ if last <= c + 1 => blocks.len(),
            c => packing.chunks[c + 1].blocks.end,
        };
        let is_tied = is_tied(problem, blocks, chunk, &(first..end), &block_of);
        ChunkCost {
            tied_bytes: if is_tied { chunk.bytes } else { 0 },
            ..chunk_cost(problem, blocks, chunk, &updates, &waits, host_rate)
        }
    });
    let fixed = graph
        .states
        .values()
        .filter(|s| !matches!(s.kind, StateKind::Param | StateKind::Moment));
    let fixed: u64 = fixed.map(|s| graph.values[s.before].ty.bytes()).sum();
    Some(Instance {
        blocks: costs,
        chunks: chunks.collect(),
        base: fixed,
        capacity: problem.device.device_bytes,
        host_capacity: Some(problem.capacity_beyond()),
        shared_link: false,
        gradients_by_chunk: false,
        alpha: ALPHA,
    })
}

/// The figures of one chunk, all but `tied_bytes`. `updates` has the node that updates each state.
fn chunk_cost(
    problem: &Problem<'_>,
    blocks: &[Block],
    chunk: &Chunk,
    updates: &Table<State, Option<Node>>,
    waits: &[Wait],
    host_rate: f64,
) -> ChunkCost {
    let graph = problem.graph;
    let states = blocks[chunk.blocks.clone()]
        .iter()
        .flat_map(|block| &block.states);
    let (mut gradients, mut largest) = (0u64, 0);
    let (mut all, mut update_device) = (chunk.bytes, 0.0);
    for &state in states {
        if let Some(update) = updates[state] {
            let bytes = gradient(graph, state, update);
            gradients += bytes;
            largest = bytes.max(largest);
            update_device += problem.cost.run(graph, update);
            all += moments(graph, update)
                .map(|m| graph.values[m].ty.bytes())
                .sum::<u64>();
        }
    }
    let of_chunk = waits
        .iter()
        .filter(|wait| wait.block.is_some_and(|b| chunk.blocks.contains(&b)));
    let waiting: u64 = of_chunk.map(|wait| wait.bytes).sum();
    let (offload, update_host) = match gradients {
        0 => (0.0, 0.0),
        _ => (
            problem.cost.link(gradients),
            (all + gradients) as f64 / host_rate,
        ),
    };
    ChunkCost {
        upload: problem.cost.link(chunk.bytes),
        offload,
        gather: 0.0,
        reduce: 0.0,
        update_device,
        update_host,
        persistent_bytes: all + waiting,
        host_bytes: all,
        buffer_bytes: chunk.bytes,
        tied_bytes: 0,
        waiting_bytes: gradients - largest,
    }
}

/// True if blocks that are not of this or a neighbouring chunk read a parameter of a chunk too.
/// They get a copy of the chunk; a neighbour's block finds it in its buffer.
fn is_tied(
    problem: &Problem<'_>,
    blocks: &[Block],
    chunk: &Chunk,
    around: &Range<usize>,
    block_of: &Table<Node, Option<usize>>,
) -> bool {
    let graph = problem.graph;
    let states = blocks[chunk.blocks.clone()]
        .iter()
        .flat_map(|block| &block.states);
    let mut roots = states.map(|&state| problem.root[graph.states[state].before]);
    roots.any(|root| {
        let lines = problem.uses[root].iter();
        let mut readers = lines.filter_map(|&at| block_of[problem.lines[at as usize]]);
        readers.any(|block| !around.contains(&block))
    })
}

/// The node that updates each state that is trained.
fn updates(graph: &Graph) -> Table<State, Option<Node>> {
    let update = |after: Value| graph.def_node(graph.root(after));
    let is_update = |&node: &Node| graph.nodes[node].phase == Phase::Optimizer;
    graph
        .states
        .values()
        .map(|state| update(state.after).filter(is_update))
        .collect()
}

/// The bytes of the gradient that an update reads for this state. Half of the state's, if the
/// gradient of an f32 is in half precision.
pub(super) fn gradient(graph: &Graph, state: State, update: Node) -> u64 {
    let own = &graph.values[graph.states[state].before].ty;
    let is_computed = |value: &Value| {
        let node = graph.def_node(graph.root(*value));
        node.is_some_and(|node| graph.nodes[node].phase != Phase::Optimizer)
    };
    let read = graph.nodes[update].inputs.iter().filter(|v| is_computed(v));
    let types = read.map(|&value| &graph.values[value].ty);
    let of_state = types.filter(|ty| ty.numel() == own.numel());
    of_state.map(TensorType::bytes).min().unwrap_or(own.bytes())
}

/// The optimizer's states that only this update reads, not those that several updates share.
fn moments(graph: &Graph, update: Node) -> impl Iterator<Item = Value> {
    let roots = graph.nodes[update]
        .inputs
        .iter()
        .map(|&value| graph.root(value));
    roots.filter(|&root| match graph.values[root].def {
        Def::State(state) => graph.states[state].kind == StateKind::Moment,
        _ => false,
    })
}

/// A complete gradient that waits for its update while other blocks run.
struct Wait {
    /// The block that computes it.
    block: Option<usize>,
    /// Its bytes.
    bytes: u64,
    /// The lines after its own until its update, as positions in [`Problem::lines`].
    lines: Range<usize>,
}

/// The gradients that wait for updates after the whole backward. With updates in the backward there
/// are none.
fn waits(problem: &Problem<'_>, block_of: &Table<Node, Option<usize>>) -> Vec<Wait> {
    let graph = problem.graph;
    let phase = |at: usize| graph.nodes[problem.lines[at]].phase;
    let mut waits = vec![];
    for (at, &node) in problem.lines.iter().enumerate() {
        for &value in &graph.nodes[node].outputs {
            let Some(&last) = problem.uses[value].last() else {
                continue;
            };
            let last = last as usize;
            let is_gradient = phase(at) == Phase::Backward && phase(last) == Phase::Optimizer;
            let passes_others = problem.lines[at..last]
                .iter()
                .any(|&other| block_of[other].is_some_and(|b| Some(b) != block_of[node]));
            if is_gradient && passes_others {
                waits.push(Wait {
                    block: block_of[node],
                    bytes: graph.values[value].ty.bytes(),
                    lines: at + 1..last + 1,
                });
            }
        }
    }
    waits
}

/// What a step with one decision for all repeated blocks needs, with all states on the device: the
/// paper's trace of memory before and during each operation (section 3.2), line by line.
struct Trace {
    /// The most bytes while each block runs, without states, without what earlier blocks hold, and
    /// without gradients that wait for a late update.
    needs: Vec<u64>,
    /// Bytes that each block holds from forward to backward.
    held: Vec<u64>,
    /// Time of the lines that run again for each block, µs.
    reruns: Vec<f64>,
}

impl Trace {
    fn new(
        problem: &Problem<'_>,
        blocks: &[Block],
        block_of: &Table<Node, Option<usize>>,
        held: &Held,
        activation: Activation,
    ) -> Option<Trace> {
        let graph = problem.graph;
        let layout: Vec<Option<Activation>> = blocks
            .iter()
            .map(|block| block.repeated.then_some(activation))
            .collect();
        let mut decisions = Decisions::default();
        activations::cut(problem, block_of, &layout, false, &mut decisions);
        let mut trace = Trace {
            needs: vec![0; blocks.len()],
            held: held.activation.clone(),
            reruns: vec![0.0; blocks.len()],
        };
        for (gap, _) in decisions
            .cuts
            .iter()
            .filter(|(_, cut)| cut.0 == Means::Recompute)
        {
            if let Some(block) = graph.def_node(gap.value).and_then(|node| block_of[node]) {
                let bytes = graph.values[gap.value].ty.bytes();
                trace.held[block] = trace.held[block].saturating_sub(bytes);
            }
        }
        let schedule = realise::unnamed(problem, &decisions).ok()?;
        let live = live_bytes(&schedule, &lifetimes(&schedule), DEVICE);
        let states: u64 = graph
            .states
            .values()
            .map(|s| graph.values[s.before].ty.bytes())
            .sum();
        let before = sums(&trace.held);
        let waits = waits(problem, block_of);
        for (instr, data) in schedule.instrs.iter() {
            let InstrKind::Run { node, .. } = data.kind else {
                continue;
            };
            let Some(block) = block_of[node] else {
                continue;
            };
            if data.why == Why::Recompute {
                trace.reruns[block] += problem.cost.run(graph, node);
            }
            let at = problem.position[node].map_or(0, |at| at as usize);
            let of_others = |wait: &&Wait| wait.block != Some(block) && wait.lines.contains(&at);
            let waiting: u64 = waits.iter().filter(of_others).map(|wait| wait.bytes).sum();
            let need = live[instr.index()].saturating_sub(states + before[block] + waiting);
            trace.needs[block] = trace.needs[block].max(need);
        }
        Some(trace)
    }
}

/// The sum of all numbers before each.
fn sums(numbers: &[u64]) -> Vec<u64> {
    let mut sum = 0;
    let before = |&number: &u64| {
        sum += number;
        sum - number
    };
    numbers.iter().map(before).collect()
}

/// The bytes that blocks hold between forward and backward, if they are kept.
struct Held {
    activation: Vec<u64>,
    /// Time to copy them one after the other, µs.
    swap: Vec<f64>,
}

fn held(problem: &Problem<'_>, blocks: &[Block], block_of: &Table<Node, Option<usize>>) -> Held {
    let graph = problem.graph;
    let mut held = Held {
        activation: vec![0; blocks.len()],
        swap: vec![0.0; blocks.len()],
    };
    let mut hold = |block: usize, bytes: u64| {
        held.activation[block] += bytes;
        held.swap[block] += problem.cost.link(bytes);
    };
    let users = users(graph, &graph.order);
    // A loss in chunks has backward lines between its forward lines: what these read is not held
    // when another block runs.
    let outlives = |node: Node, value: Value| {
        let (first, last) = (problem.position[node], problem.uses[value].last());
        let (Some(first), Some(&last)) = (first, last) else {
            return false;
        };
        let mut lines = problem.lines[first as usize..last as usize].iter();
        lines.any(|&other| block_of[other].is_some_and(|b| Some(b) != block_of[node]))
    };
    let in_phase = |phase: Phase| {
        graph
            .order
            .iter()
            .filter(move |&&node| graph.nodes[node].phase == phase)
    };
    for &node in in_phase(Phase::Forward) {
        let Some(block) = block_of[node] else {
            continue;
        };
        for &value in &graph.nodes[node].outputs {
            let bytes = graph.values[value].ty.bytes();
            let readers = |phase: Phase| {
                users[value]
                    .iter()
                    .filter(move |&&user| graph.nodes[user].phase == phase)
            };
            let others: BTreeSet<usize> = readers(Phase::Forward)
                .filter_map(|&user| block_of[user])
                .filter(|&other| other != block)
                .collect();
            let backward = readers(Phase::Backward).next().is_some();
            match (others.len(), others.first()) {
                (0, _) if backward && (blocks[block].repeated || outlives(node, value)) => {
                    hold(block, bytes);
                }
                // The next block's input, even if its backward does not read it, because the block
                // may be computed again from it.
                (1, Some(&reader)) => hold(reader, bytes),
                // What no backward reads is not held. What several blocks read is in the traces.
                _ => {}
            }
        }
    }
    held
}
