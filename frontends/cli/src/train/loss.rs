//! The loss that a step reports.

use super::failure;
use crate::failure::Failure;
use artifact::{Artifact, DType, Operand};
use half::{bf16, f16};
use runtime::Machine;

/// The output that is reported: `loss`, or the first that is one number.
pub(super) struct Loss {
    name: String,
    dtype: DType,
}

impl Loss {
    pub(super) fn find(artifact: &Artifact) -> Option<Loss> {
        let is_number = |o: &Operand| {
            let float = matches!(o.dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
            float && o.shape.iter().product::<u64>() == 1
        };
        let mut numbers = artifact
            .outputs
            .iter()
            .filter(|output| is_number(&output.operand));
        let named = numbers.clone().find(|output| output.name == "loss");
        named.or_else(|| numbers.next()).map(|output| Loss {
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
