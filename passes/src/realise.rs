//! From decisions to a finished program and its figures. Planners propose decisions; this module
//! computes the time and bytes of a proposal.
//!
//! It runs the passes of [`list`](crate::list). [`pipeline::compile`](crate::pipeline::compile)
//! runs the same passes on the chosen plan.

use crate::alloc::Lifetime;
use crate::list::{LINES, PLACES, ScheduleContext, Scheduled};
use crate::plan::machine::{DEVICE, HOST};
use crate::plan::tuning::NOTHING;
use crate::plan::{Decisions, Illegal, Problem};
use crate::schedule::sync;
use crate::sim::{Timeline, simulate};
use ir::schedule::{Buffer, BufferData, Schedule};
use ir::{Plan, Table};

/// The figures of a finished program.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Finished {
    /// Peak of the device's pool, bytes.
    pub peak: u64,
    /// Peak of the host's pool, bytes.
    pub host: u64,
    /// Simulated time of one step, µs.
    pub micros: f64,
}

/// The schedule of decisions, up to the point where places are needed.
pub fn lines(problem: &Problem<'_>, decisions: &Decisions) -> Result<Schedule, Illegal> {
    run(problem, decisions, None, true)
}

/// The same without names of buffers, in half the time. Planners build thousands of schedules that
/// are never printed.
pub fn unnamed(problem: &Problem<'_>, decisions: &Decisions) -> Result<Schedule, Illegal> {
    run(problem, decisions, None, false)
}

/// The same up to the pass that moves copies up.
pub fn unmoved(problem: &Problem<'_>, decisions: &Decisions) -> Result<Schedule, Illegal> {
    run(problem, decisions, Some("prefetch"), false)
}

/// The same up to the pass that lets buffers of the host wait on a disk.
pub fn between_two(problem: &Problem<'_>, decisions: &Decisions) -> Result<Schedule, Illegal> {
    run(problem, decisions, Some("spill"), false)
}

/// Runs [`LINES`], or those before the pass with a name.
fn run(
    problem: &Problem<'_>,
    decisions: &Decisions,
    before: Option<&str>,
    named: bool,
) -> Result<Schedule, Illegal> {
    problem.cancel.look();
    let context = ScheduleContext {
        named,
        ..ScheduleContext::new(problem, decisions)
    };
    let mut scheduled = Scheduled::default();
    for pass in LINES.iter().take_while(|pass| Some(pass.name) != before) {
        (pass.run)(&mut scheduled, &context)?;
    }
    Ok(scheduled.schedule)
}

/// The figures of a schedule whose buffers live for `lives`: those of a
/// [`Variant`](crate::schedule::lives::Variant). Also returns the times of its lines.
pub fn finish(
    problem: &Problem<'_>,
    schedule: &Schedule,
    lives: &Table<Buffer, Lifetime>,
) -> (Finished, Timeline) {
    problem.cancel.look();
    let decisions = Decisions::default();
    let context = ScheduleContext {
        lives: Some(lives),
        ..ScheduleContext::new(problem, &decisions)
    };
    let mut scheduled = Scheduled {
        schedule: schedule.clone(),
        plan: None,
    };
    for pass in &PLACES {
        (pass.run)(&mut scheduled, &context).expect("every schedule should have places");
    }
    let peak = |pool| scheduled.plan.as_ref().map_or(0, |plan| plan.peak[pool]);
    let timeline = simulate(problem.graph, &scheduled.schedule, problem.cost);
    let figures = Finished {
        peak: peak(DEVICE),
        host: peak(HOST),
        micros: timeline.micros,
    };
    (figures, timeline)
}

/// True if lines wait for bytes in a schedule that takes `micros` µs with its places, for so long
/// that other places are worth a try.
pub fn waits(problem: &Problem<'_>, schedule: &Schedule, micros: f64) -> bool {
    with_own_bytes(problem, schedule) * (1.0 + NOTHING) < micros
}

/// The time of a step, µs, if every buffer has its own bytes. With any places, lines wait at least
/// as long.
pub fn with_own_bytes(problem: &Problem<'_>, schedule: &Schedule) -> f64 {
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
