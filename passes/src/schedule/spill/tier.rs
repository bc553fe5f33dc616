//! The disk's pool and streams, and a clock for the lines.

use crate::cost::Cost;
use crate::plan::machine::COMPUTE;
use ir::schedule::{MemorySpace, PoolData, Schedule, StreamData};
use ir::{Graph, Id, Instr, Pool, Stream, Table};
use std::ops::Range;

/// The disk's pool and streams.
pub(super) struct Tier {
    pub(super) pool: Pool,
    pub(super) load: Stream,
    pub(super) store: Stream,
}

impl Tier {
    /// Adds them to a schedule.
    pub(super) fn new(schedule: &mut Schedule, bytes: u64) -> Tier {
        let space = MemorySpace::Disk;
        let mut stream = |name: &str| schedule.streams.push(StreamData { name: name.into() });
        Tier {
            load: stream("disk2h"),
            store: stream("h2disk"),
            pool: schedule.pools.push(PoolData {
                name: space.name(),
                space,
                limit: Some(bytes),
            }),
        }
    }
}

/// When lines would start if each stream took only its own time, but all streams together as long
/// as the busiest.
pub(super) struct Clock {
    /// µs from the start of the step; and its end.
    pub(super) starts: Table<Instr, f64>,
    pub(super) end: f64,
}

impl Clock {
    pub(super) fn new(graph: &Graph, schedule: &Schedule, cost: &dyn Cost) -> Clock {
        let mut clock = 0.0;
        let mut starts = Table::new();
        for (instr, data) in schedule.instrs.iter() {
            starts.push(clock);
            if data.stream == COMPUTE {
                clock += cost.line(graph, schedule, instr);
            }
        }
        Clock { starts, end: clock }
    }

    /// The same, slowed so that a step takes at least `micros` µs.
    pub(super) fn slowed(&self, micros: f64) -> Clock {
        let factor = match self.end > 0.0 {
            true => (micros / self.end).max(1.0),
            false => 1.0,
        };
        let starts = self.starts.values().map(|start| factor * start);
        Clock {
            starts: starts.collect(),
            end: factor * self.end,
        }
    }

    /// When a line would start; the end of the step for one past the last.
    pub(super) fn at(&self, line: usize) -> f64 {
        let start = self.starts.get(Instr::new(line)).copied();
        start.unwrap_or(self.end)
    }

    /// The time of lines, µs.
    pub(super) fn micros(&self, lines: Range<usize>) -> f64 {
        self.at(lines.end) - self.at(lines.start)
    }
}
