//! Stores frozen matrices in NF4 with double quantisation (Dettmers et al., 2023, "QLoRA"): half a
//! byte for each number, one for each 64, and four for each 16384.
//!
//! Before: forward and backward. After: a matrix without a gradient that products read, perhaps
//! through casts, is four states: `nf4.PATH` (codes), `nf4_sizes.PATH`, `nf4_largest.PATH` and
//! `nf4_offset.PATH`. Directly before each node that reads it, an op `nf4` computes its numbers for
//! this node alone, in the type that the node takes. So no plan keeps the numbers from one product
//! to another, in particular not from the forward to the backward.
//!
//! DoRA (Liu et al., 2024) also adds its adapters to such a matrix, for norms. Embeddings are not
//! products, so they stay as they are; so does a head that shares their matrix. The matrices of a
//! layer's experts are one tensor, and stored as one.

use ir::graph::{self, Readers};
use ir::op::attrs::Decoded;
use ir::op::{Op, OpKind, nf4_operands};
use ir::types::TypeError;
use ir::{Graph, Node, State, StateKind, TensorType, Value};
use std::collections::BTreeSet;
use thiserror::Error;

ir::named! {
    /// How frozen matrices are stored.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum Base {
        /// As they are.
        #[default]
        Whole = "whole",
        /// In NF4.
        Nf4 = "nf4",
    }
}

/// The states of a matrix in NF4 are these names, a dot, and its path: the operands of the op.
pub const STATES: [&str; 4] = ["nf4", "nf4_sizes", "nf4_largest", "nf4_offset"];

/// The matrix of which a state has the codes, the sizes, ..: its path, and the place in [`STATES`].
pub fn matrix_of(path: &str) -> Option<(&str, usize)> {
    let (name, path) = path.split_once('.')?;
    let place = STATES.iter().position(|state| *state == name)?;
    Some((path, place))
}

/// Why frozen matrices cannot be stored so.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum QuantizeError {
    /// There is none.
    #[error(
        "no matrix can be stored in nf4: none is frozen and read only by products and sums; \
         --freeze PATTERN freezes parameters, and adapters of PEFT come with a frozen base"
    )]
    Nothing,
    /// The types of states are not possible.
    #[error(transparent)]
    Type(#[from] TypeError),
    /// A node does not fit the graph.
    #[error(transparent)]
    Graph(#[from] graph::Error),
}

/// Stores frozen matrices as `base` says. Parameters are trained if they have a gradient; in a
/// graph that `evaluates`, all are.
pub fn run(graph: &mut Graph, base: Base, evaluates: bool) -> Result<(), QuantizeError> {
    if base == Base::Whole {
        return Ok(());
    }
    let trained: BTreeSet<State> = match evaluates {
        true => {
            let states = graph.states.iter();
            let params = states.filter(|(_, data)| data.kind == StateKind::Param);
            params.map(|(state, _)| state).collect()
        }
        false => graph.gradients.iter().map(|&(state, _)| state).collect(),
    };
    let readers = graph.readers();
    let mut matrices = vec![];
    for state in graph.states.ids().filter(|state| !trained.contains(state)) {
        let mut reads = Reads::default();
        if is_frozen_matrix(graph, state)
            && reads.collect(graph, &readers, graph.states[state].before)
            && reads.has_product(graph)
        {
            matrices.push((state, reads));
        }
    }
    if matrices.is_empty() {
        return Err(QuantizeError::Nothing);
    }
    for (state, reads) in matrices {
        store(graph, state, &reads)?;
    }
    super::canonical::remove_dead(graph);
    *graph = graph.compact();
    Ok(())
}

fn is_frozen_matrix(graph: &Graph, state: State) -> bool {
    let data = &graph.states[state];
    let ty = &graph.values[data.before].ty;
    let is_kind = matches!(data.kind, StateKind::Param | StateKind::Buffer);
    is_kind
        && data.before == data.after
        && (2..=3).contains(&ty.rank())
        && ty.numel() > 0
        && ty.dtype().is_float()
        && !ty.dtype().is_eight_bit_float()
}

/// The operands of products and sums that are a matrix: itself, or a cast or a reshape of it.
#[derive(Default)]
struct Reads(Vec<(Node, usize)>);

impl Reads {
    /// Whether a product has the matrix as a factor.
    fn has_product(&self, graph: &Graph) -> bool {
        let is_factor = |&(node, i): &(Node, usize)| match graph.nodes[node].op.kind() {
            OpKind::Matmul | OpKind::MatmulSum => true,
            OpKind::Addmm => i > 0,
            OpKind::GroupedMatmul => i == 1,
            _ => false,
        };
        self.0.iter().any(is_factor)
    }

    /// Adds the reads of a value; false if something else reads it.
    fn collect(&mut self, graph: &Graph, readers: &Readers, value: Value) -> bool {
        if graph
            .outputs
            .iter()
            .any(|output| graph.root(output.value) == value)
        {
            return false;
        }
        // The end of the step reads a state that does not change, too.
        for node in readers[value].iter().copied().flatten() {
            let data = &graph.nodes[node];
            let operands = match data.op.kind() {
                OpKind::Matmul | OpKind::MatmulSum | OpKind::Add => 0..2,
                OpKind::Addmm => 0..3,
                OpKind::GroupedMatmul => 1..2,
                OpKind::Cast if self.collect(graph, readers, data.outputs[0]) => continue,
                _ => return false,
            };
            for (i, &input) in data.inputs.iter().enumerate() {
                if graph.root(input) != value {
                    continue;
                }
                if !operands.contains(&i) {
                    return false;
                }
                if !self.0.contains(&(node, i)) {
                    self.0.push((node, i));
                }
            }
        }
        true
    }
}

/// Makes the four states of a matrix, the first in its place, and the ops that compute its numbers.
fn store(graph: &mut Graph, state: State, reads: &Reads) -> Result<(), QuantizeError> {
    let matrix = graph.states[state].before;
    let (name, path) = (
        graph.values[matrix].name.clone(),
        graph.states[state].path.clone(),
    );
    let n = graph.values[matrix].ty.numel();
    let operands: Vec<(TensorType, Node, usize)> = reads
        .0
        .iter()
        .map(|&(node, i)| {
            (
                graph.values[graph.nodes[node].inputs[i]].ty.clone(),
                node,
                i,
            )
        })
        .collect();
    let mut states = vec![matrix];
    for (of, (dtype, shape)) in STATES.into_iter().zip(nf4_operands(n)) {
        let ty = TensorType::new(dtype, shape)?;
        let (name, path) = (format!("{of}.{name}"), format!("{of}.{path}"));
        if of == STATES[0] {
            let value = &mut graph.values[matrix];
            (value.name, value.ty) = (name, ty);
            let data = &mut graph.states[state];
            (data.path, data.kind) = (path, StateKind::Buffer);
        } else {
            states.push(graph.add_state(name, path, StateKind::Buffer, ty));
        }
    }
    let mut edit = graph.edit();
    for (ty, node, i) in operands {
        let op = Op::Nf4(Decoded {
            dtype: ty.dtype(),
            shape: ty.shape().iter().map(|&d| d as i64).collect(),
        });
        let name = format!("{name}.{}", edit.graph().node_name(node));
        let decoded = edit.insert_before(node, op, &states, &[name])?;
        edit.set_input(node, i, edit.graph().nodes[decoded].outputs[0]);
    }
    edit.finish();
    Ok(())
}
