//! The negative log likelihood loss and its derivative.

use super::index::{IndexOperand, Indices, in_range};
use super::signature::{Checked, Signature, ensure, is_float};
use super::wide::{BLOCK, Sink, blocks_of, sink, source};
use super::{Cut, DataError, Ran};
use crate::kernel::Call;
use artifact::DType;

const NONE: i64 = 0;
const MEAN: i64 = 1;

// --- checks ---

fn check_reduction(s: &Signature<'_>) -> Result<i64, String> {
    s.int("ignore")?;
    let reduction = s.int("reduction")?;
    ensure((0..=2).contains(&reduction), || {
        "reduction should be 0, 1 or 2".into()
    })?;
    Ok(reduction)
}
pub(super) fn check_nll_loss(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.expect_index(1)?;
    s.expect_rank(0, 2)?;
    s.expect_shape(1, &s.shape(0)[..1])?;
    let shape = if check_reduction(s)? == NONE {
        s.shape(1)
    } else {
        &[]
    };
    s.results(&[(s.dtype(0), shape), (s.dtype(0), &[])])
}
pub(super) fn check_nll_sum(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.expect_index(1)?;
    s.expect_rank(0, 2)?;
    s.expect_shape(1, &s.shape(0)[..1])?;
    s.int("ignore")?;
    if s.ins.len() == 3 {
        s.expect(2, DType::F64)?;
        s.expect_shape(2, &[])?;
    }
    s.results(&[(DType::F64, &[])])
}
pub(super) fn check_nll_loss_bwd(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.expect_index(1)?;
    let (shape, dtype) = (s.sizes("shape")?, s.dtype_attr("dtype")?);
    ensure(shape.len() == 2, || "shape should have rank 2".into())?;
    s.expect_shape(1, &shape[..1])?;
    s.expect_shape(
        0,
        if check_reduction(s)? == NONE {
            &shape[..1]
        } else {
            &[]
        },
    )?;
    s.expect_shape(2, &[])?;
    s.expect(0, dtype)?;
    s.expect(2, dtype)?;
    s.results(&[(dtype, &shape)])
}

// --- indices ---

fn targets_of(s: &Signature<'_>, classes: u64) -> Vec<IndexOperand> {
    vec![IndexOperand {
        ignored: s.int("ignore").ok(),
        ..IndexOperand::new(1, classes)
    }]
}
pub(super) fn targets(s: &Signature<'_>) -> Vec<IndexOperand> {
    targets_of(s, s.shape(0)[1])
}
pub(super) fn result_targets(s: &Signature<'_>) -> Vec<IndexOperand> {
    targets_of(s, s.outs[0].shape[1])
}

// --- kernels ---

/// loss = -logp[i, target[i]], or their sum, or their mean: NaN if no row counts.
pub(super) fn nll_loss(call: &Call<'_>) -> Ran {
    let reduction = call.int("reduction");
    let (mut loss, mut weight) = (sink(call, 0), sink(call, 1));
    let (mut sum, mut counted) = (0.0, 0.0);
    each_term(call, |row, term| {
        sum += term.unwrap_or(0.0);
        counted += f64::from(u8::from(term.is_some()));
        if reduction == NONE {
            loss.store(row, &[term.unwrap_or(0.0)]);
        }
    })?;
    match reduction {
        NONE => {}
        MEAN => loss.store(0, &[sum / counted]),
        _ => loss.store(0, &[sum]),
    }
    weight.store(0, &[counted]);
    Ok(())
}

/// The sum of -logp[i, target[i]], added row by row to operand 2, or to 0, in the same order as in
/// [`nll_loss`].
pub(super) fn nll_sum(call: &Call<'_>) -> Ran {
    let mut loss = sink(call, 0);
    let mut sum = if call.n_inputs() == 3 {
        source(call, 2).one(&loss, 0)
    } else {
        0.0
    };
    each_term(call, |_, term| sum += term.unwrap_or(0.0))?;
    loss.store(0, &[sum]);
    Ok(())
}

/// Gives `f` each row and its -logp[i, target[i]], if the row counts.
fn each_term(call: &Call<'_>, mut f: impl FnMut(usize, Option<f64>)) -> Ran {
    let &[rows, classes] = call.in_shape(0) else {
        return Err(DataError::NoMatrix {
            tensor: "operand 0",
        });
    };
    let ignore = call.int("ignore");
    let (logp, targets, apart) = (source(call, 0), Indices::new(call, 1), Sink::none());
    for row in 0..rows {
        let target = targets.at(row);
        let counts = target != ignore;
        let at = if counts {
            Some(row * classes + in_range(target, classes)?)
        } else {
            None
        };
        f(row, at.map(|at| -logp.one::<f64>(&apart, at)));
    }
    Ok(())
}

pub(super) fn cut_bwd(call: &Call<'_>) -> Cut {
    Cut::of(call.out_shape(0)[0], call.out_shape(0)[1])
}
/// dlogp[i, target[i]] = -dloss, divided by the weight for a mean; 0 elsewhere.
pub(super) fn nll_loss_bwd(call: &Call<'_>) -> Ran {
    let &[rows, classes] = call.out_shape(0) else {
        return Err(DataError::NoMatrix { tensor: "result 0" });
    };
    let (ignore, reduction) = (call.int("ignore"), call.int("reduction"));
    let (dloss, targets, weight) = (source(call, 0), Indices::new(call, 1), source(call, 2));
    let mut dx = sink(call, 0);
    let weight = if reduction == MEAN {
        weight.one::<f64>(&dx, 0)
    } else {
        1.0
    };
    for (block, len) in blocks_of(call.elements()) {
        dx.store(block, &[0f32; BLOCK][..len]);
    }
    for row in call.part(rows) {
        let target = targets.at(row);
        if target != ignore {
            let at = row * classes + in_range(target, classes)?;
            let dloss: f64 = dloss.one(&dx, if reduction == NONE { row } else { 0 });
            dx.store(at, &[-dloss / weight]);
        }
    }
    Ok(())
}
