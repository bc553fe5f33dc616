//! How fast a step could be at a budget, at best: a certificate beside every plan.
//!
//! Every line that is not an update runs once on the device: that is the compute bound. At one line, moreover, what lies in
//! memory but is not accessed there must go until the rest fits. A value goes by waiting on the host, and then its bytes
//! come in over the link, or by being computed again, and then its node runs once more at least. What a moment needs is a
//! gradient's way out. The best mixture of whole and broken values, with the link and the processor at work side by
//! side, takes no longer than any plan: it forgets all other lines, latencies, and what recomputing needs in turn.
//!
//! For a time `T` the bytes that can go are bounded by duality: for any prices `m, n >= 0` they are at most
//! `m T + n (T - C) + sum max(0, bytes - min(m link, n run))`. The least such bound is found by search; any prices are
//! valid, so the search's precision costs tightness and not truth. `T` is found by bisection, from below.

use super::Problem;
use ir::graph::Def;
use ir::schedule::buffer_bytes;
use ir::{Phase, StateKind, Value};

/// What stands in the way of a faster step.
#[derive(Clone, PartialEq, Debug)]
pub struct Certificate {
    /// No plan at this budget is faster, µs.
    pub lower_bound: f64,
    /// The plan's time over the bound, less one.
    pub gap: f64,
    /// What the bound would be if something were different.
    pub changes: Vec<(Change, f64)>,
}

/// Something that could be different.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// A budget half as large again.
    Budget,
    /// A link twice as fast.
    Link,
    /// A processor twice as fast.
    Compute,
}

impl Change {
    /// Every change.
    pub const ALL: [Change; 3] = [Change::Budget, Change::Link, Change::Compute];
    /// For reports: `budget x1.5`.
    pub fn name(self) -> &'static str {
        match self {
            Change::Budget => "budget x1.5",
            Change::Link => "link x2",
            Change::Compute => "compute x2",
        }
    }
}

/// A value that may be away from a line.
#[derive(Clone, Copy)]
struct Item {
    bytes: f64,
    /// Link time that its absence takes at least, and run time, µs.
    link: f64,
    run: f64,
}

/// A line: bytes that must be there, and what may be away.
struct Line {
    needed: f64,
    items: Vec<Item>,
}

/// Lines that are looked at: those with the most bytes.
const LINES: usize = 3;
/// Halvings of the time, and of each price's interval.
const HALVINGS: usize = 40;
const PRICES: usize = 24;

/// The certificate of a plan that takes `micros` µs in `budget` bytes.
pub fn certificate(problem: &Problem<'_>, budget: u64, micros: f64) -> Certificate {
    let facts = Facts::new(problem);
    let budget = budget as f64;
    let lower_bound = facts.bound(budget, 1.0, 1.0).min(micros);
    let changes = Change::ALL.map(|change| {
        let bound = match change {
            Change::Budget => facts.bound(1.5 * budget, 1.0, 1.0),
            Change::Link => facts.bound(budget, 2.0, 1.0),
            Change::Compute => facts.bound(budget, 1.0, 2.0),
        };
        (change, bound.min(lower_bound))
    });
    let gap = if 0.0 < lower_bound { micros / lower_bound - 1.0 } else { 0.0 };
    Certificate { lower_bound, gap, changes: changes.to_vec() }
}

struct Facts {
    compute: f64,
    lines: Vec<Line>,
}

impl Facts {
    fn new(problem: &Problem<'_>) -> Facts {
        let graph = problem.graph;
        let n = problem.lines.len();
        let is_update = |at: usize| graph.nodes[problem.lines[at]].phase == Phase::Optimizer;
        let compute = (0..n).filter(|&at| !is_update(at)).map(|at| problem.cost.run(graph, problem.lines[at])).sum();
        // Where each root lies between accesses: all along for states, from its definition to its last use for others.
        let roots: Vec<Value> = graph.values.ids().filter(|&v| graph.root(v) == v).collect();
        let span = |value: Value| match graph.values[value].def {
            Def::State(_) => (0, n),
            Def::Input(_) => (n, 0),
            Def::Node(..) => {
                let accesses = problem.accesses(value);
                match (accesses.first(), accesses.last()) {
                    (Some(&first), Some(&last)) => (first as usize, last as usize + 1),
                    _ => (n, 0),
                }
            }
        };
        let mut change = vec![0i128; n + 1];
        for &value in &roots {
            let (from, to) = span(value);
            if from < to {
                change[from] += i128::from(graph.values[value].ty.bytes());
                change[to] -= i128::from(graph.values[value].ty.bytes());
            }
        }
        let mut live = 0;
        let mut order: Vec<(i128, usize)> = (0..n)
            .map(|at| {
                live += change[at];
                (live, at)
            })
            .collect();
        order.sort_by(|a, b| b.cmp(a));
        // Neighbouring lines say the same: the fullest, then the fullest of those far from it.
        let mut chosen: Vec<usize> = vec![];
        for &(_, at) in &order {
            if chosen.len() < LINES && chosen.iter().all(|&other| n / 8 < at.abs_diff(other)) {
                chosen.push(at);
            }
        }
        let lines = chosen.into_iter().map(|at| line(problem, &roots, &span, at)).collect();
        Facts { compute, lines }
    }

    /// No plan is faster, with a link and a processor so many times as fast.
    fn bound(&self, budget: f64, link: f64, compute: f64) -> f64 {
        let base = self.compute / compute;
        self.lines.iter().map(|line| line.bound(budget, link, compute, base)).fold(base, f64::max)
    }
}

fn line(problem: &Problem<'_>, roots: &[Value], span: &dyn Fn(Value) -> (usize, usize), at: usize) -> Line {
    let graph = problem.graph;
    let data = &graph.nodes[problem.lines[at]];
    // A result in an operand's place needs no bytes of its own.
    let in_place = |value: Value| {
        let j = data.outputs.iter().position(|&v| v == value);
        j.is_some_and(|j| data.op.inplace().iter().any(|&(_, k)| k == j))
    };
    let mut needed = 0.0;
    let mut items = vec![];
    for &value in roots {
        let (from, to) = span(value);
        let bytes = graph.values[value].ty.bytes();
        if !(from <= at && at < to) || bytes == 0 {
            continue;
        }
        let size = buffer_bytes(bytes) as f64;
        let accessed =
            data.inputs.iter().any(|&v| graph.root(v) == value) || data.outputs.iter().any(|&v| graph.root(v) == value);
        if accessed {
            // An update may run on the host.
            if data.phase != Phase::Optimizer && !in_place(value) {
                needed += size;
            }
            continue;
        }
        let latency = problem.cost.link(0);
        let link = problem.cost.link(bytes) - latency;
        items.push(match graph.values[value].def {
            Def::State(state) if graph.states[state].kind == StateKind::Moment => {
                // Two moments at most share a gradient's way out.
                Item { bytes: size, link: 0.5 * link, run: f64::INFINITY }
            }
            Def::State(state) => {
                let used = !problem.uses[graph.states[state].before].is_empty();
                Item { bytes: size, link: if used { link } else { 0.0 }, run: f64::INFINITY }
            }
            Def::Input(_) => continue,
            Def::Node(node, _) => {
                let pure = graph.nodes[node].op.is_pure();
                let run = problem.cost.run(graph, node) / graph.nodes[node].outputs.len() as f64;
                // An update's gradient goes out, and need not come back.
                Item { bytes: size, link, run: if pure { run } else { f64::INFINITY } }
            }
        });
    }
    needed += problem.scratch[problem.lines[at]] as f64;
    Line { needed, items }
}

impl Line {
    fn bound(&self, budget: f64, link: f64, compute: f64, base: f64) -> f64 {
        let excess = self.needed + self.items.iter().map(|item| item.bytes).sum::<f64>() - budget;
        if excess <= 0.0 || self.freed(base, base, link, compute, excess) {
            return base;
        }
        // Every finite way out takes no longer than all of it.
        let all: f64 = self.items.iter().map(|item| item.link / link).sum();
        let (mut low, mut high) = (base, base + all);
        if !self.freed(high, base, link, compute, excess) {
            return high;
        }
        for _ in 0..HALVINGS {
            let mid = 0.5 * (low + high);
            if self.freed(mid, base, link, compute, excess) {
                high = mid;
            } else {
                low = mid;
            }
        }
        low
    }

    /// False only if no mixture frees `excess` bytes within `micros` µs.
    fn freed(&self, micros: f64, base: f64, link: f64, compute: f64, excess: f64) -> bool {
        let best = |item: &Item, m: f64, n: f64| {
            let run = if item.run.is_finite() { n * item.run / compute } else { f64::INFINITY };
            (item.bytes - (m * item.link / link).min(run)).max(0.0)
        };
        let value = |m: f64, n: f64| {
            m * micros + n * (micros - base) + self.items.iter().map(|item| best(item, m, n)).sum::<f64>()
        };
        // Convex in both prices: nested searches by thirds, each price between nothing and one that nothing is worth.
        let most = |time: fn(&Item) -> f64| {
            let rates = self.items.iter().filter(|item| 0.0 < time(item) && time(item).is_finite());
            rates.map(|item| item.bytes / time(item)).fold(0.0, f64::max)
        };
        let (most_m, most_n) = (link * most(|item| item.link), compute * most(|item| item.run));
        let inner = |m: f64| thirds(most_n, excess, &|n| value(m, n));
        excess <= thirds(most_m, excess, &inner)
    }
}

/// The least of a convex function on `0..=most`, or some value below `enough`, whichever is met first.
fn thirds(most: f64, enough: f64, function: &dyn Fn(f64) -> f64) -> f64 {
    let (mut low, mut high) = (0.0, most);
    let mut least = function(low).min(function(high));
    for _ in 0..PRICES {
        if least < enough {
            break;
        }
        let (a, b) = (low + (high - low) / 3.0, high - (high - low) / 3.0);
        let (at_a, at_b) = (function(a), function(b));
        least = least.min(at_a).min(at_b);
        if at_a < at_b {
            high = b;
        } else {
            low = a;
        }
    }
    least
}
