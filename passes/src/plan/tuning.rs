//! The numbers that steer the planners, in one place, each with its unit and its reason; and the
//! heuristics that drop candidates, each with a switch ([`Heuristics`]).
//!
//! `cargo bench -p lighterage-tests --bench planners` shows what a change does to plans,
//! `--bench compile_time` what it does to planning.

/// Switches for the heuristics that drop candidates which are not proved to be worse. All are on by
/// default. `cargo bench -p lighterage-tests --bench planners -- ablation` switches each one off.
/// At 80, 50 and 30 % of keep, only `drop_dominated` ever made a step longer, by at most 1.0 %
/// (docs/benchmarks.md).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Heuristics {
    /// A ladder ends early once its rungs are slower than what is possible; for one budget only.
    pub end_ladders: bool,
    /// Drafts of one planner that another of its drafts beats in bytes and time are not judged.
    pub drop_dominated: bool,
    /// For large graphs, overlapping steps are taken to win at most [`OVERLAP`] of a step.
    pub bound_overlap: bool,
    /// For large graphs, peaks that differ by less than [`CLEARLY`] count as equal when a draft is
    /// compared with a record.
    pub blur_peaks: bool,
    /// For large graphs, the second variant of a draft is taken to be no faster than the first.
    pub first_variant_is_fastest: bool,
}

impl Heuristics {
    /// All heuristics.
    pub const ALL: Heuristics = Heuristics {
        end_ladders: true,
        drop_dominated: true,
        bound_overlap: true,
        blur_peaks: true,
        first_variant_is_fastest: true,
    };
    /// No heuristic: more drafts are judged, and planning takes longer.
    pub const NONE: Heuristics = Heuristics {
        end_ladders: false,
        drop_dominated: false,
        bound_overlap: false,
        blur_peaks: false,
        first_variant_is_fastest: false,
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
/// Share of the shortest possible step: a step that exceeds that by at most this is as fast as
/// possible.
pub const AS_FAST: f64 = 0.001;
/// Lines of a graph. From here on a round of planning takes long, and a share of the peak holds
/// many tensors: ladders take larger steps.
pub const LARGE: usize = 2000;
/// Lines of a graph. Below, every draft is judged: it takes no time.
pub const SMALL: usize = 64;
/// Copy time in latencies of the link. A copy of this length loses 3 % to latency, so hosted
/// parameters are joined to chunks of at least this length.
pub const LATENCIES: f64 = 32.0;
/// The largest number of chunks in which the loss is tried. Further doubling saves no bytes in any
/// fixture.
pub const MOST_LOSS_CHUNKS: u64 = 64;

// Drafts and records.

/// Factor of step time: a rung of a ladder is clearly slower than what is possible.
pub const LONGER: f64 = 1.05;
/// Shares of the live peak that copies may take above it, to come early.
pub const AHEAD: [f64; 4] = [0.0, 0.05, 0.15, 0.4];
/// Share of a step that more room for early copies must win.
pub const AHEAD_WORTH: f64 = 0.001;
/// Share of bytes and time by which a draft is clearly better than another. Gaps between tensors
/// blur peaks by about this much.
pub const CLEARLY: f64 = 0.005;
/// Share of a draft's step that overlapping it with the next wins at most. Measured: 0.2 %.
pub const OVERLAP: f64 = 0.003;
/// Share by which equal times differ when the same numbers are added in another order.
pub const SAME: f64 = 1e-9;
/// Number of drafts that are judged at once, so that no thread is idle.
pub const FEW: usize = 8;

// Greedy trajectories and jumps.

/// Share of the live peak by which the first round of a trajectory lowers it. Small steps find more
/// plans.
pub const STEP: f64 = 0.03;
/// Factor from one round's share to the next, up to [`LARGEST_STEP`]. Most budgets are near what
/// keeping everything needs; far below it, tensors are large beside the peak. 45 rounds reach a
/// hundredth of the peak.
pub const GROWTH: f64 = 1.05;
/// The largest share of a round.
pub const LARGEST_STEP: f64 = 0.25;
/// [`STEP`] for large graphs: 26 rounds.
pub const LARGE_STEP: f64 = 0.06;
/// [`GROWTH`] for large graphs.
pub const LARGE_GROWTH: f64 = 1.08;
/// Factor from one target of a ladder of jumps to the next; the second is for large graphs.
pub const JUMP_LADDER: [f64; 2] = [0.9, 0.8];
/// Rounds to reach the target of a jump: reruns take bytes that only the lines show.
pub const JUMP_TRIES: usize = 3;
/// Factor of a target. A jump that misses its target by this is the last of its ladder.
pub const MISSED: f64 = 1.5;
/// Shares of the blocks whose states live on the host at the start of ladders of jumps.
pub const HOSTED: [f64; 5] = [0.0, 0.25, 0.5, 0.75, 1.0];
/// Rounds in a row that may fail to lower the live peak before a trajectory ends.
pub const PATIENCE: usize = 6;
/// Reruns for each line of the model. More of them mean cascades that start again and again: such
/// cuts are given up.
pub const MOST_RERUNS: usize = 1;
/// Nodes of a cascade. A longer one is not worth pricing.
pub const LONGEST_CASCADE: usize = 64;

// Prices of swaps. They only order candidates: the simulator has the last word on time.

/// Share of its time that a hidden copy costs: it takes link time from other copies.
pub const HIDDEN_COPY: f64 = 0.05;
/// Share of the computing time in which the link may be at work and copies still hide.
pub const LINK_HIDES: f64 = 0.8;
/// Share of the computing time in which the host may be at work and its updates still hide.
pub const HOST_HIDES: f64 = 0.9;
/// Shares of the computing time and of the time of copies in that bound the swaps a ladder of
/// recomputation begins with: each swap comes back, beside the copies that are there.
pub const SWAP_SPARE: [f64; 2] = [0.6, 0.5];
/// Share of the computing time that copies out may take altogether.
pub const SWAP_OUT_SPARE: f64 = 0.9;
/// Copy time in latencies. A shorter copy is mostly latency and frees little.
pub const SWAP_LATENCIES: f64 = 8.0;

// Recomputation.

/// Shares of the blocks whose states live on the host, and of the link's spare time that swaps
/// take, at the start of each ladder.
pub const REMAT_STARTS: [(f64, f64); 9] = [
    (0.0, 0.0),
    (0.0, 0.5),
    (0.0, 0.9),
    (0.5, 0.0),
    (0.5, 0.5),
    (0.5, 0.9),
    (1.0, 0.0),
    (1.0, 0.5),
    (1.0, 0.9),
];
/// Factor from one budget of a ladder to the next; the second is for large graphs.
pub const REMAT_LADDER: [f64; 2] = [0.9, 0.82];
/// Steps of the solver for each line of the schedule.
pub const REMAT_STEPS: u64 = 40;
/// The most steps of the solver for a budget.
pub const REMAT_MOST_STEPS: u64 = 30_000;
/// Rounds in which a budget is corrected by what the lines really need.
pub const REMAT_TRIES: usize = 2;

// Layouts (ProTrain) and weights.

/// Number of capacities that the ProTrain planner tries, from what keeping everything needs down to
/// the smallest possible.
pub const RUNGS: usize = 24;
/// Number of shares of the chunks that stay on the device, and of the blocks that swap.
pub const LAYOUT_SHARES: usize = 4;
/// Factor from one memory of the ladder of weight offloading to the next.
pub const WEIGHTS_LADDER: f64 = 0.88;
/// Layers of a chain. A shorter one has nothing to hide a transfer behind.
pub const FEWEST_LAYERS: usize = 3;
