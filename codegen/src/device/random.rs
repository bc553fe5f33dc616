//! Random numbers: the same words as the plain kernels ([`crate::philox`]), and the same numbers
//! from them. A thread computes the numbers of a block of four words.

use super::Kernel;
use super::functions::{cosine, logarithm, sine};
use super::grid::Grid;
use crate::mlir::{Arith, Emit, Kind, Value};
use crate::philox::Words;
use ir::DType;
use ir::op::attrs::{Dropout, Random};

/// Block `i` of an op's words; operand 0 is [seed, step].
fn block_of(g: &mut Grid, stream: i64, i: Value) -> [Value; 4] {
    let rng = g.operand(0);
    let [seed, step] = [0, 1].map(|at| {
        let at = g.b.long(at);
        g.get(rng, at)
    });
    let stream = g.b.int(stream);
    let words = Words::new(&mut g.b, seed, step, stream);
    words.block(&mut g.b, i)
}

/// A number in `0..1` from the upper `bits` bits of a word, as f64.
fn uniform(g: &mut Grid, word: Value, bits: u32) -> Value {
    let wide = g.b.wide(word);
    let places = g.b.long((32 - bits).into());
    let upper = g.b.shrui(wide, places);
    let x = g.double(upper);
    let unit = g.float(0.5f64.powi(bits as i32), Kind::F64);
    g.mul(x, unit)
}

/// A number in `0..1` from 53 bits of two words.
fn uniform53(g: &mut Grid, [high, low]: [Value; 2]) -> Value {
    let [high, low] = [high, low].map(|x| g.b.wide(x));
    let [up, down] = [32, 11].map(|i| g.b.long(i));
    let high = g.b.arith(Arith::Shli, &[high, up]);
    let all = g.b.ori(high, low);
    let all = g.b.shrui(all, down);
    let x = g.double(all);
    let unit = g.float(0.5f64.powi(53), Kind::F64);
    g.mul(x, unit)
}

/// Two normal numbers from two uniform ones: Box and Muller's method, of 1 - u, which is never 0.
fn normal(g: &mut Grid, [u, v]: [Value; 2]) -> [Value; 2] {
    let [one, minus, turn] = [1.0, -2.0, std::f64::consts::TAU].map(|x| g.float(x, Kind::F64));
    let u = g.sub(one, u);
    let log = logarithm(g, u);
    let square = g.mul(minus, log);
    let radius = g.b.arith(Arith::Sqrt, &[square]);
    let angle = g.mul(turn, v);
    let (c, s) = (cosine(g, angle), sine(g, angle));
    [g.mul(radius, c), g.mul(radius, s)]
}

/// Adds a phase in which each thread writes the numbers of a block of words.
fn fill(
    k: &mut Kernel<'_>,
    a: &Random,
    each: u64,
    numbers: impl FnOnce(&mut Grid, [Value; 4]) -> Vec<Value>,
) {
    let n = k.y().numel();
    k.elements(n.div_ceil(each), |g, block| {
        let words = block_of(g, a.stream, block);
        let first = g.times(block, each);
        let y = g.result(0);
        for (i, x) in numbers(g, words).into_iter().enumerate() {
            let at = g.plus(first, i as i64);
            let inside = g.below(at, n);
            g.when(inside, |g| {
                let x = g.rounded(x, a.dtype);
                g.put(y, at, x);
            });
        }
    });
}

pub(super) fn rand(k: &mut Kernel<'_>, a: &Random) {
    // At most the bits that the type can hold; otherwise rounding could give 1.
    let bits = match a.dtype {
        DType::F64 => {
            return fill(k, a, 2, |g, [a, b, c, d]| {
                vec![uniform53(g, [a, b]), uniform53(g, [c, d])]
            });
        }
        DType::F32 => 24,
        DType::F16 => 11,
        _ => 8,
    };
    fill(k, a, 4, |g, words| {
        words.map(|word| uniform(g, word, bits)).to_vec()
    });
}

pub(super) fn randn(k: &mut Kernel<'_>, a: &Random) {
    if a.dtype == DType::F64 {
        return fill(k, a, 2, |g, [a, b, c, d]| {
            let pair = [uniform53(g, [a, b]), uniform53(g, [c, d])];
            normal(g, pair).to_vec()
        });
    }
    fill(k, a, 4, |g, words| {
        let [a, b, c, d] = words.map(|word| uniform(g, word, 24));
        [normal(g, [a, b]), normal(g, [c, d])].concat()
    });
}

/// The numbers by which attention drops weights.
pub(super) fn dropout_key(k: &mut Kernel<'_>, a: &Dropout) {
    let known = [a.stream as u64, a.p.to_bits()];
    k.elements(2, |g, i| {
        let (x, y) = (g.operand(0), g.result(0));
        let now = g.get(x, i);
        g.put(y, i, now);
        let [stream, p] = known.map(|x| g.b.long(x));
        let is_first = g.below(i, 1);
        let other = g.b.select(is_first, stream, p);
        let at = g.plus(i, 2);
        g.put(y, at, other);
    });
}

/// The next step of a generator: [seed, step + 1].
pub(super) fn rng_next(k: &mut Kernel<'_>) {
    k.elements(2, |g, i| {
        let (x, y) = (g.operand(0), g.result(0));
        let now = g.get(x, i);
        let next = g.b.addi(now, i);
        g.put(y, i, next);
    });
}
