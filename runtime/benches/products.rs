//! Products and attention: milliseconds of each, for `benches/products.py`, which compares them
//! with PyTorch.
//!
//! `cargo bench -p lighterage-runtime --bench products -- THREADS ROUNDS CASE…` prints a line of
//! JSON for each case: the fastest of ROUNDS rounds. A case is `BxMxKxN:ORDER`, with the order
//! `nn`, `nt` or `tn` of the factors and an optional `+bias` for an added row, or `BxHxSxD:fwd` or
//! `:bwd`, causal attention. With `--cold`, other memory passes through the caches before each
//! round, because operands in a training step were made long before. With `--bf16` or `--f16`,
//! operands and results have that type.

#![allow(clippy::print_stdout, reason = "a benchmark's output is its purpose")]

mod operands;

use artifact::{Attr, DType};
use lighterage_runtime::Team;
use lighterage_runtime::kernels::owned::{OwnedTensor, Run};
use std::time::Instant;

fn main() {
    // Cargo passes `--bench` along.
    let given: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .collect();
    let cold = std::env::args().any(|arg| arg == "--cold");
    let dtype = operands::dtype();
    let mut other = vec![
        0u64;
        if cold {
            EVICTED_BYTES / size_of::<u64>()
        } else {
            0
        }
    ];
    let number = |i: usize, default| {
        given
            .get(i)
            .and_then(|arg| arg.parse().ok())
            .unwrap_or(default)
    };
    let (threads, rounds): (usize, usize) = (number(0, 1), number(1, 20));
    let team = Team::new(threads).expect("threads should start");
    for case in &given[2.min(given.len())..] {
        let (sizes, what) = case
            .split_once(':')
            .expect("a case should have sizes and an order");
        let sizes: Vec<usize> = sizes
            .split('x')
            .map(|n| n.parse().expect("sizes should be numbers"))
            .collect();
        let &[a, b, c, d] = &sizes[..] else {
            panic!("a case should have four sizes")
        };
        let random = |shape: &[usize], seed| operands::random(dtype, shape, seed);
        let mut best = |op: &str,
                        attrs: &[(String, Attr)],
                        ins: &[&OwnedTensor],
                        outs: &[(DType, Vec<usize>)]| {
            let mut run =
                Run::new(op, attrs, ins, outs, 1 << 26, &[]).expect("the kernel should take it");
            let mut best = f64::INFINITY;
            for _ in 0..rounds {
                other.iter_mut().for_each(|number| *number += 1);
                std::hint::black_box(&mut other);
                let mut marks = vec![];
                run.run_on(Some(&team), || marks.push(Instant::now()))
                    .expect("the kernel should run");
                let [start, end] = marks[..] else {
                    panic!("a run should be marked twice")
                };
                best = best.min((end - start).as_secs_f64() * 1e3);
            }
            (best, run.results)
        };
        let attr = |key: &str, value| (key.to_string(), value);
        let ms = match what {
            "fwd" | "bwd" => {
                let attrs = [
                    attr("causal", Attr::Bool(true)),
                    attr("scale", Attr::Float((d as f64).powf(-0.5))),
                ];
                let [q, k, v, dout] = [1, 2, 3, 4].map(|seed| random(&[a, b, c, d], seed));
                let outs = [(dtype, vec![a, b, c, d]), (DType::F32, vec![a, b, c])];
                let (forward, results) = best("sdpa", &attrs, &[&q, &k, &v], &outs);
                if what == "fwd" {
                    forward
                } else {
                    let outs = vec![(dtype, vec![a, b, c, d]); 3];
                    best(
                        "sdpa_bwd",
                        &attrs,
                        &[&dout, &q, &k, &v, &results[0], &results[1]],
                        &outs,
                    )
                    .0
                }
            }
            order => {
                let (ta, tb) = (order.starts_with('t'), order[1..].starts_with('t'));
                let shape = |rows, columns| {
                    if a == 1 {
                        vec![rows, columns]
                    } else {
                        vec![a, rows, columns]
                    }
                };
                let x = random(&if ta { shape(c, b) } else { shape(b, c) }, 1);
                let w = random(&if tb { shape(d, c) } else { shape(c, d) }, 2);
                let attrs = [attr("ta", Attr::Bool(ta)), attr("tb", Attr::Bool(tb))];
                let out = [(dtype, shape(b, d))];
                match order.ends_with("+bias") {
                    true => best("addmm", &attrs, &[&random(&[d], 3), &x, &w], &out).0,
                    false => best("matmul", &attrs, &[&x, &w], &out).0,
                }
            }
        };
        println!("{{\"case\": \"{case}\", \"ms\": {ms:.4}}}");
    }
}

/// More than the last cache of most machines.
const EVICTED_BYTES: usize = 128 << 20;
