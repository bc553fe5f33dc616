//! Sine, cosine, logarithm and powers. They are computed in f64, to about its last bit. So the
//! result is nearly always the nearest f32. (The instructions of GPUs have an error of 2^-21.)
//!
//! The polynomials are from FreeBSD's libm (Sun Microsystems, 1993).

use super::Kernel;
use super::grid::Grid;
use super::moves::broadcast;
use crate::mlir::{Arith, Convert, Kind, Predicate, Value};

/// A polynomial by Horner's rule, the highest power's coefficient first.
fn polynomial(g: &mut Grid, x: Value, coefficients: &[f64]) -> Value {
    let mut coefficients = coefficients
        .iter()
        .map(|&c| g.float(c, Kind::F64))
        .collect::<Vec<_>>();
    let first = coefficients.remove(0);
    coefficients
        .into_iter()
        .fold(first, |y, c| g.b.fma(y, x, c))
}

/// The nearest integer as f64: adding 1.5 · 2^52 rounds, for numbers below 2^51.
fn nearest(g: &mut Grid, x: Value) -> Value {
    let magic = g.float(6_755_399_441_055_744.0, Kind::F64);
    let shifted = g.add(x, magic);
    g.sub(shifted, magic)
}

/// An angle as a number of quarter turns and a rest of at most an eighth turn. It is exact to the
/// last bits of f64 for angles up to 2^50, because π/2 is the sum of two numbers and products are
/// not rounded.
fn quarters(g: &mut Grid, x: Value) -> [Value; 2] {
    const HIGH: f64 = std::f64::consts::FRAC_PI_2;
    const LOW: f64 = 6.123_233_995_736_766e-17;
    let [inverse, high, low] =
        [std::f64::consts::FRAC_2_PI, -HIGH, -LOW].map(|x| g.float(x, Kind::F64));
    let turns = g.mul(x, inverse);
    let n = nearest(g, turns);
    let rest = g.b.fma(n, high, x);
    let rest = g.b.fma(n, low, rest);
    [g.b.convert(Convert::Fptosi, n, Kind::I64), rest]
}

/// The sine of an angle of `n` quarter turns and `x`.
fn turned_sine(g: &mut Grid, n: Value, x: Value) -> Value {
    let square = g.mul(x, x);
    let p = polynomial(
        g,
        square,
        &[
            1.589_690_995_211_55e-10,
            -2.505_076_025_340_686_3e-8,
            2.755_731_370_707_006_8e-6,
            -1.984_126_982_985_795e-4,
            8.333_333_333_322_49e-3,
            -1.666_666_666_666_663_2e-1,
        ],
    );
    let cube = g.mul(square, x);
    let sine = g.b.fma(p, cube, x);
    let q = polynomial(
        g,
        square,
        &[
            -1.135_964_755_778_819_5e-11,
            2.087_572_321_298_175e-9,
            -2.755_731_435_139_066_3e-7,
            2.480_158_728_947_673e-5,
            -1.388_888_888_887_411e-3,
            4.166_666_666_666_66e-2,
            -0.5,
        ],
    );
    let one = g.float(1.0, Kind::F64);
    let cosine = g.b.fma(q, square, one);
    let [bit, two, zero] = [1, 2, 0].map(|i| g.b.long(i));
    let odd = g.b.andi(n, bit);
    let odd = g.b.compare(Predicate::Ne, odd, zero);
    let y = g.b.select(odd, cosine, sine);
    let half = g.b.andi(n, two);
    let negative = g.b.compare(Predicate::Ne, half, zero);
    let minus = g.b.arith(Arith::Negf, &[y]);
    g.b.select(negative, minus, y)
}

pub(super) fn sine(g: &mut Grid, x: Value) -> Value {
    let [n, rest] = quarters(g, x);
    let y = turned_sine(g, n, rest);
    // -0 stays.
    let zero = g.float(0.0, Kind::F64);
    let none = g.equal(x, zero);
    g.b.select(none, x, y)
}

pub(super) fn cosine(g: &mut Grid, x: Value) -> Value {
    let [n, rest] = quarters(g, x);
    let n = g.plus(n, 1);
    turned_sine(g, n, rest)
}

/// The arc tangent: of the reciprocal of a number above 1, and of an angle that is turned by π/4 if
/// it is above π/8. The polynomial is that of fdlibm, for numbers up to 7/16.
fn arc_tangent(g: &mut Grid, x: Value) -> Value {
    let [zero, one, edge, quarter, half] = [
        0.0,
        1.0,
        std::f64::consts::SQRT_2 - 1.0,
        std::f64::consts::FRAC_PI_4,
        std::f64::consts::FRAC_PI_2,
    ]
    .map(|x| g.float(x, Kind::F64));
    let is_negative = g.less(x, zero);
    let minus = g.b.arith(Arith::Negf, &[x]);
    let size = g.b.select(is_negative, minus, x);
    let is_large = g.less(one, size);
    let inverse = g.b.divf(one, size);
    let t = g.b.select(is_large, inverse, size);
    let is_steep = g.less(edge, t);
    let (less, more) = (g.sub(t, one), g.add(t, one));
    let turned = g.b.divf(less, more);
    let t = g.b.select(is_steep, turned, t);
    let square = g.mul(t, t);
    let p = polynomial(
        g,
        square,
        &[
            1.628_582_011_536_578_2e-2,
            -3.653_157_274_421_691_6e-2,
            4.976_877_994_615_932e-2,
            -5.833_570_133_790_573_5e-2,
            6.661_073_137_387_531e-2,
            -7.691_876_205_044_83e-2,
            9.090_887_133_436_507e-2,
            -1.111_111_040_546_235_6e-1,
            1.428_571_427_250_346_6e-1,
            -1.999_999_999_987_648_3e-1,
            3.333_333_333_333_293e-1,
        ],
    );
    let cube = g.mul(square, t);
    let rest = g.mul(p, cube);
    let y = g.sub(t, rest);
    let steep = g.add(quarter, y);
    let y = g.b.select(is_steep, steep, y);
    let large = g.sub(half, y);
    let y = g.b.select(is_large, large, y);
    let minus = g.b.arith(Arith::Negf, &[y]);
    let y = g.b.select(is_negative, minus, y);
    // -0 stays.
    let none = g.equal(x, zero);
    g.b.select(none, x, y)
}

/// The natural logarithm of a positive normal number: x = m 2^e, with m in sqrt(1/2)..sqrt(2).
pub(super) fn logarithm(g: &mut Grid, x: Value) -> Value {
    let bits = g.b.convert(Convert::Bitcast, x, Kind::I64);
    let root = g.b.long(std::f64::consts::FRAC_1_SQRT_2.to_bits());
    let places = g.b.long(52);
    let past = g.b.subi(bits, root);
    let e = g.b.arith(Arith::Shrsi, &[past, places]);
    let whole = g.b.arith(Arith::Shli, &[e, places]);
    let m = g.b.subi(bits, whole);
    let m = g.b.convert(Convert::Bitcast, m, Kind::F64);
    let [one, two, half] = [1.0, 2.0, 0.5].map(|x| g.float(x, Kind::F64));
    let f = g.sub(m, one);
    let below = g.add(f, two);
    let s = g.b.divf(f, below);
    let square = g.mul(s, s);
    let p = polynomial(
        g,
        square,
        &[
            1.479_819_860_511_658_6e-1,
            1.531_383_769_920_937_3e-1,
            1.818_357_216_161_805e-1,
            2.222_219_843_214_978_4e-1,
            2.857_142_874_366_239e-1,
            3.999_999_999_940_942e-1,
            6.666_666_666_666_735e-1,
        ],
    );
    let p = g.mul(p, square);
    let f2 = g.mul(f, f);
    let hfsq = g.mul(half, f2);
    let sum = g.add(hfsq, p);
    let tail = g.mul(s, sum);
    let [high, low] =
        [6.931_471_803_691_238e-1, 1.908_214_929_270_587_7e-10].map(|x| g.float(x, Kind::F64));
    let e = g.double(e);
    let rest = g.b.fma(e, low, tail);
    let rest = g.sub(hfsq, rest);
    let rest = g.sub(rest, f);
    let minus = g.b.arith(Arith::Negf, &[rest]);
    g.b.fma(e, high, minus)
}

/// Applies a function of f64 to each element.
fn each(k: &mut Kernel<'_>, f: impl FnOnce(&mut Grid, Value) -> Value) {
    let (dtype, n) = (k.x().dtype(), k.x().numel());
    k.elements(n, |g, i| {
        let (x, y) = (g.operand(0), g.result(0));
        let x = g.get(x, i);
        let x = g.double(x);
        let value = f(g, x);
        let value = g.rounded(value, dtype);
        g.put(y, i, value);
    });
}

pub(super) fn sin(k: &mut Kernel<'_>) {
    each(k, sine);
}

pub(super) fn cos(k: &mut Kernel<'_>) {
    each(k, cosine);
}

pub(super) fn atan(k: &mut Kernel<'_>) {
    each(k, arc_tangent);
}

/// e^x within the range of f64; beyond it the result is 0 or infinity.
pub(super) fn exponential(g: &mut Grid, x: Value) -> Value {
    let [least, most] = [-746.0, 710.0].map(|x| g.float(x, Kind::F64));
    let low = g.less(x, least);
    let bounded = g.b.select(low, least, x);
    let high = g.less(most, x);
    let bounded = g.b.select(high, most, bounded);
    let [inverse, upper, lower] = [
        std::f64::consts::LOG2_E,
        -6.931_471_803_691_238e-1,
        -1.908_214_929_270_587_7e-10,
    ]
    .map(|x| g.float(x, Kind::F64));
    let n = g.mul(bounded, inverse);
    let n = nearest(g, n);
    let r = g.b.fma(n, upper, bounded);
    let r = g.b.fma(n, lower, r);
    // Taylor's series: the rest after r^13 / 13! is below 2^-57.
    let mut factorials = vec![1.0];
    for i in 1..14 {
        factorials.push(factorials[i - 1] / i as f64);
    }
    factorials.reverse();
    let y = polynomial(g, r, &factorials);
    // 2^n in two factors: neither overflows unless the result does.
    let n = g.b.convert(Convert::Fptosi, n, Kind::I64);
    let [one, bias, places] = [1, 1023, 52].map(|i| g.b.long(i));
    let half = g.b.arith(Arith::Shrsi, &[n, one]);
    let rest = g.b.subi(n, half);
    [half, rest].into_iter().fold(y, |y, n| {
        let exponent = g.b.addi(n, bias);
        let bits = g.b.arith(Arith::Shli, &[exponent, places]);
        let power = g.b.convert(Convert::Bitcast, bits, Kind::F64);
        g.mul(y, power)
    })
}

/// The logarithm of any number that is not negative.
pub(super) fn any_logarithm(g: &mut Grid, x: Value) -> Value {
    let [zero, inf, lowest] =
        [0.0, f64::INFINITY, f64::NEG_INFINITY].map(|x| g.float(x, Kind::F64));
    let y = logarithm(g, x);
    let (none, infinite) = (g.equal(x, zero), g.equal(x, inf));
    let y = g.b.select(none, lowest, y);
    let y = g.b.select(infinite, inf, y);
    let nan = g.b.compare(Predicate::Uno, x, x);
    g.b.select(nan, x, y)
}

/// x^y with the special cases of IEEE 754. The error comes from y times a logarithm: up to 2^-44 of
/// the result.
fn power(g: &mut Grid, x: Value, y: Value) -> Value {
    let [zero, one, half, large, nan] =
        [0.0, 1.0, 0.5, 2f64.powi(51), f64::NAN].map(|x| g.float(x, Kind::F64));
    let [magnitude, size] = [x, y].map(|x| g.b.arith(Arith::Absf, &[x]));
    let log = any_logarithm(g, magnitude);
    let product = g.mul(log, y);
    let result = exponential(g, product);
    // |x| = 1 is 1 to every power that is a number.
    let unit = g.equal(magnitude, one);
    let ordered = g.equal(y, y);
    let unit = g.b.andi(unit, ordered);
    let result = g.b.select(unit, one, result);

    // Large numbers are even integers.
    let (small, whole) = (g.less(size, large), nearest(g, y));
    let whole = g.equal(whole, y);
    let beyond = g.b.compare(Predicate::Ole, large, size);
    let integer = g.b.ori(whole, beyond);
    let halved = g.mul(y, half);
    let even = nearest(g, halved);
    let odd = g.b.compare(Predicate::Une, even, halved);
    let odd = g.b.andi(odd, whole);
    let odd = g.b.andi(odd, small);
    // The sign of -0 counts.
    let bits = g.b.convert(Convert::Bitcast, x, Kind::I64);
    let none = g.b.long(0);
    let negative = g.less(bits, none);
    let minus = g.b.arith(Arith::Negf, &[result]);
    let flips = g.b.andi(negative, odd);
    let result = g.b.select(flips, minus, result);
    // Roots of negative numbers are NaN; the root of -∞ is infinite.
    let lowest = g.float(f64::NEG_INFINITY, Kind::F64);
    let (below, finite) = (g.less(x, zero), g.less(lowest, x));
    let below = g.b.andi(below, finite);
    let root = g.b.select(integer, result, nan);
    let result = g.b.select(below, root, result);

    // 1 to any power, and any number to the power 0, are 1, NaN too.
    let (is_one, is_zero) = (g.equal(x, one), g.equal(y, zero));
    let result = g.b.select(is_one, one, result);
    g.b.select(is_zero, one, result)
}

pub(super) fn pow(k: &mut Kernel<'_>) {
    let (dtype, shape) = (k.y().dtype(), k.y().shape().to_vec());
    let steps = [0, 1].map(|i| broadcast(k.operands[i].shape(), &shape));
    k.elements(k.y().numel(), |g, i| {
        let at = g.coordinates(i, &shape);
        let [x, y] = [0, 1].map(|which| {
            let from = g.offset(&at, &steps[which], 0);
            let operand = g.operand(which);
            let x = g.get(operand, from);
            g.double(x)
        });
        let value = power(g, x, y);
        let value = g.rounded(value, dtype);
        let result = g.result(0);
        g.put(result, i, value);
    });
}
