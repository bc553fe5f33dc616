//! Convolutions and their gradients: milliseconds of each, for `benches/convolution.py`, which
//! compares them with PyTorch.
//!
//! `cargo bench -p lighterage-runtime --bench convolution -- THREADS ROUNDS CASE…` prints a line of
//! JSON for each case: the fastest of ROUNDS rounds. A case is
//! `WHAT:BATCH,INPUTS,HEIGHT,WIDTH:OUTPUTS, KERNEL,STRIDE,PADDING,DILATION,GROUPS`, where WHAT is
//! `forward`, `input`, `weight`, `both` (gradients), `norm`, `norm_bwd`, `pool`, `pool_bwd` or
//! `sum` (of each channel). Norms and sums have only the image. With `--bf16` or `--f16`,
//! convolutions have that type.

#![allow(clippy::print_stdout, reason = "a benchmark's output is its purpose")]

mod operands;

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

/// The fastest run. Before each run, other memory passes through the caches.
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
    operands::random(DType::F32, shape, seed)
}

/// A parsed case.
struct Asked {
    what: String,
    image: Vec<usize>,
    /// Shapes of the weight and of the result.
    weight: Vec<usize>,
    result: Vec<usize>,
    kernel: usize,
    groups: usize,
    /// Dilation, padding and stride.
    attrs: Vec<(String, Attr)>,
}

fn attr(key: &str, value: Attr) -> (String, Attr) {
    (key.to_string(), value)
}

fn f32s(shape: &[usize]) -> (DType, Vec<usize>) {
    (DType::F32, shape.to_vec())
}

fn asked(name: &str) -> Asked {
    let parts: Vec<&str> = name.split(':').collect();
    let [what, image, window] = parts[..] else {
        panic!("a case should have three parts")
    };
    let (image, window) = (numbers(image), numbers(window));
    let &[outputs, kernel, stride, padding, dilation, groups] = &window[..] else {
        panic!("a window should have six numbers")
    };
    let all = |n: usize| Attr::Ints(vec![n as i64; image.len() - 2]);
    let reach = dilation * (kernel - 1) + 1;
    let places = image[2..]
        .iter()
        .map(|n| (n + 2 * padding - reach) / stride + 1);
    let result = [image[0], outputs].into_iter().chain(places).collect();
    let mut weight = vec![outputs, image[1] / groups];
    weight.extend(vec![kernel; image.len() - 2]);
    let attrs = vec![
        attr("dilation", all(dilation)),
        attr("padding", all(padding)),
        attr("stride", all(stride)),
    ];
    Asked {
        what: what.to_string(),
        image,
        weight,
        result,
        kernel,
        groups,
        attrs,
    }
}

fn case(name: &str) -> Case {
    let asked = asked(name);
    match asked.what.as_str() {
        "forward" | "input" | "weight" | "both" => convolution(asked),
        "norm" | "norm_bwd" => norm(&asked),
        "pool" | "pool_bwd" => pool(asked),
        "sum" => sum(asked),
        other => panic!("{other} should be something to measure"),
    }
}

fn convolution(asked: Asked) -> Case {
    let Asked {
        what,
        image,
        weight,
        result,
        groups,
        mut attrs,
        ..
    } = asked;
    attrs.push(attr("groups", Attr::Int(groups as i64)));
    let dtype = operands::dtype();
    let random = |shape: &[usize], seed| operands::random(dtype, shape, seed);
    let result_of = |shape: &[usize]| (dtype, shape.to_vec());
    let (x, w) = (random(&image, 1), random(&weight, 2));
    if what == "forward" {
        return Case {
            op: "convolution",
            attrs,
            ins: vec![x, w],
            outs: vec![result_of(&result)],
        };
    }
    let (mask, outs) = match what.as_str() {
        "input" => ([1, 0, 0], vec![result_of(&image)]),
        "weight" => ([0, 1, 0], vec![result_of(&weight)]),
        _ => ([1, 1, 0], vec![result_of(&image), result_of(&weight)]),
    };
    attrs.push(attr("mask", Attr::Ints(mask.into())));
    Case {
        op: "convolution_bwd",
        attrs,
        ins: vec![random(&result, 3), x, w],
        outs,
    }
}

fn norm(asked: &Asked) -> Case {
    let c = [asked.image[1]];
    let numbers = [2, 3, 4, 5].map(|seed| random(&c, seed));
    let x = random(&asked.image, 1);
    if asked.what == "norm" {
        let mut outs = vec![f32s(&asked.image)];
        outs.extend(vec![f32s(&c); 3]);
        return Case {
            op: "batch_norm",
            attrs: vec![attr("eps", Attr::Float(1e-5))],
            ins: [x].into_iter().chain(numbers).take(3).collect(),
            outs,
        };
    }
    let dy = random(&asked.image, 6);
    Case {
        op: "batch_norm_bwd",
        attrs: vec![attr("mask", Attr::Ints(vec![1; 3]))],
        ins: [dy, x].into_iter().chain(numbers).take(5).collect(),
        outs: vec![f32s(&asked.image), f32s(&c), f32s(&c)],
    }
}

fn sum(asked: Asked) -> Case {
    let dims = (0..asked.image.len() as i64).filter(|&d| d != 1).collect();
    let mut shape = vec![1; asked.image.len()];
    shape[1] = asked.image[1];
    Case {
        op: "sum",
        attrs: vec![
            attr("dims", Attr::Ints(dims)),
            attr("keepdim", Attr::Bool(true)),
        ],
        ins: vec![random(&asked.image, 1)],
        outs: vec![f32s(&shape)],
    }
}

fn pool(asked: Asked) -> Case {
    let Asked {
        what,
        image,
        result,
        kernel,
        mut attrs,
        ..
    } = asked;
    let y = [&image[..2], &result[2..]].concat();
    attrs.push(attr("ceil", Attr::Bool(false)));
    attrs.push(attr("kernel", Attr::Ints(vec![kernel as i64; 2])));
    if what == "pool" {
        return Case {
            op: "max_pool2d",
            attrs,
            ins: vec![random(&image, 1)],
            outs: vec![f32s(&y), (DType::I64, y)],
        };
    }
    let plane = image[2] * image[3];
    let indices: Vec<i64> = (0..y.iter().product::<usize>())
        .map(|i| (i * 4 % plane) as i64)
        .collect();
    let shape = image.iter().map(|&n| n as i64).collect();
    Case {
        op: "max_pool2d_bwd",
        attrs: [attrs, vec![attr("shape", Attr::Ints(shape))]].concat(),
        ins: vec![
            random(&y, 1),
            OwnedTensor::from_i64s(DType::I64, &y, &indices),
        ],
        outs: vec![f32s(&image)],
    }
}
