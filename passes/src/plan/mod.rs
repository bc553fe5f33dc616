//! The nouns of planning, as plain data: the user's choices ([`Options`], [`Budget`]), what
//! planners read ([`Problem`]) and return ([`Decisions`]), and the pools and streams of every
//! schedule.
//!
//! Nothing here plans. The planners are in [`decide`](crate::decide). Only
//! [`apply`](crate::schedule::apply) turns decisions into lines.

pub mod blocks;
mod cancel;
mod decisions;
mod error;
mod homes;
pub mod machine;
mod options;
pub mod parts;
mod problem;
pub mod tuning;
pub mod users;

pub use cancel::{Cancel, Cancelled};
pub use decisions::{Decisions, Gap, Means, Reason};
pub use error::{Error, HostTooSmall, Illegal, Infeasible};
pub use homes::Homes;
pub use options::{Budget, Extent, Kernels, Limits, Options, Planner};
pub use parts::Parts;
pub use problem::{Group, GroupData, Problem};
