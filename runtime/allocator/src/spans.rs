//! Disjoint half-open ranges of bytes, each with a value.

use std::collections::BTreeMap;

/// Ranges `lo..hi` in ascending order; no two overlap.
#[derive(Clone, Debug)]
pub(crate) struct Spans<V> {
    by_start: BTreeMap<u64, (u64, V)>,
}

impl<V: Clone> Spans<V> {
    pub(crate) fn new() -> Spans<V> {
        Spans {
            by_start: BTreeMap::new(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_start.is_empty()
    }

    /// Adds a range that overlaps no other.
    pub(crate) fn insert(&mut self, lo: u64, hi: u64, value: V) {
        debug_assert!(
            lo < hi && self.first_meeting(lo, hi).is_none(),
            "{lo}..{hi} should be free"
        );
        self.by_start.insert(lo, (hi, value));
    }

    /// All ranges, ascending.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.by_start.iter().map(|(lo, (hi, _))| (*lo, *hi))
    }

    /// The range that begins at `lo`.
    pub(crate) fn get(&self, lo: u64) -> Option<&V> {
        self.by_start.get(&lo).map(|(_, value)| value)
    }

    /// Removes the range that begins at `lo`; returns its end and its value.
    pub(crate) fn remove(&mut self, lo: u64) -> Option<(u64, V)> {
        self.by_start.remove(&lo)
    }

    /// The lowest range that shares a byte with `lo..hi`: its start, end and value.
    pub(crate) fn first_meeting(&self, lo: u64, hi: u64) -> Option<(u64, u64, &V)> {
        let below = self
            .by_start
            .range(..=lo)
            .next_back()
            .filter(|(_, (end, _))| lo < *end);
        let found = below.or_else(|| self.by_start.range(lo..hi).next());
        found
            .filter(|(start, _)| **start < hi)
            .map(|(start, (end, value))| (*start, *end, value))
    }

    /// Removes `lo..hi` from all ranges; the parts outside stay. Returns the values of the ranges
    /// that changed.
    pub(crate) fn cut(&mut self, lo: u64, hi: u64) -> Vec<V> {
        let mut met = vec![];
        while let Some((start, end, _)) = self.first_meeting(lo, hi) {
            let (_, value) = self
                .by_start
                .remove(&start)
                .expect("the range should be there");
            if start < lo {
                self.by_start.insert(start, (lo, value.clone()));
            }
            if hi < end {
                self.by_start.insert(hi, (end, value.clone()));
            }
            met.push(value);
        }
        met
    }

    /// The parts of `lo..hi` that no range covers, ascending.
    pub(crate) fn holes(&self, lo: u64, hi: u64) -> impl Iterator<Item = (u64, u64)> {
        let first = self.first_meeting(lo, hi).map_or(hi, |(start, _, _)| start);
        let mut ranges = self
            .by_start
            .range(first..hi.max(first))
            .map(|(start, (end, _))| (*start, *end));
        let mut at = lo;
        std::iter::from_fn(move || {
            loop {
                let hole = at;
                if hi <= at {
                    return None;
                }
                let (start, end) = ranges.next().unwrap_or((hi, hi));
                at = end.max(at);
                if start == hi {
                    at = hi;
                }
                if hole < start {
                    return Some((hole, start));
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every operation gives the same result as on an array of single bytes.
        #[test]
        fn like_bytes(ops in prop::collection::vec((0u8..4, 0u64..40, 1u64..9), 1..60)) {
            let (mut spans, mut bytes) = (Spans::new(), [None; 64]);
            for (i, (op, lo, len)) in ops.into_iter().enumerate() {
                let hi = lo + len;
                let (l, h) = (lo as usize, hi as usize);
                let meets = bytes[l..h].iter().any(Option::is_some);
                prop_assert_eq!(spans.first_meeting(lo, hi).is_some(), meets);
                match op {
                    0 | 1 if !meets => {
                        spans.insert(lo, hi, i);
                        bytes[l..h].fill(Some(i));
                    }
                    2 => {
                        // Two parts of one range count twice.
                        let mut met: Vec<usize> = bytes[l..h].iter().flatten().copied().collect();
                        let mut cut = spans.cut(lo, hi);
                        [&mut met, &mut cut].into_iter().for_each(|values| values.dedup());
                        prop_assert_eq!(cut, met);
                        bytes[l..h].fill(None);
                    }
                    _ => {
                        let holes: Vec<u64> = spans.holes(lo, hi).flat_map(|(lo, hi)| lo..hi)
                            .collect();
                        let expected: Vec<u64> = (lo..hi).filter(|&at| bytes[at as usize].is_none())
                            .collect();
                        prop_assert_eq!(holes, expected);
                    }
                }
            }
        }
    }
}
