//! Vectors of numbers, for loops that choose their registers.

use super::wide::Wide;
use pulp::Simd;

/// A type with vectors.
pub(super) trait Vectors: Wide {
    /// A vector.
    type V<S: Simd>: Copy;
    fn lanes<S: Simd>() -> usize;
    fn splat<S: Simd>(simd: S, x: Self) -> Self::V<S>;
    /// The whole vectors of a slice.
    fn vectors<S: Simd>(from: &[Self]) -> &[Self::V<S>];
    fn write<S: Simd>(to: &mut [Self], v: Self::V<S>);
    /// a * b + c
    fn multiply_add<S: Simd>(simd: S, a: Self::V<S>, b: Self::V<S>, c: Self::V<S>) -> Self::V<S>;
    fn sum<S: Simd>(simd: S, v: Self::V<S>) -> Self;
}

macro_rules! vectors {
    ($ty:ident, $v:ident, $splat:ident, $slices:ident, $mut_slices:ident, $fma:ident,
        $sum:ident) => {
        impl Vectors for $ty {
            type V<S: Simd> = S::$v;
            #[inline(always)]
            fn lanes<S: Simd>() -> usize {
                size_of::<S::$v>() / size_of::<$ty>()
            }
            #[inline(always)]
            fn splat<S: Simd>(simd: S, x: $ty) -> S::$v {
                simd.$splat(x)
            }
            #[inline(always)]
            fn vectors<S: Simd>(from: &[$ty]) -> &[S::$v] {
                S::$slices(from).0
            }
            #[inline(always)]
            fn write<S: Simd>(to: &mut [$ty], v: S::$v) {
                S::$mut_slices(&mut to[..Self::lanes::<S>()]).0[0] = v;
            }
            #[inline(always)]
            fn multiply_add<S: Simd>(simd: S, a: S::$v, b: S::$v, c: S::$v) -> S::$v {
                simd.$fma(a, b, c)
            }
            #[inline(always)]
            fn sum<S: Simd>(simd: S, v: S::$v) -> $ty {
                simd.$sum(v)
            }
        }
    };
}
vectors!(
    f32,
    f32s,
    splat_f32s,
    as_simd_f32s,
    as_mut_simd_f32s,
    mul_add_f32s,
    reduce_sum_f32s
);
vectors!(
    f64,
    f64s,
    splat_f64s,
    as_simd_f64s,
    as_mut_simd_f64s,
    mul_add_f64s,
    reduce_sum_f64s
);
