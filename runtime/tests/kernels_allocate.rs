//! Kernels allocate nothing after their first run. Alone in its binary: the counter counts everybody.

#![allow(unsafe_code, reason = "a global allocator is unsafe to implement; this one forwards to the system's")]

#[allow(dead_code, reason = "shared with the tests of kernels")]
#[path = "kernels/generate.rs"]
mod generate;

use generate::{Rng, SCRATCH_BYTES, case_of};
use runtime::kernels::KERNELS;
use runtime::kernels::owned::{OwnedTensor, Run};
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
fn kernels_allocate_nothing() {
    for kernel in KERNELS {
        for seed in 0..20 {
            let case = case_of(kernel.name, &mut Rng(seed));
            let ins: Vec<&OwnedTensor> = case.ins.iter().collect();
            let mut run = Run::new(case.op, &case.attrs, &ins, &case.outs, SCRATCH_BYTES, &[]).unwrap();
            // The first run may: products keep a workspace for each thread.
            run.run().unwrap();
            let mut marks = Vec::with_capacity(2);
            run.run_between(|| marks.push(ALLOCATIONS.load(Ordering::SeqCst))).unwrap();
            let [before, after] = marks[..] else { panic!("two marks") };
            assert_eq!(before, after, "{} allocates: {:?}", case.op, case.outs);
        }
    }
}
