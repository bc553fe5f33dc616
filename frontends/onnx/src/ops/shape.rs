//! Views, parts, and tensors put together.

use super::inputs::{Inputs, Row, flag, op, op_with, wrap_all};
use crate::tensor::Numbers;
use ir::DType;
use lower::{Call, Error, Range, Ref, Result, Results, Scalar, all, count, ensure, one, wrap};

pub(super) const OPS: &[Row] = &[
    op_with("Reshape", &[1], reshape),
    op("Flatten", flatten),
    op_with("Squeeze", &[1], squeeze),
    op_with("Unsqueeze", &[1], unsqueeze),
    op("Transpose", transpose),
    op_with("Expand", &[1], expand),
    op_with("Slice", &[1, 2, 3, 4], slice),
    op("Concat", concat),
    op_with("Split", &[1], split),
    op_with("Tile", &[1], tile),
    op_with("Pad", &[1, 2, 3], pad),
    op_with("Trilu", &[1], triangle),
    op("DepthToSpace", depth_to_space),
    op("SpaceToDepth", space_to_depth),
    op_with("ConstantOfShape", &[0], constant_of_shape),
    op_with("Range", &[0, 1, 2], range),
    op_with("CenterCropPad", &[1], center),
    op_with("ReverseSequence", &[1], reverse_sequence),
];

// --- views ---

fn reshape(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let keeps_zero = flag(c, "allowzero", false)?;
    let x = inputs.at(c, 0)?;
    let old = c.shape_of(x);
    let mut sizes = inputs.ints(1)?;
    if !keeps_zero {
        for (i, size) in sizes.iter_mut().enumerate().filter(|(_, size)| **size == 0) {
            *size = *old.get(i).ok_or("keeps a dimension that does not exist")? as i64;
        }
    }
    one(c.reshape_to(x, &sizes)?)
}

fn flatten(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let shape = c.shape_of(x);
    let axis = c.int_or("axis", 1)?;
    let axis = if axis == shape.len() as i64 {
        shape.len()
    } else {
        wrap(axis, shape.len())?
    };
    let (rows, columns) = shape.split_at(axis);
    one(c.reshape(x, &[count(rows)?, count(columns)?])?)
}

fn squeeze(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let shape = c.shape_of(x);
    let axes = inputs.axes(c, 1, shape.len())?;
    let is_gone = |d: usize| match &axes {
        Some(axes) => axes.contains(&d),
        None => shape[d] == 1,
    };
    let kept: Vec<usize> = (0..shape.len()).filter(|&d| !is_gone(d)).collect();
    let kept: Vec<u64> = kept.into_iter().map(|d| shape[d]).collect();
    one(c.reshape(x, &kept)?)
}

fn unsqueeze(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let n_new = match inputs.opt_ints(1)? {
        Some(axes) => axes.len(),
        None => c.ints("axes")?.len(),
    };
    let mut shape = c.shape_of(x);
    let axes = inputs.axes(c, 1, shape.len() + n_new)?.unwrap_or_default();
    for axis in axes {
        shape.insert(axis, 1);
    }
    one(c.reshape(x, &shape)?)
}

fn transpose(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let rank = c.rank(x);
    let dims: Vec<usize> = match c.opt_ints("perm")? {
        Some(perm) => wrap_all(&perm, rank)?,
        None => (0..rank).rev().collect(),
    };
    one(c.permute(x, &dims)?)
}

/// Broadcasts in both directions.
fn expand(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let shape: Result<Vec<u64>> = inputs.ints(1)?.into_iter().map(size).collect();
    let shape = ir::op::broadcast_shapes(c.ty(x).shape(), &shape?)?;
    one(c.expand(x, &shape)?)
}

fn size(d: i64) -> Result<u64> {
    u64::try_from(d).map_err(|_| format!("the size {d} is negative").into())
}

fn tile(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let repeats: Result<Vec<u64>> = inputs.ints(1)?.into_iter().map(size).collect();
    one(c.tile(x, &repeats?)?)
}

// --- parts ---

/// The axes that a list of numbers is for: `input`, else all from the first on.
fn axes_of(inputs: &Inputs<'_>, input: usize, n: usize, rank: usize) -> Result<Vec<usize>> {
    let axes = match inputs.opt_ints(input)? {
        Some(axes) => wrap_all(&axes, rank)?,
        None => (0..n).collect(),
    };
    ensure(
        axes.len() == n && n <= rank,
        "the lists of numbers have different lengths",
    )?;
    Ok(axes)
}

fn slice(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let mut x = inputs.at(c, 0)?;
    let (starts, ends) = (inputs.ints(1)?, inputs.ints(2)?);
    let axes = axes_of(inputs, 3, starts.len(), c.rank(x))?;
    let steps = inputs.opt_ints(4)?.unwrap_or_else(|| vec![1; starts.len()]);
    ensure(
        ends.len() == starts.len() && steps.len() == starts.len(),
        "the lists of numbers have different lengths",
    )?;
    for (i, &axis) in axes.iter().enumerate() {
        x = sliced(c, x, axis, (starts[i], ends[i], steps[i]))?;
    }
    one(x)
}

/// A part of a dimension; a negative step goes backwards.
fn sliced(
    c: &mut Call<'_>,
    x: Ref,
    axis: usize,
    (start, end, step): (i64, i64, i64),
) -> Result<Ref> {
    if step > 0 {
        return c.slice(
            x,
            axis,
            Range {
                start: Some(start),
                end: Some(end),
                step,
            },
        );
    }
    ensure(step < 0, "a step is 0")?;
    let size = c.shape_of(x)[axis] as i64;
    let from_front = |i: i64| if i < 0 { i.saturating_add(size) } else { i };
    // Position i is position size - 1 - i of the reversed dimension.
    let start = size - 1 - from_front(start).clamp(-1, size - 1);
    let end = size - 1 - from_front(end).clamp(-1, size - 1);
    let x = c.flip(x, &[axis])?;
    let step = step.checked_neg().ok_or("a step is too large")?;
    c.slice(
        x,
        axis,
        Range {
            start: Some(start),
            end: Some(end),
            step,
        },
    )
}

fn split(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let axis = c.dim("axis", Some(0), c.rank(x))?;
    let wanted = c.opt_int("num_outputs")?;
    if let Some(sizes) = inputs.opt_ints(1)? {
        return all(c.split(x, axis, &sizes)?);
    }
    let n = wanted.unwrap_or(c.n_results() as i64);
    ensure(
        n > 0 && n as usize == c.n_results(),
        "another number of results",
    )?;
    let size = c.shape_of(x)[axis] as i64;
    let part = (size + n - 1) / n;
    let sizes: Vec<i64> = (0..n).map(|i| (size - i * part).clamp(0, part)).collect();
    all(c.split(x, axis, &sizes)?)
}

fn triangle(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let upper = flag(c, "upper", true)?;
    let x = inputs.at(c, 0)?;
    let k = inputs.opt_int(1)?.unwrap_or(0);
    one(c.triangle(x, !upper, k)?)
}

// --- tensors put together ---

fn concat(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let parts: Result<Vec<Ref>> = (0..inputs.len()).map(|i| inputs.at(c, i)).collect();
    let parts = parts?;
    let rank = parts.first().map_or(0, |&x| c.rank(x));
    let axis = c.dim("axis", None, rank)?;
    one(c.cat(&parts, axis)?)
}

/// Sizes of a dimension are smaller, so that their sums do not overflow.
const LARGE: i64 = 1 << 52;

/// The numbers of elements before and after each dimension.
fn paddings(inputs: &Inputs<'_>, rank: usize) -> Result<Vec<(i64, i64)>> {
    let pads = inputs.ints(1)?;
    let is_small = |pad: &i64| (-LARGE..LARGE).contains(pad);
    ensure(
        pads.len().is_multiple_of(2) && pads.iter().all(is_small),
        "the paddings do not fit the tensor",
    )?;
    let n = pads.len() / 2;
    let axes = axes_of(inputs, 3, n, rank)?;
    let mut all = vec![(0, 0); rank];
    for (i, axis) in axes.into_iter().enumerate() {
        all[axis] = (pads[i], pads[n + i]);
    }
    Ok(all)
}

fn pad(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let mode = c.string_or("mode", "constant")?;
    let mut x = inputs.at(c, 0)?;
    let pads = paddings(inputs, c.rank(x))?;
    if mode == "constant" {
        let value = inputs.opt_number(2)?.unwrap_or(Scalar::Int(0));
        let innermost: Vec<i64> = pads.iter().rev().flat_map(|&(a, b)| [a, b]).collect();
        return one(c.pad(x, &innermost, value)?);
    }
    for (axis, (before, after)) in pads.into_iter().enumerate() {
        x = mirrored(c, x, axis, (before, after), &mode)?;
    }
    one(x)
}

/// `x` with its own elements around it along a dimension. A negative number cuts.
fn mirrored(
    c: &mut Call<'_>,
    x: Ref,
    axis: usize,
    (before, after): (i64, i64),
    mode: &str,
) -> Result<Ref> {
    let size = c.shape_of(x)[axis] as i64;
    let (start, end) = ((-before).max(0), size - (-after).max(0));
    ensure(start <= end, "cuts more than the tensor has")?;
    let x = c.slice(x, axis, Range::new(start, end))?;
    let (before, after) = (before.max(0), after.max(0));
    if before == 0 && after == 0 {
        return Ok(x);
    }
    let size = c.shape_of(x)[axis] as i64;
    ensure(size > 0, "there is nothing to repeat")?;
    let (head, tail) = match mode {
        "edge" => {
            let mut parts = vec![];
            for (at, n) in [(0, before), (size - 1, after)] {
                let edge = c.slice(x, axis, Range::new(at, at + 1))?;
                let mut shape = c.shape_of(x);
                shape[axis] = n as u64;
                parts.push(c.expand(edge, &shape)?);
            }
            (parts[0], parts[1])
        }
        "reflect" => {
            ensure(
                before < size && after < size,
                "reflects more than the tensor has",
            )?;
            let head = c.slice(x, axis, Range::new(1, before + 1))?;
            let tail = c.slice(x, axis, Range::new(size - 1 - after, size - 1))?;
            (c.flip(head, &[axis])?, c.flip(tail, &[axis])?)
        }
        "wrap" => {
            ensure(
                before <= size && after <= size,
                "wraps more than the tensor has",
            )?;
            let head = c.slice(x, axis, Range::new(size - before, size))?;
            (head, c.slice(x, axis, Range::new(0, after))?)
        }
        other => return Err(format!("no padding {other}").into()),
    };
    let parts = [(before, head), (size, x), (after, tail)];
    let parts: Vec<Ref> = parts
        .into_iter()
        .filter(|(n, _)| *n > 0)
        .map(|(_, x)| x)
        .collect();
    c.cat(&parts, axis)
}

fn constant_of_shape(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let shape: Result<Vec<u64>> = inputs.ints(0)?.into_iter().map(size).collect();
    c.ignore(&["value"]);
    let (dtype, value) = match inputs.attribute {
        Some(numbers) => {
            let number = Numbers::uniform(numbers).ok_or("the value is no single number")?;
            (numbers.ty.dtype(), number)
        }
        None => (DType::F32, Scalar::Float(0.0)),
    };
    one(c.full(value, dtype, &shape?)?)
}

fn range(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let number = |i: usize| inputs.opt_number(i)?.ok_or(Error::Missing(i.to_string()));
    let (start, limit, delta) = (number(0)?, number(1)?, number(2)?);
    let dtype = inputs.get(0).map_or(DType::F32, |x| x.ty.dtype());
    if (limit.float() - start.float()) * delta.float() <= 0.0 {
        return one(c.full(Scalar::Int(0), dtype, &[0])?);
    }
    one(c.arange_to(dtype, start, limit, delta)?)
}

// --- blocks of images ---

/// Images of any rank 4 tensor: N, C, H, W, and the size of a block.
fn blocks(c: &mut Call<'_>, x: Ref) -> Result<([u64; 4], u64)> {
    let block = size(c.int("blocksize")?)?;
    let shape = <[u64; 4]>::try_from(c.shape_of(x));
    let shape = shape.map_err(|_| Error::from("is no batch of images"))?;
    ensure(block > 0, "a block has no elements")?;
    Ok((shape, block))
}

fn depth_to_space(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let rows_first = c.string_or("mode", "DCR")? == "DCR";
    let x = inputs.at(c, 0)?;
    let ([n, channels, h, w], b) = blocks(c, x)?;
    let area = b.checked_mul(b).ok_or("too large")?;
    ensure(channels.is_multiple_of(area), "the channels are no blocks")?;
    let depth = channels / area;
    let (shape, order) = if rows_first {
        ([n, b, b, depth, h, w], [0, 3, 4, 1, 5, 2])
    } else {
        ([n, depth, b, b, h, w], [0, 1, 4, 2, 5, 3])
    };
    let x = c.reshape(x, &shape)?;
    let x = c.permute(x, &order)?;
    one(c.reshape(x, &[n, depth, count(&[h, b])?, count(&[w, b])?])?)
}

fn space_to_depth(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let rows_first = c.string_or("mode", "DCR")? == "DCR";
    let x = inputs.at(c, 0)?;
    let ([n, channels, h, w], b) = blocks(c, x)?;
    let fits = h.is_multiple_of(b) && w.is_multiple_of(b);
    ensure(fits, "the images are no blocks")?;
    let x = c.reshape(x, &[n, channels, h / b, b, w / b, b])?;
    let order = if rows_first {
        [0, 3, 5, 1, 2, 4]
    } else {
        [0, 1, 3, 5, 2, 4]
    };
    let x = c.permute(x, &order)?;
    one(c.reshape(x, &[n, count(&[channels, b, b])?, h / b, w / b])?)
}

/// Cuts or pads dimensions around their middle.
fn center(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let shape = c.shape_of(x);
    let sizes = inputs.ints(1)?;
    let axes = match c.opt_ints("axes")? {
        Some(axes) => wrap_all(&axes, shape.len())?,
        None => (0..shape.len()).collect(),
    };
    ensure(
        axes.len() == sizes.len(),
        "the lists of numbers have different lengths",
    )?;
    let mut pads = vec![(0, 0); shape.len()];
    for (axis, size) in axes.into_iter().zip(sizes) {
        ensure(
            (0..LARGE).contains(&size),
            "a size is negative or too large",
        )?;
        let more = size - shape[axis] as i64;
        // Half of it, rounded down in size, is before.
        let before = if more < 0 { -((-more) / 2) } else { more / 2 };
        pads[axis] = (before, more - before);
    }
    let innermost: Vec<i64> = pads.iter().rev().flat_map(|&(a, b)| [a, b]).collect();
    one(c.pad(x, &innermost, Scalar::Int(0))?)
}

/// Reverses the start of each sequence, whose lengths are known.
fn reverse_sequence(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let rank = c.rank(x);
    let (time, batch) = (
        c.dim("time_axis", Some(0), rank)?,
        c.dim("batch_axis", Some(1), rank)?,
    );
    let (lengths, size) = (inputs.ints(1)?, c.shape_of(x)[time] as i64);
    ensure(time != batch, "time and batch are one dimension")?;
    ensure(
        lengths.len() as u64 == c.shape_of(x)[batch],
        "there is not one length for each sequence",
    )?;
    let mut parts = vec![];
    for (i, &length) in lengths.iter().enumerate() {
        ensure((0..=size).contains(&length), "a sequence is too long")?;
        let one = c.slice(x, batch, Range::new(i as i64, i as i64 + 1))?;
        let head = c.slice(one, time, Range::new(0, length))?;
        let tail = c.slice(one, time, Range::new(length, size))?;
        let head = c.flip(head, &[time])?;
        parts.push(c.cat(&[head, tail], time)?);
    }
    ensure(!parts.is_empty(), "there are no sequences")?;
    one(c.cat(&parts, batch)?)
}
