//! Decides by search whether blocks fit a capacity. The method is MiniMalloc's (Moffitt, ASPLOS
//! 2023), with more inference.
//!
//! If a plan exists, then one exists in which no block can slide down. Such a plan is found by
//! placing blocks in the order of their offsets, each directly on the highest block placed under
//! it; ties are broken by rank. So each step of the search places one of the blocks that may come
//! next in this order. It gives up a branch when
//!
//! * a section has no room for its remaining blocks: blocks are considered in the order of their
//!   lowest possible offsets, and every set of blocks that cannot start below some offset must fit
//!   above it;
//! * a block could still slide into the space that the next block leaves empty (dominance).
//!
//! If no unplaced block lives across a moment, the parts before and after it are searched
//! separately, so neither repeats the other's failures. Each part gets new ranks from its open
//! blocks, because the fullest section of the whole problem may be easy within a part. (A block
//! whose turn has passed under the old ranks stays lifted, so nothing is tried twice.)
//!
//! A search is limited by the number of items that it examines. It is repeated with other ranks,
//! because the best order differs between problems. Searches learn: a section that often had no
//! room has more weight in the ranks of the next search (weighted degrees: Boussemart et al.,
//! 2004). So the hard part comes first.

use super::order::Rank;
use super::problem::{Item, Problem, aligned};
use std::cmp::Reverse;
use std::ops::Range;

/// The result of a search.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// A plan was found: see [`Search::offsets`].
    Found,
    /// No plan exists.
    None,
    /// The steps were not enough to decide.
    Spent,
}

/// A section that failed 1000 times counts as twice its bytes. Values from 0.02 to 0.2 give nearly
/// the same results on random instances.
const LEARNED: f64 = 0.1;
/// Not placed.
const OPEN: u64 = u64::MAX;

/// Blocks, and the pairs that live at the same time.
pub(super) struct Blocks<'a> {
    items: &'a [Item],
    bytes: Vec<u64>,
    align: Vec<u64>,
    /// The blocks that live at the same time as each block.
    meets: Lists,
    /// Sections of a block, and blocks of a section.
    sections: Lists,
    members: Lists,
}

/// The state of a search.
pub(super) struct Search<'a> {
    blocks: &'a Blocks<'a>,
    /// The rank of each block, which breaks ties.
    rank: Vec<u32>,
    ranked: Rank,
    capacity: u64,
    /// The offset of each block, or [`OPEN`].
    at: Vec<u64>,
    /// The top of the highest block that is placed under each open block. If the open block came
    /// next, this would be its offset.
    low: Vec<u64>,
    /// The smallest offset that each open block can still have. It is above `low` after the block's
    /// turn at `low` has passed.
    lift: Vec<u64>,
    /// The open block that was last found to permit this offset, by coming under the block.
    support: Vec<u32>,
    /// The smallest `lift` in each section; and the section's open bytes.
    floor: Vec<u64>,
    open: Vec<u64>,
    /// The number of open blocks that live in a section and in the next one.
    across: Vec<u32>,
    /// Placed blocks, and the other changes to undo.
    placed: Vec<u32>,
    trail: Vec<Undo>,
    /// Open blocks of the parts on the search path, one part after the other.
    lists: Vec<u32>,
    candidates: Vec<(u64, u32, u32)>,
    dirty: Vec<u32>,
    is_dirty: Vec<bool>,
    /// The smallest offset and the bytes of each open block of the section that is checked.
    lows: Vec<(u64, u64)>,
    /// How often a section had no room, in all runs; and the resulting weight of its bytes.
    failed: Vec<u32>,
    weight: Vec<f64>,
    /// Saved ranks, and keys of blocks that are being ranked.
    ranks: Vec<u32>,
    keys: Vec<(Reverse<[u64; 3]>, u32)>,
    /// The number of blocks and sections that may still be examined.
    pub(super) left: u64,
}

enum Undo {
    Low(u32, u64),
    Lift(u32, u64),
    Floor(u32, u64),
}

/// Lists of numbers, end to end.
struct Lists {
    start: Vec<u32>,
    all: Vec<u32>,
}

impl Lists {
    fn new(lists: impl Iterator<Item = Vec<u32>>) -> Lists {
        let mut made = Lists {
            start: vec![0],
            all: vec![],
        };
        for list in lists {
            made.all.extend(list);
            made.start.push(made.all.len() as u32);
        }
        made
    }
    fn range(&self, i: u32) -> Range<usize> {
        self.start[i as usize] as usize..self.start[i as usize + 1] as usize
    }
}

impl<'a> Blocks<'a> {
    /// The items of a problem.
    pub(super) fn new(problem: &'a Problem) -> Blocks<'a> {
        let items = &problem.items;
        let n = items.len() as u32;
        let of_item = |i: u32| {
            problem
                .spans(&items[i as usize])
                .iter()
                .flat_map(|(s, e)| s..e)
                .collect::<Vec<u32>>()
        };
        let mut members = vec![vec![]; problem.sections() as usize];
        for i in 0..n {
            of_item(i)
                .into_iter()
                .for_each(|s| members[s as usize].push(i));
        }
        let meets = |i: u32| {
            let meet = |j: &u32| *j != i && problem.meet(&items[i as usize], &items[*j as usize]);
            (0..n).filter(meet).collect::<Vec<u32>>()
        };
        Blocks {
            items,
            bytes: items.iter().map(|item| item.bytes).collect(),
            align: items.iter().map(|item| item.align).collect(),
            meets: Lists::new((0..n).map(meets)),
            sections: Lists::new((0..n).map(of_item)),
            members: Lists::new(members.into_iter()),
        }
    }
}

impl<'a> Search<'a> {
    /// A search that has not learned anything yet.
    pub(super) fn new(blocks: &'a Blocks<'a>) -> Search<'a> {
        let (n, sections) = (blocks.items.len(), blocks.members.start.len() - 1);
        Search {
            blocks,
            rank: vec![0; n],
            ranked: Rank::default(),
            capacity: 0,
            at: vec![OPEN; n],
            low: vec![0; n],
            lift: vec![0; n],
            support: vec![0; n],
            floor: vec![0; sections],
            open: vec![0; sections],
            across: vec![0; sections],
            placed: vec![],
            trail: vec![],
            lists: vec![],
            candidates: vec![],
            dirty: vec![],
            is_dirty: vec![false; sections],
            lows: vec![],
            failed: vec![0; sections],
            weight: vec![1.0; sections],
            ranks: vec![],
            keys: vec![],
            left: 0,
        }
    }

    /// The number of blocks.
    pub(super) fn len(&self) -> usize {
        self.blocks.items.len()
    }

    /// Offsets of the plan that was found.
    pub(super) fn offsets(&self) -> &[u64] {
        &self.at
    }

    /// Searches for a plan between `base` and `capacity`.
    pub(super) fn run(&mut self, rank: Rank, base: u64, capacity: u64) -> Outcome {
        let n = self.blocks.bytes.len() as u32;
        self.ranked = rank;
        for (weight, &failed) in self.weight.iter_mut().zip(&self.failed) {
            *weight = if rank.learned {
                (1.0 + f64::from(failed)).powf(LEARNED)
            } else {
                1.0
            };
        }
        self.capacity = capacity;
        self.at.fill(OPEN);
        // The block itself means none.
        self.support = (0..n).collect();
        for (low, align) in self.low.iter_mut().zip(&self.blocks.align) {
            *low = aligned(base, *align);
        }
        self.lift.copy_from_slice(&self.low);
        self.floor.fill(base);
        self.open.fill(0);
        self.across.fill(0);
        for i in 0..n {
            let mut last = None;
            for &s in &self.blocks.sections.all[self.blocks.sections.range(i)] {
                self.open[s as usize] += self.blocks.bytes[i as usize];
                // A gap also joins its two sides, because the block has one offset.
                for between in last.unwrap_or(s)..s {
                    self.across[between as usize] += 1;
                }
                last = Some(s);
            }
        }
        if self
            .open
            .iter()
            .any(|&open| capacity < base.saturating_add(open))
        {
            return Outcome::None;
        }
        self.placed.clear();
        self.trail.clear();
        self.lists.clear();
        self.candidates.clear();
        self.lists.extend(0..n);
        let sections = 0..self.floor.len() as u32;
        self.rank_anew(0..n as usize);
        self.parts(0..n as usize, sections, (base, 0))
    }

    /// Computes new ranks for a part from its unplaced blocks.
    fn rank_anew(&mut self, part: Range<usize>) {
        let mut keys = std::mem::take(&mut self.keys);
        keys.clear();
        for &i in &self.lists[part] {
            let sections = &self.blocks.sections.all[self.blocks.sections.range(i)];
            self.left = self.left.saturating_sub(4 + sections.len() as u64);
            let tight = |&s: &u32| (self.open[s as usize] as f64 * self.weight[s as usize]) as u64;
            let fullest = sections.iter().map(tight).max().unwrap_or(0);
            keys.push((
                Reverse(
                    self.ranked
                        .order
                        .key(&self.blocks.items[i as usize], fullest),
                ),
                i,
            ));
        }
        keys.sort_unstable();
        for (place, (_, i)) in (0..).zip(&keys) {
            self.rank[*i as usize] = self.ranked.disordered(place, *i);
        }
        self.keys = keys;
    }

    /// Places the open blocks of a part: `lists[part]`, which live in `sections`. Each comes at
    /// `next` or after it.
    fn search(&mut self, part: Range<usize>, sections: Range<u32>, next: (u64, u32)) -> Outcome {
        // No block may have an offset at which another block could still slide under it.
        let heights = self.lists[part.clone()]
            .iter()
            .map(|&i| self.low[i as usize] + self.blocks.bytes[i as usize]);
        let height = heights.min().unwrap_or(0);
        // The open blocks of a section must fit above it: no later block is lower than the next
        // one.
        let open = self.open[sections.start as usize..sections.end as usize]
            .iter()
            .max();
        let height = height.min((self.capacity - open.copied().unwrap_or(0)).saturating_add(1));
        let first = self.candidates.len();
        for &i in &self.lists[part.clone()] {
            let key = (self.low[i as usize], self.rank[i as usize]);
            if next <= key && key.0 < height && self.lift[i as usize] == key.0 {
                self.candidates.push((key.0, key.1, i));
            }
        }
        let last = self.candidates.len();
        self.candidates[first..].sort_unstable();
        self.left = self.left.saturating_sub(part.len() as u64);
        let mut outcome = Outcome::None;
        for k in first..last {
            let (low, rank, block) = self.candidates[k];
            if self.left == 0 {
                outcome = Outcome::Spent;
                break;
            }
            let mark = (self.placed.len(), self.trail.len());
            if self.put(block, low, sections.clone()) {
                let rest = self.lists.len();
                for j in part.clone() {
                    let other = self.lists[j];
                    if other != block {
                        self.lists.push(other);
                    }
                }
                outcome = self.parts(rest..self.lists.len(), sections.clone(), (low, rank));
                self.lists.truncate(rest);
            }
            if outcome != Outcome::None {
                break;
            }
            self.undo(mark);
        }
        self.candidates.truncate(first);
        outcome
    }

    /// Searches each part that is no longer connected with the others.
    fn parts(&mut self, part: Range<usize>, sections: Range<u32>, next: (u64, u32)) -> Outcome {
        if part.is_empty() {
            return Outcome::Found;
        }
        if !self.lift(part.clone(), next) {
            return Outcome::None;
        }
        let mut start = sections.start;
        let mut begun = self.lists.len();
        let mut outcome = Outcome::Found;
        for s in sections.clone() {
            if self.across[s as usize] != 0 && s + 1 < sections.end {
                continue;
            }
            if self.open[s as usize] == 0 && start == s {
                start = s + 1;
                continue;
            }
            if start == sections.start && s + 1 == sections.end {
                return self.search(part, sections, next);
            }
            for j in part.clone() {
                let i = self.lists[j];
                let first =
                    self.blocks.sections.all[self.blocks.sections.start[i as usize] as usize];
                if start <= first && first <= s {
                    self.lists.push(i);
                }
            }
            let own = begun..self.lists.len();
            if !own.is_empty() {
                // Blocks whose turn has passed are lifted, so the old ranks are not needed for
                // anything else.
                let before = self.ranks.len();
                self.ranks.extend(
                    self.lists[own.clone()]
                        .iter()
                        .map(|&i| self.rank[i as usize]),
                );
                self.rank_anew(own.clone());
                outcome = self.search(own.clone(), start..s + 1, (next.0, 0));
                for (j, rank) in own.zip(self.ranks.drain(before..)) {
                    self.rank[self.lists[j] as usize] = rank;
                }
            }
            self.lists.truncate(begun);
            begun = self.lists.len();
            start = s + 1;
            if outcome != Outcome::Found {
                break;
            }
        }
        outcome
    }

    /// Places a block. Returns false if the remaining blocks then have no room.
    fn put(&mut self, block: u32, low: u64, part: Range<u32>) -> bool {
        let bytes = self.blocks.bytes[block as usize];
        let top = low + bytes;
        self.at[block as usize] = low;
        self.placed.push(block);
        let sections = self.blocks.sections.range(block);
        let cost = 16 + sections.len() + self.blocks.meets.range(block).len() + part.len();
        self.left = self.left.saturating_sub(cost as u64);
        let mut last = None;
        for k in sections.clone() {
            let s = self.blocks.sections.all[k];
            self.open[s as usize] -= bytes;
            for between in last.unwrap_or(s)..s {
                self.across[between as usize] -= 1;
            }
            last = Some(s);
            self.is_dirty[s as usize] = true;
            self.dirty.push(s);
        }
        for k in self.blocks.meets.range(block) {
            let other = self.blocks.meets.all[k];
            let was = self.low[other as usize];
            if self.at[other as usize] == OPEN && was < top {
                self.trail.push(Undo::Low(other, was));
                self.low[other as usize] = aligned(top, self.blocks.align[other as usize]);
                self.raise(other, self.low[other as usize]);
            }
        }
        let mut fits = true;
        for s in part {
            if self.capacity < self.floor[s as usize].max(low) + self.open[s as usize]
                && 0 < self.open[s as usize]
            {
                fits = false;
                self.failed[s as usize] += 1;
                break;
            }
        }
        self.settle(low, fits)
    }

    /// Raises the smallest offset of an open block.
    fn raise(&mut self, i: u32, lift: u64) {
        let was = self.lift[i as usize];
        if lift <= was {
            return;
        }
        self.trail.push(Undo::Lift(i, was));
        self.lift[i as usize] = lift;
        for k in self.blocks.sections.range(i) {
            let s = self.blocks.sections.all[k];
            if was <= self.floor[s as usize] && !self.is_dirty[s as usize] {
                self.is_dirty[s as usize] = true;
                self.dirty.push(s);
            }
        }
    }

    /// Checks the sections in which an offset was raised; false if one has no room.
    fn settle(&mut self, least: u64, mut fits: bool) -> bool {
        for k in 0..self.dirty.len() {
            let s = self.dirty[k];
            self.is_dirty[s as usize] = false;
            if fits && 0 < self.open[s as usize] {
                fits = self.has_room(s, least);
                self.failed[s as usize] += u32::from(!fits);
            }
        }
        self.dirty.clear();
        fits
    }

    /// A block whose turn has passed must wait until another one is placed under it, so it lies on
    /// top of an unplaced block.
    fn lift(&mut self, part: Range<usize>, next: (u64, u32)) -> bool {
        for j in part {
            let i = self.lists[j];
            let low = self.low[i as usize];
            if next <= (low, self.rank[i as usize]) && self.lift[i as usize] == low {
                continue;
            }
            let top = |other: u32| {
                self.lift[other as usize].max(next.0) + self.blocks.bytes[other as usize]
            };
            let support = self.support[i as usize];
            if support != i
                && self.at[support as usize] == OPEN
                && top(support) <= self.lift[i as usize]
            {
                continue;
            }
            let mut least = u64::MAX;
            self.left = self
                .left
                .saturating_sub(self.blocks.meets.range(i).len() as u64);
            for &other in &self.blocks.meets.all[self.blocks.meets.range(i)] {
                if self.at[other as usize] == OPEN && top(other) < least {
                    least = top(other);
                    self.support[i as usize] = other;
                }
            }
            if self.capacity - self.blocks.bytes[i as usize] < least {
                return self.settle(next.0, false);
            }
            self.raise(i, aligned(least, self.blocks.align[i as usize]));
        }
        self.settle(next.0, true)
    }

    /// Whether the open blocks of a section have room, with none of them below `least`.
    fn has_room(&mut self, section: u32, least: u64) -> bool {
        let members = &self.blocks.members.all[self.blocks.members.range(section)];
        self.left = self.left.saturating_sub(members.len() as u64);
        let (mut floor, mut top) = (u64::MAX, 0);
        self.lows.clear();
        for &i in members {
            if self.at[i as usize] == OPEN {
                let low = self.lift[i as usize].max(least);
                (floor, top) = (floor.min(low), top.max(low));
                self.lows.push((low, self.blocks.bytes[i as usize]));
            }
        }
        let (was, bytes) = (self.floor[section as usize], self.open[section as usize]);
        if was < floor {
            self.trail.push(Undo::Floor(section, was));
            self.floor[section as usize] = floor;
        }
        // A quick test decides most cases: all fit above the highest, or they do not even fit above
        // the lowest.
        if top + bytes <= self.capacity || self.capacity < floor + bytes {
            return top + bytes <= self.capacity;
        }
        all_fit(&mut self.lows, (floor, top), self.capacity)
    }

    /// Undoes all placements and conclusions since a mark.
    fn undo(&mut self, (placed, trail): (usize, usize)) {
        for change in self.trail.drain(trail..).rev() {
            match change {
                Undo::Low(i, low) => self.low[i as usize] = low,
                Undo::Lift(i, lift) => self.lift[i as usize] = lift,
                Undo::Floor(s, floor) => self.floor[s as usize] = floor,
            }
        }
        for block in self.placed.drain(placed..) {
            self.at[block as usize] = OPEN;
            let mut last = None;
            for &s in &self.blocks.sections.all[self.blocks.sections.range(block)] {
                self.open[s as usize] += self.blocks.bytes[block as usize];
                for between in last.unwrap_or(s)..s {
                    self.across[between as usize] += 1;
                }
                last = Some(s);
            }
        }
    }
}

/// The number of ranges of offsets in [`all_fit`].
const RANGES: usize = 32;

/// Whether, for each offset of `lows`, the blocks that are not below it fit between it and the
/// capacity. `lows` has the smallest offset and the bytes of each block; the offsets are in
/// `floor..=top`. Offsets are sorted only in the ranges where the lowest one fits, and the highest
/// one would not fit with all blocks of the range.
fn all_fit(lows: &mut [(u64, u64)], (floor, top): (u64, u64), capacity: u64) -> bool {
    let bits = u64::BITS - (top - floor).leading_zeros();
    let shift = bits.saturating_sub(RANGES.ilog2());
    let range = |low: u64| ((low - floor) >> shift) as usize;
    let (mut sums, mut least, mut most) = ([0; RANGES], [u64::MAX; RANGES], [0; RANGES]);
    for &(low, bytes) in &*lows {
        let k = range(low);
        sums[k] += bytes;
        least[k] = least[k].min(low);
        most[k] = most[k].max(low);
    }
    let mut above = 0;
    for k in (0..RANGES).rev().filter(|&k| 0 < sums[k]) {
        let with = above + sums[k];
        if capacity < least[k] + with {
            return false;
        }
        if capacity < most[k] + with {
            let mut n = 0;
            for j in 0..lows.len() {
                if range(lows[j].0) == k {
                    lows.swap(n, j);
                    n += 1;
                }
            }
            lows[..n].sort_unstable();
            let mut above = above;
            let fit = lows[..n].iter().rev().all(|&(low, bytes)| {
                above += bytes;
                low + above <= capacity
            });
            if !fit {
                return false;
            }
        }
        above = with;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::ranks;
    use crate::trace::{Block, Trace};
    use proptest::prelude::*;

    /// The optimal peak. First fit in the order of its offsets finds an optimal plan, so all orders
    /// are tried.
    fn best(problem: &Problem, placed: &mut Vec<(usize, u64)>, mut least: u64) -> u64 {
        let items = &problem.items;
        if placed.len() == items.len() {
            return placed
                .iter()
                .map(|&(i, at)| at + items[i].bytes)
                .max()
                .unwrap_or(0)
                .min(least);
        }
        let bottom = placed.last().map_or(0, |last| last.1);
        for i in (0..items.len())
            .filter(|&i| placed.iter().all(|&(j, _)| j != i))
            .collect::<Vec<_>>()
        {
            let under = placed
                .iter()
                .filter(|&&(j, _)| problem.meet(&items[i], &items[j]));
            let at = under
                .map(|&(j, at)| at + items[j].bytes)
                .max()
                .unwrap_or(0)
                .next_multiple_of(items[i].align);
            if bottom <= at && at + items[i].bytes < least {
                placed.push((i, at));
                least = best(problem, placed, least);
                placed.pop();
            }
        }
        least
    }

    proptest! {
        /// Blocks fit in what they need, and not in a byte less.
        #[test]
        fn ranges_decide_to_the_byte(
            mut lows in prop::collection::vec((0u64..2000, 1u64..60), 1..40),
        ) {
            let [floor, top] = [u64::min, u64::max].map(|f| {
                lows.iter().map(|low| low.0).reduce(f).unwrap()
            });
            let needs = lows.iter().map(|&(low, _)| {
                let above = lows.iter().filter(|other| low <= other.0);
                low + above.map(|other| other.1).sum::<u64>()
            });
            let needed = needs.max().unwrap();
            prop_assert!(all_fit(&mut lows, (floor, top), needed));
            prop_assert!(!all_fit(&mut lows, (floor, top), needed - 1));
        }

        /// For any ranks, and after any learning, the search finds a plan with the optimal peak,
        /// and proves that no lower one exists. There are few sections and short lives, so that
        /// unconnected parts occur.
        #[test]
        fn finds_what_there_is_and_nothing_else(
            raw in prop::collection::vec((0u64..10, 1u64..5, 1u64..9, 0u32..2, 0u64..5), 1..=7),
        ) {
            let blocks = raw.iter().map(|&(start, span, bytes, align, gap)| {
                let gaps = if 0 < gap && gap + 1 < span { vec![(start + gap, start + gap
                    + 1)] } else { vec![] };
                Block { start, end: start + span, bytes, alignment: 1 << align, gaps,
                    ..Block::default() }
            });
            let trace = Trace { blocks: blocks.collect(), ..Trace::default() };
            let problem = Problem::new(&trace, 1).unwrap();
            let peak = best(&problem, &mut vec![], u64::MAX);
            let blocks = Blocks::new(&problem);
            for k in 0..ranks(0).len() {
                let mut search = Search::new(&blocks);
                for round in 0..4 {
                    search.left = u64::MAX;
                    prop_assert_eq!(search.run(ranks(round)[k], 0, peak - 1), Outcome::None);
                    prop_assert_eq!(search.run(ranks(round)[k], 0, peak), Outcome::Found);
                    let items = || problem.items.iter().zip(search.offsets());
                    prop_assert_eq!(items().map(|(item, at)| at + item.bytes).max(), Some(peak));
                    for (a, &lo) in items() {
                        prop_assert!(lo.is_multiple_of(a.align));
                        let apart = |(b, &at): (&Item, &u64)| {
                            a.block == b.block || !problem.meet(a, b) || at + b.bytes <= lo || lo
                                + a.bytes <= at
                        };
                        prop_assert!(items().all(apart));
                    }
                }
            }
        }
    }
}
