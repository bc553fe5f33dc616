//! Packing: numbers of a factor in the order in which micro-kernels read them.

use super::{LINE_BYTES, MOST_WIDE, Tiled};

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

/// Copies `n` vectors, `stride` apart, of `depth` numbers, `step` apart, into panels of `WIDE`
/// vectors, `panel` apart: number `l` of vector `i` of a panel at `l * WIDE + i`. The last panel is
/// filled up with zeros. One of `stride` and `step` is 1.
pub(super) fn pack<R: Tiled, const WIDE: usize>(
    room: &mut [R],
    panel: usize,
    (n, stride): (usize, usize),
    (depth, step): (usize, usize),
    from: &[R],
) {
    const { assert!(WIDE <= MOST_WIDE) };
    // Vectors without numbers: there is nothing to copy, and panels have no length.
    if depth == 0 {
        return;
    }
    if stride == 1 {
        // Neighbouring lines are read, as many as panels that stay in the first cache.
        for (panels, first) in room
            .chunks_mut(PANELS * panel)
            .zip((0..n).step_by(PANELS * WIDE))
        {
            let width = (n - first).min(PANELS * WIDE);
            for l in 0..depth {
                let at = l * step + first;
                let ahead = from.as_ptr().wrapping_add(at + AHEAD * step);
                (0..width)
                    .step_by(LINE_BYTES / size_of::<R>())
                    .for_each(|i| fetch(ahead.wrapping_add(i)));
                let (whole, rest) = from[at..at + width].as_chunks::<WIDE>();
                let mut panels = panels.chunks_mut(panel);
                for (numbers, panel) in whole.iter().zip(&mut panels) {
                    panel[l * WIDE..][..WIDE].copy_from_slice(numbers);
                }
                if let (false, Some(panel)) = (rest.is_empty(), panels.next()) {
                    let (numbers, zeros) = panel[l * WIDE..][..WIDE].split_at_mut(rest.len());
                    numbers.copy_from_slice(rest);
                    zeros.fill(R::ZERO);
                }
            }
        }
        return;
    }
    for (panel, at) in room.chunks_mut(panel).zip((0..n).step_by(WIDE)) {
        let (panel, _) = panel[..WIDE * depth].as_chunks_mut::<WIDE>();
        let width = WIDE.min(n - at);
        assert!(step == 1, "vectors or numbers should be next to each other");
        // A line of each vector at a time: else the panel would pass through the cache once for
        // each vector. There are too many vectors for the processor's own prefetching.
        for (block, rows) in panel.chunks_mut(SQUARE).enumerate() {
            let from = &from[at * stride + block * SQUARE..];
            let mut done = 0;
            if let Some(rows) = rows.as_chunks_mut::<SQUARE>().0.first_mut() {
                done = width / FOUR * FOUR;
                for i in (0..done).step_by(FOUR) {
                    let numbers = std::array::from_fn(|j| {
                        let numbers = from[(i + j) * stride..].first_chunk::<SQUARE>();
                        let numbers = numbers.expect("a vector should have a block's numbers");
                        fetch(numbers.as_ptr().wrapping_add(SQUARE));
                        numbers
                    });
                    turn(numbers, rows, i);
                }
            }
            for i in done..width {
                let numbers = &from[i * stride..][..rows.len()];
                fetch(numbers.as_ptr().wrapping_add(SQUARE));
                let rows = rows.iter_mut().zip(numbers);
                rows.for_each(|(row, &number)| row[i] = number);
            }
            rows.iter_mut().for_each(|row| row[width..].fill(R::ZERO));
        }
    }
}

/// Writes four vectors as columns, from column `at` on. Squares of four are turned in registers.
fn turn<R: Tiled, const WIDE: usize>(
    numbers: [&[R; SQUARE]; FOUR],
    rows: &mut [[R; WIDE]; SQUARE],
    at: usize,
) {
    for (first, rows) in (0..SQUARE)
        .step_by(FOUR)
        .zip(rows.as_chunks_mut::<FOUR>().0)
    {
        let square = numbers.map(|numbers| std::array::from_fn(|l| numbers[first + l]));
        for (row, turned) in rows.iter_mut().zip(R::turned(square)) {
            if let Some(four) = row[at..].first_chunk_mut::<FOUR>() {
                *four = turned;
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
