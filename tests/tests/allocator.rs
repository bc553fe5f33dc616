//! Places: buffers that live at the same time do not overlap, the peak is between the bound and the
//! sum, and for few buffers it is optimal.

use ir::schedule::{BufferData, InstrData, InstrKind, MemorySpace, PoolData, Stream, Why};
use ir::{Buffer, Id, Plan, Pool, Schedule, Table};
use lighterage_tests::generate;
use passes::alloc::{Lifetime, allocate, live_peak};
use proptest::prelude::*;

/// Lines of a step; lifetimes are within them.
const LINES: u32 = 12;

/// A schedule with only buffers: its lines do nothing, and their number covers the lifetimes.
fn schedule(sizes: &[u64]) -> Schedule {
    let mut schedule = Schedule::default();
    let pool = schedule.pools.push(PoolData {
        name: "device".into(),
        space: MemorySpace::Device(0),
        limit: None,
    });
    for (i, &bytes) in sizes.iter().enumerate() {
        schedule.buffers.push(BufferData {
            name: format!("b{i}"),
            pool,
            bytes,
        });
    }
    for _ in 0..LINES {
        let kind = InstrKind::Copy {
            src: Buffer::new(0).into(),
            dst: Buffer::new(0).into(),
            bytes: 0,
        };
        schedule.instrs.push(InstrData {
            kind,
            stream: Stream::new(0),
            after: vec![],
            why: Why::Feed,
        });
    }
    schedule
}

/// Sizes in cache lines, starts and spans.
fn buffers(most: usize) -> impl Strategy<Value = Vec<(u64, Lifetime)>> {
    let lifetime = (0..LINES, 1..=LINES).prop_map(|(start, span)| Lifetime {
        start,
        end: (start + span).min(LINES),
    });
    prop::collection::vec((1u64..9, lifetime), 1..=most)
}

fn plan(buffers: &[(u64, Lifetime)]) -> (Schedule, Table<Buffer, Lifetime>, Plan) {
    let sizes: Vec<u64> = buffers.iter().map(|&(lines, _)| 64 * lines).collect();
    let schedule = schedule(&sizes);
    let lives = buffers.iter().map(|&(_, life)| life).collect();
    let plan = allocate(&schedule, &lives);
    (schedule, lives, plan)
}

fn together(a: Lifetime, b: Lifetime) -> bool {
    a.start < b.end && b.start < a.end
}

/// The optimal peak, in cache lines. One optimal plan is left-justified: every buffer is at 0 or on
/// top of another. First fit in the order of its offsets finds it, so all orders are tried.
fn best(buffers: &[(u64, Lifetime)], placed: &mut Vec<(usize, u64)>, mut limit: u64) -> u64 {
    if placed.len() == buffers.len() {
        return placed
            .iter()
            .map(|&(i, at)| at + buffers[i].0)
            .max()
            .unwrap_or(0)
            .min(limit);
    }
    for i in (0..buffers.len())
        .filter(|&i| placed.iter().all(|&(j, _)| j != i))
        .collect::<Vec<_>>()
    {
        let (lines, life) = buffers[i];
        let mut in_the_way: Vec<(u64, u64)> = placed
            .iter()
            .filter(|&&(j, _)| together(life, buffers[j].1))
            .map(|&(j, at)| (at, at + buffers[j].0))
            .collect();
        in_the_way.sort_unstable();
        let at = in_the_way.iter().fold(
            0,
            |at, &(lo, hi)| if lo < at + lines { at.max(hi) } else { at },
        );
        if at + lines < limit {
            placed.push((i, at));
            limit = best(buffers, placed, limit);
            placed.pop();
        }
    }
    limit
}

proptest! {
    #![proptest_config(generate::config(500))]
    #[test]
    fn buffers_that_live_together_do_not_meet(buffers in buffers(60)) {
        let (schedule, lives, plan) = plan(&buffers);
        let pool = Pool::new(0);
        let sum: u64 = schedule.buffers.values().map(|data| data.bytes).sum();
        prop_assert!(live_peak(&schedule, &lives, pool) <= plan.peak[pool]);
        prop_assert!(plan.peak[pool] <= sum);
        for (a, data) in schedule.buffers.iter() {
            let (lo, hi) = (plan.offset[a], plan.offset[a] + data.bytes);
            prop_assert!(lo.is_multiple_of(ir::schedule::ALIGN) && hi <= plan.peak[pool]);
            for (b, other) in schedule
                .buffers
                .iter()
                .filter(|&(b, _)| a < b && together(lives[a], lives[b]))
            {
                let (from, to) = (plan.offset[b], plan.offset[b] + other.bytes);
                prop_assert!(
                    hi <= from || to <= lo,
                    "{a:?} {lo}..{hi} and {b:?} {from}..{to} \
                    live together"
                );
            }
        }
    }
}

/// For up to seven buffers, the peak is optimal.
#[test]
fn small_sets_are_placed_as_well_as_can_be() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::{Config, TestRng, TestRunner};
    let rng = TestRng::deterministic_rng(Default::default());
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    const SETS: usize = 500;
    for _ in 0..SETS {
        let buffers = buffers(7).new_tree(&mut runner).unwrap().current();
        let (.., plan) = plan(&buffers);
        let found = plan.peak[Pool::new(0)] / 64;
        let sum = buffers.iter().map(|&(lines, _)| lines).sum::<u64>();
        let best = best(&buffers, &mut vec![], sum + 1);
        assert_eq!(found, best, "{buffers:?}");
    }
}
