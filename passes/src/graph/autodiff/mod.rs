//! Adds the backward of a step: reverse mode over the graph, one rule for each op.
//!
//! Before: a forward alone. Its output `loss` is one floating-point number, and no state has a
//! gradient. After: `graph.gradients` has the gradient of each floating-point parameter on which
//! the loss depends, in the parameter's own type. A parameter that the loss does not depend on has
//! none, as in PyTorch. The new nodes have the phase `bwd` and the module of the forward node that
//! they differentiate.
//!
//! [`run`] brings the forward into the form that later passes make of it, and only then
//! differentiates it: `canonical`, which keeps `detach`, `simplify`, then [`differentiate`]. So a
//! softmax or a norm that the file writes as ten ops has the derivative of one op, which saves
//! less. Enzyme measured the same for code (Moses and Churavy, 2020, arXiv 2010.01709). Both passes
//! run again on the whole.
//!
//! The walk is that of Speelpenning (1980). Nodes are visited from last to first. The adjoint of a
//! value, the derivative of the loss by it, is complete when the walk reaches the node that
//! computes the value. An adjoint that does not exist is absent: no zeros are computed (JAX calls
//! this a symbolic zero: Radul et al., 2022, arXiv 2204.10923).
//!
//! **Invariant:** the order of additions follows from the graph. The adjoints that the readers of a
//! value give are added in the order of the walk, the last reader first; a reader that reads it
//! twice gives operand 0's first. A value and its reshapes have one sum: see `adjoints`.
//! PyTorch's engine adds in this order too.
//!
//! [`derivative`] has the rule of each op; it does not compile until a new op has one.
//! `docs/autodiff.md` lists them.

mod adjoints;
mod derivative;
mod rules;
mod tape;

use super::{canonical, simplify};
use adjoints::Adjoints;
pub use derivative::{Derivative, Rule, derivative};
use ir::graph::{self, NodeData};
use ir::op::attrs::Full;
use ir::op::{Number, OpKind};
use ir::{DType, Graph, Node, Op, Phase, State, StateKind, Table, Value};
use tape::Tape;
use thiserror::Error;

/// The output that is differentiated.
pub const LOSS: &str = "loss";

/// Why a graph cannot be differentiated.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum AutodiffError {
    /// The graph has gradients.
    #[error("the step has a backward already; --differentiate is for a forward alone")]
    HasGradients,
    /// No output is the loss.
    #[error("the step has no output {LOSS} to differentiate")]
    NoLoss,
    /// The loss is not one number.
    #[error("the loss %{name} is {ty}; a loss is one floating-point number, such as f32[]")]
    LossType {
        /// The value.
        name: String,
        /// Its type.
        ty: String,
    },
    /// No parameter influences the loss.
    #[error("the loss %{0} depends on no parameter, so there is nothing to train")]
    Independent(String),
    /// An op on the way to a parameter has no derivative.
    #[error("no gradient passes %{node}, {op}: {why}")]
    Refused {
        /// The node.
        node: String,
        /// Its op.
        op: String,
        /// The reason.
        why: &'static str,
    },
    /// A node of the backward does not fit the graph.
    #[error(transparent)]
    Graph(#[from] graph::Error),
}

/// Brings the forward into the form that `canonical` and, if `simplified`, `simplify` make of it,
/// and differentiates it.
pub fn run(graph: &mut Graph, simplified: bool) -> Result<(), AutodiffError> {
    // The first pass takes time, so an error comes before it.
    loss_of(graph)?;
    canonical::run_before_autodiff(graph);
    if simplified {
        // A formula may be the derivative of another function, which has none of its own here.
        simplify::run_with(graph, |op| {
            !matches!(derivative(op), Derivative::Refused(_))
        });
    }
    differentiate(graph)?;
    drop_detached(graph);
    Ok(())
}

/// Puts the values themselves in the place of detached ones: there are no more gradients to stop.
fn drop_detached(graph: &mut Graph) {
    let is_detach = |node: &Node| matches!(graph.nodes[*node].op, Op::Detach);
    let detached: Vec<Node> = graph.order.iter().copied().filter(is_detach).collect();
    if detached.is_empty() {
        return;
    }
    let mut edit = graph.edit();
    for node in detached {
        let data = edit.graph().nodes[node].clone();
        edit.replace_uses(data.outputs[0], data.inputs[0]);
        edit.remove(node);
    }
    edit.finish();
}

/// Adds the backward of the graph as it is.
pub fn differentiate(graph: &mut Graph) -> Result<(), AutodiffError> {
    let loss = loss_of(graph)?;
    let parameters = parameters(graph);
    let depends = dependents(graph);
    let name = graph.values[loss].name.clone();
    if !depends[loss] {
        return Err(AutodiffError::Independent(name));
    }
    let forward = graph.order.clone();
    let last = graph.def_node(loss);
    let mut adjoints = Adjoints::new(graph);
    let mut tape = Tape::new(graph);
    tape.enter(&name, last);
    let one = seed(&mut tape, loss)?;
    adjoints.give(&mut tape, loss, one.into())?;
    for &node in forward.iter().rev() {
        visit(node, &depends, &mut tape, &mut adjoints)?;
    }
    let mut gradients = vec![];
    for (state, value) in parameters {
        if let Some(gradient) = adjoints.take(&mut tape, value)? {
            gradients.push((state, gradient));
        }
    }
    graph.gradients = gradients;
    put_before_updates(graph, forward.len());
    if graph.gradients.is_empty() {
        return Err(AutodiffError::Independent(name));
    }
    Ok(())
}

/// The value of the output `loss`, if the graph is a forward.
fn loss_of(graph: &Graph) -> Result<Value, AutodiffError> {
    if !graph.gradients.is_empty() {
        return Err(AutodiffError::HasGradients);
    }
    let output = graph.outputs.iter().find(|output| output.name == LOSS);
    let value = output.ok_or(AutodiffError::NoLoss)?.value;
    let data = &graph.values[value];
    if data.ty.rank() > 0 || !is_differentiable(data.ty.dtype()) {
        return Err(AutodiffError::LossType {
            name: data.name.clone(),
            ty: data.ty.to_string(),
        });
    }
    Ok(value)
}

/// True for element types that gradients may have.
fn is_differentiable(dtype: DType) -> bool {
    dtype.is_float() && !dtype.is_eight_bit_float()
}

/// Parameters with floating-point elements, with their values before the step.
fn parameters(graph: &Graph) -> Vec<(State, Value)> {
    let states = graph.states.iter();
    states
        .filter(|(_, state)| state.kind == StateKind::Param)
        .map(|(id, state)| (id, state.before))
        .filter(|&(_, value)| is_differentiable(graph.values[value].ty.dtype()))
        .collect()
}

/// The values whose adjoints are needed: those that depend on a parameter, through ops whose
/// derivative is not zero.
pub fn dependents(graph: &Graph) -> Table<Value, bool> {
    let mut depends = Table::filled(graph.values.len(), false);
    for (_, value) in parameters(graph) {
        depends[value] = true;
    }
    for &node in &graph.order {
        let NodeData {
            op,
            inputs,
            outputs,
            ..
        } = &graph.nodes[node];
        let is_zero = matches!(derivative(op.kind()), Derivative::Zero);
        if is_zero || !inputs.iter().any(|&input| depends[input]) {
            continue;
        }
        for (i, &output) in outputs.iter().enumerate() {
            let is_count = i == 1 && op.kind() == OpKind::NllLoss;
            depends[output] = is_differentiable(graph.values[output].ty.dtype()) && !is_count;
        }
    }
    depends
}

/// The derivative of the loss by itself.
fn seed(tape: &mut Tape<'_>, loss: Value) -> Result<Value, graph::Error> {
    let full = Full {
        dtype: tape.dtype(loss),
        shape: vec![],
        value: Number::Float(1.0),
    };
    tape.one(Op::Full(full), &[])
}

/// Gives the operands of a node the adjoints that follow from those of its results.
fn visit(
    node: Node,
    depends: &Table<Value, bool>,
    tape: &mut Tape<'_>,
    adjoints: &mut Adjoints,
) -> Result<(), AutodiffError> {
    let data = tape.graph().nodes[node].clone();
    if !data.outputs.iter().any(|&output| adjoints.has(output)) {
        return Ok(());
    }
    let name = tape.graph().node_name(node).to_string();
    let refused = |why| AutodiffError::Refused {
        node: name.clone(),
        op: match &data.op {
            Op::Extern(call) => call.name.clone(),
            op => op.name().to_string(),
        },
        why,
    };
    let apply = match derivative(data.op.kind()) {
        Derivative::Rule(Rule(apply)) => apply,
        Derivative::Zero => return Ok(()),
        Derivative::Refused(why) => return Err(refused(why)),
    };
    tape.enter(&name, Some(node));
    let mut results = vec![];
    for &output in &data.outputs {
        results.push(adjoints.take(tape, output)?);
    }
    let (Some(dy), true) = (results[0], results[1..].iter().all(Option::is_none)) else {
        return Err(refused(
            "a result besides its first is used, and only the first has a derivative",
        ));
    };
    let needs: Vec<bool> = data.inputs.iter().map(|&input| depends[input]).collect();
    let call = rules::Call {
        op: &data.op,
        inputs: &data.inputs,
        outputs: &data.outputs,
        needs: &needs,
        dy,
    };
    let given = apply(tape, &call).map_err(|error| match error {
        rules::Fault::Refused(why) => refused(why),
        rules::Fault::Graph(error) => error.into(),
    })?;
    for ((&input, adjoint), needed) in data.inputs.iter().zip(given).zip(needs) {
        if let (Some(adjoint), true) = (adjoint, needed) {
            adjoints.give(tape, input, adjoint)?;
        }
    }
    Ok(())
}

/// Moves the backward, the nodes after the first `n`, before the updates at the end of the forward:
/// those of the random numbers' state.
fn put_before_updates(graph: &mut Graph, n: usize) {
    let is_update = |node: &Node| graph.nodes[*node].phase == Phase::Optimizer;
    let n_updates = graph.order[..n]
        .iter()
        .rev()
        .take_while(|&node| is_update(node));
    let start = n - n_updates.count();
    let mut order = graph.order.clone();
    order[start..].rotate_left(n - start);
    graph.set_order(order);
}
