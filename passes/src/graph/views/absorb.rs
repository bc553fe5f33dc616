//! Makes views steps of the kernels that read them.

use crate::graph::reshape_to;
use crate::graph::steps::{TOGETHER, may_join, moves};
use ir::graph::Readers;
use ir::op::attrs::Fused;
use ir::op::body::{Body, Step};
use ir::{Graph, Node, Op, Phase, Table, TensorType, Value};
use std::sync::Arc;

/// Rewrites the graph.
pub(in crate::graph) fn absorb(graph: &mut Graph) {
    let order = graph.order.clone();
    let mut readers = graph.readers();
    let positions = graph.positions();
    let lives = Lives::of(graph, &readers, &positions);
    let mut edit = graph.edit();
    // A view of a view becomes a step first.
    for &node in order.iter().rev() {
        let data = &edit.graph().nodes[node];
        if !moves(&data.op) {
            continue;
        }
        let (x, view) = (data.inputs[0], data.outputs[0]);
        let all: Option<Vec<Node>> = readers[view].iter().copied().collect();
        let Some(all) = all.filter(|all| !all.is_empty() && lives.allow(edit.graph(), node)) else {
            continue;
        };
        let kernels = all.iter().map(|&reader| with(edit.graph(), reader, node));
        let Some(kernels) = kernels.collect::<Option<Vec<_>>>() else {
            continue;
        };
        for (&reader, (body, operands)) in all.iter().zip(kernels) {
            let body = Arc::new(body);
            edit.set_op(reader, Op::Fused(Fused { body }), operands);
        }
        let root = edit.graph().root(x);
        let list = &mut readers[root];
        list.retain(|&reader| reader != Some(node));
        for reader in all.into_iter().map(Some) {
            if !list.contains(&reader) {
                list.push(reader);
            }
        }
    }
    edit.finish();
    crate::graph::canonical::remove_dead(graph);
}

/// True for a node that a generated kernel computes. An update stays what it is, so that it can run
/// on the host.
fn is_kernel(graph: &Graph, node: Node) -> bool {
    let data = &graph.nodes[node];
    data.phase != Phase::Optimizer && (data.op.body().is_some() || may_join(graph, node))
}

/// The kernel of a node and of the view among its operands; none if there is no such kernel, or if
/// it would read few elements that follow each other.
fn with(graph: &Graph, reader: Node, view: Node) -> Option<(Body, Vec<Value>)> {
    is_kernel(graph, reader).then_some(())?;
    let data = &graph.nodes[reader];
    let (steps, results) = match data.op.body() {
        Some(body) => (body.steps().to_vec(), body.results().to_vec()),
        None => {
            let n = data.inputs.len();
            let step = Step {
                op: data.op.clone(),
                inputs: (0..n).collect(),
                outputs: data.outputs.len(),
            };
            (vec![step], (n..n + data.outputs.len()).collect())
        }
    };
    let made = &graph.nodes[view];
    let (base, viewed) = (made.inputs[0], made.outputs[0]);
    let is_view = |&value: &Value| graph.root(value) == viewed;
    let mut operands: Vec<Value> = data
        .inputs
        .iter()
        .copied()
        .filter(|v| !is_view(v))
        .collect();
    // The operand that has the bytes of the base.
    let same = |&value: &Value| graph.root(value) == graph.root(base);
    let source = operands.iter().position(same).unwrap_or(operands.len());
    if source == operands.len() {
        operands.push(base);
    }
    let number = |value: Value| operands.iter().position(|&other| other == value);

    let n = operands.len();
    let reshape = |to: Value, from: usize| Step {
        op: reshape_to(graph.values[to].ty.shape().iter().copied()),
        inputs: vec![from],
        outputs: 1,
    };
    let mut first = vec![];
    if operands[source] != base {
        first.push(reshape(base, source));
    }
    first.push(Step {
        op: made.op.clone(),
        inputs: vec![if first.is_empty() { source } else { n }],
        outputs: 1,
    });
    let at = n + first.len() - 1;
    let mut new: Vec<usize> = vec![];
    for &operand in &data.inputs {
        new.push(if operand == viewed {
            at
        } else if is_view(&operand) {
            first.push(reshape(operand, at));
            n + first.len() - 1
        } else {
            number(operand)?
        });
    }
    let (before, after) = (data.inputs.len(), n + first.len());
    let renumbered = |v: &usize| match v.checked_sub(before) {
        Some(step) => after + step,
        None => new[*v],
    };
    first.extend(steps.iter().map(|step| Step {
        inputs: step.inputs.iter().map(renumbered).collect(),
        ..step.clone()
    }));
    let results = results.iter().map(renumbered).collect();
    let body = Body::new(n, first, results).ok()?;
    let types = |values: &[Value]| -> Vec<TensorType> {
        let types = values.iter().map(|&v| graph.values[v].ty.clone());
        types.collect()
    };
    let columns = |body: &Body, values: &[Value]| {
        let types = types(values);
        let space = body.space(&types.iter().collect::<Vec<_>>()).ok();
        space.map(|space| space.columns())
    };
    let own = data.op.body().and_then(|body| columns(body, &data.inputs));
    let least = own.unwrap_or(TOGETHER).min(TOGETHER);
    let fits = least <= columns(&body, &operands)?;
    fits.then_some((body, operands))
}

/// Which views may be read from their operand's bytes, so that no more bytes stay alive.
struct Lives {
    /// For each value: the elements of its views that only kernels read, and of those among them
    /// that are read after the forward.
    viewed: Table<Value, [u64; 2]>,
    /// The position of the last reader of each value that is no view of it.
    last: Table<Value, usize>,
    /// The position of the last reader of each view.
    read: Table<Node, usize>,
    /// The position after the last node of the forward.
    forward: usize,
}

impl Lives {
    fn of(graph: &Graph, readers: &Readers, positions: &Table<Node, usize>) -> Lives {
        let is_forward = |&node: &Node| graph.nodes[node].phase == Phase::Forward;
        let forward = graph.order.iter().rposition(is_forward);
        let mut lives = Lives {
            viewed: Table::filled(graph.values.len(), [0; 2]),
            last: Table::filled(graph.values.len(), 0),
            read: Table::filled(graph.nodes.len(), 0),
            forward: forward.map_or(0, |last| last + 1),
        };
        // The end of the step reads after all nodes.
        let position = |reader: &Option<Node>| reader.map_or(usize::MAX, |node| positions[node]);
        for value in graph.values.ids() {
            let others = readers[value].iter();
            let others = others.filter(|r| r.is_none_or(|r| !moves(&graph.nodes[r].op)));
            lives.last[value] = others.map(position).max().unwrap_or(0);
        }
        // A view of a view comes first.
        let mut absorbed = Table::filled(graph.nodes.len(), false);
        for &node in graph.order.iter().rev() {
            let data = &graph.nodes[node];
            if moves(&data.op) {
                let mut all = readers[data.outputs[0]].iter();
                absorbed[node] = all.all(|r| r.is_some_and(|r| absorbed[r] || is_kernel(graph, r)));
                let read = readers[data.outputs[0]].iter().map(position).max();
                lives.read[node] = read.unwrap_or(0);
                if !absorbed[node] {
                    continue;
                }
                let numel = graph.values[data.outputs[0]].ty.numel();
                let viewed = &mut lives.viewed[graph.root(data.inputs[0])];
                viewed[0] += numel;
                if lives.forward <= lives.read[node] {
                    viewed[1] += numel;
                }
            }
        }
        lives
    }

    /// True if the operand lives as long as the view anyway, or if its views have as many elements
    /// as it has.
    fn allow(&self, graph: &Graph, view: Node) -> bool {
        let data = &graph.nodes[view];
        let root = graph.root(data.inputs[0]);
        let [all, late] = self.viewed[root];
        let needed = match self.forward <= self.read[view] {
            true => late,
            false => all,
        };
        graph.def_node(root).is_none()
            || self.read[view] <= self.last[root]
            || graph.values[root].ty.numel() <= needed
    }
}
