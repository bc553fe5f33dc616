//! Recompute only, on graphs with published measurements of other methods: ours is at least as
//! good.

use papers::remat::{Effort, Problem, curve, evaluate, lower_bound, solve};

fn problem(name: &str) -> Problem {
    lighterage_tests::remat::read(name)
        .and_then(|listed| listed.problem())
        .expect("the graph should be there, and in order")
}

/// The time of reruns at a share of the memory for keeping everything, in percent of the step's
/// time, and its lower bound.
fn percent(problem: &Problem, share: f64, steps: u64) -> (f64, f64) {
    let budget = (evaluate(problem, &[]).peak as f64 * share) as u64;
    let solution = solve(problem, budget, Effort { steps, seed: 0 }).expect("the graph should fit");
    assert!(solution.peak <= budget);
    let over = |micros: f64| 100.0 * (micros / problem.base_micros() - 1.0);
    (over(solution.micros), over(lower_bound(problem, budget)))
}

/// Graph, budget as a share, and the allowed cost of reruns in percent. The best published figures
/// are 1.56, 8.80, 16.0; 6.47, 8.07, 10.4; 4.11, 9.39 and 12.55. 9.39 is PyTorch's figure at a
/// budget that rounds to 0.68: at exactly 0.68 the lower bound is higher, and at 0.683 we reach it.
#[test]
fn published_figures_are_reached() {
    let rows = [
        ("gpt2", 0.9, 1.565),
        ("gpt2", 0.7, 8.805),
        ("gpt2", 0.6, 16.015),
        ("gpt4", 0.7, 6.475),
        ("gpt4", 0.66, 8.075),
        ("gpt4", 0.585, 10.375),
        ("gpt12", 0.82, 4.115),
        ("gpt12", 0.68, 9.595),
        ("gpt12", 0.683, 9.385),
        ("gpt12", 0.60, 12.555),
    ];
    for (name, share, most) in rows {
        let (ours, bound) = percent(&problem(name), share, 100_000);
        assert!(
            ours <= most,
            "{name} at {share}: {ours:.3} % is more than {most} %"
        );
        assert!(
            bound <= ours + 1e-6,
            "{name} at {share}: {ours:.3} % is below the bound, {bound:.3} %"
        );
    }
    assert!(
        9.39 < percent(&problem("gpt12"), 0.68, 1).1,
        "the published figure should be below the bound at 0.68"
    );
}

/// Ten times deeper, the answer is within a hundredth of the bound.
#[test]
fn deep_graphs_are_solved_near_the_bound() {
    let deep = lighterage_tests::remat::read("gpt12")
        .expect("the graph should be there")
        .deeper(120);
    let (ours, bound) = percent(
        &deep.problem().expect("the graph should be in order"),
        0.6,
        30_000,
    );
    assert!(
        bound <= ours && ours <= 1.01 * bound,
        "{ours:.3} % against {bound:.3} %"
    );
}

/// The same number of layers gives the same graph.
#[test]
fn deeper_by_nothing_is_the_same() {
    for (name, layers) in [("gpt2", 2), ("gpt4", 4), ("gpt12", 12)] {
        let listed = lighterage_tests::remat::read(name).expect("the graph should be there");
        assert_eq!(listed.deeper(layers).problem(), listed.problem(), "{name}");
    }
}

/// A curve goes from keeping everything down to about a third, and gives the right peak and time of
/// each solution.
#[test]
fn a_curve_reaches_far_down() {
    let problem = problem("gpt12");
    let curve = curve(
        &problem,
        Effort {
            steps: 100_000,
            seed: 0,
        },
    );
    let least = curve.last().expect("a curve should have a point");
    assert!((least.peak as f64) < 0.36 * curve[0].peak as f64);
    for solution in &curve {
        let evaluation = evaluate(&problem, &solution.reruns);
        assert_eq!(
            (evaluation.peak, evaluation.micros),
            (solution.peak, solution.micros)
        );
    }
}

/// Without reruns, peak and time are the baselines of the published shares and overheads.
#[test]
fn baselines_are_the_published_ones() {
    for (name, peak, micros) in [
        ("gpt2", 364_579_842, 4462.888),
        ("gpt4", 666_635_266, 8638.756),
        ("gpt12", 7_328_079_874, 79_482.351),
    ] {
        let evaluation = evaluate(&problem(name), &[]);
        assert_eq!(evaluation.peak, peak, "{name}");
        assert!(
            (evaluation.micros - micros).abs() < 1e-3,
            "{name}: {} us",
            evaluation.micros
        );
    }
}
