//! What the user chooses: [`Options`], including the [`Budget`].

use super::cancel::Cancel;
use super::homes::Homes;
use super::parts::Parts;
use crate::graph::loss::Chunks;
use crate::graph::optimizer::{Attach, Master, Optimizer, Rounding};
use crate::graph::precision::Precision;
use crate::graph::quantize::Base;
use crate::graph::reduction::Combination;
use crate::graph::scale::LossScale;
use crate::schedule::order::Update;
use papers::protrain::Fixed;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Peak bytes of the device for the whole step.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub enum Budget {
    /// The memory of the device.
    #[default]
    Device,
    /// A number of bytes.
    Bytes(u64),
    /// A share of what `keep` needs: 0.6 is 60 %.
    Share(f64),
}

ir::named! {
    /// The kind of kernels.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum Kernels {
        /// One kernel for each op, in the runtime.
        Plain = "plain",
        /// Ops are grouped, and a kernel is generated for each group. The runtime has the other
        /// kernels.
        #[default]
        Generated = "generated",
    }
}

/// What the user chose.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Options {
    /// The optimizer to attach.
    pub optimizer: Optimizer,
    /// The f32 masters of half-precision parameters.
    pub master: Master,
    /// How bf16 parameters without masters are rounded.
    pub rounding: Rounding,
    /// The largest norm over all gradients.
    pub clip_norm: Option<f64>,
    /// Makes the norm over all gradients an output.
    pub grad_norm: bool,
    /// Groups of parameters with options of their own, by path: see [`Attach::groups`].
    pub groups: BTreeMap<String, usize>,
    /// The groups whose moments are numbers where the optimizer has codes: see [`Attach::whole`].
    pub whole_groups: BTreeSet<usize>,
    /// The options of the groups from 1 on that differ from those of group 0, for the program that
    /// runs the step. They change no plan.
    pub group_options: Vec<Vec<(String, f64)>>,
    /// The number of batches over which gradients are accumulated for one update; 1 if absent.
    pub micro_batches: Option<usize>,
    /// How their losses and gradients are put together.
    pub reduction: Combination,
    /// Where its updates run.
    pub update: Update,
    /// The number of chunks of rows of the loss.
    pub loss_chunks: Chunks,
    /// The kind of kernels.
    pub kernels: Kernels,
    /// The budget.
    pub budget: Budget,
    /// The limit of the host's pool, bytes; the figure of the device file if absent.
    pub host: Option<u64>,
    /// The planner.
    pub planner: Planner,
    /// Those of ProTrain's four numbers that are given, for the planner `protrain`. With any, only
    /// plans with these numbers are made.
    pub protrain: Fixed,
    /// Whether other budgets are planned too.
    pub extent: Extent,
    /// Where the states of another step live, on whose memory this one runs, too.
    pub homes: Option<Homes>,
    /// Runs the step in two parts, on memory of the caller.
    pub parts: Option<Parts>,
    /// The types in which a step traced in f32 is computed.
    pub precision: Precision,
    /// How the scale of the loss changes in fp16.
    pub loss_scale: LossScale,
    /// How frozen matrices are stored.
    pub base: Base,
    /// Lets a GPU round the factors of f32 products (`matmul`, `addmm`) to TF32, which has 11 bits
    /// of precision, so that tensor cores multiply them. Times are predicted for it too.
    pub tf32: bool,
    /// Adds the backward to a graph that is a forward alone: see [`crate::graph::autodiff`].
    pub differentiate: bool,
    /// Compiles the loss alone, as the model computes it in evaluation: see
    /// [`crate::graph::evaluation`].
    pub evaluate: bool,
    /// Skips `simplify`: formulas stay as they were traced.
    pub without_simplify: bool,
    /// Ends the compilation from outside. It changes no result.
    pub cancel: Cancel,
}

impl Options {
    /// What the optimizer pass attaches.
    pub fn attach(&self) -> Attach {
        Attach {
            optimizer: self.optimizer,
            master: self.master,
            rounding: self.rounding,
            clip_norm: self.clip_norm,
            grad_norm: self.grad_norm,
            groups: self.groups.clone(),
            whole: self.whole_groups.clone(),
            loss_scale: (self.precision == Precision::Fp16).then_some(self.loss_scale),
        }
    }
}

ir::named! {
    /// The planner.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum Planner {
        /// The best plan of all planners.
        #[default]
        Auto = "auto",
        /// Nothing leaves the device.
        Keep = "keep",
        /// The change with the lowest price per byte, in rounds or at once: see [`greedy`].
        Greedy = "greedy",
        /// Weights leave, activations stay: see [`weights`].
        Offload = "offload",
        /// See [`layout`].
        Protrain = "protrain",
    }
}

/// What planning computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Extent {
    /// The plan for the budget, the plans for other budgets, and the lower bound of the step time.
    Curve,
    /// Only the plan for the budget: the same plan, in less time. For graphs of thousands of lines,
    /// a better plan may be missed; this was never observed: see `decide::record`.
    #[default]
    Plan,
}

/// The most memory that a record may need, bytes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// On the device.
    pub device: u64,
    /// On the host.
    pub host: u64,
}

impl Limits {
    /// None.
    pub const NONE: Limits = Limits {
        device: u64::MAX,
        host: u64::MAX,
    };
}
