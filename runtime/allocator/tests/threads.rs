//! Eight threads, eight million requests, and many differences from the plan.

use crate::arena::Arena;
use lighterage_alloc::{Allocator, Plan, Stats};
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

const THREADS: usize = 8;
/// A multiple of the number of sizes, so that neighbours also differ across the end.
const REQUESTS: usize = 89 * 113;
const STEPS: usize = 200;

/// A block of a step: it lives from its own request until before request `end`.
struct Planned {
    bytes: u64,
    end: usize,
}

/// xorshift64*: the same numbers in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
    }
}

/// A step whose neighbours have different sizes, and its plan by first fit.
fn plan(random: &mut Random) -> (Vec<Planned>, Plan) {
    let blocks: Vec<Planned> = (0..REQUESTS)
        .map(|i| {
            let span = 1 + if i % 7 == 0 {
                random.below(900)
            } else {
                random.below(20)
            } as usize;
            // The last requests mark the step's end: a repeating sequence does not identify its
            // place.
            let last = if REQUESTS - 89 <= i { 8 } else { 0 };
            Planned {
                bytes: 300 + (i * 37 % 89) as u64 * 16 + last,
                end: (i + span).min(REQUESTS),
            }
        })
        .collect();
    let mut text = String::new();
    let mut live: Vec<(u64, u64, usize)> = vec![];
    let mut pool = 0;
    for (i, block) in blocks.iter().enumerate() {
        live.retain(|(_, _, end)| i < *end);
        let mut offset = 0;
        for &(lo, hi, _) in &live {
            if offset + block.bytes <= lo {
                break;
            }
            offset = hi.next_multiple_of(512);
        }
        let at = live.partition_point(|(lo, _, _)| *lo < offset);
        live.insert(at, (offset, offset + block.bytes, block.end));
        pool = pool.max(offset + block.bytes);
        writeln!(text, "s {} 0 {offset} {}", block.bytes, block.end).unwrap();
    }
    let text = format!("lighterage-plan 1\npool {pool} 512\nrequests {REQUESTS} 0\n{text}end\n");
    (blocks, Plan::read(&text).unwrap())
}

/// Every request is served in one of three ways, and freed memory comes back.
fn adds_up(stats: &Stats) {
    assert_eq!(
        stats.requests,
        stats.planned + stats.moved + stats.dynamic + stats.fallback,
        "{stats}"
    );
    assert_eq!(
        (stats.frees, stats.unknown_frees, stats.cache_live_bytes),
        (stats.requests, 0, 0),
        "{stats}"
    );
}

/// One thread at a time, in any order: each difference from the plan is counted in its own class.
#[test]
fn differences_are_counted_exactly() {
    enum Event {
        Alloc(usize, u64),
        Free(usize),
    }
    let mut random = Random(7);
    let (blocks, plan) = plan(&mut random);
    let arena = Arena::new(1 << 30);
    let allocator = Mutex::new(Allocator::planned(arena.pool(), plan).unwrap());
    let (mut extra, mut missing, mut resized, mut requests) = (0, 0, 0, 0);
    // All steps' events, including the differences; each difference is a few requests from the
    // next.
    let mut script = vec![];
    for step in 0..STEPS {
        let mut ends: Vec<Vec<usize>> = vec![vec![]; REQUESTS + 1];
        let mut quiet = 5;
        for (i, block) in blocks.iter().enumerate() {
            script.extend(ends[i].drain(..).map(Event::Free));
            let id = 1 + (step * REQUESTS + i) * 2;
            let mut ask = |id: usize, bytes, end: usize| {
                script.push(Event::Alloc(id, bytes));
                ends[end].push(id);
                requests += 1;
            };
            quiet -= 1;
            let what = if quiet <= 0 && i + 5 < REQUESTS {
                random.below(30)
            } else {
                u64::MAX
            };
            match what {
                0 => {
                    ask(id, 5001 + random.below(100) * 2, block.end);
                    resized += 1;
                }
                1 => missing += 1,
                2 => {
                    // Any block may live longer than planned, unless its place is planned.
                    ask(id + 1, 7001 + random.below(100) * 2, REQUESTS);
                    ask(id, block.bytes, block.end);
                    extra += 1;
                }
                _ => ask(id, block.bytes, block.end),
            }
            if what < 3 {
                quiet = 5;
            }
        }
        script.extend(ends[REQUESTS].drain(..).map(Event::Free));
    }
    let turns = Mutex::new((script.into_iter(), std::collections::HashMap::new()));
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let mut turn = turns.lock().unwrap();
                    let (events, live) = &mut *turn;
                    // A few at a time: a thread makes several requests.
                    for event in events.by_ref().take(64) {
                        match event {
                            Event::Alloc(id, bytes) => {
                                let address = allocator.lock().unwrap().malloc(bytes, 0).unwrap();
                                arena.own(address, bytes, id as u64);
                                live.insert(id, (address, bytes));
                            }
                            Event::Free(id) => {
                                let (address, bytes) = live.remove(&id).unwrap();
                                arena.disown(address, bytes, id as u64);
                                assert!(allocator.lock().unwrap().free(address));
                            }
                        }
                    }
                    if events.len() == 0 {
                        return;
                    }
                }
            });
        }
    });
    let stats = allocator.lock().unwrap().stats();
    adds_up(&stats);
    assert!(
        900_000 < requests && 1000 < extra.min(missing).min(resized),
        "{requests} {extra} {missing} {resized}"
    );
    let counted = (
        stats.requests,
        stats.mismatches.extra,
        stats.mismatches.missing,
        stats.mismatches.resized,
    );
    assert_eq!(counted, (requests, extra, missing, resized), "{stats}");
    assert_eq!(
        (stats.fallback, stats.occupied),
        (extra + resized, 0),
        "{stats}"
    );
    assert_eq!(
        (stats.mismatches.reordered, stats.mismatches.other_stream),
        (0, 0),
        "{stats}"
    );
    assert_eq!(stats.steps, STEPS as u64);
}

/// All threads at once, in any order: nothing overlaps, nothing leaks, and the plan is found again.
#[test]
fn threads_at_once_never_overlap() {
    let (blocks, plan) = plan(&mut Random(11));
    let arena = Arena::new(1 << 31);
    let allocator = Mutex::new(Allocator::planned(arena.pool(), plan).unwrap());
    let pool = arena.given();
    let cursor = AtomicUsize::new(0);
    // Blocks that another thread than the requesting one frees.
    let handed = Mutex::new(vec![]);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (allocator, arena, cursor, handed, blocks) =
                (&allocator, &arena, &cursor, &handed, &blocks);
            scope.spawn(move || {
                let mut random = Random(thread as u64 + 1);
                let mut live: std::collections::VecDeque<(usize, u64, u64, u64)> =
                    Default::default();
                let free = |(_, address, bytes, id): (usize, u64, u64, u64)| {
                    arena.disown(address, bytes, id);
                    assert!(allocator.lock().unwrap().free(address));
                };
                for n in 0u64.. {
                    let at = cursor.fetch_add(1, Ordering::Relaxed);
                    if REQUESTS * STEPS <= at {
                        break;
                    }
                    let block = &blocks[at % REQUESTS];
                    let bytes = match random.below(60) {
                        0 => continue,
                        1 => 1 + random.below(1 << 14),
                        _ => block.bytes,
                    };
                    let id = 1 + n * THREADS as u64 + thread as u64;
                    let address = allocator.lock().unwrap().malloc(bytes, 0).unwrap();
                    arena.own(address, bytes, id);
                    let end = at + block.end - at % REQUESTS
                        + if random.below(400) == 0 { 5000 } else { 0 };
                    if random.below(20) == 0 {
                        handed.lock().unwrap().push((end, address, bytes, id));
                    } else {
                        live.push_back((end, address, bytes, id));
                    }
                    // This thread's blocks whose life is over, and some blocks of other threads.
                    for _ in 0..live.len() {
                        let block = live.pop_front().unwrap();
                        if block.0 <= at {
                            free(block)
                        } else {
                            live.push_back(block)
                        }
                    }
                    if random.below(16) == 0 {
                        let over: Vec<_> = handed
                            .lock()
                            .unwrap()
                            .extract_if(.., |block| block.0 <= at)
                            .collect();
                        over.into_iter().for_each(free);
                    }
                }
                live.into_iter().for_each(free);
            });
        }
    });
    let mut allocator = allocator.into_inner().unwrap();
    for (_, address, bytes, id) in handed.into_inner().unwrap() {
        arena.disown(address, bytes, id);
        assert!(allocator.free(address));
    }
    let stats = allocator.stats();
    adds_up(&stats);
    // The number of free places depends on the machine: a thread that is not running frees nothing.
    assert!(
        0 < stats.planned
            && 0 < stats.mismatches.extra
            && 0 < stats.mismatches.missing
            && 0 < stats.occupied,
        "{stats}"
    );
    allocator.trim();
    assert_eq!(allocator.stats().cache_bytes, 0);
    assert_eq!(arena.given(), pool, "only the plan's pool should be left");

    // In order again: the first step finds the place in the plan, the second runs as planned.
    let mut before = allocator.stats();
    for step in 0..2 {
        let mut ends: Vec<Vec<u64>> = vec![vec![]; REQUESTS + 1];
        before = allocator.stats();
        for (i, block) in blocks.iter().enumerate() {
            ends[i]
                .drain(..)
                .for_each(|address| assert!(allocator.free(address), "step {step}"));
            ends[block.end].push(allocator.malloc(block.bytes, 0).unwrap());
        }
        ends[REQUESTS]
            .drain(..)
            .for_each(|address| assert!(allocator.free(address)));
    }
    let after = allocator.stats();
    assert_eq!(
        (
            after.planned - before.planned,
            after.fallback - before.fallback
        ),
        (REQUESTS as u64, 0),
        "{after}"
    );
    assert_eq!(
        after.native, before.native,
        "a step as planned should ask the device for nothing"
    );
}
