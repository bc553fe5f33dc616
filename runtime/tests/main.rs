//! The runtime: its kernels, its machine, and what it refuses.

mod backend;
mod common;
mod kernels;
mod machine;
mod races;
mod validate;
