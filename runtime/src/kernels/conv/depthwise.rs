//! Depthwise convolutions and their gradients, in which each group reads one channel and writes
//! one: direct loops as in [`direct`](super::direct), for one plane after the other. A plane may
//! have few elements, so what depends only on the shape is made once for all of them.

use super::bands::{Band, FEW, largest, rectangles};
use super::columns::{Product, SUMS};
use super::direct::{AFTER_DY, Computed, NUMBERS, Sums, WeightSums, in_vectors};
use super::patches::Line;
use super::weights::Gradients;
use super::{Axis, Sizes, by_group};
use crate::kernel::Planes;
use crate::kernels::math::Float;
use crate::kernels::product::Tiled;
use crate::kernels::wide::{Scalar, Wide};
use std::ops::Range;

/// The largest number of taps.
const TAPS: usize = 256;
/// Elements of a band, and its positions. The band and its sums stay in the first cache.
const BAND: usize = 1 << 12;
const POSITIONS: usize = 1 << 11;
/// Room for a band. One row of few places may have more than [`BAND`] elements.
const ROOM: usize = SUMS / 2;

/// The rectangles of planes that all read the same taps.
struct Blocks {
    lines: (Line, Line),
    /// The rows and columns of a rectangle.
    size: (usize, usize),
    last: Option<Block>,
}

/// A rectangle of a plane's places, and where its taps are in its band.
struct Block {
    places: (Range<usize>, Range<usize>),
    band: Band,
    taps: [usize; TAPS],
}

impl Blocks {
    fn new(lines: (Line, Line)) -> Blocks {
        let size = largest((&lines.0, &lines.1), 1, (BAND, POSITIONS));
        Blocks {
            lines,
            size,
            last: None,
        }
    }
    fn places(&self) -> (usize, usize) {
        (self.lines.0.places, self.lines.1.places)
    }
    fn taps(&self) -> usize {
        self.lines.0.taps * self.lines.1.taps
    }
    /// Copies what a rectangle of a plane's places reads. Most planes have the same rectangles:
    /// what depends on these, and the zeros around the elements, are made for the first of them.
    fn copy<T: Scalar, W: Wide>(
        &mut self,
        plane: &[T],
        places: (Range<usize>, Range<usize>),
        room: &mut [W],
    ) -> &Block {
        if self.last.as_ref().is_some_and(|last| last.places != places) {
            self.last = None;
        }
        let (y, x) = &self.lines;
        let block = self.last.get_or_insert_with(|| {
            let band = Band::new((y, x), 1, places.clone());
            let mut taps = [0; TAPS];
            band.taps(&mut taps[..y.taps * x.taps]);
            band.clear_around(room);
            Block { places, band, taps }
        });
        block.band.copy_inside(plane, room);
        block
    }
}

impl Sizes {
    /// Whether these loops compute it: the smallest rectangle's band must have room.
    pub(super) fn is_depthwise(&self) -> bool {
        let reach = |axis: &Axis| axis.taps.saturating_mul(axis.dilation);
        let rows = reach(&self.y).saturating_add(self.y.stride);
        let columns = reach(&self.x).saturating_add(self.x.stride.saturating_mul(FEW));
        let (result, image) = self.planes();
        (self.inputs, self.outputs) == (1, 1)
            && 0 < result.min(image)
            && self.y.taps.saturating_mul(self.x.taps) <= TAPS
            && rows.saturating_mul(columns) <= ROOM / 2
    }
}

/// Computes this part's columns of the products of all groups, which are depthwise. A result's
/// planes are computed in the order in which they are in memory.
pub(super) fn products<'a, T: Float>(
    product: &dyn Fn(usize) -> Product<'a, T>,
    lines: (Line, Line),
    planes: &mut Planes<'_, T>,
    (groups, elements): (usize, usize),
) {
    let mut blocks = Blocks::new(lines);
    let (size, places, taps) = (blocks.size, blocks.places(), blocks.taps());
    // The number at which a sum begins, then a weight for each tap.
    let mut weights = [T::Wide::ZERO; 1 + TAPS];
    let weights = &mut weights[..1 + taps];
    T::Wide::with_space(SUMS, |room| {
        let (room, rest) = room.split_at_mut(ROOM);
        let (numbers, sums) = rest.split_at_mut(NUMBERS);
        for (plane, part) in by_group(planes.part(), elements) {
            let (image, group) = (plane / groups, plane % groups);
            let product = product(group);
            let (grid, source) = (product.grid, product.patches.image(image));
            product.weights.row(&mut weights[1..], 0, 0);
            weights[0] = product
                .bias
                .map_or(T::Wide::ZERO, |bias| T::Wide::of(bias[0]));
            let before = |element| match element == elements {
                true => places.0 * places.1,
                false => grid.columns_before(element, elements),
            };
            let columns = before(part.start)..before(part.end);
            rectangles(columns, places, size, |_, down, right| {
                let first = down.start * places.1 + right.start;
                let (rows, width) = (down.len(), right.len());
                let block = blocks.copy(source, (down, right), room);
                let mut store = |tile: Computed<'_, T::Wide>| {
                    sums[tile.at..][..tile.width].copy_from_slice(&tile.numbers[..tile.width]);
                };
                in_vectors(Sums {
                    band: &block.band,
                    depth: taps,
                    taps: &block.taps[..taps],
                    step: 0,
                    room,
                    weights,
                    numbers,
                    rows: 1,
                    store: &mut store,
                });

                let row = grid.elements(first, width);
                let next = match rows {
                    1 => row.clone(),
                    _ => grid.elements(first + places.1, width),
                };
                let down = next.start - row.start;
                let elements = row.start..row.end + (rows - 1) * down;
                let mut window = planes.window(plane, 0..1, elements);
                let to = window.row(0);
                for (i, sums) in sums.chunks(block.band.pitch()).take(rows).enumerate() {
                    grid.store(&sums[..width], &mut to[i * down..][..row.len()]);
                }
            });
        }
    });
}

/// Computes this part's gradients of all groups' weights, if they are depthwise: sums over the
/// positions of each band, then over all bands. Neighbouring channels of an image are read one
/// after the other.
pub(super) fn gradients<'a, T: Float>(
    gradients: &dyn Fn(usize) -> Gradients<'a, T>,
    lines: (Line, Line),
    planes: &mut Planes<'_, T>,
    images: usize,
) {
    let mut blocks = Blocks::new(lines);
    let (size, places, depth) = (blocks.size, blocks.places(), blocks.taps());
    T::Wide::with_space(SUMS, |room| {
        let (room, rest) = room.split_at_mut(ROOM);
        let (dys, rest) = rest.split_at_mut(POSITIONS + AFTER_DY);
        let part = planes.part();
        let most = rest.len() / depth * depth;
        let mut at = part.start;
        while at < part.end {
            let some = at..part.end.min(at / depth * depth + most);
            let sums = &mut rest[..some.len()];
            sums.fill(T::Wide::ZERO);
            for image in 0..images {
                for (group, weights) in by_group(some.clone(), depth) {
                    let gradients = gradients(group);
                    let source = gradients.patches.image(image);
                    let first = group * depth + weights.start - some.start;
                    let sums = &mut sums[first..][..weights.len()];
                    rectangles(0..places.0 * places.1, places, size, |_, down, right| {
                        let first = down.start * places.1 + right.start;
                        let block = blocks.copy(source, (down, right), room);
                        gradients.copy_dy(&block.band, (image, 0), (first, places.1), dys);
                        in_vectors(WeightSums {
                            band: &block.band,
                            room,
                            row: dys.len(),
                            dys,
                            outputs: 1,
                            first: 0,
                            taps: &block.taps[..depth],
                            weights: weights.clone(),
                            sums,
                        });
                    });
                }
            }
            for (group, weights) in by_group(some.clone(), depth) {
                let first = group * depth + weights.start - some.start;
                let sums = &sums[first..][..weights.len()];
                T::Wide::store(sums, planes.window(group, 0..1, weights).row(0));
            }
            at = some.end;
        }
    });
}
