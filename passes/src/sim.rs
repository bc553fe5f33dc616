//! Plays a schedule in time: each stream runs its lines in order, a line starts when its stream is free and what it
//! waits for is done. The link is duplex: each direction is a stream of its own.

use crate::cost::Cost;
use ir::schedule::{InstrKind, Schedule, Why};
use ir::{Graph, Instr, Program, Stream, Table, text};

/// When each line runs.
#[derive(Clone, PartialEq, Debug)]
pub struct Timeline {
    /// Start of each line, µs.
    pub start: Table<Instr, f64>,
    /// End of each line, µs.
    pub end: Table<Instr, f64>,
    /// End of the last line: the time of one step that starts with nothing under way, µs.
    pub micros: f64,
    /// Time each stream is at work, µs.
    pub busy: Table<Stream, f64>,
    /// Time of the reruns, µs.
    pub recomputed: f64,
    /// Bytes that swaps and hosted states send over the link.
    pub swapped_bytes: u64,
}

/// Plays one step.
pub fn simulate(graph: &Graph, schedule: &Schedule, cost: &dyn Cost) -> Timeline {
    let n = schedule.instrs.len();
    let (mut start, mut end) = (Table::filled(n, 0.0), Table::filled(n, 0.0));
    let mut free = Table::filled(schedule.streams.len(), 0.0);
    let mut busy = Table::filled(schedule.streams.len(), 0.0);
    let (mut recomputed, mut swapped_bytes) = (0.0, 0);
    for (instr, data) in schedule.instrs.iter() {
        let micros = cost.line(graph, schedule, instr);
        let waits = data.after.iter().filter(|dep| !dep.previous).map(|dep| end[dep.instr]);
        start[instr] = waits.fold(free[data.stream], f64::max);
        end[instr] = start[instr] + micros;
        free[data.stream] = end[instr];
        busy[data.stream] += micros;
        match data.why {
            Why::Recompute => recomputed += micros,
            Why::SwapOut | Why::SwapIn | Why::Gather | Why::Offload => {
                if let InstrKind::Copy { bytes, .. } = data.kind {
                    swapped_bytes += bytes;
                }
            }
            Why::Model | Why::Update | Why::Feed | Why::Fetch => {}
        }
    }
    let micros = free.values().copied().fold(0.0, f64::max);
    Timeline { start, end, micros, busy, recomputed, swapped_bytes }
}

/// The text of a program with the times of its lines as comments.
pub fn print(program: &Program, timeline: &Timeline) -> String {
    text::print_program_with(program, &|instr| {
        let (start, end) = (timeline.start.get(instr)?, timeline.end.get(instr)?);
        Some(format!("{start:.1}..{end:.1} us"))
    })
}
