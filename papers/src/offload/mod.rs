//! Weight offloading as a separate problem: which bytes of a chain's weights leave the device,
//! when, and when they return.
//!
//! Source: O. Beaumont, L. Eyraud-Dubois, A. Shilova, X. Zhao, "Weight Offloading Strategies for
//! Training Large DNN Models" (2022). A step runs forwards `F_1 … F_L`, then backwards `B_L … B_1`.
//! The update of a layer is part of its backward, so only one layer's gradient exists at a time.
//! The step repeats, and transfers may cross from one step into the next. Before: an [`Instance`].
//! After: a [`Solution`], whose schedule [`validate`](validate::validate) accepts.
//!
//! A layer's weights may be away in two gaps ([`Gap`]). Only a backward changes them. So bytes that
//! were uploaded after it need no second upload: one upload may serve two absences.
//!
//! [`solve`] has the paper's algorithms, two others from the literature, and
//! [`Algorithm::GreedyPlus`], the recommended one.

mod bound;
pub mod exact;
mod fit;
mod lists;
mod lp;
pub mod paper;
mod select;
mod timetable;
pub mod validate;

#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::{Range, RangeInclusive};

/// One layer of the chain.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layer {
    /// Its weights. Its gradient has the same size (Section 3).
    pub weight_bytes: u64,
    /// The activations that its forward leaves for the backward.
    pub activation_bytes: u64,
    /// How long its forward takes, µs.
    pub forward_micros: f64,
    /// How long its backward takes, with the update, µs.
    pub backward_micros: f64,
}

/// A chain of layers, a device's memory and its link to the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Instance {
    /// In the order of the forwards.
    pub layers: Vec<Layer>,
    /// The link's bandwidth in each direction, bytes per µs. Both directions work at the same time.
    pub bytes_per_micro: f64,
    /// The device's memory.
    pub memory_bytes: u64,
}

/// When a layer's weights may be away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Gap {
    /// After its backward, until the next step's forward: the paper's choice (k, 0).
    BackwardToForward,
    /// After its forward, until its backward: (k, 1).
    ForwardToBackward,
}

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// To the device: a prefetch.
    ToDevice,
    /// To the host: an upload. The bytes stay on the device until an [`Absence`] begins.
    ToHost,
}

/// Bytes on the link. A transfer that ends after the period reaches into the next step.
#[derive(Clone, Debug, PartialEq)]
pub struct Transfer {
    /// The layer, from 0.
    pub layer: usize,
    /// Its direction.
    pub way: Way,
    /// The range of the layer's bytes.
    pub bytes: Range<u64>,
    /// When it starts, µs, within the period.
    pub start: f64,
    /// When it ends, µs.
    pub end: f64,
}

/// Bytes that are not on the device: from their deletion until the start of the prefetch that
/// brings them back, which takes their place again.
#[derive(Clone, Debug, PartialEq)]
pub struct Absence {
    /// The layer, from 0.
    pub layer: usize,
    /// Its gap.
    pub gap: Gap,
    /// The range of the layer's bytes.
    pub bytes: Range<u64>,
    /// When they are deleted, µs, within the period.
    pub from: f64,
    /// When the prefetch begins, µs, after `from`.
    pub until: f64,
}

/// A step that repeats every `period`.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// µs from one step's start to the next one's.
    pub period: f64,
    /// When the operations start, µs: `B_L … B_1`, then `F_1 … F_L`. The cycle is cut before `B_L`,
    /// as in the paper.
    pub starts: Vec<f64>,
    /// All transfers.
    pub transfers: Vec<Transfer>,
    /// All absences.
    pub absences: Vec<Absence>,
}

ir::named! {
    /// How to solve.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub enum Algorithm {
        /// The optimum of the relaxed problem, scheduled in pieces. Whole layers are tried first.
        GreedyPlus = "greedy+",
        /// The paper's Algorithms 1 and 2.
        Greedy = "greedy",
        /// The same layers in the same gaps, but each absence has its own upload (Section 7:
        /// "weights are not only offloaded once").
        GreedyStar = "greedy*",
        /// Layer to layer (B. Pudipeddi et al., 2020): one layer on the device at a time, and
        /// operations wait for each prefetch.
        L2l = "l2l",
        /// The smallest number of first layers that fits (STRONGHOLD, X. Sun et al., 2022),
        /// scheduled by Algorithm 2.
        FirstHalf = "first-half",
        /// AutoSwap (J. Zhang et al., 2019), priority DOA: the longest absences first, scheduled by
        /// Algorithm 2.
        AutoSwapDoa = "autoswap-doa",
        /// AutoSwap, priority AOA: the largest product of bytes and absence first.
        AutoSwapAoa = "autoswap-aoa",
        /// AutoSwap, priority WDOA: absences first during which the excess of memory is large.
        AutoSwapWdoa = "autoswap-wdoa",
        /// AutoSwap, priority SWDOA: as WDOA, with the excess that is left after each choice.
        AutoSwapSwdoa = "autoswap-swdoa",
    }
}

impl Algorithm {
    /// The priority, if this is AutoSwap.
    fn score(self) -> Option<select::Score> {
        match self {
            Algorithm::AutoSwapDoa => Some(select::Score::Absence),
            Algorithm::AutoSwapAoa => Some(select::Score::Area),
            Algorithm::AutoSwapWdoa => Some(select::Score::Weighted),
            Algorithm::AutoSwapSwdoa => Some(select::Score::Submodular),
            Algorithm::GreedyPlus
            | Algorithm::Greedy
            | Algorithm::GreedyStar
            | Algorithm::L2l
            | Algorithm::FirstHalf => None,
        }
    }
}

/// Why there is no solution.
#[derive(Clone, Debug, PartialEq)]
pub enum Error {
    /// The instance is invalid: the error, and its place.
    Invalid(String),
    /// An operation alone does not fit into the memory.
    TooSmall {
        /// The layer, from 0.
        layer: usize,
        /// The memory of its backward: activations up to it, its weights, its gradient. No schedule
        /// fits into less.
        needed_bytes: u64,
        /// The device's memory.
        memory_bytes: u64,
    },
    /// Schedules exist, but this algorithm finds none.
    Stuck(Algorithm),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Invalid(what) => f.write_str(what),
            Error::TooSmall {
                layer,
                needed_bytes,
                memory_bytes,
            } => write!(
                f,
                "layer {layer} does not fit the memory: its backward needs {needed_bytes} bytes \
                 with the activations before \
                 it, and there are {memory_bytes}"
            ),
            Error::Stuck(algorithm) => {
                write!(
                    f,
                    "{} finds no schedule within this memory; greedy+ does",
                    algorithm.name()
                )
            }
        }
    }
}

impl std::error::Error for Error {}

/// The result of [`solve`].
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// The algorithm that found it.
    pub algorithm: Algorithm,
    /// The step.
    pub schedule: Schedule,
    /// The time of the operations without a pause, µs: no step is shorter.
    pub compute_micros: f64,
    /// No step is shorter than this either, µs; at least `compute_micros`.
    pub bound_micros: f64,
}

impl Solution {
    /// For each layer, the number of its bytes that are away in [`Gap::BackwardToForward`] and in
    /// [`Gap::ForwardToBackward`].
    pub fn away_bytes(&self) -> Vec<[u64; 2]> {
        let mut away = vec![[0; 2]; self.schedule.starts.len() / 2];
        for absence in &self.schedule.absences {
            away[absence.layer][absence.gap as usize] += absence.bytes.end - absence.bytes.start;
        }
        away
    }

    /// Bytes that move in a step, in one direction.
    pub fn moved_bytes(&self, way: Way) -> u64 {
        let moved = self
            .schedule
            .transfers
            .iter()
            .filter(|transfer| transfer.way == way);
        moved
            .map(|transfer| transfer.bytes.end - transfer.bytes.start)
            .sum()
    }
}

/// An operation, in the order of [`Schedule::starts`].
#[derive(Clone, Copy, Debug)]
struct Op {
    layer: usize,
    backward: bool,
    micros: f64,
    /// The bytes that it needs in addition to all weights on the device: activations, and for a
    /// backward its gradient (Eq 1).
    held_bytes: u64,
    /// The bytes that stay until the next operation starts: activations.
    left_bytes: u64,
}

/// The link's bytes per µs. These limits, like that of the times, are far from every machine, and
/// keep the sums of times exact enough to be compared.
const RATES: RangeInclusive<f64> = 1e-3..=1e12;
/// The longest operation, µs.
const MOST_MICROS: f64 = 1e12;

impl Instance {
    /// Checks that the instance is valid.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] with the reason; [`Error::TooSmall`] if no schedule exists.
    pub fn validate(&self) -> Result<(), Error> {
        let invalid = |what: String| Err(Error::Invalid(what));
        if self.layers.is_empty() {
            return invalid("there are no layers".into());
        }
        // Sums of bytes are exact as f64, and twice the weights is far below the maximum of u64.
        const MOST: u64 = 1 << 52;
        if self.memory_bytes > MOST {
            return invalid(format!(
                "a memory of {} bytes is more than {MOST}, up to which bytes are counted exactly",
                self.memory_bytes
            ));
        }
        let mut total = 0u64;
        for (k, layer) in self.layers.iter().enumerate() {
            for (micros, what) in [
                (layer.forward_micros, "forward"),
                (layer.backward_micros, "backward"),
            ] {
                if !(0.0..=MOST_MICROS).contains(&micros) {
                    return invalid(format!(
                        "layer {k}: the time of its {what} is {micros:e} us, and should be from 0 \
                         to {MOST_MICROS:e}"
                    ));
                }
            }
            let bytes = layer
                .weight_bytes
                .checked_mul(2)
                .and_then(|bytes| bytes.checked_add(layer.activation_bytes));
            total = match bytes.and_then(|bytes| total.checked_add(bytes)) {
                Some(total) if total <= MOST => total,
                _ => {
                    return invalid(format!(
                        "layer {k}: the layers up to it have more than {MOST} bytes"
                    ));
                }
            };
        }
        if !RATES.contains(&self.bytes_per_micro) {
            return invalid(format!(
                "the link's bandwidth is {:e} bytes per second, and should be from {:e} to {:e}",
                1e6 * self.bytes_per_micro,
                1e6 * RATES.start(),
                1e6 * RATES.end()
            ));
        }
        let ops = self.ops();
        let alone = ops
            .iter()
            .map(|op| (op.held_bytes + self.layers[op.layer].weight_bytes, op.layer));
        let (needed_bytes, layer) = alone.max().expect("a chain should have operations");
        match needed_bytes <= self.memory_bytes {
            true => Ok(()),
            false => Err(Error::TooSmall {
                layer,
                needed_bytes,
                memory_bytes: self.memory_bytes,
            }),
        }
    }

    /// The smallest memory into which any schedule fits: the activations, weights and gradient of
    /// the operation that needs most.
    pub fn floor_bytes(&self) -> u64 {
        self.ops()
            .iter()
            .map(|op| op.held_bytes + self.layers[op.layer].weight_bytes)
            .max()
            .unwrap_or(0)
    }

    /// The memory with which no bytes need to move.
    pub fn keep_bytes(&self) -> u64 {
        self.weight_bytes() + self.ops().iter().map(|op| op.held_bytes).max().unwrap_or(0)
    }

    /// The time of the operations without a pause, µs.
    pub fn compute_micros(&self) -> f64 {
        self.ops().iter().map(|op| op.micros).sum()
    }

    /// All weights.
    fn weight_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.weight_bytes).sum()
    }

    /// A step's operations, `B_L … B_1, F_1 … F_L`.
    fn ops(&self) -> Vec<Op> {
        let mut activations = 0;
        let mut backwards: Vec<Op> = Vec::new();
        let mut forwards = Vec::new();
        for (k, layer) in self.layers.iter().enumerate() {
            let before = activations;
            activations += layer.activation_bytes;
            let held_bytes = activations + layer.weight_bytes;
            let micros = layer.backward_micros;
            backwards.push(Op {
                layer: k,
                backward: true,
                micros,
                held_bytes,
                left_bytes: before,
            });
            let (held_bytes, micros) = (activations, layer.forward_micros);
            forwards.push(Op {
                layer: k,
                backward: false,
                micros,
                held_bytes,
                left_bytes: activations,
            });
        }
        backwards.into_iter().rev().chain(forwards).collect()
    }

    /// A layer's weights.
    fn weight(&self, layer: usize) -> u64 {
        self.layers[layer].weight_bytes
    }
}

/// Solves an instance. Also computes the bound, unless the step has no pause and needs no bound.
///
/// # Errors
///
/// The errors of [`Instance::validate`], and [`Error::Stuck`] for algorithms other than
/// [`Algorithm::GreedyPlus`].
pub fn solve(instance: &Instance, algorithm: Algorithm) -> Result<Solution, Error> {
    instance.validate()?;
    let ops = instance.ops();
    let compute_micros = instance.compute_micros();
    let (schedule, known) = match algorithm {
        Algorithm::GreedyPlus => fit::fit(instance, &ops),
        Algorithm::Greedy
        | Algorithm::GreedyStar
        | Algorithm::FirstHalf
        | Algorithm::AutoSwapDoa
        | Algorithm::AutoSwapAoa
        | Algorithm::AutoSwapWdoa
        | Algorithm::AutoSwapSwdoa => (
            whole_layers(instance, &ops, algorithm).ok_or(Error::Stuck(algorithm))?,
            None,
        ),
        Algorithm::L2l => (lists::layer_to_layer(instance, &ops), None),
    };
    let bound_micros = match known {
        Some(micros) => micros,
        None if schedule.period <= compute_micros * (1.0 + 1e-12) => compute_micros,
        None => bound::relax(instance, &ops, &vec![0.0; ops.len()]).micros,
    };
    Ok(Solution {
        algorithm,
        schedule,
        compute_micros,
        bound_micros,
    })
}

/// A selection, then Algorithm 2. `greedy*` has the selection of `greedy`. A selection that fills
/// the memory to the last byte leaves no place for the next layer while one runs, so operations
/// wait for each prefetch. If the place of one layer is left free, the pauses are as in the paper's
/// Table 1. So the best of one, a half and none is taken.
fn whole_layers(instance: &Instance, ops: &[Op], algorithm: Algorithm) -> Option<Schedule> {
    let largest = instance
        .layers
        .iter()
        .map(|layer| layer.weight_bytes as f64)
        .fold(0.0, f64::max);
    let schedules = [1.0, 0.5, 0.0].into_iter().filter_map(|share| {
        let reserve = share * largest;
        let away = match (algorithm, algorithm.score()) {
            (Algorithm::FirstHalf, _) => select::first(instance, ops, reserve)?,
            (_, Some(score)) => select::by_score(instance, ops, score, reserve)?,
            (_, None) => select::greedy(instance, ops, reserve)?,
        };
        lists::schedule(instance, ops, &away, algorithm != Algorithm::GreedyStar)
    });
    schedules.reduce(|best, schedule| {
        if schedule.period < best.period {
            schedule
        } else {
            best
        }
    })
}

/// No step of this instance is shorter, µs.
///
/// # Errors
///
/// The errors of [`Instance::validate`].
pub fn bound(instance: &Instance) -> Result<f64, Error> {
    instance.validate()?;
    let ops = instance.ops();
    Ok(bound::relax(instance, &ops, &vec![0.0; ops.len()]).micros)
}
