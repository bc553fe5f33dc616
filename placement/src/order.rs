//! Orders in which first fit takes items, largest key first. Each order fails on some problems, so
//! several are tried:
//!
//! * by size: leaves gaps that only small items fill;
//! * by length of life: long-lived items are at the bottom;
//! * by area: a compromise of the two;
//! * by the fullest section: places the hardest items first;
//! * by time: best for steps that behave like a stack;
//! * at random, near the order by size.

use super::problem::{Item, Problem};
use std::cmp::Reverse;

/// A name, and the key of an item; `fullest` is the most bytes alive at once during its life.
pub(super) struct Order {
    pub(super) name: &'static str,
    key: fn(item: &Item, fullest: u64) -> [u64; 3],
}

/// Orders for first fit, in the order in which they are tried. In the first three, blocks of
/// similar size come in the order of time. This loses nothing if all have the same size (the
/// left-edge algorithm: Hashimoto and Stevens, 1971), and uses one part of the tree after another.
/// A sweep does the same as the last two, and is faster, if it is possible.
pub(super) const PLACING: &[Order] = &[
    Order {
        name: "size, end",
        key: |i, _| [i.bytes, u64::from(i.end), 0],
    },
    Order {
        name: "log size, end",
        key: |i, _| [u64::from(i.bytes.ilog2()), u64::from(i.end), i.bytes],
    },
    Order {
        name: "size, start",
        key: |i, _| [i.bytes, u64::MAX - u64::from(i.start), 0],
    },
    Order {
        name: "fullest, life",
        key: |i, fullest| [fullest, i.sections(), i.bytes],
    },
    Order {
        name: "area",
        key: |i, _| [area(i), i.bytes, 0],
    },
    Order {
        name: "fullest, size",
        key: |i, fullest| [fullest, i.bytes, 0],
    },
    Order {
        name: "size, life",
        key: |i, _| [i.bytes, i.sections(), 0],
    },
    Order {
        name: "size x life^1/2",
        key: |i, _| [leaning(i.bytes, i.sections(), 1), i.bytes, 0],
    },
    Order {
        name: "life, size",
        key: |i, _| [i.sections(), i.bytes, 0],
    },
    Order {
        name: "fullest, size, life",
        key: |i, fullest| [fullest, i.bytes, i.sections()],
    },
    Order {
        name: "life x size^1/2",
        key: |i, _| [leaning(i.sections(), i.bytes, 1), i.bytes, 0],
    },
    Order {
        name: "life x size^1/4",
        key: |i, _| [leaning(i.sections(), i.bytes, 2), i.bytes, 0],
    },
    Order {
        name: "size x life^1/4",
        key: |i, _| [leaning(i.bytes, i.sections(), 2), i.bytes, 0],
    },
    Order {
        name: "log life, size",
        key: |i, _| [u64::from(i.sections().ilog2()), i.bytes, i.sections()],
    },
    Order {
        name: "log size, life",
        key: |i, _| [u64::from(i.bytes.ilog2()), i.sections(), i.bytes],
    },
    Order {
        name: "end",
        key: |i, _| [u64::from(i.end), i.bytes, 0],
    },
    Order {
        name: "start",
        key: |i, _| [u64::MAX - u64::from(i.start), i.bytes, 0],
    },
];

/// Orders for the exact search: they decide among the blocks that could be next.
pub(super) const RANKS: &[Order] = &[
    Order {
        name: "life",
        key: |i, _| [i.ticks, i.bytes, 0],
    },
    Order {
        name: "fullest, area",
        key: |i, fullest| [fullest, i.bytes.saturating_mul(i.ticks), i.ticks],
    },
    Order {
        name: "fullest, life",
        key: |i, fullest| [fullest, i.ticks, i.bytes],
    },
    Order {
        name: "sections",
        key: |i, _| [i.sections(), i.bytes, 0],
    },
    Order {
        name: "fullest, sections x size",
        key: |i, fullest| [fullest, area(i), i.sections()],
    },
    Order {
        name: "fullest, sections",
        key: |i, fullest| [fullest, i.sections(), i.bytes],
    },
];

/// How the exact search ranks blocks: by an order, with some random changes.
#[derive(Clone, Copy)]
pub(super) struct Rank {
    pub(super) order: &'static Order,
    seed: u64,
    /// Whether sections that failed often have more weight.
    pub(super) learned: bool,
    /// The largest random change of a block's place, in 4096ths of the place.
    most: u32,
}

impl Default for Rank {
    fn default() -> Rank {
        Rank {
            order: &RANKS[0],
            seed: 0,
            learned: false,
            most: 1,
        }
    }
}

impl Rank {
    /// The place of a block that is the `place`th in order, changed at random by up to an eighth.
    pub(super) fn disordered(&self, place: u32, i: u32) -> u32 {
        let mut random = self
            .seed
            .wrapping_add(u64::from(i))
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            | 1;
        next(&mut random);
        let off = (next(&mut random) >> 16) as u32 % self.most;
        place * (4096 - self.most / 2 + off)
    }
}

/// The ranks of a round of the exact search. They are [`RANKS`], in three rounds of four with
/// random changes and with learned weights, because a search fails when the wrong blocks come
/// first.
pub(super) fn ranks(round: u64) -> Vec<Rank> {
    let most = [1, 64, 256, 1024][round as usize % 4];
    RANKS
        .iter()
        .map(|order| Rank {
            order,
            seed: round << 32,
            learned: most != 1,
            most,
        })
        .collect()
}

/// A random order for first fit, near the order by size. Every fixed order is far from the bound on
/// some traces; of these orders, a few in a hundred are nearer.
pub(super) fn random(problem: &Problem, fullest: &[u64], random: &mut u64) -> Vec<u32> {
    let keys = match next(random) % 4 {
        0 => by_size_and_life(problem, fullest, random),
        _ => by_class_and_time(problem, random),
    };
    let mut keyed: Vec<((f64, u64), u32)> = keys.into_iter().zip(0..).collect();
    // Largest first.
    keyed.sort_unstable_by(|((a, a_time), i), ((b, b_time), j)| {
        b.total_cmp(a).then(b_time.cmp(a_time)).then(i.cmp(j))
    });
    keyed.into_iter().map(|(_, i)| i).collect()
}

/// Classes of similar sizes, each in the order of time. The order of the classes is that of the
/// sizes, or is near it.
fn by_class_and_time(problem: &Problem, random: &mut u64) -> Vec<(f64, u64)> {
    // In powers of two. Without a width, equal sizes are a class.
    let width = next(random).is_multiple_of(2).then(|| 1.5 * unit(random));
    let (first, noise, seed) = (unit(random), noise(random), next(random));
    let from_end = next(random).is_multiple_of(2);
    let key = |item: &Item| {
        // The exponent and the fraction of a float are nearly a logarithm: they are equal on all
        // machines, which logarithms are not.
        let log = (item.bytes as f64).to_bits() as f64 / (1u64 << 52) as f64;
        let class = width.map_or(log, |width| (log / width + first).floor() * width);
        // Equal for the items of a class.
        let mut own = (class.to_bits() ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        next(&mut own);
        let time = match from_end {
            true => u64::from(item.end),
            false => u64::MAX - u64::from(item.start),
        };
        (class + 1.5 * noise * unit(&mut own), time)
    };
    problem.items.iter().map(key).collect()
}

/// By size, with a little weight on the length of life, often with weight on the fullest section,
/// and often with noise.
fn by_size_and_life(problem: &Problem, fullest: &[u64], random: &mut u64) -> Vec<(f64, u64)> {
    // The life counts to the power of 1/4 to 1/256.
    let halvings = 2 + next(random) % 7;
    let weight = [0, 0, 0, 0, 1, 2, 3, 5][(next(random) % 8) as usize];
    let noise = noise(random) / 2.0;
    let key = |(item, &full): (&Item, &u64)| {
        let life = (0..halvings).fold(item.sections() as f64, |root, _| root.sqrt());
        let full = (0..weight).fold(1.0, |power, _| power * full as f64);
        (
            item.bytes as f64 * life * full * (1.0 + noise * unit(random)),
            0,
        )
    };
    problem.items.iter().zip(fullest).map(key).collect()
}

/// The amount of noise: none, or a power of two from 1/64 to 1.
fn noise(random: &mut u64) -> f64 {
    match next(random).is_multiple_of(2) {
        true => 0.0,
        false => 1.0 / (1u64 << (next(random) % 7)) as f64,
    }
}

/// A number from 0 to 1.
fn unit(random: &mut u64) -> f64 {
    (next(random) >> 32) as f64 / (1u64 << 32) as f64
}

/// The next random number (xorshift).
pub(super) fn next(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random
}

fn area(item: &Item) -> u64 {
    item.bytes.saturating_mul(item.sections())
}

/// The product of a number and the `2^halvings`th root of another.
fn leaning(whole: u64, part: u64, halvings: u32) -> u64 {
    let root = (0..halvings).fold(part as f64, |root, _| root.sqrt());
    // In 256ths, so that small products differ.
    (whole as f64 * root * 256.0) as u64
}

/// The most bytes alive at once during each item's life.
pub(super) fn fullest(problem: &Problem) -> Vec<u64> {
    // Maxima over all ranges whose length is a power of two. Two of them cover any life.
    let mut tables = vec![problem.live.clone()];
    while 1 << tables.len() <= problem.live.len() {
        let last = &tables[tables.len() - 1];
        let half = 1 << (tables.len() - 1);
        tables.push(
            (half..last.len())
                .map(|s| last[s - half].max(last[s]))
                .collect(),
        );
    }
    let most = |item: &Item| {
        let table = (item.end - item.start).ilog2();
        let covered = &tables[table as usize];
        covered[item.start as usize].max(covered[item.end as usize - (1 << table)])
    };
    problem.items.iter().map(most).collect()
}

impl Order {
    /// The key; a larger key comes first.
    pub(super) fn key(&self, item: &Item, fullest: u64) -> [u64; 3] {
        (self.key)(item, fullest)
    }

    /// The items in this order.
    pub(super) fn sorted(&self, problem: &Problem, fullest: &[u64]) -> Vec<u32> {
        let keyed = problem.items.iter().zip(fullest).enumerate();
        let mut keyed: Vec<_> = keyed
            .map(|(i, (item, &full))| (Reverse((self.key)(item, full)), i as u32))
            .collect();
        keyed.sort_unstable();
        keyed.into_iter().map(|(_, i)| i).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Block, Trace};

    #[test]
    fn random_orders_are_permutations() {
        let block = |i: u64| Block {
            start: i % 50,
            end: i % 50 + 1 + i % 17,
            bytes: 64 + 37 * (i * i % 41),
            ..Block::default()
        };
        let trace = Trace {
            blocks: (0..200).map(block).collect(),
            ..Trace::default()
        };
        let problem = Problem::new(&trace, 1).unwrap();
        let fullest = fullest(&problem);
        let mut seed = 1;
        let orders: Vec<_> = (0..50)
            .map(|_| random(&problem, &fullest, &mut seed))
            .collect();
        for order in &orders {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..200));
        }
        let mut different = orders;
        different.sort();
        different.dedup();
        assert!(30 <= different.len(), "{}", different.len());
    }
}
