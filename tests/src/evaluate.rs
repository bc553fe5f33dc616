//! The meaning of a graph, computed in the simplest way: each node once, in the order of the graph,
//! on separate tensors. No schedule, no plan, no streams; only the kernels come from the runtime.

use codegen::{attr, dtype};
use ir::{Graph, Op, Table, TensorType, Value};
use runtime::kernels::owned::{OwnedTensor, run_op};
use std::collections::BTreeMap;

/// Bytes of tensors by name: an input's or output's name, a state's path.
pub type Tensors = BTreeMap<String, Vec<u8>>;

/// Computes one step: changes `states`, which are given by path, and returns the outputs by name.
/// An error names the node and the kernel's reason. Panics if an input or a state has no bytes.
pub fn step(graph: &Graph, states: &mut Tensors, inputs: &Tensors) -> Result<Tensors, String> {
    let mut tensors: Table<Value, Option<OwnedTensor>> = Table::filled(graph.values.len(), None);
    for &input in &graph.inputs {
        tensors[input] = Some(given(graph, input, inputs, &graph.values[input].name));
    }
    for state in graph.states.values() {
        tensors[state.before] = Some(given(graph, state.before, states, &state.path));
    }
    for &node in &graph.order {
        let data = &graph.nodes[node];
        let operands: Vec<&OwnedTensor> =
            data.inputs.iter().map(|&v| computed(&tensors, v)).collect();
        let ins: Vec<&TensorType> = data.inputs.iter().map(|&v| &graph.values[v].ty).collect();
        let results = run(&data.op, &ins, &operands)
            .map_err(|e| format!("node {}: {e}", graph.node_name(node)))?;
        for (&output, result) in data.outputs.iter().zip(results) {
            tensors[output] = Some(result);
        }
    }
    for state in graph.states.values() {
        states.insert(state.path.clone(), computed(&tensors, state.after).bytes());
    }
    Ok(graph
        .outputs
        .iter()
        .map(|o| (o.name.clone(), computed(&tensors, o.value).bytes()))
        .collect())
}

/// Runs one op on tensors of these types; for a fused op, its ops in turn.
pub fn run(
    op: &Op,
    types: &[&TensorType],
    operands: &[&OwnedTensor],
) -> Result<Vec<OwnedTensor>, String> {
    let outs = op.infer(types)?;
    if let Some(body) = op.body() {
        let all = body.types(types)?;
        let mut values: Vec<OwnedTensor> = operands.iter().map(|&x| x.clone()).collect();
        for step in body.steps() {
            let ins: Vec<&TensorType> = step.inputs.iter().map(|&v| &all[v]).collect();
            let operands: Vec<&OwnedTensor> = step.inputs.iter().map(|&v| &values[v]).collect();
            let results = run(&step.op, &ins, &operands)?;
            values.extend(results);
        }
        return Ok(body.results().iter().map(|&v| values[v].clone()).collect());
    }
    if op.is_alias() {
        return Ok(vec![operands[0].reshape(&shape(&outs[0]))]);
    }
    let attrs: Vec<_> = op
        .attrs()
        .iter()
        .map(|(&key, value)| (key.to_string(), attr(value)))
        .collect();
    let scratch = op.work(types, &outs).scratch.cpu;
    let outs: Vec<_> = outs
        .iter()
        .map(|ty| (dtype(ty.dtype()), shape(ty)))
        .collect();
    run_op(op.name(), &attrs, operands, &outs, scratch).map_err(|e| e.to_string())
}

fn given(graph: &Graph, value: Value, tensors: &Tensors, name: &str) -> OwnedTensor {
    let bytes = tensors
        .get(name)
        .unwrap_or_else(|| panic!("{name} should be given"));
    let ty = &graph.values[value].ty;
    OwnedTensor::from_bytes(dtype(ty.dtype()), &shape(ty), bytes)
}

fn computed(tensors: &Table<Value, Option<OwnedTensor>>, value: Value) -> &OwnedTensor {
    tensors[value]
        .as_ref()
        .expect("a graph's order should be topological")
}

fn shape(ty: &TensorType) -> Vec<usize> {
    ty.shape().iter().map(|&d| d as usize).collect()
}
