//! In steady state a step allocates nothing, in any thread. Alone in its binary: the counter counts everybody.

mod common;
mod counting;

use common::*;
use counting::ALLOCATIONS;
use runtime::{Machine, Options};
use std::sync::atomic::Ordering;

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
