//! The plan synthesis of STAlloc, as described in the paper (W. Huang et al., "STAlloc: Enhancing
//! Memory Efficiency in Large-Scale Model Training with Spatio-Temporal Planning", 2025, section
//! 5.1), for comparison.
//!
//! Blocks that are allocated in one phase and freed in another form a *HomoPhase group*. They
//! overlap in time, so they are packed next to each other. Two groups are *fused* if one ends in
//! the phase in which the other starts and if that raises the time-memory product (Eq 2). The
//! smaller group is placed in the larger. Then each group is one request. Requests of one size form
//! *HomoSize groups*, which are processed in descending order. Requests that fit into idle times of
//! larger layers go there. The others form new *memory-layers* (Algorithm 1).
//!
//! The paper leaves some points open. Here, a block that starts and ends in the same phase, or
//! whose phase is unknown, is a group of its own. A group is packed with the latest end at the
//! bottom, because fusion needs this. Adjacent groups are fused in the order of their start, each
//! with the result of the fusions before. Within a layer the lowest free address is used.

use placement::reduced;
use placement::trace::Trace;
use placement::{Error, Placement};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Blocks with addresses from 0, which become one request.
#[derive(Clone, Debug, Default)]
struct Local {
    /// The positions in the trace, and the relative addresses.
    blocks: Vec<(usize, u64)>,
}

/// The paper's plan of a trace. Addresses are multiples of `align`. A block with a fixed address,
/// or with a larger alignment, is an error. The paper does not use gaps and streams, so gaps are
/// ignored, and each stream has a region.
pub fn place(trace: &Trace, align: u64) -> Result<Placement, Error> {
    reduced(trace, align, None, &mut |trace, _| {
        place_times(trace, align)
    })
}

fn place_times(trace: &Trace, align: u64) -> Result<Placement, Error> {
    for (i, block) in trace.blocks.iter().enumerate() {
        if block.offset.is_some() || align.max(1) < block.alignment {
            let what = if block.offset.is_some() {
                "address is given"
            } else {
                "alignment is its own"
            };
            let message = format!(
                "STAlloc's planner knows no blocks like {}: its {what}",
                block.id
            );
            return Err(Error { block: i, message });
        }
    }
    let offsets = plan(trace, align);
    let ends = trace
        .blocks
        .iter()
        .zip(&offsets)
        .map(|(block, at)| at + block.bytes.next_multiple_of(align.max(1)));
    let (peak, lower_bound) = (
        ends.max().unwrap_or(0),
        placement::lower_bound(trace, align),
    );
    Ok(Placement {
        offsets,
        peak,
        lower_bound,
        optimal: peak == lower_bound,
        method: "stalloc".into(),
    })
}

/// Addresses of a trace's blocks, in its order. Sizes are rounded up to multiples of `align`.
fn plan(trace: &Trace, align: u64) -> Vec<u64> {
    let problem = Problem {
        trace,
        align: align.max(1),
    };
    let mut offsets = vec![0; trace.blocks.len()];
    let locals = problem.fused(problem.groups());
    let mut by_size: BTreeMap<u64, Vec<(Range<u64>, usize)>> = BTreeMap::new();
    for (k, local) in locals.iter().enumerate() {
        let (size, time) = problem.extent(local);
        by_size.entry(size).or_default().push((time, k));
    }
    let mut layers: Vec<Layer> = vec![];
    let mut top = 0;
    for (&size, requests) in by_size.iter_mut().rev() {
        requests.sort_by_key(|(time, k)| (time.start, time.end, *k));
        let mut rest = vec![];
        for (time, k) in requests.drain(..) {
            // First fit over the layers of larger sizes.
            match layers.iter_mut().find_map(|layer| layer.place(&time, size)) {
                Some(address) => locals[k].put(address, &mut offsets),
                None => rest.push((time, k)),
            }
        }
        for layer in memory_layers(&rest) {
            let mut new = Layer {
                base: top,
                bytes: size,
                ..Layer::default()
            };
            for request in layer {
                let (time, k) = &rest[request];
                let address = new
                    .place(time, size)
                    .expect("a layer's requests should not overlap");
                locals[*k].put(address, &mut offsets);
            }
            layers.push(new);
            top += size;
        }
    }
    offsets
}

impl Local {
    fn put(&self, address: u64, offsets: &mut [u64]) {
        self.blocks
            .iter()
            .for_each(|&(block, relative)| offsets[block] = address + relative);
    }
}

/// Memory-layers of requests of one size, sorted by start (Algorithm 1): each request goes after
/// the latest end that is not after its start. The number of layers is the most requests that are
/// alive at once. Returns positions in `requests`.
fn memory_layers(requests: &[(Range<u64>, usize)]) -> Vec<Vec<usize>> {
    let mut layers: Vec<Vec<usize>> = vec![];
    let mut ends: BTreeSet<(u64, usize)> = BTreeSet::new();
    for (at, (time, _)) in requests.iter().enumerate() {
        let layer = match ends.range(..=(time.start, usize::MAX)).next_back().copied() {
            Some(end) => {
                ends.remove(&end);
                end.1
            }
            None => {
                layers.push(vec![]);
                layers.len() - 1
            }
        };
        layers[layer].push(at);
        ends.insert((time.end, layer));
    }
    layers
}

/// A range of addresses, and the groups that use its parts over time.
#[derive(Default)]
struct Layer {
    base: u64,
    bytes: u64,
    /// By start and address: end and bytes.
    taken: BTreeMap<(u64, u64), (u64, u64)>,
    longest: u64,
}

impl Layer {
    /// Takes the lowest address that is free over the whole time, if one exists.
    fn place(&mut self, time: &Range<u64>, bytes: u64) -> Option<u64> {
        let from = time.start.saturating_sub(self.longest);
        let mut met: Vec<(u64, u64)> = self
            .taken
            .range((from, 0)..(time.end, 0))
            .filter(|(_, taken)| time.start < taken.0)
            .map(|(&(_, address), &(_, bytes))| (address, bytes))
            .collect();
        met.sort_unstable();
        let mut at = self.base;
        for (address, taken) in met {
            if at + bytes <= address {
                break;
            }
            at = at.max(address + taken);
        }
        if self.base + self.bytes < at + bytes {
            return None;
        }
        self.taken.insert((time.start, at), (time.end, bytes));
        self.longest = self.longest.max(time.end - time.start);
        Some(at)
    }
}

struct Problem<'a> {
    trace: &'a Trace,
    align: u64,
}

impl Problem<'_> {
    fn bytes(&self, block: usize) -> u64 {
        self.trace.blocks[block].bytes.next_multiple_of(self.align)
    }
    fn time(&self, block: usize) -> Range<u64> {
        self.trace.blocks[block].start..self.trace.blocks[block].end
    }

    /// The bytes and the time of a local plan.
    fn extent(&self, local: &Local) -> (u64, Range<u64>) {
        let blocks = || local.blocks.iter();
        let bytes = blocks()
            .map(|&(block, at)| at + self.bytes(block))
            .max()
            .unwrap_or(0);
        let start = blocks()
            .map(|&(block, _)| self.time(block).start)
            .min()
            .unwrap_or(0);
        let end = blocks()
            .map(|&(block, _)| self.time(block).end)
            .max()
            .unwrap_or(0);
        (bytes, start..end)
    }

    /// The numerator and the denominator of the time-memory product (Eq 2).
    fn product(&self, local: &Local) -> [f64; 2] {
        let area = |bytes: u64, time: Range<u64>| bytes as f64 * (time.end - time.start) as f64;
        let used = local
            .blocks
            .iter()
            .map(|&(block, _)| area(self.bytes(block), self.time(block)))
            .sum();
        let (bytes, time) = self.extent(local);
        [used, area(bytes, time)]
    }

    /// HomoPhase groups, packed, by their phases.
    fn groups(&self) -> Vec<((u32, u32), Local)> {
        let mut scoped: BTreeMap<(u32, u32), Vec<usize>> = BTreeMap::new();
        let mut groups = vec![];
        for (block, data) in self.trace.blocks.iter().enumerate() {
            let phases = data.origin.phases;
            if phases.0 == phases.1 || phases.0 == 0 || phases.1 == 0 {
                groups.push((
                    (0, 0),
                    Local {
                        blocks: vec![(block, 0)],
                    },
                ));
            } else {
                scoped.entry(phases).or_default().push(block);
            }
        }
        for (phases, mut blocks) in scoped {
            blocks.sort_by_key(|&block| {
                (
                    std::cmp::Reverse(self.time(block).end),
                    self.time(block).start,
                    block,
                )
            });
            let mut top = 0;
            let place = |block: usize| {
                let at = top;
                top += self.bytes(block);
                (block, at)
            };
            groups.push((
                phases,
                Local {
                    blocks: blocks.into_iter().map(place).collect(),
                },
            ));
        }
        groups
    }

    /// Fuses groups that follow each other while that raises the time-memory product.
    fn fused(&self, groups: Vec<((u32, u32), Local)>) -> Vec<Local> {
        let (mut scoped, alone): (Vec<_>, Vec<_>) = groups
            .into_iter()
            .partition(|(phases, _)| *phases != (0, 0));
        scoped.sort_by_key(|(phases, local)| (self.extent(local).1.start, *phases));
        let mut done: Vec<Local> = alone.into_iter().map(|(_, local)| local).collect();
        // The fused groups so far, by the phase in which they end.
        let mut open: BTreeMap<u32, Local> = BTreeMap::new();
        for ((first, last), local) in scoped {
            let fused = open
                .remove(&first)
                .map(|before| self.fuse(&before, &local).ok_or(before));
            let next = match fused {
                Some(Ok(fused)) => fused,
                Some(Err(before)) => {
                    done.push(before);
                    local
                }
                None => local,
            };
            done.extend(open.insert(last, next));
        }
        done.extend(open.into_values());
        done
    }

    /// The smaller plan placed in the larger, if this leaves fewer bubbles than the two separate
    /// plans have.
    fn fuse(&self, one: &Local, other: &Local) -> Option<Local> {
        let (large, small) = if self.extent(one).0 < self.extent(other).0 {
            (other, one)
        } else {
            (one, other)
        };
        let mut layer = Layer {
            bytes: u64::MAX / 2,
            ..Layer::default()
        };
        let mut fused = large.clone();
        for &(block, at) in &large.blocks {
            let time = self.time(block);
            layer.longest = layer.longest.max(time.end - time.start);
            layer
                .taken
                .insert((time.start, at), (time.end, self.bytes(block)));
        }
        // From the bottom, where the larger plan has its latest ends: at each address, the earliest
        // block that fits.
        let mut addresses: BTreeSet<u64> = large.blocks.iter().map(|&(_, at)| at).collect();
        addresses.insert(self.extent(large).0);
        let mut waiting: Vec<usize> = small.blocks.iter().map(|&(block, _)| block).collect();
        waiting.sort_by_key(|&block| (self.time(block).start, block));
        let mut address = 0;
        while !waiting.is_empty() {
            let fits = waiting
                .iter()
                .position(|&block| layer.is_free(&self.time(block), address, self.bytes(block)));
            match (fits, addresses.range(address + 1..).next()) {
                (Some(k), _) => {
                    let block = waiting.remove(k);
                    let time = self.time(block);
                    layer.longest = layer.longest.max(time.end - time.start);
                    layer
                        .taken
                        .insert((time.start, address), (time.end, self.bytes(block)));
                    fused.blocks.push((block, address));
                    address += self.bytes(block);
                }
                (None, Some(&next)) => address = next,
                // Above all blocks there is always room.
                (None, None) => address = self.extent(&fused).0.max(address + 1),
            }
        }
        let [used, reserved] = self.product(&fused);
        let parts = [self.product(one), self.product(other)];
        let average = (parts[0][0] + parts[1][0]) / (parts[0][1] + parts[1][1]);
        (average < used / reserved).then_some(fused)
    }
}

impl Layer {
    fn is_free(&self, time: &Range<u64>, address: u64, bytes: u64) -> bool {
        let from = time.start.saturating_sub(self.longest);
        let mut met = self
            .taken
            .range((from, 0)..(time.end, 0))
            .filter(|(_, taken)| time.start < taken.0);
        !met.any(|(&(_, at), &(_, taken))| at < address + bytes && address < at + taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use placement::check::check;
    use placement::trace::{Block, Origin};
    use proptest::prelude::*;

    fn block(start: u64, end: u64, bytes: u64, phases: (u32, u32)) -> Block {
        Block {
            start,
            end,
            bytes,
            origin: Origin {
                phases,
                ..Origin::default()
            },
            ..Block::default()
        }
    }

    fn trace(blocks: Vec<Block>) -> Trace {
        Trace {
            blocks,
            ..Trace::default()
        }
    }

    fn peak(trace: &Trace, offsets: &[u64]) -> u64 {
        trace
            .blocks
            .iter()
            .zip(offsets)
            .map(|(block, at)| at + block.bytes)
            .max()
            .unwrap_or(0)
    }

    /// As on the left of figure 7: the first group's blocks are freed one after the other in the
    /// phase in which the second group's blocks start. So these take their places, and bubbles
    /// vanish.
    #[test]
    fn groups_that_fill_each_others_bubbles_are_fused() {
        let trace = trace(vec![
            block(0, 10, 4, (1, 2)),
            block(1, 8, 4, (1, 2)),
            block(8, 20, 4, (2, 3)),
            block(10, 20, 4, (2, 3)),
        ]);
        let problem = Problem {
            trace: &trace,
            align: 1,
        };
        let locals = problem.fused(problem.groups());
        assert_eq!(locals.len(), 1);
        // Without fusion, the groups cannot share addresses: both exist from 8 to 10.
        assert_eq!(peak(&trace, &plan(&trace, 1)), 8);
    }

    /// As on the right of figure 7: the second group starts before the first group's blocks are
    /// freed. So together they would leave larger bubbles than separately.
    #[test]
    fn groups_that_leave_bubbles_are_not_fused() {
        let trace = trace(vec![
            block(0, 10, 8, (1, 2)),
            block(9, 11, 8, (2, 3)),
            block(9, 12, 8, (2, 3)),
        ]);
        let problem = Problem {
            trace: &trace,
            align: 1,
        };
        assert_eq!(problem.fused(problem.groups()).len(), 2);
    }

    #[test]
    fn small_blocks_lie_in_idle_times_of_large_ones() {
        let none = (0, 0);
        let trace = trace(vec![
            block(0, 4, 8, none),
            block(6, 9, 8, none),
            block(4, 6, 3, none),
            block(4, 6, 5, none),
        ]);
        assert_eq!(peak(&trace, &plan(&trace, 1)), 8);
    }

    proptest! {
        #[test]
        fn blocks_never_meet(raw in proptest::collection::vec((0u64..40, 1u64..20, 1u64..9,
            1u32..5, 0u32..3), 1..40)) {
            let of = |&(start, length, bytes, phase, more): &(u64, u64, u64, u32, u32)| {
                block(start, start + length, bytes, (phase, phase + more))
            };
            let trace = trace(raw.iter().map(of).collect());
            let offsets = plan(&trace, 1);
            prop_assert!(check(&trace, &offsets, 1, None).is_ok(), "{offsets:?}");
        }

        /// The number of layers of one size is minimal.
        #[test]
        fn equal_blocks_lose_nothing(raw in proptest::collection::vec((0u64..40, 1u64..20),
            1..40)) {
            let trace = trace(raw.iter().map(|&(start, length)| block(start, start + length, 8,
                (0, 0))).collect());
            let alive = |at: u64| trace.blocks.iter().filter(|b| b.start <= at && at < b.end)
                .count() as u64 * 8;
            let most = (0..60).map(alive).max().unwrap();
            prop_assert_eq!(peak(&trace, &plan(&trace, 1)), most);
        }
    }
}
