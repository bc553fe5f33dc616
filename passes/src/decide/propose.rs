//! Runs the planners, with all parts of their work in parallel.

use super::record::{self, Draft, Origin, Wanted};
use super::{greedy, layout, recompute, relieve, weights};
use crate::plan::tuning::{
    CLEARLY, FILLED, FILLED_PER_OCTAVE, HOSTED, LARGE_STEPS, REMAT_STARTS, REMAT_SWAPS, RUNGS,
    STEPS,
};
use crate::plan::{Planner, Problem};
use rayon::prelude::*;
use std::sync::Arc;

/// A part of a planner's work. Parts share only one figure: the step time that the trajectories
/// find possible.
struct Part<'a> {
    planner: Planner,
    origin: Origin,
    is_trajectory: bool,
    drafts: Drafts<'a>,
}

/// The drafts of a part, as far as they are wanted.
type Drafts<'a> = Box<dyn Fn(&Wanted) -> Vec<Draft> + Sync + 'a>;

/// The parts of a planner. `auto` has the parts of all planners, so the plan of another one is
/// faster only by the tolerance within which a simpler plan is preferred.
fn parts<'a>(problem: &'a Problem<'_>, planner: Planner) -> Vec<Part<'a>> {
    let mut parts = vec![];
    let planners = Planner::ALL.into_iter();
    for own in planners.filter(|&own| planner == own || planner == Planner::Auto) {
        let mut add = |origin, is_trajectory, drafts: Vec<Drafts<'a>>| {
            parts.extend(drafts.into_iter().map(|drafts| Part {
                planner: own,
                origin,
                is_trajectory,
                drafts,
            }));
        };
        match own {
            Planner::Auto => {
                add(Origin::Keep, false, vec![boxed(|_| fed_twice(problem))]);
                add(Origin::Remat, false, remat_parts(problem));
                add(
                    Origin::Blocks,
                    false,
                    vec![boxed(|_| layout::parts(problem))],
                );
            }
            Planner::Keep => {}
            Planner::Greedy => {
                add(Origin::Greedy, false, jump_parts(problem));
                add(Origin::Greedy, true, trajectory_parts(problem));
            }
            Planner::Offload => {
                add(
                    Origin::Offload,
                    false,
                    vec![boxed(|_| weights::drafts(problem))],
                );
            }
            Planner::Protrain => {
                let gradients = match planner {
                    Planner::Auto => layout::Gradients::Alone,
                    _ => layout::Gradients::ByChunk,
                };
                let ladder =
                    move |wanted: &Wanted| layout::drafts(problem, gradients, RUNGS, wanted);
                let ladder = boxed(ladder);
                add(Origin::Protrain, false, vec![ladder]);
            }
        }
    }
    parts
}

fn boxed<'a>(drafts: impl Fn(&Wanted) -> Vec<Draft> + Sync + 'a) -> Drafts<'a> {
    Box::new(drafts)
}

/// Keeps everything but the inputs, which come once more for the backward. So those of the next
/// step come while the backward runs.
fn fed_twice(problem: &Problem<'_>) -> Vec<Draft> {
    let mut decisions = problem.start();
    problem.feed_twice(&mut decisions, f64::INFINITY);
    let mut drafts = vec![];
    if !decisions.cuts.is_empty() {
        record::propose(problem, &decisions, &mut drafts);
    }
    drafts
}

/// True if a share of the groups is at least one.
fn hosts_any(problem: &Problem<'_>, share: f64) -> bool {
    problem.n_hosted(share) > 0
}

fn remat_parts<'a>(problem: &'a Problem<'_>) -> Vec<Drafts<'a>> {
    let filled = problem.filling_shares().into_iter();
    let filled = filled.flat_map(|share| REMAT_SWAPS.map(|swaps| (share, swaps)));
    let starts = REMAT_STARTS.into_iter().chain(filled);
    starts
        .filter(|start| start.0 == 0.0 || hosts_any(problem, start.0))
        .map(|start| boxed(move |wanted| recompute::drafts(problem, start, wanted)))
        .collect()
}

fn jump_parts<'a>(problem: &'a Problem<'_>) -> Vec<Drafts<'a>> {
    let shares = HOSTED.into_iter().chain(problem.filling_shares());
    shares
        .filter(|&share| share == 0.0 || hosts_any(problem, share))
        .map(|share| {
            boxed(move |wanted| greedy::jumps(problem, share, greedy::Taste::Cheaper, wanted))
        })
        .collect()
}

fn trajectory_parts<'a>(problem: &'a Problem<'_>) -> Vec<Drafts<'a>> {
    // For large graphs, where rounds take long, only the tastes that mix means are used.
    let mixes =
        |taste: &greedy::Taste| matches!(taste, greedy::Taste::Cheaper | greedy::Taste::Block);
    let tastes = greedy::TASTES.into_iter();
    let tastes = tastes.filter(|taste| !problem.is_large() || mixes(taste));
    let steps = if problem.is_large() {
        LARGE_STEPS
    } else {
        STEPS
    };
    tastes
        .flat_map(|taste| steps.iter().map(move |&step| (taste, step)))
        .map(|(taste, step)| boxed(move |wanted| greedy::trajectory(problem, taste, step, wanted)))
        .collect()
}

/// The drafts for each problem that is planned. Trajectories run first, because they tell the other
/// parts which step time is possible. Drafts that another draft of the same planner clearly beats
/// are dropped; a draft of another planner does not count. Also returns the smallest time at which
/// a ladder was cut off, µs: if the chosen plan is slower, the rest of the ladder may have a better
/// one.
pub(super) fn propose(
    problems: &[Problem<'_>],
    planned: &[bool],
    planner: Planner,
    mut wanted: Wanted,
) -> (Vec<Vec<Draft>>, f64) {
    let planned = problems.iter().enumerate().filter(|(i, _)| planned[*i]);
    let all: Vec<(usize, Part<'_>)> = planned
        .flat_map(|(i, problem)| {
            parts(problem, planner)
                .into_iter()
                .map(move |part| (i, part))
        })
        .collect();
    let mut done: Vec<Vec<Draft>> = vec![vec![]; all.len()];
    let mut ended = f64::INFINITY;
    for trajectories in [true, false] {
        let now: Vec<usize> = (0..all.len())
            .filter(|&k| all[k].1.is_trajectory == trajectories)
            .collect();
        let drafts: Vec<Vec<Draft>> = now
            .par_iter()
            .with_max_len(1)
            .map(|&k| (all[k].1.drafts)(&wanted))
            .collect();
        let mut possible = f64::INFINITY;
        for (k, mut drafts) in now.into_iter().zip(drafts) {
            let (problem, part) = (&problems[all[k].0], &all[k].1);
            drafts
                .iter_mut()
                .for_each(|draft| draft.origin = part.origin);
            ended = ended.min(wanted.end(problem, &drafts).unwrap_or(f64::INFINITY));
            possible = possible.min(wanted.fastest(problem, &drafts));
            done[k] = drafts;
        }
        if wanted.possible.is_infinite() {
            wanted.possible = possible;
        }
    }
    let of = |i: usize, planner: Planner| -> Vec<Draft> {
        let parts = all
            .iter()
            .zip(&done)
            .filter(|((of, part), _)| *of == i && part.planner == planner);
        // A draft that does not fit into the host should not beat one that does.
        parts
            .flat_map(|(_, drafts)| drafts)
            .filter(|draft| problems[i].host_holds(draft.host))
            .filter(|draft| problems[i].keeps_homes(&draft.decisions))
            .cloned()
            .collect()
    };
    let front = |i: usize| {
        let problem = &problems[i];
        let front: Vec<Draft> = Planner::ALL
            .into_iter()
            .flat_map(|planner| record::front(problem, of(i, planner)))
            .collect();
        // The other planners stay as their papers describe them.
        if planner != Planner::Auto || !problem.heuristics.take_back {
            return front;
        }
        // Taking back lowers no peak, so it helps no draft that does not fit.
        let most = wanted.limits.map_or(u64::MAX, |limits| limits.device);
        let fitting = || front.iter().filter(|draft| draft.live <= most);
        let best = record::front(problem, fitting().cloned().collect());
        let relieved: Vec<Vec<Draft>> = fitting()
            .collect::<Vec<_>>()
            .into_par_iter()
            .with_max_len(1)
            .map(|draft| {
                let is = |other: &Draft| Arc::ptr_eq(&other.decisions, &draft.decisions);
                let targets = match best.iter().any(is) {
                    true => targets(draft.live, most),
                    false => vec![],
                };
                relieve::drafts(problem, draft, &targets)
            })
            .collect();
        // A state that is taken back has another home.
        let mut relieved = relieved.concat();
        relieved.retain(|draft| problem.keeps_homes(&draft.decisions));
        let relieved = record::front(problem, relieved);
        [front, relieved].concat()
    };
    ((0..problems.len()).map(front).collect(), ended)
}

/// The memory that drafts of `live` bytes fill, for budgets of at most `most` bytes: round numbers,
/// so that one budget's plans are candidates for each larger one. What is left free is for gaps.
fn targets(live: u64, most: u64) -> Vec<u64> {
    let step = |octave: u32| (1u64 << octave).div_ceil(FILLED_PER_OCTAVE);
    let first = live.max(1).ilog2();
    let round = (first..(first + 3).min(63)).flat_map(|octave| {
        (0..FILLED_PER_OCTAVE).map(move |n| (1u64 << octave) + n * step(octave))
    });
    let targets = round.map(|round| (round as f64 * (1.0 - CLEARLY)) as u64);
    let larger = targets.filter(|&target| live < target).take(FILLED);
    larger
        .filter(|&target| relieve::least_filled(target) <= most)
        .collect()
}
