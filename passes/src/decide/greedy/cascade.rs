//! The cost of computing values again, including everything that they need and that is no longer on
//! the device.

use super::cut::Gaps;
use crate::decide::occupancy::Occupancy;
use crate::plan::Problem;
use crate::plan::tuning::LONGEST_CASCADE;
use ir::graph::Def;
use ir::{Node, Phase, Table, Value};

/// The values and nodes of one recomputation. The tables are reused for the next one: an entry is
/// valid if it has the current number.
pub(super) struct Cascade {
    number: u32,
    needed: Table<Value, u32>,
    runs: Table<Node, u32>,
    n_needed: usize,
    stack: Vec<Value>,
}

impl Cascade {
    pub(super) fn new(problem: &Problem<'_>) -> Cascade {
        Cascade {
            number: 0,
            needed: Table::filled(problem.graph.values.len(), 0),
            runs: Table::filled(problem.graph.nodes.len(), 0),
            n_needed: 0,
            stack: vec![],
        }
    }

    /// The time to compute the gaps' values again before `line`, µs, including everything that they
    /// need and that is not on the device there; `None` if that is impossible.
    pub(super) fn price(
        &mut self,
        problem: &Problem<'_>,
        occupancy: &Occupancy,
        gaps: &Gaps,
        line: usize,
    ) -> Option<f64> {
        let graph = problem.graph;
        let position = occupancy.position.get(line).copied().unwrap_or(u32::MAX);
        self.begin(gaps.iter().map(|gap| gap.0));
        let longest = LONGEST_CASCADE + gaps.len();
        let mut price = 0.0;
        while let Some(value) = self.stack.pop() {
            let Def::Node(node, _) = graph.values[value].def else {
                price += problem.cost.link(graph.values[value].ty.bytes());
                continue;
            };
            let data = &graph.nodes[node];
            if !data.op.is_pure() || data.phase != Phase::Forward || self.n_needed > longest {
                return None;
            }
            if self.run(node) {
                price += problem.cost.run(graph, node);
            }
            for &input in &data.inputs {
                let root = problem.root[input];
                if is_updated(problem, root, position) {
                    return None;
                }
                if !occupancy.is_resident(root, line) && self.need(root) {
                    self.stack.push(root);
                }
            }
        }
        Some(price)
    }

    /// Starts a new recomputation of these values.
    fn begin(&mut self, values: impl Iterator<Item = Value>) {
        self.number += 1;
        self.n_needed = 0;
        self.stack.clear();
        for value in values {
            self.need(value);
            self.stack.push(value);
        }
    }

    /// Notes that a value is needed; false if it was noted before.
    fn need(&mut self, value: Value) -> bool {
        let new = std::mem::replace(&mut self.needed[value], self.number) != self.number;
        self.n_needed += usize::from(new);
        new
    }

    /// Notes that a node runs; false if it was noted before.
    fn run(&mut self, node: Node) -> bool {
        std::mem::replace(&mut self.runs[node], self.number) != self.number
    }
}

/// True for a state whose old value is overwritten before the line of the model at `position`.
fn is_updated(problem: &Problem<'_>, root: Value, position: u32) -> bool {
    let graph = problem.graph;
    let Def::State(state) = graph.values[root].def else {
        return false;
    };
    let update = graph.def_node(problem.root[graph.states[state].after]);
    let updated = update.and_then(|node| problem.position[node]);
    updated.is_some_and(|updated| updated < position)
}
