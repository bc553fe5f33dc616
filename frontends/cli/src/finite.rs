//! Checks whether a state should be saved: training from a checkpoint with NaNs gives NaNs.
//!
//! Without its sign, a number's bits are a smaller integer than those of infinity, and a NaN's are
//! a larger one. So a tensor's largest integer tells, and finding it costs little beside copying.

use artifact::{DType, StateKind};
use half::{bf16, f16};

/// True if training can continue from a state's values. Parameters and moments must be finite; a
/// buffer may hold infinities (a mask does) but no NaN; constants and random states do not change.
pub(crate) fn is_sound(kind: StateKind, dtype: DType, bytes: &[u8]) -> bool {
    let Some((largest, infinity)) = largest(dtype, bytes) else {
        return true;
    };
    match kind {
        StateKind::Param | StateKind::Moment => largest < infinity,
        StateKind::Buffer => largest <= infinity,
        StateKind::Const | StateKind::Rng => true,
    }
}

/// The largest element's bits without the sign, and those of infinity. `None` for integers.
fn largest(dtype: DType, bytes: &[u8]) -> Option<(u64, u64)> {
    Some(match dtype {
        DType::F64 => (
            (chunks(bytes).map(|b| u64::from_le_bytes(b) & (u64::MAX >> 1)))
                .max()
                .unwrap_or(0),
            f64::INFINITY.to_bits(),
        ),
        DType::F32 => (
            (chunks(bytes).map(|b| u32::from_le_bytes(b) & (u32::MAX >> 1)))
                .max()
                .map_or(0, u64::from),
            f32::INFINITY.to_bits().into(),
        ),
        DType::F16 => (halves(bytes), f16::INFINITY.to_bits().into()),
        DType::BF16 => (halves(bytes), bf16::INFINITY.to_bits().into()),
        // This format has no infinities: the value would be a NaN's, and is one less here.
        DType::F8E4M3 => (eighths(bytes) * 2, 0x7f * 2 - 1),
        DType::F8E5M2 => (eighths(bytes), 0x7c),
        DType::Bool | DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64 => return None,
    })
}

fn halves(bytes: &[u8]) -> u64 {
    let bits = chunks(bytes).map(|b| u16::from_le_bytes(b) & (u16::MAX >> 1));
    bits.max().map_or(0, u64::from)
}

fn eighths(bytes: &[u8]) -> u64 {
    let bits = bytes.iter().map(|byte| byte & (u8::MAX >> 1));
    bits.max().map_or(0, u64::from)
}

fn chunks<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks().0.iter().copied()
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
