//! Compile time against graph size: `cargo bench -p tests --bench compile_time [-- FILE.pt2 …]`.
//!
//! Prints one row a model: nodes, lines, the time of each pass, and nanoseconds per n log n.

use passes::cost::Roofline;
use passes::pipeline::{self, Options, Report};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

fn main() {
    let files: Vec<String> = std::env::args().skip(1).filter(|arg| arg.ends_with(".pt2")).collect();
    let mut out = std::io::stdout();
    for file in files {
        let start = Instant::now();
        let model = match torch::read(Path::new(&file), &BTreeMap::new()) {
            Ok(model) => model,
            Err(error) => {
                writeln!(out, "{file}: {error}").expect("stdout should be open");
                continue;
            }
        };
        let read = start.elapsed().as_secs_f64();
        let device = passes::devices::named("a100-80g").expect("a100-80g should be a device");
        let cost = Roofline::new(&device);
        let options = Options { optimizer: passes::graph::optimizer::Optimizer::AdamW, ..Options::default() };
        let mut times = vec![];
        let start = Instant::now();
        let mut observer = |report: &Report<'_>| times.push(format!("{} {:.0}", report.name, report.time.as_secs_f64() * 1e3));
        let n = model.graph.order.len();
        let text = match pipeline::compile(model.graph, &options, &device, &cost, &mut observer) {
            Ok(compiled) => format!(
                "keep {} smallest {} planned {} lines {} predicted {:.0} ms",
                compiled.decided.keep_peak,
                compiled.decided.smallest,
                compiled.planned_peak,
                compiled.program.schedule.instrs.len(),
                compiled.timeline.micros / 1e3
            ),
            Err(error) => format!("{error}"),
        };
        let total = start.elapsed().as_secs_f64();
        let per = total * 1e9 / (n as f64 * (n as f64).log2());
        writeln!(out, "{file}: {n} nodes, read {read:.2} s, compile {total:.2} s, {per:.0} ns per n log n; {text}; ms: {}", times.join(", "))
            .expect("stdout should be open");
    }
}
