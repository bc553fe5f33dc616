//! Arithmetic on bits: integers of a width, floats of a type, one rounding.

use super::parse::Ty;

/// The lowest `bits` bits.
pub(super) fn low(bits: u32, v: u64) -> u64 {
    if bits < 64 { v & ((1 << bits) - 1) } else { v }
}
/// The lowest `bits` bits, as a signed number.
pub(super) fn signed(bits: u32, v: u64) -> i64 {
    if bits < 64 {
        ((v << (64 - bits)) as i64) >> (64 - bits)
    } else {
        v as i64
    }
}
pub(super) fn f32_of(v: u64) -> f32 {
    f32::from_bits(v as u32)
}

/// A float of any type, exactly.
pub(super) fn wide(ty: Ty, v: u64) -> f64 {
    match ty {
        Ty::F64 => f64::from_bits(v),
        Ty::F16 => half::f16::from_bits(v as u16).to_f64(),
        Ty::Bf16 => f64::from(half::bf16::from_bits(v as u16).to_f32()),
        _ => f64::from(f32_of(v)),
    }
}
/// A number rounded once to the nearest float of a type, ties to even.
pub(super) fn narrow(ty: Ty, x: f64) -> u64 {
    match ty {
        Ty::F64 => x.to_bits(),
        Ty::F16 => u64::from(half::f16::from_f32(odd(x)).to_bits()),
        Ty::Bf16 => u64::from(half::bf16::from_f32(odd(x)).to_bits()),
        _ => u64::from((x as f32).to_bits()),
    }
}
/// Rounds to f32 and sets the last bit if the result is not exact: rounding this again gives the
/// same as rounding once. Boldo and Melquiond, "When double rounding is odd", 2005.
fn odd(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || x.is_nan() || x.is_infinite() {
        return near;
    }
    let toward_zero = if x.abs() < f64::from(near).abs() {
        near.to_bits() - 1
    } else {
        near.to_bits()
    };
    f32::from_bits(toward_zero | 1)
}
/// a + b; the last bit is set if the result is not exact.
pub(super) fn odd_sum(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let part = sum - a;
    let lost = (a - (sum - part)) + (b - part);
    if lost == 0.0 || !sum.is_finite() || sum.to_bits() & 1 == 1 {
        return sum;
    }
    let up = (0.0 < lost) == (0.0 < sum);
    f64::from_bits(if up {
        sum.to_bits() + 1
    } else {
        sum.to_bits() - 1
    })
}
/// With `ftz`, subnormals of f32 become zero with their sign.
pub(super) fn flushed(x: f32, ftz: bool) -> f32 {
    if ftz && x.is_subnormal() {
        0f32.copysign(x)
    } else {
        x
    }
}
/// The smaller of two floats, or the larger. If one is NaN, the other, or NaN with `nan`. -0 is
/// less than 0.
pub(super) fn extreme(a: f64, b: f64, larger: bool, nan: bool) -> f64 {
    if a.is_nan() || b.is_nan() {
        return match () {
            () if nan => f64::NAN,
            () if a.is_nan() => b,
            () => a,
        };
    }
    let less = a < b || (a == b && a.is_sign_negative());
    if less == larger { b } else { a }
}
