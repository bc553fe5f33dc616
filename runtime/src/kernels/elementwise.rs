//! Element by element: one operand, an operand and a number, two broadcast operands, derivatives.

use super::Ran;
use super::math::{self, Real};
use super::signature::{Checked, Signature, broadcast_shapes, ensure, is_float, is_integer};
use super::wide::{Wide, map, wide, wide_float};
use crate::kernel::Call;
use artifact::{Attr, DType};

// --- checks ---

pub(super) fn is_number(dtype: DType) -> bool {
    is_float(dtype) || is_integer(dtype)
}
pub(super) fn is_any(dtype: DType) -> bool {
    is_number(dtype) || dtype == DType::Bool
}
fn is_bits(dtype: DType) -> bool {
    is_integer(dtype) || dtype == DType::Bool
}
fn same(s: &Signature<'_>, fits: fn(DType) -> bool) -> Checked {
    s.has_kernel(0, fits)?;
    s.results(&[(s.dtype(0), s.shape(0))])
}
pub(super) fn check_floats(s: &Signature<'_>) -> Checked {
    same(s, is_float)
}
pub(super) fn check_numbers(s: &Signature<'_>) -> Checked {
    same(s, is_number)
}
pub(super) fn check_signed(s: &Signature<'_>) -> Checked {
    same(s, is_number)
}
pub(super) fn check_bitwise(s: &Signature<'_>) -> Checked {
    same(s, is_bits)
}
pub(super) fn check_gelu(s: &Signature<'_>) -> Checked {
    s.bool("tanh")?;
    same(s, is_float)
}
pub(super) fn check_predicate(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_any)?;
    s.results(&[(DType::Bool, s.shape(0))])
}
pub(super) fn check_cast(s: &Signature<'_>) -> Checked {
    let dtype = s.dtype_attr("dtype")?;
    s.has_kernel(0, is_any)?;
    ensure(is_any(dtype), || format!("no kernel for {dtype:?}"))?;
    s.results(&[(dtype, s.shape(0))])
}
pub(super) fn check_clamp(s: &Signature<'_>) -> Checked {
    s.number("min", DType::F32)?;
    s.number("max", DType::F32)?;
    same(s, is_number)
}
pub(super) fn check_scalar(s: &Signature<'_>) -> Checked {
    s.number("value", s.dtype(0))?;
    same(s, is_number)
}
pub(super) fn check_float_scalar(s: &Signature<'_>) -> Checked {
    s.number("value", s.dtype(0))?;
    same(s, is_float)
}
pub(super) fn check_pow_scalar(s: &Signature<'_>) -> Checked {
    check_scalar(s)?;
    let fits = is_float(s.dtype(0)) || 0 <= s.int("value")?;
    ensure(fits, || "integers have no negative powers".into())
}
pub(super) fn check_compare_scalar(s: &Signature<'_>) -> Checked {
    s.number("value", s.dtype(0))?;
    check_predicate(s)
}
fn binary(s: &Signature<'_>, fits: fn(DType) -> bool, result: Option<DType>) -> Checked {
    s.has_kernel(0, fits)?;
    s.expect_dtype(0, 1)?;
    s.results(&[(
        result.unwrap_or(s.dtype(0)),
        &broadcast_shapes(s.shape(0), s.shape(1))?,
    )])
}
pub(super) fn check_binary(s: &Signature<'_>) -> Checked {
    binary(s, is_any, None)
}
pub(super) fn check_binary_numbers(s: &Signature<'_>) -> Checked {
    binary(s, is_number, None)
}
pub(super) fn check_binary_floats(s: &Signature<'_>) -> Checked {
    binary(s, is_float, None)
}
pub(super) fn check_binary_bitwise(s: &Signature<'_>) -> Checked {
    binary(s, is_bits, None)
}
pub(super) fn check_compare(s: &Signature<'_>) -> Checked {
    binary(s, is_any, Some(DType::Bool))
}
pub(super) fn check_select(s: &Signature<'_>) -> Checked {
    s.expect(0, DType::Bool)?;
    s.expect_dtype(1, 2)?;
    s.has_kernel(1, is_any)?;
    let shape = broadcast_shapes(&broadcast_shapes(s.shape(0), s.shape(1))?, s.shape(2))?;
    s.results(&[(s.dtype(1), &shape)])
}
pub(super) fn check_derivative(s: &Signature<'_>) -> Checked {
    s.expect_same(0, 1)?;
    same(s, is_float)
}
pub(super) fn check_gelu_bwd(s: &Signature<'_>) -> Checked {
    s.bool("tanh")?;
    check_derivative(s)
}
pub(super) fn check_threshold_bwd(s: &Signature<'_>) -> Checked {
    s.number("value", s.dtype(0))?;
    check_derivative(s)
}

// --- one operand ---

/// Kernels `y = f(x)` over every number type.
macro_rules! numbers {
    ($($name:ident: $x:ident => $y:expr;)*) => {$(
        pub(super) fn $name(call: &Call<'_>) -> Ran {
            wide!(call.out_dtype(0), W => map(call, |[$x]: [W; 1]| $y))
        }
    )*};
}
/// Kernels `y = f(x)` over the floating-point types.
macro_rules! reals {
    ($($name:ident: $x:ident => $y:expr;)*) => {$(
        pub(super) fn $name(call: &Call<'_>) -> Ran {
            fn f<R: Real>($x: R) -> R {
                $y
            }
            wide_float!(call.out_dtype(0), W => map(call, |[x]: [W; 1]| f(x)))
        }
    )*};
}
numbers! {
    neg: x => negative(x);
    abs: x => x.magnitude();
    sign: x => signum(x);
    relu: x => positive(x);
}
reals! {
    exp: x => math::exp(x);
    log: x => x.ln_of();
    sqrt: x => x.sqrt_of();
    rsqrt: x => R::ONE / x.sqrt_of();
    reciprocal: x => R::ONE / x;
    tanh: x => math::tanh(x);
    sigmoid: x => math::sigmoid(x);
    sin: x => x.sin_of();
    cos: x => x.cos_of();
    atan: x => x.atan_of();
    erf: x => math::erf(x);
    silu: x => x / (R::ONE + math::exp(-x));
}
/// By a product: for an x of 0.0, `0 - x` is 0.0, but the result should be -0.0.
fn negative<W: Wide>(x: W) -> W {
    x.times(W::ZERO.minus(W::ONE))
}
/// -1, 0 or 1; 0 for NaN.
fn signum<W: Wide>(x: W) -> W {
    W::flag(W::ZERO < x).minus(W::flag(x < W::ZERO))
}
/// NaN stays.
fn positive<W: Wide>(x: W) -> W {
    if x < W::ZERO { W::ZERO } else { x }
}
pub(super) fn gelu(call: &Call<'_>) -> Ran {
    match call.bool("tanh") {
        true => wide_float!(call.out_dtype(0), W => map(call, |[x]: [W; 1]| math::gelu_tanh(x))),
        false => wide_float!(call.out_dtype(0), W => map(call, |[x]: [W; 1]| math::gelu(x))),
    }
}
pub(super) fn bitwise_not(call: &Call<'_>) -> Ran {
    match call.out_dtype(0) {
        DType::Bool => map(call, |[x]: [i64; 1]| 1 - x),
        _ => map(call, |[x]: [i64; 1]| !x),
    }
}
pub(super) fn logical_not(call: &Call<'_>) -> Ran {
    wide!(call.in_dtype(0), W => map(call, |[x]: [W; 1]| W::flag(x == W::ZERO)))
}
pub(super) fn cast(call: &Call<'_>) -> Ran {
    match (call.in_dtype(0), call.out_dtype(0)) {
        // A small number is true, even if it rounds to zero in the result's wide type.
        (from, DType::Bool) => wide!(from, W => map(call, |[x]: [W; 1]| x)),
        (_, to) => wide!(to, W => map(call, |[x]: [W; 1]| x)),
    }
}
pub(super) fn clamp(call: &Call<'_>) -> Ran {
    if !is_float(call.out_dtype(0)) {
        // Bounds may be infinite for integers too: casts saturate.
        let (lo, hi) = (number::<i64>(call, "min"), number::<i64>(call, "max"));
        return map(call, |[x]: [i64; 1]| x.max(lo).min(hi));
    }
    wide_float!(call.out_dtype(0), W => {
        let (lo, hi) = (number::<W>(call, "min"), number::<W>(call, "max"));
        map(call, |[x]: [W; 1]| {
            let x = if x < lo { lo } else { x };
            if hi < x { hi } else { x }
        })
    })
}

// --- an operand and a number ---

/// A number attribute in a wide type.
pub(super) fn number<W: Wide>(call: &Call<'_>, key: &str) -> W {
    match *call.attr(key) {
        Attr::Int(i) => W::of(i),
        _ => W::of_f64(call.float(key)),
    }
}
macro_rules! scalars {
    ($($name:ident: $x:ident, $v:ident => $y:expr;)*) => {$(
        pub(super) fn $name(call: &Call<'_>) -> Ran {
            wide!(call.in_dtype(0), W => {
                let $v = number::<W>(call, "value");
                map(call, |[$x]: [W; 1]| $y)
            })
        }
    )*};
}
scalars! {
    add_scalar: x, v => x.plus(v);
    mul_scalar: x, v => x.times(v);
    rsub_scalar: x, v => v.minus(x);
    eq_scalar: x, v => W::flag(x == v);
    ne_scalar: x, v => W::flag(x != v);
    lt_scalar: x, v => W::flag(x < v);
    le_scalar: x, v => W::flag(x <= v);
    gt_scalar: x, v => W::flag(v < x);
    ge_scalar: x, v => W::flag(v <= x);
}
pub(super) fn div_scalar(call: &Call<'_>) -> Ran {
    wide_float!(call.out_dtype(0), W => {
        let v = number::<W>(call, "value");
        map(call, |[x]: [W; 1]| x / v)
    })
}
pub(super) fn pow_scalar(call: &Call<'_>) -> Ran {
    fn real<R: Real>(call: &Call<'_>) -> Ran {
        // The powers that PyTorch computes without pow.
        match call.float("value") {
            2.0 => map(call, |[x]: [R; 1]| x * x),
            3.0 => map(call, |[x]: [R; 1]| x * x * x),
            0.5 => map(call, |[x]: [R; 1]| x.sqrt_of()),
            -0.5 => map(call, |[x]: [R; 1]| R::ONE / x.sqrt_of()),
            -1.0 => map(call, |[x]: [R; 1]| R::ONE / x),
            -2.0 => map(call, |[x]: [R; 1]| R::ONE / (x * x)),
            v => map(call, |[x]: [R; 1]| x.pow_of(R::of_f64(v))),
        }
    }
    if !is_float(call.out_dtype(0)) {
        let exponent = call.int("value");
        return map(call, |[x]: [i64; 1]| integer_power(x, exponent));
    }
    wide_float!(call.out_dtype(0), W => real::<W>(call))
}
fn integer_power(mut x: i64, mut exponent: i64) -> i64 {
    let mut y = 1i64;
    while 0 < exponent {
        if exponent & 1 == 1 {
            y = y.wrapping_mul(x);
        }
        x = x.wrapping_mul(x);
        exponent >>= 1;
    }
    y
}

// --- two operands ---

macro_rules! binaries {
    ($($name:ident: $a:ident, $b:ident => $y:expr;)*) => {$(
        pub(super) fn $name(call: &Call<'_>) -> Ran {
            wide!(call.in_dtype(0), W => map(call, |[$a, $b]: [W; 2]| $y))
        }
    )*};
}
binaries! {
    add: a, b => a.plus(b);
    sub: a, b => a.minus(b);
    mul: a, b => a.times(b);
    maximum: a, b => a.larger(b);
    minimum: a, b => a.smaller(b);
    eq: a, b => W::flag(a == b);
    ne: a, b => W::flag(a != b);
    lt: a, b => W::flag(a < b);
    le: a, b => W::flag(a <= b);
    gt: a, b => W::flag(b < a);
    ge: a, b => W::flag(b <= a);
    logical_and: a, b => W::flag((a != W::ZERO) & (b != W::ZERO));
    logical_or: a, b => W::flag((a != W::ZERO) | (b != W::ZERO));
}
pub(super) fn div(call: &Call<'_>) -> Ran {
    wide_float!(call.out_dtype(0), W => map(call, |[a, b]: [W; 2]| a / b))
}
pub(super) fn pow(call: &Call<'_>) -> Ran {
    wide_float!(call.out_dtype(0), W => map(call, |[a, b]: [W; 2]| a.pow_of(b)))
}
pub(super) fn bitwise_and(call: &Call<'_>) -> Ran {
    map(call, |[a, b]: [i64; 2]| a & b)
}
pub(super) fn bitwise_or(call: &Call<'_>) -> Ran {
    map(call, |[a, b]: [i64; 2]| a | b)
}
pub(super) fn bitwise_xor(call: &Call<'_>) -> Ran {
    map(call, |[a, b]: [i64; 2]| a ^ b)
}
pub(super) fn select(call: &Call<'_>) -> Ran {
    wide!(call.out_dtype(0), W => map(call, |[condition, x, y]: [W; 3]|
        if condition != W::ZERO { x } else { y }))
}

// --- derivatives ---

macro_rules! derivatives {
    ($($name:ident: $dy:ident, $x:ident => $dx:expr;)*) => {$(
        pub(super) fn $name(call: &Call<'_>) -> Ran {
            fn f<R: Real>($dy: R, $x: R) -> R {
                $dx
            }
            wide_float!(call.out_dtype(0), W => map(call, |[dy, x]: [W; 2]| f(dy, x)))
        }
    )*};
}
derivatives! {
    tanh_bwd: dy, y => dy * (R::ONE - y * y);
    sigmoid_bwd: dy, y => dy * (R::ONE - y) * y;
    silu_bwd: dy, x => {
        let s = math::sigmoid(x);
        dy * s * (R::ONE + x * (R::ONE - s))
    };
}
pub(super) fn gelu_bwd(call: &Call<'_>) -> Ran {
    match call.bool("tanh") {
        true => {
            wide_float!(call.out_dtype(0), W =>
                map(call, |[dy, x]: [W; 2]| math::gelu_tanh_bwd(dy, x)))
        }
        false => {
            wide_float!(call.out_dtype(0), W => map(call, |[dy, x]: [W; 2]| math::gelu_bwd(dy, x)))
        }
    }
}
pub(super) fn threshold_bwd(call: &Call<'_>) -> Ran {
    wide_float!(call.out_dtype(0), W => {
        let threshold = number::<W>(call, "value");
        // NaN passes the gradient, as in PyTorch.
        map(call, |[dy, x]: [W; 2]| if x <= threshold { W::ZERO } else { dy })
    })
}
