//! What to save across one line and what to recompute after it, as a minimum cut.
//!
//! For one line, only the values that survive it matter. Each value that is read after the line is
//! either saved, at a price per byte, or its producer runs again. A rerun costs its time, and needs
//! its own operands. For a given price the best choice is a minimum cut, as in Griewank and
//! Walther's work and in PyTorch's partitioner (He, "Min-cut optimal recomputation", 2022).
//! Everything else before and after the line is ignored. So the choice is a start for the search,
//! and its value is a bound.

use super::flow::{Network, UNLIMITED};
use super::{Problem, Rerun, Value};
use std::collections::{BTreeMap, BTreeSet};

/// Capacities are whole picoseconds.
const PER_MICRO: f64 = 1e6;

/// The choice for one line and price.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    /// The nodes that run again after the line.
    pub(super) nodes: BTreeSet<u32>,
    /// Bytes saved across the line, in addition to the values that the line itself makes and reads.
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
    let mut across = Across {
        problem,
        line,
        network: Network::new(2),
        vertex_of: BTreeMap::new(),
        node_of: BTreeMap::new(),
    };
    across.build(price, time);
    across.cut()
}

const SOURCE: u32 = 0;
const SINK: u32 = 1;

/// The network of the values that may survive a line. A value on the source's side must be
/// available after the line; a node on the source's side runs again.
struct Across<'a> {
    problem: &'a Problem,
    line: u32,
    network: Network,
    /// The vertex of each value.
    vertex_of: BTreeMap<u32, u32>,
    /// The vertex of each node.
    node_of: BTreeMap<u32, u32>,
}

impl Across<'_> {
    /// True if the line itself makes or reads a value.
    fn is_here(&self, value: u32) -> bool {
        let node = &self.problem.nodes[self.line as usize];
        self.problem.values[value as usize].maker == self.line
            || node.reads.binary_search(&value).is_ok()
    }

    /// The values made so far that later lines read or the step must leave, except values that the
    /// line itself makes or reads.
    fn wanted(&self) -> BTreeSet<u32> {
        let problem = self.problem;
        let is_made = |value: u32| problem.values[value as usize].maker <= self.line;
        let later = &problem.nodes[self.line as usize + 1..];
        let read = later.iter().flat_map(|node| &node.reads).copied();
        let all = 0..problem.values.len() as u32;
        let kept = all.filter(|&value| problem.values[value as usize].kept);
        read.chain(kept)
            .filter(|&value| is_made(value) && !self.is_here(value))
            .collect()
    }

    fn build(&mut self, price: f64, time: &dyn Fn(u32) -> f64) {
        let mut stack: Vec<u32> = vec![];
        for value in self.wanted() {
            let vertex = self.network.vertex();
            self.vertex_of.insert(value, vertex);
            self.network.arc(SOURCE, vertex, UNLIMITED);
            stack.push(value);
        }
        while let Some(value) = stack.pop() {
            let Value { bytes, maker, .. } = self.problem.values[value as usize];
            let vertex = self.vertex_of[&value];
            // Rounded down, so that the cut is at most the true cost.
            let saved = (price * bytes as f64 * PER_MICRO).min(UNLIMITED as f64 / 1e3) as i64;
            if self.problem.nodes[maker as usize].until <= self.line {
                self.network.arc(vertex, SINK, saved);
                continue;
            }
            let node = match self.node_of.get(&maker) {
                Some(&node) => node,
                None => self.add_node(maker, time(maker), &mut stack),
            };
            self.network.arc(vertex, node, saved);
        }
    }

    /// Adds a node, and pushes the operands that only it needs so far onto the stack.
    fn add_node(&mut self, maker: u32, micros: f64, stack: &mut Vec<u32>) -> u32 {
        let problem = self.problem;
        let node = self.network.vertex();
        self.node_of.insert(maker, node);
        self.network.arc(node, SINK, (micros * PER_MICRO) as i64);
        for &read in &problem.nodes[maker as usize].reads {
            if self.is_here(read) {
                continue;
            }
            let vertex = *self.vertex_of.entry(read).or_insert_with(|| {
                stack.push(read);
                self.network.vertex()
            });
            self.network.arc(node, vertex, UNLIMITED);
        }
        node
    }

    /// The minimum cut as a choice.
    fn cut(mut self) -> Choice {
        let (least, reached) = self.network.cut(SOURCE, SINK);
        let is_reached = |vertex: u32| reached[vertex as usize];
        let nodes: BTreeSet<u32> = self
            .node_of
            .iter()
            .filter(|&(_, &vertex)| is_reached(vertex))
            .map(|(&maker, _)| maker)
            .collect();
        let values = self.vertex_of.iter();
        let bytes = values
            .filter(|&(_, &vertex)| is_reached(vertex))
            .map(|(&value, _)| &self.problem.values[value as usize])
            .filter(|value| !nodes.contains(&value.maker))
            .map(|value| value.bytes)
            .sum();
        Choice {
            nodes,
            bytes,
            least: least as f64 / PER_MICRO,
        }
    }
}

/// Reruns of the chosen nodes, each once, at the first line after `line` that needs it.
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
