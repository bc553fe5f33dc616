//! Running sums of lines: a thread has a line and processes it in the order of the plain kernels.

use super::Kernel;
use super::grid::Grid;
use super::moves::around;
use crate::mlir::{Kind, Value};
use ir::op::attrs::Along;

pub(super) fn cumsum(k: &mut Kernel<'_>, a: &Along) {
    let [outer, n, inner] = around(k.x().shape(), a.dim);
    let dtype = k.x().dtype();
    k.elements(outer * inner, |g, line| {
        let first = first(g, line, n, inner);
        let (x, y) = (g.operand(0), g.result(0));
        let start = if dtype.is_float() {
            g.float(0.0, Kind::F64)
        } else {
            g.b.long(0)
        };
        g.count(n, &[start], |g, i, sum| {
            let at = g.times(i, inner);
            let at = g.b.addi(first, at);
            let x = g.get(x, at);
            if !dtype.is_float() {
                let sum = g.add(sum[0], x);
                g.put(y, at, sum);
                return vec![sum];
            }
            let x = g.double(x);
            let sum = g.add(sum[0], x);
            let value = g.rounded(sum, dtype);
            g.put(y, at, value);
            vec![sum]
        });
    });
}

/// The first element of a line, of `n` that are `inner` apart.
pub(super) fn first(g: &mut Grid, line: Value, n: u64, inner: u64) -> Value {
    let [row, column] = g.divided(line, inner);
    let first = g.times(row, n * inner);
    g.b.addi(first, column)
}
