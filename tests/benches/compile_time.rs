//! Compile time against graph size, as a table in Markdown: `cargo bench -p tests --bench compile_time [-- FILE.pt2 …]`.
//!
//! Without files: residual networks of 0.3k to 12k nodes. The last column divides by n log n: it should not grow.

use ir::Graph;
use passes::cost::Roofline;
use passes::graph::optimizer::Optimizer;
use passes::pipeline::{self, Budget, Options, Report};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

fn main() {
    let files: Vec<String> = std::env::args().skip(1).filter(|arg| arg.ends_with(".pt2")).collect();
    let mut out = std::io::stdout();
    writeln!(out, "| graph | nodes | decide s | the rest ms | µs / (n log2 n) |\n|---|---|---|---|---|")
        .expect("stdout should be open");
    let graphs: Vec<Graph> = if files.is_empty() {
        [18, 60, 180, 360, 720].map(tests::chain::chain).to_vec()
    } else {
        let read = |file: &String| torch::read(Path::new(file), &BTreeMap::new()).map(|model| model.graph);
        files.iter().map(|file| read(file).unwrap_or_else(|error| panic!("{error}"))).collect()
    };
    for graph in graphs {
        writeln!(out, "{}", row(graph)).expect("stdout should be open");
    }
}

/// Compiles with AdamW for 60 % of what `keep` needs.
fn row(graph: Graph) -> String {
    let device = passes::devices::named("a100-80g").expect("a100-80g should be a device");
    let cost = Roofline::new(&device);
    let options = Options { optimizer: Optimizer::AdamW, budget: Budget::Share(0.6), ..Options::default() };
    let mut decide = 0.0;
    let mut observer = |report: &Report<'_>| {
        if report.name == "decide" {
            decide = report.time.as_secs_f64();
        }
    };
    let name = graph.name.clone();
    let start = Instant::now();
    let compiled = pipeline::compile(graph, &options, &device, &cost, &mut observer);
    let total = start.elapsed().as_secs_f64();
    let compiled = match compiled {
        Ok(compiled) => compiled,
        Err(error) => return format!("| {name} | {error} |"),
    };
    let n = compiled.program.graph.order.len() as f64;
    let per = total * 1e6 / (n * n.log2());
    format!("| {name} | {n} | {decide:.2} | {:.0} | {per:.0} |", (total - decide) * 1e3)
}
