//! Makes a plan fit a capacity by moving few blocks. Blocks above the capacity are removed and
//! inserted again one by one, the hardest first. A block without a hole replaces those blocks that
//! are cheapest to move, which go to the pool. Each time a block finds no hole its price rises, so
//! the search avoids the same area for a while (ejection pools: Nagata and Bräysy, 2009, for
//! vehicle routes; rising priorities: Joslin and Clements' squeaky wheels).

use super::order::next;
use super::problem::{FREE, Item, Problem, aligned};

/// Not placed.
const OPEN: u64 = u64::MAX;

/// An address and an item in one number, which sorts by the address: numbers of 64 bits sort
/// several times as fast as pairs.
#[derive(Clone, Copy)]
struct Keys {
    /// Bits of an item's number.
    bits: u32,
}

impl Keys {
    fn new(n: usize) -> Keys {
        Keys {
            bits: usize::BITS - n.leading_zeros(),
        }
    }

    /// True if keys have room for addresses up to this one.
    fn hold(self, address: u64) -> bool {
        self.bits <= address.leading_zeros()
    }

    fn key(self, address: u64, item: u32) -> u64 {
        address << self.bits | u64::from(item)
    }

    fn address(self, key: u64) -> u64 {
        key >> self.bits
    }

    fn item(self, key: u64) -> u32 {
        (key & ((1 << self.bits) - 1)) as u32
    }
}

/// A search for a plan within a capacity.
pub(super) struct Repair<'a> {
    problem: &'a Problem,
    /// No item is below this address.
    base: u64,
    /// Items alive at the first of every `stride` sections.
    alive: Vec<Vec<u32>>,
    stride: u32,
    /// The first item that starts in a section or after it.
    first: Vec<u32>,
    /// How hard it is to move an item, by its size and life; and how often it was in the way.
    weight: Vec<u64>,
    trouble: Vec<u32>,
    at: Vec<u64>,
    random: u64,
    keys: Keys,
    /// Placed items that live at the same time as the current one, by their starts and by their
    /// ends; and the cost of each, by its number.
    starts: Vec<u64>,
    ends: Vec<u64>,
    costs: Vec<u64>,
    /// The number of examined items.
    pub(super) work: u64,
}

impl<'a> Repair<'a> {
    /// Prepares for a problem whose items all lie at `base` or above. Ties are broken at random, by
    /// `seed`.
    pub(super) fn new(problem: &'a Problem, base: u64, seed: u64) -> Repair<'a> {
        let n = problem.items.len();
        let sections = problem.sections();
        let lives: u64 = problem.items.iter().map(Item::sections).sum();
        let stride = (lives / (8 * n.max(1) as u64) + 1).min(u64::from(u32::MAX)) as u32;
        let mut alive = vec![vec![]; (sections / stride + 1) as usize];
        let mut first = vec![0; sections as usize + 1];
        for (i, item) in problem.items.iter().enumerate() {
            for stop in item.start.div_ceil(stride)..item.end.div_ceil(stride) {
                alive[stop as usize].push(i as u32);
            }
            first[item.start as usize + 1] = i as u32 + 1;
        }
        for s in 1..first.len() {
            first[s] = first[s].max(first[s - 1]);
        }
        // Other shares of size and life solved as many schedules, but fewer of minimalloc's traces.
        // Square roots are the same on all machines.
        let weight = |item: &Item| {
            let root = (item.bytes as f64 * item.sections() as f64).sqrt().sqrt();
            (16.0 * root) as u64 + 1
        };
        Repair {
            problem,
            base,
            alive,
            stride,
            first,
            weight: problem.items.iter().map(weight).collect(),
            trouble: vec![1; n],
            at: vec![],
            random: 0x9E37_79B9_7F4A_7C15 ^ seed,
            keys: Keys::new(n),
            starts: vec![],
            ends: vec![],
            costs: vec![0; n],
            work: 0,
        }
    }

    /// Searches for a plan within `capacity`, starting from another plan, until `limit` items have
    /// been examined. No plan is found for a capacity that keys cannot hold: more than 16 TiB for a
    /// million items.
    pub(super) fn run(&mut self, start: &[u64], capacity: u64, limit: u64) -> Option<Vec<u64>> {
        if !self.keys.hold(capacity) {
            return None;
        }
        let items = &self.problem.items;
        self.at = start.to_vec();
        self.trouble.fill(1);
        let mut pool = vec![];
        for (i, item) in items.iter().enumerate() {
            if capacity < start[i] + item.bytes {
                if item.fixed != FREE || capacity < aligned(self.base, item.align) + item.bytes {
                    return None;
                }
                self.at[i] = OPEN;
                pool.push(i as u32);
            }
        }
        let limit = self.work.saturating_add(limit);
        while let Some(item) = self.hardest(&mut pool) {
            if limit <= self.work {
                return None;
            }
            self.insert(item, capacity, &mut pool)?;
        }
        Some(std::mem::take(&mut self.at))
    }

    /// Takes the block out of the pool that costs most to move.
    fn hardest(&self, pool: &mut Vec<u32>) -> Option<u32> {
        let hardest = (0..pool.len()).max_by_key(|&k| self.cost(pool[k]))?;
        Some(pool.swap_remove(hardest))
    }

    /// Finds the placed items that live at the same time as an item.
    fn look(&mut self, of: u32) {
        let item = &self.problem.items[of as usize];
        self.starts.clear();
        let stop = item.start / self.stride;
        let later = self.first[(stop * self.stride) as usize + 1]..self.first[item.end as usize];
        let alive = &self.alive[stop as usize];
        self.work += 8 + alive.len() as u64 + u64::from(later.end.saturating_sub(later.start));
        for other in alive.iter().copied().chain(later) {
            let (lo, data) = (self.at[other as usize], &self.problem.items[other as usize]);
            if lo != OPEN && item.start < data.end && self.problem.meet(item, data) {
                self.starts.push(self.keys.key(lo, other));
            }
        }
        self.starts.sort_unstable();
    }

    /// Places an item in the smallest hole that is large enough, or in the place of other items,
    /// which go to the pool.
    fn insert(&mut self, i: u32, capacity: u64, pool: &mut Vec<u32>) -> Option<()> {
        let item = self.problem.items[i as usize];
        self.look(i);
        let mut best: Option<(u64, u64)> = None;
        let mut free = self.base;
        let mut consider = |free: u64, lo: u64| {
            let at = aligned(free, item.align);
            if at + item.bytes <= lo && best.is_none_or(|(hole, _)| lo - free < hole) {
                best = Some((lo - free, at));
            }
        };
        for &key in &self.starts {
            let lo = self.keys.address(key);
            consider(free, lo);
            free = free.max(lo + self.bytes(key));
        }
        consider(free, capacity);
        if let Some((_, at)) = best {
            self.at[i as usize] = at;
            return Some(());
        }
        self.trouble[i as usize] += 1;
        let at = self.cheapest(&item, capacity)?;
        for &key in &self.starts {
            let lo = self.keys.address(key);
            if lo < at + item.bytes && at < lo + self.bytes(key) {
                let other = self.keys.item(key);
                self.at[other as usize] = OPEN;
                pool.push(other);
            }
        }
        self.at[i as usize] = at;
        Some(())
    }

    /// Bytes of a key's item.
    fn bytes(&self, key: u64) -> u64 {
        self.problem.items[self.keys.item(key) as usize].bytes
    }

    fn cost(&self, i: u32) -> u64 {
        if self.problem.items[i as usize].fixed != FREE {
            return 1 << 60;
        }
        self.weight[i as usize]
            .saturating_mul(u64::from(self.trouble[i as usize]))
            .min(1 << 40)
    }

    /// The offset at which moving the blocks in the way costs least; none if fixed blocks are in
    /// the way everywhere.
    fn cheapest(&mut self, item: &Item, capacity: u64) -> Option<u64> {
        self.ends.clear();
        for &key in &self.starts {
            let (lo, other) = (self.keys.address(key), self.keys.item(key));
            self.costs[other as usize] = self.cost(other);
            self.ends.push(self.keys.key(lo + self.bytes(key), other));
        }
        self.ends.sort_unstable();
        let (keys, starts, ends) = (self.keys, &self.starts[..], &self.ends[..]);
        let mut best: Option<(u128, u64)> = None;
        let mut ties = 0;
        let mut consider = |cost: u128, at: u64, random: &mut u64| {
            if best.is_none_or(|(least, _)| cost < least) {
                best = Some((cost, at));
                ties = 1;
            } else if best.is_some_and(|(least, _)| cost == least) {
                ties += 1;
                if next(random).is_multiple_of(ties) {
                    best = Some((cost, at));
                }
            }
        };
        // On top of an item, or at the bottom.
        let mut in_way = InWay::new(keys, [starts, ends], &self.costs);
        for k in 0..=ends.len() {
            let free = if k == 0 {
                self.base
            } else {
                keys.address(ends[k - 1])
            };
            let at = aligned(free, item.align);
            if capacity < at + item.bytes {
                break;
            }
            consider(in_way.cost(at, item.bytes), at, &mut self.random);
        }
        // Directly under an item, or at the top.
        let mut in_way = InWay::new(keys, [starts, ends], &self.costs);
        for k in 0..=starts.len() {
            let hi = starts.get(k).map_or(capacity, |&key| keys.address(key));
            let Some(at) = hi.checked_sub(item.bytes).map(|at| at & !(item.align - 1)) else {
                continue;
            };
            if at < self.base {
                continue;
            }
            consider(in_way.cost(at, item.bytes), at, &mut self.random);
        }
        best.filter(|&(cost, _)| cost < 1 << 60).map(|(_, at)| at)
    }
}

/// Computes the cost of the items in the way, for rising addresses: the number of items that start
/// below the end of a place, the number that end before it, and their costs.
struct InWay<'a> {
    keys: Keys,
    starts: &'a [u64],
    ends: &'a [u64],
    /// By an item's number.
    costs: &'a [u64],
    begun: (usize, u128),
    ended: (usize, u128),
}

impl<'a> InWay<'a> {
    fn new(keys: Keys, [starts, ends]: [&'a [u64]; 2], costs: &'a [u64]) -> InWay<'a> {
        InWay {
            keys,
            starts,
            ends,
            costs,
            begun: (0, 0),
            ended: (0, 0),
        }
    }

    /// The cost of the items in the way of `bytes` bytes at `at`, which is not below the last `at`.
    fn cost(&mut self, at: u64, bytes: u64) -> u128 {
        let cost = |key: u64| u128::from(self.costs[self.keys.item(key) as usize]);
        while let Some(&key) = self.ends.get(self.ended.0)
            && self.keys.address(key) <= at
        {
            self.ended.1 += cost(key);
            self.ended.0 += 1;
        }
        while let Some(&key) = self.starts.get(self.begun.0)
            && self.keys.address(key) < at + bytes
        {
            self.begun.1 += cost(key);
            self.begun.0 += 1;
        }
        self.begun.1 - self.ended.1
    }
}
