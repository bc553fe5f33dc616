//! Reads and writes at indices.

use super::{Call, Fault, Given, only};
use crate::graph::autodiff::adjoints::Adjoint;
use crate::graph::autodiff::tape::Tape;
use ir::op::Number;
use ir::op::attrs::{Along, Embedding, EmbeddingBwd, IndexPut, Pad, ScatterValue};
use ir::{Op, Value};

pub(in super::super) fn table(t: &mut Tape<'_>, c: &Call<'_>) -> Given {
    let (x, dy) = (c.inputs[0], c.dy);
    match c.op {
        &Op::Embedding(Embedding { padding }) => {
            let rows = t.size(x, 0);
            let op = Op::EmbeddingBwd(EmbeddingBwd { padding, rows });
            only(t.one(op, &[dy, c.inputs[1]])?)
        }
        &Op::Gather(Along { dim }) => {
            let zeros = t.full(dy, &t.shape(x), 0.0)?;
            only(t.one(Op::ScatterAdd(Along { dim }), &[zeros, c.inputs[1], dy])?)
        }
        &Op::Scatter(Along { dim }) => {
            let dx = match c.needs[0] {
                true => Some(cleared(t, dy, c.inputs[1], dim)?.into()),
                false => None,
            };
            Ok(vec![dx, None, source(t, c, dim)?])
        }
        &Op::ScatterAdd(Along { dim }) => Ok(vec![Some(dy.into()), None, source(t, c, dim)?]),
        Op::ScatterValue(a) => only(cleared(t, dy, c.inputs[1], a.dim)?),
        Op::Index => {
            let zeros = t.full(dy, &t.shape(x), 0.0)?;
            let mut inputs = vec![zeros, dy];
            inputs.extend(&c.inputs[1..]);
            only(t.one(Op::IndexPut(IndexPut { accumulate: true }), &inputs)?)
        }
        Op::IndexPut(a) => put(t, c, a.accumulate),
        _ => Err(Fault::STRAY),
    }
}

/// x with zeros at the indices.
fn cleared(t: &mut Tape<'_>, x: Value, index: Value, dim: i64) -> Result<Value, Fault> {
    let value = Number::Float(0.0);
    Ok(t.one(Op::ScatterValue(ScatterValue { dim, value }), &[x, index])?)
}

/// The adjoint of what is written. It may be larger than the indices; the rest is not written.
fn source(t: &mut Tape<'_>, c: &Call<'_>, dim: i64) -> Result<Option<Adjoint>, Fault> {
    let (index, source) = (c.inputs[1], c.inputs[2]);
    if !c.needs[2] {
        return Ok(None);
    }
    let read = t.one(Op::Gather(Along { dim }), &[c.dy, index])?;
    let (from, to) = (t.shape(read), t.shape(source));
    if from == to {
        return Ok(Some(read.into()));
    }
    let rest = from
        .iter()
        .zip(&to)
        .flat_map(|(&from, &to)| [0, to as i64 - from as i64]);
    let pad = rest.collect();
    let value = Number::Float(0.0);
    Ok(Some(t.one(Op::Pad(Pad { pad, value }), &[read])?.into()))
}

/// index_put(x, values, indices..).
fn put(t: &mut Tape<'_>, c: &Call<'_>, accumulate: bool) -> Given {
    let (values, indices) = (c.inputs[1], &c.inputs[2..]);
    let mut given: Vec<Option<Adjoint>> = vec![None, None];
    if c.needs[0] {
        let dx = match accumulate {
            true => c.dy,
            false => {
                let zero = t.full(c.dy, &[], 0.0)?;
                let mut inputs = vec![c.dy, zero];
                inputs.extend(indices);
                t.one(Op::IndexPut(IndexPut { accumulate: false }), &inputs)?
            }
        };
        given[0] = Some(dx.into());
    }
    if c.needs[1] {
        let mut inputs = vec![c.dy];
        inputs.extend(indices);
        let read = t.one(Op::Index, &inputs)?;
        let read = t.cast(read, t.dtype(values))?;
        given[1] = Some(t.unbroadcast(read, &t.shape(values))?.into());
    }
    Ok(given)
}
