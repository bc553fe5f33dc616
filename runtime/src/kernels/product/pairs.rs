//! Products of bf16 by instructions that multiply pairs of numbers and add both products to an f32
//! (AVX-512 BF16): up to twice as fast as f32. The loops are those of [`super::product_part`], and
//! sums are cut at the same depth. A *pair* is two neighbours of a sum in 32 bits. The instructions
//! take numbers that are not normal for zero.

use super::pack::{FOUR, fetch, turned_f32};
use super::{DEPTH, LINE_BYTES, ROOM, Start, Tiled};
use crate::kernel::Window;
use half::bf16;
use std::arch::x86_64::{
    __m512bh, __m512i, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_mask_storeu_ps,
    _mm512_maskz_loadu_ps, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_setzero_si512,
};
use std::ops::Range;

/// Rows of a tile, and its vectors of 16 columns: 24 sums are registers.
const ROWS: usize = 6;
const VECTORS: usize = 4;
const LANES: usize = 16;
const COLUMNS: usize = VECTORS * LANES;
/// Pairs of a packed block's depth.
const PAIRS: usize = DEPTH / 2;
/// Columns of the right factor that are packed at once: 256 KiB.
const BLOCK: usize = 256;
/// Rows of a transposed left factor that are packed at once.
const TALL: usize = 1024;
/// Rows of a packed panel of the left factor: whole tiles and whole cache lines.
const PANEL: usize = 48;
const _: () = assert!(PAIRS * (BLOCK + TALL.next_multiple_of(PANEL)) <= ROOM);

/// Whether this machine has the instructions.
pub(super) fn exist() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bf16")
}

/// A left factor: pair `l` of row `i` of a panel lies `row * i + pair * l` numbers from the panel's
/// first. A panel has `panel.0` rows, and panels are `panel.1` numbers apart.
#[derive(Clone, Copy)]
struct Left<'a> {
    x: &'a [bf16],
    row: usize,
    pair: usize,
    panel: (usize, usize),
}

/// See [`super::product_part`].
pub(super) fn product_part(
    (m, k, n): (usize, usize, usize),
    (rows, columns): (Range<usize>, Range<usize>),
    (ta, tb): (bool, bool),
    (x, w): (&[bf16], &[bf16]),
    y: &mut Window<'_, f32>,
    start: Start<'_, f32>,
) {
    let (x_row, x_column) = if ta { (1, m) } else { (k, 1) };
    let (w_row, w_column) = if tb { (1, k) } else { (n, 1) };
    // The last pair of an odd number of numbers has only one.
    let pack_x = ta || !k.is_multiple_of(2);
    let most_rows = if pack_x { TALL } else { rows.len() };
    f32::with_room(|room| {
        let (w_room, x_room) = words(room).split_at_mut(PAIRS * BLOCK);
        for top in rows.clone().step_by(most_rows) {
            let height = most_rows.min(rows.end - top);
            for shallow in (0..k).step_by(DEPTH) {
                let depth = DEPTH.min(k - shallow);
                let pairs = depth.div_ceil(2);
                let x = &x[top * x_row + shallow * x_column..];
                let x = if pack_x {
                    pack::<PANEL>(x_room, (height, x_row), (depth, x_column), x);
                    Left {
                        x: numbers(x_room),
                        row: 2,
                        pair: 2 * PANEL,
                        panel: (PANEL, 2 * PANEL * pairs),
                    }
                } else {
                    Left {
                        x,
                        row: k,
                        pair: 2,
                        panel: (ROWS, ROWS * k),
                    }
                };
                for left in columns.clone().step_by(BLOCK) {
                    let width = BLOCK.min(columns.end - left);
                    let w = &w[shallow * w_row + left * w_column..];
                    pack::<COLUMNS>(w_room, (width, w_column), (depth, w_row), w);
                    let (i, j) = (top - rows.start, left - columns.start);
                    let mut y = y.part(i..i + height, j..j + width);
                    for low in (0..height).step_by(ROWS) {
                        let high = height.min(low + ROWS);
                        let mut y = y.part(low..high, 0..width);
                        let add = match start {
                            Start::From(f) if shallow == 0 => {
                                (low..high).for_each(|l| f(top + l, left, y.row(l - low)));
                                true
                            }
                            _ => 0 < shallow || matches!(start, Start::Result),
                        };
                        tiles(pairs, x.tile(low), w_room, y, add);
                    }
                }
            }
        }
    });
}

impl Left<'_> {
    /// The same from row `low` on, which is the first of a tile.
    fn tile(&self, low: usize) -> Self {
        let (rows, apart) = self.panel;
        Left {
            x: &self.x[low / rows * apart + low % rows * self.row..],
            ..*self
        }
    }
}

/// Copies `n` vectors, `stride` apart, of `depth` numbers, `step` apart, as pairs into panels of
/// `WIDE` vectors: pair `l` of vector `i` of a panel at `l * WIDE + i`. The last panel and the last
/// pair are filled up with zeros. One of `stride` and `step` is 1.
fn pack<const WIDE: usize>(
    room: &mut [u32],
    (n, stride): (usize, usize),
    (depth, step): (usize, usize),
    from: &[bf16],
) {
    let pairs = depth.div_ceil(2);
    let panels = room.chunks_mut(WIDE * pairs);
    if stride == 1 {
        for (panel, at) in panels.zip((0..n).step_by(WIDE)) {
            let width = WIDE.min(n - at);
            for (l, pairs) in panel.as_chunks_mut::<WIDE>().0.iter_mut().enumerate() {
                let evens = &from[2 * l * step + at..][..width];
                let ahead = evens.as_ptr().wrapping_add(AHEAD * step);
                for line in (0..width).step_by(LINE_BYTES / size_of::<bf16>()) {
                    fetch(ahead.wrapping_add(line));
                    fetch(ahead.wrapping_add(line + step));
                }
                let odds = from
                    .get((2 * l + 1) * step + at..)
                    .filter(|_| 2 * l + 1 < depth);
                match odds.map(|odds| &odds[..width]) {
                    Some(odds) => interleave(pairs, evens, odds),
                    None => interleave(pairs, evens, &[bf16::ZERO; WIDE][..width]),
                }
                pairs[width..].fill(0);
            }
        }
        return;
    }
    assert!(step == 1, "vectors or numbers should be next to each other");
    for (panel, at) in panels.zip((0..n).step_by(WIDE)) {
        let width = WIDE.min(n - at);
        let vector = |i: usize| &from[(at + i) * stride..][..depth];
        // A line of each vector at a time: see `super::pack`.
        for (block, rows) in panel.as_chunks_mut::<WIDE>().0.chunks_mut(LINE).enumerate() {
            let mut done = 0;
            if rows.len() == LINE && 2 * LINE * (block + 1) <= depth {
                done = width / FOUR * FOUR;
                for i in (0..done).step_by(FOUR) {
                    let four: [_; FOUR] = std::array::from_fn(|j| {
                        let line = &vector(i + j)[2 * LINE * block..][..2 * LINE];
                        fetch(line.as_ptr().wrapping_add(2 * LINE));
                        line.as_chunks::<2>().0
                    });
                    for (first, rows) in (0..LINE).step_by(FOUR).zip(rows.as_chunks_mut::<FOUR>().0)
                    {
                        let square = four.map(|line| {
                            std::array::from_fn(|l| f32::from_bits(pair(line[first + l])))
                        });
                        for (row, turned) in rows.iter_mut().zip(turned_f32(square)) {
                            if let Some(four) = row[i..].first_chunk_mut::<FOUR>() {
                                *four = turned.map(f32::to_bits);
                            }
                        }
                    }
                }
            }
            for i in done..width {
                let (whole, rest) = vector(i)[2 * LINE * block..].as_chunks::<2>();
                let last = rest.first().map(|&even| [even, bf16::ZERO]);
                let pairs = whole.iter().copied().chain(last);
                rows.iter_mut()
                    .zip(pairs)
                    .for_each(|(row, halves)| row[i] = pair(halves));
            }
            rows.iter_mut().for_each(|row| row[width..].fill(0));
        }
    }
}

/// Pairs that are packed together of vectors that are next to each other: a cache line.
const LINE: usize = LINE_BYTES / size_of::<u32>();
/// Numbers are fetched this far ahead.
const AHEAD: usize = 8;

fn pair([even, odd]: [bf16; 2]) -> u32 {
    u32::from(even.to_bits()) | u32::from(odd.to_bits()) << 16
}

fn interleave(pairs: &mut [u32], evens: &[bf16], odds: &[bf16]) {
    for (to, (&even, &odd)) in pairs.iter_mut().zip(evens.iter().zip(odds)) {
        *to = pair([even, odd]);
    }
}

/// A workspace for pairs.
fn words(room: &mut [f32]) -> &mut [u32] {
    // SAFETY: both types have the same size and alignment, and any bits are valid in both.
    unsafe { std::slice::from_raw_parts_mut(room.as_mut_ptr().cast(), room.len()) }
}
/// The numbers of pairs.
fn numbers(pairs: &[u32]) -> &[bf16] {
    // SAFETY: a pair is two numbers, whose alignment is less. Any bits are a bf16.
    unsafe { std::slice::from_raw_parts(pairs.as_ptr().cast(), 2 * pairs.len()) }
}

/// `y = x w`, or `y += x w`: at most [`ROWS`] rows, a tile at a time. `w` has panels of [`COLUMNS`].
fn tiles(pairs: usize, x: Left<'_>, w: &[u32], mut y: Window<'_, f32>, add: bool) {
    let (rows, columns) = (y.rows(), y.columns());
    let last = columns.div_ceil(COLUMNS) * pairs * COLUMNS;
    let end = x.row * (rows - 1) + x.pair * (pairs - 1) + 2;
    assert!(
        (1..=ROWS).contains(&rows) && end <= x.x.len() && last <= w.len(),
        "factors should have what their product reads"
    );
    let (stride, start) = (y.stride(), y.as_mut_ptr());
    for (j, w) in (0..columns).step_by(COLUMNS).zip(w.chunks(pairs * COLUMNS)) {
        let width = COLUMNS.min(columns - j);
        // The kernel touches y when it is done with the factors.
        (0..rows).for_each(|i| fetch(start.wrapping_add(i * stride + j)));
        // SAFETY: the kernel reads `pairs` pairs of `rows` rows of x and of all columns of a panel
        // of w: the assertion above says that the last ones exist. It writes `rows` rows of `width`
        // numbers of y, which lie in the window. The machine has the instructions: `exist` says so
        // before there is a product of pairs.
        unsafe {
            kernel(rows, width)(&Tile {
                pairs,
                x: x.x.as_ptr(),
                row: x.row,
                pair: x.pair,
                w: w.as_ptr(),
                y: start.add(j),
                stride,
                rows,
                columns: width,
                add,
            });
        }
    }
}

/// What a kernel computes: see [`tiles`].
struct Tile {
    pairs: usize,
    x: *const bf16,
    row: usize,
    pair: usize,
    w: *const u32,
    y: *mut f32,
    stride: usize,
    rows: usize,
    columns: usize,
    add: bool,
}

/// The smallest kernel for a tile. What it computes beyond the tile is not stored.
fn kernel(rows: usize, columns: usize) -> unsafe fn(&Tile) {
    match (rows, columns.div_ceil(LANES)) {
        (1, 1) => tile::<1, 1>,
        (1, 2) => tile::<1, 2>,
        (1, _) => tile::<1, 4>,
        (2, 1) => tile::<2, 1>,
        (2, 2) => tile::<2, 2>,
        (2, _) => tile::<2, 4>,
        (3 | 4, 1) => tile::<4, 1>,
        (3 | 4, 2) => tile::<4, 2>,
        (3 | 4, _) => tile::<4, 4>,
        (_, 1) => tile::<ROWS, 1>,
        (_, 2) => tile::<ROWS, 2>,
        (_, _) => tile::<ROWS, VECTORS>,
    }
}

/// Safety: the pointers have what [`Tile`] says, and the machine has the instructions.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn tile<const ROWS: usize, const VECTORS: usize>(t: &Tile) {
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
    for l in 0..t.pairs {
        let mut columns = [bits(_mm512_setzero_si512()); VECTORS];
        for (v, columns) in columns.iter_mut().enumerate() {
            // SAFETY: a panel has whole vectors of `pairs` pairs of its columns.
            *columns = bits(unsafe { _mm512_loadu_si512(t.w.add(l * COLUMNS + v * LANES).cast()) });
        }
        for (i, sums) in sums.iter_mut().enumerate() {
            let at = i.min(t.rows - 1) * t.row + l * t.pair;
            // SAFETY: the row has pair l. It may begin at any number.
            let pair = unsafe { t.x.add(at).cast::<i32>().read_unaligned() };
            let row = bits(_mm512_set1_epi32(pair));
            for (sum, &columns) in sums.iter_mut().zip(&columns) {
                *sum = _mm512_dpbf16_ps(*sum, row, columns);
            }
        }
    }
    for (i, sums) in sums.iter().enumerate().take(t.rows) {
        for (v, &sum) in sums.iter().enumerate() {
            let lanes = t.columns.saturating_sub(v * LANES).min(LANES);
            let there = ((1u32 << lanes) - 1) as u16;
            let before = if t.add { there } else { 0 };
            // SAFETY: row i of the window has the columns that the masks select.
            unsafe {
                let y = t.y.wrapping_add(i * t.stride + v * LANES);
                let sum = _mm512_add_ps(_mm512_maskz_loadu_ps(before, y), sum);
                _mm512_mask_storeu_ps(y, there, sum);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bits(pairs: __m512i) -> __m512bh {
    // SAFETY: both are 512 bits, and any are valid.
    unsafe { std::mem::transmute(pairs) }
}
