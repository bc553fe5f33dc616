//! Products of groups of rows, such as the tokens of an expert with the expert's weights: a product
//! of [`super::product`] for each group. Half-precision results are rounded from blocks of f32.
//!
//! Threads share rows of the result, whose bits do not depend on each other.

use super::index::{IndexOperand, Indices, in_range};
use super::math::Float;
use super::product::{Numbers, Start, Tile, Tiled, product_part};
use super::signature::{Checked, Signature, ensure, is_float, is_half};
use super::{Cut, DataError, ELEMENTS, Ran};
use crate::kernel::{Call, Window};
use artifact::DType;
use std::ops::Range;

// --- checks ---

/// Operand 2 has the ends of this many groups.
fn check_ends(s: &Signature<'_>, groups: Option<u64>) -> Result<u64, String> {
    s.expect_index(2)?;
    match s.shape(2) {
        &[ends] if groups.is_none_or(|groups| groups == ends) => Ok(ends),
        _ => Err("operand 2 should have an end for each group".into()),
    }
}
pub(super) fn check_matmul(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.expect_dtype(1, 0)?;
    let (&[rows, inner], &[groups, p, q]) = (s.shape(0), s.shape(1)) else {
        return Err("the factors should have ranks 2 and 3".into());
    };
    let (k, n) = if s.bool("tb")? { (q, p) } else { (p, q) };
    ensure(k == inner, || "inner dimensions differ".into())?;
    check_ends(s, Some(groups))?;
    s.results(&[(s.dtype(0), &[rows, n])])
}
pub(super) fn check_outer(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.expect_dtype(1, 0)?;
    let (&[rows, m], &[rows2, n]) = (s.shape(0), s.shape(1)) else {
        return Err("the factors should have rank 2".into());
    };
    ensure(rows == rows2, || "the numbers of rows differ".into())?;
    let groups = check_ends(s, None)?;
    s.results(&[(s.dtype(0), &[groups, m, n])])
}
/// A group may end behind the last row.
pub(super) fn ends(s: &Signature<'_>) -> Vec<IndexOperand> {
    vec![IndexOperand::new(2, s.shape(0)[0] + 1)]
}

// --- kernels ---

/// A type of factors.
trait Factor: Float<Wide: Tiled> {
    fn numbers(x: &[Self]) -> Numbers<'_, Self::Wide>;
}
impl Factor for f32 {
    fn numbers(x: &[f32]) -> Numbers<'_, f32> {
        Numbers::Wide(x)
    }
}
impl Factor for f64 {
    fn numbers(x: &[f64]) -> Numbers<'_, f64> {
        Numbers::Wide(x)
    }
}
impl Factor for half::bf16 {
    fn numbers(x: &[half::bf16]) -> Numbers<'_, f32> {
        Numbers::Bf16(x)
    }
}
impl Factor for half::f16 {
    fn numbers(x: &[half::f16]) -> Numbers<'_, f32> {
        Numbers::F16(x)
    }
}

/// The rows of each group.
fn groups(call: &Call<'_>) -> impl Iterator<Item = Result<Range<usize>, DataError>> {
    let (rows, ends) = (call.in_shape(0)[0], Indices::new(call, 2));
    let mut start = 0;
    (0..call.in_shape(2)[0]).map(move |g| {
        let end = in_range(ends.at(g), rows + 1)?.max(start);
        Ok(std::mem::replace(&mut start, end)..end)
    })
}

/// Rows and columns of a block of a half-precision result.
const BLOCK: (usize, usize) = (256, 512);
/// The smallest number of rows of a part: with fewer, packing of the right factor costs too much.
const LEAST_ROWS: usize = 64;

/// A part has at least about ten microseconds of work.
fn cut_of(rows: usize, work: usize, per_thread: usize) -> Cut {
    Cut {
        units: rows,
        align: 1,
        grain: LEAST_ROWS.max((ELEMENTS * 32).div_ceil(work.max(1))),
        per_thread,
    }
}
pub(super) fn cut_matmul(call: &Call<'_>) -> Cut {
    let (x, y) = (call.in_shape(0), call.out_shape(0));
    cut_of(y[0], x[1].saturating_mul(y[1]), 2)
}
/// Groups have different numbers of rows, so that parts are unequal.
pub(super) fn cut_outer(call: &Call<'_>) -> Cut {
    let (y, groups) = (call.out_shape(0), call.in_shape(2)[0]);
    let each = call.in_shape(0)[0] / groups.max(1);
    cut_of(groups * y[1], each.saturating_mul(y[2]), 4)
}

pub(super) fn prepare(call: &Call<'_>) -> Ran {
    match call.out_dtype(0) {
        DType::F64 => f64::with_room(|_| {}),
        dtype => {
            f32::with_room(|_| {});
            if is_half(dtype) {
                f32::with_space(BLOCK.0 * BLOCK.1, |_| {});
            }
        }
    }
    Ok(())
}

pub(super) fn products(call: &Call<'_>) -> Ran {
    match call.out_dtype(0) {
        DType::F32 => products_of::<f32>(call),
        DType::F64 => products_of::<f64>(call),
        DType::BF16 => products_of::<half::bf16>(call),
        DType::F16 => products_of::<half::f16>(call),
        other => Err(DataError::NoKernel(other)),
    }
}

/// Each row times the matrix of its group, or, if the result has a matrix for each group, the sums
/// of the outer products of rows.
fn products_of<T: Factor>(call: &Call<'_>) -> Ran {
    let (x, w, tile) = (call.input::<T>(0), call.input::<T>(1), T::Wide::tile());
    let (&[_, width], &[.., rows, n]) = (call.in_shape(0), call.out_shape(0)) else {
        return Ok(());
    };
    let is_outer = call.out_shape(0).len() == 3;
    let (units, tb) = match is_outer {
        true => (call.in_shape(2)[0] * rows, false),
        false => (rows, call.bool("tb")),
    };
    let part = call.part(units);
    let y = call.output::<T>(0);
    let mut end = 0;
    for (g, group) in groups(call).enumerate() {
        let group = group?;
        let (result, sizes, of_w) = match is_outer {
            true => (
                g * rows..(g + 1) * rows,
                (width, group.len(), n),
                group.start * n..group.end * n,
            ),
            false => (
                group.clone(),
                (group.len(), width, n),
                g * width * n..(g + 1) * width * n,
            ),
        };
        end = result.end;
        let ours = result.start.max(part.start)..result.end.min(part.end);
        if ours.is_empty() {
            continue;
        }
        let product = Product {
            tile: &tile,
            sizes,
            flags: (is_outer, tb),
            x: &x[group.start * width..group.end * width],
            w: &w[of_w],
        };
        let (from, to) = (ours.start - part.start, ours.end - part.start);
        let within = ours.start - result.start..ours.end - result.start;
        product.rows(within, &mut y[from * n..to * n]);
    }
    // No group has the rest.
    let grouped = end.clamp(part.start, part.end) - part.start;
    y[grouped * n..].fill(T::cast_f32(0.0));
    Ok(())
}

/// The product of a group.
struct Product<'a, T: Factor> {
    tile: &'a Tile<T::Wide>,
    sizes: (usize, usize, usize),
    flags: (bool, bool),
    x: &'a [T],
    w: &'a [T],
}

impl<T: Factor> Product<'_, T> {
    /// Some rows of the product.
    fn rows(&self, rows: Range<usize>, y: &mut [T]) {
        let n = self.sizes.2;
        if T::room(1) == 0 {
            // The type is its own wide type, and the room stays empty.
            return T::rounded(y, &mut [], |y| {
                self.block(rows.clone(), 0..n, Window::new(y, rows.len(), n));
            });
        }
        T::Wide::with_space(BLOCK.0 * BLOCK.1, |room| {
            for top in rows.clone().step_by(BLOCK.0) {
                let height = BLOCK.0.min(rows.end - top);
                for left in (0..n).step_by(BLOCK.1) {
                    let width = BLOCK.1.min(n - left);
                    let room = &mut room[..height * width];
                    let window = Window::new(&mut *room, height, width);
                    self.block(top..top + height, left..left + width, window);
                    for (i, room) in room.chunks_exact_mut(width).enumerate() {
                        let at = (top - rows.start + i) * n + left;
                        // The numbers are there already.
                        T::rounded(&mut y[at..at + width], room, |_| {});
                    }
                }
            }
        });
    }

    fn block(&self, rows: Range<usize>, columns: Range<usize>, y: Window<'_, T::Wide>) {
        let factors = (T::numbers(self.x), T::numbers(self.w));
        product_part(
            self.tile,
            self.sizes,
            (rows, columns),
            self.flags,
            factors,
            y,
            Start::Zero,
        );
    }
}
