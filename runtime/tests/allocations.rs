//! In steady state a step allocates nothing, in any thread. Alone in its binary: the counter counts everybody.

#![allow(unsafe_code, reason = "a global allocator is unsafe to implement; this one forwards to the system's")]

mod common;

use common::*;
use runtime::{Machine, Options};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: forwards every call as it is to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn steps_allocate_nothing() {
    let (x, mut out) = (floats(1.0), [0; 64]);
    for options in [Options::default(), Options { link_bandwidth: Some(1e6), ..Options::default() }] {
        let mut machine = Machine::new(offloading(), options).unwrap();
        let mut step = || {
            machine.write_input("x", &x).unwrap();
            machine.step().unwrap();
            machine.read_output_into("out", &mut out).unwrap();
        };
        // The first step may: threads set up what they keep.
        step();
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        (0..100).for_each(|_| step());
        assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - before, 0);
    }
}
