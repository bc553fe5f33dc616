//! Ops that the program with the machine computes.

use crate::common::*;
use artifact::*;
use lighterage_runtime::{Error, Foreign, ForeignCall, Machine, Options, validate};
use std::slice;
use std::sync::{Arc, Mutex};

/// Adds the operands up and notes the calls; `aten.bad` fails.
#[derive(Default)]
struct Sums(Mutex<Vec<(String, String)>>);

impl Foreign for Sums {
    fn compute(&self, call: &ForeignCall<'_>) -> Result<(), String> {
        let mut calls = self.0.lock().unwrap();
        calls.push((call.name.into(), call.node.into()));
        if call.name == "aten.bad" {
            return Err("no such luck".into());
        }
        let mut sum = vec![0.0; call.outs[0].tensor().numel()];
        for i in 0..call.ins.len() {
            let operand = values(&call.read(i));
            sum.iter_mut().zip(operand).for_each(|(sum, x)| *sum += x);
        }
        let bytes: Vec<u8> = sum.iter().flat_map(|x: &f32| x.to_le_bytes()).collect();
        (0..call.outs.len()).for_each(|j| call.write(j, &bytes));
        Ok(())
    }
}

fn attrs(name: &str, node: &str, types: &str) -> Vec<(String, Attr)> {
    let text = |text: &str| Attr::Str(text.into());
    let all = [
        ("name", text(name)),
        ("node", text(node)),
        ("pure", Attr::Bool(true)),
        ("types", text(types)),
    ];
    all.map(|(key, attr)| (key.to_string(), attr)).to_vec()
}

/// x + x by a function outside, and the sum plus x by a kernel.
fn step(name: &str) -> Artifact {
    let mut p = Plan::new(4, 0, &["compute"]);
    let (x, y, z) = (at(DEVICE, 0), at(DEVICE, 1), at(DEVICE, 2));
    p.run(
        0,
        "y",
        "extern",
        &[x.clone(), x.clone()],
        slice::from_ref(&y),
    );
    p.run(0, "z", "add", &[x.clone(), y], slice::from_ref(&z));
    p.input("x", x);
    p.output("z", z);
    p.0.kernels[0].attrs = attrs(name, "sum_1", "f32[16]");
    p.0
}

fn run(artifact: Artifact, options: Options) -> (Result<Vec<f32>, Error>, Arc<Sums>) {
    let sums = Arc::new(Sums::default());
    let mut machine = Machine::calling(artifact, options, sums.clone()).unwrap();
    let mut last = || {
        for x in [1.0, 2.0] {
            machine.write_input("x", &floats(x))?;
            machine.step()?;
        }
        machine.read_output("z").map(|bytes| values(&bytes))
    };
    (last(), sums)
}

#[test]
fn a_launch_calls_the_function_with_its_tensors() {
    let shuffled = Options {
        shuffle: Some(1),
        ..Options::default()
    };
    for options in [Options::default(), shuffled] {
        let (z, sums) = run(step("aten.sum"), options);
        assert_eq!(z.unwrap(), [6.0; 16]);
        let call = ("aten.sum".to_string(), "sum_1".to_string());
        assert_eq!(*sums.0.lock().unwrap(), [call.clone(), call]);
    }
}

#[test]
fn a_function_that_fails_stops_the_machine() {
    let (z, sums) = run(step("aten.bad"), Options::default());
    assert_eq!(z.unwrap_err().to_string(), "line y failed: no such luck");
    assert_eq!(sums.0.lock().unwrap().len(), 1);
}

#[test]
fn a_loan_outlives_the_machine() {
    struct Keeps(Mutex<Vec<lighterage_runtime::Lent>>);
    impl Foreign for Keeps {
        fn compute(&self, call: &ForeignCall<'_>) -> Result<(), String> {
            self.0.lock().unwrap().extend_from_slice(call.ins);
            call.write(0, &call.read(1));
            Ok(())
        }
    }
    let keeps = Arc::new(Keeps(Mutex::default()));
    let mut machine =
        Machine::calling(step("aten.sum"), Options::default(), keeps.clone()).unwrap();
    machine.write_input("x", &floats(3.0)).unwrap();
    machine.step().unwrap();
    let start = machine
        .lend(lighterage_runtime::Port::Input("x"))
        .unwrap()
        .tensor()
        .start();
    drop(machine);
    let kept = keeps.0.lock().unwrap();
    assert_eq!(kept.len(), 2);
    assert!(kept.iter().all(|lent| lent.tensor().start() == start));
}

#[test]
fn without_a_function_every_op_is_named() {
    let mut artifact = step("aten.sum");
    let mut second = artifact.commands[0].clone();
    if let CommandKind::Launch { kernel, .. } = &mut second.kind {
        *kernel = 2;
    }
    artifact.kernels.push(Kernel {
        op: "extern".into(),
        attrs: attrs("aten.histc", "histc", "f32[16]"),
        code: None,
    });
    artifact.commands.insert(1, second);
    let expected = "unsupported: aten.sum (line y), aten.histc (line y): there is no kernel, so \
                    only the program that compiled the step can run it";
    let refused = |e: Error| assert_eq!(e.to_string(), expected);
    refused(validate(&artifact).unwrap_err());
    refused(Machine::new(artifact, Options::default()).err().unwrap());
}

#[test]
fn launches_that_are_not_sound_are_refused() {
    type Change = fn(&mut Artifact);
    let refused = |change: Change| {
        let mut artifact = step("aten.sum");
        change(&mut artifact);
        let machine = Machine::calling(artifact, Options::default(), Arc::new(Sums::default()));
        match machine {
            Ok(_) => panic!("it should be refused"),
            Err(refusal) => refusal.to_string(),
        }
    };
    let said = "invalid artifact: line y: ";
    let types = format!("{said}aten.sum: its results should be f32[16]");
    assert_eq!(
        refused(|a| a.kernels[0].attrs.truncate(3)),
        format!("{said}an extern should have a name, a node and types")
    );
    assert!(
        refused(|a| a.kernels[0].attrs.push(("x".into(), Attr::Int(1))))
            .contains("has the attributes")
    );
    assert!(refused(|a| a.kernels[0].attrs[2].1 = Attr::Int(1)).contains("has the attributes"));
    assert_eq!(
        refused(|a| a.kernels[0].attrs[3].1 = Attr::Str("f32[17]".into())),
        format!("{said}aten.sum: its results should be f32[17]")
    );
    assert_eq!(refused(|a| outs(a)[0].dtype = DType::I32), types);
    assert_eq!(refused(|a| outs(a).clear()), types);
    assert_eq!(
        refused(|a| outs(a)[0].place.offset = 0),
        format!("{said}result 0 overlaps operand 0, and they are no in-place pair")
    );
    assert!(refused(|a| outs(a)[0].place.offset = 64 * 4).contains("leave pool device"));
    assert!(refused(|a| ins(a)[0].place.pool = 7).contains("pool 7 of 2"));
    let unwritten = refused(|a| ins(a)[0].place.offset = 64 * 3);
    assert!(unwritten.contains("nothing has written"), "{unwritten}");
}

fn outs(artifact: &mut Artifact) -> &mut Vec<Operand> {
    match &mut artifact.commands[0].kind {
        CommandKind::Launch { outs, .. } => outs,
        _ => panic!("the first command should be a launch"),
    }
}

fn ins(artifact: &mut Artifact) -> &mut Vec<Operand> {
    match &mut artifact.commands[0].kind {
        CommandKind::Launch { ins, .. } => ins,
        _ => panic!("the first command should be a launch"),
    }
}
