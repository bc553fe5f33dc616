//! ProTrain beside other systems, on other numbers of devices, and what a profiler of layers does
//! not see.

use super::layouts::{self, prepared};
use super::{Kind, Section};
use crate::paper_models::{self, A100, GPT2_10B, Machine, Model, RTX3090, SEQUENCE, VOCABULARY};
use ir::graph::Phase;
use ir::schedule::InstrKind;
use ir::{Graph, Schedule};
use papers::protrain::{self, Config, Instance};
use papers::table::Table;
use passes::alloc::{lifetimes, live_bytes};
use passes::cost::{Roofline, Tabled};
use passes::decide::{Problem, layout};
use passes::plan::machine::DEVICE;
use passes::realise;
use std::time::Instant;

pub(super) fn sections() -> Vec<Section> {
    let mut sections = comparisons();
    sections.extend(vec![
        Section {
            name: "protrain-scaling",
            title: "Figures 4a and 7a: one to four devices, tokens a second at the best batch",
            kind: Kind::Simulated,
            command: None,
            body: scaling,
            differs: "The paper: 2493 tokens a second for GPT-2 10B on four RTX 3090s, 3.5 times \
                      one, so 712 on one. Its figure 7a has lost its numbers. One A100 has room \
                      for fewer activations of the 34B model, so four are more than four times as \
                      fast here.",
            quick: true,
        },
        Section {
            name: "protrain-figure7b",
            title: "Figure 7b: parts of a step of LLaMA 34B on four A100s",
            kind: Kind::Simulated,
            command: None,
            body: || layouts::parts_of_steps(&LLAMA_34B, &A100, &[8, 16, 32, 64, 128]),
            differs: "As in the paper, the host's updates are hidden behind the backward. The \
                      paper prints no numbers.",
            quick: true,
        },
        Section {
            name: "protrain-note3",
            title: "Note 3: the longest sequence of GPT-2 75B on one A100",
            kind: Kind::Simulated,
            command: None,
            body: longest,
            differs: "The paper trains it up to 7168 tokens and does not say with how many \
                      sequences: one is taken here. It fits, and twice the length nearly does too.",
            quick: false,
        },
        Section {
            name: "protrain-profiler",
            title: "Section 3.2: the peak that a profiler of layers does not see",
            kind: Kind::Simulated,
            command: Some("lighterage plan … --lines lines.csv"),
            body: profilers,
            differs: "The paper misses 3.06 GB, 17.2 % of the peak of its configuration, which it \
                      does not state. The first table finds these bytes: between the hooks of the \
                      head, the loss makes 16 bytes for each logit. The second table has schedules \
                      of our own graph in f32, batch 4 on a device. There a profiler that reads \
                      the allocated bytes when a module's forward or backward ends misses little: \
                      the loss makes 12 bytes a logit and frees them at once, attention is one op, \
                      and the peak is in a block. With the bytes at each line nothing is missed: \
                      their most is the peak of the plan, and steps reach it to the byte.",
            quick: true,
        },
        Section {
            name: "protrain-search",
            title: "Section 5.3.4: time of the search",
            kind: Kind::Timed,
            command: None,
            body: searches,
            differs: "The paper's search takes 0.06 s on average.",
            quick: false,
        },
    ]);
    sections
}

fn comparisons() -> Vec<Section> {
    vec![
        Section {
            name: "protrain-figure3",
            title: "Figure 3: tokens a second on four RTX 3090s, at the best batch",
            kind: Kind::Simulated,
            command: None,
            body: on_small_devices,
            differs: "The paper: 2090 tokens a second on average over its models, 2493 for GPT-2 \
                      10B, 1.77 to 2.71 times other systems, and 5.05 times FSDP for GPT-2 15B. \
                      Which models its average has is not stated; here it has those that fit. \
                      LLaMA 34B does not (table 2: 33.4B). The other systems are described at \
                      table 3: their strategies alone cost half of what the paper measures.",
            quick: true,
        },
        Section {
            name: "protrain-table3",
            title: "Table 3: other systems on four A100s, how many times slower",
            kind: Kind::Simulated,
            command: None,
            body: with_and_without_offloading,
            differs: "Our model of another system is its strategy in ProTrain's formulas. `ZeRO-3, \
                      offloaded` stands for DeepSpeed and Colossal-AI: no persistent chunk, three \
                      buffers, all blocks recomputed or none, updates on the host after the \
                      backward. `ZeRO-3, on devices`: states divided over the devices, no link, \
                      updates there. `FSDP, offloaded`: f32 on the link, and PyTorch's Adam, \
                      assumed to take three times as long as a vectorised one. So what a strategy \
                      costs comes out, with the paper's order: without offloading other systems \
                      are nearly as fast as ProTrain for small models, and slower than with it for \
                      20B, where memory is left for small batches only. What the systems' \
                      implementations cost does not: the paper measures up to twice the gap. FSDP \
                      without offloading fits here, in the paper not.",
            quick: true,
        },
        Section {
            name: "protrain-table5",
            title: "Table 5: FSDP with selective checkpointing on four A100s",
            kind: Kind::Simulated,
            command: None,
            body: selective,
            differs: "How many times faster than FSDP with selective checkpointing. Here its best \
                      batch recomputes every block, so selecting gains nothing; in the paper it \
                      gains 5 to 22 %, except for GPT-2 40B. ProTrain is faster in each row, by \
                      less than in the paper, as in table 3.",
            quick: true,
        },
    ]
}

const fn model(hidden: u64, blocks: usize, heads: u64) -> Model {
    Model {
        hidden,
        blocks,
        heads,
    }
}

const LLAMA_34B: Model = model(8192, 48, 64);

/// Table 1 of the paper.
const MODELS: [(&str, Model); 10] = [
    ("Mistral-7B", model(4096, 32, 32)),
    ("GPT2-10B", GPT2_10B),
    ("LLaMA-13B", model(5120, 40, 40)),
    ("GPT2-15B", model(8192, 18, 64)),
    ("GPT2-20B", model(8192, 24, 64)),
    ("GPT2-30B", model(8192, 36, 64)),
    ("OPT-30B", model(7168, 48, 56)),
    ("LLaMA-34B", LLAMA_34B),
    ("GPT2-40B", model(8192, 50, 64)),
    ("GPT2-75B", model(8192, 93, 64)),
];

fn named(name: &str) -> Model {
    let found = MODELS.into_iter().find(|&(other, _)| other == name);
    found.expect("a model of the paper").1
}

/// How a system keeps states and activations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum System {
    /// Persistent chunks, buffers, swaps and recomputes as the search finds them.
    Protrain,
    /// Everything on the host, as DeepSpeed and Colossal-AI do.
    Offloaded,
    /// Everything divided over the devices.
    OnDevices,
    /// FSDP, with all states on the host; all blocks are recomputed, or none.
    Fsdp,
    /// FSDP that recomputes as few blocks as must be.
    FsdpSelective,
}

/// PyTorch's Adam on the host reads and writes each state several times: assumed.
const SLOW_ADAM: f64 = 3.0;

/// The figures of a model in a system's hands.
fn instance_in(system: System, instance: &Instance, world: u64) -> Instance {
    let mut instance = instance.clone();
    for chunk in &mut instance.chunks {
        match system {
            System::Protrain | System::Offloaded => {}
            System::OnDevices => {
                (chunk.upload, chunk.offload) = (0.0, 0.0);
                chunk.update_host = chunk.update_device;
                // 16 bytes a parameter, divided; the host has 12 bytes a parameter.
                instance.base += chunk.host_bytes / 12 * 16 / world;
                chunk.host_bytes = 0;
            }
            System::Fsdp | System::FsdpSelective => {
                (chunk.upload, chunk.offload) = (2.0 * chunk.upload, 2.0 * chunk.offload);
                chunk.update_host *= SLOW_ADAM;
            }
        }
    }
    instance
}

/// The shortest step of a system, µs; `None` if nothing fits.
fn step(system: System, plain: &Instance, world: u64) -> Option<f64> {
    if system == System::Protrain {
        return protrain::search(plain).map(|(_, predicted)| predicted.times.step());
    }
    let instance = instance_in(system, plain, world);
    let blocks = instance.n_repeated();
    let mut recomputed = match system {
        System::FsdpSelective => (0..=blocks).collect(),
        _ => vec![0, blocks],
    };
    recomputed.retain(|&n_recompute| {
        let config = apart(n_recompute);
        let host = instance.host_capacity.unwrap_or(u64::MAX);
        protrain::memory(&instance, &config) <= instance.capacity
            && protrain::host_memory(&instance, &config) <= host
    });
    let micros = recomputed.into_iter().map(|n_recompute| {
        let times = protrain::times(&instance, &apart(n_recompute));
        times.forward + times.backward + times.update_host
    });
    micros.min_by(f64::total_cmp)
}

/// No persistent chunk, three buffers.
fn apart(n_recompute: usize) -> Config {
    Config {
        n_buffer: protrain::FEWEST_BUFFERS,
        n_recompute,
        ..Config::default()
    }
}

/// The best batch of a system, and its tokens a second.
pub fn fastest(system: System, model: &Model, machine: &Machine, world: u64) -> Option<(u64, f64)> {
    let of = |batch: u64| {
        let instance = paper_models::instance(model, machine, batch, world);
        let micros = step(system, &instance, world)?;
        Some((batch, (batch * SEQUENCE) as f64 * 1e6 / micros))
    };
    let batches = layouts::BATCHES
        .into_iter()
        .filter(|b| b.is_multiple_of(world));
    batches.filter_map(of).max_by(|a, b| a.1.total_cmp(&b.1))
}

/// How many times as fast as another one; or that the other one does not fit.
fn times_as_fast(ours: f64, other: Option<(u64, f64)>) -> String {
    other.map_or("does not fit".into(), |(_, theirs)| {
        format!("{:.2}", ours / theirs)
    })
}

fn on_small_devices() -> String {
    let mut table = Table::new([
        "model",
        "best batch",
        "ours",
        "ZeRO-3, offloaded: times slower",
        "FSDP, offloaded: times slower",
    ]);
    let (mut sum, mut n) = (0.0, 0);
    for (name, model) in &MODELS[..8] {
        let of = |system| fastest(system, model, &RTX3090, 4);
        let Some((batch, ours)) = of(System::Protrain) else {
            continue;
        };
        (sum, n) = (sum + ours, n + 1);
        table.push(vec![
            name.to_string(),
            batch.to_string(),
            format!("{ours:.0}"),
            times_as_fast(ours, of(System::Offloaded)),
            times_as_fast(ours, of(System::Fsdp)),
        ]);
    }
    let mean = sum / f64::from(n.max(1));
    let row = ["mean".to_string(), String::new(), format!("{mean:.0}")];
    table.push([&row[..], &[String::new(), String::new()]].concat());
    table.markdown()
}

fn with_and_without_offloading() -> String {
    let mut table = Table::new([
        "model",
        "ours",
        "the paper",
        "ZeRO-3, offloaded",
        "DeepSpeed, Colossal-AI",
        "ZeRO-3, on devices",
        "DeepSpeed, Colossal-AI",
        "FSDP, offloaded",
        "FSDP",
    ]);
    for (name, theirs, ratios) in [
        ("Mistral-7B", 11060.92, ["1.43, 1.52", "1.13, 1.31", "2.08"]),
        ("GPT2-10B", 8266.40, ["1.28, 1.21", "1.13, 1.05", "1.77"]),
        ("LLaMA-13B", 6471.32, ["1.46, 1.30", "1.24, 1.47", "1.74"]),
        ("GPT2-20B", 5043.75, ["1.47, 1.30", "OOM, 2.42", "2.36"]),
    ] {
        let of = |system| fastest(system, &named(name), &A100, 4);
        let Some((_, ours)) = of(System::Protrain) else {
            continue;
        };
        let mut cells = vec![name.into(), format!("{ours:.0}"), format!("{theirs:.0}")];
        let systems = [System::Offloaded, System::OnDevices, System::Fsdp];
        for (system, ratio) in systems.into_iter().zip(ratios) {
            cells.extend([times_as_fast(ours, of(system)), ratio.into()]);
        }
        table.push(cells);
    }
    table.markdown()
}

fn selective() -> String {
    let mut table = Table::new([
        "model",
        "all or none recomputed",
        "the paper",
        "ProTrain",
        "the paper",
    ]);
    for (name, theirs) in [
        ("LLaMA-13B", [0.93, 1.62]),
        ("GPT2-20B", [0.89, 2.11]),
        ("GPT2-30B", [0.95, 2.48]),
        ("OPT-30B", [0.83, 2.01]),
        ("LLaMA-34B", [0.82, 2.28]),
        ("GPT2-40B", [1.06, 2.38]),
    ] {
        let of = |system| fastest(system, &named(name), &A100, 4);
        let some = of(System::FsdpSelective);
        let mut cells = vec![name.to_string()];
        for (system, theirs) in [System::Fsdp, System::Protrain].into_iter().zip(theirs) {
            let ratio = of(system).map(|(_, speed)| times_as_fast(speed, some));
            cells.push(ratio.unwrap_or("does not fit".into()));
            cells.push(format!("{theirs:.2}"));
        }
        table.push(cells);
    }
    table.markdown()
}

fn scaling() -> String {
    let mut table = Table::new([
        "model",
        "machine",
        "devices",
        "best batch",
        "ours",
        "of one",
    ]);
    for (name, machine_name, machine) in [
        ("GPT2-10B", "RTX 3090", RTX3090),
        ("LLaMA-34B", "A100", A100),
    ] {
        let mut one = None;
        for world in [1, 2, 4] {
            let found = fastest(System::Protrain, &named(name), &machine, world);
            let Some((batch, ours)) = found else { continue };
            let first = *one.get_or_insert(ours);
            table.push(vec![
                name.into(),
                machine_name.into(),
                world.to_string(),
                batch.to_string(),
                format!("{ours:.0}"),
                format!("{:.2}", ours / first),
            ]);
        }
    }
    table.markdown()
}

/// The longest sequence, in steps of 256 tokens, with which a model fits one A100.
pub fn longest_sequence(model: &Model) -> u64 {
    let fits = |sequence: &u64| {
        let instance = paper_models::instance_of_length(model, &A100, 1, 1, *sequence);
        protrain::search(&instance).is_some()
    };
    let lengths = (1..=128).map(|n| 256 * n);
    lengths.take_while(fits).last().unwrap_or(0)
}

fn longest() -> String {
    let model = named("GPT2-75B");
    let mut table = Table::new(["tokens", "peak GB", "step s", "configuration"]);
    for sequence in [1024, 2048, 4096, 7168, longest_sequence(&model)] {
        let instance = paper_models::instance_of_length(&model, &A100, 1, 1, sequence);
        let Some((config, predicted)) = protrain::search(&instance) else {
            table.push(vec![
                sequence.to_string(),
                "does not fit".into(),
                String::new(),
                String::new(),
            ]);
            continue;
        };
        table.push(vec![
            sequence.to_string(),
            format!("{:.1}", predicted.memory as f64 / 1e9),
            format!("{:.1}", predicted.times.step() / 1e6),
            config.to_string(),
        ]);
    }
    table.markdown()
}

/// Bytes that the loss makes for each logit between the hooks of the head, in a model of 16 bits:
/// labels are shifted against logits.
const LOSS: [(&str, u64); 5] = [
    ("logits of all tokens but the last, contiguous", 2),
    ("the same in f32", 4),
    ("log-softmax", 4),
    ("its gradient in f32", 4),
    ("the gradient in 16 bits", 2),
];

/// What the loss of GPT-2 10B makes on each of four devices, batch 16, bytes.
pub fn missed_by_layers() -> u64 {
    let rows = 16 / 4 * (SEQUENCE - 1);
    LOSS.iter()
        .map(|(_, bytes)| bytes * rows * VOCABULARY)
        .sum()
}

/// The device's peak over all lines of a schedule, and over the ends of modules alone.
pub fn peaks(graph: &Graph, schedule: &Schedule) -> (u64, u64) {
    let lives = lifetimes(schedule);
    let live = live_bytes(schedule, &lives, DEVICE);
    // The module of each line, if it is a module's line; each phase has hooks of its own.
    let lines = schedule.instrs.values();
    let modules: Vec<Option<(Phase, &str)>> = lines
        .map(|line| match line.kind {
            InstrKind::Run { node, .. } => {
                let node = &graph.nodes[node];
                let module = node.module.as_str();
                let is_hooked = node.phase != Phase::Optimizer && !module.is_empty();
                is_hooked.then_some((node.phase, module))
            }
            InstrKind::Copy { .. } => None,
        })
        .collect();
    let ends_here = |at: usize| modules[at].is_some() && modules.get(at + 1) != modules.get(at);
    let mut ends = vec![0u64; live.len() + 1];
    for (buffer, life) in lives.iter() {
        if schedule.buffers[buffer].pool == DEVICE {
            ends[life.end as usize] += schedule.buffers[buffer].bytes;
        }
    }
    let after = |at: usize| live[at] - ends[at + 1];
    let seen = (0..live.len()).filter(|&at| ends_here(at)).map(after);
    let all = live.iter().copied().max().unwrap_or(0);
    (all, seen.max().unwrap_or(0))
}

fn profilers() -> String {
    let gib = |bytes: u64| format!("{:.2}", bytes as f64 / (1u64 << 30) as f64);
    let mut loss = Table::new(["between the hooks of the head", "bytes a logit", "GiB"]);
    let rows = 16 / 4 * (SEQUENCE - 1);
    for (name, bytes) in LOSS {
        let all = bytes * rows * VOCABULARY;
        loss.push(vec![name.into(), bytes.to_string(), gib(all)]);
    }
    let sum: u64 = LOSS.iter().map(|(_, bytes)| bytes).sum();
    let missed = format!("{} (theirs: 3.06)", gib(missed_by_layers()));
    loss.push(vec!["all".into(), sum.to_string(), missed]);
    let graph = prepared(&GPT2_10B, 4);
    let device = passes::devices::named("a100-80g").expect("a known device");
    let roofline = Roofline::new(&device);
    let cost = Tabled::new(&roofline, &graph);
    let problem = Problem::new(&graph, &device, &cost);
    let model =
        layout::Model::new(&problem, layout::Gradients::ByChunk).expect("the model has parameters");
    let (chunks, blocks) = (model.instance().chunks.len(), GPT2_10B.blocks);
    let mut table = Table::new([
        "n_persist",
        "n_ckpt",
        "peak GiB",
        "at the ends of modules GiB",
        "missed GiB",
        "missed",
    ]);
    for (n_persist, n_recompute) in [(chunks, 0), (0, 0), (0, blocks)] {
        let config = Config {
            n_persist,
            n_buffer: protrain::FEWEST_BUFFERS.min(chunks - n_persist),
            n_recompute,
            ..Config::default()
        };
        let decisions = model.decisions(&problem, &config);
        let schedule = realise::lines(&problem, &decisions).expect("a layout is legal");
        let (all, seen) = peaks(&graph, &schedule);
        table.push(vec![
            n_persist.to_string(),
            n_recompute.to_string(),
            gib(all),
            gib(seen),
            gib(all - seen),
            format!("{:.1} %", 100.0 * (1.0 - seen as f64 / all as f64)),
        ]);
    }
    format!("{}\n{}", loss.markdown(), table.markdown())
}

fn searches() -> String {
    let mut table = Table::new(["model", "machine", "batch", "search s"]);
    let mut sum = 0.0;
    let mut n = 0;
    for (name, model) in &MODELS[..9] {
        for (machine_name, machine, batch) in [("RTX 3090", RTX3090, 16), ("A100", A100, 64)] {
            let instance = paper_models::instance(model, &machine, batch, 4);
            let start = Instant::now();
            if protrain::search(&instance).is_none() {
                continue;
            }
            let seconds = start.elapsed().as_secs_f64();
            (sum, n) = (sum + seconds, n + 1);
            table.push(vec![
                name.to_string(),
                machine_name.into(),
                batch.to_string(),
                format!("{seconds:.4}"),
            ]);
        }
    }
    let mean = sum / f64::from(n.max(1));
    table.push(vec![
        "mean".into(),
        String::new(),
        String::new(),
        format!("{mean:.4}"),
    ]);
    table.markdown()
}
