//! Normalisation. The mean and the inverse deviation are results of the forward.

use super::{Call, Fault, Given};
use crate::graph::autodiff::tape::Tape;
use ir::Op;
use ir::op::attrs::{BatchNormBwd, LayerNormBwd};

pub(in super::super) fn norm(t: &mut Tape<'_>, c: &Call<'_>) -> Given {
    let mask: Vec<i64> = (0..3)
        .map(|i| i64::from(c.needs.get(i) == Some(&true)))
        .collect();
    let [x, mean, rstd] = [c.inputs[0], c.outputs[1], c.outputs[2]];
    let (op, inputs) = match c.op {
        Op::LayerNorm(a) => {
            let dims = a.dims;
            let mask = mask.clone();
            let mut inputs = vec![c.dy, x, mean, rstd];
            inputs.extend(c.inputs.get(1));
            (Op::LayerNormBwd(LayerNormBwd { dims, mask }), inputs)
        }
        Op::BatchNorm(_) => {
            let mask = mask.clone();
            let inputs = vec![c.dy, x, c.inputs[1], mean, rstd];
            (Op::BatchNormBwd(BatchNormBwd { mask }), inputs)
        }
        _ => return Err(Fault::STRAY),
    };
    let mut results = t.node(op, &inputs)?.into_iter();
    let given = mask.iter().map(|&needed| match needed {
        0 => None,
        _ => results.next().map(Into::into),
    });
    Ok(given.collect())
}
