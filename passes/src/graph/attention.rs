//! Lets attention read and write heads where products leave them and take them: inside rows. So no
//! slice, permutation or concatenation stands beside it.
//!
//! Before: `sdpa` and `sdpa_bwd` over heads that contain rows, and permutations of their operands
//! and results. After: if a permutation reads the result of an attention, this is `sdpa_rows`. Its
//! q, k and v are read from the value of which they are a view of heads inside rows (a part of a
//! product for all three, say); an operand that is no such view stays as it is. The same holds for
//! its backward. If q, k and v fill the rows of one value, and one concatenation reads their three
//! gradients, the backward writes these rows. Repeated heads of keys and values are read from the
//! heads themselves: see `groups`. Numbers of documents take the place of their mask: see
//! `documents`.

mod documents;
mod groups;

use super::reshape_to;
use ir::graph::Edit;
use ir::op::attention::Attending;
use ir::op::attrs::{Along, Attention, AttentionRows, Dims, Slice};
use ir::op::body::{Strided, View};
use ir::{Graph, Node, Op, Value};
use std::collections::BTreeMap;

/// Rewrites the graph.
pub fn run(graph: &mut Graph) {
    documents::run(graph);
    groups::run(graph);
    let order = graph.order.clone();
    let mut rewrite = Rewrite {
        edit: graph.edit(),
        out: BTreeMap::new(),
        heads: BTreeMap::new(),
    };
    for node in order {
        match rewrite.graph().nodes[node].op.clone() {
            Op::Sdpa(a) => rewrite.forward(node, &a),
            Op::SdpaBwd(a) => rewrite.backward(node, &a),
            _ => {}
        }
    }
    rewrite.edit.finish();
    super::canonical::remove_dead(graph);
}

/// Exchanges heads and rows.
const SWAPPED: [i64; 4] = [0, 2, 1, 3];

struct Rewrite<'a> {
    edit: Edit<'a>,
    /// The results of attention as heads that contain rows, and now.
    out: BTreeMap<Value, Value>,
    /// Values as rows of heads, by their shape.
    heads: BTreeMap<(Value, Vec<u64>), Value>,
}

/// A value of `[B,H,S,D]` as heads of `[B,S,N,D]`, which has the bytes of `base`.
struct InRows {
    base: Value,
    shape: Vec<u64>,
    first: u64,
}

impl Rewrite<'_> {
    fn graph(&self) -> &Graph {
        self.edit.graph()
    }
    fn shape(&self, value: Value) -> &[u64] {
        self.graph().values[value].ty.shape()
    }
    fn name(&self, value: Value) -> String {
        self.graph().values[value].name.clone()
    }
    /// Adds a node with one result.
    fn add(&mut self, at: Node, op: Op, inputs: &[Value], name: String) -> Value {
        let node = self.edit.insert_before(at, op, inputs, &[name]);
        let node = node.expect("a view of a value should be typed");
        self.graph().nodes[node].outputs[0]
    }

    fn forward(&mut self, node: Node, a: &Attention) {
        let data = &self.graph().nodes[node];
        let (inputs, outputs) = (data.inputs.clone(), data.outputs.clone());
        let [out, logsumexp] = outputs[..] else {
            return;
        };
        if self.swaps(out).is_empty() {
            return;
        }
        let (op, inputs) = self.rows(node, a, &inputs, 0);
        let names = [self.name(out), self.name(logsumexp)];
        let added = self
            .edit
            .insert_before(node, Op::SdpaRows(op), &inputs, &names)
            .expect("attention to views should be typed like attention");
        let [new, sums] = self.graph().nodes[added].outputs[..] else {
            return;
        };
        let heads = self.replace(node, out, new);
        self.out.insert(heads, new);
        self.edit.replace_uses(logsumexp, sums);
        self.edit.remove(node);
    }

    fn backward(&mut self, node: Node, a: &Attention) {
        let data = &self.graph().nodes[node];
        let (mut inputs, gradients) = (data.inputs.clone(), data.outputs.clone());
        let Some(&out) = self.out.get(&inputs[4]) else {
            return;
        };
        inputs[4] = out;
        inputs[0] = match in_rows(self.graph(), inputs[0]) {
            Some(rows) if rows.shape == self.shape(out) => self.of(node, &rows),
            _ => {
                let name = format!("{}.rows", self.name(inputs[0]));
                let op = Op::Permute(Dims {
                    dims: SWAPPED.to_vec(),
                });
                self.add(node, op, &[inputs[0]], name)
            }
        };
        let (op, inputs) = self.rows(node, a, &inputs, 1);
        let shapes = [1, 2, 3].map(|i| self.shape(inputs[i]));
        let form = Attending::rows(&op, shapes, 1).expect("views should fit the attention");
        let names: Vec<String> = if form.is_joint {
            vec![format!("{}.all", self.name(gradients[0]))]
        } else {
            gradients.iter().map(|&dx| self.name(dx)).collect()
        };
        let first = op.first.clone();
        let added = self
            .edit
            .insert_before(node, Op::SdpaRowsBwd(op), &inputs, &names)
            .expect("attention to views should be typed like attention");
        let results = self.graph().nodes[added].outputs.clone();
        if form.is_joint {
            self.replace_joint(node, &gradients, results[0], &first);
        } else {
            for i in 0..3 {
                if first[i] < 0 {
                    self.edit.replace_uses(gradients[i], results[i]);
                } else {
                    self.replace(node, gradients[i], results[i]);
                }
            }
        }
        self.edit.remove(node);
    }

    /// The attributes and operands of attention with heads inside rows; operand `q` is q.
    fn rows(
        &mut self,
        node: Node,
        a: &Attention,
        inputs: &[Value],
        q: usize,
    ) -> (AttentionRows, Vec<Value>) {
        let mut inputs = inputs.to_vec();
        let heads = [q, q + 1].map(|i| self.shape(inputs[i])[1] as i64);
        let mut first = vec![-1; 3];
        for i in 0..3 {
            if let Some(rows) = in_rows(self.graph(), inputs[q + i]) {
                first[i] = rows.first as i64;
                inputs[q + i] = self.of(node, &rows);
            }
        }
        let op = AttentionRows {
            causal: a.causal,
            first,
            heads: heads.to_vec(),
            scale: a.scale,
        };
        (op, inputs)
    }

    /// The value of rows of heads.
    fn of(&mut self, at: Node, rows: &InRows) -> Value {
        if self.shape(rows.base) == rows.shape {
            return rows.base;
        }
        let key = (rows.base, rows.shape.clone());
        if let Some(&known) = self.heads.get(&key) {
            return known;
        }
        let others = self.heads.keys().filter(|(base, _)| *base == rows.base);
        let name = match others.count() {
            0 => format!("{}.heads", self.name(rows.base)),
            n => format!("{}.heads.{n}", self.name(rows.base)),
        };
        let op = reshape_to(rows.shape.iter().copied());
        let value = self.add(at, op, &[rows.base], name);
        self.heads.insert(key, value);
        value
    }

    /// The permutations that read a value and exchange its heads and rows.
    fn swaps(&self, value: Value) -> Vec<Node> {
        let graph = self.graph();
        let swaps = |&&node: &&Node| {
            let data = &graph.nodes[node];
            let is_swap = matches!(&data.op, Op::Permute(Dims { dims }) if dims[..] == SWAPPED);
            is_swap && data.inputs[0] == value
        };
        graph.order.iter().filter(swaps).copied().collect()
    }

    /// Lets the readers of `heads`, a result of `node`, read the same numbers from `rows`. Returns
    /// the value that readers of heads read.
    fn replace(&mut self, node: Node, heads: Value, rows: Value) -> Value {
        for swap in self.swaps(heads) {
            let swapped = self.graph().nodes[swap].outputs[0];
            self.edit.replace_uses(swapped, rows);
            self.edit.remove(swap);
        }
        let op = Op::Permute(Dims {
            dims: SWAPPED.to_vec(),
        });
        let name = format!("{}.swapped", self.name(heads));
        let permuted = self.add(node, op, &[rows], name);
        self.edit.replace_uses(heads, permuted);
        permuted
    }

    /// Lets the readers of three gradients read them from the rows that have all of them.
    fn replace_joint(&mut self, node: Node, gradients: &[Value], all: Value, first: &[i64]) {
        if let Some(cat) = self.joined(gradients, first) {
            let shape = self.shape(cat).to_vec();
            let name = format!("{}.rows", self.name(all));
            let rows = self.add(node, reshape_to(shape), &[all], name);
            // Nothing reads the parts any more.
            self.edit.replace_uses(cat, rows);
        }
        for (&dx, &start) in gradients.iter().zip(first) {
            let end = start + self.shape(dx)[1] as i64;
            let part = Op::Slice(Slice {
                dim: 2,
                end,
                start,
                step: 1,
            });
            let name = format!("{}.rows", self.name(dx));
            let rows = self.add(node, part, &[all], name);
            self.replace(node, dx, rows);
        }
    }

    /// The concatenation of three gradients as heads inside rows, if nothing else reads them.
    fn joined(&self, gradients: &[Value], first: &[i64]) -> Option<Value> {
        let graph = self.graph();
        let readers = graph.readers();
        let only = |value: Value| match readers[value][..] {
            [Some(node)] => Some(node),
            _ => None,
        };
        let mut parts = vec![];
        for (&dx, &first) in gradients.iter().zip(first) {
            let swap = only(dx).filter(|swap| self.swaps(dx) == [*swap])?;
            let swapped = graph.nodes[swap].outputs[0];
            let reader = only(swapped)?;
            let data = &graph.nodes[reader];
            let Op::Cat(Along { dim }) = data.op else {
                return None;
            };
            let part = data
                .inputs
                .iter()
                .find(|&&part| graph.root(part) == swapped)?;
            // Each row of the concatenation's operand has the heads of one row.
            let row: u64 = self.shape(*part)[dim as usize..].iter().product();
            let &[_, heads, _, width] = self.shape(dx) else {
                return None;
            };
            (row == heads * width).then_some(())?;
            parts.push((first, *part, reader));
        }
        parts.sort();
        let cat = parts[0].2;
        let joined = parts.iter().map(|&(_, part, _)| part);
        let one = parts.iter().all(|&(.., reader)| reader == cat)
            && joined.eq(graph.nodes[cat].inputs.iter().copied());
        one.then(|| graph.nodes[cat].outputs[0])
    }
}

/// The rows in which a value of `[B,H,S,D]` has its heads, if it is a view of them.
fn in_rows(graph: &Graph, value: Value) -> Option<InRows> {
    let (base, view) = view(graph, value);
    let [batch, head, row, each] = view.dims[..] else {
        return None;
    };
    let [b, h, s, d] = [batch, head, row, each].map(|dim| dim.size);
    let all = graph.values[base].ty.numel();
    if base == value || all == 0 || b * h * s * d == 0 || !all.is_multiple_of(b * s) {
        return None;
    }
    let width = all / (b * s);
    let is = |dim: Strided, wanted: u64| dim.size == 1 || dim.stride == wanted as i64;
    let lies = is(each, 1) && is(head, d) && is(row, width) && is(batch, s * width);
    let start = u64::try_from(view.first).ok()?;
    let whole = width.is_multiple_of(d) && start.is_multiple_of(d);
    let (heads, first) = (width / d, start / d);
    (lies && whole && first + h <= heads).then(|| InRows {
        base,
        shape: vec![b, s, heads, d],
        first,
    })
}

/// The base of a value that slices, permutations and reshapes may compute, and the value as a view
/// of it.
fn view(graph: &Graph, value: Value) -> (Value, View) {
    // A loop: a file may have more views of views than the stack has room for.
    let mut chain = vec![value];
    let mut base = value;
    while let Some(before) = viewed(graph, base) {
        base = before;
        chain.push(base);
    }
    let shape = |value: Value| graph.values[value].ty.shape();
    let mut view = View::whole(shape(base));
    for &value in chain.iter().rev().skip(1) {
        let op = graph.def_node(value).map(|node| &graph.nodes[node].op);
        match op.and_then(|op| view.clone().then(op, shape(value))) {
            Some(next) => view = next,
            None => (base, view) = (value, View::whole(shape(value))),
        }
    }
    (base, view)
}

/// The value of which a value is a slice, a permutation or a reshape.
fn viewed(graph: &Graph, value: Value) -> Option<Value> {
    let data = &graph.nodes[graph.def_node(value)?];
    match (&data.op, &data.inputs[..]) {
        (Op::Reshape(_) | Op::Permute(_) | Op::Slice(_), &[x]) => Some(x),
        _ => None,
    }
}
