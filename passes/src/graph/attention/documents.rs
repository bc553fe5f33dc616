//! Documents in a row stay apart by their numbers. A mask that says for each query and key whether
//! they are of one document has a byte for each two tokens. Attention also takes the numbers
//! themselves, and compares them where it computes scores. So the mask is not computed.
//!
//! Before: attention whose mask is `eq` of two views of one tensor of i64: a query's number and a
//! key's number. After: its mask is that tensor, `[B,S]`.

use super::view;
use crate::graph::{canonical, reshape_to};
use ir::op::attention::Attending;
use ir::op::body::{Strided, View};
use ir::{DType, Graph, Node, Op, Value};

/// Rewrites the graph.
pub(super) fn run(graph: &mut Graph) {
    let found: Vec<(Node, usize, Numbers)> = graph
        .order
        .iter()
        .filter_map(|&node| {
            let (at, scores) = mask_of(graph, node)?;
            let numbers = numbers(graph, graph.nodes[node].inputs[at], scores)?;
            Some((node, at, numbers))
        })
        .collect();
    if found.is_empty() {
        return;
    }
    let mut edit = graph.edit();
    for (node, at, Numbers { base, shape }) in found {
        let mut given = base;
        if edit.graph().values[base].ty.shape() != shape {
            let name = format!("{}.documents", edit.graph().values[base].name);
            let node = edit
                .insert_before(node, reshape_to(shape), &[base], &[name])
                .expect("numbers should have another shape");
            given = edit.graph().nodes[node].outputs[0];
        }
        let mut data = edit.graph().nodes[node].clone();
        data.inputs[at] = given;
        let names: Vec<String> = data
            .outputs
            .iter()
            .map(|&value| edit.graph().values[value].name.clone())
            .collect();
        let new = edit
            .insert_before(node, data.op, &data.inputs, &names)
            .expect("attention should take numbers of documents");
        let results = edit.graph().nodes[new].outputs.clone();
        for (&old, new) in data.outputs.iter().zip(results) {
            edit.replace_uses(old, new);
        }
        edit.remove(node);
    }
    edit.finish();
    canonical::remove_dead(graph);
}

/// The number of the operand that is a mask of bits, and the shape of the scores.
fn mask_of(graph: &Graph, node: Node) -> Option<(usize, [u64; 4])> {
    let data = &graph.nodes[node];
    let (q, at) = match data.op {
        Op::Sdpa(_) => (0, 3),
        Op::SdpaBwd(_) => (1, 6),
        _ => return None,
    };
    let mask = *data.inputs.get(at)?;
    let shape = |i: usize| graph.values[data.inputs[i]].ty.shape();
    let s = Attending::plain(shape(q), shape(q + 2)).sizes;
    let is_bits = graph.values[mask].ty.dtype() == DType::Bool;
    is_bits.then_some((at, [s.batch, s.heads, s.queries, s.keys]))
}

/// The numbers of documents.
struct Numbers {
    base: Value,
    /// Rows, or 1, and tokens.
    shape: [u64; 2],
}

/// The numbers that a mask compares; none if it is another mask.
fn numbers(graph: &Graph, mask: Value, scores: [u64; 4]) -> Option<Numbers> {
    let root = graph.root(mask);
    let data = &graph.nodes[graph.def_node(root)?];
    matches!(data.op, Op::Eq).then_some(())?;
    // A reshape of the mask moves no element to another query or key.
    let ends = [scores[2], scores[3]];
    let ends_so = |value: Value| graph.values[value].ty.shape().ends_with(&ends);
    (scores[2] == scores[3] && ends_so(root) && ends_so(mask)).then_some(())?;
    let [(base, one), (other_base, other)] = [0, 1].map(|i| view(graph, data.inputs[i]));
    (base == other_base).then_some(())?;
    let ty = &graph.values[base].ty;
    (ty.dtype() == DType::I64).then_some(())?;
    let length = scores[3];
    let rows = ty.numel().checked_div(length)?;
    let shape = [rows, length];
    (ty.numel() == rows * length && (rows == 1 || rows == scores[0])).then_some(())?;
    let sides = [(&one, &other), (&other, &one)];
    let fits = |(query, key): (&View, &View)| {
        along(query, shape) == Some(Side::Query) && along(key, shape) == Some(Side::Key)
    };
    sides
        .into_iter()
        .any(fits)
        .then_some(Numbers { base, shape })
}

/// Whose numbers a view has.
#[derive(PartialEq, Eq)]
enum Side {
    Query,
    Key,
}

/// Whose numbers a view of `[rows, length]` has, as an operand that is broadcast to the scores.
fn along(view: &View, [rows, length]: [u64; 2]) -> Option<Side> {
    (view.first == 0 && view.dims.len() <= 4).then_some(())?;
    let one = Strided { size: 1, stride: 0 };
    let mut dims = vec![one; 4 - view.dims.len()];
    dims.extend(&view.dims);
    let [batch, heads, query, key] = dims[..] else {
        return None;
    };
    let batches = batch.size == 1 || batch.stride == length as i64;
    (heads.size == 1 && batch.size == rows && batches).then_some(())?;
    let runs = |dim: Strided| dim.size == length && dim.stride == 1;
    match (query.size, key.size) {
        (1, _) if runs(key) => Some(Side::Key),
        (_, 1) if runs(query) => Some(Side::Query),
        _ => None,
    }
}
