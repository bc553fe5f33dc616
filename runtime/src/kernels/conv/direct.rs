//! Convolutions with few channels in a group (depthwise, for example), by direct loops over vectors
//! of neighbouring places in a row.
//!
//! Images are first copied into the thread's workspace, a band of rows at a time, with zeros around
//! them. With a stride, elements that neighbouring places read are put next to each other. After
//! that no loop checks where an image ends.

use super::columns::{Grid, SUMS};
use super::patches::Line;
use super::{Axis, Phase, Sizes};
use crate::kernels::math::{Float, Real};
use crate::kernels::product::Tiled;
use crate::kernels::wide::{Scalar, Wide};
use pulp::{Arch, Simd, WithSimd};
use std::ops::Range;

/// A type whose vectors these loops use.
pub(in crate::kernels) trait Vectors: Real {
    /// A vector.
    type V<S: Simd>: Copy;
    fn lanes<S: Simd>() -> usize;
    fn splat<S: Simd>(simd: S, x: Self) -> Self::V<S>;
    /// The first numbers of a slice, which must have enough.
    fn read<S: Simd>(from: &[Self]) -> Self::V<S>;
    fn write<S: Simd>(to: &mut [Self], v: Self::V<S>);
    /// a * b + c
    fn multiply_add<S: Simd>(simd: S, a: Self::V<S>, b: Self::V<S>, c: Self::V<S>) -> Self::V<S>;
    fn sum<S: Simd>(simd: S, v: Self::V<S>) -> Self;
}

macro_rules! vectors {
    ($ty:ident, $v:ident, $splat:ident, $slices:ident, $mut_slices:ident, $fma:ident,
        $sum:ident) => {
        impl Vectors for $ty {
            type V<S: Simd> = S::$v;
            #[inline(always)]
            fn lanes<S: Simd>() -> usize {
                size_of::<S::$v>() / size_of::<$ty>()
            }
            #[inline(always)]
            fn splat<S: Simd>(simd: S, x: $ty) -> S::$v {
                simd.$splat(x)
            }
            #[inline(always)]
            fn read<S: Simd>(from: &[$ty]) -> S::$v {
                S::$slices(&from[..Self::lanes::<S>()]).0[0]
            }
            #[inline(always)]
            fn write<S: Simd>(to: &mut [$ty], v: S::$v) {
                S::$mut_slices(&mut to[..Self::lanes::<S>()]).0[0] = v;
            }
            #[inline(always)]
            fn multiply_add<S: Simd>(simd: S, a: S::$v, b: S::$v, c: S::$v) -> S::$v {
                simd.$fma(a, b, c)
            }
            #[inline(always)]
            fn sum<S: Simd>(simd: S, v: S::$v) -> $ty {
                simd.$sum(v)
            }
        }
    };
}
vectors!(
    f32,
    f32s,
    splat_f32s,
    as_simd_f32s,
    as_mut_simd_f32s,
    mul_add_f32s,
    reduce_sum_f32s
);
vectors!(
    f64,
    f64s,
    splat_f64s,
    as_simd_f64s,
    as_mut_simd_f64s,
    mul_add_f64s,
    reduce_sum_f64s
);

/// How a dimension's elements lie in the workspace: element `i` of the padded dimension lies at `i
/// % stride * run + i / stride`. The padded dimension begins at element `first` of the source.
#[derive(Clone, Copy)]
struct Padded {
    line: Line,
    first: isize,
    /// Elements for each remainder.
    run: usize,
}

impl Padded {
    /// With room for `places`, which may be more than the dimension has.
    fn new(line: Line, places: usize) -> Padded {
        let reach = line.taps.saturating_sub(1) * line.step.unsigned_abs();
        Padded {
            line,
            first: line.offset + (line.step * line.taps.saturating_sub(1) as isize).min(0),
            run: places + reach.div_ceil(line.stride),
        }
    }
    /// The position of the first place's element for a tap.
    fn at(&self, tap: usize) -> usize {
        let i = (self.line.offset - self.first + tap as isize * self.line.step) as usize;
        i % self.line.stride * self.run + i / self.line.stride
    }
    /// Elements of a row.
    fn pitch(&self) -> usize {
        self.run * self.line.stride
    }
    /// Copies a row of the source.
    fn copy<T: Scalar, W: Wide>(&self, from: &[T], to: &mut [W]) {
        let stride = self.line.stride;
        for (remainder, to) in to.chunks_exact_mut(self.run).enumerate() {
            // Element `j * stride + remainder + first` goes to `j`.
            let start = self.first + remainder as isize;
            let before = |end: isize| ((end - start).max(0) as usize).div_ceil(stride);
            let (lo, hi) = (
                before(0).min(self.run),
                before(from.len() as isize).min(self.run),
            );
            to[..lo].fill(W::ZERO);
            to[hi..].fill(W::ZERO);
            if lo == hi {
                continue;
            }
            let from = &from[(start + (lo * stride) as isize) as usize..];
            if stride == 1 {
                W::load(&from[..hi - lo], &mut to[lo..hi]);
            } else {
                for (to, &from) in to[lo..hi].iter_mut().zip(from.iter().step_by(stride)) {
                    *to = W::of(from);
                }
            }
        }
    }
}

/// Several planes of an image whose convolutions are summed.
struct Planes<'a, T> {
    source: &'a [T],
    /// The start of the first plane, and the number of planes.
    first: usize,
    n: usize,
    y: Line,
    x: Line,
}

/// Rows and vectors of places that are computed at once.
const ROWS: usize = 4;
const WIDE: usize = 4;

impl<T: Float> Planes<'_, T> {
    /// Elements of a band of `rows` rows of places in the workspace.
    fn band(&self, x: &Padded, rows: usize) -> usize {
        self.n * self.band_rows(rows) * x.pitch()
    }
    fn band_rows(&self, rows: usize) -> usize {
        let reach = self.y.taps.saturating_sub(1) * self.y.step.unsigned_abs();
        (rows - 1) * self.y.stride + reach + 1
    }
    /// Copies the elements that places in rows `rows` read.
    fn copy(&self, x: &Padded, rows: Range<usize>, room: &mut [T::Wide]) {
        let plane = self.y.size * self.x.size;
        let down = self.y.step * self.y.taps.saturating_sub(1) as isize;
        let first = self.y.offset + down.min(0) + (rows.start * self.y.stride) as isize;
        let all = self.band_rows(rows.len());
        for (i, to) in room
            .chunks_exact_mut(x.pitch())
            .take(self.n * all)
            .enumerate()
        {
            let y = (first + (i % all) as isize) as usize;
            if y < self.y.size {
                let at = self.first + i / all * plane + y * self.x.size;
                x.copy(&self.source[at..][..self.x.size], to);
            } else {
                to.fill(T::Wide::ZERO);
            }
        }
    }
    /// The number of rows of places that the workspace has room for: all, or a multiple of
    /// [`ROWS`], or 0.
    fn rows_that_fit(&self, x: &Padded, room: usize) -> usize {
        let all = self.y.places.next_multiple_of(ROWS);
        if self.band(x, all) <= room {
            return all;
        }
        let each = self.n * x.pitch() * self.y.stride * ROWS;
        let least = self.band(x, ROWS);
        room.checked_sub(least)
            .map_or(0, |rest| rest / each.max(1) * ROWS + ROWS)
    }
}

/// The largest number of taps of a row, and of taps of a channel whose gradients have direct loops.
const MOST_TAPS: usize = 256;
/// The largest number of weights that are read for one plane of a result.
const WEIGHTS: usize = 4096;

/// The places of one plane of a result.
struct Sums<'a, 'b, T: Float> {
    planes: Planes<'a, T>,
    /// For each plane, its taps.
    weights: &'b [T::Wide],
    start: T::Wide,
    grid: Grid,
    to: &'b mut [T],
    room: &'b mut [T::Wide],
}

impl<T: Float> WithSimd for Sums<'_, '_, T>
where
    T::Wide: Vectors,
{
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let lanes = T::Wide::lanes::<S>();
        if self.planes.y.places == 0 {
            return;
        }
        match self.planes.x.places.div_ceil(lanes) {
            0 => {}
            1 => self.run::<S, ROWS, 1>(simd),
            2 => self.run::<S, { ROWS / 2 }, 2>(simd),
            _ => self.run::<S, 1, WIDE>(simd),
        }
    }
}

impl<T: Float> Sums<'_, '_, T>
where
    T::Wide: Vectors,
{
    /// `R` rows of `V` vectors at once.
    #[inline(always)]
    fn run<S: Simd, const R: usize, const V: usize>(self, simd: S) {
        let Sums {
            planes,
            weights,
            start,
            grid,
            to,
            room,
        } = self;
        let step = V * T::Wide::lanes::<S>();
        let x = Padded::new(planes.x, planes.x.places.next_multiple_of(step));
        let most = planes.rows_that_fit(&x, room.len());
        assert!(most > 0, "the workspace should have room for some rows");
        let (pitch, down) = (x.pitch(), planes.y.step);
        let lowest = (down * planes.y.taps.saturating_sub(1) as isize).min(0);
        let mut taps = [0; MOST_TAPS];
        for (kx, tap) in taps[..planes.x.taps].iter_mut().enumerate() {
            *tap = x.at(kx);
        }

        for top in (0..planes.y.places).step_by(most) {
            let end = (top + most).min(planes.y.places);
            let height = (end - top).next_multiple_of(R);
            planes.copy(&x, top..top + height, room);
            let tile = Tile {
                planes: &planes,
                weights,
                room,
                pitch,
                plane: planes.band_rows(height) * pitch,
                lowest,
                taps: &taps[..planes.x.taps],
            };
            for y in (top..end).step_by(R) {
                for left in (0..planes.x.places).step_by(step) {
                    let first = (y - top) * planes.y.stride * pitch + left;
                    let sums = tile.sums::<S, R, V>(simd, start, first);
                    let n = step.min(planes.x.places - left);
                    for (r, sums) in sums.iter().enumerate().take(end - y) {
                        let mut numbers = [T::Wide::ZERO; 16 * WIDE];
                        for (v, &sum) in sums.iter().enumerate() {
                            T::Wide::write::<S>(&mut numbers[v * T::Wide::lanes::<S>()..], sum);
                        }
                        grid.store(to, (y + r, left), &numbers[..n]);
                    }
                }
            }
        }
    }
}

/// The elements that a block of places reads: a band in the workspace.
struct Tile<'a, T: Float> {
    planes: &'a Planes<'a, T>,
    weights: &'a [T::Wide],
    room: &'a [T::Wide],
    /// The distance from a row to the next, and from a plane to the next.
    pitch: usize,
    plane: usize,
    /// The lowest row that a tap reads, relative to the first tap's row.
    lowest: isize,
    /// The positions at which the taps of a row are read.
    taps: &'a [usize],
}

impl<T: Float> Tile<'_, T>
where
    T::Wide: Vectors,
{
    /// The sums of `R` rows of `V` vectors. The first reads from `first` on.
    #[inline(always)]
    fn sums<S: Simd, const R: usize, const V: usize>(
        &self,
        simd: S,
        start: T::Wide,
        first: usize,
    ) -> [[<T::Wide as Vectors>::V<S>; V]; R] {
        let lanes = T::Wide::lanes::<S>();
        let down = self.planes.y.stride * self.pitch;
        let rows = self.planes.y.taps;
        let mut sums = [[T::Wide::splat(simd, start); V]; R];
        for (i, weights) in self
            .weights
            .chunks_exact(self.taps.len().max(1))
            .enumerate()
        {
            let (plane, ky) = (i / rows, i % rows);
            let row = (ky as isize * self.planes.y.step - self.lowest) as usize;
            let row = &self.room[plane * self.plane + row * self.pitch + first..];
            for (&w, &tap) in weights.iter().zip(self.taps) {
                let w = T::Wide::splat(simd, w);
                for (r, sums) in sums.iter_mut().enumerate() {
                    let from = &row[tap + r * down..][..V * lanes];
                    for (v, sum) in sums.iter_mut().enumerate() {
                        let x = T::Wide::read::<S>(&from[v * lanes..]);
                        *sum = T::Wide::multiply_add(simd, w, x, *sum);
                    }
                }
            }
        }
        sums
    }
}

impl Grid {
    /// Writes neighbouring places in a row of a plane.
    #[inline(always)]
    fn store<T: Float>(&self, plane: &mut [T], (y, x): (usize, usize), from: &[T::Wide]) {
        let row = (self.first.0 + y * self.step.0) * self.width;
        let to = &mut plane[row + self.first.1 + x * self.step.1..];
        if self.step.1 == 1 {
            T::Wide::store(from, &mut to[..from.len()]);
        } else {
            for (to, from) in to.iter_mut().step_by(self.step.1).zip(from) {
                *to = from.narrow();
            }
        }
    }
}

/// Whether the workspace has room for the elements that a few rows of a result read, with the
/// vectors of any machine.
fn fits(n: usize, y: &Line, x: &Line) -> bool {
    let reach = |line: &Line| line.taps.saturating_sub(1) * line.step.unsigned_abs();
    let rows = ROWS * y.stride + reach(y);
    let width = (x.places + 64) * x.stride + reach(x) + x.stride;
    let room = n.checked_mul(rows).and_then(|n| n.checked_mul(width));
    let weights = n.saturating_mul(y.taps * x.taps) <= WEIGHTS && x.taps <= MOST_TAPS;
    weights && room.is_some_and(|room| room <= SUMS - WEIGHTS)
}

/// Whether the forward, the gradient of the input and the gradient of the weights have direct
/// loops.
pub(super) fn takes(s: &Sizes) -> [bool; 3] {
    let (y, x) = (Line::forward(&s.y), Line::forward(&s.x));
    // At least as many as each phase reads.
    let back = |axis: &Axis| {
        let phase = Phase::new(axis, 0);
        let taps = axis.taps.div_ceil(phase.step);
        Phase { taps, ..phase }.line(axis)
    };
    let rows = Line {
        places: s.y.output,
        stride: s.y.output * s.y.stride / ROWS + s.y.stride,
        ..y
    };
    let whole = (s.y.output + 1) * (s.x.output + 64) <= SUMS / 4;
    let both = s.inputs.max(s.outputs) <= super::FEW;
    [
        s.outputs <= super::FEW && fits(s.inputs, &y, &x),
        s.inputs <= super::FEW && fits(s.outputs, &back(&s.y), &back(&s.x)),
        both && whole && fits(2, &rows, &x) && s.y.taps * s.x.taps <= MOST_TAPS,
    ]
}

/// Writes channels of the result, counted through all images.
pub(super) fn forward<T: Float>(
    s: &Sizes,
    (x, w, bias): (&[T], &[T], Option<&[T]>),
    channels: Range<usize>,
    y: &mut [T],
) where
    T::Wide: Vectors,
{
    let plane = s.planes().0;
    T::Wide::with_space(SUMS, |room| {
        for (channel, to) in channels.zip(y.chunks_exact_mut(plane.max(1))) {
            let (b, c) = (
                channel / (s.groups * s.outputs),
                channel % (s.groups * s.outputs),
            );
            let (g, o) = (c / s.outputs, c % s.outputs);
            let n = s.depth();
            let (weights, room) = room.split_at_mut(WEIGHTS);
            T::Wide::load(&w[s.weight_row(g, o, 0, 0)..][..n], &mut weights[..n]);
            Arch::new().dispatch(Sums {
                planes: Planes {
                    source: x,
                    first: s.input_row(b, g, 0, 0),
                    n: s.inputs,
                    y: Line::forward(&s.y),
                    x: Line::forward(&s.x),
                },
                weights: &weights[..n],
                start: bias.map_or(T::Wide::ZERO, |bias| T::Wide::of(bias[c])),
                grid: Grid {
                    places: (s.y.output, s.x.output),
                    first: (0, 0),
                    step: (1, 1),
                    width: s.x.output,
                },
                to,
                room,
            });
        }
    });
}

/// Writes the gradients of channels of the input, counted through all images.
pub(super) fn input<T: Float>(
    s: &Sizes,
    (dy, w): (&[T], &[T]),
    channels: Range<usize>,
    dx: &mut [T],
) where
    T::Wide: Vectors,
{
    let plane = s.planes().1;
    T::Wide::with_space(SUMS, |room| {
        for (channel, to) in channels.zip(dx.chunks_exact_mut(plane.max(1))) {
            let (b, c) = (
                channel / (s.groups * s.inputs),
                channel % (s.groups * s.inputs),
            );
            let (g, i) = (c / s.inputs, c % s.inputs);
            for y in Phase::all(s.y) {
                for x in Phase::all(s.x) {
                    let n = s.outputs * y.taps * x.taps;
                    let (weights, room) = room.split_at_mut(WEIGHTS);
                    for (k, weight) in weights[..n].iter_mut().enumerate() {
                        let (kx, rest) = (k % x.taps, k / x.taps);
                        let (ky, o) = (rest % y.taps, rest / y.taps);
                        let row = s.weight_row(g, o, i, y.first + ky * y.step);
                        *weight = T::Wide::of(w[row + x.first + kx * x.step]);
                    }
                    Arch::new().dispatch(Sums {
                        planes: Planes {
                            source: dy,
                            first: s.output_row(b, g, 0, 0),
                            n: s.outputs,
                            y: y.line(&s.y),
                            x: x.line(&s.x),
                        },
                        weights: &weights[..n],
                        start: T::Wide::ZERO,
                        grid: Grid {
                            places: (y.places, x.places),
                            first: (y.remainder, x.remainder),
                            step: (s.y.stride, s.x.stride),
                            width: s.x.input,
                        },
                        to: &mut *to,
                        room,
                    });
                }
            }
        }
    });
}

/// Writes the gradients of channels of weights: sums over an image's places in vectors, over images
/// in f64.
pub(super) fn weights<T: Float>(
    s: &Sizes,
    (dy, x): (&[T], &[T]),
    channels: Range<usize>,
    dw: &mut [T],
) where
    T::Wide: Vectors,
{
    let (outputs, taps) = (s.outputs, s.y.taps * s.x.taps);
    T::Wide::with_space(SUMS, |room| {
        for (i, dw) in dw.chunks_exact_mut(taps).enumerate() {
            let (channel, c) = (channels.start + i / s.inputs, i % s.inputs);
            let mut totals = [0.0; MOST_TAPS];
            for b in 0..s.batch {
                Arch::new().dispatch(WeightSums {
                    s,
                    dy: &dy[s.output_row(b, channel / outputs, channel % outputs, 0)..],
                    image: Planes {
                        source: x,
                        first: s.input_row(b, channel / outputs, c, 0),
                        n: 1,
                        y: Line::forward(&s.y),
                        x: Line::forward(&s.x),
                    },
                    totals: &mut totals,
                    room: &mut *room,
                });
            }
            for (dw, &total) in dw.iter_mut().zip(&totals) {
                *dw = T::cast_f64(total);
            }
        }
    });
}

/// The sums over one image of one channel's weights.
struct WeightSums<'a, 'b, T: Float> {
    s: &'a Sizes,
    dy: &'a [T],
    image: Planes<'a, T>,
    totals: &'b mut [f64; MOST_TAPS],
    room: &'b mut [T::Wide],
}

impl<T: Float> WithSimd for WeightSums<'_, '_, T>
where
    T::Wide: Vectors,
{
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let s = self.s;
        let (height, width) = (s.y.output, s.x.output);
        let places = width.next_multiple_of(T::Wide::lanes::<S>());
        let x = Padded::new(self.image.x, places);
        let (dys, room) = self.room.split_at_mut(height * places);
        // Zeros after a row: elements that non-existing places read add nothing.
        for (from, to) in self.dy.chunks(width).zip(dys.chunks_exact_mut(places)) {
            T::Wide::load(from, &mut to[..width]);
            to[width..].fill(T::Wide::ZERO);
        }
        self.image.copy(&x, 0..height, room);
        let sums = TapSums {
            dys,
            places,
            room,
            x,
            down: x.pitch() * s.y.stride,
        };
        for ky in 0..s.y.taps {
            let row = ky * s.y.dilation * x.pitch();
            for kx in (0..s.x.taps).step_by(4) {
                let totals = &mut self.totals[ky * s.x.taps + kx..];
                match s.x.taps - kx {
                    1 => sums.add::<S, 1>(simd, row, kx, totals),
                    2 => sums.add::<S, 2>(simd, row, kx, totals),
                    3 => sums.add::<S, 3>(simd, row, kx, totals),
                    _ => sums.add::<S, 4>(simd, row, kx, totals),
                }
            }
        }
    }
}

/// The gradient of a result's plane and the image, in the workspace.
struct TapSums<'a, W> {
    dys: &'a [W],
    places: usize,
    room: &'a [W],
    x: Padded,
    /// The distance between the elements that a row of places reads and the elements that the next
    /// row reads.
    down: usize,
}

impl<W: Vectors> TapSums<'_, W> {
    /// Adds the sums of `N` neighbouring taps in a row.
    #[inline(always)]
    fn add<S: Simd, const N: usize>(&self, simd: S, row: usize, kx: usize, totals: &mut [f64]) {
        let lanes = W::lanes::<S>();
        let mut sums = [W::splat(simd, W::ZERO); N];
        let taps: [usize; N] = std::array::from_fn(|i| row + self.x.at(kx + i));
        for (y, dys) in self.dys.chunks_exact(self.places).enumerate() {
            for (left, dys) in dys.chunks_exact(lanes).enumerate() {
                let dy = W::read::<S>(dys);
                let at = y * self.down + left * lanes;
                for (sum, tap) in sums.iter_mut().zip(taps) {
                    let x = W::read::<S>(&self.room[at + tap..]);
                    *sum = W::multiply_add(simd, dy, x, *sum);
                }
            }
        }
        for (total, sum) in totals.iter_mut().zip(sums) {
            *total += W::sum(simd, sum).to_f64();
        }
    }
}
