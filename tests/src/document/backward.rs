//! The optimizer's step in the backward: the toy of linear layers, and LLaMA 7B on a few devices.

use super::allocation::{self, ALIGN};
use super::{Kind, Paper, Section};
use crate::fsdp::{
    self, A100, Figures, LLAMA_7B, LLAMA_13B, Machine, Memory, OutOfMemory, Prefetch, Setup,
};
use crate::linears::linears;
use papers::table::Table;
use passes::cost::{Roofline, Tabled};
use passes::decide::{Planner, Problem, decide};
use passes::graph::optimizer::Optimizer;
use passes::graph::{canonical, optimizer};
use passes::pipeline::Budget;
use passes::schedule::order::{self, Update};
use placement::trace::Trace;
use placement::{Effort, lower_bound};

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
                          buffers, which the post does not state.",
                quick: true,
            },
            Section {
                name: "backward-fsdp",
                title: "LLaMA with FSDP on A100s of 40 GB: the time of a step, and what stalls it",
                kind: Kind::Simulated,
                command: None,
                body: chain,
                differs: DIFFERS_CHAIN,
                quick: false,
            },
            Section {
                name: "backward-prefetch",
                title: "BACKWARD_PRE or BACKWARD_POST: seconds of a step, and the model's choice",
                kind: Kind::Simulated,
                command: None,
                body: prefetch,
                differs: DIFFERS_PREFETCH,
                quick: false,
            },
        ],
    }
}

const DIFFERS_CHAIN: &str = "\
    Here PyTorch's allocator serves the step's own requests, and its retries are counted; none is \
    put in by hand. A row is the mean of eight runs (four memories of 40.6 to 41.2 GB for \
    tensors, two seeds), each of eight steps after three. Counts are of a step, on all devices \
    together; deviations are of the steps of one run; bytes are the most on a device. Assumed, \
    for all rows: one sequence of 2048 tokens on each device; nothing is recomputed; a layer \
    saves 16 bytes for each token and element of its width, and 8 for each of its hidden width; \
    weights are gathered and gradients are scattered in 16 bits, and the rest of the states is in \
    f32; collectives reach 200 GB/s; the host needs 2 ms for a layer's backward; times of kernels \
    and of the host vary by 5 %. Two numbers are set once, by two of the post's rows: 79 TFLOP/s \
    by 1.15 s, and 5 ms and 5 ms a GB for each cudaMalloc and cudaFree so that some runs of one \
    by one on four devices take 7.2 s.\n\n\
    What comes out: each change of the post helps, and the last one most; `foreach` is out of \
    memory on four devices (in most runs) and not on five, because of 13.5 GB of temporaries; \
    without a limit, the host gathers up to 9 GB ahead, which leads to retries, and with the \
    limit 1.7 GB; with updates in the backward 7B never retries, and reserves 4.5 GB less; each \
    stall delays all devices, so eight devices stall longer than four.\n\n\
    What does not: `limit_all_gathers` alone takes twice the post's time. The post sees no retry \
    there, and here the pools of the three streams, which share nothing, still need more than the \
    device has, twice in a step. One by one, five devices are faster than four; in the post they \
    are not. Single runs of one row differ by up to a factor of 2.6, so the rows with retries are \
    regimes, not predictions. The post's deviations are 28 % before and 8 % after; here up to 20 \
    % and 0.2 %, the share of kernels: what else varies on a real machine is not simulated. 13B \
    with updates in the backward has 1.3 GB to spare and stalls; in the post it hardly does. With \
    BACKWARD_POST it hardly does here either (below).\n\n\
    With planned memory a step has no request. Its row has the same streams and updates, no \
    retries, and reserves what its tensors need.";
const DIFFERS_PREFETCH: &str = "\
    The runs of the table above, with both orders. The choice is the order with the shorter \
    predicted step; PRE if they are within 1 %, because it hides slower links. PRE has one more \
    unit of weights on the device. For 7B the choices are those that are faster in the post: \
    after the backward the bytes of a unit are worth more than the overlap, in the backward they \
    are not. This holds near the assumed memory only: with 40.3 GB for tensors POST still \
    retries, and is slower than PRE. The 9 % that POST costs the post with updates in the \
    backward do not come out: here gathers are hidden in both orders. For 13B the post gives one \
    time for each kind of update, and no order.";

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
            if all <= A100.device_bytes as f64 {
                "yes"
            } else {
                "no"
            }
            .into(),
            theirs.into(),
        ]);
    }
    table.markdown()
}

/// The post's configurations of FSDP.
pub fn rows() -> Vec<(&'static str, Setup, &'static str)> {
    let one = Setup {
        model: LLAMA_7B,
        devices: 4,
        foreach: false,
        limit_gathers: false,
        in_backward: false,
        prefetch: Prefetch::Pre,
        memory: Memory::Caching,
    };
    let foreach = Setup {
        foreach: true,
        ..one
    };
    let five = |setup| Setup {
        devices: 5,
        ..setup
    };
    let limited = Setup {
        limit_gathers: true,
        ..one
    };
    let in_backward = Setup {
        in_backward: true,
        ..limited
    };
    let planned = Setup {
        memory: Memory::Planned,
        ..in_backward
    };
    let large = |setup| Setup {
        model: LLAMA_13B,
        devices: 8,
        ..setup
    };
    vec![
        ("7B, foreach", foreach, "out of memory"),
        ("7B, foreach", five(foreach), "8"),
        ("7B, one by one", five(one), "7.2"),
        ("7B, one by one", one, "7.2"),
        ("7B, limit_all_gathers", limited, "2.5"),
        ("7B, in the backward", in_backward, "1.15"),
        ("7B, planned memory", planned, ""),
        ("13B, limit_all_gathers", large(limited), "8.8"),
        ("13B, in the backward", large(in_backward), "2.6"),
        ("13B, planned memory", large(planned), ""),
    ]
}

/// Memories for tensors that are tried: what the context and the libraries take is not known to
/// some 0.3 GB, and how often the allocator stalls depends on it.
const MEMORIES: [u64; 4] = [
    A100.device_bytes - 400_000_000,
    A100.device_bytes - 200_000_000,
    A100.device_bytes,
    A100.device_bytes + 200_000_000,
];
/// Steps of each run: those that fill the caches, and those that count.
const STEPS: (usize, usize) = (3, 8);

/// Runs of a setup with each memory, with two seeds. A run without memory has no figures.
pub fn runs(setup: &Setup) -> Vec<Result<Figures, OutOfMemory>> {
    let run = |device_bytes, seed| {
        let machine = Machine {
            device_bytes,
            ..A100
        };
        fsdp::run(setup, &machine, STEPS.0, STEPS.1, seed)
    };
    let both = |bytes| [1, 2].map(|seed| run(bytes, seed));
    MEMORIES.into_iter().flat_map(both).collect()
}

/// The mean of a figure over some runs.
fn mean(runs: &[Figures], of: impl Fn(&Figures) -> f64) -> f64 {
    runs.iter().map(of).sum::<f64>() / runs.len() as f64
}

/// Seconds of a step, over the runs that have memory; none if most do not.
pub fn seconds(runs: &[Result<Figures, OutOfMemory>]) -> Option<f64> {
    let fitting: Vec<Figures> = runs.iter().filter_map(|run| run.clone().ok()).collect();
    (2 * fitting.len() > runs.len()).then(|| mean(&fitting, Figures::mean))
}

/// The memory of a planned step.
pub struct Planned {
    /// The most bytes of tensors that are alive at once.
    pub tensors: u64,
    /// Bytes of the plan.
    pub pool: u64,
    /// The most bytes of gathered weights.
    pub gathered: u64,
}

/// Plans addresses for the tensors of a setup's step.
pub fn planned(setup: &Setup) -> Planned {
    let mut trace = fsdp::trace(setup, &A100);
    let gathers = trace.blocks.iter();
    let gathers = Trace {
        blocks: gathers
            .filter(|block| block.origin.stream == fsdp::GATHER)
            .cloned()
            .collect(),
        ..Trace::default()
    };
    // A planned step has a wait wherever a stream takes over bytes of another one.
    for block in &mut trace.blocks {
        block.origin.stream = 0;
    }
    Planned {
        tensors: lower_bound(&trace, ALIGN),
        pool: allocation::checked(&trace, &allocation::ours(&trace, Effort::Fast)),
        gathered: lower_bound(&gathers, ALIGN),
    }
}

fn chain() -> String {
    let mut table = Table::new([
        "",
        "devices",
        "step s",
        "least and most",
        "the post",
        "retries",
        "cudaMalloc and cudaFree",
        "deviation",
        "tensors GB",
        "reserved GB",
        "gathered GB",
    ]);
    for (name, setup, theirs) in rows() {
        let all = runs(&setup);
        let fitting: Vec<Figures> = all.iter().filter_map(|run| run.clone().ok()).collect();
        let mut cells = vec![name.to_string(), setup.devices.to_string()];
        let Some(step) = seconds(&all) else {
            let short = all.len() - fitting.len();
            cells.push(format!("out of memory in {short} of {} runs", all.len()));
            cells.resize(11, String::new());
            cells[4] = theirs.into();
            table.push(cells);
            continue;
        };
        let of_step = |all: &[usize]| all.iter().sum::<usize>() as f64 / all.len() as f64;
        let gb = |bytes: u64| format!("{:.1}", bytes as f64 / 1e9);
        let most = |of: fn(&Figures) -> u64| fitting.iter().map(of).max().unwrap_or(0);
        let times = fitting.iter().map(Figures::mean);
        let (least, longest) = times.fold((f64::INFINITY, 0.0f64), |(lo, hi), s| {
            (lo.min(s), hi.max(s))
        });
        let memory = match setup.memory {
            Memory::Caching => Planned {
                tensors: most(|run| run.allocated),
                pool: most(|run| run.reserved),
                gathered: most(|run| run.gathered),
            },
            Memory::Planned => planned(&setup),
        };
        cells.extend([
            format!("{step:.2}"),
            format!("{least:.2} to {longest:.2}"),
            theirs.into(),
            format!("{:.1}", mean(&fitting, |run| of_step(&run.retries))),
            format!("{:.0}", mean(&fitting, |run| of_step(&run.calls))),
            format!("{:.1} %", 100.0 * mean(&fitting, Figures::deviation)),
            gb(memory.tensors),
            gb(memory.pool),
            gb(memory.gathered),
        ]);
        table.push(cells);
    }
    table.markdown()
}

fn prefetch() -> String {
    let mut table = Table::new([
        "updates",
        "PRE s",
        "POST s",
        "chosen",
        "the post: PRE s",
        "POST s",
        "faster",
    ]);
    let of = |name: &str| {
        let (_, setup, _) = rows().into_iter().find(|row| row.0 == name)?;
        Some(setup)
    };
    for (name, row, theirs) in [
        (
            "7B, after the backward",
            "7B, limit_all_gathers",
            ["2.5", "2.1", "POST"],
        ),
        (
            "7B, in the backward",
            "7B, in the backward",
            ["1.15", "1.25", "PRE"],
        ),
        (
            "13B, after the backward",
            "13B, limit_all_gathers",
            ["8.8", "", ""],
        ),
        (
            "13B, in the backward",
            "13B, in the backward",
            ["2.6", "", ""],
        ),
    ] {
        let setup = of(row).expect("the row should exist");
        let [pre, post] = [Prefetch::Pre, Prefetch::Post]
            .map(|prefetch| seconds(&runs(&Setup { prefetch, ..setup })));
        let cell = |seconds: Option<f64>| match seconds {
            Some(seconds) => format!("{seconds:.2}"),
            None => "out of memory".into(),
        };
        let chosen = match fsdp::choose(pre, post) {
            Some(Prefetch::Pre) => "PRE",
            Some(Prefetch::Post) => "POST",
            None => "",
        };
        let mut cells = vec![name.into(), cell(pre), cell(post), chosen.into()];
        cells.extend(theirs.map(String::from));
        table.push(cells);
    }
    table.markdown()
}
