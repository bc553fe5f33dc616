//! Packing: numbers of a factor in the order in which micro-kernels read them.

use crate::kernels::wide::Wide;
use std::ops::Range;

/// A cache line. Vectors that straddle two are loaded twice.
pub(super) const LINE_BYTES: usize = 64;

/// Numbers whose squares are turned: rows and columns are exchanged.
pub(in crate::kernels) trait Turned: Wide {
    fn turned(square: Square<Self>) -> Square<Self>;
    /// Writes 16 vectors, so far apart, of `depth` numbers as columns of rows `wide` apart, except
    /// for the last numbers of a depth that is no multiple of 16. Returns whether this machine has
    /// instructions for that.
    fn turn_16(_: (&[Self], usize), _depth: usize, _rows: &mut [Self], _wide: usize) -> bool {
        false
    }
}
impl Turned for f32 {
    fn turned(square: Square<f32>) -> Square<f32> {
        turned_f32(square)
    }
    fn turn_16(from: (&[f32], usize), depth: usize, rows: &mut [f32], wide: usize) -> bool {
        turn_16(from, depth, rows, wide)
    }
}
impl Turned for f64 {
    fn turned(square: Square<f64>) -> Square<f64> {
        turned(square)
    }
}

/// Four vectors of four numbers.
pub(in crate::kernels) type Square<R> = [[R; FOUR]; FOUR];

fn turned<R: Copy>(square: Square<R>) -> Square<R> {
    std::array::from_fn(|l| std::array::from_fn(|j| square[j][l]))
}

/// The same in registers: compilers move each number alone.
#[cfg(target_arch = "x86_64")]
fn turned_f32(square: Square<f32>) -> Square<f32> {
    use std::arch::x86_64::{
        __m128, _mm_movehl_ps, _mm_movelh_ps, _mm_unpackhi_ps, _mm_unpacklo_ps,
    };
    // SAFETY: both types are squares of f32, of which any bits are valid, and every x86-64 has SSE.
    unsafe {
        let [a, b, c, d] = std::mem::transmute::<Square<f32>, [__m128; FOUR]>(square);
        let [ab, cd] = [_mm_unpacklo_ps(a, b), _mm_unpacklo_ps(c, d)];
        let [high_ab, high_cd] = [_mm_unpackhi_ps(a, b), _mm_unpackhi_ps(c, d)];
        std::mem::transmute::<[__m128; FOUR], Square<f32>>([
            _mm_movelh_ps(ab, cd),
            _mm_movehl_ps(cd, ab),
            _mm_movelh_ps(high_ab, high_cd),
            _mm_movehl_ps(high_cd, high_ab),
        ])
    }
}
#[cfg(not(target_arch = "x86_64"))]
fn turned_f32(square: Square<f32>) -> Square<f32> {
    turned(square)
}

/// See [`Turned::turn_16`].
#[cfg(target_arch = "x86_64")]
fn turn_16(from: (&[f32], usize), depth: usize, rows: &mut [f32], wide: usize) -> bool {
    let exist = std::arch::is_x86_feature_detected!("avx512f");
    if exist {
        let blocks = rows.chunks_mut(SQUARE * wide).take(depth / SQUARE);
        for (block, rows) in blocks.enumerate() {
            // SAFETY: the machine has the instructions.
            unsafe { turn_block((&from.0[block * SQUARE..], from.1), rows, wide) };
        }
    }
    exist
}
#[cfg(not(target_arch = "x86_64"))]
fn turn_16(_: (&[f32], usize), _: usize, _: &mut [f32], _: usize) -> bool {
    false
}

/// The first 16 numbers of 16 vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn turn_block((from, stride): (&[f32], usize), rows: &mut [f32], wide: usize) {
    use std::arch::x86_64::{
        __m512, _mm512_castpd_ps, _mm512_castps_pd, _mm512_loadu_ps, _mm512_setzero_ps,
        _mm512_shuffle_f32x4, _mm512_storeu_ps, _mm512_unpackhi_pd, _mm512_unpackhi_ps,
        _mm512_unpacklo_pd, _mm512_unpacklo_ps,
    };
    let mut lines = [_mm512_setzero_ps(); SQUARE];
    for (j, line) in lines.iter_mut().enumerate() {
        let numbers: Option<&[f32; SQUARE]> = from[j * stride..].first_chunk();
        let numbers = numbers.expect("a vector should have a block's numbers");
        // SAFETY: the array is a vector.
        *line = unsafe { _mm512_loadu_ps(numbers.as_ptr()) };
    }
    // Squares of two, then of four, in each quarter of four lines.
    let low = |a: __m512, b: __m512| {
        _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)))
    };
    let high = |a: __m512, b: __m512| {
        _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)))
    };
    for four in lines.as_chunks_mut::<4>().0 {
        let [a, b, c, d] = *four;
        let (ab, cd) = (_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d));
        let (high_ab, high_cd) = (_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d));
        *four = [
            low(ab, cd),
            high(ab, cd),
            low(high_ab, high_cd),
            high(high_ab, high_cd),
        ];
    }
    // Quarter q of lines r, 4 + r, 8 + r and 12 + r has number 4 q + r of all vectors.
    for r in 0..4 {
        let [a, b, c, d] = [lines[r], lines[4 + r], lines[8 + r], lines[12 + r]];
        let even = [(a, b), (c, d)].map(|(a, b)| _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b));
        let odd = [(a, b), (c, d)].map(|(a, b)| _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b));
        let columns = [
            _mm512_shuffle_f32x4::<0b10_00_10_00>(even[0], even[1]),
            _mm512_shuffle_f32x4::<0b10_00_10_00>(odd[0], odd[1]),
            _mm512_shuffle_f32x4::<0b11_01_11_01>(even[0], even[1]),
            _mm512_shuffle_f32x4::<0b11_01_11_01>(odd[0], odd[1]),
        ];
        for (q, column) in columns.into_iter().enumerate() {
            let row: Option<&mut [f32; SQUARE]> = rows[(4 * q + r) * wide..].first_chunk_mut();
            let row = row.expect("a panel should have a block's rows");
            // SAFETY: the array is a vector.
            unsafe { _mm512_storeu_ps(row.as_mut_ptr(), column) };
        }
    }
}

/// Fetches the cache line at an address, which is written soon.
pub(super) fn fetch<R>(at: *const R) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; any address is allowed.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast())
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Copies `n` vectors, `stride` apart, of `depth` numbers, `step` apart, into panels of `wide`
/// vectors, `panel` apart: number `l` of vector `i` of a panel at `l * wide + i`. The last panel is
/// filled up with zeros. One of `stride` and `step` is 1.
pub(in crate::kernels) fn pack<R: Turned>(
    room: &mut [R],
    (wide, panel): (usize, usize),
    (n, stride): (usize, usize),
    (depth, step): (usize, usize),
    from: &[R],
) {
    // Vectors without numbers: there is nothing to copy, and panels have no length.
    if depth == 0 {
        return;
    }
    if stride == 1 {
        // Neighbouring lines are read, as many as panels that stay in the first cache.
        for (panels, first) in room
            .chunks_mut(PANELS * panel)
            .zip((0..n).step_by(PANELS * wide))
        {
            let width = (n - first).min(PANELS * wide);
            for l in 0..depth {
                let at = l * step + first;
                let ahead = from.as_ptr().wrapping_add(at + AHEAD * step);
                (0..width)
                    .step_by(LINE_BYTES / size_of::<R>())
                    .for_each(|i| fetch(ahead.wrapping_add(i)));
                let (line, panels) = (&from[at..at + width], &mut panels[l * wide..]);
                // Copies of a known length take few instructions: these are the tiles' widths.
                let copied = match wide {
                    4 => copy::<R, 4>(panels, panel, line),
                    6 => copy::<R, 6>(panels, panel, line),
                    8 => copy::<R, 8>(panels, panel, line),
                    16 => copy::<R, 16>(panels, panel, line),
                    32 => copy::<R, 32>(panels, panel, line),
                    64 => copy::<R, 64>(panels, panel, line),
                    _ => 0,
                };
                let panels = panels.chunks_mut(panel).skip(copied / wide);
                for (panel, rest) in panels.zip(line[copied..].chunks(wide)) {
                    let (numbers, zeros) = panel[..wide].split_at_mut(rest.len());
                    numbers.copy_from_slice(rest);
                    zeros.fill(R::ZERO);
                }
            }
        }
        return;
    }
    assert!(step == 1, "vectors or numbers should be next to each other");
    for (panel, at) in room.chunks_mut(panel).zip((0..n).step_by(wide)) {
        let panel = &mut panel[..wide * depth];
        let width = wide.min(n - at);
        let mut first = 0;
        while first + SQUARE <= width {
            let from = (&from[(at + first) * stride..], stride);
            if !R::turn_16(from, depth, &mut panel[first..], wide) {
                break;
            }
            first += SQUARE;
        }
        // A line of each vector at a time: else the panel would pass through the cache once for
        // each vector. There are too many vectors for the processor's own prefetching.
        for (block, rows) in panel.chunks_mut(SQUARE * wide).enumerate() {
            let from = &from[at * stride + block * SQUARE..];
            let mut done = 0;
            if rows.len() == SQUARE * wide {
                done = width / FOUR * FOUR;
                // A known width saves time: this is that of f32 with AVX2. AVX-512 has `turn_16`.
                match wide {
                    16 => turn_all::<R, 16>(rows, wide, first..done, (from, stride)),
                    _ => turn_all::<R, 0>(rows, wide, first..done, (from, stride)),
                }
            }
            for i in done..width {
                let numbers = &from[i * stride..][..rows.len() / wide];
                fetch(numbers.as_ptr().wrapping_add(SQUARE));
                let rows = rows.chunks_exact_mut(wide).zip(numbers);
                rows.for_each(|(row, &number)| row[i] = number);
            }
            rows.chunks_exact_mut(wide)
                .for_each(|row| row[width..].fill(R::ZERO));
        }
    }
}

/// Copies the whole parts of a line to panels, and returns how many numbers that is.
fn copy<R: Copy, const WIDE: usize>(panels: &mut [R], panel: usize, line: &[R]) -> usize {
    let (whole, _) = line.as_chunks::<WIDE>();
    for (numbers, panel) in whole.iter().zip(panels.chunks_mut(panel)) {
        panel[..WIDE].copy_from_slice(numbers);
    }
    whole.len() * WIDE
}

/// Writes vectors as columns of rows `wide` apart, which is `WIDE` unless that is 0. Squares of
/// four are turned in registers.
fn turn_all<R: Turned, const WIDE: usize>(
    rows: &mut [R],
    wide: usize,
    vectors: Range<usize>,
    (from, stride): (&[R], usize),
) {
    let wide = if WIDE == 0 { wide } else { WIDE };
    let rows = &mut rows[..SQUARE * wide];
    for i in vectors.step_by(FOUR) {
        let numbers: [&[R; SQUARE]; FOUR] = std::array::from_fn(|j| {
            let numbers = from[(i + j) * stride..].first_chunk();
            let numbers: &[R; SQUARE] = numbers.expect("a vector should have a block's numbers");
            fetch(numbers.as_ptr().wrapping_add(SQUARE));
            numbers
        });
        for first in (0..SQUARE).step_by(FOUR) {
            let square = numbers.map(|numbers| std::array::from_fn(|l| numbers[first + l]));
            for (l, turned) in R::turned(square).iter().enumerate() {
                if let Some(row) = rows[(first + l) * wide + i..].first_chunk_mut() {
                    *row = *turned;
                }
            }
        }
    }
}

/// Vectors that are written together.
const FOUR: usize = 4;
/// The number of panels that are packed together, which is the number of pages written at a time.
const PANELS: usize = 48;
/// Numbers of each vector are fetched this far ahead.
const AHEAD: usize = 4;
/// Numbers of a vector that are packed together: a cache line or two.
const SQUARE: usize = 16;
