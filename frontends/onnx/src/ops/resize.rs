//! Images in another size. Each dimension is resized on its own; result `i` lies at the place
//! `start + i step` of the operand.

use super::inputs::{Inputs, Row, flag, op_with, wrap_all};
use ir::DType;
use ir::op::OpKind;
use lower::{Call, Error, Indexed, Range, Ref, Result, Results, Rounding, Scalar, ensure, one};

pub(super) const OPS: &[Row] = &[op_with("Resize", &[1, 2, 3], resize)];

/// The largest size of a dimension that is made: the places of all elements are compared.
const LARGEST: f64 = 65536.0;

/// One dimension: its size, the size of the result, and the place of the results.
#[derive(Clone, Copy)]
struct Axis {
    dim: usize,
    size: u64,
    wanted: u64,
    start: f64,
    step: f64,
}

fn resize(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    // A region is only for cutting out, which is refused below.
    inputs.get(1);
    c.ignore(&["cubic_coeff_a", "exclude_outside", "extrapolation_value"]);
    ensure(!flag(c, "antialias", false)?, "antialiasing")?;
    let mode = c.string_or("mode", "nearest")?;
    let transformation = c.string_or("coordinate_transformation_mode", "half_pixel")?;
    let rounding = c.string_or("nearest_mode", "round_prefer_floor")?;
    let x = inputs.at(c, 0)?;
    let axes = axes(c, inputs, x, &transformation)?;
    match mode.as_str() {
        "nearest" => one(each(c, x, &axes, &|c, x, axis| {
            nearest(c, x, axis, &rounding)
        })?),
        "linear" => one(each(c, x, &axes, &linear)?),
        other => Err(format!("no interpolation {other}").into()),
    }
}

/// The dimensions of a `Resize`, by scales or by sizes.
fn axes(c: &mut Call<'_>, inputs: &Inputs<'_>, x: Ref, transformation: &str) -> Result<Vec<Axis>> {
    let policy = c.string_or("keep_aspect_ratio_policy", "stretch")?;
    let shape = c.shape_of(x);
    let dims = match c.opt_ints("axes")? {
        Some(axes) => wrap_all(&axes, shape.len())?,
        None => (0..shape.len()).collect(),
    };
    let given = |i: usize| Ok::<_, Error>(inputs.known(i)?.filter(|list| list.ty.numel() > 0));
    let (scales, sizes) = (given(2)?, given(3)?);
    let list = scales
        .or(sizes)
        .ok_or("there are neither scales nor sizes")?
        .to_floats();
    ensure(
        list.len() == dims.len(),
        "there is not one number for each dimension",
    )?;
    let sized = dims.iter().map(|&dim| (dim, shape[dim]));
    if scales.is_some() {
        let axis = |(place, scale)| axis(place, None, scale, transformation);
        return sized.zip(list).map(axis).collect();
    }
    let ratios = || {
        sized
            .clone()
            .zip(&list)
            .map(|((_, size), wanted)| wanted / size.max(1) as f64)
    };
    let common = match policy.as_str() {
        "stretch" => None,
        "not_larger" => ratios().reduce(f64::min),
        "not_smaller" => ratios().reduce(f64::max),
        other => return Err(format!("no policy {other}").into()),
    };
    let mut axes = vec![];
    for ((place, wanted), ratio) in sized.clone().zip(&list).zip(ratios()) {
        let (scale, wanted) = match common {
            Some(scale) => (scale, (scale * place.1 as f64 + 0.5).floor()),
            None => (ratio, *wanted),
        };
        axes.push(axis(place, Some(wanted), scale, transformation)?);
    }
    Ok(axes)
}

/// A dimension with its places. Without a wanted size, the scale gives it.
fn axis(
    (dim, size): (usize, u64),
    wanted: Option<f64>,
    scale: f64,
    transformation: &str,
) -> Result<Axis> {
    let n = size as f64;
    let wanted = wanted.unwrap_or((n * scale).floor());
    let is_possible = scale > 0.0 && scale.is_finite() && (0.0..=LARGEST).contains(&wanted);
    ensure(is_possible && size > 0, "a size is negative or too large")?;
    let whole = scale * n;
    let half = (0.5 / scale - 0.5, scale.recip());
    let (start, step) = match transformation {
        "asymmetric" => (0.0, scale.recip()),
        "half_pixel" => half,
        "pytorch_half_pixel" if whole == 1.0 => (-0.5, 0.0),
        "pytorch_half_pixel" => half,
        "half_pixel_symmetric" => (n / 2.0 * (1.0 - wanted / whole) + half.0, half.1),
        "align_corners" if whole == 1.0 => (0.0, 0.0),
        "align_corners" => (0.0, (n - 1.0) / (whole - 1.0)),
        other => return Err(format!("no places by {other}").into()),
    };
    Ok(Axis {
        dim,
        size,
        wanted: wanted as u64,
        start,
        step,
    })
}

/// Resizes the dimensions one after the other.
fn each(
    c: &mut Call<'_>,
    x: Ref,
    axes: &[Axis],
    resize: &dyn Fn(&mut Call<'_>, Ref, Axis) -> Result<Ref>,
) -> Result<Ref> {
    let mut x = x;
    for axis in axes {
        let stays = axis.size == axis.wanted && (axis.start, axis.step) == (0.0, 1.0);
        if !stays {
            x = resize(c, x, *axis)?;
        }
    }
    Ok(x)
}

/// The elements nearest to the places.
fn nearest(c: &mut Call<'_>, x: Ref, axis: Axis, rounding: &str) -> Result<Ref> {
    let (shift, how) = match rounding {
        "round_prefer_floor" => (-0.5, Rounding::Ceil),
        "round_prefer_ceil" => (0.5, Rounding::Floor),
        "floor" => (0.0, Rounding::Floor),
        "ceil" => (0.0, Rounding::Ceil),
        other => return Err(format!("no rounding {other}").into()),
    };
    let last = axis.size as f64 - 1.0;
    let place = |i: u64| {
        let place = axis.start + shift + i as f64 * axis.step;
        let whole = if how == Rounding::Floor {
            place.floor()
        } else {
            place.ceil()
        };
        whole.clamp(0.0, last) as u64
    };
    // Each element several times, or each few elements one.
    let times = axis.wanted / axis.size;
    if times * axis.size == axis.wanted && (0..axis.wanted).all(|i| place(i) == i / times.max(1)) {
        return repeated(c, x, axis, times);
    }
    let step = axis.size / axis.wanted.max(1);
    let first = place(0);
    if step > 0 && (0..axis.wanted).all(|i| place(i) == first + i * step) {
        let range = Range {
            start: Some(first as i64),
            end: Some((first + axis.wanted.saturating_sub(1) * step + 1) as i64),
            step: step as i64,
        };
        return c.slice(x, axis.dim, range);
    }
    let at = places(c, axis, shift)?;
    let at = c.rounded(at, how)?;
    let (least, most) = (Scalar::Float(0.0), Scalar::Float(last));
    let at = c.clamp(at, Some(least), Some(most), DType::F64)?;
    let at = c.cast(at, DType::I64)?;
    Indexed::along(c, x, axis.dim, at)?.get(c)
}

/// The places as numbers, shifted.
fn places(c: &mut Call<'_>, axis: Axis, shift: f64) -> Result<Ref> {
    let start = Scalar::Float(axis.start + shift);
    c.arange(DType::F64, axis.wanted, start, Scalar::Float(axis.step))
}

/// Each element of a dimension several times.
fn repeated(c: &mut Call<'_>, x: Ref, axis: Axis, times: u64) -> Result<Ref> {
    let mut shape = c.shape_of(x);
    let (before, after) = (shape[..=axis.dim].to_vec(), shape[axis.dim + 1..].to_vec());
    let x = c.reshape(x, &[&before[..], &[1], &after].concat())?;
    let x = c.expand(x, &[&before[..], &[times], &after].concat())?;
    shape[axis.dim] = axis.wanted;
    c.reshape(x, &shape)
}

/// Means of the two elements beside each place, as a product with the matrix of weights
/// `max(0, 1 - |place - element|)`.
fn linear(c: &mut Call<'_>, x: Ref, axis: Axis) -> Result<Ref> {
    ensure(c.dtype(x).is_float(), "an interpolation of integers")?;
    let at = places(c, axis, 0.0)?;
    let last = Scalar::Float(axis.size as f64 - 1.0);
    let at = c.clamp(at, Some(Scalar::Float(0.0)), Some(last), DType::F64)?;
    let element = c.arange(DType::F64, axis.size, Scalar::Int(0), Scalar::Int(1))?;
    let element = c.reshape(element, &[axis.size, 1])?;
    let distance = c.step(OpKind::Sub, &[], &[at, element])?;
    let distance = c.map(OpKind::Abs, distance)?;
    let weight = c.scalar_step(OpKind::RsubScalar, distance, Scalar::Float(1.0))?;
    let weight = c.map(OpKind::Relu, weight)?;
    let weight = c.cast(weight, c.dtype(x))?;
    // The dimension becomes the last one.
    let rank = c.rank(x);
    let others = (0..rank).filter(|&d| d != axis.dim);
    let order: Vec<usize> = others.chain([axis.dim]).collect();
    let mut back: Vec<usize> = (0..rank - 1).collect();
    back.insert(axis.dim, rank - 1);
    let x = c.permute(x, &order)?;
    let y = c.general_product(x, weight)?;
    c.permute(y, &back)
}
