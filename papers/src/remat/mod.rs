//! Recomputation as a separate problem: which nodes run again so that a training step fits, op by
//! op, in a fixed order.
//!
//! A problem is a list of nodes in order, each with its time and the bytes of its results. A
//! solution is a set of [`Rerun`]s: before line `line`, node `node` runs once more. The reruns
//! before a line keep the nodes' own order. A reader takes a value from its producer's latest run.
//! So a value is in memory from each run of its producer to the last read before the next run.
//! Values that the step must leave are in memory from the last run to the end. Therefore any set
//! gives a program that computes the right values; only its memory and its time differ. This is the
//! space of Checkmate's integer program (Jain et al., "Checkmate: Breaking the Memory Wall with
//! Optimal Tensor Rematerialization", 2020, section 4).
//!
//! [`solve`] finds a set whose peak is within a budget. [`curve`] finds a family of sets, from
//! keeping everything down to the smallest peak found. [`lower_bound`] bounds every set.
//! [`evaluate`] defines the meaning of a set.
//!
//! A set can express more than cuts of gaps: a value may be held for a rerun after its last reader
//! among the lines, and a rerun may come earlier than directly before the next read. To apply a
//! set, run the reruns listed before each line, let readers take the latest copy, and end each
//! buffer at its last read. No other decision is needed.
//!
//! `fixed` can express other limits on a line. If a block may hold at most `h` bytes from its
//! forward to its backward and may need at most `b` bytes at once, fix `b - h` bytes on a line
//! between the two. Both limits then become one budget, `b`.
//!
//! After: the reruns are plain data. They contain no addresses, so padding and fragmentation need
//! additional memory. Results that are written over operands are ignored; they would need less.

mod bound;
mod cut;
mod flow;
mod profile;
mod search;

pub use bound::lower_bound;
pub use search::{Effort, curve, solve};

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use thiserror::Error;

/// An operation. Node number `i` is on line `i`.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Node {
    /// Time of one run, µs.
    pub micros: f64,
    /// Bytes that only a run itself needs.
    pub scratch: u64,
    /// The values that it reads.
    pub reads: Vec<u32>,
    /// It may run again before any line up to this one; 0 if it may not run again. A node that
    /// reads bytes which a later line overwrites may run again only up to that line.
    pub until: u32,
}

/// A node's result.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Value {
    /// Its size.
    pub bytes: u64,
    /// The node that makes it. A node may make several values; a rerun makes all of them.
    pub maker: u32,
    /// The step must leave it in memory.
    pub kept: bool,
}

/// A problem.
#[derive(Clone, PartialEq, Debug)]
pub struct Problem {
    nodes: Vec<Node>,
    values: Vec<Value>,
    fixed: Vec<u64>,
    /// The values that each node makes.
    results: Vec<Vec<u32>>,
}

/// Why nodes and values do not form a valid problem. All are counted from 0.
#[derive(Clone, Copy, PartialEq, Debug, Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum ProblemError {
    #[error("{lines} lines have {entries} entries of fixed bytes")]
    Fixed { lines: usize, entries: usize },
    #[error("value {value} is made by node {maker}, of {n_nodes} nodes")]
    NoMaker {
        value: usize,
        maker: u32,
        n_nodes: usize,
    },
    /// A time is negative or not a number.
    #[error("node {node} takes {micros} us")]
    NoTime { node: usize, micros: f64 },
    #[error("node {node} reads value {value}, which is not made before it")]
    Early { node: usize, value: u32 },
    #[error("the sizes add up to more than 2^62 bytes")]
    TooLarge,
}

impl Problem {
    /// A problem of nodes in their final order, their values, and the other bytes in memory on each
    /// line (`fixed`, one per node; an empty list means zeros).
    ///
    /// # Errors
    /// A value's producer is not a node, a node reads a value that is not made before it, `fixed`
    /// has another length, or a time is negative or not a number.
    pub fn new(
        mut nodes: Vec<Node>,
        values: Vec<Value>,
        mut fixed: Vec<u64>,
    ) -> Result<Problem, ProblemError> {
        if fixed.is_empty() {
            fixed = vec![0; nodes.len()];
        }
        if fixed.len() != nodes.len() {
            return Err(ProblemError::Fixed {
                lines: nodes.len(),
                entries: fixed.len(),
            });
        }
        let results = results(nodes.len(), &values)?;
        for (line, node) in nodes.iter_mut().enumerate() {
            if !(0.0 <= node.micros && node.micros.is_finite()) {
                return Err(ProblemError::NoTime {
                    node: line,
                    micros: node.micros,
                });
            }
            node.reads.sort_unstable();
            node.reads.dedup();
            for &read in &node.reads {
                if values
                    .get(read as usize)
                    .is_none_or(|value| line <= value.maker as usize)
                {
                    return Err(ProblemError::Early {
                        node: line,
                        value: read,
                    });
                }
            }
        }
        let total = values
            .iter()
            .map(|v| v.bytes)
            .chain(nodes.iter().map(|n| n.scratch))
            .chain(fixed.iter().copied());
        if total.map(u128::from).sum::<u128>() > 1 << 62 {
            return Err(ProblemError::TooLarge);
        }
        Ok(Problem {
            nodes,
            values,
            fixed,
            results,
        })
    }

    /// The nodes, in their order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }
    /// The values.
    pub fn values(&self) -> &[Value] {
        &self.values
    }
    /// The values that a node makes.
    pub fn results(&self, node: u32) -> &[u32] {
        &self.results[node as usize]
    }
    /// Time of a step without reruns, µs.
    pub fn base_micros(&self) -> f64 {
        self.nodes.iter().map(|n| n.micros).sum()
    }
    /// True if a node may run again before a line.
    pub fn may_rerun(&self, rerun: Rerun) -> bool {
        let n_lines = self.nodes.len() as u32;
        rerun.node < rerun.line
            && rerun.line < n_lines
            && rerun.line <= self.nodes[rerun.node as usize].until
    }
}

/// The values that each of `n_nodes` nodes makes.
fn results(n_nodes: usize, values: &[Value]) -> Result<Vec<Vec<u32>>, ProblemError> {
    let mut results = vec![vec![]; n_nodes];
    for (x, value) in values.iter().enumerate() {
        let Some(results) = results.get_mut(value.maker as usize) else {
            return Err(ProblemError::NoMaker {
                value: x,
                maker: value.maker,
                n_nodes,
            });
        };
        results.push(x as u32);
    }
    Ok(results)
}

/// Before line `line`, node `node` runs again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Rerun {
    /// The line before which it runs.
    pub line: u32,
    /// The node.
    pub node: u32,
}

/// Peak and time of a set of reruns.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Evaluation {
    /// The most bytes in memory at once.
    pub peak: u64,
    /// Time of a step, µs.
    pub micros: f64,
}

/// A set of reruns with its peak and time.
#[derive(Clone, PartialEq, Debug)]
pub struct Solution {
    /// The reruns, in the order in which they run.
    pub reruns: Vec<Rerun>,
    /// The most bytes in memory at once.
    pub peak: u64,
    /// Time of a step, µs.
    pub micros: f64,
}

impl Solution {
    fn new(problem: &Problem, mut reruns: Vec<Rerun>) -> Solution {
        reruns.sort_unstable();
        let Evaluation { peak, micros } = evaluate(problem, &reruns);
        Solution {
            reruns,
            peak,
            micros,
        }
    }
}

/// The meaning of a set of reruns: it runs the lines one by one, and tracks each value's latest
/// copy and its last read. Every solution is measured with it.
///
/// # Panics
/// If a node runs again that may not run again: see [`Problem::may_rerun`].
pub fn evaluate(problem: &Problem, reruns: &[Rerun]) -> Evaluation {
    let n_lines = problem.nodes.len() as u32;
    assert!(
        reruns.iter().all(|&rerun| problem.may_rerun(rerun)),
        "a rerun should be allowed"
    );
    let own = (0..n_lines).map(|line| Rerun { line, node: line });
    let mut steps: Vec<Rerun> = reruns.iter().copied().chain(own).collect();
    steps.sort_unstable();
    steps.dedup();
    // A copy of a value: the value, and the first and last step at which it is in memory.
    let mut copies: Vec<(u32, usize, usize)> = vec![];
    let mut latest: BTreeMap<u32, usize> = BTreeMap::new();
    for (step, run) in steps.iter().enumerate() {
        for read in &problem.nodes[run.node as usize].reads {
            copies[latest[read]].2 = step;
        }
        for &value in problem.results(run.node) {
            latest.insert(value, copies.len());
            copies.push((value, step, step));
        }
    }
    for (value, &copy) in &latest {
        if problem.values[*value as usize].kept {
            copies[copy].2 = steps.len() - 1;
        }
    }
    let mut bytes: Vec<u64> = steps
        .iter()
        .map(|run| problem.fixed[run.line as usize] + problem.nodes[run.node as usize].scratch)
        .collect();
    let mut starts = vec![0; steps.len() + 1];
    let mut ends = vec![0; steps.len() + 1];
    for (value, first, last) in copies {
        starts[first] += problem.values[value as usize].bytes;
        ends[last + 1] += problem.values[value as usize].bytes;
    }
    let mut live = 0;
    for (step, bytes) in bytes.iter_mut().enumerate() {
        live = live + starts[step] - ends[step];
        *bytes += live;
    }
    let micros = steps
        .iter()
        .map(|run| problem.nodes[run.node as usize].micros)
        .sum();
    Evaluation {
        peak: bytes.into_iter().max().unwrap_or(0),
        micros,
    }
}
