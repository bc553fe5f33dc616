//! Orders in which first fit takes items, largest key first. Each order fails on some problems, so
//! several are tried:
//!
//! * by size: leaves gaps that only small items fill;
//! * by length of life: long-lived items are at the bottom;
//! * by area: a compromise of the two;
//! * by the fullest section: places the hardest items first;
//! * by time: best for steps that behave like a stack.

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
