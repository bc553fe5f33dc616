//! Views, parts, and tensors put together.

use super::inputs::{Inputs, Row, flag, op, op_with, wrap_all};
use crate::tensor::Numbers;
use ir::DType;
use lower::{
    Border, Call, Error, Range, Ref, Result, Results, Scalar, all, count, ensure, one, wrap,
};

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
        x = c.pad_with_itself(x, axis, (before, after), border(&mode)?)?;
    }
    one(x)
}

fn border(mode: &str) -> Result<Border> {
    match mode {
        "edge" => Ok(Border::Edge),
        "reflect" => Ok(Border::Reflect),
        "wrap" => Ok(Border::Wrap),
        other => Err(format!("no padding {other}").into()),
    }
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

fn block(c: &mut Call<'_>) -> Result<(u64, bool)> {
    let rows_first = c.string_or("mode", "DCR")? == "DCR";
    Ok((size(c.int("blocksize")?)?, rows_first))
}

fn depth_to_space(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (block, rows_first) = block(c)?;
    let x = inputs.at(c, 0)?;
    one(c.depth_to_space(x, block, rows_first)?)
}

fn space_to_depth(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (block, rows_first) = block(c)?;
    let x = inputs.at(c, 0)?;
    one(c.space_to_depth(x, block, rows_first)?)
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
