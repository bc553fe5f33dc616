//! The norm over all gradients, and the factor that clips them to a norm.

use super::module_of;
use ir::graph::{self, StateData};
use ir::op::Op;
use ir::op::attrs::{Along, ClipScale, Reduction, Sizes};
use ir::{DType, Graph, Phase, State, Value};

/// The most sums of squares that one kernel reads: GPUs pass a few hundred addresses to a kernel.
const MOST_SUMS: usize = 192;

/// Adds the sum of squares of each gradient, f64. There are at most [`MOST_SUMS`]: the first ones
/// are added up. A gradient that was widened is read in the type that it had, so that only its
/// update reads the wider one.
pub(super) fn squares(
    graph: &mut Graph,
    gradients: &[(State, Value)],
) -> Result<Vec<Value>, graph::Error> {
    let mut sums: Vec<Value> = vec![];
    for &(state, gradient) in gradients {
        let gradient = narrow(graph, gradient);
        let StateData { before, path, .. } = &graph.states[state];
        let (name, module) = (
            format!("sum_squares.{}", graph.values[*before].name),
            module_of(path),
        );
        sums.extend(graph.add_node(
            Op::SumSquares,
            &[gradient],
            &[name],
            Phase::Optimizer,
            module,
        )?);
    }
    // The same additions in the same order as without.
    while sums.len() > MOST_SUMS {
        let name = format!("squares.{}", sums.len() - MOST_SUMS);
        let added = graph.add_node(Op::Add, &sums[..2], &[name], Phase::Optimizer, "")?;
        sums.splice(..2, added);
    }
    Ok(sums)
}

/// Adds the factor by which gradients are multiplied so that the norm over all of them is at most
/// `norm`, in a type.
pub(super) fn clip_scale(
    graph: &mut Graph,
    squares: &[Value],
    norm: f64,
    dtype: DType,
) -> Result<Value, graph::Error> {
    add(
        graph,
        Op::ClipScale(ClipScale {
            dtype,
            max_norm: norm,
        }),
        squares,
        "clip_scale",
    )
}

/// The value in half precision that a cast to a wider type reads; other values as they are.
pub(super) fn narrow(graph: &Graph, value: Value) -> Value {
    let Some(node) = graph.def_node(value) else {
        return value;
    };
    let data = &graph.nodes[node];
    let dtype = |v: Value| graph.values[v].ty.dtype();
    let is_half = |&v: &Value| matches!(dtype(v), DType::BF16 | DType::F16);
    match &data.inputs[..] {
        [from] if matches!(data.op, Op::Cast(_)) && is_half(from) && !is_half(&value) => *from,
        _ => value,
    }
}

/// Adds the sum of all squares, f64.
pub(super) fn total(graph: &mut Graph, squares: &[Value]) -> Result<Value, graph::Error> {
    let mut rows = vec![];
    for (i, &sum) in squares.iter().enumerate() {
        let row = Op::Reshape(Sizes { shape: vec![1] });
        rows.push(add(graph, row, &[sum], &format!("squares.row.{i}"))?);
    }
    let all = match rows[..] {
        [row] => row,
        _ => add(graph, Op::Cat(Along { dim: 0 }), &rows, "squares")?,
    };
    let total = Op::Sum(Reduction {
        dims: vec![0],
        keepdim: false,
    });
    add(graph, total, &[all], "squares.sum")
}

/// Adds the root of the sum of all squares, f64.
pub(super) fn root(graph: &mut Graph, total: Value) -> Result<Value, graph::Error> {
    add(graph, Op::Sqrt, &[total], "grad_norm")
}

fn add(graph: &mut Graph, op: Op, inputs: &[Value], name: &str) -> Result<Value, graph::Error> {
    Ok(graph.add_node(op, inputs, &[name.to_string()], Phase::Optimizer, "")?[0])
}
