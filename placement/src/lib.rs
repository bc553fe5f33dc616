//! Addresses for blocks of memory whose lifetimes are known: offline allocation, or two-dimensional
//! packing of time and bytes.
//!
//! A [`trace::Trace`] is a list of blocks with a start, an end and a size. [`place`] finds an
//! offset for each, with a peak near [`lower_bound`]; [`check::check`] proves a plan and shares no
//! code with the planners.
//!
//! ```
//! use lighterage_placement::trace::{Block, Trace};
//! use lighterage_placement::{Options, lower_bound, place};
//!
//! let block = |start, end, bytes| Block { start, end, bytes, ..Block::default() };
//! let trace = Trace {
//!     blocks: vec![block(0, 2, 64), block(1, 3, 32), block(2, 4, 64)],
//!     ..Trace::default()
//! };
//! let plan = place(&trace, &Options::default(), &mut |_, _| ()).unwrap();
//! assert_eq!(plan.peak, 96);
//! assert_eq!(plan.peak, lower_bound(&trace, 1));
//! ```

pub mod check;
mod exact;
mod order;
mod place;
mod problem;
mod reduce;
mod repair;
mod sweep;
pub mod trace;
mod tree;

pub use ir::named;
pub use place::{Effort, Error, Method, Options, Placement};
pub use reduce::{Plan, lower_bound, place, reduced, roots, until_waited};

/// How far a peak is above its lower bound: 0.01 is 1 %.
pub fn gap(peak: u64, lower_bound: u64) -> f64 {
    if peak <= lower_bound {
        0.0
    } else {
        peak as f64 / lower_bound.max(1) as f64 - 1.0
    }
}
