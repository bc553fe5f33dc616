//! What to keep, swap and recompute, as plain data. A planner is a function from a [`Problem`] to
//! [`Decisions`]; [`apply`](crate::schedule::apply) is the only one that acts on them.

pub mod blocks_search;
pub mod bound;
pub mod choose;
pub mod chunks;
pub mod greedy;
pub mod layout;
pub mod protrain;
pub mod recompute;
pub mod record;
pub mod weights;

use crate::plan::machine::{DEVICE, HOST};
use crate::plan::{Budget, Error, Limits};
pub use crate::plan::{
    Decisions, Extent, Gap, Group, Infeasible, Means, Planner, Problem, Reason, blocks,
};
use crate::realise::{self, Finished};
use crate::schedule::lives::{Variant, lives};
use choose::{Aim, Asked};
use ir::{Node, Pool};
use rayon::prelude::*;
use record::{Draft, Record, Wanted};
use std::collections::BTreeMap;

/// A plan for a budget, and what else could be had.
#[derive(Clone, PartialEq, Debug)]
pub struct Decided {
    /// The decisions.
    pub decisions: Decisions,
    /// How long buffers hold their bytes in it.
    pub variant: Variant,
    /// What the plan needs and takes. The compiled program has the same figures.
    pub figures: Finished,
    /// The budget, bytes; `None` if there is none.
    pub budget: Option<u64>,
    /// What `keep` needs, bytes.
    pub keep_peak: u64,
    /// The smallest budget that fits, bytes; `None` if only the plan was asked for.
    pub smallest: Option<u64>,
    /// Step time against budget: (bytes, µs), the plans that no other beats in both, fastest first.
    /// Empty if only the plan was asked for.
    pub curve: Vec<(u64, f64)>,
}

/// What plans of a problem come to.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Outcome {
    /// Where nothing leaves the device: peak in bytes, step in µs.
    pub keep: (u64, f64),
    /// Whether it was planned any further.
    pub planned: bool,
    /// The smallest budget that fits, bytes; `None` if it is not known, or if the host has too
    /// little room for any plan.
    pub smallest: Option<u64>,
    /// The fastest plan within the budget, if one is: peak in bytes, step in µs.
    pub fastest: Option<(u64, f64)>,
}

/// A share of a step or a peak that is nothing to speak of.
pub(crate) const NOTHING: f64 = 0.01;

/// Steps that are longer by this share than any has to be are as fast as can be.
const AS_FAST: f64 = 0.001;

/// Decides for a budget.
pub fn decide(problem: &Problem<'_>, planner: Planner, budget: Budget) -> Result<Decided, Error> {
    let problems = std::slice::from_ref(problem);
    decide_among(problems, planner, budget, Extent::Curve).map(|(_, decided, _)| decided)
}

/// Decides for a budget which of several problems that come to the same is taken, and how: the
/// plans of all of them are one curve. Returns its position, and what each comes to. A share as
/// budget is one of what `keep` needs in the first.
///
/// A problem that keeps everything in more bytes than a later one, and in as good as the same time,
/// is planned no further: whatever it could do below, the other does as well.
pub fn decide_among(
    problems: &[Problem<'_>],
    planner: Planner,
    budget: Budget,
    extent: Extent,
) -> Result<(usize, Decided, Vec<Outcome>), Error> {
    let drafts: Vec<Vec<Draft>> = problems.iter().map(greedy::keep).collect();
    let enough = problems.iter().map(shortest).fold(f64::INFINITY, f64::min) * (1.0 + AS_FAST);
    let first = |drafts: &[Vec<Draft>], aim, limits| {
        choose::first(
            problems,
            drafts,
            Asked {
                aim,
                limits,
                enough,
            },
        )
    };
    let mut keeps: Vec<(u64, f64)> = vec![];
    let alone = |i: usize| {
        let mut alone = vec![vec![]; problems.len()];
        alone[i].clone_from(&drafts[i]);
        alone
    };
    for i in 0..problems.len() {
        let keep = first(&alone(i), Aim::Smallest, Limits::NONE);
        let (_, keep) = keep.ok_or_else(|| Error::Graph {
            pass: "decide",
            message: "the graph cannot be kept".into(),
        })?;
        keeps.push((keep.peak, keep.micros));
    }
    let keep_peak = keeps.first().map_or(0, |keep| keep.0);
    let limit = match budget {
        Budget::Device => problems
            .first()
            .map_or(0, |problem| problem.device.device_bytes),
        Budget::Bytes(bytes) => bytes,
        Budget::Share(share) => (share * keep_peak as f64) as u64,
    };
    let host = problems
        .first()
        .and_then(|problem| problem.host_limit)
        .unwrap_or(u64::MAX);
    let (fits, on_host) = (
        Limits {
            device: limit,
            host,
        },
        Limits {
            device: u64::MAX,
            host,
        },
    );
    let beaten = |i: usize| {
        let (peak, micros) = keeps[i];
        keeps[i + 1..]
            .iter()
            .any(|later| later.0 < peak && later.1 <= micros * (1.0 + NOTHING))
    };
    // What keeps everything and is as fast as can be comes before all others; of such, what needs
    // least.
    let mut by_peak: Vec<usize> = (0..problems.len()).filter(|&i| !beaten(i)).collect();
    by_peak.sort_by_key(|&i| keeps[i].0);
    let as_fast = |(_, record): &(usize, Record)| record.micros <= enough;
    let kept = by_peak
        .into_iter()
        .find_map(|i| first(&alone(i), Aim::Fastest, fits).filter(as_fast));
    let planned: Vec<bool> = (0..problems.len())
        .map(|i| !beaten(i) && (extent == Extent::Curve || kept.is_none()))
        .collect();
    let keep = drafts;
    let plan = |wanted: Wanted| {
        let (more, ended) = propose(problems, &planned, planner, wanted);
        let drafts: Vec<Vec<Draft>> = keep
            .iter()
            .cloned()
            .zip(more)
            .map(|(own, more)| [own, more].concat())
            .collect();
        let chosen = kept.clone().or_else(|| first(&drafts, Aim::Fastest, fits));
        (drafts, chosen, ended)
    };
    // For one budget, ladders end early, by what drafts say of it. What places made of the drafts
    // has the last word.
    let limits = (extent == Extent::Plan).then_some(fits);
    let (mut drafts, mut chosen, ended) = plan(Wanted {
        limits,
        ..Wanted::ALL
    });
    let micros = chosen
        .as_ref()
        .map_or(f64::INFINITY, |(_, record)| record.micros);
    if ended < micros {
        (drafts, chosen, _) = plan(if micros.is_finite() {
            Wanted {
                limits,
                possible: micros,
            }
        } else {
            Wanted::ALL
        });
    }
    let Some((chosen, record)) = chosen else {
        let smallest = first(&drafts, Aim::Smallest, on_host);
        let (of, least, limit, pool) = match smallest {
            Some((of, record)) => (of, record, limit, DEVICE),
            None => {
                let least = first(&drafts, Aim::LeastOnHost, Limits::NONE);
                let (of, record) = least.expect("keep should have a record");
                (of, record, host, HOST)
            }
        };
        return Err(infeasible(&problems[of], planner, &least, limit, pool));
    };
    let mut decided = Decided {
        decisions: Decisions::clone(&record.decisions),
        variant: record.variant,
        figures: Finished {
            peak: record.peak,
            host: record.host,
            micros: record.micros,
        },
        budget: Some(limit),
        keep_peak,
        smallest: None,
        curve: vec![],
    };
    let outcome = |(i, &planned): (usize, &bool)| {
        let fastest = (i == chosen).then_some((record.peak, record.micros));
        Outcome {
            keep: keeps[i],
            planned,
            smallest: None,
            fastest,
        }
    };
    let mut outcomes: Vec<Outcome> = planned.iter().enumerate().map(outcome).collect();
    if extent == Extent::Curve {
        let mut all: Vec<Record> = vec![];
        for (i, (problem, drafts)) in problems.iter().zip(drafts).enumerate() {
            let mut records = vec![];
            record::judge_best(problem, drafts, &mut records);
            records.retain(|record| problem.host_holds(record.host));
            let outcome = &mut outcomes[i];
            outcome.smallest = records
                .iter()
                .map(|record| record.peak)
                .min()
                .filter(|_| planned[i]);
            let fitting = records.iter().filter(|record| record.peak <= limit);
            let fastest =
                fitting.min_by(|a, b| a.micros.total_cmp(&b.micros).then(a.peak.cmp(&b.peak)));
            outcome.fastest = outcome
                .fastest
                .or(fastest.map(|record| (record.peak, record.micros)));
            all.append(&mut records);
        }
        decided.smallest = all.iter().map(|record| record.peak).min();
        decided.curve = curve(&all);
    }
    Ok((chosen, decided, outcomes))
}

/// How long the device computes in a step at least, µs: all but the updates that the host has room
/// for.
fn shortest(problem: &Problem<'_>) -> f64 {
    let graph = problem.graph;
    let bytes = |state: &ir::graph::State| graph.values[state.before].ty.bytes();
    let mut states: BTreeMap<Node, u64> = BTreeMap::new();
    for state in &graph.states {
        if let Some(node) = graph.def_node(graph.root(state.after)) {
            *states.entry(node).or_default() += bytes(state);
        }
    }
    let stays = |node: &Node| {
        let hosted = states
            .get(node)
            .filter(|_| graph.nodes[*node].phase == ir::Phase::Optimizer);
        !hosted.is_some_and(|&bytes| problem.host_holds(bytes))
    };
    let lines = problem.lines.iter().copied();
    lines
        .filter(stays)
        .map(|node| problem.cost.run(graph, node))
        .sum()
}

/// A part of a planner's work. Parts know nothing of each other, but for what the trajectories say
/// is possible.
struct Part<'a> {
    planner: Planner,
    is_trajectory: bool,
    drafts: Drafts<'a>,
}

/// The drafts of a part, as far as they are wanted.
type Drafts<'a> = Box<dyn Fn(&Wanted) -> Vec<Draft> + Sync + 'a>;

/// What a planner has to do. `auto` does what all of them do, so that no other is better.
fn parts<'a>(problem: &'a Problem<'_>, planner: Planner) -> Vec<Part<'a>> {
    let mut parts: Vec<Part<'a>> = vec![];
    // Shares of few blocks may come to the same.
    let n_hosted = |share: f64| problem.n_hosted(share);
    let distinct = |share: f64| {
        0 < n_hosted(share) && (share == 1.0 || n_hosted(share) < problem.groups.len())
    };
    for who in Planner::ALL
        .into_iter()
        .filter(|&who| planner == who || planner == Planner::Auto)
    {
        let mut part = |is_trajectory, drafts: Drafts<'a>| {
            parts.push(Part {
                planner: who,
                is_trajectory,
                drafts,
            })
        };
        match who {
            Planner::Auto => {
                for start in recompute::STARTS
                    .into_iter()
                    .filter(|start| start.0 == 0.0 || distinct(start.0))
                {
                    part(
                        false,
                        Box::new(move |wanted| recompute::drafts(problem, start, wanted)),
                    );
                }
                part(false, Box::new(move |_| layout::parts(problem)));
            }
            Planner::Keep => {}
            Planner::Greedy => {
                for share in greedy::HOSTED
                    .into_iter()
                    .filter(|&share| share == 0.0 || distinct(share))
                {
                    let jumps = move |wanted: &_| {
                        greedy::jumps(problem, share, greedy::Taste::Cheaper, wanted)
                    };
                    part(false, Box::new(jumps));
                }
                // Where rounds take long, those tastes that mix means.
                let mixes = |taste: &greedy::Taste| {
                    matches!(taste, greedy::Taste::Cheaper | greedy::Taste::Block)
                };
                for taste in greedy::TASTES
                    .into_iter()
                    .filter(|taste| !greedy::large(problem) || mixes(taste))
                {
                    part(
                        true,
                        Box::new(move |wanted| greedy::trajectory(problem, taste, wanted)),
                    );
                }
            }
            Planner::Offload => part(false, Box::new(move |_| weights::drafts(problem))),
            Planner::Protrain => part(
                false,
                Box::new(move |wanted| layout::drafts(problem, layout::RUNGS, wanted)),
            ),
        }
    }
    parts
}

/// What planners propose for each problem that is to be planned, on as many threads as there are
/// processors: the trajectories, which tell the others what is possible, and then the rest. Of each
/// planner's drafts those remain that no other of its own clearly beats: what one planner proposes
/// never hides what another does. Returned with the least time at which a ladder ended before its
/// drafts did, µs: no slower plan is wanted without the rest of it.
fn propose(
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
        for (k, drafts) in now.into_iter().zip(drafts) {
            let problem = &problems[all[k].0];
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
        // One that the host has no room for should not hide one that it has.
        parts
            .flat_map(|(_, drafts)| drafts)
            .filter(|draft| problems[i].host_holds(draft.host))
            .cloned()
            .collect()
    };
    let front = |i: usize| {
        Planner::ALL
            .into_iter()
            .flat_map(|planner| record::front(&problems[i], of(i, planner)))
            .collect()
    };
    ((0..problems.len()).map(front).collect(), ended)
}

/// The records that no other beats in both peak and time, fastest first.
fn curve(records: &[Record]) -> Vec<(u64, f64)> {
    let mut points: Vec<(u64, f64)> = records.iter().map(|r| (r.peak, r.micros)).collect();
    points.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
    let mut lowest = u64::MAX;
    points.retain(|&(peak, _)| {
        let better = peak < lowest;
        lowest = lowest.min(peak);
        better
    });
    points
}

/// Why the record that needs least does not fit: the line where it needs most, and what lies there.
fn infeasible(
    problem: &Problem<'_>,
    planner: Planner,
    record: &Record,
    budget: u64,
    pool: Pool,
) -> Error {
    let schedule =
        realise::lines(problem, &record.decisions).expect("a recorded plan should build");
    let lives = lives(problem.graph, &schedule, problem.cost, record.variant);
    let live = crate::alloc::live_bytes(&schedule, &lives, pool);
    let line = (0..live.len())
        .rev()
        .max_by_key(|&line| live[line])
        .unwrap_or(0);
    let here =
        |life: crate::alloc::Lifetime| life.start as usize <= line && line < life.end as usize;
    let buffers = schedule
        .buffers
        .iter()
        .filter(|(buffer, data)| data.pool == pool && here(lives[*buffer]));
    let mut live: Vec<(String, u64)> = buffers
        .map(|(_, data)| (data.name.clone(), data.bytes))
        .collect();
    live.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    let line = match schedule.instrs.get(ir::table::Id::new(line)) {
        Some(_) => ir::text::print_instr(problem.graph, &schedule, ir::table::Id::new(line)),
        None => "the start of the step".into(),
    };
    let smallest = if pool == DEVICE {
        record.peak
    } else {
        record.host
    };
    Error::Infeasible(Box::new(Infeasible {
        budget,
        smallest,
        line,
        live,
        pool: schedule.pools[pool].name.clone(),
        planner,
    }))
}
