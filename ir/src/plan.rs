//! The address of every buffer of a [`Schedule`]: the third noun.

use crate::schedule::{Buffer, Loc, Pool, Schedule};
use crate::table::Table;

/// One offset for each buffer, one peak for each pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Offset of each buffer in its pool, bytes.
    pub offset: Table<Buffer, u64>,
    /// Size of each pool, bytes: the largest `offset + bytes` of its buffers.
    pub peak: Table<Pool, u64>,
}

impl Plan {
    /// A plan from offsets; computes the peaks.
    pub fn new(schedule: &Schedule, offset: Table<Buffer, u64>) -> Plan {
        let mut peak = Table::filled(schedule.pools.len(), 0u64);
        for (buffer, data) in schedule.buffers.iter() {
            let end = offset[buffer] + data.bytes;
            peak[data.pool] = peak[data.pool].max(end);
        }
        Plan { offset, peak }
    }
    /// The address of a place in its pool, bytes.
    pub fn address(&self, loc: Loc) -> u64 {
        self.offset[loc.buffer] + loc.offset
    }
}
