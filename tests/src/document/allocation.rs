//! STAlloc: allocators on generated traces of training steps.

use super::{Kind, Paper, Section};
use crate::megatron::Setup;
use addresses::caching::{self, Segments};
use addresses::dynamic;
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
                Traces are generated for the paper's configurations; the allocators of PyTorch and \
                GMLake are simulated on them ([alloc.md](alloc.md)). `ours` is `lighterage alloc \
                plan --effort fast`. Each plan is checked.",
        sections: vec![
            Section {
                name: "stalloc-figure8",
                title: "Figure 8: recomputation (R), virtual pipeline (V), ZeRO (Z), offloading \
                        (O)",
                kind: Kind::Simulated,
                command: None,
                body: || efficiencies(&figure_8()),
                differs: "The paper: STAlloc above 95 %; PyTorch 57.1 to 90.6 %, expandable \
                          segments 62.4 to 93.2 %, GMLake 45.1 to 88.1 % (dense models); for the \
                          mixture of experts 93.7 to 97.8 % against 82.3, 93.1 and 79.7 % on \
                          average. Ours agrees with it, and so does `stalloc`, our version of the \
                          paper's planner, except for the mixture of experts without \
                          recomputation. The baselines waste less here: a generated trace is one \
                          step from an empty allocator, and a real run has warm-up, evaluation, \
                          and sizes that change. GMLake's mapping costs no time here.",
                quick: false,
            },
            Section {
                name: "stalloc-figure9",
                title: "Figure 9: 2, 4 and 8 stages of layers like Llama2's",
                kind: Kind::Simulated,
                command: None,
                body: || efficiencies(&figure_9()),
                differs: "The paper: above 99 % for STAlloc at any scale, with recomputation and \
                          with a virtual pipeline. Its models are Qwen2.5 with 7, 14, 32 and 72 \
                          billion parameters.",
                quick: false,
            },
            Section {
                name: "stalloc-figure10",
                title: "Figure 10: Llama2-7B with recomputation, sequences of a micro-batch",
                kind: Kind::Simulated,
                command: None,
                body: || efficiencies(&figure_10()),
                differs: "As in the paper, STAlloc is flat at about 99 %, and the other allocators \
                          get worse with larger micro-batches.",
                quick: false,
            },
            Section {
                name: "stalloc-table3",
                title: "Table 3 and figure 13: dynamic requests of Qwen1.5-MoE",
                kind: Kind::Simulated,
                command: None,
                body: composition,
                differs: "Here the sizes of dynamic requests are unknown to the planner. As in the \
                          paper, the static plan removes most of the fragmentation, and reuse of \
                          its idle bytes serves some dynamic requests, more with recomputation. \
                          Here it does not always save memory: the requests that are left are the \
                          large ones, and the simulated caching allocator fragments on them. The \
                          paper: 70.2 % less fragmentation with static planning alone, another \
                          22.9 % with reuse. Totals differ because the paper's batches are not \
                          stated.",
                quick: false,
            },
            Section {
                name: "stalloc-table2",
                title: "Table 2: time of planning",
                kind: Kind::Timed,
                command: None,
                body: planning_times,
                differs: "The paper's requests and seconds are those of its own traces and \
                          machine.",
                quick: false,
            },
        ],
    }
}

/// The traces of figure 8.
pub fn figure_8() -> Vec<(String, Setup)> {
    [
        ("GPT-2", Setup::gpt2()),
        ("Llama2-7B", Setup::llama2()),
        ("Qwen1.5-MoE", Setup::qwen_moe()),
    ]
    .map(|(name, setup)| {
        ["", "R", "V", "VR", "ZR", "ZOR"].map(|letters| {
            let name = format!("{name} {letters}");
            (name.trim_end().to_string(), with(&setup, letters))
        })
    })
    .concat()
}

/// The traces of figure 9.
pub fn figure_9() -> Vec<(String, Setup)> {
    let scaled = |stages: usize| Setup {
        stages,
        layers: 8 * stages,
        micro_batches: 4 * stages,
        ..Setup::llama2()
    };
    let rows = [2, 4, 8].map(|stages| {
        ["R", "V"].map(|letters| {
            let name = format!("{stages} stages {letters}");
            (name, with(&scaled(stages), letters))
        })
    });
    rows.concat()
}

/// The traces of figure 10.
pub fn figure_10() -> Vec<(String, Setup)> {
    let of = |batch: u64| Setup {
        batch,
        ..Setup::llama2()
    };
    [1, 2, 4, 8, 16, 32, 64]
        .map(|batch| (batch.to_string(), with(&of(batch), "R")))
        .to_vec()
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
        of("GPT-2 N", Setup::gpt2(), 32, "", 12_785, 24.4),
        of("GPT-2 R", Setup::gpt2(), 32, "R", 16_569, 21.9),
        of("Llama2 N", Setup::llama2(), 128, "", 66_529, 105.0),
        of("Llama2 R", Setup::llama2(), 128, "R", 86_721, 136.0),
        of("MoE N", Setup::qwen_moe(), 48, "", 196_759, 374.0),
        of("MoE R", Setup::qwen_moe(), 48, "R", 281_669, 145.0),
    ]
}

/// A setup with the optimizations that the letters mean.
pub fn with(setup: &Setup, letters: &str) -> Setup {
    let has = |letter| letters.contains(letter);
    Setup {
        recompute: has('R'),
        virtual_stages: if has('V') { 2 } else { 1 },
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
fn theirs(trace: &Trace) -> Vec<u64> {
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
        let trace = setup.trace();
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
            cells.push(share(caching::simulate(&trace, rule).reserved_bytes));
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
        let trace = setup.trace();
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
    /// What the caching allocator reserves for the requests that do not fit the plan's idle bytes.
    cached: u64,
    /// The most bytes of these requests that are alive at once.
    fallback: u64,
}

/// Runs a trace: static requests have planned addresses; dynamic ones get idle bytes of the plan
/// (Eq 7, best fit) if `reuse`, or else are cached.
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
        cached: caching::simulate(&rest, Segments::Fixed).reserved_bytes,
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

fn composition() -> String {
    let mut table = Table::new([
        "trace",
        "live GB",
        "static GB",
        "fallback without reuse GB (theirs)",
        "with reuse GB (theirs)",
        "caching",
        "static plan alone",
        "with reuse",
    ]);
    for (letters, without_reuse, with_reuse) in THEIRS {
        let trace = with(&Setup::qwen_moe(), letters).trace();
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
            share(caching::simulate(&trace, Segments::Fixed).reserved_bytes),
            share(alone.pool + alone.cached),
            share(both.pool + both.cached),
        ]);
    }
    table.markdown()
}
