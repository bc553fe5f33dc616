//! Adds nodes of the backward to a graph, and has the ops that rules use most.

use ir::graph::{self, Def};
use ir::op::attrs::{Cast, Full, Reduction, Scalar, Sizes};
use ir::op::{Number, broadcast_shapes};
use ir::{DType, Graph, Node, Op, Phase, Value};
use std::collections::BTreeSet;

/// The value that a new node computes.
pub(super) type Made = Result<Value, graph::Error>;

/// A graph to which the backward of one forward node after the other is added.
pub(super) struct Tape<'g> {
    graph: &'g mut Graph,
    /// The names of values, which are unique.
    names: BTreeSet<String>,
    /// The name and the module of the forward node whose backward is being added.
    stem: String,
    module: String,
}

impl<'g> Tape<'g> {
    pub(super) fn new(graph: &'g mut Graph) -> Tape<'g> {
        let names = graph.values.values().map(|value| value.name.clone());
        Tape {
            names: names.collect(),
            graph,
            stem: String::new(),
            module: String::new(),
        }
    }

    /// Nodes from now on belong to the backward of this node.
    pub(super) fn enter(&mut self, name: &str, node: Option<Node>) {
        self.stem = format!("{name}.bwd");
        let module = node.map(|node| self.graph.nodes[node].module.clone());
        self.module = module.unwrap_or_default();
    }

    pub(super) fn graph(&self) -> &Graph {
        self.graph
    }
    pub(super) fn dtype(&self, value: Value) -> DType {
        self.graph.values[value].ty.dtype()
    }
    pub(super) fn shape(&self, value: Value) -> Vec<u64> {
        self.graph.values[value].ty.shape().to_vec()
    }
    /// The size of a dimension; 1 if there is no such dimension.
    pub(super) fn size(&self, value: Value, dim: i64) -> i64 {
        let shape = self.graph.values[value].ty.shape();
        usize::try_from(dim)
            .ok()
            .and_then(|dim| shape.get(dim))
            .map_or(1, |&size| size as i64)
    }

    /// True if the value shares the bytes of a state.
    pub(super) fn is_state(&self, value: Value) -> bool {
        matches!(self.graph.values[self.graph.root(value)].def, Def::State(_))
    }

    /// Adds a node; returns its results.
    pub(super) fn node(&mut self, op: Op, inputs: &[Value]) -> Result<Vec<Value>, graph::Error> {
        let types = inputs
            .iter()
            .map(|&v| &self.graph.values[v].ty)
            .collect::<Vec<_>>();
        let n_results = op.infer(&types)?.len();
        let names: Vec<String> = (0..n_results).map(|_| self.fresh()).collect();
        let module = self.module.clone();
        self.graph
            .add_node(op, inputs, &names, Phase::Backward, module)
    }
    /// Adds a node with one result.
    pub(super) fn one(&mut self, op: Op, inputs: &[Value]) -> Made {
        Ok(self.node(op, inputs)?[0])
    }

    fn fresh(&mut self) -> String {
        let stem = &self.stem;
        let numbered = (1..).map(|n| format!("{stem}.{n}"));
        let mut names = std::iter::once(stem.clone()).chain(numbered);
        let free = names.find(|name| !self.names.contains(name));
        let free = free.unwrap_or_default();
        self.names.insert(free.clone());
        free
    }

    /// x + y, broadcast.
    pub(super) fn add(&mut self, x: Value, y: Value) -> Made {
        self.one(Op::Add, &[x, y])
    }
    /// x y, broadcast.
    pub(super) fn mul(&mut self, x: Value, y: Value) -> Made {
        self.one(Op::Mul, &[x, y])
    }
    /// x / y, broadcast.
    pub(super) fn div(&mut self, x: Value, y: Value) -> Made {
        self.one(Op::Div, &[x, y])
    }
    /// -x.
    pub(super) fn neg(&mut self, x: Value) -> Made {
        self.one(Op::Neg, &[x])
    }
    /// A function of a tensor and a number.
    pub(super) fn with(&mut self, op: fn(Scalar) -> Op, x: Value, number: f64) -> Made {
        let value = Number::Float(number);
        self.one(op(Scalar { value }), &[x])
    }
    /// if condition then x else y, broadcast.
    pub(super) fn select(&mut self, condition: Value, x: Value, y: Value) -> Made {
        self.one(Op::Where, &[condition, x, y])
    }
    /// A tensor of one number, of the element type of `like`.
    pub(super) fn full(&mut self, like: Value, shape: &[u64], number: f64) -> Made {
        let full = Full {
            dtype: self.dtype(like),
            shape: signed(shape),
            value: Number::Float(number),
        };
        self.one(Op::Full(full), &[])
    }
    /// x as another element type.
    pub(super) fn cast(&mut self, x: Value, dtype: DType) -> Made {
        if self.dtype(x) == dtype {
            return Ok(x);
        }
        self.one(Op::Cast(Cast { dtype }), &[x])
    }
    /// x with another shape of as many elements.
    pub(super) fn reshape(&mut self, x: Value, shape: &[u64]) -> Made {
        if self.shape(x) == shape {
            return Ok(x);
        }
        let shape = signed(shape);
        self.one(Op::Reshape(Sizes { shape }), &[x])
    }
    /// x repeated along dimensions of size 1.
    pub(super) fn expand(&mut self, x: Value, shape: &[u64]) -> Made {
        if self.shape(x) == shape {
            return Ok(x);
        }
        let shape = signed(shape);
        self.one(Op::Expand(Sizes { shape }), &[x])
    }
    /// The sum over dimensions, which stay with size 1.
    pub(super) fn sum(&mut self, x: Value, dims: &[i64]) -> Made {
        let dims = dims.to_vec();
        self.one(
            Op::Sum(Reduction {
                dims,
                keepdim: true,
            }),
            &[x],
        )
    }
    /// The transpose of a broadcast from `shape`: the sum over what was repeated.
    pub(super) fn unbroadcast(&mut self, x: Value, shape: &[u64]) -> Made {
        let from = self.shape(x);
        if from == shape {
            return Ok(x);
        }
        debug_assert_eq!(broadcast_shapes(shape, &from).as_ref(), Ok(&from));
        let new = from.len() - shape.len();
        let is_repeated = |&dim: &usize| dim < new || (shape[dim - new] == 1 && from[dim] != 1);
        let dims: Vec<i64> = (0..from.len())
            .filter(is_repeated)
            .map(|dim| dim as i64)
            .collect();
        let summed = if dims.is_empty() {
            x
        } else {
            self.sum(x, &dims)?
        };
        self.reshape(summed, shape)
    }
}

/// A shape as an attribute.
pub(super) fn signed(shape: &[u64]) -> Vec<i64> {
    shape.iter().map(|&size| size as i64).collect()
}
