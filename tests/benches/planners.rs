//! Compares the planners' predicted steps, as tables in Markdown: `cargo bench -p lighterage-tests
//! --bench planners [-- headline | grid | ablation] [FILE.pt2 …]`.
//!
//! `headline`: ProTrain's models at the device's memory, how the time is spent, and how much faster
//! `auto` is. `grid`: models, devices and budgets; `auto` must not be slower than any other planner
//! anywhere. Files, weightless traces, are planned in the grid on one device. `ablation`: for each
//! heuristic that drops candidates, its cost in the step's time and its saving in planning time;
//! only on request. All step times come from the simulator. GPT-2 is generated: see
//! `lighterage_tests::gpt2`.

use ir::{Device, Graph, Stream};
use lighterage_tests::gpt2::gpt2;
use passes::cost::{Roofline, Tabled};
use passes::decide::{Decided, Planner, Problem, decide, layout, record};
use passes::graph::optimizer::Optimizer;
use passes::graph::{canonical, optimizer};
use passes::pipeline::{Budget, Error};
use passes::plan::machine::{COMPUTE, D2H, DEVICE, H2D, ON_HOST};
use passes::plan::tuning::{Heuristics, RUNGS};
use passes::schedule::lives::lives;
use passes::schedule::order::{self, Update};
use passes::schedule::sync;
use passes::sim::simulate;
use passes::{alloc, realise};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

/// A ladder this much finer than the planner's own shows the cost of its coarseness.
const FINER: usize = 4;
const BUDGETS: [f64; 5] = [0.10, 0.25, 0.40, 0.60, 0.90];
const DEVICES: [&str; 4] = ["rtx3090", "a100-80g", "h200", "gh200"];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.iter().any(|arg| arg == "ablation") {
        ablation();
        return;
    }
    let only = |name: &str| {
        args.iter().any(|arg| arg == name) || !args.iter().any(|a| a == "headline" || a == "grid")
    };
    if only("headline") {
        headline();
    }
    if only("grid") {
        grid(
            &args
                .into_iter()
                .filter(|arg| arg.ends_with(".pt2"))
                .collect::<Vec<_>>(),
        );
    }
}

fn say(text: &str) {
    writeln!(std::io::stdout(), "{text}").expect("stdout should be open");
}

fn small(batch: u64) -> Graph {
    gpt2(32, 1600, 16, batch, 1024, 50257)
}

fn large(batch: u64) -> Graph {
    gpt2(48, 4096, 32, batch, 1024, 50257)
}

fn prepared(mut graph: Graph) -> Graph {
    canonical::run(&mut graph);
    optimizer::run(&mut graph, Optimizer::AdamW).expect("the model should have gradients");
    order::run(&mut graph, Update::Backward);
    graph.compact()
}

fn device(name: &str) -> Device {
    passes::devices::named(name).unwrap_or_else(|error| panic!("{error}"))
}

/// Calls `f` with the problem of a model on a device.
fn with_problem<T>(graph: &Graph, device: &Device, f: impl FnOnce(&Problem<'_>) -> T) -> T {
    let roofline = Roofline::new(device);
    let cost = Tabled::new(&roofline, graph);
    f(&Problem::new(graph, device, &cost).with_host_limit(device.host_bytes))
}

fn headline() {
    say(
        "| model | device | planner | step s | peak GiB | compute s | of it recompute s | waiting \
         s | in s | out s | host s | plan s |",
    );
    say("|---|---|---|---|---|---|---|---|---|---|---|---|");
    let mut gains = vec![];
    for (name, graph, on) in [
        ("1B b16", small(16), "rtx3090"),
        ("10B b16", large(16), "a100-80g"),
        ("10B b64", large(64), "a100-80g"),
        ("1B b64", small(64), "a100-80g"),
    ] {
        let (graph, device) = (prepared(graph), device(on));
        let steps = with_problem(&graph, &device, |problem| {
            let step = |planner: Planner| {
                let start = Instant::now();
                let decided = decide(problem, planner, Budget::Device);
                let seconds = start.elapsed().as_secs_f64();
                let (figures, step) = match &decided {
                    Ok(decided) => figures(problem, decided),
                    Err(Error::Infeasible(e)) => {
                        (format!("does not fit: {}", gib(e.smallest)), f64::INFINITY)
                    }
                    Err(error) => (error.to_string(), f64::INFINITY),
                };
                say(&format!(
                    "| {name} | {on} | {} | {figures} | {seconds:.1} |",
                    planner.name()
                ));
                step
            };
            let steps = [Planner::Protrain, Planner::Greedy, Planner::Auto].map(step);
            let finer = record::judge(
                problem,
                &layout::drafts(
                    problem,
                    layout::Gradients::Alone,
                    FINER * RUNGS,
                    &record::Wanted::ALL,
                ),
            );
            let fits = finer
                .iter()
                .filter(|r| r.peak <= device.device_bytes && r.host <= device.host_bytes);
            let finer = fits
                .map(|r| r.micros / 1e6)
                .min_by(f64::total_cmp)
                .unwrap_or(f64::INFINITY);
            (steps, finer)
        });
        gains.push((name, on, steps));
    }
    say(
        "\nAbove 1, `auto` is faster. The finer ladder has four times the capacities that the \
         planner tries.\n",
    );
    say(
        "| model | device | protrain / auto | protrain on the finer ladder / auto | greedy / auto \
         |\n|---|---|---|---|---|",
    );
    for (name, on, ([protrain, greedy, auto], finer)) in gains {
        let ratio = |step: f64| {
            if step.is_finite() {
                format!("{:.3}", step / auto)
            } else {
                "does not fit".into()
            }
        };
        say(&format!(
            "| {name} | {on} | {} | {} | {} |",
            ratio(protrain),
            ratio(finer),
            ratio(greedy)
        ));
    }
    say("");
}

fn gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / (1u64 << 30) as f64)
}

/// How the time is spent, and the step in seconds.
fn figures(problem: &Problem<'_>, decided: &Decided) -> (String, f64) {
    let graph = problem.graph;
    let mut schedule =
        realise::lines(problem, &decided.decisions).expect("a chosen plan should build");
    let lives = lives(problem, &schedule, decided.variant);
    let plan = alloc::allocate(&schedule, &lives);
    sync::run(graph, &mut schedule, &plan);
    let timeline = simulate(graph, &schedule, problem.cost);
    let busy = |stream: Stream| timeline.busy.get(stream).copied().unwrap_or(0.0) / 1e6;
    let recompute = timeline.recomputed / 1e6;
    let step = timeline.micros / 1e6;
    let streams = [H2D, D2H, ON_HOST]
        .map(|stream| format!("{:.2}", busy(stream)))
        .join(" | ");
    let (peak, compute) = (gib(plan.peak[DEVICE]), busy(COMPUTE));
    (
        format!(
            "{step:.3} | {peak} | {compute:.2} | {recompute:.2} | {:.2} | {streams}",
            step - compute
        ),
        step,
    )
}

fn grid(files: &[String]) {
    say(
        "Step over `auto`'s at shares of what keeping everything needs, and at the device's \
         memory: never below 1.\n",
    );
    say(
        "| model | device | planner | 10 % | 25 % | 40 % | 60 % | 90 % | device | plan s \
         |\n|---|---|---|---|---|---|---|---|---|---|",
    );
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/models");
    let read = |file: &Path| {
        torch::read(file, &BTreeMap::new())
            .map(|model| model.graph)
            .unwrap_or_else(|error| panic!("{error}"))
    };
    let mut least = f64::INFINITY;
    let mut rows = |name: &str, graph: Graph, devices: &[&str]| {
        let graph = prepared(graph);
        for on in devices {
            least = least.min(row(name, &graph, &device(on)));
        }
    };
    for name in ["gpt2-tiny/joint_coarse.pt2", "llama-tiny/joint_core.pt2"] {
        rows(name, read(&data.join(name)), &DEVICES);
    }
    rows("gpt2 1B b16", small(16), &DEVICES);
    rows("gpt2 10B b16", large(16), &DEVICES);
    if files.is_empty() {
        say("| (no FILE.pt2 given: skipped) | | | | | | | | | |");
    }
    for file in files {
        rows(
            file.rsplit('/').next().unwrap_or(file),
            read(Path::new(file)),
            &["a100-80g"],
        );
    }
    say(&format!("\nLeast ratio: {least:.6}"));
    assert!(1.0 <= least, "auto is slower than another planner");
}

/// Prints a model's rows on a device; returns the smallest ratio.
fn row(name: &str, graph: &Graph, device: &Device) -> f64 {
    with_problem(graph, device, |problem| {
        let mut keep_peak = 0;
        let all = [
            Planner::Auto,
            Planner::Keep,
            Planner::Greedy,
            Planner::Protrain,
        ];
        let curves = all.map(|planner| {
            let start = Instant::now();
            let decided = decide(problem, planner, Budget::Bytes(u64::MAX));
            let curve = decided.map(|decided| {
                keep_peak = decided.keep_peak;
                decided.curve
            });
            (
                planner,
                curve.unwrap_or_default(),
                start.elapsed().as_secs_f64(),
            )
        });
        let shares = BUDGETS.map(|share| (share * keep_peak as f64) as u64);
        let budgets: Vec<u64> = shares.into_iter().chain([device.device_bytes]).collect();
        let step = |curve: &[(u64, f64)], budget: u64| {
            curve
                .iter()
                .filter(|&&(peak, _)| peak <= budget)
                .map(|&(_, micros)| micros)
                .min_by(f64::total_cmp)
        };
        let mut least = f64::INFINITY;
        for (planner, curve, seconds) in &curves {
            let cells = budgets.iter().map(|&budget| {
                match (step(curve, budget), step(&curves[0].1, budget)) {
                    (Some(step), Some(_)) if *planner == Planner::Auto => {
                        format!("{:.3} ms", step / 1e3)
                    }
                    (Some(step), Some(auto)) => {
                        least = least.min(step / auto);
                        format!("{:.3}", step / auto)
                    }
                    // If another planner finds a plan, auto should find one.
                    (Some(_), None) => {
                        least = 0.0;
                        "auto does not fit".into()
                    }
                    (None, _) => "-".into(),
                }
            });
            let cells: Vec<String> = cells.collect();
            say(&format!(
                "| {name} | {} | {} | {} | {seconds:.1} |",
                device.name,
                planner.name(),
                cells.join(" | ")
            ));
        }
        least
    })
}

/// Each heuristic's name, and all other heuristics.
fn heuristics() -> [(&'static str, Heuristics); 8] {
    let all = Heuristics::ALL;
    [
        (
            "end_ladders",
            Heuristics {
                end_ladders: false,
                ..all
            },
        ),
        (
            "drop_dominated",
            Heuristics {
                drop_dominated: false,
                ..all
            },
        ),
        (
            "bound_overlap",
            Heuristics {
                bound_overlap: false,
                ..all
            },
        ),
        (
            "blur_peaks",
            Heuristics {
                blur_peaks: false,
                ..all
            },
        ),
        (
            "first_variant_is_fastest",
            Heuristics {
                first_variant_is_fastest: false,
                ..all
            },
        ),
        (
            "halve_fills",
            Heuristics {
                halve_fills: false,
                ..all
            },
        ),
        ("all six", Heuristics::NONE),
        (
            "take_back",
            Heuristics {
                take_back: false,
                ..all
            },
        ),
    ]
}

/// Plans at three budgets without each heuristic, compared with plans with all of them.
fn ablation() {
    say(
        "| model | device | without | step at 80 % | 50 % | 30 % | planning time \
         |\n|---|---|---|---|---|---|---|",
    );
    for (name, graph, on) in [
        (
            "12 layers b8",
            gpt2(12, 768, 12, 8, 1024, 50257),
            "a100-80g",
        ),
        ("12 layers b8", gpt2(12, 768, 12, 8, 1024, 50257), "rtx3090"),
        ("1B b16", small(16), "rtx3090"),
    ] {
        let (graph, device) = (prepared(graph), device(on));
        let roofline = Roofline::new(&device);
        let cost = Tabled::new(&roofline, &graph);
        // Microseconds of the steps, and the seconds of planning.
        let plans = |heuristics: Heuristics| -> (Vec<Option<f64>>, f64) {
            let problem = Problem::new(&graph, &device, &cost)
                .with_host_limit(device.host_bytes)
                .with_heuristics(heuristics);
            let start = Instant::now();
            let step = |share: f64| {
                let decided = decide(&problem, Planner::Auto, Budget::Share(share));
                decided.ok().map(|decided| decided.figures.micros)
            };
            let steps = [0.8, 0.5, 0.3].map(step).to_vec();
            (steps, start.elapsed().as_secs_f64())
        };
        let (with, with_seconds) = plans(Heuristics::ALL);
        for (without, heuristics) in heuristics() {
            let (steps, seconds) = plans(heuristics);
            let cells = steps.iter().zip(&with).map(|pair| match pair {
                (Some(without), Some(with)) => format!("{:.4}", without / with),
                (None, None) => "-".into(),
                (Some(_), None) => "only without".into(),
                (None, Some(_)) => "only with".into(),
            });
            let cells: Vec<String> = cells.collect();
            say(&format!(
                "| {name} | {on} | {without} | {} | {:.2} |",
                cells.join(" | "),
                seconds / with_seconds
            ));
        }
    }
    say(
        "\nRatios to plans with all heuristics: a step below 1 is what the heuristic costs, a \
         planning time above 1 what it saves.",
    );
}
