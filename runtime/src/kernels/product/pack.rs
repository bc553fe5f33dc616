//! Packing: numbers of a factor in the order in which micro-kernels read them.

use super::{LINE_BYTES, Tiled};

/// Four vectors of four numbers.
pub(super) type Square<R> = [[R; FOUR]; FOUR];

pub(super) fn turned<R: Copy>(square: Square<R>) -> Square<R> {
    std::array::from_fn(|l| std::array::from_fn(|j| square[j][l]))
}

/// The same in registers: compilers move each number alone.
#[cfg(target_arch = "x86_64")]
pub(super) fn turned_f32(square: Square<f32>) -> Square<f32> {
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
pub(super) fn turned_f32(square: Square<f32>) -> Square<f32> {
    turned(square)
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
pub(super) fn pack<R: Tiled>(
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
                // The widths of the machines' tiles.
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
        // A line of each vector at a time: else the panel would pass through the cache once for
        // each vector. There are too many vectors for the processor's own prefetching.
        for (block, rows) in panel.chunks_mut(SQUARE * wide).enumerate() {
            let from = &from[at * stride + block * SQUARE..];
            let mut done = 0;
            if rows.len() == SQUARE * wide {
                done = width / FOUR * FOUR;
                // The columns of tiles whose numbers are f32.
                match wide {
                    16 => turn_all::<R, 16>(rows, wide, done, (from, stride)),
                    64 => turn_all::<R, 64>(rows, wide, done, (from, stride)),
                    _ => turn_all::<R, 0>(rows, wide, done, (from, stride)),
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

/// Writes `n` vectors as columns of rows `wide` apart, which is `WIDE` unless that is 0. Squares of
/// four are turned in registers.
fn turn_all<R: Tiled, const WIDE: usize>(
    rows: &mut [R],
    wide: usize,
    n: usize,
    (from, stride): (&[R], usize),
) {
    let wide = if WIDE == 0 { wide } else { WIDE };
    let rows = &mut rows[..SQUARE * wide];
    for i in (0..n).step_by(FOUR) {
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
pub(super) const FOUR: usize = 4;
/// The number of panels that are packed together, which is the number of pages written at a time.
const PANELS: usize = 48;
/// Numbers of each vector are fetched this far ahead.
const AHEAD: usize = 4;
/// Numbers of a vector that are packed together: a cache line or two.
const SQUARE: usize = 16;
