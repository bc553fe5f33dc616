//! Reductions over dimensions, running sums, and the largest of a line.

use super::elementwise::{is_any, is_number};
use super::signature::{Checked, Signature, ensure, is_float, is_integer};
use super::strides::{Nest, around, contiguous, count};
use super::wide::{BLOCK, Scalar, Sink, Source, Wide, blocks, sink, source, wide, wide_float};
use super::{Cut, DataError, Ran};
use crate::kernel::{Call, Element};
use artifact::DType;
use pulp::{Arch, Simd, WithSimd};
use std::cmp::Ordering::{Greater, Less};
use std::marker::PhantomData;
use std::ops::Range;

// --- checks ---

fn check_reduction(s: &Signature<'_>, fits: fn(DType) -> bool, result: DType) -> Checked {
    s.has_kernel(0, fits)?;
    let (dims, keep) = (s.dims("dims", 0)?, s.bool("keepdim")?);
    let mut shape = vec![];
    for (i, &d) in s.shape(0).iter().enumerate() {
        match (dims.contains(&i), keep) {
            (false, _) => shape.push(d),
            (true, true) => shape.push(1),
            (true, false) => {}
        }
    }
    s.results(&[(result, &shape)])
}
pub(super) fn check_numbers(s: &Signature<'_>) -> Checked {
    check_reduction(s, is_number, s.dtype(0))
}
pub(super) fn check_floats(s: &Signature<'_>) -> Checked {
    check_reduction(s, is_float, s.dtype(0))
}
pub(super) fn check_extreme(s: &Signature<'_>) -> Checked {
    check_reduction(s, is_any, s.dtype(0))?;
    let fits =
        s.shape(0).iter().product::<u64>() != 0 || s.outs[0].shape.iter().product::<u64>() == 0;
    ensure(fits, || "no numbers have no extreme".into())
}
pub(super) fn check_any(s: &Signature<'_>) -> Checked {
    check_reduction(s, is_any, DType::Bool)
}
pub(super) fn check_cumsum(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_number)?;
    s.dim("dim", 0)?;
    s.results(&[(s.dtype(0), s.shape(0))])
}
pub(super) fn check_topk(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_number)?;
    s.bool("largest")?;
    let (dim, k) = (s.dim("dim", 0)?, s.int("k")?);
    let mut shape = s.shape(0).to_vec();
    ensure(0 <= k && k as u64 <= shape[dim], || {
        format!("k={k} is not in 0..={}", shape[dim])
    })?;
    shape[dim] = k as u64;
    s.results(&[(s.dtype(0), &shape), (DType::I64, &shape)])
}

// --- reductions ---

/// Sums side by side: enough for vector registers, and the order of additions is fixed.
const LANES: usize = 16;

/// A reduction: elements are lifted, combined, and the combination is finished.
#[derive(Clone, Copy)]
struct Fold<A, L, C> {
    start: A,
    lift: L,
    combine: C,
}

impl<A: Copy, L, C: Fn(A, A) -> A> Fold<A, L, C> {
    /// Combines a line of elements that follow each other.
    #[inline(always)]
    fn line<W: Wide>(
        &self,
        x: &Source<'_>,
        y: &Sink<'_>,
        at: usize,
        n: usize,
        lanes: &mut [A; LANES],
    ) where
        L: Fn(W) -> A,
    {
        let mut xs = [W::ZERO; BLOCK];
        for (block, len) in blocks(n) {
            x.load(y, at + block, &mut xs[..len]);
            let (whole, rest) = xs[..len].as_chunks::<LANES>();
            // A copy, so that these stay in registers.
            let mut copy = *lanes;
            for part in whole {
                for (lane, &x) in copy.iter_mut().zip(part) {
                    *lane = (self.combine)(*lane, (self.lift)(x));
                }
            }
            *lanes = copy;
            for (lane, &x) in lanes.iter_mut().zip(rest) {
                *lane = (self.combine)(*lane, (self.lift)(x));
            }
        }
    }

    /// Combines at most [`LANES`] combinations, in a tree.
    #[inline(always)]
    fn together(&self, lanes: &mut [A]) -> A {
        let mut width = LANES;
        while 1 < width {
            width /= 2;
            let (low, high) = lanes.split_at_mut(width.min(lanes.len()));
            for (low, high) in low.iter_mut().zip(high) {
                *low = (self.combine)(*low, *high);
            }
        }
        lanes[0]
    }
}

/// Writes the finished combinations over the dimensions `dims` to result 0.
#[inline(always)]
fn reduce<W: Wide, A: Copy>(
    call: &Call<'_>,
    start: A,
    lift: impl Fn(W) -> A,
    combine: impl Fn(A, A) -> A,
    finish: impl Fn(A) -> W,
) -> Ran {
    let fold = Fold {
        start,
        lift,
        combine,
    };
    let (shape, dims) = (call.in_shape(0), call.ints("dims"));
    let (x, mut y) = (source(call, 0), sink(call, 0));
    let strides = contiguous(shape);
    let (mut kept, mut reduced) = (Nest::<1>::new(), Nest::<1>::new());
    for (d, &size) in shape.iter().enumerate() {
        let nest = if dims.contains(&(d as i64)) {
            &mut reduced
        } else {
            &mut kept
        };
        nest.push(size, [strides[d]]);
    }
    let part = call.part(count(call.out_shape(0)));
    // The length of lines. A line has one element if the innermost dimension is kept.
    let n = match reduced.inner_strides() == [1] {
        true => reduced.pop().0,
        false => 1,
    };
    let short = (1..=LANES).contains(&n) && 1 < kept.points();
    if short && kept.inner_strides() == [n as isize] {
        // Short lines that follow each other are combined together.
        let (width, _) = kept.pop();
        let mut out = part.start;
        while out < part.end {
            let (row, column) = (out / width, out % width);
            let len = (BLOCK / n).min(width - column).min(part.end - out);
            let [at] = kept.point(row);
            let mut lanes = [fold.start; BLOCK];
            let mut xs = [W::ZERO; BLOCK];
            reduced.each_here([at + (column * n) as isize], |[at]| {
                x.load(&y, at as usize, &mut xs[..len * n]);
                (0..len * n).for_each(|j| lanes[j] = (fold.combine)(lanes[j], (fold.lift)(xs[j])));
            });
            if n == 1 {
                (0..len).for_each(|j| xs[j] = finish(lanes[j]));
            } else {
                for (x, lanes) in xs.iter_mut().zip(lanes[..len * n].chunks_mut(n)) {
                    *x = finish(fold.together(lanes));
                }
            }
            y.store(out, &xs[..len]);
            out += len;
        }
        return Ok(());
    }
    for out in part {
        let mut lanes = [fold.start; LANES];
        reduced.each_here(kept.point(out), |[at]| {
            fold.line(&x, &y, at as usize, n, &mut lanes)
        });
        y.store(out, &[finish(fold.together(&mut lanes))]);
    }
    Ok(())
}
/// The units are the elements of the result. If rows are combined with rows, a part has enough for
/// a few cache lines of each.
pub(super) fn cut(call: &Call<'_>) -> Cut {
    let shape = call.in_shape(0);
    let (from, to) = (count(shape), count(call.out_shape(0)));
    let cut = Cut::of(to, from / to.max(1));
    let last = shape.iter().rposition(|&size| 1 < size);
    let of_rows = last.is_some_and(|d| !call.ints("dims").contains(&(d as i64)));
    Cut {
        grain: if of_rows && 64 <= to {
            cut.grain.max((to / 4).clamp(64, BLOCK))
        } else {
            cut.grain
        },
        ..cut
    }
}

pub(super) fn sum(call: &Call<'_>) -> Ran {
    if is_integer(call.in_dtype(0)) {
        return reduce(call, 0i64, |x: i64| x, i64::wrapping_add, |sum| sum);
    }
    sum_over(call, 1.0)
}
pub(super) fn mean(call: &Call<'_>) -> Ran {
    let n: usize = call
        .ints("dims")
        .iter()
        .map(|&d| call.in_shape(0)[d as usize])
        .product();
    sum_over(call, n as f64)
}
/// The sum, divided by `n`.
fn sum_over(call: &Call<'_>, n: f64) -> Ran {
    wide_float!(call.in_dtype(0), W => Arch::new().dispatch(Sum::<W>(call, n, PhantomData)))
}

/// Sums in f64, divided by a number.
struct Sum<'a, 'b, W>(&'a Call<'b>, f64, PhantomData<W>);

impl<W: Wide> WithSimd for Sum<'_, '_, W> {
    type Output = Ran;
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> Ran {
        let Sum(call, n, _) = self;
        reduce(
            call,
            0.0,
            |x: W| x.to_f64(),
            |a, b| a + b,
            |sum| W::of_f64(sum / n),
        )
    }
}

pub(super) fn amax(call: &Call<'_>) -> Ran {
    wide!(call.in_dtype(0), W => reduce(call, W::LOWEST, |x: W| x, W::larger, |x| x))
}
pub(super) fn amin(call: &Call<'_>) -> Ran {
    wide!(call.in_dtype(0), W => reduce(call, W::HIGHEST, |x: W| x, W::smaller, |x| x))
}
pub(super) fn any(call: &Call<'_>) -> Ran {
    wide!(call.in_dtype(0), W => reduce(call, false, |x: W| x != W::ZERO, |a, b| a | b, W::flag))
}

// --- lines ---

/// The units are the lines of the outer dimensions.
pub(super) fn cut_lines(call: &Call<'_>) -> Cut {
    let (outer, n, inner) = around(call.in_shape(0), call.int("dim") as usize);
    Cut::of(outer, n * inner)
}
pub(super) fn cumsum(call: &Call<'_>) -> Ran {
    let (outer, n, inner) = around(call.in_shape(0), call.int("dim") as usize);
    let outer = call.part(outer);
    let (x, mut y) = (source(call, 0), sink(call, 0));
    if is_integer(call.in_dtype(0)) {
        running(
            &x,
            &mut y,
            (outer.clone(), n, inner),
            0i64,
            |x: i64| x,
            i64::wrapping_add,
            |sum| sum,
        );
    } else {
        wide_float!(call.in_dtype(0), W => {
            running(&x, &mut y, (outer, n, inner), 0.0, |x: W| x.to_f64(), |a, b| a + b, W::of_f64);
        });
    }
    Ok(())
}

fn running<W: Wide, A: Copy>(
    x: &Source<'_>,
    y: &mut Sink<'_>,
    (outer, n, inner): (Range<usize>, usize, usize),
    start: A,
    lift: impl Fn(W) -> A,
    add: impl Fn(A, A) -> A,
    finish: impl Fn(A) -> W,
) {
    let mut xs = [W::ZERO; BLOCK];
    for o in outer {
        if inner == 1 {
            let mut sum = start;
            for (block, len) in blocks(n) {
                x.load(y, o * n + block, &mut xs[..len]);
                for x in &mut xs[..len] {
                    sum = add(sum, lift(*x));
                    *x = finish(sum);
                }
                y.store(o * n + block, &xs[..len]);
            }
            continue;
        }
        for (block, len) in blocks(inner) {
            let mut sums = [start; BLOCK];
            for i in 0..n {
                let at = (o * n + i) * inner + block;
                x.load(y, at, &mut xs[..len]);
                for (sum, x) in sums.iter_mut().zip(&mut xs[..len]) {
                    *sum = add(*sum, lift(*x));
                    *x = finish(*sum);
                }
                y.store(at, &xs[..len]);
            }
        }
    }
}

pub(super) fn topk(call: &Call<'_>) -> Ran {
    macro_rules! each {
        ($($ty:ty),*) => {
            match call.in_dtype(0) {
                $(<$ty as Element>::DTYPE => {
                    // NaN counts as the largest, as in PyTorch; equal elements keep their order.
                    let larger = |a: $ty, b: $ty| a > b || is_nan(a) && !is_nan(b);
                    let largest = call.bool("largest");
                    topk_of::<$ty>(call, |a, b| if largest { larger(a, b) } else { larger(b, a) });
                })*
                other => return Err(DataError::NoKernel(other)),
            }
        };
    }
    each!(u8, i8, i16, i32, i64, half::f16, half::bf16, f32, f64);
    Ok(())
}

#[allow(clippy::eq_op, reason = "NaN alone differs from itself")]
fn is_nan<T: PartialEq + Copy>(x: T) -> bool {
    x != x
}

/// Room for the indices of a line for each outer element. Lines that follow each other are sorted
/// where their indices go.
pub(super) fn topk_scratch(s: &Signature<'_>) -> u64 {
    let shape = &s.outs[0].shape;
    let dim = s.dim("dim", 0).unwrap_or(0);
    match shape[dim + 1..].iter().product() {
        0 | 1 => 0,
        _ => 8 * shape[..=dim].iter().product::<u64>(),
    }
}

fn topk_of<T: Scalar>(call: &Call<'_>, before: impl Fn(T, T) -> bool) {
    let k = call.int("k") as usize;
    let (outer, n, inner) = around(call.in_shape(0), call.int("dim") as usize);
    let (x, values, indices) = (
        call.input::<T>(0),
        call.output::<T>(0),
        call.output::<i64>(1),
    );
    if count(call.out_shape(0)) == 0 {
        return;
    }
    let part = call.part(outer);
    let apart = call.scratch_part::<i64>(outer, 1, k);
    for o in part.clone() {
        for line in 0..inner {
            let at = |i: i64| x[(o * n + i as usize) * inner + line];
            let place = |i: usize| ((o - part.start) * k + i) * inner + line;
            let firsts = match inner {
                1 => &mut indices[place(0)..][..k],
                _ => &mut apart[..k],
            };
            // Equal elements keep their order.
            let is_before = |a: i64, b: i64| before(at(a), at(b)) || !before(at(b), at(a)) && a < b;
            first_of(n, firsts, &is_before);
            for i in 0..k {
                let index = if inner == 1 {
                    indices[place(i)]
                } else {
                    apart[i]
                };
                (values[place(i)], indices[place(i)]) = (at(index), index);
            }
        }
    }
}

/// The first of the numbers below `n`, in the order in which `before` sorts them. There are at
/// least as many numbers as results. `before` is not generic: the code for sorting is large.
fn first_of(n: usize, firsts: &mut [i64], before: &dyn Fn(i64, i64) -> bool) {
    for (to, i) in firsts.iter_mut().zip(0..) {
        *to = i;
    }
    // A heap of the first of the numbers so far, the last of them at its root.
    let sink = |heap: &mut [i64], mut at: usize| {
        loop {
            let child = 2 * at + 1;
            let Some(&left) = heap.get(child) else { break };
            let right = heap.get(child + 1).filter(|&&right| before(left, right));
            let (child, last) = right.map_or((child, left), |&right| (child + 1, right));
            if !before(heap[at], last) {
                break;
            }
            heap.swap(at, child);
            at = child;
        }
    };
    if firsts.len() < n {
        (0..firsts.len() / 2).rev().for_each(|at| sink(firsts, at));
    }
    for i in firsts.len()..n {
        if before(i as i64, firsts[0]) {
            firsts[0] = i as i64;
            sink(firsts, 0);
        }
    }
    firsts.sort_unstable_by(|&a, &b| if before(a, b) { Less } else { Greater });
}
