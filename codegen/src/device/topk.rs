//! The largest or smallest elements of lines, sorted. A few are found by insertion: a thread has a
//! line. Many are found by a sort of all lines ([`Sorted`]).
//!
//! After: NaN counts as the largest number, and equal elements keep their order.

use super::Kernel;
use super::grid::{Grid, Tensor, Unit};
use super::lines::first;
use super::moves::around;
use super::sorted::Sorted;
use crate::mlir::{Convert, Emit, Kind, Predicate, Value};
use ir::DType;
use ir::op::attrs::TopK;
use ir::op::sorting::Sorting;

pub(super) fn topk(k: &mut Kernel<'_>, a: &TopK) {
    match Sorting::of_lines(k.x(), a.dim as usize, a.k as u64) {
        Some(sorting) => sorted(k, a, sorting),
        None => inserted(k, a),
    }
}

// --- by a sort ---

/// Items are the elements, line by line.
fn sorted(k: &mut Kernel<'_>, a: &TopK, sorting: Sorting) {
    let [_, n, inner] = around(k.x().shape(), a.dim);
    let most = a.k as u64;
    k.scratch_bytes = sorting.scratch_bytes();
    let from = |g: &mut Grid, item| {
        let [line, number] = g.divided(item, n);
        let (first, past) = (first(g, line, n, inner), g.times(number, inner));
        (g.b.addi(first, past), number)
    };
    let sorted = Sorted::new(k, sorting, |g, item| {
        let (at, _) = from(g, item);
        let x = g.operand(0);
        key(g, x, at, a.largest)
    });
    let unit = Unit(k.x().dtype().bytes());
    k.elements(k.y().numel(), |g, i| {
        let [row, rest] = g.divided(i, most * inner);
        let [number, column] = g.divided(rest, inner);
        let line = g.times(row, inner);
        let line = g.b.addi(line, column);
        let start = g.times(line, n);
        let place = g.b.addi(start, number);
        let item = sorted.item(g, place);
        let (at, index) = from(g, item);
        let (x, values, indices) = (g.operand(0), g.result(0), g.result(1));
        let bits = g.bits(x, at, unit);
        g.put_bits(values, i, bits, unit);
        g.put(indices, i, index);
    });
}

/// A number without a sign, of as many bits as an element, whose order is that of results.
fn key(g: &mut Grid, x: Tensor, at: Value, largest: bool) -> Value {
    let bits = 8 * x.dtype.bytes();
    let (sign, all) = (1 << (bits - 1), u64::MAX >> (64 - bits));
    let rising = match infinity(x.dtype) {
        Some(infinity) => rising(g, x, at, [sign, all, infinity]),
        None => {
            let number = g.get(x, at);
            match x.dtype {
                DType::U8 | DType::Bool => number,
                _ => g.plus(number, sign as i64),
            }
        }
    };
    if !largest {
        return rising;
    }
    let all = g.b.long(all);
    g.b.xori(rising, all)
}

/// The key of a floating-point number: 0 and -0 have one, and all NaN have the last.
fn rising(g: &mut Grid, x: Tensor, at: Value, [sign, all, infinity]: [u64; 3]) -> Value {
    let number = g.bits(x, at, Unit(x.dtype.bytes()));
    let number = match x.dtype.bytes() {
        8 => number,
        _ => g.b.convert(Convert::Extui, number, Kind::I64),
    };
    let [sign, without, infinity] = [sign, sign - 1, infinity].map(|bits| g.b.long(bits));
    let size = g.b.andi(number, without);
    let (above, below) = (g.b.addi(sign, size), g.b.subi(sign, size));
    let is_positive = g.b.compare(Predicate::Ult, number, sign);
    let ordered = g.b.select(is_positive, above, below);
    let (is_nan, last) = (g.less(infinity, size), g.b.long(all));
    g.b.select(is_nan, last, ordered)
}

/// The bits of infinity, if the type has one.
fn infinity(dtype: DType) -> Option<u64> {
    match dtype {
        DType::F16 => Some(0x7c00),
        DType::BF16 => Some(0x7f80),
        DType::F32 => Some(0x7f80_0000),
        DType::F64 => Some(0x7ff0_0000_0000_0000),
        DType::Bool | DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64 => None,
        // No op computes them.
        DType::F8E4M3 | DType::F8E5M2 => None,
    }
}

// --- by insertion ---

/// Insertion into the sorted results, which needs no other memory.
fn inserted(k: &mut Kernel<'_>, a: &TopK) {
    let [outer, n, inner] = around(k.x().shape(), a.dim);
    let (most, is_float) = (a.k as u64, k.x().dtype().is_float());
    k.elements(outer * inner, |g, line| {
        let firsts = Firsts {
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
            firsts.insert(g, new, i, most);
            vec![]
        });
    });
}

/// A line's first numbers so far.
struct Firsts {
    values: Tensor,
    indices: Tensor,
    first: Value,
    inner: u64,
    largest: bool,
    is_float: bool,
}

impl Firsts {
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
