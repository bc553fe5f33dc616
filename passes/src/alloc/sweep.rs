//! First fit in the order of ends, the latest first, without a tree: what is placed before a block ends no earlier than it, so
//! what is in its way at its last moment is all that ever is. It is an allocator that serves the trace backward, which
//! knows which addresses are free at one moment.

use super::problem::{FREE, Problem};

/// Ranges `lo..hi` that are free, in ascending order, none touching the next; the last has no end.
struct Holes(Vec<(u64, u64)>);

impl Holes {
    /// Takes the lowest multiple of `align` at which `bytes` bytes are free.
    fn take(&mut self, bytes: u64, align: u64) -> u64 {
        let up = |address: u64| (address + (align - 1)) & !(align - 1);
        let k = self.0.iter().position(|&(lo, hi)| up(lo) + bytes <= hi).expect("the last hole should have room");
        let (lo, hi) = self.0[k];
        let at = up(lo);
        match (lo < at, at + bytes < hi) {
            (false, true) => self.0[k].0 = at + bytes,
            (true, false) => self.0[k].1 = at,
            (false, false) => _ = self.0.remove(k),
            (true, true) => {
                self.0[k].0 = at + bytes;
                self.0.insert(k, (lo, at));
            }
        }
        at
    }

    /// Gives a range back.
    fn give(&mut self, lo: u64, hi: u64) {
        let k = self.0.partition_point(|hole| hole.0 < lo);
        let joins = (0 < k && self.0[k - 1].1 == lo, self.0[k].0 == hi);
        match joins {
            (true, true) => {
                self.0[k - 1].1 = self.0[k].1;
                self.0.remove(k);
            }
            (true, false) => self.0[k - 1].1 = hi,
            (false, true) => self.0[k].0 = lo,
            (false, false) => self.0.insert(k, (lo, hi)),
        }
    }
}

/// Whether [`backward`] can place a problem's items: none has a fixed place or a gap.
pub(super) fn is_plain(problem: &Problem) -> bool {
    problem.spans.is_empty() && problem.items.iter().all(|item| item.fixed == FREE)
}

/// Places items in an order of falling ends, each at the lowest address from `base` on that is free over its life.
pub(super) fn backward(problem: &Problem, order: &[u32], base: u64) -> Vec<u64> {
    let items = &problem.items;
    let mut at = vec![0; items.len()];
    let mut holes = Holes(vec![(base, u64::MAX)]);
    // Items stand in the order of their starts; those from here on start too late to meet what comes next.
    let mut gone = items.len();
    for &i in order {
        let item = &items[i as usize];
        while 0 < gone && item.end <= items[gone - 1].start {
            gone -= 1;
            holes.give(at[gone], at[gone] + items[gone].bytes);
        }
        at[i as usize] = holes.take(item.bytes, item.align);
    }
    at
}
