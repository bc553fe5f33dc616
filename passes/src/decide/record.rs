//! What decisions come to. A planner answers with drafts: decisions, and what they would come to on a machine where
//! tensors lie without gaps and no copy waits for bytes, which is quickly found. [`front`] drops those that another draft
//! clearly beats; [`judge`] places and simulates the rest, and these records are what a budget chooses from.

use super::{Decisions, Problem};
use crate::alloc::{lifetimes, live_peak};
use crate::realise::{self, Finished};
use crate::schedule::apply::{DEVICE, HOST};
use crate::schedule::prefetch;
use crate::sim::{Timeline, unlimited};
use ir::{Id, Pool, Schedule};
use rayon::prelude::*;
use std::sync::Arc;

/// A proposal.
#[derive(Clone, Debug)]
pub struct Draft {
    /// The decisions; there may be thousands of drafts.
    pub decisions: Arc<Decisions>,
    /// The most bytes alive on the device at one line: no plan needs fewer.
    pub live: u64,
    /// The same of the host.
    pub host: u64,
    /// Time of a step that never waits for bytes, µs.
    pub micros: f64,
}

/// What decisions come to.
#[derive(Clone, Debug)]
pub struct Record {
    /// The decisions; shared by the variants.
    pub decisions: Arc<Decisions>,
    /// Peak of the device's pool, bytes.
    pub peak: u64,
    /// Peak of the host's pool, bytes.
    pub host: u64,
    /// Time of a step, µs.
    pub micros: f64,
    /// Which of the finished programs: see [`realise::finish`].
    pub variant: usize,
}

/// Shares of the peak that copies may take besides, to come early.
const AHEAD: [f64; 4] = [0.0, 0.05, 0.15, 0.4];
/// The least share of a step that more room for copies should win.
const WORTH: f64 = 0.001;
/// Graphs of fewer lines have every draft judged.
const SMALL: usize = 64;
/// A draft is dropped if another is better by this share in both bytes and time. Gaps between tensors blur the bytes.
const CLEARLY: f64 = 0.005;

/// The drafts of decisions, with more and less room for copies to come early; returns the timeline of the first, which has
/// none. `schedule` is what the decisions, without such room, make of the problem.
pub fn draft(problem: &Problem<'_>, decisions: &Decisions, schedule: &Schedule, drafts: &mut Vec<Draft>) -> Timeline {
    let live_of = |schedule: &Schedule| {
        let lives = lifetimes(schedule);
        [DEVICE, HOST].map(|pool| live_peak(schedule, &lives, Pool::new(pool)))
    };
    let [live, host] = live_of(schedule);
    let timeline = unlimited(problem.graph, schedule, problem.cost);
    let mut fastest = timeline.micros;
    drafts.push(Draft { decisions: Arc::new(decisions.clone()), live, host, micros: fastest });
    for share in &AHEAD[1..] {
        let ahead = (live as f64 * share) as u64;
        let mut early = schedule.clone();
        prefetch::run(problem.graph, &mut early, problem.cost, ahead);
        let micros = unlimited(problem.graph, &early, problem.cost).micros;
        if micros < fastest * (1.0 - WORTH) {
            fastest = micros;
            let decisions = Arc::new(Decisions { ahead, ..decisions.clone() });
            let [live, host] = live_of(&early);
            drafts.push(Draft { decisions, live, host, micros });
        }
    }
    timeline
}

/// The drafts of decisions that can be acted on; none of others.
pub fn propose(problem: &Problem<'_>, decisions: &Decisions, drafts: &mut Vec<Draft>) {
    match realise::unnamed(problem, decisions) {
        Ok(schedule) => drop(draft(problem, decisions, &schedule, drafts)),
        Err(error) => log::debug!("not legal: {error}"),
    }
}

/// Places and simulates the drafts, on as many threads as there are processors. The order of the records is that of the
/// drafts.
pub fn judge(problem: &Problem<'_>, drafts: &[Draft]) -> Vec<Record> {
    drafts.par_iter().with_max_len(1).flat_map_iter(|draft| records(problem, draft)).collect()
}

/// The drafts that no other clearly beats, fewest bytes first; all of them where judging takes no time.
pub fn front(problem: &Problem<'_>, mut drafts: Vec<Draft>) -> Vec<Draft> {
    if problem.lines.len() < SMALL {
        return drafts;
    }
    drafts.sort_by(|a, b| a.live.cmp(&b.live).then(a.micros.total_cmp(&b.micros)));
    // The fastest among those of fewer bytes, as far as those are clearly fewer.
    let (mut behind, mut fastest) = (0, f64::INFINITY);
    let mut kept: Vec<Draft> = vec![];
    for at in 0..drafts.len() {
        let draft = &drafts[at];
        while (drafts[behind].live as f64) < draft.live as f64 * (1.0 - CLEARLY) {
            fastest = fastest.min(drafts[behind].micros);
            behind += 1;
        }
        let same = kept.last().is_some_and(|last| last.live == draft.live && last.micros == draft.micros);
        if draft.micros * (1.0 - CLEARLY) < fastest && !same {
            kept.push(draft.clone());
        }
    }
    kept
}

fn records(problem: &Problem<'_>, draft: &Draft) -> Vec<Record> {
    let Ok(schedule) = realise::unnamed(problem, &draft.decisions) else { return vec![] };
    let finished = realise::finish(problem, &schedule).into_iter().enumerate();
    finished
        .map(|(variant, Finished { peak, host, micros })| Record {
            decisions: draft.decisions.clone(),
            peak,
            host,
            micros,
            variant,
        })
        .collect()
}
