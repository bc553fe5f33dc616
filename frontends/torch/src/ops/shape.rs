//! Views, parts, and tensors put together.

use super::Family;
use ir::DType;
use ir::op::OpKind;
use lower::{
    Border, Call, Indexed, Range, Ref, Result, Results, Scalar, all, count, ensure, one, wrap,
};

pub(super) const OPS: Family = &[
    ("view", view),
    ("_unsafe_view", view),
    ("reshape", view),
    ("view_copy", view),
    ("_reshape_alias", view),
    ("view.dtype", other_bits),
    ("view_copy.dtype", other_bits),
    ("flatten", as_declared),
    ("squeeze", as_declared),
    ("squeeze_copy", as_declared),
    ("unsqueeze", as_declared),
    ("unsqueeze_copy", as_declared),
    ("unflatten", as_declared),
    ("view_as", as_declared),
    ("permute", permute),
    ("permute_copy", permute),
    ("transpose", transpose),
    ("transpose_copy", transpose),
    ("t", matrix_transpose),
    ("t_copy", matrix_transpose),
    ("mT", batch_transpose),
    ("numpy_T", reverse_dims),
    ("expand", expand),
    ("expand_copy", expand),
    ("expand_as", expand_as),
    ("repeat", repeat),
    ("repeat_interleave.self_int", repeat_interleave),
    ("broadcast_tensors", broadcast_tensors),
    ("movedim", movedim),
    ("swapaxes", transpose_axes),
    ("swapdims", transpose_axes),
    ("unfold", unfold),
    ("flip", flip),
    ("slice", slice),
    ("slice_copy", slice),
    ("narrow", narrow),
    ("narrow_copy", narrow),
    ("select", select),
    ("select_copy", select),
    ("unbind", unbind),
    ("unbind_copy", unbind),
    ("split.Tensor", split_equally),
    ("split", |c| split(c, "split_size")),
    ("split_with_sizes", |c| split(c, "split_sizes")),
    ("split_with_sizes_copy", |c| split(c, "split_sizes")),
    ("chunk", chunk),
    ("slice_scatter", slice_scatter),
    ("select_scatter", select_scatter),
    ("slice_backward", slice_backward),
    ("select_backward", select_backward),
    ("cat", cat),
    ("concatenate", cat),
    ("stack", stack),
    ("roll", roll),
    ("fft_fftshift", |c| half_turn(c, false)),
    ("fft_ifftshift", |c| half_turn(c, true)),
    ("pixel_shuffle", |c| {
        blocks(c, "upscale_factor", Call::depth_to_space)
    }),
    ("pixel_unshuffle", |c| {
        blocks(c, "downscale_factor", Call::space_to_depth)
    }),
    ("constant_pad_nd", pad),
    ("pad", pad),
    ("tril", |c| triangle(c, true)),
    ("triu", |c| triangle(c, false)),
];

// --- views ---

fn view(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let sizes = c.ints("size").or_else(|_| c.ints("shape"))?;
    c.ignore(&["stride"]);
    one(c.reshape_to(x, &sizes)?)
}

fn other_bits(_: &mut Call<'_>) -> Result<Results> {
    Err("reads the bits as another type".into())
}

/// The shape is the result's shape in the file; the table of ops checks the number of elements.
fn as_declared(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    c.ignore(&["start_dim", "end_dim", "dim", "sizes", "other"]);
    let shape = c.result()?.shape();
    one(c.reshape(x, shape)?)
}

fn permute(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let rank = c.rank(x);
    let dims = c.ints("dims")?;
    let dims: Result<Vec<usize>> = dims.into_iter().map(|d| wrap(d, rank)).collect();
    one(c.permute(x, &dims?)?)
}

fn transpose(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let rank = c.rank(x);
    let mut dims: Vec<usize> = (0..rank).collect();
    if rank == 0 {
        c.ignore(&["dim0", "dim1"]);
    } else {
        let (a, b) = (c.dim("dim0", None, rank)?, c.dim("dim1", None, rank)?);
        dims.swap(a, b);
    }
    one(c.permute(x, &dims)?)
}

/// A transposition of at most two dimensions.
fn matrix_transpose(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    ensure(c.rank(x) <= 2, "more than two dimensions")?;
    reversed(c, x)
}

/// A transposition of the last two dimensions.
fn batch_transpose(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let rank = c.rank(x);
    if rank < 2 {
        return reversed(c, x);
    }
    let mut dims: Vec<usize> = (0..rank).collect();
    dims.swap(rank - 2, rank - 1);
    one(c.permute(x, &dims)?)
}

fn reverse_dims(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    reversed(c, x)
}

fn reversed(c: &mut Call<'_>, x: Ref) -> Result<Results> {
    let dims: Vec<usize> = (0..c.rank(x)).rev().collect();
    one(c.permute(x, &dims)?)
}

fn expand(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    c.bool_or("implicit", false)?;
    let sizes = c.ints("size")?;
    one(c.expand_to(x, &sizes)?)
}

fn expand_as(c: &mut Call<'_>) -> Result<Results> {
    let (x, other) = (c.tensor("self")?, c.tensor("other")?);
    let shape = c.shape_of(other);
    one(c.expand(x, &shape)?)
}

fn repeat(c: &mut Call<'_>) -> Result<Results> {
    let (x, repeats) = (c.tensor("self")?, c.shape("repeats")?);
    one(c.tile(x, &repeats)?)
}

/// Each element of a dimension several times; without a dimension, of all elements in a row.
fn repeat_interleave(c: &mut Call<'_>) -> Result<Results> {
    let mut x = c.tensor("self")?;
    let repeats = u64::try_from(c.int("repeats")?).map_err(|_| "a negative size")?;
    c.ignore(&["output_size"]);
    let dim = match c.opt_int("dim")? {
        Some(dim) => wrap(dim, c.rank(x))?,
        None => {
            let n = c.ty(x).numel();
            x = c.reshape(x, &[n])?;
            0
        }
    };
    let mut shape = c.shape_of(x);
    let whole = shape[dim].checked_mul(repeats).ok_or("too large")?;
    shape.insert(dim + 1, 1);
    let x = c.reshape(x, &shape)?;
    shape[dim + 1] = repeats;
    let x = c.expand(x, &shape)?;
    shape.remove(dim + 1);
    shape[dim] = whole;
    one(c.reshape(x, &shape)?)
}

fn broadcast_tensors(c: &mut Call<'_>) -> Result<Results> {
    let mut shape = vec![];
    let list = c.tensors("tensors")?;
    for &x in &list {
        shape = ir::op::broadcast_shapes(&shape, c.ty(x).shape())?;
    }
    let wide: Result<Vec<Ref>> = list.into_iter().map(|x| c.expand(x, &shape)).collect();
    all(wide?)
}

pub(super) fn movedim(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let order = moved(c, c.rank(x))?;
    one(c.permute(x, &order)?)
}

/// For each dimension after `movedim`, where it was.
pub(super) fn moved(c: &mut Call<'_>, rank: usize) -> Result<Vec<usize>> {
    let (from, to) = (c.ints("source")?, c.ints("destination")?);
    ensure(from.len() == to.len(), "moves other dimensions")?;
    let mut order: Vec<Option<usize>> = vec![None; rank];
    for (from, to) in from.into_iter().zip(to) {
        order[wrap(to, rank)?] = Some(wrap(from, rank)?);
    }
    let moved: Vec<usize> = order.iter().flatten().copied().collect();
    let mut rest = (0..rank).filter(|d| !moved.contains(d));
    let order: Option<Vec<usize>> = order
        .into_iter()
        .map(|d| d.or_else(|| rest.next()))
        .collect();
    Ok(order.ok_or("moves other dimensions")?)
}

fn transpose_axes(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let order = swapped(c, c.rank(x))?;
    one(c.permute(x, &order)?)
}

/// The dimensions after `swapaxes`, two of which have changed places.
pub(super) fn swapped(c: &mut Call<'_>, rank: usize) -> Result<Vec<usize>> {
    let mut dims: Vec<usize> = (0..rank).collect();
    let by_name = |c: &mut Call<'_>, axis: &str, dim: &str| match c.opt_int(axis)? {
        Some(i) => wrap(i, rank),
        None => c.dim(dim, None, rank),
    };
    let (a, b) = (by_name(c, "axis0", "dim0")?, by_name(c, "axis1", "dim1")?);
    dims.swap(a, b);
    Ok(dims)
}

/// Overlapping parts of a dimension; the elements of a part are a new last dimension.
fn unfold(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let dim = c.dim("dimension", None, c.rank(x))?;
    let (size, step) = (c.int("size")?, c.int("step")?);
    let whole = c.shape_of(x)[dim] as i64;
    ensure(
        size > 0 && step > 0 && size <= whole,
        "the parts do not fit",
    )?;
    let n = (whole - size) / step + 1;
    ensure(n <= 1 << 16 && size <= 1 << 16, "too large")?;
    let start = c.arange(DType::I64, n as u64, Scalar::Int(0), Scalar::Int(step))?;
    let start = c.reshape(start, &[n as u64, 1])?;
    let within = c.arange(DType::I64, size as u64, Scalar::Int(0), Scalar::Int(1))?;
    let at = c.step(OpKind::Add, &[], &[start, within])?;
    let y = Indexed::along(c, x, dim, at)?.get(c)?;
    // [.., n size, ..] -> [.., n, .., size]
    let mut shape = c.shape_of(x);
    shape[dim] = n as u64;
    shape.insert(dim + 1, size as u64);
    let y = c.reshape(y, &shape)?;
    let order: Vec<usize> = (0..shape.len())
        .filter(|&d| d != dim + 1)
        .chain([dim + 1])
        .collect();
    one(c.permute(y, &order)?)
}

fn flip(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let dims = c.dims("dims", c.rank(x))?;
    one(c.flip(x, &dims)?)
}

// --- parts ---

fn range(c: &mut Call<'_>) -> Result<Range> {
    Ok(Range {
        start: c.opt_int("start")?,
        end: c.opt_int("end")?,
        step: c.int_or("step", 1)?,
    })
}

fn slice(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let dim = c.dim("dim", Some(0), c.rank(x))?;
    let range = range(c)?;
    one(c.slice(x, dim, range)?)
}

fn narrow(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let dim = c.dim("dim", None, c.rank(x))?;
    let (start, length) = (c.int("start")?, c.int("length")?);
    // A negative start counts from the end, and must not become an end of 0.
    let start = if start < 0 {
        start.saturating_add(c.ty(x).shape()[dim] as i64)
    } else {
        start
    };
    let range = Range::new(start, start.saturating_add(length));
    one(c.slice(x, dim, range)?)
}

fn select(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let (dim, at) = (c.dim("dim", None, c.rank(x))?, c.int("index")?);
    one(c.select(x, dim, at)?)
}

fn unbind(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let dim = c.dim("dim", Some(0), c.rank(x))?;
    all(c.unbind(x, dim)?)
}

fn split(c: &mut Call<'_>, sizes: &str) -> Result<Results> {
    let x = c.tensor("self")?;
    let dim = c.dim("dim", Some(0), c.rank(x))?;
    let sizes = c.ints(sizes)?;
    all(c.split(x, dim, &sizes)?)
}

fn split_equally(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let dim = c.dim("dim", Some(0), c.rank(x))?;
    let size = c.int("split_size")?;
    all(c.split_equally(x, dim, size)?)
}

fn chunk(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let dim = c.dim("dim", Some(0), c.rank(x))?;
    let n = c.int("chunks")?;
    all(c.chunk(x, dim, n)?)
}

fn slice_scatter(c: &mut Call<'_>) -> Result<Results> {
    let (x, source) = (c.tensor("self")?, c.tensor("src")?);
    let dim = c.dim("dim", Some(0), c.rank(x))?;
    let range = range(c)?;
    one(c.slice_scatter(x, source, dim, range)?)
}

fn select_scatter(c: &mut Call<'_>) -> Result<Results> {
    let (x, source) = (c.tensor("self")?, c.tensor("src")?);
    let (dim, at) = (c.dim("dim", None, c.rank(x))?, c.int("index")?);
    one(c.select_scatter(x, source, dim, at)?)
}

fn slice_backward(c: &mut Call<'_>) -> Result<Results> {
    let (dy, shape) = (c.tensor("grad_output")?, c.shape("input_sizes")?);
    let dim = c.dim("dim", None, shape.len())?;
    let range = range(c)?;
    let zeros = c.full(Scalar::Int(0), c.dtype(dy), &shape)?;
    one(c.slice_scatter(zeros, dy, dim, range)?)
}

fn select_backward(c: &mut Call<'_>) -> Result<Results> {
    let (dy, shape) = (c.tensor("grad_output")?, c.shape("input_sizes")?);
    let (dim, at) = (c.dim("dim", None, shape.len())?, c.int("index")?);
    let zeros = c.full(Scalar::Int(0), c.dtype(dy), &shape)?;
    one(c.select_scatter(zeros, dy, dim, at)?)
}

// --- tensors put together ---

fn cat(c: &mut Call<'_>) -> Result<Results> {
    let parts = c.tensors("tensors")?;
    let (dtype, rank) = (c.result()?.dtype(), c.result()?.rank());
    let dim = c.dim("dim", Some(0), rank)?;
    // An empty vector may be part of a concatenation of any rank.
    let counts = |&x: &Ref| c.rank(x) == rank && (rank != 1 || c.ty(x).numel() != 0);
    let parts: Vec<Ref> = parts.into_iter().filter(counts).collect();
    let parts: Result<Vec<Ref>> = parts.into_iter().map(|x| c.cast(x, dtype)).collect();
    one(c.cat(&parts?, dim)?)
}

fn stack(c: &mut Call<'_>) -> Result<Results> {
    let parts = c.tensors("tensors")?;
    let dtype = c.result()?.dtype();
    let dim = c.dim("dim", Some(0), c.result()?.rank())?;
    one(c.stack(parts, dim, dtype)?)
}

/// Rotates dimensions by half of their sizes, rounded up to go back.
fn half_turn(c: &mut Call<'_>, back: bool) -> Result<Results> {
    let x = c.tensor("self")?;
    let shape = c.shape_of(x);
    let dims = c.dims("dim", shape.len())?;
    let half = |size: u64| if back { size.div_ceil(2) } else { size / 2 };
    let shifts: Vec<(i64, usize)> = dims.iter().map(|&d| (half(shape[d]) as i64, d)).collect();
    one(c.roll(x, &shifts)?)
}

fn roll(c: &mut Call<'_>) -> Result<Results> {
    const MISFIT: &str = "another number of shifts than of dimensions";
    let x = c.tensor("self")?;
    let shifts = c.ints("shifts")?;
    let dims = c.opt_ints("dims")?.unwrap_or_default();
    if dims.is_empty() {
        // Without dimensions, the elements move like one vector.
        let &[shift] = &shifts[..] else {
            return Err(MISFIT.into());
        };
        let (shape, n) = (c.shape_of(x), c.ty(x).numel());
        let flat = c.reshape(x, &[n])?;
        let flat = c.roll(flat, &[(shift, 0)])?;
        return one(c.reshape(flat, &shape)?);
    }
    ensure(shifts.len() == dims.len(), MISFIT)?;
    let rank = c.rank(x);
    let moved = |(shift, dim): (i64, i64)| Ok((shift, wrap(dim, rank)?));
    let moves: Result<Vec<(i64, usize)>> = shifts.into_iter().zip(dims).map(moved).collect();
    one(c.roll(x, &moves?)?)
}

fn pad(c: &mut Call<'_>) -> Result<Results> {
    let (mut x, pad) = (c.tensor("self")?, c.ints("pad")?);
    let border = match c.string_or("mode", "constant")?.as_str() {
        "constant" => {
            let value = c.scalar_or("value", Scalar::Int(0))?;
            return one(c.pad(x, &pad, value)?);
        }
        "reflect" => Border::Reflect,
        "replicate" => Border::Edge,
        "circular" => Border::Wrap,
        other => return Err(format!("no padding {other}").into()),
    };
    c.ignore(&["value"]);
    let rank = c.rank(x);
    ensure(
        pad.len().is_multiple_of(2) && pad.len() <= 2 * rank,
        "another number of paddings",
    )?;
    for (i, pair) in pad.chunks(2).enumerate() {
        x = c.pad_with_itself(x, rank - 1 - i, (pair[0], pair[1]), border)?;
    }
    one(x)
}

/// Images whose channels are blocks of rows and columns, or the reverse. Any number of dimensions
/// may come before the channels.
fn blocks<'a>(
    c: &mut Call<'a>,
    factor: &str,
    moved: fn(&mut Call<'a>, Ref, u64, bool) -> Result<Ref>,
) -> Result<Results> {
    let x = c.tensor("self")?;
    let block = u64::try_from(c.int(factor)?).map_err(|_| "a negative size")?;
    let shape = c.shape_of(x);
    let [lead @ .., channels, rows, columns] = &shape[..] else {
        return Err("has too few dimensions".into());
    };
    let images = [count(lead)?, *channels, *rows, *columns];
    let x = c.reshape(x, &images)?;
    let y = moved(c, x, block, false)?;
    let shape = c.result()?.shape();
    one(c.reshape(y, shape)?)
}

fn triangle(c: &mut Call<'_>, lower: bool) -> Result<Results> {
    let (x, diagonal) = (c.tensor("self")?, c.int_or("diagonal", 0)?);
    one(c.triangle(x, lower, diagonal)?)
}
