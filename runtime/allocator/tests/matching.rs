//! How a run that differs from the plan gets back into it.

use crate::arena::Arena;
use lighterage_alloc::sequence::{ANCHOR, WINDOW};
use lighterage_alloc::{Allocator, Mismatches, Plan, Stats};
use std::fmt::Write;

const PROLOGUE: usize = 3;
const STEP: usize = 200;

/// Request `i`'s bytes: no two requests have the same.
fn bytes(i: usize) -> u64 {
    10 + 2 * i as u64
}

/// A prologue whose blocks stay, and a step of blocks that live for one request each.
fn allocator() -> Allocator {
    let n = PROLOGUE + STEP;
    let mut text = format!(
        "lighterage-plan 1\npool {} 512\nrequests {n} {PROLOGUE}\n",
        512 * (PROLOGUE + 2)
    );
    for i in 0..n {
        let (offset, end) = if i < PROLOGUE {
            (512 * i, "-".to_string())
        } else {
            (512 * (PROLOGUE + i % 2), (i + 1).to_string())
        };
        writeln!(text, "s {} 0 {offset} {end}", bytes(i)).unwrap();
    }
    Allocator::planned(
        Arena::new(1 << 24).pool(),
        Plan::read(&format!("{text}end\n")).unwrap(),
    )
    .unwrap()
}

/// Requests blocks and frees each at once; the prologue's blocks stay.
fn play(allocator: &mut Allocator, requests: impl IntoIterator<Item = usize>) {
    for i in requests {
        let address = allocator.malloc(bytes(i), 0).unwrap();
        if PROLOGUE <= i {
            assert!(allocator.free(address));
        }
    }
}

fn counted(stats: &Stats) -> (u64, u64, Mismatches) {
    (stats.planned, stats.fallback, stats.mismatches)
}

const ALL: std::ops::Range<usize> = 0..PROLOGUE + STEP;
const STEPS: std::ops::Range<usize> = PROLOGUE..PROLOGUE + STEP;

#[test]
fn steps_follow_without_help() {
    let mut allocator = allocator();
    play(&mut allocator, ALL.chain(STEPS).chain(STEPS));
    let stats = allocator.stats();
    assert_eq!(
        counted(&stats),
        ((PROLOGUE + 3 * STEP) as u64, 0, Mismatches::default())
    );
    assert_eq!(
        (stats.steps, stats.native, &stats.first_mismatch),
        (3, 1, &None)
    );
}

/// A step that ends early (a skipped update, for example): the next one begins normally.
#[test]
fn a_short_step_is_skipped_over() {
    let mut allocator = allocator();
    play(&mut allocator, ALL.take(PROLOGUE + STEP - 20).chain(STEPS));
    let mismatches = Mismatches {
        missing: 20,
        ..Mismatches::default()
    };
    assert_eq!(
        counted(&allocator.stats()),
        ((PROLOGUE + 2 * STEP - 20) as u64, 0, mismatches)
    );
}

/// More requests are skipped than are searched: a run of requests that occurs once identifies the
/// place.
#[test]
fn a_run_of_requests_tells_the_place() {
    let mut allocator = allocator();
    let skipped = 100;
    assert!(WINDOW < skipped);
    play(
        &mut allocator,
        ALL.take(PROLOGUE + 50)
            .chain(STEPS.skip(50 + skipped))
            .chain(STEPS),
    );
    let stats = allocator.stats();
    let lost = ANCHOR - 1;
    assert_eq!(
        (stats.planned, stats.fallback),
        (
            (PROLOGUE + 50 + STEP - 50 - skipped - lost + STEP) as u64,
            lost as u64
        )
    );
    // Each unknown request replaces a skipped one.
    let expected = Mismatches {
        missing: skipped as u64,
        resized: lost as u64,
        ..Mismatches::default()
    };
    assert_eq!(stats.mismatches, expected, "{stats}");
}

/// An evaluation between two steps: its requests are extra, and the next step is found at once.
#[test]
fn an_evaluation_does_not_matter() {
    let mut allocator = allocator();
    play(&mut allocator, ALL);
    play(&mut allocator, (0..500).map(|i| 1000 + i % 7));
    play(&mut allocator, STEPS);
    let mismatches = Mismatches {
        extra: 500,
        ..Mismatches::default()
    };
    assert_eq!(
        counted(&allocator.stats()),
        ((PROLOGUE + 2 * STEP) as u64, 500, mismatches)
    );
}

/// A run that begins in the step (after another way of loading a checkpoint, for example) is served
/// from the step on.
#[test]
fn the_prologue_may_be_missing() {
    let mut allocator = allocator();
    play(&mut allocator, STEPS.skip(60).chain(STEPS));
    let stats = allocator.stats();
    assert_eq!(
        (stats.planned, stats.fallback),
        ((2 * STEP - 60 - ANCHOR + 1) as u64, ANCHOR as u64 - 1),
        "{stats}"
    );
}

#[test]
fn swapped_requests_get_their_places() {
    let mut allocator = allocator();
    let mut live = vec![];
    // Two requests that live until the step's end, in the other order.
    let text = "lighterage-plan 1\npool 2048 512\nrequests 4 0\ns 10 0 0 4\ns 20 0 512 4\ns 30 0 \
        1024 4\ns 40 0 1536 4\nend\n";
    let mut small =
        Allocator::planned(Arena::new(1 << 20).pool(), Plan::read(text).unwrap()).unwrap();
    for bytes in [20, 10, 30, 40] {
        live.push(small.malloc(bytes, 0).unwrap());
    }
    assert_eq!([live[0] - live[1], live[2] - live[1]], [512, 1024]);
    let mismatches = Mismatches {
        reordered: 1,
        ..Mismatches::default()
    };
    assert_eq!(counted(&small.stats()), (4, 0, mismatches));
    let told = "step 0, request 0: 10 bytes on stream 0 were planned, and request 1 came";
    assert_eq!(small.stats().first_mismatch.as_deref(), Some(told));

    // A request whose planned life is over gets no place of other blocks.
    play(&mut allocator, ALL.take(PROLOGUE + 10));
    play(
        &mut allocator,
        [PROLOGUE + 12, PROLOGUE + 13, PROLOGUE + 10],
    );
    let mismatches = Mismatches {
        missing: 2,
        extra: 1,
        ..Mismatches::default()
    };
    assert_eq!(
        counted(&allocator.stats()),
        ((PROLOGUE + 12) as u64, 1, mismatches)
    );
}

#[test]
fn another_stream_gets_other_bytes() {
    let mut allocator = allocator();
    play(&mut allocator, ALL.take(PROLOGUE + 10));
    let address = allocator.malloc(bytes(PROLOGUE + 10), 5).unwrap();
    assert!(allocator.free(address));
    play(&mut allocator, ALL.skip(PROLOGUE + 11));
    let mismatches = Mismatches {
        other_stream: 1,
        ..Mismatches::default()
    };
    assert_eq!(
        counted(&allocator.stats()),
        ((PROLOGUE + STEP - 1) as u64, 1, mismatches)
    );
}

/// A block that is freed late keeps its bytes. The requests that should have had them get others
/// that the plan does not use in the meantime; in the next step they get their own place.
#[test]
fn a_late_free_is_waited_for_by_nobody() {
    let mut allocator = allocator();
    play(&mut allocator, ALL.take(PROLOGUE + 10));
    let late = allocator.malloc(bytes(PROLOGUE + 10), 0).unwrap();
    play(&mut allocator, ALL.skip(PROLOGUE + 11));
    // Every second request lies there.
    let rest = (STEP - 11) as u64;
    let stats = allocator.stats();
    assert_eq!(
        (stats.moved, stats.fallback, stats.mismatches),
        (rest / 2, 0, Mismatches::default())
    );
    assert!(allocator.free(late));
    play(&mut allocator, STEPS);
    assert_eq!(
        allocator.stats().planned,
        (PROLOGUE + STEP) as u64 - rest / 2 + STEP as u64
    );
}

/// Of two requests of one size, the first does not come. The second gets its place, and keeps it
/// for longer than planned. What was planned there moves to the place of the second.
#[test]
fn a_missing_request_among_equal_ones_sends_nothing_to_the_cache() {
    let n = 40;
    let mut text = format!("lighterage-plan 1\npool 1024 512\nrequests {n} 0\n");
    text += "s 100 0 0 1\n";
    writeln!(text, "s 100 0 512 {n}").unwrap();
    for i in 2..n {
        writeln!(text, "s {} 0 0 {}", bytes(i), i + 1).unwrap();
    }
    let plan = Plan::read(&format!("{text}end\n")).unwrap();
    let mut allocator = Allocator::planned(Arena::new(1 << 24).pool(), plan).unwrap();
    for _ in 0..3 {
        let long = allocator.malloc(100, 0).unwrap();
        for i in 2..n {
            let address = allocator.malloc(bytes(i), 0).unwrap();
            assert!(allocator.free(address));
        }
        assert!(allocator.free(long));
    }
    let stats = allocator.stats();
    assert_eq!(stats.mismatches.missing, 3);
    assert_eq!((stats.fallback, stats.cache_bytes), (0, 0), "{stats}");
    assert_eq!((stats.planned, stats.moved), (3, 3 * (n as u64 - 2)));
}

/// No memory of this size: the error says what is in use, and the request does not count as served.
#[test]
fn no_memory_is_an_error() {
    let mut allocator = allocator();
    for bytes in [1 << 30, 1 << 62, u64::MAX] {
        let error = allocator.malloc(bytes, 0).unwrap_err().to_string();
        assert!(
            error.contains("the arena is full") || error.contains("no device has"),
            "{error}"
        );
    }
    let stats = allocator.stats();
    assert_eq!(
        (stats.requests, stats.fallback, stats.mismatches.extra),
        (0, 0, 3)
    );
    assert!(!allocator.free(12345));
    assert_eq!(allocator.stats().unknown_frees, 1);
}
