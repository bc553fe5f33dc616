//! Signatures that no compiler would write: `check` refuses them, or the kernel runs without
//! panicking.

use super::generate::{Rng, SCRATCH_BYTES, case};
use super::random::run;
use artifact::{Attr, DType, Operand, Place};
use lighterage_runtime::kernels::owned::OwnedTensor;
use lighterage_runtime::kernels::{Signature, find};
use proptest::prelude::*;

/// Numbers at which arithmetic goes wrong.
const EDGES: [i64; 13] = [
    i64::MIN,
    -(1 << 50),
    -3,
    -1,
    0,
    1,
    2,
    3,
    7,
    1 << 28,
    1 << 32,
    1 << 50,
    i64::MAX,
];

fn mutate(attr: &mut Attr, rng: &mut Rng) {
    match attr {
        Attr::Int(i) if rng.flag() => *i = rng.pick(&EDGES),
        Attr::Float(x) if rng.flag() => *x = rng.pick(&[f64::NAN, f64::INFINITY, -1.0, 0.0, 1e300]),
        Attr::Ints(list) if !list.is_empty() && rng.below(3) != 0 => {
            let i = rng.below(list.len());
            list[i] = if rng.flag() {
                rng.pick(&EDGES)
            } else {
                list[i].wrapping_add(rng.below(3) as i64 - 1)
            };
        }
        Attr::Ints(list) => match rng.flag() {
            true => list.push(rng.pick(&EDGES)),
            false => drop(list.pop()),
        },
        Attr::Bool(b) => *b = !*b,
        Attr::Type(dtype) => *dtype = rng.pick(&DType::ALL),
        other => {
            *other = rng.pick(&[
                Attr::Int(1),
                Attr::Float(0.5),
                Attr::Bool(true),
                Attr::Ints(vec![]),
            ])
        }
    }
}

fn mutate_shape(shape: &mut Vec<usize>, rng: &mut Rng) {
    match rng.below(4) {
        0 => shape.push(1 + rng.below(2)),
        1 => drop(shape.pop()),
        _ if shape.is_empty() => shape.push(3),
        _ => {
            let d = rng.below(shape.len());
            shape[d] = rng.pick(&[0, 1, 2, 3, shape[d] + 1]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// Small hostile runs are refused or run, on any data.
    #[test]
    fn checked_kernels_do_not_panic(seed: u64) {
        let rng = &mut Rng(seed);
        let mut case = case(rng);
        for _ in 0..1 + rng.below(2) {
            match rng.below(6) {
                0 | 1 if !case.attrs.is_empty() => {
                    let i = rng.below(case.attrs.len());
                    mutate(&mut case.attrs[i].1, rng);
                }
                2 if !case.ins.is_empty() => {
                    let i = rng.below(case.ins.len());
                    let mut shape = case.ins[i].shape().to_vec();
                    mutate_shape(&mut shape, rng);
                    let dtype = case.ins[i].dtype();
                    case.ins[i] = rng.tensor(dtype, &shape);
                }
                3 => {
                    let j = rng.below(case.outs.len());
                    mutate_shape(&mut case.outs[j].1, rng);
                }
                4 => {
                    // One element type is replaced everywhere, so that some signatures are
                    // accepted.
                    let (from, to) = (case.outs[0].0, rng.pick(&DType::ALL));
                    case.outs.iter_mut().filter(|o| o.0 == from).for_each(|o| o.0 = to);
                    for x in case.ins.iter_mut().filter(|x| x.dtype() == from) {
                        *x = rng.tensor(to, x.shape());
                    }
                }
                5 if rng.flag() && !case.ins.is_empty() => drop(case.ins.pop()),
                _ => {
                    // Random data: indices are out of range, numbers are not finite.
                    for x in &mut case.ins {
                        let drawn = |_: &u8| rng.pick(&[0, 1, 0x7f, 0x80, 0xff]);
                        let bytes: Vec<u8> = x.bytes().iter().map(drawn).collect();
                        *x = OwnedTensor::from_bytes(x.dtype(), x.shape(), &bytes);
                    }
                }
            }
        }
        let _ = run(&case);
    }

    /// Sizes of any magnitude are refused or accepted; nothing is run.
    #[test]
    fn checks_do_not_overflow(seed: u64) {
        let rng = &mut Rng(seed);
        let mut case = case(rng);
        let ins = case.ins.iter().map(|x| operand(x.dtype(), x.shape()));
        let mut ins: Vec<Operand> = ins.collect();
        let outs = case.outs.iter().map(|(dtype, shape)| operand(*dtype, shape));
        let mut outs: Vec<Operand> = outs.collect();
        for _ in 0..1 + rng.below(6) {
            let all = ins.len() + outs.len();
            let k = rng.below(all);
            let n_ins = ins.len();
            let shape = &mut if k < n_ins { &mut ins[k] } else { &mut outs[k - n_ins] }.shape;
            if !shape.is_empty() {
                let d = rng.below(shape.len());
                shape[d] = rng.pick(&[0, 1, 1 << 20, 1 << 33, 1 << 49, 1 << 50, u64::MAX]);
            }
            if !case.attrs.is_empty() {
                let i = rng.below(case.attrs.len());
                mutate(&mut case.attrs[i].1, rng);
            }
        }
        let signature = Signature {
            attrs: &case.attrs,
            ins: &ins,
            outs: &outs,
            scratch: SCRATCH_BYTES,
        };
        let _ = find(case.op).unwrap().check(&signature);
    }
}

fn operand(dtype: DType, shape: &[usize]) -> Operand {
    let shape = shape.iter().map(|&d| d as u64).collect();
    Operand {
        place: Place { pool: 0, offset: 0 },
        dtype,
        shape,
    }
}

/// Too little scratch is refused.
#[test]
fn scratch_is_checked() {
    for seed in 0..2000 {
        let case = case(&mut Rng(seed));
        let ins: Vec<Operand> = case
            .ins
            .iter()
            .map(|x| operand(x.dtype(), x.shape()))
            .collect();
        let outs: Vec<Operand> = case
            .outs
            .iter()
            .map(|(dtype, shape)| operand(*dtype, shape))
            .collect();
        let kernel = find(case.op).unwrap();
        let with = |scratch| Signature {
            attrs: &case.attrs,
            ins: &ins,
            outs: &outs,
            scratch,
        };
        let needs = kernel.scratch_bytes(&with(0));
        assert!(kernel.check(&with(needs)).is_ok());
        assert!(needs == 0 || kernel.check(&with(needs - 1)).is_err());
    }
}
