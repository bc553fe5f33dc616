//! Passes over graphs.

pub mod accumulate;
pub mod canonical;
pub mod fuse;
pub mod loss;
pub mod microbatch;
pub mod optimizer;
pub mod simplify;

use ir::graph::{Def, NodeData, ValueData};
use ir::{Attr, Graph, Node, Op, Table, TensorType, Value};
use std::collections::BTreeSet;

/// Who reads each value or an alias of it, aliases left out; by root. `None` stands for the step's
/// end.
type Readers = Table<Value, Vec<Option<Node>>>;

fn readers(graph: &Graph) -> Readers {
    let mut readers = Table::filled(graph.values.len(), vec![]);
    for &node in &graph.order {
        let data = &graph.nodes[node];
        if !data.op.is_alias() {
            let roots: BTreeSet<Value> = data.inputs.iter().map(|&v| graph.root(v)).collect();
            roots
                .into_iter()
                .for_each(|root: Value| readers[root].push(Some(node)));
        }
    }
    for value in graph.wanted() {
        readers[graph.root(value)].push(None);
    }
    readers
}

/// Adds a node of one result, of the phase and module of another. It is in no order yet.
fn add_beside(
    graph: &mut Graph,
    beside: Node,
    op: Op,
    inputs: Vec<Value>,
    ty: TensorType,
    name: String,
) -> (Node, Value) {
    let (phase, module) = (
        graph.nodes[beside].phase,
        graph.nodes[beside].module.clone(),
    );
    let node = graph.nodes.push(NodeData {
        op,
        inputs,
        outputs: vec![],
        phase,
        module,
    });
    let value = graph.values.push(ValueData {
        name,
        ty,
        def: Def::Node(node, 0),
    });
    graph.nodes[node].outputs.push(value);
    (node, value)
}

/// The op that reshapes to these sizes.
fn reshape_to(sizes: impl IntoIterator<Item = u64>) -> Op {
    let shape = sizes.into_iter().map(|size| size as i64).collect();
    Op::new("reshape", [("shape", Attr::Ints(shape))]).expect("reshape should have a shape")
}
