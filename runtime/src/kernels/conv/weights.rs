//! The gradient of a convolution's weights: for each group, the product of the patches (a row for
//! each weight of an output channel) and the transposed gradient of the result. The transposed
//! product is stored.

use super::columns::SUMS;
use super::patches::{MOST_COLUMNS, Patches, SLACK};
use crate::kernel::Window;
use crate::kernels::math::Float;
use crate::kernels::product::{Left, MOST_WIDE, Right, Tile, Tiled, pack, tiles};
use crate::kernels::wide::Wide;
use std::ops::Range;

/// Places of results that are multiplied at once. Sums are cut there, for any number of threads.
const DEPTH: usize = MOST_COLUMNS;
/// Rows of patches that are packed at once: 128 KiB of f32.
const ROWS: usize = 128;
/// Output channels that are packed at once.
const OUTPUTS: usize = 1024;

/// The gradients of a group's weights.
pub(super) struct Gradients<'a, T: Float> {
    pub(super) tile: &'a Tile<T::Wide>,
    pub(super) patches: Patches<'a, T>,
    pub(super) dy: &'a [T],
    /// Channels of an image, and of a group.
    pub(super) channels: (usize, usize),
    /// The first channel, and elements of a channel.
    pub(super) first: usize,
    pub(super) plane: usize,
}

impl<T: Float> Gradients<'_, T> {
    /// Computes the gradients of some weights of some output channels.
    pub(super) fn run(
        &self,
        (outputs, weights): (Range<usize>, Range<usize>),
        to: &mut Window<'_, T>,
    ) {
        T::Wide::with_room(|room| {
            let (patches, dys) = room.split_at_mut(DEPTH * ROWS + SLACK);
            T::Wide::with_space(SUMS, |sums| {
                for o in (0..outputs.len()).step_by(OUTPUTS) {
                    let some = o..(o + OUTPUTS).min(outputs.len());
                    let most = (SUMS / some.len()).min(8 * ROWS);
                    for top in (0..weights.len()).step_by(most) {
                        let rows = top..(top + most).min(weights.len());
                        let sums = &mut sums[..rows.len() * some.len()];
                        let part = (
                            weights.start + rows.start..weights.start + rows.end,
                            outputs.start + some.start..outputs.start + some.end,
                        );
                        self.sums(sums, part, patches, dys);
                        store_transposed(sums, some.len(), dys, &mut to.part(some.clone(), rows));
                    }
                }
            });
        });
    }
    /// Sums over all places: a row for each weight, a column for each output channel.
    fn sums(
        &self,
        sums: &mut [T::Wide],
        (rows, outputs): (Range<usize>, Range<usize>),
        patches: &mut [T::Wide],
        dys: &mut [T::Wide],
    ) {
        let places = self.patches.columns();
        if places == 0 {
            sums.fill(T::Wide::ZERO);
        }
        let mut y = Window::new(sums, rows.len(), outputs.len());
        for shallow in (0..places).step_by(DEPTH) {
            let depth = shallow..(shallow + DEPTH).min(places);
            let right = self.pack(dys, depth.clone(), outputs.clone());
            let (tile, pairs) = self.tile.of(T::IS_BF16, depth.len());
            for top in (0..rows.len()).step_by(ROWS) {
                let end = rows.len().min(top + ROWS);
                let some = rows.start + top..rows.start + end;
                self.patches.pack(patches, depth.len(), some, depth.clone());
                if let Some(bf16) = self.tile.pairs(T::IS_BF16) {
                    let patches = &mut patches[..(end - top) * depth.len()];
                    (bf16.pair_rows)(patches, depth.len());
                }
                let left = Left::rows(tile, patches, depth.len());
                let y = &mut y.part(top..end, 0..outputs.len());
                tiles(tile, pairs, left, right, T::Wide::ONE, y, shallow > 0);
            }
        }
    }
    /// The gradient of the result at some places, transposed, in panels.
    fn pack<'b>(
        &self,
        room: &'b mut [T::Wide],
        places: Range<usize>,
        outputs: Range<usize>,
    ) -> Right<'b, T::Wide> {
        let (widened, room) = room.split_at_mut(DEPTH * MOST_WIDE);
        let width = self.tile.of(T::IS_BF16, 0).0.columns();
        let panel = width * places.len();
        let mut at = places.start;
        while at < places.end {
            let (image, place) = (at / self.plane, at % self.plane);
            let n = (self.plane - place).min(places.end - at);
            let channel = image * self.channels.0 + self.first + outputs.start;
            let from = &self.dy[channel * self.plane + place..];
            let room = &mut room[(at - places.start) * width..];
            if T::room(1) == 0 {
                // The type is its own wide type.
                let from = T::widened(from, &mut []);
                self.tile
                    .pack_columns(room, panel, (outputs.len(), self.plane), (n, 1), from);
            } else {
                self.pack_widened((room, widened), panel, (outputs.len(), n), from);
            }
            at += n;
        }
        if let Some(bf16) = self.tile.pairs(T::IS_BF16) {
            let panels = outputs.len().div_ceil(width);
            (bf16.pair_panels)(&mut room[..panels * panel], (places.len(), width));
        }
        Right {
            w: room,
            row: width,
            panel,
        }
    }
    /// The same for `n` places, if elements must be widened.
    fn pack_widened(
        &self,
        (room, widened): (&mut [T::Wide], &mut [T::Wide]),
        panel: usize,
        (outputs, n): (usize, usize),
        from: &[T],
    ) {
        let tile = self.tile.of(T::IS_BF16, 0).0;
        for first in (0..outputs).step_by(tile.columns()) {
            let some = (outputs - first).min(tile.columns());
            let channels = from[first * self.plane..].chunks(self.plane).take(some);
            for (channel, row) in channels.zip(widened.chunks_exact_mut(n)) {
                T::Wide::load(&channel[..n], row);
            }
            let room = &mut room[first / tile.columns() * panel..];
            tile.pack_columns(room, panel, (some, n), (n, 1), widened);
        }
    }
}

/// Rows that are turned at once.
const TURNED: usize = 64;

/// Rounds sums of so many columns and writes them transposed. Neighbouring rows are turned in
/// `room`.
pub(super) fn store_transposed<T: Float>(
    sums: &[T::Wide],
    columns: usize,
    room: &mut [T::Wide],
    to: &mut Window<'_, T>,
) {
    let room = &mut room[..TURNED * columns];
    for (block, sums) in sums.chunks(TURNED * columns).enumerate() {
        let rows = sums.len() / columns;
        let panel = (TURNED, room.len());
        pack(room, panel, (rows, columns), (columns, 1), sums);
        for (column, from) in room.chunks_exact(TURNED).enumerate() {
            let to = &mut to.row(column)[block * TURNED..][..rows];
            T::Wide::store(&from[..rows], to);
        }
    }
}
