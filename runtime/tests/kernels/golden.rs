//! Compares every kernel with PyTorch's results: see ../data/gen_golden.py.

use artifact::{Attr, DType};
use lighterage_runtime::kernels::owned::{OwnedTensor, run_op, run_op_inplace};
use lighterage_runtime::kernels::{KERNELS, find};
use serde_json::Value;

use super::generate::SCRATCH_BYTES;

fn dtype(name: &str) -> Option<DType> {
    Some(match name {
        "bool" => DType::Bool,
        "u8" => DType::U8,
        "i8" => DType::I8,
        "i16" => DType::I16,
        "i32" => DType::I32,
        "i64" => DType::I64,
        "f16" => DType::F16,
        "bf16" => DType::BF16,
        "f32" => DType::F32,
        "f64" => DType::F64,
        _ => return None,
    })
}

fn base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut bytes = vec![];
    for group in text.trim_end_matches('=').as_bytes().chunks(4) {
        let digit = |c: &u8| DIGITS.iter().position(|d| d == c).unwrap();
        let word = group.iter().fold(0, |word, c| word << 6 | digit(c)) << (6 * (4 - group.len()));
        bytes.extend(&[(word >> 16) as u8, (word >> 8) as u8, word as u8][..group.len() - 1]);
    }
    bytes
}

fn tensor(value: &Value) -> OwnedTensor {
    let shape: Vec<usize> = value[1]
        .as_array()
        .unwrap()
        .iter()
        .map(|d| d.as_u64().unwrap() as usize)
        .collect();
    OwnedTensor::from_bytes(
        dtype(value[0].as_str().unwrap()).unwrap(),
        &shape,
        &base64(value[2].as_str().unwrap()),
    )
}

fn attr(value: &Value) -> Attr {
    match value {
        Value::Bool(b) => Attr::Bool(*b),
        Value::Number(n) => n
            .as_i64()
            .map_or_else(|| Attr::Float(n.as_f64().unwrap()), Attr::Int),
        Value::Array(list) => Attr::Ints(list.iter().map(|i| i.as_i64().unwrap()).collect()),
        Value::String(name) => {
            dtype(name).map_or_else(|| Attr::Float(name.parse().unwrap()), Attr::Type)
        }
        other => panic!("{other} is no attribute"),
    }
}

/// The largest difference from PyTorch's number, relative to 1 + its magnitude.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 2e-6,
        DType::F16 => 1.5e-3,
        DType::BF16 => 1.2e-2,
        _ => 0.0,
    }
}

fn assert_close(what: &str, ours: &OwnedTensor, theirs: &OwnedTensor) {
    let tolerance = tolerance(theirs.dtype());
    for (i, (a, b)) in ours.to_f64s().into_iter().zip(theirs.to_f64s()).enumerate() {
        let close =
            a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance * (1.0 + b.abs());
        assert!(close, "{what}: element {i} is {a:e}, PyTorch's {b:e}");
    }
}

/// The bits of the f32 numbers whose nearest bf16 is the first tensor and whose lower 16 bits are
/// the second: neighbouring numbers differ by 1.
fn joined(halves: &[OwnedTensor]) -> Vec<i64> {
    let (high, low) = (halves[0].bytes(), halves[1].to_i64s());
    let bits =
        |(high, low): (&[u8], i64)| (i64::from(u16::from_le_bytes([high[0], high[1]])) << 16) + low;
    high.chunks(2).zip(low).map(bits).collect()
}

#[test]
fn kernels_give_pytorchs_results() {
    let mut ops = std::collections::BTreeSet::new();
    for line in include_str!("../data/golden.json").lines() {
        let value: Value = serde_json::from_str(line).unwrap();
        let op = value["op"].as_str().unwrap();
        let attrs: Vec<(String, Attr)> = value["attrs"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(k, v)| (k.clone(), attr(v)))
            .collect();
        let of = |key: &str| -> Vec<OwnedTensor> {
            value[key].as_array().unwrap().iter().map(tensor).collect()
        };
        let (ins, outs) = (of("in"), of("out"));
        let ins: Vec<&OwnedTensor> = ins.iter().collect();
        let types: Vec<_> = outs
            .iter()
            .map(|t| (t.dtype(), t.shape().to_vec()))
            .collect();
        let what = format!(
            "{}: {op} {attrs:?} of {:?}",
            value["name"],
            ins.iter()
                .map(|t| (t.dtype(), t.shape()))
                .collect::<Vec<_>>()
        );
        let ours = run_op(op, &attrs, &ins, &types, SCRATCH_BYTES)
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        let compared = ours.iter().zip(&outs);
        // Two halves are one number, which may differ from PyTorch's by one unit in the last place.
        // The lower half alone would have to be exact.
        let skip = if op == "adamw_split" {
            for (ours, theirs) in joined(&ours).iter().zip(joined(&outs)) {
                assert!(
                    (ours - theirs).abs() <= 1,
                    "{what}: {ours:x}, not {theirs:x}"
                );
            }
            2
        } else {
            0
        };
        for (ours, theirs) in compared.skip(skip) {
            assert_close(&what, ours, theirs);
        }
        // In place the bits are the same, for each pair alone and for all compatible pairs.
        let pairs = find(op).unwrap().inplace.iter().copied();
        let fits = |&(i, j): &(usize, usize)| {
            i < ins.len()
                && j < outs.len()
                && ins[i].dtype() == outs[j].dtype()
                && ins[i].shape() == outs[j].shape()
        };
        let pairs: Vec<(usize, usize)> = pairs.filter(fits).collect();
        let mut sets: Vec<Vec<(usize, usize)>> = pairs.iter().map(|&pair| vec![pair]).collect();
        if pairs
            .iter()
            .all(|a| pairs.iter().all(|b| a == b || a.1 != b.1))
        {
            sets.push(pairs);
        }
        for set in sets {
            let inplace = run_op_inplace(op, &attrs, &ins, &types, SCRATCH_BYTES, &set).unwrap();
            for (a, b) in inplace.iter().zip(&ours) {
                assert_eq!(a.bytes(), b.bytes(), "{what}, in place {set:?}");
            }
        }
        ops.insert(op.to_string());
    }
    // Random numbers are not PyTorch's.
    let random = ["rand", "randn", "dropout", "round_random"];
    for kernel in KERNELS {
        assert!(
            random.contains(&kernel.name) || ops.contains(kernel.name),
            "golden.json has no case for {}: add one to runtime/tests/data/gen_golden.py, run it",
            kernel.name
        );
    }
}
