//! How long buffers hold their bytes. A schedule can be finished in three variants, which differ
//! only in this. The planner tries the first two, and the third if lines of the second wait for
//! bytes.

use super::sync;
use crate::alloc::{self, Lifetime};
use crate::plan::Problem;
use crate::plan::machine::COMPUTE;
use crate::plan::tuning::NOTHING;
use crate::sim::{Timeline, simulate, unlimited};
use ir::schedule::{Buffer, MemorySpace, Pool, Schedule};
use ir::{Id, Table};

/// The host's limit divided by this is left for gaps between buffers.
const GAPS: u64 = 100;

/// When a buffer that a copy still reads becomes free.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Variant {
    /// When the copy has ended in simulated time. So no line waits for the bytes of a copy.
    #[default]
    ByTime,
    /// At the next line of the list, and where its pool has room, later: until its copy has ended.
    /// Needs the fewest bytes. Lines wait for copies only where memory is short.
    WhereFree,
    /// The same with a little more room, and until the copy has ended in a simulation of
    /// `WhereFree`, where copies also wait for bytes. If the host is full, they end much later than
    /// in the first simulation.
    AsPlayed,
}

impl Variant {
    /// All, in the order in which they are tried.
    pub const ALL: [Variant; 3] = [Variant::ByTime, Variant::WhereFree, Variant::AsPlayed];
}

/// The lifetimes of a schedule's buffers in a variant.
pub fn lives(
    problem: &Problem<'_>,
    schedule: &Schedule,
    variant: Variant,
) -> Table<Buffer, Lifetime> {
    let [by_time, where_free] = first_two(problem, schedule);
    match variant {
        Variant::ByTime => by_time,
        Variant::WhereFree => where_free,
        Variant::AsPlayed => {
            let Problem { graph, unit, .. } = *problem;
            let plan = alloc::allocate_at(schedule, &where_free, unit);
            let plan = alloc::states_first(graph, schedule, &plan, unit);
            let mut played = schedule.clone();
            sync::run(graph, &mut played, &plan);
            as_played(schedule, &simulate(graph, &played, problem.cost))
        }
    }
}

/// The lifetimes of the first two variants. Only the first if both are the same.
pub fn variants(
    problem: &Problem<'_>,
    schedule: &Schedule,
) -> Vec<(Variant, Table<Buffer, Lifetime>)> {
    let [by_time, where_free] = first_two(problem, schedule);
    let mut variants = vec![(Variant::ByTime, by_time), (Variant::WhereFree, where_free)];
    variants.dedup_by(|a, b| a.1 == b.1);
    variants
}

fn first_two(problem: &Problem<'_>, schedule: &Schedule) -> [Table<Buffer, Lifetime>; 2] {
    let least = alloc::lifetimes(schedule);
    let timeline = unlimited(problem.graph, schedule, problem.cost);
    let most = stretched(schedule, &least, &timeline);
    let free = where_free(schedule, &least, &most, 0.0);
    [most, free]
}

/// The lifetimes of [`Variant::AsPlayed`], from the times of a schedule with the places of
/// [`Variant::WhereFree`].
pub fn as_played(schedule: &Schedule, timeline: &Timeline) -> Table<Buffer, Lifetime> {
    let least = alloc::lifetimes(schedule);
    let most = stretched(schedule, &least, timeline);
    where_free(schedule, &least, &most, NOTHING)
}

/// Lifetimes in the time of a simulation: a buffer that a copy or the host still reads becomes free
/// at the first line that starts after this read has ended. Otherwise first fit could place a
/// tensor in bytes that are still being swapped out, and the step would wait for the link.
fn stretched(
    schedule: &Schedule,
    lives: &Table<Buffer, Lifetime>,
    timeline: &Timeline,
) -> Table<Buffer, Lifetime> {
    let computing: Vec<(f64, u32)> = schedule
        .instrs
        .iter()
        .filter(|(_, data)| data.stream == COMPUTE)
        .map(|(instr, _)| (timeline.start[instr], instr.index() as u32))
        .collect();
    let n = schedule.instrs.len() as u32;
    let mut lives = lives.clone();
    // With a disk behind the host, `spill` keeps the host's limit by the positions of lines.
    let has = |space| schedule.pool_in(space).is_some();
    let spills = has(MemorySpace::Host) && has(MemorySpace::Disk);
    for (instr, data) in schedule
        .instrs
        .iter()
        .filter(|(_, data)| data.stream != COMPUTE)
    {
        let after = computing.partition_point(|&(start, _)| start < timeline.end[instr]);
        let end = computing.get(after).map_or(n, |&(_, line)| line);
        for loc in data.kind.places() {
            if !spills || schedule.space(loc).is_device() {
                lives[loc.buffer].end = lives[loc.buffer].end.max(end);
            }
        }
    }
    lives
}

/// Lifetimes between `least` and `most`: each buffer, in the order of its end, lives on while its
/// pool has room for it: on the device, below the peak of `least` and a share `more` of it.
fn where_free(
    schedule: &Schedule,
    least: &Table<Buffer, Lifetime>,
    most: &Table<Buffer, Lifetime>,
    more: f64,
) -> Table<Buffer, Lifetime> {
    let mut live: Vec<Vec<u64>> = schedule
        .pools
        .ids()
        .map(|pool| alloc::live_bytes(schedule, least, pool))
        .collect();
    let room = |pool: Pool| {
        let peak = live[pool.index()].iter().copied().max().unwrap_or(0);
        // The device's limit is not known here, because a plan is for many budgets.
        match (schedule.pools[pool].space, schedule.pools[pool].limit) {
            (MemorySpace::Host, limit) => {
                let limit = limit.map_or(u64::MAX, |limit| limit - limit / GAPS);
                peak.max(limit)
            }
            _ => peak + (peak as f64 * more) as u64,
        }
    };
    let room: Vec<u64> = schedule.pools.ids().map(room).collect();
    let mut longer: Vec<Buffer> = (least.ids())
        .filter(|&buffer| least[buffer].end < most[buffer].end)
        .collect();
    longer.sort_by_key(|&buffer| (least[buffer].end, buffer));
    let mut lives = least.clone();
    for buffer in longer {
        let data = &schedule.buffers[buffer];
        let (live, room) = (&mut live[data.pool.index()], room[data.pool.index()]);
        let lines = &mut live[least[buffer].end as usize..most[buffer].end as usize];
        let free = lines
            .iter()
            .take_while(|&&bytes| bytes + data.bytes <= room);
        let n = free.count();
        lines[..n].iter_mut().for_each(|bytes| *bytes += data.bytes);
        lives[buffer].end += n as u32;
    }
    lives
}
