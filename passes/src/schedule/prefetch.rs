//! Moves copies from the host up, so that they end before their value is needed.
//!
//! Before: each copy in is directly before the line that reads it. After: copies were moved up,
//! from the last copy to the first. Each is placed where the link must start it to end in time, but
//! not higher than memory allows (ProTrain, appendix A.2: prefetch only when memory allows). The
//! peak rises by at most the bytes that the decisions reserve for this.

use crate::alloc::{lifetimes, live_bytes};
use crate::cost::{Cost, Lane};
use crate::plan::machine::{BACKWARD, COMPUTE, D2H, DEVICE, FORWARD, H2D};
use crate::plan::{Decisions, Problem};
use ir::schedule::{InstrData, InstrKind, Schedule, Why};
use ir::{Buffer, Id, Instr, Table};
use smallvec::SmallVec;
use std::ops::Range;

/// Reorders the lines of decisions.
pub fn run(problem: &Problem<'_>, decisions: &Decisions, schedule: &mut Schedule) {
    let order = Room::new(problem, decisions, schedule).order(decisions.ahead);
    if let Some(order) = order {
        reorder(schedule, &order);
    }
}

/// Puts lines into another order.
pub fn reorder(schedule: &mut Schedule, order: &[u32]) {
    let mut old: Vec<Option<InstrData>> = std::mem::take(&mut schedule.instrs)
        .into_values()
        .map(Some)
        .collect();
    let mut take = |&line: &u32| {
        old[line as usize]
            .take()
            .expect("each line should stand once")
    };
    schedule.instrs = order.iter().map(&mut take).collect();
}

/// Which bytes of a buffer were written, and one past the line that did it last: the newest last.
#[derive(Clone, Default)]
struct Filled(SmallVec<[(Range<u64>, usize); 1]>);

impl Filled {
    fn note(&mut self, bytes: Range<u64>, line: usize) {
        let covers = |old: &Range<u64>| bytes.start <= old.start && old.end <= bytes.end;
        self.0.retain(|(old, _)| !covers(old));
        self.0.push((bytes, line));
    }

    /// One past the last line that wrote some of these bytes; 0 if there is none.
    fn last(&self, bytes: Range<u64>) -> usize {
        let meets = |old: &Range<u64>| old.start < bytes.end && bytes.start < old.end;
        let newest = self.0.iter().rev().find(|(old, _)| meets(old));
        newest.map_or(0, |&(_, line)| line)
    }
}

/// How far the copies of a schedule can move up.
pub struct Room<'a> {
    schedule: &'a Schedule,
    cost: &'a dyn Cost,
    /// Bytes alive on the device at each line.
    live: Vec<u64>,
    /// When each line would start if only computing took time.
    starts: Vec<f64>,
    /// For each copy in, one past the line that last wrote its source. The copy must stay after
    /// this line.
    lowest: Vec<usize>,
    /// When copies out run, by the same clock: from, to. Copies in are slower then.
    out: Vec<(f64, f64)>,
    /// When the last line would end.
    end: f64,
}

impl<'a> Room<'a> {
    /// The room of the copies of decisions. A layout of ProTrain takes them to be alone on the
    /// link, as the paper's formulas do.
    pub fn new(problem: &Problem<'a>, decisions: &Decisions, schedule: &'a Schedule) -> Room<'a> {
        let (graph, cost) = (problem.graph, problem.cost);
        let n = schedule.instrs.len();
        let live = live_bytes(schedule, &lifetimes(schedule), DEVICE);
        let mut clock = 0.0;
        let mut starts = Vec::with_capacity(n);
        let mut filled: Table<Buffer, Filled> =
            Table::filled(schedule.buffers.len(), Filled::default());
        let mut lowest = vec![0; n];
        // In a step with a pause, where that is.
        let mut pause = 0;
        let mut out: Vec<(f64, f64)> = vec![];
        for (instr, data) in schedule.instrs.iter() {
            starts.push(clock);
            if data.stream == COMPUTE {
                clock += cost.line(graph, schedule, instr);
            }
            if data.stream == D2H && decisions.layout.is_none() {
                let micros = cost.line(graph, schedule, instr);
                match out.last_mut() {
                    Some(last) if clock <= last.1 => last.1 += micros,
                    _ => out.push((clock, clock + micros)),
                }
            }
            if let InstrKind::Copy { src, bytes, .. } = data.kind {
                lowest[instr.index()] = filled[src.buffer].last(src.offset..src.offset + bytes);
                if schedule.buffers[src.buffer].pool == BACKWARD {
                    lowest[instr.index()] = pause;
                }
            }
            schedule.each_access(graph, instr, |access| {
                if access.write {
                    let start = access.loc.offset;
                    filled[access.loc.buffer].note(start..start + access.bytes, instr.index() + 1);
                    if schedule.buffers[access.loc.buffer].pool == FORWARD {
                        pause = instr.index() + 1;
                    }
                }
            });
        }
        Room {
            schedule,
            cost,
            live,
            starts,
            lowest,
            out,
            end: clock,
        }
    }

    /// When a copy in of `bytes` bytes must start to end at a time.
    fn start(&self, bytes: u64, end: f64) -> f64 {
        let keeps = self.cost.shares().keeps[Lane::In as usize][Lane::Out as usize];
        let (mut left, mut at) = (self.cost.link(bytes), end);
        let before = self.out.partition_point(|&(from, _)| from < end);
        for &(from, to) in self.out[..before].iter().rev() {
            let alone = at - to.min(at);
            if left <= alone {
                break;
            }
            (left, at) = (left - alone, to.min(at));
            let beside = (at - from) * keeps;
            if left <= beside {
                return at - left / keeps;
            }
            (left, at) = (left - beside, from);
        }
        at - left
    }

    /// The order of the lines if copies may take `ahead` bytes above the peak; `None` if no copy
    /// moves.
    pub fn order(&self, ahead: u64) -> Option<Vec<u32>> {
        // A copy of a state's new value overwrites the old one, which lines before it may read. So
        // it stays.
        let is_copy_in = |line: usize| {
            let data = &self.schedule.instrs[Instr::new(line)];
            data.stream == H2D && data.why != Why::Update
        };
        let copies_in: Vec<usize> = (0..self.schedule.instrs.len())
            .filter(|&line| is_copy_in(line))
            .collect();
        if copies_in.is_empty() {
            return None;
        }
        let (mut slots, early) = self.slots(&copies_in, ahead, f64::INFINITY);
        // The first copies should start before the step does, so the last ones must end sooner.
        if early < 0.0 {
            slots = self.slots(&copies_in, ahead, self.end + early).0;
        }
        // The link is a queue: a copy that is needed later must not come before one that is needed
        // sooner.
        let mut latest = 0;
        for &line in &copies_in {
            latest = latest.max(slots[line]);
            slots[line] = latest;
        }
        if copies_in.iter().all(|&line| line == slots[line]) {
            return None;
        }
        // Copies in with the same slot keep their order, and come before the line that has the
        // slot.
        let mut order = Vec::with_capacity(slots.len());
        let mut moved = copies_in.iter().copied().peekable();
        for line in 0..slots.len() {
            while let Some(copy) = moved.next_if(|&copy| slots[copy] <= line) {
                order.push(copy as u32);
            }
            if !is_copy_in(line) {
                order.push(line as u32);
            }
        }
        Some(order)
    }

    /// Each line's slot: lines keep their own, copies in move to lower ones. Also the time at which
    /// the first copy should start. The link is free for these copies until `link_free`.
    fn slots(&self, copies_in: &[usize], ahead: u64, mut link_free: f64) -> (Vec<usize>, f64) {
        let Room {
            schedule, starts, ..
        } = self;
        let mut live = self.live.clone();
        let peak = live.iter().copied().max().unwrap_or(0) + ahead;
        let mut slots: Vec<usize> = (0..schedule.instrs.len()).collect();
        let mut early = 0.0;
        for &line in copies_in.iter().rev() {
            let data = &schedule.instrs[Instr::new(line)];
            let InstrKind::Copy { dst, bytes, .. } = data.kind else {
                continue;
            };
            let wanted = self.start(bytes, starts[line].min(link_free));
            let size = schedule.buffers[dst.buffer].bytes;
            let mut slot = line;
            while self.lowest[line] < slot && wanted < starts[slot] && live[slot - 1] + size <= peak
            {
                slot -= 1;
                live[slot] += size;
            }
            slots[line] = slot;
            link_free = match slot {
                0 => wanted,
                _ => wanted.max(starts[slot]),
            };
            early = wanted;
        }
        (slots, early)
    }
}
