//! Kernels that threads share: the same bits on any number of threads, for any cuts into parts.

use super::generate::{self, Rng, SCRATCH_BYTES};
use artifact::{Attr, DType};
use lighterage_runtime::Team;
use lighterage_runtime::kernels::owned::{OwnedTensor, Run};

/// Batch, rows, inner and columns: parts are rows or columns, end within a matrix and span several,
/// and the last is short.
const PRODUCTS: [[usize; 4]; 5] = [
    [1, 700, 165, 713],
    [5, 300, 17, 601],
    [40, 10, 3, 4097],
    [3, 257, 0, 300],
    [1, 313, 513, 1001],
];

fn numbers(dtype: DType, shape: &[usize], seed: u64) -> OwnedTensor {
    let mut rng = Rng(seed);
    let n = shape.iter().product();
    OwnedTensor::from_f64s(
        dtype,
        shape,
        &(0..n)
            .map(|_| rng.below(2001) as f64 / 64.0 - 15.0)
            .collect::<Vec<_>>(),
    )
}

#[test]
fn threads_change_no_bit_of_products() {
    let teams = [2, 3, 7].map(|threads| Team::new(threads).unwrap());
    for kernel in lighterage_runtime::kernels::KERNELS
        .iter()
        .filter(|kernel| matches!(kernel.name, "matmul" | "addmm" | "matmul_sum"))
    {
        for (case, [batch, m, k, n]) in PRODUCTS.into_iter().enumerate() {
            let wide = [DType::F32, DType::F64, DType::I32, DType::F32, DType::F32][case];
            let half = [DType::BF16, DType::F16][case % 2];
            let types = match kernel.name {
                "matmul_sum" => vec![(half, DType::F32)],
                _ => vec![(wide, wide), (half, half)],
            };
            let flags = [(false, false), (true, false), (false, true)];
            let each = types
                .iter()
                .flat_map(|&types| flags.map(|flags| (types, flags)));
            for ((dtype, result), (ta, tb)) in each {
                let shape = |rows, columns, t| {
                    if t {
                        vec![batch, columns, rows]
                    } else {
                        vec![batch, rows, columns]
                    }
                };
                let mut ins = vec![
                    numbers(dtype, &shape(m, k, ta), 1),
                    numbers(dtype, &shape(k, n, tb), 2),
                ];
                match kernel.name {
                    "matmul" => {}
                    "matmul_sum" => ins.push(numbers(result, &[batch, m, n], 3)),
                    "addmm" => ins.insert(
                        0,
                        numbers(
                            dtype,
                            [&[n][..], &[m, 1], &[batch, m, n], &[], &[n]][case],
                            3,
                        ),
                    ),
                    other => panic!("{other} needs operands here"),
                }
                let attrs = [("ta".into(), Attr::Bool(ta)), ("tb".into(), Attr::Bool(tb))];
                let run = |team| {
                    let outs = [(result, vec![batch, m, n])];
                    let ins: Vec<&OwnedTensor> = ins.iter().collect();
                    let mut run = Run::new(kernel.name, &attrs, &ins, &outs, 0, &[]).unwrap();
                    run.run_on(team, || {}).unwrap();
                    run.results[0].bytes()
                };
                let alone = run(None);
                for team in &teams {
                    assert!(
                        run(Some(team)) == alone,
                        "{} {dtype:?} {case}, {ta} {tb}, {} threads",
                        kernel.name,
                        team.threads()
                    );
                }
            }
        }
    }
}

/// There is no matrix, and it would have no rows.
#[test]
fn products_of_nothing_are_nothing() {
    for dtype in [DType::F32, DType::BF16] {
        let (x, w) = (
            numbers(dtype, &[0, 0, 8], 1),
            numbers(dtype, &[0, 8, 600], 2),
        );
        let attrs = ["ta", "tb"].map(|key| (key.to_string(), Attr::Bool(false)));
        let outs = [(dtype, vec![0, 0, 600])];
        let mut run = Run::new("matmul", &attrs, &[&x, &w], &outs, 0, &[]).unwrap();
        run.run_on(None, || {}).unwrap();
        assert!(run.results[0].bytes().is_empty());
    }
}

/// Rows, inner and columns, which are cut into parts; blocks of half-precision results, whole and
/// not.
#[test]
fn threads_change_no_bit_of_grouped_products() {
    let teams = [2, 3, 7].map(|threads| Team::new(threads).unwrap());
    let [rows, k, n] = [1500, 300, 601];
    let ends = OwnedTensor::from_i64s(DType::I64, &[5], &[0, 400, 401, 390, 1400]);
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let x = numbers(dtype, &[rows, k], 1);
        let (turned, other) = (&[5, n, k], &[rows, n]);
        let attrs = [("tb".to_string(), Attr::Bool(true))];
        for (op, attrs, w, y) in [
            ("grouped_matmul", &attrs[..], &turned[..], vec![rows, n]),
            ("grouped_outer", &[], &other[..], vec![5, k, n]),
        ] {
            let w = numbers(dtype, w, 2);
            let run = |team| {
                let outs = [(dtype, y.clone())];
                let mut run = Run::new(op, attrs, &[&x, &w, &ends], &outs, 0, &[]).unwrap();
                run.run_on(team, || {}).unwrap();
                run.results[0].bytes()
            };
            let alone = run(None);
            for team in &teams {
                let threads = team.threads();
                assert!(
                    run(Some(team)) == alone,
                    "{op} of {dtype:?}, {threads} threads"
                );
            }
        }
    }
}

/// Every kernel on random operands (also odd and empty ones), in random parts, in place or not.
#[test]
fn parts_change_no_bit() {
    let rng = &mut Rng(7);
    let mut whole = Vec::new();
    for kernel in lighterage_runtime::kernels::KERNELS {
        let mut most = 0;
        for _ in 0..60 {
            let case = generate::case_of(kernel.name, rng);
            let ins: Vec<&OwnedTensor> = case.ins.iter().collect();
            let alike = |&&(i, j): &&(usize, usize)| {
                let of = |t: &OwnedTensor| (t.dtype(), t.shape().to_vec());
                case.ins.get(i).map(of).as_ref() == case.outs.get(j)
            };
            // Two operands cannot lie on one result.
            let pair: Vec<_> = kernel
                .inplace
                .iter()
                .filter(alike)
                .take(1)
                .copied()
                .collect();
            for pairs in [&[][..], &pair] {
                let run = || {
                    Run::new(
                        kernel.name,
                        &case.attrs,
                        &ins,
                        &case.outs,
                        SCRATCH_BYTES,
                        pairs,
                    )
                    .unwrap()
                };
                let (mut alone, mut parts) = (run(), run());
                alone.run().unwrap();
                let lengths = [1 + rng.below(3), 1 + rng.below(9), 1 + rng.below(40)];
                most = most.max(parts.run_in_parts(&lengths).unwrap());
                let bytes = |run: &Run<'_>| {
                    run.results
                        .iter()
                        .map(OwnedTensor::bytes)
                        .collect::<Vec<_>>()
                };
                assert!(
                    bytes(&alone) == bytes(&parts),
                    "{} {:?} {:?} {lengths:?}",
                    kernel.name,
                    case.attrs,
                    case.outs
                );
            }
        }
        if most == 1 {
            whole.push(kernel.name);
        }
    }
    // Kernels that threads do not share.
    let expected = [
        "nll_loss",
        "nll_sum",
        "scatter",
        "scatter_add",
        "scatter_value",
        "index_put",
        "slice_scatter",
        "pad",
        "dropout_key",
        "rng_next",
        "sum_squares",
        "clip_scale",
    ];
    assert_eq!(whole, expected);
}

/// Kernels of rows and heads, large enough that the machine cuts them by itself.
#[test]
fn threads_change_no_bit_of_rows() {
    let teams = [2, 3, 7].map(|threads| Team::new(threads).unwrap());
    let int = |key: &str, value| (key.to_string(), Attr::Int(value));
    let (rows, n) = (515, 129);
    let [x, dy, w] = [
        numbers(DType::F32, &[rows, n], 1),
        numbers(DType::F32, &[rows, n], 2),
        numbers(DType::F32, &[n], 3),
    ];
    let statistics = [4, 5].map(|seed| numbers(DType::F32, &[rows, 1], seed));
    let like = (DType::F32, vec![rows, n]);
    let column = (DType::F32, vec![n]);
    let attention = |heads, seed| numbers(DType::F32, &[2, heads, 201, 24], seed);
    let heads = [
        attention(6, 6),
        attention(3, 7),
        attention(3, 8),
        attention(6, 9),
        attention(6, 10),
    ];
    let sums = numbers(DType::F32, &[2, 6, 201], 11);
    let causal = vec![
        ("causal".into(), Attr::Bool(true)),
        ("scale".into(), Attr::Float(0.02)),
    ];
    let (of_q, of_k) = (
        (DType::F32, vec![2, 6, 201, 24]),
        (DType::F32, vec![2, 3, 201, 24]),
    );
    let mask = |mask: [i64; 3]| {
        vec![
            int("dims", 1),
            ("mask".to_string(), Attr::Ints(mask.into())),
        ]
    };
    let norm = vec![&dy, &x, &statistics[0], &statistics[1], &w];
    let cases = vec![
        (
            "gelu",
            vec![("tanh".into(), Attr::Bool(true))],
            vec![&x],
            vec![like.clone()],
        ),
        ("softmax", vec![int("dim", 1)], vec![&x], vec![like.clone()]),
        (
            "layer_norm_bwd",
            mask([1, 1, 1]),
            norm.clone(),
            vec![like.clone(), column.clone(), column.clone()],
        ),
        (
            "layer_norm_bwd",
            mask([0, 1, 0]),
            norm.clone(),
            vec![column.clone()],
        ),
        ("layer_norm_bwd", mask([1, 0, 0]), norm, vec![like.clone()]),
        (
            "sdpa",
            causal.clone(),
            vec![&heads[0], &heads[1], &heads[2]],
            vec![of_q.clone(), (DType::F32, vec![2, 6, 201])],
        ),
        (
            "sdpa_bwd",
            causal.clone(),
            vec![&heads[3], &heads[0], &heads[1], &heads[2], &heads[4], &sums],
            vec![of_q, of_k.clone(), of_k.clone()],
        ),
    ];
    // Heads inside rows: q, k and v fill the rows of one tensor, or have their own.
    let rows = numbers(DType::F32, &[2, 201, 12, 24], 12);
    let [dout, out] = [13, 14].map(|seed| numbers(DType::F32, &[2, 201, 6, 24], seed));
    let form = |first: [i64; 3]| {
        let mut attrs = causal.clone();
        attrs.push(("first".into(), Attr::Ints(first.to_vec())));
        attrs.push(("heads".into(), Attr::Ints(vec![6, 3])));
        attrs
    };
    let of_out = (DType::F32, vec![2, 201, 6, 24]);
    let of_keys = (DType::F32, vec![2, 201, 3, 24]);
    let cases = cases.into_iter().chain([
        (
            "sdpa_rows",
            form([0, 6, 9]),
            vec![&rows, &rows, &rows],
            vec![of_out.clone(), (DType::F32, vec![2, 6, 201])],
        ),
        (
            "sdpa_rows_bwd",
            form([0, 6, 9]),
            vec![&dout, &rows, &rows, &rows, &out, &sums],
            vec![(DType::F32, vec![2, 201, 12, 24])],
        ),
        (
            "sdpa_rows_bwd",
            form([5, -1, 0]),
            vec![&dout, &rows, &heads[1], &rows, &out, &sums],
            vec![of_out, of_k.clone(), of_keys],
        ),
    ]);
    for (op, attrs, ins, outs) in &cases.collect::<Vec<_>>() {
        let run = |team| {
            let mut run = Run::new(op, attrs, ins, outs, SCRATCH_BYTES, &[]).unwrap();
            run.run_on(team, || {}).unwrap();
            run.results
                .iter()
                .map(OwnedTensor::bytes)
                .collect::<Vec<_>>()
        };
        let alone = run(None);
        for team in &teams {
            assert!(run(Some(team)) == alone, "{op}, {} threads", team.threads());
        }
        let mut parts = Run::new(op, attrs, ins, outs, SCRATCH_BYTES, &[]).unwrap();
        assert!(
            1 < parts.run_in_parts(&[1, 2, 1]).unwrap(),
            "{op} should have parts"
        );
        let parts: Vec<_> = parts.results.iter().map(OwnedTensor::bytes).collect();
        assert!(parts == alone, "{op} in parts");
    }
}
