//! Images in another size. Each dimension is resized on its own; result `i` lies at the place
//! `start + i step` of the operand.

use super::inputs::{Inputs, Row, flag, op_with, wrap_all};
use super::sample::polynomial;
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
    scale: f64,
    start: f64,
    step: f64,
}

/// How places follow from the results.
struct Places {
    transformation: String,
    /// For each dimension that is resized, the part of the operand that is cut out.
    region: Option<Vec<f64>>,
}

/// How an element's weight follows from its distance.
#[derive(Clone, Copy)]
struct Kernel {
    /// Keys' factor, for the interpolation between four elements instead of two.
    cubic: Option<f64>,
    /// The kernel of a smaller image is as wide as its elements.
    antialias: bool,
    /// Elements beside the image have no weight. Else they are the nearest in it.
    exclude_outside: bool,
}

fn resize(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let mode = c.string_or("mode", "nearest")?;
    let rounding = c.string_or("nearest_mode", "round_prefer_floor")?;
    let factor = c.float_or("cubic_coeff_a", -0.75)?;
    let beside = c.float_or("extrapolation_value", 0.0)?;
    let kernel = Kernel {
        cubic: (mode == "cubic").then_some(factor),
        antialias: flag(c, "antialias", false)?,
        exclude_outside: flag(c, "exclude_outside", false)?,
    };
    let places = Places {
        transformation: c.string_or("coordinate_transformation_mode", "half_pixel")?,
        region: inputs.known(1)?.map(|region| region.to_floats()),
    };
    let is_cut = places.transformation == "tf_crop_and_resize";
    let x = inputs.at(c, 0)?;
    let axes = axes(c, inputs, x, &places)?;
    let mut y = x;
    for axis in axes {
        let stays = axis.size == axis.wanted && (axis.start, axis.step) == (0.0, 1.0);
        if stays {
            continue;
        }
        y = match mode.as_str() {
            "nearest" => {
                ensure(!kernel.antialias, "antialiasing of the nearest elements")?;
                nearest(c, y, axis, &rounding)?
            }
            "linear" | "cubic" => mixed(c, y, axis, kernel, is_cut)?,
            other => return Err(format!("no interpolation {other}").into()),
        };
        if is_cut {
            y = extrapolated(c, y, axis, beside)?;
        }
    }
    one(y)
}

/// `y` with a number where the place is beside the operand.
fn extrapolated(c: &mut Call<'_>, y: Ref, axis: Axis, value: f64) -> Result<Ref> {
    let at = places(c, axis, 0.0)?;
    let above = c.scalar_step(OpKind::GeScalar, at, Scalar::Float(0.0))?;
    let last = Scalar::Float(axis.size as f64 - 1.0);
    let below = c.scalar_step(OpKind::LeScalar, at, last)?;
    let inside = c.step(OpKind::LogicalAnd, &[], &[above, below])?;
    let mut beside = vec![1; c.rank(y)];
    beside[axis.dim] = axis.wanted;
    let inside = c.reshape(inside, &beside)?;
    let value = c.full(Scalar::Float(value), c.dtype(y), &[])?;
    c.step(OpKind::Where, &[], &[inside, y, value])
}

/// The dimensions of a `Resize`, by scales or by sizes.
fn axes(c: &mut Call<'_>, inputs: &Inputs<'_>, x: Ref, places: &Places) -> Result<Vec<Axis>> {
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
    let n = dims.len();
    let region = |i: usize| match &places.region {
        Some(region) if region.len() == 2 * n => (region[i], region[n + i]),
        _ => (0.0, 1.0),
    };
    let place = |(i, &dim): (usize, &usize)| (dim, shape[dim], region(i));
    let sized = dims.iter().enumerate().map(place);
    if scales.is_some() {
        let axis = |(place, scale)| axis(place, None, scale, &places.transformation);
        return sized.zip(list).map(axis).collect();
    }
    let ratios = || {
        sized
            .clone()
            .zip(&list)
            .map(|((_, size, _), wanted)| wanted / size.max(1) as f64)
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
        axes.push(axis(place, Some(wanted), scale, &places.transformation)?);
    }
    Ok(axes)
}

/// A dimension with its places. Without a wanted size, the scale gives it.
fn axis(
    (dim, size, region): (usize, u64, (f64, f64)),
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
        "tf_crop_and_resize" => {
            let (first, span) = (region.0 * (n - 1.0), (region.1 - region.0) * (n - 1.0));
            if whole == 1.0 {
                (first + span / 2.0, 0.0)
            } else {
                (first, span / (whole - 1.0))
            }
        }
        "align_corners" if whole == 1.0 => (0.0, 0.0),
        "align_corners" => (0.0, (n - 1.0) / (whole - 1.0)),
        other => return Err(format!("no places by {other}").into()),
    };
    Ok(Axis {
        dim,
        size,
        wanted: wanted as u64,
        scale,
        start,
        step,
    })
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

/// Means of the elements beside each place, as a product with the matrix of their weights.
fn mixed(c: &mut Call<'_>, x: Ref, axis: Axis, kernel: Kernel, is_cut: bool) -> Result<Ref> {
    ensure(c.dtype(x).is_float(), "an interpolation of integers")?;
    let mut at = places(c, axis, 0.0)?;
    let last = Scalar::Float(axis.size as f64 - 1.0);
    let shrinks = kernel.antialias && axis.scale < 1.0;
    let narrow = if shrinks { axis.scale } else { 1.0 };
    // Between two elements, a place beside the image has the weights of the nearest in it.
    let is_plain = kernel.cubic.is_none() && narrow == 1.0 && !kernel.exclude_outside;
    if is_plain || is_cut {
        at = c.clamp(at, Some(Scalar::Float(0.0)), Some(last), DType::F64)?;
    }
    let radius = if kernel.cubic.is_some() { 2.0 } else { 1.0 };
    let beside = match is_plain || kernel.exclude_outside {
        true => 0,
        false => (radius / narrow).ceil().min(LARGEST) as u64 + 1,
    };
    let n = axis.size + 2 * beside;
    let element = c.arange(DType::F64, n, Scalar::Int(-(beside as i64)), Scalar::Int(1))?;
    let element = c.reshape(element, &[n, 1])?;
    let distance = c.step(OpKind::Sub, &[], &[at, element])?;
    let mut distance = c.map(OpKind::Abs, distance)?;
    if narrow != 1.0 {
        distance = c.scalar_step(OpKind::MulScalar, distance, Scalar::Float(narrow))?;
    }
    let mut weight = match kernel.cubic {
        Some(factor) => cubic(c, distance, factor)?,
        None => {
            let weight = c.scalar_step(OpKind::RsubScalar, distance, Scalar::Float(1.0))?;
            c.map(OpKind::Relu, weight)?
        }
    };
    if narrow != 1.0 || kernel.exclude_outside {
        let sum = c.reduce(OpKind::Sum, weight, &[0], true)?;
        weight = c.step(OpKind::Div, &[], &[weight, sum])?;
    }
    if beside > 0 {
        weight = folded(c, weight, axis.size, beside)?;
    }
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

/// Keys' kernel at a distance.
fn cubic(c: &mut Call<'_>, distance: Ref, a: f64) -> Result<Ref> {
    let near = polynomial(c, distance, [a + 2.0, -(a + 3.0), 0.0, 1.0])?;
    let far = polynomial(c, distance, [a, -5.0 * a, 8.0 * a, -4.0 * a])?;
    let is_near = c.scalar_step(OpKind::LeScalar, distance, Scalar::Float(1.0))?;
    let is_seen = c.scalar_step(OpKind::LtScalar, distance, Scalar::Float(2.0))?;
    let far = c.masked(is_seen, far)?;
    c.step(OpKind::Where, &[], &[is_near, near, far])
}

/// The weights of `beside` rows before and after the image, added to those of its first and last.
fn folded(c: &mut Call<'_>, weight: Ref, size: u64, beside: u64) -> Result<Ref> {
    let (size, beside) = (size as i64, beside as i64);
    if size == 1 {
        return c.reduce(OpKind::Sum, weight, &[0], true);
    }
    let first = c.slice(weight, 0, Range::new(0, beside + 1))?;
    let first = c.reduce(OpKind::Sum, first, &[0], true)?;
    let end = beside + size;
    let inner = c.slice(weight, 0, Range::new(beside + 1, end - 1))?;
    let last = c.slice(weight, 0, Range::new(end - 1, end + beside))?;
    let last = c.reduce(OpKind::Sum, last, &[0], true)?;
    if size == 2 {
        return c.cat(&[first, last], 0);
    }
    c.cat(&[first, inner, last], 0)
}
