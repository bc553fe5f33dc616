//! Convolutions and the gradients of their inputs: products of weights and patches, a block of
//! columns at a time. The patches of a block are packed into the thread's workspace.

use super::bands::{load_row, store_row};
use super::patches::{MOST_COLUMNS, Patches, SLACK};
use super::{Phase, Sizes};
use crate::kernel::{Planes, Window};
use crate::kernels::math::Float;
use crate::kernels::product::{Left, Right, Tile, Tiled, elements_of, pairs_of, tiles};
use crate::kernels::wide::{Scalar, Wide};
use std::ops::Range;

/// Rows of patches that are packed at once. Sums are cut there, for any number of threads.
const DEPTH: usize = artifact::PRODUCT_DEPTH;
/// Rows of weights that are copied together.
const NEIGHBOURS: usize = 8;
/// Rows of weights of a multiple of so many bytes compete for sets of the first cache.
const COMPETING: usize = 2048;
/// Numbers of a cache line.
const LINE: usize = 16;
/// Columns that are packed at once: 256 KiB of f32.
const COLUMNS: usize = 128;
/// Rows of weights that are packed at once, if they are.
const ROWS: usize = 1024;
/// Results that are summed in a workspace of the thread before they are stored: 1 MiB of f32.
pub(super) const SUMS: usize = 1 << 18;

/// The left factor of a product of weights and patches, of one group.
pub(super) struct Weights<'a, T> {
    /// [outputs, inputs, taps of both dimensions].
    w: &'a [T],
    inputs: usize,
    taps: [usize; 2],
    /// For the gradient of the input: the taps that are read.
    flipped: Option<[Phase; 2]>,
}

impl<'a, T: Float> Weights<'a, T> {
    /// The factor of one group of a convolution's weights.
    pub(super) fn new(
        s: &Sizes,
        w: &'a [T],
        group: usize,
        flipped: Option<[Phase; 2]>,
    ) -> Weights<'a, T> {
        let n = s.outputs * s.depth();
        Weights {
            w: &w[group * n..][..n],
            inputs: s.inputs,
            taps: [s.y.taps, s.x.taps],
            flipped,
        }
    }
    /// Some rows and columns of the factor, packed or at their place in memory.
    fn left<'b>(
        &'b self,
        tile: &Tile<T::Wide>,
        room: &'b mut [T::Wide],
        (rows, depth): (Range<usize>, Range<usize>),
    ) -> Left<'b, T::Wide> {
        if depth.is_empty() {
            return Left::rows(tile, room, 0);
        }
        if let Some(bf16) = tile.pairs(T::IS_BF16) {
            return self.left_of_pairs(bf16.tile, room, (rows, depth));
        }
        let k = self.inputs * self.taps[0] * self.taps[1];
        // The type may be its own wide type.
        let w = (T::room(1) == 0).then(|| T::widened(self.w, &mut []));
        match (w, &self.flipped) {
            // The weights are read at their place in memory, but rows that compete for a set of the
            // cache are packed.
            (Some(w), None) => {
                let w = &w[rows.start * k + depth.start..];
                return match (k * size_of::<T>()).is_multiple_of(COMPETING) {
                    false => Left::rows(tile, w, k),
                    true => Left::packed(tile, room, (rows.len(), k), (depth.len(), 1), w),
                };
            }
            (Some(w), Some(_)) if self.taps == [1, 1] => {
                let w = &w[depth.start * self.inputs + rows.start..];
                let depth = (depth.len(), self.inputs);
                return Left::packed(tile, room, (rows.len(), 1), depth, w);
            }
            (None, Some(_)) if self.taps == [1, 1] => {
                return self.transposed(tile, room, (rows, depth));
            }
            _ => {}
        }
        let n = depth.len();
        for first in rows.clone().step_by(NEIGHBOURS) {
            let some = first..rows.end.min(first + NEIGHBOURS);
            self.rows(&mut room[(first - rows.start) * n..], some, depth.clone());
        }
        Left::rows(tile, room, n)
    }
    /// The same as pairs of neighbouring numbers.
    fn left_of_pairs<'b>(
        &'b self,
        tile: &Tile<T::Wide>,
        room: &'b mut [T::Wide],
        (rows, depth): (Range<usize>, Range<usize>),
    ) -> Left<'b, T::Wide> {
        let taps = self.taps[0] * self.taps[1];
        let (k, n) = (self.inputs * taps, depth.len());
        let to = elements_of::<T::Wide, T>(room);
        // The last pair of an odd number of numbers has only one.
        let row = n.next_multiple_of(2);
        let Some(phases) = &self.flipped else {
            let w = &self.w[rows.start * k + depth.start..];
            let in_place = k.is_multiple_of(2) && !(k * size_of::<T>()).is_multiple_of(COMPETING);
            if let (true, Some(w)) = (in_place, pairs_of(w)) {
                return Left::rows(tile, w, k / 2);
            }
            for (w, to) in w.chunks(k).zip(to.chunks_exact_mut(row)).take(rows.len()) {
                to[..n].copy_from_slice(&w[..n]);
                to[n..].fill(T::default());
            }
            return Left::rows(tile, room, row / 2);
        };
        if taps == 1 {
            // Lines of pairs of outputs, a line of the cache apart so that they do not compete.
            let line = rows.len() + LINE;
            let lines = to.as_chunks_mut().0.chunks_mut(line);
            for (output, to) in depth.clone().step_by(2).zip(lines) {
                let evens = &self.w[output * self.inputs + rows.start..][..rows.len()];
                if output + 1 < depth.end {
                    let odds = &self.w[(output + 1) * self.inputs + rows.start..];
                    let pairs = to.iter_mut().zip(evens.iter().zip(odds));
                    pairs.for_each(|(to, (&even, &odd))| *to = [even, odd]);
                } else {
                    let pairs = to.iter_mut().zip(evens);
                    pairs.for_each(|(to, &even)| *to = [even, T::default()]);
                }
            }
            return Left::transposed(tile, room, line);
        }
        let used = phases[0].taps * phases[1].taps;
        let mut at = 0;
        while at < n {
            let (output, tap) = ((depth.start + at) / used, (depth.start + at) % used);
            let len = (used - tap).min(n - at);
            for (i, channel) in rows.clone().enumerate() {
                let from = &self.w[(output * self.inputs + channel) * taps..];
                let to = &mut to[i * row + at..(i + 1) * row];
                if used == taps {
                    copy_some(&from[tap..], len, to);
                } else {
                    for (tap, to) in (tap..).zip(&mut to[..len]) {
                        *to = from[self.place(tap)];
                    }
                }
            }
            at += len;
        }
        if n < row {
            let last = to.iter_mut().skip(n).step_by(row).take(rows.len());
            last.for_each(|to| *to = T::default());
        }
        Left::rows(tile, room, row / 2)
    }
    /// The same for one tap of a gradient of the input, if weights must be widened.
    fn transposed<'b>(
        &self,
        tile: &Tile<T::Wide>,
        room: &'b mut [T::Wide],
        (rows, depth): (Range<usize>, Range<usize>),
    ) -> Left<'b, T::Wide> {
        let (height, wide) = (rows.len(), tile.rows());
        let panels = height.next_multiple_of(wide) * depth.len();
        let (room, widened) = room.split_at_mut(panels);
        let widened = &mut widened[..NEIGHBOURS * height];
        for top in depth.clone().step_by(NEIGHBOURS) {
            let outputs = top..depth.end.min(top + NEIGHBOURS);
            for (output, line) in outputs.clone().zip(widened.chunks_exact_mut(height)) {
                T::Wide::load(&self.w[output * self.inputs + rows.start..][..height], line);
            }
            let room = &mut room[(top - depth.start) * wide..];
            let lines = (outputs.len(), height);
            tile.pack_rows(room, wide * depth.len(), (height, 1), lines, widened);
        }
        Left::panels(tile, room, depth.len())
    }
    /// Copies some numbers of neighbouring rows. Those of a gradient of the input are next to each
    /// other for each output: all rows' are copied before those of the next output.
    pub(super) fn rows(&self, to: &mut [T::Wide], rows: Range<usize>, numbers: Range<usize>) {
        let (n, taps) = (numbers.len(), self.taps[0] * self.taps[1]);
        let whole = |[y, x]: &[Phase; 2]| y.taps * x.taps == taps;
        if !self.flipped.as_ref().is_some_and(whole) {
            for (row, to) in rows.zip(to.chunks_exact_mut(n.max(1))) {
                self.row(to, row, numbers.start);
            }
            return;
        }
        let mut at = 0;
        while at < n {
            let (output, tap) = ((numbers.start + at) / taps, (numbers.start + at) % taps);
            let len = (taps - tap).min(n - at);
            for (i, row) in rows.clone().enumerate() {
                let from = &self.w[(output * self.inputs + row) * taps + tap..][..len];
                load_row(from, &mut to[i * n + at..][..len]);
            }
            at += len;
        }
    }
    /// Copies rows as pairs of neighbouring channels: of each two channels a pair for each tap.
    pub(super) fn pairs(&self, to: &mut [[T; 2]], rows: Range<usize>, depth: usize) {
        let taps = self.taps[0] * self.taps[1];
        let of_output = self.inputs * taps;
        let (of_row, of_channel, channels) = match self.flipped {
            None => (of_output, taps, self.inputs),
            Some(_) => (taps, of_output, self.w.len() / of_output.max(1)),
        };
        let pairs = channels.div_ceil(2);
        let used = depth / pairs.max(1);
        let copy = |to: &mut [[T; 2]], row: usize, pair: usize| {
            let at = pair * used;
            let even = &self.w[row * of_row + 2 * pair * of_channel..];
            let odd = (2 * pair + 1 < channels).then(|| &even[of_channel..]);
            if let (Some(odd), true) = (odd, used == taps) {
                let whole = (used <= SOME).then(|| to[at..].first_chunk_mut::<SOME>());
                let from = (even.first_chunk::<SOME>(), odd.first_chunk::<SOME>());
                if let (Some(Some(to)), (Some(even), Some(odd))) = (whole, from) {
                    // The others are overwritten later.
                    *to = std::array::from_fn(|i| [even[i], odd[i]]);
                } else {
                    let pairs = to[at..at + used].iter_mut().zip(even.iter().zip(odd));
                    pairs.for_each(|(to, (&even, &odd))| *to = [even, odd]);
                }
                return;
            }
            for (tap, to) in to[at..at + used].iter_mut().enumerate() {
                let place = self.place(tap);
                *to = [even[place], odd.map_or(T::default(), |odd| odd[place])];
            }
        };
        let first = rows.start;
        let room = |row: usize| (row - first) * depth..(row - first + 1) * depth;
        if self.flipped.is_none() {
            for row in rows {
                let room = room(row);
                (0..pairs).for_each(|pair| copy(&mut to[room.clone()], row, pair));
            }
        } else {
            for pair in 0..pairs {
                for row in rows.clone() {
                    let room = room(row);
                    copy(&mut to[room], row, pair);
                }
            }
        }
    }
    /// The weight of a tap that is read, among those of its channel.
    fn place(&self, tap: usize) -> usize {
        let Some([y, x]) = &self.flipped else {
            return tap;
        };
        let (ky, kx) = (tap / x.taps, tap % x.taps);
        (y.first + ky * y.step) * self.taps[1] + x.first + kx * x.step
    }
    /// Whether they are those of a gradient of the input.
    pub(super) fn is_flipped(&self) -> bool {
        self.flipped.is_some()
    }
    /// Copies numbers of a row from number `first` on.
    pub(super) fn row(&self, to: &mut [T::Wide], row: usize, first: usize) {
        if let Some(phases) = &self.flipped {
            return self.pack_flipped(to, row, first, phases);
        }
        let k = self.inputs * self.taps[0] * self.taps[1];
        T::Wide::load(&self.w[row * k + first..][..to.len()], to);
    }
    /// Weights of input channel `row` for outputs and taps of a phase, counted from `first` on.
    fn pack_flipped(&self, to: &mut [T::Wide], row: usize, first: usize, phases: &[Phase; 2]) {
        let [y, x] = phases;
        let (taps, used) = (self.taps[0] * self.taps[1], y.taps * x.taps);
        let whole = used == taps && taps > 1;
        let (mut output, mut tap) = (first / used.max(1), first % used.max(1));
        let mut at = 0;
        while at < to.len() {
            let w = &self.w[(output * self.inputs + row) * taps..][..taps];
            let n = (used - tap).min(to.len() - at);
            if whole {
                let to = &mut to[at..at + n];
                to.iter_mut()
                    .zip(&w[tap..])
                    .for_each(|(to, &w)| *to = T::Wide::of(w));
            } else {
                for (i, to) in to[at..at + n].iter_mut().enumerate() {
                    *to = T::Wide::of(w[self.place(tap + i)]);
                }
            }
            (output, tap, at) = (output + 1, 0, at + n);
        }
    }
}

/// Elements that are copied at once.
const SOME: usize = 16;

/// Copies `n` elements, or more if these are few. The others are overwritten later.
#[inline(always)]
fn copy_some<T: Copy>(from: &[T], n: usize, to: &mut [T]) {
    match (from.first_chunk::<SOME>(), to.first_chunk_mut::<SOME>()) {
        (Some(from), Some(to)) if n <= SOME => *to = *from,
        _ => to[..n].copy_from_slice(&from[..n]),
    }
}

/// Where the columns of a product are in the planes of the result: row `y`, column `x` of a grid in
/// each image is element `(first.0 + y * step.0) * width + first.1 + x * step.1` of its plane.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    pub(super) places: (usize, usize),
    pub(super) first: (usize, usize),
    pub(super) step: (usize, usize),
    pub(super) width: usize,
}

impl Grid {
    /// Every element of a plane, in order.
    pub(super) fn whole(height: usize, width: usize) -> Grid {
        Grid {
            places: (1, height * width),
            first: (0, 0),
            step: (1, 1),
            width: height * width,
        }
    }
    /// The elements of a plane from the one at which a column is to the one at which the last of
    /// `n` neighbours in its row is.
    #[inline]
    pub(super) fn elements(&self, column: usize, n: usize) -> Range<usize> {
        let (y, x) = (column / self.places.1, column % self.places.1);
        let row = (self.first.0 + y * self.step.0) * self.width;
        let start = row + self.first.1 + x * self.step.1;
        start..start + (n - 1) * self.step.1 + 1
    }
    /// The number of columns from one on to the end of its row.
    #[inline]
    pub(super) fn neighbours(&self, column: usize) -> usize {
        self.places.1 - column % self.places.1
    }
    /// Writes neighbouring columns of a row to these elements.
    #[inline]
    pub(super) fn store<T: Scalar, W: Wide>(&self, from: &[W], to: &mut [T]) {
        if self.step.1 == 1 {
            store_row(from, to);
        } else if self.step.1 == 2 {
            let (pairs, rest) = to.as_chunks_mut::<2>();
            let (from, last) = from.split_at(from.len().min(pairs.len()));
            pairs
                .iter_mut()
                .zip(from)
                .for_each(|([to, _], from)| *to = from.narrow());
            rest.iter_mut()
                .zip(last)
                .for_each(|(to, from)| *to = from.narrow());
        } else {
            for (to, from) in to.iter_mut().step_by(self.step.1).zip(from) {
                *to = from.narrow();
            }
        }
    }
    /// Whether columns are elements of the planes, in order.
    fn is_whole(&self) -> bool {
        self.places.0 == 1 && self.step == (1, 1)
    }
    /// The number of the grid's columns before `element`, counted through all planes of `plane`
    /// elements.
    pub(super) fn columns_before(&self, element: usize, plane: usize) -> usize {
        let (rows, columns) = self.places;
        let before = |at: usize, first: usize, step: usize, most: usize| {
            at.saturating_sub(first).div_ceil(step).min(most)
        };
        let (image, rest) = (
            element.checked_div(plane).unwrap_or(0),
            element.checked_rem(plane).unwrap_or(0),
        );
        let (y, x) = (rest / self.width.max(1), rest % self.width.max(1));
        let above = before(y, self.first.0, self.step.0, rows);
        let in_row = y >= self.first.0
            && (y - self.first.0).is_multiple_of(self.step.0)
            && (y - self.first.0) / self.step.0 < rows;
        let left = if in_row {
            before(x, self.first.1, self.step.1, columns)
        } else {
            0
        };
        (image * rows + above) * columns + left
    }
}

/// The result of a product.
pub(super) enum Results<'a, 'b, T: Float> {
    /// Sums are rounded or placed when they are complete.
    Stored(&'a mut Planes<'b, T>),
    /// The same for some rows of the product. Each row of an image is a plane: the first row's
    /// images come first.
    Rows(&'a mut Planes<'b, T>),
    /// Sums are made in the result itself, for a grid of whole planes.
    There(&'a mut Planes<'b, T::Wide>),
}

/// A product of a group's weights and patches.
pub(super) struct Product<'a, T: Float> {
    pub(super) tile: &'a Tile<T::Wide>,
    /// Rows of the result.
    pub(super) rows: usize,
    pub(super) weights: Weights<'a, T>,
    pub(super) patches: Patches<'a, T>,
    pub(super) bias: Option<&'a [T]>,
    pub(super) grid: Grid,
    /// The number of the first plane.
    pub(super) plane: usize,
}

impl<T: Float> Product<'_, T> {
    /// Whether sums may be made in the result itself.
    pub(super) fn in_place(&self) -> bool {
        let columns = self.grid.places.1;
        // Blocks end where planes end: blocks of small planes would be short.
        let long = columns >= 4 * COLUMNS
            || columns.is_multiple_of(COLUMNS)
            || self.patches.columns() == columns;
        T::room(1) == 0 && self.grid.is_whole() && long
    }
    /// Computes some rows and columns.
    pub(super) fn run(
        &self,
        (rows, columns): (Range<usize>, Range<usize>),
        mut results: Results<'_, '_, T>,
    ) {
        let (depth, bottom) = (self.patches.rows(), rows.end);
        T::Wide::with_room(|room| {
            let (patches_room, weights_room) = room.split_at_mut(DEPTH * COLUMNS + SLACK);
            T::Wide::with_space(SUMS, |sums| {
                for top in rows.step_by(ROWS) {
                    let rows = top..(top + ROWS).min(bottom);
                    let most = match results {
                        Results::There(_) => columns.len(),
                        Results::Stored(_) | Results::Rows(_) => {
                            SUMS / rows.len() / COLUMNS * COLUMNS
                        }
                    };
                    for left in columns.clone().step_by(most.max(1)) {
                        let columns = left..(left + most).min(columns.end);
                        let sums = &mut sums[..];
                        // A depth of 0 also gives a product: zeros, or the bias.
                        for shallow in (0..depth.max(1)).step_by(DEPTH) {
                            let depth = shallow..(shallow + DEPTH).min(depth);
                            let left = (rows.clone(), depth.clone());
                            let weights = self.weights.left(self.tile, weights_room, left);
                            let part = (rows.clone(), depth, columns.clone());
                            self.blocks(weights, part, patches_room, sums, &mut results);
                        }
                        self.store(&mut results, &sums[..], rows.clone(), columns);
                    }
                }
            });
        });
    }
    /// Adds the product of some depth to all columns.
    fn blocks(
        &self,
        weights: Left<'_, T::Wide>,
        (rows, depth, columns): (Range<usize>, Range<usize>, Range<usize>),
        room: &mut [T::Wide],
        sums: &mut [T::Wide],
        results: &mut Results<'_, '_, T>,
    ) {
        let plane = self.grid.places.1;
        let (height, width) = (rows.len(), columns.len());
        let mut at = columns.start;
        while at < columns.end {
            let mut end = columns.end.min(at + COLUMNS);
            match results {
                Results::There(planes) => {
                    let (image, place) = (at / plane, at % plane);
                    end = end.min((image + 1) * plane);
                    let places = place..place + (end - at);
                    let y = planes.window(self.plane + image, rows.clone(), places);
                    self.block(weights, (&rows, &depth, at..end), room, y);
                }
                Results::Stored(_) | Results::Rows(_) => {
                    let mut all = Window::new(&mut sums[..height * width], height, width);
                    let y = all.part(0..height, at - columns.start..end - columns.start);
                    self.block(weights, (&rows, &depth, at..end), room, y);
                }
            }
            at = end;
        }
    }
    /// Adds the product of some depth to a block of columns.
    fn block(
        &self,
        weights: Left<'_, T::Wide>,
        (rows, depth, columns): (&Range<usize>, &Range<usize>, Range<usize>),
        room: &mut [T::Wide],
        mut y: Window<'_, T::Wide>,
    ) {
        let mut add = depth.start > 0;
        if let (false, Some(bias)) = (add, self.bias) {
            for (i, &bias) in bias[rows.clone()].iter().enumerate() {
                y.row(i).fill(T::Wide::of(bias));
            }
            add = true;
        }
        let right = self.pack(room, depth, columns);
        let (tile, depth) = self.tile.of(T::IS_BF16, depth.len());
        tiles(tile, depth, weights, right, T::Wide::ONE, &mut y, add);
    }
    /// Patches in panels.
    fn pack<'b>(
        &self,
        room: &'b mut [T::Wide],
        depth: &Range<usize>,
        columns: Range<usize>,
    ) -> Right<'b, T::Wide> {
        let width = self.tile.of(T::IS_BF16, 0).0.columns();
        let panel = width * depth.len();
        for (i, at) in columns.clone().step_by(width).enumerate() {
            let columns = at..(at + width).min(columns.end);
            self.patches
                .pack(&mut room[i * panel..], width, depth.clone(), columns);
        }
        if let Some(bf16) = self.tile.pairs(T::IS_BF16) {
            let panels = columns.len().div_ceil(width);
            (bf16.pair_panels)(&mut room[..panels * panel], (depth.len(), width));
        }
        Right {
            w: room,
            row: width,
            panel,
        }
    }
    /// Rounds complete sums and writes them to their places, unless they are there.
    fn store(
        &self,
        results: &mut Results<'_, '_, T>,
        sums: &[T::Wide],
        rows: Range<usize>,
        columns: Range<usize>,
    ) {
        let (height, width) = self.grid.places;
        let images = self.patches.columns() / (height * width).max(1);
        let mut at = columns.start;
        while at < columns.end {
            let image = at / (height * width);
            let len = self.grid.neighbours(at).min(columns.end - at);
            let elements = self.grid.elements(at % (height * width), len);
            let of_row = |i: usize| &sums[i * columns.len() + at - columns.start..][..len];
            match results {
                Results::Stored(planes) => {
                    let mut window = planes.window(self.plane + image, rows.clone(), elements);
                    for i in 0..rows.len() {
                        self.grid.store(of_row(i), window.row(i));
                    }
                }
                Results::Rows(planes) => {
                    let first = self.plane * self.rows + image;
                    for (i, row) in rows.clone().enumerate() {
                        let plane = first + row * images;
                        let mut window = planes.window(plane, 0..1, elements.clone());
                        self.grid.store(of_row(i), window.row(0));
                    }
                }
                Results::There(_) => {}
            }
            at += len;
        }
    }
}

const _: () = assert!(COLUMNS <= MOST_COLUMNS && SUMS / ROWS >= COLUMNS);
