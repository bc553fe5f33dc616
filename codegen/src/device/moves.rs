//! Kernels that move elements without computing with them, and `arange`.
//!
//! A [`Nest`] describes a strided copy: loops over dimensions, each with its stride in the operand
//! and in the result. Dimensions that are contiguous in both are merged. The largest unit that both
//! permit is moved at once.

use super::Kernel;
use super::grid::{Grid, THREADS, Unit};
use crate::mlir::{Emit, Kind, Type, Value};
use ir::op::attrs::{Along, Arange, Dims, Pad, Slice};

/// Loops over dimensions, outermost first, with strides in a source and in a destination.
struct Nest {
    sizes: Vec<u64>,
    from: Vec<i64>,
    to: Vec<i64>,
    /// The place of the first point in each.
    start: [i64; 2],
}

/// A copy of some points of an operand.
struct Copy {
    operand: usize,
    nest: Nest,
}

impl Nest {
    fn new(start: [i64; 2]) -> Nest {
        Nest {
            sizes: vec![],
            from: vec![],
            to: vec![],
            start,
        }
    }

    /// Adds a dimension inside the existing ones.
    fn push(&mut self, size: u64, [from, to]: [i64; 2]) {
        if size == 1 {
            return;
        }
        let last = self.sizes.len().wrapping_sub(1);
        let merges = |strides: &[i64], stride: i64| {
            strides
                .last()
                .is_some_and(|&outer| outer == stride * size as i64)
        };
        if merges(&self.from, from) && merges(&self.to, to) {
            self.sizes[last] *= size;
            (self.from[last], self.to[last]) = (from, to);
            return;
        }
        self.sizes.push(size);
        self.from.push(from);
        self.to.push(to);
    }

    fn points(&self) -> u64 {
        self.sizes.iter().product()
    }

    /// Merges several elements of `bytes` bytes each to one point, if elements of the innermost
    /// dimension are contiguous in both tensors. Returns the bytes of a point.
    fn widen(&mut self, bytes: u64) -> Unit {
        let last = self.sizes.len().wrapping_sub(1);
        if self.from.last() != Some(&1) || self.to.last() != Some(&1) {
            return Unit(bytes);
        }
        let strides = self.from[..last].iter().chain(&self.to[..last]);
        let places = strides.chain(&self.start).map(|s| s.unsigned_abs() * bytes);
        let unit = Unit::dividing(places.chain([self.sizes[last] * bytes]));
        let n = (unit.0 / bytes) as i64;
        self.sizes[last] /= n as u64;
        let outer = self.from[..last].iter_mut().chain(&mut self.to[..last]);
        outer.chain(&mut self.start).for_each(|stride| *stride /= n);
        unit
    }
}

/// Row-major strides of a shape.
pub(super) fn strides(shape: &[u64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d] as i64;
    }
    strides
}

/// The strides of a tensor along the dimensions to which it is broadcast.
pub(super) fn broadcast(from: &[u64], to: &[u64]) -> Vec<i64> {
    let own = strides(from);
    let more = to.len() - from.len();
    let stride = |d: usize| match d.checked_sub(more) {
        Some(i) if from[i] != 1 => own[i],
        _ => 0,
    };
    (0..to.len()).map(stride).collect()
}

/// A tensor as three dimensions: before, at and after `dim`.
pub(super) fn around(shape: &[u64], dim: i64) -> [u64; 3] {
    let dim = dim as usize;
    let count = |sizes: &[u64]| sizes.iter().product();
    [count(&shape[..dim]), shape[dim], count(&shape[dim + 1..])]
}

/// Adds a phase that copies operand `i` to result 0, which has the same type and may have the same
/// bytes.
pub(super) fn copy(k: &mut Kernel<'_>, i: usize) {
    let mut nest = Nest::new([0, 0]);
    nest.push(k.y().numel(), [1, 1]);
    copies(k, vec![Copy { operand: i, nest }]);
}

/// Adds a phase of copies to result 0, which write different elements. The parts of the copies come
/// one after the other.
fn copies(k: &mut Kernel<'_>, copies: Vec<Copy>) {
    let bytes = k.y().dtype().bytes();
    let mut all = vec![];
    let mut parts = 0;
    for mut copy in copies {
        let unit = copy.nest.widen(bytes);
        let first = parts;
        parts += copy.nest.points().div_ceil(THREADS.into());
        all.push((copy, unit, first..parts));
    }
    k.phase(THREADS, parts, |g| {
        g.parts(parts, |g, part| {
            for (copy, unit, range) in &all {
                let own = g.plus(part, -(range.start as i64));
                let is_its = g.below(own, range.end - range.start);
                g.when(is_its, |g| one_copy(g, copy, *unit, own));
            }
        });
    });
}

/// A part of a copy.
fn one_copy(g: &mut Grid, copy: &Copy, unit: Unit, part: Value) {
    let nest = &copy.nest;
    let first = g.times(part, THREADS.into());
    let i = g.b.addi(first, g.thread);
    let inside = g.below(i, nest.points());
    g.when(inside, |g| {
        let at = g.coordinates(i, &nest.sizes);
        let from = g.offset(&at, &nest.from, nest.start[0]);
        let to = g.offset(&at, &nest.to, nest.start[1]);
        let (x, y) = (g.operand(copy.operand), g.result(0));
        let bits = g.bits(x, from, unit);
        g.put_bits(y, to, bits, unit);
    });
}

/// Writes result 0 from operand 0, whose elements are `stride(d)` apart along dimension `d` of the
/// result.
fn strided(k: &mut Kernel<'_>, start: i64, stride: impl Fn(usize) -> i64) {
    let mut nest = Nest::new([start, 0]);
    let own = strides(k.y().shape());
    for (d, &size) in k.y().shape().iter().enumerate() {
        nest.push(size, [stride(d), own[d]]);
    }
    copies(k, vec![Copy { operand: 0, nest }]);
}

pub(super) fn permute(k: &mut Kernel<'_>, a: &Dims) {
    let from = strides(k.x().shape());
    strided(k, 0, |d| from[a.dims[d] as usize]);
}

pub(super) fn flip(k: &mut Kernel<'_>, a: &Dims) {
    let from = strides(k.x().shape());
    let last = |&d: &i64| (k.x().shape()[d as usize] as i64 - 1) * from[d as usize];
    let start = a.dims.iter().map(last).sum();
    strided(k, start, |d| {
        if a.dims.contains(&(d as i64)) {
            -from[d]
        } else {
            from[d]
        }
    });
}

pub(super) fn slice(k: &mut Kernel<'_>, a: &Slice) {
    let from = strides(k.x().shape());
    let dim = a.dim as usize;
    strided(k, a.start * from[dim], |d| {
        if d == dim {
            a.step.saturating_mul(from[d])
        } else {
            from[d]
        }
    });
}

pub(super) fn cat(k: &mut Kernel<'_>, a: &Along) {
    let dim = a.dim as usize;
    let to = strides(k.y().shape());
    let mut all = vec![];
    let mut at = 0;
    for (operand, ty) in k.operands.iter().enumerate() {
        let from = strides(ty.shape());
        let mut nest = Nest::new([0, at * to[dim]]);
        for (d, &size) in ty.shape().iter().enumerate() {
            nest.push(size, [from[d], to[d]]);
        }
        at += ty.shape()[dim] as i64;
        if ty.numel() > 0 {
            all.push(Copy { operand, nest });
        }
    }
    copies(k, all);
}

/// Each element of the result is an element of the source, or keeps its place. A thread reads
/// before it writes, so the result may have the bytes of operand 0.
pub(super) fn slice_scatter(k: &mut Kernel<'_>, a: &Slice) {
    let bytes = k.x().dtype().bytes();
    let [_, size, inner] = around(k.x().shape(), a.dim);
    let part = k.operands[1].shape()[a.dim as usize];
    let unit = Unit::dividing([inner * bytes]);
    let inner = inner * bytes / unit.0;
    let n = k.x().bytes() / unit.0;
    k.elements(n, |g, i| {
        let [row, column] = g.divided(i, inner);
        let [outer, at] = g.divided(row, size);
        let past = g.plus(at, -a.start);
        let [which, off] = g.divided(past, a.step as u64);
        let zero = g.b.long(0);
        let [hits, within] = [g.equal(off, zero), g.below(past, (a.end - a.start) as u64)];
        let taken = g.b.andi(hits, within);
        let (x, source, y) = (g.operand(0), g.operand(1), g.result(0));
        let own = g.bits(x, i, unit);
        let new = g.choose(taken, &[own], |g| {
            let row = g.times(outer, part);
            let row = g.b.addi(row, which);
            let from = g.times(row, inner);
            let from = g.b.addi(from, column);
            vec![g.bits(source, from, unit)]
        });
        g.put_bits(y, i, new[0], unit);
    });
}

pub(super) fn pad(k: &mut Kernel<'_>, a: &Pad) {
    let (dtype, n) = (k.y().dtype(), k.y().numel());
    let (from, to) = (k.x().shape().to_vec(), k.y().shape().to_vec());
    let steps = strides(&from);
    k.elements(n, |g, i| {
        let at = g.coordinates(i, &to);
        let mut inside = g.b.constant(1, Type::Scalar(Kind::I1));
        let mut places = vec![];
        for (d, &at) in at.iter().enumerate() {
            let place = g.plus(at, -a.pad[2 * d]);
            let within = g.below(place, from[d]);
            inside = g.b.andi(inside, within);
            places.push(place);
        }
        let value = g.value(a.value, dtype);
        let (x, y) = (g.operand(0), g.result(0));
        let value = g.choose(inside, &[value], |g| {
            let from = g.offset(&places, &steps, 0);
            vec![g.get(x, from)]
        });
        g.put(y, i, value[0]);
    });
}

pub(super) fn arange(k: &mut Kernel<'_>, a: &Arange) {
    let (dtype, n) = (k.y().dtype(), k.y().numel());
    k.elements(n, |g, i| {
        let y = g.result(0);
        let x = if dtype.is_float() {
            let [start, step] = [a.start, a.step].map(|x| g.number(x, Kind::F64));
            let i = g.double(i);
            let past = g.mul(step, i);
            let x = g.add(start, past);
            g.rounded(x, dtype)
        } else {
            let [start, step] = [a.start, a.step].map(|x| g.number(x, Kind::I64));
            let past = g.mul(step, i);
            g.add(start, past)
        };
        g.put(y, i, x);
    });
}
