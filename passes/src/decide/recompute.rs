//! Recompute, solved for the whole step at once, on top of states that live on the host and of
//! activations that swap.
//!
//! What swaps and what the host holds is settled first, in a few ways; the lines that come of it
//! are a [`remat`] problem: values that stay are its values, and all other bytes of the device are
//! there whatever it decides. Its reruns go into the decisions as they are. Bytes that results take
//! over from operands blur its view, so that budgets are corrected by what the lines really need.

use super::greedy::{beyond_host, live, swaps};
use super::record::{Draft, Wanted, draft};
use crate::alloc::lifetimes;
use crate::plan::machine::{COMPUTE, DEVICE};
use crate::plan::tuning::{REMAT_LADDER, REMAT_MOST_STEPS, REMAT_STEPS, REMAT_TRIES};
use crate::plan::{Decisions, Problem};
use crate::realise;
use ir::schedule::{Buffer, InstrKind, Schedule, Why};
use ir::{Id, Node, Phase, Table, Value};
use papers::remat::{self, Effort};

/// Drafts for a ladder of budgets, as far as they are wanted.
pub fn drafts(problem: &Problem<'_>, (hosted, swapped): (f64, f64), wanted: &Wanted) -> Vec<Draft> {
    let mut drafts = vec![];
    let mut base = problem.hosted(hosted);
    if !problem.host_has_room(&base) {
        return drafts;
    }
    problem.stream_hosted(&mut base);
    // Where nothing is worth swapping, the start without swaps has it all.
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
    // What the solver sees beyond the truth.
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
    /// For each line the position of the model's next line, and the node that it runs.
    position: Vec<u32>,
    node: Vec<Option<Node>>,
}

impl Model {
    fn new(problem: &Problem<'_>, base: &Decisions, schedule: &Schedule) -> Option<Model> {
        let graph = problem.graph;
        let n = schedule.instrs.len();
        let on_device = |buffer: Buffer| schedule.buffers[buffer].pool == DEVICE;
        let cut: Table<Value, bool> = {
            let mut cut = Table::filled(graph.values.len(), false);
            base.cuts.keys().for_each(|gap| cut[gap.value] = true);
            cut
        };
        // The solver's number of each value that stays.
        let mut number: Table<Value, Option<u32>> = Table::filled(graph.values.len(), None);
        let mut values = vec![];
        let mut nodes = vec![remat::Node::default(); n];
        let mut home = Table::filled(schedule.buffers.len(), false);
        schedule
            .entry
            .iter()
            .chain(&schedule.exit)
            .for_each(|(_, loc)| home[loc.buffer] = true);
        // Where each state is overwritten.
        let mut overwritten: Table<Buffer, u32> =
            Table::filled(schedule.buffers.len(), n as u32 - 1);
        let mut position = vec![];
        let mut models = 0;
        for (instr, data) in schedule.instrs.iter() {
            position.push(models);
            models += u32::from(data.why == Why::Model);
            schedule.each_access(graph, instr, |access| {
                if access.write && home[access.loc.buffer] {
                    overwritten[access.loc.buffer] =
                        overwritten[access.loc.buffer].min(instr.index() as u32);
                }
            });
        }
        // The value that each buffer holds, and the buffers whose bytes the solver sees.
        let mut holds: Table<Buffer, Option<u32>> = Table::filled(schedule.buffers.len(), None);
        let mut seen: Table<Buffer, bool> = Table::filled(schedule.buffers.len(), false);
        let mut shared = vec![0u64; n];
        let mut runs = vec![None; n];
        for (instr, data) in schedule.instrs.iter() {
            let line = instr.index();
            match &data.kind {
                InstrKind::Run {
                    node,
                    args,
                    outs,
                    scratch,
                } => {
                    let node_data = &graph.nodes[*node];
                    let remat = &mut nodes[line];
                    let device = data.stream == COMPUTE;
                    if device {
                        remat.micros = problem.cost.run(graph, *node);
                    }
                    let mut until = n as u32 - 1;
                    for (&input, loc) in node_data.inputs.iter().zip(args) {
                        if let Some(number) =
                            number[problem.root[input]].filter(|_| on_device(loc.buffer))
                        {
                            remat.reads.push(number);
                        } else if home[loc.buffer] {
                            until = until.min(overwritten[loc.buffer]);
                        }
                    }
                    let again =
                        device && node_data.op.is_pure() && node_data.phase != Phase::Optimizer;
                    if again && outs.iter().all(|loc| !home[loc.buffer]) {
                        remat.until = until;
                        runs[line] = Some(*node);
                    }
                    if let Some(loc) = scratch.filter(|loc| on_device(loc.buffer)) {
                        remat.scratch = schedule.buffers[loc.buffer].bytes;
                        seen[loc.buffer] = true;
                    }
                    for (&output, loc) in node_data.outputs.iter().zip(outs) {
                        if !on_device(loc.buffer) || home[loc.buffer] || cut[output] {
                            continue;
                        }
                        number[output] = Some(values.len() as u32);
                        holds[loc.buffer] = number[output];
                        let bytes = schedule.buffers[loc.buffer].bytes;
                        values.push(remat::Value {
                            bytes,
                            maker: line as u32,
                            kept: false,
                        });
                        if args.contains(loc) {
                            shared[line] += bytes;
                        }
                        seen[loc.buffer] = true;
                    }
                }
                InstrKind::Copy { src, .. } => {
                    // A copy out reads what it sends.
                    nodes[line].reads.extend(holds[src.buffer]);
                }
            }
        }
        let lives = lifetimes(schedule);
        let mut change = vec![0i64; n + 1];
        for (buffer, data) in schedule
            .buffers
            .iter()
            .filter(|&(buffer, _)| on_device(buffer) && !seen[buffer])
        {
            change[lives[buffer].start as usize] += data.bytes as i64;
            change[lives[buffer].end as usize] -= data.bytes as i64;
        }
        let mut sum = 0;
        let fixed = change[..n]
            .iter()
            .zip(&shared)
            .map(|(change, &shared)| {
                sum += change;
                (sum as u64).saturating_sub(shared)
            })
            .collect();
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
