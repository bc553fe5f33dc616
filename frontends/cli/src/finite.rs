//! Checks whether a state should be saved: training from a checkpoint with NaNs gives NaNs.

use artifact::{DType, StateKind};
use half::{bf16, f16};

/// True if training can continue from a state's values. Parameters and moments must be finite; a
/// buffer may hold infinities (a mask does) but no NaN; constants and random states do not change.
pub(crate) fn is_sound(kind: StateKind, dtype: DType, bytes: &[u8]) -> bool {
    match kind {
        StateKind::Param | StateKind::Moment => all(dtype, bytes, f64::is_finite),
        StateKind::Buffer => all(dtype, bytes, |x| !x.is_nan()),
        StateKind::Const | StateKind::Rng => true,
    }
}

/// True if a predicate holds for all elements. For integers it always holds.
fn all(dtype: DType, bytes: &[u8], holds: fn(f64) -> bool) -> bool {
    match dtype {
        DType::F64 => chunks(bytes).all(|b| holds(f64::from_le_bytes(b))),
        DType::F32 => chunks(bytes).all(|b| holds(f32::from_le_bytes(b).into())),
        DType::F16 => chunks(bytes).all(|b| holds(f16::from_le_bytes(b).into())),
        DType::BF16 => chunks(bytes).all(|b| holds(bf16::from_le_bytes(b).into())),
        DType::F8E4M3 => bytes.iter().all(|&b| holds(f8_e4m3(b))),
        DType::F8E5M2 => bytes.iter().all(|&b| holds(f8_e5m2(b))),
        DType::Bool | DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64 => true,
    }
}

fn chunks<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks().0.iter().copied()
}

/// A NaN, or 0 for every number: this format has no infinities.
fn f8_e4m3(byte: u8) -> f64 {
    if byte & 0x7f == 0x7f { f64::NAN } else { 0.0 }
}

/// A NaN, an infinity, or 0 for every number.
fn f8_e5m2(byte: u8) -> f64 {
    match byte & 0x7f {
        0x7d.. => f64::NAN,
        0x7c => f64::INFINITY,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_values_are_found_in_every_type() {
        use StateKind::{Buffer, Const, Moment, Param};
        let f32s = |x: f32| [1f32.to_le_bytes(), x.to_le_bytes()].concat();
        let f64s = |x: f64| [1f64.to_le_bytes(), x.to_le_bytes()].concat();
        let f16s = |x: f32| f16::from_f32(x).to_le_bytes().to_vec();
        let bf16s = |x: f32| bf16::from_f32(x).to_le_bytes().to_vec();
        for (dtype, nan, infinite, sound) in [
            (DType::F32, f32s(f32::NAN), f32s(f32::INFINITY), f32s(3e38)),
            (
                DType::F64,
                f64s(f64::NAN),
                f64s(f64::NEG_INFINITY),
                f64s(1e300),
            ),
            (DType::F16, f16s(f32::NAN), f16s(f32::INFINITY), f16s(6e4)),
            (
                DType::BF16,
                bf16s(f32::NAN),
                bf16s(f32::INFINITY),
                bf16s(3e38),
            ),
            (DType::F8E5M2, vec![0xfe], vec![0xfc], vec![0x7b]),
            (DType::F8E4M3, vec![0xff], vec![0x7f], vec![0x7e]),
        ] {
            for kind in [Param, Moment] {
                assert!(!is_sound(kind, dtype, &nan), "{dtype:?}");
                assert!(!is_sound(kind, dtype, &infinite), "{dtype:?}");
                assert!(is_sound(kind, dtype, &sound), "{dtype:?}");
            }
            assert!(!is_sound(Buffer, dtype, &nan));
            assert!(is_sound(Const, dtype, &nan));
        }
        // A mask.
        assert!(is_sound(Buffer, DType::F32, &f32s(f32::NEG_INFINITY)));
        assert!(is_sound(Param, DType::I64, &[0xff; 8]));
    }
}
