//! Bytes go from stream to stream only after the earlier work of the other streams.

use crate::arena::Arena;
use lighterage_alloc::{Allocator, Plan};
use proptest::prelude::*;
use std::fmt::Write;

/// Requests of two streams on the same bytes, in a plan: the second stream waits, and so does the
/// first one's next request.
#[test]
fn the_next_stream_waits() {
    let text = "lighterage-plan 1\npool 512 512\nrequests 2 0\ns 100 0 0 1\ns 200 1 0 2\nend\n";
    let arena = Arena::new(1 << 20);
    let mut allocator = Allocator::planned(arena.pool(), Plan::read(text).unwrap()).unwrap();
    for step in 0..3 {
        for (bytes, stream) in [(100, 0), (200, 77)] {
            let address = allocator.malloc(bytes, stream).unwrap();
            arena.work(address, bytes, stream, true);
            assert!(allocator.free(address));
        }
        assert_eq!(allocator.stats().waits, 2 * step + 1);
    }
    assert_eq!(allocator.stats().planned, 6);
}

/// The next owner waits for a stream that was recorded for a block, and only for its work before
/// the free.
#[test]
fn a_recorded_stream_is_waited_for() {
    let text = "lighterage-plan 1\npool 1024 512\nrequests 2 0\ns 1024 0 0 1\ns 100 0 512 2\nend\n";
    let arena = Arena::new(1 << 20);
    let mut allocator = Allocator::planned(arena.pool(), Plan::read(text).unwrap()).unwrap();
    let block = allocator.malloc(1024, 0).unwrap();
    arena.work(block, 1024, 0, true);
    allocator.record_stream(block, 5);
    arena.work(block, 1024, 5, false);
    assert!(allocator.free(block));
    let part = allocator.malloc(100, 0).unwrap();
    assert_eq!(part, block + 512);
    arena.work(part, 100, 0, true);
    assert!(allocator.free(part));
    // The other half is still the recorded stream's.
    let block = allocator.malloc(1024, 0).unwrap();
    arena.work(block, 1024, 0, true);
    assert_eq!((allocator.stats().planned, allocator.stats().waits), (3, 2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// For any requests on any streams, with any other users: no request gets bytes that are still
    /// used.
    #[test]
    fn streams_take_turns(
        planned in prop::collection::vec((1u64..4, 0u32..3, 0u64..6, 1usize..9), 1..30),
        dynamic in prop::collection::vec(0u32..3, 0..4),
        events in prop::collection::vec((0u8..12, 0usize..40, 0u64..4, 1u64..3000), 1..250),
    ) {
        // Random places: blocks that the check refuses get a separate part at the end of the pool.
        let mut text = String::new();
        let mut lines: Vec<String> = vec![];
        let mut asked: Vec<(u64, u32)> = vec![];
        let mut pool = 1 << 13;
        let n = planned.len() + dynamic.len();
        let mut live: Vec<(u64, u64, usize)> = vec![];
        for (i, &(units, stream, at, span)) in planned.iter().enumerate() {
            live.retain(|live| i < live.2);
            let (mut lo, bytes) = (at * 512, units * 512 - 7);
            if live.iter().any(|live| lo < live.1 && live.0 < lo + bytes) {
                lo = pool;
                pool += units * 512;
            }
            let end = (i + span).min(n);
            live.push((lo, lo + bytes, end));
            lines.push(format!("s {bytes} {stream} {lo} {end}"));
            asked.push((bytes, stream));
        }
        // The dynamic ones come last, and may use bytes that no live planned block has.
        let mut holes: Vec<(u64, u64)> = vec![];
        let mut at = 0;
        live.retain(|live| planned.len() < live.2);
        live.sort_unstable();
        for &(lo, hi, _) in live.iter().chain([&(pool, pool, 0)]) {
            if at < lo {
                holes.push((at, lo));
            }
            at = hi;
        }
        let space: Vec<String> = holes.iter().map(|(lo, hi)| format!("{lo}:{hi}")).collect();
        for &stream in &dynamic {
            lines.push(format!("d 0 {stream}"));
            asked.push((0, stream));
        }
        writeln!(text, "lighterage-plan 1\npool {pool} 512\nrequests {n} 0\nspace \
            {}\n{}\nend", space.join(" "), lines.join("\n")).unwrap();
        let plan = Plan::read(&text).unwrap();
        let arena = Arena::new(1 << 28);
        let mut allocator = Allocator::planned(arena.pool(), plan).unwrap();
        let (mut live, mut cursor, mut id) = (vec![], 0, 0u64);
        for (what, which, other, size) in events {
            match what {
                0..=5 => {
                    let (mut bytes, mut stream) = asked[cursor % n];
                    cursor += 1;
                    match what {
                        _ if bytes == 0 => bytes = size,
                        0 => stream = other as u32,
                        1 => bytes = size,
                        _ => {}
                    }
                    let stream = u64::from(stream) * 1000;
                    let address = allocator.malloc(bytes, stream).unwrap();
                    id += 1;
                    arena.own(address, bytes, id);
                    arena.work(address, bytes, stream, true);
                    live.push((address, bytes, stream, id));
                }
                6..=7 if !live.is_empty() => {
                    let (address, bytes, _, _) = live[which % live.len()];
                    allocator.record_stream(address, other * 1000);
                    arena.work(address, bytes, other * 1000, false);
                }
                _ if !live.is_empty() => {
                    let (address, bytes, stream, id) = live.swap_remove(which % live.len());
                    arena.work(address, bytes, stream, false);
                    arena.disown(address, bytes, id);
                    prop_assert!(allocator.free(address));
                    prop_assert!(!allocator.free(address), "twice");
                }
                _ => {}
            }
        }
        let stats = allocator.stats();
        let served = stats.planned + stats.moved + stats.dynamic + stats.fallback;
        prop_assert_eq!(stats.requests, served);
    }
}
