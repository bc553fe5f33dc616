//! Functions of floating-point numbers. LLVM can vectorise the functions of f32 (no branches, no
//! calls, no table); their error is a few units in the last place. The functions of f64 are the
//! standard library's.

use super::product::Tiled;
use super::wide::Scalar;
use std::ops::{Add, Div, Mul, Neg, Sub};

/// A floating-point type that kernels compute in.
pub(super) trait Real:
    Tiled
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    fn exp_of(self) -> Self;
    fn ln_of(self) -> Self;
    fn sqrt_of(self) -> Self;
    fn tanh_of(self) -> Self;
    fn erf_of(self) -> Self;
    fn atan_of(self) -> Self;
    fn sin_of(self) -> Self;
    fn cos_of(self) -> Self;
    fn pow_of(self, y: Self) -> Self;
    /// `self * y + z`, rounded once.
    fn fma_of(self, y: Self, z: Self) -> Self;
}

/// A floating-point element type and the type in which its products are computed: the same type,
/// except for half precision, which is converted through extra memory, `room`.
pub(super) trait Float: Scalar {
    type Wide: Real + Scalar;
    const IS_BF16: bool;
    /// The elements; in `room` if they must be widened.
    fn widened<'a>(x: &'a [Self], room: &'a mut [Self::Wide]) -> &'a [Self::Wide];
    /// Lets `f` write the elements; through `room` if they must be rounded.
    fn rounded(y: &mut [Self], room: &mut [Self::Wide], f: impl FnOnce(&mut [Self::Wide]));
    /// The room that `n` elements need.
    fn room(n: usize) -> usize;
}

macro_rules! float {
    ($($ty:ident),*) => {$(
        impl Float for $ty {
            type Wide = $ty;
            const IS_BF16: bool = false;
            fn widened<'a>(x: &'a [$ty], _: &'a mut [$ty]) -> &'a [$ty] {
                x
            }
            fn rounded(y: &mut [$ty], _: &mut [$ty], f: impl FnOnce(&mut [$ty])) {
                f(y);
            }
            fn room(_: usize) -> usize {
                0
            }
        }
    )*};
}
float!(f32, f64);

macro_rules! half_float {
    ($($ty:ident: $is_bf16:literal),*) => {$(
        impl Float for half::$ty {
            type Wide = f32;
            const IS_BF16: bool = $is_bf16;
            fn widened<'a>(x: &'a [Self], room: &'a mut [f32]) -> &'a [f32] {
                Self::to_f32s(x, &mut room[..x.len()]);
                &room[..x.len()]
            }
            fn rounded(y: &mut [Self], room: &mut [f32], f: impl FnOnce(&mut [f32])) {
                let room = &mut room[..y.len()];
                f(room);
                Self::of_f32s(room, y);
            }
            fn room(n: usize) -> usize {
                n
            }
        }
    )*};
}
half_float!(bf16: true, f16: false);

macro_rules! real {
    ($ty:ident, $exp:path, $tanh:path, $erf:path) => {
        impl Real for $ty {
            #[inline(always)]
            fn exp_of(self) -> $ty {
                $exp(self)
            }
            fn ln_of(self) -> $ty {
                self.ln()
            }
            fn sqrt_of(self) -> $ty {
                self.sqrt()
            }
            fn tanh_of(self) -> $ty {
                $tanh(self)
            }
            fn erf_of(self) -> $ty {
                $erf(self)
            }
            fn atan_of(self) -> $ty {
                self.atan()
            }
            fn sin_of(self) -> $ty {
                self.sin()
            }
            fn cos_of(self) -> $ty {
                self.cos()
            }
            fn pow_of(self, y: $ty) -> $ty {
                self.powf(y)
            }
            #[inline(always)]
            fn fma_of(self, y: $ty, z: $ty) -> $ty {
                self.mul_add(y, z)
            }
        }
    };
}
real!(f32, exp32, tanh32, erf32);
real!(f64, f64::exp, f64::tanh, libm::erf);

#[inline(always)]
pub(super) fn exp<R: Real>(x: R) -> R {
    x.exp_of()
}
pub(super) fn sqrt<R: Real>(x: R) -> R {
    x.sqrt_of()
}
/// `x * y + z`, rounded once.
#[inline(always)]
pub(super) fn fma<R: Real>(x: R, y: R, z: R) -> R {
    x.fma_of(y, z)
}
pub(super) fn tanh<R: Real>(x: R) -> R {
    x.tanh_of()
}
pub(super) fn erf<R: Real>(x: R) -> R {
    x.erf_of()
}
/// A constant.
pub(super) fn c<R: Real>(x: f64) -> R {
    R::of_f64(x)
}
pub(super) fn sigmoid<R: Real>(x: R) -> R {
    R::ONE / (R::ONE + exp(-x))
}
pub(super) fn gelu<R: Real>(x: R) -> R {
    c::<R>(0.5) * x * (R::ONE + erf(x * c(std::f64::consts::FRAC_1_SQRT_2)))
}
pub(super) fn gelu_bwd<R: Real>(dy: R, x: R) -> R {
    let cdf = c::<R>(0.5) * (R::ONE + erf(x * c(std::f64::consts::FRAC_1_SQRT_2)));
    let pdf = exp(c::<R>(-0.5) * x * x)
        * c(0.5 * std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2);
    dy * (cdf + x * pdf)
}
/// sqrt(2 / pi)
const BETA: f64 = std::f64::consts::SQRT_2 * std::f64::consts::FRAC_2_SQRT_PI * 0.5;
const KAPPA: f64 = 0.044715;
pub(super) fn gelu_tanh<R: Real>(x: R) -> R {
    let inner = c::<R>(BETA) * (x + c::<R>(KAPPA) * x * x * x);
    c::<R>(0.5) * x * (R::ONE + tanh(inner))
}
pub(super) fn gelu_tanh_bwd<R: Real>(dy: R, x: R) -> R {
    let t = tanh(c::<R>(BETA) * (x + c::<R>(KAPPA) * x * x * x));
    let inner = c::<R>(BETA) * (R::ONE + c::<R>(3.0 * KAPPA) * x * x);
    dy * c(0.5) * (R::ONE + t + x * (R::ONE - t * t) * inner)
}

/// `x` within `lo..=hi`; NaN stays.
#[inline(always)]
fn within(x: f32, lo: f32, hi: f32) -> f32 {
    let x = if x < lo { lo } else { x };
    if hi < x { hi } else { x }
}

/// `y`; or 1 or -1 if `x` is so large that these are the nearest numbers.
fn saturated(y: f32, x: f32, from: f32) -> f32 {
    let y = if from <= x { 1.0 } else { y };
    if x <= -from { -1.0 } else { y }
}

/// e^x after Cephes' `expf`: x = n ln 2 + r, a polynomial in r, and n added to the exponent. The
/// polynomial is the best of degree 6, whose relative error is 3e-9, a twentieth of a unit in the
/// last place.
#[inline(always)]
fn exp32(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    // ln 2 in two parts, the first with few enough bits that its products with n are exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Below -104 the result is 0, above 89 it is infinite.
    let x = within(x, -104.0, 89.0);
    let shifted = x * std::f32::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.381_454e-3;
    for c in [8.368_745e-3, 4.166_839e-2, 1.666_652_1e-1, 0.499_999_94] {
        p = p * r + c;
    }
    let y = p * r * r + r + 1.0;
    // 2^n in two factors: neither overflows unless the result does.
    let n = (shifted.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    let half = n >> 1;
    y * power(half) * power(n.wrapping_sub(half))
}

/// tanh as a ratio of polynomials (Eigen's): odd of degree 13 over even of degree 6.
fn tanh32(x: f32) -> f32 {
    let given = x;
    let x = within(x, -7.905_311, 7.905_311);
    let x2 = x * x;
    let mut p = -2.760_768_5e-16;
    for c in [
        2.000_188e-13,
        -8.604_672e-11,
        5.122_297e-8,
        1.485_722_4e-5,
        6.372_619_3e-4,
        4.893_524_6e-3,
    ] {
        p = p * x2 + c;
    }
    let mut q = 1.198_258_4e-6;
    for c in [1.185_347_1e-4, 2.268_434_6e-3, 4.893_525e-3] {
        q = q * x2 + c;
    }
    saturated(x * p / q, given, 9.02)
}

/// erf as a ratio of polynomials (Eigen's): odd of degree 13 over even of degree 8.
fn erf32(x: f32) -> f32 {
    let given = x;
    let x = within(x, -4.0, 4.0);
    let x2 = x * x;
    let mut p = -2.726_142_4e-10;
    for c in [
        2.770_681_5e-8,
        -2.101_024e-6,
        -5.692_506_3e-5,
        -7.349_906_3e-4,
        -2.954_6e-3,
        -1.609_603_3e-2,
    ] {
        p = p * x2 + c;
    }
    let mut q = -1.456_607_2e-5;
    for c in [
        -2.133_740_6e-4,
        -1.682_827e-3,
        -7.373_329e-3,
        -1.426_473_9e-2,
    ] {
        q = q * x2 + c;
    }
    saturated(x * p / q, given, 3.832_507)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f32_functions_follow_f64() {
        let mut worst = [0f64; 3];
        for i in -400_000..=400_000 {
            let x = i as f32 * 2.6e-4;
            let wide = f64::from(x);
            let exact = [wide.exp(), wide.tanh(), libm::erf(wide)];
            let ours = [exp32(x), tanh32(x), erf32(x)];
            for ((worst, exact), ours) in worst.iter_mut().zip(exact).zip(ours) {
                if exact.abs() < f64::from(f32::MAX) && 1e-37 < exact.abs() {
                    *worst = worst.max((f64::from(ours) - exact).abs() / exact.abs());
                }
            }
        }
        assert!(worst.iter().all(|&w| w < 6e-7), "{worst:?}");
    }

    #[test]
    fn f32_functions_at_the_ends() {
        let inf = f32::INFINITY;
        assert_eq!(
            [
                exp32(0.0),
                exp32(-inf),
                exp32(inf),
                exp32(-200.0),
                exp32(89.0)
            ],
            [1.0, 0.0, inf, 0.0, inf]
        );
        assert!(exp32(88.7) < inf && 0.0 < exp32(-103.0));
        assert_eq!([tanh32(0.0), tanh32(inf), tanh32(-inf)], [0.0, 1.0, -1.0]);
        assert_eq!([erf32(0.0), erf32(inf), erf32(-inf)], [0.0, 1.0, -1.0]);
        assert!(
            [exp32(f32::NAN), tanh32(f32::NAN), erf32(f32::NAN)]
                .iter()
                .all(|y| y.is_nan())
        );
    }
}
