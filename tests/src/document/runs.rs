//! STAlloc: what makes allocators waste memory in runs, and what that costs.

use super::allocation::{ALIGN, H200, checked, figure_8, generated, ours, planned, theirs, with};
use super::{Kind, Section};
use addresses::caching::{self, Segments};
use addresses::generate::{Chunked, Model, Setup};
use addresses::stats::stats;
use papers::table::Table;
use placement::trace::Trace;
use placement::{Effort, lower_bound};
use std::collections::BTreeMap;

pub(super) fn sections() -> Vec<Section> {
    vec![
        Section {
            name: "stalloc-figure8-runs",
            title: "Figure 8 again: runs, and tensors of collectives",
            kind: Kind::Simulated,
            command: None,
            body: regimes,
            differs: "RUNS",
            quick: false,
        },
        Section {
            name: "stalloc-causes",
            title: "Which requests make the caching allocator grow",
            kind: Kind::Simulated,
            command: None,
            body: causes,
            differs: "CAUSES",
            quick: true,
        },
        Section {
            name: "stalloc-figure2",
            title: "Figure 2: GPT-2 with PyTorch's allocator",
            kind: Kind::Simulated,
            command: None,
            body: figure_2,
            differs: "FIG2",
            quick: true,
        },
        Section {
            name: "stalloc-figure3",
            title: "Figure 3 and section 2.3: sizes of Llama2-7B's requests",
            kind: Kind::Simulated,
            command: Some(
                "lighterage alloc generate --model llama2-7b --pipeline 4 --tensor-parallel 2 \
                 --sequence-parallel --micro-batch 4 --micro-batches 128 -o a.trace; lighterage \
                 alloc stats a.trace",
            ),
            body: sizes,
            differs: "FIG3",
            quick: true,
        },
        Section {
            name: "stalloc-table1",
            title: "Table 1 and section 2.2: Qwen2.5-14B on 16 H200, what fits",
            kind: Kind::Simulated,
            command: None,
            body: feasibility,
            differs: "TAB1",
            quick: false,
        },
        Section {
            name: "stalloc-figure11",
            title: "Figure 11: GPT-2 in Colossal-AI, ZeRO-3 with offloading",
            kind: Kind::Simulated,
            command: None,
            body: other_framework,
            differs: "FIG11",
            quick: true,
        },
    ]
}

/// The simulated allocators: PyTorch's two, and GMLake's with its default limit.
const RULES: [Segments; 3] = [
    Segments::Fixed,
    Segments::Expandable,
    Segments::Stitched(512 << 20),
];

fn percent(live: u64, held: u64) -> f64 {
    100.0 * live as f64 / held as f64
}

fn gb(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / 1e9)
}

/// Efficiencies of the allocators. Bytes that PyTorch holds for a collective do not count as alive.
fn efficiencies(setup: &Setup) -> [f64; 3] {
    let live = lower_bound(&planned(setup), ALIGN);
    let requests = generated(setup);
    RULES.map(|rule| percent(live, caching::simulate(&requests, rule).reserved_bytes))
}

/// The lower efficiency of the first and the last stage.
fn lower(setup: &Setup) -> [f64; 3] {
    let of = |stage| {
        efficiencies(&Setup {
            stage,
            ..setup.clone()
        })
    };
    let (first, last) = (of(0), of(setup.pipeline - 1));
    [0, 1, 2].map(|i| first[i].min(last[i]))
}

/// Three steps; after each one an evaluation of four micro-batches; sequences up to 30 % shorter.
fn run(setup: &Setup) -> Setup {
    Setup {
        steps: 3,
        evaluate: 4,
        vary: 30,
        ..setup.clone()
    }
}

fn holding(setup: &Setup) -> Setup {
    Setup {
        holds_collectives: true,
        ..setup.clone()
    }
}

/// The efficiency of a plan for the longest sequences, which serves the shorter ones too: they make
/// the same requests, and none is larger.
fn planned_run(setup: &Setup) -> f64 {
    let of = |stage| {
        let setup = Setup {
            stage,
            ..setup.clone()
        };
        let live = lower_bound(&planned(&setup), ALIGN);
        let longest = planned(&Setup { vary: 0, ..setup });
        percent(live, checked(&longest, &ours(&longest, Effort::Fast)))
    };
    of(0).min(of(setup.pipeline - 1))
}

fn regimes() -> String {
    let mut table = Table::new([
        "trace",
        "one step: caching, expandable, gmlake",
        "a run",
        "one step, collectives hold",
        "a run, collectives hold",
        "ours, a run",
    ]);
    for (name, setup) in figure_8() {
        let mut cells = vec![name];
        for setup in [
            setup.clone(),
            run(&setup),
            holding(&setup),
            holding(&run(&setup)),
        ] {
            let shares = lower(&setup).map(|share| format!("{share:.1}"));
            cells.push(shares.join(", "));
        }
        cells.push(format!("{:.1}", planned_run(&run(&setup))));
        table.push(cells);
    }
    table.markdown()
}

/// The kind of a phase: the word in its name.
fn kind_of(trace: &Trace, block: usize) -> String {
    let phase = trace.blocks[block].origin.phases.0 as usize;
    let name = &trace.phases[phase].name;
    let step = name.split('.').next().unwrap_or("");
    let kind = name.split('.').nth(1).unwrap_or("");
    match (step, kind) {
        (_, "") => "weights, gradients, copies of weights".into(),
        ("0", "optimizer") => "moments after the first step".into(),
        ("0", "fwd" | "bwd") => "first step".into(),
        (_, "eval") => "evaluation".into(),
        _ => "later steps".into(),
    }
}

fn causes() -> String {
    let kinds = [
        "weights, gradients, copies of weights",
        "first step",
        "moments after the first step",
        "evaluation",
        "later steps",
    ];
    let mut table = Table::new(
        ["run", "live GB", "reserved GB"]
            .into_iter()
            .chain(kinds)
            .chain(["largest growth after the first step"]),
    );
    let last = |setup: Setup| Setup {
        stage: setup.pipeline - 1,
        ..setup
    };
    let two = |setup: Setup| Setup { steps: 2, ..setup };
    let gpt2 = Setup::new(Model::Gpt2);
    let llama2 = Setup::new(Model::Llama2);
    for (name, setup) in [
        ("GPT-2, last stage, two steps", two(last(gpt2.clone()))),
        ("GPT-2, first stage", run(&gpt2)),
        ("Llama2-7B, first stage", run(&llama2)),
        (
            "Llama2-7B R, first stage, held",
            holding(&run(&with(&llama2, "R"))),
        ),
    ] {
        let trace = generated(&setup);
        let mut growth: BTreeMap<String, u64> = BTreeMap::new();
        let mut later: BTreeMap<u64, u64> = BTreeMap::new();
        let mut see = |block: usize, bytes: u64| {
            let kind = kind_of(&trace, block);
            if kind == "evaluation" || kind == "later steps" {
                *later.entry(trace.blocks[block].bytes).or_default() += bytes;
            }
            *growth.entry(kind).or_default() += bytes;
        };
        let held = caching::simulate_seen(&trace, Segments::Fixed, u64::MAX, &mut see);
        let held = held.expect("memory without a limit should suffice");
        let mut cells = vec![
            name.to_string(),
            gb(lower_bound(&planned(&setup), ALIGN)),
            gb(held.reserved_bytes),
        ];
        cells.extend(kinds.map(|kind| gb(growth.get(kind).copied().unwrap_or(0))));
        let largest = later.iter().max_by_key(|&(_, bytes)| bytes);
        cells.push(largest.map_or("none".into(), |(&size, &bytes)| {
            format!("{} for requests of {:.2}", gb(bytes), size as f64 / 1e9)
        }));
        table.push(cells);
    }
    table.markdown()
}

fn figure_2() -> String {
    let mut table = Table::new([
        "configuration",
        "live GB (theirs)",
        "reserved GB, a step",
        "reserved GB, collectives hold",
        "theirs",
        "efficiency, a step",
        "collectives hold",
        "theirs",
    ]);
    for (name, letters, live_theirs, reserved_theirs, efficiency_theirs) in [
        ("1F1B", "", "46.9", "52.1", "90 %"),
        ("virtual pipeline", "V", "51.8", "59.9", "80 %"),
        (
            "recomputation",
            "R",
            "not stated",
            "not stated",
            "about 60 %",
        ),
    ] {
        let setup = with(&Setup::new(Model::Gpt2), letters);
        let live = lower_bound(&planned(&setup), ALIGN);
        let held = [setup.clone(), holding(&setup)]
            .map(|setup| caching::simulate(&generated(&setup), Segments::Fixed).reserved_bytes);
        table.push(vec![
            name.into(),
            format!("{} ({live_theirs})", gb(live)),
            gb(held[0]),
            gb(held[1]),
            reserved_theirs.into(),
            format!("{:.1} %", percent(live, held[0])),
            format!("{:.1} %", percent(live, held[1])),
            efficiency_theirs.into(),
        ]);
    }
    table.markdown()
}

fn sizes() -> String {
    let mut table = Table::new([
        "configuration",
        "requests",
        "above 512 bytes",
        "sizes",
        "theirs",
    ]);
    for (name, letters, theirs) in [
        ("no optimization", "", "more than 50,000 requests, 32 sizes"),
        ("recomputation", "R", "about 32 sizes"),
        ("virtual pipeline", "V", "about 32 sizes"),
    ] {
        let setup = Setup {
            micro_batches: 128,
            ..with(&Setup::new(Model::Llama2), letters)
        };
        let of = stats(&planned(&setup));
        table.push(vec![
            name.into(),
            of.blocks.to_string(),
            of.above_512.to_string(),
            of.sizes_above_512.to_string(),
            theirs.into(),
        ]);
    }
    table.markdown()
}

/// A configuration of table 1: name, setup, TFLOPS, and whether PyTorch's caching allocator, its
/// expandable segments and STAlloc fit in the paper.
type Row = (&'static str, Setup, f64, [bool; 3]);

/// The rows of table 1 with sequences of a micro-batch.
fn table_1(batch: u64) -> [Row; 4] {
    let original = Setup {
        batch,
        virtual_pipeline: 2,
        ..Setup::new(Model::Qwen14b)
    };
    let plain = Setup {
        virtual_pipeline: 1,
        ..original.clone()
    };
    let again = Setup {
        recompute: true,
        ..original.clone()
    };
    let divided = Setup {
        tensor: 4,
        ..original.clone()
    };
    [
        ("original", original, 464.3, [false, false, true]),
        ("no virtual pipeline", plain, 440.6, [false, true, true]),
        ("recomputation", again, 350.4, [true; 3]),
        ("4 ranks for a product", divided, 431.5, [true; 3]),
    ]
}

/// The most bytes that a stage needs, by a function of its setup. None if a stage does not fit.
fn most(setup: &Setup, of: impl Fn(&Setup) -> Option<u64>) -> Option<u64> {
    let stages = (0..setup.pipeline).map(|stage| {
        of(&Setup {
            stage,
            ..setup.clone()
        })
    });
    stages.collect::<Option<Vec<u64>>>()?.into_iter().max()
}

fn peak(setup: &Setup, plan: fn(&Trace) -> Vec<u64>) -> Option<u64> {
    most(setup, |setup| {
        let trace = planned(setup);
        Some(checked(&trace, &plan(&trace)))
    })
}

fn our_plan(trace: &Trace) -> Vec<u64> {
    ours(trace, Effort::Fast)
}

/// What a program needs with an allocator, largest stage. None: out of memory.
type Needs = Option<u64>;

/// For PyTorch's caching allocator, GMLake's, expandable segments, STAlloc's plan and ours.
fn needs(setup: &Setup, requests: &Setup) -> [Needs; 5] {
    let reserved = |rule: Segments| {
        most(requests, |setup| {
            let held = caching::simulate_within(&generated(setup), rule, H200)?;
            Some(held.reserved_bytes)
        })
    };
    let within = |peak: Needs| peak.filter(|&peak| peak <= H200);
    [
        reserved(Segments::Fixed),
        reserved(Segments::Stitched(512 << 20)),
        reserved(Segments::Expandable),
        within(peak(setup, theirs)),
        within(peak(setup, our_plan)),
    ]
}

/// A run whose sequences have one length, as when Megatron-LM trains on packed documents.
fn training(setup: &Setup) -> Setup {
    Setup {
        vary: 0,
        ..holding(&run(setup))
    }
}

fn feasibility() -> String {
    // The largest batch with which the original fits at all.
    let fits = |&batch: &u64| {
        let [(_, original, ..), ..] = table_1(batch);
        peak(&original, our_plan).is_some_and(|peak| peak <= H200)
    };
    let batch = (1..=16).rev().find(fits).unwrap_or(1);
    let mut table = Table::new([
        "configuration",
        "live GB",
        "PyTorch",
        "GMLake",
        "expandable segments",
        "STAlloc",
        "ours",
        "paper: PyTorch, expandable, STAlloc",
    ]);
    let mut fastest: [Option<f64>; 5] = [None; 5];
    let rows = table_1(batch);
    for (name, setup, tflops, theirs_fit) in &rows {
        let needs = needs(setup, &training(setup));
        for (fastest, fits) in fastest.iter_mut().zip(&needs) {
            if fits.is_some() && fastest.is_none_or(|before| before < *tflops) {
                *fastest = Some(*tflops);
            }
        }
        let live = most(setup, |setup| Some(lower_bound(&planned(setup), ALIGN)));
        let mut cells = vec![name.to_string(), live.map_or("".into(), gb)];
        cells.extend(needs.map(|fits| fits.map_or("OOM".into(), gb)));
        let words = theirs_fit.map(|fits| if fits { "fits" } else { "OOM" });
        cells.push(words.join(", "));
        table.push(cells);
    }
    let mut cells = vec!["fastest that fits, TFLOPS".to_string(), String::new()];
    let best = rows[0].2;
    let loss = |speed: f64| format!("{speed} (loses {:.1} %)", 100.0 * (1.0 - speed / best));
    cells.extend(fastest.map(|speed| speed.map_or("none".into(), loss)));
    cells.push([431.5, 440.6, best].map(loss).join(", "));
    table.push(cells);
    format!(
        "Sequences of a micro-batch: {batch}. A device has {} GB.\n\n{}",
        gb(H200),
        table.markdown()
    )
}

fn other_framework() -> String {
    let mut table = Table::new([
        "sequences of a batch",
        "requests",
        "live GB",
        "caching",
        "expandable",
        "gmlake 512",
        "stalloc",
        "ours",
    ]);
    for batch in [8, 16] {
        let setup = Chunked {
            shape: Model::Gpt2.shape(),
            batch,
            ranks: 8,
            chunk: 32 << 20,
            steps: 3,
        };
        let trace = setup.trace();
        let live = lower_bound(&trace, ALIGN);
        let share = |held: u64| format!("{:.1} %", percent(live, held));
        let mut cells = vec![batch.to_string(), trace.blocks.len().to_string(), gb(live)];
        cells.extend(RULES.map(|rule| share(caching::simulate(&trace, rule).reserved_bytes)));
        cells.push(share(checked(&trace, &theirs(&trace))));
        cells.push(share(checked(&trace, &our_plan(&trace))));
        table.push(cells);
    }
    table.markdown()
}
