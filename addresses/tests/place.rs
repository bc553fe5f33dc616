//! Plans of traces: blocks that live at the same time do not overlap, with any constraints; the
//! bound is right; plans of few blocks are optimal; errors in a trace are reported.

use placement::trace::{Block, Trace};
use placement::{Effort, Method, Options, Placement, lower_bound, place};
use proptest::prelude::*;

fn planned(trace: &Trace, options: Options) -> Placement {
    place(trace, &options, &mut |_, _| ()).expect("the trace should be in order")
}

fn block(start: u64, end: u64, bytes: u64) -> Block {
    Block {
        id: format!("{start}..{end}"),
        start,
        end,
        bytes,
        ..Block::default()
    }
}

fn trace(blocks: impl IntoIterator<Item = Block>) -> Trace {
    Trace {
        blocks: blocks.into_iter().collect(),
        ..Trace::default()
    }
}

/// Whether a block needs its bytes at a tick.
fn needs(block: &Block, tick: u64) -> bool {
    block.start <= tick
        && tick < block.end
        && !block.gaps.iter().any(|&(lo, hi)| lo <= tick && tick < hi)
}

/// The error in a placement, found tick by tick.
fn wrong(trace: &Trace, align: u64, placement: &Placement) -> Option<String> {
    let end = |i: usize| placement.offsets[i] + trace.blocks[i].bytes.next_multiple_of(align);
    let last = trace
        .blocks
        .iter()
        .map(|block| block.end)
        .max()
        .unwrap_or(0);
    let mut live = 0;
    for tick in 0..last {
        let here: Vec<usize> = (0..trace.blocks.len())
            .filter(|&i| needs(&trace.blocks[i], tick))
            .collect();
        live = live.max(here.iter().map(|&i| end(i) - placement.offsets[i]).sum());
        for (k, &a) in here.iter().enumerate() {
            for &b in &here[k + 1..] {
                if placement.offsets[a] < end(b) && placement.offsets[b] < end(a) {
                    return Some(format!("blocks {a} and {b} meet at {tick}"));
                }
            }
        }
    }
    for (i, block) in trace.blocks.iter().enumerate() {
        if !placement.offsets[i].is_multiple_of(block.alignment.max(align)) {
            return Some(format!("block {i} is not aligned"));
        }
        if block
            .offset
            .is_some_and(|offset| offset != placement.offsets[i])
        {
            return Some(format!("block {i} is not where it has to be"));
        }
        if placement.peak < end(i) && (block.start..block.end).any(|tick| needs(block, tick)) {
            return Some(format!("block {i} ends above the peak"));
        }
    }
    (placement.lower_bound < live || placement.peak < placement.lower_bound).then(|| {
        format!(
            "{live} alive, bound {}, peak {}",
            placement.lower_bound, placement.peak
        )
    })
}

/// Blocks with alignments and gaps.
fn blocks(most: usize) -> impl Strategy<Value = Trace> {
    let one = (0u64..30, 1u64..20, 0u64..50, 0u32..4, 0u64..6, 0u64..6);
    prop::collection::vec(one, 0..=most).prop_map(|all| {
        trace(
            all.into_iter()
                .map(|(start, span, bytes, align, skip, gap)| {
                    let end = start + span;
                    let gaps = if 0 < gap && skip + gap <= span {
                        vec![(start + skip, start + skip + gap)]
                    } else {
                        vec![]
                    };
                    Block {
                        alignment: 1 << align,
                        gaps,
                        ..block(start, end, bytes)
                    }
                }),
        )
    })
}

/// A rectangle of ticks and bytes, cut into blocks at random. They fit into it without a hole.
fn cut(cuts: &[(usize, bool, u64)], ticks: u64, bytes: u64) -> Trace {
    let mut parts = vec![(0, ticks, bytes)];
    for &(which, in_time, at) in cuts {
        let k = which % parts.len();
        let (start, end, size) = parts[k];
        if in_time && 1 < end - start {
            let middle = start + 1 + at % (end - start - 1);
            parts[k].1 = middle;
            parts.push((middle, end, size));
        } else if !in_time && 1 < size {
            let part = 1 + at % (size - 1);
            parts[k].2 = part;
            parts.push((start, end, size - part));
        }
    }
    trace(
        parts
            .into_iter()
            .map(|(start, end, bytes)| block(start, end, bytes)),
    )
}

/// The optimal peak. First fit in the order of its offsets finds an optimal plan, so all orders are
/// tried.
fn best(blocks: &[Block], placed: &mut Vec<(usize, u64)>, mut limit: u64) -> u64 {
    if placed.len() == blocks.len() {
        return placed
            .iter()
            .map(|&(i, at)| at + blocks[i].bytes)
            .max()
            .unwrap_or(0)
            .min(limit);
    }
    for i in (0..blocks.len())
        .filter(|&i| placed.iter().all(|&(j, _)| j != i))
        .collect::<Vec<_>>()
    {
        let own = &blocks[i];
        let together = |other: &Block| own.start < other.end && other.start < own.end;
        let near = placed.iter().filter(|&&(j, _)| together(&blocks[j]));
        let mut near: Vec<(u64, u64)> = near.map(|&(j, at)| (at, at + blocks[j].bytes)).collect();
        near.sort_unstable();
        let at = near.iter().fold(
            0,
            |at, &(lo, hi)| if lo < at + own.bytes { at.max(hi) } else { at },
        );
        if at + own.bytes < limit {
            placed.push((i, at));
            limit = best(blocks, placed, limit);
            placed.pop();
        }
    }
    limit
}

proptest! {
    // A case may search for a while.
    #![proptest_config(ProptestConfig {
        cases: 24,
        ..ProptestConfig::default()
    })]

    #[test]
    fn blocks_do_not_meet(trace in blocks(40), align in 0u32..5) {
        for effort in [Effort::Fast, Effort::Normal] {
            let align = 1 << align;
            let placement = planned(
                &trace,
                Options {
                    effort,
                    align,
                    ..Options::default()
                },
            );
            prop_assert_eq!(wrong(&trace, align, &placement), None);
            prop_assert!(
                !placement.optimal
                    || effort == Effort::Normal
                    || placement.peak == placement.lower_bound
            );
            prop_assert!(lower_bound(&trace, align) <= placement.lower_bound);
        }
    }

    #[test]
    fn places_that_are_given_are_kept(
        trace in blocks(25),
        keep in prop::collection::vec(any::<bool>(), 25),
    ) {
        let free = planned(
            &trace,
            Options {
                effort: Effort::Fast,
                ..Options::default()
            },
        );
        let mut fixed = trace.clone();
        for ((block, &at), &keep) in fixed.blocks.iter_mut().zip(&free.offsets).zip(&keep) {
            block.offset = keep.then_some(at);
        }
        let placement = planned(&fixed, Options::default());
        prop_assert_eq!(wrong(&fixed, 1, &placement), None);
    }

    #[test]
    fn few_blocks_lie_as_low_as_they_can(
        spans in prop::collection::vec((0u64..8, 1u64..6, 1u64..9), 1..=6),
    ) {
        let trace = trace(
            spans
                .into_iter()
                .map(|(start, span, bytes)| block(start, start + span, bytes)),
        );
        let placement = planned(
            &trace,
            Options {
                effort: Effort::Max,
                ..Options::default()
            },
        );
        prop_assert_eq!(placement.peak, best(&trace.blocks, &mut vec![], u64::MAX));
        prop_assert!(placement.optimal);
    }

    #[test]
    fn what_was_cut_fits_again(
        cuts in prop::collection::vec((any::<usize>(), any::<bool>(), any::<u64>()), 0..25),
    ) {
        let trace = cut(&cuts, 40, 60);
        let placement = planned(
            &trace,
            Options {
                effort: Effort::Max,
                ..Options::default()
            },
        );
        prop_assert_eq!(wrong(&trace, 1, &placement), None);
        prop_assert_eq!((placement.peak, placement.optimal), (60, true));
    }

    #[test]
    fn threads_change_nothing(trace in blocks(30)) {
        let one = planned(&trace, Options::default());
        prop_assert_eq!(
            one,
            planned(
                &trace,
                Options {
                    threads: 3,
                    ..Options::default()
                }
            )
        );
    }
}

fn refused(blocks: impl IntoIterator<Item = Block>) -> String {
    place(&trace(blocks), &Options::default(), &mut |_, _| ())
        .expect_err("it should be refused")
        .to_string()
}

#[test]
fn wrong_traces_are_refused() {
    assert!(refused([block(3, 3, 1)]).contains("no time"));
    assert!(
        refused([Block {
            alignment: 3,
            ..block(0, 1, 1)
        }])
        .contains("powers of two")
    );
    assert!(refused([block(0, 1, u64::MAX), block(0, 1, 1)]).contains("64 bits"));
    assert!(
        refused([
            Block {
                alignment: 1 << 63,
                ..block(0, 1, 1)
            },
            block(0, 1, 1 << 63)
        ])
        .contains("64 bits")
    );
    assert!(
        refused([Block {
            offset: Some(8),
            alignment: 16,
            ..block(0, 1, 1)
        }])
        .contains("alignment, 16")
    );
    assert!(
        refused([Block {
            offset: Some(u64::MAX - 1),
            ..block(0, 1, 4)
        }])
        .contains("64 bits")
    );
    assert!(
        refused([Block {
            gaps: vec![(5, 12)],
            ..block(0, 10, 1)
        }])
        .contains("gap 5..12")
    );
    assert!(
        refused([Block {
            gaps: vec![(5, 7), (6, 8)],
            ..block(0, 10, 1)
        }])
        .contains("gap 6..8")
    );
    let there = |at| Block {
        offset: Some(at),
        ..block(0, 9, 4)
    };
    assert!(refused([there(0), there(3)]).contains("both offsets are fixed"));
}

#[test]
fn a_plan_that_fits_is_enough() {
    // Four blocks that do not fit without a hole in every order. With spare room, the first plan is
    // accepted.
    let trace = trace([
        block(0, 2, 3),
        block(1, 3, 4),
        block(2, 4, 5),
        block(3, 5, 2),
    ]);
    let placement = planned(
        &trace,
        Options {
            capacity: Some(100),
            ..Options::default()
        },
    );
    assert!(placement.peak <= 100 && placement.method.starts_with("first fit"));
}

/// A plan respects a capacity above the bound at every effort. A plan near the bound is not enough.
#[test]
fn a_capacity_is_not_missed_by_a_little() {
    // A backward sweep places the last byte at the bottom, and the block on top of it ends one byte
    // above the bound.
    let trace = trace([
        block(4, 7, 4000),
        block(2, 5, 1),
        block(0, 1, 2000),
        block(2, 3, 4190),
        block(0, 1, 8190),
        block(0, 3, 4001),
    ]);
    let bound = lower_bound(&trace, 1);
    for effort in [Effort::Fast, Effort::Normal, Effort::Max] {
        let placement = planned(
            &trace,
            Options {
                effort,
                capacity: Some(bound),
                ..Options::default()
            },
        );
        assert_eq!(placement.peak, bound, "{effort:?}");
    }
}

/// Large blocks that fit without a hole, between many small ones: repair and search of all blocks
/// together find fewer plans near the bound than after they placed the large ones alone.
#[test]
fn small_blocks_hide_no_plan_of_large_ones() {
    let mut random = 1u64;
    let mut next = |below: u64| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (random >> 33) % below
    };
    let mut near = [0, 0];
    for _ in 0..12 {
        let cuts: Vec<(usize, bool, u64)> = (0..140)
            .map(|_| (next(1 << 20) as usize, next(2) == 0, next(1 << 20)))
            .collect();
        let mut trace = cut(&cuts, 60, 60);
        trace.blocks.retain(|_| 0 < next(25));
        trace
            .blocks
            .iter_mut()
            .for_each(|block| block.bytes *= 1000);
        for _ in 0..160 {
            let start = next(58);
            let small = block(start, start + 1 + next(60 - start - 1), 1 + next(40));
            trace.blocks.push(small);
        }
        let bound = lower_bound(&trace, 1);
        for (near, without) in near.iter_mut().zip([None, Some(Method::Coarse)]) {
            let options = Options {
                effort: Effort::Brief,
                capacity: Some(bound + bound / 500),
                without: std::array::from_fn(|i| without.filter(|_| i == 0)),
                ..Options::default()
            };
            let placement = planned(&trace, options);
            assert_eq!(wrong(&trace, 1, &placement), None);
            *near += u32::from(placement.peak <= bound + bound / 500);
        }
    }
    let [with, without] = near;
    assert!(without < with, "{with} plans, and {without} without");
}

/// Blocks that live the whole time are stacked only if alignment loses nothing. Here the larger one
/// must be below.
#[test]
fn stacks_lose_nothing() {
    let aligned = |bytes| Block {
        alignment: 8,
        ..block(0, 2, bytes)
    };
    let placement = planned(&trace([aligned(3), aligned(5)]), Options::default());
    assert_eq!((placement.peak, placement.optimal), (11, true));
    let placement = planned(
        &trace([aligned(16), aligned(8), block(0, 1, 5)]),
        Options::default(),
    );
    assert_eq!(
        (placement.peak, placement.optimal, placement.lower_bound),
        (29, true, 29)
    );
}

#[test]
fn nothing_needs_nothing() {
    let placement = planned(&trace([]), Options::default());
    assert_eq!(
        (placement.peak, placement.lower_bound, placement.optimal),
        (0, 0, true)
    );
    let placement = planned(&trace([block(0, 5, 0)]), Options::default());
    assert_eq!((placement.peak, placement.offsets), (0, vec![0]));
}
