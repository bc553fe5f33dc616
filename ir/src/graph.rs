//! What is computed: the first noun. Pure SSA over tensors, in phases. States are tensors that
//! outlive a step.

mod edit;
mod readers;

use crate::ids;
use crate::op::{Access, Op, ShapeError, Work};
use crate::schedule::{Extent, Part};
use crate::table::Table;
use crate::types::TensorType;
pub use edit::Edit;
pub use readers::Readers;

ids! {
    /// One tensor of a graph.
    Value = "v";
    /// One operation of a graph.
    Node = "n";
    /// A tensor that outlives a step: a parameter, a moment.
    State = "state";
}

/// Why a node cannot be added to a graph.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// The operands or the attributes do not fit the op.
    #[error(transparent)]
    Op(#[from] ShapeError),
    /// The number of names is not the number of results.
    #[error("{op} has {results} results, {names} are named")]
    #[allow(missing_docs, reason = "the message names each")]
    Results {
        op: &'static str,
        results: usize,
        names: usize,
    },
}

/// For callers whose errors are still text.
impl From<Error> for String {
    fn from(error: Error) -> String {
        error.to_string()
    }
}

/// One training step.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Graph {
    /// The model's name.
    pub name: String,
    /// Tensors.
    pub values: Table<Value, ValueData>,
    /// Operations. A node that is not in `order` is not part of the step.
    pub nodes: Table<Node, NodeData>,
    /// The operations in the order in which they run. Invariant: topological.
    pub order: Vec<Node>,
    /// Values that are fed at every step.
    pub inputs: Vec<Value>,
    /// Values that the step finds at its start and leaves at its end.
    pub states: Table<State, StateData>,
    /// Values that a step returns, by name; the loss has the name `loss`.
    pub outputs: Vec<Output>,
    /// The gradients that an optimizer may be attached to: state, gradient.
    pub gradients: Vec<(State, Value)>,
}

/// A tensor's name, type and origin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ValueData {
    /// Unique in its graph, without the `%`.
    pub name: String,
    /// Its type.
    pub ty: TensorType,
    /// Where it comes from.
    pub def: Def,
}

/// Where a value comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Def {
    /// Fed at every step; the position in `inputs`.
    Input(usize),
    /// Found at the start of the step: the value of a state.
    State(State),
    /// Result `index` of a node.
    Node(Node, usize),
}

/// One operation.
#[derive(Clone, PartialEq, Debug)]
pub struct NodeData {
    /// What it computes.
    pub op: Op,
    /// Operands.
    pub inputs: Vec<Value>,
    /// Results.
    pub outputs: Vec<Value>,
    /// The part of the step to which it belongs.
    pub phase: Phase,
    /// The path of the module in which it was traced; may be empty.
    pub module: String,
}

crate::named! {
    /// Part of a training step.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
    #[allow(missing_docs, reason = "the names are the documentation")]
    pub enum Phase {
        Forward = "fwd",
        Backward = "bwd",
        Optimizer = "opt",
    }
}

/// A state's name, kind and values.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StateData {
    /// Its name outside: the parameter's path, `exp_avg.` + path, `rng`.
    pub path: String,
    /// Its kind, for reports and initial values.
    pub kind: StateKind,
    /// Its value before the step.
    pub before: Value,
    /// Its value after the step; `before` itself if the step does not change it.
    pub after: Value,
}

crate::named! {
    /// The kind of a state.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
    pub enum StateKind {
        /// Trained.
        Param = "param",
        /// A module's buffer: running statistics.
        Buffer = "buffer",
        /// A tensor constant of the model.
        Const = "const",
        /// Optimizer state: moments, step count. Starts at zero.
        Moment = "moment",
        /// State of the random-number generator: `i64[2]` = seed, step.
        Rng = "rng",
    }
}

/// A value that a step returns.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Output {
    /// Its name outside.
    pub name: String,
    /// Its value.
    pub value: Value,
}

impl Graph {
    /// An empty graph.
    pub fn new(name: impl Into<String>) -> Graph {
        Graph {
            name: name.into(),
            ..Graph::default()
        }
    }
    /// Adds an input.
    pub fn add_input(&mut self, name: impl Into<String>, ty: TensorType) -> Value {
        let def = Def::Input(self.inputs.len());
        let value = self.values.push(ValueData {
            name: name.into(),
            ty,
            def,
        });
        self.inputs.push(value);
        value
    }
    /// Adds a state that the step does not change until its `after` is set; returns its value
    /// before the step.
    pub fn add_state(
        &mut self,
        name: impl Into<String>,
        path: impl Into<String>,
        kind: StateKind,
        ty: TensorType,
    ) -> Value {
        let def = Def::State(self.states.next_id());
        let value = self.values.push(ValueData {
            name: name.into(),
            ty,
            def,
        });
        self.states.push(StateData {
            path: path.into(),
            kind,
            before: value,
            after: value,
        });
        value
    }
    /// Adds a node at the end of the order; its result types follow from the op's shape rule.
    /// `names` are the results' names. An error if the operands do not fit the op, or if the number
    /// of names is not the number of results.
    pub fn add_node(
        &mut self,
        op: Op,
        inputs: &[Value],
        names: &[String],
        phase: Phase,
        module: impl Into<String>,
    ) -> Result<Vec<Value>, Error> {
        let node = self.add_unordered(op, inputs, names, phase, module.into())?;
        self.order.push(node);
        Ok(self.nodes[node].outputs.clone())
    }
    /// The value whose bytes `value` shares: a chain of reshapes followed to its start. Reshapes
    /// never become lines.
    pub fn root(&self, mut value: Value) -> Value {
        while let Def::Node(node, _) = self.values[value].def {
            let data = &self.nodes[node];
            if !data.op.is_alias() {
                break;
            }
            value = data.inputs[0];
        }
        value
    }
    /// The values at the end of a step: new values of states, and outputs. Gradients are in
    /// [`Graph::gradients`].
    pub fn left(&self) -> impl Iterator<Item = Value> + '_ {
        self.states
            .values()
            .map(|state| state.after)
            .chain(self.outputs.iter().map(|output| output.value))
    }
    /// The values that must be computed: values at the end of the step, and gradients.
    pub fn wanted(&self) -> impl Iterator<Item = Value> + '_ {
        self.left()
            .chain(self.gradients.iter().map(|&(_, value)| value))
    }
    /// The node that computes a value; `None` if no node does.
    pub fn def_node(&self, value: Value) -> Option<Node> {
        match self.values[value].def {
            Def::Node(node, _) => Some(node),
            _ => None,
        }
    }
    /// The types of values, such as a node's operands.
    pub fn types(&self, values: &[Value]) -> Vec<TensorType> {
        values.iter().map(|&v| self.values[v].ty.clone()).collect()
    }
    /// Arithmetic and scratch of one run of a node.
    pub fn work(&self, node: Node) -> Work {
        let data = &self.nodes[node];
        let inputs: Vec<&TensorType> = data.inputs.iter().map(|&v| &self.values[v].ty).collect();
        data.op.work(&inputs, &self.types(&data.outputs))
    }
    /// The number of elements of a node that lines may compute part by part: each element of its
    /// results depends on the elements of the operands at the same place, and on options. `None` if
    /// it has to run as a whole.
    pub fn divisible(&self, node: Node) -> Option<u64> {
        let data = self.nodes.get(node)?;
        let facts = data.op.facts();
        let n = self.values.get(*data.outputs.first()?)?.ty.numel();
        let options = facts.options_from?.min(data.inputs.len());
        let (cut, whole) = data.inputs.split_at(options);
        let mut all = cut.iter().chain(&data.outputs);
        let is_even = all.all(|&v| self.values.get(v).is_some_and(|data| data.ty.numel() == n));
        let is_element = facts.access == Access::Element && data.op.is_pure() && !facts.is_random;
        let is_apart = whole.iter().all(|value| !cut.contains(value));
        (is_element && is_even && is_apart).then_some(n)
    }

    /// The bytes of an operand or a result that a part of a node touches: of an option all. The
    /// node should be [divisible](Graph::divisible).
    pub fn extent(&self, node: Node, part: Option<Part>, value: Value) -> Extent {
        let ty = &self.values[value].ty;
        let all = Extent {
            start: 0,
            bytes: ty.bytes(),
        };
        let Some(part) = part else {
            return all;
        };
        let data = &self.nodes[node];
        let options = data.op.facts().options_from.unwrap_or(data.inputs.len());
        let mut options = data.inputs.iter().skip(options);
        if options.any(|&option| option == value) {
            return all;
        }
        let size = ty.dtype().bytes();
        Extent {
            start: part.start * size,
            bytes: part.len() * size,
        }
    }

    /// A node's name: the name of its first result.
    pub fn node_name(&self, node: Node) -> &str {
        self.nodes[node]
            .outputs
            .first()
            .map_or("", |&v| &self.values[v].name)
    }
}
