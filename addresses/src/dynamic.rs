//! Space for dynamic requests, whose sizes are known only at run time: the bytes that a plan leaves
//! idle during their lives.
//!
//! Before: every block that is not dynamic has an offset. After: dynamic blocks are grouped by the
//! modules that allocate and free them, and each group has the ranges that no planned block uses
//! during its time. At run time the allocator fits a group's requests into these ranges:
//! `runtime/allocator`.
//!
//! Source: STAlloc (EuroSys 2026), section 5.2: HomoLayer groups (Eq 3), Dynamic Reusable Space (Eq
//! 4 to 6).

use placement::trace::{Block, Trace};
use std::collections::BTreeMap;

/// Dynamic blocks that are allocated in the same module and freed in the same module, and the bytes
/// that they may use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Group {
    /// The modules in which they are allocated and freed: positions in [`Trace::modules`]. A block
    /// with an unknown module is a separate group.
    pub modules: (u32, u32),
    /// From the first module's start to the last one's end, T(a, b) in the paper. It covers at
    /// least the lives of the blocks.
    pub span: (u64, u64),
    /// Positions in [`Trace::blocks`].
    pub blocks: Vec<usize>,
    /// Ranges of bytes that no planned block uses during the span, ascending and disjoint.
    pub space: Vec<(u64, u64)>,
}

/// The planned part of a trace, and the position of each of its blocks in the trace.
pub fn statics(trace: &Trace) -> (Trace, Vec<usize>) {
    let which: Vec<usize> = (0..trace.blocks.len())
        .filter(|&i| !trace.blocks[i].origin.dynamic)
        .collect();
    let blocks = which.iter().map(|&i| trace.blocks[i].clone()).collect();
    (
        Trace {
            blocks,
            phases: trace.phases.clone(),
            modules: trace.modules.clone(),
            waits: vec![],
        },
        which,
    )
}

/// The groups in the order of their first blocks, with their space. `offsets` has a number for each
/// block; the numbers of dynamic blocks are ignored.
pub fn groups(trace: &Trace, offsets: &[u64]) -> Vec<Group> {
    assert_eq!(
        offsets.len(),
        trace.blocks.len(),
        "every block should have an offset"
    );
    let mut groups: Vec<Group> = vec![];
    let mut known: BTreeMap<(u32, u32), usize> = BTreeMap::new();
    for (i, block) in trace
        .blocks
        .iter()
        .enumerate()
        .filter(|(_, block)| block.origin.dynamic)
    {
        let modules = block.origin.modules;
        let found = known
            .get(&modules)
            .copied()
            .filter(|_| modules.0 != 0 && modules.1 != 0);
        let at = found.unwrap_or_else(|| {
            let module = |module: u32| {
                (module != 0)
                    .then(|| trace.modules.get(module as usize))
                    .flatten()
            };
            let start = module(modules.0).map_or(block.start, |span| span.start);
            let end = module(modules.1).map_or(block.end, |span| span.end);
            groups.push(Group {
                modules,
                span: (start, end),
                blocks: vec![],
                space: vec![],
            });
            known.insert(modules, groups.len() - 1);
            groups.len() - 1
        });
        let group = &mut groups[at];
        group.blocks.push(i);
        group.span = (group.span.0.min(block.start), group.span.1.max(block.end));
    }
    let planned = Planned::new(trace, offsets);
    for group in &mut groups {
        group.space = planned.idle(group.span);
    }
    groups
}

/// A time in which a planned block needs its bytes.
#[derive(Clone, Copy)]
struct Piece {
    start: u64,
    end: u64,
    lo: u64,
    hi: u64,
}

/// Pieces by start, with the latest end of each subtree of the implicit balanced tree over them.
struct Planned {
    pieces: Vec<Piece>,
    latest: Vec<u64>,
    /// All addresses (Eq 5).
    bounds: (u64, u64),
}

impl Planned {
    fn new(trace: &Trace, offsets: &[u64]) -> Planned {
        let mut pieces = vec![];
        for (block, &lo) in trace
            .blocks
            .iter()
            .zip(offsets)
            .filter(|(block, _)| !block.origin.dynamic && 0 < block.bytes)
        {
            pieces.extend(times(block).map(|(start, end)| Piece {
                start,
                end,
                lo,
                hi: lo + block.bytes,
            }));
        }
        pieces.sort_unstable_by_key(|piece| (piece.start, piece.lo));
        let bounds = (
            pieces.iter().map(|piece| piece.lo).min(),
            pieces.iter().map(|piece| piece.hi).max(),
        );
        let mut planned = Planned {
            latest: vec![0; pieces.len()],
            pieces,
            bounds: (bounds.0.unwrap_or(0), bounds.1.unwrap_or(0)),
        };
        planned.measure(0, planned.pieces.len());
        planned
    }

    /// Fills in the latest ends of the subtree over `first..last`, whose root is in the middle.
    fn measure(&mut self, first: usize, last: usize) -> u64 {
        if first == last {
            return 0;
        }
        let root = first.midpoint(last);
        let below = self.measure(first, root).max(self.measure(root + 1, last));
        self.latest[root] = below.max(self.pieces[root].end);
        self.latest[root]
    }

    /// Calls `met` for each piece of the subtree that shares a tick with the span.
    fn meeting(&self, span: (u64, u64), first: usize, last: usize, met: &mut impl FnMut(&Piece)) {
        if first == last {
            return;
        }
        let root = first.midpoint(last);
        if self.latest[root] <= span.0 {
            return;
        }
        self.meeting(span, first, root, met);
        let piece = &self.pieces[root];
        if piece.start < span.1 {
            if span.0 < piece.end {
                met(piece);
            }
            self.meeting(span, root + 1, last, met);
        }
    }

    /// All addresses without those in use at some time of the span (Eq 4 and 6).
    fn idle(&self, span: (u64, u64)) -> Vec<(u64, u64)> {
        let mut occupied: Vec<(u64, u64)> = vec![];
        self.meeting(span, 0, self.pieces.len(), &mut |piece| {
            occupied.push((piece.lo, piece.hi))
        });
        occupied.sort_unstable();
        let (mut at, top) = self.bounds;
        let mut idle = vec![];
        for (lo, hi) in occupied.into_iter().chain([(top, top)]) {
            if at < lo {
                idle.push((at, lo));
            }
            at = at.max(hi);
        }
        idle
    }
}

/// When a block needs its bytes: its life without its gaps.
fn times(block: &Block) -> impl Iterator<Item = (u64, u64)> {
    let starts = std::iter::once(block.start).chain(block.gaps.iter().map(|gap| gap.1));
    let ends = block.gaps.iter().map(|gap| gap.0).chain([block.end]);
    starts.zip(ends).filter(|(start, end)| start < end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use placement::trace::{Origin, Span};
    use proptest::prelude::*;

    fn block(start: u64, len: u64, bytes: u64, dynamic: bool, modules: (u32, u32)) -> Block {
        let origin = Origin {
            dynamic,
            modules,
            ..Origin::default()
        };
        Block {
            start,
            end: start + len,
            bytes,
            origin,
            ..Block::default()
        }
    }

    /// Two experts share a layer. A planned block that is alive in their modules keeps its bytes.
    #[test]
    fn a_group_avoids_what_lives_in_its_modules() {
        let blocks = vec![
            block(0, 10, 100, false, (0, 0)),
            block(3, 2, 7, true, (1, 2)),
            block(7, 2, 50, false, (0, 0)),
            block(4, 2, 9, true, (1, 2)),
            block(4, 1, 9, true, (1, 1)),
        ];
        let module = |start, end| Span {
            name: "moe".into(),
            start,
            end,
        };
        let trace = Trace {
            blocks,
            phases: vec![],
            modules: vec![Span::default(), module(2, 5), module(6, 8)],
            waits: vec![],
        };
        let groups = groups(&trace, &[50, 0, 200, 0, 0]);
        assert_eq!(groups.len(), 2);
        assert_eq!(
            (groups[0].modules, groups[0].span, &groups[0].blocks[..]),
            ((1, 2), (2, 8), &[1, 3][..])
        );
        assert_eq!(groups[0].space, [(150, 200)]);
        assert_eq!(
            (groups[1].span, &groups[1].space[..]),
            ((2, 5), &[(150, 250)][..])
        );
    }

    proptest! {
        /// A byte is in a group's space if and only if no planned block uses it at any tick of the
        /// span.
        #[test]
        fn space_is_what_is_idle(
            planned in prop::collection::vec((0u64..30, 1u64..20, 1u64..12, 0u64..60, 0u64..20),
                1..25),
            dynamic in prop::collection::vec((0u64..30, 1u64..12, 0u32..4, 0u32..4), 1..6),
        ) {
            let modules = [(0, 0), (0, 9), (8, 21), (20, 40)]
                .map(|(start, end)| Span { start, end, ..Span::default() });
            let mut blocks: Vec<Block> = dynamic.iter()
                .map(|&(start, len, a, b)| block(start, len, 1, true, (a, b))).collect();
            let mut offsets = vec![0; blocks.len()];
            for &(start, len, bytes, offset, gap) in &planned {
                let mut block = block(start, len, bytes, false, (0, 0));
                if 2 < len && 0 < gap % (len - 2) {
                    block.gaps = vec![(start + 1, start + 1 + gap % (len - 2))];
                }
                blocks.push(block);
                offsets.push(offset);
            }
            let trace = Trace { blocks, phases: vec![], modules: modules.to_vec(), waits: vec![] };
            let groups = groups(&trace, &offsets);
            prop_assert_eq!(groups.iter().map(|group| group.blocks.len()).sum::<usize>(),
                dynamic.len());
            let both = || trace.blocks.iter().zip(&offsets)
                .filter(|(block, _)| !block.origin.dynamic);
            let (lo, hi) = (both().map(|(_, at)| *at).min().unwrap(),
                both().map(|(block, at)| at + block.bytes).max().unwrap());
            for group in groups {
                for &i in &group.blocks {
                    prop_assert!(group.span.0 <= trace.blocks[i].start
                        && trace.blocks[i].end <= group.span.1);
                }
                for byte in 0..100 {
                    let used = both().any(|(block, &at)| {
                        let has = |tick: &u64| !block.gaps.iter()
                            .any(|gap| gap.0 <= *tick && *tick < gap.1);
                        at <= byte && byte < at + block.bytes
                            && (block.start.max(group.span.0)..block.end.min(group.span.1))
                                .any(|tick| has(&tick))
                    });
                    let inside = group.space.iter().any(|range| range.0 <= byte && byte < range.1);
                    prop_assert_eq!(inside, lo <= byte && byte < hi && !used, "byte {} of \
                        {:?}", byte, group);
                }
            }
        }
    }
}
