//! Products of few rows and a right factor that is read transposed, as of a linear layer for a small
//! batch. Each number is the dot product of two rows, which are read in place: packing the right
//! factor would take longer than multiplying it.

use super::Start;
use crate::kernel::Window;
use crate::kernels::vectors::Vectors;
use pulp::{Arch, Simd, WithSimd};
use std::ops::Range;

/// Packing is faster for more rows, and for short ones. Measured on Zen 5.
pub(super) fn are_faster(rows: usize, k: usize) -> bool {
    rows <= 8 || rows <= 16 && 512 <= k
}

/// Rows and columns of a tile. Its sums are registers.
const ROWS: usize = 4;
const COLUMNS: usize = 2;

/// Some rows and columns of the product of rows of `k` numbers: see [`super::product_part`].
pub(super) fn product_part<R: Vectors>(
    k: usize,
    (rows, columns): (Range<usize>, Range<usize>),
    (x, w): (&[R], &[R]),
    y: &mut Window<'_, R>,
    start: Start<'_, R>,
) {
    if let Start::From(f) = start {
        (0..y.rows()).for_each(|i| f(rows.start + i, columns.start, y.row(i)));
    }
    Arch::new().dispatch(Dots {
        k,
        x: &x[rows.start * k..rows.end * k],
        w: &w[columns.start * k..columns.end * k],
        y,
        add: !matches!(start, Start::Zero),
    });
}

struct Dots<'a, 'b, R> {
    k: usize,
    x: &'a [R],
    w: &'a [R],
    y: &'a mut Window<'b, R>,
    add: bool,
}

impl<R: Vectors> WithSimd for Dots<'_, '_, R> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Dots { k, x, w, y, add } = self;
        let (rows, columns) = (y.rows(), y.columns());
        for j in (0..columns).step_by(COLUMNS) {
            // The last row of a tile may be there several times.
            let w = std::array::from_fn(|l| &w[(j + l).min(columns - 1) * k..][..k]);
            for i in (0..rows).step_by(ROWS) {
                let x = std::array::from_fn(|l| &x[(i + l).min(rows - 1) * k..][..k]);
                let sums = tile(simd, x, w);
                for (l, sums) in sums.iter().enumerate().take(rows - i) {
                    let y = &mut y.row(i + l)[j..];
                    for (l, &sum) in sums.iter().enumerate() {
                        if let Some(y) = y.get_mut(l) {
                            *y = if add { y.plus(sum) } else { sum };
                        }
                    }
                }
            }
        }
    }
}

/// The dot products of each row of `x` with each of `w`.
#[inline(always)]
fn tile<S: Simd, R: Vectors>(simd: S, x: [&[R]; ROWS], w: [&[R]; COLUMNS]) -> [[R; COLUMNS]; ROWS] {
    let (xs, ws) = (x.map(R::vectors::<S>), w.map(R::vectors::<S>));
    let n = ws[0].0.len();
    let (x, w) = (xs.map(|(x, _)| &x[..n]), ws.map(|(w, _)| &w[..n]));
    let mut sums = [[R::splat(simd, R::ZERO); COLUMNS]; ROWS];
    for l in 0..n {
        for (x, sums) in x.iter().zip(&mut sums) {
            for (w, sum) in w.iter().zip(sums) {
                *sum = R::multiply_add(simd, x[l], w[l], *sum);
            }
        }
    }
    let mut totals = sums.map(|sums| sums.map(|sum| R::sum(simd, sum)));
    if ws[0].1.is_empty() {
        return totals;
    }
    for (totals, (_, x)) in totals.iter_mut().zip(xs) {
        for (total, (_, w)) in totals.iter_mut().zip(ws) {
            for (&x, &w) in x.iter().zip(w) {
                *total = total.plus(x.times(w));
            }
        }
    }
    totals
}
