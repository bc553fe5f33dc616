//! Ops with kernels written for GPUs, with operands: odd sizes, tensors without elements, up to
//! four dimensions, every width of an element. The runtime's plain kernels give the expected
//! results.

use crate::gpu::{Case, Wanted, case, ints, op, ptx, results, ty, types};
use crate::numbers::{Close, Numbers, Random, shape_of, tensor};
use codegen::kernels::{Generated, Target};
use ir::op::{Attr, Op};
use ir::{DType, TensorType};
use runtime::kernels::owned::OwnedTensor;

use DType::{BF16, Bool, F16, F32, F64, I8, I16, I32, I64, U8};

/// Exactly the same.
const SAME: Close = Close::Ulps(0.0);

/// Exactly the same for finite sums. The cases need a processor with fused multiply-adds.
const PRODUCT: Close = Close::OfLargest(0.0);

/// Collects ops with their operands.
struct Wishes {
    all: Vec<Wanted>,
    random: Random,
}

type Attrs<'a> = &'a [(&'static str, Attr)];

impl Wishes {
    /// An op on random tensors.
    fn on(&mut self, name: &str, attrs: Attrs<'_>, types: &[TensorType], close: Close) {
        let numbers = if close == SAME {
            Numbers::Wild
        } else {
            Numbers::Small
        };
        let ins = types
            .iter()
            .map(|ty| self.tensor(ty, numbers))
            .collect::<Vec<_>>();
        self.of(name, attrs, ins, close);
    }

    /// An op on given tensors.
    fn of(&mut self, name: &str, attrs: Attrs<'_>, ins: Ins, close: Close) {
        let op = op(name, attrs);
        self.all.push(Wanted { op, ins, close });
    }

    fn tensor(&mut self, ty: &TensorType, numbers: Numbers) -> (TensorType, OwnedTensor) {
        (ty.clone(), tensor(ty, numbers, &mut self.random))
    }

    fn wild(&mut self, dtype: DType, shape: &[u64]) -> (TensorType, OwnedTensor) {
        self.tensor(&ty(dtype, shape), Numbers::Wild)
    }

    fn small(&mut self, dtype: DType, shape: &[u64]) -> (TensorType, OwnedTensor) {
        self.tensor(&ty(dtype, shape), Numbers::Small)
    }

    fn of_numbers(
        &self,
        dtype: DType,
        shape: &[u64],
        numbers: &[f64],
    ) -> (TensorType, OwnedTensor) {
        let ty = ty(dtype, shape);
        let tensor = OwnedTensor::from_f64s(codegen::dtype(dtype), &shape_of(&ty), numbers);
        (ty, tensor)
    }

    /// Indices in `from..to`.
    fn indices(
        &mut self,
        dtype: DType,
        shape: &[u64],
        [from, to]: [i64; 2],
    ) -> (TensorType, OwnedTensor) {
        let ty = ty(dtype, shape);
        let mut index = || from + (self.random.next() % (to - from) as u64) as i64;
        let ints: Vec<i64> = (0..ty.numel()).map(|_| index()).collect();
        let tensor = OwnedTensor::from_i64s(codegen::dtype(dtype), &shape_of(&ty), &ints);
        (ty, tensor)
    }
}

type Ins = Vec<(TensorType, OwnedTensor)>;

/// Every case.
pub(crate) fn cases(target: &Target) -> Vec<Case> {
    let mut wishes = Wishes {
        all: vec![],
        random: Random(11),
    };
    moves(&mut wishes);
    tables(&mut wishes);
    losses(&mut wishes);
    random(&mut wishes);
    functions(&mut wishes);
    lines(&mut wishes);
    blocks(&mut wishes);
    reductions(&mut wishes);
    norms(&mut wishes);
    windows(&mut wishes);
    products(&mut wishes);
    attention(&mut wishes);
    attention_rows(&mut wishes);
    let mut cases = made(target, &wishes.all, false);
    wishes.all.clear();
    rounded(&mut wishes);
    cases.extend(made(target, &wishes.all, true));
    cases
}

/// The cases of ops; with `tf32`, factors of f32 are rounded.
fn made(target: &Target, all: &[Wanted], tf32: bool) -> Vec<Case> {
    let generate = |wanted: &Wanted| {
        codegen::kernel_as(&wanted.op, &types(wanted), target, scratch(wanted), tf32)
            .unwrap_or_else(|e| panic!("{e}: {:?}", types(wanted)))
    };
    let generated: Vec<Generated> = all.iter().map(generate).collect();
    let texts = ptx(&generated, target);
    let mut cases = vec![];
    for ((wanted, generated), ptx) in all.iter().zip(&generated).zip(texts) {
        assert_eq!(tf32, ptx.contains(".tf32"), "{:?}", wanted.op);
        let outs = results(&wanted.op, &types(wanted));
        let factors = tf32.then(|| wanted.op.name() == "addmm").map(usize::from);
        let ins: Vec<OwnedTensor> = (0..wanted.ins.len())
            .map(|i| match factors {
                Some(first) if [first, first + 1].contains(&i) => nearest_tf32(&wanted.ins[i]),
                _ => wanted.ins[i].1.clone(),
            })
            .collect();
        let ins: Vec<&OwnedTensor> = ins.iter().collect();
        let first = wanted.ins.first().map(|(ty, _)| ty.dtype());
        let expected = match (wanted.op.name(), first) {
            ("matmul" | "addmm" | "matmul_sum", Some(BF16)) => {
                vec![of_bf16(&wanted.op, &ins, &outs[0])]
            }
            _ => crate::code::plain(&wanted.op, &ins, &outs)
                .unwrap_or_else(|e| panic!("{e}: {:?}", types(wanted))),
        };
        cases.push(case(wanted, generated, ptx, &outs, &expected));
    }
    cases
}

/// A product of bf16: that of f32, rounded. A processor may add two products of bf16 at once; the
/// kernels for GPUs that are not for tensor cores add one after the other.
fn of_bf16(product: &Op, ins: &[&OwnedTensor], out: &TensorType) -> OwnedTensor {
    let plain = |op: &Op, ins: &[&OwnedTensor], ty| {
        let found = crate::code::plain(op, ins, &[ty]);
        found.expect("the kernel should take it").remove(0)
    };
    let cast = |x: &OwnedTensor, dtype| {
        let shape: Vec<u64> = x.shape().iter().map(|&n| n as u64).collect();
        plain(
            &op("cast", &[("dtype", Attr::Type(dtype))]),
            &[x],
            ty(dtype, &shape),
        )
    };
    let mut wide: Vec<OwnedTensor> = ins.iter().map(|x| cast(x, F32)).collect();
    if product.name() == "matmul_sum" {
        // What is added comes last; in `addmm` it comes first.
        wide.rotate_right(ins.len() - 2);
    }
    let of_f32 = Op::new(["matmul", "addmm"][ins.len() - 2], product.attrs());
    let of_f32 = of_f32.expect("they should have the same attributes");
    let wide: Vec<&OwnedTensor> = wide.iter().collect();
    cast(&plain(&of_f32, &wide, ty(F32, out.shape())), out.dtype())
}

/// Numbers of f32 rounded to 11 bits, ties away from zero.
fn nearest_tf32((ty, x): &(TensorType, OwnedTensor)) -> OwnedTensor {
    let round = |x: &f64| f64::from(f32::from_bits(((*x as f32).to_bits() + 0x1000) & !0x1fff));
    let rounded: Vec<f64> = x.to_f64s().iter().map(round).collect();
    OwnedTensor::from_f64s(codegen::dtype(ty.dtype()), &shape_of(ty), &rounded)
}

/// Products whose factors are rounded to TF32: any sizes, several tiles and rounds, all addends.
fn rounded(w: &mut Wishes) {
    // The interpreter rounds the sum of 8 products once.
    let close = Close::OfLargest(32.0);
    for [m, k, n] in [[136, 72, 200], [70, 19, 67], [3, 5, 2]] {
        for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
            let flags = [("ta", Attr::Bool(ta)), ("tb", Attr::Bool(tb))];
            let x = ty(F32, &if ta { [k, m] } else { [m, k] });
            let y = ty(F32, &if tb { [n, k] } else { [k, n] });
            w.on("matmul", &flags, &[x.clone(), y.clone()], close);
            let bias = ty(F32, &if ta { vec![m, 1] } else { vec![n] });
            w.on("addmm", &flags, &[bias, x, y], close);
        }
    }
    let flags = [("ta", Attr::Bool(true)), ("tb", Attr::Bool(false))];
    let batch = [ty(F32, &[3, 33, 5]), ty(F32, &[3, 33, 12])];
    w.on("matmul", &flags, &batch, close);
    let added = [&[ty(F32, &[3, 5, 12])], &batch[..]].concat();
    w.on("addmm", &flags, &added, close);
    grouped(w, (F32, [75, 72, 136]), ENDS[0].1, close);
    for (i, (rows, ends)) in ENDS.into_iter().enumerate() {
        // Lines that are multiples of 16 bytes, others, and lines of one number.
        let [m, n] = [[24, 12], [19, 11], [1, 40]][i % 3];
        grouped(w, (F32, [rows, m, n]), ends, close);
    }
}

/// The scratch in a plan for it.
fn scratch(wanted: &Wanted) -> u64 {
    let types = types(wanted);
    let outs = results(&wanted.op, &types);
    let types: Vec<&TensorType> = types.iter().collect();
    wanted.op.work(&types, &outs).scratch.gpu
}

fn moves(w: &mut Wishes) {
    let dims = |dims: &[i64]| [("dims", ints(dims))];
    for dtype in [F32, BF16, U8, I64] {
        w.on("permute", &dims(&[2, 0, 1]), &[ty(dtype, &[3, 5, 7])], SAME);
    }
    w.on(
        "permute",
        &dims(&[0, 2, 1, 3]),
        &[ty(F32, &[2, 6, 3, 16])],
        SAME,
    );
    w.on(
        "permute",
        &dims(&[0, 2, 1, 3]),
        &[ty(BF16, &[3, 5, 2, 12])],
        SAME,
    );
    w.on("permute", &dims(&[1, 0]), &[ty(F32, &[37, 23])], SAME);
    w.on("permute", &dims(&[]), &[ty(F32, &[])], SAME);
    w.on("permute", &dims(&[1, 0]), &[ty(F32, &[0, 3])], SAME);
    w.on("flip", &dims(&[0, 2]), &[ty(F32, &[3, 4, 8])], SAME);
    w.on("flip", &dims(&[0]), &[ty(BF16, &[5, 8])], SAME);
    slices(w);
    let along = |dim| [("dim", Attr::Int(dim))];
    for (dtype, last) in [(F32, 8), (BF16, 3), (Bool, 1)] {
        let x = |n| ty(dtype, &[2, n, last]);
        w.on("cat", &along(1), &[x(3), x(0), x(300), x(1)], SAME);
        w.on("cat", &along(2), &[x(5), x(5)], SAME);
    }
    let pad = |pad: &[i64], value| [("pad", ints(pad)), ("value", Attr::Float(value))];
    w.on("pad", &pad(&[1, 2, 0, 3], 1.5), &[ty(F32, &[3, 5])], SAME);
    w.on(
        "pad",
        &pad(&[-1, 2, -2, -2], 0.5),
        &[ty(BF16, &[3, 5])],
        SAME,
    );
    w.on("pad", &pad(&[2, 0], 0.5), &[ty(Bool, &[0])], SAME);
    let counted = |dtype, start: Attr, step: Attr| {
        [
            ("dtype", Attr::Type(dtype)),
            ("shape", ints(&[300])),
            ("start", start),
            ("step", step),
        ]
    };
    w.on(
        "arange",
        &counted(I64, Attr::Int(-3), Attr::Int(2)),
        &[],
        SAME,
    );
    w.on(
        "arange",
        &counted(U8, Attr::Int(3), Attr::Int(1)),
        &[],
        SAME,
    );
    w.on(
        "arange",
        &counted(F32, Attr::Float(0.1), Attr::Float(0.3)),
        &[],
        SAME,
    );
    w.on(
        "arange",
        &counted(BF16, Attr::Float(0.1), Attr::Float(0.3)),
        &[],
        SAME,
    );
}

fn slices(w: &mut Wishes) {
    let slice = |dim, start, end, step| {
        [
            ("dim", Attr::Int(dim)),
            ("end", Attr::Int(end)),
            ("start", Attr::Int(start)),
            ("step", Attr::Int(step)),
        ]
    };
    for dtype in [F32, BF16] {
        let x = ty(dtype, &[4, 9, 16]);
        w.on("slice", &slice(2, 8, 16, 1), std::slice::from_ref(&x), SAME);
        w.on("slice", &slice(1, 1, 8, 3), std::slice::from_ref(&x), SAME);
        w.on("slice", &slice(0, 2, 2, 1), std::slice::from_ref(&x), SAME);
        w.on(
            "slice",
            &slice(2, 3, 16, 100),
            std::slice::from_ref(&x),
            SAME,
        );
        let part = ty(dtype, &[4, 3, 16]);
        w.on(
            "slice_scatter",
            &slice(1, 1, 8, 3),
            &[x.clone(), part],
            SAME,
        );
        let part = ty(dtype, &[4, 9, 7]);
        w.on(
            "slice_scatter",
            &slice(2, 5, 12, 1),
            &[x.clone(), part],
            SAME,
        );
        let none = ty(dtype, &[4, 9, 0]);
        w.on("slice_scatter", &slice(2, 5, 5, 1), &[x, none], SAME);
    }
}

fn tables(w: &mut Wishes) {
    for (dtype, width) in [(F32, 8), (BF16, 7), (F16, 1), (F64, 3)] {
        let ins = vec![
            w.wild(dtype, &[11, width]),
            w.indices(I64, &[5, 3], [0, 11]),
        ];
        w.of("embedding", &[("padding", Attr::Int(-1))], ins, SAME);
        let ins = vec![w.small(dtype, &[29, width]), w.indices(I32, &[29], [0, 7])];
        let rows = [("padding", Attr::Int(3)), ("rows", Attr::Int(300))];
        w.of("embedding_bwd", &rows, ins, SAME);
    }
    // Several tiles, several passes; a row with many indices, and rows with one.
    for (dtype, rows, most) in [(F32, 40, 3), (F16, 700, 700), (BF16, 70_000, 70_000)] {
        let ins = vec![
            w.small(dtype, &[2100, 1]),
            w.indices(I64, &[2100], [0, most]),
        ];
        let rows = [("padding", Attr::Int(2)), ("rows", Attr::Int(rows))];
        w.of("embedding_bwd", &rows, ins, SAME);
    }
    let ins = vec![w.small(F32, &[0, 4]), w.indices(I64, &[0], [0, 1])];
    let rows = [("padding", Attr::Int(-1)), ("rows", Attr::Int(5))];
    w.of("embedding_bwd", &rows, ins, SAME);

    for (dtype, dim) in [(F32, 0), (BF16, 1), (I32, 2), (F64, 1)] {
        let along = [("dim", Attr::Int(dim))];
        let shape = [3, 4, 5];
        let mut of = [2, 3, 4];
        of[dim as usize] = 7;
        let index = |w: &mut Wishes| w.indices(I64, &of, [0, shape[dim as usize] as i64]);
        let ins = vec![w.wild(dtype, &shape), index(w)];
        w.of("gather", &along, ins, SAME);
        let ins = vec![w.wild(dtype, &shape), index(w), w.wild(dtype, &[7, 8, 9])];
        w.of("scatter", &along, ins, SAME);
        let ins = vec![w.small(dtype, &shape), index(w), w.small(dtype, &[7, 8, 9])];
        w.of("scatter_add", &along, ins, SAME);
        let value = [("dim", Attr::Int(dim)), ("value", Attr::Float(2.5))];
        let ins = vec![w.wild(dtype, &shape), index(w)];
        w.of("scatter_value", &value, ins, SAME);
    }
    for (shape, of, dim) in [([3, 50], [3, 90], 1), ([50, 3], [90, 3], 0)] {
        let along = [("dim", Attr::Int(dim))];
        let index = w.indices(I64, &of, [0, 50]);
        let ins = vec![w.small(BF16, &shape), index.clone(), w.small(BF16, &of)];
        w.of("scatter_add", &along, ins, SAME);
        let ins = vec![w.wild(F32, &shape), index, w.wild(F32, &of)];
        w.of("scatter", &along, ins, SAME);
    }
    let ins = vec![
        w.wild(F32, &[3, 2]),
        w.indices(I64, &[0, 2], [0, 3]),
        w.wild(F32, &[0, 2]),
    ];
    w.of("scatter", &[("dim", Attr::Int(0))], ins, SAME);
    several(w);
    added_halves(w);
}

/// Several indices at once.
fn several(w: &mut Wishes) {
    // Three passes.
    let ins = vec![
        w.small(U8, &[1 << 18]),
        w.small(U8, &[1030]),
        w.indices(I32, &[1030], [0, 1 << 18]),
    ];
    w.of("index_put", &[("accumulate", Attr::Bool(true))], ins, SAME);
    for dtype in [F32, BF16, I64] {
        let ins = vec![
            w.wild(dtype, &[5, 4, 6]),
            w.indices(I64, &[3, 1], [-5, 5]),
            w.indices(I64, &[7], [-4, 4]),
        ];
        w.of("index", &[], ins, SAME);
        let ins = vec![w.wild(dtype, &[5, 8]), w.indices(I64, &[9], [-5, 5])];
        w.of("index", &[], ins, SAME);
        for accumulate in [false, true] {
            let accumulate = [("accumulate", Attr::Bool(accumulate))];
            let ins = vec![
                w.small(dtype, &[5, 4, 6]),
                w.small(dtype, &[7, 1]),
                w.indices(I64, &[3, 1], [-5, 5]),
                w.indices(I64, &[7], [-4, 4]),
            ];
            w.of("index_put", &accumulate, ins, SAME);
            let ins = vec![
                w.small(dtype, &[600, 3]),
                w.small(dtype, &[1100, 3]),
                w.indices(I64, &[1100], [-600, 600]),
            ];
            w.of("index_put", &accumulate, ins, SAME);
            let ins = vec![
                w.small(dtype, &[5]),
                w.small(dtype, &[]),
                w.indices(I64, &[9], [0, 5]),
            ];
            w.of("index_put", &accumulate, ins, SAME);
        }
    }
}

/// Values in half precision that are added to f32.
fn added_halves(w: &mut Wishes) {
    for dtype in [BF16, F16] {
        let ins = vec![
            w.small(F32, &[7, 3]),
            w.small(dtype, &[40, 3]),
            w.indices(I64, &[40], [-7, 7]),
        ];
        w.of("index_put", &[("accumulate", Attr::Bool(true))], ins, SAME);
    }
}

fn losses(w: &mut Wishes) {
    for (dtype, rows, classes) in [(F32, 300, 8), (BF16, 7, 11), (F64, 1, 3), (F32, 0, 3)] {
        let (count, n) = (rows as i64, classes as i64);
        let shape = [("shape", ints(&[count, n]))];
        for reduction in [0, 1, 2] {
            let attrs = [
                ("ignore", Attr::Int(2)),
                ("reduction", Attr::Int(reduction)),
            ];
            let targets = w.indices(I64, &[rows], [0, n]);
            let ins = vec![w.small(dtype, &[rows, classes]), targets.clone()];
            w.of("nll_loss", &attrs, ins, SAME);
            let dloss: &[u64] = if reduction == 0 { &[rows] } else { &[] };
            let weight = w.of_numbers(dtype, &[], &[3.0]);
            let ins = vec![w.small(dtype, dloss), targets, weight];
            let attrs = [&attrs[..], &shape, &[("dtype", Attr::Type(dtype))]].concat();
            w.of("nll_loss_bwd", &attrs, ins, SAME);
        }
        let logp = w.small(dtype, &[rows, classes]);
        let mut ins = vec![logp, w.indices(I32, &[rows], [0, n])];
        let attrs = [("ignore", Attr::Int(-100))];
        w.of("nll_sum", &attrs, ins.clone(), SAME);
        ins.push(w.of_numbers(F64, &[], &[0.1]));
        w.of("nll_sum", &attrs, ins, SAME);
    }
    for (dtype, n) in [
        (F32, 3000),
        (BF16, 1037),
        (F64, 5),
        (F16, 0),
        (BF16, 40_002),
    ] {
        w.on("sum_squares", &[], &[ty(dtype, &[n])], Close::Ulps(16.0));
    }
    for sums in [[0.25, 0.5], [9.0, 16.0], [f64::NAN, 1.0]] {
        for dtype in [F32, F64] {
            let ins = sums.map(|sum| w.of_numbers(F64, &[], &[sum])).to_vec();
            let attrs = [("dtype", Attr::Type(dtype)), ("max_norm", Attr::Float(2.0))];
            w.of("clip_scale", &attrs, ins, SAME);
        }
    }
}

fn random(w: &mut Wishes) {
    let rng = (
        ty(I64, &[2]),
        OwnedTensor::from_i64s(artifact::DType::I64, &[2], &[-7_000_000_000_001, 5]),
    );
    for dtype in [F32, BF16, F16, F64] {
        let attrs = [
            ("dtype", Attr::Type(dtype)),
            ("shape", ints(&[7, 43])),
            ("stream", Attr::Int(9)),
        ];
        w.of("rand", &attrs, vec![rng.clone()], SAME);
        // Logarithms and cosines differ by their last bit from the standard library's.
        let close = if dtype == F64 {
            Close::OfLargest(8.0)
        } else {
            Close::Ulps(1.0)
        };
        w.of("randn", &attrs, vec![rng.clone()], close);
    }
    let attrs = [("p", Attr::Float(0.3)), ("stream", Attr::Int(1 << 33 | 9))];
    w.of("dropout_key", &attrs, vec![rng.clone()], SAME);
    w.of("rng_next", &[], vec![rng], SAME);
}

fn functions(w: &mut Wishes) {
    let wild = [
        0.0,
        -0.0,
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        1.0,
        -1.0,
        -3.0,
        0.5,
        2.0,
    ];
    for dtype in [F32, BF16, F16, F64] {
        let close = if dtype == F64 {
            Close::Ulps(2048.0)
        } else {
            Close::Ulps(1.0)
        };
        let mut angles: Vec<f64> = (0..300).map(|_| w.random.unit() * 100.0).collect();
        angles.extend([0.0, -0.0, 1e-30, 6.0e4, -4.0e4, f64::NAN, f64::INFINITY]);
        for name in ["sin", "cos"] {
            let ins = vec![w.of_numbers(dtype, &[angles.len() as u64], &angles)];
            w.of(name, &[], ins, Close::Ulps(1.0));
        }
        let (n, one) = (wild.len() as u64, [1]);
        let ins = vec![
            w.of_numbers(dtype, &[n, 1], &wild),
            w.of_numbers(dtype, &[n], &wild),
        ];
        w.of("pow", &[], ins, close);
        let base: Vec<f64> = (0..100).map(|_| w.random.unit().abs() * 10.0).collect();
        let ins = vec![
            w.of_numbers(dtype, &[100], &base),
            w.of_numbers(dtype, &one, &[-2.7]),
        ];
        w.of("pow", &[], ins, close);
    }
    for dtype in [F32, BF16, F16, F64] {
        let mut numbers: Vec<f64> = (-150..150).map(|i| f64::from(i) * 0.0217).collect();
        numbers.extend([
            0.0,
            -0.0,
            1e-30,
            0.41421,
            0.41422,
            1.0,
            2.4143,
            -1.0,
            5e4,
            f64::NAN,
        ]);
        numbers.extend([f64::INFINITY, f64::NEG_INFINITY]);
        let ins = vec![w.of_numbers(dtype, &[numbers.len() as u64], &numbers)];
        w.of(
            "atan",
            &[],
            ins,
            Close::Ulps(if dtype == F64 { 2.0 } else { 1.0 }),
        );
    }
    let ins = vec![w.of_numbers(F32, &[3], &[1e6, -3.3e9, 1e12])];
    w.of("sin", &[], ins.clone(), Close::Ulps(1.0));
    w.of("cos", &[], ins, Close::Ulps(1.0));
}

/// Numbers in blocks of codes: blocks that are whole, one that is not, none.
fn blocks(w: &mut Wishes) {
    for (dtype, n, has_scale) in [
        (F32, 768u64, false),
        (F32, 1, true),
        (BF16, 700, true),
        (F64, 300, true),
        (F16, 0, false),
    ] {
        let (codes, blocks) = ([n], [n.div_ceil(256)]);
        let mut ins = vec![w.small(dtype, &codes), w.small(dtype, &codes)];
        ins.extend([0, 1].map(|_| w.wild(U8, &codes)));
        let sizes: Vec<f64> = (0..blocks[0]).map(|i| i as f64 + 0.3).collect();
        ins.extend([0, 1].map(|_| w.of_numbers(F32, &blocks, &sizes)));
        ins.push(w.of_numbers(I64, &[], &[3.0]));
        ins.push(w.of_numbers(F64, &[5], &[0.01, 0.9, 0.95, 1e-6, 0.1]));
        if has_scale {
            let wide = if dtype == F64 { F64 } else { F32 };
            ins.push(w.of_numbers(wide, &[], &[0.7]));
        }
        w.of("adamw_8bit", &[], ins, Close::Ulps(2.0));
    }
    for (dtype, shape) in [
        (F32, [64, 300]),
        (BF16, [7, 21]),
        (F64, [1, 1]),
        (F16, [3, 0]),
    ] {
        let n = shape.iter().product::<u64>();
        let blocks = n.div_ceil(64);
        let sizes: Vec<f64> = (0..blocks.div_ceil(256)).map(|i| i as f64 + 0.3).collect();
        let ins = vec![
            w.wild(U8, &[n.div_ceil(2)]),
            w.wild(U8, &[blocks]),
            w.of_numbers(F32, &[sizes.len() as u64], &sizes),
            w.of_numbers(F32, &[], &[1.5]),
        ];
        let shape = shape.map(|d| d as i64);
        let attrs = [("dtype", Attr::Type(dtype)), ("shape", ints(&shape))];
        w.of("nf4", &attrs, ins, SAME);
    }
}

fn lines(w: &mut Wishes) {
    for (dtype, dim) in [(F32, 1), (BF16, 0), (F64, 2), (I32, 1), (U8, 2)] {
        let x = ty(dtype, &[3, 17, 5]);
        w.on(
            "cumsum",
            &[("dim", Attr::Int(dim))],
            std::slice::from_ref(&x),
            SAME,
        );
        for (n, largest) in [(1, true), (3, false), (0, true)] {
            let attrs = [
                ("dim", Attr::Int(dim)),
                ("k", Attr::Int(n)),
                ("largest", Attr::Bool(largest)),
            ];
            w.on("topk", &attrs, std::slice::from_ref(&x), SAME);
        }
    }
    let attrs = [
        ("dim", Attr::Int(0)),
        ("k", Attr::Int(2)),
        ("largest", Attr::Bool(true)),
    ];
    w.on("topk", &attrs, &[ty(F32, &[2])], SAME);
    sorted(w);
}

/// Long lines, which are sorted, up or down: every type, several lines, several tiles, along each
/// dimension.
fn sorted(w: &mut Wishes) {
    let cases: [(DType, &[u64], i64, i64); 12] = [
        (F32, &[300], 0, 300),
        (BF16, &[2, 700], 1, 500),
        (F16, &[3, 400, 2], 1, 399),
        (F64, &[2, 300], 1, 100),
        (I64, &[1100], 0, 1100),
        (I64, &[130, 9], 0, 130),
        (I32, &[600], 0, 65),
        (I16, &[2, 2, 300], 2, 300),
        (I8, &[500], 0, 500),
        (U8, &[33, 300], 1, 299),
        // By insertion: several elements of short lines, and few of a long one.
        (F32, &[40, 66], 1, 66),
        (BF16, &[700], 0, 64),
    ];
    let attrs = |dim, k, largest| {
        [
            ("dim", Attr::Int(dim)),
            ("k", Attr::Int(k)),
            ("largest", Attr::Bool(largest)),
        ]
    };
    for (i, (dtype, shape, dim, k)) in cases.into_iter().enumerate() {
        let x = w.wild(dtype, shape);
        w.of("topk", &attrs(dim, k, i % 2 == 0), vec![x], SAME);
    }
    // A few numbers many times.
    let some = [
        1.5,
        -0.0,
        0.0,
        f64::NAN,
        -2.0,
        f64::INFINITY,
        f64::NEG_INFINITY,
    ];
    let numbers: Vec<f64> = (0..1030).map(|i| some[i * i % 7]).collect();
    for largest in [true, false] {
        let x = w.of_numbers(F32, &[1030], &numbers);
        w.of("topk", &attrs(0, 1030, largest), vec![x], SAME);
    }
}

/// Reductions that generated kernels cannot compute, or need scratch for.
fn reductions(w: &mut Wishes) {
    let over = |dims: &[i64]| [("dims", ints(dims)), ("keepdim", Attr::Bool(false))];
    for dtype in [F32, BF16, F64, I32] {
        w.on(
            "sum",
            &over(&[0]),
            &[ty(dtype, &[301, 35])],
            Close::OfLargest(64.0),
        );
        // f64 is added up in f64, in another order; the others are rounded once.
        let close = Close::OfLargest(if dtype == F64 { 21.0 } else { 1.0 });
        w.on("sum", &over(&[0, 2]), &[ty(dtype, &[3, 5, 7])], close);
        w.on("sum", &over(&[1]), &[ty(dtype, &[3, 0, 7])], SAME);
        w.on("amax", &over(&[0]), &[ty(dtype, &[9, 40])], SAME);
        w.on("amin", &over(&[0, 2]), &[ty(dtype, &[3, 5, 7])], SAME);
    }
    for (dtype, dim) in [(F32, 1), (BF16, 0), (F64, 2)] {
        let x = ty(dtype, &[3, 9, 7]);
        let along = [("dim", Attr::Int(dim))];
        for name in ["softmax", "log_softmax"] {
            let close = Close::OfLargest(8.0);
            w.on(name, &along, std::slice::from_ref(&x), close);
            let backward = format!("{name}_bwd");
            w.on(&backward, &along, &[x.clone(), x.clone()], close);
        }
    }
    w.on(
        "mean",
        &over(&[0]),
        &[ty(BF16, &[300, 3])],
        Close::OfLargest(1.0),
    );
    w.on("any", &over(&[0]), &[ty(F32, &[300, 3])], SAME);
    w.on("any", &over(&[1]), &[ty(Bool, &[2, 3, 3])], SAME);
}

fn norms(w: &mut Wishes) {
    for (dtype, shape) in [
        (F32, [3, 5, 4, 7]),
        (BF16, [2, 3, 9, 1]),
        (F64, [1, 2, 1, 1]),
    ] {
        let x = ty(dtype, &shape);
        let channels = ty(dtype, &shape[1..2]);
        let close = Close::OfLargest(2.0);
        let ins = [x.clone(), channels.clone(), channels.clone()];
        w.on("batch_norm", &[("eps", Attr::Float(1e-5))], &ins, close);
        let mut ins = vec![x.clone(), x];
        ins.extend(vec![channels; 3]);
        for mask in [[1, 1, 1], [0, 1, 0], [1, 0, 1]] {
            w.on("batch_norm_bwd", &[("mask", ints(&mask))], &ins, close);
        }
    }
}

/// The derivative of maxima: dilation, kernel, padding, stride.
fn maxima(w: &mut Wishes, dtype: DType, lists: [[i64; 2]; 4], ceil: bool) {
    let shape = [2, 3, 6, 7];
    let [dilation, kernel, padding, stride] = lists.map(|list| ints(&list));
    let mut attrs = vec![
        ("ceil", Attr::Bool(ceil)),
        ("dilation", dilation),
        ("kernel", kernel),
        ("padding", padding),
        ("stride", stride),
    ];
    // Few different numbers, so that windows share their maxima.
    let x = w.indices(I32, &shape, [0, 5]).1.to_f64s();
    let x = w.of_numbers(dtype, &shape, &x);
    let forward = op("max_pool2d", &attrs);
    let mut outs = results(&forward, std::slice::from_ref(&x.0));
    let made = crate::code::plain(&forward, &[&x.1], &outs).expect("there should be maxima");
    let (index, dy) = (outs.remove(1), w.small(dtype, outs[0].shape()));
    let indices = made.into_iter().nth(1).expect("it has indices");
    attrs.push(("shape", ints(&shape.map(|size| size as i64))));
    w.of("max_pool2d_bwd", &attrs, vec![dy, (index, indices)], SAME);
}

fn windows(w: &mut Wishes) {
    for (dtype, ceil) in [(F32, true), (BF16, false), (I32, false)] {
        let attrs = [
            ("ceil", Attr::Bool(ceil)),
            ("dilation", ints(&[1, 2])),
            ("kernel", ints(&[3, 2])),
            ("padding", ints(&[1, 0])),
            ("stride", ints(&[2, 1])),
        ];
        w.on("max_pool2d", &attrs, &[ty(dtype, &[2, 3, 6, 7])], SAME);
    }
    for dtype in [F32, BF16] {
        // Windows apart, windows that overlap, windows that reach beyond the border.
        maxima(w, dtype, [[1, 1], [2, 2], [0, 0], [2, 2]], false);
        maxima(w, dtype, [[1, 1], [3, 3], [1, 1], [1, 1]], false);
        maxima(w, dtype, [[1, 2], [3, 2], [1, 0], [2, 1]], true);
    }
    let of = |groups, lists: [&[i64]; 3]| {
        [
            ("dilation", ints(lists[0])),
            ("groups", Attr::Int(groups)),
            ("padding", ints(lists[1])),
            ("stride", ints(lists[2])),
        ]
    };
    let lines: [&[i64]; 3] = [&[1], &[2], &[3]];
    // The type, the groups, the lists of attributes, and the shapes of x and w.
    type Case = (
        DType,
        i64,
        [&'static [i64]; 3],
        &'static [u64],
        &'static [u64],
    );
    let plain: [&[i64]; 3] = [&[1, 1], &[1, 1], &[1, 1]];
    let wide: [&[i64]; 3] = [&[2, 1], &[0, 2], &[2, 3]];
    let cases: [Case; 12] = [
        (F32, 1, plain, &[2, 3, 5, 6], &[4, 3, 3, 3]),
        (F32, 2, wide, &[1, 4, 7, 5], &[6, 2, 3, 2]),
        (BF16, 2, wide, &[1, 4, 7, 5], &[6, 2, 3, 2]),
        (
            F64,
            3,
            [&[1, 1], &[0, 0], &[1, 1]],
            &[1, 3, 3, 3],
            &[3, 1, 3, 3],
        ),
        // By tensor cores: lines of weights that are multiples of 16 bytes, and others.
        (BF16, 1, plain, &[2, 8, 9, 7], &[16, 8, 3, 3]),
        (BF16, 1, lines, &[2, 3, 10], &[2, 3, 3]),
        (
            BF16,
            1,
            [&[1, 1], &[3, 3], &[2, 2]],
            &[1, 3, 15, 13],
            &[5, 3, 7, 7],
        ),
        (BF16, 1, wide, &[2, 5, 7, 8], &[6, 5, 3, 2]),
        (
            BF16,
            1,
            [&[2, 2], &[1, 3], &[4, 2]],
            &[1, 2, 11, 9],
            &[3, 2, 2, 3],
        ),
        // Places of x that no window reads.
        (
            BF16,
            1,
            [&[1, 1], &[0, 0], &[2, 2]],
            &[2, 9, 7, 5],
            &[10, 9, 1, 1],
        ),
        // Several tiles along each side, and several rounds.
        (
            BF16,
            1,
            [&[1, 1], &[0, 0], &[1, 1]],
            &[3, 72, 8, 8],
            &[136, 72, 1, 1],
        ),
        // The gradient of the weights in parts.
        (BF16, 1, plain, &[5, 2, 16, 16], &[3, 2, 3, 3]),
    ];
    for (dtype, groups, lists, x, weights) in cases {
        let attrs = of(groups, lists);
        let close = Close::OfLargest(4.0);
        let mut ins = vec![ty(dtype, x), ty(dtype, weights)];
        w.on("convolution", &attrs, &ins, close);
        let y = results(&op("convolution", &attrs), &ins).remove(0);
        let backward = [vec![y], ins.clone()].concat();
        ins.push(ty(dtype, &weights[..1]));
        w.on("convolution", &attrs, &ins, close);
        for mask in [[1, 1, 1], [0, 1, 0], [1, 0, 0]] {
            let attrs = [&attrs[..], &[("mask", ints(&mask))]].concat();
            w.on("convolution_bwd", &attrs, &backward, close);
        }
    }
}

fn products(w: &mut Wishes) {
    let flags = |ta, tb| [("ta", Attr::Bool(ta)), ("tb", Attr::Bool(tb))];
    for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
        for dtype in [F32, BF16] {
            let [m, k, n] = [70, 19, 67];
            let x = ty(dtype, &if ta { [k, m] } else { [m, k] });
            let y = ty(dtype, &if tb { [n, k] } else { [k, n] });
            w.on("matmul", &flags(ta, tb), &[x.clone(), y.clone()], PRODUCT);
            w.on(
                "addmm",
                &flags(ta, tb),
                &[ty(dtype, &[n]), x.clone(), y.clone()],
                PRODUCT,
            );
            if dtype == BF16 {
                let before = ty(F32, &[m, n]);
                w.on("matmul_sum", &flags(ta, tb), &[x, y, before], PRODUCT);
            }
        }
        let batch = |rows: u64, columns: u64, flipped: bool| {
            let [a, b] = if flipped {
                [columns, rows]
            } else {
                [rows, columns]
            };
            ty(F32, &[3, a, b])
        };
        let (x, y) = (batch(5, 33, ta), batch(33, 2, tb));
        w.on("matmul", &flags(ta, tb), &[x.clone(), y.clone()], PRODUCT);
        w.on(
            "addmm",
            &flags(ta, tb),
            &[ty(F32, &[3, 5, 2]), x, y],
            PRODUCT,
        );
    }
    // Sums that are cut.
    let long = [ty(F32, &[2, 1100]), ty(F32, &[1100, 3])];
    w.on("matmul", &flags(false, false), &long, PRODUCT);
    let added = [&[ty(F32, &[3])], &long[..]].concat();
    w.on("addmm", &flags(false, false), &added, PRODUCT);
    let half = [ty(F16, &[1100, 2]), ty(F16, &[1100, 3])];
    w.on("matmul_sum", &flags(true, false), &half, PRODUCT);
    let continued = [&half[..], &[ty(F32, &[2, 3])]].concat();
    w.on("matmul_sum", &flags(true, false), &continued, PRODUCT);
    for dtype in [F16, F64, I32, I64, U8] {
        let ins = [ty(dtype, &[3, 17]), ty(dtype, &[17, 5])];
        w.on("matmul", &flags(false, false), &ins, PRODUCT);
    }
    tensor_cores(w);
    groups(w);
    let none = [ty(F32, &[2, 1]), ty(F32, &[2, 0]), ty(F32, &[0, 3])];
    w.on("addmm", &flags(false, false), &none, PRODUCT);
}

/// Products whose lines are multiples of 16 bytes. The interpreter rounds the sum of 16 products
/// once, the plain kernel after each.
fn tensor_cores(w: &mut Wishes) {
    let (rounded, sums) = (Close::OfLargest(1.0), Close::OfLargest(16.0));
    let [m, k, n] = [136, 72, 200];
    for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
        let flags = [("ta", Attr::Bool(ta)), ("tb", Attr::Bool(tb))];
        let x = ty(BF16, &if ta { [k, m] } else { [m, k] });
        let y = ty(BF16, &if tb { [n, k] } else { [k, n] });
        w.on("matmul", &flags, &[x.clone(), y.clone()], rounded);
        let bias = ty(BF16, &if ta { vec![m, 1] } else { vec![n] });
        w.on("addmm", &flags, &[bias, x.clone(), y.clone()], rounded);
        let before = ty(F32, &[m, n]);
        w.on("matmul_sum", &flags, &[x, y, before], sums);
    }
    // Any number of terms, if no line goes over them; several matrices; several tiles.
    let flags = [("ta", Attr::Bool(true)), ("tb", Attr::Bool(false))];
    let odd = [ty(BF16, &[2, 67, 8]), ty(BF16, &[2, 67, 16])];
    w.on("matmul", &flags, &odd, rounded);
    let wide = [ty(BF16, &[33, 264]), ty(BF16, &[33, 136])];
    w.on("matmul_sum", &flags, &wide, sums);
}

/// Ends of groups. The first and the last case have rows behind the last group.
const ENDS: [(u64, &[i64]); 7] = [
    (75, &[0, 3, 3, 73]),
    (70, &[70]),
    (9, &[2, 1, 5, 5, 9]),
    (1, &[1, 1]),
    (5, &[0, 0, 0]),
    (
        20,
        &[
            0, 1, 1, 3, 4, 4, 5, 9, 9, 9, 12, 13, 14, 14, 14, 17, 18, 19, 20,
        ],
    ),
    (131, &[129, 130]),
];

/// Products of groups of rows: uneven ones, and empty ones. Ends go down and have both types.
fn groups(w: &mut Wishes) {
    for (i, (rows, ends)) in ENDS.into_iter().enumerate() {
        for dtype in [[F32, BF16], [F16, F64]][i % 2] {
            grouped(w, (dtype, [rows, 19, 11]), ends, PRODUCT);
        }
    }
    // Sums that are cut, several tiles of columns, none of some size.
    grouped(w, (F32, [1203, 5, 3]), &[2, 1102, 1200], PRODUCT);
    grouped(w, (F32, [5, 1100, 3]), &[1, 4], PRODUCT);
    grouped(w, (F32, [5, 3, 67]), &[1, 4], PRODUCT);
    grouped(w, (F32, [5, 70, 1]), &[5, 5], PRODUCT);
    grouped(w, (F32, [5, 0, 3]), &[1, 4], PRODUCT);
    grouped(w, (F32, [0, 4, 3]), &[0, 0], PRODUCT);
    grouped(w, (F32, [3, 4, 2]), &[], PRODUCT);
    // By tensor cores.
    for (i, (rows, ends)) in ENDS.into_iter().enumerate() {
        let [m, n] = if i == 0 { [72, 136] } else { [24, 16] };
        grouped(w, (BF16, [rows, m, n]), ends, Close::OfLargest(1.0));
    }
    grouped(
        w,
        (BF16, [300, 136, 8]),
        &[7, 140, 150],
        Close::OfLargest(1.0),
    );
}

/// Both products of rows of `m` and of `n` numbers in groups. Every other number of groups has
/// matrices that are read transposed, and ends of the other type.
fn grouped(w: &mut Wishes, (dtype, [s, m, n]): (DType, [u64; 3]), ends: &[i64], close: Close) {
    let groups = ends.len() as u64;
    let tb = groups % 2 == 1;
    let numbers: Vec<f64> = ends.iter().map(|&end| end as f64).collect();
    let ends = w.of_numbers(if tb { I32 } else { I64 }, &[groups], &numbers);
    let weight = if tb { [groups, n, m] } else { [groups, m, n] };
    let ins = vec![
        w.small(dtype, &[s, m]),
        w.small(dtype, &weight),
        ends.clone(),
    ];
    w.of("grouped_matmul", &[("tb", Attr::Bool(tb))], ins, close);
    let ins = vec![w.small(dtype, &[s, m]), w.small(dtype, &[s, n]), ends];
    w.of("grouped_outer", &[], ins, close);
}

/// Batch, heads of q and of k, queries, keys, widths of q and of v; a mask.
type Attention = (DType, [u64; 7], Option<(DType, &'static [u64])>);

fn attention(w: &mut Wishes) {
    let cases: [Attention; 14] = [
        // By tensor cores, which round probabilities to bf16.
        (BF16, [1, 2, 1, 70, 33, 64, 64], None),
        (BF16, [2, 1, 1, 5, 66, 128, 128], None),
        (BF16, [1, 1, 1, 64, 64, 64, 64], None),
        (BF16, [1, 1, 1, 0, 5, 64, 64], None),
        (F32, [1, 1, 1, 5, 0, 4, 4], None),
        (F32, [2, 2, 2, 5, 7, 6, 3], None),
        (F32, [1, 4, 2, 6, 6, 16, 16], None),
        (BF16, [1, 2, 1, 3, 4, 8, 8], None),
        (F64, [1, 1, 1, 3, 3, 4, 4], None),
        (F32, [2, 2, 2, 3, 5, 4, 4], Some((F32, &[2, 1, 1, 5]))),
        (F32, [2, 2, 2, 3, 5, 4, 4], Some((Bool, &[3, 5]))),
        (F32, [2, 2, 1, 6, 6, 4, 4], Some((I64, &[2, 6]))),
        (BF16, [2, 1, 1, 5, 5, 64, 64], Some((I64, &[1, 5]))),
        // Wider than tiles.
        (F32, [1, 1, 1, 3, 4, 130, 4], None),
    ];
    for case in cases {
        for causal in [false, true] {
            attend(w, case, causal, None);
        }
    }
    dropped(w);
    // By several tiles, whole ones and parts. Their kernels are long.
    let tiles: [(bool, Attention); 9] = [
        (true, (F32, [1, 4, 2, 70, 130, 32, 32], None)),
        (true, (F32, [2, 1, 1, 128, 64, 64, 64], None)),
        (true, (F32, [1, 2, 1, 40, 70, 96, 128], None)),
        (false, (BF16, [1, 2, 1, 7, 66, 80, 80], None)),
        (true, (BF16, [1, 4, 2, 66, 30, 32, 32], None)),
        (true, (F16, [1, 2, 2, 9, 17, 24, 12], None)),
        (
            false,
            (F32, [2, 2, 1, 70, 33, 12, 20], Some((F32, &[2, 1, 1, 33]))),
        ),
        (
            true,
            (F32, [1, 2, 1, 66, 20, 5, 7], Some((Bool, &[66, 20]))),
        ),
        (true, (F32, [2, 2, 1, 70, 70, 8, 8], Some((I64, &[2, 70])))),
    ];
    for (causal, case) in tiles {
        attend(w, case, causal, None);
    }
}

/// Attention that drops weights.
fn dropped(w: &mut Wishes) {
    let cases: [(bool, f64, Attention); 8] = [
        // By tensor cores.
        (true, 0.25, (BF16, [1, 4, 2, 70, 72, 64, 64], None)),
        (false, 0.5, (BF16, [2, 1, 1, 5, 36, 128, 128], None)),
        // By tiles.
        (false, 0.1, (BF16, [1, 2, 1, 5, 66, 64, 64], None)),
        (true, 0.25, (F32, [2, 2, 1, 33, 33, 12, 20], None)),
        (
            false,
            0.75,
            (F32, [1, 2, 2, 9, 70, 8, 8], Some((F32, &[9, 70]))),
        ),
        (
            true,
            0.5,
            (F16, [2, 2, 1, 7, 7, 8, 8], Some((I64, &[2, 7]))),
        ),
        // One query at a time.
        (true, 0.25, (F64, [2, 2, 1, 7, 5, 4, 4], None)),
        (false, 0.25, (F32, [1, 2, 1, 3, 5, 130, 4], None)),
    ];
    for (causal, p, case) in cases {
        attend(w, case, causal, Some(p));
    }
}

/// A dropout key.
fn key(p: f64) -> (TensorType, OwnedTensor) {
    let numbers = [0x1234_5678_9ABC, 3, 5, p.to_bits() as i64];
    let tensor = OwnedTensor::from_i64s(codegen::dtype(I64), &[4], &numbers);
    (ty(I64, &[4]), tensor)
}

fn attend(
    w: &mut Wishes,
    (dtype, [b, h, g, s, t, d, e], mask): Attention,
    causal: bool,
    drops: Option<f64>,
) {
    let attrs = [("causal", Attr::Bool(causal)), ("scale", Attr::Float(0.3))];
    let shapes = [[b, h, s, d], [b, g, t, d], [b, g, t, e]];
    let mut ins = shapes.map(|shape| w.small(dtype, &shape)).to_vec();
    ins.extend(mask.map(|(dtype, shape)| mask_of(w, dtype, shape)));
    ins.extend(drops.map(key));
    // A query that sees one key has gradients of rounding errors.
    let close = match dtype {
        F32 if d.max(e).max(t) <= 16 => Close::Absolute(1e-5),
        F32 => Close::OfSums(16.0, 1e-5),
        BF16 => Close::OfSums(2.0, 0.3 * error_of_sums(&ins[0].1, &ins[1].1)),
        _ => Close::OfLargest(16.0),
    };
    both_ways(w, ["sdpa", "sdpa_bwd"], &attrs, ins, close);
}

/// How far two sums in f32 of the products of a row of each tensor may differ, if they add in
/// different orders. Products of bf16 are exact in f32. Each of n additions rounds by at most 2^-24
/// of a partial sum, which is at most n products of the largest numbers.
fn error_of_sums(a: &OwnedTensor, b: &OwnedTensor) -> f64 {
    let largest = |x: &OwnedTensor| x.to_f64s().into_iter().fold(0f64, |m, x| m.max(x.abs()));
    let n = a.shape().last().map_or(0.0, |&width| width as f64);
    2.0 * n * 2f64.powi(-24) * n * largest(a) * largest(b)
}

/// A mask, or numbers of documents.
fn mask_of(w: &mut Wishes, dtype: DType, shape: &[u64]) -> (TensorType, OwnedTensor) {
    match dtype {
        I64 => w.indices(I64, shape, [0, 3]),
        _ => w.small(dtype, shape),
    }
}

/// Attention and its backward, which has the forward's results.
fn both_ways(
    w: &mut Wishes,
    [forward, backward]: [&'static str; 2],
    attrs: Attrs<'_>,
    ins: Ins,
    close: Close,
) {
    let of = op(forward, attrs);
    let types: Vec<TensorType> = ins.iter().map(|(ty, _)| ty.clone()).collect();
    let outs = results(&of, &types);
    let tensors: Vec<&OwnedTensor> = ins.iter().map(|(_, tensor)| tensor).collect();
    let found = crate::code::plain(&of, &tensors, &outs).expect("attention should run");
    let mut operands = vec![w.small(types[0].dtype(), outs[0].shape())];
    operands.extend_from_slice(&ins[..3]);
    operands.extend(outs.into_iter().zip(found));
    operands.extend_from_slice(&ins[3..]);
    w.of(forward, attrs, ins, close);
    w.of(backward, attrs, operands, close);
}

/// Heads inside rows.
fn attention_rows(w: &mut Wishes) {
    // Batch, heads of q and of k, queries, keys, widths of q and of v; the first heads in rows of
    // q, k and v, and the heads in these rows; a mask.
    type Case = (
        DType,
        [u64; 7],
        [(i64, u64); 3],
        Option<(DType, &'static [u64])>,
    );
    let cases: [Case; 8] = [
        // By tensor cores. The gradients of the first two are one result.
        (
            BF16,
            [2, 2, 2, 70, 70, 64, 64],
            [(0, 6), (2, 6), (4, 6)],
            None,
        ),
        (
            BF16,
            [1, 2, 1, 33, 33, 128, 128],
            [(2, 4), (0, 4), (1, 4)],
            None,
        ),
        (
            BF16,
            [2, 4, 2, 66, 33, 64, 64],
            [(-1, 0), (0, 2), (1, 4)],
            None,
        ),
        (
            BF16,
            [1, 2, 2, 5, 66, 128, 128],
            [(1, 3), (-1, 0), (-1, 0)],
            None,
        ),
        (F32, [1, 2, 2, 33, 33, 8, 8], [(0, 6), (2, 6), (4, 6)], None),
        (
            F32,
            [2, 4, 2, 5, 7, 6, 3],
            [(1, 5), (-1, 0), (0, 2)],
            Some((F32, &[2, 1, 1, 7])),
        ),
        (
            BF16,
            [2, 2, 2, 3, 3, 8, 8],
            [(4, 6), (0, 6), (2, 6)],
            Some((Bool, &[3, 3])),
        ),
        (F64, [1, 2, 1, 3, 4, 4, 4], [(-1, 0), (-1, 0), (0, 1)], None),
    ];
    for (dtype, [b, h, g, s, t, d, e], places, mask) in cases {
        for causal in [false, true] {
            let first = places.map(|(first, _)| first).to_vec();
            let attrs = [
                ("causal", Attr::Bool(causal)),
                ("first", Attr::Ints(first)),
                ("heads", Attr::Ints(vec![h as i64, g as i64])),
                ("scale", Attr::Float(0.3)),
            ];
            let forms = [(h, s, d), (g, t, d), (g, t, e)];
            let mut ins = vec![];
            for ((heads, rows, width), (first, all)) in forms.into_iter().zip(places) {
                let shape = match first {
                    -1 => [b, heads, rows, width],
                    _ => [b, rows, all, width],
                };
                ins.push(w.small(dtype, &shape));
            }
            ins.extend(mask.map(|(dtype, shape)| mask_of(w, dtype, shape)));
            let close = match dtype {
                F32 => Close::Absolute(1e-5),
                BF16 => Close::OfSums(2.0, 0.3 * error_of_sums(&ins[0].1, &ins[1].1)),
                _ => Close::OfLargest(16.0),
            };
            // Every other one drops weights.
            ins.extend(causal.then(|| key(0.25)));
            both_ways(w, ["sdpa_rows", "sdpa_rows_bwd"], &attrs, ins, close);
        }
    }
}
