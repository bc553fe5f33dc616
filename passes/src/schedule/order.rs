//! Puts the nodes of a graph into the order in which a step runs them.
//!
//! Before: a topological order, as traced. After: a topological order in which
//! * nodes without operands (masks, positions, zeros) run just before the first use of their
//!   result. Traces have them all at the start, and their results would be in memory for the whole
//!   step;
//! * the update of a parameter comes after the last reader of the parameter, when its gradient is
//!   complete. So the optimizer runs inside the backward, and the gradient's bytes are free
//!   directly after. With `Update::After` updates come after the whole backward.

use crate::plan::Parts;
use crate::plan::users::users;
use ir::graph::Def;
use ir::{Graph, Node, Phase, Table, Value};

/// Where the optimizer's updates run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Update {
    /// In backward, as soon as a gradient is complete.
    #[default]
    Backward,
    /// After the whole backward.
    After,
}

/// Reorders `graph.order`.
pub fn run(graph: &mut Graph, update: Update) {
    let order = std::mem::take(&mut graph.order);
    let late = late_nodes(graph, &order);
    let is_update = |node: Node| graph.nodes[node].phase == Phase::Optimizer;

    // The number of nodes that each update still waits for, and the updates that wait for each
    // node.
    let mut waits: Table<Node, usize> = Table::filled(graph.nodes.len(), 0);
    let mut waiters: Table<Node, Vec<Node>> = Table::filled(graph.nodes.len(), vec![]);
    if update == Update::Backward {
        let users = users(graph, &order);
        for &node in order.iter().filter(|&&node| is_update(node)) {
            for before in predecessors(graph, &users, node, &late) {
                waits[node] += 1;
                waiters[before].push(node);
            }
        }
    }

    let mut line = Line {
        graph,
        emitted: Table::filled(graph.nodes.len(), false),
        nodes: Vec::with_capacity(order.len()),
    };
    for &node in order
        .iter()
        .filter(|&&node| !is_update(node) && !late[node])
    {
        line.emit(node);
        for &update in &waiters[node] {
            waits[update] -= 1;
            if waits[update] == 0 {
                line.emit(update);
            }
        }
    }
    for &node in order.iter().filter(|&&node| is_update(node)) {
        line.emit(node);
    }
    // A node without operands and readers may still compute an output.
    for value in graph.wanted() {
        if let Some(node) = graph.def_node(value) {
            line.emit(node);
        }
    }
    graph.order = line.nodes;
}

/// Puts the nodes that run before the pause first. Otherwise the order stays.
pub fn in_parts(graph: &mut Graph, parts: &Parts) {
    let early = parts.early_nodes(graph);
    // Stable, and topological: what an early node reads is early.
    graph.order.sort_by_key(|&node| !early[node]);
}

/// Pure nodes without operands, or whose operands come from such nodes.
fn late_nodes(graph: &Graph, order: &[Node]) -> Table<Node, bool> {
    let mut late = Table::filled(graph.nodes.len(), false);
    for &node in order {
        let data = &graph.nodes[node];
        late[node] = data.op.is_pure()
            && data.phase != Phase::Optimizer
            && data
                .inputs
                .iter()
                .all(|&v| graph.def_node(v).is_some_and(|def| late[def]));
    }
    late
}

/// The nodes of forward and backward that must come before an update: the nodes that compute its
/// operands, and the readers of the states that it overwrites.
fn predecessors(
    graph: &Graph,
    users: &Table<Value, Vec<Node>>,
    update: Node,
    late: &Table<Node, bool>,
) -> Vec<Node> {
    let mut before = vec![];
    let mut stack: Vec<Value> = graph.nodes[update].inputs.clone();
    while let Some(value) = stack.pop() {
        match graph.values[graph.root(value)].def {
            Def::Node(def, _) if graph.nodes[def].phase == Phase::Optimizer => {
                stack.extend(&graph.nodes[def].inputs)
            }
            Def::Node(def, _) => before.push(def),
            // An update mostly overwrites the states that it reads. If it does not, the wait is
            // harmless.
            Def::State(_) => before.extend(&users[graph.root(value)]),
            Def::Input(_) => {}
        }
    }
    before.retain(|&node| !late[node] && graph.nodes[node].phase != Phase::Optimizer);
    before.sort_unstable();
    before.dedup();
    before
}

/// The order so far.
struct Line<'a> {
    graph: &'a Graph,
    emitted: Table<Node, bool>,
    nodes: Vec<Node>,
}

impl Line<'_> {
    /// Emits `node` after the definitions of its operands that were not emitted yet. Iterative,
    /// because chains may be long.
    fn emit(&mut self, node: Node) {
        let mut stack = vec![(node, 0)];
        while let Some((node, next)) = stack.pop() {
            if self.emitted[node] {
                continue;
            }
            let Some(&value) = self.graph.nodes[node].inputs.get(next) else {
                self.emitted[node] = true;
                self.nodes.push(node);
                continue;
            };
            stack.push((node, next + 1));
            if let Some(def) = self.graph.def_node(value) {
                stack.push((def, 0));
            }
        }
    }
}
