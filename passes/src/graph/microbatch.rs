//! Makes one step of several micro-batches. Gradients are accumulated over them, so memory that
//! grows with the batch's size is needed for only one micro-batch at a time.
//!
//! Before: forward and backward of one batch, and the gradients. After: the same nodes once for
//! each of `n` micro-batches, one after the other, on inputs `NAME.0` to `NAME.n-1` of the same
//! types. All read the same parameters. Other states (of the random generator, running statistics)
//! go from one micro-batch to the next. A parameter is cast once for all. A gradient is the mean or
//! the sum over the micro-batches, added up in their order in the gradient's own type, and so is
//! the output `loss`: as [`reduction`] reads the loss, so that both equal those of the whole batch.
//! What counts samples there is computed for all micro-batches first, and each micro-batch reads
//! the count of all. Of a scaled loss ([`super::scale`]) that is a mean, each micro-batch has its
//! part of the scale, and gradients are only added up. Other outputs become `NAME.0`, ….
//!
//! The optimizer comes after this pass: gradients are complete in the backward of the last
//! micro-batch.

use super::reduction::{self, Combination, Count, CountOf, NotAdditive, Whole};
use super::scale::SCALE;
use ir::graph::{self, Def, NodeData, Output, StateData};
use ir::op::attrs::{Cast, NllLoss, NllSum, Reduction, Scalar};
use ir::op::{Number, Op};
use ir::{DType, Graph, Node, Phase, StateKind, Table, Value};
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
    /// The loss of all micro-batches does not follow from theirs.
    #[error(
        "the loss of micro-batches together does not follow from their losses: {0}; --reduction \
         mean (in Python reduction=\"mean\") takes the mean of their losses and gradients, \
         whatever they are, and sum takes their sum"
    )]
    Loss(#[from] NotAdditive),
    /// A node of a micro-batch does not fit the graph.
    #[error(transparent)]
    Graph(#[from] graph::Error),
}

/// Makes a step of `n` micro-batches. An error if the graph has no gradients, if the name of an
/// input is in use, or if the loss of all does not follow from theirs.
pub fn run(graph: &mut Graph, n: usize, combination: Combination) -> Result<(), MicrobatchError> {
    if n <= 1 {
        return Ok(());
    }
    if graph.gradients.is_empty() {
        return Err(MicrobatchError::NoGradients);
    }
    let whole = whole(graph, combination)?;
    let mut many = Many::new(graph, n, &whole);
    many.inputs()?;
    whole
        .counts
        .iter()
        .try_for_each(|&count| many.count_all(count))?;
    for k in 0..n {
        many.batch(k, k + 1 == n)?;
    }
    *graph = many.finish()?;
    Ok(())
}

/// How the losses of micro-batches are put together.
pub fn whole(graph: &Graph, combination: Combination) -> Result<Whole, NotAdditive> {
    match combination {
        Combination::Auto => reduction::of(graph),
        Combination::Mean => Ok(Whole::default()),
        Combination::Sum => Ok(Whole {
            sums: true,
            counts: vec![],
            kind: reduction::Kind::Sum,
        }),
    }
}

/// The values of a micro-batch, for each value of the single batch.
type Here = Table<Value, Option<Value>>;

struct Many<'a> {
    one: &'a Graph,
    graph: Graph,
    whole: &'a Whole,
    /// What is known of each micro-batch.
    here: Vec<Here>,
    /// For each `nll_loss` whose targets are counted, their number in all micro-batches, f64.
    targets: BTreeMap<Node, Value>,
    /// Names that are in use.
    names: BTreeSet<String>,
    /// The value of each state before the next micro-batch.
    found: Vec<Value>,
    /// The state that is the scale of the loss, if it is scaled.
    scale: Option<Value>,
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
    fn new(one: &'a Graph, n: usize, whole: &'a Whole) -> Many<'a> {
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
        let scale = one.states.values().find(|state| state.path == SCALE);
        Many {
            one,
            graph,
            whole,
            here: vec![Table::filled(one.values.len(), None); n],
            targets: BTreeMap::new(),
            names,
            found,
            scale: scale.map(|state| state.before),
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

    /// Adds the inputs of all micro-batches.
    fn inputs(&mut self) -> Result<(), MicrobatchError> {
        let one = self.one;
        for batch in 0..self.here.len() {
            for &input in &one.inputs {
                let name = format!("{}.{batch}", one.values[input].name);
                if !self.names.insert(name.clone()) {
                    return Err(MicrobatchError::Taken { batch, name });
                }
                let ty = one.values[input].ty.clone();
                self.here[batch][input] = Some(self.graph.add_input(name, ty));
            }
        }
        Ok(())
    }

    /// Adds what counts samples, for all micro-batches, and gives each of them the count of all.
    fn count_all(&mut self, count: Count) -> Result<(), MicrobatchError> {
        let one = self.one;
        let counts = match count.of {
            CountOf::Targets(loss) => vec![one.nodes[loss].inputs[1]],
            CountOf::Sum | CountOf::Mean => vec![count.value],
        };
        let needed = ancestors(one, counts);
        let changes = |state: &&StateData| {
            let reads = |node: &Node| one.nodes[*node].inputs.contains(&state.before);
            state.after != state.before && needed.iter().any(reads)
        };
        if let Some(state) = one.states.values().find(changes) {
            return Err(MicrobatchError::Loss(NotAdditive {
                value: one.values[state.before].name.clone(),
                what: "a state that changes, on which the number of samples depends",
            }));
        }
        let name = one.values[count.value].name.clone();
        let mut all = None;
        for k in 0..self.here.len() {
            self.find_states(k);
            for &node in one.order.iter().filter(|node| needed.contains(node)) {
                self.copy_node(node, k)?;
            }
            let own = match count.of {
                CountOf::Targets(loss) => self.targets_of(loss, k)?,
                CountOf::Sum | CountOf::Mean => now(&self.here[k], count.value),
            };
            all = Some(match all {
                Some(all) => {
                    let name = format!("{name}.all.{k}");
                    self.node(Op::Add, &[all, own], name, Phase::Forward, "")?
                }
                None => own,
            });
        }
        let mut all = all.expect("there should be at least two micro-batches");
        match count.of {
            CountOf::Targets(loss) => {
                self.targets.insert(loss, all);
                let dtype = one.values[count.value].ty.dtype();
                all = self.node(cast(dtype), &[all], name, Phase::Forward, "")?;
            }
            CountOf::Mean => {
                let op = divided_by(self.here.len());
                all = self.node(op, &[all], name, Phase::Forward, "")?;
            }
            CountOf::Sum => {}
        }
        for here in &mut self.here {
            here[count.value] = Some(all);
        }
        Ok(())
    }

    /// The number of targets of micro-batch `k` that a loss does not ignore, f64.
    fn targets_of(&mut self, loss: Node, k: usize) -> Result<Value, graph::Error> {
        let data = &self.one.nodes[loss];
        let Op::NllLoss(NllLoss { ignore, .. }) = data.op else {
            unreachable!("targets should be those of an nll_loss");
        };
        let targets = now(&self.here[k], data.inputs[1]);
        let name = &self.one.values[data.outputs[1]].name;
        let value = Number::Int(ignore);
        let sum = Op::Sum(Reduction {
            dims: vec![0],
            keepdim: false,
        });
        let (phase, module) = (data.phase, data.module.as_str());
        let counts = Op::NeScalar(Scalar { value });
        let counts = self.node(
            counts,
            &[targets],
            format!("{name}.counts.{k}"),
            phase,
            module,
        )?;
        let ones = format!("{name}.ones.{k}");
        let ones = self.node(cast(DType::F64), &[counts], ones, phase, module)?;
        self.node(sum, &[ones], format!("{name}.sum.{k}"), phase, module)
    }

    /// Gives micro-batch `k` the states that the one before leaves.
    fn find_states(&mut self, k: usize) {
        for (state, &found) in self.one.states.values().zip(&self.found) {
            self.here[k][state.before] = Some(found);
        }
    }

    /// Adds micro-batch `k`.
    fn batch(&mut self, k: usize, is_last: bool) -> Result<(), MicrobatchError> {
        let one = self.one;
        self.find_states(k);
        for (i, &(_, gradient)) in one.gradients.iter().enumerate() {
            if one.def_node(gradient).is_none() {
                self.accumulate(i, now(&self.here[k], gradient), k, is_last)?;
            }
        }
        for &node in &one.order {
            self.copy_node(node, k)?;
            for i in self.computed.get(&node).cloned().unwrap_or_default() {
                self.accumulate(i, now(&self.here[k], one.gradients[i].1), k, is_last)?;
            }
        }
        let here = std::mem::take(&mut self.here[k]);
        let states = one.states.values();
        self.found = states.map(|state| now(&here, state.after)).collect();
        self.add_outputs(k, &here)
    }

    /// Adds a node for micro-batch `k`, unless its results exist.
    fn copy_node(&mut self, node: Node, k: usize) -> Result<(), MicrobatchError> {
        let data = &self.one.nodes[node];
        if let Some(&all) = self.targets.get(&node) {
            return self.share_of_mean(data, k, all);
        }
        if data.outputs.iter().all(|&v| self.here[k][v].is_some()) {
            return Ok(());
        }
        if let Some(values) = self.shared.get(&node) {
            let values = data.outputs.iter().zip(values);
            values.for_each(|(&output, &value)| self.here[k][output] = Some(value));
            return Ok(());
        }
        let inputs: Vec<Value> = data.inputs.iter().map(|&v| now(&self.here[k], v)).collect();
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
            self.here[k][output].get_or_insert(value);
        }
        if is_cast_parameter(self.one, node) {
            self.shared.insert(node, outputs);
        } else if self.is_scale(data) && !self.whole.sums {
            let op = divided_by(self.here.len());
            let (name, output) = (format!("loss_scale.part.{k}"), data.outputs[0]);
            let part = self.node(op, &outputs, name, data.phase, &data.module)?;
            self.here[k][output] = Some(part);
        }
        Ok(())
    }

    /// True for the node that reads the scale of the loss: see [`super::scale::current`].
    fn is_scale(&self, data: &NodeData) -> bool {
        data.op == Op::Where && data.inputs.get(2).copied() == self.scale && self.scale.is_some()
    }

    /// Adds the part of a mean over targets that micro-batch `k` has: the sum over its targets,
    /// divided by the number of targets of all. `nll_sum` adds in the order of `nll_loss`, in f64.
    fn share_of_mean(
        &mut self,
        data: &NodeData,
        k: usize,
        all: Value,
    ) -> Result<(), MicrobatchError> {
        let Op::NllLoss(NllLoss { ignore, .. }) = data.op else {
            unreachable!("targets should be those of an nll_loss");
        };
        let loss = &self.one.values[data.outputs[0]];
        let (name, dtype) = (format!("{}.{k}", loss.name), loss.ty.dtype());
        let inputs: Vec<Value> = data.inputs.iter().map(|&v| now(&self.here[k], v)).collect();
        let (phase, module) = (data.phase, data.module.as_str());
        let sum = Op::NllSum(NllSum { ignore });
        let sum = self.node(sum, &inputs, format!("{name}.sum"), phase, module)?;
        let share = format!("{name}.share");
        let share = self.node(Op::Div, &[sum, all], share, phase, module)?;
        let share = self.node(cast(dtype), &[share], name, phase, module)?;
        self.here[k][data.outputs[0]] = Some(share);
        Ok(())
    }

    /// Adds the losses of micro-batch `k` to the earlier ones, and its other outputs under new
    /// names.
    fn add_outputs(&mut self, k: usize, here: &Here) -> Result<(), MicrobatchError> {
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

    /// Adds gradient number `i` of micro-batch `k` to its sum. For a mean, the last micro-batch
    /// divides the sum.
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
        if is_last && !self.whole.sums && self.scale.is_none() {
            let name = format!("grad.{name}");
            sum = self.node(divided_by(k + 1), &[sum], name, Phase::Backward, module)?;
        }
        self.sums[i] = Some(sum);
        Ok(())
    }

    fn finish(mut self) -> Result<Graph, graph::Error> {
        let (one, n) = (self.one, self.here.len());
        for (i, output) in one.outputs.iter().enumerate() {
            if let Some(sum) = self.losses[i] {
                let value = if self.whole.sums {
                    sum
                } else {
                    let name = format!("{}.mean", one.values[output.value].name);
                    self.node(divided_by(n), &[sum], name, Phase::Forward, "")?
                };
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

/// The nodes that values depend on.
fn ancestors(graph: &Graph, values: Vec<Value>) -> BTreeSet<Node> {
    let mut nodes = BTreeSet::new();
    let mut left = values;
    while let Some(value) = left.pop() {
        if let Some(node) = graph.def_node(value)
            && nodes.insert(node)
        {
            left.extend(&graph.nodes[node].inputs);
        }
    }
    nodes
}

fn cast(dtype: DType) -> Op {
    Op::Cast(Cast { dtype })
}

/// The output that is put together: the loss, a number.
fn is_loss(graph: &Graph, output: &Output) -> bool {
    let ty = &graph.values[output.value].ty;
    output.name == "loss" && ty.dtype().is_float() && ty.numel() == 1
}

fn divided_by(n: usize) -> Op {
    Op::DivScalar(Scalar {
        value: Number::Float(n as f64),
    })
}
