//! Checks a plan of addresses. It reads only the trace and the offsets, and shares no code with the
//! planners.
//!
//! One sweep over time keeps the live blocks ordered by address, so a new block is compared only
//! with its two neighbours. The requested bytes of blocks count. A planner may round them up, but
//! the check does not need this.
//!
//! With several streams there is a second sweep. Each range of bytes records which stream used it
//! last. Each stream records how far it has waited for every other stream (a vector clock). A
//! stream that gets bytes must have waited for their last user.

use super::trace::Trace;
use std::collections::BTreeMap;
use std::fmt;

/// An error in a plan. Blocks are positions in the trace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The number of addresses is not the number of blocks.
    Count {
        /// Blocks of the trace.
        blocks: usize,
        /// Addresses of the plan.
        offsets: usize,
    },
    /// Two blocks have a byte in common while both are needed.
    Overlap {
        /// The block that was alive before.
        below: usize,
        /// The block that started.
        above: usize,
        /// When it started.
        tick: u64,
    },
    /// A stream gets bytes that another stream has used, and has not waited for it since then.
    Unordered {
        /// The last block that used them.
        before: usize,
        /// The block that gets them.
        after: usize,
        /// When.
        tick: u64,
    },
    /// A block should be in the bytes of another, but has another address.
    Apart {
        /// The block.
        block: usize,
        /// The other.
        from: usize,
    },
    /// An address is not a multiple of its alignment.
    Misaligned {
        /// The block.
        block: usize,
        /// Its alignment.
        alignment: u64,
    },
    /// The trace gives a block a fixed address, and it has another one.
    Moved {
        /// The block.
        block: usize,
        /// The fixed address.
        to: u64,
    },
    /// A block ends beyond the pool, or beyond the largest address.
    Outside {
        /// The block.
        block: usize,
        /// Bytes of the pool.
        capacity: u64,
    },
}

/// The text of a fault, with the names of its blocks.
pub struct Told<'a>(pub &'a Fault, pub &'a Trace, pub &'a [u64]);

impl fmt::Display for Told<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Told(fault, trace, offsets) = *self;
        let place = |block: usize| {
            let (id, bytes, offset) = (
                &trace.blocks[block].id,
                trace.blocks[block].bytes,
                offsets[block],
            );
            format!("block {id} ({bytes} bytes at {offset})")
        };
        match *fault {
            Fault::Count { blocks, offsets } => {
                write!(f, "{blocks} blocks and {offsets} addresses")
            }
            Fault::Overlap { below, above, tick } => {
                write!(
                    f,
                    "{} and {} overlap from tick {tick} on",
                    place(below),
                    place(above)
                )
            }
            Fault::Unordered {
                before,
                after,
                tick,
            } => {
                let stream = |block: usize| trace.blocks[block].origin.stream;
                let (first, second) = (stream(before), stream(after));
                let (before, after) = (place(before), place(after));
                write!(
                    f,
                    "{after} gets bytes of {before} at tick {tick}, and stream {second} has not \
                     waited for {first}"
                )
            }
            Fault::Apart { block, from } => {
                write!(
                    f,
                    "{} is not where {} is, whose bytes it shares",
                    place(block),
                    place(from)
                )
            }
            Fault::Misaligned { block, alignment } => {
                write!(f, "{}: not a multiple of {alignment}", place(block))
            }
            Fault::Moved { block, to } => write!(f, "{}: the trace fixes it at {to}", place(block)),
            Fault::Outside { block, capacity } => {
                write!(f, "{}: ends beyond {capacity}", place(block))
            }
        }
    }
}

/// Checks that
///
/// * every block has an address, a multiple of its alignment and of `align`, within `capacity`;
/// * a fixed address is respected, and a block made in the bytes of another has its address;
/// * no two blocks overlap;
/// * a stream reuses bytes of another stream only after it has waited for it.
///
/// Returns the highest address in use, in bytes, or the faults. A block that overlaps another is
/// ignored after that. So it is one fault, even if it overlaps several blocks.
pub fn check(
    trace: &Trace,
    offsets: &[u64],
    align: u64,
    capacity: Option<u64>,
) -> Result<u64, Vec<Fault>> {
    let blocks = &trace.blocks;
    if blocks.len() != offsets.len() {
        return Err(vec![Fault::Count {
            blocks: blocks.len(),
            offsets: offsets.len(),
        }]);
    }
    let mut faults = vec![];
    let mut peak = 0;
    let capacity = capacity.unwrap_or(u64::MAX);
    let mut events: Vec<Event> = vec![];
    for (i, (block, &offset)) in blocks.iter().zip(offsets).enumerate() {
        misplaced(trace, offsets, i, align, &mut faults);
        let end = offset.checked_add(block.bytes);
        let Some(end) = end.filter(|&end| end <= capacity) else {
            faults.push(Fault::Outside { block: i, capacity });
            continue;
        };
        peak = peak.max(end);
        if block.bytes == 0 {
            continue;
        }
        // The times when it is needed: between its gaps.
        let mut start = block.start;
        for (until, next) in block.gaps.iter().copied().chain([(block.end, block.end)]) {
            if start < until {
                events.extend([(start, true, i), (until, false, i)]);
            }
            start = start.max(next);
        }
    }
    events.sort_unstable();
    let shares = shares(trace);
    overlapping(trace, offsets, &events, &shares, &mut faults);
    unordered(trace, offsets, &events, &shares, &mut faults);
    if faults.is_empty() {
        Ok(peak)
    } else {
        Err(faults)
    }
}

/// A tick, whether a block starts or ends at it, and the block. A block that ends at a tick makes
/// room for a block that starts there, so ends are sorted first.
type Event = (u64, bool, usize);

/// Finds errors in the address of block `i` alone, except that it is out of range.
fn misplaced(trace: &Trace, offsets: &[u64], i: usize, align: u64, faults: &mut Vec<Fault>) {
    let (block, offset) = (&trace.blocks[i], offsets[i]);
    for alignment in [block.alignment, align] {
        if alignment > 1 && !offset.is_multiple_of(alignment) {
            faults.push(Fault::Misaligned {
                block: i,
                alignment,
            });
        }
    }
    let within = block.within;
    if let Some(from) = within.filter(|&from| offsets.get(from) != Some(&offset)) {
        faults.push(Fault::Apart {
            block: i,
            from: from.min(offsets.len() - 1),
        });
    }
    if let Some(to) = block.offset.filter(|&to| to != offset) {
        faults.push(Fault::Moved { block: i, to });
    }
}

/// Finds blocks that overlap. `shares` has the same number for blocks that share their bytes.
fn overlapping(
    trace: &Trace,
    offsets: &[u64],
    events: &[Event],
    shares: &[usize],
    faults: &mut Vec<Fault>,
) {
    let end = |i: usize| offsets[i] + trace.blocks[i].bytes;
    // The blocks at each address: several if they share their bytes.
    let mut here: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for &(tick, comes, i) in events {
        let lo = offsets[i];
        if !comes {
            // A block that overlapped another was not inserted.
            if let Some(there) = here.get_mut(&lo) {
                there.retain(|&j| j != i);
                if there.is_empty() {
                    here.remove(&lo);
                }
            }
            continue;
        }
        // Invariant: blocks in `here` are disjoint. So only the blocks at the last address below
        // the block's end can overlap it.
        let last = here.range(..end(i)).next_back().map(|(_, there)| there);
        let meets = |&&j: &&usize| lo < end(j) && !(shares[i] == shares[j] && offsets[j] == lo);
        match last.and_then(|there| there.iter().find(meets)) {
            Some(&j) => faults.push(Fault::Overlap {
                below: j,
                above: i,
                tick,
            }),
            None => here.entry(lo).or_default().push(i),
        }
    }
}

/// For each block, the first of the blocks that share its bytes; for blocks that form a cycle, any
/// of them.
fn shares(trace: &Trace) -> Vec<usize> {
    let mut first: Vec<Option<usize>> = vec![None; trace.blocks.len()];
    for i in 0..first.len() {
        let (mut path, mut at) = (vec![], i);
        while first[at].is_none() && path.len() <= first.len() {
            path.push(at);
            at = trace.blocks[at]
                .within
                .filter(|&other| other < first.len())
                .unwrap_or(at);
            if path.last() == Some(&at) {
                break;
            }
        }
        let found = first[at].unwrap_or(at);
        path.into_iter().for_each(|at| first[at] = Some(found));
    }
    first
        .into_iter()
        .enumerate()
        .map(|(i, found)| found.unwrap_or(i))
        .collect()
}

/// Finds blocks whose bytes another stream may still use. Events are starts and ends of blocks in
/// order. An event at the tick of a wait may be on either side of it.
fn unordered(
    trace: &Trace,
    offsets: &[u64],
    events: &[Event],
    shares: &[usize],
    faults: &mut Vec<Fault>,
) {
    let stream = |i: usize| trace.blocks[i].origin.stream;
    if events
        .iter()
        .all(|&(_, _, i)| stream(i) == stream(events[0].2))
    {
        return;
    }
    let mut waits = trace.waits.clone();
    waits.sort_by_key(|wait| wait.tick);
    let mut waits = waits.into_iter().peekable();
    // What each stream has waited for: all work of other streams before these ticks.
    let mut knows: BTreeMap<u32, BTreeMap<u32, u64>> = BTreeMap::new();
    // Ranges of bytes by their start: the end, the last user, and the tick at which it ended, if it
    // has.
    let mut last: BTreeMap<u64, (u64, usize, u64)> = BTreeMap::new();
    // When the blocks that share bytes last ended.
    let mut gone: Vec<u64> = vec![0; trace.blocks.len()];
    for &(tick, comes, i) in events {
        if !comes {
            gone[shares[i]] = tick;
            continue;
        }
        while let Some(wait) = waits.next_if(|wait| wait.tick < tick) {
            let mut news = knows.get(&wait.on).cloned().unwrap_or_default();
            news.insert(wait.on, wait.tick);
            let own = knows.entry(wait.stream).or_default();
            for (other, until) in news {
                let known = own.entry(other).or_default();
                *known = until.max(*known);
            }
        }
        let (lo, hi) = (offsets[i], offsets[i] + trace.blocks[i].bytes);
        let from = last
            .range(..lo)
            .next_back()
            .filter(|(_, (end, ..))| lo < *end)
            .map_or(lo, |(&at, _)| at);
        let touched: Vec<u64> = last.range(from..hi).map(|(&at, _)| at).collect();
        let mut told = None;
        for at in touched {
            let (end, j, came) = last
                .remove(&at)
                .expect("a range that was found should be there");
            let known = || {
                knows
                    .get(&stream(i))
                    .and_then(|own| own.get(&stream(j)))
                    .copied()
                    .unwrap_or(0)
            };
            let done = gone[shares[j]];
            // If the other block is still alive, that is another fault.
            if stream(i) != stream(j) && came < done && known() <= done {
                told = told.or(Some(j));
            }
            if at < lo {
                last.insert(at, (lo, j, came));
            }
            if hi < end {
                last.insert(hi, (end, j, came));
            }
        }
        if let Some(before) = told {
            faults.push(Fault::Unordered {
                before,
                after: i,
                tick,
            });
        }
        last.insert(lo, (hi, i, tick));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Block;
    use proptest::prelude::*;

    fn block(start: u64, end: u64, bytes: u64) -> Block {
        Block {
            id: format!("{start}-{end}"),
            start,
            end,
            bytes,
            ..Block::default()
        }
    }

    fn trace(blocks: Vec<Block>) -> Trace {
        Trace {
            blocks,
            ..Trace::default()
        }
    }

    #[test]
    fn each_fault_is_found() {
        let two = trace(vec![block(0, 4, 8), block(2, 6, 8)]);
        assert_eq!(check(&two, &[0, 8], 8, Some(16)), Ok(16));
        assert_eq!(
            check(&two, &[0], 1, None),
            Err(vec![Fault::Count {
                blocks: 2,
                offsets: 1
            }])
        );
        assert_eq!(
            check(&two, &[0, 4], 1, None),
            Err(vec![Fault::Overlap {
                below: 0,
                above: 1,
                tick: 2
            }])
        );
        assert_eq!(
            check(&two, &[0, 8], 16, None),
            Err(vec![Fault::Misaligned {
                block: 1,
                alignment: 16
            }])
        );
        assert_eq!(
            check(&two, &[0, 8], 1, Some(15)),
            Err(vec![Fault::Outside {
                block: 1,
                capacity: 15
            }])
        );
        let end = u64::MAX;
        assert_eq!(
            check(&two, &[0, end], 1, None),
            Err(vec![Fault::Outside {
                block: 1,
                capacity: end
            }])
        );
        let mut fixed = two.clone();
        fixed.blocks[0].offset = Some(16);
        assert_eq!(
            check(&fixed, &[0, 8], 1, None),
            Err(vec![Fault::Moved { block: 0, to: 16 }])
        );
        let mut aligned = two;
        aligned.blocks[1].alignment = 16;
        assert_eq!(
            check(&aligned, &[0, 8], 1, None),
            Err(vec![Fault::Misaligned {
                block: 1,
                alignment: 16
            }])
        );
    }

    #[test]
    fn bytes_are_free_in_gaps_and_after_the_end() {
        let mut blocks = vec![block(0, 9, 8), block(3, 5, 8), block(9, 12, 8)];
        blocks[0].gaps = vec![(3, 5)];
        assert_eq!(check(&trace(blocks.clone()), &[0, 0, 0], 1, None), Ok(8));
        blocks[1].end = 6;
        let found = check(&trace(blocks), &[0, 0, 0], 1, None);
        assert_eq!(
            found,
            Err(vec![Fault::Overlap {
                below: 1,
                above: 0,
                tick: 5
            }])
        );
    }

    proptest! {
        /// The sweep finds an overlap where comparing all pairs does.
        #[test]
        fn agrees_with_all_pairs(items in prop::collection::vec((0u64..20, 1u64..8, 0u64..6,
            0u64..20), 0..12)) {
            let trace = trace(items.iter().map(|&(start, span, bytes, _)| block(start, start
                + span, bytes)).collect());
            let offsets: Vec<u64> = items.iter().map(|item| item.3).collect();
            let meet = |&(s, span, bytes, lo): &(u64, u64, u64, u64),
                &(t, spun, size, at): &(u64, u64, u64, u64)| {
                s < t + spun && t < s + span && 0 < bytes && 0 < size && lo < at + size && at < lo
                    + bytes
            };
            let overlaps = (0..items.len()).any(|i| (0..i).any(|j| meet(&items[i], &items[j])));
            prop_assert_eq!(check(&trace, &offsets, 1, None).is_err(), overlaps);
        }
    }
}
