//! Bands of an image: the elements that a rectangle of places reads, copied into a workspace with
//! zeros around them.
//!
//! In a band every tap reads its elements at the same distance from the places' own positions, so
//! loops over vectors of neighbouring positions need no checks of where an image ends. Elements
//! with the same remainders modulo the strides lie together: neighbouring places read neighbours.

use super::patches::Line;
use crate::kernels::wide::{Scalar, Wide};
use std::ops::Range;

/// One dimension of a band. Number `i` of the elements from `first` on has position `i / stride`
/// among those of its remainder modulo the stride.
#[derive(Clone, Copy)]
struct Span {
    line: Line,
    /// An element of the source, or a place before or after it, where zeros are.
    first: isize,
    /// The remainders that taps read.
    remainders: usize,
    /// Positions of a remainder.
    run: usize,
}

impl Span {
    /// Of some places of a line.
    fn new(line: &Line, places: Range<usize>) -> Span {
        let line = Line {
            offset: line.offset + (places.start * line.stride) as isize,
            places: places.len(),
            ..*line
        };
        let reach = line.taps.saturating_sub(1) * line.step.unsigned_abs();
        let back = if line.step < 0 { reach } else { 0 };
        Span {
            line,
            first: line.offset - back as isize,
            remainders: line.stride.min(reach + 1),
            run: line.places + reach / line.stride,
        }
    }
    /// The remainder and the position that the first place reads at a tap.
    fn at(&self, tap: usize) -> (usize, usize) {
        let i = (self.line.offset - self.first + tap as isize * self.line.step) as usize;
        (i % self.line.stride, i / self.line.stride)
    }
    /// The element of the source at a position, if there is one.
    fn element(&self, remainder: usize, position: usize) -> Option<usize> {
        let i = self.first + (position * self.line.stride + remainder) as isize;
        usize::try_from(i).ok().filter(|&i| i < self.line.size)
    }
    /// The positions of a remainder that have an element of the source.
    fn inside(&self, remainder: usize) -> Range<usize> {
        let start = self.first + remainder as isize;
        let before = |end: isize| ((end - start).max(0) as usize).div_ceil(self.line.stride);
        let end = before(self.line.size as isize).min(self.run);
        before(0).min(end)..end
    }
    /// The zeros at the end of a row that can also be those at the start of the next row.
    fn shared(&self) -> usize {
        (0..self.remainders)
            .map(|remainder| self.inside(remainder))
            .map(|inside| inside.start.min(self.run - inside.end))
            .fold((self.run - self.line.places).min(AFTER / 2), usize::min)
    }
}

/// The layout of a rectangle of places and of the elements of some channels that it reads. Place
/// `(y, x)` has position `y * pitch + x`.
pub(super) struct Band {
    y: Span,
    x: Span,
    channels: usize,
    /// Elements of a row, and of a channel.
    pitch: usize,
    plane: usize,
}

/// Zeros after a band: half for the last row, which shares those at its end, half for vectors of
/// positions that end after the band.
const AFTER: usize = 256;
/// Elements of a cache line.
const LINE: usize = 16;

impl Band {
    pub(super) fn new(
        (y, x): (&Line, &Line),
        channels: usize,
        (rows, columns): (Range<usize>, Range<usize>),
    ) -> Band {
        let (y, x) = (Span::new(y, rows), Span::new(x, columns));
        let pitch = x.run - x.shared();
        let runs = y.remainders.saturating_mul(x.remainders);
        let plane = runs.saturating_mul(y.run).saturating_mul(pitch);
        Band {
            y,
            x,
            channels,
            pitch,
            // An odd number of lines, so that channels do not compete for a set of the cache.
            plane: plane.div_ceil(LINE).saturating_mul(LINE) | LINE,
        }
    }
    /// The room that it needs.
    pub(super) fn len(&self) -> usize {
        self.plane
            .saturating_mul(self.channels)
            .saturating_add(AFTER)
    }
    /// Elements of a channel.
    pub(super) fn plane(&self) -> usize {
        self.plane
    }
    /// The distance from a place to the place in the next row.
    pub(super) fn pitch(&self) -> usize {
        self.pitch
    }
    /// Places of a row.
    pub(super) fn width(&self) -> usize {
        self.x.line.places
    }
    /// The number of positions from the first place to the last. Some are not places.
    pub(super) fn positions(&self) -> usize {
        (self.y.line.places - 1) * self.pitch + self.x.line.places
    }
    /// Fills a table with what position 0 reads at each tap.
    pub(super) fn taps(&self, table: &mut [usize]) {
        for (tap, to) in table.iter_mut().enumerate() {
            *to = self.tap(tap);
        }
    }
    fn tap(&self, tap: usize) -> usize {
        let (ry, y) = self.y.at(tap / self.x.line.taps);
        let (rx, x) = self.x.at(tap % self.x.line.taps);
        ((ry * self.x.remainders + rx) * self.y.run + y) * self.pitch + x
    }
    /// Copies the elements of its channels, and zeros around them. `source` begins at the first
    /// channel's.
    pub(super) fn copy<T: Scalar, W: Wide>(&self, source: &[T], room: &mut [W]) {
        self.clear_around(room);
        self.copy_inside(source, room);
    }
    /// The same, without a conversion.
    pub(super) fn copy_elements<T: Scalar>(&self, source: &[T], room: &mut [T]) {
        self.clear_around(room);
        self.each_row(room, |channel, at, to| {
            let from = &source[channel * self.source_plane() + at..];
            match self.x.line.stride {
                1 => to.copy_from_slice(&from[..to.len()]),
                2 => {
                    if let Some((last, to)) = to.split_last_mut() {
                        *last = from[2 * to.len()];
                        each(to, from.as_chunks::<2>().0.iter().map(|&[from, _]| from));
                    }
                }
                stride => each(to, from.iter().step_by(stride).copied()),
            }
        });
    }
    /// The same, for pairs of so many channels of the source.
    pub(super) fn copy_pairs<T: Scalar>(
        &self,
        (source, channels): (&[T], usize),
        room: &mut [[T; 2]],
    ) {
        self.clear_around(room);
        self.each_row(room, |pair, at, to| {
            let evens = &source[2 * pair * self.source_plane() + at..];
            let stride = self.x.line.stride;
            if 2 * pair + 1 == channels {
                let pairs = evens.iter().map(|&even| [even, T::default()]);
                return each(to, pairs.step_by(stride));
            }
            let odds = &evens[self.source_plane()..];
            match stride {
                1 => {
                    let pairs = evens[..to.len()].iter().zip(&odds[..to.len()]);
                    each(to, pairs.map(|(&even, &odd)| [even, odd]));
                }
                2 => {
                    if let Some((last, to)) = to.split_last_mut() {
                        *last = [evens[2 * to.len()], odds[2 * to.len()]];
                        let (evens, odds) = (evens.as_chunks::<2>().0, odds.as_chunks::<2>().0);
                        let pairs = evens.iter().zip(odds);
                        each(to, pairs.map(|(&[even, _], &[odd, _])| [even, odd]));
                    }
                }
                _ => {
                    let pairs = evens.iter().zip(odds).step_by(stride);
                    each(to, pairs.map(|(&even, &odd)| [even, odd]));
                }
            }
        });
    }
    /// Elements of a channel of the source.
    fn source_plane(&self) -> usize {
        self.y.line.size * self.x.line.size
    }
    /// Writes the zeros around the elements.
    pub(super) fn clear_around<W: Copy + Default>(&self, room: &mut [W]) {
        let zero = W::default();
        let end = self.plane * self.channels;
        room[end..self.len()].fill(zero);
        for to in room[..end].chunks_exact_mut(self.plane) {
            let runs = self.y.remainders * self.x.remainders * self.y.run;
            to[runs * self.pitch..].fill(zero);
            self.rows(to, |row, inside, to| {
                let (start, end) = match row {
                    Some(_) => (inside.start.min(self.pitch), inside.end),
                    None => (self.pitch, self.pitch),
                };
                to[..start].fill(zero);
                to[end..].fill(zero);
            });
        }
    }
    /// Copies the elements of its channels to a room that has zeros around them.
    pub(super) fn copy_inside<T: Scalar, W: Wide>(&self, source: &[T], room: &mut [W]) {
        self.each_row(room, |channel, at, to| {
            self.copy_row(&source[channel * self.source_plane() + at..], to);
        });
    }
    /// Calls `f` with each row of each channel that has elements: the channel's number, the row's
    /// first element among the channel's in the source, and the elements' room.
    #[inline(always)]
    fn each_row<W>(&self, room: &mut [W], mut f: impl FnMut(usize, usize, &mut [W])) {
        let width = self.x.line.size;
        let planes = room[..self.plane * self.channels].chunks_exact_mut(self.plane);
        for (channel, to) in planes.enumerate() {
            self.rows(to, |row, inside, to| {
                if let Some((y, x)) = row {
                    f(channel, y * width + x, &mut to[inside]);
                }
            });
        }
    }
    /// Calls `f` for each row of a channel, with the row and column of its first element in the
    /// source, if it has elements, and with their positions in the row.
    #[inline(always)]
    fn rows<W>(
        &self,
        channel: &mut [W],
        mut f: impl FnMut(Option<(usize, usize)>, Range<usize>, &mut [W]),
    ) {
        let mut rows = channel.chunks_exact_mut(self.pitch);
        for ry in 0..self.y.remainders {
            for rx in 0..self.x.remainders {
                let inside = self.x.inside(rx);
                let x = self.x.element(rx, inside.start);
                for (y, to) in rows.by_ref().take(self.y.run).enumerate() {
                    f(self.y.element(ry, y).zip(x), inside.clone(), to);
                }
            }
        }
    }
    /// Copies the elements of a row that have a remainder, from the first of them on.
    #[inline]
    fn copy_row<T: Scalar, W: Wide>(&self, from: &[T], to: &mut [W]) {
        if self.x.line.stride == 1 {
            load_row(&from[..to.len()], to);
        } else if self.x.line.stride == 2 {
            // A loop that LLVM turns into vectors.
            let (pairs, rest) = from.as_chunks::<2>();
            let (to, last) = to.split_at_mut(to.len().min(pairs.len()));
            to.iter_mut()
                .zip(pairs)
                .for_each(|(to, &[from, _])| *to = W::of(from));
            last.iter_mut()
                .zip(rest)
                .for_each(|(to, &from)| *to = W::of(from));
        } else {
            for (to, &from) in to.iter_mut().zip(from.iter().step_by(self.x.line.stride)) {
                *to = W::of(from);
            }
        }
    }
}

/// A loop that LLVM turns into vectors, for iterators without gaps and over chunks.
#[inline(always)]
fn each<W>(to: &mut [W], from: impl Iterator<Item = W>) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = from);
}

/// Elements that are copied at once.
const FEW_ELEMENTS: usize = 4;

/// Copies a row. For a short one, a call of the system's copy would take longer than the copy.
#[inline(always)]
pub(super) fn load_row<T: Scalar, W: Wide>(from: &[T], to: &mut [W]) {
    let n = to.len();
    if size_of::<T>() != size_of::<W>() || !(FEW_ELEMENTS..=LINE * 4).contains(&n) {
        return W::load(from, to);
    }
    // The last ones may be copied twice.
    for at in (0..n).step_by(FEW_ELEMENTS) {
        let at = at.min(n - FEW_ELEMENTS);
        W::load(&from[at..][..FEW_ELEMENTS], &mut to[at..][..FEW_ELEMENTS]);
    }
}

/// Rounds and copies a row, as [`load_row`] does.
#[inline(always)]
pub(super) fn store_row<T: Scalar, W: Wide>(from: &[W], to: &mut [T]) {
    let n = to.len();
    if size_of::<T>() != size_of::<W>() || !(FEW_ELEMENTS..=LINE * 4).contains(&n) {
        return W::store(from, to);
    }
    for at in (0..n).step_by(FEW_ELEMENTS) {
        let at = at.min(n - FEW_ELEMENTS);
        W::store(&from[at..][..FEW_ELEMENTS], &mut to[at..][..FEW_ELEMENTS]);
    }
}

/// Calls `f` with the image, rows and columns of rectangles of places, which together are some
/// places of all images. Rectangles have at most so many rows and columns.
pub(super) fn rectangles(
    places: Range<usize>,
    (height, width): (usize, usize),
    (rows, columns): (usize, usize),
    mut f: impl FnMut(usize, Range<usize>, Range<usize>),
) {
    let mut at = places.start;
    while at < places.end {
        let (x, row) = (at % width, at / width);
        let (y, image) = (row % height, row / height);
        let left = places.end - at;
        if x == 0 && width <= left.min(columns) {
            let n = rows.min(height - y).min(left / width);
            f(image, y..y + n, 0..width);
            at += n * width;
        } else {
            let n = columns.min(width - x).min(left);
            f(image, y..y + 1, x..x + n);
            at += n;
        }
    }
}

/// The rows and columns of the largest rectangles whose bands of some channels have at most `most`
/// elements and `positions` positions. One row of a few columns may have more.
pub(super) fn largest(
    (y, x): (&Line, &Line),
    channels: usize,
    (most, positions): (usize, usize),
) -> (usize, usize) {
    let fits = |rows: usize, columns: usize| {
        let band = Band::new((y, x), channels, (0..rows, 0..columns));
        band.len() <= most && band.positions() <= positions
    };
    // Equal parts, so that no rectangle is small.
    let equal = |n: usize, fits: &dyn Fn(usize) -> bool| {
        let parts = (1..=n).find(|&parts| fits(n.div_ceil(parts)));
        n.div_ceil(parts.unwrap_or(n).max(1)).max(1)
    };
    let columns = equal(x.places, &|columns| columns <= FEW || fits(1, columns));
    match columns < x.places {
        true => (1, columns),
        false => (equal(y.places, &|rows| fits(rows, columns)), columns),
    }
}

/// Columns of a rectangle that is not made smaller.
pub(super) const FEW: usize = 48;
