//! Reductions, sums along dimensions, and sorting.

use super::inputs::{Inputs, Row, flag, op, op_with};
use ir::op::OpKind;
use ir::{Attr, DType};
use lower::{Call, Ref, Result, Results, Scalar, all, ensure, one};

pub(super) const OPS: &[Row] = &[
    op_with("ReduceSum", &[1], |c, x| plain(c, x, OpKind::Sum)),
    op_with("ReduceMean", &[1], |c, x| plain(c, x, OpKind::Mean)),
    op_with("ReduceMax", &[1], |c, x| extreme(c, x, OpKind::Amax)),
    op_with("ReduceMin", &[1], |c, x| extreme(c, x, OpKind::Amin)),
    op_with("ReduceProd", &[1], product),
    op_with("ReduceL1", &[1], |c, x| {
        sum_of(c, x, Function::Size, Function::Same)
    }),
    op_with("ReduceL2", &[1], |c, x| {
        sum_of(c, x, Function::Square, Function::Root)
    }),
    op_with("ReduceSumSquare", &[1], |c, x| {
        sum_of(c, x, Function::Square, Function::Same)
    }),
    op_with("ReduceLogSum", &[1], |c, x| {
        sum_of(c, x, Function::Same, Function::Log)
    }),
    op_with("ReduceLogSumExp", &[1], log_sum_exp),
    op("ArgMax", |c, x| position(c, x, true)),
    op("ArgMin", |c, x| position(c, x, false)),
    op("Hardmax", hardmax),
    op_with("CumSum", &[1], |c, x| running(c, x, true)),
    op_with("CumProd", &[1], |c, x| running(c, x, false)),
    op_with("TopK", &[1], topk),
    op("Softmax", |c, x| softmax(c, x, OpKind::Softmax)),
    op("LogSoftmax", |c, x| softmax(c, x, OpKind::LogSoftmax)),
];

/// What a node reduces.
struct Reduced {
    x: Ref,
    dims: Vec<usize>,
    keepdim: bool,
    /// The shape of the result.
    shape: Vec<u64>,
    /// The element type of the result.
    dtype: DType,
    /// True if no dimension is named, and then none is reduced.
    is_idle: bool,
}

fn reduced(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Reduced> {
    let keepdim = flag(c, "keepdims", true)?;
    let is_noop = flag(c, "noop_with_empty_axes", false)?;
    let x = inputs.at(c, 0)?;
    let rank = c.rank(x);
    let axes = inputs.axes(c, 1, rank)?.filter(|axes| !axes.is_empty());
    let is_idle = axes.is_none() && is_noop;
    let all = || if is_noop { vec![] } else { (0..rank).collect() };
    let dims = axes.unwrap_or_else(all);
    let sizes = c.shape_of(x).into_iter().enumerate();
    let shape = sizes
        .filter(|(d, _)| keepdim || !dims.contains(d))
        .map(|(d, size)| if dims.contains(&d) { 1 } else { size })
        .collect();
    let dtype = c.dtype(x);
    Ok(Reduced {
        x,
        dims,
        keepdim,
        shape,
        dtype,
        is_idle,
    })
}

fn plain(c: &mut Call<'_>, inputs: &Inputs<'_>, op: OpKind) -> Result<Results> {
    let it = reduced(c, inputs)?;
    // A mean of integers is rounded towards zero.
    let wide = if op == OpKind::Mean && !it.dtype.is_float() {
        DType::F64
    } else {
        it.dtype
    };
    let x = c.cast(it.x, wide)?;
    let y = c.reduce(op, x, &it.dims, it.keepdim)?;
    one(c.cast(y, it.dtype)?)
}

/// The largest or the smallest element of none is the smallest or the largest number.
fn extreme(c: &mut Call<'_>, inputs: &Inputs<'_>, op: OpKind) -> Result<Results> {
    let it = reduced(c, inputs)?;
    if c.ty(it.x).numel() == 0 {
        let (least, most) = lower::bounds(it.dtype);
        let bound = if op == OpKind::Amax { least } else { most };
        return one(c.full(bound, it.dtype, &it.shape)?);
    }
    one(c.reduce(op, it.x, &it.dims, it.keepdim)?)
}

/// The product, by halves of a dimension.
fn product(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let it = reduced(c, inputs)?;
    if it.is_idle {
        return one(it.x);
    }
    if c.ty(it.x).numel() == 0 {
        return one(c.full(Scalar::Int(1), it.dtype, &it.shape)?);
    }
    let mut x = it.x;
    for &dim in &it.dims {
        let mut size = c.shape_of(x)[dim] as i64;
        while size > 1 {
            let half = size / 2;
            let parts = c.split(x, dim, &[half, half, size - 2 * half])?;
            x = c.step(OpKind::Mul, &[], &[parts[0], parts[1]])?;
            if size % 2 == 1 {
                x = c.cat(&[x, parts[2]], dim)?;
            }
            size -= half;
        }
    }
    one(c.reshape(x, &it.shape)?)
}

/// A function of elements or of a sum.
#[derive(Clone, Copy)]
enum Function {
    Same,
    Size,
    Square,
    Root,
    Log,
}

impl Function {
    fn of(self, c: &mut Call<'_>, x: Ref) -> Result<Ref> {
        match self {
            Function::Same => Ok(x),
            Function::Size => c.map(OpKind::Abs, x),
            Function::Square => c.step(OpKind::Mul, &[], &[x, x]),
            Function::Root => c.map(OpKind::Sqrt, x),
            Function::Log => c.map(OpKind::Log, x),
        }
    }
}

/// A function of the sum of a function. Roots and logarithms of integers are computed with floats.
fn sum_of(
    c: &mut Call<'_>,
    inputs: &Inputs<'_>,
    each: Function,
    after: Function,
) -> Result<Results> {
    let it = reduced(c, inputs)?;
    let is_real = matches!(after, Function::Root | Function::Log);
    let wide = if is_real && !it.dtype.is_float() {
        DType::F64
    } else {
        it.dtype
    };
    let x = c.cast(it.x, wide)?;
    let x = each.of(c, x)?;
    let y = c.reduce(OpKind::Sum, x, &it.dims, it.keepdim)?;
    let y = after.of(c, y)?;
    one(c.cast(y, it.dtype)?)
}

fn log_sum_exp(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let it = reduced(c, inputs)?;
    if it.dims.is_empty() {
        return one(it.x);
    }
    if c.ty(it.x).numel() == 0 {
        return one(c.full(Scalar::Float(f64::NEG_INFINITY), it.dtype, &it.shape)?);
    }
    one(c.logsumexp(it.x, &it.dims, &it.shape)?)
}

// --- along one dimension ---

/// The position of the largest or smallest element; the first one, unless the last is asked for.
fn position(c: &mut Call<'_>, inputs: &Inputs<'_>, largest: bool) -> Result<Results> {
    let (keepdim, last) = (
        flag(c, "keepdims", true)?,
        flag(c, "select_last_index", false)?,
    );
    let mut x = inputs.at(c, 0)?;
    let axis = c.dim("axis", Some(0), c.rank(x))?;
    let size = c.shape_of(x)[axis] as i64;
    ensure(size > 0, "there is no element")?;
    if last {
        x = c.flip(x, &[axis])?;
    }
    let found = c.extreme(x, axis, keepdim, largest)?[1];
    one(if last {
        c.scalar_step(OpKind::RsubScalar, found, Scalar::Int(size - 1))?
    } else {
        found
    })
}

/// 1 at the first largest element along a dimension, 0 elsewhere.
fn hardmax(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let axis = c.dim("axis", Some(-1), c.rank(x))?;
    let largest = c.extreme(x, axis, true, true)?[1];
    let size = c.shape_of(x)[axis];
    let is_largest = c.is_class(largest, axis, size)?;
    one(c.cast(is_largest, c.dtype(x))?)
}

/// A running sum or product.
fn running(c: &mut Call<'_>, inputs: &Inputs<'_>, is_sum: bool) -> Result<Results> {
    let (exclusive, reverse) = (flag(c, "exclusive", false)?, flag(c, "reverse", false)?);
    let mut x = inputs.at(c, 0)?;
    let axis = inputs.opt_int(1)?.ok_or("input 1 is missing")?;
    let axis = lower::wrap(axis, c.rank(x))?;
    let size = c.shape_of(x)[axis];
    if reverse {
        x = c.flip(x, &[axis])?;
    }
    if exclusive && size > 0 {
        x = shifted(c, x, axis, 1, Scalar::Int(if is_sum { 0 } else { 1 }))?;
    }
    let mut y = if is_sum {
        c.step(OpKind::Cumsum, &[("dim", Attr::Int(axis as i64))], &[x])?
    } else {
        // After step k, each element is the product of the last 2^k (Hillis and Steele, 1986).
        let mut distance = 1;
        while distance < size {
            let before = shifted(c, x, axis, distance as i64, Scalar::Int(1))?;
            x = c.step(OpKind::Mul, &[], &[x, before])?;
            distance *= 2;
        }
        x
    };
    if reverse {
        y = c.flip(y, &[axis])?;
    }
    one(y)
}

/// `x` moved to later places of a dimension, with a number before it.
fn shifted(c: &mut Call<'_>, x: Ref, axis: usize, distance: i64, value: Scalar) -> Result<Ref> {
    let mut pad = vec![0; 2 * (c.rank(x) - axis)];
    let n = pad.len();
    (pad[n - 2], pad[n - 1]) = (distance, -distance);
    c.pad(x, &pad, value)
}

fn topk(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let largest = flag(c, "largest", true)?;
    // Sorted results are also right if any order is allowed.
    c.ignore(&["sorted"]);
    let x = inputs.at(c, 0)?;
    let axis = c.dim("axis", Some(-1), c.rank(x))?;
    let k = inputs.opt_int(1)?.ok_or("input 1 is missing")?;
    all(c.topk(x, axis, k, largest)?)
}

fn softmax(c: &mut Call<'_>, inputs: &Inputs<'_>, op: OpKind) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let axis = c.dim("axis", Some(-1), c.rank(x))?;
    one(c.step(op, &[("dim", Attr::Int(axis as i64))], &[x])?)
}
