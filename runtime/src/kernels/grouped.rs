//! Products of groups of rows, such as the tokens of an expert with the expert's weights: a product
//! of [`super::product`] for each group.
//!
//! Threads share rows of the result, whose bits do not depend on each other.

use super::factor::Factor;
use super::index::{IndexOperand, Indices, in_range};
use super::product::{Start, Tiled};
use super::signature::{Checked, Signature, ensure, is_float};
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

/// The rows of each group.
fn groups(call: &Call<'_>) -> impl Iterator<Item = Result<Range<usize>, DataError>> {
    let (rows, ends) = (call.in_shape(0)[0], Indices::new(call, 2));
    let mut start = 0;
    (0..call.in_shape(2)[0]).map(move |g| {
        let end = in_range(ends.at(g), rows + 1)?.max(start);
        Ok(std::mem::replace(&mut start, end)..end)
    })
}

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
        let (from, to) = (ours.start - part.start, ours.end - part.start);
        let within = ours.start - result.start..ours.end - result.start;
        let factors = (&x[group.start * width..group.end * width], &w[of_w]);
        let y = Window::new(&mut y[from * n..to * n], within.len(), n);
        let (part, flags) = ((within, 0..n), (is_outer, tb));
        T::product_part(&tile, sizes, part, flags, factors, y, Start::Zero);
    }
    // No group has the rest.
    let grouped = end.clamp(part.start, part.end) - part.start;
    y[grouped * n..].fill(T::cast_f32(0.0));
    Ok(())
}
