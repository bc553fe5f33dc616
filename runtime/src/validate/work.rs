//! Bounds the work of a launch, so that a step ends.
//!
//! Most kernels visit the elements of their operands and results a constant number of times, and a
//! pool's size limits these elements. Products and windows visit them more often, and a small file
//! can ask for years of work. The limit is far above the launches of the largest models, and far
//! below such work.

use artifact::{Attr, Kernel, Operand};
use ops::OpKind;

/// The largest number of multiplications or comparisons of one launch: eight hours at ten billion
/// per second. The logits of a batch of 16 sequences of 4,096 tokens, with a width of 8,192 and a
/// vocabulary of 128,256, take a quarter of it.
const MOST_WORK: u128 = 1 << 48;

/// Refuses a launch that would not end in reasonable time. Its kernel's check has accepted the
/// launch.
pub(super) fn check(kernel: &Kernel, ins: &[Operand], outs: &[Operand]) -> Result<(), String> {
    let work = work(kernel, ins, outs);
    if work > MOST_WORK {
        return Err(format!(
            "{}: one run takes some {work} operations; {MOST_WORK} at most",
            kernel.op
        ));
    }
    Ok(())
}

/// A pattern of several ops.
macro_rules! any_of {
    ($($kind:ident)*) => {
        $(OpKind::$kind)|*
    };
}

/// The approximate number of operations of a launch; 0 if it is proportional to the number of
/// elements, or if the launch does not have the operands of its op. The match lists every op, so
/// that a new op must say whether it visits elements many times.
fn work(kernel: &Kernel, ins: &[Operand], outs: &[Operand]) -> u128 {
    let (Some(out), Some(op)) = (outs.first(), OpKind::from_name(&kernel.op)) else {
        return 0;
    };
    match (op, ins) {
        (any_of!(Matmul MatmulSum), [x, ..]) | (OpKind::Addmm, [_, x, ..]) => {
            // The size that is summed over: the last, or, if transposed, the one before.
            let from_end = usize::from(flag(kernel, "ta"));
            let depth = x.shape.iter().rev().nth(from_end);
            times(elements(out), depth.copied().unwrap_or(1))
        }
        // Each row meets one matrix.
        (OpKind::GroupedMatmul, [x, ..]) => times(elements(out), size(x, 1)),
        (OpKind::GroupedOuter, [x, y, _]) => times(elements(x), size(y, 1)),
        (OpKind::Convolution, [_, w, ..]) => windows(out, w),
        (OpKind::ConvolutionBwd, [dy, _, w]) => times(windows(dy, w), 2),
        (OpKind::Sdpa, [q, k, v, ..]) => attention(q, k, v),
        (OpKind::SdpaBwd, [_, q, k, v, ..]) => times(attention(q, k, v), 3),
        (OpKind::SdpaRows, [q, k, v, ..]) => attention_rows(kernel, q, k, v),
        (OpKind::SdpaRowsBwd, [_, q, k, v, ..]) => times(attention_rows(kernel, q, k, v), 3),
        (OpKind::MaxPool2d, _) => {
            let taps = list(kernel, "kernel");
            taps.iter()
                .fold(elements(out), |work, &tap| times(work, tap.unsigned_abs()))
        }
        (
            any_of!(
                Matmul Addmm MatmulSum GroupedMatmul GroupedOuter Convolution ConvolutionBwd Sdpa
                SdpaBwd SdpaRows SdpaRowsBwd
            ),
            _,
        ) => 0,
        // These ops visit each element a constant number of times.
        (
            any_of!(
                Neg Abs Sign Exp Log Sqrt Rsqrt Reciprocal Tanh Sigmoid Sin Cos Atan Erf Relu Silu
                Gelu BitwiseNot LogicalNot Cast Clamp AddScalar MulScalar DivScalar RsubScalar
                PowScalar EqScalar NeScalar LtScalar LeScalar GtScalar GeScalar Add Sub Mul Div Pow
                Maximum Minimum BitwiseAnd BitwiseOr BitwiseXor Eq Ne Lt Le Gt Ge LogicalAnd
                LogicalOr Where TanhBwd SigmoidBwd SiluBwd GeluBwd ThresholdBwd Sum Mean Amax Amin
                Any Cumsum TopK Softmax LogSoftmax SoftmaxBwd LogSoftmaxBwd LayerNorm LayerNormBwd
                BatchNorm BatchNormBwd MaxPool2dBwd Embedding EmbeddingBwd NllLoss NllSum NllLossBwd
                Gather Scatter ScatterAdd ScatterValue Index IndexPut Reshape Detach Permute Expand
                Flip Slice SliceScatter Cat Pad Full Arange Rand Randn Dropout DropoutBwd
                RoundRandom DropoutKey RngNext SumSquares ClipScale Adamw AdamwSplit Adamw8bit Nf4
                Sgd SgdMomentum Fused Extern
            ),
            _,
        ) => 0,
    }
}

/// Each element of a convolution's result reads a filter.
fn windows(out: &Operand, w: &Operand) -> u128 {
    w.shape
        .iter()
        .skip(1)
        .fold(elements(out), |work, &d| times(work, d))
}

/// Each pair of a query and a key takes the width of keys plus the width of values.
fn attention(q: &Operand, k: &Operand, v: &Operand) -> u128 {
    let rows = [size(q, 0), size(q, 1), size(q, 2), size(k, 2)];
    let pairs = rows.iter().fold(1, |work, &d| times(work, d));
    times(pairs, size(q, 3).saturating_add(size(v, 3)))
}

/// The same with heads inside rows.
fn attention_rows(kernel: &Kernel, q: &Operand, k: &Operand, v: &Operand) -> u128 {
    let first = list(kernel, "first");
    let heads = list(kernel, "heads").first().copied().unwrap_or(1);
    let rows = |x: &Operand, i: usize| {
        let inside = first.get(i).is_none_or(|&first| first >= 0);
        size(x, if inside { 1 } else { 2 })
    };
    let sizes = [size(q, 0), heads.unsigned_abs(), rows(q, 0), rows(k, 1)];
    let pairs = sizes.iter().fold(1, |work, &d| times(work, d));
    times(pairs, size(q, 3).saturating_add(size(v, 3)))
}

/// A size of an operand; 1 if it has no such dimension.
fn size(x: &Operand, axis: usize) -> u64 {
    x.shape.get(axis).copied().unwrap_or(1)
}

fn elements(x: &Operand) -> u128 {
    x.shape.iter().fold(1, |n, &d| times(n, d))
}

fn times(work: u128, factor: u64) -> u128 {
    work.saturating_mul(u128::from(factor))
}

fn attr<'a>(kernel: &'a Kernel, key: &str) -> Option<&'a Attr> {
    let found = kernel.attrs.iter().find(|(name, _)| name == key);
    found.map(|(_, attr)| attr)
}

fn flag(kernel: &Kernel, key: &str) -> bool {
    matches!(attr(kernel, key), Some(Attr::Bool(true)))
}

fn list<'a>(kernel: &'a Kernel, key: &str) -> &'a [i64] {
    match attr(kernel, key) {
        Some(Attr::Ints(list)) => list,
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use artifact::{DType, Place};

    fn operand(shape: &[u64]) -> Operand {
        let place = Place { pool: 0, offset: 0 };
        let (dtype, shape) = (DType::F32, shape.to_vec());
        Operand {
            place,
            dtype,
            shape,
        }
    }

    #[test]
    fn products_and_windows_are_counted() {
        let count = |op: &str, attrs: &[(&str, Attr)], ins: &[&[u64]], out: &[u64]| {
            let kernel = Kernel {
                op: op.into(),
                attrs: attrs
                    .iter()
                    .map(|(k, v)| (k.to_string(), v.clone()))
                    .collect(),
                code: None,
            };
            let ins: Vec<Operand> = ins.iter().map(|shape| operand(shape)).collect();
            work(&kernel, &ins, &[operand(out)])
        };
        let t = [("ta", Attr::Bool(true))];
        assert_eq!(
            count("matmul", &[], &[&[2, 3, 5], &[5, 7]], &[2, 3, 7]),
            210
        );
        assert_eq!(count("matmul", &t, &[&[2, 5, 3], &[5, 7]], &[2, 3, 7]), 210);
        assert_eq!(count("addmm", &[], &[&[7], &[3, 5], &[5, 7]], &[3, 7]), 105);
        let (x, w, y) = (&[2, 3, 8, 8][..], &[4, 3, 3, 3][..], &[2, 4, 6, 6][..]);
        assert_eq!(count("convolution", &[], &[x, w], y), 2 * 4 * 36 * 27);
        assert_eq!(
            count("convolution_bwd", &[], &[y, x, w], x),
            2 * 2 * 4 * 36 * 27
        );
        let (q, k, v) = (&[2, 4, 5, 8][..], &[2, 2, 7, 8][..], &[2, 2, 7, 6][..]);
        assert_eq!(
            count("sdpa", &[], &[q, k, v], &[2, 4, 5, 6]),
            2 * 4 * 35 * 14
        );
        // q, k and v share rows of 8 heads; v's heads contain rows.
        let qk = &[2, 5, 8, 8][..];
        let form = |key, list: &[i64]| (key, Attr::Ints(list.to_vec()));
        let form = [form("first", &[0, 4, -1]), form("heads", &[4, 2])];
        assert_eq!(
            count("sdpa_rows", &form, &[qk, qk, &[2, 2, 5, 6]], &[2, 5, 4, 6]),
            2 * 4 * 25 * 14
        );
        let kernel = [("kernel", Attr::Ints(vec![3, 2]))];
        assert_eq!(count("max_pool2d", &kernel, &[x], &[2, 3, 4, 4]), 96 * 6);
        assert_eq!(count("relu", &[], &[x], x), 0);
        let vast = 1 << 30;
        assert!(count("matmul", &[], &[&[vast, vast], &[vast, 1]], &[vast, 1]) > MOST_WORK);
    }
}
