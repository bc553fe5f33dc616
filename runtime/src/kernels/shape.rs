//! Kernels that only move elements, and sources.

use super::elementwise::{is_any, number};
use super::signature::{Checked, Signature, broadcast_shapes, ensure};
use super::strides::{Nest, around, contiguous, count};
use super::wide::{BLOCK, Wide, bits, blocks_of, sink};
use super::{Cut, Ran};
use crate::kernel::{Bits, Call};
use artifact::DType;

// --- checks ---

pub(super) fn check_permute(s: &Signature<'_>) -> Checked {
    let dims = s.dims("dims", 0)?;
    ensure(dims.len() == s.rank(0), || {
        "dims should name every dimension".into()
    })?;
    let shape: Vec<u64> = dims.iter().map(|&d| s.shape(0)[d]).collect();
    s.results(&[(s.dtype(0), &shape)])
}
pub(super) fn check_expand(s: &Signature<'_>) -> Checked {
    let shape = s.sizes("shape")?;
    ensure(broadcast_shapes(s.shape(0), &shape)? == shape, || {
        format!("does not expand to {shape:?}")
    })?;
    s.results(&[(s.dtype(0), &shape)])
}
pub(super) fn check_flip(s: &Signature<'_>) -> Checked {
    s.dims("dims", 0)?;
    s.results(&[(s.dtype(0), s.shape(0))])
}
/// The shape of a slice of operand 0.
fn sliced(s: &Signature<'_>) -> Result<Vec<u64>, String> {
    let dim = s.dim("dim", 0)?;
    let (start, end, step) = (s.int("start")?, s.int("end")?, s.int("step")?);
    let mut shape = s.shape(0).to_vec();
    let size = shape[dim];
    let fits = 0 <= start && start <= end && end as u64 <= size && 1 <= step;
    ensure(fits, || {
        format!("{start}:{end}:{step} is not within 0..{size}")
    })?;
    shape[dim] = ((end - start) as u64).div_ceil(step as u64);
    Ok(shape)
}
pub(super) fn check_slice(s: &Signature<'_>) -> Checked {
    s.results(&[(s.dtype(0), &sliced(s)?)])
}
pub(super) fn check_slice_scatter(s: &Signature<'_>) -> Checked {
    s.expect_shape(1, &sliced(s)?)?;
    s.expect_dtype(1, 0)?;
    s.results(&[(s.dtype(0), s.shape(0))])
}
pub(super) fn check_cat(s: &Signature<'_>) -> Checked {
    let dim = s.dim("dim", 0)?;
    let mut shape = s.shape(0).to_vec();
    for i in 1..s.ins.len() {
        s.expect_dtype(i, 0)?;
        let other = s.shape(i);
        let fits = other.len() == shape.len()
            && (0..shape.len()).all(|d| d == dim || other[d] == shape[d]);
        ensure(fits, || format!("operand {i} does not fit operand 0"))?;
        // At most 4096 sizes of 2^50 each.
        shape[dim] += other[dim];
    }
    s.results(&[(s.dtype(0), &shape)])
}
pub(super) fn check_pad(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_any)?;
    s.number("value", DType::F32)?;
    let pad = s.ints("pad")?;
    let fits = pad.len() == 2 * s.rank(0) && pad.iter().all(|p| p.unsigned_abs() < 1 << 50);
    ensure(fits, || "pad should have two numbers a dimension".into())?;
    let mut shape = vec![];
    for (&d, pair) in s.shape(0).iter().zip(pad.chunks(2)) {
        let d = u64::try_from(d as i64 + pair[0] + pair[1]);
        shape.push(d.map_err(|_| "pad leaves a negative size".to_string())?);
    }
    s.results(&[(s.dtype(0), &shape)])
}
pub(super) fn check_full(s: &Signature<'_>) -> Checked {
    let dtype = s.dtype_attr("dtype")?;
    ensure(is_any(dtype), || format!("no kernel for {dtype:?}"))?;
    s.number("value", DType::F32)?;
    s.results(&[(dtype, &s.sizes("shape")?)])
}
pub(super) fn check_arange(s: &Signature<'_>) -> Checked {
    let dtype = s.dtype_attr("dtype")?;
    ensure(is_any(dtype), || format!("no kernel for {dtype:?}"))?;
    s.number("start", DType::F32)?;
    s.number("step", DType::F32)?;
    let shape = s.sizes("shape")?;
    ensure(shape.len() == 1, || "shape should have rank 1".into())?;
    s.results(&[(dtype, &shape)])
}

// --- kernels ---

/// Copies the points of a nest. Its offsets are positions in `x` and `y`.
fn copy<B: Bits>(mut nest: Nest<2>, start: [isize; 2], x: &[B], y: &mut [B]) {
    let (n, [x_stride, y_stride]) = nest.pop();
    if n == 0 {
        return;
    }
    nest.each(start, |[from, to]| {
        let (from, to) = (from as usize, to as usize);
        match (x_stride, y_stride) {
            (1, 1) => y[to..to + n].copy_from_slice(&x[from..from + n]),
            (0, 1) => y[to..to + n].fill(x[from]),
            (stride, 1) => {
                for (i, y) in y[to..to + n].iter_mut().enumerate() {
                    *y = x[from.wrapping_add_signed(i as isize * stride)];
                }
            }
            (x_stride, y_stride) => {
                for i in 0..n as isize {
                    y[to.wrapping_add_signed(i * y_stride)] =
                        x[from.wrapping_add_signed(i * x_stride)];
                }
            }
        }
    });
}

/// The outermost dimension of result 0 whose size is not 1. Copies are cut along it.
fn outermost(call: &Call<'_>) -> Option<usize> {
    call.out_shape(0).iter().position(|&size| size != 1)
}
pub(super) fn cut(call: &Call<'_>) -> Cut {
    let shape = call.out_shape(0);
    outermost(call).map_or(Cut::NO, |d| Cut::of(shape[d], count(&shape[d + 1..])))
}
/// Writes result 0 from operand 0: `stride(d)` is the distance in the operand between the result's
/// elements along `d`.
fn gather(call: &Call<'_>, start: isize, stride: impl Fn(usize) -> isize) -> Ran {
    let shape = call.out_shape(0);
    let own = contiguous(shape);
    let mut nest = Nest::<2>::new();
    let mut start = start;
    for (d, &size) in shape.iter().enumerate() {
        if Some(d) == outermost(call) {
            let part = call.part(size);
            start += part.start as isize * stride(d);
            nest.push(part.len(), [stride(d), own[d]]);
        } else {
            nest.push(size, [stride(d), own[d]]);
        }
    }
    bits!(call.out_dtype(0), B => copy::<B>(nest, [start, 0], call.input_bits(0),
        call.output_bits(0)));
    Ok(())
}
pub(super) fn permute(call: &Call<'_>) -> Ran {
    let (dims, strides) = (call.ints("dims"), contiguous(call.in_shape(0)));
    gather(call, 0, |d| strides[dims[d] as usize])
}
pub(super) fn expand(call: &Call<'_>) -> Ran {
    let (from, to) = (call.in_shape(0), call.out_shape(0));
    let strides = contiguous(from);
    gather(call, 0, |d| match (d + from.len()).checked_sub(to.len()) {
        Some(i) if from[i] != 1 => strides[i],
        _ => 0,
    })
}
pub(super) fn flip(call: &Call<'_>) -> Ran {
    let (dims, shape) = (call.ints("dims"), call.in_shape(0));
    let strides = contiguous(shape);
    let start = dims
        .iter()
        .map(|&d| (shape[d as usize] as isize - 1) * strides[d as usize])
        .sum();
    gather(call, start, |d| {
        if dims.contains(&(d as i64)) {
            -strides[d]
        } else {
            strides[d]
        }
    })
}
pub(super) fn slice(call: &Call<'_>) -> Ran {
    let (dim, start, step) = (
        call.int("dim") as usize,
        call.int("start") as isize,
        call.int("step") as isize,
    );
    let strides = contiguous(call.in_shape(0));
    // A step beyond the end is taken at most once; then its length does not matter.
    let step = step.min(call.in_shape(0)[dim] as isize);
    gather(call, start * strides[dim], |d| {
        if d == dim {
            step * strides[d]
        } else {
            strides[d]
        }
    })
}
pub(super) fn slice_scatter(call: &Call<'_>) -> Ran {
    let (shape, part) = (call.in_shape(0), call.in_shape(1));
    let (dim, start, step) = (
        call.int("dim") as usize,
        call.int("start") as isize,
        call.int("step") as isize,
    );
    let (strides, own) = (contiguous(shape), contiguous(part));
    let step = step.min(shape[dim] as isize);
    let mut nest = Nest::<2>::new();
    for (d, &size) in part.iter().enumerate() {
        nest.push(
            size,
            [
                own[d],
                if d == dim {
                    step * strides[d]
                } else {
                    strides[d]
                },
            ],
        );
    }
    bits!(call.out_dtype(0), B => {
        let y = copied::<B>(call);
        copy(nest, [0, start * strides[dim]], call.input_bits(1), y);
    });
    Ok(())
}
/// Result 0 with operand 0's elements: copied, unless the operand lies there.
pub(super) fn copied<'a, B: Bits>(call: &Call<'a>) -> &'a mut [B] {
    let y = call.output_bits(0);
    if call.inplace(0).is_none() {
        y.copy_from_slice(call.input_bits(0));
    }
    y
}
pub(super) fn cut_cat(call: &Call<'_>) -> Cut {
    let (outer, total, inner) = around(call.out_shape(0), call.int("dim") as usize);
    Cut::of(outer * total, inner)
}
pub(super) fn cat(call: &Call<'_>) -> Ran {
    let dim = call.int("dim") as usize;
    let (outer, total, inner) = around(call.out_shape(0), dim);
    let part = call.part(outer * total);
    bits!(call.out_dtype(0), B => {
        let y: &mut [B] = call.output_bits(0);
        let mut at = 0;
        for i in 0..call.n_inputs() {
            let (x, rows): (&[B], usize) = (call.input_bits(i), call.in_shape(i)[dim]);
            let outer = part.start / total.max(1)..part.end.div_ceil(total.max(1));
            let is_whole = [part.start, part.end].iter().all(|at| at.is_multiple_of(total));
            if rows * inner == 1 && is_whole && !y.is_empty() {
                // A call that copies one element takes longer than the element.
                let places = y[at * inner..].iter_mut().step_by(total * inner);
                places.zip(&x[outer]).for_each(|(y, x)| *y = *x);
                at += rows;
                continue;
            }
            for o in outer {
                // The operand's rows of this iteration, limited to the rows of this part.
                let first = o * total + at;
                let (from, to) = (first.max(part.start), (first + rows).min(part.end));
                if from < to {
                    let x = &x[(o * rows + from - first) * inner..][..(to - from) * inner];
                    y[(from - part.start) * inner..][..x.len()].copy_from_slice(x);
                }
            }
            at += rows;
        }
    });
    Ok(())
}
pub(super) fn pad(call: &Call<'_>) -> Ran {
    let (from, to, pad) = (call.in_shape(0), call.out_shape(0), call.ints("pad"));
    let (x_strides, y_strides) = (contiguous(from), contiguous(to));
    let (mut nest, mut start) = (Nest::<2>::new(), [0, 0]);
    for d in 0..from.len() {
        let (before, after) = (pad[2 * d] as isize, pad[2 * d + 1] as isize);
        let kept = from[d] as isize + before.min(0) + after.min(0);
        nest.push(kept.max(0) as usize, [x_strides[d], y_strides[d]]);
        // If nothing is kept, `before` may be any number.
        let before = if kept <= 0 { 0 } else { before };
        start[0] += (-before).max(0) * x_strides[d];
        start[1] += before.max(0) * y_strides[d];
    }
    bits!(call.out_dtype(0), B => {
        let y: &mut [B] = call.output_bits(0);
        y.fill(constant(call) as B);
        copy(nest, start, call.input_bits(0), y);
    });
    Ok(())
}
/// The bits of attribute `value` in the result's type, in the low bits.
pub(super) fn constant(call: &Call<'_>) -> u64 {
    let (float, int) = (number::<f64>(call, "value"), number::<i64>(call, "value"));
    match call.out_dtype(0) {
        DType::F64 => float.to_bits(),
        DType::F32 => u64::from((float as f32).to_bits()),
        DType::BF16 => u64::from(half::bf16::from_f32(float as f32).to_bits()),
        DType::F16 => u64::from(half::f16::from_f32(float as f32).to_bits()),
        DType::Bool => u64::from(float != 0.0),
        // Two's complement: the low bits are those of the narrower type.
        _ => int as u64,
    }
}
pub(super) fn full(call: &Call<'_>) -> Ran {
    bits!(call.out_dtype(0), B => call.output_bits::<B>(0).fill(constant(call) as B));
    Ok(())
}
pub(super) fn arange(call: &Call<'_>) -> Ran {
    fn fill<W: Wide>(call: &Call<'_>, at: impl Fn(usize) -> W) {
        let mut y = sink(call, 0);
        let mut ys = [W::ZERO; BLOCK];
        for (block, len) in blocks_of(call.elements()) {
            (0..len).for_each(|j| ys[j] = at(block + j));
            y.store(block, &ys[..len]);
        }
    }
    if super::signature::is_float(call.out_dtype(0)) {
        let (start, step) = (number::<f64>(call, "start"), number::<f64>(call, "step"));
        fill(call, |i| start + step * i as f64);
    } else {
        let (start, step) = (number::<i64>(call, "start"), number::<i64>(call, "step"));
        fill(call, |i| start.wrapping_add(step.wrapping_mul(i as i64)));
    }
    Ok(())
}
