//! Turns a step into the loss alone, as a model in evaluation computes it.
//!
//! Before: forward and backward of a model that learns. After: the outputs that are one number, of
//! a model in which a dropout drops nothing and a batch norm has its running statistics instead of
//! those of the batch. Nothing is learned and no state changes. Parameters with gradients stay
//! parameters; all others become buffers, so that later passes know which are frozen.

use super::{canonical, reshape_to};
use ir::graph::{self, Def};
use ir::op::attrs::{BatchNorm, Cast, Scalar};
use ir::op::{Number, OpKind};
use ir::{DType, Graph, Node, Op, State, StateKind, Value};
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// Why a step is not that of a model which evaluation could use.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum EvaluationError {
    /// The step updates numbers that are no running statistics of a batch norm, and what the model
    /// does with them in evaluation is not in the graph.
    #[error("the model updates {0}, which is no running statistic of a batch norm")]
    Buffer(String),
    /// A node does not fit the graph.
    #[error(transparent)]
    Graph(#[from] graph::Error),
}

/// The results of a batch norm of which running statistics are averages.
const MEAN: usize = 1;
const VARIANCE: usize = 3;

/// Rewrites the graph.
pub fn run(graph: &mut Graph) -> Result<(), EvaluationError> {
    let statistics = statistics(graph)?;
    let trained: BTreeSet<State> = graph.gradients.drain(..).map(|(state, _)| state).collect();
    for state in graph.states.ids() {
        let data = &mut graph.states[state];
        data.after = data.before;
        if data.kind == StateKind::Param && !trained.contains(&state) {
            data.kind = StateKind::Buffer;
        }
    }
    let is_number = |value: Value| {
        let ty = &graph.values[value].ty;
        ty.numel() == 1 && ty.dtype().is_float()
    };
    let numbers: Vec<bool> = graph.outputs.iter().map(|o| is_number(o.value)).collect();
    let mut numbers = numbers.into_iter();
    graph.outputs.retain(|_| numbers.next() == Some(true));
    canonical::remove_dead(graph);

    for node in graph.order.clone() {
        let data = &graph.nodes[node];
        match data.op {
            Op::Dropout(_) => {
                let (x, y) = (data.inputs[0], data.outputs[0]);
                let mut edit = graph.edit();
                edit.replace_uses(y, x);
                edit.finish();
            }
            Op::Sdpa(_) | Op::SdpaRows(_) => keep_weights(graph, node)?,
            Op::BatchNorm(BatchNorm { eps }) => {
                let [mean, variance] = [MEAN, VARIANCE].map(|i| statistics.get(&(node, i)));
                // Without running statistics it has those of the batch in evaluation, too.
                if let (Some(&mean), Some(&variance)) = (mean, variance) {
                    normalise(graph, node, [mean, variance], eps)?;
                }
            }
            _ => {}
        }
    }
    canonical::run(graph);
    Ok(())
}

/// Attention that drops weights keeps them all.
fn keep_weights(graph: &mut Graph, node: Node) -> Result<(), graph::Error> {
    let data = graph.nodes[node].clone();
    let is_key = |value: &Value| {
        let of = graph.def_node(*value);
        of.is_some_and(|node| graph.nodes[node].op.kind() == OpKind::DropoutKey)
    };
    let inputs: Vec<Value> = data.inputs.iter().copied().filter(|v| !is_key(v)).collect();
    if inputs.len() == data.inputs.len() {
        return Ok(());
    }
    let name = |&value: &Value| graph.values[value].name.clone();
    let names: Vec<String> = data.outputs.iter().map(name).collect();
    let mut edit = graph.edit();
    let new = edit.insert_before(node, data.op, &inputs, &names)?;
    let results = edit.graph().nodes[new].outputs.clone();
    for (&old, new) in data.outputs.iter().zip(results) {
        edit.replace_uses(old, new);
    }
    edit.remove(node);
    edit.finish();
    Ok(())
}

/// For the mean and the variance of each batch norm, the state that is their running average.
fn statistics(graph: &Graph) -> Result<BTreeMap<(Node, usize), Value>, EvaluationError> {
    let mut statistics = BTreeMap::new();
    for data in graph.states.values() {
        let changes = data.kind == StateKind::Buffer && data.after != data.before;
        // Whole numbers count batches.
        if !changes || !graph.values[data.before].ty.dtype().is_float() {
            continue;
        }
        let of = averaged(graph, data.before, data.after);
        let of = of.ok_or_else(|| EvaluationError::Buffer(data.path.clone()))?;
        statistics.insert(of, data.before);
    }
    Ok(statistics)
}

/// The result of a batch norm of which `after` is an average with `before`; `None` if it is
/// computed from anything else.
fn averaged(graph: &Graph, before: Value, after: Value) -> Option<(Node, usize)> {
    let mut found = None;
    let mut stack = vec![after];
    let mut seen = BTreeSet::new();
    while let Some(value) = stack.pop() {
        if value == before || !seen.insert(value) {
            continue;
        }
        match graph.values[value].def {
            Def::Node(node, i) if graph.nodes[node].op.kind() == OpKind::BatchNorm => {
                let is_other = found.is_some_and(|known| known != (node, i));
                if is_other || !(i == MEAN || i == VARIANCE) {
                    return None;
                }
                found = Some((node, i));
            }
            Def::Node(node, _) => stack.extend(&graph.nodes[node].inputs),
            // The number of batches so far may be a weight of the average.
            Def::State(_) if !graph.values[value].ty.dtype().is_float() => {}
            Def::State(_) | Def::Input(_) => return None,
        }
    }
    found
}

/// Replaces the result of a batch norm: `y = (x - mean) / sqrt(variance + eps) * w + b`.
fn normalise(
    graph: &mut Graph,
    node: Node,
    [mean, variance]: [Value; 2],
    eps: f64,
) -> Result<(), EvaluationError> {
    let data = &graph.nodes[node];
    let (y, [x, w, b]) = (
        data.outputs[0],
        [0, 1, 2].map(|operand| data.inputs[operand]),
    );
    let name = graph.values[y].name.clone();
    let ty = graph.values[x].ty.clone();
    let wide = match ty.dtype() {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    // Channels are dimension 1.
    let mut beside = vec![1; ty.rank()];
    beside[1] = ty.shape()[1];
    let mut edit = graph.edit();
    let mut n = 0;
    let mut insert = |op: Op, inputs: &[Value]| {
        n += 1;
        let node = edit.insert_before(node, op, inputs, &[format!("{name}.running_{n}")])?;
        Ok::<Value, graph::Error>(edit.graph().nodes[node].outputs[0])
    };
    let mut of = |op: Op, value: Value| insert(op, &[value]);
    let cast = |dtype| Op::Cast(Cast { dtype });
    let value = Number::Float(eps);
    let wanted = [x, w, b, mean, variance];
    let [x, w, b, mean, variance] = wanted.map(|value| of(cast(wide), value));
    let variance = of(Op::AddScalar(Scalar { value }), variance?)?;
    let rstd = of(Op::Rsqrt, variance)?;
    let factor = insert(Op::Mul, &[rstd, w?])?;
    let mut result = x?;
    for (op, operand) in [(Op::Sub, mean?), (Op::Mul, factor), (Op::Add, b?)] {
        let operand = insert(reshape_to(beside.iter().copied()), &[operand])?;
        result = insert(op, &[result, operand])?;
    }
    let result = insert(cast(ty.dtype()), &[result])?;
    edit.replace_uses(y, result);
    edit.finish();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::text::parse_graph;

    /// `%m` is an average of its last value and a parameter.
    #[test]
    fn a_buffer_that_is_no_statistic_is_named() {
        let text = "graph g {
            input %x : f32[8,4]
            state param %g -> %g : f32[4] \"g\"
            state buffer %m -> %m2 : f32[4] \"m\"
            fwd - %m1 = mul_scalar %m value=0.9 : f32[4]
            fwd - %m2 = add %m1, %g : f32[4]
            fwd - %y = mul %x, %m2 : f32[8,4]
            fwd - %loss = sum %y dims=[0,1] keepdim=false : f32[]
            output loss = %loss
        }";
        let error = run(&mut parse_graph(text).unwrap()).unwrap_err();
        assert_eq!(error, EvaluationError::Buffer("m".into()));
    }
}
