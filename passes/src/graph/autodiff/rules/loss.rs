//! Losses.

use super::{Call, Fault, Given, only};
use crate::graph::autodiff::adjoints::Adjoint;
use crate::graph::autodiff::tape::{Tape, signed};
use ir::Op;
use ir::op::attrs::{NllLoss, NllLossBwd};

pub(in super::super) fn loss(t: &mut Tape<'_>, c: &Call<'_>) -> Given {
    let logp = c.inputs[0];
    let dtype = t.dtype(logp);
    let backward = |t: &Tape<'_>, ignore, reduction| {
        let shape = signed(&t.shape(logp));
        Op::NllLossBwd(NllLossBwd {
            dtype,
            ignore,
            reduction,
            shape,
        })
    };
    match c.op {
        // The second result is the number of targets that count.
        Op::NllLoss(a) => {
            let op = backward(t, a.ignore, a.reduction);
            only(t.one(op, &[c.dy, c.inputs[1], c.outputs[1]])?)
        }
        // The sum is f64; a sum does not read the number of targets.
        Op::NllSum(a) => {
            let mut given: Vec<Option<Adjoint>> = vec![None; 2];
            if c.needs[0] {
                let dy = t.cast(c.dy, dtype)?;
                let weight = t.full(logp, &[], 1.0)?;
                let op = backward(t, a.ignore, NllLoss::SUM);
                given[0] = Some(t.one(op, &[dy, c.inputs[1], weight])?.into());
            }
            given.push(Some(c.dy.into()));
            Ok(given)
        }
        _ => Err(Fault::STRAY),
    }
}
