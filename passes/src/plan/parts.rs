//! Steps in two parts: the caller computes something between forward and backward.
//!
//! The list of lines is cut at one place, and each part runs alone, between two turns of the
//! caller. A schedule means the same wherever the caller pauses, because the list itself is one of
//! the permitted executions. Two facts must hold: no line before the pause reads an input that
//! comes at the pause, and no line after it writes an output that the caller has read by then.
//! `order`, `apply` and `prefetch` keep them. They show in the pools: see [`FORWARD`] and
//! [`BACKWARD`].
//!
//! Parameters, inputs and outputs of such a step lie in memory of the caller, and the budget does
//! not count them.

use super::machine::{BACKWARD, FORWARD, PARAMETERS};
use ir::schedule::{MemorySpace, Pool, Schedule};
use ir::{Graph, Node, Table, Value};
use std::collections::BTreeSet;

/// What crosses the pause, by name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Parts {
    /// Inputs that come at the pause. All others are there from the start.
    pub late: BTreeSet<String>,
    /// Outputs that leave at the pause. All others leave at the end.
    pub early: BTreeSet<String>,
    /// Whether the caller's memory is the device's. Else inputs and outputs are on the host.
    pub on_device: bool,
}

impl Parts {
    /// True for an input that comes at the pause.
    pub fn is_late(&self, graph: &Graph, input: Value) -> bool {
        self.late.contains(&graph.values[input].name)
    }

    /// The nodes that outputs of the first part need. They run before the pause.
    pub fn early_nodes(&self, graph: &Graph) -> Table<Node, bool> {
        let outputs = graph.outputs.iter();
        let early = outputs.filter(|output| self.early.contains(&output.name));
        let mut stack: Vec<Value> = early.map(|output| output.value).collect();
        let mut needed = Table::filled(graph.nodes.len(), false);
        while let Some(value) = stack.pop() {
            if let Some(node) = graph.def_node(value).filter(|&node| !needed[node]) {
                needed[node] = true;
                stack.extend(&graph.nodes[node].inputs);
            }
        }
        needed
    }
}

/// True for a pool that is memory of the caller. A step in one part may have a disk's pool instead.
pub fn is_lent(schedule: &Schedule, pool: Pool) -> bool {
    let is_disk = schedule.pools[pool].space == MemorySpace::Disk;
    !is_disk && [PARAMETERS, FORWARD, BACKWARD].contains(&pool)
}
