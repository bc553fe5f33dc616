//! The check of plans against planners: it accepts what they produce, and refuses it once two blocks overlap.

use passes::alloc::check::{Fault, check};
use passes::alloc::trace::{Block, Trace};
use passes::alloc::{Effort, Options, lower_bound, place};
use proptest::prelude::*;
use proptest::sample::Index;

/// Blocks with alignments and gaps.
fn any_trace() -> impl Strategy<Value = Trace> {
    let block = (0u64..60, 1u64..20, 1u64..5000, 0u32..12, 0u64..10);
    prop::collection::vec(block, 2..50).prop_map(|items| {
        let blocks = items.into_iter().enumerate().map(|(i, (start, span, bytes, shift, gap))| Block {
            id: i.to_string(),
            start,
            end: start + span,
            bytes,
            alignment: if shift < 4 { 1 << shift } else { 0 },
            gaps: if 0 < gap && gap < span { vec![(start + gap, start + span)] } else { vec![] },
            ..Block::default()
        });
        Trace { blocks: blocks.collect(), ..Trace::default() }
    })
}

/// True if both blocks are needed at some tick: tick by tick, and so in another way than the check's.
fn both_needed(a: &Block, b: &Block) -> bool {
    let needed = |block: &Block, tick: u64| {
        block.start <= tick && tick < block.end && !block.gaps.iter().any(|gap| gap.0 <= tick && tick < gap.1)
    };
    (a.start..a.end).any(|tick| needed(a, tick) && needed(b, tick))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Ten mutants of each of a thousand plans: one block is moved so that it shares bytes with another.
    #[test]
    fn overlaps_are_refused(
        trace in any_trace(),
        align in prop::sample::select(vec![1u64, 64, 512]),
        moves in prop::collection::vec((any::<Index>(), any::<Index>(), any::<Index>()), 10),
    ) {
        let options = Options { effort: Effort::Fast, capacity: None, align, threads: 1 };
        let placement = place(&trace, &options, &mut |_, _| ()).unwrap();
        let peak = check(&trace, &placement.offsets, align, Some(placement.peak));
        prop_assert!(peak.is_ok(), "{peak:?}");
        prop_assert!(lower_bound(&trace, 1) <= peak.unwrap());
        for (who, other, by) in moves {
            let n = trace.blocks.len();
            let (i, other) = (who.index(n), other.index(n));
            let meet = |&j: &usize| j != i && both_needed(&trace.blocks[i], &trace.blocks[j]);
            let Some(j) = (0..n).map(|k| (other + k) % n).find(meet) else { continue };
            // Any address at which the two share a byte.
            let lowest = placement.offsets[j].saturating_sub(trace.blocks[i].bytes - 1);
            let highest = placement.offsets[j] + trace.blocks[j].bytes - 1;
            let mut offsets = placement.offsets.clone();
            offsets[i] = lowest + by.index((highest - lowest + 1) as usize) as u64;
            let faults = check(&trace, &offsets, 1, None).expect_err("two blocks share bytes");
            prop_assert!(faults.iter().any(|fault| matches!(fault, Fault::Overlap { .. })), "{faults:?}");
        }
    }
}
