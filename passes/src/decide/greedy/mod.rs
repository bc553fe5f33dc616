//! Cuts gaps where memory is short, lowest price per byte first. The simulator judges the results.
//!
//! A *trajectory* starts from `keep` and lowers the live peak round by round. In a round, every
//! idle stretch of a buffer (a value that lies on the device between two accesses) is a candidate:
//! swap it, compute it again, or, for a state, let it live on the host. Everything that a block of
//! the model holds for its backward is also a candidate. Prices are estimated from the last
//! simulation. Candidates are taken in order of price per byte, as long as they cover a line above
//! the round's target. Then the lines are built, placed and simulated again. The simulated results
//! are recorded, not the estimates.
//!
//! There is one trajectory for each [`Taste`]. No trajectory depends on the budget. The plan for a
//! budget is the fastest record that fits. So a lower budget never gives a higher peak, and the
//! smallest record is the smallest feasible budget. If only one budget is planned, records that
//! would not be chosen are left out: see [`Wanted`].

mod cascade;
mod cut;
mod last_resort;
mod prices;
mod round;

pub use cut::{TASTES, Taste};

use super::occupancy::Idle;
use super::record::{Draft, Wanted, draft};
use crate::alloc::{lifetimes, live_bytes};
use crate::plan::machine::{COMPUTE, D2H, DEVICE, H2D};
use crate::plan::tuning::{
    FEW_TENSORS, FINE_JUMP_LADDER, GROWTH, JUMP_LADDER, JUMP_TRIES, LARGE_GROWTH,
    LARGE_JUMP_LADDER, LARGEST_STEP, MISSED, MOST_RERUNS, PATIENCE, SWAP_LATENCIES, SWAP_OUT_SPARE,
    SWAP_SPARE,
};
use crate::plan::{Decisions, Means, Problem};
use crate::realise;
use crate::sim::{Timeline, unlimited};
use cascade::Cascade;
use cut::{Cut, recomputed};
use ir::schedule::{Schedule, Why};
use ir::{Phase, Value};
use round::Round;
use std::collections::BTreeSet;

/// The drafts of keeping everything on the device.
pub fn keep(problem: &Problem<'_>) -> Vec<Draft> {
    let mut drafts = vec![];
    let decisions = problem.start();
    if let Ok(schedule) = realise::unnamed(problem, &decisions) {
        draft(problem, &decisions, &schedule, &mut drafts);
    }
    drafts
}

/// The drafts of one trajectory, in its order, as far as they are wanted. Its first round lowers
/// the peak by the share `step`.
pub fn trajectory(problem: &Problem<'_>, taste: Taste, step: f64, wanted: &Wanted) -> Vec<Draft> {
    let Some(mut trajectory) = Trajectory::new(problem, taste, step, wanted) else {
        return vec![];
    };
    while trajectory.round() {}
    trajectory.drafts
}

/// Decisions that start from `keep` and lower the peak round by round.
struct Trajectory<'a> {
    problem: &'a Problem<'a>,
    taste: Taste,
    wanted: &'a Wanted,
    decisions: Decisions,
    /// The lines of the decisions, and their times.
    schedule: Schedule,
    timeline: Timeline,
    drafts: Vec<Draft>,
    /// Recomputes that raised the peak.
    banned: BTreeSet<(Value, u32)>,
    /// The share of the peak that the next round should save.
    step: f64,
    /// The lowest live peak of a draft so far, bytes.
    lowest: u64,
    /// The number of rounds since the last draft.
    fruitless: usize,
}

impl<'a> Trajectory<'a> {
    /// A trajectory that keeps everything; `None` if the graph cannot be kept.
    fn new(
        problem: &'a Problem<'a>,
        taste: Taste,
        step: f64,
        wanted: &'a Wanted,
    ) -> Option<Trajectory<'a>> {
        let decisions = problem.start();
        let schedule = realise::unnamed(problem, &decisions).ok()?;
        let lowest = live(&schedule).into_iter().max().unwrap_or(0);
        let mut drafts = vec![];
        let timeline = draft(problem, &decisions, &schedule, &mut drafts);
        Some(Trajectory {
            problem,
            taste,
            wanted,
            decisions,
            schedule,
            timeline,
            drafts,
            banned: BTreeSet::new(),
            step,
            lowest,
            fruitless: 0,
        })
    }

    /// Lowers the peak once. False if the trajectory ends.
    fn round(&mut self) -> bool {
        let live = live(&self.schedule);
        let peak = live.iter().copied().max().unwrap_or(0);
        let chosen = self.choose(&live, peak);
        if chosen.is_empty() {
            return false;
        }
        let built = add(self.problem, &chosen, &self.decisions);
        log::debug!(
            "{:?}: {} cuts chosen at {} lines, live peak {peak} -> {:?}",
            self.taste,
            chosen.len(),
            self.schedule.instrs.len(),
            built.as_ref().map(|built| built.peak)
        );
        let only_swaps = chosen.iter().all(|cut| cut.means == Means::Swap);
        match built {
            Some(built) if built.peak < peak || only_swaps => {
                if !self.accept(built) {
                    return false;
                }
            }
            _ => {
                // The reruns need more bytes than they freed, or one of them is impossible.
                self.fruitless += 1;
                self.banned.extend(recomputed(&chosen));
            }
        }
        self.fruitless <= PATIENCE
    }

    /// The cuts of the next round; `peak` is the maximum of `live`, bytes.
    fn choose(&mut self, live: &[u64], peak: u64) -> Vec<Cut> {
        let target = (peak as f64 * (1.0 - self.step)) as u64;
        let growth = if self.problem.is_large() {
            LARGE_GROWTH
        } else {
            GROWTH
        };
        self.step = (self.step * growth).min(LARGEST_STEP);
        Round::new(
            self.problem,
            &self.decisions,
            &self.schedule,
            &self.timeline,
            &self.banned,
            self.taste,
        )
        .choose(live, target)
    }

    /// Continues from these decisions. They become a draft if their peak is the lowest so far.
    /// False if no later draft is wanted.
    fn accept(&mut self, built: Built) -> bool {
        let Built {
            decisions,
            schedule,
            peak,
        } = built;
        let lower = peak < self.lowest;
        if lower {
            self.timeline = draft(self.problem, &decisions, &schedule, &mut self.drafts);
            self.fruitless = 0;
            self.lowest = peak;
        } else {
            self.timeline = unlimited(self.problem.graph, &schedule, self.problem.cost);
            self.fruitless += 1;
        }
        (self.decisions, self.schedule) = (decisions, schedule);
        !lower || goes_on(self.problem, &self.drafts, self.wanted)
    }
}

/// Drafts that do not build on each other, one for each of a ladder of targets. At the start of
/// each, the states of the last blocks are on the host, a share `hosted` of all blocks, and
/// everything else is kept. A trajectory never undoes a cut; in a jump one large cut replaces many
/// small ones.
pub fn jumps(problem: &Problem<'_>, hosted: f64, taste: Taste, wanted: &Wanted) -> Vec<Draft> {
    let mut drafts = vec![];
    let base = problem.hosted(hosted);
    if !problem.host_has_room(&base) {
        return drafts;
    }
    let Ok(schedule) = realise::unnamed(problem, &base) else {
        return drafts;
    };
    let timeline = draft(problem, &base, &schedule, &mut drafts);
    let none_banned = BTreeSet::new();
    let start = Start {
        problem,
        taste,
        decisions: &base,
        schedule: &schedule,
        timeline: &timeline,
        live: live(&schedule),
        round: Round::new(problem, &base, &schedule, &timeline, &none_banned, taste),
    };
    let peak = start.live.iter().copied().max().unwrap_or(0) as f64;
    let mut target = peak;
    loop {
        target *= match problem.is_large() {
            true => LARGE_JUMP_LADDER,
            false if target < FEW_TENSORS * peak => FINE_JUMP_LADDER,
            false => JUMP_LADDER,
        };
        let Some(built) = start.jump(target) else {
            return drafts;
        };
        draft(problem, &built.decisions, &built.schedule, &mut drafts);
        // The peak is 0 if the host updates everything.
        let last = built.peak == 0 || target * MISSED < built.peak as f64;
        if last || !goes_on(problem, &drafts, wanted) {
            return drafts;
        }
    }
}

/// The start of all jumps.
struct Start<'a> {
    problem: &'a Problem<'a>,
    taste: Taste,
    decisions: &'a Decisions,
    schedule: &'a Schedule,
    timeline: &'a Timeline,
    /// Bytes alive at each line.
    live: Vec<u64>,
    /// The first round of each jump. No recompute is banned in it.
    round: Round<'a>,
}

impl Start<'_> {
    /// Lowers the peak towards `target` bytes in a few rounds. `None` if no round lowers it.
    fn jump(&self, target: f64) -> Option<Built> {
        let mut best: Option<Built> = None;
        let mut banned: BTreeSet<(Value, u32)> = BTreeSet::new();
        for _ in 0..JUMP_TRIES {
            let chosen = self.choose(best.as_ref(), &banned, target as u64);
            let (decisions, lowest) = match &best {
                Some(best) => (&best.decisions, best.peak),
                None => (self.decisions, u64::MAX),
            };
            match add(self.problem, &chosen, decisions) {
                Some(built) if built.peak < lowest && !chosen.is_empty() => {
                    let reached = built.peak as f64 <= target;
                    best = Some(built);
                    if reached {
                        break;
                    }
                }
                _ => banned.extend(recomputed(&chosen)),
            }
        }
        best
    }

    /// The cuts of the next round, from the best decisions so far, or from the start.
    fn choose(
        &self,
        best: Option<&Built>,
        banned: &BTreeSet<(Value, u32)>,
        target: u64,
    ) -> Vec<Cut> {
        let round = |decisions, schedule, timeline| {
            Round::new(
                self.problem,
                decisions,
                schedule,
                timeline,
                banned,
                self.taste,
            )
        };
        match best {
            None if banned.is_empty() => self.round.choose(&self.live, target),
            None => round(self.decisions, self.schedule, self.timeline).choose(&self.live, target),
            Some(best) => {
                let timeline = unlimited(self.problem.graph, &best.schedule, self.problem.cost);
                let live = live(&best.schedule);
                round(&best.decisions, &best.schedule, &timeline).choose(&live, target)
            }
        }
    }
}

/// Decisions, their lines, and the most bytes alive on the device at one line.
struct Built {
    decisions: Decisions,
    schedule: Schedule,
    peak: u64,
}

/// Decisions with more cuts. `None` if they are illegal, or mostly reruns.
fn add(problem: &Problem<'_>, cuts: &[Cut], decisions: &Decisions) -> Option<Built> {
    let mut decisions = decisions.clone();
    cuts.iter()
        .for_each(|cut| cut.add_to(&mut decisions, problem));
    let schedule = realise::unnamed(problem, &decisions).ok()?;
    let reruns = schedule
        .instrs
        .values()
        .filter(|data| data.why == Why::Recompute)
        .count();
    if reruns > MOST_RERUNS * problem.lines.len() {
        return None;
    }
    let peak = live(&schedule).into_iter().max()?;
    Some(Built {
        decisions,
        schedule,
        peak,
    })
}

/// True if a draft after the last one may be chosen.
fn goes_on(problem: &Problem<'_>, drafts: &[Draft], wanted: &Wanted) -> bool {
    !beyond_host(problem, drafts) && wanted.end(problem, drafts).is_none()
}

/// True if the last draft has more bytes on the host than the host may hold: later drafts free more
/// of the device and need more of the host.
pub(super) fn beyond_host(problem: &Problem<'_>, drafts: &[Draft]) -> bool {
    drafts
        .last()
        .is_some_and(|draft| !problem.host_holds(draft.host))
}

/// Bytes alive on the device at each line.
pub(super) fn live(schedule: &Schedule) -> Vec<u64> {
    live_bytes(schedule, &lifetimes(schedule), DEVICE)
}

/// Swaps the values that cost the most to compute again, over their gap between forward and
/// backward. It stops when a `share` of the link's spare time is used. False if no value is
/// swapped.
pub(super) fn swaps(problem: &Problem<'_>, decisions: &mut Decisions, share: f64) -> bool {
    let Ok(schedule) = realise::unnamed(problem, decisions) else {
        return false;
    };
    let timeline = unlimited(problem.graph, &schedule, problem.cost);
    let spare = (SWAP_SPARE[0] * timeline.busy[COMPUTE] - SWAP_SPARE[1] * timeline.busy[H2D])
        .min(SWAP_OUT_SPARE * timeline.busy[COMPUTE] - timeline.busy[D2H]);
    let mut room = share * spare;
    let mut chosen = vec![];
    for cut in dearest_to_recompute(problem, decisions, &schedule, &timeline) {
        let micros = problem.cost.link(cut.bytes);
        // A copy that is mostly latency frees little.
        let worth = SWAP_LATENCIES * problem.cost.link(0) < micros && 2.0 * micros < cut.room;
        if worth && micros <= room {
            room -= micros;
            chosen.push(Cut {
                means: Means::Swap,
                ..cut
            });
        }
    }
    chosen.iter().for_each(|cut| cut.add_to(decisions, problem));
    !chosen.is_empty()
}

/// The cuts of values between forward and backward, the highest cost per byte of computing again
/// first. Values that cannot be computed again come before all others.
fn dearest_to_recompute(
    problem: &Problem<'_>,
    decisions: &Decisions,
    schedule: &Schedule,
    timeline: &Timeline,
) -> Vec<Cut> {
    let graph = problem.graph;
    let banned = BTreeSet::new();
    let round = Round::new(problem, decisions, schedule, timeline, &banned, Taste::Swap);
    let crosses = |idle: &&Idle| {
        let def = graph
            .def_node(idle.value)
            .map(|node| graph.nodes[node].phase);
        def == Some(Phase::Forward) && round.phase(idle.to) == Some(Phase::Backward)
    };
    let mut cascade = Cascade::new(problem);
    let crossing = round.occupancy.idle.iter().filter(crosses);
    let mut cuts: Vec<Cut> = crossing
        .filter_map(|idle| round.gap(idle, &mut cascade))
        .collect();
    let dear = |cut: &Cut| cut.recompute.unwrap_or(f64::INFINITY) / cut.bytes as f64;
    cuts.sort_by(|a, b| dear(b).total_cmp(&dear(a)).then(a.gaps.cmp(&b.gaps)));
    cuts
}
