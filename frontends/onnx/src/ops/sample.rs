//! Images read at places that a grid gives.

use super::inputs::{Inputs, Row, flag, op, op_with};
use ir::DType;
use ir::op::OpKind;
use lower::{Call, Indexed, Ref, Result, Results, Rounding, Scalar, ensure, one};

pub(super) const OPS: &[Row] = &[
    op("GridSample", grid_sample),
    op_with("AffineGrid", &[1], affine_grid),
];

/// What lies beside an image.
#[derive(Clone, Copy, PartialEq)]
enum Beside {
    Zeros,
    Border,
    Reflection,
}

/// One dimension of an image: its size, and the borders at which it is reflected.
#[derive(Clone, Copy)]
struct Side {
    size: f64,
    low: f64,
    high: f64,
}

/// The elements along one dimension that a result reads, each with its weight.
type Taps = Vec<(Ref, Ref)>;

fn number(x: f64) -> Scalar {
    Scalar::Float(x)
}

fn grid_sample(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let corners = flag(c, "align_corners", false)?;
    let mode = c.string_or("mode", "linear")?;
    let beside = match c.string_or("padding_mode", "zeros")?.as_str() {
        "zeros" => Beside::Zeros,
        "border" => Beside::Border,
        "reflection" => Beside::Reflection,
        other => return Err(format!("no padding {other}").into()),
    };
    let (x, grid) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    let (shape, places) = (c.shape_of(x), c.shape_of(grid));
    let n = shape.len().saturating_sub(2);
    let fits = (1..=3).contains(&n) && places.len() == n + 2 && places[n + 1] == n as u64;
    ensure(fits, "the grid does not fit the images")?;
    let wide = if c.dtype(grid) == DType::F64 {
        DType::F64
    } else {
        DType::F32
    };
    let grid = c.cast(grid, wide)?;
    let mut dims: Vec<Taps> = vec![];
    for i in 0..n {
        // The grid names the last dimension first.
        let at = c.select(grid, n + 1, (n - 1 - i) as i64)?;
        let size = shape[2 + i] as f64;
        let (low, high) = if corners {
            (0.0, size - 1.0)
        } else {
            (-0.5, size - 0.5)
        };
        let side = Side { size, low, high };
        let at = c.scalar_step(OpKind::AddScalar, at, number(1.0))?;
        let at = c.scalar_step(OpKind::MulScalar, at, number((high - low) / 2.0))?;
        let at = c.scalar_step(OpKind::AddScalar, at, number(low))?;
        dims.push(taps(c, at, side, &mode, beside)?);
    }
    let batch = c.arange(DType::I64, shape[0], Scalar::Int(0), Scalar::Int(1))?;
    let mut lead = vec![1; n + 1];
    lead[0] = shape[0];
    let batch = c.reshape(batch, &lead)?;
    let y = mixed(c, x, &dims, &[Some(batch), None], None)?;
    let y = y.ok_or("the images have no elements")?;
    let order: Vec<usize> = [0, n + 1].into_iter().chain(1..=n).collect();
    one(c.permute(y, &order)?)
}

/// The sum over all combinations of taps of the remaining dimensions; `index` and `weight` are of
/// those before.
fn mixed(
    c: &mut Call<'_>,
    x: Ref,
    dims: &[Taps],
    index: &[Option<Ref>],
    weight: Option<Ref>,
) -> Result<Option<Ref>> {
    let Some((taps, rest)) = dims.split_first() else {
        let y = Indexed::new(c, x, index)?.get(c)?;
        let Some(weight) = weight else {
            return Ok(Some(y));
        };
        let shape = [&c.shape_of(weight)[..], &[1]].concat();
        let weight = c.reshape(weight, &shape)?;
        let weight = c.cast(weight, c.dtype(x))?;
        return c.step(OpKind::Mul, &[], &[y, weight]).map(Some);
    };
    let mut sum = None;
    for &(at, own) in taps {
        let weight = match weight {
            Some(weight) => c.step(OpKind::Mul, &[], &[weight, own])?,
            None => own,
        };
        let index = [index, &[Some(at)]].concat();
        let part = mixed(c, x, rest, &index, Some(weight))?;
        sum = match (sum, part) {
            (Some(sum), Some(part)) => Some(c.step(OpKind::Add, &[], &[sum, part])?),
            (sum, part) => sum.or(part),
        };
    }
    Ok(sum)
}

/// The elements that are read for places along one dimension.
fn taps(c: &mut Call<'_>, at: Ref, side: Side, mode: &str, beside: Beside) -> Result<Taps> {
    let mut at = at;
    if mode == "nearest" {
        at = c.rounded_to_even(at)?;
    }
    at = match beside {
        Beside::Zeros => at,
        Beside::Border => clamped(c, at, side)?,
        Beside::Reflection => reflected(c, at, side)?,
    };
    let weights: fn(&mut Call<'_>, Ref) -> Result<Vec<Ref>> = match mode {
        "nearest" => |c, x| {
            let shape = c.shape_of(x);
            Ok(vec![c.full(Scalar::Int(1), c.dtype(x), &shape)?])
        },
        "linear" | "bilinear" => |c, x| {
            let near = c.scalar_step(OpKind::RsubScalar, x, number(1.0))?;
            Ok(vec![near, x])
        },
        "cubic" | "bicubic" => cubic,
        other => return Err(format!("no interpolation {other}").into()),
    };
    let floor = c.rounded(at, Rounding::Floor)?;
    let fraction = c.step(OpKind::Sub, &[], &[at, floor])?;
    let weights = weights(c, fraction)?;
    let first = if weights.len() == 4 { -1.0 } else { 0.0 };
    let mut taps = vec![];
    for (i, mut weight) in weights.into_iter().enumerate() {
        let mut element = floor;
        if first + i as f64 != 0.0 {
            element = c.scalar_step(OpKind::AddScalar, floor, number(first + i as f64))?;
        }
        match beside {
            Beside::Zeros => {
                let above = c.scalar_step(OpKind::GeScalar, element, number(0.0))?;
                let below = c.scalar_step(OpKind::LtScalar, element, number(side.size))?;
                let inside = c.step(OpKind::LogicalAnd, &[], &[above, below])?;
                weight = c.masked(inside, weight)?;
            }
            Beside::Border => (),
            Beside::Reflection => element = reflected(c, element, side)?,
        }
        let element = clamped(c, element, side)?;
        taps.push((c.cast(element, DType::I64)?, weight));
    }
    Ok(taps)
}

fn clamped(c: &mut Call<'_>, x: Ref, side: Side) -> Result<Ref> {
    let dtype = c.dtype(x);
    let last = number((side.size - 1.0).max(0.0));
    c.clamp(x, Some(number(0.0)), Some(last), dtype)
}

/// A place beyond a border, seen in a mirror there, as often as needed.
fn reflected(c: &mut Call<'_>, x: Ref, side: Side) -> Result<Ref> {
    let span = side.high - side.low;
    if span <= 0.0 {
        return c.scalar_step(OpKind::MulScalar, x, number(0.0));
    }
    // The distance from the lower border, in a wave of two spans.
    let far = c.scalar_step(OpKind::AddScalar, x, number(-side.low))?;
    let far = c.map(OpKind::Abs, far)?;
    let turns = c.scalar_step(OpKind::DivScalar, far, number(2.0 * span))?;
    let turns = c.rounded(turns, Rounding::Floor)?;
    let turns = c.scalar_step(OpKind::MulScalar, turns, number(2.0 * span))?;
    let rest = c.step(OpKind::Sub, &[], &[far, turns])?;
    let back = c.scalar_step(OpKind::RsubScalar, rest, number(2.0 * span))?;
    let near = c.step(OpKind::Minimum, &[], &[rest, back])?;
    c.scalar_step(OpKind::AddScalar, near, number(side.low))
}

/// Keys' weights of the four elements beside a place, with `a = -0.75`; `x` is its distance from
/// the second.
fn cubic(c: &mut Call<'_>, x: Ref) -> Result<Vec<Ref>> {
    const A: f64 = -0.75;
    let rest = c.scalar_step(OpKind::RsubScalar, x, number(1.0))?;
    let outer = c.scalar_step(OpKind::AddScalar, x, number(1.0))?;
    let last = c.scalar_step(OpKind::RsubScalar, x, number(2.0))?;
    let far = [A, -5.0 * A, 8.0 * A, -4.0 * A];
    let near = [A + 2.0, -(A + 3.0), 0.0, 1.0];
    let list = [(outer, far), (x, near), (rest, near), (last, far)];
    list.into_iter()
        .map(|(x, factors)| c.cubic_polynomial(x, factors))
        .collect()
}

/// The places of all elements of images of this size, moved by a matrix for each image.
fn affine_grid(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let corners = flag(c, "align_corners", false)?;
    let matrices = inputs.at(c, 0)?;
    let sizes = inputs.ints(1)?;
    let sizes: Option<Vec<u64>> = sizes.iter().map(|&d| u64::try_from(d).ok()).collect();
    let sizes = sizes.ok_or("a size is negative")?;
    let [batch, _, sizes @ ..] = &sizes[..] else {
        return Err("the size has no images".into());
    };
    let n = sizes.len();
    let (dtype, one_each) = (c.dtype(matrices), Scalar::Int(1));
    let mut parts = vec![];
    // The last dimension comes first.
    for (i, &size) in sizes.iter().enumerate().rev() {
        let n_steps = if corners {
            size as f64 - 1.0
        } else {
            size as f64
        };
        let step = if n_steps > 0.0 { 2.0 / n_steps } else { 0.0 };
        let start = if corners { -1.0 } else { step / 2.0 - 1.0 };
        let at = c.arange(dtype, size, number(start), number(step))?;
        let mut beside = vec![1; n];
        beside[i] = size;
        let at = c.reshape(at, &beside)?;
        parts.push(c.expand(at, sizes)?);
    }
    parts.push(c.full(one_each, dtype, sizes)?);
    let places = c.stack(parts, n, dtype)?;
    let count = lower::count(sizes)?;
    let places = c.reshape(places, &[count, n as u64 + 1])?;
    let matrices = c.permute(matrices, &[0, 2, 1])?;
    let y = c.general_product(places, matrices)?;
    one(c.reshape(y, &[&[*batch], sizes, &[n as u64]].concat())?)
}
