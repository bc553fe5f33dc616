//! Passes over schedules, in the order in which they run.

pub mod apply;
pub mod inplace;
pub mod order;
pub mod prefetch;
pub mod sync;
