//! Lets buffers of the host wait on a disk, if the host's pool would exceed its limit: the third
//! tier of ZeRO-Infinity (Rajbhandari et al., 2021).
//!
//! Before: lines between the device and the host, after `prefetch`; no places. After: if the
//! machine has a disk, the schedule has a pool `disk` and streams of copies from it and to it. A
//! buffer that waits there has its home in this pool. For each visit to the host it gets a buffer
//! there, which a `load` fills if the visit reads, and which a `store` copies home if the visit
//! writes. Loads come early and stores go late, as far as the host has room.
//!
//! The pass depends on the host's limit and never on the device's budget. So budgets stay monotone.

mod choose;
mod held;
mod lines;
mod tier;

use crate::alloc::{lifetimes, live_peak, peak_in};
use crate::plan::machine::HOST;
use crate::plan::tuning::{SPILL_TRIES, STAGED};
use crate::plan::{Illegal, Problem};
use ir::schedule::{MemorySpace, Schedule};
use tier::{Clock, Tier};

/// Adds the disk's pool, streams and lines; only the first two if the host holds everything. An
/// error if the disk is too small.
pub fn run(problem: &Problem<'_>, schedule: &mut Schedule) -> Result<(), Illegal> {
    if problem.device.disk.is_none() || problem.parts.is_some() {
        return Ok(());
    }
    let most_on_disk = problem.disk_limit;
    let tier = Tier::new(schedule, most_on_disk);
    let limit = problem.host_limit.unwrap_or(u64::MAX);
    let fits = |schedule: &Schedule| host_peak(problem, schedule).is_some_and(|peak| peak <= limit);
    if problem.on_disk.is_none() && fits(schedule) {
        return Ok(());
    }
    let clock = Clock::new(problem.graph, schedule, problem.cost);
    let held = held::held(problem, schedule);
    // Gaps between addresses take some of the limit. How much is known only afterwards.
    let mut most = limit;
    let mut spilled = schedule.clone();
    for number in 1..=SPILL_TRIES {
        let room = match number < SPILL_TRIES {
            true => most / STAGED,
            false => most,
        };
        let chosen = choose::choose(problem, schedule, &clock, held.clone(), most - room);
        // The last try: everything that can wait on the disk does, and nothing comes early.
        let most_live = if number < SPILL_TRIES { most } else { 0 };
        spilled = lines::spilled(problem, schedule, (&tier, &clock), &chosen, most_live);
        let peak = match host_peak(problem, &spilled) {
            Some(peak) if peak <= limit => break,
            Some(peak) => peak,
            None => limit.saturating_mul(2),
        };
        most = most.saturating_sub((peak - limit).max(most / 32));
    }
    *schedule = spilled;
    let needs = on_disk(problem, schedule);
    match needs <= most_on_disk {
        true => Ok(()),
        false => Err(Illegal::DiskTooSmall {
            needs,
            has: most_on_disk,
        }),
    }
}

/// What the pool on the disk takes when it is placed, bytes; 0 if there is none.
pub fn on_disk(problem: &Problem<'_>, schedule: &Schedule) -> u64 {
    let pool = schedule.pool_in(MemorySpace::Disk);
    pool.map_or(0, |pool| {
        peak_in(schedule, &lifetimes(schedule), problem.unit, pool)
    })
}

/// What the host's pool takes when it is placed; `None` if more bytes are alive than it may have.
fn host_peak(problem: &Problem<'_>, schedule: &Schedule) -> Option<u64> {
    let lives = lifetimes(schedule);
    let fits = problem.host_holds(live_peak(schedule, &lives, HOST));
    fits.then(|| peak_in(schedule, &lives, problem.unit, HOST))
}
