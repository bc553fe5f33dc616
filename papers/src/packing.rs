//! Sequences of different lengths in bins of a number of tokens: first-fit decreasing.
//!
//! The longest sequence comes first, and each one goes into the first bin that has room. No more
//! than 11/9 of the smallest possible number of bins are needed, and 6/9 of a bin (Dósa, "The Tight
//! Bound of First Fit Decreasing Bin-Packing Algorithm Is FFD(I) <= 11/9 OPT(I) + 6/9", 2007).

/// The sequences of each bin, by their position in `lengths`, in the order in which they were put
/// in. None if a sequence is longer than `limit`. It takes `n log n` steps.
pub fn first_fit_decreasing(lengths: &[u64], limit: u64) -> Option<Vec<Vec<usize>>> {
    if lengths.iter().any(|&length| length > limit) {
        return None;
    }
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(lengths[i]));
    let mut bins: Vec<Vec<usize>> = vec![];
    let mut room = Room::new(lengths.len(), limit);
    for i in order {
        let bin = room.take(lengths[i]);
        if bin == bins.len() {
            bins.push(vec![]);
        }
        bins[bin].push(i);
    }
    Some(bins)
}

/// The room in each bin, as a tree of maxima: the leaves are bins, all of them empty at first.
struct Room {
    most: Vec<u64>,
    leaves: usize,
}

impl Room {
    fn new(bins: usize, limit: u64) -> Room {
        let leaves = bins.next_power_of_two();
        Room {
            most: vec![limit; 2 * leaves],
            leaves,
        }
    }

    /// Takes room in the first bin that has enough; there is an empty one.
    fn take(&mut self, length: u64) -> usize {
        let mut at = 1;
        while at < self.leaves {
            at *= 2;
            if self.most[at] < length {
                at += 1;
            }
        }
        self.most[at] -= length;
        let bin = at - self.leaves;
        while at > 1 {
            at /= 2;
            self.most[at] = self.most[2 * at].max(self.most[2 * at + 1]);
        }
        bin
    }
}

/// Tokens of rows that are as long as the longest of their sequences.
pub fn padded(lengths: &[u64]) -> u64 {
    lengths.len() as u64 * lengths.iter().max().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 84 lengths with a mean of 5000. The blog post does not list its own; these go evenly from
    /// 600 to 9400, and are cut at 8192.
    fn lengths() -> Vec<u64> {
        let length = |i: u64| (600 + 8800 * (i * 37 % 84) / 83).min(8192);
        let mut lengths: Vec<u64> = (0..84).map(length).collect();
        lengths.sort_unstable();
        let missing = 420_000 - lengths.iter().sum::<u64>();
        lengths[0] += missing;
        lengths
    }

    #[test]
    fn the_post_s_sequences_need_its_numbers_of_microbatches() {
        let lengths = lengths();
        assert_eq!((lengths.len(), lengths.iter().sum()), (84, 420_000u64));
        let bins = |limit| first_fit_decreasing(&lengths, limit).unwrap();
        assert_eq!(
            [65_536, 16_384, 8192].map(|limit| bins(limit).len()),
            [7, 26, 52]
        );
        for limit in [65_536, 16_384, 8192] {
            let mut all: Vec<usize> = bins(limit).concat();
            all.sort_unstable();
            assert_eq!(all, (0..84).collect::<Vec<_>>());
            let tokens = |bin: &Vec<usize>| bin.iter().map(|&i| lengths[i]).sum::<u64>();
            assert!(bins(limit).iter().all(|bin| tokens(bin) <= limit));
        }
        assert_eq!(first_fit_decreasing(&lengths, 8191), None);
    }

    #[test]
    fn a_row_is_padded_to_its_longest_sequence() {
        assert_eq!(padded(&[3000, 5000, 8000]), 24_000);
        assert_eq!(
            first_fit_decreasing(&[3000, 5000, 8000], 16_000)
                .unwrap()
                .len(),
            1
        );
    }

    /// Against the smallest number, by trying all ways.
    #[test]
    fn bins_are_close_to_the_fewest() {
        fn fewest(lengths: &[u64], room: &mut Vec<u64>, limit: u64, best: &mut usize) {
            let Some((&first, rest)) = lengths.split_first() else {
                *best = room.len().min(*best);
                return;
            };
            if room.len() >= *best {
                return;
            }
            for bin in 0..room.len() {
                if room[bin] >= first {
                    room[bin] -= first;
                    fewest(rest, room, limit, best);
                    room[bin] += first;
                }
            }
            room.push(limit - first);
            fewest(rest, room, limit, best);
            room.pop();
        }
        let mut seed = 1u64;
        for _ in 0..200 {
            let mut next = || {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                seed >> 33
            };
            let lengths: Vec<u64> = (0..8).map(|_| 1 + next() % 60).collect();
            let mut best = lengths.len();
            fewest(&lengths, &mut vec![], 100, &mut best);
            let bins = first_fit_decreasing(&lengths, 100).unwrap().len();
            assert!(9 * bins <= 11 * best + 6, "{lengths:?}: {bins} {best}");
        }
    }
}
