//! The figures that ProTrain's planner uses: an [`Instance`] from a problem's blocks and the
//! packing of its states into chunks.

use super::chunks::{Chunk, Packing};
use crate::plan::Problem;
use crate::plan::blocks::Block;
use crate::plan::users::users;
use ir::graph::Def;
use ir::{Graph, Node, Phase, State, StateKind, Table, Value};
use papers::protrain::{BlockCost, ChunkCost, Instance};
use std::collections::BTreeSet;

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
    let held = held(graph, &block_of, blocks.len());
    let transient = transients(problem, &block_of, blocks.len(), &held);
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
        let swap = problem.cost.link(held.activation[i]);
        BlockCost {
            repeated: block.repeated,
            chunk,
            forward: run(&block.forward),
            backward: run(&block.backward),
            activation: held.activation[i],
            input: held.input[i],
            transient: transient[i],
            swap_out: swap,
            swap_in: swap,
        }
    });
    let costs = costs.collect();
    let updates = updates(graph);
    let chunks = packing.chunks.iter();
    let chunks = chunks.map(|chunk| chunk_cost(problem, blocks, chunk, &updates, host_rate));
    let fixed = graph
        .states
        .values()
        .filter(|s| !matches!(s.kind, StateKind::Param | StateKind::Moment));
    let fixed: u64 = fixed.map(|s| graph.values[s.before].ty.bytes()).sum();
    let bytes = packing.chunks.iter().map(|chunk| chunk.bytes);
    Some(Instance {
        blocks: costs,
        chunks: chunks.collect(),
        buffer_bytes: bytes.max().unwrap_or(0),
        base: fixed + held.shared,
        capacity: problem.device.device_bytes,
        host_capacity: Some(problem.host_limit.unwrap_or(problem.device.host_bytes)),
        shared_link: false,
        alpha: 1.0,
    })
}

/// The figures of one chunk. `updates` has the node that updates each state.
fn chunk_cost(
    problem: &Problem<'_>,
    blocks: &[Block],
    chunk: &Chunk,
    updates: &Table<State, Option<Node>>,
    host_rate: f64,
) -> ChunkCost {
    let graph = problem.graph;
    let states = blocks[chunk.blocks.clone()]
        .iter()
        .flat_map(|block| &block.states);
    let (mut gradients, mut all, mut update_device) = (0u64, chunk.bytes, 0.0);
    for &state in states {
        if let Some(update) = updates[state] {
            // A gradient has as many bytes as its parameter.
            gradients += graph.values[graph.states[state].before].ty.bytes();
            update_device += problem.cost.run(graph, update);
            all += moments(graph, update)
                .map(|m| graph.values[m].ty.bytes())
                .sum::<u64>();
        }
    }
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
        persistent_bytes: all + gradients,
        host_bytes: all,
    }
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

/// The bytes that blocks hold between forward and backward.
struct Held {
    activation: Vec<u64>,
    input: Vec<u64>,
    shared: u64,
    /// The forward values that are held.
    values: Table<Value, bool>,
}

fn held(graph: &Graph, block_of: &Table<Node, Option<usize>>, n: usize) -> Held {
    let mut held = Held {
        activation: vec![0; n],
        input: vec![0; n],
        shared: 0,
        values: Table::filled(graph.values.len(), false),
    };
    let users = users(graph, &graph.order);
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
            let mut hold = |to: &mut u64| {
                *to += bytes;
                held.values[value] = true;
            };
            match (others.len(), others.first()) {
                (0, _) if backward => hold(&mut held.activation[block]),
                (0, _) => {}
                // The next block's input, even if its backward does not read it, because the block
                // may be computed again from it.
                (1, Some(&reader)) => {
                    hold(&mut held.activation[reader]);
                    held.input[reader] += bytes;
                }
                _ => hold(&mut held.shared),
            }
        }
    }
    held
}

/// The most bytes that each block needs while it runs, in addition to what it holds: results of its
/// forward that no backward reads, and all results of its backward except parameters' gradients,
/// which are model states.
fn transients(
    problem: &Problem<'_>,
    block_of: &Table<Node, Option<usize>>,
    n: usize,
    held: &Held,
) -> Vec<u64> {
    let graph = problem.graph;
    let mut change = vec![0i128; problem.lines.len() + 1];
    for (at, &node) in problem.lines.iter().enumerate() {
        for &value in &graph.nodes[node].outputs {
            let for_update =
                |&user: &u32| graph.nodes[problem.lines[user as usize]].phase == Phase::Optimizer;
            let gradient = problem.leaves[value] || problem.uses[value].iter().any(for_update);
            if held.values[value] || gradient || graph.nodes[node].phase == Phase::Optimizer {
                continue;
            }
            let bytes = i128::from(graph.values[value].ty.bytes());
            change[at] += bytes;
            change[problem.uses[value].last().map_or(at, |&last| last as usize) + 1] -= bytes;
        }
    }
    let mut peaks = vec![0; n];
    let mut live = 0i128;
    for (&node, change) in problem.lines.iter().zip(&change) {
        live += change;
        if let Some(block) = block_of[node] {
            peaks[block] = peaks[block].max(live as u64);
        }
    }
    peaks
}
