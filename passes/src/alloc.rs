//! Gives every buffer of a schedule its place: lifetimes to a [`Plan`]. The buffers of a pool are a
//! [`Trace`], which [`placement`] plans like the trace of any other program.

use crate::plan::machine::{COMPUTE, H2D};
use ir::graph::Def;
use ir::schedule::{ALIGN, Buffer, InstrKind, Pool, Schedule, Why};
use ir::{Graph, Id, Plan, Table};
use placement::trace::{Block, Trace};
use placement::{Effort, Options, place};

/// When a buffer is in use: lines `start..end` of the schedule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lifetime {
    /// First line.
    pub start: u32,
    /// One past the last line.
    pub end: u32,
}

/// Lifetimes by list position: from the first line that touches a buffer to the last. A buffer that
/// is in use at entry or exit lives for the whole step.
pub fn lifetimes(schedule: &Schedule) -> Table<Buffer, Lifetime> {
    let n = schedule.instrs.len() as u32;
    let mut lives = Table::filled(
        schedule.buffers.len(),
        Lifetime {
            start: u32::MAX,
            end: 0,
        },
    );
    for instr in schedule.instrs.ids() {
        // Accesses are not enough: a zero-byte operand is no access, but its buffer needs a place.
        for loc in schedule.instrs[instr].kind.places() {
            let life = &mut lives[loc.buffer];
            life.start = life.start.min(instr.index() as u32);
            life.end = life.end.max(instr.index() as u32 + 1);
        }
    }
    for (_, loc) in schedule.entry.iter().chain(&schedule.exit) {
        lives[loc.buffer] = Lifetime {
            start: 0,
            end: n.max(1),
        };
    }
    for buffer in schedule.buffers.ids() {
        if lives[buffer].end <= lives[buffer].start {
            lives[buffer] = Lifetime {
                start: 0,
                end: n.max(1),
            };
        }
    }
    lives
}

/// Bytes alive at each line, of one pool.
pub fn live_bytes(schedule: &Schedule, lives: &Table<Buffer, Lifetime>, pool: Pool) -> Vec<u64> {
    let n = schedule.instrs.len().max(1);
    let mut change = vec![0i128; n + 1];
    for (buffer, data) in schedule
        .buffers
        .iter()
        .filter(|(_, data)| data.pool == pool)
    {
        change[lives[buffer].start as usize] += i128::from(data.bytes);
        change[lives[buffer].end as usize] -= i128::from(data.bytes);
    }
    let mut live = 0;
    change[..n]
        .iter()
        .map(|c| {
            live += c;
            live as u64
        })
        .collect()
}

/// The most bytes that one line reads, writes and uses, of one pool.
pub fn neediest(schedule: &Schedule, pool: Pool) -> u64 {
    let needs = |kind: &InstrKind| -> u64 {
        let mut buffers: Vec<Buffer> = kind
            .places()
            .map(|loc| loc.buffer)
            .filter(|&buffer| schedule.buffers[buffer].pool == pool)
            .collect();
        buffers.sort_unstable();
        buffers.dedup();
        buffers
            .into_iter()
            .map(|buffer| schedule.buffers[buffer].bytes)
            .sum()
    };
    schedule
        .instrs
        .values()
        .map(|data| needs(&data.kind))
        .max()
        .unwrap_or(0)
}

/// The lower bound of any plan's peak: the most bytes alive at one line.
pub fn live_peak(schedule: &Schedule, lives: &Table<Buffer, Lifetime>, pool: Pool) -> u64 {
    live_bytes(schedule, lives, pool)
        .into_iter()
        .max()
        .unwrap_or(0)
}

/// The same places with the states first: in each pool the homes of states lie at its start, in the
/// order of the graph, and everything else above them. So where a state lies depends on which
/// states live in its pool, and on nothing else. Homes live for the whole step, so no other buffer
/// shares their bytes, and the peak does not rise. Buffers start at multiples of `unit` bytes, here
/// and in the plan.
pub fn states_first(graph: &Graph, schedule: &Schedule, plan: &Plan, unit: u64) -> Plan {
    let size = |home: Buffer| schedule.buffers[home].bytes.next_multiple_of(unit);
    let mut homes: Vec<Buffer> = vec![];
    let mut is_home = Table::filled(schedule.buffers.len(), false);
    for &(value, loc) in &schedule.entry {
        let is_state = matches!(graph.values[value].def, Def::State(_));
        if is_state && !std::mem::replace(&mut is_home[loc.buffer], true) {
            homes.push(loc.buffer);
        }
    }
    let mut offset = plan.offset.clone();
    for pool in schedule.pools.ids() {
        // Where each home was, and the bytes of the homes below it, itself included.
        let here = |buffer: &&Buffer| schedule.buffers[**buffer].pool == pool;
        let mut below: Vec<(u64, u64)> = homes
            .iter()
            .filter(here)
            .map(|&home| (plan.offset[home], size(home)))
            .collect();
        below.sort_unstable();
        let mut all = 0;
        for (_, bytes) in &mut below {
            all += *bytes;
            *bytes = all;
        }
        for (buffer, data) in schedule.buffers.iter() {
            if data.pool == pool && !is_home[buffer] {
                let at = plan.offset[buffer];
                let n_below = below.partition_point(|&(home, _)| home < at);
                let removed = n_below.checked_sub(1).map_or(0, |last| below[last].1);
                offset[buffer] = all + at - removed;
            }
        }
        let mut next = 0;
        for &home in homes.iter().filter(here) {
            offset[home] = next;
            next += size(home);
        }
    }
    Plan::new(schedule, offset)
}

/// A plan is good enough if its peak exceeds the lower bound by at most one part in this number.
const NEAR: u64 = 200;

/// The most bytes in excess of the lower bound with which a plan is good enough. Shares of the
/// memory refer to the plan that keeps everything, so its search goes on to the lower bound. Such
/// plans are few, and planners place thousands of others.
fn good_enough(schedule: &Schedule, bound: u64) -> u64 {
    let moves = |why| matches!(why, Why::Recompute | Why::SwapOut | Why::Gather);
    let keeps_all = !schedule.instrs.values().any(|data| moves(data.why));
    if keeps_all { 0 } else { bound / NEAR }
}

/// A plan in which buffers that live at the same time do not overlap.
pub fn allocate(schedule: &Schedule, lives: &Table<Buffer, Lifetime>) -> Plan {
    allocate_at(schedule, lives, ALIGN)
}

/// The same with buffers that start at multiples of `unit` bytes.
pub fn allocate_at(schedule: &Schedule, lives: &Table<Buffer, Lifetime>, unit: u64) -> Plan {
    let mut offset = Table::filled(schedule.buffers.len(), 0u64);
    for pool in schedule.pools.ids() {
        for (buffer, at) in allocate_in(schedule, lives, unit, pool) {
            offset[buffer] = at;
        }
    }
    for copy in first_copies(schedule) {
        offset[copy] = free_earliest(schedule, lives, unit, &offset, copy);
    }
    Plan::new(schedule, offset)
}

/// The peak of one pool in such a plan, bytes.
pub fn peak_in(schedule: &Schedule, lives: &Table<Buffer, Lifetime>, unit: u64, pool: Pool) -> u64 {
    let placed = allocate_in(schedule, lives, unit, pool).into_iter();
    let ends = placed.map(|(buffer, at)| at + schedule.buffers[buffer].bytes);
    ends.max().unwrap_or(0)
}

/// The buffers of a pool with their offsets.
fn allocate_in(
    schedule: &Schedule,
    lives: &Table<Buffer, Lifetime>,
    unit: u64,
    pool: Pool,
) -> Vec<(Buffer, u64)> {
    let buffers: Vec<Buffer> = schedule
        .buffers
        .iter()
        .filter(|(_, data)| data.pool == pool)
        .map(|(b, _)| b)
        .collect();
    let block = |&buffer: &Buffer| {
        let Lifetime { start, end } = lives[buffer];
        let bytes = schedule.buffers[buffer].bytes.next_multiple_of(unit);
        Block {
            start: start.into(),
            end: end.into(),
            bytes,
            ..Block::default()
        }
    };
    let trace = Trace {
        blocks: buffers.iter().map(block).collect(),
        ..Trace::default()
    };
    let bound = live_peak(schedule, lives, pool);
    let options = Options {
        effort: Effort::Brief,
        capacity: Some(bound + good_enough(schedule, bound)),
        ..Options::default()
    };
    let placed =
        place(&trace, &options, &mut |_, _| ()).expect("a schedule's buffers should be right");
    buffers.into_iter().zip(placed.offsets).collect()
}

/// The buffers of copies to the device before the first kernel.
fn first_copies(schedule: &Schedule) -> Vec<Buffer> {
    let before = schedule
        .instrs
        .values()
        .take_while(|data| data.stream != COMPUTE);
    before
        .filter(|data| data.stream == H2D)
        .filter_map(|data| match data.kind {
            InstrKind::Copy { dst, .. } => Some(dst.buffer),
            InstrKind::Run { .. } => None,
        })
        .collect()
}

/// The lowest place for a buffer whose bytes have their last use earliest in the step, below the
/// peak and beside all buffers that live at the same time. So the buffer's first line can start
/// while the step before still runs.
fn free_earliest(
    schedule: &Schedule,
    lives: &Table<Buffer, Lifetime>,
    unit: u64,
    offset: &Table<Buffer, u64>,
    buffer: Buffer,
) -> u64 {
    let Lifetime { start, end } = lives[buffer];
    let size = |buffer: Buffer| schedule.buffers[buffer].bytes.next_multiple_of(unit);
    let pool = schedule.buffers[buffer].pool;
    // From, to, and until which line the bytes are in use by another buffer.
    let mut blocks: Vec<(u64, u64, u32)> = schedule
        .buffers
        .iter()
        .filter(|&(other, data)| data.pool == pool && other != buffer)
        .map(|(other, _)| {
            let life = lives[other];
            let beside = life.start < end && start < life.end;
            let until = if beside { u32::MAX } else { life.end };
            (offset[other], offset[other] + size(other), until)
        })
        .collect();
    blocks.sort_unstable();
    let own = offset[buffer] + size(buffer);
    let top = blocks.iter().map(|block| block.1).fold(own, u64::max);
    let fit = |until: u32| {
        let mut free = 0;
        for &(from, to, _) in blocks.iter().filter(|block| until < block.2) {
            if free + size(buffer) <= from {
                return Some(free);
            }
            free = free.max(to);
        }
        (free + size(buffer) <= top).then_some(free)
    };
    let mut untils: Vec<u32> = blocks.iter().map(|block| block.2).collect();
    untils.push(0);
    untils.sort_unstable();
    let first = untils.partition_point(|&until| fit(until).is_none());
    let place = untils.get(first).and_then(|&until| fit(until));
    place.unwrap_or(offset[buffer])
}
