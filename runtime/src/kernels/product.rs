//! One product of two matrices: the micro-kernels of `gemm-f32` and `gemm-f64`, which multiply a tile of a few rows and
//! columns at the machine's speed, and our own loops around them.
//!
//! The loops that come with those crates allocate for each product; these keep one workspace a thread, made at the
//! thread's first product, so that a step in steady state allocates nothing. They are Goto's: a block of the right factor
//! is packed so that it stays in the second cache while tiles go over it, cut at places that depend on the shape alone.
//! Measured on one core of Zen 3 (AVX2), f32, the shapes of a small GPT-2 in all orders: 84 to 98 GFLOP/s, 0.92 to 1.06 of
//! what the loops of the crate `gemm` reach; attention's small products 57 to 91, 0.97 to 1.03. A product of one row spends
//! its time on packing: 1x768x768 with the right factor transposed has 5 GFLOP/s, and could have 29.

#![allow(unsafe_code, reason = "micro-kernels take pointers; the one call is in `product`")]

use super::wide::Wide;
use std::cell::RefCell;
use std::ops::Range;

/// `(columns, rows, depth, y, w, x, y's row stride, y's column stride, w's row stride, x's column stride, x's row stride,
/// factor of y, factor of the product, 0: y is overwritten or 1: added to, …)`. The crates have columns for rows: `y` is
/// row-major here, which is the transposed product there. It computes
/// `y[i][j] (+)= sum over l of x[i][l] w[l][j]` for a tile, where `w`'s columns are next to each other.
type Micro<R> = unsafe fn(
    usize,
    usize,
    usize,
    *mut R,
    *const R,
    *const R,
    isize,
    isize,
    isize,
    isize,
    isize,
    R,
    R,
    u8,
    bool,
    bool,
    bool,
    *const R,
);

/// The micro-kernels of a machine: for each number of vectors that hold a row of the tile, for each number of rows.
pub(super) struct Tile<R: 'static> {
    kernels: &'static [Micro<R>],
    /// Most rows of a tile.
    rows: usize,
    /// Most columns: so many whole vectors.
    columns: usize,
    /// Numbers in a vector. Kernels read whole vectors of `w`.
    lanes: usize,
    /// Packs rows of `x`, and columns of `w`.
    pack_rows: Pack<R>,
    pack_columns: Pack<R>,
}

/// See [`pack`].
type Pack<R> = fn(&mut [R], (usize, usize), (usize, usize), &[R]);

/// A type that products are computed in.
pub(super) trait Tiled: Wide {
    /// The best micro-kernels that this machine has.
    fn tile() -> Tile<Self>;
    /// Lends this thread's workspace: [`ROOM`] numbers.
    fn with_room(f: impl FnOnce(&mut [Self]));
}

/// How deep a packed block is: then a tile's rows of `x` stay in the first cache.
const DEPTH: usize = 512;
/// How many columns of `w` are packed at once: 256 KiB of f32 in the second cache. A multiple of every tile's columns.
const COLUMNS: usize = 128;
/// How many rows of `x` are packed at once, if they are.
const ROWS: usize = 512;
const ROOM: usize = DEPTH * (COLUMNS + ROWS);
/// A cache line. Vectors that straddle two are loaded twice.
const LINE_BYTES: usize = 64;

macro_rules! tiled {
    ($ty:ident, $micro:ident, fma $fma:literal, neon $neon:literal) => {
        impl Tiled for $ty {
            fn tile() -> Tile<$ty> {
                macro_rules! tile {
                    ($set:ident, $lanes:literal) => {{
                        use $micro::microkernel::$set::$ty::{MR_DIV_N, NR, UKR};
                        const COLUMNS: usize = MR_DIV_N * $lanes;
                        Tile {
                            kernels: UKR.as_flattened(),
                            rows: NR,
                            columns: COLUMNS,
                            lanes: $lanes,
                            pack_rows: pack::<$ty, NR>,
                            pack_columns: pack::<$ty, COLUMNS>,
                        }
                    }};
                }
                #[cfg(target_arch = "x86_64")]
                if std::arch::is_x86_feature_detected!("fma") {
                    return tile!(fma, $fma);
                }
                #[cfg(target_arch = "aarch64")]
                if std::arch::is_aarch64_feature_detected!("neon") {
                    return tile!(neon, $neon);
                }
                tile!(scalar, 1)
            }
            fn with_room(f: impl FnOnce(&mut [$ty])) {
                thread_local! {
                    static MEMORY: RefCell<Vec<$ty>> = const { RefCell::new(Vec::new()) };
                }
                MEMORY.with_borrow_mut(|memory| {
                    if memory.is_empty() {
                        memory.resize(ROOM + LINE_BYTES / size_of::<$ty>(), 0.0);
                    }
                    let skip = memory.as_ptr().align_offset(LINE_BYTES);
                    f(&mut memory[skip..][..ROOM]);
                });
            }
        }
    };
}
tiled!(f32, gemm_f32, fma 8, neon 4);
tiled!(f64, gemm_f64, fma 4, neon 2);

/// One product of an `m` by `k` and a `k` by `n` matrix, read transposed where `ta`, `tb` say so: y = x w, or y += x w.
pub(super) fn product<R: Tiled>(
    (m, k, n): (usize, usize, usize),
    transposed: (bool, bool),
    x: &[R],
    w: &[R],
    y: &mut [R],
    add: bool,
) {
    product_rows((m, k, n), 0..m, transposed, x, w, y, add);
}

/// Some rows of a product: `y` holds them alone. Their bits do not depend on which others are computed with them.
pub(super) fn product_rows<R: Tiled>(
    (m, k, n): (usize, usize, usize),
    rows: Range<usize>,
    (ta, tb): (bool, bool),
    x: &[R],
    w: &[R],
    y: &mut [R],
    add: bool,
) {
    if rows.is_empty() || n == 0 {
        return;
    }
    if k == 0 {
        if !add {
            y.fill(R::ZERO);
        }
        return;
    }
    let (first, end) = (rows.start, rows.end);
    let whole = x.len() == m * k && w.len() == k * n && end <= m && y.len() == (end - first) * n;
    assert!(whole, "slices should be whole matrices, and the rows some of them");
    let tile = R::tile();
    let (x_row, x_column) = if ta { (1, m) } else { (k, 1) };
    let (w_row, w_column) = if tb { (1, k) } else { (n, 1) };
    // Rows of x that do not lie in lines are packed if they are read often enough.
    let pack_x = ta && 2 * tile.columns < n;
    let most_rows = if pack_x { ROWS / tile.rows * tile.rows } else { end - first };
    R::with_room(|room| {
        let (w_room, x_room) = room.split_at_mut(DEPTH * COLUMNS);
        for top in (first..end).step_by(most_rows) {
            let rows = most_rows.min(end - top);
            for shallow in (0..k).step_by(DEPTH) {
                let depth = DEPTH.min(k - shallow);
                let x = &x[top * x_row + shallow * x_column..];
                if pack_x {
                    (tile.pack_rows)(x_room, (rows, x_row), (depth, x_column), x);
                }
                let add = u8::from(add || 0 < shallow);
                for left in (0..n).step_by(COLUMNS) {
                    let columns = COLUMNS.min(n - left);
                    let w = &w[shallow * w_row + left * w_column..];
                    // A few rows read w where it lies, if whole vectors of it are there.
                    let pack_w = tb || !columns.is_multiple_of(tile.lanes) || 8 * tile.rows < rows;
                    if pack_w {
                        (tile.pack_columns)(w_room, (columns, w_column), (depth, w_row), w);
                    }
                    for i in (0..rows).step_by(tile.rows) {
                        let height = tile.rows.min(rows - i);
                        let (x, x_row, x_column) = match pack_x {
                            true => (&x_room[i * depth..], 1, tile.rows),
                            false => (&x[i * x_row..], x_row, x_column),
                        };
                        for j in (0..columns).step_by(tile.columns) {
                            let width = tile.columns.min(columns - j);
                            let (w, w_row) = match pack_w {
                                true => (&w_room[j * depth..], tile.columns),
                                false => (&w[j..], w_row),
                            };
                            let kernel = tile.kernels[(width.div_ceil(tile.lanes) - 1) * tile.rows + height - 1];
                            let y = &mut y[(top - first + i) * n + left + j..];
                            // SAFETY: the kernel writes `height` rows of `width` numbers, `n` apart, of y: a part of the
                            // matrix, for i + height <= rows <= end - top and j + width <= columns <= n - left. It reads
                            // `depth` rows of w and columns of x. Where they lie in the factors, they are parts of
                            // those in the same way, for shallow + depth <= k; whole vectors of w are read, which the
                            // width then is a multiple of. Where they are packed, a panel of w has `tile.columns`
                            // numbers a row, one of x `tile.rows`, and `pack` has filled them all. The assertion above
                            // says that the slices are whole; y is a mutable slice and overlaps neither. The machine
                            // has the kernel's instructions: `tile` asked.
                            unsafe {
                                kernel(
                                    width,
                                    height,
                                    depth,
                                    y.as_mut_ptr(),
                                    w.as_ptr(),
                                    x.as_ptr(),
                                    n as isize,
                                    1,
                                    w_row as isize,
                                    x_column as isize,
                                    x_row as isize,
                                    R::ONE,
                                    R::ONE,
                                    add,
                                    false,
                                    false,
                                    false,
                                    std::ptr::null(),
                                );
                            }
                        }
                    }
                }
            }
        }
    });
}

/// Copies `n` vectors, `stride` apart, of `depth` numbers, `step` apart, into panels of `WIDE` vectors: number `l` of vector
/// `i` of a panel at `l * WIDE + i`. The last panel is filled up with zeros. One of `stride` and `step` is 1.
fn pack<R: Tiled, const WIDE: usize>(
    room: &mut [R],
    (n, stride): (usize, usize),
    (depth, step): (usize, usize),
    from: &[R],
) {
    for (panel, at) in room.chunks_exact_mut(WIDE * depth).zip((0..n).step_by(WIDE)) {
        let (panel, _) = panel.as_chunks_mut::<WIDE>();
        let width = WIDE.min(n - at);
        if stride == 1 {
            for (l, row) in panel.iter_mut().enumerate() {
                let from = &from[at + l * step..];
                match from.first_chunk() {
                    Some(whole) if width == WIDE => *row = *whole,
                    _ => {
                        row[..width].copy_from_slice(&from[..width]);
                        row[width..].fill(R::ZERO);
                    }
                }
            }
            continue;
        }
        assert!(step == 1, "vectors or numbers should be next to each other");
        // A few numbers of each vector at a time, or the panel would pass through the cache once for each vector.
        for (block, rows) in panel.chunks_mut(SQUARE).enumerate() {
            let from = &from[at * stride + block * SQUARE..];
            for i in 0..width {
                let numbers = &from[i * stride..][..rows.len()];
                rows.iter_mut().zip(numbers).for_each(|(row, &number)| row[i] = number);
            }
            rows.iter_mut().for_each(|row| row[width..].fill(R::ZERO));
        }
    }
}

/// Numbers of a vector that are packed together: a cache line or two.
const SQUARE: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    /// Small integers: sums are exact in any order.
    fn integers<R: Tiled>(n: usize, seed: usize) -> Vec<R> {
        (0..n).map(|i| R::of_f64(((i * 7 + seed * 13 + i * i / 5) % 9) as f64 - 4.0)).collect()
    }

    fn agrees<R: Tiled>() {
        let tile = R::tile();
        assert!(COLUMNS.is_multiple_of(tile.columns) && tile.rows <= ROWS && tile.columns.is_multiple_of(tile.lanes));
        // Around the borders of tiles, panels and blocks.
        let (ms, ns) = ([1, 2, 5, 6, 7, 13, 49, 515], [1, 3, 4, 8, 15, 16, 17, 24, 33, 127, 129, 260]);
        for (m, n) in ms.into_iter().flat_map(|m| ns.map(|n| (m, n))) {
            for k in [1, 2, 3, 16, 17, 65, 513].into_iter().filter(|k| k * m * n < 1 << 18) {
                let (x, w, start) = (integers::<R>(m * k, 1), integers::<R>(k * n, 2), integers::<R>(m * n, 3));
                for (ta, tb, add) in (0..8).map(|bits| (bits & 1 == 1, bits & 2 == 2, bits & 4 == 4)) {
                    let at = |i: usize, l: usize, columns, rows, t| if t { l * rows + i } else { i * columns + l };
                    let mut expected = start.clone();
                    for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                        let products = (0..k).map(|l| x[at(i, l, k, m, ta)].to_f64() * w[at(l, j, n, k, tb)].to_f64());
                        let sum = products.sum::<f64>() + if add { start[i * n + j].to_f64() } else { 0.0 };
                        expected[i * n + j] = R::of_f64(sum);
                    }
                    let mut y = start.clone();
                    product((m, k, n), (ta, tb), &x, &w, &mut y, add);
                    assert!(y == expected, "{m} x {k} x {n}, ta {ta}, tb {tb}, add {add}");
                }
            }
        }
    }

    #[test]
    fn products_are_sums_of_products() {
        agrees::<f32>();
        agrees::<f64>();
    }
}
