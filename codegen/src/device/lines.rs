//! Running sums, and the largest elements of a line: a thread has a line and processes it in the
//! order of the plain kernels.

use super::Kernel;
use super::grid::{Grid, Tensor};
use super::moves::around;
use crate::mlir::{Emit, Kind, Predicate, Value};
use ir::op::attrs::{Along, TopK};

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
fn first(g: &mut Grid, line: Value, n: u64, inner: u64) -> Value {
    let [row, column] = g.divided(line, inner);
    let first = g.times(row, n * inner);
    g.b.addi(first, column)
}

/// Insertion into the sorted results, which needs no other memory.
pub(super) fn topk(k: &mut Kernel<'_>, a: &TopK) {
    let [outer, n, inner] = around(k.x().shape(), a.dim);
    let (most, is_float) = (a.k as u64, k.x().dtype().is_float());
    k.elements(outer * inner, |g, line| {
        let sorted = Sorted {
            values: g.result(0),
            indices: g.result(1),
            first: first(g, line, most, inner),
            inner,
            largest: a.largest,
            is_float,
        };
        let from = first(g, line, n, inner);
        g.count(n, &[], |g, i, _| {
            let at = g.times(i, inner);
            let at = g.b.addi(from, at);
            let x = g.operand(0);
            let new = g.get(x, at);
            sorted.insert(g, new, i, most);
            vec![]
        });
    });
}

/// A line's largest numbers so far.
struct Sorted {
    values: Tensor,
    indices: Tensor,
    first: Value,
    inner: u64,
    largest: bool,
    is_float: bool,
}

impl Sorted {
    fn place(&self, g: &mut Grid, i: Value) -> Value {
        let past = g.times(i, self.inner);
        g.b.addi(self.first, past)
    }

    /// Whether `a` comes before `b`: NaN counts as the largest.
    fn before(&self, g: &mut Grid, a: Value, b: Value) -> Value {
        let (a, b) = if self.largest { (a, b) } else { (b, a) };
        let above = g.less(b, a);
        if !self.is_float {
            return above;
        }
        let (none, some) = (g.b.compare(Predicate::Uno, a, a), g.equal(b, b));
        let only = g.b.andi(none, some);
        g.b.ori(above, only)
    }

    /// Moves the numbers after the new one by one place, from the last to the first, and puts the
    /// new one into the gap.
    fn insert(&self, g: &mut Grid, new: Value, index: Value, most: u64) {
        let all = g.b.long(most);
        let filled = g.b.minui(index, all);
        // The gap moves down: `p` numbers stay in front of it. It stops where `moving` is 0.
        let (zero, one) = (g.b.long(0), g.b.long(1));
        let some = g.less(zero, filled);
        let moving = g.b.select(some, one, zero);
        let last = g.repeat_while(Predicate::Ne, zero, &[moving, filled], |g, values| {
            let p = values[1];
            let before = g.plus(p, -1);
            let from = self.place(g, before);
            let old = g.get(self.values, from);
            let moves = self.before(g, new, old);
            let within = g.less(p, all);
            let written = g.b.andi(moves, within);
            g.when(written, |g| {
                let to = self.place(g, p);
                let which = g.get(self.indices, from);
                g.put(self.values, to, old);
                g.put(self.indices, to, which);
            });
            let p = g.b.select(moves, before, p);
            let more = g.less(zero, p);
            let goes_on = g.b.andi(moves, more);
            vec![g.b.select(goes_on, one, zero), p]
        });
        let p = last[1];
        let within = g.less(p, all);
        g.when(within, |g| {
            let to = self.place(g, p);
            g.put(self.values, to, new);
            g.put(self.indices, to, index);
        });
    }
}
