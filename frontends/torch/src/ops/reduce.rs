//! Reductions, sorting and cumulative sums.

use super::Family;
use ir::op::OpKind;
use ir::{Attr, DType};
use lower::{Call, Range, Ref, Result, Results, all, ensure, one, wrap};

pub(super) const OPS: Family = &[
    ("sum", |c| total(c, OpKind::Sum)),
    ("mean", |c| total(c, OpKind::Mean)),
    ("amax", |c| reduction(c, OpKind::Amax)),
    ("amin", |c| reduction(c, OpKind::Amin)),
    ("max.default", |c| over_all(c, OpKind::Amax)),
    ("min.default", |c| over_all(c, OpKind::Amin)),
    ("max.dim", |c| extreme(c, true)),
    ("min.dim", |c| extreme(c, false)),
    ("argmax", |c| position(c, true)),
    ("argmin", |c| position(c, false)),
    ("any", |c| any_or_all(c, false)),
    ("all", |c| any_or_all(c, true)),
    ("cumsum", cumsum),
    ("diff", diff),
    ("topk", topk),
    ("sort.default", sort),
    ("var", |c| variance(c, false, false)),
    ("std", |c| variance(c, true, false)),
    ("var_mean", |c| variance(c, false, true)),
    ("std_mean", |c| variance(c, true, true)),
    ("logsumexp", logsumexp),
    ("linalg_vector_norm", |c| norm(c, "ord")),
    ("norm", |c| norm(c, "p")),
];

/// The operand, the reduced dimensions, and whether these stay, with size 1.
fn operand(c: &mut Call<'_>) -> Result<(Ref, Vec<usize>, bool)> {
    let x = c.tensor("self")?;
    let dims = c.dims("dim", c.rank(x))?;
    Ok((x, dims, c.bool_or("keepdim", false)?))
}

fn reduction(c: &mut Call<'_>, op: OpKind) -> Result<Results> {
    let (x, dims, keepdim) = operand(c)?;
    one(c.reduce(op, x, &dims, keepdim)?)
}

/// A reduction in the element type of the result.
fn total(c: &mut Call<'_>, op: OpKind) -> Result<Results> {
    let (x, dims, keepdim) = operand(c)?;
    c.opt_dtype("dtype")?;
    let x = c.cast(x, c.result()?.dtype())?;
    one(c.reduce(op, x, &dims, keepdim)?)
}

fn over_all(c: &mut Call<'_>, op: OpKind) -> Result<Results> {
    let x = c.tensor("self")?;
    let dims: Vec<usize> = (0..c.rank(x)).collect();
    one(c.reduce(op, x, &dims, false)?)
}

fn extreme(c: &mut Call<'_>, largest: bool) -> Result<Results> {
    let x = c.tensor("self")?;
    let dim = c.dim("dim", None, c.rank(x))?;
    let keepdim = c.bool_or("keepdim", false)?;
    all(c.extreme(x, dim, keepdim, largest)?)
}

fn position(c: &mut Call<'_>, largest: bool) -> Result<Results> {
    let mut x = c.tensor("self")?;
    let keepdim = c.bool_or("keepdim", false)?;
    let dim = match c.opt_int("dim")? {
        Some(dim) => wrap(dim, c.rank(x))?,
        None => {
            ensure(!keepdim, "keeps the dimensions of a flattened tensor")?;
            let n = c.ty(x).numel();
            x = c.reshape(x, &[n])?;
            0
        }
    };
    one(c.extreme(x, dim, keepdim, largest)?[1])
}

fn any_or_all(c: &mut Call<'_>, is_all: bool) -> Result<Results> {
    let (x, dims, keepdim) = operand(c)?;
    let y = c.any_or_all(x, &dims, keepdim, is_all)?;
    // any() of bytes is a byte.
    one(c.cast(y, c.result()?.dtype())?)
}

fn cumsum(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let dim = c.dim("dim", None, c.rank(x))?;
    c.opt_dtype("dtype")?;
    let x = c.cast(x, c.result()?.dtype())?;
    one(c.step(OpKind::Cumsum, &[("dim", Attr::Int(dim as i64))], &[x])?)
}

/// The differences of neighbours along a dimension.
fn diff(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let dim = c.dim("dim", Some(-1), c.rank(x))?;
    ensure(c.int_or("n", 1)? == 1, "takes differences of differences")?;
    let (before, after) = (c.opt_tensor("prepend")?, c.opt_tensor("append")?);
    let parts: Vec<Ref> = [before, Some(x), after].into_iter().flatten().collect();
    let x = match parts[..] {
        [only] => only,
        _ => c.step(OpKind::Cat, &[("dim", Attr::Int(dim as i64))], &parts)?,
    };
    let size = c.ty(x).shape()[dim] as i64;
    let left = c.slice(x, dim, Range::new(0, (size - 1).max(0)))?;
    let right = c.slice(x, dim, Range::new(size.min(1), size))?;
    let op = match c.dtype(x) {
        DType::Bool => OpKind::Ne,
        _ => OpKind::Sub,
    };
    one(c.step(op, &[], &[right, left])?)
}

fn topk(c: &mut Call<'_>) -> Result<Results> {
    let (x, k) = (c.tensor("self")?, c.int("k")?);
    let dim = c.dim("dim", Some(-1), c.rank(x))?;
    let largest = c.bool_or("largest", true)?;
    // Sorted results are also right if any order is allowed.
    c.bool_or("sorted", true)?;
    all(c.topk(x, dim, k, largest)?)
}

fn sort(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let dim = c.dim("dim", Some(-1), c.rank(x))?;
    let descending = c.bool_or("descending", false)?;
    let size = *c.ty(x).shape().get(dim).ok_or("a number is not sorted")?;
    all(c.topk(x, dim, size as i64, descending)?)
}

fn variance(c: &mut Call<'_>, root: bool, with_mean: bool) -> Result<Results> {
    let (x, dims, keepdim) = operand(c)?;
    let correction = match c.opt_scalar("correction")? {
        Some(correction) => correction.float(),
        None => f64::from(u8::from(c.bool_or("unbiased", true)?)),
    };
    let (mut y, mean) = c.variance(x, &dims, keepdim, correction)?;
    if root {
        y = c.map(OpKind::Sqrt, y)?;
    }
    let shape = c.shape_of(y);
    let mean = c.reshape(mean, &shape)?;
    if with_mean {
        all(vec![y, mean])
    } else {
        one(y)
    }
}

fn logsumexp(c: &mut Call<'_>) -> Result<Results> {
    let (x, dims, _) = operand(c)?;
    let shape = c.result()?.shape();
    one(c.logsumexp(x, &dims, shape)?)
}

fn norm(c: &mut Call<'_>, order: &str) -> Result<Results> {
    let order = c.float_or(order, 2.0)?;
    let (x, dims, keepdim) = operand(c)?;
    c.opt_dtype("dtype")?;
    let x = c.cast(x, c.result()?.dtype())?;
    one(c.norm(x, order, &dims, keepdim)?)
}
