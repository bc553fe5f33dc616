//! Reductions, sorting and cumulative sums.

use super::Family;
use super::special::log_of_two;
use ir::op::OpKind;
use ir::{Attr, DType};
use lower::{Call, Range, Ref, Result, Results, Scalar, all, ensure, one, wrap};

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
    ("linalg_matrix_norm.str_ord", frobenius),
    ("dist", distance),
    ("prod", prod),
    ("cumprod", cumprod),
    ("logcumsumexp", logcumsumexp),
    ("nansum", |c| of_numbers(c, OpKind::Sum)),
    ("nanmean", |c| of_numbers(c, OpKind::Mean)),
    ("count_nonzero", count_nonzero),
    ("aminmax", aminmax),
    ("kthvalue", kthvalue),
    ("median", median),
    ("histc", histc),
    ("argsort", argsort),
    ("msort", msort),
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

/// The operand and the dimension that is reduced; without one, all elements in a row.
fn line(c: &mut Call<'_>) -> Result<(Ref, usize)> {
    let x = c.tensor("self")?;
    match c.opt_int("dim")? {
        Some(dim) => Ok((x, wrap(dim, c.rank(x))?)),
        None => {
            let n = c.ty(x).numel();
            Ok((c.reshape(x, &[n])?, 0))
        }
    }
}

fn position(c: &mut Call<'_>, largest: bool) -> Result<Results> {
    let keepdim = c.bool_or("keepdim", false)?;
    let is_flat = c.opt_int("dim")?.is_none();
    ensure(
        !(is_flat && keepdim),
        "keeps the dimensions of a flattened tensor",
    )?;
    let (x, dim) = line(c)?;
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

fn frobenius(c: &mut Call<'_>) -> Result<Results> {
    let order = c.string_or("ord", "fro")?;
    ensure(order == "fro", "a norm of singular values")?;
    let x = c.tensor("self")?;
    let rank = c.rank(x);
    let dims = c.ints_of("dim", 2, &[-2, -1])?;
    let dims: Result<Vec<usize>> = dims.into_iter().map(|d| wrap(d, rank)).collect();
    let keepdim = c.bool_or("keepdim", false)?;
    c.opt_dtype("dtype")?;
    let x = c.cast(x, c.result()?.dtype())?;
    let mut dims = dims?;
    dims.sort_unstable();
    one(c.norm(x, 2.0, &dims, keepdim)?)
}

/// The norm of a difference.
fn distance(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.tensor("self")?, c.tensor("other")?);
    let order = c.float_or("p", 2.0)?;
    let d = c.step(OpKind::Sub, &[], &[a, b])?;
    let dims: Vec<usize> = (0..c.rank(d)).collect();
    one(c.norm(d, order, &dims, false)?)
}

/// The longest dimension whose elements are multiplied in steps: each step doubles the number.
const LONGEST: u64 = 1 << 12;

/// The product along a dimension: of its halves, then of theirs. So it has a derivative at 0.
fn prod(c: &mut Call<'_>) -> Result<Results> {
    let (x, dim) = line(c)?;
    c.opt_dtype("dtype")?;
    let mut x = c.cast(x, c.result()?.dtype())?;
    let keepdim = c.bool_or("keepdim", false)?;
    let mut n = c.shape_of(x)[dim];
    ensure((1..=LONGEST).contains(&n), "a product of this many numbers")?;
    while n > 1 {
        let half = (n / 2) as i64;
        let left = c.slice(x, dim, Range::new(0, half))?;
        let right = c.slice(x, dim, Range::new(half, 2 * half))?;
        let product = c.step(OpKind::Mul, &[], &[left, right])?;
        x = match n % 2 {
            0 => product,
            _ => {
                let last = c.slice(x, dim, Range::new(2 * half, 2 * half + 1))?;
                c.cat(&[product, last], dim)?
            }
        };
        n = n.div_ceil(2);
    }
    let mut shape = c.shape_of(x);
    if !keepdim {
        shape.remove(dim);
    }
    one(c.reshape(x, &shape)?)
}

/// Combines each element with all before it along a dimension: with the one before it, then with
/// the one two places before, then four, and so on.
fn scan(
    c: &mut Call<'_>,
    with: impl Fn(&mut Call<'_>, Ref, Ref) -> Result<Ref>,
) -> Result<Results> {
    let x = c.tensor("self")?;
    let dim = c.dim("dim", None, c.rank(x))?;
    c.opt_dtype("dtype")?;
    let mut x = c.cast(x, c.result()?.dtype())?;
    let n = c.shape_of(x)[dim];
    ensure(n <= LONGEST, "a scan of this many numbers")?;
    let mut step = 1;
    while step < n as i64 {
        let first = c.slice(x, dim, Range::new(0, step))?;
        let before = c.slice(x, dim, Range::new(0, n as i64 - step))?;
        let later = c.slice(x, dim, Range::new(step, n as i64))?;
        let later = with(c, later, before)?;
        x = c.cat(&[first, later], dim)?;
        step *= 2;
    }
    one(x)
}

fn cumprod(c: &mut Call<'_>) -> Result<Results> {
    scan(c, |c, x, before| c.step(OpKind::Mul, &[], &[x, before]))
}

fn logcumsumexp(c: &mut Call<'_>) -> Result<Results> {
    scan(c, |c, x, before| log_of_two(c, x, before, 1.0))
}

/// A sum or mean of the elements that are not NaN.
fn of_numbers(c: &mut Call<'_>, op: OpKind) -> Result<Results> {
    let (x, dims, keepdim) = operand(c)?;
    c.opt_dtype("dtype")?;
    let x = c.cast(x, c.result()?.dtype())?;
    let is_number = c.step(OpKind::Eq, &[], &[x, x])?;
    let x = c.masked(is_number, x)?;
    let sum = c.reduce(OpKind::Sum, x, &dims, keepdim)?;
    if op == OpKind::Sum {
        return one(sum);
    }
    let counts = c.cast(is_number, c.dtype(x))?;
    let n = c.reduce(OpKind::Sum, counts, &dims, keepdim)?;
    one(c.step(OpKind::Div, &[], &[sum, n])?)
}

fn count_nonzero(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let dims = c.dims("dim", c.rank(x))?;
    let counts = c.truth(x)?;
    let counts = c.cast(counts, DType::I64)?;
    one(c.reduce(OpKind::Sum, counts, &dims, false)?)
}

fn aminmax(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let keepdim = c.bool_or("keepdim", false)?;
    let dims = match c.opt_int("dim")? {
        Some(dim) => vec![wrap(dim, c.rank(x))?],
        None => (0..c.rank(x)).collect(),
    };
    let least = c.reduce(OpKind::Amin, x, &dims, keepdim)?;
    all(vec![least, c.reduce(OpKind::Amax, x, &dims, keepdim)?])
}

/// The element at a place of the sorted elements, from 0, and where it was.
fn nth(c: &mut Call<'_>, x: Ref, dim: usize, n: i64, keepdim: bool) -> Result<Vec<Ref>> {
    let first = c.topk(x, dim, n + 1, false)?;
    let mut found = vec![];
    for y in first {
        let y = c.slice(y, dim, Range::new(n, n + 1))?;
        let mut shape = c.shape_of(y);
        if !keepdim {
            shape.remove(dim);
        }
        found.push(c.reshape(y, &shape)?);
    }
    Ok(found)
}

fn kthvalue(c: &mut Call<'_>) -> Result<Results> {
    let (x, k) = (c.tensor("self")?, c.int("k")?);
    let dim = c.dim("dim", Some(-1), c.rank(x))?;
    let keepdim = c.bool_or("keepdim", false)?;
    let size = c.shape_of(x)[dim];
    ensure(1 <= k && k as u64 <= size, "there are fewer elements")?;
    all(nth(c, x, dim, k - 1, keepdim)?)
}

/// The lower one of the two in the middle; NaN if there is one.
fn median(c: &mut Call<'_>) -> Result<Results> {
    let (x, dim) = line(c)?;
    let keepdim = c.bool_or("keepdim", false)?;
    let size = c.shape_of(x)[dim];
    ensure(size > 0, "no element has a median")?;
    let mut found = nth(c, x, dim, (size as i64 - 1) / 2, keepdim)?;
    if c.dtype(x).is_float() {
        // NaN counts as the largest number where a median is found, and as the median.
        let is_nan = c.step(OpKind::Ne, &[], &[x, x])?;
        let any = c.reduce(OpKind::Any, is_nan, &[dim], keepdim)?;
        let nan = c.full(Scalar::Float(f64::NAN), c.dtype(x), &[])?;
        found[0] = c.step(OpKind::Where, &[], &[any, nan, found[0]])?;
    }
    found.truncate(c.n_results());
    all(found)
}

fn argsort(c: &mut Call<'_>) -> Result<Results> {
    c.ignore(&["stable"]);
    one(sort(c)?[1].ok_or("has no order")?)
}

/// How many elements lie in each of `bins` equal parts of `min..=max`.
fn histc(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let bins = c.int_or("bins", 100)?;
    let min = c.scalar_or("min", Scalar::Int(0))?.float();
    let max = c.scalar_or("max", Scalar::Int(0))?.float();
    ensure(bins > 0, "no bins")?;
    ensure(
        min < max,
        "its bins lie between the smallest and the largest element; give min and max",
    )?;
    let dtype = c.dtype(x);
    let n = c.ty(x).numel();
    let x = c.reshape(x, &[n])?;
    let x = match dtype {
        DType::F32 | DType::F64 => x,
        DType::BF16 | DType::F16 => c.cast(x, DType::F32)?,
        _ => c.cast(x, DType::F64)?,
    };
    // torch rounds the ends to the elements' type, then computes in this order.
    let rounded = |end: f64| match dtype {
        DType::F32 => f64::from(end as f32),
        _ => end,
    };
    let (min, max) = (rounded(min), rounded(max));
    let width = match dtype {
        DType::F32 => f64::from(max as f32 - min as f32),
        _ => max - min,
    };
    let place = c.scalar_step(OpKind::AddScalar, x, Scalar::Float(-min))?;
    let place = c.scalar_step(OpKind::MulScalar, place, Scalar::Float(bins as f64))?;
    let place = c.scalar_step(OpKind::DivScalar, place, Scalar::Float(width))?;
    let place = c.cast(place, DType::I64)?;
    // The last bin has its end.
    let place = c.clamp(place, None, Some(Scalar::Int(bins - 1)), DType::I64)?;
    let above = c.scalar_step(OpKind::GeScalar, x, Scalar::Float(min))?;
    let below = c.scalar_step(OpKind::LeScalar, x, Scalar::Float(max))?;
    let counts = c.step(OpKind::LogicalAnd, &[], &[above, below])?;
    // The others are counted in a bin that is dropped.
    let outside = c.full(Scalar::Int(bins), DType::I64, &[])?;
    let place = c.step(OpKind::Where, &[], &[counts, place, outside])?;
    let none = c.full(Scalar::Int(0), dtype, &[bins as u64 + 1])?;
    let one_each = c.full(Scalar::Int(1), dtype, &[n])?;
    let along = [("dim", Attr::Int(0))];
    let found = c.step(OpKind::ScatterAdd, &along, &[none, place, one_each])?;
    let range = Range {
        start: Some(0),
        end: Some(bins),
        step: 1,
    };
    one(c.slice(found, 0, range)?)
}

fn msort(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let size = *c.ty(x).shape().first().ok_or("a number is not sorted")?;
    one(c.topk(x, 0, size as i64, false)?[0])
}
