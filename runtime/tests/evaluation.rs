//! One output of a step without the rest of it.

use crate::common::*;
use artifact::*;
use lighterage_runtime::{Evaluation, Machine, NotEvaluable, Options};

/// `w = w + x`, then `out = w + x`.
fn updating_first() -> Artifact {
    let mut p = Plan::new(3, 0, &["compute"]);
    let (x, w, out) = (at(DEVICE, 0), at(DEVICE, 1), at(DEVICE, 2));
    p.run(
        0,
        "w'",
        "add",
        &[w.clone(), x.clone()],
        std::slice::from_ref(&w),
    );
    p.run(
        0,
        "out",
        "add",
        &[w.clone(), x.clone()],
        std::slice::from_ref(&out),
    );
    p.input("x", x);
    p.output("out", out);
    p.state("w", StateKind::Param, w, Initial::Zeros);
    p.0
}

#[test]
fn an_output_is_computed_and_no_state_changes() {
    for shuffle in [None, Some(3)] {
        let options = Options {
            shuffle,
            ..Options::default()
        };
        let evaluation = Evaluation::of(&offloading(), "out").unwrap();
        // All but the new parameter and its way home.
        assert_eq!(evaluation.n_commands(), 5);
        let mut machine = Machine::new(offloading(), options).unwrap();
        let lacking = machine.evaluate(&evaluation).unwrap_err().to_string();
        assert!(lacking.contains("input x must be written"), "{lacking}");

        // out = 2 (x + w), w = w + x: before the first step, between steps, after the last one.
        let mut w = 1.0;
        for _ in 0..3 {
            for x in [5.0, 7.0] {
                machine.write_input("x", &floats(x)).unwrap();
                let out = machine.evaluate(&evaluation).unwrap();
                assert_eq!(values(&out), [2.0 * (x + w); 16]);
                assert_eq!(values(&machine.read_state("w").unwrap()), [w; 16]);
            }
            machine.write_input("x", &floats(3.0)).unwrap();
            machine.launch().unwrap();
            machine.wait_io().unwrap();
            let out = machine.read_output("out").unwrap();
            assert_eq!(values(&out), [2.0 * (3.0 + w); 16]);
            w += 3.0;
        }
    }
}

#[test]
fn what_cannot_be_evaluated_is_told() {
    let of = |change: &dyn Fn(&mut Artifact)| {
        let mut artifact = offloading();
        change(&mut artifact);
        Evaluation::of(&artifact, "out").unwrap_err()
    };
    let path = || "w".to_string();
    let buffer = of(&|a| a.states[0].kind = StateKind::Buffer);
    assert_eq!(buffer, NotEvaluable::Buffer(path()));
    let invalid = of(&|a| a.commands[0].stream = 99);
    assert!(matches!(invalid, NotEvaluable::Invalid(_)));
    let unknown = Evaluation::of(&offloading(), "loss").unwrap_err();
    assert_eq!(unknown.to_string(), "the step has no output loss");
    let early = Evaluation::of(&updating_first(), "out").unwrap_err();
    assert_eq!(early, NotEvaluable::State(path()));

    let mut machine = Machine::new(updating_first(), Options::default()).unwrap();
    let other = Evaluation::of(&offloading(), "out").unwrap();
    let told = machine.evaluate(&other).unwrap_err().to_string();
    assert_eq!(told, "the evaluation is of another artifact");
}
