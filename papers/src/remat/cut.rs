//! What to save across one line and what to recompute after it, as a minimum cut.
//!
//! Seen from one line, all that matters is which values survive it. Each value that is read after
//! the line is either saved, at a price per byte, or its producer runs again, at the cost of its
//! time, and then needs its own operands. For a given price the best choice is a minimum cut, as in
//! Griewank and Walther's work and in PyTorch's partitioner (He, "Min-cut optimal recomputation",
//! 2022). Everything else before and after the line is ignored. So the choice is a start for a
//! search, and its value is a bound.

use super::flow::{Network, UNLIMITED};
use super::{Problem, Rerun};
use std::collections::{BTreeMap, BTreeSet};

/// Capacities are whole picoseconds.
const PER_MICRO: f64 = 1e6;

/// What is chosen for one line and price.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    /// The nodes that run again after the line.
    pub(super) nodes: BTreeSet<u32>,
    /// Bytes saved across the line, besides those that the line itself makes and reads.
    pub(super) bytes: u64,
    /// Lower bound, µs, with each saved byte counted at the price.
    pub(super) least: f64,
}

/// Bytes in memory on a line for every choice: its results and operands, its scratch, and the fixed
/// bytes.
pub(super) fn must(problem: &Problem, line: u32) -> u64 {
    let node = &problem.nodes[line as usize];
    let values = node.reads.iter().chain(&problem.results[line as usize]);
    problem.fixed[line as usize]
        + node.scratch
        + values
            .map(|&v| problem.values[v as usize].bytes)
            .sum::<u64>()
}

/// The best choice at a line for a price in µs per byte. `time` gives the cost of a node's rerun.
pub(super) fn choose(
    problem: &Problem,
    line: u32,
    price: f64,
    time: &dyn Fn(u32) -> f64,
) -> Choice {
    let here = |value: u32| {
        let node = &problem.nodes[line as usize];
        problem.values[value as usize].maker == line || node.reads.binary_search(&value).is_ok()
    };
    let mut wanted: BTreeSet<u32> = BTreeSet::new();
    for node in &problem.nodes[line as usize + 1..] {
        wanted.extend(
            node.reads
                .iter()
                .filter(|&&v| problem.values[v as usize].maker <= line),
        );
    }
    let kept =
        |&x: &u32| problem.values[x as usize].kept && problem.values[x as usize].maker <= line;
    wanted.extend((0..problem.values.len() as u32).filter(kept));
    wanted.retain(|&value| !here(value));

    // A value on the source's side must be there after the line; a node on the source's side runs
    // again.
    let (source, sink) = (0, 1);
    let mut network = Network::new(2);
    let mut vertex_of: BTreeMap<u32, u32> = BTreeMap::new();
    let mut node_of: BTreeMap<u32, u32> = BTreeMap::new();
    let mut stack: Vec<u32> = vec![];
    for &value in &wanted {
        let vertex = network.vertex();
        vertex_of.insert(value, vertex);
        network.arc(source, vertex, UNLIMITED);
        stack.push(value);
    }
    while let Some(value) = stack.pop() {
        let maker = problem.values[value as usize].maker;
        let bytes = problem.values[value as usize].bytes as f64;
        let vertex = vertex_of[&value];
        // Rounded down: so the cut is no more than the least.
        let saved = (price * bytes * PER_MICRO).min(UNLIMITED as f64 / 1e3) as i64;
        if problem.nodes[maker as usize].until <= line {
            network.arc(vertex, sink, saved);
            continue;
        }
        let node = *node_of.entry(maker).or_insert_with(|| {
            let node = network.vertex();
            network.arc(node, sink, (time(maker) * PER_MICRO) as i64);
            for &read in problem.nodes[maker as usize]
                .reads
                .iter()
                .filter(|&&read| !here(read))
            {
                let vertex = *vertex_of.entry(read).or_insert_with(|| {
                    stack.push(read);
                    network.vertex()
                });
                network.arc(node, vertex, UNLIMITED);
            }
            node
        });
        network.arc(vertex, node, saved);
    }
    let (least, reached) = network.cut(source, sink);
    let runs = |maker: u32| {
        node_of
            .get(&maker)
            .is_some_and(|&vertex| reached[vertex as usize])
    };
    let nodes: BTreeSet<u32> = node_of
        .keys()
        .copied()
        .filter(|&maker| runs(maker))
        .collect();
    let saved = vertex_of.iter().filter(|&(&value, &vertex)| {
        reached[vertex as usize] && !runs(problem.values[value as usize].maker)
    });
    Choice {
        bytes: saved
            .map(|(&value, _)| problem.values[value as usize].bytes)
            .sum(),
        nodes,
        least: least as f64 / PER_MICRO,
    }
}

/// Reruns of the chosen nodes, each once, where it is first needed after the line.
pub(super) fn lay(problem: &Problem, line: u32, choice: &Choice) -> Vec<Rerun> {
    let mut left = choice.nodes.clone();
    let mut reruns = vec![];
    for reader in line + 1..problem.nodes.len() as u32 {
        let mut stack: Vec<u32> = problem.nodes[reader as usize].reads.clone();
        while let Some(value) = stack.pop() {
            let node = problem.values[value as usize].maker;
            if left.remove(&node) {
                reruns.push(Rerun {
                    line: reader.min(problem.nodes[node as usize].until),
                    node,
                });
                stack.extend(&problem.nodes[node as usize].reads);
            }
        }
    }
    reruns
}
