//! Products of bf16 by instructions that multiply pairs of numbers and add both products to an f32
//! (AVX-512 BF16): up to twice as fast as f32. A *pair* is two neighbours of a sum in the 32 bits
//! of an f32. So [`TILE`] computes products of matrices of pairs as other tiles do those of
//! numbers, and sums are cut at the same depth. The instructions take numbers that are not normal
//! for zero.

use super::banded::{self, LANES, LINES, ROWS, VECTORS, pairs_of};
use super::pack::{LINE_BYTES, fetch};
use super::{Bf16, DEPTH, Left, Micro, ROOM, Right, Start, Tile, Tiled, tiles};
use crate::kernel::Window;
use half::bf16;
use std::ops::Range;

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

/// What this machine has.
pub(super) fn instructions() -> Option<&'static Bf16<f32>> {
    let exist = std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512bf16");
    exist.then_some(&INSTRUCTIONS)
}

static INSTRUCTIONS: Bf16<f32> = Bf16 {
    tile: &TILE,
    banded: &super::banded::BF16,
    product_part,
    pair_rows,
    pair_panels,
};

const KERNELS: [[Micro<f32>; ROWS]; VECTORS] = [
    by_rows::<1>(),
    by_rows::<2>(),
    by_rows::<3>(),
    by_rows::<4>(),
];

/// Kernels for 1 to 6 rows.
const fn by_rows<const VECTORS: usize>() -> [Micro<f32>; ROWS] {
    let (few, more) = (tile::<4, VECTORS>, tile::<ROWS, VECTORS>);
    [tile::<1, VECTORS>, few, few, few, more, more]
}

/// Its numbers are pairs.
static TILE: Tile<f32> = Tile {
    kernels: KERNELS.as_flattened(),
    rows: ROWS,
    columns: COLUMNS,
    lanes: LANES,
    bf16: None,
};

/// See [`super::product_part`].
fn product_part(
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
    let in_place = pairs_of(x).filter(|_| !ta && k.is_multiple_of(2));
    let most_rows = if in_place.is_some() { rows.len() } else { TALL };
    f32::with_room(|room| {
        let (w_room, x_room) = room.split_at_mut(PAIRS * BLOCK);
        for top in rows.clone().step_by(most_rows) {
            let height = most_rows.min(rows.end - top);
            for shallow in (0..k).step_by(DEPTH) {
                let depth = DEPTH.min(k - shallow);
                let pairs = depth.div_ceil(2);
                if in_place.is_none() {
                    let x = &x[top * x_row + shallow * x_column..];
                    pack(x_room, PANEL, (height, x_row), (depth, x_column), x);
                }
                for left in columns.clone().step_by(BLOCK) {
                    let width = BLOCK.min(columns.end - left);
                    let from = &w[shallow * w_row + left * w_column..];
                    pack(w_room, COLUMNS, (width, w_column), (depth, w_row), from);
                    let w = Right {
                        w: &*w_room,
                        row: COLUMNS,
                        panel: COLUMNS * pairs,
                    };
                    let j = left - columns.start;
                    for low in (top..top + height).step_by(PANEL) {
                        let high = (top + height).min(low + PANEL);
                        let mut y = y.part(low - rows.start..high - rows.start, j..j + width);
                        let add = match start {
                            Start::From(f) if shallow == 0 => {
                                (low..high).for_each(|l| f(l, left, y.row(l - low)));
                                true
                            }
                            _ => 0 < shallow || matches!(start, Start::Result),
                        };
                        let x = match in_place {
                            Some(x) => Left::rows(&TILE, &x[(low * k + shallow) / 2..], k / 2),
                            None => {
                                let panel = (low - top) / PANEL * PANEL * pairs;
                                Left::transposed(&TILE, &x_room[panel..], PANEL)
                            }
                        };
                        tiles(&TILE, pairs, x, w, 1.0, &mut y, add);
                    }
                }
            }
        }
    });
}

fn pair_rows(rows: &mut [f32], n: usize) {
    // SAFETY: the machine has the instructions, see `instructions`.
    rows.chunks_exact_mut(n)
        .for_each(|row| unsafe { pair_neighbours(row) });
}

fn pair_panels(panels: &mut [f32], (depth, width): (usize, usize)) {
    // There may be no lines.
    for panel in panels.chunks_exact_mut((width * depth).max(1)) {
        let pair = match width {
            COLUMNS => pair_lines::<COLUMNS>,
            ROWS => pair_lines::<ROWS>,
            _ => unreachable!("a panel is as wide as a tile"),
        };
        // SAFETY: the machine has the instructions, see `instructions`.
        unsafe { pair(panel) };
    }
}

/// Makes pairs of neighbours in place.
#[target_feature(enable = "avx512f,avx512bw")]
fn pair_neighbours(row: &mut [f32]) {
    let (n, whole) = (row.len(), row.len() / (2 * LANES));
    for i in 0..whole {
        if let Some(&numbers) = row[i * 2 * LANES..].first_chunk::<{ 2 * LANES }>() {
            let to = &mut row[i * LANES..][..LANES];
            for (to, [even, odd]) in to.iter_mut().zip(numbers.as_chunks::<2>().0) {
                *to = of_widened(*even, *odd);
            }
        }
    }
    for l in whole * LANES..n.div_ceil(2) {
        let odd = row.get(2 * l + 1).copied().unwrap_or(0.0);
        row[l] = of_widened(row[2 * l], odd);
    }
}

/// Makes pairs of the numbers of two lines, in place.
#[target_feature(enable = "avx512f,avx512bw")]
fn pair_lines<const WIDE: usize>(lines: &mut [f32]) {
    let (lines, _) = lines.as_chunks_mut::<WIDE>();
    for l in 0..lines.len().div_ceil(2) {
        let odds = lines.get(2 * l + 1).copied().unwrap_or([0.0; WIDE]);
        let evens = lines[2 * l];
        for (to, (even, odd)) in lines[l].iter_mut().zip(evens.iter().zip(&odds)) {
            *to = of_widened(*even, *odd);
        }
    }
}

#[inline(always)]
fn of_widened(even: f32, odd: f32) -> f32 {
    f32::from_bits(even.to_bits() >> 16 | odd.to_bits() & 0xFFFF_0000)
}

/// Copies `n` vectors, `stride` apart, of `depth` numbers, `step` apart, as pairs into panels of
/// `wide` vectors: pair `l` of vector `i` of a panel at `l * wide + i`. The last panel and the last
/// pair are filled up with zeros. One of `stride` and `step` is 1.
fn pack(
    room: &mut [f32],
    wide: usize,
    (n, stride): (usize, usize),
    (depth, step): (usize, usize),
    from: &[bf16],
) {
    let pairs = depth.div_ceil(2);
    let panels = room.chunks_mut(wide * pairs).zip((0..n).step_by(wide));
    if stride == 1 {
        for (panel, at) in panels {
            let width = wide.min(n - at);
            for (l, pairs) in panel.chunks_exact_mut(wide).enumerate() {
                let line = |l: usize| &from[l * step + at..][..width];
                let evens = line(2 * l);
                let ahead = evens.as_ptr().wrapping_add(AHEAD * step);
                for line in (0..width).step_by(LINE_BYTES / size_of::<bf16>()) {
                    fetch(ahead.wrapping_add(line));
                    fetch(ahead.wrapping_add(line + step));
                }
                let (pairs, zeros) = pairs.split_at_mut(width);
                let pairs = pairs.iter_mut().zip(evens);
                if 2 * l + 1 < depth {
                    let odds = line(2 * l + 1);
                    pairs
                        .zip(odds)
                        .for_each(|((to, &even), &odd)| *to = pair([even, odd]));
                } else {
                    pairs.for_each(|(to, &even)| *to = pair([even, bf16::ZERO]));
                }
                zeros.fill(0.0);
            }
        }
        return;
    }
    assert!(step == 1, "vectors or numbers should be next to each other");
    let even = depth.is_multiple_of(2) && stride.is_multiple_of(2);
    if let Some(from) = pairs_of(from).filter(|_| even) {
        let panel = (wide, wide * pairs);
        return super::pack::pack(room, panel, (n, stride / 2), (pairs, 1), from);
    }
    for (panel, at) in panels {
        let width = wide.min(n - at);
        for (i, vector) in from[at * stride..].chunks(stride).take(width).enumerate() {
            let (whole, rest) = vector[..depth].as_chunks::<2>();
            let last = rest.first().map(|&even| [even, bf16::ZERO]);
            let pairs = whole.iter().copied().chain(last);
            panel
                .chunks_exact_mut(wide)
                .zip(pairs)
                .for_each(|(row, halves)| row[i] = pair(halves));
        }
        panel
            .chunks_exact_mut(wide)
            .for_each(|row| row[width..].fill(0.0));
    }
}

/// Numbers are fetched this far ahead.
const AHEAD: usize = 8;

fn pair([even, odd]: [bf16; 2]) -> f32 {
    f32::from_bits(u32::from(even.to_bits()) | u32::from(odd.to_bits()) << 16)
}

/// One of [`TILE`]'s kernels: see [`Micro`]. The right factor is packed.
///
/// # Safety
/// The pointers have what the sizes say, and the machine has the instructions.
#[target_feature(enable = "avx512f,avx512bf16")]
#[allow(
    clippy::too_many_arguments,
    reason = "they are those of the crates' kernels"
)]
unsafe fn tile<const R: usize, const V: usize>(
    columns: usize,
    rows: usize,
    pairs: usize,
    y: *mut f32,
    w: *const f32,
    x: *const f32,
    y_row: isize,
    _: isize,
    w_row: isize,
    x_column: isize,
    x_row: isize,
    _: f32,
    scale: f32,
    add: u8,
    _: bool,
    _: bool,
    _: bool,
    _: *const f32,
) {
    debug_assert!(w_row == COLUMNS as isize, "a right factor should be packed");
    let x_rows = std::array::from_fn(|i| x.wrapping_offset(i.min(rows - 1) as isize * x_row));
    let (y_row, x_column) = (y_row as usize, x_column as usize);
    let step = LINES.len() * COLUMNS;
    // SAFETY: as here.
    unsafe {
        banded::tile::<R, V>(
            columns, rows, pairs, y, &x_rows, w, &LINES, y_row, x_column, step, scale, add,
        );
    }
}
