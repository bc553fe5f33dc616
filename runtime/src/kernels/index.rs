//! Reading and writing at indices that are data. An index out of range is an error in the data: it
//! is reported, and the result is then unspecified.

use super::elementwise::{is_any, is_number};
use super::shape::{constant, copied};
use super::signature::{Checked, MAX_RANK, Signature, broadcast_shapes, ensure, is_float, is_half};
use super::strides::{Broadcast, Nest, contiguous, count};
use super::wide::{BLOCK, Scalar, Wide, bits, blocks, blocks_of, every_number, sink, source};
use super::{Cut, DataError, Ran};
use crate::kernel::Call;
use artifact::DType;
use std::ops::Range;

// --- checks ---

pub(super) fn check_embedding(s: &Signature<'_>) -> Checked {
    s.expect_index(1)?;
    s.expect_rank(0, 2)?;
    let shape: Vec<u64> = s.shape(1).iter().chain(&s.shape(0)[1..]).copied().collect();
    s.results(&[(s.dtype(0), &shape)])
}
pub(super) fn check_embedding_bwd(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.expect_index(1)?;
    s.int("padding")?;
    let (dy, index) = (s.shape(0), s.shape(1));
    let fits = dy.len() == index.len() + 1 && dy[..index.len()] == *index;
    ensure(fits, || {
        "operand 0 should have operand 1's shape and one more dimension".into()
    })?;
    let rows =
        u64::try_from(s.int("rows")?).map_err(|_| "rows should not be negative".to_string())?;
    let small = rows < 1 << 31 && index.iter().product::<u64>() < 1 << 31;
    ensure(small, || "2^31 rows or indices are too many".into())?;
    s.results(&[(s.dtype(0), &[rows, dy[index.len()]])])
}
/// For each row a list of its indices, i32 each.
pub(super) fn embedding_bwd_scratch(s: &Signature<'_>) -> u64 {
    4 * (s.outs[0].shape[0] + s.shape(1).iter().product::<u64>())
}
/// `index` has the rank of operand 0, and no dimension other than `dim` is larger.
fn check_indexed(s: &Signature<'_>) -> Checked {
    let dim = s.dim("dim", 0)?;
    s.expect_index(1)?;
    let (x, index) = (s.shape(0), s.shape(1));
    let fits = x.len() == index.len() && (0..x.len()).all(|i| i == dim || index[i] <= x[i]);
    ensure(fits, || "operand 1 does not fit operand 0".into())
}
pub(super) fn check_gather(s: &Signature<'_>) -> Checked {
    check_indexed(s)?;
    s.results(&[(s.dtype(0), s.shape(1))])
}
pub(super) fn check_scatter(s: &Signature<'_>) -> Checked {
    check_indexed(s)?;
    s.expect_dtype(2, 0)?;
    let fits = s.rank(2) == s.rank(1) && s.shape(1).iter().zip(s.shape(2)).all(|(i, s)| i <= s);
    ensure(fits, || "operand 2 is smaller than operand 1".into())?;
    s.results(&[(s.dtype(0), s.shape(0))])
}
pub(super) fn check_scatter_add(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_number)?;
    check_scatter(s)
}
pub(super) fn check_scatter_value(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_any)?;
    s.number("value", DType::F32)?;
    check_indexed(s)?;
    s.results(&[(s.dtype(0), s.shape(0))])
}
/// The shape of operand 0 indexed by the operands from `first` on.
fn indexed_shape(s: &Signature<'_>, first: usize) -> Result<Vec<u64>, String> {
    let (x, n) = (s.shape(0), s.ins.len() - first);
    ensure(n <= x.len(), || "more indices than dimensions".into())?;
    let mut shape = vec![];
    for i in first..s.ins.len() {
        s.expect_index(i)?;
        shape = broadcast_shapes(&shape, s.shape(i))?;
    }
    shape.extend(&x[n..]);
    ensure(shape.len() <= MAX_RANK, || {
        "the indexed tensor's rank is too high".into()
    })?;
    Ok(shape)
}
pub(super) fn check_index(s: &Signature<'_>) -> Checked {
    s.results(&[(s.dtype(0), &indexed_shape(s, 1)?)])
}
pub(super) fn check_index_put(s: &Signature<'_>) -> Checked {
    if s.bool("accumulate")? {
        s.has_kernel(0, is_number)?;
    }
    let shape = indexed_shape(s, 2)?;
    // The kernel visits all its elements, even if the operands have fewer: 2^32 take a minute.
    let points = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d.max(1)));
    ensure(points.is_some_and(|n| n <= 1 << 32), || {
        "the indexed tensor is too large".into()
    })?;
    // What is added up in f32 may be in half precision.
    if !(s.bool("accumulate")? && s.dtype(0) == DType::F32 && is_half(s.dtype(1))) {
        s.expect_dtype(1, 0)?;
    }
    ensure(broadcast_shapes(s.shape(1), &shape)? == shape, || {
        "the values do not broadcast".into()
    })?;
    s.results(&[(s.dtype(0), s.shape(0))])
}

// --- indices ---

/// An operand of indices, and which of them are right.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct IndexOperand {
    /// The operand, from 0.
    pub(crate) operand: usize,
    /// The dimension's size.
    pub(crate) size: u64,
    /// Negative indices count from the end.
    pub(crate) from_end: bool,
    /// An index that stands for none.
    pub(crate) ignored: Option<i64>,
}

impl IndexOperand {
    pub(super) fn new(operand: usize, size: u64) -> IndexOperand {
        IndexOperand {
            operand,
            size,
            from_end: false,
            ignored: None,
        }
    }

    /// What is wrong with an index.
    pub(super) fn wrong(&self, index: i64) -> DataError {
        let size = self.size as usize;
        match self.from_end {
            true => DataError::SignedIndex { index, size },
            false => DataError::Index { index, size },
        }
    }
}

pub(super) fn of_rows(s: &Signature<'_>) -> Vec<IndexOperand> {
    vec![IndexOperand::new(1, s.shape(0)[0])]
}
pub(super) fn of_result_rows(s: &Signature<'_>) -> Vec<IndexOperand> {
    vec![IndexOperand::new(1, s.outs[0].shape[0])]
}
pub(super) fn along(s: &Signature<'_>) -> Vec<IndexOperand> {
    let size = s.dim("dim", 0).map(|dim| s.shape(0)[dim]);
    size.map_or(vec![], |size| vec![IndexOperand::new(1, size)])
}
/// Operands from `first` on: each indexes a dimension of operand 0.
fn from(first: usize, s: &Signature<'_>) -> Vec<IndexOperand> {
    let sizes = (first..s.ins.len()).zip(s.shape(0));
    let operand = |(operand, &size)| IndexOperand {
        from_end: true,
        ..IndexOperand::new(operand, size)
    };
    sizes.map(operand).collect()
}
pub(super) fn from_1(s: &Signature<'_>) -> Vec<IndexOperand> {
    from(1, s)
}
pub(super) fn from_2(s: &Signature<'_>) -> Vec<IndexOperand> {
    from(2, s)
}

/// An operand of indices.
pub(super) enum Indices<'a> {
    I32(&'a [i32]),
    I64(&'a [i64]),
}

impl<'a> Indices<'a> {
    pub(super) fn new(call: &Call<'a>, i: usize) -> Indices<'a> {
        match call.in_dtype(i) {
            DType::I32 => Indices::I32(call.input(i)),
            _ => Indices::I64(call.input(i)),
        }
    }
    pub(super) fn at(&self, i: usize) -> i64 {
        match self {
            Indices::I32(x) => i64::from(x[i]),
            Indices::I64(x) => x[i],
        }
    }
}

/// An index in `0..size`, or what is wrong with it.
pub(super) fn in_range(index: i64, size: usize) -> Result<usize, DataError> {
    usize::try_from(index)
        .ok()
        .filter(|&i| i < size)
        .ok_or(DataError::Index { index, size })
}

// --- tables ---

pub(super) fn cut_embedding(call: &Call<'_>) -> Cut {
    Cut::of(count(call.in_shape(1)), call.in_shape(0)[1])
}
pub(super) fn embedding(call: &Call<'_>) -> Ran {
    let &[rows, width] = call.in_shape(0) else {
        return Err(DataError::NoMatrix {
            tensor: "operand 0",
        });
    };
    let (index, n) = (Indices::new(call, 1), count(call.in_shape(1)));
    bits!(call.out_dtype(0), B => {
        let (w, y): (&[B], &mut [B]) = (call.input_bits(0), call.output_bits(0));
        let part = call.part(n);
        for i in part.clone() {
            let row = in_range(index.at(i), rows)?;
            y[(i - part.start) * width..][..width].copy_from_slice(&w[row * width..][..width]);
        }
    });
    Ok(())
}

/// The end of a chain of indices.
const END: i32 = -1;

/// The indices of each row form a chain, so that a row is summed in f64 in the order of its indices
/// and written once.
pub(super) fn embedding_bwd_chains(call: &Call<'_>) -> Ran {
    let rows = call.out_shape(0)[0];
    let (index, n, padding) = (
        Indices::new(call, 1),
        count(call.in_shape(1)),
        call.int("padding"),
    );
    let (heads, nexts) = call.scratch::<i32>().split_at_mut(rows);
    heads.fill(END);
    for i in (0..n).rev() {
        let row = in_range(index.at(i), rows)?;
        if index.at(i) != padding {
            nexts[i] = heads[row];
            heads[row] = i as i32;
        }
    }
    Ok(())
}
pub(super) fn cut_embedding_bwd(call: &Call<'_>) -> Cut {
    Cut::of(call.out_shape(0)[0], call.out_shape(0)[1])
}
/// Sums along the chains that [`embedding_bwd_chains`] made.
pub(super) fn embedding_bwd(call: &Call<'_>) -> Ran {
    let &[rows, width] = call.out_shape(0) else {
        return Err(DataError::NoMatrix { tensor: "result 0" });
    };
    let (heads, nexts) = call.scratch_read::<i32>().split_at(rows);
    let (dy, mut dw) = (source(call, 0), sink(call, 0));
    let mut xs = [0.0; BLOCK];
    for row in call.part(rows) {
        for (block, len) in blocks(width) {
            let mut sums = [0.0; BLOCK];
            let mut next = heads[row];
            while next != END {
                dy.load(&dw, next as usize * width + block, &mut xs[..len]);
                (0..len).for_each(|j| sums[j] += xs[j]);
                next = nexts[next as usize];
            }
            dw.store(row * width + block, &sums[..len]);
        }
    }
    Ok(())
}

// --- gather and scatter ---

/// Calls `f` for every index of some rows, in order, with its positions in operand 0 and in a
/// tensor of shape `other`. A row is an element of the first dimension.
fn indexed(
    call: &Call<'_>,
    other: &[usize],
    rows: Range<usize>,
    mut f: impl FnMut(usize, usize),
) -> Ran {
    let (size, index) = (
        call.in_shape(0)[call.int("dim") as usize],
        Indices::new(call, 1),
    );
    let mut ran = Ok(());
    lines(call, other, rows, &mut |line| {
        let [mut at, mut other] = line.start;
        for i in line.indices {
            match in_range(index.at(i), size) {
                Ok(index) => f(at as usize + index * line.stride, other as usize),
                Err(e) if ran.is_ok() => ran = Err(e),
                Err(_) => {}
            }
            at += line.steps[0];
            other += line.steps[1];
        }
    });
    ran
}

/// Neighbouring indices.
struct Line {
    indices: Range<usize>,
    /// The positions of the first in operand 0, for an index of 0, and in the other tensor.
    start: [isize; 2],
    /// The distances to those of the next.
    steps: [isize; 2],
    /// The distance in operand 0 from an index to the next.
    stride: usize,
}

/// Calls `f` for every line of the indices of some rows. It is one function for all types.
fn lines(call: &Call<'_>, other: &[usize], rows: Range<usize>, f: &mut dyn FnMut(Line)) {
    let (shape, dim) = (call.in_shape(0), call.int("dim") as usize);
    let (strides, others) = (contiguous(shape), contiguous(other));
    let own = |d: usize| [if d == dim { 0 } else { strides[d] }, others[d]];
    let mut nest = Nest::<2>::new();
    let mut start = [0, 0];
    for (d, &size) in call.in_shape(1).iter().enumerate() {
        if d == 0 {
            nest.push(rows.len(), own(d));
            start = own(d).map(|stride| stride * rows.start as isize);
        } else {
            nest.push(size, own(d));
        }
    }
    let mut i = rows.start * count(call.in_shape(1).get(1..).unwrap_or(&[]));
    let (width, steps) = nest.pop();
    nest.each(start, |start| {
        f(Line {
            indices: i..i + width,
            start,
            steps,
            stride: strides[dim] as usize,
        });
        i += width;
    });
}
/// The number of rows of the indices.
fn rows(call: &Call<'_>) -> usize {
    call.in_shape(1).first().copied().unwrap_or(1)
}
pub(super) fn cut_gather(call: &Call<'_>) -> Cut {
    let n = count(call.in_shape(1));
    Cut::of(rows(call), n / rows(call).max(1))
}
pub(super) fn gather(call: &Call<'_>) -> Ran {
    let part = call.part(rows(call));
    let start = call.output_start(0);
    bits!(call.out_dtype(0), B => {
        let (x, y): (&[B], &mut [B]) = (call.input_bits(0), call.output_bits(0));
        indexed(call, call.out_shape(0), part, |at, i| y[i - start] = x[at])
    })
}
pub(super) fn scatter(call: &Call<'_>) -> Ran {
    bits!(call.out_dtype(0), B => {
        let (y, values) = (copied::<B>(call), call.input_bits::<B>(2));
        indexed(call, call.in_shape(2), 0..rows(call), |at, i| y[at] = values[i])
    })
}
pub(super) fn scatter_add(call: &Call<'_>) -> Ran {
    every_number!(call.out_dtype(0), T, W => {
        let (y, values) = (call.output::<T>(0), call.input::<T>(2));
        if call.inplace(0).is_none() {
            y.copy_from_slice(call.input(0));
        }
        indexed(call, call.in_shape(2), 0..rows(call), |at, i| {
            y[at] = W::of(y[at]).plus(W::of(values[i])).narrow();
        })
    })
}
pub(super) fn scatter_value(call: &Call<'_>) -> Ran {
    bits!(call.out_dtype(0), B => {
        let (y, value) = (copied::<B>(call), constant(call) as B);
        indexed(call, call.in_shape(1), 0..rows(call), |at, _| y[at] = value)
    })
}

// --- several indices at once ---

/// The largest number of index operands.
const MAX_INDICES: usize = 8;

/// The shape to which the operands from `first` on broadcast, and its rank.
fn points_shape(call: &Call<'_>, first: usize) -> ([usize; MAX_RANK], usize) {
    let mut shape = [1; MAX_RANK];
    let rank = (first..call.n_inputs())
        .map(|i| call.in_shape(i).len())
        .max()
        .unwrap_or(0);
    for own in (first..call.n_inputs()).map(|i| call.in_shape(i)) {
        let tail = shape[rank - own.len()..].iter_mut();
        tail.zip(own)
            .filter(|&(_, &size)| size != 1)
            .for_each(|(to, &size)| *to = size);
    }
    (shape, rank)
}

/// Calls `f` for some neighbouring points in `part` of the broadcast indices at a time, with the
/// number of the first point, and the row of operand 0 of each. The indices are the operands from
/// `first` on. A row consists of the dimensions that are not indexed.
fn points(
    call: &Call<'_>,
    first: usize,
    part: Range<usize>,
    f: &mut dyn FnMut(usize, &[usize]),
) -> Ran {
    let (x, n) = (call.in_shape(0), call.n_inputs() - first);
    let (shape, rank) = points_shape(call, first);
    let shape = &shape[..rank];
    let indices: [Option<(Indices<'_>, Broadcast)>; MAX_INDICES] = std::array::from_fn(|k| {
        (k < n).then(|| {
            (
                Indices::new(call, first + k),
                Broadcast::new(call.in_shape(first + k), shape),
            )
        })
    });
    for (at, len) in blocks_of(part) {
        let mut rows = [0usize; BLOCK];
        for (k, (index, order)) in indices.iter().flatten().enumerate() {
            let mut ran = Ok(());
            order.runs(at, len, |range, from, follow| {
                for (i, row) in rows[range].iter_mut().enumerate() {
                    let index = index.at(if follow { from + i } else { from });
                    // Negative indices count from the end, as in PyTorch.
                    let wrapped = if index < 0 {
                        index.saturating_add(x[k] as i64)
                    } else {
                        index
                    };
                    match in_range(wrapped, x[k]) {
                        Ok(index) => *row = *row * x[k] + index,
                        Err(_) => {
                            let size = x[k];
                            ran = Err(DataError::SignedIndex { index, size });
                        }
                    }
                }
            });
            ran?;
        }
        f(at, &rows[..len]);
    }
    Ok(())
}
pub(super) fn cut_index(call: &Call<'_>) -> Cut {
    let (shape, rank) = points_shape(call, 1);
    Cut::of(
        count(&shape[..rank]),
        count(&call.in_shape(0)[call.n_inputs() - 1..]),
    )
}
pub(super) fn index(call: &Call<'_>) -> Ran {
    let width = count(&call.in_shape(0)[call.n_inputs() - 1..]);
    let (shape, rank) = points_shape(call, 1);
    let part = call.part(count(&shape[..rank]));
    bits!(call.out_dtype(0), B => {
        let (x, y): (&[B], &mut [B]) = (call.input_bits(0), call.output_bits(0));
        let start = call.output_start(0);
        points(call, 1, part, &mut |at, rows| {
            for (i, &row) in rows.iter().enumerate() {
                y[(at + i) * width - start..][..width].copy_from_slice(&x[row * width..][..width]);
            }
        })
    })
}
pub(super) fn index_put(call: &Call<'_>) -> Ran {
    match call.in_dtype(1) {
        dtype if dtype == call.out_dtype(0) => {}
        DType::BF16 => return add_half::<half::bf16>(call),
        DType::F16 => return add_half::<half::f16>(call),
        other => return Err(DataError::NoKernel(other)),
    }
    if call.bool("accumulate") {
        return every_number!(call.out_dtype(0), T, W => {
            let y = call.output::<T>(0);
            if call.inplace(0).is_none() {
                y.copy_from_slice(call.input(0));
            }
            put(call, y, call.input::<T>(1), |y, value| *y = W::of(*y).plus(W::of(value)).narrow())
        });
    }
    bits!(call.out_dtype(0), B => {
        let y = copied::<B>(call);
        put(call, y, call.input_bits::<B>(1), |y, value| *y = value)
    })
}
/// Adds values in half precision to numbers in f32.
fn add_half<T: Scalar>(call: &Call<'_>) -> Ran {
    let y = call.output::<f32>(0);
    if call.inplace(0).is_none() {
        y.copy_from_slice(call.input(0));
    }
    put(call, y, call.input::<T>(1), |y, value| *y += value.f32())
}
/// Calls `f` with each indexed element of `y` and its value.
fn put<T, V: Copy>(call: &Call<'_>, y: &mut [T], values: &[V], f: impl Fn(&mut T, V)) -> Ran {
    runs_put(call, &mut |range, from, follow| {
        for (j, y) in y[range].iter_mut().enumerate() {
            f(y, values[if follow { from + j } else { from }]);
        }
    })
}
/// Calls `f` with each run of indexed elements, the place of the first one's value, and whether the
/// values of the others follow it or are the same. It is one function for all types.
fn runs_put(call: &Call<'_>, f: &mut dyn FnMut(Range<usize>, usize, bool)) -> Ran {
    let first = 2;
    let rest = &call.in_shape(0)[call.n_inputs() - first..];
    let width = count(rest);
    // The shape of the indexed tensor: the indices' broadcast to each other, then the rest.
    let (mut shape, lead) = points_shape(call, first);
    shape[lead..lead + rest.len()].copy_from_slice(rest);
    let order = Broadcast::new(call.in_shape(1), &shape[..lead + rest.len()]);
    points(call, first, 0..count(&shape[..lead]), &mut |at, rows| {
        for (i, &row) in rows.iter().enumerate() {
            order.runs((at + i) * width, width, |range, from, follow| {
                let start = row * width;
                f(start + range.start..start + range.end, from, follow);
            });
        }
    })
}
