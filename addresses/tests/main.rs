//! Addresses of traces: plans, streams, and the check of plans.

mod alloc_check;
mod place;
mod streams;
