//! Compile time against graph size, as a table in Markdown:
//! `cargo bench -p lighterage-tests --bench compile_time [-- FILE.pt2 …]`.
//!
//! Without files: residual networks of 0.3k to 12k nodes. First for one budget, as in `compile`,
//! also divided by n log n, which should not grow; then with the plans of all budgets, as in
//! `plan`.

use ir::Graph;
use passes::cost::Roofline;
use passes::decide::Extent;
use passes::graph::optimizer::Optimizer;
use passes::pipeline::{self, Budget, Error, Options, Report};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

fn main() {
    let files: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| arg.ends_with(".pt2"))
        .collect();
    let mut out = std::io::stdout();
    writeln!(
        out,
        "| graph | nodes | decide s | the rest ms | µs / (n log2 n) | all budgets s \
         |\n|---|---|---|---|---|---|"
    )
    .expect("stdout should be open");
    let graphs: Vec<Graph> = if files.is_empty() {
        [18, 60, 180, 360, 800]
            .map(lighterage_tests::chain::chain)
            .to_vec()
    } else {
        let read =
            |file: &String| torch::read(Path::new(file), &BTreeMap::new()).map(|model| model.graph);
        files
            .iter()
            .map(|file| read(file).unwrap_or_else(|error| panic!("{error}")))
            .collect()
    };
    for graph in graphs {
        writeln!(out, "{}", row(graph)).expect("stdout should be open");
    }
}

/// Compiles with AdamW at 60 % of the memory of `keep`.
fn row(graph: Graph) -> String {
    let name = graph.name.clone();
    let measured = compile(graph.clone(), Extent::Plan)
        .and_then(|plan| Ok((plan, compile(graph, Extent::Curve)?)));
    match measured {
        Ok((
            Measured {
                nodes,
                decide,
                total,
            },
            all,
        )) => {
            let n = nodes as f64;
            let per = total * 1e6 / (n * n.log2());
            let rest = (total - decide) * 1e3;
            format!(
                "| {name} | {nodes} | {decide:.2} | {rest:.0} | {per:.0} | {:.2} |",
                all.total
            )
        }
        Err(error) => format!("| {name} | {error} |"),
    }
}

/// Nodes of the compiled graph, and seconds.
struct Measured {
    nodes: usize,
    decide: f64,
    total: f64,
}

fn compile(graph: Graph, extent: Extent) -> Result<Measured, Error> {
    let device = passes::devices::named("a100-80g").expect("a100-80g should be a device");
    let cost = Roofline::new(&device);
    let options = Options {
        optimizer: Optimizer::AdamW,
        budget: Budget::Share(0.6),
        extent,
        ..Options::default()
    };
    let mut decide = 0.0;
    let mut observer = |report: &Report<'_>| {
        if report.name == "decide" {
            decide = report.time.as_secs_f64();
        }
    };
    let start = Instant::now();
    let compiled = pipeline::compile(graph, &options, &device, &cost, &mut observer)?;
    Ok(Measured {
        nodes: compiled.program.graph.order.len(),
        decide,
        total: start.elapsed().as_secs_f64(),
    })
}
