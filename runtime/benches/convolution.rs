//! Convolutions and their gradients: milliseconds of each, for `benches/convolution.py`, which has
//! PyTorch beside.
//!
//! `cargo bench -p lighterage-runtime --bench convolution -- THREADS ROUNDS CASE…` prints a line of
//! JSON a case: the fastest of that many rounds. A case is `WHAT:BATCH,INPUTS,HEIGHT,WIDTH:OUTPUTS,
//! KERNEL,STRIDE,PADDING,DILATION,GROUPS`, where WHAT is `forward`, `input`, `weight`, `norm`,
//! `norm_bwd`, `pool` or `pool_bwd`. Norms have the image alone.

#![allow(clippy::print_stdout, reason = "a benchmark's output is its purpose")]

use artifact::{Attr, DType};
use lighterage_runtime::Team;
use lighterage_runtime::kernels::owned::{OwnedTensor, Run};
use std::time::Instant;

/// More than the last cache of most machines.
const EVICTED_BYTES: usize = 128 << 20;

/// A kernel with its operands.
struct Case {
    op: &'static str,
    attrs: Vec<(String, Attr)>,
    ins: Vec<OwnedTensor>,
    outs: Vec<(DType, Vec<usize>)>,
}

fn main() {
    // Cargo passes `--bench` along.
    let given: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .collect();
    let [threads, rounds, cases @ ..] = &given[..] else {
        panic!("threads, rounds and cases should be given")
    };
    let threads = threads.parse().expect("threads should be a number");
    let rounds: usize = rounds.parse().expect("rounds should be a number");
    let team = Team::new(threads).expect("threads should start");
    let mut other = vec![0u64; EVICTED_BYTES / size_of::<u64>()];
    for name in cases {
        let case = case(name);
        let ms = best(&case, &team, rounds, &mut other);
        println!("{{\"case\": \"{name}\", \"ms\": {ms:.4}}}");
    }
}

/// The fastest run, before each of which other memory passes through the caches.
fn best(case: &Case, team: &Team, rounds: usize, other: &mut [u64]) -> f64 {
    let ins: Vec<&OwnedTensor> = case.ins.iter().collect();
    let mut run = Run::new(case.op, &case.attrs, &ins, &case.outs, 1 << 26, &[])
        .expect("the kernel should take it");
    let mut best = f64::INFINITY;
    for _ in 0..rounds {
        other.iter_mut().for_each(|number| *number += 1);
        std::hint::black_box(&mut *other);
        let mut marks = vec![];
        run.run_on(Some(team), || marks.push(Instant::now()))
            .expect("the kernel should run");
        let [start, end] = marks[..] else {
            panic!("a run should be marked twice")
        };
        best = best.min((end - start).as_secs_f64() * 1e3);
    }
    best
}

fn numbers(list: &str) -> Vec<usize> {
    list.split(',')
        .map(|n| n.parse().expect("sizes should be numbers"))
        .collect()
}

fn random(shape: &[usize], seed: usize) -> OwnedTensor {
    let numbers: Vec<u8> = (0..shape.iter().product::<usize>())
        .flat_map(|i| {
            let hash = i.wrapping_mul(2654435761) + seed * 97;
            (((hash >> 7) % 2000) as f32 * 1e-3 - 1.0).to_le_bytes()
        })
        .collect();
    OwnedTensor::from_bytes(DType::F32, shape, &numbers)
}

fn case(name: &str) -> Case {
    let parts: Vec<&str> = name.split(':').collect();
    let [what, image, window] = parts[..] else {
        panic!("a case should have three parts")
    };
    let (image, window) = (numbers(image), numbers(window));
    let &[o, k, stride, padding, dilation, groups] = &window[..] else {
        panic!("a window should have six numbers")
    };
    let (f32s, c) = (|shape: &[usize]| (DType::F32, shape.to_vec()), image[1]);
    let pair = |n: usize| Attr::Ints(vec![n as i64; image.len() - 2]);
    let attr = |key: &str, value| (key.to_string(), value);
    let ones = |n: usize| Attr::Ints(vec![1; n]);
    let reach = dilation * (k - 1) + 1;
    let out = image[2..]
        .iter()
        .map(|n| (n + 2 * padding - reach) / stride + 1);
    let y: Vec<usize> = [image[0], o].into_iter().chain(out).collect();
    let mut w = vec![o, c / groups];
    w.extend(vec![k; image.len() - 2]);

    let mut attrs = vec![
        attr("dilation", pair(dilation)),
        attr("padding", pair(padding)),
        attr("stride", pair(stride)),
    ];
    let channels = |seed| random(&[c], seed);
    match what {
        "forward" => {
            attrs.push(attr("groups", Attr::Int(groups as i64)));
            let ins = vec![random(&image, 1), random(&w, 2)];
            let outs = vec![f32s(&y)];
            Case {
                op: "convolution",
                attrs,
                ins,
                outs,
            }
        }
        "input" | "weight" => {
            attrs.push(attr("groups", Attr::Int(groups as i64)));
            let mask = if what == "input" {
                [1, 0, 0]
            } else {
                [0, 1, 0]
            };
            attrs.push(attr("mask", Attr::Ints(mask.into())));
            let outs = vec![f32s(if what == "input" { &image } else { &w })];
            Case {
                op: "convolution_bwd",
                attrs,
                ins: vec![random(&y, 3), random(&image, 1), random(&w, 2)],
                outs,
            }
        }
        "norm" => Case {
            op: "batch_norm",
            attrs: vec![
                attr("eps", Attr::Float(1e-5)),
                attr("momentum", Attr::Float(0.1)),
            ],
            ins: vec![
                random(&image, 1),
                channels(2),
                channels(3),
                channels(4),
                channels(5),
            ],
            outs: [&image[..], &[c], &[c], &[c], &[c]].map(f32s).into(),
        },
        "norm_bwd" => Case {
            op: "batch_norm_bwd",
            attrs: vec![attr("mask", ones(3))],
            ins: vec![
                random(&image, 1),
                random(&image, 2),
                channels(3),
                channels(4),
                channels(5),
            ],
            outs: [&image[..], &[c], &[c]].map(f32s).into(),
        },
        "pool" => {
            attrs.push(attr("ceil", Attr::Bool(false)));
            attrs.push(attr("kernel", pair(k)));
            let y = [&[image[0], c], &y[2..]].concat();
            Case {
                op: "max_pool2d",
                attrs,
                ins: vec![random(&image, 1)],
                outs: vec![f32s(&y), (DType::I64, y)],
            }
        }
        "pool_bwd" => {
            let y = [&[image[0], c], &y[2..]].concat();
            let shape = image.iter().map(|&n| n as i64).collect();
            let plane = image[2] * image[3];
            let n: usize = y.iter().product();
            let at: Vec<i64> = (0..n).map(|i| (i * 4 % plane) as i64).collect();
            Case {
                op: "max_pool2d_bwd",
                attrs: vec![attr("shape", Attr::Ints(shape))],
                ins: vec![random(&y, 1), OwnedTensor::from_i64s(DType::I64, &y, &at)],
                outs: vec![f32s(&image)],
            }
        }
        other => panic!("{other} should be something to measure"),
    }
}
