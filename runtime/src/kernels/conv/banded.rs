//! Convolutions of bf16 and their gradients on machines that multiply pairs of numbers: products of
//! bands of images, see [`Banded`]. A band is copied once, where patches are once for each tap.

use super::bands::{Band, largest, rectangles};
use super::columns::{Product, SUMS};
use super::direct::{TAPS, band, taps};
use super::patches::Patches;
use super::weights::{Gradients, store_transposed};
use crate::kernel::{Planes, Window};
use crate::kernels::math::Float;
use crate::kernels::product::{Banded, LINES, Rows, Steps, Tiled, elements_of};
use crate::kernels::wide::Wide;
use std::ops::Range;

/// Pairs of a band: 256 KiB, in the second cache.
const BAND: usize = 1 << 16;
/// Pairs of weights that are packed at once.
const MOST_WEIGHTS: usize = 1 << 19;
const LANES: usize = Banded::<f32>::LANES;
/// Rows of a product that are stored together.
const STORED: usize = 8 * Banded::<f32>::ROWS;
/// Room for their sums.
const NUMBERS: usize = STORED * Banded::<f32>::COLUMNS;
/// Positions over which sums of weights' gradients are made at once.
const POSITIONS: usize = 1024;
/// Output channels whose gradients are packed at once.
const OUTPUTS: usize = 512;
/// Packing patches takes as long as computing about so many rows of a product. Measured on Zen 5.
const PACKED_ROWS: usize = 96;
/// With more rows for each tap, packing patches takes no longer than packing bands and pairs of
/// weights. Patches of several flipped taps always take longer.
const ROWS_OF_TAP: usize = 64;

/// Whether bands of at most so many positions are worth their copies. Products of patches have no
/// positions that are not places, and `more` for each band, which are computed for all rows.
fn pays<T: Float>(
    patches: &Patches<'_, T>,
    channels: usize,
    (positions, more): (usize, usize),
    rows: usize,
) -> bool {
    let (y, x) = (&patches.y, &patches.x);
    let taps = y.taps.saturating_mul(x.taps);
    if !(1..=TAPS).contains(&taps) || y.places * x.places == 0 {
        return false;
    }
    let (height, width) = largest((y, x), channels, (BAND, positions));
    let band = Band::new((y, x), channels, (0..height, 0..width));
    let places = height * width;
    let between = band.positions() + more - places;
    let weights = channels.saturating_mul(taps);
    let fits = band.len() <= BAND && (1..=MOST_WEIGHTS / STORED).contains(&weights);
    fits && between * rows <= places * PACKED_ROWS
}

impl<T: Float> Product<'_, T> {
    /// Micro-kernels, if products of bands are faster than those of patches.
    pub(super) fn banded(&self) -> Option<&'static Banded<T::Wide>> {
        let banded = self.tile.pairs(T::IS_BF16)?.banded;
        let pairs = self.patches.channels.div_ceil(2);
        // A channel without a neighbour has a pair of its own.
        let odd = 2 * pairs - self.patches.channels;
        let taps = self.patches.y.taps * self.patches.x.taps;
        let pays = pays(&self.patches, pairs, (usize::MAX, LANES / 2), self.rows)
            && (self.rows <= taps * ROWS_OF_TAP || 1 < taps && self.weights.is_flipped())
            && odd * self.rows <= self.patches.channels * PACKED_ROWS / 8;
        pays.then_some(banded)
    }
    /// Computes some columns.
    pub(super) fn by_bands(
        &self,
        banded: &Banded<T::Wide>,
        columns: Range<usize>,
        planes: &mut Planes<'_, T>,
    ) {
        let patches = &self.patches;
        let pairs = patches.channels.div_ceil(2);
        let depth = pairs * patches.y.taps * patches.x.taps;
        let (tall, lanes) = (Banded::<T::Wide>::ROWS, Banded::<T::Wide>::LANES);
        let most = MOST_WEIGHTS / depth / tall * tall;
        let size = largest((&patches.y, &patches.x), pairs, (BAND, usize::MAX));
        let places = (patches.y.places, patches.x.places);
        let mut table = [0; TAPS];
        T::Wide::with_room(|weights| {
            T::Wide::with_space(SUMS, |room| {
                let (numbers, room) = room.split_at_mut(NUMBERS);
                let (rounded, room) = room.split_at_mut(NUMBERS);
                let rounded = elements_of::<T::Wide, T>(rounded);
                for top in (0..self.rows).step_by(most) {
                    let rows = top..(top + most).min(self.rows);
                    let pairs_of = elements_of::<T::Wide, T>(weights).as_chunks_mut().0;
                    self.weights.pairs(pairs_of, rows.clone(), depth);
                    rectangles(columns.clone(), places, size, |image, down, right| {
                        let (first, band) = band(patches, pairs, (down, right));
                        let to = elements_of::<T::Wide, T>(room).as_chunks_mut().0;
                        band.copy_pairs((patches.image(image), patches.channels), to);
                        let (table, step) = taps(&band, patches, pairs, &mut table);
                        let positions = band.positions();
                        // Tiles of nearly equal widths.
                        let tiles = positions.div_ceil(Banded::<T::Wide>::COLUMNS);
                        let wide = positions.div_ceil(tiles).next_multiple_of(lanes);
                        for at in (0..positions).step_by(wide) {
                            let width = wide.min(positions - at);
                            let w = Steps {
                                w: &room[at..],
                                table,
                                step,
                                wide,
                                panel: wide,
                            };
                            for row in rows.clone().step_by(STORED) {
                                let some = row..rows.end.min(row + STORED);
                                let numbers = &mut numbers[..some.len() * width];
                                for (row, numbers) in
                                    some.clone().zip(numbers.chunks_exact_mut(width))
                                {
                                    let bias = self.bias.map(|bias| T::Wide::of(bias[row]));
                                    numbers.fill(bias.unwrap_or(T::Wide::ZERO));
                                }
                                let x = Rows {
                                    x: &*weights,
                                    start: &|i: usize| (row - rows.start + i) * depth,
                                };
                                let mut y = Window::new(numbers, some.len(), width);
                                banded.add(depth, &x, &w, &mut y);
                                let rounded = &mut rounded[..some.len() * width];
                                T::Wide::store(numbers, rounded);
                                let place = (self.plane + image, some);
                                let positions = (&band, first, at);
                                self.place_rounded(&*rounded, width, place, positions, planes);
                            }
                        }
                    });
                }
            });
        });
    }
    /// Writes some rows of numbers, of a band's positions from one on, to the elements of a plane.
    fn place_rounded(
        &self,
        numbers: &[T],
        width: usize,
        (plane, rows): (usize, Range<usize>),
        (band, first, at): (&Band, (usize, usize), usize),
        planes: &mut Planes<'_, T>,
    ) {
        self.segments(band, first, (at, width), |positions, elements| {
            let mut window = planes.window(plane, rows.clone(), elements);
            for (r, from) in numbers.chunks_exact(width).enumerate() {
                let (from, to) = (&from[positions.clone()], window.row(r));
                match self.grid.step.1 {
                    1 => to.copy_from_slice(from),
                    step => {
                        let to = to.iter_mut().step_by(step);
                        to.zip(from).for_each(|(to, &from)| *to = from);
                    }
                }
            }
        });
    }
}

impl<T: Float> Gradients<'_, T> {
    /// Micro-kernels, if products of bands are faster than those of patches.
    pub(super) fn banded(&self) -> Option<&'static Banded<T::Wide>> {
        let banded = self.tile.pairs(T::IS_BF16)?.banded;
        let (patches, outputs) = (&self.patches, self.channels.1);
        let pays = pays(patches, patches.channels, (POSITIONS, LANES), outputs);
        (LANES <= outputs && pays).then_some(banded)
    }
    /// Computes the gradients of some weights of some output channels. Pairs are neighbouring
    /// positions of a band, and of the result's gradient with zeros between its rows.
    pub(super) fn by_bands(
        &self,
        banded: &Banded<T::Wide>,
        (outputs, weights): (Range<usize>, Range<usize>),
        to: &mut Window<'_, T>,
    ) {
        let patches = &self.patches;
        let (plane, n_taps) = (
            patches.y.size * patches.x.size,
            patches.y.taps * patches.x.taps,
        );
        // The same rectangles for any part of the weights: sums are cut there.
        let size = largest(
            (&patches.y, &patches.x),
            patches.channels,
            (BAND, POSITIONS),
        );
        let places = (patches.y.places, patches.x.places);
        let mut table = [0; TAPS];
        T::Wide::with_room(|panels| {
            let (dys, panels) = panels.split_at_mut(OUTPUTS * POSITIONS / 2);
            T::Wide::with_space(SUMS, |sums| {
                let (room, sums) = sums.split_at_mut(BAND / 2);
                let room = elements_of::<T::Wide, T>(room);
                for o in (0..outputs.len()).step_by(OUTPUTS) {
                    let some = o..(o + OUTPUTS).min(outputs.len());
                    let most = sums.len() / some.len();
                    for top in (0..weights.len()).step_by(most) {
                        let rows = top..(top + most).min(weights.len());
                        let (start, end) = (weights.start + rows.start, weights.start + rows.end);
                        let channels = start / n_taps..end.div_ceil(n_taps);
                        let sums = &mut sums[..rows.len() * some.len()];
                        sums.fill(T::Wide::ZERO);
                        rectangles(0..patches.columns(), places, size, |image, down, right| {
                            let (first, band) = band(patches, channels.len(), (down, right));
                            band.copy_elements(
                                &patches.image(image)[channels.start * plane..],
                                room,
                            );
                            band.taps(&mut table[..n_taps]);
                            let depth = band.positions().div_ceil(2);
                            let at = (first.0 * places.1 + first.1, places.1);
                            let rows_of_dy =
                                elements_of::<T::Wide, T>(dys).chunks_exact_mut(2 * depth);
                            for (output, to) in some.clone().zip(rows_of_dy) {
                                let output = (image, outputs.start + output);
                                self.copy_rows_of_dy(&band, output, at, to, |from, to| {
                                    to.copy_from_slice(from)
                                });
                            }
                            let (tile, wide) =
                                (self.tile.of(T::IS_BF16, 0).0, Banded::<T::Wide>::COLUMNS);
                            tile.pack_columns(
                                panels,
                                wide * depth,
                                (some.len(), depth),
                                (depth, 1),
                                dys,
                            );
                            let x = Rows {
                                x: &*room,
                                start: &|i: usize| {
                                    let (channel, tap) =
                                        ((start + i) / n_taps, (start + i) % n_taps);
                                    (channel - channels.start) * band.plane() + table[tap]
                                },
                            };
                            let w = Steps {
                                w: &*panels,
                                table: &LINES,
                                step: LINES.len() * wide,
                                wide,
                                panel: wide * depth,
                            };
                            banded.add(
                                depth,
                                &x,
                                &w,
                                &mut Window::new(sums, rows.len(), some.len()),
                            );
                        });
                        store_transposed(
                            sums,
                            some.len(),
                            panels,
                            &mut to.part(some.clone(), rows),
                        );
                    }
                }
            });
        });
    }
}
