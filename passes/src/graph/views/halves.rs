//! Writes the exchange of two halves as a flip of two rows: `cat(-x[h..], x[..h])`, which
//! implementations of rotary embeddings call `rotate_half`, and its derivative.

use crate::graph::reshape_to;
use crate::graph::steps::TOGETHER;
use ir::graph::Edit;
use ir::op::Number;
use ir::op::attrs::{Along, Arange, Dims, Slice};
use ir::{DType, Graph, Node, Op, Value};
use std::collections::BTreeMap;

/// Rewrites the graph.
pub(super) fn run(graph: &mut Graph) {
    let order = graph.order.clone();
    let mut signs: BTreeMap<(DType, bool), Value> = BTreeMap::new();
    let mut edit = graph.edit();
    for node in order {
        if let Some(halves) = Halves::of(edit.graph(), node) {
            halves.write(&mut edit, node, &mut signs);
        }
    }
    edit.finish();
    crate::graph::canonical::remove_dead(graph);
}

/// A concatenation of the second half of a value and its first half.
struct Halves {
    of: Value,
    dim: usize,
    /// Whether a half of the result is negated.
    negated: [bool; 2],
}

impl Halves {
    fn of(graph: &Graph, node: Node) -> Option<Halves> {
        let data = &graph.nodes[node];
        let Op::Cat(Along { dim }) = data.op else {
            return None;
        };
        let &[second, first] = &data.inputs[..] else {
            return None;
        };
        let parts = [second, first].map(|part| Part::of(graph, part, dim));
        let [Some(second), Some(first)] = parts else {
            return None;
        };
        let ty = &graph.values[second.of].ty;
        let (shape, dim) = (ty.shape(), dim as usize);
        let half = shape[dim] / 2;
        let follows = shape[dim + 1..].iter().product::<u64>() * half;
        let size = half as i64;
        let fits = second.of == first.of
            && (first.start, first.end) == (0, size)
            && (second.start, second.end) == (size, 2 * size)
            && shape[dim] == 2 * half
            && TOGETHER <= follows
            && ty.dtype().is_float();
        fits.then_some(Halves {
            of: second.of,
            dim,
            negated: [second.negated, first.negated],
        })
    }

    fn write(&self, edit: &mut Edit<'_>, node: Node, signs: &mut BTreeMap<(DType, bool), Value>) {
        let graph = edit.graph();
        let ty = graph.values[self.of].ty.clone();
        let (shape, dtype) = (ty.shape().to_vec(), ty.dtype());
        let name = graph.values[graph.nodes[node].outputs[0]].name.clone();
        let add = |edit: &mut Edit<'_>, op: Op, inputs: &[Value], what: &str| {
            let added = edit.insert_before(node, op, inputs, &[format!("{name}.{what}")]);
            let added = added.expect("halves should be typed like their value");
            edit.graph().nodes[added].outputs[0]
        };
        let mut rows = shape[..self.dim].to_vec();
        rows.extend([2, shape[self.dim] / 2]);
        rows.extend(&shape[self.dim + 1..]);
        let rows = add(edit, reshape_to(rows), &[self.of], "rows");
        let dims = vec![self.dim as i64];
        let mut x = add(edit, Op::Flip(Dims { dims }), &[rows], "exchanged");
        match self.negated {
            [false, false] => {}
            [true, true] => x = add(edit, Op::Neg, &[x], "negated"),
            [second, _] => {
                let sign = *signs.entry((dtype, second)).or_insert_with(|| {
                    let step = if second { 2 } else { -2 };
                    let signs = Op::Arange(Arange {
                        dtype,
                        shape: vec![2],
                        start: Number::Int(-step / 2),
                        step: Number::Int(step),
                    });
                    add(edit, signs, &[], "signs")
                });
                let mut ones = vec![2];
                ones.extend(vec![1; shape.len() - self.dim]);
                let sign = add(edit, reshape_to(ones), &[sign], "sign");
                x = add(edit, Op::Mul, &[x, sign], "signed");
            }
        }
        edit.set_op(node, reshape_to(shape), vec![x]);
    }
}

/// A slice of a value, perhaps negated.
struct Part {
    of: Value,
    start: i64,
    end: i64,
    negated: bool,
}

impl Part {
    fn of(graph: &Graph, value: Value, along: i64) -> Option<Part> {
        let mut data = &graph.nodes[graph.def_node(value)?];
        let negated = matches!(data.op, Op::Neg);
        if negated {
            data = &graph.nodes[graph.def_node(data.inputs[0])?];
        }
        match data.op {
            Op::Slice(Slice {
                dim,
                end,
                start,
                step: 1,
            }) if dim == along => Some(Part {
                of: data.inputs[0],
                start,
                end,
                negated,
            }),
            _ => None,
        }
    }
}
