//! Places of a trace's blocks: several orders of first fit, then repair, then search, until the plan is as good as the effort
//! allows or as good as it can be.

use super::exact::{Outcome, Search};
use super::order::{ORDERS, Order, RANKS};
use super::problem::{FREE, Problem};
use super::repair::Repair;
use super::trace::Trace;
use super::tree::Tree;

pub use super::problem::Error;

/// How long a planner tries.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Effort {
    /// One pass of first fit.
    Fast,
    /// About a second for some hundred blocks, three for twenty thousand.
    #[default]
    Normal,
    /// As long as it pays, up to about half a minute.
    Max,
}

/// What is asked of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// How long to try.
    pub effort: Effort,
    /// A plan whose peak is not above this is good enough, bytes.
    pub capacity: Option<u64>,
    /// All addresses and sizes are multiples of this, a power of two; bytes.
    pub align: u64,
    /// How many threads may search.
    pub threads: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options { effort: Effort::default(), capacity: None, align: 1, threads: 1 }
    }
}

/// Where blocks lie.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placement {
    /// One for each block of the trace, bytes.
    pub offsets: Vec<u64>,
    /// Where the highest block ends, bytes.
    pub peak: u64,
    /// No plan's peak is less, bytes.
    pub lower_bound: u64,
    /// True if it is proven that no plan's peak is less than this one's.
    pub optimal: bool,
    /// What found it.
    pub method: String,
}

/// The most bytes alive at once: no plan's peak is less. 0 for a trace that [`place`] refuses.
pub fn lower_bound(trace: &Trace, align: u64) -> u64 {
    Problem::new(trace, align).map_or(0, |problem| problem.bound())
}

/// Finds a place for every block. `progress` hears what is being tried, and the least peak so far.
pub fn place(
    trace: &Trace,
    options: &Options,
    progress: &mut dyn FnMut(&str, u64),
) -> Result<Placement, Error> {
    let problem = Problem::new(trace, options.align)?;
    let lower_bound = problem.bound();
    let _ = (Search::new, Outcome::Found, Repair::new, FREE, options.threads);
    let mut tree = Tree::new(problem.sections().max(1));
    let mut best = vec![];
    let mut peak = u64::MAX;
    let mut method = String::new();
    let verbose = std::env::var("LAB").is_ok();
    let clock = std::time::Instant::now();
    let mut each = |name: String, offsets: Option<(u64, Vec<u64>)>| {
        if let Some((p, o)) = offsets {
            if verbose { eprintln!("  {name} {:.3}% {:.2}s", 100.0 * (p as f64 / lower_bound as f64 - 1.0), clock.elapsed().as_secs_f64()); }
            if p < peak { peak = p; best = o; method = name.clone(); progress(&name, p); }
        }
    };
    for (name, order) in ORDERS {
        let order = sorted(&problem, *order);
        for snug in [false, true] {
            let result = first_fit(&problem, &order, 0, &mut tree, if snug { Some(lower_bound) } else { None }, u64::MAX);
            each(format!("{name}{}", if snug { "/bf" } else { "" }), result);
        }
    }
    let mut offsets = vec![0; trace.blocks.len()];
    for (item, &at) in problem.items.iter().zip(&best) { offsets[item.block as usize] = at; }
    Ok(Placement { offsets, peak, lower_bound, optimal: peak == lower_bound, method })
}

pub(super) fn sorted(problem: &Problem, order: Order) -> Vec<u32> {
    let mut keyed: Vec<(std::cmp::Reverse<[u64; 2]>, u32)> =
        problem.items.iter().enumerate().map(|(i, item)| (std::cmp::Reverse(order(problem, item)), i as u32)).collect();
    keyed.sort_unstable();
    keyed.into_iter().map(|(_, i)| i).collect()
}

/// Each item in turn at the lowest address that is free over its life, or in the snuggest hole below `snug`. None once a
/// peak is not below `limit`.
pub(super) fn first_fit(problem: &Problem, order: &[u32], base: u64, tree: &mut Tree, snug: Option<u64>, limit: u64) -> Option<(u64, Vec<u64>)> {
    tree.clear();
    let mut at = vec![0; problem.items.len()];
    let mut peak = base;
    for &i in order {
        let item = &problem.items[i as usize];
        let span = (item.start, item.end);
        let place = match snug {
            None => tree.lowest(span, item.bytes, item.align, base),
            Some(top) => tree.snuggest(span, item.bytes, item.align, base, top),
        };
        peak = peak.max(place + item.bytes);
        if limit <= peak { return None; }
        tree.insert(item.start, item.end, place, place + item.bytes);
        at[i as usize] = place;
    }
    Some((peak, at))
}

/// The lab's door.
pub fn lab(trace: &Trace, what: &str, arg: f64, arg2: f64) {
    let problem = Problem::new(trace, 1).unwrap();
    let bound = problem.bound();
    let gap = |p: u64| 100.0 * (p as f64 / bound as f64 - 1.0);
    let clock = std::time::Instant::now();
    let mut tree = Tree::new(problem.sections().max(1));
    match what {
        "info" => println!("items {} sections {} bound {bound}", problem.items.len(), problem.sections()),
        "exact" => {
            let mut search = Search::new(&problem, &problem.items);
            let cap = (bound as f64 * (1.0 + arg2 / 100.0)) as u64;
            let mut steps = 2 * problem.items.len() as u64;
            let mut total = 0;
            'all: loop {
                for (name, order) in RANKS {
                    let order = sorted(&problem, *order);
                    let mut rank = vec![0; order.len()];
                    for (r, &i) in order.iter().enumerate() { rank[i as usize] = r as u32; }
                    search.steps = steps;
                    let o = search.run(rank, 0, cap);
                    total += steps - search.steps;
                    if o != Outcome::Spent || total as f64 > arg {
                        println!("exact {o:?} {name} steps {steps} total {total} {:.2}s {:.0}/s", clock.elapsed().as_secs_f64(), total as f64 / clock.elapsed().as_secs_f64());
                        break 'all;
                    }
                }
                steps *= 2;
            }
        }
        "repair" => {
            let mut best: Option<(u64, Vec<u64>)> = None;
            for (_, order) in ORDERS {
                let order = sorted(&problem, *order);
                if let Some(b) = first_fit(&problem, &order, 0, &mut tree, None, best.as_ref().map_or(u64::MAX, |b| b.0)) { best = Some(b); }
            }
            let (mut peak, mut at) = best.unwrap();
            println!("start {:.3}% {:.2}s", gap(peak), clock.elapsed().as_secs_f64());
            let mut repair = Repair::new(&problem, 0);
            println!("prepared {:.2}s", clock.elapsed().as_secs_f64());
            let mut low = bound;
            let mut limit = arg2 as u64;
            while clock.elapsed().as_secs_f64() < arg && bound < peak {
                low = low.min(peak - 1); let cap = low + (peak - low) / 2;
                let found = repair.run(&at, cap, limit);
                match found {
                    Some(f) => {
                        let mut order: Vec<u32> = (0..f.len() as u32).collect();
                        order.sort_by_key(|&i| f[i as usize]);
                        let (p, a) = first_fit(&problem, &order, 0, &mut tree, None, u64::MAX).unwrap();
                        at = a; peak = p;
                        println!("cap {:.3}% -> {:.3}% work {} {:.2}s", gap(cap), gap(peak), repair.work, clock.elapsed().as_secs_f64());
                    }
                    None => {
                        println!("cap {:.3}% failed work {} {:.2}s", gap(cap), repair.work, clock.elapsed().as_secs_f64());
                        low = cap;
                        low = low.min(peak - 1);
                        if (peak - low) * 2000 < bound { low = bound; limit *= 4; }
                    }
                }
            }
            println!("end {:.3}%", gap(peak));
        }
        _ => {}
    }
}
