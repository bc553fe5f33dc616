//! The patches of an image as a matrix. It is never in memory as a whole. Its rows are the channels
//! and taps that a result reads, its columns the places of results in all images; [`Patches::pack`]
//! copies some rows and columns into a factor's panel.

use super::bands::load_row;
use super::{Axis, Sizes};
use crate::kernels::wide::{Scalar, Wide};
use std::ops::Range;

/// One dimension of patches: place `p` reads element `offset + p * stride + k * step` at tap `k`,
/// or zero where that is outside of the source.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line {
    /// Elements of the source.
    pub(super) size: usize,
    pub(super) places: usize,
    pub(super) stride: usize,
    pub(super) taps: usize,
    pub(super) offset: isize,
    pub(super) step: isize,
}

impl Line {
    /// The elements that a convolution reads.
    pub(super) fn forward(axis: &Axis) -> Line {
        Line {
            size: axis.input,
            places: axis.output,
            stride: axis.stride,
            taps: axis.taps,
            offset: -(axis.padding as isize),
            step: axis.dilation as isize,
        }
    }
    /// Whether every place reads the element of its own number.
    fn is_identity(&self) -> bool {
        (self.taps, self.stride, self.offset) == (1, 1, 0) && self.places == self.size
    }
}

/// The patches of one group's channels of all images.
pub(super) struct Patches<'a, T> {
    source: &'a [T],
    batch: usize,
    groups: usize,
    group: usize,
    pub(super) channels: usize,
    pub(super) y: Line,
    pub(super) x: Line,
}

/// Neighbouring places in a row of an image.
#[derive(Clone, Copy, Default)]
struct Segment {
    /// Their position among the packed columns.
    at: usize,
    len: usize,
    /// The start of the group's channels of their image.
    image: usize,
    /// The row and the column that the first of them reads at the first tap.
    y: isize,
    x: isize,
}

/// The largest number of columns that are packed at once.
pub(super) const MOST_COLUMNS: usize = 256;
/// Elements that are copied at once. A copy may write elements after its own, which are overwritten
/// later: a room needs this many more elements.
pub(super) const SLACK: usize = 16;

impl<'a, T: Scalar> Patches<'a, T> {
    /// The patches of a group, for images with `channels` channels in a group.
    pub(super) fn new(
        s: &Sizes,
        source: &'a [T],
        (group, channels): (usize, usize),
        (mut y, mut x): (Line, Line),
    ) -> Patches<'a, T> {
        if y.is_identity() && x.is_identity() {
            // Long rows are copied faster.
            (x.size, x.places) = (x.size * y.size, x.places * y.places);
            (y.size, y.places) = (1, 1);
        }
        Patches {
            source,
            batch: s.batch,
            groups: s.groups,
            group,
            channels,
            y,
            x,
        }
    }
    /// The number of the matrix's rows.
    pub(super) fn rows(&self) -> usize {
        self.channels * self.y.taps * self.x.taps
    }
    /// The source from the group's channels of an image on.
    pub(super) fn image(&self, image: usize) -> &[T] {
        let channel = (image * self.groups + self.group) * self.channels;
        &self.source[channel * self.y.size * self.x.size..]
    }
    /// The number of its columns.
    pub(super) fn columns(&self) -> usize {
        self.batch * self.y.places * self.x.places
    }
    /// Copies some rows and columns, at most [`MOST_COLUMNS`], to `room`, with `pitch` elements
    /// from a row to the next.
    pub(super) fn pack<W: Wide>(
        &self,
        room: &mut [W],
        pitch: usize,
        rows: Range<usize>,
        columns: Range<usize>,
    ) {
        if rows.is_empty() {
            return;
        }
        let mut segments = [Segment::default(); MOST_COLUMNS];
        let n = self.segments(&mut segments, columns);
        let segments = &segments[..n];
        let plane = self.y.size * self.x.size;
        if self.y.is_identity() && self.x.is_identity() {
            for segment in segments {
                let first = segment.image + rows.start * plane + segment.x as usize;
                for row in 0..rows.len() {
                    let to = &mut room[row * pitch + segment.at..][..segment.len];
                    load_row(&self.source[first + row * plane..][..segment.len], to);
                }
            }
            return;
        }
        let taps = self.y.taps * self.x.taps;
        let (mut channel, tap) = (rows.start / taps, rows.start % taps);
        let (mut ky, mut kx) = (tap / self.x.taps, tap % self.x.taps);

        for row in 0..rows.len() {
            let room = &mut room[row * pitch..];
            let (down, right) = (ky as isize * self.y.step, kx as isize * self.x.step);
            for segment in segments {
                let y = (segment.y + down) as usize;
                if y >= self.y.size {
                    room[segment.at..][..segment.len].fill(W::ZERO);
                    continue;
                }
                let from = &self.source[segment.image + channel * plane + y * self.x.size..];
                let room = &mut room[segment.at..];
                if self.x.stride == 1 {
                    copy(room, segment.len, from, self.x.size, segment.x + right);
                } else {
                    self.gather(&mut room[..segment.len], from, segment.x + right);
                }
            }
            kx += 1;
            if kx == self.x.taps {
                (kx, ky) = (0, ky + 1);
            }
            if ky == self.y.taps {
                (ky, channel) = (0, channel + 1);
            }
        }
    }
    /// The segments of some columns, and their number.
    fn segments(&self, segments: &mut [Segment; MOST_COLUMNS], columns: Range<usize>) -> usize {
        let (width, height) = (self.x.places, self.y.places);
        let (mut n, mut at) = (0, columns.start);
        while at < columns.end {
            let (x, row) = (at % width, at / width);
            let (y, image) = (row % height, row / height);
            let len = (width - x).min(columns.end - at);
            let channels = (image * self.groups + self.group) * self.channels;
            segments[n] = Segment {
                at: at - columns.start,
                len,
                image: channels * self.y.size * self.x.size,
                y: self.y.offset + (y * self.y.stride) as isize,
                x: self.x.offset + (x * self.x.stride) as isize,
            };
            n += 1;
            at += len;
        }
        n
    }
    /// Elements of the row `from`, `stride` apart from the element `x` on.
    fn gather<W: Wide>(&self, to: &mut [W], from: &[T], x: isize) {
        let (stride, n) = (self.x.stride, to.len());
        // The first place that reads at or after element 0, and the first that reads past the end.
        let reached = |end: isize| {
            let before = (end - x).max(0) as usize;
            before.div_ceil(stride).min(n)
        };
        let (first, end) = (reached(0), reached(self.x.size as isize));
        to[..first].fill(W::ZERO);
        to[end..].fill(W::ZERO);
        if first < end {
            let from = &from[(x + (first * stride) as isize) as usize..];
            let to = &mut to[first..end];
            if let (2, Some((last, to))) = (stride, to.split_last_mut()) {
                // Vectors of every other element.
                let (pairs, rest) = from[..=2 * to.len()].as_chunks::<2>();
                for (to, &[from, _]) in to.iter_mut().zip(pairs) {
                    *to = W::of(from);
                }
                *last = W::of(rest[0]);
                return;
            }
            for (to, &from) in to.iter_mut().zip(from.iter().step_by(stride)) {
                *to = W::of(from);
            }
        }
    }
}

/// Copies elements `x..x + len` of a row of `size` elements; zeros outside the row.
#[inline]
fn copy<T: Scalar, W: Wide>(room: &mut [W], len: usize, from: &[T], size: usize, x: isize) {
    let first = x.min(0).unsigned_abs().min(len);
    let end = (size as isize - x).clamp(first as isize, len as isize) as usize;
    room[..first].fill(W::ZERO);
    if first < end {
        let from = &from[(x + first as isize) as usize..];
        let whole = (end - first).next_multiple_of(SLACK);
        if from.len() >= whole && room.len() >= first + whole {
            let from = from[..whole].as_chunks::<SLACK>().0;
            let to = room[first..][..whole].as_chunks_mut::<SLACK>().0;
            for (to, from) in to.iter_mut().zip(from) {
                W::load(from, to);
            }
        } else {
            W::load(&from[..end - first], &mut room[first..end]);
        }
    }
    room[end..len].fill(W::ZERO);
}
