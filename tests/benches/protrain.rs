//! Time of the four-number search, and of the search with parts of blocks: `cargo bench -p
//! lighterage-tests --bench protrain [-- FILE.pt2 …]`. Files are planned with AdamW on an RTX 3090.

use ir::Graph;
use lighterage_tests::paper_models::{self, A100, GPT2_1B, GPT2_10B, RTX3090};
use papers::blocks_search;
use papers::protrain::{Instance, search};
use passes::cost::{Roofline, Tabled};
use passes::decide::figures::instance;
use passes::decide::{Problem, blocks, chunks};
use passes::graph::optimizer::Optimizer;
use passes::graph::{canonical, optimizer};
use passes::schedule::order::{self, Update};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

const RUNS: u32 = 10;

fn main() {
    let mut out = std::io::stdout();
    let head = "| instance | blocks | chunks | evaluated | search ms | persistent, buffers, swap, \
        recompute | step s | parts ms | step s |\n|---|---|---|---|---|---|---|---|---|";
    writeln!(out, "{head}").expect("stdout should be open");
    let mut rows = vec![];
    for (name, model, machine, batch) in [
        ("1B b8 3090", GPT2_1B, RTX3090, 8),
        ("1B b64 3090", GPT2_1B, RTX3090, 64),
        ("1B b64 A100", GPT2_1B, A100, 64),
        ("10B b8 3090", GPT2_10B, RTX3090, 8),
        ("10B b64 3090", GPT2_10B, RTX3090, 64),
        ("10B b8 A100", GPT2_10B, A100, 8),
        ("10B b128 A100", GPT2_10B, A100, 128),
    ] {
        let choices = paper_models::choices(&model, &machine, batch, 4);
        rows.push((
            name.to_string(),
            paper_models::instance(&model, &machine, batch, 4),
            Some(choices),
        ));
    }
    for file in std::env::args().skip(1).filter(|arg| arg.ends_with(".pt2")) {
        let model = torch::read(Path::new(&file), &BTreeMap::new())
            .unwrap_or_else(|error| panic!("{error}"));
        let start = Instant::now();
        let instance = of_graph(model.graph);
        writeln!(
            out,
            "instance of {file}: {:.0} ms",
            start.elapsed().as_secs_f64() * 1e3
        )
        .expect("stdout should be open");
        rows.push((file, instance, None));
    }
    for (name, instance, choices) in rows {
        let start = Instant::now();
        let mut found = None;
        for _ in 0..RUNS {
            found = search(std::hint::black_box(&instance));
        }
        let millis = start.elapsed().as_secs_f64() * 1e3 / f64::from(RUNS);
        let config = found.map_or("does not fit".into(), |(c, _)| {
            format!(
                "{}, {}, {}, {}",
                c.n_persist, c.n_buffer, c.n_swap, c.n_recompute
            )
        });
        let evaluated = found.map_or(0, |(_, predicted)| predicted.evaluated);
        let (n, chunks) = (instance.n_repeated(), instance.chunks.len());
        let step = found.map_or(0.0, |(_, predicted)| predicted.times.step() / 1e6);
        let start = Instant::now();
        let parts = choices.and_then(|choices| {
            blocks_search::search(&instance, &choices).expect("choices should fit")
        });
        let parts = parts.map_or("|".into(), |parts| {
            format!(
                "{:.1} | {:.3}",
                start.elapsed().as_secs_f64() * 1e3,
                parts.times.step() / 1e6
            )
        });
        writeln!(
            out,
            "| {name} | {n} | {chunks} | {evaluated} | {millis:.2} | {config} | \
            {step:.3} | {parts} |"
        )
        .expect("stdout should be open");
    }
}

fn of_graph(mut graph: Graph) -> Instance {
    canonical::run(&mut graph);
    optimizer::run(&mut graph, Optimizer::AdamW).expect("a traced graph should have gradients");
    order::run(&mut graph, Update::Backward);
    let device = passes::devices::named("rtx3090").expect("rtx3090 should be a device");
    let roofline = Roofline::new(&device);
    let cost = Tabled::new(&roofline, &graph);
    let problem = Problem::new(&graph, &device, &cost);
    let blocks = blocks::find(&graph);
    let packing = chunks::grid_search(&chunks::sizes(&graph, &blocks), chunks::RANGE)
        .expect("a model should have parameters");
    // A host that reads and writes 40 GB/s.
    instance(&problem, &blocks, &packing, 4e4).expect("blocks and packing should agree")
}
