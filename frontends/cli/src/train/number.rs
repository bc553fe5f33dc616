//! The numbers that a step reports: its loss, the norm over its gradients, the scale of its loss.

use super::failure;
use crate::failure::Failure;
use artifact::{Artifact, DType, Operand};
use half::{bf16, f16};
use passes::graph::optimizer::{FOUND_INF, GRAD_NORM, LOSS_SCALE};
use runtime::Machine;

/// An output that is one number.
pub(super) struct Number {
    name: String,
    dtype: DType,
}

impl Number {
    /// The loss: the output `loss`, or the first that is one number.
    pub(super) fn loss(artifact: &Artifact) -> Option<Number> {
        let ours = [GRAD_NORM, LOSS_SCALE, FOUND_INF];
        let mut numbers = Number::all(artifact).filter(|number| !ours.contains(&&*number.name));
        Number::named(artifact, "loss").or_else(|| numbers.next())
    }

    /// The output of a name, if it is one number.
    pub(super) fn named(artifact: &Artifact, name: &str) -> Option<Number> {
        Number::all(artifact).find(|number| number.name == name)
    }

    fn all(artifact: &Artifact) -> impl Iterator<Item = Number> {
        let is_number = |o: &Operand| {
            let float = matches!(o.dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
            float && o.shape.iter().product::<u64>() == 1
        };
        let outputs = artifact.outputs.iter();
        let numbers = outputs.filter(move |output| is_number(&output.operand));
        numbers.map(|output| Number {
            name: output.name.clone(),
            dtype: output.operand.dtype,
        })
    }

    /// Its value after a step. An f32 is widened to f64; its shortest decimal form reads back to
    /// the same f32.
    pub(super) fn read(&self, machine: &mut Machine) -> Result<Option<f64>, Failure> {
        let bytes = machine.read_output(&self.name).map_err(failure)?;
        Ok(self.value(&bytes))
    }

    /// The output's name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The value of the output's bytes.
    pub(super) fn value(&self, bytes: &[u8]) -> Option<f64> {
        match self.dtype {
            DType::F64 => bytes.first_chunk().map(|b| f64::from_le_bytes(*b)),
            DType::F32 => bytes
                .first_chunk()
                .map(|b| f64::from(f32::from_le_bytes(*b))),
            DType::F16 => bytes.first_chunk().map(|b| f16::from_le_bytes(*b).to_f64()),
            DType::BF16 => bytes
                .first_chunk()
                .map(|b| bf16::from_le_bytes(*b).to_f64()),
            _ => None,
        }
    }
}
