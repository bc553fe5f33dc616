//! The positions of the nodes of a graph, and the readers of a value.

use super::{Graph, Node, Value};
use crate::table::Table;
use std::collections::BTreeSet;

/// The readers of each value's bytes, by root. Aliases are followed, and are not readers. Nodes are
/// in the graph's order. `None` is the end of the step, which reads outputs and new values of
/// states.
pub type Readers = Table<Value, Vec<Option<Node>>>;

impl Graph {
    /// The readers of each value.
    pub fn readers(&self) -> Readers {
        let mut readers = Table::filled(self.values.len(), vec![]);
        for &node in &self.order {
            let data = &self.nodes[node];
            if !data.op.is_alias() {
                // A node that reads a value twice counts once.
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

    /// The position of each node in the order; `usize::MAX` for nodes that are not in the order.
    pub fn positions(&self) -> Table<Node, usize> {
        let mut positions = Table::filled(self.nodes.len(), usize::MAX);
        for (i, &node) in self.order.iter().enumerate() {
            positions[node] = i;
        }
        positions
    }
}
