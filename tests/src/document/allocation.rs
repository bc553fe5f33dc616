//! STAlloc: allocators on generated traces of training steps.

use super::{Kind, Paper, Section, runs};
use crate::serving;
use addresses::caching::{self, Segments};
use addresses::dynamic;
use addresses::generate::{Model, Setup};
use papers::stalloc;
use papers::table::Table;
use placement::trace::Trace;
use placement::{Effort, Options, check, lower_bound, place};
use std::collections::BTreeMap;
use std::time::Instant;

/// Alignment of sizes and addresses, as in PyTorch's requests.
pub const ALIGN: u64 = 512;

pub(super) fn paper() -> Paper {
    Paper {
        title: "STAlloc (EuroSys 2026)",
        about: "Efficiency is the most bytes alive at once divided by the reserved bytes (Eq 1). \
                Traces are generated for the paper's configurations (`lighterage alloc generate`); \
                the allocators of PyTorch and GMLake are simulated on them ([alloc.md](alloc.md)). \
                `ours` is `lighterage alloc plan --effort fast --share-streams`. Each plan is \
                checked. What the paper does not state is chosen: 4 stages of 2 ranks with \
                sequence parallelism (Megatron-LM), 16 micro-batches, the first stage.",
        sections: [efficiency_sections(), runs::sections(), detail_sections()]
            .into_iter()
            .flatten()
            .collect(),
    }
}

fn efficiency_sections() -> Vec<Section> {
    vec![
        Section {
            name: "stalloc-figure8",
            title: "Figure 8: recomputation (R), virtual pipeline (V), ZeRO (Z), offloading (O)",
            kind: Kind::Simulated,
            command: None,
            body: || efficiencies(&figure_8()),
            differs: "One step from an empty allocator; each block is free when the program frees \
                      it. The paper: STAlloc above 95 %; PyTorch 57.1 to 90.6 %, expandable \
                      segments 62.4 to 93.2 %, GMLake 45.1 to 88.1 % (dense models); for the \
                      mixture of experts 93.7 to 97.8 % against 82.3, 93.1 and 79.7 % on average. \
                      Ours agrees with it. So does `stalloc`, our version of the paper's planner, \
                      except for virtual pipelines and for the mixture of experts without \
                      recomputation; it knows the sizes of experts' requests here. The other \
                      allocators waste less than in the paper: the next section says why. GMLake's \
                      mapping costs no time here.",
            quick: false,
        },
        Section {
            name: "stalloc-figure9",
            title: "Figure 9: from 8 to 128 devices",
            kind: Kind::Simulated,
            command: None,
            body: || efficiencies(&figure_9()),
            differs: "The paper: 99.1 % for STAlloc on Qwen2.5 with recomputation, above 99 % with \
                      a virtual pipeline, 37.9 and 15.7 GB less than PyTorch on average; on AMD \
                      devices PyTorch is below 60 % for Llama2-7B and below 80 % for the mixture \
                      on 64. Here ours is above 97 % on all, and above 99 % on all but one. The \
                      parallelism per device count is not stated; micro-batches are the largest \
                      power of two whose live bytes fit 139 GiB. The mixture's experts are divided \
                      over 4 ranks, and its attention over 2 on 64 devices. Our version of \
                      STAlloc's planner has 88 to 98 % in virtual pipelines. The other allocators \
                      run one step without holding, as in figure 8.",
            quick: false,
        },
        Section {
            name: "stalloc-figure10",
            title: "Figure 10: Llama2-7B with recomputation, sequences of a micro-batch",
            kind: Kind::Simulated,
            command: None,
            body: || efficiencies(&figure_10()),
            differs: "As in the paper, STAlloc is flat at about 99 %, and PyTorch's allocators get \
                      worse with larger micro-batches.",
            quick: false,
        },
    ]
}

fn detail_sections() -> Vec<Section> {
    vec![
        Section {
            name: "stalloc-table3",
            title: "Table 3 and figure 13: dynamic requests of Qwen1.5-MoE",
            kind: Kind::Simulated,
            command: None,
            body: composition,
            differs: "Here the sizes of dynamic requests are unknown to the planner. As in the \
                      paper, the static plan removes most of the fragmentation, measured against \
                      an allocator whose collectives hold, and reuse of its idle bytes serves some \
                      dynamic requests, more with recomputation. The rest comes from the run-time \
                      allocator's cache: in segments, as the paper's, or in one range of addresses \
                      for each stream (`expandable`, with reuse). With recomputation alone the \
                      fallback is the paper's within 0.2 GB, with the other options \
                      within 1.4 GB, and without reuse up to 11 GB more. The paper states its \
                      batches, but not its pipeline, its micro-batches or what a profile holds.",
            quick: false,
        },
        Section {
            name: "stalloc-table2",
            title: "Table 2: time of planning",
            kind: Kind::Timed,
            command: None,
            body: planning_times,
            differs: "The paper's requests and seconds are those of its own traces and machine.",
            quick: false,
        },
    ]
}

/// The traces of figure 8.
pub fn figure_8() -> Vec<(String, Setup)> {
    [
        ("GPT-2", Model::Gpt2),
        ("Llama2-7B", Model::Llama2),
        ("Qwen1.5-MoE", Model::QwenMoe),
    ]
    .map(|(name, model)| {
        ["", "R", "V", "VR", "ZR", "ZOR"].map(|letters| {
            let name = format!("{name} {letters}");
            (
                name.trim_end().to_string(),
                with(&Setup::new(model), letters),
            )
        })
    })
    .concat()
}

/// Bytes of an H200 that a program can use.
pub const H200: u64 = 139 << 30;

/// The traces of figure 9: Qwen2.5 on 8 to 128 devices of type H200 with the largest micro-batch
/// that is alive in their memory; Llama2-7B and the mixture of experts on 32 and 64.
pub fn figure_9() -> Vec<(String, Setup)> {
    let qwen = |model, tensor, pipeline, virtual_pipeline| Setup {
        tensor,
        pipeline,
        virtual_pipeline,
        micro_batches: 4 * pipeline,
        ..Setup::new(model)
    };
    let models = [
        ("Qwen2.5-7B, 8 devices", qwen(Model::Qwen7b, 2, 2, 2)),
        ("Qwen2.5-14B, 16 devices", qwen(Model::Qwen14b, 2, 4, 2)),
        ("Qwen2.5-32B, 32 devices", qwen(Model::Qwen32b, 4, 4, 2)),
        ("Qwen2.5-72B, 64 devices", qwen(Model::Qwen72b, 4, 8, 2)),
        ("Qwen2.5-72B, 128 devices", qwen(Model::Qwen72b, 8, 8, 2)),
    ];
    let mut rows = vec![];
    for letters in ["R", "V"] {
        for (name, setup) in &models {
            let parts = setup.virtual_pipeline;
            let setup = Setup {
                virtual_pipeline: if letters == "V" { parts } else { 1 },
                recompute: letters == "R",
                ..setup.clone()
            };
            let setup = largest(&setup, H200);
            rows.push((format!("{name}, {letters}, batch {}", setup.batch), setup));
        }
    }
    for (name, model, tensor, pipeline, expert) in [
        ("Llama2-7B, 32 devices, R", Model::Llama2, 2, 4, 1),
        ("Llama2-7B, 64 devices, R", Model::Llama2, 2, 8, 1),
        ("Qwen1.5-MoE, 32 devices, R", Model::QwenMoe, 1, 8, 4),
        ("Qwen1.5-MoE, 64 devices, R", Model::QwenMoe, 2, 8, 4),
    ] {
        let setup = Setup {
            tensor,
            pipeline,
            expert,
            sequence_parallel: tensor > 1,
            micro_batches: 4 * pipeline,
            recompute: true,
            ..Setup::new(model)
        };
        rows.push((name.into(), setup));
    }
    rows
}

/// The setup with the largest micro-batch, a power of two, whose live bytes fit on a device.
fn largest(setup: &Setup, bytes: u64) -> Setup {
    let of = |batch: u64| Setup {
        batch,
        ..setup.clone()
    };
    let batches = [64, 32, 16, 8, 4, 2];
    let fits = |&batch: &u64| lower_bound(&planned(&of(batch)), ALIGN) <= bytes;
    of(batches.into_iter().find(fits).unwrap_or(1))
}

/// The traces of figure 10.
pub fn figure_10() -> Vec<(String, Setup)> {
    let of = |batch: u64| Setup {
        batch,
        ..Setup::new(Model::Llama2)
    };
    [1, 2, 4, 8, 16, 32, 64]
        .map(|batch| (batch.to_string(), with(&of(batch), "R")))
        .to_vec()
}

/// The requests that are planned: each block is free when the program frees it, and streams share
/// all bytes, as the run-time allocator serves them.
pub fn planned(setup: &Setup) -> Trace {
    let setup = Setup {
        holds_collectives: false,
        ..setup.clone()
    };
    generated(&setup).one_stream()
}

/// The requests as PyTorch's allocator gets them.
pub fn generated(setup: &Setup) -> Trace {
    setup
        .trace()
        .expect("a setup of the paper should make sense")
}

/// The traces of table 2, with the paper's requests and seconds.
pub fn table_2() -> Vec<(String, Setup, u64, f64)> {
    let of = |name: &str, setup: Setup, micro_batches, letters: &str, requests, seconds| {
        let setup = Setup {
            micro_batches,
            ..setup
        };
        (name.to_string(), with(&setup, letters), requests, seconds)
    };
    vec![
        of("GPT-2 N", Setup::new(Model::Gpt2), 32, "", 12_785, 24.4),
        of("GPT-2 R", Setup::new(Model::Gpt2), 32, "R", 16_569, 21.9),
        of(
            "Llama2 N",
            Setup::new(Model::Llama2),
            128,
            "",
            66_529,
            105.0,
        ),
        of(
            "Llama2 R",
            Setup::new(Model::Llama2),
            128,
            "R",
            86_721,
            136.0,
        ),
        of("MoE N", Setup::new(Model::QwenMoe), 48, "", 196_759, 374.0),
        of("MoE R", Setup::new(Model::QwenMoe), 48, "R", 281_669, 145.0),
    ]
}

/// A setup with the optimizations that the letters mean.
pub fn with(setup: &Setup, letters: &str) -> Setup {
    let has = |letter| letters.contains(letter);
    Setup {
        recompute: has('R'),
        virtual_pipeline: if has('V') { 2 } else { 1 },
        zero: if has('Z') { 2 } else { 1 },
        offload: has('O'),
        ..setup.clone()
    }
}

/// The offsets of our plan.
pub(super) fn ours(trace: &Trace, effort: Effort) -> Vec<u64> {
    let options = Options {
        effort,
        align: ALIGN,
        ..Options::default()
    };
    place(trace, &options, &mut |_, _| ())
        .expect("a generated trace should have a plan")
        .offsets
}

/// Addresses of the paper's planner.
pub(super) fn theirs(trace: &Trace) -> Vec<u64> {
    stalloc::place(trace, ALIGN)
        .expect("a generated trace should have a plan")
        .offsets
}

/// The peak of a plan, after its proof.
pub(super) fn checked(trace: &Trace, offsets: &[u64]) -> u64 {
    check::check(trace, offsets, ALIGN, None)
        .unwrap_or_else(|faults| panic!("{} faults", faults.len()))
}

fn efficiencies(rows: &[(String, Setup)]) -> String {
    let mut table = Table::new([
        "trace",
        "requests",
        "live GiB",
        "caching",
        "expandable",
        "gmlake 512",
        "gmlake 64",
        "stalloc",
        "ours",
    ]);
    for (name, setup) in rows {
        let (trace, requests) = (planned(setup), generated(setup));
        let live = lower_bound(&trace, ALIGN);
        let share = |held: u64| format!("{:.1} %", 100.0 * live as f64 / held as f64);
        let mut cells = vec![
            name.clone(),
            trace.blocks.len().to_string(),
            format!("{:.1}", live as f64 / (1u64 << 30) as f64),
        ];
        let stitched = |mib: u64| Segments::Stitched(mib << 20);
        for rule in [
            Segments::Fixed,
            Segments::Expandable,
            stitched(512),
            stitched(64),
        ] {
            cells.push(share(caching::simulate(&requests, rule).reserved_bytes));
        }
        cells.push(share(checked(&trace, &theirs(&trace))));
        cells.push(share(checked(&trace, &ours(&trace, Effort::Fast))));
        table.push(cells);
    }
    table.markdown()
}

fn timed(what: impl FnOnce()) -> String {
    let start = Instant::now();
    what();
    format!("{:.2}", start.elapsed().as_secs_f64())
}

fn planning_times() -> String {
    let mut table = Table::new([
        "trace",
        "requests",
        "stalloc here, s",
        "ours fast, s",
        "ours normal, s",
        "their requests",
        "their s",
    ]);
    for (name, setup, requests, seconds) in table_2() {
        let trace = planned(&setup);
        table.push(vec![
            name,
            trace.blocks.len().to_string(),
            timed(|| drop(theirs(&trace))),
            timed(|| drop(ours(&trace, Effort::Fast))),
            timed(|| drop(ours(&trace, Effort::Normal))),
            requests.to_string(),
            seconds.to_string(),
        ]);
    }
    table.markdown()
}

/// Bytes of a run in which dynamic requests are not in the plan.
struct Run {
    /// The pool of the plan.
    pool: u64,
    /// What the cache of the run-time allocator takes from the device for the requests that do not
    /// fit the plan's idle bytes: in segments, and if it is expandable.
    cached: [u64; 2],
    /// The most bytes of these requests that are alive at once.
    fallback: u64,
}

/// Runs a trace: static requests have planned addresses; dynamic ones get idle bytes of the plan
/// (Eq 7, best fit) if `reuse`, or else come from the cache.
fn run(trace: &Trace, reuse: bool) -> Run {
    let (planned, which) = dynamic::statics(trace);
    let offsets_of_planned = ours(&planned, Effort::Fast);
    let pool = checked(&planned, &offsets_of_planned);
    let mut offsets = vec![0; trace.blocks.len()];
    for (&block, &offset) in which.iter().zip(&offsets_of_planned) {
        offsets[block] = offset;
    }
    let mut group_of = BTreeMap::new();
    let groups = dynamic::groups(trace, &offsets);
    for (k, group) in groups.iter().enumerate() {
        group_of.extend(group.blocks.iter().map(|&block| (block, k)));
    }
    let mut events: Vec<(u64, bool, usize)> = group_of
        .keys()
        .flat_map(|&i| {
            let block = &trace.blocks[i];
            [(block.start, true, i), (block.end, false, i)]
        })
        .collect();
    events.sort_unstable();
    // Addresses in use by dynamic requests, by start.
    let mut used: BTreeMap<u64, u64> = BTreeMap::new();
    let mut place_of: BTreeMap<usize, u64> = BTreeMap::new();
    let mut rest = vec![];
    for (_, comes, block) in events {
        if !comes {
            if let Some(start) = place_of.remove(&block) {
                used.remove(&start);
            }
            continue;
        }
        let bytes = trace.blocks[block].bytes.next_multiple_of(ALIGN);
        let space = &groups[group_of[&block]].space;
        match best_fit(space, &used, bytes).filter(|_| reuse) {
            Some(start) => {
                used.insert(start, start + bytes);
                place_of.insert(block, start);
            }
            None => rest.push(trace.blocks[block].clone()),
        }
    }
    let rest = Trace {
        blocks: rest,
        ..Trace::default()
    };
    Run {
        pool,
        cached: [false, true].map(|expandable| serving::cached(&rest, expandable)),
        fallback: lower_bound(&rest, ALIGN),
    }
}

/// The start of the smallest idle range of at least `bytes` bytes.
fn best_fit(space: &[(u64, u64)], used: &BTreeMap<u64, u64>, bytes: u64) -> Option<u64> {
    let mut best: Option<(u64, u64)> = None;
    let mut consider = |from: u64, to: u64| {
        let from = from.next_multiple_of(ALIGN);
        if from + bytes <= to && best.is_none_or(|(length, _)| to - from < length) {
            best = Some((to - from, from));
        }
    };
    for &(from, to) in space {
        let before = used.range(..from).next_back().map_or(from, |(_, &end)| end);
        let mut at = from.max(before);
        for (&start, &end) in used.range(from..to) {
            consider(at, start);
            at = at.max(end);
        }
        consider(at, to);
    }
    best.map(|(_, start)| start)
}

/// Table 3 of the paper: fallback without and with reuse, GB.
const THEIRS: [(&str, f64, f64); 6] = [
    ("", 15.19, 15.19),
    ("R", 1.61, 1.12),
    ("V", 17.80, 17.22),
    ("VR", 1.78, 1.70),
    ("ZR", 2.99, 1.92),
    ("ZOR", 1.95, 1.55),
];

/// The most bytes of the mixture's step that are alive at once, and the bytes that a plan with
/// reuse and an expandable cache take for it.
pub fn mixture(letters: &str) -> (u64, u64) {
    let trace = planned(&with(&Setup::new(Model::QwenMoe), letters));
    let run = run(&trace, true);
    (lower_bound(&trace, ALIGN), run.pool + run.cached[1])
}

fn composition() -> String {
    let mut table = Table::new([
        "trace",
        "live GB",
        "static GB",
        "fallback without reuse GB (theirs)",
        "with reuse GB (theirs)",
        "caching",
        "caching, collectives hold",
        "static plan alone",
        "with reuse",
        "expandable",
    ]);
    let mut wasted = [0.0; 5];
    for (letters, without_reuse, with_reuse) in THEIRS {
        let setup = with(&Setup::new(Model::QwenMoe), letters);
        let trace = planned(&setup);
        let [cached, holding] = [false, true].map(|holds_collectives| {
            let setup = Setup {
                holds_collectives,
                ..setup.clone()
            };
            caching::simulate(&generated(&setup), Segments::Fixed).reserved_bytes
        });
        let live = lower_bound(&trace, ALIGN);
        let gb = |bytes: u64| format!("{:.2}", bytes as f64 / 1e9);
        let share = |held: u64| format!("{:.1} %", 100.0 * live as f64 / held as f64);
        let [alone, both] = [false, true].map(|reuse| run(&trace, reuse));
        let name = if letters.is_empty() { "none" } else { letters };
        table.push(vec![
            name.into(),
            gb(live),
            gb(alone.pool),
            format!("{} ({without_reuse:.2})", gb(alone.fallback)),
            format!("{} ({with_reuse:.2})", gb(both.fallback)),
            share(cached),
            share(holding),
            share(alone.pool + alone.cached[0]),
            share(both.pool + both.cached[0]),
            share(both.pool + both.cached[1]),
        ]);
        let held = [
            cached,
            holding,
            alone.pool + alone.cached[0],
            both.pool + both.cached[0],
            both.pool + both.cached[1],
        ];
        for (wasted, held) in wasted.iter_mut().zip(held) {
            *wasted += held as f64 - live as f64;
        }
    }
    let less = |before: f64, after: f64| 100.0 * (1.0 - after / before);
    let [cached, holding, alone, both, expandable] = wasted;
    format!(
        "{}\nThe static plan alone wastes {:.1} % less than the caching allocator, or {:.1} % less \
         if collectives hold (theirs: 70.2 %). Reuse wastes another {:.1} % less (theirs: 22.9 \
         %), and an expandable cache another {:.1} %.\n",
        table.markdown(),
        less(cached, alone),
        less(holding, alone),
        less(alone, both),
        less(both, expandable)
    )
}
