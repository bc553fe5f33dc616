//! Tests of the command line.

mod alloc;
mod common;
mod devices;
mod estimate;
mod forward;
mod gpu;
mod hyper;
mod offload;
mod plan;
mod profile;
mod report;
mod robust;
mod train;
mod trust;
