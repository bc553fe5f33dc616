//! Passes over graphs.

pub mod accumulate;
pub mod attention;
pub mod autodiff;
pub mod canonical;
pub mod criterion;
pub mod evaluation;
pub mod fuse;
mod generator;
pub mod logits;
pub mod lora;
pub mod loss;
pub mod microbatch;
pub mod optimizer;
pub mod precision;
pub mod quantize;
pub mod reduction;
pub mod scale;
pub mod simplify;
mod steps;
mod views;

use ir::Op;
use ir::op::attrs::Sizes;

/// The op that reshapes to these sizes.
fn reshape_to(sizes: impl IntoIterator<Item = u64>) -> Op {
    let shape = sizes.into_iter().map(|size| size as i64).collect();
    Op::Reshape(Sizes { shape })
}
