//! The nouns of planning, as plain data: what is asked ([`Options`], [`Budget`]), what planners see
//! ([`Problem`]), what they answer ([`Decisions`]), and the pools and streams of every schedule.
//!
//! Nothing here plans. The planners are in [`decide`](crate::decide), and
//! [`apply`](crate::schedule::apply) alone turns decisions into lines.

pub mod blocks;
mod decisions;
mod error;
pub mod machine;
mod options;
mod problem;
pub mod tuning;
pub mod users;

pub use decisions::{Decisions, Gap, Means, Reason};
pub use error::{Error, Illegal, Infeasible};
pub use options::{Budget, Extent, Kernels, Limits, Options, Planner};
pub use problem::{Group, GroupData, Problem};
