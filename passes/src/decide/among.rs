//! Chooses the plan for a budget, among the plans of one or several problems.

use super::choose::{self, Aim, Asked};
use super::greedy;
use super::layout::{self, Described};
use super::propose::propose;
use super::record::{self, Draft, Origin, Record, Wanted};
use super::shortage::infeasible;
use crate::plan::machine::{DEVICE, HOST};
use crate::plan::tuning::{AS_FAST, NOTHING};
use crate::plan::{Budget, Decisions, Error, Extent, Limits, Planner, Problem};
use crate::realise::Finished;
use crate::schedule::lives::Variant;
use ir::Node;
use std::collections::BTreeMap;

/// A plan for a budget, and the plans for other budgets.
#[derive(Clone, PartialEq, Debug)]
pub struct Decided {
    /// The decisions.
    pub decisions: Decisions,
    /// The search that found them.
    pub origin: Origin,
    /// ProTrain's numbers, if its layout made them.
    pub layout: Option<Described>,
    /// How long buffers hold their bytes in it.
    pub variant: Variant,
    /// What the plan needs and takes. The compiled program has the same figures.
    pub figures: Finished,
    /// The budget, bytes; `None` if there is none.
    pub budget: Option<u64>,
    /// What `keep` needs, bytes.
    pub keep_peak: u64,
    /// The smallest feasible budget, bytes; `None` with [`Extent::Plan`].
    pub smallest: Option<u64>,
    /// Step time against budget: (bytes, µs), the plans that no other plan beats in both, fastest
    /// first. Empty with [`Extent::Plan`].
    pub curve: Vec<(u64, f64)>,
}

/// What the plans of a problem need and take.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Outcome {
    /// The plan in which nothing leaves the device: peak in bytes, step in µs.
    pub keep: (u64, f64),
    /// Whether more than keeping everything was planned.
    pub planned: bool,
    /// The smallest feasible budget, bytes; `None` if it is not known, or if the host has too
    /// little room for any plan.
    pub smallest: Option<u64>,
    /// The fastest plan within the budget, if a plan fits: peak in bytes, step in µs.
    pub fastest: Option<(u64, f64)>,
}

/// Decides for a budget.
pub fn decide(problem: &Problem<'_>, planner: Planner, budget: Budget) -> Result<Decided, Error> {
    let problems = std::slice::from_ref(problem);
    decide_among(problems, planner, budget, Extent::Curve).map(|(_, decided, _)| decided)
}

/// Chooses, for a budget, one of several problems with the same results and a plan for it. The
/// plans of all problems form one curve. Returns the chosen problem's position, the plan, and what
/// the plans of each problem need and take. A budget given as a share refers to what keeping
/// everything needs in the first problem.
///
/// A problem is not planned beyond keeping everything if a later one keeps everything in fewer
/// bytes and in nearly the same time. Below this peak, the plans of the later problem are at least
/// as good.
pub fn decide_among(
    problems: &[Problem<'_>],
    planner: Planner,
    budget: Budget,
    extent: Extent,
) -> Result<(usize, Decided, Vec<Outcome>), Error> {
    check_fixed(problems)?;
    let search = Search::new(problems, planner, budget, extent)?;
    let Planned { drafts, chosen } = search.plan();
    let Some((chosen, record)) = chosen else {
        return Err(search.shortage(&drafts));
    };
    let mut decided = Decided {
        decisions: Decisions::clone(&record.decisions),
        origin: record.origin,
        layout: layout::described(&problems[chosen], &record.decisions),
        variant: record.variant,
        figures: Finished {
            peak: record.peak,
            host: record.host,
            micros: record.micros,
        },
        budget: Some(search.limits.device),
        keep_peak: search.keep_peak,
        smallest: None,
        curve: vec![],
    };
    let mut outcomes = search.outcomes();
    outcomes[chosen].fastest = Some((record.peak, record.micros));
    if extent == Extent::Curve {
        let records = search.judge_all(drafts, &mut outcomes);
        decided.smallest = records.iter().map(|record| record.peak).min();
        decided.curve = curve(&records);
    }
    Ok((chosen, decided, outcomes))
}

/// The choice of a plan among problems.
struct Search<'a, 'p> {
    problems: &'a [Problem<'p>],
    planner: Planner,
    extent: Extent,
    limits: Limits,
    /// Steps of at most this are as fast as possible, µs.
    as_fast: f64,
    /// For each problem, the drafts of keeping everything.
    keep_drafts: Vec<Vec<Draft>>,
    /// For each problem, the peak and the time of keeping everything.
    keeps: Vec<(u64, f64)>,
    /// The peak of keeping everything in the first problem.
    keep_peak: u64,
    /// The plan that keeps everything, fits, and is as fast as possible, with its problem. It is
    /// preferred to all others.
    kept: Option<(usize, Record)>,
    /// Which problems are planned beyond keeping everything.
    planned: Vec<bool>,
}

/// What planning found: the drafts of each problem, and the chosen record with its problem.
struct Planned {
    drafts: Vec<Vec<Draft>>,
    chosen: Option<(usize, Record)>,
}

impl<'a, 'p> Search<'a, 'p> {
    fn new(
        problems: &'a [Problem<'p>],
        planner: Planner,
        budget: Budget,
        extent: Extent,
    ) -> Result<Search<'a, 'p>, Error> {
        let shortest = problems.iter().map(shortest).fold(f64::INFINITY, f64::min);
        let mut search = Search {
            problems,
            planner,
            extent,
            limits: Limits::NONE,
            as_fast: shortest * (1.0 + AS_FAST),
            keep_drafts: problems.iter().map(greedy::keep).collect(),
            keeps: vec![],
            keep_peak: 0,
            kept: None,
            planned: vec![],
        };
        for problem in 0..problems.len() {
            let keep = search.best(&search.keeping(problem), Aim::Smallest, Limits::NONE);
            let (_, keep) = keep.ok_or_else(|| Error::Graph {
                pass: "decide",
                message: "the graph cannot be kept".into(),
            })?;
            search.keeps.push((keep.peak, keep.micros));
        }
        search.keep_peak = search.keeps.first().map_or(0, |keep| keep.0);
        search.limits = limits(problems, budget, search.keep_peak);
        search.kept = search.kept(search.as_fast);
        let open = extent == Extent::Curve || search.kept.is_none();
        search.planned = (0..problems.len())
            .map(|problem| search.is_given() || open && !search.is_beaten(problem))
            .collect();
        Ok(search)
    }

    /// The best record of drafts within limits.
    fn best(&self, drafts: &[Vec<Draft>], aim: Aim, limits: Limits) -> Option<(usize, Record)> {
        let asked = Asked {
            aim,
            limits,
            as_fast: self.as_fast,
        };
        choose::best(self.problems, drafts, asked)
    }

    /// True if the user gives numbers of ProTrain's: then only plans with these are made.
    fn is_given(&self) -> bool {
        self.problems.iter().any(|problem| !problem.fixed.is_free())
    }

    /// The drafts of keeping everything in one problem, and none of the others.
    fn keeping(&self, problem: usize) -> Vec<Vec<Draft>> {
        let mut drafts = vec![vec![]; self.problems.len()];
        drafts[problem].clone_from(&self.keep_drafts[problem]);
        drafts
    }

    /// True if a later problem keeps everything in fewer bytes and in nearly the same time.
    fn is_beaten(&self, problem: usize) -> bool {
        let (peak, micros) = self.keeps[problem];
        self.keeps[problem + 1..]
            .iter()
            .any(|later| later.0 < peak && later.1 <= micros * (1.0 + NOTHING))
    }

    /// The plan that keeps everything, fits, and takes at most `micros` µs. If several problems
    /// have such a plan, the one with the lowest peak is taken. None if the user gives numbers.
    fn kept(&self, micros: f64) -> Option<(usize, Record)> {
        if self.is_given() {
            return None;
        }
        let problems = 0..self.problems.len();
        let mut by_peak: Vec<usize> = problems.filter(|&i| !self.is_beaten(i)).collect();
        by_peak.sort_by_key(|&problem| self.keeps[problem].0);
        by_peak.into_iter().find_map(|problem| {
            self.best(&self.keeping(problem), Aim::Fastest, self.limits)
                .filter(|(_, record)| record.micros <= micros)
        })
    }

    /// Plans. For one budget, ladders end early; the step times of drafts decide when. If the
    /// chosen record is slower than the time at which a ladder ended, planning runs again with less
    /// strict ends. If no plan fits, planning runs again for all budgets: the error names the
    /// smallest one.
    fn plan(&self) -> Planned {
        let limits = (self.extent == Extent::Plan).then_some(self.limits);
        let (planned, cut_off) = self.plan_for(Wanted {
            limits,
            ..Wanted::ALL
        });
        let wanted = match &planned.chosen {
            Some((_, record)) if record.micros <= cut_off => return planned,
            Some((_, record)) => Wanted {
                limits,
                possible: record.micros,
            },
            None if limits.is_none() => return planned,
            None => Wanted::ALL,
        };
        log::debug!("planning again: a ladder ended at {cut_off} us, {wanted:?}");
        self.plan_for(wanted).0
    }

    /// Plans with the wanted drafts. Also returns the smallest step time at which a ladder was cut
    /// off, µs.
    fn plan_for(&self, wanted: Wanted) -> (Planned, f64) {
        let (more, cut_off) = propose(self.problems, &self.planned, self.planner, wanted);
        let given = self.is_given();
        let own = self.keep_drafts.iter().map(|own| match given {
            true => vec![],
            false => own.clone(),
        });
        let drafts: Vec<Vec<Draft>> = own
            .zip(more)
            .map(|(own, more)| [own, more].concat())
            .collect();
        let chosen = self.kept.clone().or_else(|| {
            let fastest = self.best(&drafts, Aim::Fastest, self.limits)?;
            let micros = fastest.1.micros * (1.0 + AS_FAST);
            Some(self.kept(micros).unwrap_or(fastest))
        });
        (Planned { drafts, chosen }, cut_off)
    }

    /// The error that no plan fits. It describes the smallest plan that fits into the host's
    /// memory; if none does, the plan that needs the least host memory.
    fn shortage(&self, drafts: &[Vec<Draft>]) -> Error {
        let on_host = Limits {
            device: u64::MAX,
            ..self.limits
        };
        if let Some((problem, record)) = self.best(drafts, Aim::Smallest, on_host) {
            let problem = &self.problems[problem];
            return infeasible(problem, self.planner, &record, self.limits.device, DEVICE);
        }
        let least = self.best(drafts, Aim::LeastOnHost, Limits::NONE);
        let Some((problem, record)) = least else {
            return Error::Graph {
                pass: "decide",
                message: "protrain: the host's memory, and a disk behind it, hold no plan with \
                          these numbers: a larger n_persist or a smaller n_swap needs less of it"
                    .into(),
            };
        };
        let problem = &self.problems[problem];
        infeasible(problem, self.planner, &record, self.limits.host, HOST)
    }

    /// What is known about each problem before its drafts are judged.
    fn outcomes(&self) -> Vec<Outcome> {
        let outcome = |(&keep, &planned): (&(u64, f64), &bool)| Outcome {
            keep,
            planned,
            smallest: None,
            fastest: None,
        };
        self.keeps.iter().zip(&self.planned).map(outcome).collect()
    }

    /// Judges all drafts that may be better than others, completes the outcomes, and returns the
    /// records that the host holds.
    fn judge_all(&self, drafts: Vec<Vec<Draft>>, outcomes: &mut [Outcome]) -> Vec<Record> {
        let mut all: Vec<Record> = vec![];
        for (i, (problem, drafts)) in self.problems.iter().zip(drafts).enumerate() {
            let mut records = vec![];
            record::judge_best(problem, drafts, &mut records);
            records.retain(|record| problem.host_holds(record.host));
            let smallest = records.iter().map(|record| record.peak).min();
            outcomes[i].smallest = smallest.filter(|_| self.planned[i]);
            outcomes[i].fastest = outcomes[i]
                .fastest
                .or_else(|| fastest(&records, self.limits.device));
            all.append(&mut records);
        }
        all
    }
}

/// Checks that every problem has configurations with the numbers that the user gives.
fn check_fixed(problems: &[Problem<'_>]) -> Result<(), Error> {
    for problem in problems.iter().filter(|problem| !problem.fixed.is_free()) {
        let checked = match layout::Model::new(problem, layout::Gradients::ByChunk) {
            Some(model) => model
                .check(&problem.fixed)
                .map_err(|error| error.to_string()),
            None => Err("the model has no parameters, so it has no chunks".into()),
        };
        checked.map_err(|error| Error::Graph {
            pass: "decide",
            message: format!("protrain: {error}"),
        })?;
    }
    Ok(())
}

/// What a plan may need.
fn limits(problems: &[Problem<'_>], budget: Budget, keep_peak: u64) -> Limits {
    let first = problems.first();
    Limits {
        device: match budget {
            Budget::Device => first.map_or(0, |problem| problem.device.device_bytes),
            Budget::Bytes(bytes) => bytes,
            Budget::Share(share) => (share * keep_peak as f64) as u64,
        },
        host: first
            .and_then(|problem| problem.host_limit)
            .unwrap_or(u64::MAX),
    }
}

/// Peak and time of the fastest record within a limit; of equally fast ones, the smallest.
fn fastest(records: &[Record], limit: u64) -> Option<(u64, f64)> {
    let fitting = records.iter().filter(|record| record.peak <= limit);
    let fastest = fitting.min_by(|a, b| a.micros.total_cmp(&b.micros).then(a.peak.cmp(&b.peak)));
    fastest.map(|record| (record.peak, record.micros))
}

/// The shortest time that the device computes in a step, µs. Updates that the host has room for are
/// not counted.
fn shortest(problem: &Problem<'_>) -> f64 {
    let graph = problem.graph;
    let bytes = |state: &ir::graph::StateData| graph.values[state.before].ty.bytes();
    let mut states: BTreeMap<Node, u64> = BTreeMap::new();
    for state in graph.states.values() {
        if let Some(node) = graph.def_node(graph.root(state.after)) {
            *states.entry(node).or_default() += bytes(state);
        }
    }
    let stays = |node: &Node| {
        let hosted = states
            .get(node)
            .filter(|_| graph.nodes[*node].phase == ir::Phase::Optimizer);
        !hosted.is_some_and(|&bytes| problem.holds_beyond(bytes))
    };
    let lines = problem.lines.iter().copied();
    lines
        .filter(stays)
        .map(|node| problem.cost.run(graph, node))
        .sum()
}

/// The records that no other record beats in both peak and time, fastest first.
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
