//! Convolutions and pools.

use super::{Call, Fault, Given, only};
use crate::graph::autodiff::derivative::SECOND;
use crate::graph::autodiff::tape::{Tape, signed};
use ir::Op;
use ir::op::attrs::{Convolution, ConvolutionBwd, PoolBwd};

pub(in super::super) fn window(t: &mut Tape<'_>, c: &Call<'_>) -> Given {
    match c.op {
        Op::Convolution(a) => {
            let mask: Vec<i64> = (0..3)
                .map(|i| i64::from(c.needs.get(i) == Some(&true)))
                .collect();
            let op = Op::ConvolutionBwd(ConvolutionBwd {
                dilation: a.dilation.clone(),
                groups: a.groups,
                mask: mask.clone(),
                padding: a.padding.clone(),
                stride: a.stride.clone(),
            });
            let mut results = t.node(op, &[c.dy, c.inputs[0], c.inputs[1]])?.into_iter();
            let given = mask.iter().map(|&needed| match needed {
                0 => None,
                _ => results.next().map(Into::into),
            });
            Ok(given.collect())
        }
        // The second result says where each maximum was.
        Op::MaxPool2d(a) => {
            let op = Op::MaxPool2dBwd(PoolBwd {
                ceil: a.ceil,
                dilation: a.dilation.clone(),
                kernel: a.kernel.clone(),
                padding: a.padding.clone(),
                shape: signed(&t.shape(c.inputs[0])),
                stride: a.stride.clone(),
            });
            only(t.one(op, &[c.dy, c.outputs[1]])?)
        }
        Op::ConvolutionBwd(a) if a.mask == [1, 0, 0] => transposed(t, c, a),
        Op::ConvolutionBwd(_) => Err(Fault::Refused(SECOND)),
        _ => Err(Fault::STRAY),
    }
}

/// A transposed convolution: the adjoint of a convolution's operand, of which only the shape
/// counts. It is linear in the other two.
fn transposed(t: &mut Tape<'_>, c: &Call<'_>, a: &ConvolutionBwd) -> Given {
    let [x, _, w] = [c.inputs[0], c.inputs[1], c.inputs[2]];
    let mut given = vec![None, None, None];
    if c.needs[0] {
        let op = Op::Convolution(Convolution {
            dilation: a.dilation.clone(),
            groups: a.groups,
            padding: a.padding.clone(),
            stride: a.stride.clone(),
        });
        given[0] = Some(t.one(op, &[c.dy, w])?.into());
    }
    if c.needs[2] {
        let mask = vec![0, 1, 0];
        let op = Op::ConvolutionBwd(ConvolutionBwd { mask, ..a.clone() });
        given[2] = Some(t.one(op, &[x, c.dy, w])?.into());
    }
    Ok(given)
}
