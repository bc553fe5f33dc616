//! Operands of benchmarks.

use artifact::DType;
use half::{bf16, f16};
use lighterage_runtime::kernels::owned::OwnedTensor;

/// The type that an argument `--bf16` or `--f16` asks for, else f32.
pub(crate) fn dtype() -> DType {
    let has = |option: &str| std::env::args().any(|arg| arg == option);
    match (has("--bf16"), has("--f16")) {
        (true, _) => DType::BF16,
        (_, true) => DType::F16,
        _ => DType::F32,
    }
}

/// Numbers from -1 to 1.
pub(crate) fn random(dtype: DType, shape: &[usize], seed: usize) -> OwnedTensor {
    let numbers = (0..shape.iter().product::<usize>()).map(|i| {
        let hash = i.wrapping_mul(2654435761) + seed * 97;
        ((hash >> 7) % 2000) as f32 * 1e-3 - 1.0
    });
    let bytes: Vec<u8> = match dtype {
        DType::BF16 => numbers
            .flat_map(|x| bf16::from_f32(x).to_le_bytes())
            .collect(),
        DType::F16 => numbers
            .flat_map(|x| f16::from_f32(x).to_le_bytes())
            .collect(),
        _ => numbers.flat_map(f32::to_le_bytes).collect(),
    };
    OwnedTensor::from_bytes(dtype, shape, &bytes)
}
