//! The samples in `docs/passes.md` must equal the results of the passes on `docs/mlp.ir`. A sample
//! names its pass, and its budget if the pass depends on one. The dump must contain its lines in
//! this order; `..` means omitted lines.

use ir::Device;
use passes::cost::Roofline;
use passes::graph::optimizer::Optimizer;
use passes::pipeline::{self, Budget, Kernels, Options};
use std::collections::BTreeMap;

const DOC: &str = include_str!("../../docs/passes.md");
const README: &str = include_str!("../../README.md");
const MODEL: &str = include_str!("../../docs/mlp.ir");

/// The result of each pass on the model, by name, as in the dumps of `plan docs/mlp.ir --optimizer
/// sgd --device docs/mlp.toml --kernels plain`.
fn dumps(percent: f64) -> BTreeMap<String, String> {
    let graph = ir::text::parse_graph(MODEL).unwrap();
    let device = Device::from_toml(include_str!("../../docs/mlp.toml")).unwrap();
    let budget = Budget::Share(percent / 100.0);
    let options = Options {
        optimizer: Optimizer::Sgd,
        budget,
        kernels: Kernels::Plain,
        ..Options::default()
    };
    let mut dumps = BTreeMap::from([("import".to_string(), ir::text::print_graph(&graph))]);
    pipeline::compile(
        graph,
        &options,
        &device,
        &Roofline::new(&device),
        &mut |report| {
            dumps.insert(report.name.to_string(), (report.text)());
        },
    )
    .unwrap();
    dumps
}

#[test]
fn samples_are_what_the_passes_print() {
    let samples: Vec<&str> = DOC
        .split("```ir ")
        .skip(1)
        .map(|rest| rest.split_once("```").unwrap().0)
        .collect();
    assert!(!samples.is_empty());
    for sample in samples {
        let (head, text) = sample.split_once('\n').unwrap();
        let (pass, percent) = head.split_once(' ').unwrap_or((head, "100%"));
        let dumps = dumps(percent.strip_suffix('%').unwrap().parse().unwrap());
        let dump = &dumps[pass];
        let mut lines = dump.lines();
        for line in text.lines().filter(|line| line.trim() != "..") {
            assert!(
                lines.any(|other| other == line),
                "docs/passes.md: {head} has not, or not here: {line}\n{dump}"
            );
        }
    }
}

#[test]
fn every_pass_is_told() {
    for name in pipeline::names() {
        assert!(
            DOC.contains(&format!("| `{name}` |")),
            "docs/passes.md should have a row for {name}"
        );
    }
}

/// The sample of `train` in README.md is that of the example at 20 %: its bytes and its predicted
/// time.
#[test]
fn the_readme_shows_the_example() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/gpt2/gpt2.pt2");
    let graph = torch::read(file.as_ref(), &BTreeMap::new()).unwrap().graph;
    let device = passes::devices::named("cpu").unwrap();
    let options = Options {
        optimizer: Optimizer::AdamW,
        budget: Budget::Share(0.2),
        ..Options::default()
    };
    let cost = Roofline::new(&device);
    let compiled = pipeline::compile(graph, &options, &device, &cost, &mut |_| ()).unwrap();
    let mib = |bytes: u64| bytes as f64 / (1u64 << 20) as f64;
    let (peak, keep) = (compiled.planned_peak, compiled.decided.keep_peak);
    let moved = compiled.timeline.swapped_bytes;
    for line in [
        format!(
            "peak          {:.1} MiB ({peak} bytes), planned = measured\n",
            mib(peak)
        ),
        format!(
            "keep          {:.1} MiB ({keep} bytes): the peak is {:.1}% of it\n",
            mib(keep),
            100.0 * peak as f64 / keep as f64
        ),
        format!(" {:.2} ms predicted;", compiled.timeline.micros / 1e3),
        format!("moved         {:.1} MiB of swaps and states,", mib(moved)),
    ] {
        assert!(README.contains(&line), "README.md should have: {line}");
    }
}
