//! Kernels allocate nothing after their first run, but products: the gemm crate packs factors into memory that it frees
//! before it returns. Alone in its binary: the counters count everybody.

#![allow(unsafe_code, reason = "a global allocator is unsafe to implement; this one forwards to the system's")]

#[allow(dead_code, reason = "shared with the tests of kernels")]
#[path = "kernels/generate.rs"]
mod generate;

use generate::{Rng, SCRATCH_BYTES, case_of};
use runtime::kernels::KERNELS;
use runtime::kernels::owned::{OwnedTensor, Run};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static LIVE_BYTES: AtomicI64 = AtomicI64::new(0);

// SAFETY: forwards every call as it is to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        LIVE_BYTES.fetch_add(layout.size() as i64, Ordering::SeqCst);
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size() as i64, Ordering::SeqCst);
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
            // The first run may: gemm keeps a workspace for each thread.
            run.run().unwrap();
            let mut marks = Vec::with_capacity(2);
            let counters = || (ALLOCATIONS.load(Ordering::SeqCst), LIVE_BYTES.load(Ordering::SeqCst));
            run.run_between(|| marks.push(counters())).unwrap();
            let [before, after] = marks[..] else { panic!("two marks") };
            assert_eq!(before.1, after.1, "{} keeps memory: {:?}", case.op, case.outs);
            let products = ["matmul", "addmm", "sdpa", "sdpa_bwd"];
            assert!(before.0 == after.0 || products.contains(&case.op), "{} allocates: {:?}", case.op, case.outs);
        }
    }
}
