//! Places the blocks of a trace: sweeps through time, then first fit in several orders, then repair
//! and search in turns, until the plan is optimal or the effort is used up. Effort is counted in
//! examined items, not in seconds, so the same trace gets the same plan.
//!
//! Each turn first repairs and searches the large blocks alone: see [`Level`].

use super::exact::{Blocks, Outcome, Search};
use super::order::{self, Order, Rank};
use super::problem::{FREE, Item, Problem};
use super::repair::Repair;
use super::sweep::Sweep;
use super::trace::Trace;
use super::tree::Tree;
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

pub use super::problem::Error;

/// How long a planner searches.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Effort {
    /// A sweep. If it is not near the bound, also first fit in one order, or in several orders if
    /// there are few blocks.
    Fast,
    /// Sweeps and orders, and an amount of repair and search that depends on the number of blocks.
    /// The compiler uses it for each schedule that it compares.
    Brief,
    /// Sweeps and orders, then some repair and search: a second or a few.
    #[default]
    Normal,
    /// Far more repair and search.
    Max,
}

ir::named! {
    /// A method to find better plans than one pass of first fit.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Method {
        /// First and best fit in the order of time.
        Sweeps = "sweeps",
        /// First fit in orders other than the first.
        Orders = "orders",
        /// First fit in random orders, for problems that are too large for the search.
        Restarts = "restarts",
        /// The smallest hole that is large enough, instead of the lowest.
        BestFit = "best-fit",
        /// The large blocks alone, then the others in what they leave.
        Coarse = "coarse",
        /// Blocks that are too high are moved, then the blocks that are in their way.
        Repair = "repair",
        /// Exact search.
        Search = "search",
    }
}

/// The requirements of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// How long to search.
    pub effort: Effort,
    /// A plan with at most this peak is accepted, bytes.
    pub capacity: Option<u64>,
    /// All addresses and sizes are multiples of this, a power of two; bytes.
    pub align: u64,
    /// The number of threads. The plan does not depend on it.
    pub threads: usize,
    /// Methods that are not used, to measure what each contributes.
    pub without: [Option<Method>; Method::ALL.len()],
}

impl Options {
    fn has(&self, method: Method) -> bool {
        !self.without.contains(&Some(method))
    }
}

impl Default for Options {
    fn default() -> Options {
        Options {
            effort: Effort::default(),
            capacity: None,
            align: 1,
            threads: 1,
            without: [None; _],
        }
    }
}

/// The addresses of blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placement {
    /// The offset of each block of the trace, bytes.
    pub offsets: Vec<u64>,
    /// The end of the highest block, bytes.
    pub peak: u64,
    /// No plan has a lower peak, bytes.
    pub lower_bound: u64,
    /// True if it is proven that no plan has a lower peak.
    pub optimal: bool,
    /// The method that found it.
    pub method: String,
}

/// The amount of each method for an effort.
struct Limits {
    /// The number of sweeps.
    sweeps: usize,
    /// The number of address ranges that first fit may pass, in all orders together. One order is
    /// always tried.
    climbed: u64,
    /// The same in random orders.
    restarted: u64,
    /// For first fit, a gap below the lower bound divided by this is good enough.
    near: u64,
    /// The number of items that repair may examine.
    looked: u64,
    /// The number of blocks and sections that the exact search may examine.
    searched: u64,
    /// Repair and search take turns. Each turn searches twice as long as the turn before; the last
    /// one has half of it all.
    turns: u32,
    /// Each turn repairs 2 to this power times as long as the turn before. With 2, early turns
    /// repair less than with 1, and the last one more: the sum is the same. If the search can find
    /// a plan, it mostly does so in an early turn.
    repairs: u32,
    /// The last turns that also search between the target and the best plan. Turns before them
    /// search for the target alone.
    between: u32,
    /// A plan that exceeds the target by at most the target divided by this gets only one turn.
    gap: u64,
    /// A plan that exceeds the target by more than the target divided by the first of these gets no
    /// last turn; with the second, not the turn before either. `None`: every plan gets all turns.
    far: Option<[u64; 2]>,
    /// After this many turns that find nothing, there is no further one.
    fruitless: u32,
    /// The work on large blocks alone, in halves of the work on all blocks.
    coarse: u64,
}

impl Effort {
    /// The limits for `n` items.
    fn limits(self, n: u64) -> Limits {
        match self {
            Effort::Fast => Limits {
                sweeps: 1,
                climbed: 150_000,
                restarted: 0,
                near: 4096,
                looked: 0,
                searched: 0,
                turns: 0,
                repairs: 0,
                between: 0,
                gap: u64::MAX,
                far: None,
                fruitless: u32::MAX,
                coarse: 0,
            },
            Effort::Brief => {
                // This is enough for most schedules that are above the bound after all orders. In
                // small schedules a single gap is a larger share, so they get more. Of 1036
                // schedules of small models that no order solves, 55 end more than half a per cent
                // above the bound; 71 did with twice this work, and none on large blocks alone.
                let (looked, searched) = match n < 512 {
                    true => (2_000_000, 8_000_000),
                    false => ((1_000 * n).min(4_000_000), 1_000 * n),
                };
                Limits {
                    climbed: 2_000_000,
                    restarted: 0,
                    looked,
                    searched,
                    // The rest of such a gap takes most of the time and changes no decision.
                    gap: 1000,
                    // Turns solve 1865 of 1936 schedules of small models. With these two numbers, 3
                    // fewer, and 25 others end 0.9 per cent higher, in three quarters of the time.
                    far: Some([40, 20]),
                    // With this, one fewer, and others end 0.04 per cent higher.
                    fruitless: 2,
                    // The search mostly finds the target or nothing.
                    between: 1,
                    coarse: 3,
                    ..Effort::Normal.limits(n)
                }
            }
            Effort::Normal => {
                // What cannot be searched is repaired for as long.
                let (looked, searched) = match n <= SEARCHED as u64 {
                    true => (8_000_000, 180_000_000),
                    false => (48_000_000, 0),
                };
                Limits {
                    sweeps: 4,
                    climbed: 60_000_000,
                    restarted: 60_000_000,
                    near: 1 << 20,
                    looked,
                    searched,
                    turns: 4,
                    repairs: 1,
                    between: 4,
                    gap: u64::MAX,
                    far: None,
                    fruitless: u32::MAX,
                    coarse: 1,
                }
            }
            Effort::Max => Limits {
                sweeps: 4,
                climbed: 400_000_000,
                restarted: 400_000_000,
                near: 1 << 40,
                looked: 200_000_000,
                searched: 2_000_000_000,
                turns: 8,
                repairs: 2,
                between: 1,
                gap: u64::MAX,
                far: None,
                fruitless: u32::MAX,
                coarse: 1,
            },
        }
    }
}

/// Sweeps, in the order in which they are tried.
const SWEEPS: [Sweep; 4] = [
    Sweep {
        backward: true,
        snug: false,
    },
    Sweep {
        backward: true,
        snug: true,
    },
    Sweep {
        backward: false,
        snug: false,
    },
    Sweep {
        backward: false,
        snug: true,
    },
];
/// The most blocks for the exact search, which stores for each block all blocks that live at the
/// same time.
const SEARCHED: usize = 1500;
/// The most blocks that repair starts with. Of more it would place most, but that counts only if
/// all are placed.
const HIGH: usize = 24;
/// The levels: blocks are large if they have at least the lower bound divided by one of these. No
/// single number is best for most traces, so turns use them one after the other.
const LARGE: [u64; 4] = [200, 50, 1000, 500];
/// The fewest large blocks that are placed alone.
const FEW: usize = 16;
/// Most items for which the tightest hole is searched, which examines all holes, and for which
/// large blocks are placed alone first, which repeats sweeps and orders.
const SNUG: usize = 50_000;

/// The most bytes alive at once: no plan has a lower peak. 0 for a trace that [`place`] refuses.
pub(super) fn lower_bound(trace: &Trace, align: u64) -> u64 {
    Problem::new(trace, align).map_or(0, |problem| problem.bound())
}

/// Finds an address for every block. `progress` receives the method being tried and the lowest peak
/// so far.
///
/// # Errors
/// A block's life, gaps, size, alignment or fixed offset is invalid, or blocks with fixed offsets
/// overlap.
pub(super) fn place(
    trace: &Trace,
    options: &Options,
    progress: &mut dyn FnMut(&str, u64),
) -> Result<Placement, Error> {
    let mut problem = Problem::new(trace, options.align)?;
    let lower_bound = problem.bound();
    problem.fixed_apart(trace)?;
    let (stacked, base) = problem.stack_whole();
    let target = options
        .capacity
        .map_or(lower_bound, |capacity| capacity.max(lower_bound));
    let mut planner = Planner::new(&problem, base, lower_bound, target, progress);
    planner.plan(options);
    let mut offsets: Vec<u64> = trace
        .blocks
        .iter()
        .map(|block| block.offset.unwrap_or(0))
        .collect();
    for (block, at) in stacked {
        offsets[block as usize] = at;
    }
    for (item, &at) in problem.items.iter().zip(&planner.at) {
        offsets[item.block as usize] = at;
    }
    let (peak, method) = (planner.peak, planner.method);
    Ok(Placement {
        offsets,
        peak,
        lower_bound: planner.proven,
        optimal: peak == planner.proven,
        method,
    })
}

/// The large blocks of a problem. Small blocks cost a search as much as large ones, and nearly
/// always find room in what the others leave. Without them, repair and search find better plans.
struct Level {
    problem: Problem,
    /// The position in the whole problem of each item.
    large: Vec<u32>,
    /// The best plan so far, if there is one, and its peak.
    at: Vec<u64>,
    peak: u64,
}

struct Planner<'a> {
    problem: &'a Problem,
    /// Only first fit in an order needs this.
    fullest: Vec<u64>,
    tree: Tree,
    /// No item is below this address.
    base: u64,
    /// A peak that is good enough.
    target: u64,
    /// The most bytes alive at once.
    bound: u64,
    /// The best plan, its peak, and its method.
    at: Vec<u64>,
    peak: u64,
    method: String,
    /// It is proven that no plan has a lower peak.
    proven: u64,
    progress: &'a mut dyn FnMut(&str, u64),
}

impl<'a> Planner<'a> {
    fn new(
        problem: &'a Problem,
        base: u64,
        bound: u64,
        target: u64,
        progress: &'a mut dyn FnMut(&str, u64),
    ) -> Planner<'a> {
        Planner {
            problem,
            fullest: vec![],
            tree: Tree::new(1),
            base,
            target,
            bound,
            at: vec![],
            peak: u64::MAX,
            method: String::new(),
            proven: bound,
            progress,
        }
    }

    fn plan(&mut self, options: &Options) {
        let limits = options.effort.limits(self.problem.items.len() as u64);
        let near = match options.capacity {
            Some(_) => self.target,
            None => self.bound.saturating_add(self.bound / limits.near),
        };
        self.start(options, &limits, near);
        if options.effort == Effort::Fast || self.peak <= near {
            return;
        }
        let has_levels = options.has(Method::Coarse) && self.problem.items.len() <= SNUG;
        let mut levels = match has_levels {
            true => self.levels(),
            false => vec![],
        };
        self.improve(options, &limits, &mut levels, 0);
    }

    /// Sweeps and orders, until a plan has at most `near` bytes.
    fn start(&mut self, options: &Options, limits: &Limits, near: u64) {
        let plain = Sweep::can(self.problem);
        let n_sweeps = if plain && options.has(Method::Sweeps) {
            limits.sweeps
        } else {
            0
        };
        for sweep in SWEEPS.iter().take(n_sweeps) {
            let at = sweep.place(self.problem, self.base);
            self.offer(at, &sweep.name());
            if self.peak <= near {
                return;
            }
        }
        self.prepare();
        let n_orders = match options.has(Method::Orders) {
            // Sweeps do the same as the last two orders, and better.
            true => order::PLACING.len() - if 0 < n_sweeps { 2 } else { 0 },
            false => 1,
        };
        let orders = &order::PLACING[..n_orders];
        let mut found: Vec<(u64, usize)> = vec![];
        for (i, order) in orders.iter().enumerate() {
            if self.peak <= near || limits.climbed < self.tree.work && 0 < i {
                break;
            }
            found.push((self.first_fit(order, false), i));
        }
        if options.effort == Effort::Fast || self.peak <= near {
            return;
        }
        if SEARCHED < self.problem.items.len() && options.has(Method::Restarts) {
            self.restart(limits.restarted);
        }
        found.sort_unstable();
        if self.problem.items.len() <= SNUG && options.has(Method::BestFit) {
            for &(_, i) in found.iter().take(4) {
                if self.target < self.peak && self.tree.work < limits.climbed {
                    self.first_fit(&orders[i], true);
                }
            }
        }
    }

    /// Prepares for first fit in an order.
    fn prepare(&mut self) {
        self.fullest = order::fullest(self.problem);
        self.tree = Tree::new(self.problem.sections().max(1));
    }

    /// Repair and search, of the large blocks alone and of all blocks. They take turns, each with
    /// more work than the last. Most traces need only a little of one of them.
    fn improve(&mut self, options: &Options, limits: &Limits, levels: &mut [Level], seed: u64) {
        let mut repair = options
            .has(Method::Repair)
            .then(|| Repair::new(self.problem, self.base, seed));
        let free = self.problem.items.iter().all(|item| item.fixed == FREE);
        let is_searchable = self.problem.items.len() <= SEARCHED;
        let searched = options.has(Method::Search) && is_searchable && free;
        let blocks = searched.then(|| Blocks::new(self.problem));
        let mut search = blocks
            .as_ref()
            .map(|blocks| Searches::new(blocks, options.threads, seed));
        let mut fruitless = 0;
        for turn in (1..=limits.turns).rev() {
            let above = self.peak.saturating_sub(self.target);
            let is_near = turn < limits.turns && above <= self.target / limits.gap;
            let far = limits.far.as_ref();
            let far = far.and_then(|far| far.get(turn as usize - 1));
            let is_far = far.is_some_and(|share| self.target / share < above);
            if is_near || is_far || limits.fruitless <= fruitless {
                break;
            }
            let before = self.peak;
            let looked = (limits.looked >> (limits.repairs * turn)) * ((1 << limits.repairs) - 1);
            let searched = limits.searched >> turn;
            if self.target < self.peak && !levels.is_empty() {
                let number = (limits.turns - turn) as usize;
                let level = &mut levels[number % levels.len()];
                let limits = Limits {
                    restarted: limits.restarted >> (turn + 1),
                    climbed: limits.climbed >> (turn + 1),
                    looked: looked * limits.coarse / 2,
                    searched: searched * limits.coarse / 2,
                    turns: 2,
                    far: None,
                    ..*limits
                };
                self.coarse(options, &limits, level, number as u64);
            }
            match &mut repair {
                Some(repair) if self.target < self.peak => self.repair(repair, looked),
                _ => {}
            }
            match &mut search {
                Some(search) if self.target < self.peak => {
                    self.search(search, searched, turn <= limits.between);
                }
                _ => {}
            }
            fruitless = if self.peak < before { 0 } else { fruitless + 1 };
        }
    }

    /// The levels of this problem, in the order in which they are tried. Those with nearly all
    /// blocks, or with the same blocks as one before, are left out.
    fn levels(&self) -> Vec<Level> {
        let items = &self.problem.items;
        let mut levels: Vec<Level> = vec![];
        for share in LARGE {
            let is_large = |item: &Item| item.fixed != FREE || self.bound / share <= item.bytes;
            let n = items.iter().filter(|item| is_large(item)).count();
            let is_known = levels.iter().any(|level| level.large.len() == n);
            if FEW <= n && n <= items.len() / 10 * 9 && !is_known {
                let (problem, large) = self.problem.part(is_large);
                levels.push(Level {
                    problem,
                    large,
                    at: vec![],
                    peak: u64::MAX,
                });
            }
        }
        levels
    }

    /// Improves the plan of a level, and places the other blocks in what it leaves. Large blocks
    /// come in the order of their addresses, so first fit leaves them where they are, or lower.
    fn coarse(&mut self, options: &Options, limits: &Limits, level: &mut Level, seed: u64) {
        let bound = self.base + level.problem.bound();
        let target = bound + (self.target - self.bound);
        let mut silent = |_: &str, _| ();
        let mut planner = Planner::new(&level.problem, self.base, bound, target, &mut silent);
        if level.at.is_empty() {
            planner.start(options, limits, target);
        } else {
            planner.prepare();
            (planner.at, planner.peak) = (std::mem::take(&mut level.at), level.peak);
        }
        planner.improve(options, limits, &mut [], seed);
        (level.at, level.peak) = (planner.at, planner.peak);
        let mut is_large = vec![false; self.problem.items.len()];
        for &i in &level.large {
            is_large[i as usize] = true;
        }
        let mut large: Vec<usize> = (0..level.large.len()).collect();
        large.sort_by_key(|&k| level.at[k]);
        let limit = self.tree.work.saturating_add(2 * limits.climbed);
        for order in order::PLACING {
            let small = order.sorted(self.problem, &self.fullest).into_iter();
            let order: Vec<u32> = (large.iter().map(|&k| level.large[k]))
                .chain(small.filter(|&i| !is_large[i as usize]))
                .collect();
            for snug in [false, true] {
                self.fit(&order, snug, "coarse");
                if self.peak <= self.target || limit < self.tree.work {
                    return;
                }
            }
        }
    }

    /// Keeps a plan if it is better. Returns its peak.
    fn offer(&mut self, at: Vec<u64>, method: &str) -> u64 {
        let ends = self
            .problem
            .items
            .iter()
            .zip(&at)
            .map(|(item, at)| at + item.bytes);
        let peak = ends.max().unwrap_or(0).max(self.base);
        if peak < self.peak {
            (self.at, self.peak, self.method) = (at, peak, method.into());
            (self.progress)(method, peak);
        }
        peak
    }

    /// Places each item in turn at the lowest address that is free over its life, or in the
    /// smallest hole. Returns the peak, or the maximum if the plan cannot be better than the best
    /// one so far.
    fn first_fit(&mut self, order: &Order, snug: bool) -> u64 {
        let method = format!(
            "{} by {}",
            if snug { "best fit" } else { "first fit" },
            order.name
        );
        let sorted = order.sorted(self.problem, &self.fullest);
        self.fit(&sorted, snug, &method)
    }

    /// First fit in random orders, until `work` address ranges have been passed.
    fn restart(&mut self, work: u64) {
        let limit = self.tree.work.saturating_add(work);
        let mut random = 0x9E37_79B9_7F4A_7C15;
        while self.target < self.peak && self.tree.work < limit {
            let order = order::random(self.problem, &self.fullest, &mut random);
            // An order that is given up early costs its sorting.
            self.tree.work += order.len() as u64;
            self.fit(&order, false, "first fit in a random order");
        }
    }

    fn fit(&mut self, order: &[u32], snug: bool, method: &str) -> u64 {
        let problem = self.problem;
        self.tree.clear();
        let mut at = vec![0; problem.items.len()];
        let mut peak = self.base;
        let fixed = |&&i: &&u32| problem.items[i as usize].fixed != FREE;
        for &i in order
            .iter()
            .filter(fixed)
            .chain(order.iter().filter(|i| !fixed(i)))
        {
            let item = &problem.items[i as usize];
            let place = if item.fixed == FREE {
                self.hole(i, snug)
            } else {
                item.fixed
            };
            peak = peak.max(place + item.bytes);
            if self.peak <= peak {
                return u64::MAX;
            }
            for (start, end) in problem.spans(item).iter() {
                self.tree.insert(start, end, place, place + item.bytes);
            }
            at[i as usize] = place;
        }
        self.offer(at, method)
    }

    /// The offset of a hole for an item.
    fn hole(&mut self, i: u32, snug: bool) -> u64 {
        let item = &self.problem.items[i as usize];
        let spans = self.problem.spans(item);
        if item.spans.0 == item.spans.1 && snug {
            return self.tree.snuggest(
                (item.start, item.end),
                item.bytes,
                item.align,
                self.base,
                self.bound,
            );
        }
        let mut at = self.base;
        loop {
            let before = at;
            for span in spans.iter() {
                at = self.tree.lowest(span, item.bytes, item.align, at);
            }
            if at == before || item.spans.0 == item.spans.1 {
                return at;
            }
        }
    }

    /// Repairs the best plan for lower and lower capacities, with a few blocks above each.
    fn repair(&mut self, repair: &mut Repair<'_>, work: u64) {
        let limit = repair.work + work;
        let mut low = self.target;
        while low < self.peak && repair.work < limit {
            let middle = low + (self.peak - low) / 2;
            let capacity = middle.max(self.high()).min(self.peak - 1);
            let before = repair.work;
            let found = repair.run(&self.at, capacity, (work / 4).min(limit - repair.work));
            if repair.work == before {
                // The highest block cannot move, or it is fixed and below all others.
                return;
            }
            if let Some(at) = found {
                // All blocks slide down as far as possible, because moved blocks left holes.
                let mut order: Vec<u32> = (0..at.len() as u32).collect();
                order.sort_by_key(|&i| at[i as usize]);
                self.fit(&order, false, "repair");
                if self.peak <= low {
                    low = self.target;
                }
            } else {
                low = capacity;
                // When the two are close enough, the rest of the effort is used for one more step
                // down.
                if self.peak - low <= 1 + self.bound / 2000 {
                    low = self.target;
                }
            }
        }
    }

    /// The end of the item of the best plan that [`HIGH`] others exceed.
    fn high(&self) -> u64 {
        let items = self.problem.items.iter().zip(&self.at);
        let mut ends: Vec<u64> = items.map(|(item, at)| at + item.bytes).collect();
        match ends.len().checked_sub(HIGH + 1) {
            Some(nth) => *ends.select_nth_unstable(nth).1,
            None => self.base,
        }
    }

    /// Searches for a plan that is good enough. If `is_between` and half of the work finds none,
    /// searches for one with half the distance of the best plan, and so on.
    fn search(&mut self, searches: &mut Searches<'_>, work: u64, is_between: bool) {
        let mut low = self.target;
        let mut capacity = low;
        let mut left = work;
        while low < self.peak && 0 < left {
            (self.progress)("search", self.peak);
            let share = match capacity == self.target {
                true if !is_between => left,
                true => left / 2,
                false => left / 3 * 2,
            };
            let (outcome, at, used) = searches.run((self.base, capacity), share);
            left = left.saturating_sub(used.max(work / 32));
            match outcome {
                Outcome::Found => {
                    self.offer(at, "search");
                }
                Outcome::None => {
                    self.proven = self.proven.max(capacity + 1);
                    low = capacity + 1;
                    self.target = self.target.max(low);
                }
                Outcome::Spent if !is_between => return,
                Outcome::Spent => low = capacity + 1,
            }
            capacity = low + self.peak.saturating_sub(low) / 2;
        }
    }
}

/// Searches with several ranks, which learn from their failures.
struct Searches<'a> {
    searches: Vec<Search<'a>>,
    round: u64,
    /// The last capacity, and the work of each rank there.
    last: (u64, u64),
    /// None if there is only one thread.
    pool: Option<ThreadPool>,
}

impl<'a> Searches<'a> {
    /// Searches whose ranks depend on `seed`.
    fn new(blocks: &'a Blocks<'a>, threads: usize, seed: u64) -> Searches<'a> {
        let pool = (1 < threads)
            .then(|| ThreadPoolBuilder::new().num_threads(threads).build().ok())
            .flatten();
        Searches {
            searches: order::RANKS.iter().map(|_| Search::new(blocks)).collect(),
            round: seed << 8,
            last: (0, 0),
            pool,
        }
    }

    /// Searches with every rank, first with little work each, then with more and more, up to the
    /// given total. Returns the outcome, the plan if one was found, and the work.
    fn run(&mut self, (base, capacity): (u64, u64), work: u64) -> (Outcome, Vec<u64>, u64) {
        let mut used = 0;
        let mut each = 200 * self.searches[0].len() as u64;
        if self.last.0 == capacity {
            each = each.max(self.last.1);
        }
        while used < work {
            each = each.min((work - used) / self.searches.len() as u64 + 1000);
            let ranks = order::ranks(self.round);
            let run = |(search, rank): (&mut Search<'_>, Rank)| {
                search.left = each;
                (search.run(rank, base, capacity), each - search.left)
            };
            let outcomes: Vec<(Outcome, u64)> = match &self.pool {
                Some(pool) => {
                    pool.install(|| self.searches.par_iter_mut().zip(ranks).map(run).collect())
                }
                None => self.searches.iter_mut().zip(ranks).map(run).collect(),
            };
            used += outcomes.iter().map(|(_, used)| used).sum::<u64>();
            self.round += 1;
            if let Some(k) = outcomes
                .iter()
                .position(|(outcome, _)| *outcome != Outcome::Spent)
            {
                return (outcomes[k].0, self.searches[k].offsets().to_vec(), used);
            }
            each += each / 2;
        }
        // The good-enough capacity is tried again; other capacities change.
        if self.last.0 == 0 || self.last.0 == capacity {
            self.last = (capacity, each);
        }
        (Outcome::Spent, vec![], used)
    }
}
