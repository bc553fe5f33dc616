//! Four numbers that decide a step: how many chunks of model states stay on the device, how many
//! buffers the other chunks use, how many blocks swap their activations, and how many compute them
//! again (ProTrain: sections 3.1 to 3.3, appendix A; the equations are reconstructed from its
//! text).
//!
//! Before: an [`Instance`], plain figures of blocks, chunks and machine. After: the fastest
//! [`Config`] that fits, its time and memory, and, by [`Config::layout`], the decision for each
//! block and chunk.
//!
//! The search tries all relevant configurations. Time never rises with the number of buffers. So
//! only two numbers are tried: the fewest that keep the pipeline busy, and the most that fit. With
//! more than 128 blocks, not every number of blocks is tried. At most one block in `interval` may
//! swap, because a swap must end before the next one begins. Chunks are made persistent one by one
//! until memory is full. A number of recomputed blocks is skipped if its arithmetic alone takes
//! longer than the best step.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::ops::{Add, Range, RangeInclusive};
use thiserror::Error;

/// The figures of a block. Times are in µs, for one step.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct BlockCost {
    /// True if it may be swapped or computed again: one of the model's repeated blocks.
    pub repeated: bool,
    /// The chunk that its parameters are in.
    pub chunk: usize,
    /// Its forward.
    pub forward: f64,
    /// Its backward, without any recompute.
    pub backward: f64,
    /// Computing it again in its backward: at most its forward, because not every result is needed
    /// again.
    pub recompute: f64,
    /// Bytes that it holds from its forward for its backward, including its input.
    pub activation: u64,
    /// Bytes of its input, which it holds if it is computed again.
    pub input: u64,
    /// The most bytes that it needs while it runs, in addition to `activation`: gradients,
    /// temporaries, whether it is kept or computed again.
    pub transient: u64,
    /// Swapping its activation out.
    pub swap_out: f64,
    /// Swapping it in.
    pub swap_in: f64,
}

/// The figures of a chunk. Times are in µs, without contention.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ChunkCost {
    /// Fetching this device's share of the parameters from the host.
    pub upload: f64,
    /// Sending its share of the gradients to the host.
    pub offload: f64,
    /// Gathering the parameters from all devices; 0 with one device.
    pub gather: f64,
    /// Reducing the gradients over all devices; 0 with one device.
    pub reduce: f64,
    /// The update on the device, if it is persistent.
    pub update_device: f64,
    /// The update on the host, if it is not.
    pub update_host: f64,
    /// Bytes on the device if it is persistent: parameters, gradients, optimizer's states.
    pub persistent_bytes: u64,
    /// Bytes on the host if it is not.
    pub host_bytes: u64,
    /// Bytes of its buffer if it is not persistent: its parameters, or the size of all buffers.
    pub buffer_bytes: u64,
    /// Bytes of its copy for blocks of other chunks, in addition to the buffers, if it is neither
    /// persistent nor still in its buffer: tied embeddings.
    pub tied_bytes: u64,
    /// Bytes of its gradients that wait on the device for the last one, if gradients leave by chunk
    /// and it is not persistent. The blocks' `transient` has one gradient.
    pub waiting_bytes: u64,
}

/// A model on a machine, in figures.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Instance {
    /// The blocks, in the order of the forward. Blocks that are not repeated are kept.
    pub blocks: Vec<BlockCost>,
    /// The chunks, in the order of the forward. Not empty; it contains the chunk of every block.
    pub chunks: Vec<ChunkCost>,
    /// Bytes that are on the device with any configuration.
    pub base: u64,
    /// The device's memory, bytes.
    pub capacity: u64,
    /// The host's memory, bytes; `None` means no limit.
    pub host_capacity: Option<u64>,
    /// True if collectives also use the link to the host (no NVLink). Then their times add up.
    pub shared_link: bool,
    /// True if the gradients of a chunk go to the host together, false if block by block.
    pub gradients_by_chunk: bool,
    /// Bytes that are reserved for each used byte: 1 if addresses are planned, ProTrain's 1.1 if an
    /// allocator fragments memory.
    pub alpha: f64,
}

/// The four numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Config {
    /// Chunks that stay on the device, from the model's start.
    pub n_persist: usize,
    /// Buffers for the other chunks.
    pub n_buffer: usize,
    /// Blocks whose activations are swapped.
    pub n_swap: usize,
    /// Blocks that are computed again.
    pub n_recompute: usize,
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Config {
            n_persist,
            n_buffer,
            n_swap,
            n_recompute,
        } = self;
        write!(
            f,
            "n_persist={n_persist},n_buffer={n_buffer},n_swap={n_swap},n_ckpt={n_recompute}"
        )
    }
}

/// Numbers that the user gives; the others are searched.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Fixed {
    /// Persistent chunks.
    pub n_persist: Option<usize>,
    /// Buffers.
    pub n_buffer: Option<usize>,
    /// Blocks that swap.
    pub n_swap: Option<usize>,
    /// Blocks that are computed again: the paper's `n_ckpt`.
    pub n_ckpt: Option<usize>,
}

/// Numbers that no configuration of a model has.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum ConfigError {
    /// The text is not a list of numbers.
    #[error(
        "`{0}` should be n_persist=N, n_buffer=N, n_swap=N or n_ckpt=N, each once, with commas \
         between them"
    )]
    Text(String),
    /// More than the model has.
    #[error("{knob}={number}: the model has {most} {of}")]
    TooMany {
        /// The number's name.
        knob: &'static str,
        /// The number.
        number: usize,
        /// How many there are.
        most: usize,
        /// Of what.
        of: &'static str,
    },
    /// The persistent chunks leave fewer chunks than buffers.
    #[error(
        "n_buffer={n_buffer}: with n_persist={n_persist} only {others} of {chunks} chunks need a \
         buffer"
    )]
    NoChunkForBuffer {
        /// Buffers.
        n_buffer: usize,
        /// Persistent chunks.
        n_persist: usize,
        /// The other chunks.
        others: usize,
        /// All chunks.
        chunks: usize,
    },
    /// Fetching, computing and offloading need a buffer each.
    #[error(
        "n_buffer={n_buffer}: {others} chunks are not persistent and need at least {fewest} \
         buffers: one each to fetch, compute and offload"
    )]
    FewBuffers {
        /// Buffers.
        n_buffer: usize,
        /// Chunks that are not persistent.
        others: usize,
        /// The fewest buffers for them.
        fewest: usize,
    },
    /// More blocks than the model has.
    #[error("n_swap={n_swap} and n_ckpt={n_ckpt}: the model has {blocks} blocks")]
    TooManyBlocks {
        /// Blocks that swap.
        n_swap: usize,
        /// Blocks that are computed again.
        n_ckpt: usize,
        /// Blocks of the model.
        blocks: usize,
    },
    /// Swaps would not end before the next begins.
    #[error(
        "n_swap={n_swap}: a swap takes as long as the forward of N_interval = {interval} blocks, \
         so at most {most} of {blocks} blocks swap"
    )]
    TooManySwaps {
        /// Blocks that swap.
        n_swap: usize,
        /// Blocks from one swap to the next.
        interval: usize,
        /// The most that may swap.
        most: usize,
        /// Blocks of the model.
        blocks: usize,
    },
}

impl Fixed {
    /// Numbers as text: `n_persist=2,n_buffer=3`.
    ///
    /// # Errors
    ///
    /// If a part is not a known name and a number, or if a name comes twice.
    pub fn parse(text: &str) -> Result<Fixed, ConfigError> {
        let mut fixed = Fixed::default();
        for part in text.split(',') {
            let wrong = || ConfigError::Text(part.to_string());
            let (name, number) = part.split_once('=').ok_or_else(wrong)?;
            let number = number.trim().parse().map_err(|_| wrong())?;
            let knob = match name.trim() {
                "n_persist" => &mut fixed.n_persist,
                "n_buffer" => &mut fixed.n_buffer,
                "n_swap" => &mut fixed.n_swap,
                "n_ckpt" => &mut fixed.n_ckpt,
                _ => return Err(wrong()),
            };
            if knob.replace(number).is_some() {
                return Err(wrong());
            }
        }
        Ok(fixed)
    }

    /// True if no number is given.
    pub fn is_free(&self) -> bool {
        *self == Fixed::default()
    }

    /// Checks that some configuration of the model has these numbers.
    ///
    /// # Errors
    ///
    /// The first number that none has, and why.
    pub fn check(&self, instance: &Instance) -> Result<(), ConfigError> {
        let (chunks, blocks) = (instance.chunks.len(), instance.n_repeated());
        for (knob, number, most, of) in [
            ("n_persist", self.n_persist, chunks, "chunks"),
            ("n_buffer", self.n_buffer, chunks, "chunks"),
            ("n_swap", self.n_swap, blocks, "blocks"),
            ("n_ckpt", self.n_ckpt, blocks, "blocks"),
        ] {
            if let Some(number) = number.filter(|&number| most < number) {
                return Err(ConfigError::TooMany {
                    knob,
                    number,
                    most,
                    of,
                });
            }
        }
        if let (Some(n_persist), Some(n_buffer)) = (self.n_persist, self.n_buffer) {
            let others = chunks - n_persist;
            let (fewest, most) = instance.buffers(n_persist);
            if most < n_buffer {
                return Err(ConfigError::NoChunkForBuffer {
                    n_buffer,
                    n_persist,
                    others,
                    chunks,
                });
            }
            if n_buffer < fewest {
                return Err(ConfigError::FewBuffers {
                    n_buffer,
                    others,
                    fewest,
                });
            }
        }
        if let Some(n_swap) = self.n_swap.filter(|&n| instance.most_swaps() < n) {
            return Err(ConfigError::TooManySwaps {
                n_swap,
                interval: instance.interval(),
                most: instance.most_swaps(),
                blocks,
            });
        }
        match (self.n_swap, self.n_ckpt) {
            (Some(n_swap), Some(n_ckpt)) if blocks < n_swap + n_ckpt => {
                Err(ConfigError::TooManyBlocks {
                    n_swap,
                    n_ckpt,
                    blocks,
                })
            }
            _ => Ok(()),
        }
    }
}

/// True if a number is not given, or is this one.
fn allows(fixed: Option<usize>, number: usize) -> bool {
    fixed.is_none_or(|fixed| fixed == number)
}

/// How a block's activations are handled.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Activation {
    /// They stay.
    Keep,
    /// They wait on the host.
    Swap,
    /// They are computed again from the block's input.
    Recompute,
}

/// The decisions of a configuration, for each block and each chunk.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Layout {
    /// For each block; `None` for blocks that are not repeated.
    pub activation: Vec<Option<Activation>>,
    /// For each chunk: whether it stays on the device, and is updated there.
    pub persistent: Vec<bool>,
    /// For each chunk: whether it is still in its buffer when the backward begins, and is not
    /// fetched again.
    pub cached: Vec<bool>,
}

/// Predicted times of a step's parts, µs.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Times {
    /// The forward (Eqs 3 and 4).
    pub forward: f64,
    /// The backward (Eqs 5 to 7).
    pub backward: f64,
    /// Updates of persistent chunks, after the backward.
    pub update_device: f64,
    /// Updates of the other chunks, on the host during the backward.
    pub update_host: f64,
    /// The wait for the first chunks that are not persistent, in addition: their gradients come
    /// last, and the next forward needs their new parameters first. Eq 2 does not have this term.
    pub tail: f64,
}

impl Times {
    /// The step (Eq 2, and the tail).
    pub fn step(&self) -> f64 {
        self.forward + (self.backward + self.update_device).max(self.update_host) + self.tail
    }
}

/// The predicted time and memory of a configuration.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Predicted {
    /// Times.
    pub times: Times,
    /// Peak of the device's memory, bytes.
    pub memory: u64,
    /// Configurations that were evaluated to find it.
    pub evaluated: usize,
}

/// The number of buffers with which fetching, computing and offloading can overlap (section 5.4).
pub const FEWEST_BUFFERS: usize = 3;
/// If two kinds of traffic share one link, each gets half.
const CONTENTION: f64 = 2.0;
/// Times that differ by less than this share are equal, because sums in another order differ
/// slightly.
const EQUAL: f64 = 1e-9;

impl Instance {
    /// The blocks that may be swapped or recomputed.
    pub fn n_repeated(&self) -> usize {
        self.blocks.iter().filter(|block| block.repeated).count()
    }
    /// `N_interval`: the number of blocks whose forwards take as long as swapping one block out; at
    /// least 1.
    pub fn interval(&self) -> usize {
        let of = |f: fn(&BlockCost) -> f64| {
            self.blocks
                .iter()
                .filter(|b| b.repeated)
                .map(f)
                .sum::<f64>()
        };
        let (swap, forward) = (of(|b| b.swap_out), of(|b| b.forward));
        let blocks = (swap * (1.0 - EQUAL) / forward).ceil();
        // Without any compute, no number of blocks can hide a swap.
        if blocks.is_finite() {
            (blocks as usize).max(1)
        } else {
            usize::MAX
        }
    }
    /// The most blocks that may swap. The last block does not: its backward comes first.
    pub fn most_swaps(&self) -> usize {
        let blocks = self.n_repeated();
        (blocks / self.interval()).min(blocks.saturating_sub(1))
    }
    /// The fewest and the most buffers for a number of persistent chunks.
    pub fn buffers(&self, n_persist: usize) -> (usize, usize) {
        let others = self.chunks.len() - n_persist;
        (others.min(FEWEST_BUFFERS), others)
    }
}

impl Config {
    /// The decisions of the configuration.
    pub fn layout(&self, instance: &Instance) -> Layout {
        let n_chunks = instance.chunks.len();
        let mut repeated = interleaved(
            instance.n_repeated(),
            self.n_swap,
            self.n_recompute,
            instance.interval(),
        )
        .into_iter();
        Layout {
            activation: instance
                .blocks
                .iter()
                .map(|b| if b.repeated { repeated.next() } else { None })
                .collect(),
            persistent: (0..n_chunks).map(|c| c < self.n_persist).collect(),
            cached: (0..n_chunks)
                .map(|c| self.n_persist <= c && n_chunks - self.n_buffer <= c)
                .collect(),
        }
    }
}

/// The layout of the repeated blocks: swapped blocks from the start, one in `interval`; recomputed
/// blocks in the places between and after; kept blocks last, because the backward uses their
/// activations first (section 3.1.2, figure 2).
pub fn interleaved(
    n_blocks: usize,
    n_swap: usize,
    n_recompute: usize,
    interval: usize,
) -> Vec<Activation> {
    let mut layout = vec![Activation::Keep; n_blocks];
    for block in (0..n_blocks).step_by(interval.max(1)).take(n_swap) {
        layout[block] = Activation::Swap;
    }
    for block in layout
        .iter_mut()
        .filter(|block| **block == Activation::Keep)
        .take(n_recompute)
    {
        *block = Activation::Recompute;
    }
    layout
}

/// The compute of each chunk, and whether a swap runs at the same time.
pub(super) struct Stages {
    pub(super) forward: Vec<f64>,
    pub(super) backward: Vec<f64>,
    contended: Vec<bool>,
    n_blocks: Vec<u32>,
}

pub(super) fn stages(instance: &Instance, activation: &[Option<Activation>]) -> Stages {
    let n = instance.chunks.len();
    let mut stages = Stages {
        forward: vec![0.0; n],
        backward: vec![0.0; n],
        contended: vec![false; n],
        n_blocks: vec![0; n],
    };
    let interval = instance.interval();
    // The number of following blocks during which the last swap is still running.
    let mut swapping = 0;
    for (block, activation) in instance.blocks.iter().zip(activation) {
        stages.forward[block.chunk] += block.forward;
        stages.n_blocks[block.chunk] += 1;
        stages.backward[block.chunk] += block.backward;
        match activation {
            Some(Activation::Swap) => swapping = interval,
            Some(Activation::Recompute) => stages.backward[block.chunk] += block.recompute,
            _ => {}
        }
        if activation.is_some() {
            stages.contended[block.chunk] |= 0 < swapping;
            swapping = swapping.saturating_sub(1);
        }
    }
    stages
}

/// The time of the transfers during a chunk's compute, µs: in the forward and in the backward.
pub(super) fn moved(instance: &Instance, stages: &Stages, config: &Config, c: usize) -> (f64, f64) {
    let n = instance.chunks.len();
    let stays = |chunk: usize| chunk < config.n_persist;
    let slow = if stages.contended[c] { CONTENTION } else { 1.0 };
    let slow_collective = if instance.shared_link { slow } else { 1.0 };
    let fetch = |other: usize| match &instance.chunks[other] {
        _ if stays(other) => 0.0,
        other => slow_collective * other.gather + slow * other.upload,
    };
    let next = if c + 1 < n { fetch(c + 1) } else { 0.0 };
    let previous = match c.checked_sub(1) {
        Some(previous) if previous < n - config.n_buffer => fetch(previous),
        _ => 0.0,
    };
    let chunk = &instance.chunks[c];
    let away = slow_collective * chunk.reduce + if stays(c) { 0.0 } else { slow * chunk.offload };
    (
        next,
        if instance.shared_link {
            previous + away
        } else {
            previous.max(away)
        },
    )
}

/// Times of everything except the backward, for a number of persistent chunks and of buffers.
pub(super) fn around(instance: &Instance, stages: &Stages, config: &Config) -> Times {
    let mut times = Times::default();
    // Nothing computes while the first chunk is fetched.
    if config.n_persist == 0 {
        times.forward += instance.chunks[0].gather + instance.chunks[0].upload;
    }
    for (c, chunk) in instance.chunks.iter().enumerate() {
        times.forward += stages.forward[c].max(moved(instance, stages, config, c).0);
        match c < config.n_persist {
            true => times.update_device += chunk.update_device,
            false => times.update_host += chunk.update_host,
        }
    }
    times
}

fn chunk_times(instance: &Instance, stages: &Stages, config: &Config) -> Times {
    let stage = |c: usize| stages.backward[c].max(moved(instance, stages, config, c).1);
    let backward = (0..instance.chunks.len()).map(stage).sum();
    with_tail(
        instance,
        stages,
        config,
        Times {
            backward,
            ..around(instance, stages, config)
        },
    )
}

/// The times with the wait for chunks whose new parameters the next forward needs early. The host
/// updates one chunk after the other, the last chunk first, each when its gradients have arrived.
/// From a chunk's use in one forward to its use in the next, no step is shorter than its own
/// backward, offload, update and fetch.
fn with_tail(instance: &Instance, stages: &Stages, config: &Config, times: Times) -> Times {
    let n = instance.chunks.len();
    // Ends of the stages before each chunk's forward.
    let first = &instance.chunks[0];
    let mut start = match config.n_persist {
        0 => first.gather + first.upload,
        _ => 0.0,
    };
    let mut starts = vec![0.0; n];
    for (c, at) in starts.iter_mut().enumerate() {
        *at = start;
        start += stages.forward[c].max(moved(instance, stages, config, c).0);
    }
    let (mut clock, mut updated, mut longest) = (times.forward, 0.0f64, 0.0f64);
    for c in (config.n_persist..n).rev() {
        let chunk = &instance.chunks[c];
        // Those of the last block, or of all blocks, end the chunk's update.
        let part = match instance.gradients_by_chunk {
            true => 1.0,
            false => 1.0 / stages.n_blocks[c].max(1) as f64,
        };
        let leaves = part * (chunk.reduce + chunk.offload);
        let first = clock + part * stages.backward[c] + leaves;
        updated = updated.max(first) + (1.0 - part) * chunk.update_host;
        let last = clock + stages.backward[c] + leaves;
        updated = updated.max(last) + part * chunk.update_host;
        clock += stages.backward[c].max(moved(instance, stages, config, c).1);
        longest = longest.max(updated + chunk.gather + chunk.upload - starts[c]);
    }
    let step = Times { tail: 0.0, ..times }.step();
    Times {
        tail: (longest - step).max(0.0),
        ..times
    }
}

/// Times of a configuration's parts (Eqs 2 to 7).
pub fn times(instance: &Instance, config: &Config) -> Times {
    let layout = config.layout(instance);
    chunk_times(instance, &stages(instance, &layout.activation), config)
}

/// Bytes of swapped blocks that are still on the device while each later block's forward runs. The
/// link transfers one block after the other, each tensor as soon as it is computed. So a block's
/// bytes become free evenly, from the start of its forward. While a later block runs, its own bytes
/// grow as evenly, so the mean of what is left at its start and at its end counts.
pub(super) fn leaving(instance: &Instance, swapped: impl Fn(usize) -> bool) -> Vec<u64> {
    let (mut clock, mut link) = (0.0, 0.0f64);
    // Start, end and bytes of each swap.
    let mut swaps: VecDeque<(f64, f64, u64)> = VecDeque::new();
    let left = |swaps: &VecDeque<(f64, f64, u64)>, at: f64| -> f64 {
        let of = |&(start, end, bytes): &(f64, f64, u64)| {
            bytes as f64 * ((end - at) / (end - start)).clamp(0.0, 1.0)
        };
        swaps.iter().map(of).sum()
    };
    let blocks = instance.blocks.iter().enumerate();
    blocks
        .map(|(i, block)| {
            while swaps.front().is_some_and(|swap| swap.1 <= clock) {
                swaps.pop_front();
            }
            let end = clock + block.forward;
            let here = 0.5 * (left(&swaps, clock) + left(&swaps, end));
            if swapped(i) {
                let start = link.max(clock);
                // The last tensor leaves after the forward.
                link = (start + block.swap_out).max(end);
                if start < link {
                    swaps.push_back((start, link, block.activation));
                }
            }
            clock = end;
            here.ceil() as u64
        })
        .collect()
}

/// The most bytes of activations: of all blocks before, of blocks that are leaving, and of the
/// block that runs (Eqs 8 to 10). The backward needs the same bytes in the reverse order. A swapped
/// block comes back for its own backward, and earlier only if there is room (appendix A.2).
fn activation_peak(instance: &Instance, activation: &[Option<Activation>]) -> u64 {
    held_peak(
        instance,
        activation,
        &leaving(instance, |i| activation[i] == Some(Activation::Swap)),
    )
}

/// The same, with given bytes that are leaving while each block runs.
fn held_peak(instance: &Instance, activation: &[Option<Activation>], leaving: &[u64]) -> u64 {
    let (mut held, mut peak) = (0u64, 0u64);
    for ((block, activation), leaving) in instance.blocks.iter().zip(activation).zip(leaving) {
        peak = peak.max(held + leaving + block.activation + block.transient);
        held += match activation {
            Some(Activation::Swap) => 0,
            Some(Activation::Recompute) => block.input,
            _ => block.activation,
        };
    }
    peak
}

/// The total, including fragmentation (Eq 11). `states`: bytes of [`states`].
pub fn total(instance: &Instance, activations: u64, states: u64) -> u64 {
    let used = instance.base + activations + states;
    (instance.alpha * used as f64).ceil() as u64
}

/// Bytes of states on the device, for each number of persistent chunks and of buffers
/// (`[n_persist][n_buffer]`): persistent chunks, successive chunks in the buffers, what other
/// chunks share, and gradients that wait.
pub fn states(instance: &Instance) -> Vec<Vec<u64>> {
    let n = instance.chunks.len();
    let sums_of = |bytes: fn(&ChunkCost) -> u64| sums(instance.chunks.iter().map(bytes));
    let persistent = sums_of(|chunk| chunk.persistent_bytes);
    let tied = sums_of(|chunk| chunk.tied_bytes);
    let buffers = sums_of(|chunk| chunk.buffer_bytes);
    // The gradients of one chunk wait at a time.
    let mut waiting = vec![0; n + 1];
    for (c, chunk) in instance.chunks.iter().enumerate().rev() {
        if instance.gradients_by_chunk {
            waiting[c] = chunk.waiting_bytes.max(waiting[c + 1]);
        }
    }
    let mut states = vec![vec![]; n + 1];
    for n_buffer in 0..=n {
        let mut most = 0;
        for n_persist in (0..=n - n_buffer).rev() {
            most = (buffers[n_persist + n_buffer] - buffers[n_persist]).max(most);
            let fetched_again = tied[n - n_buffer] - tied[n_persist];
            let bytes = persistent[n_persist] + most + fetched_again + waiting[n_persist];
            states[n_persist].push(bytes);
        }
    }
    states
}

/// Peak of the device's memory, bytes (Eqs 8 to 11).
pub fn memory(instance: &Instance, config: &Config) -> u64 {
    total(
        instance,
        activation_peak(instance, &config.layout(instance).activation),
        states(instance)[config.n_persist][config.n_buffer],
    )
}

/// Bytes on the host: states of chunks that are not persistent, and swapped activations.
pub fn host_memory(instance: &Instance, config: &Config) -> u64 {
    let layout = config.layout(instance);
    let swapped = instance
        .blocks
        .iter()
        .zip(&layout.activation)
        .filter(|(_, a)| **a == Some(Activation::Swap));
    instance.chunks[config.n_persist..]
        .iter()
        .map(|chunk| chunk.host_bytes)
        .sum::<u64>()
        + swapped.map(|(block, _)| block.activation).sum::<u64>()
}

/// The fastest configuration that fits. Of equally fast ones, the one with the fewest swapped and
/// recomputed blocks, then the one with the least memory. `None` if nothing fits.
pub fn search(instance: &Instance) -> Option<(Config, Predicted)> {
    search_among(instance, &outlines(instance))
}

/// The same, except that everything stays on the device if this fits and is at most the share
/// `near` slower: a gain below the error of the predictions is none ("offloading only when it
/// improves performance", section 6).
pub fn choose(instance: &Instance, near: f64) -> Option<(Config, Predicted)> {
    let (config, best) = search(instance)?;
    let all = Config {
        n_persist: instance.chunks.len(),
        ..Config::default()
    };
    let (times, memory) = (times(instance, &all), memory(instance, &all));
    if memory <= instance.capacity && times.step() <= best.times.step() * (1.0 + near) {
        let predicted = Predicted {
            times,
            memory,
            ..best
        };
        return Some((all, predicted));
    }
    Some((config, best))
}

/// Time and memory of the blocks' activations, which do not depend on the chunks.
#[derive(Clone, Copy, Debug)]
pub struct Outline {
    /// Blocks that swap.
    pub n_swap: usize,
    /// Blocks that are computed again.
    pub n_recompute: usize,
    /// The most bytes of activations on the device.
    pub activations: u64,
    /// Arithmetic of the forward and of the backward, µs.
    forward: f64,
    backward: f64,
}

/// With more blocks than this, not every number is tried: one block in a hundred makes hardly a
/// difference.
const FINE: usize = 128;

/// For each number of swapped blocks, the outlines of each number of recomputed blocks. They do not
/// depend on the capacity.
pub fn outlines(instance: &Instance) -> Vec<Vec<Outline>> {
    outlines_with(instance, &Fixed::default())
}

/// The same; given numbers are among them.
fn outlines_with(instance: &Instance, fixed: &Fixed) -> Vec<Vec<Outline>> {
    let n = instance.n_repeated();
    let stride = n.div_ceil(FINE).max(1);
    let tried = |number: usize, most: usize| {
        number.is_multiple_of(stride)
            || number == most
            || [fixed.n_swap, fixed.n_ckpt].contains(&Some(number))
    };
    let of_swaps = |n_swap: usize| {
        let mut activation = Config {
            n_swap,
            ..Config::default()
        }
        .layout(instance)
        .activation;
        let leaving = leaving(instance, |i| activation[i] == Some(Activation::Swap));
        let forward = instance.blocks.iter().map(|block| block.forward).sum();
        let mut backward = instance.blocks.iter().map(|block| block.backward).sum();
        let kept = activation
            .iter()
            .enumerate()
            .filter(|(_, a)| **a == Some(Activation::Keep))
            .map(|(i, _)| i);
        let kept: Vec<usize> = kept.collect();
        // Each outline recomputes one more block: see `interleaved`.
        let outline = |n_recompute: usize| {
            if let Some(&block) = n_recompute.checked_sub(1).and_then(|last| kept.get(last)) {
                activation[block] = Some(Activation::Recompute);
                backward += instance.blocks[block].recompute;
            }
            tried(n_recompute, n - n_swap).then(|| {
                let activations = held_peak(instance, &activation, &leaving);
                Outline {
                    n_swap,
                    n_recompute,
                    activations,
                    forward,
                    backward,
                }
            })
        };
        (0..=n - n_swap).filter_map(outline).collect()
    };
    let most = instance.most_swaps().min(n);
    (0..=most)
        .filter(|&n_swap| tried(n_swap, most))
        .map(of_swaps)
        .collect()
}

/// [`search`] with the instance's outlines.
pub fn search_among(instance: &Instance, outlines: &[Vec<Outline>]) -> Option<(Config, Predicted)> {
    let mut search = Search::new(instance);
    for outlines in outlines {
        for outline in outlines {
            // Each outline has more arithmetic than the one before.
            let arithmetic = outline.forward + outline.backward;
            if search.best_step() * (1.0 + EQUAL) < arithmetic {
                break;
            }
            search.try_outline(outline);
        }
    }
    let (config, predicted) = give_back(instance, search.best?);
    let evaluated = search.evaluated;
    Some((
        config,
        Predicted {
            evaluated,
            ..predicted
        },
    ))
}

/// The best configuration so far, and prefix sums over the chunks.
struct Search<'a> {
    instance: &'a Instance,
    /// Bytes of states on the device: see [`states`].
    states: Vec<Vec<u64>>,
    /// By the number of first chunks: bytes on the device if they stay.
    persistent: Vec<u64>,
    /// Bytes on the host if they do not.
    hosted: Vec<u64>,
    /// The device's updates if they stay, µs.
    update_device: Vec<f64>,
    /// The host's updates if they do not, µs.
    update_host: Vec<f64>,
    best: Option<(Config, Predicted)>,
    /// Configurations that were evaluated.
    evaluated: usize,
}

impl<'a> Search<'a> {
    fn new(instance: &'a Instance) -> Search<'a> {
        let chunks = || instance.chunks.iter();
        Search {
            instance,
            states: states(instance),
            persistent: sums(chunks().map(|chunk| chunk.persistent_bytes)),
            hosted: sums(chunks().map(|chunk| chunk.host_bytes)),
            update_device: sums(chunks().map(|chunk| chunk.update_device)),
            update_host: sums(chunks().map(|chunk| chunk.update_host)),
            best: None,
            evaluated: 0,
        }
    }

    fn n_chunks(&self) -> usize {
        self.instance.chunks.len()
    }

    /// The step of the best configuration, µs; infinite if there is none.
    fn best_step(&self) -> f64 {
        self.best
            .map_or(f64::INFINITY, |(_, best)| best.times.step())
    }

    /// Tries the configurations of an outline that may be the best.
    fn try_outline(&mut self, outline: &Outline) {
        let instance = self.instance;
        if instance.capacity < total(instance, outline.activations, 0) {
            return;
        }
        let n_persists = self.n_persists(outline);
        if n_persists.is_empty() {
            return;
        }
        let config = Config {
            n_persist: 0,
            n_buffer: 0,
            n_swap: outline.n_swap,
            n_recompute: outline.n_recompute,
        };
        let layout = config.layout(instance);
        let stages = stages(instance, &layout.activation);
        let swapped = host_memory(
            instance,
            &Config {
                n_persist: self.n_chunks(),
                ..config
            },
        );
        for n_persist in n_persists {
            let on_host = swapped + self.hosted[self.n_chunks()] - self.hosted[n_persist];
            let is_host_full = instance
                .host_capacity
                .is_some_and(|capacity| capacity < on_host);
            if is_host_full || self.is_too_slow(outline, n_persist) {
                continue;
            }
            for n_buffer in self.n_buffers(outline, n_persist) {
                let config = Config {
                    n_persist,
                    n_buffer,
                    ..config
                };
                self.evaluate(config, &stages, outline.activations);
            }
        }
    }

    /// The numbers of persistent chunks that may be the best. A step takes at least its arithmetic
    /// plus the updates after it. With more persistent chunks, the device updates more after the
    /// backward, and the host updates less during it. Numbers for which either alone takes too long
    /// are skipped.
    fn n_persists(&self, outline: &Outline) -> RangeInclusive<usize> {
        let instance = self.instance;
        let longest = self.best_step() * (1.0 + 3.0 * EQUAL) - outline.forward;
        let all = self.update_host[self.n_chunks()];
        let first = self
            .update_host
            .partition_point(|update| longest < all - update);
        let may_stay = |n: usize| {
            total(instance, outline.activations, self.persistent[n]) <= instance.capacity
                && outline.backward + self.update_device[n] <= longest
        };
        first..=last_of(0..self.n_chunks() + 1, may_stay)
    }

    /// True if the arithmetic and the updates alone make a longer step than the best one.
    fn is_too_slow(&self, outline: &Outline, n_persist: usize) -> bool {
        let on_device = outline.backward + self.update_device[n_persist];
        let on_host = self.update_host[self.n_chunks()] - self.update_host[n_persist];
        let step = outline.forward + on_device.max(on_host);
        self.best_step() * (1.0 + EQUAL) < step * (1.0 - EQUAL)
    }

    /// The numbers of buffers that are tried: the fewest and the most that fit. A chunk that is
    /// tied may need fewer bytes with one buffer more, in which it stays.
    fn n_buffers(&self, outline: &Outline, n_persist: usize) -> BTreeSet<usize> {
        let instance = self.instance;
        let states = &self.states[n_persist];
        let fits =
            |&n: &usize| total(instance, outline.activations, states[n]) <= instance.capacity;
        let (fewest, most) = instance.buffers(n_persist);
        let (first, last) = ((fewest..=most).find(fits), (fewest..=most).rfind(fits));
        first.into_iter().chain(last).collect()
    }

    /// Compares a configuration with the best.
    fn evaluate(&mut self, config: Config, stages: &Stages, activations: u64) {
        self.evaluated += 1;
        let states = self.states[config.n_persist][config.n_buffer];
        let predicted = Predicted {
            times: chunk_times(self.instance, stages, &config),
            memory: total(self.instance, activations, states),
            evaluated: 0,
        };
        let found = (config, predicted);
        if self.best.is_none_or(|best| better(&found, &best)) {
            self.best = Some(found);
        }
    }
}

/// The most numbers of swapped blocks, of persistent chunks and of buffers that [`front`] tries.
/// With more, it tries evenly spaced ones.
const TRIED: [usize; 3] = [64, 64, 32];

/// The configurations with these numbers that no other one beats in both memory and time, for any
/// capacity, the one with the most memory first. The one that [`search`] finds for a capacity is
/// the first that fits, if every number is tried.
pub fn front(instance: &Instance, fixed: &Fixed) -> Vec<(Config, Predicted)> {
    let n_chunks = instance.chunks.len();
    let states = states(instance);
    let mut front = Front::default();
    let outlines = outlines_with(instance, fixed);
    let swaps: BTreeSet<usize> = spaced(0..=instance.most_swaps(), TRIED[0]).collect();
    for outline in outlines.iter().flatten() {
        let is_given = fixed.n_swap == Some(outline.n_swap);
        if !(allows(fixed.n_swap, outline.n_swap) && (is_given || swaps.contains(&outline.n_swap)))
            || !allows(fixed.n_ckpt, outline.n_recompute)
        {
            continue;
        }
        let mut config = Config {
            n_swap: outline.n_swap,
            n_recompute: outline.n_recompute,
            ..Config::default()
        };
        let stages = stages(instance, &config.layout(instance).activation);
        let persists = given_or(fixed.n_persist, spaced(0..=n_chunks, TRIED[1]));
        for n_persist in persists.filter(|&n| n <= n_chunks) {
            config.n_persist = n_persist;
            let is_host_full = instance
                .host_capacity
                .is_some_and(|capacity| capacity < host_memory(instance, &config));
            if !is_host_full {
                let (states, activations) = (&states[n_persist], outline.activations);
                front.try_buffers(instance, &stages, config, fixed, activations, states);
            }
        }
    }
    front.steps.into_values().rev().collect()
}

/// Configurations by memory: with more memory, each is faster.
#[derive(Default)]
struct Front {
    steps: BTreeMap<u64, (Config, Predicted)>,
}

impl Front {
    /// Tries all numbers of buffers. `states`: the bytes of states for each.
    fn try_buffers(
        &mut self,
        instance: &Instance,
        stages: &Stages,
        config: Config,
        fixed: &Fixed,
        activations: u64,
        states: &[u64],
    ) {
        let n = instance.chunks.len();
        let (fewest, most) = instance.buffers(config.n_persist);
        let around = around(instance, stages, &config);
        // A chunk's backward with its predecessor in a buffer, and without.
        let stage = |n_buffer: usize, c: usize| {
            let config = Config { n_buffer, ..config };
            stages.backward[c].max(moved(instance, stages, &config, c).1)
        };
        let cached = sums((0..n).map(|c| stage(n, c)));
        let fetched = sums((0..n).map(|c| stage(0, c)));
        let buffers = given_or(fixed.n_buffer, spaced(fewest..=most, TRIED[2]));
        for n_buffer in buffers.filter(|n| (fewest..=most).contains(n)) {
            // Chunk c - 1 is in a buffer if c is above n - n_buffer.
            let first = (n - n_buffer + 1).min(n);
            let backward = fetched[first] + cached[n] - cached[first];
            let mut predicted = Predicted {
                times: Times { backward, ..around },
                memory: total(instance, activations, states[n_buffer]),
                evaluated: 0,
            };
            let config = Config { n_buffer, ..config };
            // The tail takes a pass over all chunks. Without it the time is a lower bound.
            if self.is_wanted(&(config, predicted)) {
                predicted.times = with_tail(instance, stages, &config, predicted.times);
                self.push((config, predicted));
            }
        }
    }

    /// False if one with no more memory is at least as good.
    fn is_wanted(&self, new: &(Config, Predicted)) -> bool {
        let below = self.steps.range(..=new.1.memory).next_back();
        below.is_none_or(|(_, below)| better(new, below))
    }

    /// Adds a configuration, and drops those that it beats; nothing if one beats it.
    fn push(&mut self, new: (Config, Predicted)) {
        let memory = new.1.memory;
        if !self.is_wanted(&new) {
            return;
        }
        let beaten = self.steps.range(memory..);
        let beaten: Vec<u64> = beaten
            .take_while(|(_, above)| !better(above, &new))
            .map(|(&memory, _)| memory)
            .collect();
        for memory in beaten {
            self.steps.remove(&memory);
        }
        self.steps.insert(memory, new);
    }
}

/// Numbers of a range: all of them, or `most` evenly spaced ones with both ends.
fn spaced(range: RangeInclusive<usize>, most: usize) -> impl Iterator<Item = usize> {
    let (first, last) = (*range.start(), *range.end());
    let steps = (last - first).min(most.max(2) - 1);
    (0..=steps).map(move |k| first + (last - first) * k / steps.max(1))
}

/// The given number, or these.
fn given_or(
    given: Option<usize>,
    numbers: impl Iterator<Item = usize>,
) -> impl Iterator<Item = usize> {
    let free = given.is_none();
    given.into_iter().chain(numbers.filter(move |_| free))
}

/// Prefix sums: of no number, of one, of two, ….
fn sums<T: Copy + Default + Add<Output = T>>(numbers: impl Iterator<Item = T>) -> Vec<T> {
    let mut sums = vec![T::default()];
    for number in numbers {
        sums.push(sums[sums.len() - 1] + number);
    }
    sums
}

/// The last number of a range for which `holds` is true, if it is true up to some number; the start
/// of the range if it is true for none.
fn last_of(range: Range<usize>, holds: impl Fn(usize) -> bool) -> usize {
    let (mut last, mut above) = (range.start, range.end);
    while above - last > 1 {
        let middle = last.midpoint(above);
        if holds(middle) {
            last = middle
        } else {
            above = middle
        }
    }
    last
}

/// Removes buffers that save no time.
fn give_back(instance: &Instance, found: (Config, Predicted)) -> (Config, Predicted) {
    let (mut config, mut predicted) = found;
    while instance.buffers(config.n_persist).0 < config.n_buffer {
        let fewer = Config {
            n_buffer: config.n_buffer - 1,
            ..config
        };
        let (times, memory) = (times(instance, &fewer), memory(instance, &fewer));
        let is_slower = predicted.times.step() * (1.0 + EQUAL) < times.step();
        if is_slower || instance.capacity < memory {
            break;
        }
        config = fewer;
        predicted = Predicted {
            times,
            memory,
            ..predicted
        };
    }
    (config, predicted)
}

fn better((config, new): &(Config, Predicted), (of_best, best): &(Config, Predicted)) -> bool {
    let (new_step, best_step) = (new.times.step(), best.times.step());
    if (new_step - best_step).abs() <= EQUAL * best_step {
        let decisions = |config: &Config| config.n_swap + config.n_recompute;
        return (decisions(config), new.memory, *config)
            < (decisions(of_best), best.memory, *of_best);
    }
    new_step < best_step
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn figure_2_is_laid_out() {
        use Activation::{Keep as K, Recompute as R, Swap as S};
        assert_eq!(interleaved(8, 2, 4, 3), [S, R, R, S, R, R, K, K]);
        assert_eq!(interleaved(4, 0, 2, 1), [R, R, K, K]);
        assert_eq!(interleaved(3, 3, 0, 1), [S, S, S]);
        assert_eq!(interleaved(0, 0, 0, 1), []);
    }

    /// Figure 2: interleaving needs less memory than swapping the first blocks, because swaps that
    /// wait for the link accumulate.
    #[test]
    fn interleaving_keeps_the_peak_low() {
        let block = BlockCost {
            repeated: true,
            forward: 1.0,
            activation: 100,
            input: 1,
            swap_out: 3.0,
            ..Default::default()
        };
        let instance = Instance {
            blocks: vec![block; 8],
            chunks: vec![ChunkCost::default()],
            alpha: 1.0,
            ..Default::default()
        };
        assert_eq!(instance.interval(), 3);
        let config = Config {
            n_persist: 1,
            n_buffer: 0,
            n_swap: 2,
            n_recompute: 4,
        };
        // Two kept, four inputs.
        assert_eq!(memory(&instance, &config), 204);
        // With both swaps at the start, the first two blocks still wait for the link while the
        // fourth block runs; the first one leaves meanwhile.
        let mut piled = config.layout(&instance).activation;
        piled.swap(1, 3);
        assert!(memory(&instance, &config) < activation_peak(&instance, &piled));
    }

    /// Small instances of all kinds.
    pub(crate) fn instances() -> impl Strategy<Value = Instance> {
        let block = (1u32..20, 1u32..40, 10u64..60, 0u64..10, 0u64..20, 0u32..60).prop_map(
            |(forward, backward, activation, input, transient, swap)| BlockCost {
                repeated: true,
                chunk: 0,
                forward: f64::from(forward),
                backward: f64::from(backward),
                recompute: 0.75 * f64::from(forward),
                activation,
                input: input.min(activation),
                transient,
                swap_out: f64::from(swap),
                swap_in: f64::from(swap),
            },
        );
        let chunk = (
            0u32..30,
            0u32..30,
            0u32..20,
            0u32..20,
            0u32..10,
            0u32..60,
            10u64..80,
            1u64..30,
        )
            .prop_map(
                |(upload, offload, gather, reduce, device, host, bytes, buffer)| ChunkCost {
                    upload: f64::from(upload),
                    offload: f64::from(offload),
                    gather: f64::from(gather),
                    reduce: f64::from(reduce),
                    update_device: f64::from(device),
                    update_host: f64::from(host),
                    persistent_bytes: bytes,
                    host_bytes: bytes,
                    buffer_bytes: buffer,
                    tied_bytes: if buffer.is_multiple_of(3) { buffer } else { 0 },
                    waiting_bytes: bytes / 8,
                },
            );
        let parts = (
            prop::collection::vec(block, 2..7),
            prop::collection::vec(chunk, 1..7),
        );
        (
            parts,
            50u64..600,
            prop::option::of(20u64..400),
            any::<bool>(),
            any::<bool>(),
        )
            .prop_map(
                |((mut blocks, chunks), capacity, host_capacity, shared_link, ends)| {
                    let n = blocks.len();
                    for (i, block) in blocks.iter_mut().enumerate() {
                        block.chunk = i * chunks.len() / n;
                        block.repeated = !ends || (0 < i && i + 1 < n);
                    }
                    Instance {
                        blocks,
                        chunks,
                        base: 3,
                        capacity,
                        host_capacity,
                        shared_link,
                        gradients_by_chunk: shared_link,
                        alpha: 1.1,
                    }
                },
            )
    }

    /// Every configuration, without any pruning.
    fn brute(instance: &Instance) -> Option<f64> {
        let mut best: Option<f64> = None;
        for n_swap in 0..=instance.most_swaps() {
            for n_recompute in 0..=instance.n_repeated() - n_swap {
                for n_persist in 0..=instance.chunks.len() {
                    let (fewest, most) = instance.buffers(n_persist);
                    for n_buffer in fewest..=most {
                        let config = Config {
                            n_persist,
                            n_buffer,
                            n_swap,
                            n_recompute,
                        };
                        let fits = memory(instance, &config) <= instance.capacity
                            && instance
                                .host_capacity
                                .is_none_or(|host| host_memory(instance, &config) <= host);
                        if fits {
                            let step = times(instance, &config).step();
                            best = Some(best.map_or(step, |best| best.min(step)));
                        }
                    }
                }
            }
        }
        best
    }

    proptest! {
        #[test]
        fn pruning_loses_nothing(instance in instances()) {
            let found = search(&instance);
            let best = brute(&instance);
            prop_assert_eq!(found.is_some(), best.is_some());
            if let (Some((config, predicted)), Some(best)) = (found, best) {
                prop_assert!((predicted.times.step() - best).abs() <= 1e-6 * best, "{config:?} \
                    {predicted:?} {best}");
                prop_assert_eq!(predicted.times, times(&instance, &config));
                prop_assert_eq!(predicted.memory, memory(&instance, &config));
                prop_assert!(predicted.memory <= instance.capacity);
                prop_assert!(instance.host_capacity
                    .is_none_or(|host| host_memory(&instance, &config) <= host));
            }
        }

        #[test]
        fn more_buffers_never_cost_time(instance in instances(), n_persist in 0usize..7) {
            let n_persist = n_persist.min(instance.chunks.len());
            let (fewest, most) = instance.buffers(n_persist);
            let step = |n_buffer| times(&instance,
                &Config { n_persist, n_buffer, ..Config::default() }).step();
            for n_buffer in fewest..most {
                prop_assert!(step(n_buffer + 1) <= step(n_buffer) * (1.0 + EQUAL));
            }
        }
    }

    proptest! {
        /// For any capacity, the first of the front that fits is as fast as brute force.
        #[test]
        fn the_front_has_the_fastest_for_each_capacity(instance in instances()) {
            let front = front(&instance, &Fixed::default());
            for pair in front.windows(2) {
                prop_assert!(pair[1].1.memory < pair[0].1.memory);
            }
            for (config, predicted) in &front {
                prop_assert_eq!(predicted.memory, memory(&instance, config));
                let (told, exact) = (predicted.times.step(), times(&instance, config).step());
                prop_assert!((told - exact).abs() <= 1e-9 * exact, "{config:?}: {told}, {exact}");
            }
            for capacity in (50..900).step_by(50) {
                let instance = Instance { capacity, ..instance.clone() };
                let fits = front.iter().find(|(_, predicted)| predicted.memory <= capacity);
                let (found, best) = (fits.map(|(_, p)| p.times.step()), brute(&instance));
                prop_assert_eq!(found.is_some(), best.is_some());
                if let (Some(found), Some(best)) = (found, best) {
                    prop_assert!((found - best).abs() <= 1e-6 * best, "{found} {best}");
                }
            }
        }

        #[test]
        fn given_numbers_are_kept(instance in instances(), knob in 0usize..4, number in 0usize..8) {
            let mut fixed = Fixed::default();
            [&mut fixed.n_persist, &mut fixed.n_buffer, &mut fixed.n_swap, &mut fixed.n_ckpt]
                [knob].replace(number);
            let found = front(&Instance { host_capacity: None, ..instance.clone() }, &fixed);
            for (config, _) in &found {
                let numbers = [config.n_persist, config.n_buffer, config.n_swap,
                    config.n_recompute];
                prop_assert_eq!(numbers[knob], number);
            }
            if fixed.check(&instance).is_err() {
                prop_assert!(found.is_empty());
            }
        }
    }

    #[test]
    fn numbers_are_read_and_refused() {
        let fixed = Fixed::parse("n_ckpt=4,n_persist=1").unwrap();
        assert_eq!((fixed.n_ckpt, fixed.n_persist), (Some(4), Some(1)));
        assert!(!fixed.is_free() && Fixed::default().is_free());
        for text in [
            "",
            "n_persist",
            "n_persist=-1",
            "n_persist=1,n_persist=2",
            "blocks=3",
        ] {
            assert!(Fixed::parse(text).is_err(), "{text}");
        }
        let block = BlockCost {
            repeated: true,
            forward: 1.0,
            swap_out: 3.0,
            ..BlockCost::default()
        };
        let instance = Instance {
            blocks: vec![block; 8],
            chunks: vec![ChunkCost::default(); 6],
            alpha: 1.0,
            ..Instance::default()
        };
        for (text, words) in [
            ("n_persist=7", "n_persist=7: the model has 6 chunks"),
            ("n_persist=4,n_buffer=3", "only 2 of 6 chunks"),
            ("n_persist=0,n_buffer=2", "at least 3 buffers"),
            ("n_swap=3", "N_interval = 3 blocks, so at most 2"),
            ("n_swap=2,n_ckpt=7", "the model has 8 blocks"),
        ] {
            let error = Fixed::parse(text)
                .unwrap()
                .check(&instance)
                .unwrap_err()
                .to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
        let text = Config {
            n_swap: 2,
            ..Config::default()
        }
        .to_string();
        assert_eq!(text, "n_persist=0,n_buffer=0,n_swap=2,n_ckpt=0");
        assert_eq!(Fixed::parse(&text).unwrap().n_swap, Some(2));
    }

    /// A limit of Eq 2: if every chunk is persistent, nothing is fetched, and the host updates
    /// nothing.
    #[test]
    fn persistent_everything_is_compute_and_update() {
        let block = BlockCost {
            repeated: true,
            forward: 2.0,
            backward: 4.0,
            ..Default::default()
        };
        let chunk = ChunkCost {
            upload: 9.0,
            offload: 9.0,
            update_device: 1.0,
            update_host: 50.0,
            ..Default::default()
        };
        let blocks = (0..3)
            .map(|chunk| BlockCost {
                chunk,
                ..block.clone()
            })
            .collect();
        let instance = Instance {
            blocks,
            chunks: vec![chunk; 3],
            capacity: 10,
            alpha: 1.0,
            ..Default::default()
        };
        let all = times(
            &instance,
            &Config {
                n_persist: 3,
                ..Config::default()
            },
        );
        assert_eq!(
            all,
            Times {
                forward: 6.0,
                backward: 12.0,
                update_device: 3.0,
                update_host: 0.0,
                tail: 0.0
            }
        );
        assert_eq!(all.step(), 21.0);
        // No persistent chunks: the step waits for the first chunk, two more are fetched in the
        // forward, and the last two are cached in the backward.
        let none = times(
            &instance,
            &Config {
                n_buffer: 2,
                ..Config::default()
            },
        );
        assert_eq!(none.forward, 9.0 + 9.0 + 9.0 + 2.0);
        assert_eq!(none.backward, 9.0 + 9.0 + 9.0);
        assert_eq!(none.step() - none.tail, none.forward + 150.0);
        // The first gradients arrive when a backward and an offload are over: 4 + 9. Then the host
        // updates 3 chunks, and the next step fetches the last one of them, the first chunk.
        assert_eq!(none.tail, 4.0 + 9.0);
    }
}
