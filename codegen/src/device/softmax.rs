//! Softmax along any dimension, its logarithm, and their derivatives: a block of threads has a
//! line. Lines along the last dimension of f32 and narrower have better kernels, made from
//! instructions.

use super::Kernel;
use super::functions::{any_logarithm, exponential};
use super::grid::{Grid, Tensor};
use super::moves::around;
use crate::mlir::{Arith, Kind, Value};
use ir::DType;
use ir::op::attrs::Along;

/// Threads of a block.
const THREADS: u32 = 256;

/// A line of `n` elements, `inner` apart.
struct Line {
    n: u64,
    inner: u64,
    first: Value,
    room: Tensor,
}

impl Line {
    fn at(&self, g: &mut Grid, i: Value) -> Value {
        let past = g.times(i, self.inner);
        g.b.addi(self.first, past)
    }

    /// Combines `f` of each element's place over the line.
    fn fold(
        &self,
        g: &mut Grid,
        start: f64,
        f: impl FnOnce(&mut Grid, Value) -> Value,
        combine: impl Fn(&mut Grid, Value, Value) -> Value,
    ) -> Value {
        let start = g.float(start, Kind::F64);
        let own = g.share(self.n, &[start], |g, i, so_far| {
            let at = self.at(g, i);
            let x = f(g, at);
            vec![combine(g, so_far[0], x)]
        });
        g.fold(own[0], self.room, 1, combine)
    }

    /// Writes `f` of each place to result 0.
    fn write(&self, g: &mut Grid, f: impl FnOnce(&mut Grid, Value) -> Value) {
        g.share(self.n, &[], |g, i, _| {
            let at = self.at(g, i);
            let x = f(g, at);
            let y = g.result(0);
            let x = g.rounded(x, y.dtype);
            g.put(y, at, x);
            vec![]
        });
    }
}

fn lines(k: &mut Kernel<'_>, a: &Along, body: impl FnOnce(&mut Grid, &Line)) {
    let [outer, n, inner] = around(k.x().shape(), a.dim);
    let parts = outer * inner;
    k.phase(THREADS, parts, |g| {
        g.parts(parts, |g, part| {
            let [row, column] = g.divided(part, inner);
            let first = g.times(row, n * inner);
            let line = Line {
                n,
                inner,
                first: g.b.addi(first, column),
                room: g.shared(THREADS.into(), DType::F64),
            };
            body(g, &line);
        });
    });
}

/// An operand's element as f64.
fn element(g: &mut Grid, operand: usize, at: Value) -> Value {
    let x = g.operand(operand);
    let x = g.get(x, at);
    g.double(x)
}

/// Softmax, or its logarithm.
pub(super) fn softmax(k: &mut Kernel<'_>, a: &Along, log: bool) {
    lines(k, a, |g, line| {
        let larger = |g: &mut Grid, a, b| g.b.arith(Arith::Maximumf, &[a, b]);
        let max = line.fold(g, f64::NEG_INFINITY, |g, at| element(g, 0, at), larger);
        let below = |g: &mut Grid, at| {
            let x = element(g, 0, at);
            g.sub(x, max)
        };
        let power = |g: &mut Grid, at| {
            let x = below(g, at);
            exponential(g, x)
        };
        let sum = line.fold(g, 0.0, power, |g, a, b| g.add(a, b));
        if log {
            let sum = any_logarithm(g, sum);
            return line.write(g, |g, at| {
                let x = below(g, at);
                g.sub(x, sum)
            });
        }
        line.write(g, |g, at| {
            let x = power(g, at);
            g.b.divf(x, sum)
        });
    });
}

/// (dy, y) -> y (dy - Σ dy y), or, for the logarithm, dy - e^y Σ dy.
pub(super) fn softmax_bwd(k: &mut Kernel<'_>, a: &Along, log: bool) {
    lines(k, a, |g, line| {
        let term = |g: &mut Grid, at| {
            let dy = element(g, 0, at);
            if log {
                return dy;
            }
            let y = element(g, 1, at);
            g.mul(dy, y)
        };
        let sum = line.fold(g, 0.0, term, |g, a, b| g.add(a, b));
        line.write(g, |g, at| {
            let (dy, y) = (element(g, 0, at), element(g, 1, at));
            if log {
                let y = exponential(g, y);
                let product = g.mul(y, sum);
                return g.sub(dy, product);
            }
            let less = g.sub(dy, sum);
            g.mul(less, y)
        });
    });
}
