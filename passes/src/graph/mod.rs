//! Passes over graphs.

pub mod canonical;
pub mod optimizer;
