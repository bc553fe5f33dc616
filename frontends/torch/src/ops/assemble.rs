//! Tensors put together of others in further ways: stacks, splits, grids, diagonals, blocks.

use super::Family;
use ir::DType;
use ir::op::OpKind;
use lower::{Call, Indexed, Range, Ref, Result, Results, Scalar, all, ensure, one, wrap};

pub(super) const OPS: Family = &[
    ("ravel", |c| {
        let x = c.tensor("self")?;
        one(c.reshape_to(x, &[-1])?)
    }),
    ("atleast_1d", as_declared),
    ("atleast_2d", as_declared),
    ("atleast_3d", as_declared),
    ("moveaxis", super::shape::movedim),
    ("fliplr", |c| turned_over(c, 1)),
    ("flipud", |c| turned_over(c, 0)),
    ("rot90", rot90),
    ("tile", tile),
    ("hstack", |c| stacked(c, 1)),
    ("vstack", |c| stacked(c, 2)),
    ("dstack", |c| stacked(c, 3)),
    ("column_stack", column_stack),
    ("hsplit.int", |c| split(c, "sections", Side::Columns)),
    ("vsplit.int", |c| split(c, "sections", Side::Rows)),
    ("dsplit.int", |c| split(c, "sections", Side::Layers)),
    ("hsplit.array", |c| split(c, "indices", Side::Columns)),
    ("vsplit.array", |c| split(c, "indices", Side::Rows)),
    ("dsplit.array", |c| split(c, "indices", Side::Layers)),
    ("tensor_split.sections", |c| {
        split(c, "sections", Side::Given)
    }),
    ("tensor_split.indices", |c| split(c, "indices", Side::Given)),
    ("meshgrid", meshgrid),
    ("diagonal", diagonal),
    ("diagonal_copy", diagonal),
    ("trace", trace),
    ("diag", diag),
    ("diag_embed", diag_embed),
    ("diagonal_scatter", diagonal_scatter),
    ("block_diag", block_diag),
    ("channel_shuffle", channel_shuffle),
    ("take", take),
    ("put", put),
    ("masked_scatter", masked_scatter),
    ("im2col", im2col),
    ("col2im", col2im),
    ("linspace", linspace),
    ("logspace", logspace),
];

fn as_declared(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let shape = c.result()?.shape();
    one(c.reshape(x, shape)?)
}

fn turned_over(c: &mut Call<'_>, dim: usize) -> Result<Results> {
    let x = c.tensor("self")?;
    ensure(dim < c.rank(x), "has too few dimensions")?;
    one(c.flip(x, &[dim])?)
}

fn transposed(c: &mut Call<'_>, x: Ref, a: usize, b: usize) -> Result<Ref> {
    let mut order: Vec<usize> = (0..c.rank(x)).collect();
    order.swap(a, b);
    c.permute(x, &order)
}

/// A quarter turn from the first of two dimensions to the second, several times.
fn rot90(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let rank = c.rank(x);
    let times = c.int_or("k", 1)?.rem_euclid(4);
    let dims = c.ints_of("dims", 2, &[0, 1])?;
    let (a, b) = (wrap(dims[0], rank)?, wrap(dims[1], rank)?);
    one(match times {
        0 => x,
        1 => {
            let x = c.flip(x, &[b])?;
            transposed(c, x, a, b)?
        }
        2 => c.flip(x, &[a.min(b), a.max(b)])?,
        _ => {
            let x = transposed(c, x, a, b)?;
            c.flip(x, &[b])?
        }
    })
}

fn tile(c: &mut Call<'_>) -> Result<Results> {
    let (x, mut repeats) = (c.tensor("self")?, c.shape("dims")?);
    while repeats.len() < c.rank(x) {
        repeats.insert(0, 1);
    }
    one(c.tile(x, &repeats)?)
}

// --- stacks and splits ---

/// Tensors one after another along the dimension `dims - 1`, which vectors get, if they lack it;
/// horizontally (1) vectors along their own.
fn stacked(c: &mut Call<'_>, dims: usize) -> Result<Results> {
    let (parts, dtype) = (c.tensors("tensors")?, c.result()?.dtype());
    let mut wide = vec![];
    for x in parts {
        let mut shape = c.shape_of(x);
        match (dims, shape.len()) {
            (_, 0) => shape = vec![1; dims.max(1)],
            (2, 1) => shape.insert(0, 1),
            (3, 1) => shape = vec![1, shape[0], 1],
            (3, 2) => shape.push(1),
            _ => (),
        }
        let x = c.cast(x, dtype)?;
        wide.push(c.reshape(x, &shape)?);
    }
    let rank = wide.first().map_or(0, |&x| c.rank(x));
    let dim = match dims {
        1 => usize::from(rank > 1),
        2 => 0,
        _ => 2,
    };
    one(c.cat(&wide, dim)?)
}

fn column_stack(c: &mut Call<'_>) -> Result<Results> {
    let (parts, dtype) = (c.tensors("tensors")?, c.result()?.dtype());
    let mut columns = vec![];
    for x in parts {
        let n = c.ty(x).numel();
        let x = c.cast(x, dtype)?;
        columns.push(if c.rank(x) < 2 {
            c.reshape(x, &[n, 1])?
        } else {
            x
        });
    }
    one(c.cat(&columns, 1)?)
}

/// The dimension that is split.
#[derive(Clone, Copy)]
enum Side {
    Rows,
    /// Of a vector, its elements.
    Columns,
    Layers,
    Given,
}

/// Parts of nearly equal sizes, or parts that end before given places.
fn split(c: &mut Call<'_>, by: &str, side: Side) -> Result<Results> {
    let x = c.tensor("self")?;
    let rank = c.rank(x);
    let dim = match side {
        Side::Rows => 0,
        Side::Columns => usize::from(rank > 1),
        Side::Layers => 2,
        Side::Given => c.dim("dim", Some(0), rank)?,
    };
    let size = *c.ty(x).shape().get(dim).ok_or("has too few dimensions")? as i64;
    let ends: Vec<i64> = match by {
        "sections" => {
            let n = c.int(by)?;
            ensure(
                n > 0 && n as usize == c.n_results(),
                "another number of parts",
            )?;
            // The first parts have one more.
            (1..=n).map(|i| size / n * i + i.min(size % n)).collect()
        }
        _ => {
            let mut ends = c.ints(by)?;
            for end in &mut ends {
                *end = if *end < 0 { *end + size } else { *end }.clamp(0, size);
            }
            ends.push(size);
            ensure(ends.len() == c.n_results(), "another number of parts")?;
            ends
        }
    };
    let mut parts = vec![];
    let mut start = 0;
    for end in ends {
        parts.push(c.slice(x, dim, Range::new(start, end.max(start)))?);
        start = end;
    }
    all(parts)
}

/// Vectors, each repeated along the dimensions of the others.
fn meshgrid(c: &mut Call<'_>) -> Result<Results> {
    let list = c.tensors("tensors")?;
    let swaps = c.string_or("indexing", "ij")? == "xy" && list.len() > 1;
    let mut order: Vec<usize> = (0..list.len()).collect();
    if swaps {
        order.swap(0, 1);
    }
    let mut shape = vec![1; list.len()];
    for (i, &x) in list.iter().enumerate() {
        shape[order[i]] = c.ty(x).numel();
    }
    let mut grids = vec![];
    for (i, &x) in list.iter().enumerate() {
        let mut own = vec![1; list.len()];
        own[order[i]] = c.ty(x).numel();
        let x = c.reshape(x, &own)?;
        grids.push(c.expand(x, &shape)?);
    }
    all(grids)
}

// --- diagonals ---

/// The two dimensions of a diagonal, by torch's names or as given, and its number above the main
/// one.
fn plane(c: &mut Call<'_>, rank: usize, default: [i64; 2]) -> Result<(usize, usize, i64)> {
    let a = c.dim("dim1", Some(default[0]), rank)?;
    let b = c.dim("dim2", Some(default[1]), rank)?;
    ensure(a != b, "a diagonal of one dimension")?;
    Ok((a, b, c.int_or("offset", 0)?))
}

/// The dimensions other than two.
fn others(rank: usize, a: usize, b: usize) -> impl Iterator<Item = usize> {
    (0..rank).filter(move |&d| d != a && d != b)
}

/// The elements on a diagonal of two dimensions, as the last dimension.
fn on_diagonal(c: &mut Call<'_>, x: Ref, (a, b, offset): (usize, usize, i64)) -> Result<Ref> {
    let order: Vec<usize> = others(c.rank(x), a, b).chain([a, b]).collect();
    let x = c.permute(x, &order)?;
    let mut shape = c.shape_of(x);
    let (columns, rows) = (shape.pop().unwrap_or(0), shape.pop().unwrap_or(0));
    let (columns, rows) = (columns as i64, rows as i64);
    ensure(rows.max(columns) < 1 << 31, "too large")?;
    let n = match offset {
        0.. => rows.min(columns.saturating_sub(offset)),
        _ => columns.min(rows.saturating_add(offset)),
    };
    let n = n.max(0);
    let start = if offset < 0 {
        offset.saturating_neg().min(rows) * columns
    } else {
        offset
    };
    shape.push((rows * columns) as u64);
    let last = shape.len() - 1;
    let flat = c.reshape(x, &shape)?;
    if n == 0 {
        return c.slice(flat, last, Range::new(0, 0));
    }
    let range = Range {
        start: Some(start),
        end: Some(start + (n - 1) * (columns + 1) + 1),
        step: columns + 1,
    };
    c.slice(flat, last, range)
}

fn diagonal(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let plane = plane(c, c.rank(x), [0, 1])?;
    one(on_diagonal(c, x, plane)?)
}

fn trace(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    ensure(c.rank(x) == 2, "is no matrix")?;
    let diagonal = on_diagonal(c, x, (0, 1, 0))?;
    let diagonal = c.cast(diagonal, c.result()?.dtype())?;
    one(c.reduce(OpKind::Sum, diagonal, &[0], false)?)
}

fn diag(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let offset = c.int_or("diagonal", 0)?;
    match c.rank(x) {
        1 => one(embedded(c, x, offset)?),
        2 => one(on_diagonal(c, x, (0, 1, offset))?),
        _ => Err("is neither a vector nor a matrix".into()),
    }
}

/// Matrices, the last two dimensions, with the last dimension of `x` on a diagonal and zeros
/// elsewhere.
fn embedded(c: &mut Call<'_>, x: Ref, offset: i64) -> Result<Ref> {
    let mut shape = c.shape_of(x);
    let n = *shape.last().ok_or("has no dimension")?;
    let more = i64::try_from(offset.unsigned_abs()).map_err(|_| "too large")?;
    ensure(more < 1 << 31, "too large")?;
    let size = n + more as u64;
    // Column j has the element of its row.
    let pad = if offset < 0 { [0, more] } else { [more, 0] };
    let x = c.pad(x, &pad, Scalar::Int(0))?;
    let last = shape.len() - 1;
    shape[last] = 1;
    shape.push(size);
    let row = c.reshape(x, &shape)?;
    shape[last] = size;
    let wide = c.expand(row, &shape)?;
    let there = c.diagonals(OpKind::Eq, size, size, offset)?;
    c.masked(there, wide)
}

fn diag_embed(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let rank = c.rank(x) + 1;
    let (a, b, offset) = plane(c, rank, [-2, -1])?;
    let y = embedded(c, x, offset)?;
    let order: Vec<usize> = others(rank, a, b).chain([a, b]).collect();
    one(c.permute(y, &inverse(&order))?)
}

fn diagonal_scatter(c: &mut Call<'_>) -> Result<Results> {
    let (x, source) = (c.tensor("self")?, c.tensor("src")?);
    one(with_diagonal(c, x, source)?)
}

/// `x` with other elements on a diagonal of two dimensions.
pub(super) fn with_diagonal(c: &mut Call<'_>, x: Ref, source: Ref) -> Result<Ref> {
    let rank = c.rank(x);
    let (a, b, offset) = plane(c, rank, [0, 1])?;
    let order: Vec<usize> = others(rank, a, b).chain([a, b]).collect();
    let matrices = c.permute(x, &order)?;
    let shape = c.shape_of(matrices);
    let (rows, columns) = (shape[rank - 2], shape[rank - 1]);
    let whole = embedded(c, source, offset)?;
    let whole = c.resized(whole, rank - 2, rows)?;
    let whole = c.resized(whole, rank - 1, columns)?;
    let there = c.diagonals(OpKind::Eq, rows, columns, offset)?;
    let y = c.step(OpKind::Where, &[], &[there, whole, matrices])?;
    c.permute(y, &inverse(&order))
}

/// Where each dimension of a permutation's result was.
pub(super) fn inverse(order: &[usize]) -> Vec<usize> {
    let mut back = vec![0; order.len()];
    for (i, &dim) in order.iter().enumerate() {
        back[dim] = i;
    }
    back
}

fn block_diag(c: &mut Call<'_>) -> Result<Results> {
    let (list, ty) = (c.tensors("tensors")?, c.result()?);
    let columns = *ty.shape().last().ok_or("has no dimension")? as i64;
    let (mut rows, mut before) = (vec![], 0);
    for x in list {
        let mut shape = c.shape_of(x);
        while shape.len() < 2 {
            shape.insert(0, 1);
        }
        let x = c.cast(x, ty.dtype())?;
        let x = c.reshape(x, &shape)?;
        let after = columns - before - shape[1] as i64;
        rows.push(c.pad(x, &[before, after], Scalar::Int(0))?);
        before += shape[1] as i64;
    }
    one(c.cat(&rows, 0)?)
}

// --- elements by place ---

fn channel_shuffle(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let groups = u64::try_from(c.int("groups")?).map_err(|_| "a negative number")?;
    let shape = c.shape_of(x);
    ensure(shape.len() > 1 && groups > 0, "has no channels")?;
    ensure(
        shape[1].is_multiple_of(groups),
        "the groups do not divide the channels",
    )?;
    let apart = [&[shape[0], groups, shape[1] / groups], &shape[2..]].concat();
    let y = c.reshape(x, &apart)?;
    let y = transposed(c, y, 1, 2)?;
    one(c.reshape(y, &shape)?)
}

fn flat(c: &mut Call<'_>, x: Ref) -> Result<Ref> {
    let n = c.ty(x).numel();
    c.reshape(x, &[n])
}

fn take(c: &mut Call<'_>) -> Result<Results> {
    let (x, index) = (c.tensor("self")?, c.tensor("index")?);
    let x = flat(c, x)?;
    one(Indexed::new(c, x, &[Some(index)])?.get(c)?)
}

fn put(c: &mut Call<'_>) -> Result<Results> {
    let (x, index, source) = (c.tensor("self")?, c.tensor("index")?, c.tensor("source")?);
    let accumulate = c.bool_or("accumulate", false)?;
    let shape = c.shape_of(x);
    let x = flat(c, x)?;
    let (index, source) = (flat(c, index)?, flat(c, source)?);
    let y = Indexed::new(c, x, &[Some(index)])?.put(c, source, accumulate)?;
    one(c.reshape(y, &shape)?)
}

/// The elements of `source`, in order, where the mask is true.
fn masked_scatter(c: &mut Call<'_>) -> Result<Results> {
    let (x, mask, source) = (c.tensor("self")?, c.tensor("mask")?, c.tensor("source")?);
    let shape = ir::op::broadcast_shapes(c.ty(x).shape(), c.ty(mask).shape())?;
    let (x, mask) = (c.expand(x, &shape)?, c.expand(mask, &shape)?);
    let source = flat(c, source)?;
    ensure(c.ty(source).numel() > 0, "the source is empty")?;
    let marks = flat(c, mask)?;
    let marks = c.cast(marks, DType::I64)?;
    let dim = [("dim", ir::Attr::Int(0))];
    let number = c.step(OpKind::Cumsum, &dim, &[marks])?;
    let number = c.scalar_step(OpKind::AddScalar, number, Scalar::Int(-1))?;
    let last = c.ty(source).numel() as i64 - 1;
    let (least, most) = (Some(Scalar::Int(0)), Some(Scalar::Int(last)));
    let number = c.clamp(number, least, most, DType::I64)?;
    let found = Indexed::new(c, source, &[Some(number)])?.get(c)?;
    let found = c.reshape(found, &shape)?;
    one(c.step(OpKind::Where, &[], &[mask, found, x])?)
}

// --- windows of images ---

/// The windows of images.
struct Grid {
    kernel: [u64; 2],
    dilation: [u64; 2],
    padding: [u64; 2],
    stride: [u64; 2],
    /// The size of the images with their padding, and the number of windows in each direction.
    padded: [u64; 2],
    n: [u64; 2],
}

impl Grid {
    fn of(c: &mut Call<'_>, size: [u64; 2]) -> Result<Grid> {
        let mut read = |name: &str, least: i64| -> Result<[u64; 2]> {
            let list = c.ints_of(name, 2, &[])?;
            let fits = list.len() == 2 && list.iter().all(|n| (least..1 << 16).contains(n));
            ensure(fits, "a window of this size")?;
            Ok([list[0] as u64, list[1] as u64])
        };
        let (kernel, dilation) = (read("kernel_size", 1)?, read("dilation", 1)?);
        let (padding, stride) = (read("padding", 0)?, read("stride", 1)?);
        ensure(
            kernel[0] * kernel[1] <= 256,
            "windows of more than 256 elements",
        )?;
        let padded = [0, 1].map(|d| size[d] + 2 * padding[d]);
        let span = [0, 1].map(|d| dilation[d] * (kernel[d] - 1) + 1);
        ensure(
            span[0] <= padded[0] && span[1] <= padded[1],
            "the windows do not fit",
        )?;
        let n = [0, 1].map(|d| (padded[d] - span[d]) / stride[d] + 1);
        Ok(Grid {
            kernel,
            dilation,
            padding,
            stride,
            padded,
            n,
        })
    }

    /// The elements of a dimension that are at one place of each window.
    fn range(&self, d: usize, place: u64) -> Range {
        let start = place * self.dilation[d];
        Range {
            start: Some(start as i64),
            end: Some((start + (self.n[d] - 1) * self.stride[d] + 1) as i64),
            step: self.stride[d] as i64,
        }
    }

    fn places(&self) -> impl Iterator<Item = [u64; 2]> {
        let [rows, columns] = self.kernel;
        (0..rows).flat_map(move |i| (0..columns).map(move |j| [i, j]))
    }
}

/// `[batch, channels, height, width]`, and whether there was no batch.
fn batched(c: &mut Call<'_>, x: Ref, rank: usize) -> Result<(Ref, bool)> {
    let shape = c.shape_of(x);
    if shape.len() + 1 == rank {
        let x = c.reshape(x, &[&[1], &shape[..]].concat())?;
        return Ok((x, true));
    }
    ensure(shape.len() == rank, "has another rank")?;
    Ok((x, false))
}

/// The elements of each window as a column: `[batch, channels kernel, windows]`.
fn im2col(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let (x, _) = batched(c, x, 4)?;
    let &[batch, channels, height, width] = &c.shape_of(x)[..] else {
        return Err("is no image".into());
    };
    let grid = Grid::of(c, [height, width])?;
    let [rows, columns] = grid.padding.map(|n| n as i64);
    let x = match grid.padding {
        [0, 0] => x,
        _ => c.pad(x, &[columns, columns, rows, rows], Scalar::Int(0))?,
    };
    let mut places = vec![];
    let windows = grid.n[0] * grid.n[1];
    for [i, j] in grid.places() {
        let part = c.slice(x, 2, grid.range(0, i))?;
        let part = c.slice(part, 3, grid.range(1, j))?;
        places.push(c.reshape(part, &[batch, channels, 1, windows])?);
    }
    let y = c.cat(&places, 2)?;
    let shape = c.result()?.shape();
    one(c.reshape(y, shape)?)
}

/// Images of which each element is the sum of what the windows have for it.
fn col2im(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let size = c.ints_of("output_size", 2, &[])?;
    let fits = size.len() == 2 && size.iter().all(|n| (1..1 << 31).contains(n));
    ensure(fits, "images of this size")?;
    let grid = Grid::of(c, [size[0] as u64, size[1] as u64])?;
    let (x, _) = batched(c, x, 3)?;
    let &[batch, columns, windows] = &c.shape_of(x)[..] else {
        return Err("has no windows".into());
    };
    let kernel = grid.kernel[0] * grid.kernel[1];
    let fits = columns.is_multiple_of(kernel) && windows == grid.n[0] * grid.n[1];
    ensure(fits, "the windows do not fit the images")?;
    let channels = columns / kernel;
    let apart = c.reshape(x, &[batch, channels, kernel, grid.n[0], grid.n[1]])?;
    let padded = [batch, channels, grid.padded[0], grid.padded[1]];
    let lines = [batch, channels, grid.padded[0], grid.n[1]];
    let dtype = c.dtype(x);
    let mut sum: Option<Ref> = None;
    for (at, [i, j]) in grid.places().enumerate() {
        let part = c.select(apart, 2, at as i64)?;
        let zeros = c.full(Scalar::Int(0), dtype, &lines)?;
        let part = c.slice_scatter(zeros, part, 2, grid.range(0, i))?;
        let zeros = c.full(Scalar::Int(0), dtype, &padded)?;
        let part = c.slice_scatter(zeros, part, 3, grid.range(1, j))?;
        sum = Some(match sum {
            None => part,
            Some(sum) => c.step(OpKind::Add, &[], &[sum, part])?,
        });
    }
    let y = sum.ok_or("has no windows")?;
    let [rows, columns] = grid.padding.map(|n| -(n as i64));
    let y = match grid.padding {
        [0, 0] => y,
        _ => c.pad(y, &[columns, columns, rows, rows], Scalar::Int(0))?,
    };
    let shape = c.result()?.shape();
    one(c.reshape(y, shape)?)
}

// --- sources ---

/// Evenly spaced numbers from `start` to `end`, each computed from the nearer end, as torch does.
fn spaced(c: &mut Call<'_>, dtype: DType) -> Result<Ref> {
    let (start, end) = (c.float("start")?, c.float("end")?);
    let n = u64::try_from(c.int("steps")?).map_err(|_| "a negative number")?;
    c.opt_dtype("dtype")?;
    ensure(n < 1 << 40, "too large")?;
    let step = if n > 1 {
        (end - start) / (n - 1) as f64
    } else {
        0.0
    };
    let numbers = |c: &mut Call<'_>, from: f64, at: i64| {
        let place = c.arange(DType::I64, n, Scalar::Int(at), Scalar::Int(1))?;
        let place = c.cast(place, dtype)?;
        let far = c.scalar_step(OpKind::MulScalar, place, Scalar::Float(step))?;
        c.scalar_step(OpKind::AddScalar, far, Scalar::Float(from))
    };
    let (low, high) = (numbers(c, start, 0)?, numbers(c, end, 1 - n as i64)?);
    let place = c.arange(DType::I64, n, Scalar::Int(0), Scalar::Int(1))?;
    let is_low = c.scalar_step(OpKind::LtScalar, place, Scalar::Int((n / 2) as i64))?;
    let is_low = match n {
        1 => c.full(Scalar::Bool(true), DType::Bool, &[1])?,
        _ => is_low,
    };
    c.step(OpKind::Where, &[], &[is_low, low, high])
}

fn linspace(c: &mut Call<'_>) -> Result<Results> {
    let dtype = c.result()?.dtype();
    ensure(dtype.is_float(), "integers with even spaces")?;
    one(spaced(c, dtype)?)
}

fn logspace(c: &mut Call<'_>) -> Result<Results> {
    let (dtype, base) = (c.result()?.dtype(), c.float_or("base", 10.0)?);
    ensure(dtype.is_float() && base > 0.0, "powers of this base")?;
    let powers = spaced(c, DType::F64)?;
    let exponent = c.scalar_step(OpKind::MulScalar, powers, Scalar::Float(base.ln()))?;
    let y = c.map(OpKind::Exp, exponent)?;
    one(c.cast(y, dtype)?)
}
