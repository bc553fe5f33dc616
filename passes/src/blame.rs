//! Which limit is to blame if no plan fits: that of the host's pool, or of the disk's. It plans
//! again with larger ones, so the error says what is large enough.

use crate::decide;
use crate::plan::{Error, Extent, HostTooSmall, Infeasible, Options, Problem};
use crate::realise;
use crate::schedule::spill;
use ir::schedule::MemorySpace;

/// For graphs with more lines, a plan takes seconds: no smaller pool is searched.
const FEW_LINES: usize = 2000;
/// How often the range that has the smallest sufficient pool is halved.
const HALVINGS: usize = 4;

/// The error of planning. If a pool behind the link is limited and a plan fits with a larger one,
/// it says how large.
pub(crate) fn blamed(error: Error, mut problems: Vec<Problem<'_>>, options: &Options) -> Error {
    let (Error::Infeasible(infeasible), Some(first)) = (&error, problems.first()) else {
        return error;
    };
    for suspect in suspects(first, options) {
        let enough = enough(&suspect, infeasible, &mut problems, options);
        if let Some(enough) = enough.filter(|&enough| suspect.limit < enough) {
            return Error::HostTooSmall(Box::new(HostTooSmall {
                infeasible: Infeasible::clone(infeasible),
                pool: suspect.space.name(),
                option: suspect.option,
                limit: suspect.limit,
                enough,
            }));
        }
    }
    error
}

/// A pool whose limit may be why nothing fits.
struct Suspect {
    space: MemorySpace,
    /// Its option, up to the number.
    option: &'static str,
    limit: u64,
    /// No plan is planned with a larger limit, bytes.
    most: u64,
}

/// The pools behind the device's link that may be too small. The disk comes before the host: it
/// costs least.
fn suspects(problem: &Problem<'_>, options: &Options) -> Vec<Suspect> {
    let Some(host_limit) = problem.host_limit else {
        return vec![];
    };
    let (device, graph) = (problem.device, problem.graph);
    let values = graph.values.values().map(|value| value.ty.bytes());
    let disk = |limit| Suspect {
        space: MemorySpace::Disk,
        option: "--disk DIR:",
        limit,
        // More than any plan leaves there: each value is there once, with gaps.
        most: values.fold(0, u64::saturating_add).saturating_mul(2),
    };
    if device.host_is_disk {
        return vec![disk(host_limit)];
    }
    let mut suspects: Vec<Suspect> = vec![];
    if device.disk.is_some() {
        suspects.push(disk(problem.disk_limit));
    }
    if options.host.is_some() {
        suspects.push(Suspect {
            space: MemorySpace::Host,
            option: "--host ",
            limit: host_limit,
            most: device.host_bytes,
        });
    }
    suspects
}

/// Bytes of a pool with which a plan fits, if a larger one helps.
fn enough(
    suspect: &Suspect,
    infeasible: &Infeasible,
    problems: &mut [Problem<'_>],
    options: &Options,
) -> Option<u64> {
    let has_few_lines = problems.iter().all(|p| p.lines.len() <= FEW_LINES);
    let halvings = if has_few_lines { HALVINGS } else { 0 };
    let hosts: Vec<_> = problems.iter().map(|p| p.host_limit).collect();
    let disks: Vec<_> = problems.iter().map(|p| p.disk_limit).collect();
    let is_behind_host = suspect.space == MemorySpace::Disk
        && problems.iter().all(|problem| !problem.device.host_is_disk);
    // The pool's peak of the fastest plan with a limit of the pool.
    let mut plan = |limit: u64| {
        for problem in &mut *problems {
            match is_behind_host {
                true => problem.disk_limit = limit,
                false => problem.host_limit = Some(limit),
            }
        }
        let (planner, budget) = (options.planner, options.budget);
        let planned = decide::decide_among(problems, planner, budget, Extent::Plan);
        let (chosen, decided, _) = planned.ok()?;
        if !is_behind_host {
            return Some(decided.figures.host);
        }
        let lines = realise::lines(&problems[chosen], &decided.decisions).ok()?;
        Some(spill::on_disk(&problems[chosen], &lines))
    };
    // No plan needs less; often a plan with this pool fits the budget, too.
    let least = match infeasible.pool == suspect.space.name() {
        true => infeasible.smallest,
        false => suspect.limit,
    };
    let enough = smallest(&mut plan, suspect, least, halvings);
    // Another pool may be asked about next.
    for ((problem, host), disk) in problems.iter_mut().zip(hosts).zip(disks) {
        (problem.host_limit, problem.disk_limit) = (host, disk);
    }
    enough
}

/// A small limit of at least `least` bytes with which a plan fits. `plan` says what the plan with a
/// limit takes.
fn smallest(
    plan: &mut dyn FnMut(u64) -> Option<u64>,
    suspect: &Suspect,
    least: u64,
    halvings: usize,
) -> Option<u64> {
    let mut found = None;
    if suspect.limit < least {
        found = plan(least).map(|peak| (least, peak));
    }
    if found.is_none() && least < suspect.most {
        found = plan(suspect.most).map(|peak| (suspect.most, peak));
        let mut too_small = least;
        for _ in 0..halvings {
            let Some((_, peak)) = found else { break };
            let middle = too_small.midpoint(peak);
            match plan(middle) {
                Some(peak) => found = Some((middle, peak)),
                None => too_small = middle,
            }
        }
    }
    let (limit, peak) = found?;
    // Planners go by the limit, too: if it is what the plan takes, they may not find the plan.
    Some(match peak < limit && plan(peak).is_some() {
        true => peak,
        false => limit,
    })
}
