//! Weight offloading compared with the paper's table and figure, and its time: `cargo bench -p
//! lighterage-tests --bench offload`.
//!
//! Table 1 at two memories, Figure 4's bandwidths, and how long greedy+ takes on long chains. All
//! schedules are checked. Times are processor times of one thread, the smallest of several runs.

use papers::offload::paper::{MIB_PER_MS, TABLE_1};
use papers::offload::{Algorithm, Instance, Solution, solve, validate::validate};
use std::io::Write;

/// The paper's unit: 1000 MiB.
const GB: f64 = 1000.0 * 1048576.0;

fn main() {
    let mut out = std::io::stdout();
    let mut say = |line: String| writeln!(out, "{line}").expect("stdout should be open");
    say("Table 1: pauses, in times that a block takes to move; L2L in ms off the paper's".into());
    say(
        "| row | paper: greedy, greedy* | memory | greedy+ | greedy | greedy* | first half | L2L \
        off |"
            .into(),
    );
    say("|---|---|---|---|---|---|---|---|".into());
    for row in &TABLE_1 {
        for blocks in [1.1, 6.0] {
            let mut instance = row.instance();
            let block = instance.layers[1].weight_bytes as f64;
            instance.memory_bytes = instance.floor_bytes() + (blocks * block) as u64;
            let block_ms = block / instance.bytes_per_micro / 1e3;
            let paper = |millis: u32| f64::from(millis - row.compute) / block_ms;
            let pause = |algorithm| {
                checked(&instance, algorithm).map_or("-".into(), |solution| {
                    format!(
                        "{:.2}",
                        (solution.schedule.period - solution.compute_micros) / 1e3 / block_ms
                    )
                })
            };
            let l2l = checked(&instance, Algorithm::L2l).expect("L2L should fit");
            say(format!(
                "| {} | {:.1}, {:.1} | floor + {blocks} | {} | {} | {} | {} | {:+.2} |",
                row.name(),
                paper(row.greedy),
                paper(row.greedy_star),
                pause(Algorithm::GreedyPlus),
                pause(Algorithm::Greedy),
                pause(Algorithm::GreedyStar),
                pause(Algorithm::FirstHalf),
                l2l.schedule.period / 1e3 - f64::from(row.l2l),
            ));
        }
    }
    say("\nFigure 4, GPT-2 38: step over its operations, %; greedy+ over the bound, %".into());
    say(
        "| batch, memory GB | GB/s | bound | greedy+ | over the bound | greedy | greedy* | first \
        half | L2L |"
            .into(),
    );
    say("|---|---|---|---|---|---|---|---|---|".into());
    for (row, gb) in [(5, 13.0), (5, 9.0), (8, 13.0), (8, 9.0)] {
        for bandwidth in [0.5, 1.0, 2.0, 4.0, 8.0, 12.0] {
            let mut instance = TABLE_1[row].instance();
            instance.memory_bytes = (gb * GB) as u64;
            instance.bytes_per_micro = bandwidth * MIB_PER_MS;
            let best = checked(&instance, Algorithm::GreedyPlus).expect("greedy+ should fit");
            let over = |a: f64, b: f64| 100.0 * (a / b - 1.0).max(0.0);
            let other = |algorithm| {
                checked(&instance, algorithm).map_or("-".into(), |solution| {
                    format!(
                        "{:.2}",
                        over(solution.schedule.period, solution.compute_micros)
                    )
                })
            };
            say(format!(
                "| {}, {gb} | {bandwidth} | {:.2} | {:.2} | {:.2} | {} | {} | {} | {} |",
                TABLE_1[row].batch,
                over(best.bound_micros, best.compute_micros),
                over(best.schedule.period, best.compute_micros),
                over(best.schedule.period, best.bound_micros),
                other(Algorithm::Greedy),
                other(Algorithm::GreedyStar),
                other(Algorithm::FirstHalf),
                other(Algorithm::L2l),
            ));
        }
    }
    say(
        "\nTime of greedy+, half-way between the least memory and all, GPT-2's blocks, batch 32; \
        ms"
        .into(),
    );
    say(
        "| layers | GB/s | step over its operations, % | over the bound, % | greedy+, bound \
        included | bound |"
            .into(),
    );
    say("|---|---|---|---|---|---|".into());
    for n_layers in [38, 128, 512] {
        for bandwidth in [0.5, 1.0, 2.0, 4.0, 12.0] {
            let mut instance = TABLE_1[5].instance();
            let block = instance.layers[1];
            instance.layers.resize(n_layers, block);
            instance.memory_bytes = instance.floor_bytes() / 2 + instance.keep_bytes() / 2;
            instance.bytes_per_micro = bandwidth * MIB_PER_MS;
            let solution = checked(&instance, Algorithm::GreedyPlus).expect("greedy+ should fit");
            let period = solution.schedule.period;
            say(format!(
                "| {n_layers} | {bandwidth} | {:.2} | {:.3} | {:.0} | {:.0} |",
                100.0 * (period / solution.compute_micros - 1.0),
                100.0 * (period / solution.bound_micros - 1.0),
                least_millis(|| drop(solve(&instance, Algorithm::GreedyPlus))),
                least_millis(|| drop(papers::offload::bound(&instance))),
            ));
        }
    }
}

/// A solution that the validator accepts, or none.
fn checked(instance: &Instance, algorithm: Algorithm) -> Option<Solution> {
    let solution = solve(instance, algorithm).ok()?;
    if let Err(error) = validate(instance, &solution.schedule) {
        panic!("{}: {error}", algorithm.name());
    }
    Some(solution)
}

/// The processor time of the work, ms: the smallest of five means over 40 ms and more.
fn least_millis(work: impl Fn()) -> f64 {
    let mean = || {
        let (start, mut runs) = (processor_millis(), 0.0);
        loop {
            work();
            runs += 1.0;
            let spent = processor_millis() - start;
            if 40.0 <= spent || 1000.0 <= runs {
                return spent / runs;
            }
        }
    };
    (0..5).map(|_| mean()).fold(f64::INFINITY, f64::min)
}

/// This thread's processor time, if the system gives it; else the clock.
fn processor_millis() -> f64 {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanos = told.and_then(|text| {
        text.split(' ')
            .next()
            .and_then(|nanos| nanos.parse::<f64>().ok())
    });
    let clock = || {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0.0, |t| t.as_secs_f64() * 1e9)
    };
    nanos.unwrap_or_else(clock) / 1e6
}
