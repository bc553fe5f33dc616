//! Kernels allocate nothing after their first run. The test is alone in its binary, because the
//! counter counts every thread.

mod counting;

#[allow(dead_code, reason = "shared with the tests of kernels")]
#[path = "kernels/generate.rs"]
mod generate;

use counting::ALLOCATIONS;
use generate::{Rng, SCRATCH_BYTES, case_of};
use lighterage_runtime::kernels::KERNELS;
use lighterage_runtime::kernels::owned::{OwnedTensor, Run};
use std::sync::atomic::Ordering;

#[test]
fn kernels_allocate_nothing() {
    for kernel in KERNELS {
        for seed in 0..20 {
            let case = case_of(kernel.name, &mut Rng(seed));
            let ins: Vec<&OwnedTensor> = case.ins.iter().collect();
            let mut run =
                Run::new(case.op, &case.attrs, &ins, &case.outs, SCRATCH_BYTES, &[]).unwrap();
            // The first run may allocate: products keep a workspace for each thread.
            run.run().unwrap();
            let mut marks = Vec::with_capacity(2);
            run.run_between(|| marks.push(ALLOCATIONS.load(Ordering::SeqCst)))
                .unwrap();
            let [before, after] = marks[..] else {
                panic!("two marks")
            };
            assert_eq!(before, after, "{} allocates: {:?}", case.op, case.outs);
        }
    }
}
