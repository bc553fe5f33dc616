//! AdamW on f32 compared with the memory's bandwidth: the kernel, and the same streams with almost
//! no arithmetic.
//!
//! `cargo bench -p lighterage-runtime --bench adamw -- ELEMENTS THREADS ROUNDS` prints a line of
//! JSON for each round: milliseconds of the kernel and of the streams, alternately, by the clock
//! and (on Linux) on a processor, per thread. Both read p, g, m, v and write p, m, v in place: 28
//! bytes an element. `benches/adamw.py` makes a table of it, together with PyTorch.

#![allow(clippy::print_stdout, reason = "a benchmark's output is its purpose")]

use artifact::DType;
use lighterage_runtime::Team;
use lighterage_runtime::kernels::owned::{OwnedTensor, Run};
use pulp::{Arch, Simd, WithSimd};
use std::path::Path;
use std::time::Instant;

fn main() {
    // Cargo passes `--bench` along.
    let given: Vec<usize> = std::env::args()
        .skip(1)
        .filter_map(|arg| arg.parse().ok())
        .collect();
    let number = |i: usize, default| given.get(i).copied().unwrap_or(default);
    let (n, threads, rounds) = (number(0, 1 << 25), number(1, 2), number(2, 5));

    let hyper = OwnedTensor::from_f64s(DType::F64, &[5], &[1e-3, 0.9, 0.999, 1e-8, 0.01]);
    let step = OwnedTensor::from_i64s(DType::I64, &[], &[1]);
    let bytes: Vec<u8> = (0..n as u32)
        .flat_map(|i| ((i % 1000) as f32 * 1e-3 - 0.5).to_le_bytes())
        .collect();
    let gradient = OwnedTensor::from_bytes(DType::F32, &[n], &bytes);
    drop(bytes);
    let zeros = OwnedTensor::zeros(DType::F32, &[n]);
    let ins = [&gradient, &gradient, &zeros, &zeros, &step, &hyper];
    let outs = vec![(DType::F32, vec![n]); 3];
    let mut run = Run::new("adamw", &[], &ins, &outs, 0, &[(0, 0), (2, 1), (3, 2)])
        .expect("the kernel should take it");
    let team = Team::new(threads).expect("threads should start");
    let [mut p, g, mut m, mut v] = [1.0f32, 2.0, 3.0, 4.0].map(|x| vec![x; n]);

    for round in 0..=rounds {
        let mut marks = vec![];
        run.run_on(Some(&team), || marks.push(now()))
            .expect("the kernel should run");
        let start = Instant::now();
        let streams_cpu = streams(threads, [&mut p, &mut m, &mut v], &g);
        let (kernel, streams) = (marks[1].0 - marks[0].0, start.elapsed());
        // The first round touches pages and wakes the machine.
        if 0 < round {
            let [kernel, streams] = [kernel, streams].map(|time| time.as_secs_f64() * 1e3);
            let cpu = [marks[1].1 - marks[0].1, streams_cpu]
                .map(|time| time as f64 / 1e6 / threads as f64);
            println!(
                "{{\"kernel_ms\": {kernel:.4}, \"streams_ms\": {streams:.4}, \"kernel_cpu_ms\": \
                 {:.4}, \
                 \"streams_cpu_ms\": {:.4}}}",
                cpu[0], cpu[1]
            );
        }
    }
}

/// The time, and the nanoseconds that this process's threads have been on a processor.
fn now() -> (Instant, u64) {
    let tasks = std::fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten();
    (
        Instant::now(),
        tasks
            .map(|task| on_cpu(&task.path().join("schedstat")))
            .sum(),
    )
}

/// Nanoseconds that a thread has been on a processor; 0 if the system does not say.
fn on_cpu(schedstat: &Path) -> u64 {
    let text = std::fs::read_to_string(schedstat).unwrap_or_default();
    text.split_whitespace()
        .next()
        .and_then(|word| word.parse().ok())
        .unwrap_or(0)
}

/// Reads and writes the same bytes as the kernel, on the same number of threads; each has a part of
/// the elements. Returns the nanoseconds that they were on a processor.
fn streams(threads: usize, [p, m, v]: [&mut Vec<f32>; 3], g: &[f32]) -> u64 {
    let part = g.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let parts = p
            .chunks_mut(part)
            .zip(m.chunks_mut(part))
            .zip(v.chunks_mut(part))
            .zip(g.chunks(part));
        let sums = parts.map(|(((p, m), v), g)| Sums { p, m, v, g });
        let run = |sums| {
            Arch::new().dispatch::<Sums<'_>>(sums);
            on_cpu(Path::new("/proc/thread-self/schedstat"))
        };
        let threads: Vec<_> = sums.map(|sums| scope.spawn(move || run(sums))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a sum should not panic"))
            .sum()
    })
}

const BLOCK: usize = 256;

/// Almost no arithmetic, on the machine's widest vectors.
struct Sums<'a> {
    p: &'a mut [f32],
    m: &'a mut [f32],
    v: &'a mut [f32],
    g: &'a [f32],
}

impl WithSimd for Sums<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        // Block by block, stream by stream, which is faster than all at once: see
        // `kernels/optim.rs`.
        let news = self
            .p
            .chunks_mut(BLOCK)
            .zip(self.m.chunks_mut(BLOCK))
            .zip(self.v.chunks_mut(BLOCK));
        for (((p, m), v), g) in news.zip(self.g.chunks(BLOCK)) {
            for x in [p, m, v] {
                x.iter_mut().zip(g).for_each(|(x, g)| *x += *g);
            }
        }
    }
}
