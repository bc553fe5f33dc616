//! Plays a schedule in time: each stream runs its lines in order, a line starts when its stream is free and what it
//! waits for is done. The link is duplex: each direction is a stream of its own.

use crate::cost::Cost;
use ir::schedule::{InstrKind, Schedule, Why};
use ir::{Buffer, Graph, Instr, Program, Stream, Table, text};

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
    play(graph, schedule, cost, |instr, end: &Table<Instr, f64>| {
        let waits = schedule.instrs[instr].after.iter().filter(|dep| !dep.previous);
        waits.map(|dep| end[dep.instr]).fold(0.0, f64::max)
    })
}

/// Plays one step on a machine where every buffer has bytes of its own, so that only data orders lines: the schedule has
/// no plan and no waits yet.
pub fn unlimited(graph: &Graph, schedule: &Schedule, cost: &dyn Cost) -> Timeline {
    // The line that last wrote each buffer, and the readers since.
    let mut users: Table<Buffer, (Option<Instr>, Vec<Instr>)> = Table::filled(schedule.buffers.len(), (None, vec![]));
    play(graph, schedule, cost, |instr, end: &Table<Instr, f64>| {
        let mut ready = 0.0f64;
        schedule.each_access(graph, instr, |access| {
            let (writer, readers) = &mut users[access.loc.buffer];
            if let Some(writer) = *writer
                && writer != instr
            {
                ready = ready.max(end[writer]);
            }
            if access.write {
                ready = readers.iter().filter(|&&r| r != instr).map(|&r| end[r]).fold(ready, f64::max);
                readers.clear();
                *writer = Some(instr);
            } else {
                readers.push(instr);
            }
        });
        ready
    })
}

/// Runs each stream's lines in order, each from when its stream is free and `ready` says so.
fn play(
    graph: &Graph,
    schedule: &Schedule,
    cost: &dyn Cost,
    mut ready: impl FnMut(Instr, &Table<Instr, f64>) -> f64,
) -> Timeline {
    let n = schedule.instrs.len();
    let (mut start, mut end) = (Table::filled(n, 0.0), Table::filled(n, 0.0));
    let mut free = Table::filled(schedule.streams.len(), 0.0);
    let mut busy = Table::filled(schedule.streams.len(), 0.0);
    let (mut recomputed, mut swapped_bytes) = (0.0, 0);
    for (instr, data) in schedule.instrs.iter() {
        let micros = cost.line(graph, schedule, instr);
        start[instr] = ready(instr, &end).max(free[data.stream]);
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
