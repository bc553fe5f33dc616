//! Tests of the command line.

mod adapters;
mod alloc;
mod buckets;
mod checkpoints;
mod common;
mod config;
mod data;
mod devices;
mod disk_tier;
mod estimate;
mod evaluation;
mod forward;
mod gpu;
mod hyper;
mod metrics;
mod offload;
mod onnx;
mod page;
mod plan;
mod power;
mod precision;
mod profile;
mod report;
mod robust;
mod train;
mod trust;
