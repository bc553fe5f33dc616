//! Which buffers wait on the disk, and when: those that wait longest for each byte that is copied.
//!
//! A candidate is the home of a buffer, or the gap between two touches of one. Candidates are taken
//! in the order of the bytes that they free, times how long, for each µs of copies. One is taken if
//! the host is too full at one of the lines where it frees bytes.

use super::held::Held;
use super::tier::Clock;
use crate::alloc::{lifetimes, live_bytes};
use crate::cost::Cost;
use crate::lines::{MaxTree, Stretch};
use crate::plan::Problem;
use crate::plan::machine::HOST;
use ir::Schedule;

/// A way to free bytes of the host.
struct Candidate {
    /// Bytes times µs that it frees, for each µs of copies.
    worth: f64,
    /// The position of its buffer.
    held: usize,
    /// The gap after this touch; `None` for those that a home on the disk brings.
    gap: Option<usize>,
}

/// Chooses what spills, so that at most `most` bytes of the host are alive at each line, or as few
/// as possible.
pub(super) fn choose(
    problem: &Problem<'_>,
    schedule: &Schedule,
    clock: &Clock,
    mut held: Vec<Held>,
    most: u64,
) -> Vec<Held> {
    let live = live_bytes(schedule, &lifetimes(schedule), HOST);
    let n = live.len();
    let mut tree = MaxTree::new(&live);
    let replace = |tree: &mut MaxTree, one: &mut Held, by: Held| {
        tree.free(&one.footprint(n));
        tree.restore(&by.footprint(n));
        *one = by;
    };
    if problem.on_disk.is_some() {
        for one in held.iter_mut().filter(|one| one.is_home) {
            let spilled = one.spilled();
            replace(&mut tree, one, spilled);
        }
    }
    let mut candidates: Vec<Candidate> = vec![];
    for (k, one) in held.iter().enumerate() {
        candidates.extend(self::candidates(k, one, clock, problem.cost, n));
    }
    candidates.sort_by(|a, b| b.worth.total_cmp(&a.worth).then(a.held.cmp(&b.held)));
    for Candidate { held: k, gap, .. } in candidates {
        if tree.most() <= most {
            break;
        }
        let after = with(&held[k], gap);
        if !tree.is_within(&freed(&held[k], &after, n), most) {
            replace(&mut tree, &mut held[k], after);
        }
    }
    held.retain(|one| one.spills);
    held
}

/// A buffer with a candidate taken.
fn with(held: &Held, gap: Option<usize>) -> Held {
    let mut spilled = match held.spills {
        true => held.clone(),
        false => held.spilled(),
    };
    if let Some(gap) = gap {
        spilled.cuts[gap] = true;
    }
    spilled
}

/// The candidates of a buffer.
fn candidates(
    number: usize,
    held: &Held,
    clock: &Clock,
    cost: &dyn Cost,
    n: usize,
) -> Vec<Candidate> {
    let home = held.spilled();
    let area = |one: &Held| -> f64 {
        let footprint = one.footprint(n).into_iter();
        footprint
            .map(|(from, to, bytes)| bytes as f64 * clock.micros(from..to))
            .sum()
    };
    let candidate = |before: (f64, f64), after: &Held, gap| {
        let (frees, takes) = (before.0 - area(after), after.micros(cost) - before.1);
        (frees > 0.0).then(|| Candidate {
            worth: frees / takes.max(f64::MIN_POSITIVE),
            held: number,
            gap,
        })
    };
    let mut candidates = vec![];
    if !held.spills && home.cuts.contains(&true) {
        candidates.extend(candidate((area(held), 0.0), &home, None));
    }
    let of_home = (area(&home), home.micros(cost));
    for gap in 0..home.cuts.len().saturating_sub(1) {
        if !home.cuts[gap] {
            candidates.extend(candidate(of_home, &with(&home, Some(gap)), Some(gap)));
        }
    }
    candidates
}

/// The lines at which a buffer frees bytes of the host if it becomes another: those at which only
/// the first takes some. The numbers of bytes are 0.
fn freed(before: &Held, after: &Held, n: usize) -> Vec<Stretch> {
    let (before, after) = (before.footprint(n), after.footprint(n));
    let starts = before.iter().map(|&(from, ..)| from);
    let ends = before.iter().map(|&(_, to, _)| to);
    let (mut from, end) = (starts.min().unwrap_or(0), ends.max().unwrap_or(n));
    let mut freed = vec![];
    for (start, to, _) in after.into_iter().chain([(end, end, 0)]) {
        if from < start {
            freed.push((from, start, 0));
        }
        from = from.max(to);
    }
    freed
}
