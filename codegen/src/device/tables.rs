//! Reading and writing at indices that are data.
//!
//! Writes to one place keep their order: one thread does all of them, one after the other.

use super::Kernel;
use super::grid::{Grid, Tensor, Unit};
use super::moves::{broadcast, copy, strides};
use super::sorted::Sorted;
use crate::kernels::wide;
use crate::mlir::{Emit, Kind, Predicate, Value};
use ir::TensorType;
use ir::op::attrs::{Along, EmbeddingBwd, IndexPut, ScatterValue};
use ir::op::sorting::Sorting;

/// The unit in which an operand's elements are moved.
fn element(ty: &TensorType) -> Unit {
    Unit(ty.dtype().bytes())
}

/// The bits at a column of a row of `width` units, if the row exists; otherwise all ones.
fn row_bits(
    g: &mut Grid,
    table: Tensor,
    (row, exists): (Value, Value),
    (column, width): (Value, u64),
    unit: Unit,
) -> Value {
    guarded(g, exists, unit, |g| {
        let from = g.times(row, width);
        let from = g.b.addi(from, column);
        g.bits(table, from, unit)
    })
}

/// Bits that are read if a condition holds; otherwise all ones.
fn guarded(
    g: &mut Grid,
    inside: Value,
    unit: Unit,
    read: impl FnOnce(&mut Grid) -> Value,
) -> Value {
    let ones = g.b.constant(u64::MAX, unit.ty());
    g.choose(inside, &[ones], |g| vec![read(g)])[0]
}

// --- tables of rows ---

pub(super) fn embedding(k: &mut Kernel<'_>) {
    let (rows, width) = (k.x().shape()[0], k.x().shape()[1]);
    let bytes = width * k.x().dtype().bytes();
    let unit = Unit::dividing([bytes]);
    let width = bytes / unit.0;
    let n = k.operands[1].numel() * width;
    k.elements(n, |g, i| {
        let [which, column] = g.divided(i, width);
        let (w, index, y) = (g.operand(0), g.operand(1), g.result(0));
        let row = g.get(index, which);
        let exists = g.below(row, rows);
        let bits = row_bits(g, w, (row, exists), (column, width), unit);
        g.put_bits(y, i, bits, unit);
    });
}

/// The indices are sorted by row. Then each row is summed in f64, in the order of its indices.
pub(super) fn embedding_bwd(k: &mut Kernel<'_>, a: &EmbeddingBwd) {
    let (rows, width, dtype) = (k.y().shape()[0], k.y().shape()[1], k.y().dtype());
    let sorting = Sorting {
        items: k.operands[1].numel(),
        keys: rows,
        lines: 1,
    };
    k.scratch_bytes = sorting.scratch_bytes();
    k.elements(rows * width, |g, i| {
        let dw = g.result(0);
        let zero = g.float(0.0, wide(dtype));
        g.put(dw, i, zero);
    });
    let sorted = Sorted::new(k, sorting, |g, i| {
        let index = g.operand(1);
        let (row, none) = (g.get(index, i), g.b.long(rows));
        let padding = g.b.long(a.padding as u64);
        let [exists, counts] = [g.below(row, rows), g.b.compare(Predicate::Ne, row, padding)];
        let counts = g.b.andi(exists, counts);
        g.b.select(counts, row, none)
    });
    k.elements(sorting.items * width, |g, i| {
        let [at, column] = g.divided(i, width);
        let row = sorted.key(g, at);
        let is_first = sorted.is_first(g, at, row);
        g.when(is_first, |g| {
            let (dy, dw) = (g.operand(0), g.result(0));
            let nothing = g.float(0.0, Kind::F64);
            let load = |g: &mut Grid, item| {
                let from = g.times(item, width);
                let from = g.b.addi(from, column);
                let x = g.get(dy, from);
                g.double(x)
            };
            let sum = sorted.fold(g, [at, row], nothing, load, |g, sum, x| g.add(sum, x));
            let (to, sum) = (g.times(row, width), g.rounded(sum, dtype));
            let to = g.b.addi(to, column);
            g.put(dw, to, sum);
        });
    });
}

// --- gather and scatter ---

pub(super) fn gather(k: &mut Kernel<'_>, a: &Along) {
    let (dim, unit) = (a.dim as usize, element(k.x()));
    let (size, shape) = (k.x().shape()[dim], k.y().shape().to_vec());
    let steps = strides(k.x().shape());
    k.elements(k.y().numel(), |g, i| {
        let (x, index, y) = (g.operand(0), g.operand(1), g.result(0));
        let mut at = g.coordinates(i, &shape);
        at[dim] = g.get(index, i);
        let inside = g.below(at[dim], size);
        let bits = guarded(g, inside, unit, |g| {
            let from = g.offset(&at, &steps, 0);
            g.bits(x, from, unit)
        });
        g.put_bits(y, i, bits, unit);
    });
}

/// Copies operand 0, then writes at the indices. Indices that differ only along `dim` are a line.
/// Several threads read it, if there are few lines; each writes only to its own places in the
/// result's line. `write` gets the place in the result and the coordinates of the index.
fn scattered(k: &mut Kernel<'_>, dim: i64, write: impl FnOnce(&mut Grid, Value, &[Value])) {
    copy(k, 0);
    let dim = dim as usize;
    let shape = k.operands[1].shape().to_vec();
    let (size, steps, own) = (k.x().shape()[dim], strides(k.x().shape()), strides(&shape));
    let mut lines = shape.clone();
    lines[dim] = 1;
    if k.operands[1].numel() == 0 {
        return;
    }
    let n_lines = lines.iter().product();
    let readers = readers(n_lines, shape[dim]);
    k.elements(readers * n_lines, |g, i| {
        let [reader, line] = g.divided(i, n_lines);
        let mut at = g.coordinates(line, &lines);
        let index = g.operand(1);
        g.count(shape[dim], &[], |g, i, _| {
            at[dim] = i;
            let which = g.offset(&at, &own, 0);
            let to = g.get(index, which);
            let (inside, [_, owner]) = (g.below(to, size), g.divided(to, readers));
            let is_own = g.equal(owner, reader);
            let writes = g.b.andi(inside, is_own);
            g.when(writes, |g| {
                let mut places = at.clone();
                places[dim] = to;
                let to = g.offset(&places, &steps, 0);
                write(g, to, &at);
            });
            vec![]
        });
    });
}

/// The number of threads that read a line of so many indices.
fn readers(lines: u64, indices: u64) -> u64 {
    /// Threads that keep a GPU busy.
    const THREADS: u64 = 1 << 16;
    /// Writes that are worth another thread, which reads all indices.
    const WRITES: u64 = 8;
    let most = (THREADS / lines.max(1)).min(indices / WRITES);
    1 << most.max(1).ilog2()
}

pub(super) fn scatter(k: &mut Kernel<'_>, a: &Along) {
    let (unit, steps) = (element(k.x()), strides(k.operands[2].shape()));
    scattered(k, a.dim, |g, to, at| {
        let (source, y) = (g.operand(2), g.result(0));
        let from = g.offset(at, &steps, 0);
        let bits = g.bits(source, from, unit);
        g.put_bits(y, to, bits, unit);
    });
}

pub(super) fn scatter_add(k: &mut Kernel<'_>, a: &Along) {
    let steps = strides(k.operands[2].shape());
    scattered(k, a.dim, |g, to, at| {
        let (source, y) = (g.operand(2), g.result(0));
        let from = g.offset(at, &steps, 0);
        let (sum, x) = (g.get(y, to), g.get(source, from));
        let sum = g.add(sum, x);
        g.put(y, to, sum);
    });
}

pub(super) fn scatter_value(k: &mut Kernel<'_>, a: &ScatterValue) {
    let dtype = k.x().dtype();
    scattered(k, a.dim, |g, to, _| {
        let value = g.value(a.value, dtype);
        let y = g.result(0);
        g.put(y, to, value);
    });
}

// --- several indices at once ---

/// The operands of indices: their broadcast shape, the dimensions that they index, and the strides
/// of each.
struct Points {
    first: usize,
    shape: Vec<u64>,
    sizes: Vec<u64>,
    steps: Vec<Vec<i64>>,
    /// The number of contiguous elements at each index.
    width: u64,
}

impl Points {
    /// The operands of indices from `first` on.
    fn new(k: &Kernel<'_>, first: usize) -> Points {
        let indices = &k.operands[first..];
        let rank = indices.iter().map(TensorType::rank).max().unwrap_or(0);
        let mut shape = vec![1; rank];
        for index in indices {
            let tail = shape[rank - index.rank()..].iter_mut();
            let sizes = tail.zip(index.shape()).filter(|&(_, &size)| size != 1);
            sizes.for_each(|(to, &size)| *to = size);
        }
        let (sizes, rest) = k.x().shape().split_at(indices.len());
        let steps = indices.iter().map(|index| broadcast(index.shape(), &shape));
        Points {
            first,
            steps: steps.collect(),
            shape,
            sizes: sizes.to_vec(),
            width: rest.iter().product(),
        }
    }

    fn n(&self) -> u64 {
        self.shape.iter().product()
    }

    /// The row of operand 0 for a point, and whether it exists.
    fn row(&self, g: &mut Grid, point: Value) -> (Value, Value) {
        let at = g.coordinates(point, &self.shape);
        let mut row = g.b.long(0);
        let mut inside = g.b.constant(1, crate::mlir::Type::Scalar(Kind::I1));
        for (i, (&size, steps)) in self.sizes.iter().zip(&self.steps).enumerate() {
            let from = g.offset(&at, steps, 0);
            let index = g.operand(self.first + i);
            let index = g.get(index, from);
            // Negative indices count from the end.
            let zero = g.b.long(0);
            let (before, wrapped) = (g.less(index, zero), g.plus(index, size as i64));
            let index = g.b.select(before, wrapped, index);
            let within = g.below(index, size);
            inside = g.b.andi(inside, within);
            let above = g.times(row, size);
            row = g.b.addi(above, index);
        }
        (row, inside)
    }
}

pub(super) fn index(k: &mut Kernel<'_>) {
    let points = Points::new(k, 1);
    let bytes = points.width * k.x().dtype().bytes();
    let unit = Unit::dividing([bytes]);
    let width = bytes / unit.0;
    k.elements(points.n() * width, |g, i| {
        let (x, y) = (g.operand(0), g.result(0));
        let [point, column] = g.divided(i, width);
        let row = points.row(g, point);
        let bits = row_bits(g, x, row, (column, width), unit);
        g.put_bits(y, i, bits, unit);
    });
}

/// The points are sorted by row. Then each row gets its values in the order of its points, or the
/// last one.
pub(super) fn index_put(k: &mut Kernel<'_>, a: &IndexPut) {
    let points = Points::new(k, 2);
    let rest = &k.x().shape()[points.sizes.len()..];
    let shape = [&points.shape, rest].concat();
    let (steps, dtype, width) = (
        broadcast(k.operands[1].shape(), &shape),
        k.x().dtype(),
        points.width,
    );
    let sorting = Sorting {
        items: points.n(),
        keys: points.sizes.iter().product(),
        lines: 1,
    };
    k.scratch_bytes = sorting.scratch_bytes();
    copy(k, 0);
    let sorted = Sorted::new(k, sorting, |g, point| {
        let (row, inside) = points.row(g, point);
        let none = g.b.long(sorting.keys);
        g.b.select(inside, row, none)
    });
    k.elements(sorting.items * width, |g, i| {
        let [at, column] = g.divided(i, width);
        let (row, values, y) = (sorted.key(g, at), g.operand(1), g.result(0));
        let from = |g: &mut Grid, point| {
            let i = g.times(point, width);
            let i = g.b.addi(i, column);
            let at = g.coordinates(i, &shape);
            g.offset(&at, &steps, 0)
        };
        let to = |g: &mut Grid| {
            let to = g.times(row, width);
            g.b.addi(to, column)
        };
        if a.accumulate {
            let is_first = sorted.is_first(g, at, row);
            return g.when(is_first, |g| {
                let to = to(g);
                let start = g.get(y, to);
                let load = |g: &mut Grid, point| {
                    let from = from(g, point);
                    g.get(values, from)
                };
                let sum = sorted.fold(g, [at, row], start, load, |g, sum, x| {
                    let sum = g.add(sum, x);
                    g.stored(sum, dtype)
                });
                g.put(y, to, sum);
            });
        }
        let is_last = sorted.is_last(g, at, row);
        g.when(is_last, |g| {
            let (to, point, unit) = (to(g), sorted.item(g, at), Unit(dtype.bytes()));
            let from = from(g, point);
            let bits = g.bits(values, from, unit);
            g.put_bits(y, to, bits, unit);
        });
    });
}
