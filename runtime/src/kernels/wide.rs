//! Element types and the three types in which kernels compute: f32 (also for half precision), f64,
//! i64 (for integers and bools). Operands are read and results are written in blocks that fit the
//! first-level cache; in between, a kernel is a loop over arrays of one wide type, which LLVM turns
//! into vector code. So a kernel is one function for all element types. In-place operands work too:
//! a block is read before it is written.

use super::convert::{
    bf16s_to_f32s, f16s_to_f32s, f32_of_bf16, f32_of_f16, f32s_to_bf16s, f32s_to_f16s,
};
use super::strides::Broadcast;
use crate::kernel::{Call, Element};
use artifact::DType;
use half::{bf16, f16};
use std::ops::Range;

/// Elements in a block: a few blocks of 8 bytes an element fit a first-level cache of 32 kB.
pub(super) const BLOCK: usize = 256;

/// A type in which kernels compute.
pub(super) trait Wide:
    Copy + Default + PartialOrd + std::fmt::Debug + Send + Sync + 'static
{
    const ZERO: Self;
    const ONE: Self;
    /// The lowest and the highest value.
    const LOWEST: Self;
    const HIGHEST: Self;
    /// The nearest value of this type; integers wrap.
    fn of<T: Scalar>(x: T) -> Self;
    fn to_f64(self) -> f64;
    fn of_f64(x: f64) -> Self;
    fn narrow<T: Scalar>(self) -> T;
    fn plus(self, other: Self) -> Self;
    fn minus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn magnitude(self) -> Self;
    fn load<T: Scalar>(x: &[T], to: &mut [Self]) {
        for (to, &x) in to.iter_mut().zip(x) {
            *to = Self::of(x);
        }
    }
    fn store<T: Scalar>(from: &[Self], y: &mut [T]) {
        for (y, &from) in y.iter_mut().zip(from) {
            *y = from.narrow();
        }
    }
    /// The larger; NaN if one is NaN.
    fn larger(self, other: Self) -> Self {
        if self > other || self.is_nan() {
            self
        } else {
            other
        }
    }
    /// The smaller; NaN if one is NaN.
    fn smaller(self, other: Self) -> Self {
        if self < other || self.is_nan() {
            self
        } else {
            other
        }
    }
    #[allow(clippy::eq_op, reason = "NaN alone differs from itself")]
    fn is_nan(self) -> bool {
        self != self
    }
    fn flag(b: bool) -> Self {
        if b { Self::ONE } else { Self::ZERO }
    }
}

/// An element type, by its conversions.
pub(super) trait Scalar: Element {
    fn f32(self) -> f32;
    fn f64(self) -> f64;
    fn i64(self) -> i64;
    fn cast_f32(x: f32) -> Self;
    fn cast_f64(x: f64) -> Self;
    fn cast_i64(x: i64) -> Self;
    fn to_f32s(x: &[Self], to: &mut [f32]) {
        for (to, &x) in to.iter_mut().zip(x) {
            *to = x.f32();
        }
    }
    fn of_f32s(from: &[f32], y: &mut [Self]) {
        for (y, &from) in y.iter_mut().zip(from) {
            *y = Self::cast_f32(from);
        }
    }
}

macro_rules! plain_scalars {
    ($($ty:ty),*) => {$(
        #[allow(clippy::unnecessary_cast, reason = "the macro casts every type to every type")]
        impl Scalar for $ty {
            fn f32(self) -> f32 { self as f32 }
            fn f64(self) -> f64 { self as f64 }
            fn i64(self) -> i64 { self as i64 }
            fn cast_f32(x: f32) -> Self { x as $ty }
            fn cast_f64(x: f64) -> Self { x as $ty }
            fn cast_i64(x: i64) -> Self { x as $ty }
        }
    )*};
}
plain_scalars!(u8, i8, i16, i32, i64, f32, f64);

macro_rules! half_scalars {
    ($($ty:ty: $wide:ident, $widen:ident, $narrow:ident);*) => {$(
        impl Scalar for $ty {
            fn f32(self) -> f32 { $wide(self) }
            fn f64(self) -> f64 { self.to_f64() }
            fn i64(self) -> i64 { self.to_f32() as i64 }
            fn cast_f32(x: f32) -> Self { Self::from_f32(x) }
            // Through f32, as in PyTorch.
            fn cast_f64(x: f64) -> Self { Self::from_f32(x as f32) }
            fn cast_i64(x: i64) -> Self { Self::from_f32(x as f32) }
            fn to_f32s(x: &[Self], to: &mut [f32]) { $widen(x, to); }
            fn of_f32s(from: &[f32], y: &mut [Self]) { $narrow(from, y); }
        }
    )*};
}
half_scalars!(
    bf16: f32_of_bf16, bf16s_to_f32s, f32s_to_bf16s;
    f16: f32_of_f16, f16s_to_f32s, f32s_to_f16s
);

impl Wide for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const LOWEST: f32 = f32::NEG_INFINITY;
    const HIGHEST: f32 = f32::INFINITY;
    fn of<T: Scalar>(x: T) -> f32 {
        x.f32()
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    fn of_f64(x: f64) -> f32 {
        x as f32
    }
    fn narrow<T: Scalar>(self) -> T {
        T::cast_f32(self)
    }
    fn plus(self, other: f32) -> f32 {
        self + other
    }
    fn minus(self, other: f32) -> f32 {
        self - other
    }
    fn times(self, other: f32) -> f32 {
        self * other
    }
    fn magnitude(self) -> f32 {
        self.abs()
    }
    fn load<T: Scalar>(x: &[T], to: &mut [f32]) {
        T::to_f32s(x, to);
    }
    fn store<T: Scalar>(from: &[f32], y: &mut [T]) {
        T::of_f32s(from, y);
    }
}

impl Wide for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const LOWEST: f64 = f64::NEG_INFINITY;
    const HIGHEST: f64 = f64::INFINITY;
    fn of<T: Scalar>(x: T) -> f64 {
        x.f64()
    }
    fn to_f64(self) -> f64 {
        self
    }
    fn of_f64(x: f64) -> f64 {
        x
    }
    fn narrow<T: Scalar>(self) -> T {
        T::cast_f64(self)
    }
    fn plus(self, other: f64) -> f64 {
        self + other
    }
    fn minus(self, other: f64) -> f64 {
        self - other
    }
    fn times(self, other: f64) -> f64 {
        self * other
    }
    fn magnitude(self) -> f64 {
        self.abs()
    }
}

impl Wide for i64 {
    const ZERO: i64 = 0;
    const ONE: i64 = 1;
    const LOWEST: i64 = i64::MIN;
    const HIGHEST: i64 = i64::MAX;
    fn of<T: Scalar>(x: T) -> i64 {
        x.i64()
    }
    fn to_f64(self) -> f64 {
        self as f64
    }
    fn of_f64(x: f64) -> i64 {
        x as i64
    }
    fn narrow<T: Scalar>(self) -> T {
        T::cast_i64(self)
    }
    fn plus(self, other: i64) -> i64 {
        self.wrapping_add(other)
    }
    fn minus(self, other: i64) -> i64 {
        self.wrapping_sub(other)
    }
    fn times(self, other: i64) -> i64 {
        self.wrapping_mul(other)
    }
    fn magnitude(self) -> i64 {
        self.wrapping_abs()
    }
}

/// Runs the body with `$W` as the wide type of an element type.
macro_rules! wide {
    ($dtype:expr, $W:ident => $body:expr) => {
        match $dtype {
            artifact::DType::F64 => {
                type $W = f64;
                $body
            }
            artifact::DType::F32 | artifact::DType::BF16 | artifact::DType::F16 => {
                type $W = f32;
                $body
            }
            _ => {
                type $W = i64;
                $body
            }
        }
    };
}
/// The same for floating-point types.
macro_rules! wide_float {
    ($dtype:expr, $W:ident => $body:expr) => {
        if $dtype == artifact::DType::F64 {
            type $W = f64;
            $body
        } else {
            type $W = f32;
            $body
        }
    };
}
/// Runs the body with `$T` as the Rust type of a floating-point element type.
macro_rules! floats {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            artifact::DType::F64 => {
                type $T = f64;
                $body
            }
            artifact::DType::F32 => {
                type $T = f32;
                $body
            }
            artifact::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            artifact::DType::F16 => {
                type $T = half::f16;
                $body
            }
            other => return Err(crate::kernels::DataError::NoKernel(other)),
        }
    };
}
/// Runs the body with `$T` as the Rust type of a number type and `$W` as its wide type.
macro_rules! every_number {
    ($dtype:expr, $T:ident, $W:ident => $body:expr) => {
        every_number!(@ $dtype, $T, $W => $body; U8 u8 i64, I8 i8 i64, I16 i16 i64, I32 i32 i64,
            I64 i64 i64,
            F16 f16 f32, BF16 bf16 f32, F32 f32 f32, F64 f64 f64)
    };
    (@ $dtype:expr, $T:ident, $W:ident => $body:expr; $($name:ident $ty:ident $wide:ident),*) => {
        match $dtype {
            $(artifact::DType::$name => {
                #[allow(unused_imports, reason = "only two of the types are half's")]
                use half::{bf16, f16};
                type $T = $ty;
                #[allow(dead_code, reason = "not every body computes")]
                type $W = $wide;
                $body
            })*
            other => return Err(crate::kernels::DataError::NoKernel(other)),
        }
    };
}
/// Runs the body with `$B` as the unsigned integer as wide as an element type.
macro_rules! bits {
    ($dtype:expr, $B:ident => $body:expr) => {
        match $dtype.bytes() {
            1 => {
                type $B = u8;
                $body
            }
            2 => {
                type $B = u16;
                $body
            }
            4 => {
                type $B = u32;
                $body
            }
            _ => {
                type $B = u64;
                $body
            }
        }
    };
}
pub(super) use {bits, every_number, floats, wide, wide_float};

macro_rules! views {
    ($($name:ident: $ty:ty),*) => {
        /// An operand, to be read in blocks.
        pub(super) enum Source<'a> {
            /// It lies on the result: read that.
            Result,
            Bool(&'a [u8]),
            $($name(&'a [$ty]),)*
        }
        /// A part of a result, written block by block at their places in the result.
        pub(super) struct Sink<'a> {
            /// Where the part begins.
            start: usize,
            part: Part<'a>,
        }
        enum Part<'a> {
            Bool(&'a mut [u8]),
            $($name(&'a mut [$ty]),)*
        }
        /// Operand `i`.
        pub(super) fn source<'a>(call: &Call<'a>, i: usize) -> Source<'a> {
            if call.inplace(i).is_some() {
                return Source::Result;
            }
            match call.in_dtype(i) {
                DType::Bool => Source::Bool(call.input(i)),
                $(<$ty as Element>::DTYPE => Source::$name(call.input(i)),)*
                other => panic!("{other:?} should have been refused when the artifact was loaded"),
            }
        }
        /// Result `j`.
        pub(super) fn sink<'a>(call: &Call<'a>, j: usize) -> Sink<'a> {
            let part = match call.out_dtype(j) {
                DType::Bool => Part::Bool(call.output(j)),
                $(<$ty as Element>::DTYPE => Part::$name(call.output(j)),)*
                other => panic!("{other:?} should have been refused when the artifact was loaded"),
            };
            Sink { start: call.output_start(j), part }
        }
        impl Source<'_> {
            /// Reads the elements from `at` on. `y` is the result on which an in-place operand
            /// lies.
            #[inline]
            pub(super) fn load<W: Wide>(&self, y: &Sink<'_>, at: usize, to: &mut [W]) {
                match self {
                    Source::Result => y.load(at, to),
                    Source::Bool(x) => load_bools(&x[at..at + to.len()], to),
                    $(Source::$name(x) => W::load(&x[at..at + to.len()], to),)*
                }
            }
        }
        impl Sink<'_> {
            /// Reads the elements from `at` on.
            pub(super) fn load<W: Wide>(&self, at: usize, to: &mut [W]) {
                let at = at - self.start;
                match &self.part {
                    Part::Bool(x) => load_bools(&x[at..at + to.len()], to),
                    $(Part::$name(x) => W::load(&x[at..at + to.len()], to),)*
                }
            }
            /// Writes the elements from `at` on.
            #[inline]
            pub(super) fn store<W: Wide>(&mut self, at: usize, from: &[W]) {
                let at = at - self.start;
                match &mut self.part {
                    Part::Bool(y) => {
                        for (y, &from) in y[at..at + from.len()].iter_mut().zip(from) {
                            *y = u8::from(from != W::ZERO);
                        }
                    }
                    $(Part::$name(y) => W::store(from, &mut y[at..at + from.len()]),)*
                }
            }
        }
    };
}
views!(U8: u8, I8: i8, I16: i16, I32: i32, I64: i64, F16: f16, BF16: bf16, F32: f32, F64: f64);

fn load_bools<W: Wide>(x: &[u8], to: &mut [W]) {
    for (to, &x) in to.iter_mut().zip(x) {
        *to = W::flag(x != 0);
    }
}

impl Sink<'_> {
    /// No result, for operands that do not lie in place.
    pub(super) fn none() -> Sink<'static> {
        Sink {
            start: 0,
            part: Part::Bool(&mut []),
        }
    }
}

impl Source<'_> {
    /// Reads one element.
    pub(super) fn one<W: Wide>(&self, y: &Sink<'_>, at: usize) -> W {
        let mut x = [W::ZERO];
        self.load(y, at, &mut x);
        x[0]
    }
    /// Reads the elements that broadcast to a result's elements from `at` on.
    #[inline]
    pub(super) fn load_broadcast<W: Wide>(
        &self,
        order: &Broadcast,
        y: &Sink<'_>,
        at: usize,
        to: &mut [W],
    ) {
        if order.whole {
            return self.load(y, at, to);
        }
        let n = to.len();
        order.runs(at, n, |range, from, follow| {
            if follow {
                self.load(y, from, &mut to[range]);
            } else {
                let x: W = self.one(y, from);
                to[range].fill(x);
            }
        });
    }
}

/// The blocks of `0..n`: the start and length of each.
pub(super) fn blocks(n: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..n).step_by(BLOCK).map(move |at| (at, BLOCK.min(n - at)))
}

/// The blocks of a range.
pub(super) fn blocks_of(range: Range<usize>) -> impl Iterator<Item = (usize, usize)> {
    let end = range.end;
    range
        .step_by(BLOCK)
        .map(move |at| (at, BLOCK.min(end - at)))
}

/// Writes `f` of the operands' elements, broadcast to the result's shape, to result 0.
pub(super) fn map<W: Wide, const N: usize>(call: &Call<'_>, f: impl Fn([W; N]) -> W) -> super::Ran {
    let shape = call.out_shape(0);
    let sources: [Source<'_>; N] = std::array::from_fn(|i| source(call, i));
    let orders: [Broadcast; N] = std::array::from_fn(|i| Broadcast::new(call.in_shape(i), shape));
    let mut y = sink(call, 0);
    let mut xs = [[W::ZERO; BLOCK]; N];
    let mut ys = [W::ZERO; BLOCK];
    for (at, len) in blocks_of(call.elements()) {
        for i in 0..N {
            sources[i].load_broadcast(&orders[i], &y, at, &mut xs[i][..len]);
        }
        for j in 0..len {
            ys[j] = f(std::array::from_fn(|i| xs[i][j]));
        }
        y.store(at, &ys[..len]);
    }
    Ok(())
}
