//! How long buffers hold their bytes. A schedule can be finished in two variants, which differ only
//! in this. The planner tries both.

use crate::alloc::{self, Lifetime};
use crate::cost::Cost;
use crate::plan::Problem;
use crate::plan::machine::COMPUTE;
use crate::sim::unlimited;
use ir::schedule::{Buffer, MemorySpace, Schedule};
use ir::{Graph, Id, Table};

/// When a buffer that a copy still reads becomes free.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Variant {
    /// When the copy has ended in simulated time. So no line waits for the bytes of a copy.
    #[default]
    ByTime,
    /// At the next line of the list. Needs the fewest bytes; a line may wait for a copy to end.
    ByPosition,
}

impl Variant {
    /// Both, in the order in which they are tried.
    pub const ALL: [Variant; 2] = [Variant::ByTime, Variant::ByPosition];
}

/// The lifetimes of a schedule's buffers in a variant.
pub fn lives(
    graph: &Graph,
    schedule: &Schedule,
    cost: &dyn Cost,
    variant: Variant,
) -> Table<Buffer, Lifetime> {
    let lives = alloc::lifetimes(schedule);
    match variant {
        Variant::ByTime => stretched(graph, schedule, &lives, cost),
        Variant::ByPosition => lives,
    }
}

/// The lifetimes of each variant. Only the first if both are the same.
pub fn variants(
    problem: &Problem<'_>,
    schedule: &Schedule,
) -> Vec<(Variant, Table<Buffer, Lifetime>)> {
    let mut variants = Variant::ALL
        .map(|variant| {
            let lives = lives(problem.graph, schedule, problem.cost, variant);
            (variant, lives)
        })
        .to_vec();
    variants.dedup_by(|a, b| a.1 == b.1);
    variants
}

/// Lifetimes in simulated time: a buffer that a copy or the host still reads becomes free at the
/// first line that starts after this read has ended. Otherwise first fit could place a tensor in
/// bytes that are still being swapped out, and the step would wait for the link.
fn stretched(
    graph: &Graph,
    schedule: &Schedule,
    lives: &Table<Buffer, Lifetime>,
    cost: &dyn Cost,
) -> Table<Buffer, Lifetime> {
    let timeline = unlimited(graph, schedule, cost);
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
