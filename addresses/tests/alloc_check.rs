//! Tests the check of plans: it accepts the plans of all planners, and refuses them when two blocks
//! overlap.

use papers::stalloc;
use placement::check::{Fault, check};
use placement::trace::{Block, Trace};
use placement::{Effort, Options, Placement, lower_bound, place};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::{BoxedStrategy, ValueTree};
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

/// The number of mutants that overlap, of all kinds together.
const MUTANTS: usize = 10_000;
/// The number of mutants of each plan.
const OF_A_PLAN: usize = 24;

/// Blocks with alignments and gaps, anywhere in time.
fn scattered() -> impl Strategy<Value = Vec<Block>> {
    let block = (0u64..60, 1u64..20, 1u64..5000, 0u32..12, 0u64..10);
    vec(block, 2..50).prop_map(|items| {
        let block = |(start, span, bytes, shift, gap)| Block {
            start,
            end: start + span,
            bytes,
            alignment: if shift < 4 { 1u64 << shift } else { 0 },
            gaps: if 0 < gap && gap < span {
                vec![(start + gap, start + span)]
            } else {
                vec![]
            },
            ..Block::default()
        };
        items.into_iter().map(block).collect()
    })
}

/// A step: the backward frees in reverse order what the forward keeps, each layer has a temporary
/// block, and weights stay.
fn step() -> impl Strategy<Value = Vec<Block>> {
    (vec((1u64..3000, 1u64..9000), 2..20), vec(1u64..4000, 0..4)).prop_map(|(layers, weights)| {
        let n = layers.len() as u64;
        let block = |start, end, bytes| Block {
            start,
            end,
            bytes,
            ..Block::default()
        };
        let mut blocks: Vec<Block> = weights
            .into_iter()
            .map(|bytes| block(0, 4 * n, bytes))
            .collect();
        for (i, (kept, scratch)) in (0..).zip(layers) {
            let back = 4 * n - 2 * i;
            blocks.extend([
                block(2 * i, back, kept),
                block(2 * i, 2 * i + 1, scratch),
                block(back - 1, back, scratch),
            ]);
        }
        blocks
    })
}

/// A few sizes and lives that fill a rectangle, so every block has two neighbours.
fn dense() -> impl Strategy<Value = Vec<Block>> {
    vec((0u64..12, 1u64..4, 1u64..4), 8..60).prop_map(|items| {
        let block = |(start, span, size)| Block {
            start,
            end: start + span,
            bytes: 64 * size,
            ..Block::default()
        };
        items.into_iter().map(block).collect()
    })
}

fn traces() -> [BoxedStrategy<Trace>; 3] {
    [scattered().boxed(), step().boxed(), dense().boxed()].map(|blocks| {
        let named = |blocks: Vec<Block>| {
            (0..).zip(blocks).map(|(i, block): (u32, _)| Block {
                id: i.to_string(),
                ..block
            })
        };
        blocks
            .prop_map(move |blocks| Trace {
                blocks: named(blocks).collect(),
                ..Trace::default()
            })
            .boxed()
    })
}

/// The plans of a trace, by every planner that supports it.
fn plans(trace: &Trace, align: u64) -> Vec<Placement> {
    let ours = [Effort::Fast, Effort::Normal].map(|effort| {
        place(
            trace,
            &Options {
                effort,
                align,
                ..Options::default()
            },
            &mut |_, _| (),
        )
        .expect("the trace is in order")
    });
    ours.into_iter()
        .chain(stalloc::place(trace, align))
        .collect()
}

/// True if both blocks are needed at some tick. It compares all ticks, which is another method than
/// that of the check.
fn both_needed(a: &Block, b: &Block) -> bool {
    let needed = |block: &Block, tick: u64| {
        block.start <= tick
            && tick < block.end
            && !block.gaps.iter().any(|gap| gap.0 <= tick && tick < gap.1)
    };
    (a.start..a.end).any(|tick| needed(a, tick) && needed(b, tick))
}

fn overlap(trace: &Trace, offsets: &[u64], a: usize, b: usize) -> bool {
    let end = |i: usize| offsets[i] + trace.blocks[i].bytes;
    offsets[a] < end(b) && offsets[b] < end(a) && both_needed(&trace.blocks[a], &trace.blocks[b])
}

/// A change of a plan, or of its trace. Gets two blocks and a number.
type Mutation = fn(&mut [Block], &mut [u64], usize, usize, u64);

const MUTATIONS: [(&str, Mutation); 10] = [
    ("shift up", |_, offsets, a, _, by| {
        offsets[a] += 1 + by % 512
    }),
    ("shift down", |_, offsets, a, _, by| {
        offsets[a] = offsets[a].saturating_sub(1 + by % 512)
    }),
    ("anywhere", |_, offsets, a, b, by| {
        offsets[a] = by % (2 * offsets[b] + 1)
    }),
    ("swap", |_, offsets, a, b, _| offsets.swap(a, b)),
    ("same place", |_, offsets, a, b, _| offsets[a] = offsets[b]),
    ("below another's start", |blocks, offsets, a, b, _| {
        offsets[a] = (offsets[b] + 1).saturating_sub(blocks[a].bytes);
    }),
    ("below another's end", |blocks, offsets, a, b, _| {
        offsets[a] = offsets[b] + blocks[b].bytes - 1
    }),
    ("larger", |blocks, _, a, _, by| {
        blocks[a].bytes += 1 + by % 4096
    }),
    ("longer", |blocks, _, a, _, by| {
        blocks[a].start = blocks[a].start.saturating_sub(by % 7);
        blocks[a].end += 1 + by % 11;
    }),
    ("no gaps, no end", |blocks, _, a, _, _| {
        blocks[a].gaps.clear();
        blocks[a].end += 30;
    }),
];

/// Ten thousand plans that overlap are refused, with the same number of each mutation. Blocks that
/// do not overlap are not reported. Correct mutants and all plans are accepted.
#[test]
fn mutants_are_refused() {
    let mut runner = TestRunner::new_with_rng(
        ProptestConfig::default(),
        TestRng::deterministic_rng(RngAlgorithm::ChaCha),
    );
    let draws = (any::<u64>(), any::<u64>(), any::<u64>());
    let mut refused = [0; MUTATIONS.len()];
    let mut accepted = 0;
    let mut sources = traces().into_iter().zip([1, 64, 512]).cycle();
    while refused.iter().any(|&n| n < MUTANTS / MUTATIONS.len()) {
        let (source, align) = sources.next().expect("a cycle should not end");
        let trace = source
            .new_tree(&mut runner)
            .expect("there should be a trace")
            .current();
        for Placement { offsets, peak, .. } in plans(&trace, align) {
            let found = check(&trace, &offsets, align, Some(peak));
            assert!(
                found
                    .as_ref()
                    .is_ok_and(|found| lower_bound(&trace, 1) <= *found),
                "{found:?} of {trace:?}"
            );
            let short = check(&trace, &offsets[1..], align, None);
            assert_eq!(
                short,
                Err(vec![Fault::Count {
                    blocks: offsets.len(),
                    offsets: offsets.len() - 1
                }])
            );
            for _ in 0..OF_A_PLAN {
                let (a, b, by) = draws
                    .new_tree(&mut runner)
                    .expect("there should be numbers")
                    .current();
                let n = offsets.len() as u64;
                let (a, b) = ((a % n) as usize, (b % n) as usize);
                for ((name, mutate), refused) in MUTATIONS.iter().zip(&mut refused) {
                    let (mut trace, mut offsets) = (trace.clone(), offsets.clone());
                    mutate(&mut trace.blocks, &mut offsets, a, b, by);
                    let what = || format!("{name} {a} {b} {by}: {trace:?} at {offsets:?}");
                    let meets = |i: usize| {
                        (0..offsets.len()).any(|j| i != j && overlap(&trace, &offsets, i, j))
                    };
                    match check(&trace, &offsets, 1, None) {
                        // No other block has changed.
                        Ok(_) => {
                            assert!(!meets(a) && !meets(b), "accepted, {}", what());
                            accepted += 1;
                        }
                        Err(faults) => {
                            let mut overlaps = 0;
                            for fault in &faults {
                                match *fault {
                                    Fault::Overlap { below, above, .. } => {
                                        assert!(
                                            overlap(&trace, &offsets, below, above),
                                            "{fault:?}, {}",
                                            what()
                                        );
                                        overlaps += 1;
                                    }
                                    Fault::Misaligned { .. } => {}
                                    _ => panic!("{fault:?}, {}", what()),
                                }
                            }
                            assert_eq!(
                                0 < overlaps,
                                meets(a) || meets(b),
                                "{faults:?}, {}",
                                what()
                            );
                            if 0 < overlaps && *refused < MUTANTS / MUTATIONS.len() {
                                *refused += 1;
                            }
                        }
                    }
                }
            }
        }
    }
    assert_eq!(refused.iter().sum::<usize>(), MUTANTS);
    assert!(100 < accepted, "{accepted} mutants were right");
}
