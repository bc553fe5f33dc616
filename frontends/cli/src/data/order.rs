//! The order in which units of data are read. Every position has its unit by a formula, so that an
//! order takes no memory, and a run may begin anywhere in it.
//!
//! A shuffled epoch is a permutation by a Feistel network over the next power of four, whose
//! results beyond the last unit are permuted again until they are units (cycle walking: Black and
//! Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Only integers are used, so all machines
//! agree.

use std::fmt;

/// Rounds of the network. Four make it a pseudorandom permutation (Luby and Rackoff); the others
/// are a margin, because the halves may have few bits.
const ROUNDS: u64 = 8;
/// The fewest bits of a half: with fewer, there are few permutations of few units.
const HALF_BITS: u32 = 4;

/// The order of a source's units, epoch after epoch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Order {
    units: u64,
    per_batch: u64,
    /// Absent: in the order of the files.
    seed: Option<u64>,
}

impl Order {
    /// An order of `units` units, `per_batch` in a batch. With a seed, each epoch has its own
    /// order.
    pub(crate) fn new(units: u64, per_batch: u64, seed: Option<u64>) -> Order {
        Order {
            units,
            per_batch: per_batch.max(1),
            seed,
        }
    }

    /// The batches of an epoch: units that do not fill one are left out. A model without inputs has
    /// an empty one.
    pub(crate) fn batches(&self) -> u64 {
        (self.units / self.per_batch).max(1)
    }

    /// The units of a batch, by its number in the run.
    pub(crate) fn units_of(&self, batch: u64) -> Vec<u64> {
        let (epoch, batch) = (batch / self.batches(), batch % self.batches());
        let positions = batch * self.per_batch..(batch + 1) * self.per_batch;
        match self.seed {
            None => positions.collect(),
            Some(seed) => {
                let key = mix(seed ^ mix(epoch));
                positions.map(|at| permuted(at, self.units, key)).collect()
            }
        }
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Order {
            units,
            per_batch,
            seed,
        } = self;
        write!(f, "{units} units, {per_batch} in a batch")?;
        match seed {
            None => Ok(()),
            Some(seed) => write!(f, ", shuffled by seed {seed}"),
        }
    }
}

/// Where a permutation of the numbers below `n` takes one of them.
fn permuted(number: u64, n: u64, key: u64) -> u64 {
    if n <= 1 {
        return number;
    }
    let bits = u64::BITS - (n - 1).leading_zeros();
    let half = bits.div_ceil(2).max(HALF_BITS);
    let mask = (1 << half) - 1;
    let mut number = number;
    loop {
        let (mut left, mut right) = (number >> half, number & mask);
        for round in 0..ROUNDS {
            let mixed = mix(key.wrapping_add(round) ^ mix(right));
            (left, right) = (right, left ^ (mixed & mask));
        }
        number = left << half | right;
        if number < n {
            return number;
        }
    }
}

/// A number without visible relation to the given one (the finaliser of SplitMix64: Steele, Lea and
/// Flood, 2014).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_has_each_unit_once() {
        for n in [1, 2, 3, 7, 16, 17, 1000, 4097] {
            for epoch in 0..3 {
                let order = Order::new(n, 1, Some(5));
                let batches = epoch * n..(epoch + 1) * n;
                let mut units: Vec<u64> = batches.flat_map(|k| order.units_of(k)).collect();
                units.sort_unstable();
                assert_eq!(units, (0..n).collect::<Vec<u64>>(), "{n} in epoch {epoch}");
            }
        }
    }

    #[test]
    fn seeds_and_epochs_have_orders_of_their_own() {
        let epoch = |seed: u64, epoch: u64| -> Vec<u64> {
            let order = Order::new(100, 1, Some(seed));
            let batches = epoch * 100..(epoch + 1) * 100;
            batches.flat_map(|k| order.units_of(k)).collect()
        };
        assert_eq!(epoch(1, 0), epoch(1, 0));
        let all = [epoch(1, 0), epoch(1, 1), epoch(2, 0), (0..100).collect()];
        for (i, one) in all.iter().enumerate() {
            for other in &all[..i] {
                let same = one.iter().zip(other).filter(|(a, b)| a == b).count();
                // Of 100 positions, chance leaves about one the same.
                assert!(same < 10, "{same} of 100 positions are the same");
            }
        }
    }

    #[test]
    fn positions_of_units_are_even() {
        // The mean position of the first tenth of the units: 4,999.5 by chance, give or take 300.
        let n = 10_000;
        let sum: u64 = (0..n / 10).map(|k| permuted(k, n, mix(3))).sum();
        let mean = sum as f64 / (n / 10) as f64;
        assert!((4_600.0..5_400.0).contains(&mean), "{mean}");
    }

    #[test]
    fn the_order_is_the_same_on_all_machines_and_in_all_versions() {
        let order = Order::new(10, 2, Some(7));
        let epoch: Vec<Vec<u64>> = (0..5).map(|k| order.units_of(k)).collect();
        assert_eq!(epoch, [[5, 3], [0, 7], [4, 2], [8, 9], [1, 6]]);
    }

    #[test]
    fn units_that_fill_no_batch_are_left_out() {
        let order = Order::new(10, 4, None);
        assert_eq!(order.batches(), 2);
        assert_eq!(order.units_of(1), [4, 5, 6, 7]);
        assert_eq!(order.units_of(2), [0, 1, 2, 3]);
    }

    #[test]
    fn the_largest_numbers_are_permuted_too() {
        for n in [u64::MAX, u64::MAX / 2 + 2] {
            assert!(permuted(n - 1, n, 1) < n);
        }
    }
}
