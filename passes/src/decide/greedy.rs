//! Cuts gaps where memory is short, cheapest byte first, and lets the simulator judge.
//!
//! A *trajectory* starts from `keep` and lowers the live peak round by round. In a round, every
//! idle stretch of a buffer (a value that lies on the device between two accesses) is a candidate:
//! swap it, compute it again, or, for a state, let it live on the host; so is what a block of the
//! model holds for its backward, all together. Candidates are priced from the last simulation and
//! taken in order of price per byte while they still cover a line above the round's target; then
//! the lines are built, placed and simulated anew. What the decisions really come to is recorded,
//! whether that is what was hoped or not.
//!
//! There is one trajectory for each [`Taste`]. None depends on the budget, so a plan for a budget
//! is a choice among the records: the fastest that fits. Hence a lower budget never plans a higher
//! peak, and the smallest record is the smallest feasible budget. Where one budget alone is
//! planned, records that would not be chosen are spared: see [`Wanted`].

use super::record::{Draft, Wanted, draft};
use crate::alloc::{lifetimes, live_bytes};
use crate::plan::machine::{COMPUTE, D2H, DEVICE, H2D, ON_HOST};
use crate::plan::tuning::{
    GROWTH, HIDDEN_COPY, HOST_HIDES, JUMP_LADDER, JUMP_TRIES, LARGE_GROWTH, LARGE_STEP,
    LARGEST_STEP, LINK_HIDES, LONGEST_CASCADE, MISSED, MOST_RERUNS, PATIENCE, STEP, SWAP_LATENCIES,
    SWAP_OUT_SPARE, SWAP_SPARE,
};
use crate::plan::{Decisions, Gap, Means, Problem, Reason};
use crate::realise;
use crate::sim::{Timeline, unlimited};
use ir::graph::Def;
use ir::schedule::{Buffer, InstrKind, Loc, Schedule, Why};
use ir::{Id, Node, Phase, Table, Value};
use smallvec::SmallVec;
use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// Which means a trajectory prefers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Taste {
    /// Whatever is reckoned cheaper.
    Cheaper,
    /// Swap, always.
    Swap,
    /// Recompute wherever that is possible.
    Recompute,
    /// Whole blocks first, by whatever is reckoned cheaper for all that a block holds from forward
    /// to backward.
    Block,
}

/// All tastes.
pub const TASTES: [Taste; 4] = [Taste::Cheaper, Taste::Swap, Taste::Recompute, Taste::Block];

/// The drafts of keeping everything on the device.
pub fn keep(problem: &Problem<'_>) -> Vec<Draft> {
    let mut drafts = vec![];
    let decisions = Decisions::default();
    if let Ok(schedule) = realise::unnamed(problem, &decisions) {
        draft(problem, &decisions, &schedule, &mut drafts);
    }
    drafts
}

/// The drafts of one trajectory, in its order, as far as they are wanted.
pub fn trajectory(problem: &Problem<'_>, taste: Taste, wanted: &Wanted) -> Vec<Draft> {
    let mut drafts = vec![];
    let mut decisions = Decisions::default();
    let Ok(mut schedule) = realise::unnamed(problem, &decisions) else {
        return drafts;
    };
    // Recomputes that made matters worse.
    let mut banned: BTreeSet<(Value, u32)> = BTreeSet::new();
    let (mut step, growth) = if problem.is_large() {
        (LARGE_STEP, LARGE_GROWTH)
    } else {
        (STEP, GROWTH)
    };
    let mut fruitless = 0;
    let mut lowest = live(&schedule).into_iter().max().unwrap_or(0);
    let mut timeline = draft(problem, &decisions, &schedule, &mut drafts);
    loop {
        let live = live(&schedule);
        let peak = live.iter().copied().max().unwrap_or(0);
        let target = (peak as f64 * (1.0 - step)) as u64;
        step = (step * growth).min(LARGEST_STEP);
        let chosen = Round::new(problem, &decisions, &schedule, &timeline, &banned, taste)
            .choose(&live, target);
        if chosen.is_empty() {
            return drafts;
        }
        let mut next = decisions.clone();
        for cut in &chosen {
            cut.add_to(&mut next, problem);
        }
        let built = build(problem, &next);
        let new_peak = built.as_ref().and_then(|s| self::live(s).into_iter().max());
        log::debug!(
            "{taste:?}: {} cuts chosen at {} lines, live peak {peak} -> {new_peak:?}",
            chosen.len(),
            schedule.instrs.len()
        );
        match (built, new_peak) {
            (Some(built), Some(new_peak))
                if new_peak < peak || chosen.iter().all(|c| c.means == Means::Swap) =>
            {
                decisions = next;
                schedule = built;
                if new_peak < lowest {
                    timeline = draft(problem, &decisions, &schedule, &mut drafts);
                    fruitless = 0;
                    lowest = new_peak;
                    if beyond_host(problem, &drafts) || wanted.end(problem, &drafts).is_some() {
                        return drafts;
                    }
                } else {
                    timeline = unlimited(problem.graph, &schedule, problem.cost);
                    fruitless += 1;
                }
            }
            _ => {
                // The reruns' own needs ate what they freed, or one is impossible: not these again.
                fruitless += 1;
                banned.extend(recomputed(&chosen));
            }
        }
        if PATIENCE < fruitless {
            return drafts;
        }
    }
}

/// Drafts that do not build on each other: for each of a ladder of targets, from a share of the
/// model's states on the host, those of the last blocks, and everything else kept. What a
/// trajectory has once cut it never takes back; here a large cut spares many small ones.
pub fn jumps(problem: &Problem<'_>, hosted: f64, taste: Taste, wanted: &Wanted) -> Vec<Draft> {
    let mut drafts = vec![];
    let base = problem.hosted(hosted);
    if !problem.host_has_room(&base) {
        return drafts;
    }
    let Ok(start) = realise::unnamed(problem, &base) else {
        return drafts;
    };
    let timeline = draft(problem, &base, &start, &mut drafts);
    let start_live = live(&start);
    let peak = start_live.iter().copied().max().unwrap_or(0) as f64;
    let mut target = peak;
    let none_banned = BTreeSet::new();
    let first = Round::new(problem, &base, &start, &timeline, &none_banned, taste);
    loop {
        target *= JUMP_LADDER[usize::from(problem.is_large())];
        let mut decisions = base.clone();
        let mut schedule = None;
        let mut banned: BTreeSet<(Value, u32)> = BTreeSet::new();
        let mut lowest = u64::MAX;
        for _ in 0..JUMP_TRIES {
            let chosen = match &schedule {
                None if banned.is_empty() => first.choose(&start_live, target as u64),
                None => Round::new(problem, &decisions, &start, &timeline, &banned, taste)
                    .choose(&start_live, target as u64),
                Some(schedule) => {
                    let timeline = unlimited(problem.graph, schedule, problem.cost);
                    Round::new(problem, &decisions, schedule, &timeline, &banned, taste)
                        .choose(&live(schedule), target as u64)
                }
            };
            let mut next = decisions.clone();
            chosen.iter().for_each(|cut| cut.add_to(&mut next, problem));
            let built = build(problem, &next);
            let reached = built.as_ref().and_then(|s| live(s).into_iter().max());
            match (built, reached) {
                (Some(built), Some(reached)) if reached < lowest && !chosen.is_empty() => {
                    (decisions, schedule, lowest) = (next, Some(built), reached);
                    if reached as f64 <= target {
                        break;
                    }
                }
                _ => {
                    banned.extend(recomputed(&chosen));
                }
            }
        }
        let Some(schedule) = schedule else {
            return drafts;
        };
        draft(problem, &decisions, &schedule, &mut drafts);
        // Where the host updates everything, nothing is left on the device.
        let last = lowest == 0 || target * MISSED < lowest as f64;
        if last || beyond_host(problem, &drafts) || wanted.end(problem, &drafts).is_some() {
            return drafts;
        }
    }
}

/// True if the last draft has more on the host than that may hold: what frees more of the device
/// leaves more there.
pub(super) fn beyond_host(problem: &Problem<'_>, drafts: &[Draft]) -> bool {
    drafts
        .last()
        .is_some_and(|draft| !problem.host_holds(draft.host))
}

/// Bytes alive on the device at each line.
pub(super) fn live(schedule: &Schedule) -> Vec<u64> {
    live_bytes(schedule, &lifetimes(schedule), DEVICE)
}

/// The lines of decisions, unless they are mostly reruns.
fn build(problem: &Problem<'_>, decisions: &Decisions) -> Option<Schedule> {
    let schedule = realise::unnamed(problem, decisions).ok()?;
    let reruns = schedule
        .instrs
        .values()
        .filter(|data| data.why == Why::Recompute)
        .count();
    (reruns <= MOST_RERUNS * problem.lines.len()).then_some(schedule)
}

/// The gaps that cuts compute over.
fn recomputed(cuts: &[Cut]) -> impl Iterator<Item = (Value, u32)> {
    let again = cuts.iter().filter(|cut| cut.means == Means::Recompute);
    again.flat_map(|cut| {
        cut.gaps
            .iter()
            .map(|&(value, gap)| (value, gap.unwrap_or(u32::MAX)))
    })
}

/// Swaps what is dearest to compute again, over its gap between forward and backward, as long as
/// the link has time: `share` of what the step leaves it. False if nothing does.
pub(super) fn swaps(problem: &Problem<'_>, decisions: &mut Decisions, share: f64) -> bool {
    let Ok(schedule) = realise::unnamed(problem, decisions) else {
        return false;
    };
    let timeline = unlimited(problem.graph, &schedule, problem.cost);
    let banned = BTreeSet::new();
    let round = Round::new(
        problem,
        decisions,
        &schedule,
        &timeline,
        &banned,
        Taste::Swap,
    );
    let graph = problem.graph;
    let phase_of = |line: usize| match schedule
        .instrs
        .get(ir::Instr::new(line))
        .map(|data| &data.kind)
    {
        Some(InstrKind::Run { node, .. }) => Some(graph.nodes[*node].phase),
        _ => None,
    };
    let crosses = |idle: &&Idle| {
        let def = graph
            .def_node(idle.value)
            .map(|node| graph.nodes[node].phase);
        def == Some(Phase::Forward) && phase_of(idle.to) == Some(Phase::Backward)
    };
    let mut cascade = Cascade::new(problem);
    let crossing = round.idle.iter().filter(crosses);
    let mut candidates: Vec<Cut> = crossing
        .filter_map(|idle| round.gap_candidate(idle, &mut cascade))
        .collect();
    // Dearest first; what cannot be computed again is the dearest.
    let dear = |cut: &Cut| cut.recompute.unwrap_or(f64::INFINITY) / cut.bytes as f64;
    candidates.sort_by(|a, b| dear(b).total_cmp(&dear(a)).then(a.gaps.cmp(&b.gaps)));
    let busy = |stream| timeline.busy[stream];
    let spare = (SWAP_SPARE[0] * busy(COMPUTE) - SWAP_SPARE[1] * busy(H2D))
        .min(SWAP_OUT_SPARE * busy(COMPUTE) - busy(D2H));
    let mut room = share * spare;
    let mut chosen = vec![];
    for cut in candidates {
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

/// Price per byte; ties go to more bytes, then to the value and gap that come first.
#[derive(Clone, Copy, PartialEq)]
struct Score(f64, u64, Value, Option<u32>);

impl Eq for Score {}
impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Score) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Score {
    fn cmp(&self, other: &Score) -> Ordering {
        let places = (self.2, self.3).cmp(&(other.2, other.3));
        self.0
            .total_cmp(&other.0)
            .then(other.1.cmp(&self.1))
            .then(places)
    }
}

/// A candidate.
#[derive(Clone)]
struct Cut {
    /// The gaps; `None` lets a state live on the host. One, or those of a block.
    gaps: Gaps,
    means: Means,
    /// What it frees.
    frees: Frees,
    /// All bytes, and those that a swap sends over the link.
    bytes: u64,
    sent: u64,
    /// Copies that a swap takes, and the time between the accesses at both ends, µs.
    copies: f64,
    room: f64,
    /// Reckoned prices, µs.
    swap: f64,
    recompute: Option<f64>,
    line: u32,
    /// The states of a block that are to live on the host, and what updates them there.
    group: Option<usize>,
    /// Time that the host's updates take, µs.
    host: f64,
}

impl Cut {
    /// Takes the means that the taste prefers.
    fn choose(&mut self, taste: Taste) {
        self.means = match (taste, self.recompute) {
            (Taste::Recompute, Some(_)) => Means::Recompute,
            (Taste::Cheaper | Taste::Block, Some(price)) if price < self.swap => Means::Recompute,
            _ => Means::Swap,
        };
    }
    fn price(&self) -> f64 {
        if self.means == Means::Recompute {
            self.recompute.unwrap_or(f64::INFINITY)
        } else {
            self.swap
        }
    }
    fn score(&self) -> Score {
        let (value, gap) = self.gaps[0];
        Score(self.price() / self.bytes as f64, self.bytes, value, gap)
    }
    fn add_to(&self, decisions: &mut Decisions, problem: &Problem<'_>) {
        let reason = Reason {
            bytes: self.bytes,
            swap: Some(self.swap),
            recompute: self.recompute,
            line: self.line,
        };
        for &(value, gap) in &self.gaps {
            match (gap, problem.graph.values[value].def) {
                (Some(gap), _) => {
                    decisions
                        .cuts
                        .insert(Gap { value, gap }, (self.means, reason));
                }
                (None, Def::State(state)) => {
                    decisions.hosted.insert(state, reason);
                }
                (None, _) => {}
            }
        }
        if let Some(group) = self.group {
            problem.groups[group].add_to(decisions);
        }
    }
}

/// What a buffer holds: at which offset which value, and since which line nobody has touched it.
/// Chunks hold several.
type Held = SmallVec<[(u64, Value, usize); 1]>;

/// Lines over which the device's memory is freed, and how many bytes.
type Stretch = (usize, usize, u64);

/// Mostly one; a round has thousands.
type Gaps = SmallVec<[(Value, Option<u32>); 1]>;
type Frees = SmallVec<[Stretch; 1]>;

/// A value that lies in a buffer over lines `from..to`, touched at both ends only.
struct Idle {
    value: Value,
    buffer: Buffer,
    from: usize,
    to: usize,
    /// The gap it is in: accesses done so far, less one; `None` before the first.
    gap: Option<u32>,
}

/// What a round knows.
struct Round<'a> {
    problem: &'a Problem<'a>,
    decisions: &'a Decisions,
    schedule: &'a Schedule,
    timeline: &'a Timeline,
    banned: &'a BTreeSet<(Value, u32)>,
    taste: Taste,
    /// When each value is on the device: lines `from..=to`, ascending.
    resident: Table<Value, SmallVec<[(u32, u32); 2]>>,
    /// How many model lines stand before each line.
    position: Vec<u32>,
    /// Buffers that states have at entry.
    home: Table<Buffer, bool>,
    /// Lines that touch each buffer of the device, and whether it holds several values.
    touched: Table<Buffer, SmallVec<[u32; 4]>>,
    shared: Table<Buffer, bool>,
    /// Every idle stretch on the device.
    idle: Vec<Idle>,
}

/// Time that a round's choices so far add to the link, and to what the host computes, µs.
#[derive(Clone, Copy, Default)]
struct Load {
    link: f64,
    host: f64,
}

impl<'a> Round<'a> {
    fn new(
        problem: &'a Problem<'a>,
        decisions: &'a Decisions,
        schedule: &'a Schedule,
        timeline: &'a Timeline,
        banned: &'a BTreeSet<(Value, u32)>,
        taste: Taste,
    ) -> Round<'a> {
        let mut models = 0;
        let mut position = vec![];
        for data in schedule.instrs.values() {
            position.push(models);
            models += u32::from(data.why == Why::Model);
        }
        let resident = Table::filled(problem.graph.values.len(), SmallVec::new());
        let mut home = Table::filled(schedule.buffers.len(), false);
        for (_, loc) in &schedule.entry {
            home[loc.buffer] = true;
        }
        let mut round = Round {
            problem,
            decisions,
            schedule,
            timeline,
            banned,
            taste,
            resident,
            position,
            home,
            touched: Table::filled(schedule.buffers.len(), SmallVec::new()),
            shared: Table::filled(schedule.buffers.len(), false),
            idle: vec![],
        };
        round.idle = round.find_idle();
        round
    }

    /// Cuts that bring every line of `live` to `target`, or as near as can be.
    fn choose(&self, live: &[u64], target: u64) -> Vec<Cut> {
        let idle = &self.idle;
        let above = Above::new(live, target);
        let mut cascade = Cascade::new(self.problem);
        let blocks = if self.taste == Taste::Block {
            self.block_candidates(&above, &mut cascade)
        } else {
            vec![]
        };
        let in_blocks: BTreeSet<_> = blocks
            .iter()
            .flat_map(|cut| cut.gaps.iter().copied())
            .collect();
        let alone = idle
            .iter()
            .filter(|idle| !in_blocks.contains(&(idle.value, idle.gap)));
        let mut candidates: Vec<Cut> = alone
            .filter(|idle| above.any(idle.from + 1, idle.to))
            .filter_map(|idle| self.gap_candidate(idle, &mut cascade))
            .collect();
        candidates.extend(blocks);
        candidates.extend(self.chunk_candidates(&above, &mut cascade));
        candidates.extend(self.state_candidates(&above));
        let mut load = Load::default();
        let mut tree = MaxTree::new(live);
        let mut chosen: Vec<Cut> = vec![];
        // Prices rise as the link fills up: whatever comes to the top of the heap is priced anew,
        // and goes back if it has become dearer.
        let mut heap: BinaryHeap<Reverse<(Score, usize)>> = candidates
            .iter()
            .enumerate()
            .map(|(i, cut)| Reverse((cut.score(), i)))
            .collect();
        while let Some(Reverse((score, i))) = heap.pop() {
            if tree.most() <= target {
                break;
            }
            let cut = &mut candidates[i];
            if cut
                .frees
                .iter()
                .all(|&(from, to, _)| tree.max(from, to) <= target)
            {
                continue;
            }
            cut.swap = self.swap_price(cut, load);
            cut.choose(self.taste);
            if score < cut.score() {
                heap.push(Reverse((cut.score(), i)));
                continue;
            }
            for &(from, to, bytes) in &cut.frees {
                tree.add(from, to, -(bytes as i64));
            }
            if cut.means == Means::Swap {
                // One direction at least; copies in and out go over different streams.
                load.link += self.problem.cost.link(cut.sent);
                load.host += cut.host;
            }
            chosen.push(cut.clone());
        }
        // What the later, larger choices made needless stays after all, dearest first.
        let mut order: Vec<usize> = (0..chosen.len()).collect();
        order.sort_by(|&a, &b| {
            chosen[b]
                .price()
                .total_cmp(&chosen[a].price())
                .then(a.cmp(&b))
        });
        let mut needless = vec![false; chosen.len()];
        for i in order.into_iter().filter(|&i| 0.0 < chosen[i].price()) {
            let frees = &chosen[i].frees;
            frees
                .iter()
                .for_each(|&(from, to, bytes)| tree.add(from, to, bytes as i64));
            needless[i] = frees
                .iter()
                .all(|&(from, to, _)| tree.max(from, to) <= target);
            if !needless[i] {
                frees
                    .iter()
                    .for_each(|&(from, to, bytes)| tree.add(from, to, -(bytes as i64)));
            }
        }
        let mut needless = needless.into_iter();
        chosen.retain(|_| !needless.next().unwrap_or(false));
        chosen
    }

    /// Every idle stretch on the device, and, on the way, when each value is there.
    fn find_idle(&mut self) -> Vec<Idle> {
        let (graph, schedule) = (self.problem.graph, self.schedule);
        let n = schedule.instrs.len();
        // What each buffer holds at which offset, and since which line nobody has touched it.
        let mut holds: Table<Buffer, Held> = Table::filled(schedule.buffers.len(), Held::new());
        let mut idle = vec![];
        for &(value, loc) in &schedule.entry {
            holds[loc.buffer].push((loc.offset, self.problem.root[value], 0));
        }
        let device = |buffer: Buffer| schedule.buffers[buffer].pool == DEVICE;
        let mut touches: Vec<(Loc, Value)> = vec![];
        for (instr, data) in schedule.instrs.iter() {
            let line = instr.index();
            match &data.kind {
                InstrKind::Run {
                    node, args, outs, ..
                } => {
                    let node = &graph.nodes[*node];
                    touches.extend(
                        args.iter()
                            .zip(&node.inputs)
                            .map(|(&loc, &v)| (loc, self.problem.root[v])),
                    );
                    touches.extend(outs.iter().zip(&node.outputs).map(|(&loc, &v)| (loc, v)));
                }
                &InstrKind::Copy { src, dst, bytes } => {
                    for &(offset, value, _) in &holds[src.buffer] {
                        if src.offset <= offset && offset < src.offset + bytes {
                            let to = Loc {
                                buffer: dst.buffer,
                                offset: dst.offset + offset - src.offset,
                            };
                            touches.extend([
                                (
                                    Loc {
                                        buffer: src.buffer,
                                        offset,
                                    },
                                    value,
                                ),
                                (to, value),
                            ]);
                        }
                    }
                }
            }
            for (loc, value) in touches.drain(..) {
                let buffer = loc.buffer;
                let on_device = device(buffer);
                if on_device && self.touched[buffer].last() != Some(&(line as u32)) {
                    self.touched[buffer].push(line as u32);
                }
                let held = holds[buffer].iter_mut().find(|held| held.0 == loc.offset);
                let since = held
                    .as_ref()
                    .filter(|held| held.1 == value)
                    .map(|held| held.2);
                if let Some(since) = since.filter(|_| on_device) {
                    let done = self.accesses_done(value, since, self.home[buffer] && since == 0);
                    if since + 1 < line {
                        idle.push(Idle {
                            value,
                            buffer,
                            from: since,
                            to: line,
                            gap: done.checked_sub(1),
                        });
                    }
                    match self.resident[value].last_mut() {
                        Some(last) if last.1 == since as u32 => last.1 = line as u32,
                        _ => self.resident[value].push((since as u32, line as u32)),
                    }
                } else if on_device {
                    self.resident[value].push((line as u32, line as u32));
                }
                match held {
                    Some(held) => *held = (loc.offset, value, line),
                    None => holds[buffer].push((loc.offset, value, line)),
                }
            }
        }
        for (buffer, held) in holds.iter() {
            self.shared[buffer] = 1 < held.len();
        }
        for &(value, loc) in schedule.entry.iter().filter(|(_, loc)| device(loc.buffer)) {
            if let Some(&(_, held, since)) =
                holds[loc.buffer].iter().find(|held| held.0 == loc.offset)
            {
                idle.push(Idle {
                    value,
                    buffer: loc.buffer,
                    from: since,
                    to: n,
                    gap: Some(u32::MAX),
                });
                self.resident[held].push((since as u32, n as u32));
            }
        }
        idle
    }

    /// How many accesses of `value` lie at or before `line`.
    fn accesses_done(&self, value: Value, line: usize, at_entry: bool) -> u32 {
        let model = self.schedule.instrs[ir::Instr::new(line)].why == Why::Model && !at_entry;
        let position = self.position[line] + u32::from(model);
        self.problem.accesses[value].partition_point(|&at| at < position) as u32
    }

    fn bytes(&self, buffer: Buffer) -> u64 {
        self.schedule.buffers[buffer].bytes
    }

    fn start(&self, line: usize) -> f64 {
        if line < self.timeline.start.len() {
            self.timeline.start[ir::Instr::new(line)]
        } else {
            self.timeline.micros
        }
    }

    /// The price of `copies` copies of `bytes` bytes each within a stretch of `room` µs: nearly
    /// nothing while the link has time to spare and the stretch is long enough, all of it
    /// otherwise.
    fn link_price(&self, bytes: u64, copies: f64, room: f64, load: Load) -> f64 {
        let micros = self.problem.cost.link(bytes);
        let busy = self.timeline.busy[H2D].max(self.timeline.busy[D2H]);
        let idle = LINK_HIDES * self.timeline.busy[COMPUTE] - busy - load.link;
        let hidden = copies * micros <= room && micros <= idle;
        // Even a hidden copy takes link time from others.
        copies * micros * if hidden { HIDDEN_COPY } else { 1.0 }
    }

    /// The gap of an idle stretch, if it is one that may be cut: not of a state at home, and not
    /// cut already.
    fn cuttable(&self, idle: &Idle) -> Option<u32> {
        let gap = idle
            .gap
            .filter(|&gap| gap != u32::MAX && !self.home[idle.buffer])?;

        (!self.decisions.cuts.contains_key(&Gap {
            value: idle.value,
            gap,
        }))
        .then_some(gap)
    }

    /// The candidate of one idle stretch.
    fn gap_candidate(&self, idle: &Idle, cascade: &mut Cascade) -> Option<Cut> {
        let gap = self.cuttable(idle).filter(|_| !self.shared[idle.buffer])?;
        let clean = self.problem.comes_from_host(idle.value, self.decisions);
        self.candidate(&[(idle, gap)], if clean { 1.0 } else { 2.0 }, cascade)
    }

    /// The candidate of several idle stretches together; `copies` is what a swap of one byte takes.
    fn candidate(
        &self,
        members: &[(&Idle, u32)],
        copies: f64,
        cascade: &mut Cascade,
    ) -> Option<Cut> {
        let gaps: Gaps = members
            .iter()
            .map(|&(idle, gap)| (idle.value, Some(gap)))
            .collect();
        let frees: Frees = members
            .iter()
            .map(|(idle, _)| (idle.from + 1, idle.to, self.bytes(idle.buffer)))
            .collect();
        let first = members.iter().map(|(idle, _)| idle.from).min()?;
        let to = members.iter().map(|(idle, _)| idle.to).min()?;
        let bytes = frees.iter().map(|&(.., bytes)| bytes).sum();
        let room = members
            .iter()
            .map(|(idle, _)| self.start(idle.to) - self.start(idle.from))
            .fold(f64::INFINITY, f64::min);
        let banned = members
            .iter()
            .any(|&(idle, gap)| self.banned.contains(&(idle.value, gap)));
        let recompute = if banned {
            None
        } else {
            self.recompute_price(&gaps, to, cascade)
        };
        let line = first as u32 + 1;
        let (means, swap) = (Means::Swap, 0.0);
        let mut cut = Cut {
            gaps,
            means,
            frees,
            bytes,
            sent: bytes,
            copies,
            room,
            swap,
            recompute,
            line,
            group: None,
            host: 0.0,
        };
        cut.swap = self.swap_price(&cut, Load::default());
        cut.choose(self.taste);
        Some(cut)
    }

    /// What a swap adds to the step: its copies and the host's updates, less the device's, as far
    /// as they do not hide.
    fn swap_price(&self, cut: &Cut, load: Load) -> f64 {
        let room = if cut.group.is_some() {
            self.timeline.micros
        } else {
            cut.room
        };
        let link = self.link_price(cut.sent, cut.copies, room, load);
        let Some(group) = cut.group else { return link };
        let busy = self.timeline.busy.get(ON_HOST).copied().unwrap_or(0.0);
        let hidden = busy + load.host + cut.host <= HOST_HIDES * self.timeline.busy[COMPUTE];
        let updates = &self.problem.groups[group].updates;
        let spared: f64 = updates
            .iter()
            .map(|&node| self.problem.cost.run(self.problem.graph, node))
            .sum();
        // From gradient to next use there is time for the gradient's copy, the update and the
        // weights' copy; the more, the better: the last blocks' gradients come first and their
        // weights are wanted last (ProTrain, section 3.1.1).
        let late = (cut.host + 2.0 * self.problem.cost.link(cut.sent) - cut.room).max(0.0);
        let share = if hidden {
            HIDDEN_COPY * (2.0 - cut.room / self.timeline.micros)
        } else {
            1.0
        };
        link + late + cut.host * share - spared
    }

    /// Stretches in which nobody touches a chunk that is on the device: it may leave and come
    /// again.
    fn chunk_candidates(&self, above: &Above, cascade: &mut Cascade) -> Vec<Cut> {
        let mut members: BTreeMap<Buffer, Vec<&Idle>> = BTreeMap::new();
        for idle in self.idle.iter().filter(|idle| self.shared[idle.buffer]) {
            members.entry(idle.buffer).or_default().push(idle);
        }
        let mut cuts = vec![];
        for (buffer, members) in members {
            for pair in self.touched[buffer].windows(2) {
                let (from, to) = (pair[0] as usize, pair[1] as usize);
                if !above.any(from + 1, to) {
                    continue;
                }
                let over = members
                    .iter()
                    .filter(|idle| idle.from <= from && to <= idle.to);
                let Some(over) = over
                    .map(|&idle| Some((idle, self.cuttable(idle)?)))
                    .collect::<Option<Vec<_>>>()
                else {
                    continue;
                };
                let Some(mut cut) = self.candidate(&over, 1.0, cascade) else {
                    continue;
                };
                let bytes = self.bytes(buffer);
                let frees = Frees::from_iter([(from + 1, to, bytes)]);
                cut = Cut {
                    frees,
                    bytes,
                    sent: bytes,
                    line: from as u32 + 1,
                    ..cut
                };
                cut.room = self.start(to) - self.start(from);
                cut.recompute = None;
                cut.swap = self.swap_price(&cut, Load::default());
                cut.choose(self.taste);
                cuts.push(cut);
            }
        }
        cuts
    }

    /// For each block of the model, all that its forward left for its backward, but for what other
    /// blocks' forwards read too: with that, the block can run again.
    fn block_candidates(&self, above: &Above, cascade: &mut Cascade) -> Vec<Cut> {
        let graph = self.problem.graph;
        let mut members: BTreeMap<usize, Vec<(&Idle, u32)>> = BTreeMap::new();
        for idle in &self.idle {
            let (Some(gap), Some(def)) = (self.cuttable(idle), graph.def_node(idle.value)) else {
                continue;
            };
            let (Some(block), Phase::Forward) =
                (self.problem.block_of[def], graph.nodes[def].phase)
            else {
                continue;
            };
            let wanted_by = self
                .schedule
                .instrs
                .get(ir::Instr::new(idle.to))
                .map(|data| &data.kind);
            let for_backward = matches!(wanted_by, Some(InstrKind::Run { node, .. })
                if graph.nodes[*node].phase == Phase::Backward);
            let at_border = self.problem.uses[idle.value].iter().any(|&at| {
                let user = self.problem.lines[at as usize];
                graph.nodes[user].phase == Phase::Forward
                    && self.problem.block_of[user] != Some(block)
            });
            if for_backward && !at_border {
                members.entry(block).or_default().push((idle, gap));
            }
        }
        let covers = |members: &Vec<(&Idle, u32)>| {
            members
                .iter()
                .any(|(idle, _)| above.any(idle.from + 1, idle.to))
        };
        members
            .into_values()
            .filter(covers)
            .filter_map(|members| self.candidate(&members, 2.0, cascade))
            .collect()
    }

    /// What it takes to compute the gaps' values again before `line`, with whatever is not there;
    /// `None` if it cannot be.
    fn recompute_price(&self, gaps: &Gaps, line: usize, cascade: &mut Cascade) -> Option<f64> {
        let graph = self.problem.graph;
        let position = self.position.get(line).copied().unwrap_or(u32::MAX);
        cascade.begin(gaps.iter().map(|gap| gap.0));
        let longest = LONGEST_CASCADE + gaps.len();
        let mut price = 0.0;
        while let Some(value) = cascade.stack.pop() {
            let Def::Node(node, _) = graph.values[value].def else {
                price += self.problem.cost.link(graph.values[value].ty.bytes());
                continue;
            };
            let data = &graph.nodes[node];
            if !data.op.is_pure() || data.phase != Phase::Forward || longest < cascade.n_wanted {
                return None;
            }
            if cascade.run(node) {
                price += self.problem.cost.run(graph, node);
            }
            for &input in &data.inputs {
                let root = self.problem.root[input];
                if let Def::State(state) = graph.values[root].def {
                    let update = graph.def_node(self.problem.root[graph.states[state].after]);
                    let updated = update.and_then(|node| self.problem.position[node]);
                    if updated.is_some_and(|updated| updated < position) {
                        return None;
                    }
                }
                if !self.is_resident(root, line) && cascade.want(root) {
                    cascade.stack.push(root);
                }
            }
        }
        Some(price)
    }

    fn is_resident(&self, value: Value, line: usize) -> bool {
        let (spans, line) = (&self.resident[value], line as u32);
        let k = spans.partition_point(|span| span.0 <= line);
        0 < k && line <= spans[k - 1].1
    }

    /// States that might live on the host: they come before their first use, stay to their last and
    /// go home if changed.
    fn state_candidates(&self, above: &Above) -> Vec<Cut> {
        let graph = self.problem.graph;
        let mut at_home: Table<Buffer, SmallVec<[(usize, usize); 2]>> =
            Table::filled(self.schedule.buffers.len(), SmallVec::new());
        for idle in &self.idle {
            // Before the first use and after the last; the stretches between uses are gaps of their
            // own once it is hosted.
            if idle.gap.is_none() || idle.gap == Some(u32::MAX) {
                at_home[idle.buffer].push((idle.from + usize::from(idle.gap.is_some()), idle.to));
            }
        }
        let mut cuts = vec![];
        // Entries are the states, in order, then the inputs.
        // Where each state that is at home lies, and when it is idle there.
        let mut stays: Vec<Option<(Buffer, Frees)>> = vec![];
        for (i, (state, (_, loc))) in graph.states.iter().zip(&self.schedule.entry).enumerate() {
            if self.decisions.hosted.contains_key(&i) {
                stays.push(None);
                continue;
            }
            let bytes = self.bytes(loc.buffer);
            let stretches = &at_home[loc.buffer];
            let frees: Frees = stretches
                .iter()
                .map(|&(from, to)| (from, to, bytes))
                .collect();
            stays.push(Some((loc.buffer, frees.clone())));
            if stretches.iter().all(|&(from, to)| !above.any(from, to)) {
                continue;
            }
            let copies = if self.problem.root[state.after] == state.before {
                1.0
            } else {
                2.0
            };
            let line = stretches.first().map_or(0, |s| s.0 as u32);
            cuts.push(self.host_candidate(
                Gaps::from_iter([(state.before, None)]),
                frees,
                (bytes, bytes),
                copies,
                line,
                None,
            ));
        }
        let n = self.schedule.instrs.len();
        for (k, group) in self.problem.groups.iter().enumerate() {
            let (mut gaps, mut frees) = (Gaps::new(), Frees::new());
            let (mut bytes, mut sent) = (0, 0);
            let mut at_home = true;
            let (mut first, mut last) = (n, 0);
            for (&state, is_param) in group
                .params
                .iter()
                .map(|s| (s, true))
                .chain(group.moments.iter().map(|s| (s, false)))
            {
                let Some((buffer, stretches)) = &stays[state] else {
                    at_home = false;
                    break;
                };
                gaps.push((graph.states[state].before, None));
                bytes += self.bytes(*buffer);
                if is_param {
                    sent += self.bytes(*buffer);
                    frees.extend(stretches.iter().copied());
                    first = first.min(
                        self.touched[*buffer]
                            .first()
                            .map_or(0, |&line| line as usize),
                    );
                    last = last.max(
                        self.touched[*buffer]
                            .last()
                            .map_or(0, |&line| line as usize),
                    );
                } else {
                    frees.push((0, n, self.bytes(*buffer)));
                }
            }
            if at_home && frees.iter().any(|&(from, to, _)| above.any(from, to)) {
                let mut cut = self.host_candidate(gaps, frees, (bytes, sent), 1.0, 0, Some(k));
                cut.room = self.start(first) + self.timeline.micros - self.start(last);
                cut.swap = self.swap_price(&cut, Load::default());
                cuts.push(cut);
            }
        }
        cuts
    }

    /// The candidate of states that would live on the host: of (all bytes, bytes sent each way).
    fn host_candidate(
        &self,
        gaps: Gaps,
        frees: Frees,
        (bytes, sent): (u64, u64),
        copies: f64,
        line: u32,
        group: Option<usize>,
    ) -> Cut {
        let updates = group.map_or(&[][..], |group| &self.problem.groups[group].updates);
        let host = updates
            .iter()
            .map(|&node| self.problem.cost.host(self.problem.graph, node))
            .sum();
        let (means, room, swap) = (Means::Swap, self.timeline.micros, 0.0);
        let mut cut = Cut {
            gaps,
            means,
            frees,
            bytes,
            sent,
            copies,
            room,
            swap,
            recompute: None,
            line,
            group,
            host,
        };
        cut.swap = self.swap_price(&cut, Load::default());
        cut
    }
}

/// The values and nodes of a cascade, kept to be reused: marked with its number.
struct Cascade {
    number: u32,
    wanted: Table<Value, u32>,
    runs: Table<Node, u32>,
    n_wanted: usize,
    stack: Vec<Value>,
}

impl Cascade {
    fn new(problem: &Problem<'_>) -> Cascade {
        let wanted = Table::filled(problem.graph.values.len(), 0);
        let runs = Table::filled(problem.graph.nodes.len(), 0);
        Cascade {
            number: 0,
            wanted,
            runs,
            n_wanted: 0,
            stack: vec![],
        }
    }
    /// Another cascade, for these values.
    fn begin(&mut self, values: impl Iterator<Item = Value>) {
        self.number += 1;
        self.n_wanted = 0;
        self.stack.clear();
        for value in values {
            self.want(value);
            self.stack.push(value);
        }
    }
    /// Notes that a value has to be computed; false if that is known.
    fn want(&mut self, value: Value) -> bool {
        let new = std::mem::replace(&mut self.wanted[value], self.number) != self.number;
        self.n_wanted += usize::from(new);
        new
    }
    /// Notes that a node runs; false if that is known.
    fn run(&mut self, node: Node) -> bool {
        std::mem::replace(&mut self.runs[node], self.number) != self.number
    }
}

/// Which lines are above the target.
struct Above(Vec<u32>);

impl Above {
    fn new(live: &[u64], target: u64) -> Above {
        let mut count = 0;
        let counts = live.iter().map(|&bytes| {
            count += u32::from(target < bytes);
            count
        });
        Above(
            std::iter::once(0)
                .chain(counts.collect::<Vec<_>>())
                .collect(),
        )
    }
    /// True if one of lines `from..to` is.
    fn any(&self, from: usize, to: usize) -> bool {
        let last = self.0.len() - 1;
        from < to && self.0[from.min(last)] < self.0[to.min(last)]
    }
}

/// Range add, range maximum over lines.
struct MaxTree {
    leaves: usize,
    max: Vec<i64>,
    add: Vec<i64>,
}

impl MaxTree {
    fn new(values: &[u64]) -> MaxTree {
        let leaves = values.len().next_power_of_two().max(1);
        let mut max = vec![0; 2 * leaves];
        for (i, &value) in values.iter().enumerate() {
            max[leaves + i] = value as i64;
        }
        for node in (1..leaves).rev() {
            max[node] = max[2 * node].max(max[2 * node + 1]);
        }
        MaxTree {
            leaves,
            max,
            add: vec![0; 2 * leaves],
        }
    }
    fn add(&mut self, from: usize, to: usize, amount: i64) {
        self.add_at(1, 0, self.leaves, from, to, amount);
    }
    fn add_at(&mut self, node: usize, lo: usize, hi: usize, from: usize, to: usize, amount: i64) {
        if to <= lo || hi <= from {
            return;
        }
        if from <= lo && hi <= to {
            self.max[node] += amount;
            self.add[node] += amount;
            return;
        }
        let mid = (lo + hi) / 2;
        self.add_at(2 * node, lo, mid, from, to, amount);
        self.add_at(2 * node + 1, mid, hi, from, to, amount);
        self.max[node] = self.add[node] + self.max[2 * node].max(self.max[2 * node + 1]);
    }
    /// The maximum over all lines. Those beyond the last are 0.
    fn most(&self) -> u64 {
        self.max[1].max(0) as u64
    }
    fn max(&self, from: usize, to: usize) -> u64 {
        self.max_at(1, 0, self.leaves, from, to).unwrap_or(0).max(0) as u64
    }
    fn max_at(&self, node: usize, lo: usize, hi: usize, from: usize, to: usize) -> Option<i64> {
        if to <= lo || hi <= from {
            return None;
        }
        if from <= lo && hi <= to {
            return Some(self.max[node]);
        }
        let mid = (lo + hi) / 2;
        let left = self.max_at(2 * node, lo, mid, from, to);
        let right = self.max_at(2 * node + 1, mid, hi, from, to);
        left.max(right).map(|max| max + self.add[node])
    }
}
