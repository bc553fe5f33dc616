//! Tests of the runtime: its kernels, its machine, and the artifacts that it refuses.

mod backend;
mod common;
mod evaluation;
mod foreign;
mod kernels;
mod machine;
mod parts;
mod races;
mod validate;
