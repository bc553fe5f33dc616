//! Bytes that go from one stream to another, and blocks in the bytes of others: every plan respects
//! the waits of the trace, and the check finds plans that do not.

use lighterage_addresses::serve;
use papers::stalloc;
use placement::check::{Fault, check};
use placement::trace::{Block, Origin, Trace, Wait};
use placement::{Effort, Options, Placement, lower_bound, place};
use proptest::prelude::*;

fn block(start: u64, end: u64, bytes: u64, stream: u32) -> Block {
    let origin = Origin {
        stream,
        ..Origin::default()
    };
    Block {
        id: format!("{start}..{end}@{stream}"),
        start,
        end,
        bytes,
        origin,
        ..Block::default()
    }
}

fn wait(tick: u64, stream: u32, on: u32) -> Wait {
    Wait { tick, stream, on }
}

fn planned(trace: &Trace, effort: Effort) -> Placement {
    place(
        trace,
        &Options {
            effort,
            ..Options::default()
        },
        &mut |_, _| (),
    )
    .expect("the trace should be in order")
}

/// Blocks of up to four streams, some with a gap, and waits.
fn streams(most: usize) -> impl Strategy<Value = Trace> {
    let one = (0u64..40, 1u64..12, 0u64..50, 0u32..4, 0u64..8);
    let waits = prop::collection::vec((0u64..50, 0u32..5, 0u32..5), 0..25);
    (prop::collection::vec(one, 0..=most), waits).prop_map(|(blocks, waits)| {
        let blocks = blocks
            .into_iter()
            .map(|(start, span, bytes, stream, gap)| Block {
                gaps: if 0 < gap && gap + 1 < span {
                    vec![(start + gap, start + gap + 1)]
                } else {
                    vec![]
                },
                ..block(start, start + span, bytes, stream)
            });
        let mut waits: Vec<Wait> = waits
            .into_iter()
            .map(|(tick, stream, on)| wait(tick, stream, on))
            .collect();
        waits.sort_by_key(|wait| wait.tick);
        Trace {
            blocks: blocks.collect(),
            waits,
            ..Trace::default()
        }
    })
}

/// The times in which a block needs its bytes.
fn needed(block: &Block) -> Vec<(u64, u64)> {
    let mut from = block.start;
    let mut needed = vec![];
    for &(lo, hi) in block.gaps.iter().chain([&(block.end, block.end)]) {
        needed.push((from, lo));
        from = hi;
    }
    needed.retain(|(from, to)| from < to);
    needed
}

/// Whether the work of `stream` after tick `after` comes after all work of stream `on` before tick
/// `before`. Waits are followed through other streams.
fn knows(trace: &Trace, stream: u32, after: u64, on: u32, before: u64) -> bool {
    let mut know = vec![on];
    for wait in trace
        .waits
        .iter()
        .filter(|wait| before < wait.tick && wait.tick < after)
    {
        if know.contains(&wait.on) {
            know.push(wait.stream);
        }
    }
    know.contains(&stream)
}

/// Two blocks that share a byte, and whose order no stream or wait keeps.
fn wrong(trace: &Trace, offsets: &[u64]) -> Option<(usize, usize)> {
    let blocks = &trace.blocks;
    let share = |i: usize, j: usize| {
        0 < blocks[i].bytes.min(blocks[j].bytes)
            && offsets[i] < offsets[j] + blocks[j].bytes
            && offsets[j] < offsets[i] + blocks[i].bytes
    };
    let ordered = |i: usize, j: usize, first: (u64, u64), second: (u64, u64)| {
        let (one, other) = (blocks[i].origin.stream, blocks[j].origin.stream);
        first.1 <= second.0 && (one == other || knows(trace, other, second.0, one, first.1))
    };
    let apart = |i: usize, j: usize| {
        needed(&blocks[i]).into_iter().all(|first| {
            needed(&blocks[j])
                .into_iter()
                .all(|second| ordered(i, j, first, second) || ordered(j, i, second, first))
        })
    };
    (0..blocks.len())
        .flat_map(|i| (0..i).map(move |j| (j, i)))
        .find(|&(j, i)| share(i, j) && !apart(i, j))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// Any two blocks that share bytes are ordered by their stream or by waits, for every planner.
    #[test]
    fn bytes_change_streams_behind_waits(trace in streams(30)) {
        for placement in [
            planned(&trace, Effort::Fast),
            planned(&trace, Effort::Normal),
            stalloc::place(&trace, 1).unwrap(),
        ] {
            prop_assert_eq!(wrong(&trace, &placement.offsets), None, "{:?}", placement);
            prop_assert_eq!(
                check(&trace, &placement.offsets, 1, Some(placement.peak)).err(),
                None
            );
            prop_assert!(
                lower_bound(&trace, 1) <= placement.lower_bound
                    && placement.lower_bound <= placement.peak
            );
            prop_assert!(!placement.optimal || placement.peak == placement.lower_bound);
        }
    }

    /// The check agrees with comparing all pairs.
    #[test]
    fn the_check_knows_who_waits(
        trace in streams(9),
        offsets in prop::collection::vec(0u64..120, 9),
    ) {
        let offsets = &offsets[..trace.blocks.len()];
        let found = check(&trace, offsets, 1, None);
        prop_assert_eq!(
            found.is_err(),
            wrong(&trace, offsets).is_some(),
            "{:?}",
            found
        );
    }

    /// With waits everywhere, streams do not matter.
    #[test]
    fn streams_that_always_wait_are_one(trace in streams(20)) {
        // Between any two ticks, all streams wait.
        let mut trace = trace;
        for block in &mut trace.blocks {
            (block.start, block.end) = (4 * block.start, 4 * block.end - 2);
            block.gaps.clear();
        }
        let all = || (0..4).flat_map(|stream| (0..4).map(move |on| (stream, on)));
        trace.waits = (0..60)
            .flat_map(|t| all().map(move |(stream, on)| wait(4 * t + 3, stream, on)))
            .collect();
        let apart = planned(&trace, Effort::Normal);
        prop_assert!(
            apart.peak <= planned(&trace.one_stream(), Effort::Normal).peak,
            "{:?}",
            apart
        );
    }

    /// Blocks in the bytes of others have their address. The bound does not rise if they have the
    /// same size, or end as early.
    #[test]
    fn blocks_lie_in_the_bytes_of_others(
        trace in streams(20),
        shared in prop::collection::vec((0usize..40, 0u64..12, 1u64..20, any::<bool>()), 1..12),
    ) {
        let mut trace = trace.one_stream();
        trace.blocks.push(block(0, 9, 10, 0));
        for (i, (which, after, span, as_large)) in shared.into_iter().enumerate() {
            let n = trace.blocks.len();
            let there = &trace.blocks[which % n];
            let first =
                std::iter::successors(Some(there), |block| block.within.map(|i| &trace.blocks[i]))
                    .last()
                    .unwrap();
            // A smaller one keeps all the bytes of the first, so it must not need them when no
            // other block does.
            let as_large = as_large && there.bytes == first.bytes || !first.gaps.is_empty();
            let start = (there.start + after).min(there.end - 1);
            let end = if as_large {
                start + span
            } else {
                (start + span).min(there.end)
            };
            let bytes = if as_large {
                first.bytes
            } else {
                there.bytes / 2
            };
            let id = format!("in {i}");
            trace.blocks.push(Block {
                id,
                within: Some(which % n),
                ..block(start, end, bytes, 0)
            });
        }
        let mut apart = trace.clone();
        apart
            .blocks
            .iter_mut()
            .for_each(|block| block.within = None);
        prop_assert!(lower_bound(&trace, 1) <= lower_bound(&apart, 1));
        for placement in [
            planned(&trace, Effort::Fast),
            planned(&trace, Effort::Normal),
            stalloc::place(&trace, 1).unwrap(),
        ] {
            let Placement { offsets, peak, .. } = placement;
            prop_assert_eq!(check(&trace, &offsets, 1, Some(peak)).err(), None);
            for (block, at) in trace.blocks.iter().zip(&offsets) {
                prop_assert!(block.within.is_none_or(|other| offsets[other] == *at));
            }
            // A block that moves away is reported, even if it overlaps others.
            let moved = trace
                .blocks
                .iter()
                .position(|block| block.within.is_some())
                .unwrap();
            let mut mutant = offsets;
            mutant[moved] += peak;
            let faults = check(&trace, &mutant, 1, None).unwrap_err();
            prop_assert!(
                faults
                    .iter()
                    .any(|fault| matches!(fault, Fault::Apart { .. })),
                "{:?}",
                faults
            );
        }
    }
}

/// Without waits, each stream has a region, and the bound is the sum of the regions' bounds.
#[test]
fn streams_that_do_not_wait_have_regions() {
    let blocks = vec![
        block(0, 4, 8, 0),
        block(6, 9, 8, 1),
        block(10, 12, 4, 0),
        block(13, 15, 8, 1),
    ];
    let trace = Trace {
        blocks,
        ..Trace::default()
    };
    let placement = planned(&trace, Effort::Normal);
    assert_eq!(
        (placement.peak, placement.lower_bound, placement.optimal),
        (16, 16, true)
    );
    assert!(
        placement.method.ends_with("2 streams apart"),
        "{}",
        placement.method
    );
    let found = check(&trace, &[0, 0, 0, 0], 1, None).unwrap_err();
    assert_eq!(
        found[0],
        Fault::Unordered {
            before: 0,
            after: 1,
            tick: 6
        }
    );
    assert_eq!(check(&trace.one_stream(), &[0, 0, 0, 0], 1, None), Ok(8));
}

/// Stream 1 waits for 0, which waits for 1, so one place is enough for all. A wait that is too
/// early, or in the wrong direction, does not help.
#[test]
fn streams_that_wait_share() {
    let blocks = vec![block(0, 4, 8, 0), block(6, 9, 8, 1), block(11, 12, 8, 0)];
    let waits = |waits: &[(u64, u32, u32)]| Trace {
        blocks: blocks.clone(),
        waits: waits
            .iter()
            .map(|&(tick, stream, on)| wait(tick, stream, on))
            .collect(),
        ..Trace::default()
    };
    let both = waits(&[(5, 1, 0), (10, 0, 1)]);
    let placement = planned(&both, Effort::Normal);
    assert_eq!(
        (placement.peak, placement.optimal),
        (8, true),
        "{placement:?}"
    );
    assert_eq!(check(&both, &[0, 0, 0], 1, None), Ok(8));
    for early in [
        waits(&[(4, 1, 0), (10, 0, 1)]),
        waits(&[(5, 0, 1), (10, 0, 1)]),
        waits(&[(6, 1, 0), (10, 0, 1)]),
    ] {
        assert_eq!(planned(&early, Effort::Normal).peak, 16);
        let found = check(&early, &[0, 0, 0], 1, None);
        assert_eq!(
            found,
            Err(vec![Fault::Unordered {
                before: 0,
                after: 1,
                tick: 6
            }]),
            "{early:?}"
        );
    }
    // Through a stream that makes no request.
    assert_eq!(
        planned(&waits(&[(5, 7, 0), (5, 1, 7), (10, 0, 1)]), Effort::Normal).peak,
        8
    );
}

/// A plan that is served: the step's streams have regions, unless they wait in every step.
#[test]
fn a_step_is_served_from_regions_of_its_streams() {
    let mut trace = Trace {
        blocks: vec![block(0, 200, 512, 0)],
        ..Trace::default()
    };
    let mut waits = vec![];
    for at in [10, 30, 50, 70, 90] {
        trace.blocks.extend([
            block(at, at + 4, 4096, 0),
            block(at + 6, at + 12, 4096, 1),
            block(at + 7, at + 11, 1024, 1),
        ]);
        waits.extend([wait(at + 5, 1, 0), wait(at + 14, 0, 1)]);
    }
    let pool = |trace: &Trace| -> u64 {
        let plan =
            |step: &Trace| -> Result<Vec<u64>, ()> { Ok(planned(step, Effort::Normal).offsets) };
        let text = serve::plan(trace, 1, plan).unwrap();
        assert!(text.contains("\nrequests 4 1\n"), "{text}");
        text.lines()
            .nth(1)
            .unwrap()
            .split(' ')
            .nth(1)
            .unwrap()
            .parse()
            .unwrap()
    };
    assert_eq!(pool(&trace), 512 + 4096 + 4096 + 1024);
    trace.waits = waits;
    assert_eq!(pool(&trace), 512 + 4096 + 1024);
}

/// An operation in place: its result has the place of its input, and needs no other place.
#[test]
fn what_is_made_in_place_is_there_once() {
    let mut blocks = vec![
        block(0, 5, 100, 0),
        block(4, 9, 100, 0),
        block(8, 12, 60, 0),
        block(0, 12, 7, 0),
    ];
    let apart = planned(
        &Trace {
            blocks: blocks.clone(),
            ..Trace::default()
        },
        Effort::Normal,
    );
    (blocks[1].within, blocks[2].within) = (Some(0), Some(1));
    let trace = Trace {
        blocks,
        ..Trace::default()
    };
    let placement = planned(&trace, Effort::Normal);
    assert_eq!(
        (apart.peak, placement.peak, placement.optimal),
        (207, 107, true)
    );
    assert_eq!(check(&trace, &placement.offsets, 1, None), Ok(107));
    // A third block must not use the bytes that two blocks share.
    let found = check(&trace, &[0, 0, 0, 93], 1, None).unwrap_err();
    assert!(matches!(found[0], Fault::Overlap { .. }), "{found:?}");
}
