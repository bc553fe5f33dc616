//! Moves copies from the host up, so that they are done when their value is needed.
//!
//! Before: each copy in stands directly before the line that wants it. After: it stands where the link, working back
//! from the last copy to the first, would have to start it, but no higher than the bytes allow: the peak does not rise
//! (ProTrain, appendix A.2: prefetch only when memory allows), or by no more than the decisions set aside for it.

use super::apply::{COMPUTE, DEVICE, H2D};
use crate::alloc::{lifetimes, live_bytes};
use crate::cost::Cost;
use ir::schedule::{InstrData, InstrKind, Schedule, Why};
use ir::{Graph, Id, Instr, Pool, Table};

/// Reorders the lines; copies may take `ahead` bytes above the peak.
pub fn run(graph: &Graph, schedule: &mut Schedule, cost: &dyn Cost, ahead: u64) {
    let lives = lifetimes(schedule);
    let mut live = live_bytes(schedule, &lives, Pool::new(DEVICE));
    let peak = live.iter().copied().max().unwrap_or(0) + ahead;

    // When each line would start if nothing but computing took time.
    let mut clock = 0.0;
    let mut starts = Vec::with_capacity(schedule.instrs.len());
    for (instr, data) in schedule.instrs.iter() {
        starts.push(clock);
        if data.stream.index() == COMPUTE {
            clock += cost.line(graph, schedule, instr);
        }
    }
    // For each copy in, one past the line that last filled its source, by a copy or by computing: it stays behind that.
    let mut filled = Table::filled(schedule.buffers.len(), 0usize);
    let mut lowest = vec![0; schedule.instrs.len()];
    for (instr, data) in schedule.instrs.iter() {
        if let InstrKind::Copy { src, .. } = data.kind {
            lowest[instr.index()] = filled[src.buffer];
        }
        schedule.each_access(graph, instr, |access| {
            if access.write {
                filled[access.loc.buffer] = instr.index() + 1;
            }
        });
    }

    // Each line's slot: lines keep their own, copies in move to lower ones.
    let mut slots: Vec<usize> = (0..schedule.instrs.len()).collect();
    let mut link_free = f64::INFINITY;
    for (instr, data) in schedule.instrs.iter().rev() {
        let InstrKind::Copy { dst, bytes, .. } = data.kind else { continue };
        // A state's new value goes home over the old one, which lines before may read.
        if data.stream.index() != H2D || data.why == Why::Update {
            continue;
        }
        let line = instr.index();
        let lowest = lowest[line];
        let wanted = starts[line].min(link_free) - cost.link(bytes);
        let size = schedule.buffers[dst.buffer].bytes;
        let mut slot = line;
        while lowest < slot && wanted < starts[slot] && live[slot - 1] + size <= peak {
            slot -= 1;
            live[slot] += size;
        }
        slots[line] = slot;
        link_free = wanted.max(starts[slot]);
    }
    // The link is a queue: a copy that is needed later does not stand before one that is needed sooner.
    let mut latest = 0;
    for (instr, data) in schedule.instrs.iter() {
        if data.stream.index() == H2D {
            latest = latest.max(slots[instr.index()]);
            slots[instr.index()] = latest;
        }
    }
    if slots.iter().enumerate().all(|(line, &slot)| line == slot) {
        return;
    }
    let is_copy_in = |line: usize| schedule.instrs[Instr::new(line)].stream.index() == H2D;
    let mut lines: Vec<(usize, bool, usize)> =
        slots.iter().enumerate().map(|(line, &slot)| (slot, !is_copy_in(line), line)).collect();
    // Copies in that share a slot keep their order, and stand before the line that has the slot.
    lines.sort_unstable();
    let mut old: Vec<Option<InstrData>> = std::mem::take(&mut schedule.instrs).into_values().map(Some).collect();
    let mut take = |line: usize| old[line].take().expect("each line should stand once");
    schedule.instrs = lines.into_iter().map(|(_, _, line)| take(line)).collect();
}
