//! Sums, extremes and softmax along dimensions.

use super::{Call, Fault, Given, only};
use crate::graph::autodiff::derivative::{Derivative, derivative};
use crate::graph::autodiff::tape::{Made, Tape};
use ir::graph::NodeData;
use ir::op::attrs::{Along, Dims, Reduction};
use ir::{Graph, Op, Phase, Value};

pub(in super::super) fn reduction(t: &mut Tape<'_>, c: &Call<'_>) -> Given {
    let (x, y, dy) = (c.inputs[0], c.outputs[0], c.dy);
    let dx = match c.op {
        Op::Sum(over) => {
            let kept = kept(t, over, x, dy)?;
            t.expand(kept, &t.shape(x))?
        }
        Op::Mean(over) => {
            let n = over.dims.iter().map(|&dim| t.size(x, dim) as f64).product();
            let kept = kept(t, over, x, dy)?;
            let whole = t.expand(kept, &t.shape(x))?;
            t.with(Op::DivScalar, whole, n)?
        }
        Op::Amax(over) | Op::Amin(over) => extreme(t, over, c)?,
        &Op::Cumsum(Along { dim }) => {
            let flip = |t: &mut Tape<'_>, x| t.one(Op::Flip(Dims { dims: vec![dim] }), &[x]);
            let from_end = flip(t, dy)?;
            let sums = t.one(Op::Cumsum(Along { dim }), &[from_end])?;
            flip(t, sums)?
        }
        // The chosen places are distinct.
        Op::TopK(along) => {
            let zeros = t.full(dy, &t.shape(x), 0.0)?;
            let dim = along.dim;
            t.one(Op::Scatter(Along { dim }), &[zeros, c.outputs[1], dy])?
        }
        &Op::Softmax(Along { dim }) => {
            let y = without_hidden_rows(t, y, dim).unwrap_or(y);
            t.one(Op::SoftmaxBwd(Along { dim }), &[dy, y])?
        }
        &Op::LogSoftmax(Along { dim }) => t.one(Op::LogSoftmaxBwd(Along { dim }), &[dy, y])?,
        _ => return Err(Fault::STRAY),
    };
    only(dx)
}

/// A tensor of the shape of a reduction's result, with size 1 in place of each reduced dimension.
fn kept(t: &mut Tape<'_>, over: &Reduction, x: Value, result: Value) -> Made {
    let mut shape = t.shape(x);
    for &dim in &over.dims {
        shape[dim as usize] = 1;
    }
    t.reshape(result, &shape)
}

/// Elements equal to the extreme share its adjoint evenly.
fn extreme(t: &mut Tape<'_>, over: &Reduction, c: &Call<'_>) -> Result<Value, Fault> {
    let x = c.inputs[0];
    let y = kept(t, over, x, c.outputs[0])?;
    let dy = kept(t, over, x, c.dy)?;
    let is_extreme = t.one(Op::Eq, &[x, y])?;
    let mask = t.cast(is_extreme, t.dtype(x))?;
    let n = if over.dims.is_empty() {
        mask
    } else {
        t.sum(mask, &over.dims)?
    };
    let shared = t.mul(dy, mask)?;
    Ok(t.div(shared, n)?)
}

/// A softmax whose rows are replaced by zeros where nothing takes part, if that is all that the
/// forward reads of it. Such rows are NaN before and have no adjoint, so the derivative is that of
/// the zeros, as in PyTorch, and only the zeros are saved.
fn without_hidden_rows(t: &Tape<'_>, y: Value, dim: i64) -> Option<Value> {
    let graph = t.graph();
    let mut found = None;
    for &node in &graph.order {
        let NodeData {
            op,
            inputs,
            outputs,
            phase,
            ..
        } = &graph.nodes[node];
        if *phase == Phase::Backward || !inputs.contains(&y) {
            continue;
        }
        let &[condition, a, b] = &inputs[..] else {
            // A comparison passes no adjoint on.
            matches!(derivative(op.kind()), Derivative::Zero).then_some(())?;
            continue;
        };
        let other = if a == y { b } else { a };
        let is_choice = matches!(op, Op::Where) && found.is_none() && is_zero(graph, other);
        let shape = t.shape(y);
        let has_rows = t.shape(condition).len() == shape.len() && t.size(condition, dim) == 1;
        let is_of_rows = has_rows || a == other && is_nan(graph, condition, y);
        (is_choice && is_of_rows && t.shape(outputs[0]) == shape).then_some(())?;
        found = Some(outputs[0]);
    }
    found
}

/// True for a tensor of zeros.
fn is_zero(graph: &Graph, value: Value) -> bool {
    let node = graph.def_node(graph.root(value));
    let op = node.map(|node| &graph.nodes[node].op);
    matches!(op, Some(Op::Full(full)) if full.value.to_f64() == 0.0)
}

/// True for x != x, which holds where x is NaN.
fn is_nan(graph: &Graph, value: Value, x: Value) -> bool {
    let node = graph.def_node(value).map(|node| &graph.nodes[node]);
    node.is_some_and(|node| matches!(node.op, Op::Ne) && node.inputs[..] == [x, x])
}
