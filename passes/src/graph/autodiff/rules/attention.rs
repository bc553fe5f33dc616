//! Attention. The second result of the forward is the logarithm of the sum of each row's
//! exponentials, from which the backward computes the weights again.

use super::product::multiply;
use super::{Call, Fault, Given};
use crate::graph::autodiff::adjoints::{Adjoint, Part};
use crate::graph::autodiff::tape::{Tape, signed};
use ir::op::Number;
use ir::op::attrs::{Arange, Attention, AttentionRows, Slice};
use ir::{DType, Op, Value};

pub(in super::super) fn attention(t: &mut Tape<'_>, c: &Call<'_>) -> Given {
    let mut inputs = vec![
        c.dy,
        c.inputs[0],
        c.inputs[1],
        c.inputs[2],
        c.outputs[0],
        c.outputs[1],
    ];
    inputs.extend(&c.inputs[3..]);
    match c.op {
        Op::Sdpa(a) => {
            let mut given: Vec<Option<Adjoint>> = vec![None; 3];
            if c.needs[..3].contains(&true) {
                let made = t.node(Op::SdpaBwd(a.clone()), &inputs)?;
                given = made.into_iter().map(|value| Some(value.into())).collect();
            }
            if c.needs.get(3) == Some(&true) {
                given.push(Some(mask(t, a, c)?.into()));
            }
            Ok(given)
        }
        Op::SdpaRows(a) => {
            if c.needs.get(3) == Some(&true) {
                return Err(Fault::Refused("its mask depends on a parameter"));
            }
            let made = t.node(Op::SdpaRowsBwd(a.clone()), &inputs)?;
            rows(t, a, c, &made)
        }
        _ => Err(Fault::STRAY),
    }
}

/// The adjoints of q, k and v, each of which may be some heads of a row.
fn rows(t: &mut Tape<'_>, a: &AttentionRows, c: &Call<'_>, made: &[Value]) -> Given {
    let [q, k, v] = [c.inputs[0], c.inputs[1], c.inputs[2]];
    if let ([joint], true) = (made, q == k && k == v) {
        return Ok(vec![Some((*joint).into())]);
    }
    let mut given = vec![];
    for i in 0..3 {
        let (start, heads) = (a.first[i], a.heads[i.min(1)]);
        let (dim, end) = (2, start + heads);
        let value = match made {
            &[joint] => t.one(
                Op::Slice(Slice {
                    dim,
                    end,
                    start,
                    step: 1,
                }),
                &[joint],
            )?,
            _ => made[i],
        };
        given.push(Some(match start {
            ..0 => value.into(),
            _ => Adjoint::Part(Part {
                value,
                dim,
                start,
                end,
            }),
        }));
    }
    Ok(given)
}

/// The adjoint of a mask that is added to the scores: that of the scores, w (dw - sum of w dw), for
/// the weights w. The sum over a row is that of out dout. The adjoint dw of a dropped weight is 0.
fn mask(t: &mut Tape<'_>, a: &Attention, c: &Call<'_>) -> Result<Value, Fault> {
    let (out, dout, logsumexp) = (c.outputs[0], c.dy, c.outputs[1]);
    // As in the kernel, half precision is widened: the logarithm has more digits.
    let dtype = t.dtype(dout);
    let wide = if dtype == DType::F64 {
        dtype
    } else {
        DType::F32
    };
    let q = t.shape(c.inputs[0]);
    let [batch, heads, queries, _] = q[..] else {
        return Err(Fault::Refused("its operands should have four dimensions"));
    };
    let keys = t.shape(c.inputs[1])[2];
    let scores = [batch, heads, queries, keys];
    // One matrix for each head, k and v being repeated for the heads that share them.
    let flat = |t: &mut Tape<'_>, x: Value| -> Result<Value, Fault> {
        let [_, groups, rows, width] = t.shape(x)[..] else {
            return Err(Fault::Refused("its operands should have four dimensions"));
        };
        let shared = heads.checked_div(groups).unwrap_or(1);
        let x = t.cast(x, wide)?;
        let apart = t.reshape(x, &[batch, groups, 1, rows, width])?;
        let repeated = t.expand(apart, &[batch, groups, shared, rows, width])?;
        Ok(t.reshape(repeated, &[batch * heads, rows, width])?)
    };
    let (q, k, v) = (
        flat(t, c.inputs[0])?,
        flat(t, c.inputs[1])?,
        flat(t, c.inputs[2])?,
    );
    let products = multiply(t, q, k, false, true)?;
    let products = t.reshape(products, &scores)?;
    let scaled = t.with(Op::MulScalar, products, a.scale)?;
    let mask = t.cast(c.inputs[3], wide)?;
    let masked = t.add(scaled, mask)?;
    let sums = t.cast(logsumexp, wide)?;
    let sums = t.reshape(sums, &[batch, heads, queries, 1])?;
    let less = t.one(Op::Sub, &[masked, sums])?;
    let mut weights = t.one(Op::Exp, &[less])?;
    if a.causal {
        let is_earlier = causal(t, queries, keys)?;
        let zero = t.full(weights, &[], 0.0)?;
        weights = t.select(is_earlier, weights, zero)?;
    }

    let flat_dout = flat(t, dout)?;
    let dweights = multiply(t, flat_dout, v, false, true)?;
    let mut dweights = t.reshape(dweights, &scores)?;
    if let Some(&key) = c.inputs.get(4) {
        dweights = dropped(t, dweights, key)?;
    }
    let (out, dout) = (t.cast(out, wide)?, t.cast(dout, wide)?);
    let shares = t.mul(out, dout)?;
    let shares = t.sum(shares, &[3])?;
    let less = t.one(Op::Sub, &[dweights, shares])?;
    let dscores = t.mul(weights, less)?;
    let dmask = t.unbroadcast(dscores, &t.shape(c.inputs[3]))?;
    Ok(t.cast(dmask, dtype)?)
}

/// Drops the adjoints of weights that attention has dropped by its key.
fn dropped(t: &mut Tape<'_>, x: Value, key: Value) -> Result<Value, Fault> {
    let graph = t.graph();
    let data = graph.def_node(key).map(|node| &graph.nodes[node]);
    let Some((Op::DropoutKey(a), &[rng])) = data.map(|data| (&data.op, &data.inputs[..])) else {
        return Err(Fault::Refused(
            "its dropout key is not computed in the step",
        ));
    };
    let (op, inputs) = (Op::Dropout(a.clone()), [x, rng]);
    Ok(t.node(op, &inputs)?[0])
}

/// For each query and key whether the key's position is not behind the query's.
fn causal(t: &mut Tape<'_>, queries: u64, keys: u64) -> Result<Value, Fault> {
    let mut positions = |n: u64| {
        let (start, step) = (Number::Int(0), Number::Int(1));
        let (dtype, shape) = (DType::I64, signed(&[n]));
        t.one(
            Op::Arange(Arange {
                dtype,
                shape,
                start,
                step,
            }),
            &[],
        )
    };
    let (query, key) = (positions(queries)?, positions(keys)?);
    let query = t.reshape(query, &[queries, 1])?;
    Ok(t.one(Op::Le, &[key, query])?)
}
