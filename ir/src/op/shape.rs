//! Shape rules: from the types of an op's operands and its attributes to the types of its results,
//! or to what does not fit. A rule trusts nothing: operands and attributes may come from a hostile
//! file.

use super::Elements;
use super::attention::{Attending, Beside};
use super::attrs::*;
use super::error::Misfit;
use crate::types::{DType, TensorType};
use ops::maps::{BLOCK_8BIT, BLOCK_NF4};

pub(super) type Shapes = Result<Vec<TensorType>, Misfit>;

/// Types of an op's operands, for shape rules and work functions.
pub(super) struct Call<'a> {
    pub(super) types: &'a [&'a TensorType],
}

impl<'a> Call<'a> {
    /// The type of operand `i`.
    pub(super) fn at(&self, i: usize) -> &'a TensorType {
        self.types[i]
    }
    pub(super) fn shape(&self, i: usize) -> &'a [u64] {
        self.types[i].shape()
    }

    /// The attribute `key` as a dimension of operand `i`.
    pub(super) fn dim(&self, key: &'static str, dim: i64, i: usize) -> Result<usize, Misfit> {
        let rank = self.at(i).rank();
        let index = usize::try_from(dim).ok().filter(|&d| d < rank);
        index.ok_or_else(|| attribute(key, format!("={dim} is not below rank {rank}")))
    }
    /// The attribute `key` as distinct dimensions of operand `i`.
    fn dims(&self, key: &'static str, dims: &[i64], i: usize) -> Result<Vec<usize>, Misfit> {
        let rank = self.at(i).rank();
        let mut seen = vec![false; rank];
        let mut distinct = vec![];
        for &d in dims {
            let d = usize::try_from(d).ok().filter(|&d| d < rank && !seen[d]);
            let d = d.ok_or_else(|| {
                let why = format!(" should be distinct dimensions below rank {rank}");
                attribute(key, why)
            })?;
            seen[d] = true;
            distinct.push(d);
        }
        Ok(distinct)
    }

    fn expect(&self, operand: usize, wanted: DType) -> Result<(), Misfit> {
        ensure(self.at(operand).dtype() == wanted, || Misfit::ElementType {
            operand,
            wanted,
        })
    }
    /// Checks that a kernel exists for the elements of operand 0, if there is an operand.
    pub(super) fn expect_elements(&self, wanted: Elements) -> Result<(), Misfit> {
        if self.types.is_empty() {
            return Ok(());
        }
        self.expect_elements_of(0, wanted)
    }
    fn expect_elements_of(&self, operand: usize, wanted: Elements) -> Result<(), Misfit> {
        let fits = has_kernel(self.at(operand).dtype(), wanted);
        ensure(fits, || Misfit::NoKernel { operand, wanted })
    }
    fn expect_index(&self, operand: usize) -> Result<(), Misfit> {
        let is_index = matches!(self.at(operand).dtype(), DType::I64 | DType::I32);
        ensure(is_index, || Misfit::NoIndex { operand })
    }
    fn expect_same(&self, i: usize, j: usize) -> Result<(), Misfit> {
        let operands = (i, j);
        ensure(self.at(i) == self.at(j), || Misfit::Types { operands })
    }
    fn expect_dtype(&self, i: usize, j: usize) -> Result<(), Misfit> {
        let operands = (i, j);
        let same = self.at(i).dtype() == self.at(j).dtype();
        ensure(same, || Misfit::ElementTypes { operands })
    }
    fn expect_shape(&self, operand: usize, wanted: &[u64]) -> Result<(), Misfit> {
        ensure(self.shape(operand) == wanted, || Misfit::Shape {
            operand,
            wanted: wanted.to_vec(),
        })
    }
    fn expect_rank(
        &self,
        operand: usize,
        fits: fn(usize) -> bool,
        wanted: &'static str,
    ) -> Result<(), Misfit> {
        ensure(fits(self.at(operand).rank()), || Misfit::Rank {
            operand,
            wanted,
        })
    }
}

pub(super) fn ensure(condition: bool, misfit: impl FnOnce() -> Misfit) -> Result<(), Misfit> {
    if condition { Ok(()) } else { Err(misfit()) }
}
/// True if kernels for `wanted` support elements of this type.
fn has_kernel(dtype: DType, wanted: Elements) -> bool {
    let is_number = dtype != DType::Bool && !dtype.is_eight_bit_float();
    match wanted {
        Elements::Any => true,
        Elements::Computed => !dtype.is_eight_bit_float(),
        Elements::Numbers => is_number,
        Elements::Bits => !dtype.is_float(),
        Elements::Floats => is_number && dtype.is_float(),
    }
}
/// Checks that a kernel exists for the element type of the attribute `dtype`.
fn expect_made(dtype: DType, wanted: Elements, why: &str) -> Result<(), Misfit> {
    ensure(has_kernel(dtype, wanted), || attribute("dtype", why))
}
/// Checks a number that is used with elements of this type: an integer, unless they are floats.
fn expect_number(key: &'static str, number: Number, dtype: DType) -> Result<(), Misfit> {
    let fits = matches!(number, Number::Int(_)) || dtype.is_float();
    ensure(fits, || {
        attribute(
            key,
            format!(" should be an integer, as the elements are {dtype}"),
        )
    })
}
/// A message about an attribute; `why` follows its name.
pub(super) fn attribute(key: &'static str, why: impl Into<String>) -> Misfit {
    Misfit::Attribute {
        key,
        why: why.into(),
    }
}
fn operands(why: &str) -> Misfit {
    Misfit::Operands(why.into())
}
fn ty(dtype: DType, shape: &[u64]) -> Shapes {
    Ok(vec![TensorType::new(dtype, shape)?])
}
/// An attribute as a shape.
fn sizes(key: &'static str, sizes: &[i64]) -> Result<Vec<u64>, Misfit> {
    let sizes = sizes.iter().map(|&d| u64::try_from(d));
    sizes
        .collect::<Result<_, _>>()
        .map_err(|_| attribute(key, " has a negative size"))
}
/// A list attribute of `n` numbers, each at least `least`.
pub(super) fn list<'a>(
    key: &'static str,
    list: &'a [i64],
    n: usize,
    least: i64,
) -> Result<&'a [i64], Misfit> {
    let fits = list.len() == n && list.iter().all(|&x| least <= x && x < 1 << 32);
    ensure(fits, || {
        attribute(key, format!(" should be {n} numbers of at least {least}"))
    })?;
    Ok(list)
}

/// The shape to which `a` and `b` broadcast.
pub fn broadcast_shapes(a: &[u64], b: &[u64]) -> Result<Vec<u64>, Misfit> {
    let rank = a.len().max(b.len());
    let at = |s: &[u64], i: usize| {
        if i + s.len() < rank {
            1
        } else {
            s[i + s.len() - rank]
        }
    };
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, y) if x == y => Ok(x),
            (1, y) => Ok(y),
            (x, 1) => Ok(x),
            _ => Err(Misfit::Broadcast(a.to_vec(), b.to_vec())),
        })
        .collect()
}

// --- element by element ---

/// The type of operand 0.
pub(super) fn same<A>(_: &A, c: &Call<'_>) -> Shapes {
    Ok(vec![c.at(0).clone()])
}
/// The type that operands 0 and 1 have.
pub(super) fn same2<A>(attrs: &A, c: &Call<'_>) -> Shapes {
    c.expect_same(0, 1)?;
    same(attrs, c)
}
pub(super) fn same_along(a: &Along, c: &Call<'_>) -> Shapes {
    c.dim("dim", a.dim, 0)?;
    same(a, c)
}
pub(super) fn same2_along(a: &Along, c: &Call<'_>) -> Shapes {
    c.dim("dim", a.dim, 0)?;
    same2(a, c)
}
/// A bool for each element.
pub(super) fn predicate<A>(_: &A, c: &Call<'_>) -> Shapes {
    ty(DType::Bool, c.shape(0))
}
pub(super) fn scalar(a: &Scalar, c: &Call<'_>) -> Shapes {
    expect_number("value", a.value, c.at(0).dtype())?;
    same(a, c)
}
pub(super) fn pow_scalar(a: &Scalar, c: &Call<'_>) -> Shapes {
    let types = scalar(a, c)?;
    let is_negative = matches!(a.value, Number::Int(power) if power < 0);
    ensure(c.at(0).dtype().is_float() || !is_negative, || {
        attribute(
            "value",
            " should not be negative: integers have no negative powers",
        )
    })?;
    Ok(types)
}
pub(super) fn compare_scalar(a: &Scalar, c: &Call<'_>) -> Shapes {
    expect_number("value", a.value, c.at(0).dtype())?;
    predicate(a, c)
}
pub(super) fn cast(a: &Cast, c: &Call<'_>) -> Shapes {
    expect_made(a.dtype, Elements::Computed, MADE)?;
    ty(a.dtype, c.shape(0))
}
pub(super) fn broadcast(_: &(), c: &Call<'_>) -> Shapes {
    c.expect_dtype(0, 1)?;
    ty(c.at(0).dtype(), &broadcast_shapes(c.shape(0), c.shape(1))?)
}
pub(super) fn broadcast_predicate(_: &(), c: &Call<'_>) -> Shapes {
    c.expect_dtype(0, 1)?;
    ty(DType::Bool, &broadcast_shapes(c.shape(0), c.shape(1))?)
}
pub(super) fn select(_: &(), c: &Call<'_>) -> Shapes {
    c.expect(0, DType::Bool)?;
    c.expect_dtype(1, 2)?;
    c.expect_elements_of(1, Elements::Computed)?;
    let shape = broadcast_shapes(&broadcast_shapes(c.shape(0), c.shape(1))?, c.shape(2))?;
    ty(c.at(1).dtype(), &shape)
}

// --- reductions ---

fn reduced_shape(a: &Reduction, c: &Call<'_>) -> Result<Vec<u64>, Misfit> {
    let dims = c.dims("dims", &a.dims, 0)?;
    let shape = c.shape(0).iter().enumerate();
    Ok(shape
        .filter_map(|(i, &d)| match (dims.contains(&i), a.keepdim) {
            (false, _) => Some(d),
            (true, true) => Some(1),
            (true, false) => None,
        })
        .collect())
}
pub(super) fn reduce(a: &Reduction, c: &Call<'_>) -> Shapes {
    ty(c.at(0).dtype(), &reduced_shape(a, c)?)
}
/// The largest or smallest elements. At least one element must be reduced.
pub(super) fn extreme(a: &Reduction, c: &Call<'_>) -> Shapes {
    let types = reduce(a, c)?;
    ensure(c.at(0).numel() > 0 || types[0].numel() == 0, || {
        operands("no elements have no extreme")
    })?;
    Ok(types)
}
pub(super) fn reduce_bool(a: &Reduction, c: &Call<'_>) -> Shapes {
    ty(DType::Bool, &reduced_shape(a, c)?)
}
pub(super) fn topk(a: &TopK, c: &Call<'_>) -> Shapes {
    let dim = c.dim("dim", a.dim, 0)?;
    let mut shape = c.shape(0).to_vec();
    ensure(0 <= a.k && a.k as u64 <= shape[dim], || {
        attribute("k", format!("={} is not in 0..={}", a.k, shape[dim]))
    })?;
    shape[dim] = a.k as u64;
    Ok(vec![
        TensorType::new(c.at(0).dtype(), shape.clone())?,
        TensorType::new(DType::I64, shape)?,
    ])
}

// --- normalisation ---

/// The leading shape and the normalised shape of operand `x`.
fn normalised<'a>(dims: i64, c: &Call<'a>, x: usize) -> Result<(&'a [u64], &'a [u64]), Misfit> {
    let shape = c.shape(x);
    let dims = usize::try_from(dims)
        .ok()
        .filter(|&d| 1 <= d && d <= shape.len());
    let dims =
        dims.ok_or_else(|| attribute("dims", format!(" should be in 1..={}", shape.len())))?;
    Ok(shape.split_at(shape.len() - dims))
}
/// The types of the needed results.
fn masked(mask: &[i64], types: Vec<TensorType>) -> Shapes {
    let fits =
        mask.len() == types.len() && mask.iter().all(|&m| m == 0 || m == 1) && mask.contains(&1);
    ensure(fits, || {
        let why = format!(" should be {} numbers, 0 or 1, not all 0", types.len());
        attribute("mask", why)
    })?;
    Ok(types
        .into_iter()
        .zip(mask)
        .filter(|&(_, &m)| m == 1)
        .map(|(t, _)| t)
        .collect())
}
/// Statistics of half-precision tensors are kept in f32.
fn statistics_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    }
}
/// The leading shape, then ones.
fn statistics_shape(lead: &[u64], norm: &[u64]) -> Vec<u64> {
    lead.iter().copied().chain(norm.iter().map(|_| 1)).collect()
}
pub(super) fn layer_norm(a: &LayerNorm, c: &Call<'_>) -> Shapes {
    let (lead, norm) = normalised(a.dims, c, 0)?;
    for i in 1..c.types.len() {
        c.expect_shape(i, norm)?;
        c.expect_dtype(0, i)?;
    }
    let dtype = statistics_dtype(c.at(0).dtype());
    let statistics = TensorType::new(dtype, statistics_shape(lead, norm))?;
    Ok(vec![c.at(0).clone(), statistics.clone(), statistics])
}
pub(super) fn layer_norm_bwd(a: &LayerNormBwd, c: &Call<'_>) -> Shapes {
    c.expect_same(0, 1)?;
    let (lead, norm) = normalised(a.dims, c, 1)?;
    let statistics = statistics_shape(lead, norm);
    for i in [2, 3] {
        c.expect_shape(i, &statistics)?;
        c.expect(i, statistics_dtype(c.at(1).dtype()))?;
    }
    if c.types.len() == 5 {
        c.expect_shape(4, norm)?;
        c.expect_dtype(4, 1)?;
    }
    let w = TensorType::new(c.at(1).dtype(), norm)?;
    masked(&a.mask, vec![c.at(1).clone(), w.clone(), w])
}
pub(super) fn batch_norm(_: &BatchNorm, c: &Call<'_>) -> Shapes {
    c.expect_rank(0, |rank| rank >= 2, "2 or more")?;
    let channels = &c.shape(0)[1..2];
    for i in 1..3 {
        c.expect_shape(i, channels)?;
        c.expect_dtype(i, 0)?;
    }
    let w = c.at(1).clone();
    Ok(vec![c.at(0).clone(), w.clone(), w.clone(), w])
}
pub(super) fn batch_norm_bwd(a: &BatchNormBwd, c: &Call<'_>) -> Shapes {
    c.expect_same(0, 1)?;
    c.expect_rank(1, |rank| rank >= 2, "2 or more")?;
    for i in 2..5 {
        c.expect_shape(i, &c.shape(1)[1..2])?;
        c.expect_dtype(i, 1)?;
    }
    let types = [1, 2, 2].map(|i| c.at(i).clone());
    masked(&a.mask, types.to_vec())
}

// --- products ---

/// Batch, rows, inner, columns of a product of operands `first` and `first + 1`.
pub(super) fn product(
    a: &Product,
    c: &Call<'_>,
    first: usize,
) -> Result<(Vec<u64>, u64, u64, u64), Misfit> {
    let (x, y) = (c.shape(first), c.shape(first + 1));
    let fits = x.len() == y.len() && (2..=3).contains(&x.len());
    ensure(fits, || {
        operands("the factors should both have rank 2, or both 3")
    })?;
    let last2 = |s: &[u64], transposed: bool| {
        let (p, q) = (s[s.len() - 2], s[s.len() - 1]);
        if transposed { (q, p) } else { (p, q) }
    };
    let ((m, k), (k2, n)) = (last2(x, a.ta), last2(y, a.tb));
    let batch = &x[..x.len() - 2];
    ensure(k == k2 && batch == &y[..y.len() - 2], || {
        operands("inner or batch dimensions differ")
    })?;
    Ok((batch.to_vec(), m, k, n))
}
fn product_type(a: &Product, c: &Call<'_>, first: usize) -> Result<TensorType, Misfit> {
    c.expect_dtype(first, first + 1)?;
    let (mut shape, m, _, n) = product(a, c, first)?;
    shape.extend([m, n]);
    Ok(TensorType::new(c.at(first).dtype(), shape)?)
}
pub(super) fn matmul(a: &Product, c: &Call<'_>) -> Shapes {
    Ok(vec![product_type(a, c, 0)?])
}
pub(super) fn addmm(a: &Product, c: &Call<'_>) -> Shapes {
    c.expect_dtype(0, 1)?;
    let result = product_type(a, c, 1)?;
    let shape = broadcast_shapes(c.shape(0), result.shape())?;
    ensure(shape == result.shape(), || Misfit::Operand {
        operand: 0,
        why: "does not broadcast to the product",
    })?;
    Ok(vec![result])
}
pub(super) fn matmul_sum(a: &Product, c: &Call<'_>) -> Shapes {
    let is_half = matches!(c.at(0).dtype(), DType::BF16 | DType::F16);
    ensure(is_half, || operands("the factors should be bf16 or f16"))?;
    let sum = TensorType::new(DType::F32, product_type(a, c, 0)?.shape())?;
    if c.types.len() == 3 {
        c.expect(2, DType::F32)?;
        c.expect_shape(2, sum.shape())?;
    }
    Ok(vec![sum])
}

/// Operand 2 has the ends of this many groups.
fn expect_ends(c: &Call<'_>) -> Result<u64, Misfit> {
    c.expect_index(2)?;
    c.expect_rank(2, |rank| rank == 1, "1")?;
    Ok(c.shape(2)[0])
}
pub(super) fn grouped_matmul(a: &GroupedProduct, c: &Call<'_>) -> Shapes {
    c.expect_dtype(1, 0)?;
    let (&[rows, inner], &[groups, p, q]) = (c.shape(0), c.shape(1)) else {
        return Err(operands("the factors should have ranks 2 and 3"));
    };
    let (k, n) = if a.tb { (q, p) } else { (p, q) };
    ensure(k == inner, || operands("inner dimensions differ"))?;
    let fits = expect_ends(c)? == groups;
    ensure(fits, || operands("each matrix should have an end"))?;
    Ok(vec![TensorType::new(c.at(0).dtype(), [rows, n])?])
}
pub(super) fn grouped_outer(_: &(), c: &Call<'_>) -> Shapes {
    c.expect_dtype(1, 0)?;
    for i in 0..2 {
        c.expect_rank(i, |rank| rank == 2, "2")?;
    }
    let (x, y) = (c.shape(0), c.shape(1));
    ensure(x[0] == y[0], || operands("the numbers of rows differ"))?;
    let shape = [expect_ends(c)?, x[1], y[1]];
    Ok(vec![TensorType::new(c.at(0).dtype(), shape)?])
}

// --- windows ---

/// How windows lie in a tensor.
struct Windows<'a> {
    kernel: &'a [u64],
    stride: &'a [i64],
    padding: &'a [i64],
    dilation: &'a [i64],
    ceil: bool,
}

impl Windows<'_> {
    /// The number of windows along each spatial dimension.
    fn count(&self, input: &[u64]) -> Result<Vec<u64>, Misfit> {
        (0..input.len()).map(|i| self.along(i, input[i])).collect()
    }
    fn along(&self, i: usize, size: u64) -> Result<u64, Misfit> {
        let (stride, padding) = (self.stride[i], self.padding[i]);
        let kernel = i64::try_from(self.kernel[i]).unwrap_or(i64::MAX >> 33);
        let reach = self.dilation[i] * (kernel.clamp(1, 1 << 28) - 1) + 1;
        let size = i64::try_from(size).map_err(|_| operands("input too large"))?;
        let room = size + 2 * padding - reach;
        ensure(room >= 0, || {
            let why = format!("a window of {reach} does not fit into {size} + 2 * {padding}");
            Misfit::Operands(why)
        })?;

        let rounded = if self.ceil { room + stride - 1 } else { room };
        let mut n = rounded / stride + 1;
        // With `ceil`, the last window must start inside the input or the padding before it.
        if self.ceil && size + padding <= (n - 1) * stride {
            n -= 1;
        }
        Ok(n as u64)
    }
}

/// The shape of the result of a convolution of operands `x` and `w`.
fn convolution_shape(
    a: &Convolution,
    c: &Call<'_>,
    x: usize,
    w: usize,
) -> Result<Vec<u64>, Misfit> {
    let (xs, ws) = (c.shape(x), c.shape(w));
    c.expect_dtype(x, w)?;
    ensure(xs.len() == ws.len() && (3..=4).contains(&xs.len()), || {
        operands("rank should be 3 or 4")
    })?;
    let (n, groups) = (xs.len() - 2, a.groups);
    let fits = 1 <= groups
        && Some(xs[1]) == ws[1].checked_mul(groups as u64)
        && ws[0].is_multiple_of(groups as u64)
        && ws[2..].iter().all(|&k| 1 <= k && k < 1 << 28);
    ensure(fits, || operands("channels, groups or kernel do not fit"))?;
    let windows = Windows {
        kernel: &ws[2..],
        stride: list("stride", &a.stride, n, 1)?,
        padding: list("padding", &a.padding, n, 0)?,
        dilation: list("dilation", &a.dilation, n, 1)?,
        ceil: false,
    };
    let mut shape = vec![xs[0], ws[0]];
    shape.extend(windows.count(&xs[2..])?);
    Ok(shape)
}
pub(super) fn convolution(a: &Convolution, c: &Call<'_>) -> Shapes {
    let shape = convolution_shape(a, c, 0, 1)?;
    if c.types.len() == 3 {
        c.expect_shape(2, &shape[1..2])?;
        c.expect_dtype(2, 0)?;
    }
    ty(c.at(0).dtype(), &shape)
}
pub(super) fn convolution_bwd(a: &ConvolutionBwd, c: &Call<'_>) -> Shapes {
    let forward = Convolution {
        dilation: a.dilation.clone(),
        groups: a.groups,
        padding: a.padding.clone(),
        stride: a.stride.clone(),
    };
    let shape = convolution_shape(&forward, c, 1, 2)?;
    c.expect_shape(0, &shape)?;
    c.expect_dtype(0, 1)?;
    let bias = TensorType::new(c.at(0).dtype(), &shape[1..2])?;
    masked(&a.mask, vec![c.at(1).clone(), c.at(2).clone(), bias])
}
/// The shape of the maxima of an image's windows: dilation, kernel, padding and stride.
fn pooled(lists: [&[i64]; 4], ceil: bool, image: &[u64]) -> Result<Vec<u64>, Misfit> {
    let [dilation, kernel, padding, stride] = lists;
    let kernel = list("kernel", kernel, 2, 1)?;
    let kernel: Vec<u64> = kernel.iter().map(|&k| k as u64).collect();
    let windows = Windows {
        kernel: &kernel,
        stride: list("stride", stride, 2, 1)?,
        padding: list("padding", padding, 2, 0)?,
        dilation: list("dilation", dilation, 2, 1)?,
        ceil,
    };
    ensure(kernel.iter().all(|&k| k < 1 << 28), || {
        attribute("kernel", " too large")
    })?;
    let mut both = windows.padding.iter().zip(&kernel);
    ensure(both.all(|(&p, &k)| 2 * p as u64 <= k), || {
        attribute("padding", " above half the kernel")
    })?;
    let mut shape = image[..2].to_vec();
    shape.extend(windows.count(&image[2..])?);
    Ok(shape)
}
pub(super) fn max_pool2d(a: &Pool, c: &Call<'_>) -> Shapes {
    c.expect_rank(0, |rank| rank == 4, "4")?;
    let lists = [&a.dilation, &a.kernel, &a.padding, &a.stride];
    let shape = pooled(lists.map(Vec::as_slice), a.ceil, c.shape(0))?;
    Ok(vec![
        TensorType::new(c.at(0).dtype(), shape.clone())?,
        TensorType::new(DType::I64, shape)?,
    ])
}
pub(super) fn max_pool2d_bwd(a: &PoolBwd, c: &Call<'_>) -> Shapes {
    c.expect(1, DType::I64)?;
    c.expect_shape(1, c.shape(0))?;
    let shape = sizes("shape", &a.shape)?;
    ensure(shape.len() == 4, || {
        attribute("shape", " should have rank 4")
    })?;
    let dx = ty(c.at(0).dtype(), &shape)?;
    let lists = [&a.dilation, &a.kernel, &a.padding, &a.stride];
    c.expect_shape(0, &pooled(lists.map(Vec::as_slice), a.ceil, &shape)?)?;
    Ok(dx)
}

// --- attention ---

/// Checks q, k, v at operands `q` to `q + 2`, and the mask at operand `mask` if it exists.
fn attention(c: &Call<'_>, q: usize, mask: usize) -> Result<(), Misfit> {
    let (qs, ks, vs) = (c.shape(q), c.shape(q + 1), c.shape(q + 2));
    ensure([qs, ks, vs].iter().all(|s| s.len() == 4), || {
        operands("q, k, v should have rank 4")
    })?;
    let heads = qs[1] == ks[1] || (0 < ks[1] && qs[1].is_multiple_of(ks[1]));
    let fits = qs[0] == ks[0] && heads && qs[3] == ks[3] && ks[..3] == vs[..3];
    ensure(fits, || operands("q, k, v do not fit together"))?;
    attention_types(c, q, mask, [qs[0], qs[1], qs[2], ks[2]])
}
/// Checks element types, and the mask for scores of shape `full`.
fn attention_types(c: &Call<'_>, q: usize, from: usize, full: [u64; 4]) -> Result<(), Misfit> {
    c.expect_dtype(q, q + 1)?;
    c.expect_dtype(q, q + 2)?;
    let beside = c.types[from..].iter().copied();
    let Beside { mask, key } = Beside::of(from, beside);
    let read = from + usize::from(mask.is_some()) + usize::from(key.is_some());
    ensure(read == c.types.len(), || {
        operands("after q, k, v there should be at most a mask and a dropout key, in this order")
    })?;
    let Some(mask) = mask else { return Ok(()) };
    if c.at(mask).dtype() == DType::I64 {
        let [batch, _, queries, keys] = full;
        let shape = c.shape(mask);
        let fits = queries == keys && (shape == [batch, keys] || shape == [1, keys]);
        ensure(fits, || {
            Misfit::Operands(format!(
                "numbers of documents should be [{batch},{keys}] or [1,{keys}], of as many queries \
                 as keys"
            ))
        })?;
    } else {
        let fits = broadcast_shapes(c.shape(mask), &full)? == full;
        ensure(fits, || {
            Misfit::Operands(format!("the mask does not broadcast to {full:?}"))
        })?;
        let dtype = c.at(mask).dtype();
        ensure(dtype == DType::Bool || dtype == c.at(q).dtype(), || {
            operands("the mask should be bool, of q's type, or numbers of documents")
        })?;
    }
    Ok(())
}
pub(super) fn sdpa(_: &Attention, c: &Call<'_>) -> Shapes {
    attention(c, 0, 3)?;
    let (q, v) = (c.shape(0), c.shape(2));
    let out = TensorType::new(c.at(0).dtype(), [q[0], q[1], q[2], v[3]])?;
    Ok(vec![out, TensorType::new(DType::F32, &q[..3])?])
}
pub(super) fn sdpa_bwd(_: &Attention, c: &Call<'_>) -> Shapes {
    attention(c, 1, 6)?;
    let (q, v) = (c.shape(1), c.shape(3));
    for i in [0, 4] {
        c.expect_shape(i, &[q[0], q[1], q[2], v[3]])?;
        c.expect_dtype(i, 1)?;
    }
    c.expect_shape(5, &q[..3])?;
    c.expect(5, DType::F32)?;
    Ok(c.types[1..4].iter().map(|&t| t.clone()).collect())
}
/// The same for heads inside rows; `q` is the number of operand q.
pub(super) fn attending(a: &AttentionRows, c: &Call<'_>, q: usize) -> Result<Attending, Misfit> {
    Attending::rows(a, [q, q + 1, q + 2].map(|i| c.shape(i)), q)
}
fn attention_rows(
    a: &AttentionRows,
    c: &Call<'_>,
    q: usize,
    mask: usize,
) -> Result<Attending, Misfit> {
    let it = attending(a, c, q)?;
    let s = it.sizes;
    attention_types(c, q, mask, [s.batch, s.heads, s.queries, s.keys])?;
    Ok(it)
}
pub(super) fn sdpa_rows(a: &AttentionRows, c: &Call<'_>) -> Shapes {
    let s = attention_rows(a, c, 0, 3)?.sizes;
    let out = TensorType::new(c.at(0).dtype(), [s.batch, s.queries, s.heads, s.values])?;
    let logsumexp = TensorType::new(DType::F32, [s.batch, s.heads, s.queries])?;
    Ok(vec![out, logsumexp])
}
pub(super) fn sdpa_rows_bwd(a: &AttentionRows, c: &Call<'_>) -> Shapes {
    let it = attention_rows(a, c, 1, 6)?;
    let s = it.sizes;
    for i in [0, 4] {
        c.expect_shape(i, &[s.batch, s.queries, s.heads, s.values])?;
        c.expect_dtype(i, 1)?;
    }
    c.expect_shape(5, &[s.batch, s.heads, s.queries])?;
    c.expect(5, DType::F32)?;
    if it.is_joint {
        return Ok(vec![c.at(1).clone()]);
    }
    let gradient = |i: usize| {
        let mut shape = c.shape(1 + i).to_vec();
        if a.first[i] >= 0 {
            shape[2] = if i == 0 { s.heads } else { s.groups };
        }
        Ok(TensorType::new(c.at(1).dtype(), shape)?)
    };
    (0..3).map(gradient).collect()
}

// --- tables and losses ---

pub(super) fn embedding(_: &Embedding, c: &Call<'_>) -> Shapes {
    c.expect_index(1)?;
    c.expect_rank(0, |rank| rank == 2, "2")?;
    let shape: Vec<u64> = c.shape(1).iter().chain(&c.shape(0)[1..]).copied().collect();
    ty(c.at(0).dtype(), &shape)
}
pub(super) fn embedding_bwd(a: &EmbeddingBwd, c: &Call<'_>) -> Shapes {
    c.expect_index(1)?;
    let (dy, index) = (c.shape(0), c.shape(1));
    let fits = dy.len() == index.len() + 1 && dy[..index.len()] == *index;
    ensure(fits, || Misfit::Operand {
        operand: 0,
        why: "should have operand 1's shape and one more dimension",
    })?;
    let rows = u64::try_from(a.rows).map_err(|_| attribute("rows", " should not be negative"))?;
    ty(c.at(0).dtype(), &[rows, dy[index.len()]])
}
/// True if all rows have one common loss.
fn is_reduced(reduction: i64) -> Result<bool, Misfit> {
    match reduction {
        NllLoss::NONE => Ok(false),
        NllLoss::MEAN | NllLoss::SUM => Ok(true),
        _ => Err(attribute("reduction", " should be 0, 1 or 2")),
    }
}
/// Checks log-probabilities at operand 0 and a target for each row at operand 1.
fn targets(c: &Call<'_>) -> Result<(), Misfit> {
    c.expect_index(1)?;
    c.expect_rank(0, |rank| rank == 2, "2")?;
    c.expect_shape(1, &c.shape(0)[..1])
}
pub(super) fn nll_loss(a: &NllLoss, c: &Call<'_>) -> Shapes {
    targets(c)?;
    let shape = if is_reduced(a.reduction)? {
        &[]
    } else {
        c.shape(1)
    };
    Ok(vec![
        TensorType::new(c.at(0).dtype(), shape)?,
        TensorType::new(c.at(0).dtype(), [])?,
    ])
}
pub(super) fn nll_sum(_: &NllSum, c: &Call<'_>) -> Shapes {
    targets(c)?;
    if c.types.len() == 3 {
        c.expect(2, DType::F64)?;
        c.expect_shape(2, &[])?;
    }
    ty(DType::F64, &[])
}
pub(super) fn nll_loss_bwd(a: &NllLossBwd, c: &Call<'_>) -> Shapes {
    c.expect_index(1)?;
    let shape = sizes("shape", &a.shape)?;
    ensure(shape.len() == 2, || {
        attribute("shape", " should have rank 2")
    })?;
    c.expect_shape(1, &shape[..1])?;
    let gradient = if is_reduced(a.reduction)? {
        &[]
    } else {
        &shape[..1]
    };
    c.expect_shape(0, gradient)?;
    c.expect_shape(2, &[])?;
    c.expect(0, a.dtype)?;
    c.expect(2, a.dtype)?;
    ty(a.dtype, &shape)
}

// --- indices ---

/// Checks that operand 1 has the rank of operand 0 and is not larger in dimensions other than
/// `dim`.
fn indexed(dim: i64, c: &Call<'_>) -> Result<(), Misfit> {
    let dim = c.dim("dim", dim, 0)?;
    c.expect_index(1)?;
    let (x, index) = (c.shape(0), c.shape(1));
    let fits = x.len() == index.len() && (0..x.len()).all(|i| i == dim || index[i] <= x[i]);
    ensure(fits, || Misfit::Operand {
        operand: 1,
        why: "does not fit operand 0",
    })
}
pub(super) fn gather(a: &Along, c: &Call<'_>) -> Shapes {
    indexed(a.dim, c)?;
    ty(c.at(0).dtype(), c.shape(1))
}
pub(super) fn scatter(a: &Along, c: &Call<'_>) -> Shapes {
    indexed(a.dim, c)?;
    c.expect_dtype(2, 0)?;
    let fits =
        c.at(2).rank() == c.at(1).rank() && c.shape(1).iter().zip(c.shape(2)).all(|(i, s)| i <= s);
    ensure(fits, || Misfit::Operand {
        operand: 2,
        why: "is smaller than operand 1",
    })?;
    same(a, c)
}
pub(super) fn scatter_value(a: &ScatterValue, c: &Call<'_>) -> Shapes {
    indexed(a.dim, c)?;
    same(a, c)
}
/// The shape of operand 0 indexed by the operands from `first` on.
fn index_shape(c: &Call<'_>, first: usize) -> Result<Vec<u64>, Misfit> {
    let x = c.shape(0);
    let n = c.types.len() - first;
    ensure(n <= x.len(), || operands("more indices than dimensions"))?;
    let mut shape = points(c, first)?;
    shape.extend(&x[n..]);
    Ok(shape)
}
/// The shape to which the indices from operand `first` on broadcast.
pub(super) fn points(c: &Call<'_>, first: usize) -> Result<Vec<u64>, Misfit> {
    let mut shape = vec![];
    for i in first..c.types.len() {
        c.expect_index(i)?;
        shape = broadcast_shapes(&shape, c.shape(i))?;
    }
    Ok(shape)
}
pub(super) fn index(_: &(), c: &Call<'_>) -> Shapes {
    ty(c.at(0).dtype(), &index_shape(c, 1)?)
}
pub(super) fn index_put(a: &IndexPut, c: &Call<'_>) -> Shapes {
    let shape = index_shape(c, 2)?;
    // What is added up in f32 may be in half precision.
    let is_half = matches!(c.at(1).dtype(), DType::BF16 | DType::F16);
    if !(a.accumulate && c.at(0).dtype() == DType::F32 && is_half) {
        c.expect_dtype(1, 0)?;
    }
    if a.accumulate {
        c.expect_elements_of(0, Elements::Numbers)?;
    }
    ensure(broadcast_shapes(c.shape(1), &shape)? == shape, || {
        operands("the values do not broadcast")
    })?;
    same(a, c)
}

// --- shapes ---

pub(super) fn reshape(a: &Sizes, c: &Call<'_>) -> Shapes {
    let result = TensorType::new(c.at(0).dtype(), sizes("shape", &a.shape)?)?;
    ensure(result.numel() == c.at(0).numel(), || {
        Misfit::Operands(format!("{result} has another number of elements"))
    })?;
    Ok(vec![result])
}
pub(super) fn permute(a: &Dims, c: &Call<'_>) -> Shapes {
    let dims = c.dims("dims", &a.dims, 0)?;
    ensure(dims.len() == c.at(0).rank(), || {
        attribute("dims", " should name every dimension")
    })?;
    let shape: Vec<u64> = dims.iter().map(|&d| c.shape(0)[d]).collect();
    ty(c.at(0).dtype(), &shape)
}
pub(super) fn flip(a: &Dims, c: &Call<'_>) -> Shapes {
    c.dims("dims", &a.dims, 0)?;
    same(a, c)
}
pub(super) fn expand(a: &Sizes, c: &Call<'_>) -> Shapes {
    let shape = sizes("shape", &a.shape)?;
    ensure(broadcast_shapes(c.shape(0), &shape)? == shape, || {
        Misfit::Operands(format!("does not expand to {shape:?}"))
    })?;
    ty(c.at(0).dtype(), &shape)
}
pub(super) fn slice(a: &Slice, c: &Call<'_>) -> Shapes {
    let dim = c.dim("dim", a.dim, 0)?;
    let Slice {
        start, end, step, ..
    } = *a;
    let mut shape = c.shape(0).to_vec();
    let fits = 0 <= start && start <= end && end as u64 <= shape[dim] && 1 <= step;
    ensure(fits, || {
        let why = format!("{start}:{end}:{step} is not within 0..{}", shape[dim]);
        Misfit::Operands(why)
    })?;
    shape[dim] = ((end - start) as u64).div_ceil(step as u64);
    ty(c.at(0).dtype(), &shape)
}
pub(super) fn slice_scatter(a: &Slice, c: &Call<'_>) -> Shapes {
    let part = slice(a, c)?.remove(0);
    ensure(part == *c.at(1), || Misfit::Type {
        operand: 1,
        wanted: part,
    })?;
    same(a, c)
}
pub(super) fn cat(a: &Along, c: &Call<'_>) -> Shapes {
    let dim = c.dim("dim", a.dim, 0)?;
    let mut shape = c.shape(0).to_vec();
    for operand in 1..c.types.len() {
        c.expect_dtype(operand, 0)?;
        let other = c.shape(operand);
        let fits = other.len() == shape.len()
            && (0..shape.len()).all(|d| d == dim || other[d] == shape[d]);
        ensure(fits, || Misfit::Operand {
            operand,
            why: "does not fit operand 0",
        })?;
        let size = shape[dim].checked_add(other[dim]);
        shape[dim] = size.ok_or_else(|| operands("too large"))?;
    }
    ty(c.at(0).dtype(), &shape)
}
pub(super) fn pad(a: &Pad, c: &Call<'_>) -> Shapes {
    ensure(a.pad.len() == 2 * c.at(0).rank(), || {
        attribute("pad", " should have two numbers a dimension")
    })?;
    let padded = |(&d, pair): (&u64, &[i64])| {
        let d = i64::try_from(d).ok()?;
        let d = d.checked_add(pair[0])?.checked_add(pair[1])?;
        u64::try_from(d).ok()
    };
    let shape: Option<Vec<u64>> = c.shape(0).iter().zip(a.pad.chunks(2)).map(padded).collect();
    let shape = shape.ok_or_else(|| attribute("pad", " leaves a negative size"))?;
    ty(c.at(0).dtype(), &shape)
}

// --- sources ---

/// The element types of ops without operands.
const MADE: &str = " should not be a floating-point type of 8 bits";

pub(super) fn full(a: &Full, _: &Call<'_>) -> Shapes {
    expect_made(a.dtype, Elements::Computed, MADE)?;
    ty(a.dtype, &sizes("shape", &a.shape)?)
}
pub(super) fn arange(a: &Arange, _: &Call<'_>) -> Shapes {
    expect_made(a.dtype, Elements::Computed, MADE)?;
    let result = ty(a.dtype, &sizes("shape", &a.shape)?)?;
    ensure(result[0].rank() == 1, || {
        attribute("shape", " should have rank 1")
    })?;
    Ok(result)
}
/// Checks the state of random numbers at operand `i`.
fn rng(c: &Call<'_>, i: usize) -> Result<(), Misfit> {
    c.expect(i, DType::I64)?;
    c.expect_shape(i, &[2])
}
pub(super) fn random(a: &Random, c: &Call<'_>) -> Shapes {
    rng(c, 0)?;
    let why = " should be a floating-point type of 16 bits or more";
    expect_made(a.dtype, Elements::Floats, why)?;
    ty(a.dtype, &sizes("shape", &a.shape)?)
}
pub(super) fn rng_next(a: &(), c: &Call<'_>) -> Shapes {
    rng(c, 0)?;
    same(a, c)
}
fn probability(p: f64) -> Result<(), Misfit> {
    ensure((0.0..=1.0).contains(&p), || {
        attribute("p", format!("={p} is not in 0..=1"))
    })
}
pub(super) fn dropout(a: &Dropout, c: &Call<'_>) -> Shapes {
    rng(c, 1)?;
    probability(a.p)?;
    Ok(vec![
        c.at(0).clone(),
        TensorType::new(DType::Bool, c.shape(0))?,
    ])
}
pub(super) fn dropout_key(a: &Dropout, c: &Call<'_>) -> Shapes {
    rng(c, 0)?;
    probability(a.p)?;
    ty(DType::I64, &[4])
}
pub(super) fn round_random(_: &Stream, c: &Call<'_>) -> Shapes {
    c.expect(0, DType::F32)?;
    rng(c, 1)?;
    ty(DType::BF16, c.shape(0))
}
pub(super) fn dropout_bwd(a: &DropoutBwd, c: &Call<'_>) -> Shapes {
    c.expect(1, DType::Bool)?;
    c.expect_shape(1, c.shape(0))?;
    same(a, c)
}

// --- optimizers ---

/// Checks a vector of `n` options at operand `i`.
fn options(c: &Call<'_>, i: usize, n: u64) -> Result<(), Misfit> {
    c.expect(i, DType::F64)?;
    c.expect_shape(i, &[n])
}
/// Checks the factor of the gradient at operand `i`, if it exists.
fn scale(c: &Call<'_>, i: usize) -> Result<(), Misfit> {
    if c.types.len() <= i {
        return Ok(());
    }
    c.expect(i, statistics_dtype(c.at(0).dtype()))?;
    c.expect_shape(i, &[])
}
/// Checks the step count at operand `i`.
fn count(c: &Call<'_>, i: usize) -> Result<(), Misfit> {
    c.expect(i, DType::I64)?;
    c.expect_shape(i, &[])
}
pub(super) fn adamw(_: &(), c: &Call<'_>) -> Shapes {
    for i in 1..4 {
        c.expect_same(0, i)?;
    }
    count(c, 4)?;
    options(c, 5, 5)?;
    scale(c, 6)?;
    Ok([0, 2, 3].map(|i| c.at(i).clone()).to_vec())
}
pub(super) fn adamw_split(_: &(), c: &Call<'_>) -> Shapes {
    let gradient = match c.at(1).dtype() {
        DType::F32 => DType::F32,
        _ => DType::BF16,
    };
    let dtypes = [DType::BF16, gradient, DType::I16, DType::F32, DType::F32];
    for (i, dtype) in dtypes.into_iter().enumerate() {
        c.expect(i, dtype)?;
        c.expect_shape(i, c.shape(0))?;
    }
    count(c, 5)?;
    options(c, 6, 5)?;
    scale(c, 7)?;
    Ok([0, 2, 3, 4].map(|i| c.at(i).clone()).to_vec())
}
pub(super) fn adamw_8bit(_: &(), c: &Call<'_>) -> Shapes {
    c.expect_same(0, 1)?;
    for i in [2, 3] {
        c.expect(i, DType::U8)?;
        c.expect_shape(i, c.shape(0))?;
    }
    for i in [4, 5] {
        c.expect(i, DType::F32)?;
        c.expect_shape(i, &[c.at(0).numel().div_ceil(BLOCK_8BIT)])?;
    }
    count(c, 6)?;
    options(c, 7, 5)?;
    scale(c, 8)?;
    Ok([0, 2, 3, 4, 5].map(|i| c.at(i).clone()).to_vec())
}
/// The types of the operands of `nf4` for `n` numbers.
pub fn nf4_operands(n: u64) -> [(DType, Vec<u64>); 4] {
    let blocks = n.div_ceil(BLOCK_NF4);
    [
        (DType::U8, vec![n.div_ceil(2)]),
        (DType::U8, vec![blocks]),
        (DType::F32, vec![blocks.div_ceil(BLOCK_8BIT)]),
        (DType::F32, vec![]),
    ]
}
pub(super) fn nf4(a: &Decoded, c: &Call<'_>) -> Shapes {
    let why = " should be a floating-point type of 16 bits or more";
    expect_made(a.dtype, Elements::Floats, why)?;
    let results = ty(a.dtype, &sizes("shape", &a.shape)?)?;
    let wanted = nf4_operands(results[0].numel());
    for (i, (dtype, shape)) in wanted.iter().enumerate() {
        c.expect(i, *dtype)?;
        c.expect_shape(i, shape)?;
    }
    Ok(results)
}
pub(super) fn sgd(_: &(), c: &Call<'_>) -> Shapes {
    c.expect_same(0, 1)?;
    options(c, 2, 3)?;
    scale(c, 3)?;
    same(&(), c)
}
pub(super) fn sgd_momentum(_: &(), c: &Call<'_>) -> Shapes {
    c.expect_same(0, 1)?;
    c.expect_same(0, 2)?;
    options(c, 3, 3)?;
    scale(c, 4)?;
    Ok([0, 2].map(|i| c.at(i).clone()).to_vec())
}
pub(super) fn sum_squares(_: &(), c: &Call<'_>) -> Shapes {
    c.expect_elements_of(0, Elements::Floats)?;
    ty(DType::F64, &[])
}
pub(super) fn clip_scale(a: &ClipScale, c: &Call<'_>) -> Shapes {
    for i in 0..c.types.len() {
        c.expect(i, DType::F64)?;
        c.expect_shape(i, &[])?;
    }
    ensure(0.0 <= a.max_norm, || {
        attribute(
            "max_norm",
            format!("={} should not be negative", a.max_norm),
        )
    })?;
    let is_real = matches!(a.dtype, DType::F32 | DType::F64);
    ensure(is_real, || {
        attribute("dtype", format!("={} should be f32 or f64", a.dtype))
    })?;
    ty(a.dtype, &[])
}

// --- kernels and strangers ---

pub(super) fn fused(a: &Fused, c: &Call<'_>) -> Shapes {
    a.body.infer(c.types).map_err(|e| Box::new(e).into())
}
pub(super) fn external(a: &Extern, _: &Call<'_>) -> Shapes {
    let types = a.types.split_whitespace().map(parse_type);
    Ok(types.collect::<Result<_, _>>()?)
}

/// A type from its text, `f32[4,64]`.
pub fn parse_type(text: &str) -> Result<TensorType, crate::types::TypeError> {
    let error = || crate::types::TypeError::Text { text: text.into() };
    let (dtype, rest) = text.split_once('[').ok_or_else(error)?;
    let sizes = rest.strip_suffix(']').ok_or_else(error)?;
    let dtype = DType::from_name(dtype).ok_or_else(error)?;
    let sizes = sizes
        .split(',')
        .map(str::trim)
        .filter(|s| !sizes.is_empty() || !s.is_empty());
    let shape: Result<Vec<u64>, _> = sizes.map(|s| s.parse::<u64>()).collect();
    TensorType::new(dtype, shape.map_err(|_| error())?)
}
