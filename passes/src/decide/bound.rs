//! A lower bound of the step time at a budget: a certificate for every plan.
//!
//! Every line that is not an update runs at least once on the device. This is the compute bound. In
//! addition, at some lines the values do not all fit, so values between two accesses must leave the
//! device. A value leaves in one of two ways: it waits on the host, and its bytes go over the link,
//! or it is computed again, and its node runs at least once more. The best mixture of these, with
//! fractions of values, and with both directions of the link and the processor working at the same
//! time, takes no longer than any plan. It ignores the lines between, latencies, gaps between
//! addresses, and what recomputation itself needs. What waits on the host fits there.
//!
//! The least that goes over the link: a value comes in for its next access, and goes out once if a
//! node made it. An update may run on the host. Then only the gradient goes out, and nothing comes
//! in. The moments of such an update need no other transfer than this gradient.
//!
//! A disk behind the host gives a bound of its own: the states that neither memory has room for
//! come from it and go back to it in each step.
//!
//! The mixture is a linear program, and any multipliers of it prove a bound (Lagrange): prices
//! `λ >= 0` of a byte on the device and `μ >= 0` of a byte on the host at each line, and weights
//! `i + o + n = 1` of the link's two directions and the processor. No step at a budget is shorter
//! than
//!
//! ```text
//! n compute + Σ λ (bytes - budget) - Σ μ host
//!     - Σ max( Σ max(0, bytes Λ - min(bytes M + i in, n run)) - o out,
//!              Σ max(0, bytes Λ - n run) )
//! ```
//!
//! The first sums are over lines, the outer one of the rest over values, and the inner ones over
//! the gaps of a value, with `Λ` and `M` the sums of the prices of the lines within a gap, and 0
//! for values that stay. It is concave; a subgradient method (B. Polyak, 1969) climbs it. Wherever
//! the method stops, the bound is valid; an early stop only makes it lower.

use crate::plan::Problem;
use ir::Disk;
use ir::graph::{Def, StateData};
use ir::schedule::buffer_bytes;
use ir::{Node, Phase, State, StateKind, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The lower bound of a plan's step time, and which changes would lower it.
#[derive(Clone, PartialEq, Debug)]
pub struct Certificate {
    /// No plan at this budget is faster, µs.
    pub lower_bound: f64,
    /// The plan's time divided by the bound, minus one.
    pub gap: f64,
    /// The bound after each change.
    pub changes: Vec<(Change, f64)>,
}

ir::named! {
    /// A change of the budget or the machine.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Change {
        /// A budget 1.5 times as large.
        Budget = "budget x1.5",
        /// A host with 1.5 times as much memory; if it cannot hold everything, and has no disk.
        Host = "host x1.5",
        /// A link twice as fast.
        Link = "link x2",
        /// A processor twice as fast.
        Compute = "compute x2",
        /// A disk twice as fast; for machines that have one behind the host.
        Disk = "disk x2",
    }
}

/// The number of lines that the bound uses: the fullest line of each stretch of the schedule.
const LINES: usize = 48;
/// Steps of the subgradient method, and the number of steps without a better bound after which it
/// aims lower.
const STEPS: usize = 150;
const PATIENCE: usize = 8;

/// Prices of a byte from which the method may start: the link's time for the byte, and smaller
/// ones. If waiting on the host has a price, then also larger ones: what cannot wait is computed
/// again, which may take longer than the link.
const SCALES: i32 = 12;
const SCALE: f64 = 0.4;
/// Weights of the link's directions and the processor from which it may start.
const TIMES: [[f64; 3]; 6] = [
    [0.0, 0.0, 1.0],
    [0.5, 0.0, 0.5],
    [0.0, 0.5, 0.5],
    [0.3, 0.3, 0.4],
    [0.1, 0.0, 0.9],
    [0.0, 0.1, 0.9],
];

/// The certificate of a plan that takes `micros` µs in `budget` bytes.
pub fn certificate(problem: &Problem<'_>, budget: u64, micros: f64) -> Certificate {
    let facts = Facts::new(problem);
    let spilled = Spilled::new(problem);
    let now = Terms {
        budget: budget as f64,
        host: 1.0,
        link: 1.0,
        compute: 1.0,
        disk: 1.0,
    };
    let here = facts.prices(now, micros);
    let mut lower_bound = facts.bound(now, &here).0;
    let changes = Change::ALL.into_iter();
    let changes = changes.filter(|&change| match change {
        Change::Disk => spilled.disk.is_some(),
        Change::Host => facts.host.is_some(),
        Change::Budget | Change::Link | Change::Compute => true,
    });
    let changes = changes.map(|change| {
        let terms = match change {
            Change::Disk => Terms { disk: 2.0, ..now },
            Change::Host => Terms { host: 1.5, ..now },
            Change::Budget => Terms {
                budget: 1.5 * now.budget,
                ..now
            },
            Change::Link => Terms { link: 2.0, ..now },
            Change::Compute => Terms {
                compute: 2.0,
                ..now
            },
        };
        let prices = facts.climb(terms, micros, here.clone());
        // The same prices also prove a bound for the unchanged terms.
        lower_bound = lower_bound.max(facts.bound(now, &prices).0);
        let bound = facts.bound(terms, &prices).0;
        let bound = bound.max(facts.bound(terms, &here).0);
        (change, bound.max(spilled.micros(terms)))
    });
    let changes = changes.collect();
    let lower_bound = lower_bound.max(spilled.micros(now));
    let gap = if 0.0 < lower_bound {
        micros / lower_bound - 1.0
    } else {
        0.0
    };
    Certificate {
        lower_bound,
        gap,
        changes,
    }
}

/// A value that may be away between accesses. Times are in µs, without latencies.
struct Item {
    bytes: f64,
    /// Its bytes on the host while it waits there. An input has none: the program has it anyway.
    on_host: f64,
    /// The lines of the bound between two accesses, which may go over the step's end; and the time
    /// for copying the value in after this gap, unless the value is computed again.
    gaps: Vec<(Range<usize>, f64)>,
    /// The time for copying it out, once for all gaps.
    outward: f64,
    /// The processor's time to compute it again.
    run: f64,
}

/// The terms of a bound: bytes, and the host's memory and the speeds of link, processor and disk
/// relative to the machine's.
#[derive(Clone, Copy)]
struct Terms {
    budget: f64,
    host: f64,
    link: f64,
    compute: f64,
    disk: f64,
}

/// What the disk must do. Between two steps, states that neither the device nor the host has room
/// for are on the disk. If a line reads them, they come; if a line renews them, they go back.
struct Spilled<'a> {
    disk: Option<&'a Disk>,
    /// Bytes of the host that states may take.
    host: f64,
    /// Bytes of states that lines read, and of those that lines renew.
    read: f64,
    renewed: f64,
}

impl<'a> Spilled<'a> {
    fn new(problem: &Problem<'a>) -> Spilled<'a> {
        let graph = problem.graph;
        let bytes = |counts: &dyn Fn(&StateData) -> bool| -> f64 {
            let states = graph.states.values().filter(|state| counts(state));
            states
                .map(|state| graph.values[state.before].ty.bytes() as f64)
                .sum()
        };
        let is_read = |state: &StateData| !problem.uses[problem.root[state.before]].is_empty();
        let is_renewed = |state: &StateData| graph.def_node(graph.root(state.after)).is_some();
        Spilled {
            disk: problem.device.disk.as_ref(),
            host: problem
                .host_limit
                .map_or(f64::INFINITY, |bytes| bytes as f64),
            read: bytes(&is_read),
            renewed: bytes(&is_renewed),
        }
    }

    /// The least time of the disk, µs.
    fn micros(&self, terms: Terms) -> f64 {
        let room = terms.budget + self.host;
        let [read, written] = [self.read, self.renewed].map(|bytes| (bytes - room).max(0.0));
        let disk = self
            .disk
            .map_or(0.0, |disk| disk.least_micros(read, written));
        disk / terms.disk
    }
}

/// Multipliers.
#[derive(Clone)]
struct Prices {
    /// Of a byte on the device at each line, µs.
    lines: Vec<f64>,
    /// Of a byte on the host at each line, µs.
    host: Vec<f64>,
    /// Of the link's directions in and out and of the processor; their sum is 1.
    times: [f64; 3],
}

/// What the absences of items gain and cost at given prices, µs.
struct Priced {
    terms: Terms,
    /// Prices of the link's directions in and out and of the processor.
    times: [f64; 3],
    /// The sums of the prices of a byte at the lines before each line, over two steps: on the
    /// device and on the host.
    until: [Vec<f64>; 2],
}

impl Priced {
    /// `n` is the number of lines of the bound.
    fn new(n: usize, terms: Terms, prices: &Prices) -> Priced {
        let until = [&prices.lines, &prices.host].map(|prices| {
            let mut until = vec![0.0; 2 * n + 1];
            for at in 0..2 * n {
                until[at + 1] = until[at] + prices[at % n];
            }
            until
        });
        Priced {
            terms,
            times: prices.times,
            until,
        }
    }

    /// The cost of waiting on the host over a gap, and of the copy in after it.
    fn copied(&self, item: &Item, (lines, inward): &(Range<usize>, f64)) -> f64 {
        let waiting = self.until[1][lines.end] - self.until[1][lines.start];
        item.on_host * waiting + self.times[0] * inward / self.terms.link
    }

    fn run(&self, item: &Item) -> f64 {
        if item.run.is_finite() {
            self.times[2] * item.run / self.terms.compute
        } else {
            f64::INFINITY
        }
    }

    /// The gain of being away over one gap, in the cheaper way. If the value has been copied out,
    /// only the copy in costs time.
    fn gain(&self, item: &Item, gap: &(Range<usize>, f64), is_out: bool) -> f64 {
        let copied = if is_out {
            self.copied(item, gap)
        } else {
            f64::INFINITY
        };
        let (lines, until) = (&gap.0, &self.until[0]);
        item.bytes * (until[lines.end] - until[lines.start]) - copied.min(self.run(item))
    }

    /// The most that an item gains over all its gaps, and whether it is copied out for that. `None`
    /// if it gains nothing.
    fn best(&self, item: &Item) -> Option<(f64, bool)> {
        let all = |is_out| {
            let gaps = item.gaps.iter();
            gaps.map(|gap| self.gain(item, gap, is_out).max(0.0))
                .sum::<f64>()
        };
        let out = self.times[1] * item.outward / self.terms.link;
        let (with, without) = (all(true) - out, all(false));
        let gain = with.max(without);
        (gain > 0.0).then_some((gain, without < with))
    }
}

struct Facts {
    compute: f64,
    items: Vec<Item>,
    /// Bytes at each line of the bound, including all values that may be away.
    bytes: Vec<f64>,
    /// Bytes of the host's memory, if it cannot hold everything that could wait there, and there is
    /// no disk behind it.
    host: Option<f64>,
    /// µs per byte on the link.
    wire: f64,
}

/// The lines between two accesses of a value. They may go over the step's end.
type Absence = (Value, Range<usize>);

/// Every absence, those of a value together. Only states are away over the step's end.
fn absences(problem: &Problem<'_>) -> Vec<Absence> {
    let graph = problem.graph;
    let n = problem.lines.len();
    let mut absences = vec![];
    for (value, data) in graph.values.iter() {
        let accesses = &problem.accesses[value];
        let (Some(&first), Some(&last)) = (accesses.first(), accesses.last()) else {
            continue;
        };
        if graph.root(value) != value || data.ty.bytes() == 0 {
            continue;
        }
        let pairs = accesses.windows(2);
        absences.extend(pairs.map(|pair| (value, pair[0] as usize + 1..pair[1] as usize)));
        if matches!(data.def, Def::State(_)) {
            absences.push((value, last as usize + 1..n + first as usize));
        }
    }
    absences
}

fn size(problem: &Problem<'_>, value: Value) -> f64 {
    buffer_bytes(problem.graph.values[value].ty.bytes()) as f64
}

/// Bytes at each line, including all values that may be away.
fn bytes_at_lines(problem: &Problem<'_>, absences: &[Absence]) -> Vec<f64> {
    let n = problem.lines.len();
    let mut change = vec![0.0; 2 * n + 1];
    for (value, lines) in absences.iter().filter(|(_, lines)| lines.start < lines.end) {
        change[lines.start] += size(problem, *value);
        change[lines.end] -= size(problem, *value);
    }
    let away = at_lines(n, &change).into_iter().enumerate();
    away.map(|(at, away)| needed(problem, at) + away).collect()
}

/// The bytes at each of `n` lines, from their changes over two steps.
fn at_lines(n: usize, changes: &[f64]) -> Vec<f64> {
    let mut bytes = vec![0.0; n];
    let mut sum = 0.0;
    for (at, change) in changes[..2 * n].iter().enumerate() {
        sum += change;
        bytes[at % n] += sum;
    }
    bytes
}

/// The fullest line of each stretch of lines.
fn fullest_lines(bytes: &[f64]) -> Vec<usize> {
    let n = bytes.len();
    let stretch = n.div_ceil(LINES).max(1);
    let starts = (0..n).step_by(stretch);
    starts
        .filter_map(|from| {
            (from..n.min(from + stretch)).max_by(|&a, &b| bytes[a].total_cmp(&bytes[b]))
        })
        .collect()
}

/// The values that may be away at one of the lines of the bound.
fn items(problem: &Problem<'_>, absences: &[Absence], looked_at: &[usize]) -> Vec<Item> {
    let n = problem.lines.len();
    let index =
        |at: usize| looked_at.partition_point(|&line| line < at % n) + at / n * looked_at.len();
    let gradients = gradients(problem);
    let mut items: Vec<Item> = vec![];
    let mut last = None;
    for (value, lines) in absences {
        let within = index(lines.start)..index(lines.end);
        if within.is_empty() {
            continue;
        }
        if last != Some(value) {
            let (outward, run) = times(problem, &gradients, *value);
            let is_input = matches!(problem.graph.values[*value].def, Def::Input(_));
            let bytes = size(problem, *value);
            items.push(Item {
                bytes,
                on_host: if is_input { 0.0 } else { bytes },
                gaps: vec![],
                outward,
                run,
            });
            last = Some(value);
        }
        // The host may run an update.
        let reader = problem.lines[lines.end % n];
        let by_device = problem.graph.nodes[reader].phase != Phase::Optimizer;
        let inward = if by_device {
            wire(problem, *value)
        } else {
            0.0
        };
        let item = items.last_mut().expect("an item was pushed");
        item.gaps.push((within, inward));
    }
    items
}

impl Facts {
    fn new(problem: &Problem<'_>) -> Facts {
        let graph = problem.graph;
        let phase = |at: usize| graph.nodes[problem.lines[at]].phase;
        let n = problem.lines.len();
        let on_device = (0..n).filter(|&at| phase(at) != Phase::Optimizer);
        let compute = on_device
            .map(|at| problem.cost.run(graph, problem.lines[at]))
            .sum();
        let absences = absences(problem);
        let bytes = bytes_at_lines(problem, &absences);
        let fullest = fullest_lines(&bytes);
        let items = items(problem, &absences, &fullest);
        let all: f64 = items.iter().map(|item| item.on_host).sum();
        let limit = problem.host_limit.filter(|_| problem.device.disk.is_none());
        let large = 1u64 << 30;
        let wire = (problem.cost.link(large) - problem.cost.link(0)) / large as f64;
        Facts {
            compute,
            items,
            bytes: fullest.into_iter().map(|at| bytes[at]).collect(),
            host: limit.map(|bytes| bytes as f64).filter(|&bytes| bytes < all),
            wire,
        }
    }

    /// The bound that the prices prove, µs, and its slope for each price.
    fn bound(&self, terms: Terms, prices: &Prices) -> (f64, Prices) {
        let n = self.bytes.len();
        let priced = Priced::new(n, terms, prices);
        let host = self.host.map(|bytes| bytes * terms.host);
        let excess: Vec<f64> = self
            .bytes
            .iter()
            .map(|bytes| bytes - terms.budget)
            .collect();
        let mut bound = priced.times[2] * self.compute / terms.compute;
        bound += excess
            .iter()
            .zip(&prices.lines)
            .map(|(excess, price)| excess * price)
            .sum::<f64>();
        bound -= host.unwrap_or(0.0) * prices.host.iter().sum::<f64>();
        let mut times = [0.0, 0.0, self.compute / terms.compute];
        // Bytes that leave the device, and of them those that wait on the host.
        let [mut away, mut waiting] = [(); 2].map(|()| vec![0.0; 2 * n + 1]);
        for item in &self.items {
            let Some((gain, is_out)) = priced.best(item) else {
                continue;
            };
            bound -= gain;
            times[1] += if is_out {
                item.outward / terms.link
            } else {
                0.0
            };
            for gap in &item.gaps {
                if priced.gain(item, gap, is_out) <= 0.0 {
                    continue;
                }
                let (lines, inward) = gap;
                away[lines.start] += item.bytes;
                away[lines.end] -= item.bytes;
                match is_out && priced.copied(item, gap) <= priced.run(item) {
                    true => {
                        times[0] += inward / terms.link;
                        waiting[lines.start] += item.on_host;
                        waiting[lines.end] -= item.on_host;
                    }
                    false => times[2] += item.run / terms.compute,
                }
            }
        }
        let [away, waiting] = [away, waiting].map(|change| at_lines(n, &change));
        let left = excess.iter().zip(away).map(|(excess, away)| excess - away);
        let over = |waiting: f64| host.map_or(0.0, |host| waiting - host);
        let slope = Prices {
            lines: left.collect(),
            host: waiting.into_iter().map(over).collect(),
            times,
        };
        (bound, slope)
    }

    /// Good prices, if a plan takes `most` µs. Slopes change suddenly where another way to be away
    /// becomes the cheapest. So the method starts from several weights.
    fn prices(&self, terms: Terms, most: f64) -> Prices {
        let mut best = Prices {
            lines: vec![0.0; self.bytes.len()],
            host: vec![0.0; self.bytes.len()],
            times: [0.0, 0.0, 1.0],
        };
        let mut bound = self.bound(terms, &best).0;
        for times in TIMES {
            let prices = self.climb(terms, most, self.start(terms, times));
            let proved = self.bound(terms, &prices).0;
            if bound < proved {
                (bound, best) = (proved, prices);
            }
        }
        best
    }

    /// For given weights, the best of a few prices of a byte, either at the fullest line or at all
    /// lines above the budget.
    fn start(&self, terms: Terms, times: [f64; 3]) -> Prices {
        let fullest = self.bytes.iter().copied().fold(0.0, f64::max);
        let uniform = |(scale, at_all, waits): (i32, bool, bool)| {
            let priced = |&bytes: &f64| terms.budget < bytes && (at_all || bytes == fullest);
            let n = self.bytes.iter().filter(|bytes| priced(bytes)).count();
            let price = self.wire / terms.link * SCALE.powi(scale) / n.max(1) as f64;
            let price = |bytes| if priced(bytes) { price } else { 0.0 };
            let lines: Vec<f64> = self.bytes.iter().map(price).collect();
            let host = match waits {
                true => lines.clone(),
                false => vec![0.0; self.bytes.len()],
            };
            Prices { lines, host, times }
        };
        let free = (0..SCALES).map(|scale| (scale, false));
        let priced = (-SCALES..SCALES).map(|scale| (scale, true));
        let all = free.chain(priced.filter(|_| self.host.is_some()));
        let all = all
            .flat_map(|(scale, waits)| [(scale, false, waits), (scale, true, waits)])
            .map(uniform);
        let best = all
            .map(|prices| (self.bound(terms, &prices).0, prices))
            .max_by(|a, b| a.0.total_cmp(&b.0));
        best.expect("there should be scales").1
    }

    /// Better prices.
    fn climb(&self, terms: Terms, most: f64, mut prices: Prices) -> Prices {
        let mut best = (self.bound(terms, &prices).0, prices.clone());
        // The unit of a byte's price, so that all directions are in µs.
        let unit = prices.lines.iter().copied().fold(0.0, f64::max);
        let mut hope = most - best.0;
        let mut fruitless = 0;
        for _ in 0..STEPS {
            let (bound, slope) = self.bound(terms, &prices);
            fruitless += 1;
            if best.0 < bound {
                if best.0 * (1.0 + 1e-4) < bound {
                    fruitless = 0;
                }
                best = (bound, prices.clone());
            }
            if PATIENCE < fruitless {
                (hope, fruitless) = (0.5 * hope, 0);
                prices = best.1.clone();
                continue;
            }
            let up = |(price, slope): (&f64, &f64)| {
                if *price <= 0.0 {
                    slope.max(0.0)
                } else {
                    *slope
                }
            };
            let lines: Vec<f64> = prices.lines.iter().zip(&slope.lines).map(up).collect();
            let host: Vec<f64> = prices.host.iter().zip(&slope.host).map(up).collect();
            // Along the simplex only the differences of the weights count.
            let mean = slope.times.iter().sum::<f64>() / 3.0;
            let bytes = lines.iter().chain(&host);
            let square = bytes.map(|s| (s * unit).powi(2)).sum::<f64>()
                + slope.times.iter().map(|s| (s - mean).powi(2)).sum::<f64>();
            if square <= 0.0 || hope <= 1e-6 * best.0 {
                break;
            }
            let step = (best.0 + hope - bound) / square;
            let bytes = prices.lines.iter_mut().chain(&mut prices.host);
            for (price, slope) in bytes.zip(lines.into_iter().chain(host)) {
                *price = (*price + step * slope * unit * unit).max(0.0);
            }
            for (price, slope) in prices.times.iter_mut().zip(slope.times) {
                *price += step * (slope - mean);
            }
            prices.times = simplex(prices.times);
        }
        best.1
    }
}

/// The nearest point whose parts are not negative and have the sum 1.
fn simplex(point: [f64; 3]) -> [f64; 3] {
    let mut sorted = point;
    sorted.sort_by(|a, b| b.total_cmp(a));
    let mut sum = 0.0;
    let mut shift = 0.0;
    for (k, part) in sorted.iter().enumerate() {
        sum += part;
        let candidate = (sum - 1.0) / (k + 1) as f64;
        if candidate < *part {
            shift = candidate;
        }
    }
    point.map(|part| (part - shift).max(0.0))
}

/// Bytes that a line itself needs. An update may run on the host, so it needs none.
fn needed(problem: &Problem<'_>, at: usize) -> f64 {
    let graph = problem.graph;
    let node = problem.lines[at];
    let data = &graph.nodes[node];
    if data.phase == Phase::Optimizer {
        return 0.0;
    }
    let mut accessed: BTreeSet<Value> = data.inputs.iter().map(|&v| graph.root(v)).collect();
    // A result in an operand's place needs no bytes of its own.
    let in_place = |j: usize| data.op.inplace().iter().any(|&(_, k)| k == j);
    accessed.extend(
        data.outputs
            .iter()
            .enumerate()
            .filter(|&(j, _)| !in_place(j))
            .map(|(_, &v)| graph.root(v)),
    );
    let bytes = accessed
        .into_iter()
        .map(|value| graph.values[value].ty.bytes())
        .filter(|&bytes| 0 < bytes);
    let scratch = problem.scratch[node].on(problem.device.processor());
    bytes.map(|bytes| buffer_bytes(bytes) as f64).sum::<f64>() + scratch as f64
}

/// The time of a value's absence: for copying it out, once, and for computing it again, each time,
/// µs.
fn times(problem: &Problem<'_>, gradients: &Gradients, value: Value) -> (f64, f64) {
    let graph = problem.graph;
    let link = wire(problem, value);
    match graph.values[value].def {
        Def::State(state) if graph.states[state].kind == StateKind::Moment => (
            gradients
                .moment
                .get(&state)
                .map_or(0.0, |&gradient| link.min(gradient)),
            f64::INFINITY,
        ),
        Def::State(_) | Def::Input(_) => (0.0, f64::INFINITY),
        Def::Node(node, _) => {
            let data = &graph.nodes[node];
            let share = problem.cost.run(graph, node) / data.outputs.len() as f64;
            let run = if data.op.is_pure() {
                share
            } else {
                f64::INFINITY
            };
            let outward = gradients.own.get(&value).copied().unwrap_or(link);
            (
                if data.phase == Phase::Optimizer {
                    0.0
                } else {
                    outward
                },
                run,
            )
        }
    }
}

/// The copies out that updates on the host need.
struct Gradients {
    /// For each value that an update reads, the part of its copy out that its own absence counts,
    /// µs.
    own: BTreeMap<Value, f64>,
    /// The same for the absence of each moment.
    moment: BTreeMap<State, f64>,
}

/// After one copy out of a gradient, the gradient and all moments of its update may be away. Each
/// counts an equal part of this copy.
fn gradients(problem: &Problem<'_>) -> Gradients {
    let graph = problem.graph;
    let optimizer = |value: Value| {
        graph
            .def_node(value)
            .filter(|&node| graph.nodes[node].phase == Phase::Optimizer)
    };
    let mut readers: BTreeMap<Value, BTreeSet<State>> = BTreeMap::new();
    for (state, data) in graph.states.iter() {
        let Some(update) = optimizer(graph.root(data.after)) else {
            continue;
        };
        // Other nodes of the optimizer that use a gradient may also run on the host.
        let mut stack = vec![update];
        let mut seen: BTreeSet<Node> = stack.iter().copied().collect();
        while let Some(node) = stack.pop() {
            for value in graph.nodes[node].inputs.iter().map(|&v| graph.root(v)) {
                match optimizer(value) {
                    Some(node) if seen.insert(node) => stack.push(node),
                    Some(_) => {}
                    None if graph.def_node(value).is_some() => {
                        let moments = readers.entry(value).or_default();
                        moments.extend((data.kind == StateKind::Moment).then_some(state));
                    }
                    None => {}
                }
            }
        }
    }
    let mut gradients = Gradients {
        own: BTreeMap::new(),
        moment: BTreeMap::new(),
    };
    for (value, moments) in readers {
        let part = wire(problem, value) / (1 + moments.len()) as f64;
        gradients.own.insert(value, part);
        moments
            .into_iter()
            .for_each(|moment| *gradients.moment.entry(moment).or_default() += part);
    }
    gradients
}

/// A value's time on the link without latency, µs.
fn wire(problem: &Problem<'_>, value: Value) -> f64 {
    problem.cost.link(problem.graph.values[value].ty.bytes()) - problem.cost.link(0)
}
