use super::dag::{Dag, Functions, Span};
use super::*;
use crate::mlir::Arith;
use ir::DType;

/// A formula of an integer that contains a floating-point number.
#[test]
fn an_op_that_mixes_numbers_says_what_it_is_for() {
    let mut dag = Dag::new(Functions::Polynomials);
    let x = dag.outside(Kind::I64, Span::default());
    let half = dag.float(0.5, Kind::F32);
    dag.mul(x, half);
    let error = dag.take_error().map(|e| Unsupported::mistyped("halve", e));
    let text = error.map(|e| e.to_string()).unwrap_or_default();
    let says = "no kernel is generated for halve: it is for floating-point numbers \
                (arith.muli: its operands are of different types, i64 and f32 (codegen";
    assert!(text.starts_with(says), "{text}");
}

#[test]
fn an_instruction_that_does_not_fit_is_named_with_its_op() {
    // No shape rule accepts such operands, so the instruction is built by hand.
    let mut dag = Dag::new(Functions::Polynomials);
    let x = dag.outside(Kind::F32, Span::default());
    dag.same(Arith::Andi, &[x, x]);
    let error = dag.take_error().expect("a float has no bits");
    let error = Unsupported::mistyped("bitwise_and", error);
    let Unsupported::Mistyped { op, source } = error else {
        panic!("{error}");
    };
    assert_eq!((op.as_str(), source.op), ("bitwise_and", "arith.andi"));
    assert!(source.place.file().ends_with("tests.rs"), "{source}");
}

/// A kernel's name is computed from its text, and is part of it.
#[test]
fn names_are_of_what_a_kernel_computes() {
    let kernel = |n| {
        let op = Op::new("neg", []).unwrap();
        let x = TensorType::new(DType::F32, [n]).unwrap();
        generate_op(&op, &[x], &Target::AVX2).unwrap()
    };
    let (a, b) = (kernel(16), kernel(32));
    assert_eq!(a, kernel(16));
    assert_ne!(a.name, b.name);
    assert_eq!(a.phases[0].symbol, a.name);
    assert!(a.mlir.contains(&format!("@{}(", a.name)));
}
