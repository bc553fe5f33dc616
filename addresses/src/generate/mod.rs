//! Traces of a rank's requests in training steps, without a GPU: [`Setup`] follows Megatron-LM,
//! [`Chunked`] follows Colossal-AI's Gemini. Address planners and allocators are compared on them.
//!
//! A trace is a model of the program: the sizes and the order of the requests of a transformer's
//! tensors, from the programs' sources. It was not recorded. Every request and free has its own
//! tick, so the trace has the program's order.
//!
//! Source: STAlloc (EuroSys 2026), section 9 (the configurations); Megatron-LM
//! (`megatron/core/pipeline_parallel/schedules.py`, `transformer_layer.py`); Colossal-AI
//! (`colossalai/zero/gemini/chunk`).

mod chunked;
mod layer;
mod mixture;
mod model;
mod setup;
mod step;
mod writer;

pub use chunked::Chunked;
pub use model::{Model, Shape};
pub use setup::{Error, MOST_REQUESTS, Setup};

/// Bytes of an element of bf16.
const HALF: u64 = 2;
/// Bytes of an element of f32.
const FULL: u64 = 4;
