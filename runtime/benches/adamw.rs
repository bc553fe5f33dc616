//! AdamW on f32 beside what memory gives: the kernel, and the same streams with next to no arithmetic.
//!
//! `cargo bench -p runtime --bench adamw -- ELEMENTS THREADS ROUNDS` prints a line of JSON a round: milliseconds of the
//! kernel and of the streams, turn by turn. Both read p, g, m, v and write p, m, v in place: 28 bytes an element.
//! `benches/adamw.py` makes a table of it, with PyTorch beside.

#![allow(clippy::print_stdout, reason = "a benchmark's output is its purpose")]

use artifact::DType;
use runtime::Team;
use runtime::kernels::owned::{OwnedTensor, Run};
use std::time::Instant;

fn main() {
    // Cargo passes `--bench` along.
    let given: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let number = |i: usize, default| given.get(i).copied().unwrap_or(default);
    let (n, threads, rounds) = (number(0, 1 << 25), number(1, 2), number(2, 5));

    let hyper = OwnedTensor::from_f64s(DType::F64, &[5], &[1e-3, 0.9, 0.999, 1e-8, 0.01]);
    let step = OwnedTensor::from_i64s(DType::I64, &[], &[1]);
    let bytes: Vec<u8> = (0..n as u32).flat_map(|i| ((i % 1000) as f32 * 1e-3 - 0.5).to_le_bytes()).collect();
    let gradient = OwnedTensor::from_bytes(DType::F32, &[n], &bytes);
    drop(bytes);
    let zeros = OwnedTensor::zeros(DType::F32, &[n]);
    let ins = [&gradient, &gradient, &zeros, &zeros, &step, &hyper];
    let outs = vec![(DType::F32, vec![n]); 3];
    let mut run = Run::new("adamw", &[], &ins, &outs, 0, &[(0, 0), (2, 1), (3, 2)]).expect("the kernel should take it");
    let team = Team::new(threads).expect("threads should start");
    let [mut p, g, mut m, mut v] = [1.0f32, 2.0, 3.0, 4.0].map(|x| vec![x; n]);

    for round in 0..=rounds {
        let mut marks = vec![];
        run.run_on(Some(&team), || marks.push(Instant::now())).expect("the kernel should run");
        let kernel = marks[1].duration_since(marks[0]);
        let start = Instant::now();
        streams(threads, [&mut p, &mut m, &mut v], &g);
        let streams = start.elapsed();
        // The first round touches pages and wakes the machine.
        if 0 < round {
            let [kernel, streams] = [kernel, streams].map(|time| time.as_secs_f64() * 1e3);
            println!("{{\"kernel_ms\": {kernel:.4}, \"streams_ms\": {streams:.4}}}");
        }
    }
}

/// Reads and writes what the kernel does, on as many threads, each a part of the elements.
fn streams(threads: usize, [p, m, v]: [&mut Vec<f32>; 3], g: &[f32]) {
    let part = g.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let parts = p.chunks_mut(part).zip(m.chunks_mut(part)).zip(v.chunks_mut(part)).zip(g.chunks(part));
        for (((p, m), v), g) in parts {
            scope.spawn(move || {
                for (((p, m), v), g) in p.iter_mut().zip(m).zip(v).zip(g) {
                    *p += *g;
                    *m += *g;
                    *v += *g;
                }
            });
        }
    });
}
