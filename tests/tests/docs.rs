//! The samples in `docs/passes.md` must equal the results of the passes on `docs/mlp.ir`. A sample
//! names its pass, and its budget if the pass depends on one. The dump must contain its lines in
//! this order; `..` means omitted lines.

use ir::Device;
use passes::cost::Roofline;
use passes::graph::optimizer::Optimizer;
use passes::pipeline::{self, Budget, Kernels, Options};
use std::collections::BTreeMap;

const DOC: &str = include_str!("../../docs/passes.md");
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
