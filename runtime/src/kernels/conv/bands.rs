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
    /// What position 0 reads at a tap.
    pub(super) fn tap(&self, tap: usize) -> usize {
        let (ry, y) = self.y.at(tap / self.x.line.taps);
        let (rx, x) = self.x.at(tap % self.x.line.taps);
        ((ry * self.x.remainders + rx) * self.y.run + y) * self.pitch + x
    }
    /// Copies the elements of its channels. `source` begins at the first one's.
    pub(super) fn copy<T: Scalar, W: Wide>(&self, source: &[T], room: &mut [W]) {
        let width = self.x.line.size;
        let (room, after) = room[..self.len()].split_at_mut(self.plane * self.channels);
        after.fill(W::ZERO);
        for (channel, to) in room.chunks_exact_mut(self.plane).enumerate() {
            let from = &source[channel * self.y.line.size * width..];
            let runs = self.y.remainders * self.x.remainders * self.y.run;
            let (rows, rest) = to.split_at_mut(runs * self.pitch);
            rest.fill(W::ZERO);
            let mut rows = rows.chunks_exact_mut(self.pitch);
            for ry in 0..self.y.remainders {
                for rx in 0..self.x.remainders {
                    let inside = self.x.inside(rx);
                    for (y, to) in rows.by_ref().take(self.y.run).enumerate() {
                        match self.y.element(ry, y) {
                            Some(y) => self.copy_row(&from[y * width..][..width], rx, &inside, to),
                            None => to.fill(W::ZERO),
                        }
                    }
                }
            }
        }
    }
    /// Copies the elements of a row that have a remainder.
    #[inline]
    fn copy_row<T: Scalar, W: Wide>(
        &self,
        from: &[T],
        remainder: usize,
        inside: &Range<usize>,
        to: &mut [W],
    ) {
        to[..inside.start.min(self.pitch)].fill(W::ZERO);
        to[inside.end..].fill(W::ZERO);
        let Some(first) = self.x.element(remainder, inside.start) else {
            return;
        };
        let (from, to) = (&from[first..], &mut to[inside.clone()]);
        if self.x.line.stride == 1 {
            W::load(&from[..to.len()], to);
        } else {
            for (to, &from) in to.iter_mut().zip(from.iter().step_by(self.x.line.stride)) {
                *to = W::of(from);
            }
        }
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
const FEW: usize = 48;
