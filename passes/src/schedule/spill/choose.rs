//! Which buffers wait on the disk, and when: those that wait longest for each byte that is copied.
//!
//! A candidate is the home of a buffer, or the gap between two touches of one. Candidates are taken
//! in the order of the bytes that they free, times how long, for each µs of copies. One is taken if
//! the host is too full at one of the lines where it frees bytes.

use super::held::Held;
use super::tier::Clock;
use crate::alloc::{lifetimes, live_bytes};
use crate::cost::Cost;
use crate::plan::Problem;
use crate::plan::machine::HOST;
use ir::Schedule;
use std::ops::Range;

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
    let mut live = Live::new(&live);
    if problem.on_disk.is_some() {
        for one in held.iter_mut().filter(|one| one.is_home) {
            let spilled = one.spilled();
            live.replace(&one.footprint(n), &spilled.footprint(n));
            *one = spilled;
        }
    }
    let mut candidates: Vec<Candidate> = vec![];
    for (k, one) in held.iter().enumerate() {
        candidates.extend(self::candidates(k, one, clock, problem.cost, n));
    }
    candidates.sort_by(|a, b| b.worth.total_cmp(&a.worth).then(a.held.cmp(&b.held)));
    for Candidate { held: k, gap, .. } in candidates {
        if live.most(0..n) <= most {
            break;
        }
        let (before, after) = (held[k].footprint(n), with(&held[k], gap));
        let frees = after.footprint(n);
        let is_full = freed(&before, &frees, n)
            .iter()
            .any(|lines| live.most(lines.clone()) > most);
        if is_full {
            live.replace(&before, &frees);
            held[k] = after;
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
            .map(|(lines, bytes)| bytes as f64 * clock.micros(lines))
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

/// The lines at which bytes are freed: those of the first footprint outside the second.
fn freed(
    before: &[(Range<usize>, u64)],
    after: &[(Range<usize>, u64)],
    n: usize,
) -> Vec<Range<usize>> {
    let mut free = vec![];
    let mut from = before
        .iter()
        .map(|(lines, _)| lines.start)
        .min()
        .unwrap_or(0);
    let end = before.iter().map(|(lines, _)| lines.end).max().unwrap_or(n);
    for (lines, _) in after {
        if from < lines.start {
            free.push(from..lines.start);
        }
        from = from.max(lines.end);
    }
    if from < end {
        free.push(from..end);
    }
    free
}

/// Bytes alive at each line, with the most in any range: a tree of sums and maxima.
struct Live {
    leaves: usize,
    /// What each node adds to all lines below it, and the most below it, itself included.
    adds: Vec<i64>,
    most: Vec<i64>,
}

impl Live {
    fn new(live: &[u64]) -> Live {
        let leaves = live.len().next_power_of_two();
        let mut most = vec![0; 2 * leaves];
        for (line, &bytes) in live.iter().enumerate() {
            most[leaves + line] = bytes as i64;
        }
        for node in (1..leaves).rev() {
            most[node] = most[2 * node].max(most[2 * node + 1]);
        }
        Live {
            leaves,
            adds: vec![0; 2 * leaves],
            most,
        }
    }

    fn replace(&mut self, before: &[(Range<usize>, u64)], after: &[(Range<usize>, u64)]) {
        for (lines, bytes) in before {
            self.add(lines, -(*bytes as i64), 1, 0..self.leaves);
        }
        for (lines, bytes) in after {
            self.add(lines, *bytes as i64, 1, 0..self.leaves);
        }
    }

    fn add(&mut self, lines: &Range<usize>, bytes: i64, node: usize, of: Range<usize>) {
        if lines.end <= of.start || of.end <= lines.start {
            return;
        }
        if lines.start <= of.start && of.end <= lines.end {
            self.adds[node] += bytes;
            self.most[node] += bytes;
            return;
        }
        let middle = of.start.midpoint(of.end);
        self.add(lines, bytes, 2 * node, of.start..middle);
        self.add(lines, bytes, 2 * node + 1, middle..of.end);
        self.most[node] = self.adds[node] + self.most[2 * node].max(self.most[2 * node + 1]);
    }

    /// The most bytes alive at one of some lines.
    fn most(&self, lines: Range<usize>) -> u64 {
        self.find(&lines, 1, 0..self.leaves).max(0) as u64
    }

    fn find(&self, lines: &Range<usize>, node: usize, of: Range<usize>) -> i64 {
        if lines.end <= of.start || of.end <= lines.start {
            return i64::MIN / 2;
        }
        if lines.start <= of.start && of.end <= lines.end {
            return self.most[node];
        }
        let middle = of.start.midpoint(of.end);
        let below = self.find(lines, 2 * node, of.start..middle).max(self.find(
            lines,
            2 * node + 1,
            middle..of.end,
        ));
        self.adds[node] + below
    }
}
