//! Decisions and certificates: the link decides between swapping and recomputing (ProTrain, section
//! 5.3.1), and no plan is faster than the certificate of its budget allows.

use ir::schedule::{InstrKind, Why};
use ir::{Device, Graph};
use passes::cost::{Roofline, Tabled};
use passes::decide::bound::{self, Certificate, Change};
use passes::decide::{Extent, Planner, Problem};
use passes::devices;
use passes::graph::optimizer::Optimizer;
use passes::pipeline::{self, Budget, Compiled, Options};
use std::collections::BTreeMap;
use std::path::Path;

fn model(name: &str) -> Graph {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("data/models/{name}/joint_coarse.pt2"));
    torch::read(&file, &BTreeMap::new()).unwrap().graph
}

fn compile(
    graph: &Graph,
    device: &Device,
    optimizer: Optimizer,
    planner: Planner,
    budget: Budget,
    extent: Extent,
) -> Compiled {
    let options = Options {
        optimizer,
        planner,
        budget,
        extent,
        ..Options::default()
    };
    pipeline::compile(
        graph.clone(),
        &options,
        device,
        &Roofline::new(device),
        &mut |_| (),
    )
    .unwrap()
}

#[test]
fn a_slow_link_recomputes_a_fast_one_swaps_and_spare_memory_does_neither() {
    let test = devices::named("test").unwrap();
    for name in ["gpt2-tiny", "llama-tiny"] {
        let graph = model(name);
        // Thousandths of the memory that swap; numbers of lines that copy states in or out, and of
        // reruns.
        let counts = |link_bandwidth: f64, share: f64| {
            let device = Device {
                link_bandwidth,
                link_micros: 0.0,
                ..test.clone()
            };
            let compiled = compile(
                &graph,
                &device,
                Optimizer::Sgd,
                Planner::Auto,
                Budget::Share(share),
                Extent::Plan,
            );
            let swapped = compiled
                .program
                .schedule
                .instrs
                .values()
                .filter(|data| data.why == Why::SwapOut);
            let swapped = swapped.map(|data| match data.kind {
                InstrKind::Copy { bytes, .. } => bytes as f64,
                InstrKind::Run { .. } => 0.0,
            });
            // Values below a thousandth of the memory do not count.
            let swapped =
                (1000.0 * swapped.sum::<f64>() / compiled.decided.keep_peak as f64) as u64;
            let count = |whys: &[Why]| {
                compiled
                    .program
                    .schedule
                    .instrs
                    .values()
                    .filter(|data| whys.contains(&data.why))
                    .count()
            };
            (
                swapped as usize,
                count(&[Why::Gather, Why::Offload]),
                count(&[Why::Recompute]),
            )
        };
        let (swapped, states, reruns) = counts(1e5, 0.8);
        assert!(
            swapped == 0 && 0 < reruns,
            "{name}, slow link: {swapped} swaps, {states} states, {reruns} reruns"
        );
        let (swapped, states, reruns) = counts(1e12, 0.8);
        assert!(
            0 < swapped + states && reruns == 0,
            "{name}, fast link: {swapped} swaps, {states} states, {reruns} reruns"
        );
        for link in [1e5, 1e12] {
            let (swapped, _, reruns) = counts(link, 1.0);
            assert_eq!((swapped, reruns), (0, 0), "{name}, spare memory");
        }
    }
}

/// The bound for the budget of a plan that has none, because no curve was computed for it.
fn certificate(compiled: &Compiled, device: &Device) -> Certificate {
    let roofline = Roofline::new(device);
    let graph = &compiled.program.graph;
    let cost = Tabled::new(&roofline, graph);
    let problem = Problem::new(graph, device, &cost).with_host_limit(device.host_bytes);
    let budget = compiled.decided.budget.unwrap();
    bound::certificate(&problem, budget, compiled.timeline.micros)
}

/// At the budgets of a whole curve, with slow and fast links and hosts: no plan is faster than the
/// bound, the bound falls as the budget grows, and it is higher than the time of running every node
/// once.
#[test]
fn certificates_hold() {
    let test = Device {
        launch_micros: 0.0,
        link_micros: 0.0,
        ..devices::named("test").unwrap()
    };
    let mut tight = 0;
    for (name, link_bandwidth, host_bandwidth) in [
        ("gpt2-tiny", 1e6, 1e10),
        ("gpt2-tiny", 1e8, 1e8),
        ("llama-tiny", 1e6, 1e10),
        ("llama-tiny", 1e9, 1e10),
    ] {
        let graph = model(name);
        let device = Device {
            link_bandwidth,
            host_bandwidth,
            ..test.clone()
        };
        let compiled = compile(
            &graph,
            &device,
            Optimizer::AdamW,
            Planner::Auto,
            Budget::Share(1.0),
            Extent::Curve,
        );
        let curve = compiled.decided.curve;
        assert!(3 <= curve.len(), "{name}: {curve:?}");
        let mut last = 0.0;
        for (bytes, _) in curve.iter().copied().step_by(1 + curve.len() / 5) {
            let compiled = compile(
                &graph,
                &device,
                Optimizer::AdamW,
                Planner::Auto,
                Budget::Bytes(bytes),
                Extent::Plan,
            );
            let certificate = certificate(&compiled, &device);
            let (bound, micros) = (certificate.lower_bound, compiled.timeline.micros);
            assert!(
                bound <= micros * (1.0 + 1e-9),
                "{name} at {bytes}: {micros} us beats {certificate:?}"
            );
            // The search for prices is not exact.
            assert!(
                last <= 1.01 * bound,
                "{name} at {bytes}: {bound} us, {last} us for more"
            );
            for &(change, changed) in &certificate.changes {
                assert!(
                    changed <= bound * (1.0 + 1e-6),
                    "{name} at {bytes}: {changed} us with {}",
                    change.name()
                );
            }
            tight += usize::from(certificate.changes[0].1 < 0.99 * bound);
            last = bound;
        }
    }
    assert!(
        3 <= tight,
        "memory should bind at some budgets, not at {tight}"
    );
}

/// A host with little memory raises the bound: what it has no room for stays on the device or is
/// computed again.
#[test]
fn the_bound_counts_the_hosts_memory() {
    let test = Device {
        link_bandwidth: 1e11,
        launch_micros: 0.0,
        link_micros: 0.0,
        ..devices::named("test").unwrap()
    };
    let graph = model("gpt2-tiny");
    let of = |host_bytes: u64| {
        let device = Device {
            host_bytes,
            ..test.clone()
        };
        let budget = Budget::Share(0.55);
        let compiled = compile(
            &graph,
            &device,
            Optimizer::AdamW,
            Planner::Auto,
            budget,
            Extent::Plan,
        );
        let certificate = certificate(&compiled, &device);
        (compiled, certificate)
    };
    let (roomy, certificate) = of(u64::MAX);
    let keep = roomy.decided.keep_peak;
    let change = |certificate: &Certificate| {
        let mut changes = certificate.changes.iter();
        let host = changes.find(|(change, _)| *change == Change::Host);
        host.map(|&(_, bound)| bound)
    };
    assert_eq!(change(&certificate), None);
    let mut last = certificate.lower_bound;
    let first = last;
    for share in [0.55, 0.5, 0.45, 0.4, 0.35] {
        let (compiled, certificate) = of((share * keep as f64) as u64);
        let bound = certificate.lower_bound;
        let micros = compiled.timeline.micros;
        assert!(bound <= micros, "{share}: {micros} us beats {bound}");
        assert!(
            last <= 1.01 * bound,
            "{share}: {bound} us, {last} with more"
        );
        assert!(
            change(&certificate).unwrap() <= bound * (1.0 + 1e-6),
            "{share}"
        );
        last = bound;
    }
    assert!(first < last, "{first} us, {last} us with a small host");
}
