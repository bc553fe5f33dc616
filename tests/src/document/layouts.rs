//! ProTrain: layouts, chunks, the search, and what its formulas predict for the paper's machines.

use super::{Kind, Paper, Section, systems};
use crate::gpt2::gpt2;
use crate::paper_models::{self, A100, GPT2_1B, GPT2_10B, Machine, Model, RTX3090};
use ir::Graph;
use papers::protrain::{self, Activation, BlockCost, Config, Fixed, Layout, interleaved};
use papers::table::Table;
use passes::cost::{Roofline, Tabled};
use passes::decide::{Problem, chunks, layout, record};
use passes::graph::optimizer::Optimizer;
use passes::graph::{canonical, optimizer};
use passes::schedule::order::{self, Update};

pub(super) fn paper() -> Paper {
    Paper {
        title: "ProTrain (MLSys 2026)",
        about: "The machines are four RTX 3090s and four A100s as the paper describes them \
                (`tests/src/paper_models.rs`): its links and memories are given, its measured \
                rates are not, so products are taken at 77 % (RTX 3090) and 48 % (A100) of the \
                peak, and 93 % of the host's memory is for states. These rates are assumptions: \
                one set for each machine, within what it can reach, with which tables 2 and 4 \
                come out. `tests/data/protrain` has a device file for each. Times are those of \
                the paper's formulas.",
        sections: [sections(), systems::sections()]
            .into_iter()
            .flatten()
            .collect(),
    }
}

fn sections() -> Vec<Section> {
    vec![
        Section {
            name: "protrain-estimator",
            title: "Figures 6 and 8: the formulas against the simulator, errors in percent",
            kind: Kind::Simulated,
            command: Some("lighterage plan … --protrain n_persist=…"),
            body: estimator,
            differs: "The paper compares with measurements: at most 4 % in time and memory for \
                          one model, 5 % in time and 10 % above in memory for several. Here the \
                          schedule of each configuration is built, placed and simulated line by \
                          line. The formulas have two terms that the paper's text does not: the \
                          wait for the first chunks' updates, and tied embeddings. A block's needs \
                          are read from one schedule, as in the paper's profiler.",
            quick: false,
        },
        Section {
            name: "protrain-figure2",
            title: "Figure 2: eight blocks, two swapped, four recomputed, N_interval 3",
            kind: Kind::Computed,
            command: None,
            body: figure_2,
            differs: "Equal: blocks 1 and 4 swap, 2, 3, 5 and 6 are recomputed, 7 and 8 are \
                          kept. The order lowers the peak.",
            quick: true,
        },
        Section {
            name: "protrain-table2",
            title: "Table 2: the largest GPT-2 that trains, billions of parameters",
            kind: Kind::Simulated,
            command: None,
            body: largest_models,
            differs: "Within 10 %. The host's memory decides: 12 bytes for each parameter that \
                          is not on a device.",
            quick: true,
        },
        Section {
            name: "protrain-table4",
            title: "Table 4: the chosen configurations",
            kind: Kind::Simulated,
            command: None,
            body: configurations,
            differs: "Every number is within 1 of the paper's. Everything stays on the device \
                          where that fits and costs at most 4 %, the error of the paper's \
                          predictions.",
            quick: true,
        },
        Section {
            name: "protrain-throughput",
            title: "Figure 3, tables 3 and 5: tokens a second on four A100s, at the best batch",
            kind: Kind::Simulated,
            command: None,
            body: throughput,
            differs: "One rate of products for all models: small widths reach less on a real \
                          GPU, large ones more. Every model is taken as a GPT-2 of the paper's \
                          width and depth (Table 1), so models with gated or grouped layers differ \
                          in their parameters.",
            quick: true,
        },
        Section {
            name: "protrain-figure4b",
            title: "Figure 4b: parts of a step of GPT-2 10B on four RTX 3090s",
            kind: Kind::Simulated,
            command: None,
            body: || parts_of_steps(&GPT2_10B, &RTX3090, &[8, 16, 32, 64]),
            differs: "As in the paper, the host's updates are nearly hidden. The paper prints \
                          no numbers.",
            quick: true,
        },
        Section {
            name: "protrain-figure5",
            title: "Figure 5: slowdown without each strategy, GPT-2 10B on four RTX 3090s",
            kind: Kind::Simulated,
            command: None,
            body: ablation,
            differs: "As in the paper, blocks that choose gain least on this machine: the link \
                          is busy with parameters, so nearly every block is recomputed anyway. In \
                          the paper overlapped updates gain more with larger batches; here less, \
                          because at batch 8 most chunks are already updated on the host, in a \
                          step that is short. The paper's text has lost its numbers.",
            quick: true,
        },
        Section {
            name: "protrain-swap",
            title: "Section 5.3.1: swapping or recomputing a block of GPT-2 40B, seconds",
            kind: Kind::Computed,
            command: None,
            body: swap_or_recompute,
            differs: "From the activations of a block (`sbh (34 + 5as/h)` bytes), the link and \
                          the products' rate. The paper does not state the batch; 78 sequences on \
                          each device give its first number.",
            quick: true,
        },
        Section {
            name: "protrain-buffers",
            title: "Section 5.4: more than three buffers where compute is the limit",
            kind: Kind::Simulated,
            command: None,
            body: buffers,
            differs: "As in the paper, three are enough: one each to fetch, compute and \
                          offload.",
            quick: true,
        },
        Section {
            name: "protrain-reverse",
            title: "Section 3.1.1: persistent chunks at the start or at the end of the model",
            kind: Kind::Simulated,
            command: None,
            body: reverse,
            differs: "The paper places them at the start for two reasons: the first chunks \
                          cannot be prefetched behind any compute, and the host's updates of the \
                          last gradients cannot hide. Here GPT-2 of 1 billion parameters, f32, \
                          batch 1, all blocks recomputed, simulated line by line.",
            quick: false,
        },
        Section {
            name: "protrain-waste",
            title: "Appendix B.1: bytes that chunks waste, in percent",
            kind: Kind::Computed,
            command: None,
            body: waste,
            differs: "Colossal-AI's documentation reports 0.63 % for GPT-2 small, packing \
                          single parameters. Whole blocks, which the paper asks for, cost more.",
            quick: true,
        },
        Section {
            name: "protrain-order",
            title: "Section 3.1.1: chunks in the order of initialisation or of execution",
            kind: Kind::Simulated,
            command: None,
            body: initialisation,
            differs: "A pass over a model with 24 blocks whose queries, keys, values, outputs \
                          and both MLP matrices are declared in six lists; three buffers, the \
                          chunk that was used longest ago leaves. In the order of execution each \
                          chunk is fetched once. Where a model declares its parameters block by \
                          block, both orders are the same.",
            quick: true,
        },
    ]
}

/// The error of the formulas for a configuration, as shares: of the step, and of the peak.
#[derive(Clone, Copy, Debug)]
pub struct Miss {
    /// The configuration.
    pub config: Config,
    /// Predicted over simulated time, minus 1.
    pub time: f64,
    /// Predicted over planned bytes, minus 1.
    pub bytes: f64,
}

/// The errors of some configurations of a model: the best ones for ten capacities, and fourteen
/// others. A plan's copies do not take more memory to come early.
pub fn misses(graph: &Graph, device: &str) -> Vec<Miss> {
    let device = passes::devices::named(device).expect("a known device");
    let roofline = Roofline::new(&device);
    let cost = Tabled::new(&roofline, graph);
    let problem = Problem::new(graph, &device, &cost);
    let model =
        layout::Model::new(&problem, layout::Gradients::ByChunk).expect("the model has parameters");
    let instance = model.instance();
    let ladder = model.ladder(&Fixed::default(), 10).into_iter();
    let mut configs: Vec<Config> = ladder.map(|(config, _)| config).collect();
    for k in 0..14 {
        let n_persist = (k * 5) % (instance.chunks.len() + 1);
        let (fewest, most) = instance.buffers(n_persist);
        let n_swap = (k * 7) % (instance.most_swaps() + 1);
        configs.push(Config {
            n_persist,
            n_buffer: fewest + (k * 3) % (most - fewest + 1),
            n_swap,
            n_recompute: (k * 11) % (instance.n_repeated() - n_swap + 1),
        });
    }
    let miss = |config: Config| {
        let mut drafts = vec![];
        record::propose(&problem, &model.decisions(&problem, &config), &mut drafts);
        let records = record::judge(&problem, &drafts);
        // The first draft has no bytes for early copies.
        let real = records.iter().find(|record| record.decisions.ahead == 0)?;
        let step = protrain::times(instance, &config).step();
        let bytes = protrain::memory(instance, &config) as f64;
        Some(Miss {
            config,
            time: step / real.micros - 1.0,
            bytes: bytes / real.peak as f64 - 1.0,
        })
    };
    configs.into_iter().filter_map(miss).collect()
}

/// A GPT-2 with its optimizer, in f32.
pub fn prepared(model: &Model, batch: u64) -> Graph {
    let Model {
        hidden,
        blocks,
        heads,
    } = *model;
    let mut graph = gpt2(blocks, hidden, heads, batch, 1024, 50257);
    canonical::run(&mut graph);
    optimizer::run(&mut graph, Optimizer::AdamW).expect("the model should have gradients");
    order::run(&mut graph, Update::Backward);
    graph.compact()
}

/// GPT-2 with 124 million parameters.
pub const GPT2_SMALL: Model = Model {
    hidden: 768,
    blocks: 12,
    heads: 12,
};

fn estimator() -> String {
    let mut table = Table::new([
        "model, batch",
        "machine",
        "configurations",
        "time, least",
        "time, most",
        "bytes, least",
        "bytes, most",
    ]);
    for (name, model, batch) in [
        ("GPT-2 small, 8", GPT2_SMALL, 8),
        ("GPT-2 1B, 16", GPT2_1B, 16),
        ("GPT-2 10B, 16", GPT2_10B, 16),
    ] {
        let graph = prepared(&model, batch);
        for device in ["rtx3090", "a100-80g", "gh200"] {
            let misses = misses(&graph, device);
            let ends = |of: fn(&Miss) -> f64| {
                let all = misses.iter().map(of);
                let least = all.clone().fold(f64::INFINITY, f64::min);
                [least, all.fold(f64::NEG_INFINITY, f64::max)]
            };
            let percent = |share: f64| format!("{:+.1}", 100.0 * share);
            let mut cells = vec![name.into(), device.into(), misses.len().to_string()];
            cells.extend(ends(|miss| miss.time).map(percent));
            cells.extend(ends(|miss| miss.bytes).map(percent));
            table.push(cells);
        }
    }
    table.markdown()
}

fn figure_2() -> String {
    let letters = |layout: &[Activation]| -> String {
        layout
            .iter()
            .map(|activation| match activation {
                Activation::Keep => 'K',
                Activation::Swap => 'S',
                Activation::Recompute => 'R',
            })
            .collect()
    };
    let ours = letters(&interleaved(8, 2, 4, 3));
    let mut table = Table::new(["", "blocks 1 to 8"]);
    table.push(vec!["the paper".into(), "SRRSRRKK".into()]);
    table.push(vec!["ours".into(), ours]);
    table.markdown()
}

/// Parameters of the largest GPT-2 of hidden size 8192 that fits with one sequence a device.
/// Fitting is monotone.
pub fn largest(machine: &Machine, world: u64) -> u64 {
    let model = |blocks| Model {
        hidden: 8192,
        blocks,
        heads: 64,
    };
    let fits = |blocks| {
        let instance = paper_models::instance(&model(blocks), machine, world, world);
        protrain::search(&instance).is_some()
    };
    let (mut fit, mut no_fit) = (1, 400);
    while fit + 1 < no_fit {
        let middle = (fit + no_fit) / 2;
        *(if fits(middle) { &mut fit } else { &mut no_fit }) = middle;
    }
    model(fit).total()
}

/// Table 2's machines, devices, and sizes in billions.
pub const TABLE_2: [(&str, Machine, u64, f64); 4] = [
    ("RTX 3090", RTX3090, 1, 34.0),
    ("RTX 3090", RTX3090, 4, 37.0),
    ("A100", A100, 1, 75.0),
    ("A100", A100, 4, 87.0),
];

fn largest_models() -> String {
    let mut table = Table::new(["machine", "devices", "the paper", "ours", "ratio"]);
    for (name, machine, world, theirs) in TABLE_2 {
        let ours = largest(&machine, world) as f64 / 1e9;
        table.push(vec![
            name.into(),
            world.to_string(),
            format!("{theirs}"),
            format!("{ours:.1}"),
            format!("{:.2}", ours / theirs),
        ]);
    }
    table.markdown()
}

/// Table 4: row, model, machine, batch, and `n_ckpt`, `n_swap`, `n_persist`, `n_buffer` of the
/// paper.
pub const TABLE_4: [(&str, Model, Machine, u64, [usize; 4]); 6] = [
    ("A, RTX 3090", GPT2_1B, RTX3090, 8, [0, 0, 12, 0]),
    ("A, A100", GPT2_1B, A100, 8, [0, 0, 12, 0]),
    ("B, RTX 3090", GPT2_1B, RTX3090, 64, [24, 2, 2, 3]),
    ("C, A100", GPT2_1B, A100, 64, [0, 0, 12, 0]),
    ("D, RTX 3090", GPT2_10B, RTX3090, 8, [48, 0, 3, 46]),
    ("E, A100", GPT2_10B, A100, 8, [0, 0, 15, 3]),
];

/// Share of a step below which offloading is no gain: the paper's predictions err by up to 4 %.
const NEAR: f64 = 0.04;

/// The configuration that the search finds for a row of Table 4, in its order, and the chunks.
pub fn chosen(model: &Model, machine: &Machine, batch: u64) -> ([usize; 4], usize) {
    let instance = paper_models::instance(model, machine, batch, 4);
    let (config, _) = protrain::choose(&instance, NEAR).expect("the paper's models should fit");
    let Config {
        n_persist,
        n_buffer,
        n_swap,
        n_recompute,
    } = config;
    (
        [n_recompute, n_swap, n_persist, n_buffer],
        instance.chunks.len(),
    )
}

fn configurations() -> String {
    let mut table = Table::new([
        "row",
        "batch",
        "N_block",
        "N_chunk (theirs)",
        "n_ckpt (theirs)",
        "n_swap (theirs)",
        "n_persist (theirs)",
        "n_buffer (theirs)",
    ]);
    for (row, model, machine, batch, theirs) in TABLE_4 {
        let (ours, n_chunk) = chosen(&model, &machine, batch);
        let their_chunks = if model.blocks == 32 { 12 } else { 49 };
        let mut cells = vec![
            row.into(),
            batch.to_string(),
            model.blocks.to_string(),
            format!("{n_chunk} ({their_chunks})"),
        ];
        let pairs = ours.iter().zip(&theirs);
        cells.extend(pairs.map(|(ours, theirs)| format!("{ours} ({theirs})")));
        table.push(cells);
    }
    table.markdown()
}

/// The batches that are tried for the best throughput, on all devices.
pub(super) const BATCHES: [u64; 16] = [
    4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320,
];

fn throughput() -> String {
    let model = |hidden, blocks, heads| Model {
        hidden,
        blocks,
        heads,
    };
    let rows = [
        ("Mistral-7B", model(4096, 32, 32), 11060.92),
        ("GPT2-10B", GPT2_10B, 8266.40),
        ("LLaMA-13B", model(5120, 40, 40), 6471.32),
        ("GPT2-20B", model(8192, 24, 64), 5043.75),
        ("GPT2-30B", model(8192, 36, 64), 3431.38),
        ("OPT-30B", model(7168, 48, 56), 3266.02),
        ("LLaMA-34B", model(8192, 48, 64), 2845.18),
        ("GPT2-40B", model(8192, 50, 64), 2723.50),
    ];
    let mut table = Table::new(["model", "best batch", "ours", "the paper", "ratio"]);
    for (name, model, theirs) in rows {
        let of = |batch: u64| {
            let instance = paper_models::instance(&model, &A100, batch, 4);
            let (_, predicted) = protrain::search(&instance)?;
            Some((batch, batch as f64 * 1024.0 * 1e6 / predicted.times.step()))
        };
        let best = BATCHES
            .into_iter()
            .filter_map(of)
            .max_by(|a, b| a.1.total_cmp(&b.1));
        let Some((batch, ours)) = best else { continue };
        table.push(vec![
            name.into(),
            batch.to_string(),
            format!("{ours:.0}"),
            format!("{theirs:.0}"),
            format!("{:.2}", ours / theirs),
        ]);
    }
    table.markdown()
}

/// The parts of a step of a model on four devices, by batch.
pub(super) fn parts_of_steps(model: &Model, machine: &Machine, batches: &[u64]) -> String {
    let mut table = Table::new([
        "batch",
        "forward s",
        "backward s",
        "update after it s",
        "host's updates s",
        "configuration",
    ]);
    for &batch in batches {
        let instance = paper_models::instance(model, machine, batch, 4);
        let Some((config, predicted)) = protrain::search(&instance) else {
            continue;
        };
        let times = predicted.times;
        let seconds = |micros: f64| format!("{:.2}", micros / 1e6);
        table.push(vec![
            batch.to_string(),
            seconds(times.forward),
            seconds(times.backward),
            seconds(times.step() - times.forward - times.backward),
            seconds(times.update_host),
            config.to_string(),
        ]);
    }
    table.markdown()
}

fn ablation() -> String {
    let mut table = Table::new([
        "batch",
        "three buffers instead of persistent chunks",
        "updates not overlapped",
        "every block recomputed",
    ]);
    for batch in [8, 16, 32, 64] {
        let instance = paper_models::instance(&GPT2_10B, &RTX3090, batch, 4);
        let Some((_, best)) = protrain::search(&instance) else {
            continue;
        };
        let step = best.times.step();
        let fastest = |fixed: Fixed| {
            let front = protrain::front(&instance, &fixed);
            let fits = front
                .iter()
                .find(|(_, predicted)| predicted.memory <= instance.capacity);
            fits.map(|(_, predicted)| predicted.times.step())
        };
        let ratio = |micros: Option<f64>| {
            micros.map_or("does not fit".into(), |m| format!("{:.2}", m / step))
        };
        let no_chunks = Fixed {
            n_persist: Some(0),
            n_buffer: Some(3),
            ..Fixed::default()
        };
        let no_blocks = Fixed {
            n_swap: Some(0),
            n_ckpt: Some(GPT2_10B.blocks),
            ..Fixed::default()
        };
        let times = best.times;
        let apart = times.forward + times.backward + times.update_device + times.update_host;
        table.push(vec![
            batch.to_string(),
            ratio(fastest(no_chunks)),
            ratio(Some(apart)),
            ratio(fastest(no_blocks)),
        ]);
    }
    table.markdown()
}

/// GPT-2 with 40 billion parameters.
const GPT2_40B: Model = Model {
    hidden: 8192,
    blocks: 50,
    heads: 64,
};
/// A GH200 in place of an A100: NVLink-C2C at 450 GB/s and 989 TFLOP/s, at the A100's shares.
pub const GH200: Machine = Machine {
    flops: 0.48 * 989e12,
    link: 0.8 * 450e9,
    ..A100
};

/// A block of GPT-2 40B in the paper's section 5.3.1.
pub fn block_of_40b(machine: &Machine) -> BlockCost {
    paper_models::instance(&GPT2_40B, machine, 4 * 78, 4).blocks[1].clone()
}

fn swap_or_recompute() -> String {
    let mut table = Table::new(["machine", "swap (theirs)", "recompute (theirs)", "cheaper"]);
    for (name, machine, theirs) in [("A100", A100, [1.9, 0.95]), ("GH200", GH200, [0.13, 0.3])] {
        let block = block_of_40b(&machine);
        let (swap, again) = (block.swap_out / 1e6, block.forward / 1e6);
        let cheaper = if swap < again { "swap" } else { "recompute" };
        table.push(vec![
            name.into(),
            format!("{swap:.2} ({})", theirs[0]),
            format!("{again:.2} ({})", theirs[1]),
            cheaper.into(),
        ]);
    }
    table.markdown()
}

fn buffers() -> String {
    let mut table = Table::new(["row", "buffers", "step s", "with all buffers, s"]);
    for (name, model, batch) in [("E", GPT2_10B, 8), ("10B, batch 64", GPT2_10B, 64)] {
        let instance = paper_models::instance(&model, &A100, batch, 4);
        let Some((config, _)) = protrain::search(&instance) else {
            continue;
        };
        let most = Config {
            n_buffer: instance.chunks.len() - config.n_persist,
            ..config
        };
        let step =
            |config: &Config| format!("{:.3}", protrain::times(&instance, config).step() / 1e6);
        table.push(vec![
            name.into(),
            config.n_buffer.to_string(),
            step(&config),
            step(&most),
        ]);
    }
    table.markdown()
}

fn reverse() -> String {
    let graph = prepared(&GPT2_1B, 1);
    let mut table = Table::new([
        "machine",
        "persistent chunks",
        "at the start s",
        "at the end s",
    ]);
    for name in ["rtx3090", "a100-80g"] {
        let device = passes::devices::named(name).expect("a known device");
        let roofline = Roofline::new(&device);
        let cost = Tabled::new(&roofline, &graph);
        let problem = Problem::new(&graph, &device, &cost).with_host_limit(device.host_bytes);
        let model = layout::Model::new(&problem, layout::Gradients::ByChunk)
            .expect("the model has parameters");
        let n = model.instance().chunks.len();
        for n_persist in [n / 4, n / 2] {
            let config = Config {
                n_persist,
                n_buffer: 3,
                n_swap: 0,
                n_recompute: model.instance().n_repeated(),
            };
            let start = config.layout(model.instance());
            let end = Layout {
                persistent: start.persistent.iter().rev().copied().collect(),
                // The last buffers hold the last chunks that are not persistent.
                cached: (0..n)
                    .map(|c| c + n_persist + 3 >= n && c + n_persist < n)
                    .collect(),
                ..start.clone()
            };
            let seconds = |layout: &Layout| {
                let mut drafts = vec![];
                record::propose(&problem, &model.carried_out(&problem, layout), &mut drafts);
                let records = record::judge(&problem, &drafts);
                let best = records.iter().map(|record| record.micros);
                best.min_by(f64::total_cmp).unwrap_or(f64::NAN) / 1e6
            };
            table.push(vec![
                name.into(),
                format!("{n_persist} of {n}"),
                format!("{:.3}", seconds(&start)),
                format!("{:.3}", seconds(&end)),
            ]);
        }
    }
    table.markdown()
}

/// Bytes of GPT-2's parameters in bf16, for each part.
fn gpt2_sizes(blocks: usize, h: u64) -> Vec<Vec<u64>> {
    let block = vec![
        2 * h,
        2 * h,
        6 * h * h,
        6 * h,
        2 * h * h,
        2 * h,
        2 * h,
        2 * h,
        8 * h * h,
        8 * h,
        8 * h * h,
        2 * h,
    ];
    let mut sizes = vec![vec![2 * 50257 * h, 2 * 1024 * h]];
    sizes.extend(vec![block; blocks]);
    sizes.push(vec![2 * h, 2 * h]);
    sizes
}

fn waste() -> String {
    let mut table = Table::new(["model", "blocks together", "chunks", "single parameters"]);
    for (name, blocks, h) in [
        ("GPT-2 small", 12, 768),
        ("GPT-2 1B", 32, 1600),
        ("GPT-2 10B", 48, 4096),
    ] {
        let together = gpt2_sizes(blocks, h);
        let single: Vec<Vec<u64>> = together
            .iter()
            .flatten()
            .map(|&bytes| vec![bytes])
            .collect();
        let packing = |sizes: &[Vec<u64>]| {
            chunks::grid_search(sizes, chunks::range(sizes)).expect("a model has parameters")
        };
        let (together, single) = (packing(&together), packing(&single));
        table.push(vec![
            name.into(),
            format!("{:.2}", together.waste_percent()),
            together.chunks.len().to_string(),
            format!("{:.2}", single.waste_percent()),
        ]);
    }
    table.markdown()
}

/// The fetches of a pass that uses chunks in this order, with `n_buffer` buffers.
fn fetches(uses: &[usize], n_buffer: usize) -> usize {
    let mut here: Vec<usize> = vec![];
    let mut fetched = 0;
    for &chunk in uses {
        let place = here.iter().position(|&other| other == chunk);
        fetched += usize::from(place.is_none());
        if let Some(place) = place {
            here.remove(place);
        }
        here.push(chunk);
        if here.len() > n_buffer {
            here.remove(0);
        }
    }
    fetched
}

fn initialisation() -> String {
    const BLOCKS: usize = 24;
    // Matrices of a block in units of h² parameters.
    const SIZES: [u64; 6] = [1, 1, 1, 1, 4, 4];
    let mut table = Table::new([
        "h² parameters a chunk",
        "chunks",
        "initialisation",
        "execution",
    ]);
    for capacity in [12, 24, 48] {
        let chunk_of = |order: &[(usize, usize)]| {
            let mut chunk = vec![[0; SIZES.len()]; BLOCKS];
            let (mut current, mut filled) = (0, 0);
            for &(block, part) in order {
                if capacity < filled + SIZES[part] {
                    (current, filled) = (current + 1, 0);
                }
                filled += SIZES[part];
                chunk[block][part] = current;
            }
            (chunk, current + 1)
        };
        let by_list: Vec<(usize, usize)> = (0..SIZES.len())
            .flat_map(|part| (0..BLOCKS).map(move |block| (block, part)))
            .collect();
        let by_use: Vec<(usize, usize)> = (0..BLOCKS)
            .flat_map(|block| (0..SIZES.len()).map(move |part| (block, part)))
            .collect();
        let count = |order: &[(usize, usize)]| {
            let (chunk, n) = chunk_of(order);
            let uses: Vec<usize> = by_use.iter().map(|&(b, part)| chunk[b][part]).collect();
            (fetches(&uses, 3), n)
        };
        let ((theirs, _), (ours, n)) = (count(&by_list), count(&by_use));
        table.push(vec![
            capacity.to_string(),
            n.to_string(),
            format!("{theirs} fetches"),
            format!("{ours} fetches"),
        ]);
    }
    table.markdown()
}
