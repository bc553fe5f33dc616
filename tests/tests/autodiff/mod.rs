//! Derivatives: each rule against central differences in f64, and against PyTorch's values where a
//! function has no derivative.

mod cases;
mod docs;
mod fixtures;
mod forward;
mod refusals;
