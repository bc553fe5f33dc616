//! `--add-lora`: adds adapters to a forward, with their first values.

use crate::args::AddLora;
use ir::{Graph, TensorType};
use passes::graph::lora::{self, Adapter, LoraError};
use runtime::StateInit;
use runtime::kernels::owned::OwnedTensor;

/// The type and the bytes of an adapter's matrix, by its path.
type Matrix = (String, (TensorType, Vec<u8>));

/// Adds adapters; returns their values. A begins with random numbers of PEFT's deviation, B with
/// zeros, so that the model computes at first what it computed before.
pub(crate) fn add(graph: &mut Graph, added: &AddLora) -> Result<Vec<Matrix>, LoraError> {
    let mut matrices = vec![];
    for Adapter { paths, types } in lora::run(graph, &added.to_graph())? {
        let ([a, b], [a_ty, b_ty]) = (paths, types);
        // PEFT draws from a uniform distribution up to 1 / sqrt(in).
        let std = Some((3.0 * a_ty.shape()[1] as f64).sqrt().recip());
        let drawn = StateInit { seed: 0, std }.drawn(&a, a_ty.numel());
        let zeros = vec![0.0; b_ty.numel() as usize];
        for (path, ty, numbers) in [(a, a_ty, drawn), (b, b_ty, zeros)] {
            let shape: Vec<usize> = ty.shape().iter().map(|&size| size as usize).collect();
            let dtype = codegen::dtype(ty.dtype());
            let bytes = OwnedTensor::from_f64s(dtype, &shape, &numbers).bytes();
            matrices.push((path, (ty, bytes)));
        }
    }
    Ok(matrices)
}
