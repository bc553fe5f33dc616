//! Gives every buffer its place: `Lifetime`s to a [`Plan`].
//!
//! Buffers that live for the whole step are stacked at the bottom: they conflict with everything, so nothing is lost.
//! The others are placed by first fit in several orders, and the plan with the lowest peak is taken. First fit asks for
//! the lowest address that is free over a lifetime: a segment tree over time holds, at each node, the address ranges in
//! use, and each set is short because neighbouring ranges are one.

pub mod caching;
pub mod check;
pub mod dynamic;
mod exact;
mod order;
mod place;
mod problem;
mod repair;
pub mod serve;
pub mod stalloc;
pub mod stats;
mod sweep;
pub mod trace;
mod tree;

use ir::schedule::{Buffer, InstrKind, Loc, Pool, Schedule};
use ir::{Id, Plan, Table};
pub use place::{Effort, Error, Options, Placement, lower_bound, place};
use tree::Tree;

/// When a buffer holds something: lines `start..end` of the schedule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lifetime {
    /// First line.
    pub start: u32,
    /// One past the last line.
    pub end: u32,
}

/// Lifetimes by list position: from the first line that touches a buffer to the last. What is there at entry or exit
/// lives for the whole step.
pub fn lifetimes(schedule: &Schedule) -> Table<Buffer, Lifetime> {
    let n = schedule.instrs.len() as u32;
    let mut lives = Table::filled(schedule.buffers.len(), Lifetime { start: u32::MAX, end: 0 });
    for instr in schedule.instrs.ids() {
        // Not by accesses: a zero-byte operand is none, yet its buffer wants a place.
        let mut touch = |loc: &Loc| {
            let life = &mut lives[loc.buffer];
            life.start = life.start.min(instr.index() as u32);
            life.end = life.end.max(instr.index() as u32 + 1);
        };
        match &schedule.instrs[instr].kind {
            InstrKind::Run { args, outs, scratch, .. } => args.iter().chain(outs).chain(scratch).for_each(&mut touch),
            InstrKind::Copy { src, dst, .. } => [src, dst].into_iter().for_each(&mut touch),
        }
    }
    for (_, loc) in schedule.entry.iter().chain(&schedule.exit) {
        lives[loc.buffer] = Lifetime { start: 0, end: n.max(1) };
    }
    for buffer in schedule.buffers.ids() {
        if lives[buffer].end <= lives[buffer].start {
            lives[buffer] = Lifetime { start: 0, end: n.max(1) };
        }
    }
    lives
}

/// Bytes alive at each line, of one pool.
pub fn live_bytes(schedule: &Schedule, lives: &Table<Buffer, Lifetime>, pool: Pool) -> Vec<u64> {
    let n = schedule.instrs.len().max(1);
    let mut change = vec![0i128; n + 1];
    for (buffer, data) in schedule.buffers.iter().filter(|(_, data)| data.pool == pool) {
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

/// The lower bound of any plan's peak: the most bytes alive at one line.
pub fn live_peak(schedule: &Schedule, lives: &Table<Buffer, Lifetime>, pool: Pool) -> u64 {
    live_bytes(schedule, lives, pool).into_iter().max().unwrap_or(0)
}

/// The order in which first fit takes buffers: sorted by key, largest first, ties by id.
type Order = fn(&Item) -> (u64, u64);

struct Item {
    buffer: Buffer,
    life: Lifetime,
    bytes: u64,
}

impl Item {
    fn span(&self) -> u64 {
        u64::from(self.life.end - self.life.start)
    }
}

/// Several orders, because each one loses somewhere: big ones first leaves gaps for the small; long ones first keeps the
/// bottom quiet; area is between; by start is what a stack-like step wants.
const ORDERS: &[Order] = &[
    |item| (item.bytes, item.span()),
    |item| (item.span(), item.bytes),
    |item| (item.bytes.saturating_mul(item.span()), item.bytes),
    |item| (u64::MAX - u64::from(item.life.start), item.bytes),
    |item| (u64::from(item.life.end), item.bytes),
];

/// An order that comes within this fraction of the lower bound is good enough: the planner places thousands of schedules.
const NEAR: u64 = 1024;

/// A plan in which buffers that live at the same time do not meet.
pub fn allocate(schedule: &Schedule, lives: &Table<Buffer, Lifetime>) -> Plan {
    let n = schedule.instrs.len().max(1) as u32;
    let mut offset = Table::filled(schedule.buffers.len(), 0u64);
    for pool in schedule.pools.ids() {
        let mut bottom = 0;
        let mut items = vec![];
        for (buffer, data) in schedule.buffers.iter().filter(|(_, data)| data.pool == pool) {
            let life = lives[buffer];
            if life.start == 0 && life.end == n {
                offset[buffer] = bottom;
                bottom += data.bytes;
            } else {
                items.push(Item { buffer, life, bytes: data.bytes });
            }
        }
        let bound = live_peak(schedule, lives, pool) - bottom;
        let mut best: Option<(u64, Vec<u64>)> = None;
        // The device's peak is what the budget limits; the host's is only a limit among others.
        let orders = if pool == Pool::new(0) { ORDERS } else { &ORDERS[..1] };
        for order in orders {
            items.sort_by_key(|item| (std::cmp::Reverse(order(item)), item.buffer));
            let limit = best.as_ref().map_or(u64::MAX, |(peak, _)| *peak);
            let Some((peak, places)) = first_fit(&items, n, limit) else { continue };
            let mut by_buffer: Vec<(Buffer, u64)> = items.iter().map(|item| item.buffer).zip(places).collect();
            by_buffer.sort_unstable();
            best = Some((peak, by_buffer.into_iter().map(|(_, place)| place).collect()));
            if peak <= bound + bound / NEAR {
                break;
            }
        }
        if let Some((_, places)) = best {
            items.sort_by_key(|item| item.buffer);
            for (item, place) in items.iter().zip(places) {
                offset[item.buffer] = bottom + place;
            }
        }
    }
    Plan::new(schedule, offset)
}

/// Lowest free address for each item in turn; `None` once the peak is not below `limit`.
fn first_fit(items: &[Item], n: u32, limit: u64) -> Option<(u64, Vec<u64>)> {
    let mut tree = Tree::new(n);
    let mut peak = 0;
    let mut places = Vec::with_capacity(items.len());
    for item in items {
        let place = tree.lowest((item.life.start, item.life.end), item.bytes, 1, 0);
        peak = peak.max(place + item.bytes);
        if limit <= peak {
            return None;
        }
        tree.insert(item.life.start, item.life.end, place, place + item.bytes);
        places.push(place);
    }
    Some((peak, places))
}
