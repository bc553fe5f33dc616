//! First fit and best fit in the order of time, forward or backward, like an allocator that serves
//! the trace. Only blocks that are alive when a block starts can be in its way. So one set of free
//! addresses is enough, and a block takes a tenth of the time of any other order. Backward is
//! usually better, because the last part of a step frees what the first part allocated.

use super::problem::{FREE, Problem};
use std::cmp::Reverse;

/// A direction through time, and a fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Sweep {
    /// From the last section to the first.
    pub(super) backward: bool,
    /// Into the smallest hole that is large enough, not the lowest.
    pub(super) snug: bool,
}

/// Free ranges `lo..hi` in ascending order, none touching the next; the last has no end.
struct Holes(Vec<(u64, u64)>);

impl Holes {
    /// Takes the lowest multiple of `align` at which `bytes` bytes are free, or one in the smallest
    /// hole.
    fn take(&mut self, bytes: u64, align: u64, snug: bool) -> u64 {
        let up = |address: u64| (address + (align - 1)) & !(align - 1);
        let mut fitting = (0..self.0.len()).filter(|&k| up(self.0[k].0) + bytes <= self.0[k].1);
        let k = if snug {
            fitting.min_by_key(|&k| self.0[k].1 - self.0[k].0)
        } else {
            fitting.next()
        };
        let k = k.expect("the last hole should have room");
        let (lo, hi) = self.0[k];
        let at = up(lo);
        match (lo < at, at + bytes < hi) {
            (false, true) => self.0[k].0 = at + bytes,
            (true, false) => self.0[k].1 = at,
            (false, false) => _ = self.0.remove(k),
            (true, true) => {
                self.0[k].0 = at + bytes;
                self.0.insert(k, (lo, at));
            }
        }
        at
    }

    /// Frees a range.
    fn give(&mut self, lo: u64, hi: u64) {
        let k = self.0.partition_point(|hole| hole.0 < lo);
        match (0 < k && self.0[k - 1].1 == lo, self.0[k].0 == hi) {
            (true, true) => {
                self.0[k - 1].1 = self.0[k].1;
                self.0.remove(k);
            }
            (true, false) => self.0[k - 1].1 = hi,
            (false, true) => self.0[k].0 = lo,
            (false, false) => self.0.insert(k, (lo, hi)),
        }
    }
}

impl Sweep {
    /// Its name.
    pub(super) fn name(self) -> String {
        let direction = if self.backward { "backward" } else { "forward" };
        format!(
            "{} fit {direction}",
            if self.snug { "best" } else { "first" }
        )
    }

    /// Whether a sweep can place a problem's items: none has a fixed place or a gap.
    pub(super) fn can(problem: &Problem) -> bool {
        problem.spans.is_empty() && problem.items.iter().all(|item| item.fixed == FREE)
    }

    /// Places items from `base` on. Of items that start at the same time, large ones come first.
    pub(super) fn place(self, problem: &Problem, base: u64) -> Vec<u64> {
        let items = &problem.items;
        let comes = |i: u32| match self.backward {
            true => u32::MAX - items[i as usize].end,
            false => items[i as usize].start,
        };
        let goes = |i: u32| match self.backward {
            true => u32::MAX - items[i as usize].start,
            false => items[i as usize].end,
        };
        let mut coming: Vec<u32> = (0..items.len() as u32).collect();
        let mut going = coming.clone();
        coming.sort_by_key(|&i| (comes(i), Reverse(items[i as usize].bytes)));
        going.sort_by_key(|&i| goes(i));
        let mut going = going.into_iter().peekable();
        let mut holes = Holes(vec![(base, u64::MAX)]);
        let mut at = vec![0; items.len()];
        for i in coming {
            while let Some(gone) = going.next_if(|&other| goes(other) <= comes(i)) {
                holes.give(
                    at[gone as usize],
                    at[gone as usize] + items[gone as usize].bytes,
                );
            }
            let item = &items[i as usize];
            at[i as usize] = holes.take(item.bytes, item.align, self.snug);
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Block, Trace};
    use crate::tree::Tree;
    use proptest::prelude::*;

    proptest! {
        /// Placed items do not overlap, and first fit gives the same result as first fit by the
        /// tree in the same order.
        #[test]
        fn sweeps_place_as_the_tree_does(
            raw in prop::collection::vec((0u64..40, 1u64..20, 1u64..9, 0u32..3), 1..60),
            base in 0u64..5,
        ) {
            let blocks = raw.iter().map(|&(start, span, bytes, align)| {
                Block { start, end: start + span, bytes, alignment: 1 << align, ..Block::default() }
            });
            let trace = Trace { blocks: blocks.collect(), ..Trace::default() };
            let problem = Problem::new(&trace, 1).unwrap();
            for (backward, snug) in [(false, false), (false, true), (true, false), (true, true)] {
                let at = Sweep { backward, snug }.place(&problem, base);
                let mut order: Vec<usize> = (0..at.len()).collect();
                let comes = |i: usize| {
                    let item = &problem.items[i];
                    if backward { u32::MAX - item.end } else { item.start }
                };
                order.sort_by_key(|&i| (comes(i), Reverse(problem.items[i].bytes)));
                let mut tree = Tree::new(problem.sections());
                for i in order {
                    let item = &problem.items[i];
                    let span = (item.start, item.end);
                    prop_assert!(at[i].is_multiple_of(item.align) && base <= at[i]);
                    prop_assert_eq!(tree.lowest(span, item.bytes, 1, at[i]), at[i], "it meets \
                        another");
                    prop_assert!(snug || tree.lowest(span, item.bytes, item.align, base) == at[i]);
                    tree.insert(item.start, item.end, at[i], at[i] + item.bytes);
                }
            }
        }
    }
}
