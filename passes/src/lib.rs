//! Graph to Schedule and Plan. [`pipeline`] is the list of passes; read it first.

pub mod alloc;
mod blame;
pub mod cost;
pub mod decide;
pub mod devices;
pub mod explain;
pub mod graph;
mod lines;
pub mod list;
mod loss_variants;
mod manager;
pub mod micro_batches;
pub mod occupants;
pub mod pipeline;
pub mod plan;
pub mod realise;
pub mod schedule;
pub mod sim;

pub use ir::named;
