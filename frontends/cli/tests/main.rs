//! Tests of the command line.

mod alloc;
mod common;
mod devices;
mod estimate;
mod gpu;
mod offload;
mod onnx;
mod plan;
mod profile;
mod report;
mod robust;
mod train;
mod trust;
