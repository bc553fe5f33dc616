//! Tests of the allocator: requests from any thread, in Rust and in C.

mod abi;
mod arena;
mod cache;
mod driver;
mod matching;
mod plans;
mod streams;
mod threads;
