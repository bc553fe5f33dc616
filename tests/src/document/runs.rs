//! STAlloc: what makes allocators waste memory in runs, and what that costs.

use super::allocation::{ALIGN, H200, checked, figure_8, generated, ours, planned, theirs, with};
use super::{Kind, Section};
use crate::serving::{self, Call};
use addresses::caching::{self, Segments};
use addresses::generate::{Chunked, Model, Setup};
use addresses::stats::stats;
use lighterage_alloc::Plan;
use papers::table::Table;
use placement::trace::{Block, Trace};
use placement::{Effort, lower_bound};
use std::collections::BTreeMap;
use std::time::Instant;

pub(super) fn sections() -> Vec<Section> {
    vec![
        Section {
            name: "stalloc-figure8-runs",
            title: "Figure 8 again: runs, and tensors of collectives",
            kind: Kind::Simulated,
            command: None,
            body: regimes,
            differs: "A run has three steps, the optimizer's moments at the end of the first, an \
                      evaluation after each, and sequences up to 30 % shorter. The lower \
                      efficiency of the first and the last stage is given. A run alone brings \
                      PyTorch's and GMLake's allocators nearer to the paper (dense models: from \
                      73.7 %), but not expandable segments, which stay above 95 %. What lowers all \
                      three is that tensors of collectives are held. NCCL's stream has used them, \
                      so PyTorch's allocator passes their bytes on only when the device has done \
                      the work, and counts them as free. STAlloc's allocator has no function for \
                      `record_stream`, and ours lets the stream wait, so plans do not hold them. \
                      Here the host is as far ahead of the device as it can be: to the end of a \
                      phase, or by 1024 launches where no phase ends with a wait (virtual \
                      pipelines). This is the worst case: the paper's efficiencies (dense models: \
                      57.1 to 90.6, 62.4 to 93.2 and 45.1 to 88.1 %) lie between it and a run \
                      without holding. How far ahead a real host is was not measured. `ours` in a \
                      run is the plan for the longest sequences, which serves the shorter ones; \
                      the live bytes are those of the run.",
            quick: false,
        },
        Section {
            name: "stalloc-causes",
            title: "Which requests make the caching allocator grow",
            kind: Kind::Simulated,
            command: None,
            body: causes,
            differs: "Columns in the middle say in which part of the run memory came from the \
                      system. Moments need no new segment: they take free ones of the first step \
                      and stay there. Then tensors that had these segments take parts of larger \
                      ones, up to the logits in f32 (13.19 GB), which need a second segment. \
                      Without the moments' requests the same two steps fragment little. With \
                      sequences of several lengths, most of the growth is for hidden tensors of \
                      full length (0.54 and 0.36 GB): shorter ones lie in their segments, and the \
                      rests are too small. Evaluations add at most 1.7 GB: without a backward, \
                      little is alive.",
            quick: true,
        },
        Section {
            name: "stalloc-figure2",
            title: "Figure 2: GPT-2 with PyTorch's allocator",
            kind: Kind::Simulated,
            command: None,
            body: figure_2,
            differs: "The paper gives 46.9 GB as 90 % of 52.1. It prints 80 % for 51.8 of 59.9 GB, \
                      which is 86 %. The trend is the paper's if tensors of collectives are held: \
                      1F1B wastes little, a virtual pipeline more, recomputation most, since fewer \
                      bytes are alive and as many are held. Without holding, one step shows no \
                      such trend. The number of stages and ranks is not stated; the bytes alive \
                      are those of 4 stages of 2 ranks.",
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
            differs: "The paper does not state the number of micro-batches; 128 give as many \
                      requests as its table 2. The generated trace has the sizes of the tensors \
                      above; a recorded one also has those of kernels' workspaces and of the \
                      communication library.",
            quick: true,
        },
        Section {
            name: "stalloc-table1",
            title: "Table 1 and section 2.2: Qwen2.5-14B on 16 H200, what fits",
            kind: Kind::Simulated,
            command: None,
            body: feasibility,
            differs: "`OOM`: a stage does not fit in a run with evaluation whose collectives hold. \
                      The paper does not state the micro-batch, the stages and the sequences; 4 \
                      stages, sequences of 4096 tokens and the largest micro-batch with which the \
                      original fits at all are taken here. A full device makes PyTorch wait for \
                      the device and return free segments, so more fits than the efficiencies \
                      suggest. As in the paper, the original does not fit with PyTorch's \
                      allocator. It does not fit with GMLake's either, which the paper leaves out, \
                      and it fits with our plan. Nine of the paper's twelve cells agree. \
                      Expandable segments fit the original here, because they return nearly all \
                      free memory; the calls to the driver cost no time here. PyTorch's allocator \
                      fits without the virtual pipeline. Our version of STAlloc's planner needs 6 \
                      % more than is alive in this schedule, and does not fit; the paper's own \
                      does. The last row has the fastest configuration that fits, with the paper's \
                      TFLOPS: fragmentation costs PyTorch 5.1 % here, in the paper 7.1 % (or 24.5 \
                      % if recomputation is chosen).",
            quick: false,
        },
        Section {
            name: "stalloc-overhead",
            title: "Figure 12: the share of a step that serving its requests takes",
            kind: Kind::Timed,
            command: Some("cargo bench -p lighterage-alloc --bench request"),
            body: overhead,
            differs: "The paper measures less than 0.05 % of throughput. Here the run-time \
                      allocator serves the requests of three steps, on addresses without memory, \
                      and a step is as long as its products at 464 TFLOP/s on each device, the \
                      paper's best rate. PyTorch's own allocator, which this replaces, takes time \
                      too. Throughput on a GPU was not measured.",
            quick: false,
        },
        Section {
            name: "stalloc-figure11",
            title: "Figure 11: GPT-2 in Colossal-AI, ZeRO-3 with offloading",
            kind: Kind::Simulated,
            command: None,
            body: other_framework,
            differs: "The paper's figure has two batch sizes that it does not state; STAlloc is \
                      best there. Here all allocators are near 100 %: chunks have one size, \
                      activations have multiples of one size, and each copy to the host waits for \
                      the device, so nothing is held. So this trace shows that another framework's \
                      pattern can be planned, not that the others fail on it. Steps from an empty \
                      allocator, without evaluation; the order is that of Gemini's static \
                      placement with all chunks on the host.",
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

/// The part of a run in which a block is requested.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Cause {
    Start,
    FirstStep,
    Moments,
    Evaluation,
    LaterSteps,
}

/// By the name of the phase, such as `0.fwd.3`.
fn cause(trace: &Trace, block: &Block) -> Cause {
    let name = &trace.phases[block.origin.phases.0 as usize].name;
    let mut words = name.split('.');
    match (words.next(), words.next()) {
        (_, None) => Cause::Start,
        (_, Some("eval")) => Cause::Evaluation,
        (Some("0"), Some("optimizer")) => Cause::Moments,
        (Some("0"), _) => Cause::FirstStep,
        _ => Cause::LaterSteps,
    }
}

fn causes() -> String {
    let mut table = Table::new([
        "run",
        "live GB",
        "reserved GB",
        "weights, gradients, copies",
        "first step",
        "moments",
        "evaluation",
        "later steps",
        "largest growth after the first step, GB",
    ]);
    let [gpt2, llama2] = [Model::Gpt2, Model::Llama2].map(Setup::new);
    let last = Setup {
        stage: gpt2.pipeline - 1,
        steps: 2,
        ..gpt2.clone()
    };
    let two = generated(&last);
    let mut without = two.clone();
    without
        .blocks
        .retain(|block| cause(&two, block) != Cause::Moments);
    for (name, trace) in [
        ("GPT-2, last stage, two steps of one length", two),
        ("the same without the requests for moments", without),
        ("GPT-2, first stage, a run", generated(&run(&gpt2))),
        ("Llama2-7B, first stage, a run", generated(&run(&llama2))),
        (
            "Llama2-7B R, first stage, a run, collectives hold",
            generated(&holding(&run(&with(&llama2, "R")))),
        ),
    ] {
        let mut growth = [0; 5];
        let mut later: BTreeMap<u64, u64> = BTreeMap::new();
        let mut see = |block: usize, bytes: u64| {
            let block = &trace.blocks[block];
            let cause = cause(&trace, block);
            if cause >= Cause::Evaluation {
                *later.entry(block.bytes).or_default() += bytes;
            }
            growth[cause as usize] += bytes;
        };
        let held = caching::simulate_seen(&trace, Segments::Fixed, u64::MAX, &mut see);
        let held = held.expect("memory without a limit should suffice");
        let live = lower_bound(&trace, ALIGN);
        let mut cells = vec![name.to_string(), gb(live), gb(held.reserved_bytes)];
        cells.extend(growth.map(gb));
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

/// Operations of a rank's products in a step: 6 for each parameter and token, 8 with recomputation.
fn operations(setup: &Setup) -> f64 {
    let shape = setup.shape;
    let products = if shape.gated { 3 } else { 2 };
    let attention = 2 * shape.width * (shape.heads + shape.key_heads) * shape.head;
    let layer = attention + products * shape.width * shape.hidden;
    let parameters = shape.layers as u64 * layer / (setup.pipeline as u64 * setup.tensor);
    let tokens = setup.sequence * setup.batch * setup.micro_batches as u64;
    let each = if setup.recompute { 8.0 } else { 6.0 };
    each * parameters as f64 * tokens as f64
}

/// Seconds in which the run-time allocator serves calls.
fn served(trace: &Trace, calls: &[Call], plan: Plan) -> f64 {
    let mut allocator = serving::allocator(plan);
    let start = Instant::now();
    serving::serve_from(&mut allocator, trace, calls);
    let seconds = start.elapsed().as_secs_f64();
    assert_eq!(
        allocator.stats().fallback,
        0,
        "recorded requests are planned"
    );
    seconds
}

fn overhead() -> String {
    const RATE: f64 = 464.3e12;
    const STEPS: usize = 3;
    let mut table = Table::new([
        "trace",
        "requests of a step",
        "ns for a request and its free",
        "serving ms",
        "step s",
        "share",
    ]);
    for (name, model, letters) in [
        ("GPT-2", Model::Gpt2, ""),
        ("GPT-2 R", Model::Gpt2, "R"),
        ("Llama2-7B", Model::Llama2, ""),
        ("Llama2-7B R", Model::Llama2, "R"),
    ] {
        let setup = Setup {
            steps: STEPS,
            ..with(&Setup::new(model), letters)
        };
        let trace = generated(&setup);
        let calls = serving::calls(&trace);
        let plan = serving::plan(&trace);
        // Other work on the machine can only add time.
        let runs = (0..5).map(|_| served(&trace, &calls, plan.clone()));
        let fastest = runs.min_by(f64::total_cmp).unwrap_or(f64::NAN);
        let seconds = fastest / STEPS as f64;
        let n = trace.blocks.len() / STEPS;
        let step = operations(&setup) / RATE;
        table.push(vec![
            name.into(),
            n.to_string(),
            format!("{:.0}", 1e9 * seconds / n as f64),
            format!("{:.2}", 1e3 * seconds),
            format!("{step:.2}"),
            format!("{:.4} %", 100.0 * seconds / step),
        ]);
    }
    table.markdown()
}
