//! Products of groups of rows on a GPU. Where groups end is data, so a kernel first writes a table
//! of what its tiles compute: the scratch that this takes.

/// Rows in groups whose ends are data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Groups {
    /// The number of rows.
    pub rows: u64,
    /// The number of groups.
    pub groups: u64,
}

/// Bytes of an entry of the table: a group, a first row, and where rows end.
const ENTRY_BYTES: u64 = 24;
/// Rows of the smallest tile.
const FEWEST_ROWS: u64 = 64;

impl Groups {
    /// The number of tiles of `tile` rows that suffice, wherever groups end. A tile has rows of one
    /// group. The rows behind the last group have tiles, too.
    pub fn tiles(&self, tile: u64) -> u64 {
        /// Rows of tiles that a kernel computes together.
        const TOGETHER: u64 = 8;
        // Each group with rows begins a tile, which need not have more than one row.
        let begun = (self.groups + 1).min(self.rows);
        (begun + (self.rows - begun) / tile).next_multiple_of(TOGETHER)
    }

    /// Bytes of scratch for an entry for each tile.
    pub fn scratch_of_tiles(&self) -> u64 {
        ENTRY_BYTES * self.tiles(FEWEST_ROWS)
    }

    /// Bytes of scratch for an entry for each group.
    pub fn scratch_of_groups(&self) -> u64 {
        ENTRY_BYTES * self.groups
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_suffice_wherever_groups_end() {
        for rows in 0..12 {
            for ends in (0..=rows).flat_map(|a| (a..=rows).map(move |b| [a, b, rows])) {
                let sizes = [ends[0], ends[1] - ends[0], ends[2] - ends[1]];
                let needed: u64 = sizes.iter().map(|size: &u64| size.div_ceil(3)).sum();
                let groups = Groups { rows, groups: 2 };
                assert!(groups.tiles(3) >= needed, "{ends:?}");
                assert!(groups.tiles(3) < needed.max(1) + 11, "{ends:?}");
            }
        }
        // Two groups of one row, and the rest.
        let groups = Groups {
            rows: 130,
            groups: 2,
        };
        assert_eq!(groups.tiles(64), 8);
        assert_eq!(
            Groups {
                rows: 64 * 7,
                groups: 2
            }
            .tiles(64),
            16
        );
    }
}
