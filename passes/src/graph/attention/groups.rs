//! Lets attention read shared heads of keys and values once, instead of a copy for each query head.
//!
//! Models with grouped queries (Ainslie et al., GQA, 2023) repeat each head of keys and values for
//! its group of query heads, and their backward adds up the gradients of the repeats. Before: `k`
//! and `v` of an attention are such repeats. After: it reads the heads themselves, and its backward
//! gives their gradients. Nothing is copied, and the heads alone are kept for the backward.

use super::super::reshape_to;
use ir::graph::Edit;
use ir::op::attrs::Reduction;
use ir::{Graph, Node, Op, Value};

/// Rewrites the graph.
pub(super) fn run(graph: &mut Graph) {
    let order = graph.order.clone();
    let mut edit = graph.edit();
    for node in order {
        match edit.graph().nodes[node].op {
            Op::Sdpa(_) => forward(&mut edit, node),
            Op::SdpaBwd(_) => backward(&mut edit, node),
            _ => None,
        };
    }
    edit.finish();
}

/// Nothing changes, and `None` is returned, if keys and values are not both repeats.
fn forward(edit: &mut Edit<'_>, node: Node) -> Option<()> {
    let shared = shared(edit, node, 1)?;
    let results = edit.graph().nodes[node].outputs.clone();
    let new = replaced(edit, node, 1, shared);
    for (old, new) in results.into_iter().zip(new) {
        edit.replace_uses(old, new);
    }
    edit.remove(node);
    Some(())
}

/// The same for a backward, if all that is read of the gradients is their sum over each group.
fn backward(edit: &mut Edit<'_>, node: Node) -> Option<()> {
    let shared = shared(edit, node, 2)?;
    let results = edit.graph().nodes[node].outputs.clone();
    let sums = [1, 2].map(|i| sums(edit.graph(), results[i], shared[i - 1].group));
    let [Some(of_keys), Some(of_values)] = sums else {
        return None;
    };
    let new = replaced(edit, node, 2, shared);
    edit.replace_uses(results[0], new[0]);
    for (sums, gradient) in [(of_keys, new[1]), (of_values, new[2])] {
        for sum in sums {
            instead(edit, node, sum, gradient);
            edit.remove(sum);
        }
    }
    // Views of the repeats' gradients, which only the sums read.
    let graph = edit.graph();
    let is_view = |&&view: &&Node| {
        let data = &graph.nodes[view];
        data.op.is_alias() && results.contains(&graph.root(data.outputs[0]))
    };
    let views: Vec<Node> = graph.order.iter().filter(is_view).copied().collect();
    for view in views.into_iter().rev() {
        edit.remove(view);
    }
    edit.remove(node);
    Some(())
}

/// Lets the readers of a sum read the gradient of the heads, which has its numbers.
fn instead(edit: &mut Edit<'_>, at: Node, sum: Node, gradient: Value) {
    let graph = edit.graph();
    let old = graph.nodes[sum].outputs[0];
    let data = &graph.values[old];
    let (name, shape) = (format!("{}.shared", data.name), data.ty.shape().to_vec());
    let wanted = graph.values[gradient].ty.shape();
    let is_same = |value: Value| graph.values[value].ty.shape() == wanted;
    let same: Vec<Value> = graph
        .order
        .iter()
        .map(|&node| &graph.nodes[node])
        .filter(|data| matches!(data.op, Op::Reshape(_)) && data.inputs[0] == old)
        .map(|data| data.outputs[0])
        .filter(|&value| is_same(value))
        .collect();
    for value in same {
        edit.replace_uses(value, gradient);
    }
    // Views that nothing reads any more still name the sum.
    let view = added(edit, at, reshape_to(shape), &[gradient], &[name])[0];
    edit.replace_uses(old, view);
}

/// Heads that are repeated.
#[derive(Clone, Copy)]
struct Shared {
    /// The heads, of shape `[B,K,1,T,D]`.
    heads: Value,
    /// How often each is there.
    group: u64,
}

/// The heads of keys and values, operands `k` and `k + 1` of an attention.
fn shared(edit: &Edit<'_>, node: Node, k: usize) -> Option<[Shared; 2]> {
    let graph = edit.graph();
    let inputs = &graph.nodes[node].inputs;
    let pair = [repeated(graph, inputs[k])?, repeated(graph, inputs[k + 1])?];
    (pair[0].group == pair[1].group).then_some(pair)
}

/// The heads of which a value `[B,H,T,D]` is a repeat: `expand` to `[B,K,G,T,D]`, then `reshape`.
fn repeated(graph: &Graph, value: Value) -> Option<Shared> {
    let shape = |value: Value| graph.values[value].ty.shape();
    let (Op::Reshape(_), [groups]) = defined(graph, value)? else {
        return None;
    };
    let (Op::Expand(_), &[heads]) = defined(graph, *groups)? else {
        return None;
    };
    let (&[b, h, t, d], &[_, k, group, ..]) = (shape(value), shape(*groups)) else {
        return None;
    };
    let is_repeat =
        h == k * group && shape(*groups) == [b, k, group, t, d] && shape(heads) == [b, k, 1, t, d];
    is_repeat.then_some(Shared { heads, group })
}

fn defined(graph: &Graph, value: Value) -> Option<(&Op, &[Value])> {
    let data = &graph.nodes[graph.def_node(value)?];
    Some((&data.op, &data.inputs))
}

/// The sums over groups that are all that reads a gradient `[B,H,T,D]` of repeated heads.
fn sums(graph: &Graph, gradient: Value, group: u64) -> Option<Vec<Node>> {
    let &[b, h, t, d] = graph.values[gradient].ty.shape() else {
        return None;
    };
    let groups = [b, h / group, group, t, d];
    let readers = &graph.readers()[gradient];
    let sum = |reader: &Option<Node>| {
        let data = &graph.nodes[(*reader)?];
        let of_groups = graph.values[data.inputs[0]].ty.shape() == groups;
        let is_sum = matches!(&data.op, Op::Sum(Reduction { dims, .. }) if dims[..] == [2]);
        (of_groups && is_sum).then_some((*reader)?)
    };
    readers.iter().map(sum).collect()
}

/// Adds the same attention over the heads themselves; returns its results.
fn replaced(edit: &mut Edit<'_>, node: Node, k: usize, shared: [Shared; 2]) -> Vec<Value> {
    let data = edit.graph().nodes[node].clone();
    let mut inputs = data.inputs.clone();
    for (i, Shared { heads, .. }) in shared.into_iter().enumerate() {
        let graph = edit.graph();
        let shape = graph.values[heads].ty.shape().iter().enumerate();
        let shape = shape.filter(|&(dim, _)| dim != 2).map(|(_, &size)| size);
        let shape: Vec<u64> = shape.collect();
        let root = graph.root(heads);
        inputs[k + i] = if graph.values[root].ty.shape() == shape {
            // The heads as they were before they got a dimension for the repeats.
            root
        } else {
            let name = format!("{}.shared.{k}", graph.values[inputs[k + i]].name);
            added(edit, node, reshape_to(shape), &[heads], &[name])[0]
        };
    }
    let graph = edit.graph();
    let names: Vec<String> = data
        .outputs
        .iter()
        .map(|&value| graph.values[value].name.clone())
        .collect();
    added(edit, node, data.op, &inputs, &names)
}

fn added(edit: &mut Edit<'_>, at: Node, op: Op, inputs: &[Value], names: &[String]) -> Vec<Value> {
    let node = edit
        .insert_before(at, op, inputs, names)
        .expect("attention over shared heads should be typed like attention");
    edit.graph().nodes[node].outputs.clone()
}
