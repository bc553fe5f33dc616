//! Losses and their derivatives.

use super::Family;
use ir::Attr;
use ir::op::OpKind;
use lower::{Call, Ref, Result, Results, Scalar, all, attr_ints, ensure, one};

pub(super) const OPS: Family = &[
    ("cross_entropy_loss", cross_entropy),
    ("nll_loss", nll_loss),
    ("nll_loss_nd", nll_loss),
    ("nll_loss2d", nll_loss),
    ("nll_loss_forward", nll_loss),
    ("nll_loss2d_forward", nll_loss),
    ("nll_loss_backward", nll_loss_backward),
    ("nll_loss2d_backward", nll_loss_backward),
    ("binary_cross_entropy", binary_cross_entropy),
    (
        "binary_cross_entropy_with_logits",
        binary_cross_entropy_with_logits,
    ),
    ("huber_loss", |c| huber(c, false)),
    ("kl_div", divergence),
    ("l1_loss", l1_loss),
    ("mse_loss", mse_loss),
    ("smooth_l1_loss", |c| huber(c, true)),
    ("soft_margin_loss", soft_margin_loss),
    ("poisson_nll_loss", poisson_nll_loss),
    ("hinge_embedding_loss", hinge_embedding_loss),
    ("cosine_embedding_loss", cosine_embedding_loss),
    ("multi_margin_loss", multi_margin_loss),
    ("margin_ranking_loss", margin_ranking_loss),
    ("mse_loss_backward", mse_loss_backward),
];

/// torch's numbers for reductions; any other number means a sum.
const NO_REDUCTION: i64 = 0;
const MEAN: i64 = 1;
/// The target that does not count, torch's default.
const IGNORED: i64 = -100;

fn nll_loss(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    losses(c, x)
}

/// The loss of logits whose targets are classes, not probabilities.
fn cross_entropy(c: &mut Call<'_>) -> Result<Results> {
    let (x, target) = (c.tensor("self")?, c.tensor("target")?);
    ensure(!c.dtype(target).is_float(), "the targets are probabilities")?;
    let smoothing = c.float_or("label_smoothing", 0.0)?;
    let x = c.class_rows(x)?;
    let x = c.step(OpKind::LogSoftmax, &[("dim", Attr::Int(1))], &[x])?;
    let loss = losses(c, x)?[0].ok_or("has no result")?;
    if smoothing == 0.0 {
        return one(loss);
    }
    let even = even_loss(c, x, target)?;
    let even = c.scalar_step(OpKind::MulScalar, even, Scalar::Float(smoothing))?;
    let loss = c.scalar_step(OpKind::MulScalar, loss, Scalar::Float(1.0 - smoothing))?;
    one(c.step(OpKind::Add, &[], &[loss, even])?)
}

/// The mean over all classes of the loss that each would have as the target, reduced over the rows
/// `x[n, classes]` that count.
fn even_loss(c: &mut Call<'_>, x: Ref, target: Ref) -> Result<Ref> {
    ensure(
        c.opt_tensor("weight")?.is_none(),
        "smooths labels that have weights",
    )?;
    let reduction = c.int_or("reduction", MEAN)?;
    let ignore = c.int_or("ignore_index", IGNORED)?;
    let shape = c.shape_of(target);
    let rows = c.reduce(OpKind::Mean, x, &[1], false)?;
    let rows = c.map(OpKind::Neg, rows)?;
    let rows = c.reshape(rows, &shape)?;
    let counts = c.scalar_step(OpKind::NeScalar, target, Scalar::Int(ignore))?;
    let rows = c.masked(counts, rows)?;
    let dims: Vec<usize> = (0..shape.len()).collect();
    match reduction {
        NO_REDUCTION => Ok(rows),
        MEAN => {
            let sum = c.reduce(OpKind::Sum, rows, &dims, false)?;
            let counts = c.cast(counts, c.dtype(sum))?;
            let n = c.reduce(OpKind::Sum, counts, &dims, false)?;
            c.step(OpKind::Div, &[], &[sum, n])
        }
        _ => c.reduce(OpKind::Sum, rows, &dims, false),
    }
}

/// The loss of log-probabilities, and the number of targets that count, or the sum of their
/// weights.
fn losses(c: &mut Call<'_>, x: Ref) -> Result<Results> {
    let target = c.tensor("target")?;
    let reduction = c.int_or("reduction", MEAN)?;
    let ignore = c.int_or("ignore_index", IGNORED)?;
    let Some(classes) = c.opt_tensor("weight")? else {
        return all(c.nll_loss(x, target, reduction, ignore)?);
    };
    let weights = weights(c, classes, target, ignore)?;
    let rows = c.nll_loss(x, target, NO_REDUCTION, ignore)?[0];
    let (shape, n) = (c.shape_of(target), c.ty(target).numel());
    let rows = c.reshape(rows, &[n])?;
    let rows = c.step(OpKind::Mul, &[], &[rows, weights])?;
    let total = c.reduce(OpKind::Sum, weights, &[0], false)?;
    let loss = match reduction {
        NO_REDUCTION => c.reshape(rows, &shape)?,
        _ => c.reduce(OpKind::Sum, rows, &[0], false)?,
    };
    let loss = match reduction {
        MEAN => c.step(OpKind::Div, &[], &[loss, total])?,
        _ => loss,
    };
    all(vec![loss, total])
}

/// The weights of the classes that are targets, in a row; 0 where a target is ignored.
fn weights(c: &mut Call<'_>, classes: Ref, target: Ref, ignore: i64) -> Result<Ref> {
    let (n, dtype) = (c.ty(target).numel(), c.dtype(classes));
    let target = c.reshape(target, &[n])?;
    let counts = c.scalar_step(OpKind::NeScalar, target, Scalar::Int(ignore))?;
    let first = c.full(Scalar::Int(0), c.dtype(target), &[1])?;
    let at = c.step(OpKind::Where, &[], &[counts, target, first])?;
    let n_classes = c.ty(classes).numel();
    let table = c.reshape(classes, &[n_classes, 1])?;
    let found = c.step(
        OpKind::Embedding,
        &[("padding", Attr::Int(-1))],
        &[table, at],
    )?;
    let found = c.reshape(found, &[n])?;
    let counts = c.cast(counts, dtype)?;
    c.step(OpKind::Mul, &[], &[found, counts])
}

fn nll_loss_backward(c: &mut Call<'_>) -> Result<Results> {
    let dy = c.tensor("grad_output")?;
    let (x, target) = (c.tensor("self")?, c.tensor("target")?);
    let (mut reduction, ignore) = (c.int("reduction")?, c.int("ignore_index")?);
    let (mut dy, weight) = (dy, c.tensor("total_weight")?);
    if let Some(classes) = c.opt_tensor("weight")? {
        let weights = weights(c, classes, target, ignore)?;
        if reduction == MEAN {
            dy = c.step(OpKind::Div, &[], &[dy, weight])?;
        }
        let n = c.ty(target).numel();
        if reduction == NO_REDUCTION {
            dy = c.reshape(dy, &[n])?;
        }
        dy = c.step(OpKind::Mul, &[], &[weights, dy])?;
        reduction = NO_REDUCTION;
    }
    let (shape, n) = (c.shape_of(x), c.ty(target).numel());
    let classes = shape.get(1).or(shape.first());
    let classes = *classes.ok_or("there are no classes")?;
    let target = c.reshape(target, &[n])?;
    let dy = if reduction == NO_REDUCTION {
        c.reshape(dy, &[n])?
    } else {
        dy
    };
    let attrs = [
        ("dtype", Attr::Type(c.dtype(x))),
        ("ignore", Attr::Int(ignore)),
        ("reduction", Attr::Int(reduction)),
        ("shape", attr_ints(&[n, classes])?),
    ];
    let dx = c.step(OpKind::NllLossBwd, &attrs, &[dy, target, weight])?;
    if shape.len() <= 2 {
        return one(c.reshape(dx, &shape)?);
    }
    // [N d.., C] -> [N, d.., C] -> [N, C, d..]
    let rank = shape.len();
    let last = [&shape[..1], &shape[2..], &[classes]].concat();
    let dx = c.reshape(dx, &last)?;
    let dims: Vec<usize> = [0, rank - 1].into_iter().chain(1..rank - 1).collect();
    one(c.permute(dx, &dims)?)
}

// --- losses of each element ---

/// The mean or the sum of losses, or all of them.
pub(super) fn reduced(c: &mut Call<'_>, x: Ref) -> Result<Results> {
    let dims: Vec<usize> = (0..c.rank(x)).collect();
    one(match c.int_or("reduction", MEAN)? {
        NO_REDUCTION => x,
        MEAN => c.reduce(OpKind::Mean, x, &dims, false)?,
        _ => c.reduce(OpKind::Sum, x, &dims, false)?,
    })
}

/// The operand and the target in the type of the result.
fn pair(c: &mut Call<'_>) -> Result<[Ref; 2]> {
    let dtype = c.result()?.dtype();
    let (x, target) = (c.tensor("self")?, c.tensor("target")?);
    Ok([c.cast(x, dtype)?, c.cast(target, dtype)?])
}

fn distance(c: &mut Call<'_>) -> Result<Ref> {
    let [x, target] = pair(c)?;
    let d = c.step(OpKind::Sub, &[], &[x, target])?;
    c.map(OpKind::Abs, d)
}

fn l1_loss(c: &mut Call<'_>) -> Result<Results> {
    let d = distance(c)?;
    reduced(c, d)
}

/// With d = |x - t|: `d^2 / 2` below `delta` and `delta (d - delta / 2)` above; a smooth loss has
/// both divided by it.
fn huber(c: &mut Call<'_>, is_smooth: bool) -> Result<Results> {
    let delta = c.float_or(if is_smooth { "beta" } else { "delta" }, 1.0)?;
    let d = distance(c)?;
    if is_smooth && delta == 0.0 {
        return reduced(c, d);
    }
    let scale = if is_smooth { delta } else { 1.0 };
    let near = c.step(OpKind::Mul, &[], &[d, d])?;
    let near = c.scalar_step(OpKind::MulScalar, near, Scalar::Float(0.5 / scale))?;
    let far = c.scalar_step(OpKind::AddScalar, d, Scalar::Float(-0.5 * delta))?;
    let far = c.scalar_step(OpKind::MulScalar, far, Scalar::Float(delta / scale))?;
    let is_near = c.scalar_step(OpKind::LtScalar, d, Scalar::Float(delta))?;
    let loss = c.step(OpKind::Where, &[], &[is_near, near, far])?;
    reduced(c, loss)
}

/// The losses with a weight for each, which broadcasts.
fn weighed(c: &mut Call<'_>, loss: Ref) -> Result<Results> {
    let loss = match c.opt_tensor("weight")? {
        Some(weight) => c.step(OpKind::Mul, &[], &[loss, weight])?,
        None => loss,
    };
    reduced(c, loss)
}

/// `-t log x - (1 - t) log(1 - x)`, where logarithms are at least -100 as in torch.
fn binary_cross_entropy(c: &mut Call<'_>) -> Result<Results> {
    let [x, t] = pair(c)?;
    let dtype = c.dtype(x);
    let rest = c.scalar_step(OpKind::RsubScalar, x, Scalar::Float(1.0))?;
    let mut terms = vec![];
    for part in [x, rest] {
        let log = c.map(OpKind::Log, part)?;
        terms.push(c.clamp(log, Some(Scalar::Float(-100.0)), None, dtype)?);
    }
    let other = c.scalar_step(OpKind::AddScalar, t, Scalar::Float(-1.0))?;
    let first = c.step(OpKind::Mul, &[], &[other, terms[1]])?;
    let second = c.step(OpKind::Mul, &[], &[t, terms[0]])?;
    let loss = c.step(OpKind::Sub, &[], &[first, second])?;
    weighed(c, loss)
}

/// `(1 - t) x + w log(1 + exp(-x))`, with `w = 1 + (p - 1) t` for a weight `p` of positive targets.
fn binary_cross_entropy_with_logits(c: &mut Call<'_>) -> Result<Results> {
    let [x, t] = pair(c)?;
    let rest = c.scalar_step(OpKind::RsubScalar, t, Scalar::Float(1.0))?;
    let linear = c.step(OpKind::Mul, &[], &[rest, x])?;
    let negative = c.map(OpKind::Neg, x)?;
    let mut bend = c.softplus(negative)?;
    if let Some(positive) = c.opt_tensor("pos_weight")? {
        let more = c.scalar_step(OpKind::AddScalar, positive, Scalar::Float(-1.0))?;
        let weight = c.step(OpKind::Mul, &[], &[more, t])?;
        let weight = c.scalar_step(OpKind::AddScalar, weight, Scalar::Float(1.0))?;
        bend = c.step(OpKind::Mul, &[], &[weight, bend])?;
    }
    let loss = c.step(OpKind::Add, &[], &[linear, bend])?;
    weighed(c, loss)
}

/// `t (log t - x)` for log-probabilities x, which is 0 where t is; with logarithms of targets
/// `exp(t) (t - x)`.
fn divergence(c: &mut Call<'_>) -> Result<Results> {
    let [x, t] = pair(c)?;
    let loss = if c.bool_or("log_target", false)? {
        let chance = c.map(OpKind::Exp, t)?;
        let d = c.step(OpKind::Sub, &[], &[t, x])?;
        c.step(OpKind::Mul, &[], &[chance, d])?
    } else {
        let is_zero = c.scalar_step(OpKind::EqScalar, t, Scalar::Float(0.0))?;
        let unit = c.full(Scalar::Float(1.0), c.dtype(t), &[])?;
        let safe = c.step(OpKind::Where, &[], &[is_zero, unit, t])?;
        let log = c.map(OpKind::Log, safe)?;
        let d = c.step(OpKind::Sub, &[], &[log, x])?;
        c.step(OpKind::Mul, &[], &[t, d])?
    };
    reduced(c, loss)
}

/// `log(1 + exp(-t x))`
fn soft_margin_loss(c: &mut Call<'_>) -> Result<Results> {
    let [x, t] = pair(c)?;
    let product = c.step(OpKind::Mul, &[], &[x, t])?;
    let negative = c.map(OpKind::Neg, product)?;
    let loss = c.softplus(negative)?;
    reduced(c, loss)
}

fn mse_loss(c: &mut Call<'_>) -> Result<Results> {
    let (x, t) = (c.tensor("self")?, c.tensor("target")?);
    let mean = match c.int_or("reduction", MEAN)? {
        NO_REDUCTION => None,
        reduction => Some(reduction == MEAN),
    };
    one(c.squared_difference(x, t, mean)?)
}

fn mse_loss_backward(c: &mut Call<'_>) -> Result<Results> {
    let dy = c.tensor("grad_output")?;
    let (x, t) = (c.tensor("self")?, c.tensor("target")?);
    let reduction = c.int("reduction")?;
    let d = c.step(OpKind::Sub, &[], &[x, t])?;
    let scale = if reduction == MEAN {
        2.0 / c.ty(d).numel() as f64
    } else {
        2.0
    };
    let d = c.scalar_step(OpKind::MulScalar, d, Scalar::Float(scale))?;
    one(c.step(OpKind::Mul, &[], &[d, dy])?)
}

/// `e^x - t x` of a logarithm `x`, or `x - t log(x + eps)`.
fn poisson_nll_loss(c: &mut Call<'_>) -> Result<Results> {
    let (x, t) = (c.tensor("input")?, c.tensor("target")?);
    let (is_log, full) = (c.bool_or("log_input", true)?, c.bool_or("full", false)?);
    let eps = c.float_or("eps", 1e-8)?;
    ensure(!full, "adds Stirling's formula")?;
    let (rate, log) = if is_log {
        (c.map(OpKind::Exp, x)?, x)
    } else {
        let more = c.scalar_step(OpKind::AddScalar, x, Scalar::Float(eps))?;
        (x, c.map(OpKind::Log, more)?)
    };
    let gain = c.step(OpKind::Mul, &[], &[t, log])?;
    let loss = c.step(OpKind::Sub, &[], &[rate, gain])?;
    reduced(c, loss)
}

/// `x` where the target is not -1, and `max(0, margin - x)` where it is not 1.
fn hinge_embedding_loss(c: &mut Call<'_>) -> Result<Results> {
    let (x, t) = (c.tensor("self")?, c.tensor("target")?);
    let margin = c.float_or("margin", 1.0)?;
    let hinge = c.scalar_step(OpKind::RsubScalar, x, Scalar::Float(margin))?;
    let hinge = at_least_0(c, hinge)?;
    let not_far = c.scalar_step(OpKind::NeScalar, t, Scalar::Int(-1))?;
    let not_near = c.scalar_step(OpKind::NeScalar, t, Scalar::Int(1))?;
    let near = c.masked(not_far, x)?;
    let far = c.masked(not_near, hinge)?;
    let loss = c.step(OpKind::Add, &[], &[near, far])?;
    reduced(c, loss)
}

/// `1 - cos` for the target 1, and `max(0, cos - margin)` for -1.
fn cosine_embedding_loss(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.tensor("input1")?, c.tensor("input2")?);
    let (t, margin) = (c.tensor("target")?, c.float_or("margin", 0.0)?);
    let last = c.rank(a).checked_sub(1).ok_or("has no dimension")?;
    // torch adds this to the sums of squares.
    let eps = Scalar::Float(1e-12);
    let mut sums = vec![];
    for (x, y, eps) in [(a, b, None), (a, a, Some(eps)), (b, b, Some(eps))] {
        let product = c.step(OpKind::Mul, &[], &[x, y])?;
        let sum = c.reduce(OpKind::Sum, product, &[last], false)?;
        sums.push(match eps {
            Some(eps) => c.scalar_step(OpKind::AddScalar, sum, eps)?,
            None => sum,
        });
    }
    let sizes = c.step(OpKind::Mul, &[], &sums[1..])?;
    let size = c.map(OpKind::Sqrt, sizes)?;
    let cos = c.step(OpKind::Div, &[], &[sums[0], size])?;
    let near = c.scalar_step(OpKind::RsubScalar, cos, Scalar::Int(1))?;
    let far = c.scalar_step(OpKind::AddScalar, cos, Scalar::Float(-margin))?;
    let far = at_least_0(c, far)?;
    let is_near = c.scalar_step(OpKind::EqScalar, t, Scalar::Int(1))?;
    let is_far = c.scalar_step(OpKind::EqScalar, t, Scalar::Int(-1))?;
    let (near, far) = (c.masked(is_near, near)?, c.masked(is_far, far)?);
    let loss = c.step(OpKind::Add, &[], &[near, far])?;
    reduced(c, loss)
}

/// The mean over the classes of `max(0, margin - x[target] + x)^p`, without the target's own.
fn multi_margin_loss(c: &mut Call<'_>) -> Result<Results> {
    let (x, t) = (c.tensor("self")?, c.tensor("target")?);
    let (p, margin) = (c.float_or("p", 1.0)?, c.float_or("margin", 1.0)?);
    ensure(c.opt_tensor("weight")?.is_none(), "weights of classes")?;
    ensure(p == 1.0 || p == 2.0, "a power other than 1 and 2")?;
    let &[n, classes] = &c.shape_of(x)[..] else {
        return Err("is no matrix of classes".into());
    };
    let at = c.reshape(t, &[n, 1])?;
    let own = c.step(OpKind::Gather, &[("dim", Attr::Int(1))], &[x, at])?;
    let rest = c.step(OpKind::Sub, &[], &[x, own])?;
    let rest = c.scalar_step(OpKind::AddScalar, rest, Scalar::Float(margin))?;
    let mut rest = c.map(OpKind::Relu, rest)?;
    if p == 2.0 {
        rest = c.step(OpKind::Mul, &[], &[rest, rest])?;
    }
    let is_own = c.is_class(at, 1, classes)?;
    let is_other = c.map(OpKind::LogicalNot, is_own)?;
    let rest = c.masked(is_other, rest)?;
    let loss = c.reduce(OpKind::Sum, rest, &[1], false)?;
    let loss = c.scalar_step(OpKind::DivScalar, loss, Scalar::Int(classes as i64))?;
    reduced(c, loss)
}

/// `max(0, margin - t (a - b))`
fn margin_ranking_loss(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.tensor("input1")?, c.tensor("input2")?);
    let (t, margin) = (c.tensor("target")?, c.float_or("margin", 0.0)?);
    let d = c.step(OpKind::Sub, &[], &[a, b])?;
    let d = c.step(OpKind::Mul, &[], &[t, d])?;
    let rest = c.scalar_step(OpKind::RsubScalar, d, Scalar::Float(margin))?;
    let loss = at_least_0(c, rest)?;
    reduced(c, loss)
}

/// `max(0, x)`, with the derivative 1 at 0, as torch's losses have it.
pub(super) fn at_least_0(c: &mut Call<'_>, x: Ref) -> Result<Ref> {
    c.clamp(x, Some(Scalar::Int(0)), None, c.dtype(x))
}
