//! What a graph means, computed the plainest way: each node once, in the order of the graph, on tensors of its own. No
//! schedule, no plan, no streams; only the kernels are those of the runtime.

use codegen::{attr, dtype};
use ir::{Graph, Table, TensorType, Value};
use runtime::kernels::owned::{OwnedTensor, run_op};
use std::collections::BTreeMap;

/// Bytes of tensors by name: an input's or output's name, a state's path.
pub type Tensors = BTreeMap<String, Vec<u8>>;

/// Computes one step: `states` by path become what the step leaves; the outputs are returned by name. An error says which
/// node's kernel refused what. Panics if an input or a state has no bytes.
pub fn step(graph: &Graph, states: &mut Tensors, inputs: &Tensors) -> Result<Tensors, String> {
    let mut tensors: Table<Value, Option<OwnedTensor>> = Table::filled(graph.values.len(), None);
    for &input in &graph.inputs {
        tensors[input] = Some(given(graph, input, inputs, &graph.values[input].name));
    }
    for state in &graph.states {
        tensors[state.before] = Some(given(graph, state.before, states, &state.path));
    }
    for &node in &graph.order {
        let data = &graph.nodes[node];
        let operands: Vec<&OwnedTensor> = data.inputs.iter().map(|&v| computed(&tensors, v)).collect();
        let results = if data.op.is_alias() {
            vec![operands[0].reshape(&shape(&graph.values[data.outputs[0]].ty))]
        } else {
            let attrs: Vec<_> = data.op.attrs().iter().map(|(&key, value)| (key.to_string(), attr(value))).collect();
            let ins: Vec<&TensorType> = data.inputs.iter().map(|&v| &graph.values[v].ty).collect();
            let outs: Vec<TensorType> = data.outputs.iter().map(|&v| graph.values[v].ty.clone()).collect();
            let scratch = data.op.work(&ins, &outs).scratch;
            let outs: Vec<_> = outs.iter().map(|ty| (dtype(ty.dtype()), shape(ty))).collect();
            let results = run_op(data.op.name(), &attrs, &operands, &outs, scratch);
            results.map_err(|e| format!("node {}: {e}", graph.node_name(node)))?
        };
        for (&output, result) in data.outputs.iter().zip(results) {
            tensors[output] = Some(result);
        }
    }
    for state in &graph.states {
        states.insert(state.path.clone(), computed(&tensors, state.after).bytes());
    }
    Ok(graph.outputs.iter().map(|o| (o.name.clone(), computed(&tensors, o.value).bytes())).collect())
}

fn given(graph: &Graph, value: Value, tensors: &Tensors, name: &str) -> OwnedTensor {
    let bytes = tensors.get(name).unwrap_or_else(|| panic!("{name} should be given"));
    let ty = &graph.values[value].ty;
    OwnedTensor::from_bytes(dtype(ty.dtype()), &shape(ty), bytes)
}

fn computed(tensors: &Table<Value, Option<OwnedTensor>>, value: Value) -> &OwnedTensor {
    tensors[value].as_ref().expect("a graph's order should be topological")
}

fn shape(ty: &TensorType) -> Vec<usize> {
    ty.shape().iter().map(|&d| d as usize).collect()
}
