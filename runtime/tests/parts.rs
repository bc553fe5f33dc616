//! Steps that pause once, on memory of the caller.

use crate::common::*;
use artifact::*;
use lighterage_runtime::{Borrowed, Error, Machine, Options, Part, Port, validate};
use std::collections::BTreeMap;
use std::slice;

const PARAMETERS: u32 = 2;
const FORWARD: u32 = 3;
const BACKWARD: u32 = 4;

/// A tensor of the caller, aligned as kernels need it.
#[repr(align(64))]
struct Tensor([f32; 16]);

impl Tensor {
    fn of(x: f32) -> Tensor {
        Tensor([x; 16])
    }

    #[expect(unsafe_code, reason = "a machine works on the tensor, as on PyTorch's")]
    fn lend(&mut self) -> Borrowed {
        // SAFETY: each test keeps its tensors until its machine is dropped, and touches them only
        // between two parts.
        unsafe { Borrowed::new(self.0.as_mut_ptr().cast(), size_of_val(&self.0)) }.unwrap()
    }
}

/// `y = x + w` leaves at the pause, where `dy` comes; then `dw = y * dy * w` leaves.
fn pausing() -> Artifact {
    let mut p = Plan::new(5, 0, &["compute", "h2d", "d2h"]);
    let lent = [
        ("parameters", MemorySpace::Device(0), 1),
        ("forward", MemorySpace::Host, 2),
        ("backward", MemorySpace::Host, 2),
    ];
    p.0.pools.extend(lent.map(|(name, space, places)| Pool {
        name: name.into(),
        space,
        bytes: 64 * places,
        lent: true,
    }));
    let (x, y, dy, dw) = (at(DEVICE, 0), at(DEVICE, 1), at(DEVICE, 2), at(DEVICE, 3));
    let product = at(DEVICE, 4);
    let w = at(PARAMETERS, 0);
    // Events are numbered by their records; waits for the previous step need the numbers earlier.
    let (arrived, computed, left, came, derived, gone) = (0, 1, 2, 3, 4, 5);
    p.wait(1, derived, true);
    p.copy(1, "x", "feed", at(FORWARD, 0), x.clone());
    assert_eq!(p.record(1), arrived);
    p.wait(0, gone, true);
    p.wait(0, arrived, false);
    p.run(0, "y", "add", &[x, w.clone()], slice::from_ref(&y));
    assert_eq!(p.record(0), computed);
    p.wait(2, computed, false);
    p.copy(2, "y", "fetch", y.clone(), at(FORWARD, 1));
    assert_eq!(p.record(2), left);
    p.0.pause = Some(p.0.commands.len() as u32);
    p.copy(1, "dy", "feed", at(BACKWARD, 0), dy.clone());
    assert_eq!(p.record(1), came);
    p.wait(0, came, false);
    p.run(0, "product", "mul", &[y, dy], slice::from_ref(&product));
    p.run(0, "dw", "mul", &[product, w.clone()], slice::from_ref(&dw));
    assert_eq!(p.record(0), derived);
    p.wait(2, derived, false);
    p.copy(2, "dw", "fetch", dw, at(BACKWARD, 1));
    assert_eq!(p.record(2), gone);
    p.input("x", at(FORWARD, 0));
    p.input("dy", at(BACKWARD, 0));
    p.output("y", at(FORWARD, 1));
    p.output("dw", at(BACKWARD, 1));
    p.state("w", StateKind::Param, w, Initial::Absent);
    p.0
}

fn machine(w: &mut Tensor) -> Machine {
    let states = BTreeMap::from([("w".to_string(), w.lend())]);
    Machine::borrowing(pausing(), Options::default(), &states, None).unwrap()
}

fn refusal(change: impl FnOnce(&mut Artifact)) -> String {
    let mut artifact = pausing();
    change(&mut artifact);
    validate(&artifact).unwrap_err().to_string()
}

#[test]
fn the_caller_s_turn_is_between_the_parts() {
    let mut w = Tensor::of(1.0);
    let mut machine = machine(&mut w);
    for step in 0..3 {
        // Tensors of each step are new ones, so their addresses change.
        let (mut x, mut y) = (Tensor::of(step as f32), Tensor::of(f32::NAN));
        machine.point(Port::Input("x"), x.lend()).unwrap();
        machine.point(Port::Output("y"), y.lend()).unwrap();
        machine.run_part(Part::First).unwrap();
        assert_eq!(y.0, [1.0 + step as f32; 16]);

        let (mut dy, mut dw) = (Tensor::of(10.0 * y.0[0]), Tensor::of(f32::NAN));
        machine.point(Port::Input("dy"), dy.lend()).unwrap();
        machine.point(Port::Output("dw"), dw.lend()).unwrap();
        let report = machine.run_part(Part::Second).unwrap();
        assert_eq!(dw.0, [10.0 * y.0[0] * y.0[0] * w.0[0]; 16]);
        assert_eq!(report.step, 2 * (step + 1));
    }
}

#[test]
fn a_state_may_move_before_each_part() {
    let mut machine = machine(&mut Tensor::of(f32::NAN));
    let (mut x, mut y) = (Tensor::of(2.0), Tensor::of(f32::NAN));
    let (mut dy, mut dw) = (Tensor::of(10.0), Tensor::of(f32::NAN));
    machine.point(Port::Input("x"), x.lend()).unwrap();
    machine.point(Port::Output("y"), y.lend()).unwrap();
    machine.point(Port::Input("dy"), dy.lend()).unwrap();
    machine.point(Port::Output("dw"), dw.lend()).unwrap();
    for value in [1.0, 3.0] {
        let mut early = Tensor::of(value);
        machine.point(Port::State("w"), early.lend()).unwrap();
        machine.run_part(Part::First).unwrap();
        assert_eq!(y.0, [2.0 + value; 16]);

        // Sharded parameters are freed after the forward, and gathered again elsewhere.
        let mut late = Tensor::of(value);
        machine.point(Port::State("w"), late.lend()).unwrap();
        early.0 = [f32::NAN; 16];
        machine.run_part(Part::Second).unwrap();
        assert_eq!(dw.0, [10.0 * (2.0 + value) * value; 16]);
    }
}

#[test]
fn what_a_machine_cannot_do_with_a_step_in_parts_is_an_error() {
    let mut w = Tensor::of(1.0);
    let mut machine = machine(&mut w);
    let told = machine.step().unwrap_err().to_string();
    assert_eq!(told, "the step runs in parts");
    let mut small = [0u8; 4];
    let told = machine.point(Port::State("v"), w.lend()).unwrap_err();
    assert_eq!(told.to_string(), r#"there is no State("v")"#);
    let told = machine.point(Port::Input("z"), w.lend()).unwrap_err();
    assert_eq!(told.to_string(), r#"there is no Input("z")"#);
    #[expect(unsafe_code, reason = "the machine refuses it")]
    // SAFETY: the machine does not take it, because it is too small.
    let few = unsafe { Borrowed::new(small.as_mut_ptr(), small.len()) }.unwrap();
    let told = machine.point(Port::Input("x"), few).unwrap_err();
    assert_eq!(told.to_string(), "x has 64 bytes (F32[16]), not 4");
    let told = machine.point(Port::State("w"), few).unwrap_err();
    assert_eq!(told.to_string(), "w has 64 bytes (F32[16]), not 4");

    // No memory for x: the part fails, and touches nothing.
    let told = machine.run_part(Part::First).unwrap_err().to_string();
    assert!(told.contains("the caller gave no memory for it"), "{told}");

    let none = BTreeMap::new();
    let borrowing = |states, options| Machine::borrowing(pausing(), options, states, None);
    let told = borrowing(&none, Options::default()).unwrap_err();
    assert_eq!(told.to_string(), "state w has no memory");
    let shuffled = Options {
        shuffle: Some(1),
        ..Options::default()
    };
    let refused = borrowing(&none, shuffled);
    assert!(matches!(refused, Err(Error::Unsupported(_))));
    let whole = Machine::new(offloading(), Options::default());
    let told = whole.unwrap().run_part(Part::First).unwrap_err();
    assert_eq!(told.to_string(), "the step has no parts");
}

#[test]
fn accesses_beside_the_caller_s_tensors_are_refused() {
    assert!(validate(&pausing()).is_ok());
    let n = pausing().commands.len() as u32;
    let told = refusal(|a| a.pause = Some(n + 1));
    assert!(
        told.contains(&format!("more than its {n} commands")),
        "{told}"
    );

    // w is not a state any more, so the kernel reads bytes that nobody has lent.
    let told = refusal(|a| a.states.clear());
    assert!(told.contains("leaves the tensors of the caller"), "{told}");

    // x would cover y.
    let told = refusal(|a| a.inputs[0].operand.shape = vec![32]);
    assert!(told.contains("share bytes"), "{told}");

    // A kernel would read an input where the caller has it, but its address may change.
    let told = refusal(|a| {
        let launch = a.commands.iter_mut().find_map(|c| match &mut c.kind {
            CommandKind::Launch { ins, .. } => Some(ins),
            _ => None,
        });
        launch.unwrap()[0].place = at(FORWARD, 0).place;
    });
    assert!(told.contains("works on an input or output"), "{told}");
}
