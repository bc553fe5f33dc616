//! What the user chooses: [`Options`], the [`Budget`] among them.

use crate::graph::loss::Chunks;
use crate::graph::optimizer::{Attach, Master, Optimizer};
use crate::schedule::order::Update;
use serde::{Deserialize, Serialize};

/// Peak bytes of the device for the whole step.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub enum Budget {
    /// What the device has.
    #[default]
    Device,
    /// So many bytes.
    Bytes(u64),
    /// A share of what `keep` needs: 0.6 is 60 %.
    Share(f64),
}

ir::named! {
    /// What computes.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum Kernels {
        /// Each op's own kernel, in the runtime.
        Plain = "plain",
        /// Ops are grouped, and groups are kernels that are generated; the runtime has the others.
        #[default]
        Generated = "generated",
    }
}

/// What the user chose.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Options {
    /// The optimizer to attach.
    pub optimizer: Optimizer,
    /// What half-precision parameters are roundings of.
    pub master: Master,
    /// The most that the norm over all gradients may be.
    pub clip_norm: Option<f64>,
    /// Over how many batches gradients are accumulated for one update; one if absent.
    pub micro_batches: Option<usize>,
    /// Where its updates stand.
    pub update: Update,
    /// In how many chunks of rows the loss is computed.
    pub loss_chunks: Chunks,
    /// What computes.
    pub kernels: Kernels,
    /// The budget.
    pub budget: Budget,
    /// Bytes that the host's pool may hold; the device file's figure if absent.
    pub host: Option<u64>,
    /// Who decides.
    pub planner: Planner,
    /// Whether other budgets are planned too.
    pub extent: Extent,
    /// Leaves formulas as they were traced: without `simplify`.
    pub without_simplify: bool,
}

impl Options {
    /// What the optimizer pass attaches.
    pub fn attach(&self) -> Attach {
        Attach {
            optimizer: self.optimizer,
            master: self.master,
            clip_norm: self.clip_norm,
        }
    }
}

ir::named! {
    /// Who decides.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum Planner {
        /// The best that any planner finds.
        #[default]
        Auto = "auto",
        /// Nothing leaves the device.
        Keep = "keep",
        /// Whatever is cheapest by the byte, in steps or at once: see [`greedy`].
        Greedy = "greedy",
        /// Weights leave, activations stay: see [`weights`].
        Offload = "offload",
        /// See [`layout`].
        Protrain = "protrain",
    }
}

/// What planning finds out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Extent {
    /// The plan for the budget, and what other budgets would come to.
    #[default]
    Curve,
    /// The plan for the budget: the same one, in less time. Of graphs of thousands of lines, some
    /// that needs less memory and is faster may be missed; none was seen: see `decide::record`.
    Plan,
}

/// What a record may need, bytes.
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
