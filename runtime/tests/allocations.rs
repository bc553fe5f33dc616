//! In steady state a step allocates nothing, in any thread. The test is alone in its binary,
//! because the counter counts every thread.

mod common;
mod counting;

use common::*;
use counting::ALLOCATIONS;
use lighterage_runtime::{Machine, Options};
use std::sync::atomic::Ordering;

#[test]
fn steps_allocate_nothing() {
    small_steps();
    shared_updates();
}

fn small_steps() {
    let (x, mut out) = (floats(1.0), [0; 64]);
    for options in [
        Options::default(),
        Options {
            link_bandwidth: Some(1e6),
            ..Options::default()
        },
    ] {
        let mut machine = Machine::new(offloading(), options).unwrap();
        let mut step = || {
            machine.write_input("x", &x).unwrap();
            machine.step().unwrap();
            machine.read_output_into("out", &mut out).unwrap();
        };
        // The first step may allocate: threads set up what they keep.
        step();
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        (0..100).for_each(|_| step());
        assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - before, 0);
    }
}

fn shared_updates() {
    let g: Vec<u8> = (0..PARAMETERS)
        .flat_map(|i| (i as f32).to_le_bytes())
        .collect();
    let hyper: Vec<u8> = [1e-3f64, 0.0, 0.0]
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let options = Options {
        threads: Some(3),
        ..Options::default()
    };
    let mut machine = Machine::new(updating("host"), options).unwrap();
    let mut step = || {
        machine.write_input("g", &g).unwrap();
        machine.write_input("hyper", &hyper).unwrap();
        machine.step().unwrap();
    };
    step();
    let before = ALLOCATIONS.load(Ordering::SeqCst);
    (0..100).for_each(|_| step());
    assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - before, 0);
}
