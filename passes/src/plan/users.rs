//! The readers of each value. Passes use them to find where a value is last needed.

use ir::{Graph, Node, Table, Value};

/// The nodes that read each value's bytes, by root, in `order`. Reshapes are not readers.
pub fn users(graph: &Graph, order: &[Node]) -> Table<Value, Vec<Node>> {
    let mut users: Table<Value, Vec<Node>> = Table::filled(graph.values.len(), vec![]);
    for &node in order
        .iter()
        .filter(|&&node| !graph.nodes[node].op.is_alias())
    {
        for &input in &graph.nodes[node].inputs {
            let root = graph.root(input);
            if users[root].last() != Some(&node) {
                users[root].push(node);
            }
        }
    }
    users
}
