//! The search for a fast set of reruns within a budget.
//!
//! 1. *Fill*: while some step is above the budget, take the fullest one and cut values that are
//!    idle there, lowest µs per byte first: the value's producer runs again before its next read.
//!    Operands that would be dead by then are either also recomputed or held until then. The
//!    cheaper of the two is chosen, at the current price of a byte.
//! 2. *Thin*: remove reruns, slowest first, if the budget allows it.
//! 3. *Change*: remove a few neighbouring reruns, fill with slightly perturbed times, thin, and
//!    keep the result if it is not slower (greedy randomised adaptive search: Feo and Resende 1995;
//!    ruin and recreate: Schrimpf et al. 2000).
//!
//! The search starts without reruns, and also from the values that a minimum cut saves across the
//! fullest line ([`cut`]). For problems with few possible reruns, all sets are enumerated. The
//! search ends after a number of elementary steps, never after a time.

use super::bound::{at_line, fullest};
use super::cut::{self, Choice};
use super::profile::{Profile, Step, line_of, step};
use super::{Problem, Rerun, Solution};
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// How long to search.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Effort {
    /// Elementary steps: computed prices, and added or removed reruns.
    pub steps: u64,
    /// Another seed finds other sets.
    pub seed: u64,
}

impl Default for Effort {
    fn default() -> Effort {
        Effort {
            steps: 1_000_000,
            seed: 0,
        }
    }
}

/// With at most this number of possible reruns, all sets are enumerated: 1024 sets.
const ENUMERABLE: usize = 10;

/// The fastest set of reruns found whose peak is within `budget` bytes; `None` if none was found.
pub fn solve(problem: &Problem, budget: u64, effort: Effort) -> Option<Solution> {
    solve_from(problem, budget, effort, &[])
}

fn solve_from(
    problem: &Problem,
    budget: u64,
    effort: Effort,
    starts: &[Vec<Rerun>],
) -> Option<Solution> {
    let possible = possible(problem);
    if possible.len() <= ENUMERABLE {
        return enumerate(problem, budget, &possible);
    }
    search(problem, budget, effort, starts)
}

/// The fastest set found without enumeration.
pub(super) fn search(
    problem: &Problem,
    budget: u64,
    effort: Effort,
    starts: &[Vec<Rerun>],
) -> Option<Solution> {
    let mut search = Search::new(problem, budget, effort.seed);
    if search.profile.peak() <= search.budget {
        return Some(Solution::new(problem, vec![]));
    }
    search.find(effort, starts);
    search
        .best
        .filter(|best| best.above == 0)
        .map(|best| Solution::new(problem, best.reruns))
}

/// Solutions from keeping everything down to the smallest memory found. Each needs less and takes
/// longer than the one before it.
pub fn curve(problem: &Problem, effort: Effort) -> Vec<Solution> {
    let mut solutions = vec![Solution::new(problem, vec![])];
    let each = Effort {
        steps: effort.steps / N_POINTS,
        ..effort
    };
    let mut steps = STEPS.into_iter().peekable();
    while let Some(step) = steps.peek() {
        let last = solutions
            .last()
            .expect("keeping everything should be a solution");
        let budget = (last.peak as f64 * step) as u64;
        match solve_from(problem, budget, each, std::slice::from_ref(&last.reruns)) {
            Some(solution) if solution.peak < last.peak => solutions.push(solution),
            _ => {
                steps.next();
            }
        }
    }
    // A solution for a smaller budget also fits a larger one.
    let mut fastest = f64::INFINITY;
    let mut curve = vec![];
    for solution in solutions.into_iter().rev() {
        if solution.micros < fastest {
            fastest = solution.micros;
            curve.push(solution);
        }
    }
    curve.reverse();
    curve
}

/// Each budget of a curve is a share of the last peak: the first share until nothing is found, then
/// the next one.
const STEPS: [f64; 3] = [0.97, 0.99, 0.997];
/// Each budget gets the effort of the curve divided by this. There may be more budgets, but if they
/// are close, starts are good.
const N_POINTS: u64 = 10;

/// The allowed reruns; for a problem that is too large to enumerate, only some of them.
fn possible(problem: &Problem) -> Vec<Rerun> {
    let mut possible = vec![];
    for line in 0..problem.nodes.len() as u32 {
        for node in 0..line {
            let rerun = Rerun { line, node };
            if problem.may_rerun(rerun) && !problem.results(node).is_empty() {
                possible.push(rerun);
            }
        }
        if ENUMERABLE < possible.len() {
            break;
        }
    }
    possible
}

/// The fastest of all sets.
pub(super) fn enumerate(problem: &Problem, budget: u64, possible: &[Rerun]) -> Option<Solution> {
    let mut profile = Profile::new(problem);
    let mut best: Option<(f64, Vec<Rerun>)> = None;
    // Gray's order: each step adds or removes one rerun.
    for set in 1..=1u64 << possible.len() {
        let beaten = best
            .as_ref()
            .is_some_and(|(micros, _)| *micros <= profile.micros());
        if profile.peak() <= budget as i64 && !beaten {
            best = Some((profile.micros(), profile.reruns().to_vec()));
        }
        if let Some(&rerun) = possible.get(set.trailing_zeros() as usize) {
            profile.toggle(rerun);
        }
    }
    best.map(|(_, reruns)| Solution::new(problem, reruns))
}

/// A candidate of the fill: an idle value and its price.
struct Priced {
    price: f64,
    value: u32,
}
impl Ord for Priced {
    /// The cheapest one is the maximum.
    fn cmp(&self, other: &Priced) -> Ordering {
        other
            .price
            .total_cmp(&self.price)
            .then(other.value.cmp(&self.value))
    }
}
impl PartialOrd for Priced {
    fn partial_cmp(&self, other: &Priced) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for Priced {
    fn eq(&self, other: &Priced) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Priced {}

struct Search<'a> {
    problem: &'a Problem,
    budget: i64,
    profile: Profile<'a>,
    /// The reruns that were toggled since the last accepted set.
    trail: Vec<Rerun>,
    /// Elementary steps so far, and the number after which a fill gives up.
    steps: u64,
    limit: u64,
    random: u64,
    /// The size of the errors in times; 0 means none.
    noise: f64,
    /// Distinguishes the errors of different changes.
    salt: u64,
    /// The current price, µs per byte, at which operands are held instead of computed again.
    price: f64,
    /// Whether reruns may come before lines at which their operands are still in memory, instead of
    /// directly before the next read.
    early: bool,
    /// The nodes of the last computed cascade.
    cascade: Vec<u32>,
    /// Marks of the nodes in it.
    mark: Vec<u64>,
    n_marks: u64,
    best: Option<Best>,
}

/// The best set so far.
struct Best {
    /// Bytes by which its peak is above the budget.
    above: i64,
    /// Time of its reruns, µs.
    micros: f64,
    reruns: Vec<Rerun>,
}

/// Longer cascades are dropped.
const LONGEST_CASCADE: usize = 200;

impl<'a> Search<'a> {
    fn new(problem: &'a Problem, budget: u64, seed: u64) -> Search<'a> {
        Search {
            problem,
            budget: i64::try_from(budget).unwrap_or(i64::MAX),
            profile: Profile::new(problem),
            trail: vec![],
            steps: 0,
            limit: u64::MAX,
            random: seed,
            noise: 0.0,
            salt: 0,
            price: f64::INFINITY,
            early: false,
            cascade: vec![],
            mark: vec![0; problem.nodes.len()],
            n_marks: 0,
            best: None,
        }
    }

    fn find(&mut self, effort: Effort, starts: &[Vec<Rerun>]) {
        let problem = self.problem;
        let line = fullest(problem);
        let time = |node: u32| {
            // Equal blocks have equal times. Small differences let the cut choose some of them.
            problem.nodes[node as usize].micros
                * (1.0 + 1e-3 * unit(scramble(u64::from(node) ^ effort.seed)))
        };
        let known = at_line(problem, line, self.budget as u64, &time);
        let going = known.price;
        let laid = |choice: Option<Choice>| {
            choice
                .map(|choice| cut::lay(problem, line, &choice))
                .unwrap_or_default()
        };
        // The best starts come first, because a short search does not reach the last ones.
        let mut all = vec![laid(known.fits), laid(known.above)];
        all.extend_from_slice(starts);
        all.push(vec![]);
        for start in &all {
            for price in [f64::INFINITY, going] {
                if effort.steps < self.steps
                    && self.best.as_ref().is_some_and(|best| best.above == 0)
                {
                    break;
                }
                self.set(start);
                self.price = price;
                self.limit = self.steps + effort.steps / 4 + FILL * problem.nodes.len() as u64;
                self.fill();
                self.thin(usize::MAX);
                self.note();
            }
        }
        if let Some(best) = self.best.take() {
            self.set(&best.reruns);
            self.best = Some(best);
            self.limit = effort.steps;
            self.change(effort, going);
        }
    }

    /// The bytes of the current set's peak above the budget, and its time: less is better.
    fn score(&self) -> (i64, f64) {
        (
            (self.profile.peak() - self.budget).max(0),
            self.profile.micros(),
        )
    }

    /// Records the current set if it is the best so far.
    fn note(&mut self) {
        let (above, micros) = self.score();
        if self.best.as_ref().is_none_or(|best| {
            above < best.above || above == best.above && micros < best.micros - 1e-9
        }) {
            self.best = Some(Best {
                above,
                micros,
                reruns: self.profile.reruns().to_vec(),
            });
        }
    }

    /// Makes a set the current one.
    fn set(&mut self, reruns: &[Rerun]) {
        for rerun in self.profile.reruns().to_vec() {
            self.profile.toggle(rerun);
        }
        for &rerun in reruns {
            self.profile.toggle(rerun);
        }
        self.trail.clear();
    }

    fn toggle(&mut self, rerun: Rerun) {
        self.steps += 1;
        self.profile.toggle(rerun);
        self.trail.push(rerun);
    }

    fn undo(&mut self, to: usize) {
        while to < self.trail.len() {
            let rerun = self.trail.pop().expect("the trail should be longer");
            self.steps += 1;
            self.profile.toggle(rerun);
        }
    }

    fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        scramble(self.random)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// The time of a node including its error, µs.
    fn micros(&self, node: u32) -> f64 {
        let micros = self.problem.nodes[node as usize].micros;
        if self.noise == 0.0 {
            return micros;
        }
        let bits = scramble(self.salt ^ u64::from(node).wrapping_mul(0xd6e8_feb8_6659_fd93));
        micros * (1.0 + self.noise * unit(bits)) / (1.0 + self.noise * unit(scramble(bits)))
    }

    /// Lowers the peak to the budget, or as far as possible.
    fn fill(&mut self) {
        let most = self.profile.reruns().len() + 2 * self.problem.nodes.len() + 64;
        loop {
            let peak = self.profile.peak();
            if peak <= self.budget {
                return;
            }
            if most < self.profile.reruns().len() || self.limit < self.steps {
                return;
            }
            let at = self.profile.peak_step();
            self.steps += 1 + self.problem.values.len() as u64 / LOOKS;
            let mut heap = BinaryHeap::new();
            for value in 0..self.problem.values.len() as u32 {
                if let Some((price, _)) = self.ask(value, at) {
                    heap.push(Priced { price, value });
                }
            }
            let mut progress = false;
            while let Some(Priced { value, .. }) = heap.pop() {
                let bytes = self.profile.bytes_at(at);
                if bytes <= self.budget {
                    break;
                }
                // Later cuts may have changed the price.
                let Some((price, line)) = self.ask(value, at) else {
                    continue;
                };
                if heap.peek().is_some_and(|next| next.price < price) {
                    heap.push(Priced { price, value });
                    continue;
                }
                let before = self.trail.len();
                let peak = self.profile.peak();
                for node in std::mem::take(&mut self.cascade) {
                    self.toggle(Rerun { line, node });
                }
                if bytes <= self.profile.bytes_at(at) || peak < self.profile.peak() {
                    self.undo(before);
                } else {
                    progress = true;
                }
            }
            if !progress {
                return;
            }
        }
    }

    /// The price, µs per byte, of cutting a value that is idle at a step, and the line before which
    /// it would be recomputed. Writes the nodes that would run to `cascade`. `None` if the value is
    /// not idle there, or if cutting it frees nothing.
    fn ask(&mut self, value: u32, at: Step) -> Option<(f64, u32)> {
        let data = self.problem.values[value as usize];
        if data.bytes == 0 {
            return None;
        }
        let read = self.profile.idle(value, at)?;
        let rerun = Rerun {
            line: line_of(read),
            node: data.maker,
        };
        if step(rerun.line, rerun.node) <= at {
            return None;
        }
        self.steps += 1;
        let early = if self.early {
            self.early(rerun, at)
        } else {
            None
        };
        if let Some(line) = early {
            self.cascade.clear();
            self.cascade.push(rerun.node);
            return Some((self.micros(rerun.node) / data.bytes as f64, line));
        }
        self.cascade.clear();
        self.n_marks += 1;
        let (micros, held) = self.again(rerun.node, rerun.line, at, f64::INFINITY)?;
        let freed = data.bytes as i64 - held as i64;
        (0 < freed).then(|| (micros / freed as f64, rerun.line))
    }

    /// The last line after a step, and before the line of a rerun, at which the operands of the
    /// rerun are still in memory.
    fn early(&self, rerun: Rerun, at: Step) -> Option<u32> {
        let Rerun { line, node } = rerun;
        let ends = self.problem.nodes[node as usize]
            .reads
            .iter()
            .map(|&read| self.profile.end_for(read, step(line, node)));
        let end = line_of(ends.min()?);
        (end < line && at < step(end, node) && self.problem.may_rerun(Rerun { line: end, node }))
            .then_some(end)
    }

    /// The time, µs, of running a node again before a line, and the bytes that it additionally
    /// holds at a step. The nodes are added to `cascade`. Returns `None`, and adds nothing, if this
    /// is impossible or costs at least `limit`, with held bytes counted at the current price.
    fn again(&mut self, node: u32, line: u32, at: Step, limit: f64) -> Option<(f64, u64)> {
        if !self.problem.may_rerun(Rerun { line, node }) || LONGEST_CASCADE <= self.cascade.len() {
            return None;
        }
        let before = self.cascade.len();
        let mark = self.n_marks;
        self.mark[node as usize] = mark;
        self.cascade.push(node);
        let (mut micros, mut held) = (self.micros(node), 0);
        let mut possible = true;
        let problem = self.problem;
        for &read in &problem.nodes[node as usize].reads {
            let data = problem.values[read as usize];
            if self.mark[data.maker as usize] == mark {
                continue;
            }
            let end = self.profile.end_for(read, step(line, node));
            if step(line, node) <= end || line_of(end) == line {
                continue;
            }
            let spent = micros
                + if held == 0 {
                    0.0
                } else {
                    held as f64 * self.price
                };
            // Holding extends its life. Bytes count less if the value is already in memory there.
            let holding = if self.price.is_infinite() {
                f64::INFINITY
            } else {
                data.bytes as f64 * self.price * if end < at { 1.0 } else { HELD_LATER }
            };
            match self.again(data.maker, line, at, holding.min(limit - spent)) {
                Some((more, bytes)) => {
                    micros += more;
                    held += bytes;
                }
                None if holding.is_finite() && spent + holding < limit => {
                    held += if end < at { data.bytes } else { 0 }
                }
                None => {
                    possible = false;
                    break;
                }
            }
        }
        let total = micros
            + if held == 0 {
                0.0
            } else {
                held as f64 * self.price
            };
        if !possible || limit <= total {
            for node in self.cascade.drain(before..) {
                self.mark[node as usize] = 0;
            }
            return None;
        }
        Some((micros, held))
    }

    /// Removes reruns, slowest first, if the peak stays within the budget or does not rise. Tries
    /// at most `most` of them.
    fn thin(&mut self, most: usize) {
        let limit = self.budget.max(self.profile.peak());
        let mut reruns: Vec<(f64, Rerun)> = if self.profile.reruns().len() <= most {
            self.profile
                .reruns()
                .iter()
                .map(|&rerun| (self.micros(rerun.node), rerun))
                .collect()
        } else {
            let mut some: Vec<Rerun> = self.trail.clone();
            for _ in 0..most.saturating_sub(some.len()) {
                let n = self.below(self.profile.reruns().len());
                some.push(self.profile.reruns()[n]);
            }
            some.sort_unstable();
            some.dedup();
            some.retain(|&rerun| self.profile.has(rerun));
            some.into_iter()
                .map(|rerun| (self.micros(rerun.node), rerun))
                .collect()
        };
        reruns.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        for (_, rerun) in reruns {
            self.toggle(rerun);
            if limit < self.profile.peak() {
                self.undo(self.trail.len() - 1);
            }
        }
    }

    /// Repeatedly removes some reruns and fills again.
    fn change(&mut self, effort: Effort, going: f64) {
        let mut rounds = 0;
        while self.steps < effort.steps {
            rounds += 1;
            let before = self.score();
            self.salt = self.next();
            self.noise = [0.0, 0.3, 1.0, 3.0][self.below(4)];
            self.price = match self.below(4) {
                0 => f64::INFINITY,
                k => going * [0.5, 1.0, 2.0][k - 1],
            };
            self.early = self.below(4) == 0;
            self.steps += 1;
            self.ruin();
            self.fill();
            self.thin(THIN);
            let after = self.score();
            if after.0 < before.0 || after.0 == before.0 && after.1 <= before.1 + 1e-9 {
                self.trail.clear();
                self.note();
            } else {
                self.undo(0);
            }
        }
        log::debug!("{rounds} changes, {} steps", self.steps);
    }

    /// Removes a few reruns, or adds some.
    fn ruin(&mut self) {
        let problem = self.problem;
        let mut out: Vec<Rerun> = vec![];
        if self.profile.reruns().is_empty() {
            out = self.one_more();
        } else {
            let first = self.pick();
            match self.below(6) {
                // A whole cascade.
                0 => out.extend(self.profile.before(first.line).map(|node| Rerun {
                    line: first.line,
                    node,
                })),
                // All reruns of a node and of the nodes that it reads.
                1 => {
                    out.extend(self.profile.reruns_of(first.node));
                    for &read in &problem.nodes[first.node as usize].reads {
                        out.extend(self.profile.reruns_of(problem.values[read as usize].maker));
                    }
                }
                // Random reruns.
                2 => {
                    out.push(first);
                    for _ in 0..self.below(4) {
                        out.push(self.pick());
                    }
                }
                // Cut another value, and remove reruns that become unnecessary.
                3 => out = self.one_more(),
                // Removes one rerun, and cuts another value.
                4 => {
                    out = self.one_more();
                    out.push(first);
                }
                // Moves one rerun to a line nearby.
                _ => {
                    let line =
                        (first.line + self.below(2 * NEARBY) as u32).saturating_sub(NEARBY as u32);
                    let moved = Rerun { line, ..first };
                    if problem.may_rerun(moved) && !self.profile.has(moved) {
                        out.extend([first, moved]);
                    }
                }
            }
        }
        out.sort_unstable();
        out.dedup();
        for rerun in out {
            self.toggle(rerun);
        }
    }

    /// A random rerun.
    fn pick(&mut self) -> Rerun {
        let pick = self.below(self.profile.reruns().len());
        self.profile.reruns()[pick]
    }

    /// The reruns that cut a value at the fullest step.
    fn one_more(&mut self) -> Vec<Rerun> {
        let at = self.profile.peak_step();
        for _ in 0..20 {
            let value = self.below(self.problem.values.len()) as u32;
            if let Some((_, line)) = self.ask(value, at) {
                return self
                    .cascade
                    .iter()
                    .map(|&node| Rerun { line, node })
                    .collect();
            }
        }
        vec![]
    }
}

/// The weight of operands that are already in memory at the fullest step and are held longer.
const HELD_LATER: f64 = 0.25;
/// The most steps of a start, for each node. If a solution exists, three are enough.
const FILL: u64 = 5;
/// The number of examined values that count as one elementary step. Most of them are not in memory.
const LOOKS: u64 = 16;
/// The most lines by which a rerun moves.
const NEARBY: usize = 4;
/// The most reruns that are checked after a change whether they are still needed.
const THIN: usize = 600;

/// Mixes the bits of a number (splitmix64: Steele, Lea and Flood 2014).
fn scramble(bits: u64) -> u64 {
    let bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
/// A number from 0 to 1 from bits.
fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}
