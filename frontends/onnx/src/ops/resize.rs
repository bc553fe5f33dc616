//! Images in another size. Each dimension is resized on its own; result `i` lies at the place
//! `start + i step` of the operand.

use super::inputs::{Inputs, Row, flag, op_with, wrap_all};
use ir::op::OpKind;
use lower::{
    Axis, Call, Error, Kernel, LARGEST, Nearest, Ref, Result, Results, Scalar, ensure, one,
};

pub(super) const OPS: &[Row] = &[op_with("Resize", &[1, 2, 3], resize)];

/// How places follow from the results.
struct Places {
    transformation: String,
    /// For each dimension that is resized, the part of the operand that is cut out.
    region: Option<Vec<f64>>,
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
        if axis.stays() {
            continue;
        }
        y = match mode.as_str() {
            "nearest" => {
                ensure(!kernel.antialias, "antialiasing of the nearest elements")?;
                c.nearest(y, axis, nearest(&rounding)?)?
            }
            "linear" | "cubic" => c.interpolated(y, axis, kernel, is_cut)?,
            other => return Err(format!("no interpolation {other}").into()),
        };
        if is_cut {
            y = extrapolated(c, y, axis, beside)?;
        }
    }
    one(y)
}

fn nearest(rounding: &str) -> Result<Nearest> {
    match rounding {
        "round_prefer_floor" => Ok(Nearest::PreferFloor),
        "round_prefer_ceil" => Ok(Nearest::PreferCeil),
        "floor" => Ok(Nearest::Floor),
        "ceil" => Ok(Nearest::Ceil),
        other => Err(format!("no rounding {other}").into()),
    }
}

/// `y` with a number where the place is beside the operand.
fn extrapolated(c: &mut Call<'_>, y: Ref, axis: Axis, value: f64) -> Result<Ref> {
    let at = c.places(axis, 0.0)?;
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
