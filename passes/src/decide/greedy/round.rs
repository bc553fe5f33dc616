//! One round: all candidates, and the choice of the cheapest that lower the live peak to a target.

use super::cascade::Cascade;
use super::cut::{Cut, Frees, Gaps, Score, Taste};
use super::prices::{Load, Prices};
use crate::decide::occupancy::{Idle, Occupancy};
use crate::lines::{Above, MaxTree};
use crate::plan::{Decisions, Gap, Group, Means, Problem};
use crate::sim::Timeline;
use ir::schedule::{Buffer, InstrKind, Schedule};
use ir::{Id, Instr, Phase, State, Table, Value};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// The data of a round.
pub(super) struct Round<'a> {
    pub(super) problem: &'a Problem<'a>,
    pub(super) decisions: &'a Decisions,
    schedule: &'a Schedule,
    /// Recomputes that are not tried again.
    banned: &'a BTreeSet<(Value, u32)>,
    taste: Taste,
    pub(super) occupancy: Occupancy,
    pub(super) prices: Prices<'a>,
}

/// A state that is on the device at entry: its buffer, and when it is idle there.
pub(super) struct Home {
    pub(super) buffer: Buffer,
    pub(super) frees: Frees,
}

impl<'a> Round<'a> {
    /// `schedule` has the lines of `decisions`, and `timeline` their times.
    pub(super) fn new(
        problem: &'a Problem<'a>,
        decisions: &'a Decisions,
        schedule: &'a Schedule,
        timeline: &'a Timeline,
        banned: &'a BTreeSet<(Value, u32)>,
        taste: Taste,
    ) -> Round<'a> {
        Round {
            problem,
            decisions,
            schedule,
            banned,
            taste,
            occupancy: Occupancy::new(problem, schedule),
            prices: Prices { problem, timeline },
        }
    }

    /// Cuts that lower every line of `live` to `target`, or as near to it as possible. Both are in
    /// bytes.
    pub(super) fn choose(&self, live: &[u64], target: u64) -> Vec<Cut> {
        let above = Above::new(live, target);
        let homes = self.homes();
        let mut tree = MaxTree::new(live);
        let mut chosen = self.cheapest(self.candidates(&homes, &above), &mut tree, target);
        if target < tree.most() {
            let last = self.last_resorts(&homes, &above);
            chosen.extend(self.cheapest(last, &mut tree, target));
        }
        drop_needless(&mut chosen, &mut tree, target);
        chosen
    }

    /// Takes candidates in order of price per byte, as long as lines are above the target.
    fn cheapest(&self, mut candidates: Vec<Cut>, tree: &mut MaxTree, target: u64) -> Vec<Cut> {
        let mut load = Load::default();
        let mut chosen: Vec<Cut> = vec![];
        // Prices rise as the link fills up. So the candidate on top of the heap is priced again,
        // and goes back if its price has risen.
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
            if tree.is_within(&cut.frees, target) {
                continue;
            }
            cut.swap = self.prices.swap(cut, load);
            cut.choose(self.taste);
            if cut.score() > score {
                heap.push(Reverse((cut.score(), i)));
                continue;
            }
            tree.free(&cut.frees);
            if cut.means == Means::Swap {
                // The time of one direction: copies in and out run on different streams.
                load.link += self.problem.cost.link(cut.sent);
                load.host += cut.host;
            }
            chosen.push(cut.clone());
        }
        chosen
    }

    /// Everything that frees a line above the target.
    fn candidates(&self, homes: &Table<State, Option<Home>>, above: &Above) -> Vec<Cut> {
        let mut cascade = Cascade::new(self.problem);
        let blocks = if self.taste == Taste::Block {
            self.blocks(above, &mut cascade)
        } else {
            vec![]
        };
        let in_blocks: BTreeSet<_> = blocks
            .iter()
            .flat_map(|cut| cut.gaps.iter().copied())
            .collect();
        let idle = self.occupancy.idle.iter();
        let mut candidates: Vec<Cut> = idle
            .filter(|idle| !in_blocks.contains(&(idle.value, idle.gap)))
            .filter(|idle| above.any(idle.from + 1, idle.to))
            .filter_map(|idle| self.gap(idle, &mut cascade))
            .collect();
        candidates.extend(blocks);
        candidates.extend(self.chunks(above, &mut cascade));
        candidates.extend(self.states(homes, above));
        candidates.extend(self.groups(homes, above));
        candidates
    }

    /// The candidate of one idle stretch.
    pub(super) fn gap(&self, idle: &Idle, cascade: &mut Cascade) -> Option<Cut> {
        let alone = !self.occupancy.shared[idle.buffer];
        let gap = self.cuttable(idle).filter(|_| alone)?;
        let clean = self.problem.comes_from_host(idle.value, self.decisions);
        self.together(&[(idle, gap)], if clean { 1.0 } else { 2.0 }, cascade)
    }

    /// The gap of an idle stretch; `None` if it belongs to a state at home, or is cut already.
    fn cuttable(&self, idle: &Idle) -> Option<u32> {
        let gap = idle.gap.filter(|&gap| gap != u32::MAX)?;
        let value = idle.value;
        let is_cut = self.decisions.cuts.contains_key(&Gap { value, gap });
        (!is_cut && !self.occupancy.home[idle.buffer]).then_some(gap)
    }

    /// The candidate of several idle stretches together; a swap takes `copies` copies of each byte.
    fn together(
        &self,
        members: &[(&Idle, u32)],
        copies: f64,
        cascade: &mut Cascade,
    ) -> Option<Cut> {
        let stretches = || members.iter().map(|&(idle, _)| idle);
        let gaps: Gaps = members
            .iter()
            .map(|&(idle, gap)| (idle.value, Some(gap)))
            .collect();
        let frees: Frees = stretches()
            .map(|idle| (idle.from + 1, idle.to, self.bytes(idle.buffer)))
            .collect();
        let first = stretches().map(|idle| idle.from).min()?;
        let to = stretches().map(|idle| idle.to).min()?;
        let room = stretches()
            .map(|idle| self.prices.start(idle.to) - self.prices.start(idle.from))
            .fold(f64::INFINITY, f64::min);
        let banned = members
            .iter()
            .any(|&(idle, gap)| self.banned.contains(&(idle.value, gap)));
        let recompute = match banned {
            true => None,
            false => cascade.price(self.problem, &self.occupancy, &gaps, to),
        };
        let bytes = frees.iter().map(|&(.., bytes)| bytes).sum();
        let mut cut = Cut {
            copies,
            room,
            recompute,
            line: first as u32 + 1,
            ..Cut::new(gaps, frees, bytes)
        };
        cut.swap = self.prices.swap(&cut, Load::default());
        cut.choose(self.taste);
        Some(cut)
    }

    /// Stretches in which no line touches a chunk that is on the device: the chunk may leave and
    /// come back.
    fn chunks(&self, above: &Above, cascade: &mut Cascade) -> Vec<Cut> {
        let occupancy = &self.occupancy;
        let mut members: BTreeMap<Buffer, Vec<&Idle>> = BTreeMap::new();
        for idle in occupancy.idle.iter() {
            if occupancy.shared[idle.buffer] {
                members.entry(idle.buffer).or_default().push(idle);
            }
        }
        let mut cuts = vec![];
        for (buffer, members) in members {
            for pair in occupancy.touched[buffer].windows(2) {
                let (from, to) = (pair[0] as usize, pair[1] as usize);
                if above.any(from + 1, to) {
                    let over = members
                        .iter()
                        .filter(|idle| idle.from <= from && to <= idle.to);
                    let over: Option<Vec<_>> = over
                        .map(|&idle| Some((idle, self.cuttable(idle)?)))
                        .collect();
                    cuts.extend(
                        over.and_then(|over| self.chunk(buffer, (from, to), &over, cascade)),
                    );
                }
            }
        }
        cuts
    }

    /// The candidate of a chunk that no line touches between two lines; `members` are the values in
    /// it.
    fn chunk(
        &self,
        buffer: Buffer,
        (from, to): (usize, usize),
        members: &[(&Idle, u32)],
        cascade: &mut Cascade,
    ) -> Option<Cut> {
        let bytes = self.bytes(buffer);
        let mut cut = Cut {
            frees: Frees::from_iter([(from + 1, to, bytes)]),
            bytes,
            sent: bytes,
            room: self.prices.start(to) - self.prices.start(from),
            recompute: None,
            line: from as u32 + 1,
            ..self.together(members, 1.0, cascade)?
        };
        cut.swap = self.prices.swap(&cut, Load::default());
        cut.choose(self.taste);
        Some(cut)
    }

    /// For each block of the model, everything that its forward left for its backward, except
    /// values that the forwards of other blocks also read. The block can be computed again from
    /// these values.
    fn blocks(&self, above: &Above, cascade: &mut Cascade) -> Vec<Cut> {
        let mut members: BTreeMap<usize, Vec<(&Idle, u32)>> = BTreeMap::new();
        for idle in &self.occupancy.idle {
            if let (Some(gap), Some(block)) = (self.cuttable(idle), self.inside_block(idle)) {
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
            .filter_map(|members| self.together(&members, 2.0, cascade))
            .collect()
    }

    /// The block whose forward computed an idle value for the backward, if no other block's forward
    /// reads it.
    fn inside_block(&self, idle: &Idle) -> Option<usize> {
        let problem = self.problem;
        let phase = |node: ir::Node| problem.graph.nodes[node].phase;
        let def = problem.graph.def_node(idle.value)?;
        let block = problem.block_of[def].filter(|_| phase(def) == Phase::Forward)?;
        let at_border = problem.uses[idle.value].iter().any(|&at| {
            let user = problem.lines[at as usize];
            phase(user) == Phase::Forward && problem.block_of[user] != Some(block)
        });
        let for_backward = self.phase(idle.to) == Some(Phase::Backward);
        (for_backward && !at_border).then_some(block)
    }

    /// The phase of the node that a line runs; `None` for copies and for the line after the last.
    pub(super) fn phase(&self, line: usize) -> Option<Phase> {
        let data = self.schedule.instrs.get(Instr::new(line))?;
        match data.kind {
            InstrKind::Run { node, .. } => Some(self.problem.graph.nodes[node].phase),
            InstrKind::Copy { .. } => None,
        }
    }

    /// For each state that is not hosted, its place, and when it is idle there: before its first
    /// use and after its last. Once it is hosted, the stretches between its uses become gaps.
    fn homes(&self) -> Table<State, Option<Home>> {
        if self.problem.parts.is_some() {
            return self.problem.graph.states.ids().map(|_| None).collect();
        }
        let mut at_home: Table<Buffer, Frees> =
            Table::filled(self.schedule.buffers.len(), SmallVec::new());
        for idle in &self.occupancy.idle {
            if idle.gap.is_none() || idle.gap == Some(u32::MAX) {
                let from = idle.from + usize::from(idle.gap.is_some());
                at_home[idle.buffer].push((from, idle.to, self.bytes(idle.buffer)));
            }
        }
        // Entries are the states, in order, then the inputs.
        let states = self.problem.graph.states.ids();
        states
            .zip(&self.schedule.entry)
            .map(|(state, &(_, loc))| {
                let hosted = self.decisions.hosted.contains_key(&state);
                (!hosted).then(|| Home {
                    buffer: loc.buffer,
                    frees: at_home[loc.buffer].clone(),
                })
            })
            .collect()
    }

    /// States that might live on the host, one by one: each comes before its first use, stays until
    /// its last, and is copied back if it changed.
    fn states(&self, homes: &Table<State, Option<Home>>, above: &Above) -> Vec<Cut> {
        let mut cuts = vec![];
        for (state, home) in self.problem.graph.states.values().zip(homes.values()) {
            let Some(Home { buffer, frees }) = home else {
                continue;
            };
            if !frees_above(frees, above) {
                continue;
            }
            let changes = self.problem.root[state.after] != state.before;
            let gaps = Gaps::from_iter([(state.before, None)]);
            let mut cut = Cut {
                copies: if changes { 2.0 } else { 1.0 },
                room: self.prices.timeline.micros,
                line: frees[0].0 as u32,
                ..Cut::new(gaps, frees.clone(), self.bytes(*buffer))
            };
            cut.swap = self.prices.swap(&cut, Load::default());
            cuts.push(cut);
        }
        cuts
    }

    /// Groups of states that might live on the host and be updated there, if all are at home.
    fn groups(&self, homes: &Table<State, Option<Home>>, above: &Above) -> Vec<Cut> {
        let groups = self.problem.groups.iter();
        let is_home = |&state: &State| homes[state].is_some();
        groups
            .filter(|(_, group)| group.params.iter().chain(&group.moments).all(is_home))
            .filter_map(|(id, _)| self.group(id, homes, above))
            .collect()
    }

    /// The candidate of a group. Its parameters are copied in for their uses; its moments never
    /// are.
    pub(super) fn group(
        &self,
        id: Group,
        homes: &Table<State, Option<Home>>,
        above: &Above,
    ) -> Option<Cut> {
        let group = &self.problem.groups[id];
        let n = self.schedule.instrs.len();
        let (mut gaps, mut frees) = (Gaps::new(), Frees::new());
        let (mut bytes, mut sent) = (0, 0);
        let (mut first, mut last) = (n, 0);
        let gap = |state: State| (self.problem.graph.states[state].before, None);
        for &state in &group.params {
            let Some(home) = &homes[state] else { continue };
            gaps.push(gap(state));
            bytes += self.bytes(home.buffer);
            sent += self.bytes(home.buffer);
            frees.extend(home.frees.iter().copied());
            let touched = &self.occupancy.touched[home.buffer];
            first = first.min(touched.first().map_or(0, |&line| line as usize));
            last = last.max(touched.last().map_or(0, |&line| line as usize));
        }
        for &state in &group.moments {
            let Some(home) = &homes[state] else {
                // It comes for the update.
                let value = self.problem.graph.states[state].before;
                let place = self
                    .problem
                    .place_bytes(self.problem.graph.values[value].ty.bytes());
                let resident = self.occupancy.resident(value).iter();
                frees.extend(resident.map(|&(from, to)| (from as usize, to as usize + 1, place)));
                gaps.push(gap(state));
                bytes += place;
                continue;
            };
            gaps.push(gap(state));
            bytes += self.bytes(home.buffer);
            frees.push((0, n, self.bytes(home.buffer)));
        }
        if !frees_above(&frees, above) {
            return None;
        }
        let step = self.prices.timeline.micros;
        let mut cut = Cut {
            sent,
            room: self.prices.start(first) + step - self.prices.start(last),
            group: Some(id),
            host: self.prices.host(id),
            ..Cut::new(gaps, frees, bytes)
        };
        cut.swap = self.prices.swap(&cut, Load::default());
        Some(cut)
    }

    pub(super) fn bytes(&self, buffer: Buffer) -> u64 {
        self.schedule.buffers[buffer].bytes
    }
}

/// True if one of the stretches has a line above the target.
pub(super) fn frees_above(frees: &Frees, above: &Above) -> bool {
    frees.iter().any(|&(from, to, _)| above.any(from, to))
}

/// Undoes cuts that later, larger cuts made unnecessary, highest price first.
fn drop_needless(chosen: &mut Vec<Cut>, tree: &mut MaxTree, target: u64) {
    let mut order: Vec<usize> = (0..chosen.len()).collect();
    order.sort_by(|&a, &b| {
        let by_price = chosen[b].price().total_cmp(&chosen[a].price());
        by_price.then(a.cmp(&b))
    });
    let mut needless = vec![false; chosen.len()];
    for i in order.into_iter().filter(|&i| chosen[i].price() > 0.0) {
        let frees = &chosen[i].frees;
        tree.restore(frees);
        needless[i] = tree.is_within(frees, target);
        if !needless[i] {
            tree.free(frees);
        }
    }
    let mut needless = needless.into_iter();
    chosen.retain(|_| !needless.next().unwrap_or(false));
}
