//! Orders in which first fit takes items, largest key first. Each order fails on some problems, so
//! several are tried:
//!
//! * by size: leaves gaps that only small items fill;
//! * by length of life: keeps the bottom quiet;
//! * by area: a compromise of the two;
//! * by the fullest section first: leaves the compromises to emptier times;
//! * by time: best for steps that behave like a stack.

use super::problem::{Item, Problem};
use std::cmp::Reverse;

/// A name, and the key of an item; `fullest` is the most bytes alive at once during its life.
pub(super) struct Order {
    pub(super) name: &'static str,
    key: fn(item: &Item, fullest: u64) -> [u64; 3],
}

/// For first fit, in the order in which they are tried. In the first three, blocks of about one
/// size come in the order of time, which loses nothing if all are of one size (the left-edge
/// algorithm: Hashimoto and Stevens, 1971) and looks at one part of the tree after another. The
/// last two are what a sweep does quicker, where it can.
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

/// For the exact search: which blocks come first among those that could be next.
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

/// How the exact search ranks blocks: by an order, with some disorder.
#[derive(Clone, Copy)]
pub(super) struct Rank {
    pub(super) order: &'static Order,
    seed: u64,
    /// Whether sections that failed often weigh more.
    pub(super) learned: bool,
    /// From how many 4096ths of its place a block's own is drawn.
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
    /// Where to put a block that is the `place`th in order: up to an eighth off.
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

/// Ranks of a round of the exact search: those of [`RANKS`], three rounds of four with some
/// disorder and what was learned, since searches that fail do so by what came first.
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

/// The next of a row of numbers without order (xorshift).
pub(super) fn next(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random
}

fn area(item: &Item) -> u64 {
    item.bytes.saturating_mul(item.sections())
}

/// The product of a number and the `2^halvings`th root of another: between its order and that of
/// both.
fn leaning(whole: u64, part: u64, halvings: u32) -> u64 {
    let root = (0..halvings).fold(part as f64, |root, _| root.sqrt());
    // In 256ths, so that small ones differ.
    (whole as f64 * root * 256.0) as u64
}

/// The most bytes alive at once during each item's life.
pub(super) fn fullest(problem: &Problem) -> Vec<u64> {
    // The maximum over every power of two of sections, so that two of them cover any life.
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
    /// What comes first is larger.
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
