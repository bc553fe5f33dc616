//! What to keep, swap and recompute, as plain data. A planner is a function from a [`Problem`] to
//! [`Decisions`]; [`apply`](crate::schedule::apply) is the only one that acts on them.

pub mod blocks;
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

use crate::cost::Cost;
use crate::pipeline::{Budget, Error};
use crate::realise;
use crate::schedule::apply::{DEVICE, HOST};
use crate::schedule::order::users;
use blocks::Block;
use choose::{Aim, Asked, Limits};
use ir::graph::Def;
use ir::schedule::buffer_bytes;
use ir::{Device, Graph, Node, Table, Value};
use rayon::prelude::*;
use record::{Draft, Record, Wanted};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// What a planner sees.
pub struct Problem<'a> {
    /// The graph; its order is final.
    pub graph: &'a Graph,
    /// The machine.
    pub device: &'a Device,
    /// Times.
    pub cost: &'a dyn Cost,
    /// The nodes that become lines: the graph's order without reshapes.
    pub lines: Vec<Node>,
    /// Where in `lines` each node stands.
    pub position: Table<Node, Option<u32>>,
    /// [`Graph::root`] of each value.
    pub root: Table<Value, Value>,
    /// The states whose new value each value is; filled for roots.
    pub renews: Table<Value, Vec<usize>>,
    /// The positions in `lines` that read each value, ascending; filled for roots.
    pub uses: Table<Value, Vec<u32>>,
    /// The positions in `lines` that access each value, ascending: its definition, if a line
    /// defines it, then its uses.
    pub accesses: Table<Value, Vec<u32>>,
    /// Roots that the step must leave: states' new values and outputs.
    pub leaves: Table<Value, bool>,
    /// The parts of the model.
    pub blocks: Vec<Block>,
    /// The repeated block that each node is in.
    pub block_of: Table<Node, Option<usize>>,
    /// States that may live on the host and be updated there, together.
    pub groups: Vec<Group>,
    /// Bytes that each node's kernel may use while it runs.
    pub scratch: Table<Node, u64>,
    /// Bytes that the host's pool may hold.
    pub host_limit: Option<u64>,
}

/// A copy of so many times the link's latency loses 3 % to it.
const LATENCIES: f64 = 32.0;

/// The states of one block of the model, and the nodes that update them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Group {
    /// Parameters, in the order in which the step first uses them; positions in the graph's states.
    pub params: Vec<usize>,
    /// The same, as they come and go together: each long enough for the link.
    pub chunks: Vec<Vec<usize>>,
    /// What else their updates change: moments.
    pub moments: Vec<usize>,
    /// The updates.
    pub updates: Vec<Node>,
}

impl Group {
    /// Lets the states, which live on the host, come in chunks and be updated there.
    fn add_to(&self, decisions: &mut Decisions) {
        decisions
            .chunks
            .extend(self.chunks.iter().filter(|chunk| 1 < chunk.len()).cloned());
        decisions.on_host.extend(&self.updates);
    }
}

impl<'a> Problem<'a> {
    /// The problem of a graph on a machine.
    pub fn new(graph: &'a Graph, device: &'a Device, cost: &'a dyn Cost) -> Problem<'a> {
        let lines: Vec<Node> = graph
            .order
            .iter()
            .copied()
            .filter(|&n| !graph.nodes[n].op.is_alias())
            .collect();
        let mut position = Table::filled(graph.nodes.len(), None);
        for (i, &node) in lines.iter().enumerate() {
            position[node] = Some(i as u32);
        }
        let at = |node: Node| position[node].expect("a reader should be a line");
        let uses: Table<Value, Vec<u32>> = users(graph, &graph.order)
            .values()
            .map(|nodes| nodes.iter().map(|&n| at(n)).collect())
            .collect();
        let accesses = |(value, uses): (Value, &Vec<u32>)| {
            let def = graph.def_node(value).and_then(|node| position[node]);
            def.into_iter().chain(uses.iter().copied()).collect()
        };
        let accesses = uses.iter().map(accesses).collect();
        let root: Table<Value, Value> = graph.values.ids().map(|value| graph.root(value)).collect();
        let mut leaves = Table::filled(graph.values.len(), false);
        for value in graph.left() {
            leaves[root[value]] = true;
        }
        let mut renews = Table::filled(graph.values.len(), vec![]);
        for (i, state) in graph.states.iter().enumerate() {
            renews[root[state.after]].push(i);
        }
        let scratch = |data: &ir::graph::NodeData| {
            let inputs: Vec<_> = data.inputs.iter().map(|&v| &graph.values[v].ty).collect();
            let outputs: Vec<_> = data
                .outputs
                .iter()
                .map(|&v| graph.values[v].ty.clone())
                .collect();
            data.op.work(&inputs, &outputs).scratch
        };
        let scratch = graph.nodes.values().map(scratch).collect();
        let blocks = blocks::find(graph);
        let mut block_of = Table::filled(graph.nodes.len(), None);
        for (i, block) in blocks
            .iter()
            .enumerate()
            .filter(|(_, block)| block.repeated)
        {
            block
                .forward
                .iter()
                .chain(&block.backward)
                .for_each(|&node| block_of[node] = Some(i));
        }
        let (groups, host_limit) = (vec![], None);
        let mut problem = Problem {
            graph,
            device,
            cost,
            lines,
            position,
            root,
            renews,
            uses,
            accesses,
            leaves,
            blocks,
            block_of,
            groups,
            scratch,
            host_limit,
        };
        problem.groups = problem.groups();
        problem
    }

    /// Parameters that one optimizer node updates, with all that it updates: those of a block
    /// together, others alone.
    fn groups(&self) -> Vec<Group> {
        let graph = self.graph;
        let mut by_node: BTreeMap<Node, Vec<usize>> = BTreeMap::new();
        for (i, state) in graph.states.iter().enumerate() {
            if let Some(node) = graph.def_node(graph.root(state.after)) {
                by_node.entry(node).or_default().push(i);
            }
        }
        let mut groups: BTreeMap<(u32, Option<usize>), Group> = BTreeMap::new();
        let mut firsts: BTreeMap<usize, u32> = BTreeMap::new();
        let mut updates: Vec<(u32, Node, Vec<usize>)> = vec![];
        for (node, states) in by_node {
            let is_param = |&i: &usize| graph.states[i].kind == ir::StateKind::Param;
            let first = states
                .iter()
                .filter(|i| is_param(i))
                .filter_map(|&i| self.uses[graph.states[i].before].first())
                .min();
            let (Some(&first), ir::Phase::Optimizer) = (first, graph.nodes[node].phase) else {
                continue;
            };
            updates.push((first, node, states));
        }
        updates.sort_unstable();
        for (first, node, states) in updates {
            let block = self.block_of[self.lines[first as usize]];
            let first = block.map_or(first, |block| *firsts.entry(block).or_insert(first));
            let group = groups.entry((first, block)).or_default();
            group.updates.push(node);
            for state in states {
                let param = graph.states[state].kind == ir::StateKind::Param;
                if param {
                    &mut group.params
                } else {
                    &mut group.moments
                }
                .push(state);
            }
        }
        let mut groups: Vec<Group> = groups.into_values().collect();
        groups
            .iter_mut()
            .for_each(|group| group.chunks = self.chunks(&group.params));
        groups
    }

    /// How many groups a share of them is.
    fn n_hosted(&self, share: f64) -> usize {
        (self.groups.len() as f64 * share).round() as usize
    }

    /// Decisions that let the states of a share of the groups live on the host, those of the last
    /// blocks: their gradients come first, and their parameters are wanted last (ProTrain, section
    /// 3.1.1).
    pub fn hosted(&self, share: f64) -> Decisions {
        let mut decisions = Decisions::default();
        for group in self.groups.iter().rev().take(self.n_hosted(share)) {
            for &state in group.params.iter().chain(&group.moments) {
                decisions.hosted.insert(state, self.hosted_reason(state));
            }
            group.add_to(&mut decisions);
        }
        decisions
    }

    /// Why a state lives on the host where that was not weighed against anything.
    fn hosted_reason(&self, state: usize) -> Reason {
        let bytes = self.graph.values[self.graph.states[state].before]
            .ty
            .bytes();
        Reason {
            bytes,
            swap: Some(self.cost.link(bytes)),
            recompute: None,
            line: 0,
        }
    }

    /// Lets hosted parameters leave the device between forward and backward.
    pub fn stream_hosted(&self, decisions: &mut Decisions) {
        for (&state, &reason) in &decisions.hosted {
            let value = self.graph.states[state].before;
            if let Some(gap) = self.between_phases(value) {
                decisions
                    .cuts
                    .insert(Gap { value, gap }, (Means::Swap, reason));
            }
        }
    }

    /// The gap of a state between its last use in forward and the next, if there are both.
    pub fn between_phases(&self, before: Value) -> Option<u32> {
        let forward =
            |&at: &u32| self.graph.nodes[self.lines[at as usize]].phase == ir::Phase::Forward;
        let uses = &self.uses[before];
        let n_forward = uses.iter().take_while(|at| forward(at)).count();
        (0 < n_forward && n_forward < uses.len()).then(|| n_forward as u32 - 1)
    }

    /// Parameters in copies that are long enough for the link's latency to be small beside them,
    /// and no longer: what comes in pieces needs less room. Neighbours are used one after the
    /// other.
    fn chunks(&self, params: &[usize]) -> Vec<Vec<usize>> {
        let worth = LATENCIES * self.device.link_micros * 1e-6 * self.device.link_bandwidth;
        let mut chunks: Vec<(f64, Vec<usize>)> = vec![];
        for &state in params {
            let bytes = self.graph.values[self.graph.states[state].before]
                .ty
                .bytes() as f64;
            match chunks.last_mut() {
                Some((sum, chunk)) if *sum < worth => {
                    *sum += bytes;
                    chunk.push(state);
                }
                _ => chunks.push((bytes, vec![state])),
            }
        }
        chunks.into_iter().map(|(_, chunk)| chunk).collect()
    }

    /// True if the host may hold so many bytes.
    pub fn host_holds(&self, bytes: u64) -> bool {
        self.host_limit.is_none_or(|limit| bytes <= limit)
    }

    /// False if decisions leave more on the host all the time, states and inputs, than it may hold:
    /// nothing that builds on them is of use.
    pub fn host_has_room(&self, decisions: &Decisions) -> bool {
        let states = decisions
            .hosted
            .keys()
            .map(|&state| self.graph.states[state].before);
        let values = states.chain(self.graph.inputs.iter().copied());
        self.host_holds(
            values
                .map(|value| buffer_bytes(self.graph.values[value].ty.bytes()))
                .sum(),
        )
    }
    /// True for values that lie on the host when a step starts: inputs always, states if they are
    /// hosted.
    pub fn comes_from_host(&self, root: Value, decisions: &Decisions) -> bool {
        match self.graph.values[root].def {
            Def::Input(_) => true,
            Def::State(state) => decisions.hosted.contains_key(&state),
            Def::Node(..) => false,
        }
    }
}

/// A gap in a value's life: from its access number `gap` (the definition is number 0 of a computed
/// value) to the next.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Gap {
    /// The value; a root.
    pub value: Value,
    /// The number of the access before the gap.
    pub gap: u32,
}

/// How a value outlives a gap without device memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Means {
    /// Its bytes wait on the host.
    Swap,
    /// Its node runs again.
    Recompute,
}

/// Why a decision was made: the figures that `explain` prints.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Reason {
    /// Bytes that it frees.
    pub bytes: u64,
    /// What a swap was reckoned to add to the step, µs; `None` if it was impossible.
    pub swap: Option<f64>,
    /// What a recompute was reckoned to add to the step, µs; `None` if it was impossible.
    pub recompute: Option<f64>,
    /// The line where memory was short.
    pub line: u32,
}

/// What a planner answers.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Decisions {
    /// Gaps over which a value leaves the device. Every other value is kept from its first access
    /// to its last.
    pub cuts: BTreeMap<Gap, (Means, Reason)>,
    /// States that live on the host, by their position in the graph's states: they come for their
    /// uses.
    pub hosted: BTreeMap<usize, Reason>,
    /// Hosted states that lie side by side on the host and come to the device in one copy. A state
    /// is in one chunk at most; one that is in none comes alone.
    pub chunks: Vec<Vec<usize>>,
    /// Nodes that the host runs, in its own memory: updates of hosted states.
    pub on_host: BTreeSet<Node>,
    /// Nodes that run again before a line, by the line's position in [`Problem::lines`], in order.
    /// Readers take the latest result.
    pub reruns: BTreeMap<u32, Vec<Node>>,
    /// Bytes above the lines' own peak that copies may take by coming early.
    pub ahead: u64,
}

impl Decisions {
    /// How many values leave the device over a gap, and states altogether.
    pub fn count(&self) -> usize {
        self.cuts.len() + self.hosted.len()
    }
    /// The gaps after which a value is computed again by one of [`Decisions::reruns`], with what
    /// that frees and costs. A value that runs again after its last access, for another rerun, has
    /// that access's number for a gap.
    pub fn solved(&self, problem: &Problem<'_>) -> BTreeMap<Gap, Reason> {
        let graph = problem.graph;
        let mut solved = BTreeMap::new();
        for (&position, nodes) in &self.reruns {
            for &node in nodes {
                let recompute = Some(problem.cost.run(graph, node));
                for &value in &graph.nodes[node].outputs {
                    let before = problem.accesses[value].partition_point(|&at| at < position);
                    let gap = Gap {
                        value,
                        gap: before.saturating_sub(1) as u32,
                    };
                    let bytes = graph.values[value].ty.bytes();
                    solved.insert(
                        gap,
                        Reason {
                            bytes,
                            swap: None,
                            recompute,
                            line: position,
                        },
                    );
                }
            }
        }
        solved
    }

    /// The decisions as text, for dumps.
    pub fn print(&self, graph: &Graph) -> String {
        let micros = |t: Option<f64>| t.map_or("impossible".into(), |t| format!("{t:.1} us"));
        let why = |r: &Reason| {
            format!(
                "; frees {} at line {}, swap {}, recompute {}",
                r.bytes,
                r.line,
                micros(r.swap),
                micros(r.recompute)
            )
        };
        let mut text = String::from("decisions {\n");
        for (&state, reason) in &self.hosted {
            text += &format!(
                "  host %{} {}\n",
                graph.values[graph.states[state].before].name,
                why(reason)
            );
        }
        if 0 < self.ahead {
            text += &format!("  ahead {}\n", self.ahead);
        }
        for (k, chunk) in self.chunks.iter().enumerate() {
            let names: Vec<String> = chunk
                .iter()
                .map(|&state| format!("%{}", graph.values[graph.states[state].before].name))
                .collect();
            text += &format!("  chunk c{k} {}\n", names.join(" "));
        }
        for &node in &self.on_host {
            text += &format!("  update %{} on the host\n", graph.node_name(node));
        }
        for (&position, nodes) in &self.reruns {
            let names: Vec<String> = nodes
                .iter()
                .map(|&node| format!("%{}", graph.node_name(node)))
                .collect();
            let line = graph
                .order
                .iter()
                .filter(|&&n| !graph.nodes[n].op.is_alias())
                .nth(position as usize);
            let before = line.map_or("", |&node| graph.node_name(node));
            text += &format!("  rerun {} before %{before}\n", names.join(" "));
        }
        for (gap, (means, reason)) in &self.cuts {
            let word = if *means == Means::Swap {
                "swap"
            } else {
                "recompute"
            };
            text += &format!(
                "  {word} %{} after access {} {}\n",
                graph.values[gap.value].name,
                gap.gap,
                why(reason)
            );
        }
        text + "}\n"
    }
}

/// Who decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Planner {
    /// The best that any planner finds.
    #[default]
    Auto,
    /// Nothing leaves the device.
    Keep,
    /// Whatever is cheapest by the byte, in steps or at once: see [`greedy`].
    Greedy,
    /// Weights leave, activations stay: see [`weights`].
    Offload,
    /// See [`layout`].
    Protrain,
}

impl Planner {
    /// Every planner.
    pub const ALL: [Planner; 5] = [
        Planner::Auto,
        Planner::Keep,
        Planner::Greedy,
        Planner::Offload,
        Planner::Protrain,
    ];
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Planner::Auto => "auto",
            Planner::Keep => "keep",
            Planner::Greedy => "greedy",
            Planner::Offload => "offload",
            Planner::Protrain => "protrain",
        }
    }
}

/// What planning finds out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Extent {
    /// The plan for the budget, and what other budgets would come to.
    #[default]
    Curve,
    /// The plan for the budget: the same one, in less time. Of graphs of thousands of lines, some
    /// that needs less memory and is faster may be missed; none was seen: see [`record::Wanted`].
    Plan,
}

/// A plan for a budget, and what else could be had.
#[derive(Clone, PartialEq, Debug)]
pub struct Decided {
    /// The decisions.
    pub decisions: Decisions,
    /// How they are finished: see [`realise::lives`].
    pub variant: usize,
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
        let (_, keep) = keep.ok_or_else(|| Error::Input("the graph cannot be kept".into()))?;
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
    pool: usize,
) -> Error {
    let schedule =
        realise::lines(problem, &record.decisions).expect("a recorded plan should build");
    let pool: ir::Pool = ir::table::Id::new(pool);
    let lives = realise::lives(problem.graph, &schedule, problem.cost, record.variant);
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
    let smallest = if pool == ir::table::Id::new(DEVICE) {
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

/// No plan fits.
#[derive(Clone, PartialEq, Debug)]
pub struct Infeasible {
    /// The budget, bytes.
    pub budget: u64,
    /// The smallest budget that would do, bytes.
    pub smallest: u64,
    /// The line of the smallest plan that needs most.
    pub line: String,
    /// What is in memory there: name, bytes; largest first.
    pub live: Vec<(String, u64)>,
    /// `device` or `host`.
    pub pool: String,
    /// Who decided.
    pub planner: Planner,
}

impl fmt::Display for Infeasible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let largest: Vec<String> = self
            .live
            .iter()
            .take(6)
            .map(|(name, bytes)| format!("{name} {bytes}"))
            .collect();
        write!(
            f,
            "does not fit: {} needs {} bytes at `{}`; the budget is {} bytes. Largest there: {}. \
             `--budget {}` fits",
            self.pool,
            self.smallest,
            self.line,
            self.budget,
            largest.join(", "),
            self.smallest
        )
    }
}
