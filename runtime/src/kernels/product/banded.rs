//! Products of pairs of bf16 for convolutions. The pairs of a right factor lie at offsets of a
//! table, so it may be a band of an image, and no patches are packed. The rows of a left factor may
//! begin anywhere. (In f32, the direct loops of convolutions are as fast.)

use super::pack::fetch;
use crate::kernel::Window;
use crate::kernels::wide::Scalar;

/// Rows of a tile, and its vectors of columns.
pub(super) const ROWS: usize = 6;
pub(super) const VECTORS: usize = 4;
pub(super) const LANES: usize = 16;

/// `(columns, rows, depth, y, the rows of x, w, offsets of w's rows, y's row stride, x's column
/// stride, the distance to the next so many rows of w, factor of the product, 0: y is overwritten
/// or 1: added to)`. It computes `y[i][j] (+)= sum over l of x[i][l] w[l][j]` for a tile of at
/// least one row.
type Kernel<R> = unsafe fn(
    usize,
    usize,
    usize,
    *mut R,
    &[*const R; ROWS],
    *const R,
    &[usize],
    usize,
    usize,
    usize,
    R,
    u8,
);

/// Offsets of some rows of a panel of a tile's columns.
pub(in crate::kernels) const LINES: [usize; 64] = {
    let mut lines = [0; 64];
    let mut l = 0;
    while l < lines.len() {
        lines[l] = l * VECTORS * LANES;
        l += 1;
    }
    lines
};

/// What a machine has.
pub(in crate::kernels) struct Banded<R: 'static> {
    /// One for each number of vectors and of rows: tiles are sums in up to 24 registers.
    kernels: [[Kernel<R>; ROWS]; VECTORS],
}

/// A left factor: row `i` begins at element `start(i)` of `x`, and its numbers are next to each
/// other. They may be pairs of elements.
pub(in crate::kernels) struct Rows<'a, X> {
    pub(in crate::kernels) x: &'a [X],
    pub(in crate::kernels) start: &'a dyn Fn(usize) -> usize,
}

/// A right factor: number `l * n + i` of column `j` of panel `p`, for a table of `n` offsets, lies
/// at `p * panel + l * step + table[i] + j`. Whole vectors are read.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Steps<'a, R> {
    pub(in crate::kernels) w: &'a [R],
    pub(in crate::kernels) table: &'a [usize],
    pub(in crate::kernels) step: usize,
    /// Columns of a panel: at most [`Banded::COLUMNS`], and whole vectors.
    pub(in crate::kernels) wide: usize,
    pub(in crate::kernels) panel: usize,
}

impl<R: Copy> Steps<'_, R> {
    /// One past the largest offset of so many numbers.
    fn reach(&self, depth: usize) -> usize {
        let n = self.table.len();
        let (whole, rest) = (depth / n, depth % n);
        let largest = |table: &[usize]| table.iter().max().map_or(0, |most| most + 1);
        let before = whole
            .checked_sub(1)
            .map_or(0, |last| last * self.step + largest(self.table));
        match rest {
            0 => before,
            _ => before.max(whole * self.step + largest(&self.table[..rest])),
        }
    }
}

impl<R: Scalar> Banded<R> {
    /// Rows and columns of a tile.
    pub(in crate::kernels) const ROWS: usize = ROWS;
    pub(in crate::kernels) const COLUMNS: usize = VECTORS * LANES;
    pub(in crate::kernels) const LANES: usize = LANES;

    /// `y += x w`, for sums of so many numbers.
    pub(in crate::kernels) fn add<X>(
        &self,
        depth: usize,
        x: &Rows<'_, X>,
        w: &Steps<'_, R>,
        y: &mut Window<'_, R>,
    ) {
        let (rows, columns, stride) = (y.rows(), y.columns(), y.stride());
        if rows == 0 || columns == 0 || depth == 0 {
            return;
        }
        assert!(
            w.wide.is_multiple_of(LANES) && (1..=VECTORS).contains(&(w.wide / LANES)),
            "a panel should be a few whole vectors"
        );
        let (last, wide) = ((columns - 1) / w.wide, (columns - 1) % w.wide + 1);
        let end = match last {
            0 => wide.next_multiple_of(LANES),
            _ => (last * w.panel + wide.next_multiple_of(LANES)).max((last - 1) * w.panel + w.wide),
        };
        assert!(
            w.reach(depth) - 1 + end <= w.w.len(),
            "a right factor should have what its product reads"
        );
        // A row's numbers, in elements of x.
        let length = depth * (size_of::<R>() / size_of::<X>());
        let to = y.as_mut_ptr();
        for i in (0..rows).step_by(ROWS) {
            let height = ROWS.min(rows - i);
            let x_rows = std::array::from_fn(|r| {
                let row = &x.x[(x.start)(i + r.min(height - 1))..][..length];
                row.as_ptr().cast::<R>()
            });
            for (panel, j) in (0..columns).step_by(w.wide).enumerate() {
                let width = w.wide.min(columns - j);
                let kernel = &self.kernels[width.div_ceil(LANES) - 1][height - 1];
                // The kernel touches y when it is done with the factors.
                (0..height).for_each(|r| fetch(to.wrapping_add((i + r) * stride + j)));
                // SAFETY: the kernel writes `height` rows of `width` numbers, `stride` apart, of y.
                // They lie in the window, because i + height <= rows and j + width <= columns. It
                // reads `depth` numbers of each row of x, at any address: the slices above have
                // them. And whole vectors at the offsets of w: the assertion says that those of the
                // last two panels exist. y is a mutable window and overlaps neither. The machine
                // has the kernel's instructions: `tile_of` checked it.
                unsafe {
                    kernel(
                        width,
                        height,
                        depth,
                        to.add(i * stride + j),
                        &x_rows,
                        w.w.as_ptr().add(panel * w.panel),
                        w.table,
                        stride,
                        1,
                        w.step,
                        R::cast_f32(1.0),
                        1,
                    );
                }
            }
        }
    }
}

/// Numbers as pairs, if they may be read in place. The last one of an odd number has no pair.
pub(in crate::kernels) fn pairs_of<X: Scalar, R: Scalar>(x: &[X]) -> Option<&[R]> {
    const { assert!(size_of::<X>() <= size_of::<R>()) };
    let (pairs, n) = (
        x.as_ptr().cast::<R>(),
        x.len() / (size_of::<R>() / size_of::<X>()),
    );
    // SAFETY: they are aligned, any bits are valid for both types, and so many exist.
    (pairs.is_aligned()).then(|| unsafe { std::slice::from_raw_parts(pairs, n) })
}

/// Room for elements of a smaller type.
pub(in crate::kernels) fn elements_of<R: Scalar, X: Scalar>(room: &mut [R]) -> &mut [X] {
    const { assert!(size_of::<X>() <= size_of::<R>() && align_of::<X>() <= align_of::<R>()) };
    let n = room.len() * (size_of::<R>() / size_of::<X>());
    // SAFETY: so many elements exist, they are aligned, and any bits are valid for both types.
    unsafe { std::slice::from_raw_parts_mut(room.as_mut_ptr().cast(), n) }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{BF16, tile};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Banded, Kernel, LANES, ROWS, VECTORS};
    use std::arch::x86_64::{
        __m512, __m512bh, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_mask_storeu_ps,
        _mm512_maskz_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps,
    };

    /// For pairs of bf16, see [`super::super::pairs`].
    pub(in super::super) static BF16: Banded<f32> = Banded {
        kernels: [
            by_rows::<1>(),
            by_rows::<2>(),
            by_rows::<3>(),
            by_rows::<VECTORS>(),
        ],
    };

    /// Kernels for 1 to 6 rows.
    const fn by_rows<const VECTORS: usize>() -> [Kernel<f32>; ROWS] {
        let (few, more) = (tile::<4, VECTORS>, tile::<ROWS, VECTORS>);
        [tile::<1, VECTORS>, few, few, few, more, more]
    }

    /// See [`Kernel`]. It may have more rows than there are; then it computes the last one several
    /// times.
    ///
    /// # Safety
    /// The pointers have what the sizes say, and the machine has the instructions.
    #[target_feature(enable = "avx512f,avx512bf16")]
    #[allow(
        clippy::too_many_arguments,
        reason = "a call for each tile: they are registers"
    )]
    pub(in super::super) unsafe fn tile<const R: usize, const V: usize>(
        columns: usize,
        rows: usize,
        depth: usize,
        y: *mut f32,
        x: &[*const f32; ROWS],
        mut w: *const f32,
        table: &[usize],
        y_row: usize,
        x_column: usize,
        step: usize,
        scale: f32,
        add: u8,
    ) {
        let mut sums = [[_mm512_setzero_ps(); V]; R];
        let mut first = 0;
        while first < depth {
            let n = table.len().min(depth - first);
            for (l, &offset) in (first..).zip(&table[..n]) {
                let mut vectors = [pairs(_mm512_setzero_ps()); V];
                for (v, vector) in vectors.iter_mut().enumerate() {
                    // SAFETY: w has whole vectors at its offsets.
                    let at = unsafe { w.add(offset + v * LANES).cast::<__m512>().read_unaligned() };
                    *vector = pairs(at);
                }
                for (sums, x) in sums.iter_mut().zip(x) {
                    // SAFETY: a row of x has so many numbers.
                    let pair = unsafe { x.add(l * x_column).read_unaligned() };
                    let pair = pairs(_mm512_set1_ps(pair));
                    for (sum, &vector) in sums.iter_mut().zip(&vectors) {
                        *sum = _mm512_dpbf16_ps(*sum, pair, vector);
                    }
                }
            }
            first += n;
            w = w.wrapping_add(step);
        }
        let scale = _mm512_set1_ps(scale);
        for (i, sums) in sums.iter().enumerate().take(rows) {
            for (v, &sum) in sums.iter().enumerate() {
                let lanes = columns.saturating_sub(v * LANES).min(LANES);
                let there = ((1u32 << lanes) - 1) as u16;
                let before = if add == 0 { 0 } else { there };
                let y = y.wrapping_add(i * y_row + v * LANES);
                // SAFETY: row i of y has the columns that the masks select.
                unsafe {
                    let sum = _mm512_fmadd_ps(scale, sum, _mm512_maskz_loadu_ps(before, y));
                    _mm512_mask_storeu_ps(y, there, sum);
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn pairs(bits: __m512) -> __m512bh {
        // SAFETY: both are 512 bits, and any are valid.
        unsafe { std::mem::transmute(bits) }
    }
}
