//! Half precision to f32 and back, in vectors. Numbers are those of the crate `half`, which
//! converts one at a time: without branches, and in integers where a machine would need
//! instructions of its own.

use half::{bf16, f16};
use pulp::Arch;

/// With fewer numbers, choosing instructions takes longer than the conversion.
const FEW: usize = 64;

/// Converts each number.
#[inline(always)]
fn each<A: Copy, B>(from: &[A], to: &mut [B], convert: impl Fn(A) -> B) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to = convert(from);
    }
}

/// The same by the instructions of this machine.
#[inline(always)]
fn in_vectors<A: Copy, B>(from: &[A], to: &mut [B], convert: impl Fn(A) -> B) {
    if from.len() < FEW {
        return each(from, to, convert);
    }
    Arch::new().dispatch(
        #[inline(always)]
        || each(from, to, convert),
    );
}

/// Short, and vectors of any machine do it: no instructions are chosen.
#[inline]
pub(super) fn bf16s_to_f32s(from: &[bf16], to: &mut [f32]) {
    each(from, to, f32_of_bf16);
}
#[inline(never)]
pub(super) fn f32s_to_bf16s(from: &[f32], to: &mut [bf16]) {
    in_vectors(from, to, bf16_of_f32);
}
#[inline(never)]
pub(super) fn f16s_to_f32s(from: &[f16], to: &mut [f32]) {
    in_vectors(from, to, f32_of_f16);
}
#[inline(never)]
pub(super) fn f32s_to_f16s(from: &[f32], to: &mut [f16]) {
    in_vectors(from, to, f16_of_f32);
}

#[inline(always)]
pub(super) fn f32_of_bf16(x: bf16) -> f32 {
    let nan = 0x7F80 < x.to_bits() & 0x7FFF;
    let quiet = if nan { 0x0040 } else { 0 };
    f32::from_bits(u32::from(x.to_bits() | quiet) << 16)
}

/// To the nearest, ties to even.
#[inline(always)]
fn bf16_of_f32(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1));
    let nan = 0x7F80_0000 < bits & 0x7FFF_FFFF;
    bf16::from_bits((if nan { bits | 0x0040_0000 } else { rounded } >> 16) as u16)
}

/// The bits of infinity.
const F16_INFINITY: u32 = 0x7C00;
/// Bits of an f32 are so many more.
const SHIFT: u32 = f32::MANTISSA_DIGITS - f16::MANTISSA_DIGITS;
/// The difference of the exponents' biases.
const BIAS: u32 = ((f32::MAX_EXP - f16::MAX_EXP) as u32) << (f32::MANTISSA_DIGITS - 1);

#[inline(always)]
pub(super) fn f32_of_f16(x: f16) -> f32 {
    let bits = u32::from(x.to_bits());
    let (sign, magnitude) = (bits & 0x8000, bits & 0x7FFF);
    // A number that is not normal is a multiple of the smallest.
    let small = (magnitude as f32 * (0.5f32).powi(24)).to_bits();
    let normal = (magnitude << SHIFT) + BIAS;
    let quiet = if F16_INFINITY < magnitude {
        0x0040_0000
    } else {
        0
    };
    let wide = match magnitude {
        0..0x0400 => small,
        0x0400..F16_INFINITY => normal,
        _ => (normal + BIAS) | quiet,
    };
    f32::from_bits(sign << 16 | wide)
}

/// To the nearest, ties to even.
#[inline(always)]
fn f16_of_f32(x: f32) -> f16 {
    let (sign, magnitude) = (x.to_bits() & 0x8000_0000, x.to_bits() & 0x7FFF_FFFF);
    // The sum's last digit is that of the smallest f16.
    let small = (f32::from_bits(magnitude) + 0.5)
        .to_bits()
        .wrapping_sub(0.5f32.to_bits());
    let half = (1 << (SHIFT - 1)) - 1 + (magnitude >> SHIFT & 1);
    let normal = magnitude.wrapping_sub(BIAS).wrapping_add(half) >> SHIFT;
    let nan = F16_INFINITY | 0x0200 | (magnitude >> SHIFT & 0x03FF);
    let narrow = match magnitude {
        0..SMALLEST_NORMAL => small,
        SMALLEST_NORMAL..TOO_LARGE => normal,
        TOO_LARGE..=INFINITY => F16_INFINITY,
        _ => nan,
    };
    f16::from_bits((sign >> 16 | narrow) as u16)
}

/// The bits of 2^-14 and of 2^16. The largest numbers below that are rounded to infinity.
const SMALLEST_NORMAL: u32 = 0x3880_0000;
const TOO_LARGE: u32 = 0x4780_0000;
const INFINITY: u32 = 0x7F80_0000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_crate() {
        for bits in 0..=u16::MAX {
            let (wide, ours) = (bf16::from_bits(bits), f32_of_bf16(bf16::from_bits(bits)));
            assert_eq!(ours.to_bits(), wide.to_f32().to_bits(), "{bits:#x}");
            let (wide, ours) = (f16::from_bits(bits), f32_of_f16(f16::from_bits(bits)));
            assert_eq!(ours.to_bits(), wide.to_f32().to_bits(), "{bits:#x}");
        }
        // Around the borders between two halves, and in the middle.
        let lows = [
            0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000,
        ];
        for x in (0..=0xFFFF).flat_map(|high| lows.map(|low| f32::from_bits(high << 16 | low))) {
            let (ours, theirs) = (bf16_of_f32(x), bf16::from_f32(x));
            assert_eq!(ours.to_bits(), theirs.to_bits(), "{:#x}", x.to_bits());
            let (ours, theirs) = (f16_of_f32(x), f16::from_f32(x));
            assert_eq!(ours.to_bits(), theirs.to_bits(), "{:#x}", x.to_bits());
        }
    }
}
