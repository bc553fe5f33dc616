//! Weight offloading compared with the paper's table and figure, and its time: `cargo bench -p
//! lighterage-tests --bench offload`.
//!
//! Table 1 at two memories, Figure 4's bandwidths, and how long greedy+ takes on long chains. All
//! schedules are checked. Times are processor times of one thread, the smallest of several runs.

use papers::offload::paper::{MIB_PER_MS, TABLE_1, table_1, table_of_figure_4};
use papers::offload::{Algorithm, Instance, Solution, solve, validate::validate};
use std::io::Write;

fn main() {
    let mut out = std::io::stdout();
    let mut say = |line: String| writeln!(out, "{line}").expect("stdout should be open");
    for blocks in [1.1, 6.0] {
        say(format!(
            "Table 1, ms, with {blocks} blocks more than the least memory\n"
        ));
        say(table_1(blocks)
            .expect("the chains should have schedules")
            .markdown());
    }
    say("Figure 4, GPT-2 with 36 blocks: the step over its operations, %\n".into());
    say(table_of_figure_4()
        .expect("the chains should have schedules")
        .markdown());
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
