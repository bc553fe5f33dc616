//! Makes one step of several micro-batches. Gradients are accumulated over them, so memory that
//! grows with the batch's size is needed for only one micro-batch at a time.
//!
//! Before: forward and backward of one batch, and the gradients. After: the same nodes once for
//! each of `n` micro-batches, one after the other, on inputs `NAME.0` to `NAME.n-1` of the same
//! types. All read the same parameters. Other states (of the random generator, running statistics)
//! go from one micro-batch to the next. A parameter is cast once for all. A gradient is the mean
//! over the micro-batches, added up in their order in the gradient's own type. If losses are means
//! over equal numbers of samples, it equals the gradient of the whole batch. Of a scaled loss, each
//! micro-batch has its part of the scale already ([`super::scale`]), so gradients are only added
//! up. The output `loss` is the mean of the losses; other outputs become `NAME.0`, ….
//!
//! The optimizer comes after this pass: gradients are complete in the backward of the last
//! micro-batch.

use super::scale::SCALE;
use ir::graph::{self, Def, Output};
use ir::op::attrs::Scalar;
use ir::op::{Number, Op};
use ir::{Graph, Node, Phase, StateKind, Table, Value};
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// Why a step is not made of several micro-batches.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum MicrobatchError {
    /// The graph has no gradients to accumulate.
    #[error("micro-batches accumulate gradients, and the graph names none")]
    NoGradients,
    /// The name of a micro-batch's input is in use.
    #[error("micro-batch {batch} needs an input {name}, and the graph has a value of that name")]
    Taken {
        /// The micro-batch, from 0.
        batch: usize,
        /// The name.
        name: String,
    },
    /// A node of a micro-batch does not fit the graph.
    #[error(transparent)]
    Graph(#[from] graph::Error),
}

/// Makes a step of `n` micro-batches. An error if the graph has no gradients, or if the name of an
/// input is in use.
pub fn run(graph: &mut Graph, n: usize) -> Result<(), MicrobatchError> {
    if n <= 1 {
        return Ok(());
    }
    if graph.gradients.is_empty() {
        return Err(MicrobatchError::NoGradients);
    }
    let mut many = Many::new(graph);
    for k in 0..n {
        many.batch(k, k + 1 == n)?;
    }
    *graph = many.finish(n)?;
    Ok(())
}

struct Many<'a> {
    one: &'a Graph,
    graph: Graph,
    /// Names that are in use.
    names: BTreeSet<String>,
    /// The value of each state before the next micro-batch.
    found: Vec<Value>,
    /// The gradients are of the nth part of the loss.
    is_scaled: bool,
    /// The results of nodes that all micro-batches share.
    shared: BTreeMap<Node, Vec<Value>>,
    /// The gradients that each node computes, by their position in `one.gradients`.
    computed: BTreeMap<Node, Vec<usize>>,
    /// The sum of each gradient so far, in the order of `one.gradients`; at the end the mean.
    sums: Vec<Option<Value>>,
    /// The sum of the losses so far, by the position in `one.outputs`.
    losses: Vec<Option<Value>>,
}

impl<'a> Many<'a> {
    fn new(one: &'a Graph) -> Many<'a> {
        let mut graph = Graph::new(one.name.clone());
        let mut names = BTreeSet::new();
        let mut found = vec![];
        for state in one.states.values() {
            let data = &one.values[state.before];
            names.insert(data.name.clone());
            found.push(graph.add_state(
                data.name.clone(),
                state.path.clone(),
                state.kind,
                data.ty.clone(),
            ));
        }
        let mut computed: BTreeMap<Node, Vec<usize>> = BTreeMap::new();
        for (i, &(_, gradient)) in one.gradients.iter().enumerate() {
            if let Some(node) = one.def_node(gradient) {
                computed.entry(node).or_default().push(i);
            }
        }
        let (sums, losses) = (
            vec![None; one.gradients.len()],
            vec![None; one.outputs.len()],
        );
        Many {
            one,
            graph,
            names,
            found,
            is_scaled: one.states.values().any(|state| state.path == SCALE),
            shared: BTreeMap::new(),
            computed,
            sums,
            losses,
        }
    }

    /// An unused name.
    fn name(&mut self, mut name: String) -> String {
        while !self.names.insert(name.clone()) {
            name.push('_');
        }
        name
    }

    fn node(
        &mut self,
        op: Op,
        inputs: &[Value],
        name: String,
        phase: Phase,
        module: &str,
    ) -> Result<Value, graph::Error> {
        let name = self.name(name);
        Ok(self.graph.add_node(op, inputs, &[name], phase, module)?[0])
    }

    /// Adds micro-batch `k`.
    fn batch(&mut self, k: usize, is_last: bool) -> Result<(), MicrobatchError> {
        let one = self.one;
        // The value of this micro-batch for each value of the single batch.
        let mut here: Table<Value, Option<Value>> = Table::filled(one.values.len(), None);
        for (state, &found) in one.states.values().zip(&self.found) {
            here[state.before] = Some(found);
        }
        for &input in &one.inputs {
            let name = format!("{}.{k}", one.values[input].name);
            if !self.names.insert(name.clone()) {
                return Err(MicrobatchError::Taken { batch: k, name });
            }
            here[input] = Some(self.graph.add_input(name, one.values[input].ty.clone()));
        }
        for (i, &(_, gradient)) in one.gradients.iter().enumerate() {
            if one.def_node(gradient).is_none() {
                self.accumulate(i, now(&here, gradient), k, is_last)?;
            }
        }
        for &node in &one.order {
            self.copy_node(node, k, &mut here)?;
            for i in self.computed.get(&node).cloned().unwrap_or_default() {
                self.accumulate(i, now(&here, one.gradients[i].1), k, is_last)?;
            }
        }
        self.found = one
            .states
            .values()
            .map(|state| now(&here, state.after))
            .collect();
        self.add_outputs(k, &here)
    }

    /// Adds a node for micro-batch `k`; `here` has the micro-batch's values.
    fn copy_node(
        &mut self,
        node: Node,
        k: usize,
        here: &mut Table<Value, Option<Value>>,
    ) -> Result<(), MicrobatchError> {
        let data = &self.one.nodes[node];
        if let Some(values) = self.shared.get(&node) {
            let values = data.outputs.iter().zip(values);
            values.for_each(|(&output, &value)| here[output] = Some(value));
            return Ok(());
        }
        let inputs: Vec<Value> = data.inputs.iter().map(|&v| now(here, v)).collect();
        let names: Vec<String> = data
            .outputs
            .iter()
            .map(|&v| self.name(format!("{}.{k}", self.one.values[v].name)))
            .collect();
        let outputs = self.graph.add_node(
            data.op.clone(),
            &inputs,
            &names,
            data.phase,
            data.module.clone(),
        )?;
        for (&output, &value) in data.outputs.iter().zip(&outputs) {
            here[output] = Some(value);
        }
        if is_cast_parameter(self.one, node) {
            self.shared.insert(node, outputs);
        }
        Ok(())
    }

    /// Adds the losses of micro-batch `k` to the earlier ones, and its other outputs under new
    /// names.
    fn add_outputs(
        &mut self,
        k: usize,
        here: &Table<Value, Option<Value>>,
    ) -> Result<(), MicrobatchError> {
        let one = self.one;
        for (i, output) in one.outputs.iter().enumerate() {
            let value = now(here, output.value);
            if is_loss(one, output) {
                let name = format!("{}.sum.{k}", one.values[output.value].name);
                self.losses[i] = Some(match self.losses[i] {
                    Some(sum) => self.node(Op::Add, &[sum, value], name, Phase::Forward, "")?,
                    None => value,
                });
            } else {
                self.graph.outputs.push(Output {
                    name: format!("{}.{k}", output.name),
                    value,
                });
            }
        }
        Ok(())
    }

    /// Adds gradient number `i` of micro-batch `k` to its sum. The last micro-batch divides the
    /// sum.
    fn accumulate(
        &mut self,
        i: usize,
        gradient: Value,
        k: usize,
        is_last: bool,
    ) -> Result<(), graph::Error> {
        let one = self.one;
        let state = &one.states[one.gradients[i].0];
        let name = &one.values[state.before].name;
        let module = state.path.rsplit_once('.').map_or("", |(module, _)| module);
        let mut sum = match self.sums[i] {
            Some(sum) => {
                let name = format!("grad.{name}.sum.{k}");
                self.node(Op::Add, &[sum, gradient], name, Phase::Backward, module)?
            }
            None => gradient,
        };
        if is_last && !self.is_scaled {
            let name = format!("grad.{name}");
            sum = self.node(divided_by(k + 1), &[sum], name, Phase::Backward, module)?;
        }
        self.sums[i] = Some(sum);
        Ok(())
    }

    fn finish(mut self, n: usize) -> Result<Graph, graph::Error> {
        let one = self.one;
        for (i, output) in one.outputs.iter().enumerate() {
            if let Some(sum) = self.losses[i] {
                let name = format!("{}.mean", one.values[output.value].name);
                let value = self.node(divided_by(n), &[sum], name, Phase::Forward, "")?;
                self.graph.outputs.push(Output {
                    name: output.name.clone(),
                    value,
                });
            }
        }
        for (state, &found) in self.graph.states.values_mut().zip(&self.found) {
            state.after = found;
        }
        for (i, &(state, _)) in one.gradients.iter().enumerate() {
            let mean =
                self.sums[i].expect("every gradient should be computed in every micro-batch");
            self.graph.gradients.push((state, mean));
        }
        Ok(self.graph)
    }
}

fn now(here: &Table<Value, Option<Value>>, value: Value) -> Value {
    here[value].expect("a graph's order should be topological")
}

/// True for a cast of a parameter, which no micro-batch changes.
fn is_cast_parameter(graph: &Graph, node: Node) -> bool {
    let data = &graph.nodes[node];
    let root = |&value: &Value| graph.values[graph.root(value)].def;
    matches!(data.op, Op::Cast(_))
        && matches!(data.inputs.first().map(root), Some(Def::State(state))
            if graph.states[state].kind == StateKind::Param
                && graph.states[state].before == graph.states[state].after)
}

/// The output that is averaged: the loss, a number.
fn is_loss(graph: &Graph, output: &Output) -> bool {
    let ty = &graph.values[output.value].ty;
    output.name == "loss" && ty.dtype().is_float() && ty.numel() == 1
}

fn divided_by(n: usize) -> Op {
    Op::DivScalar(Scalar {
        value: Number::Float(n as f64),
    })
}
