//! The maxima of windows of an image, and their derivative.

use super::conv::{Axis, window};
use super::elementwise::is_number;
use super::math::Float;
use super::signature::{Checked, Signature, ensure, is_float};
use super::strides::count;
use super::wide::{BLOCK, Scalar, Wide, blocks, every_number, floats};
use super::{Cut, Ran};
use crate::kernel::Call;
use artifact::DType;
use pulp::{Arch, Simd, WithSimd};
use std::marker::PhantomData;

pub(super) fn check_max_pool2d(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_number)?;
    s.expect_rank(0, 4)?;
    ensure(
        s.shape(0)[2..].iter().product::<u64>() < NONE.into(),
        || format!("a channel of an image should have fewer than {NONE} elements"),
    )?;
    let shape = pooled(s, s.shape(0))?;
    s.results(&[(s.dtype(0), &shape), (DType::I64, &shape)])
}
/// The shape of the maxima of an image's windows.
fn pooled(s: &Signature<'_>, image: &[u64]) -> Result<Vec<u64>, String> {
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
    let mut shape = image[..2].to_vec();
    shape.extend(window(&image[2..], &kernel, windows, s.bool("ceil")?)?);
    Ok(shape)
}
pub(super) fn check_max_pool2d_bwd(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.expect_rank(0, 4)?;
    s.expect(1, DType::I64)?;
    s.expect_shape(1, s.shape(0))?;
    let shape = s.sizes("shape")?;
    ensure(shape.len() == 4, || "shape should have rank 4".into())?;
    s.results(&[(s.dtype(0), &shape)])?;
    s.expect_shape(0, &pooled(s, &shape)?)
}

/// The units are the channels of all images.
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
    let windows = Windows {
        axes: [rows, columns],
        x: &x[planes.start * rows.input * columns.input..planes.end * rows.input * columns.input],
        y,
        indices,
        wide: PhantomData::<W>,
    };
    // Training pools floats. Of the others there is no code for each set of instructions and each
    // stride.
    if is_float(T::DTYPE) {
        Arch::new().dispatch(windows);
    } else {
        windows.with_simd(pulp::Scalar::new());
    }
}

/// The windows of some planes of an image.
struct Windows<'a, T, W> {
    axes: [Axis; 2],
    x: &'a [T],
    y: &'a mut [T],
    indices: &'a mut [i64],
    wide: PhantomData<W>,
}

impl<T: Scalar, W: Wide> WithSimd for Windows<'_, T, W> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let [rows, columns] = self.axes;
        let (plane, width) = (rows.input * columns.input, columns.output);
        let lines = self.y.chunks_mut(width.max(1));
        let lines = lines.zip(self.indices.chunks_mut(width.max(1)));
        for (line, (y, indices)) in lines.enumerate() {
            let (p, oy) = (line / rows.output, line % rows.output);
            let x = &self.x[p * plane..][..plane];
            for (lo, len) in blocks(width) {
                let (mut best, mut firsts) = ([W::LOWEST; BLOCK], [NONE; BLOCK]);
                for ky in (0..rows.taps).filter(|&ky| !rows.outputs(ky, oy, oy + 1).is_empty()) {
                    let first = rows.input(oy, ky) * columns.input;
                    for kx in 0..columns.taps {
                        let some = columns.outputs(kx, lo, lo + len);
                        if some.is_empty() {
                            continue;
                        }
                        let at = first + columns.input(some.start, kx);
                        let end = first + columns.input(some.end - 1, kx) + 1;
                        let (from, to) = (&x[at..end], some.start - lo..some.end - lo);
                        let (best, firsts) = (&mut best[to.clone()], &mut firsts[to]);
                        match (columns.stride, is_float(T::DTYPE)) {
                            (1, true) => larger(best, firsts, from, at, 1),
                            (2, true) => larger(best, firsts, from, at, 2),
                            (stride, _) => larger(best, firsts, from, at, stride),
                        }
                    }
                }
                // A window that lies completely in the padding has no maximum.
                for (index, &first) in indices[lo..lo + len].iter_mut().zip(&firsts) {
                    *index = if first == NONE { 0 } else { first.into() };
                }
                W::store(&best[..len], &mut y[lo..lo + len]);
            }
        }
    }
}

/// The index of a window that has seen no element. Indices are as wide as most elements: vectors
/// have as many of both.
const NONE: u32 = u32::MAX;

/// Updates the maximum with elements that are `stride` apart. `at` is the index of the first.
#[inline(always)]
fn larger<T: Scalar, W: Wide>(
    best: &mut [W],
    indices: &mut [u32],
    from: &[T],
    at: usize,
    stride: usize,
) {
    // Loops without branches over neighbouring elements become vector code.
    let mut news = [W::ZERO; BLOCK];
    let news = &mut news[..best.len()];
    if stride == 1 {
        W::load(from, news);
    } else {
        for (new, from) in news.iter_mut().zip(from.chunks(stride)) {
            *new = W::of(from[0]);
        }
    }
    let olds = best.iter_mut().zip(indices.iter_mut());
    for (i, ((best, index), &new)) in olds.zip(news.iter()).enumerate() {
        let takes = (*index == NONE) | (new > *best) | new.is_nan();
        let place = (at + i * stride) as u32;
        *best = if takes { new } else { *best };
        *index = if takes { place } else { *index };
    }
}

pub(super) fn max_pool2d_bwd(call: &Call<'_>) -> Ran {
    floats!(call.out_dtype(0), T => max_pool2d_bwd_of::<T>(call))
}

/// Each window's gradient goes to its maximum. Sums are rounded one by one.
fn max_pool2d_bwd_of<T: Float>(call: &Call<'_>) -> Ran {
    let (windows, plane) = (
        count(&call.in_shape(0)[2..]),
        count(&call.out_shape(0)[2..]),
    );
    let (dy, indices, dx) = (
        call.input::<T>(0),
        call.input::<i64>(1),
        call.output::<T>(0),
    );
    dx.fill(T::cast_f32(0.0));
    let planes = call.part(call.out_shape(0)[0] * call.out_shape(0)[1]);
    for (i, p) in planes.enumerate() {
        let dx = &mut dx[i * plane..][..plane];
        let windows = p * windows..(p + 1) * windows;
        for (&dy, &index) in dy[windows.clone()].iter().zip(&indices[windows]) {
            let dx = &mut dx[super::index::in_range(index, plane)?];
            *dx = (T::Wide::of(*dx) + T::Wide::of(dy)).narrow();
        }
    }
    Ok(())
}
