//! Sets of bytes of one pool.

use std::collections::BTreeMap;

/// A set of bytes: ends of disjoint ranges by their starts. No two ranges touch.
#[derive(Default)]
pub(crate) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// The first byte of a range that is not in the set.
    pub(crate) fn missing(&self, start: u64, end: u64) -> Option<u64> {
        match self.0.range(..=start).next_back() {
            Some((_, &to)) if to >= end => None,
            Some((_, &to)) if to > start => Some(to),
            _ => Some(start),
        }
    }

    /// Removes bytes; returns the number of visited ranges.
    pub(crate) fn remove(&mut self, start: u64, end: u64) -> u64 {
        let mut looks = 1;
        if let Some((&from, &to)) = self.0.range(..start).next_back()
            && to > start
        {
            self.0.insert(from, start);
            if to > end {
                self.0.insert(end, to);
            }
        }
        while let Some((&from, &to)) = self.0.range(start..end).next() {
            looks += 1;
            self.0.remove(&from);
            if to > end {
                self.0.insert(end, to);
            }
        }
        looks
    }

    /// Adds bytes; returns the number of visited ranges.
    pub(crate) fn add(&mut self, mut start: u64, mut end: u64) -> u64 {
        let looks = self.remove(start, end);
        // Ranges that touch become one.
        if let Some((&from, &to)) = self.0.range(..start).next_back()
            && to == start
        {
            self.0.remove(&from);
            start = from;
        }
        if let Some(to) = self.0.remove(&end) {
            end = to;
        }
        self.0.insert(start, end);
        looks
    }

    /// The parts of a range that are in the set.
    pub(crate) fn parts(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let before = self.0.range(..start).next_back();
        let within = self.0.range(start..end);
        before
            .into_iter()
            .chain(within)
            .map(|(&from, &to)| (from.max(start), to.min(end)))
            .filter(|(from, to)| from < to)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Ranges behave like a list of bytes.
        #[test]
        fn ranges_are_sets_of_bytes(
            edits in prop::collection::vec((any::<bool>(), 0u64..64, 1u64..40), 0..40),
            (start, len) in (0u64..64, 1u64..64),
        ) {
            let (mut ranges, mut bytes) = (Ranges::default(), [false; 128]);
            for (adds, start, len) in edits {
                if adds {
                    ranges.add(start, start + len);
                } else {
                    ranges.remove(start, start + len);
                }
                bytes[start as usize..(start + len) as usize].fill(adds);
            }
            let end = start + len;
            let missing = (start..end).find(|&byte| !bytes[byte as usize]);
            prop_assert_eq!(ranges.missing(start, end), missing);
            let mut parts = [false; 128];
            for (from, to) in ranges.parts(start, end) {
                parts[from as usize..to as usize].fill(true);
            }
            let expected = |byte: u64| (start..end).contains(&byte) && bytes[byte as usize];
            prop_assert!((0..128).all(|byte| parts[byte as usize] == expected(byte)));
            let sorted: Vec<(u64, u64)> = ranges.0.into_iter().collect();
            prop_assert!(sorted.iter().all(|(from, to)| from < to));
            prop_assert!(sorted.windows(2).all(|pair| pair[0].1 < pair[1].0));
        }
    }
}
