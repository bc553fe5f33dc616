//! Where the nodes of a graph stand, and what reads a value.

use super::{Graph, Node, Value};
use crate::table::Table;
use std::collections::BTreeSet;

/// The readers of each value's bytes, by root: aliases are followed, and are no readers themselves.
/// Nodes stand in the graph's order. `None` stands for the step's end, which reads what is left.
pub type Readers = Table<Value, Vec<Option<Node>>>;

impl Graph {
    /// What reads each value.
    pub fn readers(&self) -> Readers {
        let mut readers = Table::filled(self.values.len(), vec![]);
        for &node in &self.order {
            let data = &self.nodes[node];
            if !data.op.is_alias() {
                // A node that reads a value twice is one reader.
                let roots: BTreeSet<Value> = data.inputs.iter().map(|&v| self.root(v)).collect();
                for root in roots {
                    readers[root].push(Some(node));
                }
            }
        }
        for value in self.wanted() {
            readers[self.root(value)].push(None);
        }
        readers
    }

    /// Where each node stands in the order; `usize::MAX` for nodes outside of it.
    pub fn positions(&self) -> Table<Node, usize> {
        let mut positions = Table::filled(self.nodes.len(), usize::MAX);
        for (i, &node) in self.order.iter().enumerate() {
            positions[node] = i;
        }
        positions
    }
}
