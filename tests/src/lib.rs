//! Shared code of the tests: generators of graphs and decisions, a plain evaluator, and functions
//! that run compiled steps.

pub mod attention;
pub mod chain;
pub mod code;
pub mod document;
pub mod evaluate;
pub mod example;
pub mod forced;
pub mod fsdp;
pub mod generate;
pub mod gpt2;
pub mod gpu;
mod gpu_ops;
pub mod linears;
pub mod numbers;
pub mod paper_models;
pub mod remat;
pub mod run;
pub mod serving;
