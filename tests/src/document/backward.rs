//! The optimizer's step in the backward: the toy of linear layers, and LLaMA 7B on a few devices.

use super::{Kind, Paper, Section};
use crate::linears::linears;
use papers::table::Table;
use passes::cost::{Roofline, Tabled};
use passes::decide::{Planner, Problem, decide};
use passes::graph::optimizer::Optimizer;
use passes::graph::{canonical, optimizer};
use passes::pipeline::Budget;
use passes::schedule::order::{self, Update};

pub(super) fn paper() -> Paper {
    Paper {
        title: "Faster PyTorch Training by Reducing Peak Memory (Lightning)",
        about: "The update of a parameter runs as soon as its gradient is complete.",
        sections: vec![
            Section {
                name: "backward-toy",
                title: "A stack of 20 linear layers: peak with updates after and in the backward",
                kind: Kind::Simulated,
                command: Some("lighterage plan … --update after"),
                body: toy,
                differs: "The post: 20 to 40 % less with AdamW, over 40 % less with SGD. Planned \
                          peaks, which runs reach to the byte; width 512, eight rows.",
                quick: true,
            },
            Section {
                name: "backward-llama",
                title: "LLaMA 7B with FSDP on devices of 40 GB: GB on each device",
                kind: Kind::Computed,
                command: None,
                body: llama,
                differs: "The post: with `foreach` it runs out of memory on four devices and runs \
                          on five; without it, it runs on four; the step in the backward frees \
                          another 5 GB. The same comes out, with 6 GB assumed for activations and \
                          buffers, which the post does not state. The post's times (8, 7.2, 2.5, \
                          1.15 s) follow from how often PyTorch's allocator stalls near the limit, \
                          which it does not state; they are not simulated.",
                quick: true,
            },
        ],
    }
}

fn toy() -> String {
    let mut table = Table::new(["optimizer", "after MB", "in the backward MB", "less"]);
    for optimizer in [Optimizer::AdamW, Optimizer::SgdMomentum, Optimizer::Sgd] {
        let [after, during] = [Update::After, Update::Backward].map(|update| {
            let mut graph = linears(20, 512, 8);
            canonical::run(&mut graph);
            optimizer::run(&mut graph, optimizer).expect("the layers have gradients");
            order::run(&mut graph, update);
            let graph = graph.compact();
            let device = passes::devices::named("cpu").expect("a known device");
            let roofline = Roofline::new(&device);
            let cost = Tabled::new(&roofline, &graph);
            let problem = Problem::new(&graph, &device, &cost);
            let decided = decide(&problem, Planner::Keep, Budget::Bytes(u64::MAX));
            decided.expect("everything should fit").figures.peak as f64
        });
        table.push(vec![
            optimizer.name().into(),
            format!("{:.1}", after / 1e6),
            format!("{:.1}", during / 1e6),
            format!("{:.1} %", 100.0 * (1.0 - during / after)),
        ]);
    }
    table.markdown()
}

/// Parameters of LLaMA 7B, of its largest unit that FSDP gathers at once (a layer), and of its
/// largest tensor in such a unit.
const PARAMETERS: f64 = 6.74e9;
const LAYER: f64 = 202.4e6;
/// A device's memory that a program can use: 40 GiB less the context.
const USABLE: f64 = 41.5e9;
/// Activations of a micro-batch and buffers: an assumption.
const REST: f64 = 6e9;

/// Bytes on each of `n` devices. Everything is in f32. `foreach` keeps, for all parameters at once,
/// the square root of the second moments and the quotient of the update; one after the other needs
/// these for one parameter only. In the backward, only the gradients of one layer exist.
fn on_each(n: f64, foreach: bool, in_backward: bool) -> f64 {
    let shard = 4.0 * PARAMETERS / n;
    let states = 3.0 * shard;
    let gathered = 2.0 * 4.0 * LAYER;
    let gradients = if in_backward { 4.0 * LAYER } else { shard };
    let temporaries = if foreach {
        2.0 * shard
    } else {
        4.0 * LAYER / n
    };
    states + gathered + gradients + temporaries + REST
}

fn llama() -> String {
    let mut table = Table::new(["", "devices", "states", "all", "fits 40 GB", "the post"]);
    for (name, n, foreach, in_backward, theirs) in [
        ("foreach", 4.0, true, false, "out of memory"),
        ("foreach", 5.0, true, false, "8 s"),
        ("one by one", 4.0, false, false, "7.2 s"),
        (
            "one by one, in the backward",
            4.0,
            false,
            true,
            "1.15 s, 5 GB less",
        ),
    ] {
        let all = on_each(n, foreach, in_backward);
        table.push(vec![
            name.into(),
            format!("{n}"),
            format!("{:.1}", 12.0 * PARAMETERS / n / 1e9),
            format!("{:.1}", all / 1e9),
            if all <= USABLE { "yes" } else { "no" }.into(),
            theirs.into(),
        ]);
    }
    table.markdown()
}
