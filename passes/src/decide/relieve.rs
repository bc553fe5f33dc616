//! Takes back decisions that free no bytes where memory is short. A trajectory never takes back a
//! cut, and a layout moves whole blocks and all of their states; so some decisions cost time and
//! lower no peak.
//!
//! This is the reverse deletion of a greedy cover. Each candidate is a decision that can be taken
//! back, with the lines that then have more bytes alive. Candidates are taken in order of the time
//! that they save per byte, as long as no line rises above the peak. The results are drafts of
//! their own. They are left out unless they are as low as the draft before, and faster. The same
//! with a larger target than the peak fills memory that a draft leaves free.

use super::occupancy::Occupancy;
use super::record::{self, Draft};
use crate::alloc::{lifetimes, live_bytes};
use crate::lines::{MaxTree, Stretch};
use crate::plan::machine::{D2H, DEVICE, H2D};
use crate::plan::tuning::{AHEAD_WORTH, HALVED};
use crate::plan::{Decisions, Gap, Means, Problem};
use crate::realise;
use ir::graph::Def;
use ir::schedule::{Buffer, InstrKind, Schedule, Why, buffer_bytes};
use ir::{Id, Instr, State, Table};
use std::collections::{BTreeMap, BTreeSet};

/// The drafts without decisions that free no bytes at the peak of `draft`, then those that fill
/// each of `targets`, bytes, which rise from its peak; empty if nothing can be taken back.
pub(super) fn drafts(problem: &Problem<'_>, draft: &Draft, targets: &[u64]) -> Vec<Draft> {
    let decisions = &*draft.decisions;
    // The draft with more room for copies has the same decisions.
    if decisions.count() == 0 || 0 < decisions.ahead {
        return vec![];
    }
    let least = least_micros(problem, decisions);
    if draft.micros * (1.0 - AHEAD_WORTH) <= least {
        return vec![];
    }
    let Ok(schedule) = realise::unnamed(problem, decisions) else {
        return vec![];
    };
    let bench = Bench::new(problem, decisions, &schedule);
    let taken = TakenBack::new(&bench, Since::Access);
    let mut drafts = vec![];
    if !problem.is_large() {
        // Each finds plans that the other misses.
        let other = TakenBack::new(&bench, Since::Copy);
        if other.candidates != taken.candidates {
            drafts.append(&mut filled(draft, other, least, targets));
        }
    }
    drafts.append(&mut filled(draft, taken, least, targets));
    drafts
}

/// The drafts that fill the peak of `draft`, then each of `targets`. No step takes less than
/// `least`, µs.
fn filled(draft: &Draft, taken: TakenBack<'_>, least: f64, targets: &[u64]) -> Vec<Draft> {
    let fills = Fills::new(taken, draft, least, targets);
    let mut drafts: Vec<Draft> = vec![];
    let mut fastest = draft.micros;
    for (first, schedule) in fills.fills.iter().filter_map(Fill::filling) {
        if fastest - fills.worth < first.micros {
            continue;
        }
        fastest = first.micros;
        log::debug!(
            "taken back: {} decisions of {} are left, {fastest:.0} µs of {:.0}, {} bytes of {}",
            first.decisions.count(),
            draft.decisions.count(),
            draft.micros,
            first.live,
            draft.live,
        );
        let first = Draft {
            origin: draft.origin,
            ..first.clone()
        };
        record::with_room(fills.problem, first, schedule, &mut drafts);
    }
    drafts
}

/// What is taken back for targets that rise.
struct Fills<'a> {
    problem: &'a Problem<'a>,
    fills: Vec<Fill>,
    /// The least time that a draft must save, µs.
    worth: f64,
    /// No step takes less, µs.
    least: f64,
}

/// What is taken back for a target.
struct Fill {
    /// The least and the most bytes with which a draft fills it.
    bytes: [u64; 2],
    decisions: Decisions,
    /// Copies and reruns that are no longer needed, µs.
    saves: f64,
    /// The draft with its lines; `None` if it is not known whether it is faster than others.
    draft: Option<(Draft, Schedule)>,
}

impl Fill {
    /// The draft with its lines, if it fills the target.
    fn filling(&self) -> Option<&(Draft, Schedule)> {
        let [least, most] = self.bytes;
        let fills = |(draft, _): &&(Draft, Schedule)| (least..=most).contains(&draft.live);
        self.draft.as_ref().filter(fills)
    }
}

impl<'a> Fills<'a> {
    /// Takes back for the peak of `draft`, then for each target, and drafts what may be faster.
    fn new(mut taken: TakenBack<'a>, draft: &Draft, least: f64, targets: &[u64]) -> Fills<'a> {
        let targets = targets.iter().map(|&target| [least_filled(target), target]);
        let fill = |bytes: [u64; 2]| {
            taken.fill(bytes[1]);
            Fill {
                bytes,
                decisions: taken.decisions.clone(),
                saves: taken.saves,
                draft: None,
            }
        };
        let mut fills = Fills {
            fills: [[0, draft.live]]
                .into_iter()
                .chain(targets)
                .map(fill)
                .collect(),
            problem: taken.problem,
            worth: AHEAD_WORTH * draft.micros,
            least,
        };
        let all = fills.fills.len();
        let mut before = (0.0, draft.micros);
        let problem = fills.problem;
        if problem.heuristics.halve_fills && HALVED <= problem.lines.len() {
            fills.draft(0, all, before);
        } else {
            for fill in 0..all {
                before = fills.draft(fill, fill + 1, before);
            }
        }
        fills
    }

    /// Drafts the fills `from..to` that may be faster than what is `before` them: what it saves,
    /// and the time of its step, µs. Returns the same of the last fill. If the last fill is no
    /// faster, none is assumed to be: the others take back less.
    fn draft(&mut self, from: usize, to: usize, before: (f64, f64)) -> (f64, f64) {
        let (saves, micros) = before;
        let Some(last) = self.fills[from..to].last_mut() else {
            return before;
        };
        if last.saves - saves < self.worth || micros - self.worth <= self.least {
            return before;
        }
        let saves = last.saves;
        if last.draft.is_none() {
            last.draft = record::alone(self.problem, &last.decisions);
        }
        let known = last.draft.as_ref();
        if known.is_some_and(|(draft, _)| micros - self.worth < draft.micros) {
            return (saves, micros);
        }
        let end = last.filling().map_or(micros, |(draft, _)| draft.micros);
        let middle = from + (to - from) / 2;
        if from < middle {
            let before = self.draft(from, middle, before);
            self.draft(middle, to, before);
        }
        (saves, end)
    }
}

/// The least bytes with which a draft fills a target. A draft with fewer is dropped: it would fit
/// budgets for which this target is not tried, and their plan would depend on what else is planned.
pub(super) fn least_filled(target: u64) -> u64 {
    target - target / 4
}

/// The least time of a step after anything is taken back, µs: the device runs each node once, and
/// the solver's reruns, which are not taken back.
fn least_micros(problem: &Problem<'_>, decisions: &Decisions) -> f64 {
    let graph = problem.graph;
    let once = graph
        .nodes
        .ids()
        .filter(|node| !decisions.on_host.contains(node));
    let again = decisions.reruns.values().flatten().copied();
    once.chain(again)
        .map(|node| problem.cost.run(graph, node))
        .sum()
}

/// Decisions, while some of them are taken back.
struct TakenBack<'a> {
    problem: &'a Problem<'a>,
    decisions: Decisions,
    /// What can be taken back, the most worth per byte first.
    candidates: Vec<Candidate>,
    /// Bytes needed at each line.
    tree: MaxTree,
    /// Homes whose states live on the device again.
    at_home: BTreeSet<Buffer>,
    /// The time that taking back saves, µs.
    saves: f64,
}

impl<'a> TakenBack<'a> {
    fn new(bench: &Bench<'a>, since: Since) -> TakenBack<'a> {
        let mut candidates = bench.homes();
        candidates.extend(bench.gaps(since));
        candidates.retain(|candidate| 0.0 < candidate.saves);
        candidates.sort_by(|a, b| b.rate().total_cmp(&a.rate()));
        let mut decisions = Decisions {
            layout: None,
            ..bench.decisions.clone()
        };
        bench.problem.feed_again(&mut decisions);
        TakenBack {
            problem: bench.problem,
            decisions,
            candidates,
            tree: MaxTree::new(&bench.live),
            at_home: BTreeSet::new(),
            saves: 0.0,
        }
    }

    /// Takes back what raises no line above a target, bytes.
    fn fill(&mut self, target: u64) {
        let candidates = std::mem::take(&mut self.candidates);
        for candidate in candidates {
            if candidate
                .home
                .is_some_and(|home| self.at_home.contains(&home))
            {
                continue;
            }
            self.tree.restore(&candidate.adds);
            if self.tree.is_within(&candidate.adds, target) {
                self.saves += candidate.saves;
                if let (Undo::Home(_), Some(home)) = (&candidate.undo, candidate.home) {
                    self.at_home.insert(home);
                }
                candidate.undo.take_back(self.problem, &mut self.decisions);
            } else {
                self.tree.free(&candidate.adds);
                self.candidates.push(candidate);
            }
        }
    }
}

/// From which line on the bytes of a value that is kept over a gap are counted.
#[derive(Clone, Copy)]
enum Since {
    /// The access before the gap. This leaves room for a copy to the host that ends late.
    Access,
    /// The line that copied it to the host: until then it lies on the device anyway.
    Copy,
}

/// A decision that can be taken back.
#[derive(PartialEq)]
struct Candidate {
    undo: Undo,
    /// The home of states on the host that it is about.
    home: Option<Buffer>,
    /// The bytes that lines have in addition.
    adds: Vec<Stretch>,
    /// Copies and reruns that are no longer needed, µs.
    saves: f64,
}

impl Candidate {
    /// The time that it saves per byte.
    fn rate(&self) -> f64 {
        let bytes = self.adds.iter().map(|&(.., bytes)| bytes).max();
        self.saves / bytes.unwrap_or(0).max(1) as f64
    }
}

/// What is taken back.
#[derive(PartialEq)]
enum Undo {
    /// States live on the device.
    Home(Vec<State>),
    /// A value is kept over these gaps.
    Keep(Vec<Gap>),
}

impl Undo {
    fn take_back(self, problem: &Problem<'_>, decisions: &mut Decisions) {
        match self {
            Undo::Keep(gaps) => {
                for gap in gaps {
                    decisions.cuts.remove(&gap);
                }
            }
            Undo::Home(states) => decisions.bring_home(problem.graph, &states),
        }
    }
}

/// What candidates are made from.
struct Bench<'a> {
    problem: &'a Problem<'a>,
    decisions: &'a Decisions,
    schedule: &'a Schedule,
    /// The lines `from..to` over which each buffer is needed: a copy that comes early counts from
    /// its first reader.
    needed: Table<Buffer, (usize, usize)>,
    /// The lines of the model, in order: their positions are those of [`Problem::lines`].
    models: Vec<Instr>,
    /// Bytes needed at each line.
    live: Vec<u64>,
}

impl<'a> Bench<'a> {
    fn new(problem: &'a Problem<'a>, decisions: &'a Decisions, schedule: &'a Schedule) -> Self {
        let mut lives = lifetimes(schedule);
        let mut early: BTreeSet<Buffer> = BTreeSet::new();
        for (instr, data) in schedule.instrs.iter() {
            let line = instr.index() as u32;
            match data.kind {
                InstrKind::Copy { dst, .. }
                    if data.stream == H2D && lives[dst.buffer].start == line =>
                {
                    early.insert(dst.buffer);
                }
                _ => {
                    for loc in data.kind.places() {
                        if early.remove(&loc.buffer) {
                            lives[loc.buffer].start = line;
                        }
                    }
                }
            }
        }
        let live = live_bytes(schedule, &lives, DEVICE);
        let spans = lives
            .values()
            .map(|life| (life.start as usize, life.end as usize));
        let lines = schedule.instrs.iter();
        let models = lines.filter(|(_, data)| data.why == Why::Model);
        Bench {
            problem,
            decisions,
            schedule,
            needed: spans.collect(),
            models: models.map(|(instr, _)| instr).collect(),
            live,
        }
    }

    /// States on the host that lines of the device read: a chunk, or a state alone. They can live
    /// on the device, or stay there between two of their copies.
    fn homes(&self) -> Vec<Candidate> {
        let mut traffic = self.traffic();
        let states = self.problem.graph.states.ids();
        // Entries are the states, in order, then the inputs.
        for (state, &(_, loc)) in states.zip(&self.schedule.entry) {
            if let Some(traffic) = traffic.get_mut(&loc.buffer) {
                traffic.states.push(state);
            }
        }
        let mut candidates = vec![];
        for (home, traffic) in &traffic {
            if traffic.states.is_empty() || traffic.gathered.is_empty() {
                continue;
            }
            candidates.push(self.home(*home, traffic));
            candidates.extend(self.stays(*home, traffic));
        }
        candidates
    }

    /// The copies from and to each home of states on the host.
    fn traffic(&self) -> BTreeMap<Buffer, Traffic> {
        let mut traffic: BTreeMap<Buffer, Traffic> = BTreeMap::new();
        for data in self.schedule.instrs.values() {
            let InstrKind::Copy { src, dst, bytes } = data.kind else {
                continue;
            };
            match (data.stream, data.why) {
                (H2D, Why::Gather) => {
                    traffic
                        .entry(src.buffer)
                        .or_default()
                        .gathered
                        .push(dst.buffer);
                }
                (D2H, Why::Offload) => traffic.entry(dst.buffer).or_default().back += bytes,
                _ => {}
            }
        }
        traffic
    }

    /// The candidate that the states of a home live on the device.
    fn home(&self, home: Buffer, traffic: &Traffic) -> Candidate {
        let graph = &self.problem.graph;
        let bytes = |state: &State| graph.values[graph.states[*state].before].ty.bytes();
        let size = traffic
            .states
            .iter()
            .map(|state| buffer_bytes(bytes(state)));
        let size: u64 = size.sum();
        let mut adds = vec![];
        let mut end = 0;
        for &copy in &traffic.gathered {
            let (from, to) = self.needed[copy];
            if end < from {
                adds.push((end, from, size));
            }
            end = end.max(to);
        }
        let n = self.schedule.instrs.len();
        if end < n {
            adds.push((end, n, size));
        }
        // What the host updates is copied back to the device.
        let link = |bytes: u64| self.problem.cost.link(bytes);
        let renewed = |state: &&State| self.decisions.is_updated_on_host(graph, **state);
        let returned: f64 = traffic
            .states
            .iter()
            .filter(renewed)
            .map(|state| link(bytes(state)))
            .sum();
        let copies = traffic.gathered.len() as f64 * link(self.schedule.buffers[home].bytes);
        Candidate {
            undo: Undo::Home(traffic.states.clone()),
            home: Some(home),
            adds,
            saves: copies + link(traffic.back) - returned,
        }
    }

    /// The candidates that the states of a home stay on the device from one copy to the next.
    fn stays(&self, home: Buffer, traffic: &Traffic) -> Vec<Candidate> {
        let bytes = self.schedule.buffers[home].bytes;
        let mut candidates = vec![];
        for pair in traffic.gathered.windows(2) {
            let (from, to) = (self.needed[pair[0]].1, self.needed[pair[1]].0);
            if to <= from {
                continue;
            }
            let mut gaps = vec![];
            for &state in &traffic.states {
                let value = self.problem.graph.states[state].before;
                let range = Gap { value, gap: 0 }..=Gap {
                    value,
                    gap: u32::MAX,
                };
                let cut = self.decisions.cuts.range(range).map(|(&gap, _)| gap);
                gaps.extend(cut.filter(|&gap| {
                    let (before, after) = self.ends(gap);
                    before < to && from <= after
                }));
            }
            if !gaps.is_empty() {
                candidates.push(Candidate {
                    undo: Undo::Keep(gaps),
                    home: Some(home),
                    adds: vec![(from, to, bytes)],
                    saves: self.problem.cost.link(bytes),
                });
            }
        }
        candidates
    }

    /// The candidates that computed values are kept over their gaps.
    fn gaps(&self, since: Since) -> Vec<Candidate> {
        let cost = self.problem.cost;
        let occupancy = match since {
            Since::Access => None,
            Since::Copy => Some(Occupancy::new(self.problem, self.schedule)),
        };
        let mut candidates = vec![];
        for (&gap, (means, reason)) in &self.decisions.cuts {
            let data = &self.problem.graph.values[gap.value];
            let Def::Node(node, _) = data.def else {
                continue;
            };
            let bytes = buffer_bytes(data.ty.bytes());
            let (line, to) = self.ends(gap);
            let from = occupancy.as_ref().map_or(line, |occupancy| {
                occupancy.resident_until(self.problem.root[gap.value], line)
            });
            let saves = match means {
                Means::Swap => 2.0 * cost.link(bytes),
                Means::Recompute => reason
                    .recompute
                    .unwrap_or_else(|| cost.run(self.problem.graph, node)),
            };
            candidates.push(Candidate {
                undo: Undo::Keep(vec![gap]),
                home: None,
                adds: vec![(from + 1, to, bytes)],
                saves,
            });
        }
        candidates
    }

    /// The lines of the accesses before and after a gap.
    fn ends(&self, gap: Gap) -> (usize, usize) {
        let accesses = &self.problem.accesses[gap.value];
        let line = |number: u32, none: usize| {
            let at = accesses.get(number as usize);
            at.map_or(none, |&at| self.models[at as usize].index())
        };
        let n = self.schedule.instrs.len();
        (line(gap.gap, 0), line(gap.gap + 1, n))
    }
}

/// The copies of a home of states on the host.
#[derive(Default)]
struct Traffic {
    states: Vec<State>,
    /// The buffers on the device into which it is copied, in order.
    gathered: Vec<Buffer>,
    /// Bytes that come back from the device.
    back: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Roofline;
    use crate::devices;
    use crate::plan::Reason;
    use ir::text::parse_graph;

    /// Most bytes are alive at `%r`. `%u` is idle then, `%v` does not exist yet.
    const GRAPH: &str = "graph g {
        input %x : f32[64,64]
        input %y : f32[1024,64]
        state param %w -> %w : f32[64,64] \"w\"
        fwd a %u = relu %x : f32[64,64]
        fwd a %p = matmul %y, %x ta=false tb=false : f32[1024,64]
        fwd a %q = relu %p : f32[1024,64]
        fwd a %r = mul %p, %q : f32[1024,64]
        fwd a %m = mean %r dims=[0] keepdim=true : f32[1,64]
        fwd a %v = exp %x : f32[64,64]
        fwd a %n = relu %m : f32[1,64]
        fwd a %o = relu %n : f32[1,64]
        fwd a %s = mul %v, %o : f32[64,64]
        fwd a %t = add %s, %u : f32[64,64]
        fwd a %z = mul %t, %w : f32[64,64]
        output z = %z
    }";

    /// What is left of decisions that cut these gaps, and host the first state if `hosted`.
    fn left(text: &str, cuts: &[(&str, u32)], means: Means, hosted: bool) -> (Vec<String>, bool) {
        let graph = parse_graph(text).unwrap();
        let device = devices::named("test").unwrap();
        let cost = Roofline::new(&device);
        let problem = Problem::new(&graph, &device, &cost);
        let reason = Reason {
            bytes: 0,
            swap: None,
            recompute: None,
            line: 0,
        };
        let mut decisions = Decisions::default();
        for &(name, gap) in cuts {
            let mut values = graph.values.iter();
            let (value, _) = values.find(|(_, data)| *data.name == *name).unwrap();
            decisions.cuts.insert(Gap { value, gap }, (means, reason));
        }
        if hosted {
            decisions.hosted.insert(State::nth(0), reason);
        }
        let mut drafts = vec![];
        record::propose(&problem, &decisions, &mut drafts);
        let relieved = super::drafts(&problem, &drafts[0], &[]);
        let [first, ..] = &relieved[..] else {
            panic!("nothing was taken back");
        };
        assert_eq!(first.live, drafts[0].live);
        assert!(first.micros < drafts[0].micros);
        let names = first.decisions.cuts.keys();
        let names = names.map(|gap| format!("{} {}", graph.values[gap.value].name, gap.gap));
        (names.collect(), !first.decisions.hosted.is_empty())
    }

    #[test]
    fn cuts_that_free_nothing_at_the_peak_are_taken_back() {
        for means in [Means::Swap, Means::Recompute] {
            let left = left(GRAPH, &[("u", 0), ("v", 0)], means, false);
            assert_eq!(left, (vec!["u 0".into()], false));
        }
    }

    #[test]
    fn a_state_stays_on_the_host_if_it_would_raise_the_peak() {
        let left = left(GRAPH, &[("u", 0), ("v", 0)], Means::Swap, true);
        assert_eq!(left, (vec!["u 0".into()], true));
    }

    /// While `%a` is copied out, `%u` waits for its own copy. Most bytes are alive at `%p`.
    #[test]
    fn a_value_that_waits_for_its_copy_needs_no_bytes_in_addition() {
        let text = "graph g {
            input %x : f32[64,64]
            input %k : f32[1,128]
            fwd a %a = exp %x : f32[64,64]
            fwd a %u = relu %a : f32[64,64]
            fwd a %m = mean %u dims=[0] keepdim=true : f32[1,64]
            fwd a %p = matmul %k, %m ta=true tb=false : f32[128,64]
            fwd a %q = mean %p dims=[0] keepdim=true : f32[1,64]
            fwd a %s = mul %u, %q : f32[64,64]
            fwd a %t = add %s, %a : f32[64,64]
            output t = %t
        }";
        let left = left(text, &[("a", 1), ("u", 0), ("u", 1)], Means::Swap, false);
        assert_eq!(left, (vec!["a 1".into(), "u 1".into()], false));
    }
}
