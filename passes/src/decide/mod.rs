//! Decides what to keep, swap and recompute. A planner is a function from a [`Problem`] to
//! [`Decisions`]. Only [`apply`](crate::schedule::apply) acts on them.
//!
//! [`among`] chooses the plan for a budget, `propose` runs the planners, [`record`] measures the
//! bytes and times of their drafts, [`choose`] finds the best record without judging all drafts.

mod activations;
pub mod among;
pub mod bound;
pub mod choose;
pub mod chunks;
pub mod figures;
pub mod greedy;
pub mod layout;
mod occupancy;
mod propose;
pub mod recompute;
pub mod record;
mod relieve;
mod shortage;
pub mod weights;

pub use crate::plan::{
    Decisions, Extent, Gap, Group, Infeasible, Means, Planner, Problem, Reason, blocks,
};
pub use among::{Decided, Outcome, decide, decide_among};
