//! Images in another size.

use super::Family;
use lower::{Axis, Call, Kernel, LARGEST, Nearest, Ref, Result, Results, ensure, one};

pub(super) const OPS: Family = &[
    ("upsample_nearest1d", |c| nearest(c, 0.0)),
    ("upsample_nearest2d", |c| nearest(c, 0.0)),
    ("upsample_nearest3d", |c| nearest(c, 0.0)),
    ("_upsample_nearest_exact1d", |c| nearest(c, 0.5)),
    ("_upsample_nearest_exact2d", |c| nearest(c, 0.5)),
    ("upsample_linear1d", |c| interpolated(c, LINEAR)),
    ("upsample_bilinear2d", |c| interpolated(c, LINEAR)),
    ("upsample_trilinear3d", |c| interpolated(c, LINEAR)),
    ("upsample_bicubic2d", |c| interpolated(c, CUBIC)),
    ("_upsample_bilinear2d_aa", |c| interpolated(c, SMOOTH)),
];

const LINEAR: Kernel = Kernel {
    cubic: None,
    antialias: false,
    exclude_outside: false,
};
const CUBIC: Kernel = Kernel {
    cubic: Some(-0.75),
    ..LINEAR
};
/// torch leaves out what lies beside the image when it smooths.
const SMOOTH: Kernel = Kernel {
    antialias: true,
    exclude_outside: true,
    ..LINEAR
};

/// A dimension's size, that of the result, and the scale.
type Size = (u64, u64, f64);

/// The images, and their dimensions.
fn sizes(c: &mut Call<'_>) -> Result<(Ref, Vec<Size>)> {
    let x = match c.opt_tensor("input")? {
        Some(x) => x,
        None => c.tensor("self")?,
    };
    let (shape, wanted) = (c.shape_of(x), c.result()?.shape().to_vec());
    ensure(
        shape.len() == wanted.len() && shape.len() > 2,
        "has another rank",
    )?;
    c.ignore(&["output_size"]);
    let n = shape.len() - 2;
    let mut scales = vec![None; n];
    if let Some(list) = c.opt_floats("scale_factors")? {
        ensure(list.len() == n, "there is not one scale for each dimension")?;
        scales = list.into_iter().map(Some).collect();
    }
    let names: &[&str] = match n {
        1 => &["scales"],
        2 => &["scales_h", "scales_w"],
        _ => &["scales_d", "scales_h", "scales_w"],
    };
    for (scale, name) in scales.iter_mut().zip(names) {
        *scale = scale.or(c.opt_scalar(name)?.map(lower::Scalar::float));
    }
    let mut list = vec![];
    for (i, scale) in scales.into_iter().enumerate() {
        let (size, wanted) = (shape[2 + i], wanted[2 + i]);
        ensure(
            size > 0 && (1.0..=LARGEST).contains(&(wanted as f64)),
            "a size is 0 or too large",
        )?;
        let scale = scale.filter(|&scale| scale > 0.0);
        list.push((size, wanted, scale.unwrap_or(wanted as f64 / size as f64)));
    }
    Ok((x, list))
}

/// `shift` is the place in an element that counts.
fn nearest(c: &mut Call<'_>, shift: f64) -> Result<Results> {
    let (mut x, sizes) = sizes(c)?;
    for (i, (size, wanted, scale)) in sizes.into_iter().enumerate() {
        let axis = Axis {
            dim: 2 + i,
            size,
            wanted,
            scale,
            start: shift / scale,
            step: scale.recip(),
        };
        if size != wanted || scale != 1.0 {
            x = c.nearest(x, axis, Nearest::Floor)?;
        }
    }
    one(x)
}

fn interpolated(c: &mut Call<'_>, kernel: Kernel) -> Result<Results> {
    let corners = c.bool_or("align_corners", false)?;
    let (mut x, sizes) = sizes(c)?;
    let dtype = c.dtype(x);
    for (i, (size, wanted, scale)) in sizes.into_iter().enumerate() {
        let (start, step) = match (corners, wanted) {
            (true, 1) => (0.0, 0.0),
            (true, _) => (0.0, (size as f64 - 1.0) / (wanted as f64 - 1.0)),
            (false, _) => (0.5 / scale - 0.5, scale.recip()),
        };
        let axis = Axis {
            dim: 2 + i,
            size,
            wanted,
            scale,
            start,
            step,
        };
        if !axis.stays() {
            x = c.interpolated(x, axis, kernel, false)?;
        }
    }
    one(c.cast(x, dtype)?)
}
