//! The adjoints of values, while the walk collects them.

use super::tape::Tape;
use ir::graph;
use ir::op::Number;
use ir::op::attrs::{Along, Full, Pad};
use ir::{Graph, Op, Table, Value};

/// What a reader of a value gives to its adjoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Adjoint {
    /// The derivative by the whole value.
    Whole(Value),
    /// The derivative by a slice of it; the rest is 0.
    Part(Part),
}

/// The derivative by `start..end` of a dimension.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Part {
    pub(super) value: Value,
    pub(super) dim: i64,
    pub(super) start: i64,
    pub(super) end: i64,
}

impl From<Value> for Adjoint {
    fn from(value: Value) -> Adjoint {
        Adjoint::Whole(value)
    }
}

/// The sum so far of a value's adjoint, and the slices that are not part of it yet.
#[derive(Clone, Default)]
struct Pending {
    sum: Option<Value>,
    parts: Vec<Part>,
}

/// The adjoints of the forward's values.
pub(super) struct Adjoints {
    pending: Table<Value, Pending>,
    /// Where the adjoint of a value is summed: at the value, or at what it is a reshape of.
    at: Table<Value, Value>,
}

impl Adjoints {
    /// Room for the adjoints of a graph's values.
    ///
    /// A value and its reshapes have one sum if several nodes read it. In the program, the readers
    /// of a reshape had views of their own, which `canonical` made one; the adjoints of these meet
    /// at the value, between those of its other readers.
    pub(super) fn new(graph: &Graph) -> Adjoints {
        let mut n_reads = Table::filled(graph.values.len(), 0u32);
        for &node in &graph.order {
            for &input in &graph.nodes[node].inputs {
                n_reads[input] += 1;
            }
        }
        let mut at: Table<Value, Value> = Table::new();
        for value in graph.values.ids() {
            let operand = graph.def_node(value).map(|node| &graph.nodes[node]);
            let operand = operand.filter(|node| matches!(node.op, Op::Reshape(_)));
            let operand = operand.map(|node| node.inputs[0]);
            let shared = operand.filter(|&operand| n_reads[operand] > 1);
            at.push(shared.map_or(value, |operand| at[operand]));
        }
        Adjoints {
            pending: Table::filled(graph.values.len(), Pending::default()),
            at,
        }
    }

    /// True if a reader gave something.
    pub(super) fn has(&self, value: Value) -> bool {
        let pending = &self.pending[value];
        pending.sum.is_some() || !pending.parts.is_empty()
    }

    /// Adds to the adjoint of a value. Slices wait until all are known.
    pub(super) fn give(
        &mut self,
        tape: &mut Tape<'_>,
        value: Value,
        adjoint: Adjoint,
    ) -> Result<(), graph::Error> {
        match adjoint {
            Adjoint::Whole(more) => {
                let at = self.at[value];
                let more = tape.reshape(more, &tape.shape(at))?;
                let sum = &mut self.pending[at].sum;
                *sum = Some(plus(tape, *sum, more)?);
            }
            Adjoint::Part(part) => self.pending[value].parts.push(part),
        }
        Ok(())
    }

    /// The complete adjoint of a value; `None` if no reader gave anything.
    pub(super) fn take(
        &mut self,
        tape: &mut Tape<'_>,
        value: Value,
    ) -> Result<Option<Value>, graph::Error> {
        let Pending { mut sum, parts } = std::mem::take(&mut self.pending[value]);
        for whole in joined(tape, value, parts)? {
            sum = Some(plus(tape, sum, whole)?);
        }
        Ok(sum)
    }
}

fn plus(tape: &mut Tape<'_>, sum: Option<Value>, more: Value) -> Result<Value, graph::Error> {
    match sum {
        Some(sum) => tape.add(sum, more),
        None => Ok(more),
    }
}

/// Slices of a value as whole tensors. Slices along one dimension that do not overlap are joined by
/// one `cat`, with zeros in the gaps. So q, k and v, slices of one product, need no padded copies
/// and no additions.
fn joined(
    tape: &mut Tape<'_>,
    value: Value,
    mut parts: Vec<Part>,
) -> Result<Vec<Value>, graph::Error> {
    let [first, ..] = parts[..] else {
        return Ok(vec![]);
    };
    let shape = tape.shape(value);
    let size = tape.size(value, first.dim);
    let in_order = parts.clone();
    parts.sort_by_key(|part| (part.start, part.end));
    let are_apart = parts.windows(2).all(|two| two[0].end <= two[1].start);
    if parts.len() == 1 || !are_apart || parts.iter().any(|part| part.dim != first.dim) {
        let padded = |part: &Part| {
            let mut pad = vec![0; 2 * shape.len()];
            let dim = part.dim as usize;
            pad[2 * dim] = part.start;
            pad[2 * dim + 1] = shape[dim] as i64 - part.end;
            let value = Number::Float(0.0);
            tape.one(Op::Pad(Pad { pad, value }), &[part.value])
        };
        return in_order.iter().map(padded).collect();
    }
    let mut rows = vec![];
    let mut end = 0;
    for part in &parts {
        rows.extend(zeros(tape, value, part.dim, part.start - end)?);
        rows.push(part.value);
        end = part.end;
    }
    rows.extend(zeros(tape, value, first.dim, size - end)?);
    let whole = match rows[..] {
        [only] => only,
        _ => tape.one(Op::Cat(Along { dim: first.dim }), &rows)?,
    };
    Ok(vec![whole])
}

/// Zeros of the shape of `like`, of another size along a dimension; `None` if that is 0.
fn zeros(
    tape: &mut Tape<'_>,
    like: Value,
    dim: i64,
    size: i64,
) -> Result<Option<Value>, graph::Error> {
    if size == 0 {
        return Ok(None);
    }
    let mut shape = super::tape::signed(&tape.shape(like));
    shape[dim as usize] = size;
    let dtype = tape.dtype(like);
    let value = Number::Float(0.0);
    Ok(Some(tape.one(
        Op::Full(Full {
            dtype,
            shape,
            value,
        }),
        &[],
    )?))
}
