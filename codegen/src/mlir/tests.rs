use super::*;

const LONG: Type = Type::Scalar(Kind::I64);

/// A function of a CPU with one address and one number.
fn function(emit: impl FnOnce(&mut Builder, Value, Value)) -> Result<String, Error> {
    let parameters = vec![
        Parameter::new("at", Type::Pointer(Space::Generic)),
        Parameter::new("n", LONG),
    ];
    let (mut b, values) = Builder::new("f", parameters, Body::Cpu);
    emit(&mut b, values[0], values[1]);
    let mut module = Module::default();
    module.push(b.finish()?);
    Ok(module.to_string())
}

#[test]
fn operations_stand_where_they_were_put() {
    let text = function(|b, at, n| {
        let [zero, one] = [0, 1].map(|i| b.long(i));
        let sums = b.repeat([zero, n, one], &[zero], |b, i, sums| {
            let twice = b.outside(0, |b| b.addi(n, n));
            let sum = b.addi(sums[0], i);
            vec![b.muli(sum, twice)]
        });
        b.store(sums[0], at, 8);
    });
    let expected = "\
module {
  llvm.func @f(%at: !llvm.ptr, %n: i64) attributes \
{passthrough = [\"nounwind\", [\"prefer-vector-width\", \"512\"]]} {
    %2 = arith.constant 0 : i64
    %3 = arith.constant 1 : i64
    %6 = arith.addi %n, %n : i64
    %9 = scf.for %4 = %2 to %n step %3 iter_args(%5 = %2) -> (i64) : i64 {
      %7 = arith.addi %5, %4 : i64
      %8 = arith.muli %7, %6 : i64
      scf.yield %8 : i64
    }
    llvm.store %9, %at {alignment = 8 : i64} : i64, !llvm.ptr
    llvm.return
  }
}
";
    assert_eq!(text.unwrap(), expected);
}

#[test]
fn operands_of_two_types_are_named_with_the_line() {
    let error = function(|b, _, n| {
        let x = b.float(1.0);
        b.addi(n, x);
    });
    let error = error.unwrap_err();
    assert_eq!(error.op, "arith.addi");
    assert_eq!(
        error.why,
        Mismatch::Different(LONG, Type::Scalar(Kind::F32))
    );
    assert!(error.place.file().ends_with("mlir/tests.rs"), "{error}");
}

#[test]
fn only_the_first_mistake_is_told() {
    let error = function(|b, _, n| {
        let x = b.arith(Arith::Sqrt, &[n]);
        b.addf(x, x);
    });
    assert_eq!(error.unwrap_err().why, Mismatch::NotFloat(LONG));
}

#[test]
fn a_loop_s_values_are_not_seen_after_it() {
    let error = function(|b, _, n| {
        let [zero, one] = [0, 1].map(|i| b.long(i));
        let mut counter = zero;
        b.repeat([zero, n, one], &[], |_, i, _| {
            counter = i;
            vec![]
        });
        b.addi(counter, one);
    });
    assert!(matches!(error.unwrap_err().why, Mismatch::Hidden(_)));
}

#[test]
fn an_outer_block_does_not_see_an_inner_one() {
    let error = function(|b, _, n| {
        let [zero, one] = [0, 1].map(|i| b.long(i));
        b.repeat([zero, n, one], &[], |b, i, _| {
            b.outside(0, |b| b.addi(i, one));
            vec![]
        });
    });
    assert!(matches!(error.unwrap_err().why, Mismatch::Hidden(_)));
}

#[test]
fn rounds_hand_on_what_they_got() {
    let error = function(|b, _, n| {
        let [zero, one] = [0, 1].map(|i| b.long(i));
        b.repeat([zero, n, one], &[zero], |b, _, _| vec![b.float(0.0)]);
    });
    let float = Type::Scalar(Kind::F32);
    assert_eq!(error.unwrap_err().why, Mismatch::Different(LONG, float));
    let error = function(|b, _, n| {
        let [zero, one] = [0, 1].map(|i| b.long(i));
        b.repeat([zero, n, one], &[zero], |_, _, _| vec![]);
    });
    let (wanted, given) = (1, 0);
    assert_eq!(error.unwrap_err().why, Mismatch::Count { wanted, given });
}

#[test]
fn conversions_go_the_way_that_they_say() {
    let [narrow, wide] = [Kind::I32, Kind::I64].map(Type::Scalar);
    assert!(Convert::Extui.check(narrow, Kind::I64).is_ok());
    assert!(Convert::Extui.check(wide, Kind::I32).is_err());
    assert!(Convert::Trunci.check(wide, Kind::I32).is_ok());
    assert!(Convert::Trunci.check(wide, Kind::F32).is_err());
    assert!(Convert::Bitcast.check(narrow, Kind::F32).is_ok());
    assert!(Convert::Bitcast.check(wide, Kind::F32).is_err());
    assert!(
        Convert::Extf
            .check(Type::Vector(8, Kind::BF16), Kind::F32)
            .is_ok()
    );
}

#[test]
fn a_vector_has_the_elements_that_are_asked_for() {
    let error = function(|b, _, n| {
        let pair = b.broadcast(n, Type::Vector(2, Kind::I64));
        b.extract(pair, 2);
    });
    assert_eq!(error.unwrap_err().op, "vector.extract");
}
