//! Functions of f32 as instructions, after `runtime::kernels::math`: the same polynomials with
//! fused multiply-adds, the same results for NaN, infinities and numbers that are too large or
//! small. Errors are a few units in the last place. On GPUs exponential and logarithm are the
//! machine's instructions.

use super::dag::{Dag, Functions, Id};
use crate::mlir::{Arith, Convert, Kind};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, LOG2_E, SQRT_2};

const F32: Kind = Kind::F32;
const I32: Kind = Kind::I32;

/// sqrt(2 / pi)
const BETA: f64 = SQRT_2 * FRAC_2_SQRT_PI * 0.5;
const KAPPA: f64 = 0.044715;
/// (e^r - 1 - r) / r², highest power first, for |r| <= ln 2 / 2.
const EXP: [f64; 5] = [
    1.381_454e-3,
    8.368_745e-3,
    4.166_839e-2,
    1.666_652_1e-1,
    0.499_999_94,
];

impl Dag {
    fn f(&mut self, x: f64) -> Id {
        self.float(x, F32)
    }
    /// A polynomial, highest power first, by Estrin's scheme: pairs, then pairs of pairs, so that
    /// few operations wait for each other.
    fn polynomial(&mut self, x: Id, coefficients: &[f64]) -> Id {
        let mut terms: Vec<Id> = coefficients.iter().rev().map(|&c| self.f(c)).collect();
        let mut power = x;
        loop {
            let pair = |pair: &[Id]| match *pair {
                [low, high] => self.fma(high, power, low),
                _ => pair[0],
            };
            terms = terms.chunks(2).map(pair).collect();
            if terms.len() == 1 {
                return terms[0];
            }
            power = self.mul(power, power);
        }
    }

    /// e^x
    pub(super) fn exp(&mut self, x: Id) -> Id {
        if self.functions == Functions::Hardware {
            let log2e = self.f(LOG2_E);
            let scaled = self.mul(x, log2e);
            return self.same(Arith::Exp2, &[scaled]);
        }
        // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
        const MAGIC: f32 = 12_582_912.0;
        let (lo, hi) = (self.f(-104.0), self.f(89.0));
        let x = self.within(x, lo, hi);
        let (shifted, r) = self.reduced(x, MAGIC);
        let p = self.polynomial(r, &EXP);
        let (squared, one) = (self.mul(r, r), self.f(1.0));
        let y = self.fma(p, squared, r);
        let y = self.add(y, one);
        // 2^n in two factors, so that neither overflows where the result does not.
        let bits = self.convert(Convert::Bitcast, shifted, I32);
        let bias = self.int(MAGIC.to_bits().into(), I32);
        let n = self.sub(bits, bias);
        let one = self.int(1, I32);
        let half = self.same(Arith::Shrsi, &[n, one]);
        let rest = self.sub(n, half);
        let (a, b) = (self.power_of_two(half), self.power_of_two(rest));
        let y = self.mul(y, a);
        let y = self.mul(y, b);
        self.keep(y)
    }
    /// e^x for x that is at most 0 or NaN; results below 2^-126 may be 0.
    pub(super) fn exp_below(&mut self, x: Id) -> Id {
        if self.functions == Functions::Hardware {
            return self.exp(x);
        }
        // As `MAGIC` above; the low bits already have the exponent's bias, and are 0 at the bound
        // below.
        const MAGIC: f32 = 12_582_912.0 + 127.0;
        let lo = self.f(-88.0);
        let below = self.less(x, lo);
        let x = self.select(below, lo, x);
        let (shifted, r) = self.reduced(x, MAGIC);
        // Elements do not depend on each other. So Horner's scheme, which has the fewest
        // operations, is the fastest.
        let mut y = self.f(EXP[0]);
        for c in EXP[1..].iter().chain(&[1.0, 1.0]) {
            let c = self.f(*c);
            y = self.fma(y, r, c);
        }
        let (bits, places) = (
            self.convert(Convert::Bitcast, shifted, I32),
            self.int(23, I32),
        );
        let bits = self.same(Arith::Shli, &[bits, places]);
        let power = self.convert(Convert::Bitcast, bits, F32);
        let y = self.mul(y, power);
        self.keep(y)
    }
    /// x = n ln 2 + r with the nearest integer n. Returns `magic` + n, which has n in the low bits,
    /// and r.
    fn reduced(&mut self, x: Id, magic: f32) -> (Id, Id) {
        let (log2e, magic) = (self.f(LOG2_E), self.f(magic.into()));
        let shifted = self.fma(x, log2e, magic);
        let n = self.sub(shifted, magic);
        // ln 2 in two parts, the first with few enough bits that its products with n are exact.
        let (high, low) = (self.f(-0.693_359_375), self.f(2.121_944_4e-4));
        let r = self.fma(n, high, x);
        (shifted, self.fma(n, low, r))
    }
    /// 2^n for an I32.
    fn power_of_two(&mut self, n: Id) -> Id {
        let (bias, places) = (self.int(127, I32), self.int(23, I32));
        let exponent = self.add(n, bias);
        let bits = self.same(Arith::Shli, &[exponent, places]);
        self.convert(Convert::Bitcast, bits, F32)
    }

    /// The natural logarithm, after Cephes' `logf`.
    pub(super) fn log(&mut self, x: Id) -> Id {
        // Subnormal numbers are made normal first.
        let (least, up) = (
            self.f(f32::MIN_POSITIVE.into()),
            self.f(f64::from(1u32 << 23)),
        );
        let small = self.less(x, least);
        let raised = self.mul(x, up);
        let scaled = self.select(small, raised, x);
        let (zero_i, shift) = (self.int(0, I32), self.int(23, I32));
        let below = self.select(small, shift, zero_i);
        // x = m 2^e with m in sqrt(1/2)..sqrt(2).
        let bits = self.convert(Convert::Bitcast, scaled, I32);
        let root = self.int(f32::to_bits(std::f32::consts::FRAC_1_SQRT_2).into(), I32);
        let offset = self.sub(bits, root);
        let places = self.int(23, I32);
        let e = self.same(Arith::Shrsi, &[offset, places]);
        let whole = self.same(Arith::Shli, &[e, places]);
        let m = self.sub(bits, whole);
        let m = self.convert(Convert::Bitcast, m, F32);
        let e = self.sub(e, below);
        let e = self.convert(Convert::Sitofp, e, F32);
        let one = self.f(1.0);
        let r = self.sub(m, one);
        let p = self.polynomial(
            r,
            &[
                7.037_683_6e-2,
                -1.151_461e-1,
                1.167_699_9e-1,
                -1.242_014_1e-1,
                1.424_932_3e-1,
                -1.666_805_8e-1,
                2.000_071_4e-1,
                -2.499_999_4e-1,
                3.333_333_1e-1,
            ],
        );
        let squared = self.mul(r, r);
        let cubed = self.mul(squared, r);
        let y = self.mul(p, cubed);
        let (low, high, half) = (self.f(-2.121_944_4e-4), self.f(0.693_359_375), self.f(-0.5));
        let y = self.fma(e, low, y);
        let y = self.fma(half, squared, y);
        let y = self.add(r, y);
        let y = self.fma(e, high, y);
        // Infinity stays, zero gives minus infinity, and a negative number or NaN gives NaN.
        let (inf, zero, nan) = (self.f(f64::INFINITY), self.f(0.0), self.f(f64::NAN));
        let infinite = self.equal(x, inf);
        let y = self.select(infinite, inf, y);
        let none = self.equal(x, zero);
        let minus = self.f(f64::NEG_INFINITY);
        let y = self.select(none, minus, y);
        let valid = self.at_most(zero, x);
        let y = self.select(valid, y, nan);
        self.keep(y)
    }

    /// A ratio of an odd polynomial and an even one within bounds. At the bounds it is exactly 1
    /// and -1.
    fn ratio(&mut self, x: Id, bound: f64, p: &[f64], q: &[f64]) -> Id {
        let (lo, hi) = (self.f(-bound), self.f(bound));
        let x = self.within(x, lo, hi);
        let x2 = self.mul(x, x);
        let (p, q) = (self.polynomial(x2, p), self.polynomial(x2, q));
        let top = self.mul(x, p);
        let y = self.div(top, q);
        self.keep(y)
    }
    /// tanh as a ratio of polynomials (Eigen's): odd of degree 13 over even of degree 6.
    pub(super) fn tanh(&mut self, x: Id) -> Id {
        let p = [
            -2.760_768_5e-16,
            2.000_188e-13,
            -8.604_672e-11,
            5.122_297e-8,
            1.485_722_4e-5,
            6.372_619_3e-4,
            4.893_524_6e-3,
        ];
        self.ratio(
            x,
            8.000_488,
            &p,
            &[1.198_258_4e-6, 1.185_347_1e-4, 2.268_434_6e-3, 4.893_525e-3],
        )
    }
    /// erf as a ratio of polynomials (Eigen's): odd of degree 13 over even of degree 8.
    pub(super) fn erf(&mut self, x: Id) -> Id {
        let p = [
            -2.726_142_4e-10,
            2.770_681_5e-8,
            -2.101_024e-6,
            -5.692_506_3e-5,
            -7.349_906_3e-4,
            -2.954_6e-3,
            -1.609_603_3e-2,
        ];
        let q = [
            -1.456_607_2e-5,
            -2.133_740_6e-4,
            -1.682_827e-3,
            -7.373_329e-3,
            -1.426_473_9e-2,
        ];
        self.ratio(x, 3.832_522_9, &p, &q)
    }

    pub(super) fn sigmoid(&mut self, x: Id) -> Id {
        let one = self.f(1.0);
        let minus = self.same(Arith::Negf, &[x]);
        let e = self.exp(minus);
        let below = self.add(one, e);
        self.div(one, below)
    }
    pub(super) fn silu(&mut self, x: Id) -> Id {
        let one = self.f(1.0);
        let minus = self.same(Arith::Negf, &[x]);
        let e = self.exp(minus);
        let below = self.add(one, e);
        self.div(x, below)
    }
    pub(super) fn silu_bwd(&mut self, dy: Id, x: Id) -> Id {
        let (s, one) = (self.sigmoid(x), self.f(1.0));
        let rest = self.sub(one, s);
        let rest = self.mul(x, rest);
        let rest = self.add(one, rest);
        let dy = self.mul(dy, s);
        self.mul(dy, rest)
    }
    pub(super) fn gelu(&mut self, x: Id) -> Id {
        let (half, one, root) = (self.f(0.5), self.f(1.0), self.f(FRAC_1_SQRT_2));
        let inner = self.mul(x, root);
        let e = self.erf(inner);
        let (a, b) = (self.mul(half, x), self.add(one, e));
        self.mul(a, b)
    }
    pub(super) fn gelu_bwd(&mut self, dy: Id, x: Id) -> Id {
        let (half, one, root) = (self.f(0.5), self.f(1.0), self.f(FRAC_1_SQRT_2));
        let inner = self.mul(x, root);
        let e = self.erf(inner);
        let e = self.add(one, e);
        let cdf = self.mul(half, e);
        let minus = self.f(-0.5);
        let square = self.mul(minus, x);
        let square = self.mul(square, x);
        let (e, norm) = (
            self.exp(square),
            self.f(0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2),
        );
        let pdf = self.mul(e, norm);
        let slope = self.mul(x, pdf);
        let slope = self.add(cdf, slope);
        self.mul(dy, slope)
    }
    /// sqrt(2 / pi) (x + kappa x^3)
    fn gelu_inner(&mut self, x: Id) -> Id {
        let (beta, kappa) = (self.f(BETA), self.f(KAPPA));
        let cube = self.mul(kappa, x);
        let cube = self.mul(cube, x);
        let cube = self.mul(cube, x);
        let inner = self.add(x, cube);
        self.mul(beta, inner)
    }
    /// 1 / (1 + e^(-2 inner)), which is (1 + tanh inner) / 2: an exponential costs a GPU less than
    /// a ratio of polynomials.
    fn gelu_share(&mut self, x: Id) -> Id {
        let (inner, minus, one) = (self.gelu_inner(x), self.f(-2.0), self.f(1.0));
        let doubled = self.mul(minus, inner);
        let e = self.exp(doubled);
        let below = self.add(one, e);
        self.div(one, below)
    }
    pub(super) fn gelu_tanh(&mut self, x: Id) -> Id {
        if self.functions == Functions::Hardware {
            let share = self.gelu_share(x);
            return self.mul(x, share);
        }
        let inner = self.gelu_inner(x);
        let (t, half, one) = (self.tanh(inner), self.f(0.5), self.f(1.0));
        let (a, b) = (self.mul(half, x), self.add(one, t));
        self.mul(a, b)
    }
    pub(super) fn gelu_tanh_bwd(&mut self, dy: Id, x: Id) -> Id {
        let one = self.f(1.0);
        let (beta, three) = (self.f(BETA), self.f(3.0 * KAPPA));
        let slope = self.mul(three, x);
        let slope = self.mul(slope, x);
        let slope = self.add(one, slope);
        let slope = self.mul(beta, slope);
        if self.functions == Functions::Hardware {
            // The derivative of the share s is 2 s (1 - s) times that of inner.
            let (share, two) = (self.gelu_share(x), self.f(2.0));
            let rest = self.sub(one, share);
            let change = self.mul(rest, slope);
            let change = self.mul(change, x);
            let change = self.mul(two, change);
            let sum = self.add(one, change);
            let sum = self.mul(share, sum);
            return self.mul(dy, sum);
        }
        let inner = self.gelu_inner(x);
        let (t, half) = (self.tanh(inner), self.f(0.5));
        let square = self.mul(t, t);
        let square = self.sub(one, square);
        let square = self.mul(x, square);
        let square = self.mul(square, slope);
        let sum = self.add(one, t);
        let sum = self.add(sum, square);
        let dy = self.mul(dy, half);
        self.mul(dy, sum)
    }

    /// The f32 that a bf16's bits, an I16, are.
    pub(super) fn widened_bf16(&mut self, x: Id) -> Id {
        let wide = self.convert(Convert::Extui, x, I32);
        let places = self.int(16, I32);
        let bits = self.same(Arith::Shli, &[wide, places]);
        self.convert(Convert::Bitcast, bits, F32)
    }
    /// The bits, an I16, of the bf16 nearest to an f32, the even one if two are equally near; NaN
    /// stays.
    pub(super) fn rounded_bf16(&mut self, x: Id) -> Id {
        if self.functions == Functions::Hardware {
            return self.bf16(x);
        }
        let bits = self.convert(Convert::Bitcast, x, I32);
        let (places, one, below) = (self.int(16, I32), self.int(1, I32), self.int(0x7fff, I32));
        let high = self.same(Arith::Shrui, &[bits, places]);
        let odd = self.same(Arith::Andi, &[high, one]);
        let round = self.add(odd, below);
        let round = self.add(bits, round);
        let round = self.same(Arith::Shrui, &[round, places]);
        let quiet = self.int(0x40, I32);
        let nan = self.same(Arith::Ori, &[high, quiet]);
        let is_nan = self.differs(x, x);
        let chosen = self.select(is_nan, nan, round);
        self.convert(Convert::Trunci, chosen, Kind::I16)
    }
}
