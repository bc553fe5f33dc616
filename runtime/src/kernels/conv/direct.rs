//! Convolutions with few channels in a group, such as depthwise ones, by direct loops: the innermost
//! runs along a row of the image, whose elements follow each other.

use super::{Axis, Sizes};
use crate::kernels::math::Real;
use crate::kernels::wide::{BLOCK, Scalar, blocks};
use std::ops::Range;

/// Writes channels of the result, counted through all images.
pub(super) fn forward<T: Scalar, W: Real>(
    s: &Sizes,
    (x, w, bias): (&[T], &[T], Option<&[T]>),
    channels: Range<usize>,
    y: &mut [T],
) {
    let start = channels.start * s.y.output * s.x.output;
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

/// Each row of dx gathers what the outputs that read it got.
pub(super) fn input<T: Scalar, W: Real>(
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
pub(super) fn weights<T: Scalar, W: Real>(
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
