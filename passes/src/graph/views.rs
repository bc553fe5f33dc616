//! Lets kernels read views of their operands, so that permutations, slices and flips beside
//! elementwise ops need no kernel and no bytes of their own.
//!
//! [`rise`] runs before the grouping into kernels. It moves views from the results of elementwise
//! ops to their operands: `slice(mul(x, y))` becomes `mul(slice(x), slice(y))`. It also writes the
//! exchange of two halves, which rotary embeddings consist of, as a flip. [`absorb`] runs after the
//! grouping. It makes a view a step of the kernels that read it, if no other node reads it.

mod absorb;
mod halves;

pub(super) use absorb::absorb;

use super::reshape_to;
use super::steps::{REACH, TOGETHER, may_join, moves};
use ir::graph::{Edit, Readers};
use ir::op::Access;
use ir::op::attrs::{Dims, Slice};
use ir::op::body::View;
use ir::{Graph, Node, Op, Table, Value};
use std::collections::BTreeMap;
use std::ops::Range;

/// A value with this number of times fewer elements than the result costs nothing to copy.
const SMALL: u64 = 8;
/// The most ops past which a view moves.
const DEPTH: usize = 16;

/// Moves views up.
pub(super) fn rise(graph: &mut Graph) {
    halves::run(graph);
    let order = graph.order.clone();
    let mut rise = Rise {
        positions: graph.positions(),
        readers: graph.readers(),
        edit: graph.edit(),
        views: BTreeMap::new(),
        names: 0,
    };
    for node in order {
        rise.node(node);
    }
    rise.edit.finish();
    super::canonical::remove_dead(graph);
}

/// The number of elements of a view that follow each other.
fn run_length(view: &View) -> u64 {
    let mut length = 1;
    for dim in view.dims.iter().rev().filter(|dim| dim.size != 1) {
        if dim.stride != length as i64 {
            break;
        }
        length *= dim.size;
    }
    length
}

struct Rise<'a> {
    edit: Edit<'a>,
    positions: Table<Node, usize>,
    readers: Readers,
    /// The added views of each value, by their op.
    views: BTreeMap<Value, Vec<(Op, Value)>>,
    /// The number of added values.
    names: usize,
}

/// Where a view is wanted.
#[derive(Clone, Copy)]
struct Want {
    /// The node before which nodes are added.
    at: Node,
    /// The op that reads the value to be viewed, if the view moves past it.
    reader: Option<Node>,
    /// Elements of the view.
    numel: u64,
    /// How many more ops it may move past.
    depth: usize,
}

/// How a view and the reshape before it change places.
enum Exchange {
    /// This view is before the reshape.
    Before(Op),
    /// The reshape is before the op that computes its operand, and cuts the op's dimensions.
    Cut(Vec<Block>),
}

/// Neighbouring dimensions of two shapes that have the same elements.
type Block = (Range<usize>, Range<usize>);

impl Rise<'_> {
    fn graph(&self) -> &Graph {
        self.edit.graph()
    }

    fn shape(&self, value: Value) -> Vec<u64> {
        self.graph().values[value].ty.shape().to_vec()
    }

    fn numel(&self, value: Value) -> u64 {
        self.graph().values[value].ty.numel()
    }

    /// Moves a node's view past the ops that compute its operand.
    fn node(&mut self, node: Node) {
        let data = &self.graph().nodes[node];
        if !moves(&data.op) {
            return;
        }
        let (op, x, result) = (data.op.clone(), data.inputs[0], data.outputs[0]);
        let view = View::whole(&self.shape(x)).then(&op, &self.shape(result));
        if view.is_none_or(|view| run_length(&view) < TOGETHER) {
            return;
        }
        let want = Want {
            at: node,
            reader: None,
            numel: self.numel(result),
            depth: DEPTH,
        };
        if let Some((op, inputs)) = self.passed(want, &op, x) {
            self.edit.set_op(node, op, inputs);
            let root = self.graph().root(x);
            self.readers[root].retain(|reader| *reader != Some(node));
        }
    }

    /// The op and the operands that compute `op` of `x` from views of what `x` is computed from;
    /// none if `x` itself should be viewed.
    fn passed(&mut self, want: Want, op: &Op, x: Value) -> Option<(Op, Vec<Value>)> {
        let node = self.graph().def_node(x).filter(|_| 0 < want.depth)?;
        let data = &self.graph().nodes[node];
        let shape = self.shape(x);
        if !data.op.is_alias() {
            return self.past(want, op, node, &shape, None);
        }
        let y = data.inputs[0];
        match exchanged(op, &self.shape(y), &shape)? {
            Exchange::Before(before) => {
                let (past, inputs) = self.passed(want, &before, y)?;
                let viewed = self.add(want.at, past, &inputs);
                Some((reshape_to(viewed_shape(op, &shape)), vec![viewed]))
            }
            Exchange::Cut(blocks) => {
                let node = self.graph().def_node(y)?;
                self.past(want, op, node, &shape, Some(&blocks))
            }
        }
    }

    /// The same for a node whose result has this shape, after a reshape if `blocks` are given.
    fn past(
        &mut self,
        want: Want,
        op: &Op,
        node: Node,
        shape: &[u64],
        blocks: Option<&[Block]>,
    ) -> Option<(Op, Vec<Value>)> {
        self.is_free(node, want).then_some(())?;
        let data = &self.graph().nodes[node];
        let (past, inputs) = (data.op.clone(), data.inputs.clone());
        let own = self.shape(data.outputs[0]);
        let want = Want {
            reader: Some(node),
            depth: want.depth - 1,
            ..want
        };
        let mut viewed = vec![];
        for mut input in inputs {
            if let Some(blocks) = blocks {
                let cut = cut(&self.shape(input), &own, shape, blocks);
                input = self.view(want.at, &reshape_to(cut), input);
            }
            viewed.push(self.of_operand(want, op, shape, input)?);
        }
        Some((past, viewed))
    }

    /// The operand of the moved op which takes the place of `x`. `shape` is that of the op's
    /// result before.
    fn of_operand(&mut self, want: Want, op: &Op, shape: &[u64], x: Value) -> Option<Value> {
        let own = self.shape(x);
        let missing = shape.len() - own.len();
        let mut all = vec![1; missing];
        all.extend(&own);
        let is_one = |d: i64| all[d as usize] == 1;
        match op {
            Op::Permute(Dims { dims }) => {
                let wide: Vec<i64> = dims.iter().copied().filter(|&d| !is_one(d)).collect();
                let new = viewed_shape(op, &all);
                if wide.is_sorted() {
                    return Some(self.view(want.at, &reshape_to(new), x));
                }
                let x = self.view(want.at, &reshape_to(all), x);
                self.viewed(want, op, x)
            }
            Op::Flip(Dims { dims }) => {
                let dims = dims.iter().copied().filter(|&d| !is_one(d));
                let dims: Vec<i64> = dims.map(|d| d - missing as i64).collect();
                if dims.is_empty() {
                    return Some(x);
                }
                self.viewed(want, &Op::Flip(Dims { dims }), x)
            }
            Op::Slice(slice) if is_one(slice.dim) => Some(x),
            Op::Slice(slice) => {
                let dim = slice.dim - missing as i64;
                let slice = Slice { dim, ..*slice };
                self.viewed(want, &Op::Slice(slice), x)
            }
            _ => None,
        }
    }

    /// The value of `op` of an operand; none if nothing is saved.
    fn viewed(&mut self, want: Want, op: &Op, x: Value) -> Option<Value> {
        if self.numel(x) * SMALL <= want.numel {
            return Some(self.view(want.at, op, x));
        }
        if let Some((past, inputs)) = self.passed(want, op, x) {
            return Some(self.add(want.at, past, &inputs));
        }
        let kept = self.is_kept(x, want);
        kept.then(|| self.view(want.at, op, x))
    }

    /// True if a view may move past this node, which runs shortly before it: nothing else reads the
    /// result, or the node only widens the elements of its operand.
    fn is_free(&self, node: Node, want: Want) -> bool {
        let graph = self.graph();
        let data = &graph.nodes[node];
        let facts = data.op.facts();
        let &[result] = &data.outputs[..] else {
            return false;
        };
        let is_elementwise = facts.access == Access::Element
            && facts.options_from.is_none()
            && may_join(graph, node)
            && !data.inputs.is_empty()
            && !matches!(data.op, Op::Expand(_));
        // The op's operands should not live longer than its result would.
        let place = |node: Node| self.positions.get(node).copied();
        let is_near = place(node).zip(place(want.at)).is_none_or(|(op, view)| {
            graph.nodes[want.at].phase == data.phase && view <= op + REACH
        });
        if !is_elementwise || !is_near {
            return false;
        }
        let bytes = |v: Value| graph.values[v].ty.dtype().bytes();
        if matches!(data.op, Op::Cast(_)) && bytes(data.inputs[0]) < bytes(result) {
            return true;
        }
        let mut read = 0;
        let mut may_move = |reader: &Option<Node>| {
            let Some(reader) = *reader else {
                return false;
            };
            let data = &graph.nodes[reader];
            if moves(&data.op) {
                read += self.numel(data.outputs[0]);
            }
            moves(&data.op) || want.reader == Some(reader)
        };
        // A new value has no other readers.
        let readers = self.readers.get(result).map_or(&[][..], |list| list);
        readers.iter().all(&mut may_move) && read <= self.numel(result)
    }

    /// True for a value that is computed by a kernel of its own, or is read by other nodes too.
    fn is_kept(&self, x: Value, want: Want) -> bool {
        let graph = self.graph();
        let root = graph.root(x);
        let Some(node) = graph.def_node(root) else {
            return true;
        };
        let others = self.readers.get(root).is_some_and(|readers| {
            let mut readers = readers.iter();
            readers.any(|&reader| reader.is_none() || reader != want.reader)
        });
        !may_join(graph, node) || others
    }

    /// The view of a value by an op.
    fn view(&mut self, at: Node, op: &Op, x: Value) -> Value {
        if let Op::Reshape(sizes) = op
            && self
                .shape(x)
                .iter()
                .map(|&size| size as i64)
                .eq(sizes.shape.iter().copied())
        {
            return x;
        }
        let known = self.views.get(&x).into_iter().flatten();
        if let Some((_, value)) = known.into_iter().find(|(other, _)| other == op) {
            return *value;
        }
        let value = self.add(at, op.clone(), &[x]);
        self.views.entry(x).or_default().push((op.clone(), value));
        value
    }

    /// Adds a node with one result.
    fn add(&mut self, at: Node, op: Op, inputs: &[Value]) -> Value {
        let graph = self.graph();
        let name = format!("{}.view.{}", graph.node_name(at), self.names);
        self.names += 1;
        let node = self.edit.insert_before(at, op, inputs, &[name]);
        let node = node.expect("an op of views should be typed like the op");
        self.graph().nodes[node].outputs[0]
    }
}

/// The shape of a view of a value with this shape.
fn viewed_shape(op: &Op, shape: &[u64]) -> Vec<u64> {
    let mut new = shape.to_vec();
    match op {
        Op::Permute(Dims { dims }) => new = dims.iter().map(|&d| shape[d as usize]).collect(),
        Op::Slice(Slice {
            dim,
            end,
            start,
            step,
        }) => new[*dim as usize] = ((end - start) as u64).div_ceil(*step as u64),
        _ => {}
    }
    new
}

/// How a view of a reshape from one shape to another changes places with the reshape.
fn exchanged(op: &Op, from: &[u64], to: &[u64]) -> Option<Exchange> {
    let blocks = blocks(from, to);
    let of = |d: i64| blocks.iter().find(|(_, to)| to.contains(&(d as usize)));
    let before = match op {
        Op::Permute(Dims { dims }) if blocks.iter().all(|(_, to)| to.len() == 1) => {
            let dims = dims.iter().filter_map(|&d| of(d));
            let dims = dims.flat_map(|(from, _)| from.clone().map(|d| d as i64));
            Some(Op::Permute(Dims {
                dims: dims.collect(),
            }))
        }
        Op::Flip(Dims { dims }) => {
            let parts: Option<Vec<&Block>> = dims.iter().map(|&d| of(d)).collect();
            let parts = parts?;
            let whole = parts.iter().all(|(_, to)| to.len() == 1);
            let mut dims: Vec<i64> = vec![];
            for (from, _) in parts {
                dims.extend(from.clone().map(|d| d as i64));
            }
            dims.sort_unstable();
            whole.then_some(Op::Flip(Dims { dims }))
        }
        Op::Slice(slice) => {
            let (part, whole) = of(slice.dim)?;
            let wide: Vec<usize> = part.clone().filter(|&d| from[d] != 1).collect();
            match wide[..] {
                [dim] if whole.len() == 1 => Some(Op::Slice(Slice {
                    dim: dim as i64,
                    ..slice.clone()
                })),
                _ => None,
            }
        }
        _ => None,
    };
    let cuts = || blocks.iter().all(|(from, _)| from.len() == 1);
    match before {
        Some(op) => Some(Exchange::Before(op)),
        None if cuts() => Some(Exchange::Cut(blocks)),
        None => None,
    }
}

/// Two shapes of the same elements, as parts that correspond to each other.
fn blocks(from: &[u64], to: &[u64]) -> Vec<Block> {
    let mut blocks: Vec<Block> = vec![];
    let (mut i, mut j) = (0, 0);
    while i < from.len() || j < to.len() {
        let (first, start) = (i, j);
        let (mut a, mut b) = (1, 1);
        loop {
            let more_a = i < from.len() && (first == i || a < b);
            let more_b = j < to.len() && (start == j || b < a);
            if more_a {
                a *= from[i];
                i += 1;
            }
            if more_b {
                b *= to[j];
                j += 1;
            }
            if !more_a && !more_b {
                break;
            }
        }
        // The last dimensions of one shape may be ones that the other lacks.
        match blocks.last_mut() {
            Some(last) if first == i || start == j => (last.0.end, last.1.end) = (i, j),
            _ => blocks.push((first..i, start..j)),
        }
    }
    blocks
}

/// The shape of an operand that is broadcast to `from`, where a reshape to `to` cuts dimensions.
fn cut(operand: &[u64], from: &[u64], to: &[u64], blocks: &[Block]) -> Vec<u64> {
    let missing = from.len() - operand.len();
    let mut new = vec![];
    for (one, several) in blocks {
        let d = one.start;
        let is_repeated = d < missing || operand[d - missing] != from[d];
        new.extend(
            to[several.clone()]
                .iter()
                .map(|&size| if is_repeated { 1 } else { size }),
        );
    }
    new
}
