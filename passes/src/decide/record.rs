//! The bytes and times of decisions. A planner returns drafts: decisions with the bytes and time on
//! a machine where tensors have no gaps and no copy waits for bytes. These figures are computed
//! quickly. [`front`] drops drafts that another one clearly beats. [`judge_best`] places and
//! simulates the remaining drafts that may beat the records so far. A budget chooses among the
//! records.

use crate::alloc::{lifetimes, live_peak};
use crate::plan::Limits;
use crate::plan::machine::{DEVICE, HOST};
use crate::plan::tuning::{
    AHEAD, AHEAD_WORTH, CLEARLY, FEW, LONGER, NOTHING, OVERLAP, SAME, SMALL,
};
use crate::plan::{Decisions, Problem};
use crate::realise::{self, Finished};
use crate::schedule::lives::{Variant, as_played, variants};
use crate::schedule::prefetch::{Room, reorder};
use crate::schedule::spill;
use crate::sim::{Lines, Timeline, unlimited};
use ir::Schedule;
use rayon::prelude::*;
use std::sync::Arc;

ir::named! {
    /// The search that proposed a draft. `--planner auto` runs all of them.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum Origin {
        /// Nothing leaves the device. Inputs may come twice.
        #[default]
        Keep = "keep",
        /// The planner `greedy`.
        Greedy = "greedy",
        /// The planner `offload`.
        Offload = "offload",
        /// The planner `protrain`.
        Protrain = "protrain",
        /// Recomputation solved for the whole step at once, beside swaps.
        Remat = "rematerialization",
        /// Each block computes again what takes no product.
        Blocks = "blocks",
    }
}

/// A proposal.
#[derive(Clone, Debug)]
pub struct Draft {
    /// The search that proposed it; `propose` sets it.
    pub origin: Origin,
    /// The decisions; there may be thousands of drafts.
    pub decisions: Arc<Decisions>,
    /// The most bytes alive on the device at one line: no plan needs fewer.
    pub live: u64,
    /// The same of the host.
    pub host: u64,
    /// Time of a step that never waits for bytes, µs.
    pub micros: f64,
    /// The work of the busiest stream, µs: no step is shorter.
    pub busiest: f64,
}

/// The bytes and time of decisions, placed and simulated.
#[derive(Clone, Debug)]
pub struct Record {
    /// The search that proposed it.
    pub origin: Origin,
    /// The decisions; shared by the variants.
    pub decisions: Arc<Decisions>,
    /// Peak of the device's pool, bytes.
    pub peak: u64,
    /// Peak of the host's pool, bytes.
    pub host: u64,
    /// Time of a step, µs.
    pub micros: f64,
    /// How long buffers hold their bytes.
    pub variant: Variant,
}

/// Which drafts are wanted.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// The most memory that the plan may need; `None` if all budgets are planned.
    pub limits: Option<Limits>,
    /// A step time that is possible within the limits, µs; infinite if none is known. Then a ladder
    /// uses its own drafts.
    pub possible: f64,
}

impl Wanted {
    /// The drafts for all budgets.
    pub const ALL: Wanted = Wanted {
        limits: None,
        possible: f64::INFINITY,
    };

    /// The time of the fastest draft that surely keeps the limits, µs; infinite if no draft does.
    pub fn fastest(&self, problem: &Problem<'_>, drafts: &[Draft]) -> f64 {
        drafts
            .iter()
            .filter(|draft| self.keeps_limits(problem, draft))
            .map(|d| d.micros)
            .fold(f64::INFINITY, f64::min)
    }

    fn keeps_limits(&self, problem: &Problem<'_>, draft: &Draft) -> bool {
        let device = self.limits.map_or(u64::MAX, |limits| limits.device) as f64;
        // Gaps between tensors add to the live bytes.
        draft.live as f64 <= device * (1.0 - CLEARLY) && problem.host_holds(draft.host)
    }

    /// Stops a ladder early when planning one budget. Returns a step time, µs, once two consecutive
    /// rungs that fit are clearly slower than what is possible and the second is no faster; `None`
    /// while the ladder must continue. Along a ladder, drafts need fewer and fewer bytes. They
    /// first become faster, as more updates move to the host, and then slower. Heuristic: no later
    /// rung was ever faster in our benchmarks. The ladders of small graphs never end early: their
    /// rungs are far apart and take no time.
    pub fn end(&self, problem: &Problem<'_>, drafts: &[Draft]) -> Option<f64> {
        if self.limits.is_none() || !problem.is_large() || !problem.heuristics.end_ladders {
            return None;
        }
        let mut rungs: Vec<f64> = vec![];
        for draft in drafts
            .iter()
            .filter(|draft| self.keeps_limits(problem, draft))
        {
            match rungs.last_mut() {
                // The same rung with more room for copies.
                Some(rung) if 0 < draft.decisions.ahead => *rung = rung.min(draft.micros),
                _ => rungs.push(draft.micros),
            }
        }
        let possible = match self.possible.is_finite() {
            true => self.possible,
            false => rungs.iter().copied().fold(f64::INFINITY, f64::min),
        };
        let [.., before, last] = rungs[..] else {
            return None;
        };
        let ends = possible * LONGER < before && before * (1.0 - SAME) <= last;
        log::debug!(
            "rung {}: {last:.0} µs after {before:.0}, {possible:.0} possible{}",
            rungs.len(),
            if ends { ": the ladder ends" } else { "" }
        );
        ends.then_some(before)
    }
}

/// Adds the drafts of decisions, with more and less room for copies to come early. Returns the
/// timeline of the first draft, which has no such room. `schedule` has the lines of the decisions
/// without it.
pub fn draft(
    problem: &Problem<'_>,
    decisions: &Decisions,
    schedule: &Schedule,
    drafts: &mut Vec<Draft>,
) -> Timeline {
    let lines = Lines::new(problem.graph, schedule, problem.cost);
    let (draft, timeline) = first(decisions, schedule, &lines);
    drafts.push(draft.clone());
    draft_ahead(problem, schedule, &lines, draft, drafts);
    timeline
}

/// The draft of decisions without room for copies to come early, with its timeline.
fn first(decisions: &Decisions, schedule: &Schedule, lines: &Lines<'_>) -> (Draft, Timeline) {
    let timeline = lines.unlimited();
    let [live, host] = live_peaks(schedule);
    let draft = Draft {
        origin: Origin::default(),
        decisions: Arc::new(decisions.clone()),
        live,
        host,
        micros: timeline.micros,
        busiest: lines.busiest(),
    };
    log::debug!(
        "draft: {} decisions, {live} bytes alive, {host} on the host, {:.0} µs",
        decisions.count(),
        draft.micros
    );
    (draft, timeline)
}

/// Adds drafts with more bytes for early copies, if each makes the step faster than the drafts
/// before. `draft` has no such room.
fn draft_ahead(
    problem: &Problem<'_>,
    schedule: &Schedule,
    lines: &Lines<'_>,
    mut draft: Draft,
    drafts: &mut Vec<Draft>,
) {
    let live = draft.live;
    // No order of the lines gains more than this.
    let enough = |draft: &Draft| draft.micros * (1.0 - AHEAD_WORTH) <= draft.busiest;
    if enough(&draft) {
        return;
    }
    // Copies between device and host move first.
    let between_two = problem.device.disk.is_some().then(|| {
        let decisions = realise::between_two(problem, &draft.decisions);
        decisions.expect("a draft's decisions should be legal")
    });
    let schedule = between_two.as_ref().unwrap_or(schedule);
    let room = Room::new(problem, &draft.decisions, schedule);
    let mut last = None;
    for share in &AHEAD[1..] {
        let ahead = (live as f64 * share) as u64;
        let order = room.order(ahead);
        let Some(order) = order.filter(|order| last.as_ref() != Some(order)) else {
            continue;
        };
        let moved = || {
            let mut moved = schedule.clone();
            reorder(&mut moved, &order);
            spill::run(problem, &mut moved).ok().map(|()| moved)
        };
        // What spills follows from the order, so with a disk the time is that of other lines.
        let spilled = between_two.is_some().then(moved).flatten();
        let micros = match (&between_two, &spilled) {
            (None, _) => lines.unlimited_micros(&order),
            (Some(_), Some(spilled)) => unlimited(problem.graph, spilled, problem.cost).micros,
            (Some(_), None) => continue,
        };
        if micros < draft.micros * (1.0 - AHEAD_WORTH) {
            log::trace!("draft with {ahead} bytes of copies ahead: {micros:.0} µs");
            let Some(early) = spilled.or_else(moved) else {
                continue;
            };
            let [live, host] = live_peaks(&early);
            draft = Draft {
                origin: draft.origin,
                decisions: Arc::new(Decisions {
                    ahead,
                    ..Decisions::clone(&draft.decisions)
                }),
                live,
                host,
                micros,
                busiest: draft.busiest,
            };
            drafts.push(draft.clone());
            if enough(&draft) {
                return;
            }
        }
        last = Some(order);
    }
}

/// The most bytes alive at one line, on the device and on the host.
fn live_peaks(schedule: &Schedule) -> [u64; 2] {
    let lives = lifetimes(schedule);
    [DEVICE, HOST].map(|pool| live_peak(schedule, &lives, pool))
}

/// Adds the drafts of decisions, if they are legal and the host has room for them.
pub fn propose(problem: &Problem<'_>, decisions: &Decisions, drafts: &mut Vec<Draft>) {
    if let Some(schedule) = possible(problem, decisions) {
        draft(problem, decisions, &schedule, drafts);
    }
}

/// The draft of decisions without room for copies to come early, and its lines; `None` if they are
/// not legal or the host has no room for them.
pub fn alone(problem: &Problem<'_>, decisions: &Decisions) -> Option<(Draft, Schedule)> {
    let schedule = possible(problem, decisions)?;
    let lines = Lines::new(problem.graph, &schedule, problem.cost);
    let (draft, _) = first(decisions, &schedule, &lines);
    Some((draft, schedule))
}

/// Adds a draft of [`alone`], and those with more room for copies to come early.
pub fn with_room(
    problem: &Problem<'_>,
    draft: Draft,
    schedule: &Schedule,
    drafts: &mut Vec<Draft>,
) {
    let lines = Lines::new(problem.graph, schedule, problem.cost);
    drafts.push(draft.clone());
    draft_ahead(problem, schedule, &lines, draft, drafts);
}

/// The lines of decisions, if they are legal and the host has room for them.
fn possible(problem: &Problem<'_>, decisions: &Decisions) -> Option<Schedule> {
    if !problem.host_has_room(decisions) {
        return None;
    }
    let schedule = realise::unnamed(problem, decisions);
    let illegal = |error: &_| log::debug!("not legal: {error}");
    schedule.inspect_err(illegal).ok()
}

/// Places and simulates drafts in parallel. The records have the order of the drafts.
pub fn judge(problem: &Problem<'_>, drafts: &[Draft]) -> Vec<Record> {
    let all = |draft| {
        let mut played = None;
        Variant::ALL.into_iter().filter_map(move |variant| {
            let judged = record(problem, draft, variant, played.as_ref(), &[])?;
            played = judged.played;
            Some(judged.record)
        })
    };
    drafts
        .par_iter()
        .with_max_len(1)
        .flat_map_iter(all)
        .collect()
}

/// The same, added to `records`. Drafts that cannot beat all records are left out. Drafts are
/// judged in waves, the most promising first. Each wave uses only the records of earlier waves, so
/// no choice depends on threads.
pub fn judge_best(problem: &Problem<'_>, mut drafts: Vec<Draft>, records: &mut Vec<Record>) {
    if problem.lines.len() < SMALL {
        records.extend(judge(problem, &drafts));
        return;
    }
    while !drafts.is_empty() {
        let rest = wave(problem, &mut drafts, records);
        log::debug!(
            "wave: {} drafts judged, {} wait, {} records",
            drafts.len(),
            rest.len(),
            records.len()
        );
        let mut floor: Vec<f64> = drafts.iter().map(|draft| least(problem, draft)).collect();
        let mut played: Vec<Option<Timeline>> = vec![None; drafts.len()];
        let skips_second = problem.is_large() && problem.heuristics.first_variant_is_fastest;
        for variant in Variant::ALL {
            let known = &records[..];
            let judged = |((draft, &floor), played): ((&Draft, &f64), &Option<Timeline>)| {
                if beaten(problem, known, draft, draft.live, floor) {
                    None
                } else {
                    record(problem, draft, variant, played.as_ref(), known)
                }
            };
            let new: Vec<Option<Judged>> = drafts
                .par_iter()
                .zip(&floor)
                .zip(&played)
                .with_max_len(1)
                .map(judged)
                .collect();
            for (i, judged) in new.into_iter().enumerate() {
                played[i] = None;
                if let Some(judged) = judged {
                    played[i] = judged.played;
                    if skips_second {
                        // In the next variant, copies wait for bytes. For large graphs it was
                        // never faster.
                        floor[i] = floor[i].max(judged.record.micros);
                    }
                    records.push(judged.record);
                }
            }
        }
        drafts = rest;
    }
}

/// Drops the drafts that records beat. Leaves the drafts that no other draft beats in `drafts`, and
/// returns the others.
fn wave(problem: &Problem<'_>, drafts: &mut Vec<Draft>, records: &[Record]) -> Vec<Draft> {
    drafts.retain(|draft| !beaten(problem, records, draft, draft.live, least(problem, draft)));
    let mut fastest = f64::INFINITY;
    let (mut first, mut rest) = (vec![], vec![]);
    drafts.sort_by(|a, b| a.live.cmp(&b.live).then(a.micros.total_cmp(&b.micros)));
    for draft in drafts.drain(..) {
        if draft.micros < fastest {
            fastest = draft.micros;
            first.push(draft);
        } else {
            rest.push(draft);
        }
    }
    if rest.len() <= FEW || first.is_empty() {
        first.append(&mut rest);
    }
    *drafts = first;
    rest
}

/// True if a record is better than a draft can be: the draft needs at least `live` bytes, and its
/// step takes at least `micros` µs. Of two equally fast plans, the one with fewer decisions is
/// better. On large graphs a small difference of bytes does not count, because gaps between tensors
/// change bytes by as much. A draft that may lower the smallest budget is never beaten.
fn beaten(
    problem: &Problem<'_>,
    records: &[Record],
    draft: &Draft,
    live: u64,
    micros: f64,
) -> bool {
    let as_simple = |record: &Record| record.decisions.count() <= draft.decisions.count();
    let faster = |record: &Record| {
        record.micros < micros * (1.0 - SAME) || (record.micros <= micros && as_simple(record))
    };
    let blurred = if problem.is_large() && problem.heuristics.blur_peaks {
        (live as f64 * (1.0 + CLEARLY)) as u64
    } else {
        live
    };
    let mut possible = records
        .iter()
        .filter(|record| problem.host_holds(record.host));
    let smaller = possible.clone().any(|record| record.peak <= live);
    smaller && possible.any(|record| record.peak <= blurred && faster(record))
}

/// The least time that a step of a draft takes, µs: no step is shorter than the work of the busiest
/// stream. On large graphs, overlapping steps never gained more than `OVERLAP`.
pub fn least(problem: &Problem<'_>, draft: &Draft) -> f64 {
    if problem.is_large() && problem.heuristics.bound_overlap {
        draft.busiest.max(draft.micros * (1.0 - OVERLAP))
    } else {
        draft.busiest
    }
}

/// The drafts that no other draft clearly beats, fewest bytes first; for small graphs all drafts,
/// because judging them takes no time.
pub fn front(problem: &Problem<'_>, mut drafts: Vec<Draft>) -> Vec<Draft> {
    if problem.lines.len() < SMALL || !problem.heuristics.drop_dominated {
        return drafts;
    }
    drafts.sort_by(|a, b| a.live.cmp(&b.live).then(a.micros.total_cmp(&b.micros)));
    // The fastest of the drafts that need clearly fewer bytes.
    let (mut behind, mut fastest) = (0, f64::INFINITY);
    let mut kept: Vec<Draft> = vec![];
    for at in 0..drafts.len() {
        let draft = &drafts[at];
        while (drafts[behind].live as f64) < draft.live as f64 * (1.0 - CLEARLY) {
            fastest = fastest.min(drafts[behind].micros);
            behind += 1;
        }
        let same = kept
            .last()
            .is_some_and(|last| last.live == draft.live && last.micros == draft.micros);
        if draft.micros * (1.0 - CLEARLY) < fastest && !same {
            kept.push(draft.clone());
        }
    }
    kept
}

/// The record of a variant of a draft.
struct Judged {
    record: Record,
    /// For [`Variant::WhereFree`], the times of its lines, if they wait for bytes.
    played: Option<Timeline>,
}

/// Judges a variant of a draft; `played` are the times of the variant before. `None` if the variant
/// equals the one before, if known records beat it, or if [`Variant::AsPlayed`] has no times.
fn record(
    problem: &Problem<'_>,
    draft: &Draft,
    variant: Variant,
    played: Option<&Timeline>,
    known: &[Record],
) -> Option<Judged> {
    if variant == Variant::AsPlayed && played.is_none() {
        return None;
    }
    let schedule = realise::unnamed(problem, &draft.decisions).ok()?;
    let own = match played {
        Some(played) => as_played(&schedule, played),
        None => {
            let mut variants = variants(problem, &schedule).into_iter();
            variants.find(|(found, _)| *found == variant)?.1
        }
    };
    let live = live_peak(&schedule, &own, DEVICE);
    if beaten(problem, known, draft, live, least(problem, draft)) {
        return None;
    }
    let (Finished { peak, host, micros }, timeline) = realise::finish(problem, &schedule, &own);
    let waits = variant == Variant::WhereFree
        && least(problem, draft) * (1.0 + NOTHING) < micros
        && realise::waits(problem, &schedule, micros);
    Some(Judged {
        record: Record {
            origin: draft.origin,
            decisions: draft.decisions.clone(),
            peak,
            host,
            micros,
            variant,
        },
        played: waits.then_some(timeline),
    })
}
