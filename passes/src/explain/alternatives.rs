//! What the step would be with another decision: it is built and simulated.

use super::data::{Choice, GapChoice, Outcome, Way};
use crate::pipeline::Compiled;
use crate::plan::{Decisions, Gap, Means, Problem, Reason};
use crate::realise;
use crate::schedule::lives::variants;
use ir::graph::Def;
use ir::schedule::Why;
use ir::{Instr, Value};

/// Steps that are built and simulated for one explanation, at most: each takes as long as one round
/// of a planner.
const SIMULATIONS: usize = 16;

/// Where other decisions are tried.
pub(super) struct Bench<'a> {
    compiled: &'a Compiled,
    problem: &'a Problem<'a>,
    /// How many more steps may be simulated.
    left: usize,
}

impl<'a> Bench<'a> {
    pub(super) fn new(compiled: &'a Compiled, problem: &'a Problem<'a>) -> Bench<'a> {
        Bench {
            compiled,
            problem,
            left: SIMULATIONS,
        }
    }

    /// The step with the decisions that `change` leaves.
    pub(super) fn outcome(
        &mut self,
        change: impl FnOnce(&mut Decisions),
    ) -> Result<Outcome, String> {
        if self.left == 0 {
            return Err("not simulated: the value has too many gaps".into());
        }
        self.left -= 1;
        let mut decisions = self.compiled.decided.decisions.clone();
        change(&mut decisions);
        let budget = self.compiled.decided.budget.unwrap_or(u64::MAX);
        let schedule = realise::lines(self.problem, &decisions).map_err(|e| e.to_string())?;
        let variants = variants(self.problem, &schedule);
        let finished = variants
            .iter()
            .map(|(_, lives)| realise::finish(self.problem, &schedule, lives).0);
        let outcomes = finished.map(|r| Outcome {
            micros: r.micros,
            peak: r.peak,
            fits: r.peak <= budget && self.problem.host_holds(r.host),
        });
        // The fastest that fits; if none does, the smallest.
        let best = outcomes.min_by(|a, b| {
            let within = b.fits.cmp(&a.fits);
            within.then(if a.fits {
                a.micros.total_cmp(&b.micros)
            } else {
                a.peak.cmp(&b.peak)
            })
        });
        best.ok_or_else(|| "the step has no line".into())
    }

    /// Figures of a decision that no planner made: nothing reads them.
    fn unreasoned(&self, value: Value) -> Reason {
        Reason {
            bytes: self.problem.graph.values[value].ty.bytes(),
            swap: None,
            recompute: None,
            line: 0,
        }
    }

    /// What was decided for a state as a whole.
    pub(super) fn home(&mut self, value: Value) -> Option<Choice> {
        let Def::State(state) = self.problem.graph.values[value].def else {
            return None;
        };
        let reason = self.compiled.decided.decisions.hosted.get(&state).copied();
        let (way, other) = if reason.is_some() {
            (Way::Swap, Way::Keep)
        } else {
            (Way::Keep, Way::Swap)
        };
        let new = self.unreasoned(value);
        let graph = self.problem.graph;
        let outcome = self.outcome(|decisions| {
            if reason.is_some() {
                decisions.bring_home(graph, &[state]);
            } else {
                decisions.hosted.insert(state, new);
            }
        });
        Some(Choice {
            way,
            reason,
            others: vec![(other, outcome)],
        })
    }

    /// What was decided for each gap.
    pub(super) fn gaps(&mut self, value: Value) -> Vec<GapChoice> {
        let graph = self.problem.graph;
        let decided = &self.compiled.decided.decisions;
        // A state at home never leaves it.
        if matches!(graph.values[value].def, Def::State(state)
            if !decided.hosted.contains_key(&state))
        {
            return vec![];
        }
        let mut gaps = self.decided_gaps(value);
        // The longest gaps first: where simulations are few, those are of interest.
        let mut order: Vec<usize> = (0..gaps.len()).collect();
        order.sort_by(|&a, &b| gaps[b].micros.total_cmp(&gaps[a].micros).then(a.cmp(&b)));
        for k in order {
            gaps[k].choice.others = self.other_ways(value, &gaps[k]);
        }
        gaps
    }

    /// The gaps between accesses and what was decided for each, without the ways not taken. Gaps
    /// without a line in between are left out, unless they are cut.
    fn decided_gaps(&self, value: Value) -> Vec<GapChoice> {
        let schedule = &self.compiled.program.schedule;
        let instrs = schedule.instrs.iter();
        let models: Vec<Instr> = instrs
            .filter(|(_, data)| data.why == Why::Model)
            .map(|(i, _)| i)
            .collect();
        let timeline = &self.compiled.timeline;
        let decided = &self.compiled.decided.decisions;
        let solved = decided.solved(self.problem);
        let mut gaps = vec![];
        for (number, pair) in (0..).zip(self.problem.accesses[value].windows(2)) {
            let gap = Gap { value, gap: number };
            let cut = decided.cuts.get(&gap).copied();
            let cut = cut.or_else(|| solved.get(&gap).map(|&reason| (Means::Recompute, reason)));
            // An update on the host reads the state there.
            let on_host = |at: u32| decided.on_host.contains(&self.problem.lines[at as usize]);
            if cut.is_none() && (pair[1] <= pair[0] + 1 || on_host(pair[1])) {
                continue;
            }
            let line = |position: u32| models.get(position as usize).copied();
            let (from, to) = (line(pair[0]), line(pair[1]));
            let micros = match (from, to) {
                (Some(from), Some(to)) => (timeline.start[to] - timeline.end[from]).max(0.0),
                _ => 0.0,
            };
            let way = match cut {
                None => Way::Keep,
                Some((Means::Swap, _)) => Way::Swap,
                Some((Means::Recompute, _)) => Way::Recompute,
            };
            gaps.push(GapChoice {
                gap: number,
                from,
                to,
                micros,
                choice: Choice {
                    way,
                    reason: cut.map(|(_, reason)| reason),
                    others: vec![],
                },
            });
        }
        gaps
    }

    /// What the step would come to with each way that was not taken for a gap.
    fn other_ways(
        &mut self,
        value: Value,
        decided: &GapChoice,
    ) -> Vec<(Way, Result<Outcome, String>)> {
        let graph = self.problem.graph;
        let gap = Gap {
            value,
            gap: decided.gap,
        };
        let reason = decided.choice.reason.unwrap_or(self.unreasoned(value));
        // The lines between the accesses, before which a solver may have put reruns.
        let accesses = &self.problem.accesses[value];
        let between = accesses[gap.gap as usize] + 1..=accesses[gap.gap as usize + 1];
        let spare = |decisions: &mut Decisions| {
            for (_, nodes) in decisions.reruns.range_mut(between.clone()) {
                nodes.retain(|&node| !graph.nodes[node].outputs.contains(&value));
            }
        };
        let mut outcome = |way: Way| match way {
            Way::Recompute if graph.def_node(value).is_none() => Err("no node computes it".into()),
            Way::Keep => self.outcome(|decisions| {
                spare(decisions);
                decisions.cuts.remove(&gap);
            }),
            Way::Swap => self.outcome(|decisions| {
                spare(decisions);
                decisions.cuts.insert(gap, (Means::Swap, reason));
            }),
            Way::Recompute => self.outcome(|decisions| {
                decisions.cuts.insert(gap, (Means::Recompute, reason));
            }),
        };
        let others = Way::ALL.into_iter();
        others
            .filter(|&way| way != decided.choice.way)
            .map(|way| (way, outcome(way)))
            .collect()
    }
}
