//! Compares kernels with the reference on random runs, also in place; and tests of random numbers.

use super::generate::{Case, Rng, SCRATCH_BYTES, attention, case, case_of};
use super::reference;
use artifact::{Attr, DType};
use lighterage_runtime::kernels::owned::{OwnedTensor, run_op, run_op_inplace};
use lighterage_runtime::kernels::{KERNELS, KernelError, find};
use proptest::prelude::*;

pub(crate) fn run(case: &Case) -> Result<Vec<OwnedTensor>, KernelError> {
    let ins: Vec<&OwnedTensor> = case.ins.iter().collect();
    run_op(case.op, &case.attrs, &ins, &case.outs, SCRATCH_BYTES)
}

/// The largest difference from the reference, relative to 1 + the result's largest number.
fn tolerance(case: &Case, dtype: DType) -> f64 {
    match dtype {
        // The attention's logsumexp is f32 even for f64.
        DType::F64 if matches!(case.op, "sdpa_bwd" | "sdpa_rows_bwd") => 1e-6,
        // Here the reference uses difference quotients.
        DType::F64 if matches!(case.op, "gelu_bwd" | "silu_bwd") => 1e-9,
        DType::F64 => 1e-12,
        DType::F32 => 4e-6,
        DType::F16 => 2e-3,
        DType::BF16 => 1.6e-2,
        _ => 0.0,
    }
}

fn compare(case: &Case) {
    let results = run(case).unwrap_or_else(|e| panic!("{e}: {case:?}"));
    let Some(expected) = reference::results(case) else {
        return;
    };
    assert_eq!(results.len(), expected.len(), "{}", case.op);
    for (j, (result, expected)) in results.iter().zip(expected).enumerate() {
        let is_exact = match case.op {
            "adamw_split" => j == 1,
            "adamw_8bit" => j == 1 || j == 2,
            _ => false,
        };
        if is_exact {
            continue;
        }
        // Rounded, or wrapped, to the element type.
        let expected = OwnedTensor::from_f64s(result.dtype(), result.shape(), &expected).to_f64s();
        let largest = expected
            .iter()
            .filter(|x| x.is_finite())
            .fold(0.0, |a: f64, b| a.max(b.abs()));
        let tolerance = tolerance(case, result.dtype()) * (1.0 + largest);
        for (i, (a, b)) in result.to_f64s().into_iter().zip(expected).enumerate() {
            let close = a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance;
            assert!(
                close,
                "{}: result {j} has {a:e} at {i}, should have {b:e}: {case:?}",
                case.op
            );
        }
    }
}

/// The pairs that this run may use.
fn pairs(case: &Case) -> Vec<(usize, usize)> {
    let fits = |&(i, j): &(usize, usize)| {
        let (Some(x), Some(y)) = (case.ins.get(i), case.outs.get(j)) else {
            return false;
        };
        x.dtype() == y.0 && x.shape() == y.1
    };
    find(case.op)
        .unwrap()
        .inplace
        .iter()
        .copied()
        .filter(fits)
        .collect()
}

#[test]
fn every_kernel_equals_the_reference() {
    for kernel in KERNELS {
        for seed in 0..60 {
            compare(&case_of(kernel.name, &mut Rng(seed)));
        }
    }
}

/// Queries and keys of several blocks and tiles, around their borders. The random runs are too
/// small for that.
#[test]
fn attention_in_blocks_equals_the_reference() {
    for (i, sizes) in [
        [1, 1, 47, 50, 3, 65],
        [2, 1, 49, 48, 19, 5],
        [1, 2, 97, 130, 9, 17],
        [1, 1, 145, 20, 64, 3],
        [1, 1, 515, 530, 2, 2],
        [1, 1, 40, 1030, 3, 2],
    ]
    .into_iter()
    .enumerate()
    {
        for seed in 0..6 {
            for op in ["sdpa", "sdpa_bwd", "sdpa_rows", "sdpa_rows_bwd"] {
                compare(&attention(op, &mut Rng(100 * i as u64 + seed), sizes));
            }
        }
    }
}

/// Heads `first..first + n` of rows, as heads that contain rows; and for `n` heads of rows in their
/// own tensor, the same in the other direction.
fn exchanged(x: &OwnedTensor, first: usize, n: usize) -> OwnedTensor {
    let &[b, s, all, d] = x.shape() else {
        panic!("heads should be in rows");
    };
    let (bytes, from) = (x.dtype().bytes() as usize * d, x.bytes());
    let mut to = vec![];
    for i in 0..b * n * s {
        let (b, h, row) = (i / (n * s), i / s % n, i % s);
        let at = ((b * s + row) * all + first + h) * bytes;
        to.extend_from_slice(&from[at..at + bytes]);
    }
    OwnedTensor::from_bytes(x.dtype(), &[b, n, s, d], &to)
}

/// Attention with heads inside rows gives the bits of attention whose heads contain rows.
#[test]
fn heads_inside_rows_change_no_bit_of_attention() {
    let sizes = [
        [2, 2, 97, 130, 9, 17],
        [1, 2, 50, 50, 64, 64],
        [1, 1, 530, 1030, 5, 3],
        [1, 1, 40, 20, 3, 2],
    ];
    for seed in 0..48u64 {
        let rows = attention("sdpa_rows_bwd", &mut Rng(seed), sizes[seed as usize % 4]);
        let (first, heads) = (rows.list("first"), rows.list("heads"));
        let parts = [heads[0], heads[1], heads[1]].map(|n| n as usize);
        let mut ins = rows.ins.clone();
        for i in [0, 4] {
            ins[i] = exchanged(&rows.ins[i], 0, parts[0]);
        }
        for i in 0..3 {
            if first[i] >= 0 {
                ins[1 + i] = exchanged(&rows.ins[1 + i], first[i] as usize, parts[i]);
            }
        }
        let mut attrs = rows.attrs.clone();
        attrs.retain(|(key, _)| key == "causal" || key == "scale");
        let outs = [1, 2, 3].map(|i| (ins[i].dtype(), ins[i].shape().to_vec()));
        let backward = Case {
            op: "sdpa_bwd",
            attrs: attrs.clone(),
            ins: ins.clone(),
            outs: outs.to_vec(),
        };
        let (found, expected) = (run(&rows).unwrap(), run(&backward).unwrap());
        for i in 0..3 {
            let found = match (found.len(), first[i]) {
                (1, first) => exchanged(&found[0], first as usize, parts[i]),
                (_, -1) => found[i].clone(),
                _ => exchanged(&found[i], 0, parts[i]),
            };
            assert!(found.bytes() == expected[i].bytes(), "seed {seed}: {i}");
        }
        // The results of the forward are operands of the backward.
        let mask = ins.split_off(6);
        let forward = Case {
            op: "sdpa",
            attrs,
            outs: [4, 5]
                .map(|i| (ins[i].dtype(), ins[i].shape().to_vec()))
                .to_vec(),
            ins: ins[1..4].iter().chain(&mask).cloned().collect(),
        };
        let results = run(&forward).unwrap();
        for (i, result) in results.iter().enumerate() {
            assert!(result.bytes() == ins[4 + i].bytes(), "seed {seed}: {i}");
        }
    }
}

proptest! {
    #[test]
    fn kernels_equal_the_reference(seed: u64) {
        compare(&case(&mut Rng(seed)));
    }
}

/// An operand may lie on its result: the bits are the same.
#[test]
fn in_place_changes_nothing() {
    for kernel in KERNELS.iter().filter(|kernel| !kernel.inplace.is_empty()) {
        let mut tried = 0;
        for seed in 0..40 {
            let case = case_of(kernel.name, &mut Rng(seed));
            let expected = run(&case).unwrap();
            let ins: Vec<&OwnedTensor> = case.ins.iter().collect();
            let pairs = pairs(&case);
            let mut sets: Vec<Vec<(usize, usize)>> = pairs.iter().map(|&pair| vec![pair]).collect();
            if pairs
                .iter()
                .all(|a| pairs.iter().all(|b| a == b || a.1 != b.1))
            {
                sets.push(pairs);
            }
            for set in sets {
                let results =
                    run_op_inplace(case.op, &case.attrs, &ins, &case.outs, SCRATCH_BYTES, &set)
                        .unwrap();
                for (a, b) in results.iter().zip(&expected) {
                    assert_eq!(
                        a.bytes(),
                        b.bytes(),
                        "{} in place {set:?}: {case:?}",
                        case.op
                    );
                }
                tried += 1;
            }
        }
        assert!(tried != 0, "{} was never in place", kernel.name);
    }
}

/// One value may be both operands, and the result may lie on it.
#[test]
fn both_operands_may_be_the_result() {
    let x = OwnedTensor::from_f64s(DType::F32, &[3], &[1.0, -2.0, 0.5]);
    let types = [(DType::F32, vec![3])];
    for op in ["add", "mul", "tanh_bwd", "softmax_bwd"] {
        let attrs = if op == "softmax_bwd" {
            vec![("dim".to_string(), Attr::Int(0))]
        } else {
            vec![]
        };
        let apart = run_op(op, &attrs, &[&x, &x], &types, 0).unwrap();
        let inplace = run_op_inplace(op, &attrs, &[&x, &x], &types, 0, &[(0, 0), (1, 0)]).unwrap();
        assert_eq!(apart[0].bytes(), inplace[0].bytes(), "{op}");
    }
}

/// The same operands give the same bits.
#[test]
fn runs_repeat() {
    for seed in 0..400 {
        let case = case(&mut Rng(seed));
        let (a, b) = (run(&case).unwrap(), run(&case).unwrap());
        assert!(
            a.iter().zip(&b).all(|(a, b)| a.bytes() == b.bytes()),
            "{case:?}"
        );
    }
}

#[test]
fn an_index_out_of_range_is_reported() {
    let w = OwnedTensor::zeros(DType::F32, &[257, 4]);
    let index = OwnedTensor::from_i64s(DType::I64, &[2], &[0, 300]);
    let error = run_op(
        "embedding",
        &[],
        &[&w, &index],
        &[(DType::F32, vec![2, 4])],
        0,
    )
    .unwrap_err();
    assert_eq!(error.to_string(), "embedding: index 300 is not in 0..257");
    let error = run_op("index", &[], &[&w, &index], &[(DType::F32, vec![2, 4])], 0).unwrap_err();
    assert_eq!(error.to_string(), "index: index 300 is not in -257..257");
}

#[test]
fn a_missing_kernel_is_named() {
    let x = OwnedTensor::zeros(DType::I64, &[2]);
    let error = run_op("erf", &[], &[&x], &[(DType::I64, vec![2])], 0).unwrap_err();
    assert_eq!(error.to_string(), "erf: no kernel for I64");
}

fn random(op: &str, dtype: DType, shape: &[usize], stream: i64, rng: [i64; 2]) -> Vec<f64> {
    let list = shape.iter().map(|&d| d as i64).collect();
    let attrs = [
        ("dtype", Attr::Type(dtype)),
        ("shape", Attr::Ints(list)),
        ("stream", Attr::Int(stream)),
    ];
    let attrs = attrs.map(|(k, a)| (k.to_string(), a));
    let rng = OwnedTensor::from_i64s(DType::I64, &[2], &rng);
    run_op(op, &attrs, &[&rng], &[(dtype, shape.to_vec())], 0).unwrap()[0].to_f64s()
}

/// An element's number depends on its index, not on how many elements there are.
#[test]
fn random_numbers_belong_to_their_index() {
    for op in ["rand", "randn"] {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            let long = random(op, dtype, &[1000], 3, [1, 2]);
            assert_eq!(random(op, dtype, &[7, 71], 3, [1, 2]), long[..497]);
            for other in [(4, [1, 2]), (3, [2, 2]), (3, [1, 3])] {
                assert_ne!(random(op, dtype, &[1000], other.0, other.1), long);
            }
        }
    }
}

#[test]
fn random_numbers_are_distributed_as_they_should_be() {
    let n = 100_000;
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let x = random("rand", dtype, &[n], 0, [5, 1]);
        assert!(x.iter().all(|x| (0.0..1.0).contains(x)));
        let mean =
            |f: &dyn Fn(f64) -> f64, x: &[f64]| x.iter().map(|&x| f(x)).sum::<f64>() / n as f64;
        assert!((mean(&|x| x, &x) - 0.5).abs() < 5e-3);
        assert!((mean(&|x| (x - 0.5).powi(2), &x) - 1.0 / 12.0).abs() < 2e-3);
        let x = random("randn", dtype, &[n], 0, [5, 1]);
        let moments = [1, 2, 3, 4].map(|k| mean(&|x| x.powi(k), &x));
        let expected = [0.0, 1.0, 0.0, 3.0];
        assert!(
            moments
                .iter()
                .zip(expected)
                .all(|(m, e)| (m - e).abs() < 0.1),
            "{moments:?}"
        );
    }
}

/// A number becomes one of its neighbours in bf16, and the mean of many is the number.
#[test]
fn random_rounding_has_no_bias() {
    let n = 1 << 16;
    let rng = OwnedTensor::from_i64s(DType::I64, &[2], &[9, 9]);
    let attrs = [("stream".to_string(), Attr::Int(1))];
    let round = |x: f64| {
        let x = OwnedTensor::from_f64s(DType::F32, &[n], &vec![x; n]);
        let types = [(DType::BF16, vec![n])];
        let results = run_op("round_random", &attrs, &[&x, &rng], &types, 0).unwrap();
        results[0].to_f64s()
    };
    // 2^-7 is the distance of bf16's numbers from 1 to 2.
    let step = 1.0 / 128.0;
    for share in [0.01, 0.3, 0.5, 0.9] {
        for sign in [1.0, -1.0] {
            let x = sign * (1.5 + share * step);
            let found = round(x);
            let near = |y: &f64| *y == sign * 1.5 || *y == sign * (1.5 + step);
            assert!(found.iter().all(near), "{x}");
            let mean = found.iter().sum::<f64>() / n as f64;
            // Five deviations of the mean.
            assert!(
                (mean - x).abs() < 5.0 * step / 2.0 / (n as f64).sqrt(),
                "{x}: {mean}"
            );
        }
    }
    for exact in [0.0, 1.5, -2.0, f64::INFINITY, f64::NEG_INFINITY] {
        assert!(round(exact).iter().all(|&y| y == exact), "{exact}");
    }
    assert!(round(f64::NAN).iter().all(|y| y.is_nan()));
}

#[test]
fn dropout_keeps_and_scales() {
    let n = 20_000;
    let x = OwnedTensor::from_f64s(DType::F32, &[n], &vec![1.0; n]);
    let rng = OwnedTensor::from_i64s(DType::I64, &[2], &[9, 9]);
    for p in [0.0, 0.25, 1.0] {
        let attrs = [
            ("p".to_string(), Attr::Float(p)),
            ("stream".to_string(), Attr::Int(0)),
        ];
        let types = [(DType::F32, vec![n]), (DType::Bool, vec![n])];
        let results = run_op("dropout", &attrs, &[&x, &rng], &types, 0).unwrap();
        let (y, mask) = (results[0].to_f64s(), results[1].to_f64s());
        let scale = if p == 1.0 { 0.0 } else { 1.0 / (1.0 - p) };
        assert!(
            y.iter()
                .zip(&mask)
                .all(|(y, m)| (y - m * scale).abs() < 1e-6)
        );
        assert!((mask.iter().sum::<f64>() / n as f64 - (1.0 - p)).abs() < 0.01);
    }
}
