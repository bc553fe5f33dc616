//! Recompute only, on the graphs of `tests/data/remat`, as a table in Markdown: `cargo bench -p
//! tests --bench remat [-- STEPS]`.
//!
//! Overhead is the time of the reruns divided by the step's, in percent. The peak is the given
//! share of the memory for keeping everything. "bound" is a lower bound for all sets of reruns.
//! Shares are exact here; the published shares are rounded to two digits, so one published figure
//! is below the bound. "published" is the best of Checkmate's integer program (HiGHS), Moccasin's
//! constraint program (OR-tools), PyTorch 2.11's memory budget with its integer program, and a
//! randomised greedy search with pruning, on the same graphs.

use papers::remat::{Effort, Problem, curve, lower_bound, solve};
use std::io::Write;

/// Graph, budget as a share, the best of the published methods in percent.
const ROWS: [(&str, f64, f64); 9] = [
    ("gpt2", 0.9, 1.56),
    ("gpt2", 0.7, 8.80),
    ("gpt2", 0.6, 16.0),
    ("gpt4", 0.7, 6.47),
    ("gpt4", 0.66, 8.07),
    ("gpt4", 0.585, 10.4),
    ("gpt12", 0.82, 4.11),
    ("gpt12", 0.68, 9.39),
    ("gpt12", 0.60, 12.55),
];
/// With this many layers, gpt12 has 10 054 nodes.
const DEEP: u32 = 228;

fn main() {
    let steps = std::env::args().skip(1).find_map(|arg| arg.parse().ok());
    let effort = steps.map_or_else(Effort::default, |steps| Effort {
        steps,
        ..Effort::default()
    });
    let mut out = std::io::stdout();
    writeln!(
        out,
        "| graph | nodes | budget | ours % | bound % | published % | reruns | CPU s | bound CPU s |"
    )
    .expect("stdout should be open");
    writeln!(out, "|---|---|---|---|---|---|---|---|---|").expect("stdout should be open");
    for (name, share, published) in ROWS {
        writeln!(
            out,
            "{}",
            row(name, &problem(name), share, &format!("{published}"), effort)
        )
        .expect("stdout should be open");
    }
    for share in [0.82, 0.68, 0.60, 0.50] {
        writeln!(
            out,
            "{}",
            row("gpt228", &problem("gpt228"), share, "", effort)
        )
        .expect("stdout should be open");
    }
    writeln!(
        out,
        "\n| curve of | solutions | smallest peak | CPU s |\n|---|---|---|---|"
    )
    .expect("stdout should be open");
    for name in ["gpt2", "gpt4", "gpt12", "gpt228"] {
        let problem = problem(name);
        let start = clock();
        let curve = curve(&problem, effort);
        let seconds = clock() - start;
        let smallest =
            curve.last().map_or(0, |s| s.peak) as f64 / curve.first().map_or(1, |s| s.peak) as f64;
        writeln!(
            out,
            "| {name} | {} | {smallest:.3} | {seconds:.2} |",
            curve.len()
        )
        .expect("stdout should be open");
    }
}

fn problem(name: &str) -> Problem {
    let listed = match name {
        "gpt228" => lighterage_tests::remat::read("gpt12").map(|listed| listed.deeper(DEEP)),
        _ => lighterage_tests::remat::read(name),
    };
    listed
        .and_then(|listed| listed.problem())
        .expect("the graph should be there, and in order")
}

fn row(name: &str, problem: &Problem, share: f64, published: &str, effort: Effort) -> String {
    let keep =
        solve(problem, u64::MAX, effort).expect("keeping everything should fit without a budget");
    let budget = (keep.peak as f64 * share) as u64;
    let percent = |micros: f64| 100.0 * (micros / keep.micros - 1.0);
    let start = clock();
    let solution = solve(problem, budget, effort);
    let seconds = clock() - start;
    let start = clock();
    let bound = percent(lower_bound(problem, budget));
    let bound_seconds = clock() - start;
    let n = problem.nodes().len();
    let (ours, reruns) = solution.map_or(("none".into(), 0), |s| {
        (format!("{:.2}", percent(s.micros)), s.reruns.len())
    });
    format!(
        "| {name} | {n} | {share} | {ours} | {bound:.2} | {published} | {reruns} | {seconds:.2} | \
         {bound_seconds:.2} |"
    )
}

/// CPU seconds of this process so far, so that other work on the machine does not count. Linux
/// counts hundredths.
fn clock() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("this bench should run on Linux");
    let fields: Vec<&str> = stat[stat.rfind(')').map_or(0, |at| at + 1)..]
        .split_whitespace()
        .collect();
    let ticks = |field: usize| {
        fields
            .get(field)
            .and_then(|ticks| ticks.parse::<f64>().ok())
            .unwrap_or(0.0)
    };
    (ticks(11) + ticks(12)) / 100.0
}
