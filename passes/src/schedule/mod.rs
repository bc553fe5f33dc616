//! Passes over schedules. The list that orders them is [`list`](crate::list).

pub mod apply;
pub mod inplace;
pub mod lives;
pub mod order;
pub mod prefetch;
pub mod returns;
pub mod spill;
pub mod sync;
