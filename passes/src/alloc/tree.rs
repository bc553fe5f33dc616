//! Which addresses are in use over a span of time: a segment tree over time whose nodes hold sets of address ranges.
//!
//! A range that is in use over the whole of a node's time, and not of its parent's, is in the node's `here`. `below` is
//! the union of `here` over the node and all its descendants. The ranges in use at some time of a span are then the
//! `below` of the nodes that make up the span, and the `here` of their ancestors.

/// Disjoint ranges `lo..hi` in ascending order, none touching the next.
#[derive(Clone, Default)]
struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    fn insert(&mut self, mut lo: u64, mut hi: u64) {
        let first = self.0.partition_point(|range| range.1 < lo);
        let mut last = first;
        while last < self.0.len() && self.0[last].0 <= hi {
            lo = lo.min(self.0[last].0);
            hi = hi.max(self.0[last].1);
            last += 1;
        }
        if last == first + 1 {
            self.0[first] = (lo, hi);
        } else {
            self.0.splice(first..last, [(lo, hi)]);
        }
    }
}

pub(super) struct Tree {
    leaves: usize,
    here: Vec<Ranges>,
    below: Vec<Ranges>,
    /// The nodes that make up the span at hand, and their ancestors: kept to spare allocations.
    nodes: Vec<usize>,
    ancestors: Vec<usize>,
    /// For each set of the query at hand: the node, whether it is `here` or `below`, and how many ranges are passed.
    sets: Vec<(usize, bool, usize)>,
}

impl Tree {
    /// A tree over times `0..n`.
    pub(super) fn new(n: u32) -> Tree {
        let leaves = (n as usize).next_power_of_two();
        let ranges = || vec![Ranges::default(); 2 * leaves];
        Tree { leaves, here: ranges(), below: ranges(), nodes: vec![], ancestors: vec![], sets: vec![] }
    }

    /// Finds the nodes that make up `start..end`, and their ancestors, each once.
    fn find(&mut self, start: u32, end: u32) {
        let (mut lo, mut hi) = (start as usize + self.leaves, end as usize + self.leaves);
        self.nodes.clear();
        self.ancestors.clear();
        // The ancestors are those of the two ends: every other node's parent is above one of them.
        let (mut left, mut right) = (lo / 2, (hi - 1) / 2);
        while lo < hi {
            if lo & 1 == 1 {
                self.nodes.push(lo);
                lo += 1;
            }
            if hi & 1 == 1 {
                hi -= 1;
                self.nodes.push(hi);
            }
            lo /= 2;
            hi /= 2;
        }
        while 0 < left {
            self.ancestors.push(left);
            if right != left {
                self.ancestors.push(right);
            }
            left /= 2;
            right /= 2;
        }
        // A node of the span may lie above an end; it is no ancestor of the others, and neither is what lies below it.
        let nodes = &self.nodes;
        self.ancestors.retain(|&ancestor| {
            let inside = |node: usize| {
                let up = ancestor.ilog2().checked_sub(node.ilog2());
                up.is_some_and(|up| ancestor >> up == node)
            };
            !nodes.iter().any(|&node| inside(node))
        });
    }

    /// Marks addresses `lo..hi` as in use over `start..end`.
    pub(super) fn insert(&mut self, start: u32, end: u32, lo: u64, hi: u64) {
        self.find(start, end);
        for &node in &self.nodes {
            self.here[node].insert(lo, hi);
            self.below[node].insert(lo, hi);
        }
        for &node in &self.ancestors {
            self.below[node].insert(lo, hi);
        }
    }

    /// The lowest address from which `bytes` bytes are free over all of `start..end`.
    pub(super) fn lowest(&mut self, start: u32, end: u32, bytes: u64) -> u64 {
        self.find(start, end);
        let below = self.nodes.iter().map(|&node| (node, false, 0));
        let here = self.ancestors.iter().map(|&node| (node, true, 0));
        self.sets.clear();
        self.sets.extend(below.chain(here));
        let ranges = |node: usize, is_here: bool| if is_here { &self.here[node].0 } else { &self.below[node].0 };
        self.sets.retain(|&(node, is_here, _)| !ranges(node, is_here).is_empty());
        // Climb: while some set has a range in the way, go past the highest such range.
        let mut at = 0;
        loop {
            let mut next = at;
            for (node, is_here, passed) in &mut self.sets {
                let set = ranges(*node, *is_here);
                *passed += set[*passed..].partition_point(|range| range.1 <= next);
                // Ranges of one set do not touch, yet the gap between two may be too small.
                while let Some(&(lo, hi)) = set.get(*passed)
                    && lo < next + bytes
                {
                    next = next.max(hi);
                    *passed += 1;
                }
            }
            if next == at {
                return at;
            }
            at = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// First fit by the tree is first fit by looking at every earlier item.
        #[test]
        fn lowest_is_lowest(items in prop::collection::vec((0u32..20, 1u32..8, 1u64..6), 1..40)) {
            let mut tree = Tree::new(32);
            let mut placed: Vec<(u32, u32, u64, u64)> = vec![];
            for (start, span, bytes) in items {
                let end = start + span;
                let free = |at: u64| placed.iter().all(|&(s, e, lo, hi)| end <= s || e <= start || at + bytes <= lo || hi <= at);
                let expected = (0..).find(|&at| free(at)).unwrap();
                let at = tree.lowest(start, end, bytes);
                prop_assert_eq!(at, expected);
                tree.insert(start, end, at, at + bytes);
                placed.push((start, end, at, at + bytes));
            }
        }
    }
}
