//! Passes over graphs.

pub mod canonical;
pub mod fuse;
pub mod loss;
pub mod microbatch;
pub mod optimizer;
pub mod simplify;
