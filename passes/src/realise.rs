//! From decisions to a finished program: apply, in-place, prefetch, allocate, sync, simulate. The
//! loop that planners turn: they propose, this shows what a proposal costs in time and bytes.

use crate::alloc::{self, Lifetime};
use crate::cost::Cost;
use crate::plan::machine::{COMPUTE, DEVICE, HOST};
use crate::plan::{Decisions, Problem};
use crate::schedule::{apply, inplace, prefetch, sync};
use crate::sim::{simulate, unlimited};
use ir::schedule::{Buffer, BufferData, Schedule};
use ir::{Graph, Id, Plan, Table};

/// What decisions come to.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Finished {
    /// Peak of the device's pool, bytes.
    pub peak: u64,
    /// Peak of the host's pool, bytes.
    pub host: u64,
    /// Simulated time of one step, µs.
    pub micros: f64,
}

/// Builds the schedule up to the point where places are needed.
pub fn lines(problem: &Problem<'_>, decisions: &Decisions) -> Result<Schedule, String> {
    finish_lines(problem, decisions, apply::run(problem, decisions)?)
}

/// The same with buffers that have no names: see [`apply::unnamed`].
pub fn unnamed(problem: &Problem<'_>, decisions: &Decisions) -> Result<Schedule, String> {
    finish_lines(problem, decisions, apply::unnamed(problem, decisions)?)
}

fn finish_lines(
    problem: &Problem<'_>,
    decisions: &Decisions,
    mut schedule: Schedule,
) -> Result<Schedule, String> {
    inplace::run(problem.graph, &mut schedule);
    prefetch::run(problem.graph, &mut schedule, problem.cost, decisions.ahead);
    Ok(schedule)
}

/// How many ways there are to finish a schedule; see [`lives`].
pub const VARIANTS: usize = 2;

/// Lifetimes of a variant: 0, by time, never makes a copy wait for bytes; 1, by position, needs the
/// fewest bytes.
pub fn lives(
    graph: &Graph,
    schedule: &Schedule,
    cost: &dyn Cost,
    variant: usize,
) -> Table<Buffer, Lifetime> {
    let lives = alloc::lifetimes(schedule);
    if variant == 0 {
        stretched(graph, schedule, &lives, cost)
    } else {
        lives
    }
}

/// Lifetimes of each variant; fewer if they are the same.
pub fn variants(problem: &Problem<'_>, schedule: &Schedule) -> Vec<Table<Buffer, Lifetime>> {
    let of = |variant| lives(problem.graph, schedule, problem.cost, variant);
    let mut variants: Vec<_> = (0..VARIANTS).map(of).collect();
    variants.dedup();
    variants
}

/// What a schedule comes to with buffers that live so long.
pub fn finish(
    problem: &Problem<'_>,
    schedule: &Schedule,
    lives: &Table<Buffer, Lifetime>,
) -> Finished {
    let (graph, cost) = (problem.graph, problem.cost);
    let plan = alloc::allocate(schedule, lives);
    let mut placed = schedule.clone();
    sync::run(graph, &mut placed, &plan);
    let micros = simulate(graph, &placed, cost).micros;
    Finished {
        peak: plan.peak[DEVICE],
        host: plan.peak[HOST],
        micros,
    }
}

/// The time of a step, µs, in which every buffer has bytes of its own: no places let lines wait for
/// less.
pub fn roomy(problem: &Problem<'_>, schedule: &Schedule) -> f64 {
    let mut top = Table::filled(schedule.pools.len(), 0);
    let place = |data: &BufferData| {
        let at = top[data.pool];
        top[data.pool] += data.bytes;
        at
    };
    let plan = Plan::new(schedule, schedule.buffers.values().map(place).collect());
    let mut apart = schedule.clone();
    sync::run(problem.graph, &mut apart, &plan);
    simulate(problem.graph, &apart, problem.cost).micros
}

/// Lifetimes in simulated time: a buffer that a copy or the host still reads is not free at the
/// next line of the list, but at the first that starts after that has ended. Without this, first
/// fit puts a tensor under one that is being swapped out, and the step waits for the link.
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
    for (instr, data) in schedule
        .instrs
        .iter()
        .filter(|(_, data)| data.stream != COMPUTE)
    {
        let after = computing.partition_point(|&(start, _)| start < timeline.end[instr]);
        let end = computing.get(after).map_or(n, |&(_, line)| line);
        for loc in data.kind.places() {
            lives[loc.buffer].end = lives[loc.buffer].end.max(end);
        }
    }
    lives
}
