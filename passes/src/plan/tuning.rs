//! The constants of the planners, each with its unit and reason, and the heuristics that drop
//! candidates, each with a switch ([`Heuristics`]).
//!
//! `cargo bench -p lighterage-tests --bench planners` shows the effect of a change on plans, and
//! `--bench compile_time` the effect on planning time.

use ir::Processor;

/// Switches for the heuristics of the planners. All are on by default. All but the last drop
/// candidates which are not proved to be worse.
/// `cargo bench -p lighterage-tests --bench planners -- ablation` switches each one off. At 80, 50
/// and 30 % of keep, of the first five only `drop_dominated` ever made a step longer, by at most
/// 1.6 % (docs/benchmarks.md).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Heuristics {
    /// A ladder ends early when its rungs are slower than the possible step time; for one budget
    /// only.
    pub end_ladders: bool,
    /// Drafts of one planner that another of its drafts beats in bytes and time are not judged.
    pub drop_dominated: bool,
    /// For large graphs, overlapping steps are assumed to gain at most [`OVERLAP`] of a step.
    pub bound_overlap: bool,
    /// For large graphs, peaks that differ by less than [`CLEARLY`] count as equal when a draft is
    /// compared with a record.
    pub blur_peaks: bool,
    /// For large graphs, the second variant of a draft is assumed to be no faster than the first.
    pub first_variant_is_fastest: bool,
    /// In graphs of at least [`HALVED`] lines, taking back decisions is assumed to gain nothing up
    /// to a target if it gains nothing up to a larger one.
    pub halve_fills: bool,
    /// `auto` takes back decisions that free no bytes at the peak of a draft. Each such draft is an
    /// additional candidate.
    pub take_back: bool,
}

impl Heuristics {
    /// All heuristics.
    pub const ALL: Heuristics = Heuristics {
        end_ladders: true,
        drop_dominated: true,
        bound_overlap: true,
        blur_peaks: true,
        first_variant_is_fastest: true,
        halve_fills: true,
        take_back: true,
    };
    /// None of the heuristics that drop candidates: more are judged, and planning takes longer.
    pub const NONE: Heuristics = Heuristics {
        end_ladders: false,
        drop_dominated: false,
        bound_overlap: false,
        blur_peaks: false,
        first_variant_is_fastest: false,
        halve_fills: false,
        take_back: true,
    };
}

impl Default for Heuristics {
    fn default() -> Heuristics {
        Heuristics::ALL
    }
}

// All planners.

/// Share of a step or a peak that is too small to matter.
pub const NOTHING: f64 = 0.01;
/// Share of a step that another plan must save to be preferred to a plan that keeps everything. A
/// step that exceeds the shortest possible one by at most this share counts as fastest, and the
/// simplest of the fastest is taken. Copies and updates on the host may disturb kernels more than
/// predicted: measured on two cores, steps that move data are up to 4 % slower than predicted
/// against steps that do not.
pub const AS_FAST: f64 = 0.01;
/// Share of the bytes that more chunks of the loss must save. On a GPU each chunk starts about ten
/// kernels, and reads and writes the sum of the head's gradient: 32 chunks of GPT-2 124M take 1.1 %
/// of a step and 16 take 0.6 %, for 1.7 % more bytes.
pub const fn worth_a_chunk(processor: Processor) -> f64 {
    match processor {
        Processor::Cpu => NOTHING,
        Processor::Gpu => 0.03,
    }
}
/// Lines of a graph. With at least this number a round of planning takes long, and a small share of
/// the peak holds many tensors. So ladders take larger steps.
pub const LARGE: usize = 2000;
/// Lines of a graph. With fewer, every draft is judged, because this takes no time.
pub const SMALL: usize = 64;
/// Copy time in latencies of the link. A copy of this length loses 3 % to latency, so hosted
/// parameters are joined to chunks of at least this length.
pub const LATENCIES: f64 = 32.0;
/// The largest number of chunks of the loss. Doubling it saves no bytes in any fixture.
pub const MOST_LOSS_CHUNKS: u64 = 64;

// Drafts and records.

/// Factor of the possible step time. A rung of a ladder above it is clearly slower.
pub const LONGER: f64 = 1.05;
/// Shares of the live peak that early copies may take in addition to it.
pub const AHEAD: [f64; 4] = [0.0, 0.05, 0.15, 0.4];
/// Share of a step that more room for early copies must save.
pub const AHEAD_WORTH: f64 = 0.001;
/// Share of bytes and time by which a draft is clearly better than another. Gaps between tensors
/// change peaks by about this share.
pub const CLEARLY: f64 = 0.005;
/// The largest share of a draft's step that overlap with the next step saves. Measured: 0.2 %.
pub const OVERLAP: f64 = 0.003;
/// Share by which times may differ if the same numbers are added in another order.
pub const SAME: f64 = 1e-9;
/// Number of drafts that are judged together, so that no thread is idle.
pub const FEW: usize = 8;

// Greedy trajectories and jumps.

/// Shares of the live peak by which the first round of a trajectory lowers it. Each has its own
/// trajectory, since other rounds find other plans: the second saves up to 3 % of a step below 40 %
/// of keep (`examples/gpt2` planned for h200).
pub const STEPS: &[f64] = &[0.03, 0.02];
/// Factor from one round's share to the next, up to [`LARGEST_STEP`]. Most budgets are near the
/// memory of keeping everything, so small steps come first. Far below it, tensors are large
/// compared with the peak. 45 rounds reach a hundredth of the peak.
pub const GROWTH: f64 = 1.05;
/// The largest share of a round.
pub const LARGEST_STEP: f64 = 0.25;
/// [`STEPS`] for large graphs: 26 rounds.
pub const LARGE_STEPS: &[f64] = &[0.06];
/// [`GROWTH`] for large graphs.
pub const LARGE_GROWTH: f64 = 1.08;
/// Factor from one target of a ladder of jumps to the next.
pub const JUMP_LADDER: f64 = 0.9;
/// [`JUMP_LADDER`] for targets below the share [`FEW_TENSORS`] of the start's peak. It is the
/// square root, so every second target is one of the coarser ladder.
pub const FINE_JUMP_LADDER: f64 = 0.948_683;
/// [`JUMP_LADDER`] for large graphs.
pub const LARGE_JUMP_LADDER: f64 = 0.8;
/// Share of the peak at the start of a ladder. Below it, one tensor is a large share of the rest.
pub const FEW_TENSORS: f64 = 0.4;
/// Rounds to reach the target of a jump. Reruns take bytes that are known only after the lines are
/// built.
pub const JUMP_TRIES: usize = 3;
/// Factor of a target. A jump whose peak is above the target by this factor is the last of its
/// ladder.
pub const MISSED: f64 = 1.5;
/// Shares of the blocks whose states live on the host at the start of ladders of jumps.
pub const HOSTED: [f64; 5] = [0.0, 0.25, 0.5, 0.75, 1.0];
/// If the host has no room for the states of all blocks: shares of the host that the states of the
/// last blocks take at the start of ladders. The rest is for gradients, and for swapped values.
pub const FILLED_HOSTS: [f64; 2] = [0.95, 0.75];
/// Rounds in a row that may fail to lower the live peak before a trajectory ends.
pub const PATIENCE: usize = 6;
/// Reruns for each line of the model. With more of them the same cascades start again and again, so
/// such cuts are dropped.
pub const MOST_RERUNS: usize = 1;
/// Nodes of a cascade. Longer ones are not priced.
pub const LONGEST_CASCADE: usize = 64;

// Prices of swaps. They only order candidates; the simulator decides about time.

/// Share of its time that a hidden copy costs, because it takes link time from other copies.
pub const HIDDEN_COPY: f64 = 0.05;
/// Share of the computing time that the link may be busy while copies are still hidden.
pub const LINK_HIDES: f64 = 0.8;
/// Share of the computing time that the host may be busy while its updates are still hidden.
pub const HOST_HIDES: f64 = 0.9;
/// The swaps at the start of a ladder of recomputation may take this share of the computing time,
/// minus this share of the time of copies in: each swap comes back, in addition to the other copies
/// in.
pub const SWAP_SPARE: [f64; 2] = [0.6, 0.5];
/// Share of the computing time that all copies out together may take.
pub const SWAP_OUT_SPARE: f64 = 0.9;
/// Copy time in latencies. A shorter copy takes mostly latency and frees few bytes.
pub const SWAP_LATENCIES: f64 = 8.0;

// The disk.

/// One part in this many of the host's pool is room for copies from the disk that come early and
/// copies to it that leave late. Steps predicted with 4, 8, 16 and 32, on three levels: LLaMA 13B
/// of docs/disk.md 56.3, 55.2, 54.3 and 54.2 s; `examples/gpt2` with a disk of 1 GB/s at 20 % and a
/// host of 8 MiB 221, 222, 218 and 218 ms, at 30 % and 16 MiB 197, 196, 197 and 197 ms, at 50 % and
/// 16 MiB 171, 171, 171 and 170 ms; gpt2-tiny at 30 % and 600 KiB 7.7, 7.0, 6.9 and 6.5 ms.
pub const STAGED: u64 = 32;
/// How often what waits on the disk is chosen, each time with fewer bytes on the host. The last
/// time, everything that can wait there does.
pub const SPILL_TRIES: usize = 6;

// Recomputation.

/// The share of the blocks that leaves out only the first one, in a model of any size. Nothing
/// hides the update of the first block, because its gradient comes last.
const ALL_BUT_FIRST: f64 = 1.0 - f64::EPSILON;
/// For the start of each ladder: the share of the blocks whose states live on the host, and the
/// share of the link's spare time that swaps take.
pub const REMAT_STARTS: [(f64, f64); 12] = [
    (0.0, 0.0),
    (0.0, 0.5),
    (0.0, 0.9),
    (0.5, 0.0),
    (0.5, 0.5),
    (0.5, 0.9),
    (ALL_BUT_FIRST, 0.0),
    (ALL_BUT_FIRST, 0.5),
    (ALL_BUT_FIRST, 0.9),
    (1.0, 0.0),
    (1.0, 0.5),
    (1.0, 0.9),
];
/// The shares of the link's spare time in [`REMAT_STARTS`], for the shares of the blocks that fill
/// the host.
pub const REMAT_SWAPS: [f64; 3] = [0.0, 0.5, 0.9];
/// Factor from one budget of a ladder to the next; the second is for large graphs.
pub const REMAT_LADDER: [f64; 2] = [0.9, 0.82];
/// Steps of the solver for each line of the schedule.
pub const REMAT_STEPS: u64 = 40;
/// The most steps of the solver for a budget.
pub const REMAT_MOST_STEPS: u64 = 30_000;
/// Rounds in which a budget is corrected by the bytes that the lines really need.
pub const REMAT_TRIES: usize = 2;

// Taking back.

/// Sizes between two powers of two which drafts fill: so a budget of 20, 24 or 80 GiB is one.
pub const FILLED_PER_OCTAVE: u64 = 8;
/// Lines of a graph. With at least this number a draft takes long, and sizes are tried by halves.
/// In small graphs, where one tensor is a large share of the peak, this made a step up to 5 %
/// longer.
pub const HALVED: usize = 1000;
/// The most sizes that a draft fills: up to about 3 times its own.
pub const FILLED: usize = 12;

// Layouts (ProTrain) and weights.

/// The most configurations of ProTrain that are drafted. GPT-2 10B has 50 to 112 that no other one
/// beats by the formulas.
pub const RUNGS: usize = 128;
/// Factor of the budget. A configuration that needs more by ProTrain's formula is not drafted for
/// it: the formula is never this far above the real peak.
pub const FAR_TOO_LARGE: f64 = 1.5;
/// Number of shares of the chunks that stay on the device, and of the blocks that swap.
pub const LAYOUT_SHARES: usize = 8;
/// Shares of the host that chunks fill, if not all fit there.
pub const LAYOUT_HOSTS: [f64; 3] = [1.0, 0.85, 0.7];
/// Factor from one memory of the ladder of weight offloading to the next.
pub const WEIGHTS_LADDER: f64 = 0.88;
/// Layers of a chain. A shorter chain cannot hide transfers.
pub const FEWEST_LAYERS: usize = 3;
