//! Images sampled at given places.

use super::Family;
use ir::op::OpKind;
use ir::{Attr, DType};
use lower::{Call, Ref, Result, Results, Rounding, Scalar, count, ensure, one};

pub(super) const OPS: Family = &[
    ("grid_sampler", grid_sample),
    ("grid_sampler_2d", grid_sample),
    ("affine_grid_generator", affine_grid),
];

/// Places of the elements of a dimension, from -1 to 1: of the ends themselves, or of the outer
/// borders of the elements at the ends.
fn places(c: &mut Call<'_>, dtype: DType, n: u64, align: bool) -> Result<Ref> {
    let at = c.arange(DType::I64, n, Scalar::Int(0), Scalar::Int(1))?;
    let at = c.cast(at, dtype)?;
    let (n, half) = (n as f64, if align { 0.0 } else { 0.5 });
    let span = if align { (n - 1.0).max(1.0) } else { n };
    let at = c.scalar_step(OpKind::AddScalar, at, Scalar::Float(half))?;
    let at = c.scalar_step(OpKind::MulScalar, at, Scalar::Float(2.0 / span))?;
    // A single element is in the middle.
    let first = if align && n == 1.0 { 0.0 } else { -1.0 };
    c.scalar_step(OpKind::AddScalar, at, Scalar::Float(first))
}

/// The places at which an affine map of an image takes its elements: `[batch, height, width, 2]`.
fn affine_grid(c: &mut Call<'_>) -> Result<Results> {
    let (theta, size) = (c.tensor("theta")?, c.shape("size")?);
    let align = c.bool_or("align_corners", false)?;
    let &[batch, _, height, width] = &size[..] else {
        return Err("a grid of volumes".into());
    };
    let dtype = c.dtype(theta);
    let n = count(&[height, width])?;
    let x = places(c, dtype, width, align)?;
    let y = places(c, dtype, height, align)?;
    let mut columns = vec![];
    for (x, shape) in [(x, [1, width, 1]), (y, [height, 1, 1])] {
        let x = c.reshape(x, &shape)?;
        columns.push(c.expand(x, &[height, width, 1])?);
    }
    columns.push(c.full(Scalar::Int(1), dtype, &[height, width, 1])?);
    let base = c.cat(&columns, 2)?;
    let base = c.reshape(base, &[1, n, 3])?;
    let base = c.expand(base, &[batch, n, 3])?;
    let map = c.permute(theta, &[0, 2, 1])?;
    let grid = c.product(base, map)?;
    one(c.reshape(grid, &[batch, height, width, 2])?)
}

/// Elements of images `[batch, channels, height, width]` at the places of a grid `[batch, rows,
/// columns, 2]`: means of the four neighbours, or the nearest one. Beyond the border are zeros, or
/// the elements of the border.
fn grid_sample(c: &mut Call<'_>) -> Result<Results> {
    let (x, grid) = (c.tensor("input")?, c.tensor("grid")?);
    let (mode, padding) = (
        c.int_or("interpolation_mode", 0)?,
        c.int_or("padding_mode", 0)?,
    );
    let align = c.bool_or("align_corners", false)?;
    ensure((0..2).contains(&mode), "a cubic interpolation")?;
    ensure((0..2).contains(&padding), "places that are reflected")?;
    let (is_nearest, is_clamped) = (mode == 1, padding == 1);
    let (&[batch, channels, height, width], &[_, rows, columns, _]) =
        (&c.shape_of(x)[..], &c.shape_of(grid)[..])
    else {
        return Err("samples of volumes".into());
    };
    ensure(height > 0 && width > 0, "an image without elements")?;
    let n = count(&[rows, columns])?;
    let image = Image {
        x: c.reshape(x, &[batch, channels, count(&[height, width])?])?,
        batch,
        channels,
        width,
        n,
    };
    // The place in each dimension, in elements: the whole one below it, and the rest.
    let mut axes = vec![];
    for (d, size) in [(1, height), (0, width)] {
        let at = c.select(grid, 3, d)?;
        let at = c.reshape(at, &[batch, n])?;
        axes.push(Axis::of(c, at, size, align, is_clamped, is_nearest)?);
    }
    let mut sum: Option<Ref> = None;
    for (row, row_weight) in &axes[0].neighbours {
        for (column, column_weight) in &axes[1].neighbours {
            let weight = c.step(OpKind::Mul, &[], &[*row_weight, *column_weight])?;
            let part = image.at(c, *row, *column, weight)?;
            sum = Some(match sum {
                None => part,
                Some(sum) => c.step(OpKind::Add, &[], &[sum, part])?,
            });
        }
    }
    let y = sum.ok_or("has no neighbours")?;
    one(c.reshape(y, &[batch, channels, rows, columns])?)
}

/// The neighbours of places in one dimension, and their weights.
struct Axis {
    neighbours: Vec<(Ref, Ref)>,
}

impl Axis {
    fn of(
        c: &mut Call<'_>,
        place: Ref,
        size: u64,
        align: bool,
        is_clamped: bool,
        is_nearest: bool,
    ) -> Result<Axis> {
        let dtype = c.dtype(place);
        let (scale, shift) = match align {
            true => ((size - 1) as f64 / 2.0, (size - 1) as f64 / 2.0),
            false => (size as f64 / 2.0, (size as f64 - 1.0) / 2.0),
        };
        let at = c.scalar_step(OpKind::MulScalar, place, Scalar::Float(scale))?;
        let mut at = c.scalar_step(OpKind::AddScalar, at, Scalar::Float(shift))?;
        let last = Scalar::Int(size as i64 - 1);
        if is_clamped {
            at = c.clamp(at, Some(Scalar::Int(0)), Some(last), dtype)?;
        }
        let whole = match is_nearest {
            true => c.rounded_to_even(at)?,
            false => c.rounded(at, Rounding::Floor)?,
        };
        let whole = c.map(OpKind::Detach, whole)?;
        let mut neighbours = vec![];
        let rest = c.step(OpKind::Sub, &[], &[at, whole])?;
        let before = c.scalar_step(OpKind::RsubScalar, rest, Scalar::Int(1))?;
        let weights = if is_nearest {
            vec![None]
        } else {
            vec![Some(before), Some(rest)]
        };
        for (i, weight) in weights.into_iter().enumerate() {
            let index = c.cast(whole, DType::I64)?;
            let index = c.scalar_step(OpKind::AddScalar, index, Scalar::Int(i as i64))?;
            // Beyond the border, an element counts nothing, whichever it is.
            let starts = c.scalar_step(OpKind::GeScalar, index, Scalar::Int(0))?;
            let ends = c.scalar_step(OpKind::LeScalar, index, last)?;
            let inside = c.step(OpKind::LogicalAnd, &[], &[starts, ends])?;
            let index = c.clamp(index, Some(Scalar::Int(0)), Some(last), DType::I64)?;
            let weight = match weight {
                Some(weight) => c.masked(inside, weight)?,
                None => c.cast(inside, dtype)?,
            };
            neighbours.push((index, weight));
        }
        Ok(Axis { neighbours })
    }
}

/// Images whose elements are one dimension: `[batch, channels, elements]`.
struct Image {
    x: Ref,
    batch: u64,
    channels: u64,
    width: u64,
    /// The number of places in each image.
    n: u64,
}

impl Image {
    /// The elements at rows and columns, times their weights.
    fn at(&self, c: &mut Call<'_>, row: Ref, column: Ref, weight: Ref) -> Result<Ref> {
        let start = c.scalar_step(OpKind::MulScalar, row, Scalar::Int(self.width as i64))?;
        let index = c.step(OpKind::Add, &[], &[start, column])?;
        let index = c.reshape(index, &[self.batch, 1, self.n])?;
        let index = c.expand(index, &[self.batch, self.channels, self.n])?;
        let y = c.step(OpKind::Gather, &[("dim", Attr::Int(2))], &[self.x, index])?;
        let weight = c.reshape(weight, &[self.batch, 1, self.n])?;
        let weight = c.cast(weight, c.dtype(y))?;
        c.step(OpKind::Mul, &[], &[y, weight])
    }
}
