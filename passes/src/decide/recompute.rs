//! Solves recomputation for the whole step at once, after some states have moved to the host and
//! some activations are swapped.
//!
//! Swaps and hosted states are chosen first, in several ways. The resulting lines become a
//! [`remat`] problem: its values are the values that stay on the device, and all other bytes of the
//! device are fixed. Its reruns become decisions without a change. The solver does not see exactly
//! which results take the bytes of operands. So its budgets are corrected by the bytes that the
//! lines really need.

use super::greedy::{beyond_host, live, swaps};
use super::record::{Draft, Wanted, draft};
use crate::alloc::lifetimes;
use crate::plan::machine::{COMPUTE, DEVICE};
use crate::plan::tuning::{REMAT_LADDER, REMAT_MOST_STEPS, REMAT_STEPS, REMAT_TRIES};
use crate::plan::{Decisions, Problem};
use crate::realise;
use ir::schedule::{Buffer, InstrData, InstrKind, Loc, Schedule, Why};
use ir::{Id, Instr, Node, Part, Phase, Table, Value};
use papers::remat::{self, Effort};

/// Drafts for a ladder of budgets, as far as they are wanted.
pub fn drafts(problem: &Problem<'_>, (hosted, swapped): (f64, f64), wanted: &Wanted) -> Vec<Draft> {
    let mut drafts = vec![];
    let mut base = problem.hosted(hosted);
    if !problem.host_has_room(&base) {
        return drafts;
    }
    problem.stream_hosted(&mut base);
    // If nothing is worth swapping, this start equals the start without swaps.
    if 0.0 < swapped && !swaps(problem, &mut base, swapped) {
        return drafts;
    }
    let Ok(start) = realise::unnamed(problem, &base) else {
        return drafts;
    };
    draft(problem, &base, &start, &mut drafts);
    if beyond_host(problem, &drafts) {
        return drafts;
    }
    let Ok(schedule) = realise::unmoved(problem, &base) else {
        return drafts;
    };
    let Some(model) = Model::new(problem, &base, &schedule) else {
        return drafts;
    };
    let peak = |schedule: &Schedule| live(schedule).into_iter().max().unwrap_or(0);
    let start = peak(&start) as f64;
    // The solver's peak minus the real one, bytes.
    let mut excess = remat::evaluate(&model.problem, &[]).peak as f64 - start;
    let mut target = start;
    loop {
        target *= REMAT_LADDER[usize::from(problem.is_large())];
        let mut found = None;
        for _ in 0..REMAT_TRIES {
            let budget = (target + excess).max(0.0) as u64;
            let steps = (REMAT_STEPS * schedule.instrs.len() as u64).min(REMAT_MOST_STEPS);
            let effort = Effort { steps, seed: 0 };
            let Some(solution) = remat::solve(&model.problem, budget, effort) else {
                break;
            };
            let mut decisions = base.clone();
            model.add_to(&solution, &mut decisions);
            let Ok(schedule) = realise::unnamed(problem, &decisions) else {
                break;
            };
            let real = peak(&schedule) as f64;
            found = Some((decisions, schedule));
            if real <= target {
                break;
            }
            excess += target - real;
        }
        let Some((decisions, schedule)) = found else {
            return drafts;
        };
        draft(problem, &decisions, &schedule, &mut drafts);
        if wanted.end(problem, &drafts).is_some() {
            return drafts;
        }
    }
}

/// The solver's view of lines.
struct Model {
    problem: remat::Problem,
    /// For each line, the position of the next line of the model, and the node that the line may
    /// run again.
    position: Vec<u32>,
    node: Vec<Option<Node>>,
}

impl Model {
    fn new(problem: &Problem<'_>, base: &Decisions, schedule: &Schedule) -> Option<Model> {
        let mut lines = Lines::new(problem, base, schedule);
        let mut position = vec![];
        let mut models = 0;
        for (instr, data) in schedule.instrs.iter() {
            position.push(models);
            models += u32::from(data.why == Why::Model);
            lines.add(instr.index(), data);
        }
        let fixed = lines.fixed_bytes();
        let Lines {
            nodes,
            values,
            runs,
            ..
        } = lines;
        let problem = remat::Problem::new(nodes, values, fixed).ok()?;
        Some(Model {
            problem,
            position,
            node: runs,
        })
    }

    fn add_to(&self, solution: &remat::Solution, decisions: &mut Decisions) {
        for rerun in &solution.reruns {
            if let Some(node) = self.node[rerun.node as usize] {
                decisions
                    .reruns
                    .entry(self.position[rerun.line as usize])
                    .or_default()
                    .push(node);
            }
        }
    }
}

/// The solver's nodes and values, while they are collected line by line.
struct Lines<'a> {
    problem: &'a Problem<'a>,
    schedule: &'a Schedule,
    /// Values that already leave the device over a gap.
    cut: Table<Value, bool>,
    /// Buffers of values at entry or exit.
    home: Table<Buffer, bool>,
    /// The line that overwrites each buffer at home; the last line if no line does.
    overwritten: Table<Buffer, u32>,
    /// The solver's number of each value that stays.
    number: Table<Value, Option<u32>>,
    /// The value that each buffer holds, by the solver's number.
    holds: Table<Buffer, Option<u32>>,
    /// Buffers whose bytes the solver sees.
    seen: Table<Buffer, bool>,
    /// For each line, the bytes of results that take the place of an operand.
    shared: Vec<u64>,
    nodes: Vec<remat::Node>,
    values: Vec<remat::Value>,
    /// The node that each line may run again.
    runs: Vec<Option<Node>>,
}

impl<'a> Lines<'a> {
    fn new(problem: &'a Problem<'a>, base: &Decisions, schedule: &'a Schedule) -> Lines<'a> {
        let (n, n_buffers) = (schedule.instrs.len(), schedule.buffers.len());
        let n_values = problem.graph.values.len();
        let mut cut = Table::filled(n_values, false);
        base.cuts.keys().for_each(|gap| cut[gap.value] = true);
        let mut home = Table::filled(n_buffers, false);
        for (_, loc) in schedule.entry.iter().chain(&schedule.exit) {
            home[loc.buffer] = true;
        }
        let mut overwritten: Table<Buffer, u32> = Table::filled(n_buffers, n as u32 - 1);
        for instr in schedule.instrs.ids() {
            schedule.each_access(problem.graph, instr, |access| {
                if access.write && home[access.loc.buffer] {
                    let first = &mut overwritten[access.loc.buffer];
                    *first = (*first).min(instr.index() as u32);
                }
            });
        }
        Lines {
            problem,
            schedule,
            cut,
            home,
            overwritten,
            number: Table::filled(n_values, None),
            holds: Table::filled(n_buffers, None),
            seen: Table::filled(n_buffers, false),
            shared: vec![0; n],
            nodes: vec![remat::Node::default(); n],
            values: vec![],
            runs: vec![None; n],
        }
    }

    fn add(&mut self, line: usize, data: &InstrData) {
        match &data.kind {
            InstrKind::Run {
                node,
                args,
                outs,
                scratch,
                part,
            } => {
                let on_compute = data.stream == COMPUTE;
                if on_compute {
                    let (graph, instr) = (self.problem.graph, Instr::new(line));
                    self.nodes[line].micros = self.problem.cost.line(graph, self.schedule, instr);
                }
                if part.is_some() {
                    self.read_part(line, (*node, *part), args);
                    return;
                }
                let until = self.read(line, *node, args);
                let node_data = &self.problem.graph.nodes[*node];
                let may_rerun =
                    on_compute && node_data.op.is_pure() && node_data.phase != Phase::Optimizer;
                if may_rerun && outs.iter().all(|loc| !self.home[loc.buffer]) {
                    self.nodes[line].until = until;
                    self.runs[line] = Some(*node);
                }
                if let Some(loc) = scratch.filter(|loc| self.is_on_device(loc.buffer)) {
                    self.nodes[line].scratch = self.schedule.buffers[loc.buffer].bytes;
                    self.seen[loc.buffer] = true;
                }
                self.write(line, *node, args, outs);
            }
            InstrKind::Copy { src, .. } => {
                // A copy out reads what it sends.
                self.nodes[line].reads.extend(self.holds[src.buffer]);
            }
        }
    }

    /// Adds the operands of a line. Returns the first line that overwrites one of the operands that
    /// the solver does not see.
    fn read(&mut self, line: usize, node: Node, args: &[Loc]) -> u32 {
        let mut until = self.schedule.instrs.len() as u32 - 1;
        for (&input, loc) in self.problem.graph.nodes[node].inputs.iter().zip(args) {
            let number = self.number[self.problem.root[input]];
            if let Some(number) = number.filter(|_| self.is_on_device(loc.buffer)) {
                self.nodes[line].reads.push(number);
            } else if self.home[loc.buffer] {
                until = until.min(self.overwritten[loc.buffer]);
            }
        }
        until
    }

    /// Adds the operands of a line that computes a part of a node, as far as they are whole.
    fn read_part(&mut self, line: usize, ran: (Node, Option<Part>), args: &[Loc]) {
        let graph = self.problem.graph;
        for (&input, &loc) in graph.nodes[ran.0].inputs.iter().zip(args) {
            let number = self.number[self.problem.root[input]];
            let is_whole = self.schedule.whole_place(graph, ran, input, loc).is_some();
            let reads = number.filter(|_| is_whole && self.is_on_device(loc.buffer));
            self.nodes[line].reads.extend(reads);
        }
    }

    /// Adds the results of a line that the solver decides about.
    fn write(&mut self, line: usize, node: Node, args: &[Loc], outs: &[Loc]) {
        for (&output, loc) in self.problem.graph.nodes[node].outputs.iter().zip(outs) {
            if !self.is_on_device(loc.buffer) || self.home[loc.buffer] || self.cut[output] {
                continue;
            }
            self.number[output] = Some(self.values.len() as u32);
            self.holds[loc.buffer] = self.number[output];
            let bytes = self.schedule.buffers[loc.buffer].bytes;
            self.values.push(remat::Value {
                bytes,
                maker: line as u32,
                kept: false,
            });
            if args.contains(loc) {
                self.shared[line] += bytes;
            }
            self.seen[loc.buffer] = true;
        }
    }

    /// Bytes at each line that the solver does not decide about.
    fn fixed_bytes(&self) -> Vec<u64> {
        let n = self.schedule.instrs.len();
        let lives = lifetimes(self.schedule);
        let mut change = vec![0i64; n + 1];
        for (buffer, data) in self.schedule.buffers.iter() {
            if self.is_on_device(buffer) && !self.seen[buffer] {
                change[lives[buffer].start as usize] += data.bytes as i64;
                change[lives[buffer].end as usize] -= data.bytes as i64;
            }
        }
        let mut sum = 0;
        let lines = change[..n].iter().zip(&self.shared);
        lines
            .map(|(change, &shared)| {
                sum += change;
                (sum as u64).saturating_sub(shared)
            })
            .collect()
    }

    fn is_on_device(&self, buffer: Buffer) -> bool {
        self.schedule.buffers[buffer].pool == DEVICE
    }
}
