//! Convolution and pooling, by direct loops: the innermost runs along a row of the image, whose
//! elements follow each other. One spatial dimension is treated as two, the first of size 1.

use super::elementwise::is_number;
use super::math::{Float, Real};
use super::signature::{Checked, Signature, ensure, is_float};
use super::strides::count;
use super::wide::{
    BLOCK, Scalar, Wide, blocks, blocks_of, every_number, floats, sink, source, wide_float,
};
use super::{Cut, Ran};
use crate::kernel::Call;
use artifact::DType;
use std::ops::Range;

// --- checks ---

/// Output size of a window along each spatial dimension.
fn window(
    input: &[u64],
    kernel: &[u64],
    [stride, padding, dilation]: [&[i64]; 3],
    ceil: bool,
) -> Result<Vec<u64>, String> {
    let mut out = vec![];
    for i in 0..input.len() {
        // Sizes are below 2^50, the others below 2^28 and 2^32: nothing overflows.
        let reach = dilation[i] * (kernel[i] as i64 - 1) + 1;
        let size = input[i] as i64;
        let room = size + 2 * padding[i] - reach;
        ensure(0 <= room, || {
            format!(
                "a window of {reach} does not fit into {size} + 2 * {}",
                padding[i]
            )
        })?;
        let mut n = if ceil {
            (room as u64).div_ceil(stride[i] as u64) as i64
        } else {
            room / stride[i]
        } + 1;
        // With `ceil`, the last window must start inside the input or the padding before it.
        if ceil && size + padding[i] <= (n - 1) * stride[i] {
            n -= 1;
        }
        out.push(n as u64);
    }
    Ok(out)
}
fn convolution_shape(s: &Signature<'_>, x: usize, w: usize) -> Result<Vec<u64>, String> {
    s.has_kernel(x, is_float)?;
    s.expect_dtype(x, w)?;
    let (xs, ws) = (s.shape(x), s.shape(w));
    ensure(xs.len() == ws.len() && (3..=4).contains(&xs.len()), || {
        "rank should be 3 or 4".into()
    })?;
    let (n, groups) = (xs.len() - 2, s.int("groups")?);
    let fits = 1 <= groups
        && Some(xs[1]) == ws[1].checked_mul(groups as u64)
        && ws[0].is_multiple_of(groups as u64)
        && ws[2..].iter().all(|k| (1..1 << 28).contains(k));
    ensure(fits, || "channels, groups or kernel do not fit".into())?;
    let windows = [
        s.list("stride", n, 1)?,
        s.list("padding", n, 0)?,
        s.list("dilation", n, 1)?,
    ];
    let mut shape = vec![xs[0], ws[0]];
    shape.extend(window(&xs[2..], &ws[2..], windows, false)?);
    Ok(shape)
}
pub(super) fn check_convolution(s: &Signature<'_>) -> Checked {
    let shape = convolution_shape(s, 0, 1)?;
    if s.ins.len() == 3 {
        s.expect_shape(2, &shape[1..2])?;
        s.expect_dtype(2, 0)?;
    }
    s.results(&[(s.dtype(0), &shape)])
}
pub(super) fn check_convolution_bwd(s: &Signature<'_>) -> Checked {
    let shape = convolution_shape(s, 1, 2)?;
    s.expect_shape(0, &shape)?;
    s.expect_dtype(0, 1)?;
    let dtype = s.dtype(0);
    s.masked_results(&[
        (dtype, s.shape(1)),
        (dtype, s.shape(2)),
        (dtype, &shape[1..2]),
    ])
}
pub(super) fn check_max_pool2d(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_number)?;
    s.expect_rank(0, 4)?;
    let kernel: Vec<u64> = s.list("kernel", 2, 1)?.iter().map(|&k| k as u64).collect();
    let windows = [
        s.list("stride", 2, 1)?,
        s.list("padding", 2, 0)?,
        s.list("dilation", 2, 1)?,
    ];
    let padding = windows[1].iter().zip(&kernel);
    ensure(kernel.iter().all(|&k| k < 1 << 28), || {
        "kernel too large".into()
    })?;
    ensure(
        padding.into_iter().all(|(&p, &k)| 2 * p as u64 <= k),
        || "padding above half the kernel".into(),
    )?;
    let mut shape = s.shape(0)[..2].to_vec();
    shape.extend(window(&s.shape(0)[2..], &kernel, windows, s.bool("ceil")?)?);
    s.results(&[(s.dtype(0), &shape), (DType::I64, &shape)])
}
pub(super) fn check_max_pool2d_bwd(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.expect_rank(0, 4)?;
    s.expect(1, DType::I64)?;
    s.expect_shape(1, s.shape(0))?;
    let shape = s.sizes("shape")?;
    let fits = shape.len() == 4 && shape[..2] == s.shape(0)[..2];
    ensure(fits, || {
        "shape should have rank 4 and the operands' first two sizes".into()
    })?;
    s.results(&[(s.dtype(0), &shape)])
}

// --- convolution ---

/// One spatial dimension: output `o` reads input `o * stride + k * dilation - padding` for each tap
/// `k`.
#[derive(Clone, Copy)]
struct Axis {
    input: usize,
    output: usize,
    taps: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
}

impl Axis {
    /// The outputs in `lo..hi` whose tap `k` is inside the input.
    fn outputs(&self, k: usize, lo: usize, hi: usize) -> std::ops::Range<usize> {
        let tap = k * self.dilation;
        // o * stride + tap - padding in 0..input.
        let first = self.padding.saturating_sub(tap).div_ceil(self.stride);
        let end = (self.input + self.padding)
            .saturating_sub(tap)
            .div_ceil(self.stride);
        let (first, end) = (first.max(lo), end.min(hi));
        first..end.max(first)
    }
    /// The input that output `o` reads at tap `k`, which is inside.
    fn input(&self, o: usize, k: usize) -> usize {
        o * self.stride + k * self.dilation - self.padding
    }
    /// The output that reads input `i` at tap `k`, if one does.
    fn output(&self, i: usize, k: usize) -> Option<usize> {
        let at = (i + self.padding).checked_sub(k * self.dilation)?;
        (at.is_multiple_of(self.stride) && at / self.stride < self.output).then(|| at / self.stride)
    }
}

/// The sizes of a convolution.
struct Sizes {
    batch: usize,
    groups: usize,
    /// Channels of a group: read and written.
    inputs: usize,
    outputs: usize,
    y: Axis,
    x: Axis,
}

impl Sizes {
    fn new(call: &Call<'_>, image: &[usize], weight: &[usize], output: &[usize]) -> Sizes {
        let (stride, padding, dilation) = (
            call.ints("stride"),
            call.ints("padding"),
            call.ints("dilation"),
        );
        let axis = |d: usize| Axis {
            input: image[d + 2],
            output: output[d + 2],
            taps: weight[d + 2],
            stride: stride[d] as usize,
            padding: padding[d] as usize,
            dilation: dilation[d] as usize,
        };
        let one = Axis {
            input: 1,
            output: 1,
            taps: 1,
            stride: 1,
            padding: 0,
            dilation: 1,
        };
        let groups = call.int("groups") as usize;
        let (y, x) = if image.len() == 4 {
            (axis(0), axis(1))
        } else {
            (one, axis(0))
        };
        Sizes {
            batch: image[0],
            groups,
            inputs: weight[1],
            outputs: weight[0] / groups,
            y,
            x,
        }
    }
    /// Where row `y` of channel `c` of group `g` of an image starts, for images of `per_group`
    /// channels.
    fn input_row(&self, b: usize, g: usize, c: usize, y: usize) -> usize {
        (((b * self.groups + g) * self.inputs + c) * self.y.input + y) * self.x.input
    }
    fn output_row(&self, b: usize, g: usize, o: usize, y: usize) -> usize {
        (((b * self.groups + g) * self.outputs + o) * self.y.output + y) * self.x.output
    }
    /// Where the taps of output channel `o`, input channel `c` and row `ky` start.
    fn weight_row(&self, g: usize, o: usize, c: usize, ky: usize) -> usize {
        (((g * self.outputs + o) * self.inputs + c) * self.y.taps + ky) * self.x.taps
    }
}

/// The type that products of an element type are summed in.
type W<T> = <T as Float>::Wide;

/// By the channels of all images.
pub(super) fn cut(call: &Call<'_>) -> Cut {
    let (y, w) = (call.out_shape(0), call.in_shape(1));
    Cut::of(y[0] * y[1], count(&y[2..]) * count(&w[1..]))
}
pub(super) fn convolution(call: &Call<'_>) -> Ran {
    floats!(call.out_dtype(0), T => convolve::<T, W<T>>(call));
    Ok(())
}
fn convolve<T: Scalar, W: Real>(call: &Call<'_>) {
    let s = Sizes::new(call, call.in_shape(0), call.in_shape(1), call.out_shape(0));
    let (x, w, y) = (call.input::<T>(0), call.input::<T>(1), call.output::<T>(0));
    let bias = (call.n_inputs() == 3).then(|| call.input::<T>(2));
    let start = call.output_start(0);
    let channels = call.part(s.batch * s.groups * s.outputs);
    for (channel, oy) in channels.flat_map(|channel| (0..s.y.output).map(move |oy| (channel, oy))) {
        let (b, g, o) = (
            channel / s.outputs / s.groups,
            channel / s.outputs % s.groups,
            channel % s.outputs,
        );
        for (lo, len) in blocks(s.x.output) {
            let mut sums = [bias.map_or(W::ZERO, |bias| W::of(bias[g * s.outputs + o])); BLOCK];
            for c in 0..s.inputs {
                for ky in 0..s.y.taps {
                    if s.y.outputs(ky, oy, oy + 1).is_empty() {
                        continue;
                    }
                    let row = &x[s.input_row(b, g, c, s.y.input(oy, ky))..][..s.x.input];
                    let taps = &w[s.weight_row(g, o, c, ky)..][..s.x.taps];
                    for (kx, &tap) in taps.iter().enumerate() {
                        let range = s.x.outputs(kx, lo, lo + len);
                        if range.is_empty() {
                            continue;
                        }
                        let from = &row[s.x.input(range.start, kx)..];
                        add_scaled(
                            &mut sums[range.start - lo..range.end - lo],
                            W::of(tap),
                            from,
                            s.x.stride,
                        );
                    }
                }
            }
            W::store(
                &sums[..len],
                &mut y[s.output_row(b, g, o, oy) + lo - start..][..len],
            );
        }
    }
}
/// sums += factor * from, where `from` is read every `stride` elements.
fn add_scaled<T: Scalar, W: Real>(sums: &mut [W], factor: W, from: &[T], stride: usize) {
    match stride {
        1 => sums
            .iter_mut()
            .zip(from)
            .for_each(|(sum, &x)| *sum = *sum + factor * W::of(x)),
        _ => sums
            .iter_mut()
            .zip(from.iter().step_by(stride))
            .for_each(|(sum, &x)| *sum = *sum + factor * W::of(x)),
    }
}
/// Every point of four dimensions, the last one fastest.
fn points(sizes: [usize; 4]) -> impl Iterator<Item = (usize, usize, usize, usize)> {
    let [a, b, c, d] = sizes;
    (0..a * b * c * d).map(move |i| (i / d / c / b, i / d / c % b, i / d % c, i % d))
}

/// Which units compute dx, by the channels of all images, dw and db, by channels of the result: one
/// after the other.
fn units_bwd(call: &Call<'_>) -> [Range<usize>; 3] {
    let (x, dy) = (call.in_shape(1), call.in_shape(0));
    let (dx, dw) = (x[0] * x[1], dy[1]);
    [0..dx, dx..dx + dw, dx + dw..dx + 2 * dw]
}
pub(super) fn cut_bwd(call: &Call<'_>) -> Cut {
    let (dy, w) = (call.in_shape(0), call.in_shape(2));
    Cut {
        per_thread: 16,
        ..Cut::of(
            units_bwd(call)[2].end,
            count(&dy[2..]) * count(&w[2..]) * w[0],
        )
    }
}
pub(super) fn convolution_bwd(call: &Call<'_>) -> Ran {
    let mask = call.ints("mask");
    let result = |i: usize| (mask[i] == 1).then(|| mask[..i].iter().sum::<i64>() as usize);
    floats!(call.in_dtype(0), T => {
        let s = Sizes::new(call, call.in_shape(1), call.in_shape(2), call.in_shape(0));
        let (dy, x, w) = (call.input::<T>(0), call.input::<T>(1), call.input::<T>(2));
        let units = units_bwd(call);
        if let Some(j) = result(0) {
            let (channels, dx) = call.output_of(j, units[0].clone());
            convolve_dx::<T, W<T>>(&s, dy, w, channels, dx);
        }
        if let Some(j) = result(1) {
            let (channels, dw) = call.output_of(j, units[1].clone());
            convolve_dw::<T, W<T>>(&s, dy, x, channels, dw);
        }
        if let Some(j) = result(2) {
            let (channels, db) = call.output_of::<T>(j, units[2].clone());
            convolve_db(&s, dy, channels, db);
        }
    });
    Ok(())
}
/// Each row of dx gathers what the outputs that read it got.
fn convolve_dx<T: Scalar, W: Real>(
    s: &Sizes,
    dy: &[T],
    w: &[T],
    channels: Range<usize>,
    dx: &mut [T],
) {
    let start = channels.start * s.y.input * s.x.input;
    for (channel, iy) in channels.flat_map(|channel| (0..s.y.input).map(move |iy| (channel, iy))) {
        let (b, g, c) = (
            channel / s.inputs / s.groups,
            channel / s.inputs % s.groups,
            channel % s.inputs,
        );
        for (lo, len) in blocks(s.x.input) {
            let mut sums = [W::ZERO; BLOCK];
            for o in 0..s.outputs {
                for ky in 0..s.y.taps {
                    let Some(oy) = s.y.output(iy, ky) else {
                        continue;
                    };
                    let row = &dy[s.output_row(b, g, o, oy)..][..s.x.output];
                    let taps = &w[s.weight_row(g, o, c, ky)..][..s.x.taps];
                    for (kx, &tap) in taps.iter().enumerate() {
                        // The outputs whose tap kx is in lo..lo + len: a window as if the input
                        // began at lo.
                        let part = Axis {
                            input: lo + len,
                            ..s.x
                        };
                        let first = Axis { input: lo, ..s.x }.outputs(kx, 0, s.x.output).end;
                        let range = part.outputs(kx, first, s.x.output);
                        if range.is_empty() {
                            continue;
                        }
                        let to = &mut sums[s.x.input(range.start, kx) - lo..len];
                        scatter_scaled(to, W::of(tap), &row[range], s.x.stride);
                    }
                }
            }
            W::store(
                &sums[..len],
                &mut dx[s.input_row(b, g, c, iy) + lo - start..][..len],
            );
        }
    }
}
/// to += factor * from, where `to` is written every `stride` elements.
fn scatter_scaled<T: Scalar, W: Real>(to: &mut [W], factor: W, from: &[T], stride: usize) {
    match stride {
        1 => to
            .iter_mut()
            .zip(from)
            .for_each(|(sum, &x)| *sum = *sum + factor * W::of(x)),
        _ => to
            .iter_mut()
            .step_by(stride)
            .zip(from)
            .for_each(|(sum, &x)| *sum = *sum + factor * W::of(x)),
    }
}
/// Each weight is a sum over the batch and the outputs: rows in the wide type, rows together in
/// f64.
fn convolve_dw<T: Scalar, W: Real>(
    s: &Sizes,
    dy: &[T],
    x: &[T],
    channels: Range<usize>,
    dw: &mut [T],
) {
    let start = channels.start * s.inputs * s.y.taps * s.x.taps;
    for (channel, _, c, ky) in points([channels.len(), 1, s.inputs, s.y.taps]) {
        let (g, o) = (
            (channels.start + channel) / s.outputs,
            (channels.start + channel) % s.outputs,
        );
        for kx in 0..s.x.taps {
            let (rows, columns) = (
                s.y.outputs(ky, 0, s.y.output),
                s.x.outputs(kx, 0, s.x.output),
            );
            let mut sum = 0.0;
            if !columns.is_empty() {
                for b in 0..s.batch {
                    for oy in rows.clone() {
                        let dy = &dy[s.output_row(b, g, o, oy)..][columns.clone()];
                        let from =
                            s.input_row(b, g, c, s.y.input(oy, ky)) + s.x.input(columns.start, kx);
                        sum += dot::<T, W>(dy, &x[from..], s.x.stride).to_f64();
                    }
                }
            }
            dw[s.weight_row(g, o, c, ky) + kx - start] = T::cast_f64(sum);
        }
    }
}
/// The sum of a[i] * b[i * stride].
fn dot<T: Scalar, W: Real>(a: &[T], b: &[T], stride: usize) -> W {
    const LANES: usize = 8;
    let mut lanes = [W::ZERO; LANES];
    if stride == 1 {
        for (a, b) in a.chunks(LANES).zip(b[..a.len()].chunks(LANES)) {
            for ((lane, &a), &b) in lanes.iter_mut().zip(a).zip(b) {
                *lane = *lane + W::of(a) * W::of(b);
            }
        }
    } else {
        for (i, (&a, &b)) in a.iter().zip(b.iter().step_by(stride)).enumerate() {
            lanes[i % LANES] = lanes[i % LANES] + W::of(a) * W::of(b);
        }
    }
    lanes.into_iter().fold(W::ZERO, |sum, lane| sum + lane)
}
fn convolve_db<T: Scalar>(s: &Sizes, dy: &[T], channels: Range<usize>, db: &mut [T]) {
    let plane = s.y.output * s.x.output;
    for (c, db) in channels.zip(db) {
        let (g, o) = (c / s.outputs, c % s.outputs);
        let sum: f64 = (0..s.batch)
            .map(|b| super::norm::total(&dy[s.output_row(b, g, o, 0)..][..plane], T::f64))
            .sum();
        *db = T::cast_f64(sum);
    }
}

// --- pooling ---

/// By the channels of all images.
pub(super) fn cut_planes(call: &Call<'_>) -> Cut {
    let (x, y) = (call.in_shape(0), call.out_shape(0));
    Cut::of(y[0] * y[1], count(&x[2..]).max(count(&y[2..])))
}
pub(super) fn max_pool2d(call: &Call<'_>) -> Ran {
    every_number!(call.out_dtype(0), T, W => {
        max_pool2d_of::<T, W>(call);
        Ok(())
    })
}
/// The first maximum of each window; NaN is larger than any number, and the last NaN is taken, as
/// in PyTorch.
fn max_pool2d_of<T: Scalar, W: Wide>(call: &Call<'_>) {
    let (xs, ys) = (call.in_shape(0), call.out_shape(0));
    let (kernel, stride) = (call.ints("kernel"), call.ints("stride"));
    let (padding, dilation) = (call.ints("padding"), call.ints("dilation"));
    let axis = |d: usize| Axis {
        input: xs[d + 2],
        output: ys[d + 2],
        taps: kernel[d] as usize,
        stride: stride[d] as usize,
        padding: padding[d] as usize,
        dilation: dilation[d] as usize,
    };
    let (rows, columns) = (axis(0), axis(1));
    let (x, y, indices) = (
        call.input::<T>(0),
        call.output::<T>(0),
        call.output::<i64>(1),
    );
    let planes = call.part(ys[0] * ys[1]);
    for (i, (c, _, oy, ox)) in points([planes.len(), 1, rows.output, columns.output]).enumerate() {
        let plane =
            &x[(planes.start + c) * rows.input * columns.input..][..rows.input * columns.input];
        let (mut best, mut index) = (W::LOWEST, None);
        for iy in inside(&rows, oy) {
            for ix in inside(&columns, ox) {
                let at = iy * columns.input + ix;
                let new = W::of(plane[at]);
                if index.is_none() || new > best || new.is_nan() {
                    (best, index) = (new, Some(at));
                }
            }
        }
        // A window that lies in the padding altogether has no maximum.
        y[i] = best.narrow();
        indices[i] = index.unwrap_or(0) as i64;
    }
}
/// The inputs that output `o`'s window reads.
fn inside(axis: &Axis, o: usize) -> impl Iterator<Item = usize> {
    let (start, padding) = (o * axis.stride, axis.padding);
    let first = padding.saturating_sub(start).div_ceil(axis.dilation);
    let end = (axis.input + padding)
        .saturating_sub(start)
        .div_ceil(axis.dilation)
        .min(axis.taps);
    let dilation = axis.dilation;
    (first..end).map(move |k| start + k * dilation - padding)
}

pub(super) fn max_pool2d_bwd(call: &Call<'_>) -> Ran {
    wide_float!(call.out_dtype(0), W => max_pool2d_bwd_of::<W>(call))
}
fn max_pool2d_bwd_of<R: Real>(call: &Call<'_>) -> Ran {
    let (windows, plane) = (
        count(&call.in_shape(0)[2..]),
        count(&call.out_shape(0)[2..]),
    );
    let (dy, index, mut dx) = (source(call, 0), call.input::<i64>(1), sink(call, 0));
    for (block, len) in blocks_of(call.elements()) {
        dx.store(block, &[R::ZERO; BLOCK][..len]);
    }
    let planes = call.part(call.out_shape(0)[0] * call.out_shape(0)[1]);
    for i in planes.start * windows..planes.end * windows {
        let index = index[i];
        let at = i / windows * plane + super::index::in_range(index, plane)?;
        let mut sum = [R::ZERO];
        dx.load(at, &mut sum);
        sum[0] = sum[0] + dy.one::<R>(&dx, i);
        dx.store(at, &sum);
    }
    Ok(())
}
