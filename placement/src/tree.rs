//! The addresses in use over a span of time: a segment tree over time whose nodes hold sets of
//! address ranges.
//!
//! A range that is in use over the whole of a node's time, but not of its parent's, is in the
//! node's `here`. `below` is the union of `here` over the node and all its descendants. The ranges
//! in use at some time of a span are the `below` of the nodes that make up the span, and the `here`
//! of their ancestors.

use super::problem::aligned;

/// Disjoint ranges `lo..hi` in ascending order, none touching the next.
#[derive(Clone, Default)]
struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    /// Adds a range. False if it was already contained.
    fn insert(&mut self, mut lo: u64, mut hi: u64) -> bool {
        let first = self.0.partition_point(|range| range.1 < lo);
        match self.0.get_mut(first) {
            Some(range) if range.0 <= lo && hi <= range.1 => return false,
            Some(range) if range.0 <= hi => {
                lo = lo.min(range.0);
                hi = hi.max(range.1);
                let rest = &self.0[first + 1..];
                let joined = rest.iter().take_while(|range| range.0 <= hi).count();
                if 0 < joined {
                    hi = hi.max(rest[joined - 1].1);
                    self.0.drain(first + 1..=first + joined);
                }
                self.0[first] = (lo, hi);
            }
            _ => self.0.insert(first, (lo, hi)),
        }
        true
    }
}

pub(super) struct Tree {
    leaves: usize,
    /// For node `i` its `here` at `2 * i` and its `below` after it.
    sets: Vec<Ranges>,
    /// Positions in `sets` of the current span; stored to avoid allocations.
    query: Vec<usize>,
    /// For each set of the current query, the number of ranges that are passed.
    passed: Vec<usize>,
    /// Ranges in use over the current query.
    used: Vec<(u64, u64)>,
    /// The number of examined sets and ranges.
    pub(super) work: u64,
}

impl Tree {
    /// A tree over times `0..n`.
    pub(super) fn new(n: u32) -> Tree {
        let leaves = (n as usize).next_power_of_two();
        let sets = vec![Ranges::default(); 4 * leaves];
        Tree {
            leaves,
            sets,
            query: vec![],
            passed: vec![],
            used: vec![],
            work: 0,
        }
    }

    /// Removes all addresses.
    pub(super) fn clear(&mut self) {
        self.sets.iter_mut().for_each(|ranges| ranges.0.clear());
    }

    /// Calls `node` with the nodes that make up `start..end`.
    fn nodes(&self, start: u32, end: u32, mut node: impl FnMut(usize)) {
        let (mut lo, mut hi) = (start as usize + self.leaves, end as usize + self.leaves);
        while lo < hi {
            if lo & 1 == 1 {
                node(lo);
                lo += 1;
            }
            if hi & 1 == 1 {
                hi -= 1;
                node(hi);
            }
            lo /= 2;
            hi /= 2;
        }
    }

    /// Calls `above` with the ancestors of the nodes that make up `start..end`, each once, from
    /// below. Its result says whether the ancestors of this node are needed.
    fn ancestors(&self, start: u32, end: u32, mut above: impl FnMut(usize) -> bool) {
        let (first, last) = (start as usize + self.leaves, end as usize + self.leaves);
        let mut wanted = (true, true);
        // A node that contains an end of the span is an ancestor if and only if it extends beyond
        // the span at that end.
        for up in 1..=self.leaves.ilog2() {
            let (left, right) = (first >> up, (last - 1) >> up);
            let reaches = (left << up != first, ((right + 1) << up) != last);
            if left == right {
                if !(wanted.0 && wanted.1) || (reaches.0 || reaches.1) && !above(left) {
                    return;
                }
                continue;
            }
            if reaches.0 && wanted.0 {
                wanted.0 = above(left);
            }
            if reaches.1 && wanted.1 {
                wanted.1 = above(right);
            }
        }
    }

    /// Marks addresses `lo..hi` as in use over `start..end`.
    pub(super) fn insert(&mut self, start: u32, end: u32, lo: u64, hi: u64) {
        let mut nodes = std::mem::take(&mut self.query);
        nodes.clear();
        self.nodes(start, end, |node| nodes.push(node));
        for &node in &nodes {
            // A leaf has no descendants.
            if node < self.leaves {
                self.sets[2 * node].insert(lo, hi);
            }
            self.sets[2 * node + 1].insert(lo, hi);
        }
        self.query = nodes;
        // If a node already contains the range, all nodes above it do too.
        let mut sets = std::mem::take(&mut self.sets);
        self.ancestors(start, end, |node| sets[2 * node + 1].insert(lo, hi));
        self.sets = sets;
    }

    /// Finds the sets whose ranges are in use at some time of `start..end`.
    fn find(&mut self, start: u32, end: u32) {
        let mut query = std::mem::take(&mut self.query);
        query.clear();
        let mut add = |set: usize| {
            if !self.sets[set].0.is_empty() {
                query.push(set);
            }
        };
        self.nodes(start, end, |node| add(2 * node + 1));
        self.ancestors(start, end, |node| {
            add(2 * node);
            true
        });
        self.query = query;
    }

    /// The lowest multiple of `align` from `from` on at which `bytes` bytes are free over all of
    /// `start..end`.
    pub(super) fn lowest(
        &mut self,
        (start, end): (u32, u32),
        bytes: u64,
        align: u64,
        from: u64,
    ) -> u64 {
        self.find(start, end);
        self.passed.clear();
        self.passed.resize(self.query.len(), 0);
        // Climb: while some set has a range in the way, go past the highest such range.
        let up = |address: u64| (address + (align - 1)) & !(align - 1);
        let mut at = up(from);
        loop {
            let mut next = at;
            for (&set, passed) in self.query.iter().zip(&mut self.passed) {
                // Usually at most two ranges must be passed. Ranges of one set do not touch, but
                // the gap between two may be too small.
                let before = *passed;
                for &(lo, hi) in &self.sets[set].0[*passed..] {
                    if next + bytes <= lo {
                        break;
                    }
                    if next < hi {
                        next = up(hi);
                    }
                    *passed += 1;
                }
                self.work += 1 + (*passed - before) as u64;
            }
            if next == at {
                return at;
            }
            at = next;
        }
    }

    /// The same, in the smallest hole that is large enough. The free space below `top` counts as
    /// one hole. If no hole fits, the result lies above all used addresses.
    pub(super) fn snuggest(
        &mut self,
        (start, end): (u32, u32),
        bytes: u64,
        align: u64,
        from: u64,
        top: u64,
    ) -> u64 {
        self.find(start, end);
        self.used.clear();
        for &set in &self.query {
            self.used.extend_from_slice(&self.sets[set].0);
        }
        self.used.sort_unstable();
        self.work += 8 * self.used.len() as u64;
        let mut best: Option<(u64, u64)> = None;
        let mut free = from;
        for &(lo, hi) in self.used.iter().chain([&(top, top)]) {
            let at = aligned(free, align);
            if at + bytes <= lo && best.is_none_or(|(hole, _)| lo - free < hole) {
                best = Some((lo - free, at));
            }
            free = free.max(hi);
        }
        best.map_or(aligned(free, align), |(_, at)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// First fit by the tree gives the same result as comparing every earlier item.
        #[test]
        fn lowest_is_lowest(items in prop::collection::vec((0u32..20, 1u32..8, 1u64..6), 1..40)) {
            let mut tree = Tree::new(32);
            let mut placed: Vec<(u32, u32, u64, u64)> = vec![];
            for (start, span, bytes) in items {
                let end = start + span;
                let free = |at: u64| placed.iter()
                    .all(|&(s, e, lo, hi)| end <= s || e <= start || at + bytes <= lo || hi <= at);
                let expected = (0..).find(|&at| free(at)).unwrap();
                let at = tree.lowest((start, end), bytes, 1, 0);
                prop_assert_eq!(at, expected);
                tree.insert(start, end, at, at + bytes);
                placed.push((start, end, at, at + bytes));
            }
        }
    }
}
