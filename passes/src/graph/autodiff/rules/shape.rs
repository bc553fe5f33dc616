//! Ops that move elements.

use super::{Call, Fault, Given, only};
use crate::graph::autodiff::adjoints::{Adjoint, Part};
use crate::graph::autodiff::tape::Tape;
use ir::Op;
use ir::op::Number;
use ir::op::attrs::{Dims, Pad, Slice};

pub(in super::super) fn shape(t: &mut Tape<'_>, c: &Call<'_>) -> Given {
    let (x, dy) = (c.inputs[0], c.dy);
    match c.op {
        Op::Reshape(_) => only(t.reshape(dy, &t.shape(x))?),
        Op::Permute(Dims { dims }) => {
            let mut back = vec![0; dims.len()];
            for (i, &dim) in dims.iter().enumerate() {
                back[dim as usize] = i as i64;
            }
            only(t.one(Op::Permute(Dims { dims: back }), &[dy])?)
        }
        Op::Expand(_) => only(t.unbroadcast(dy, &t.shape(x))?),
        Op::Flip(_) => only(t.one(c.op.clone(), &[dy])?),
        &Op::Slice(Slice {
            dim,
            start,
            end,
            step: 1,
        }) => {
            let part = Part {
                value: dy,
                dim,
                start,
                end,
            };
            Ok(vec![Some(Adjoint::Part(part))])
        }
        Op::Slice(slice) => {
            let zeros = t.full(dy, &t.shape(x), 0.0)?;
            only(t.one(Op::SliceScatter(slice.clone()), &[zeros, dy])?)
        }
        Op::SliceScatter(slice) => {
            let mut given: Vec<Option<Adjoint>> = vec![None, None];
            if c.needs[0] {
                let zeros = t.full(dy, &t.shape(c.inputs[1]), 0.0)?;
                given[0] = Some(t.one(Op::SliceScatter(slice.clone()), &[dy, zeros])?.into());
            }
            if c.needs[1] {
                given[1] = Some(t.one(Op::Slice(slice.clone()), &[dy])?.into());
            }
            Ok(given)
        }
        Op::Cat(along) => {
            let dim = along.dim;
            let mut given: Vec<Option<Adjoint>> = vec![];
            let mut start = 0;
            for (&input, &needed) in c.inputs.iter().zip(c.needs) {
                let end = start + t.size(input, dim);
                let slice = Slice {
                    dim,
                    end,
                    start,
                    step: 1,
                };
                given.push(match needed {
                    true => Some(t.one(Op::Slice(slice), &[dy])?.into()),
                    false => None,
                });
                start = end;
            }
            Ok(given)
        }
        // What was added is cut, what was cut is 0.
        Op::Pad(a) => {
            let pad = a.pad.iter().map(|&n| -n).collect();
            let value = Number::Float(0.0);
            only(t.one(Op::Pad(Pad { pad, value }), &[dy])?)
        }
        _ => Err(Fault::STRAY),
    }
}
