//! Convolutions and their gradients by direct loops over vectors of neighbouring positions in bands
//! of an image, see [`bands`](super::bands). No patches are packed: for few channels that would
//! take longer than multiplying them.
//!
//! A tile is a few rows of a few vectors, whose sums are registers. Every sum is made in the order
//! of the taps, or of the positions in rectangles that depend only on the shape.

use super::bands::{Band, largest, load_row, rectangles};
use super::columns::{Product, SUMS};
use super::patches::Patches;
use super::weights::Gradients;
use crate::kernel::{Planes, Window};
use crate::kernels::math::Float;
use crate::kernels::product::Tiled;
use crate::kernels::vectors::Vectors;
use crate::kernels::wide::Wide;
use pulp::{Arch, Simd, WithSimd};
use std::ops::Range;

/// Rows of a tile, and its vectors: as many as keep two multiplications in flight each cycle, with
/// sums in 16 registers. Other numbers of rows have other numbers of vectors, see [`by_rows`].
const ROWS: usize = 4;
/// Positions of tiles that are stored together, which takes as long for one tile. They are fewer if
/// sums are deep: then elements of all channels stay in the first cache.
const STORED: usize = 512;
const STORED_DEPTH: usize = 1 << 13;
/// Room for sums of a tile's rows before they are stored. Those of the last tile may be too many.
const ROW: usize = STORED + 8 * 16;
pub(super) const NUMBERS: usize = ROWS * ROW;
/// Elements of a band: 256 KiB of f32, in the second cache.
const BAND: usize = 1 << 16;
/// Positions over which a tile's sums of weights' gradients are made: its rows of the result's
/// gradient then stay in the first cache.
const POSITIONS: usize = 1024;
/// Packing patches takes as long as computing about so many rows of a product. Measured on Zen 3.
const PACKED_ROWS: usize = 32;
/// With more rows, products of packed patches are as fast, and faster if there are few taps.
const MOST_ROWS: usize = 256;
/// The same if products multiply pairs of bf16. Measured on Zen 5.
const MOST_ROWS_OF_PAIRS: usize = 32;
/// With fewer positions, adding up the numbers of vectors would take too long. And products of
/// patches of one tap, which are copied once as bands are, are faster.
const LEAST_POSITIONS: usize = 96;
/// Packed weights that every position of a band is multiplied with before the next weights are
/// used: 128 KiB of f32.
const WEIGHTS: usize = 1 << 15;
/// Weights that are packed, or whose gradients are summed, at once. Their workspace also has room
/// for one row's weights, which are at most as many as a band's elements.
const MOST_WEIGHTS: usize = 7 << 16;
/// Numbers of a tile's rows of weights that are read before they are packed.
const LINES: usize = 1 << 14;
/// Taps whose positions are in a table.
pub(super) const TAPS: usize = 512;
/// Output channels whose gradients are copied at once.
const OUTPUTS: usize = 64;

/// The largest rectangles of patches' places whose bands have at most so many positions, if the
/// workspace has room for their bands and for the weights of some rows.
fn rectangle<T: Float>(
    patches: &Patches<'_, T>,
    rows: usize,
    positions: usize,
) -> Option<((usize, usize), Band)> {
    let (y, x) = (&patches.y, &patches.x);
    if y.taps.saturating_mul(x.taps) > TAPS || y.places * x.places == 0 {
        return None;
    }
    let size = largest((y, x), patches.channels, (BAND, positions));
    let band = Band::new((y, x), patches.channels, (0..size.0, 0..size.1));
    let weights = rows.min(OUTPUTS).saturating_mul(patches.rows() + 1);
    (band.len() <= SUMS / 2 && weights <= MOST_WEIGHTS).then_some((size, band))
}

/// Runs loops. Their code is large: there is one copy of it for each type that is computed in.
#[inline(never)]
pub(super) fn in_vectors(loops: impl WithSimd<Output = ()>) {
    Arch::new().dispatch(loops);
}

/// Work on rows that is done in tiles.
trait Tiles {
    /// Works on rows in tiles of `R` rows and `V` vectors; the last of a row has `F` vectors, if
    /// these are enough.
    fn rows<S: Simd, const R: usize, const V: usize, const F: usize>(
        &mut self,
        simd: S,
        rows: Range<usize>,
    );
}

#[inline(always)]
fn by_rows<S: Simd>(tiles: &mut impl Tiles, simd: S, rows: Range<usize>) {
    let whole = rows.start + rows.len() / ROWS * ROWS;
    let pairs = whole + (rows.end - whole) / 2 * 2;
    if rows.start < whole {
        tiles.rows::<S, ROWS, 3, 1>(simd, rows.start..whole);
    }
    if whole < pairs {
        tiles.rows::<S, 2, 6, 3>(simd, whole..pairs);
    }
    if pairs < rows.end {
        tiles.rows::<S, 1, 8, 4>(simd, pairs..rows.end);
    }
}

/// The first place of a rectangle, and the band that it reads.
pub(super) fn band<T: Float>(
    patches: &Patches<'_, T>,
    channels: usize,
    (rows, columns): (Range<usize>, Range<usize>),
) -> ((usize, usize), Band) {
    let first = (rows.start, columns.start);
    let lines = (&patches.y, &patches.x);
    (first, Band::new(lines, channels, (rows, columns)))
}

/// Fills a table with the positions at which the first place reads the taps of as many channels as
/// fit. Also returns the distance to the next so many channels.
pub(super) fn taps<'a, T: Float>(
    band: &Band,
    patches: &Patches<'_, T>,
    channels: usize,
    table: &'a mut [usize; TAPS],
) -> (&'a [usize], usize) {
    let taps = patches.y.taps * patches.x.taps;
    let channels = channels.min(TAPS / taps.max(1));
    let table = &mut table[..channels * taps];
    for (i, table) in table.chunks_exact_mut(taps.max(1)).enumerate() {
        band.taps(table);
        table.iter_mut().for_each(|to| *to += i * band.plane());
    }
    (table, channels * band.plane())
}

impl<T: Float> Product<'_, T> {
    /// Whether direct loops are faster than products of packed patches. Patches that many rows read
    /// cost little. But flipped weights are packed for each block of patches.
    pub(super) fn is_direct(&self) -> bool {
        let taps = self.patches.y.taps * self.patches.x.taps;
        let few = match self.tile.pairs(T::IS_BF16) {
            Some(_) => self.rows <= MOST_ROWS_OF_PAIRS,
            None => self.rows <= MOST_ROWS || 1 < taps && self.weights.is_flipped(),
        };
        let rectangle = rectangle(&self.patches, self.rows, usize::MAX);
        few && rectangle.is_some_and(|((height, width), band)| {
            // Each row of the product is also computed for positions that are not places.
            let between = band.positions() - height * width;
            between * self.rows <= height * width * PACKED_ROWS
                && (1 < taps || LEAST_POSITIONS <= band.positions())
        })
    }
    /// Computes some columns.
    pub(super) fn directly(&self, columns: Range<usize>, planes: &mut Planes<'_, T>) {
        let (patches, depth) = (&self.patches, self.patches.rows());
        let lines = (&patches.y, &patches.x);
        let size = largest(lines, patches.channels, (BAND, usize::MAX));
        let most = (MOST_WEIGHTS / (depth + 1) / ROWS * ROWS).max(ROWS);
        let mut table = [0; TAPS];
        T::Wide::with_room(|weights| {
            let (lines, weights) = weights.split_at_mut(LINES);
            T::Wide::with_space(SUMS, |room| {
                let (numbers, room) = room.split_at_mut(NUMBERS);
                for top in (0..self.rows).step_by(most) {
                    let rows = top..(top + most).min(self.rows);
                    self.pack_weights(weights, lines, rows.clone());
                    let places = (patches.y.places, patches.x.places);
                    rectangles(columns.clone(), places, size, |image, down, right| {
                        let (first, band) = band(patches, patches.channels, (down, right));
                        band.copy(patches.image(image), room);
                        let (taps, step) = taps(&band, patches, patches.channels, &mut table);
                        let top = rows.start;
                        let mut store = |tile: Computed<'_, T::Wide>| {
                            self.place(tile, top, &band, first, self.plane + image, planes);
                        };
                        in_vectors(Sums {
                            band: &band,
                            depth,
                            taps,
                            step,
                            room,
                            weights,
                            numbers,
                            rows: rows.len(),
                            store: &mut store,
                        });
                    });
                }
            });
        });
    }
    /// Writes a tile's sums; `top` is the first row of those whose weights are packed.
    fn place(
        &self,
        tile: Computed<'_, T::Wide>,
        top: usize,
        band: &Band,
        first: (usize, usize),
        plane: usize,
        planes: &mut Planes<'_, T>,
    ) {
        let from = tile.numbers.chunks_exact(ROW);
        let rows = top + tile.row..top + tile.row + from.len();
        self.segments(band, first, (tile.at, tile.width), |positions, elements| {
            let mut window = planes.window(plane, rows.clone(), elements);
            for (r, from) in from.clone().enumerate() {
                self.grid.store(&from[positions.clone()], window.row(r));
            }
        });
    }
    /// Calls `f` with the elements of a plane at some of a band's positions, and with the numbers
    /// of these positions, counted from the first.
    pub(super) fn segments(
        &self,
        band: &Band,
        first: (usize, usize),
        (at, n): (usize, usize),
        mut f: impl FnMut(Range<usize>, Range<usize>),
    ) {
        // Of the positions, some are not places.
        let (pitch, width) = (band.pitch(), band.width());
        let (mut y, mut x, mut done) = (at / pitch, at % pitch, 0);
        while done < n {
            if x >= width {
                (y, x, done) = (y + 1, 0, done + pitch - x);
                continue;
            }
            let place = (first.0 + y) * self.patches.x.places + first.1 + x;
            let len = (width - x).min(n - done).min(self.grid.neighbours(place));
            f(done..done + len, self.grid.elements(place, len));
            (x, done) = (x + len, done + len);
        }
    }
    /// For each tile of [`by_rows`]: the numbers at which its rows' sums begin, then for each tap a
    /// weight for each row.
    fn pack_weights(&self, room: &mut [T::Wide], lines: &mut [T::Wide], rows: Range<usize>) {
        let depth = self.patches.rows();
        let mut top = rows.start;
        while top < rows.end {
            let height = match rows.end - top {
                1 => 1,
                2 | 3 => 2,
                _ => ROWS,
            };
            let tile = &mut room[(top - rows.start) * (depth + 1)..][..height * (depth + 1)];
            let (starts, tile) = tile.split_at_mut(height);
            for (i, start) in starts.iter_mut().enumerate() {
                let bias = self.bias.map(|bias| T::Wide::of(bias[top + i]));
                *start = bias.unwrap_or(T::Wide::ZERO);
            }
            let few = LINES / ROWS;
            for (first, tile) in (0..depth).step_by(few).zip(tile.chunks_mut(few * height)) {
                let numbers = first..depth.min(first + few);
                let n = numbers.len();
                self.weights.rows(lines, top..top + height, numbers);
                for (i, line) in lines.chunks_exact(n).take(height).enumerate() {
                    let to = tile.chunks_exact_mut(height).zip(line);
                    to.for_each(|(to, &weight)| to[i] = weight);
                }
            }
            top += height;
        }
    }
}

/// Sums of a tile's rows.
pub(super) struct Computed<'a, W> {
    /// The first row of those whose weights are packed.
    pub(super) row: usize,
    pub(super) at: usize,
    /// Positions.
    pub(super) width: usize,
    /// [`ROW`] numbers for each row.
    pub(super) numbers: &'a [W],
}

/// The sums of a band's places. They are the same for all types that are computed in one.
pub(super) struct Sums<'a, W> {
    pub(super) band: &'a Band,
    pub(super) room: &'a [W],
    pub(super) weights: &'a [W],
    /// The weights of a row.
    pub(super) depth: usize,
    /// Room for a tile.
    pub(super) numbers: &'a mut [W],
    /// The rows whose weights are packed.
    pub(super) rows: usize,
    /// The positions at which the first place reads some channels' taps, and the distance to the
    /// next channels.
    pub(super) taps: &'a [usize],
    pub(super) step: usize,
    pub(super) store: &'a mut dyn FnMut(Computed<'_, W>),
}

impl<W: Vectors> WithSimd for Sums<'_, W> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let block = (WEIGHTS / (self.depth + 1) / ROWS * ROWS).max(ROWS);
        let rows = self.rows;
        for top in (0..rows).step_by(block) {
            by_rows(&mut self, simd, top..(top + block).min(rows));
        }
    }
}

impl<W: Vectors> Tiles for Sums<'_, W> {
    #[inline(always)]
    fn rows<S: Simd, const R: usize, const V: usize, const F: usize>(
        &mut self,
        simd: S,
        rows: Range<usize>,
    ) {
        let (lanes, positions) = (W::lanes::<S>(), self.band.positions());
        let step = V * lanes;
        let together = STORED.min(STORED_DEPTH / (self.depth + 1)).max(step) / step * step;
        for start in (0..positions).step_by(together) {
            let end = positions.min(start + together);
            for row in rows.clone().step_by(R) {
                let mut at = start;
                while at < end {
                    if end - at <= F * lanes {
                        self.tile::<S, R, F>(simd, row, (start, at));
                        at += F * lanes;
                    } else {
                        self.tile::<S, R, V>(simd, row, (start, at));
                        at += step;
                    }
                }
                (self.store)(Computed {
                    row,
                    at: start,
                    width: end - start,
                    numbers: &self.numbers[..R * ROW],
                });
            }
        }
    }
}

impl<W: Vectors> Sums<'_, W> {
    /// Computes `V` vectors of `R` rows.
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const V: usize>(
        &mut self,
        simd: S,
        row: usize,
        (start, at): (usize, usize),
    ) {
        let sums = self.sums::<S, R, V>(simd, row, at);
        let lanes = W::lanes::<S>();
        for (r, sums) in sums.into_iter().enumerate() {
            let to = &mut self.numbers[r * ROW + at - start..][..V * lanes];
            for (to, sum) in to.chunks_exact_mut(lanes).zip(sums) {
                W::write::<S>(to, sum);
            }
        }
    }
    #[inline(always)]
    fn sums<S: Simd, const R: usize, const V: usize>(
        &self,
        simd: S,
        row: usize,
        at: usize,
    ) -> [[W::V<S>; V]; R] {
        let (lanes, depth) = (W::lanes::<S>(), self.depth);
        let (weights, _) = self.weights[row * (depth + 1)..][..R * (depth + 1)].as_chunks::<R>();
        let (start, weights) = weights.split_first().expect("sums should begin");
        let mut sums = start.map(|start| [W::splat(simd, start); V]);
        let channels = weights.chunks(self.taps.len().max(1));
        for (i, weights) in channels.enumerate() {
            let room = &self.room[i * self.step + at..];
            for (weights, &tap) in weights.iter().zip(self.taps) {
                let xs = W::vectors::<S>(&room[tap..][..V * lanes]);
                for (sums, &w) in sums.iter_mut().zip(weights) {
                    let w = W::splat(simd, w);
                    for (sum, &x) in sums.iter_mut().zip(xs) {
                        *sum = W::multiply_add(simd, w, x, *sum);
                    }
                }
            }
        }
        sums
    }
}

impl<T: Float> Gradients<'_, T> {
    /// Whether direct loops are faster than products of packed patches and packed gradients of the
    /// result. Each is packed for the other's rows.
    pub(super) fn is_direct(&self) -> bool {
        let (_, outputs) = self.channels;
        let rectangle = rectangle(&self.patches, outputs, POSITIONS);
        outputs.min(self.patches.rows()) <= PACKED_ROWS
            && rectangle.is_some_and(|(_, band)| band.positions() >= LEAST_POSITIONS)
    }
    /// Computes the gradients of some weights of some output channels: sums in vectors over the
    /// positions of a band, then over all bands.
    pub(super) fn directly(
        &self,
        (outputs, weights): (Range<usize>, Range<usize>),
        to: &mut Window<'_, T>,
    ) {
        let patches = &self.patches;
        let taps = patches.y.taps * patches.x.taps;
        let channels = weights.start / taps..weights.end.div_ceil(taps);
        let mut table = [0; TAPS];
        // The same rectangles for any part of the weights: sums are cut there.
        let size = largest(
            (&patches.y, &patches.x),
            patches.channels,
            (BAND, POSITIONS),
        );
        let places = (patches.y.places, patches.x.places);
        T::Wide::with_room(|sums| {
            T::Wide::with_space(SUMS, |room| {
                let (dys, room) = room.split_at_mut(OUTPUTS * ROW_OF_DY);
                for top in (0..outputs.len()).step_by(OUTPUTS) {
                    let some = top..(top + OUTPUTS).min(outputs.len());
                    let sums = &mut sums[..some.len() * weights.len()];
                    sums.fill(T::Wide::ZERO);
                    rectangles(0..patches.columns(), places, size, |image, down, right| {
                        let (first, band) = band(patches, channels.len(), (down, right));
                        let first = first.0 * places.1 + first.1;
                        let source = patches.image(image);
                        let plane = patches.y.size * patches.x.size;
                        band.copy(&source[channels.start * plane..], room);
                        for (o, to) in some.clone().zip(dys.chunks_exact_mut(ROW_OF_DY)) {
                            let output = outputs.start + o;
                            self.copy_dy(&band, (image, output), (first, places.1), to);
                        }
                        band.taps(&mut table[..taps]);
                        in_vectors(WeightSums {
                            band: &band,
                            room,
                            dys,
                            row: ROW_OF_DY,
                            outputs: some.len(),
                            first: channels.start * taps,
                            taps: &table[..taps],
                            weights: weights.clone(),
                            sums,
                        });
                    });
                    let mut to = to.part(some, 0..weights.len());
                    for (i, sums) in sums.chunks_exact(weights.len()).enumerate() {
                        T::Wide::store(sums, to.row(i));
                    }
                }
            });
        });
    }
    /// Copies an output channel's gradients of a rectangle's places to their positions, with zeros
    /// at others and at [`AFTER_DY`] more. `places` are the number of the first place and the
    /// distance to that in the next row.
    pub(super) fn copy_dy(
        &self,
        band: &Band,
        output: (usize, usize),
        places: (usize, usize),
        to: &mut [T::Wide],
    ) {
        let to = &mut to[..band.positions() + AFTER_DY];
        self.copy_rows_of_dy(band, output, places, to, load_row);
    }
    /// The same for elements of a type to which `copy` copies them.
    #[inline(always)]
    pub(super) fn copy_rows_of_dy<W: Copy + Default>(
        &self,
        band: &Band,
        (image, output): (usize, usize),
        places: (usize, usize),
        to: &mut [W],
        copy: impl Fn(&[T], &mut [W]),
    ) {
        let (pitch, width) = (band.pitch(), band.width());
        let channel = image * self.channels.0 + self.first + output;
        let from = &self.dy[channel * self.plane..][..self.plane];
        let (to, rest) = to.split_at_mut(band.positions());
        for (i, to) in to.chunks_mut(pitch).enumerate() {
            let (to, between) = to.split_at_mut(width);
            copy(&from[places.0 + i * places.1..][..width], to);
            // Few, so that a loop is faster than a call.
            between.iter_mut().for_each(|to| *to = W::default());
        }
        rest.iter_mut().for_each(|to| *to = W::default());
    }
}

/// Room for a channel of a result's gradient.
const ROW_OF_DY: usize = POSITIONS + 48;
/// Zeros after its positions: those of a vector.
pub(super) const AFTER_DY: usize = 16;

/// Adds the products of a band and a result's gradient.
pub(super) struct WeightSums<'a, W> {
    pub(super) band: &'a Band,
    pub(super) room: &'a [W],
    pub(super) dys: &'a [W],
    /// Elements from a channel of the result's gradient to the next.
    pub(super) row: usize,
    pub(super) outputs: usize,
    /// The first weight of the band's first channel.
    pub(super) first: usize,
    /// The positions at which the first place reads a channel's taps.
    pub(super) taps: &'a [usize],
    pub(super) weights: Range<usize>,
    pub(super) sums: &'a mut [W],
}

impl<W: Vectors> WithSimd for WeightSums<'_, W> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let outputs = self.outputs;
        by_rows(&mut self, simd, 0..outputs);
    }
}

impl<W: Vectors> Tiles for WeightSums<'_, W> {
    #[inline(always)]
    fn rows<S: Simd, const R: usize, const V: usize, const F: usize>(
        &mut self,
        simd: S,
        rows: Range<usize>,
    ) {
        for row in rows.step_by(R) {
            let mut weight = self.weights.start;
            while weight < self.weights.end {
                if self.weights.end - weight <= F {
                    self.tile::<S, R, F>(simd, row, weight);
                    weight += F;
                } else {
                    self.tile::<S, R, V>(simd, row, weight);
                    weight += V;
                }
            }
        }
    }
}

impl<W: Vectors> WeightSums<'_, W> {
    /// `V` weights of `R` output channels.
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const V: usize>(
        &mut self,
        simd: S,
        row: usize,
        weight: usize,
    ) {
        let n = self.band.positions().div_ceil(W::lanes::<S>());
        let dys: [&[W::V<S>]; R] = std::array::from_fn(|r| {
            &W::vectors::<S>(&self.dys[(row + r) * self.row..][..self.row])[..n]
        });
        let first = weight - self.first;
        let (mut channel, mut tap) = (first / self.taps.len(), first % self.taps.len());
        let xs: [&[W::V<S>]; V] = std::array::from_fn(|v| {
            let at = channel * self.band.plane() + self.taps[tap];
            // Past the last weight, its sums are made again.
            if weight + v + 1 < self.weights.end {
                tap += 1;
                if tap == self.taps.len() {
                    (channel, tap) = (channel + 1, 0);
                }
            }
            &W::vectors::<S>(&self.room[at..][..n * W::lanes::<S>()])[..n]
        });
        let mut sums = [[W::splat(simd, W::ZERO); V]; R];
        for i in 0..n {
            let xs: [W::V<S>; V] = std::array::from_fn(|v| xs[v][i]);
            for (sums, dys) in sums.iter_mut().zip(dys) {
                for (sum, x) in sums.iter_mut().zip(xs) {
                    *sum = W::multiply_add(simd, dys[i], x, *sum);
                }
            }
        }
        let n = V.min(self.weights.end - weight);
        for (r, sums) in sums.into_iter().enumerate() {
            let at = (row + r) * self.weights.len() + weight - self.weights.start;
            for (to, sum) in self.sums[at..][..n].iter_mut().zip(sums) {
                *to = to.plus(W::sum(simd, sum));
            }
        }
    }
}
