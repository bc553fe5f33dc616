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
}

impl Tree {
    /// A tree over times `0..n`.
    pub(super) fn new(n: u32) -> Tree {
        let leaves = (n as usize).next_power_of_two();
        Tree { leaves, here: vec![Ranges::default(); 2 * leaves], below: vec![Ranges::default(); 2 * leaves] }
    }

    /// The nodes that make up `start..end`.
    fn nodes(&self, start: u32, end: u32) -> Vec<usize> {
        let (mut lo, mut hi) = (start as usize + self.leaves, end as usize + self.leaves);
        let mut nodes = vec![];
        while lo < hi {
            if lo & 1 == 1 {
                nodes.push(lo);
                lo += 1;
            }
            if hi & 1 == 1 {
                hi -= 1;
                nodes.push(hi);
            }
            lo /= 2;
            hi /= 2;
        }
        nodes
    }

    /// Marks addresses `lo..hi` as in use over `start..end`.
    pub(super) fn insert(&mut self, start: u32, end: u32, lo: u64, hi: u64) {
        let nodes = self.nodes(start, end);
        let mut touched = vec![];
        for &node in &nodes {
            self.here[node].insert(lo, hi);
            let mut node = node;
            while 0 < node {
                touched.push(node);
                node /= 2;
            }
        }
        touched.sort_unstable();
        touched.dedup();
        for node in touched {
            self.below[node].insert(lo, hi);
        }
    }

    /// The lowest address from which `bytes` bytes are free over all of `start..end`.
    pub(super) fn lowest(&self, start: u32, end: u32, bytes: u64) -> u64 {
        let nodes = self.nodes(start, end);
        let mut sets: Vec<&[(u64, u64)]> = nodes.iter().map(|&node| &*self.below[node].0).collect();
        let mut ancestors: Vec<usize> = vec![];
        for &node in &nodes {
            let mut node = node / 2;
            while 0 < node {
                ancestors.push(node);
                node /= 2;
            }
        }
        ancestors.sort_unstable();
        ancestors.dedup();
        sets.extend(ancestors.iter().map(|&node| &*self.here[node].0));
        sets.retain(|set| !set.is_empty());
        // Climb: while some set has a range in the way, go past the highest such range.
        let mut at = 0;
        loop {
            let mut next = at;
            for set in &mut sets {
                let skip = set.partition_point(|range| range.1 <= next);
                *set = &set[skip..];
                // Ranges of one set do not touch, yet the gap between two may be too small.
                while let Some(&(lo, hi)) = set.first()
                    && lo < next + bytes
                {
                    next = next.max(hi);
                    *set = &set[1..];
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
