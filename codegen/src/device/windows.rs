//! Windows of images: maxima, convolutions, and their gradients. A thread computes an element of a
//! result, or a block of threads computes an element of the weights' gradient. Convolutions of bf16
//! are computed by tensor cores where they can be: [`super::tensor_windows`].

use super::Kernel;
use super::grid::{Grid, THREADS, Tensor};
use super::tensor_windows;
use crate::kernels::wide;
use crate::mlir::{Emit, Kind, Predicate, Type, Value};
use ir::DType;
use ir::op::attrs::{Convolution, ConvolutionBwd, Pool, PoolBwd};
use ir::op::windows::{Axis, Windows};

/// The input that an output reads at a tap, and whether there is one.
fn input(axis: &Axis, g: &mut Grid, output: Value, tap: Value) -> (Value, Value) {
    let first = g.times(output, axis.stride);
    let past = g.times(tap, axis.dilation);
    let at = g.b.addi(first, past);
    let at = g.plus(at, -axis.padding);
    (at, g.below(at, axis.input))
}

/// The output that reads an input at a tap, and whether there is one.
fn output(axis: &Axis, g: &mut Grid, input: Value, tap: Value) -> (Value, Value) {
    let past = g.times(tap, axis.dilation);
    let at = g.plus(input, axis.padding);
    let at = g.b.subi(at, past);
    let zero = g.b.long(0);
    let [which, rest] = g.divided(at, axis.stride);
    let [fits, before] = [g.equal(rest, zero), g.less(at, zero)];
    let within = g.below(which, axis.output);
    let inside = g.b.andi(fits, within);
    let no = g.b.constant(0, Type::Scalar(Kind::I1));
    (which, g.b.select(before, no, inside))
}

/// Where an image is read at a tap, in both dimensions, and whether that place exists: `along` is
/// [`input`] or [`output`].
fn reads(
    g: &mut Grid,
    axes: [Axis; 2],
    along: impl Fn(&Axis, &mut Grid, Value, Value) -> (Value, Value),
    [y, x]: [Value; 2],
    [tap_y, tap_x]: [Value; 2],
) -> ([Value; 2], Value) {
    let (y, in_y) = along(&axes[0], g, y, tap_y);
    let (x, in_x) = along(&axes[1], g, x, tap_x);
    ([y, x], g.b.andi(in_y, in_x))
}

/// Loops over the taps of a window; returns the values that iterations pass on.
fn taps(
    g: &mut Grid,
    axes: [Axis; 2],
    starts: &[Value],
    body: impl FnOnce(&mut Grid, [Value; 2], &[Value]) -> Vec<Value>,
) -> Vec<Value> {
    g.count(axes[0].taps, starts, |g, y, values| {
        g.count(axes[1].taps, values, |g, x, values| body(g, [y, x], values))
    })
}

// --- maxima ---

/// Dilation, kernel, padding and stride of maxima of `x`.
fn pooled([dilation, kernel, padding, stride]: [&[i64]; 4], x: &[u64], y: &[u64]) -> [Axis; 2] {
    [0, 1].map(|d| Axis {
        input: x[d + 2],
        output: y[d + 2],
        taps: kernel[d] as u64,
        stride: stride[d] as u64,
        padding: padding[d],
        dilation: dilation[d] as u64,
    })
}

/// The first maximum of each window; NaN is larger than any number, and the last NaN is taken.
pub(super) fn max_pool2d(k: &mut Kernel<'_>, a: &Pool) {
    let (xs, ys) = (k.x().shape().to_vec(), k.y().shape().to_vec());
    let lists = [&a.dilation, &a.kernel, &a.padding, &a.stride];
    let axes = pooled(lists.map(Vec::as_slice), &xs, &ys);
    let dtype = k.x().dtype();
    k.elements(k.y().numel(), |g, i| {
        let [plane, row, column] = three(g, i, [ys[2], ys[3]]);
        let (x, first) = (g.operand(0), g.times(plane, xs[2] * xs[3]));
        let none = g.b.long(u64::MAX);
        let lowest = match wide(dtype) {
            Kind::I64 => g.b.long(i64::MIN as u64),
            kind => g.float(f64::NEG_INFINITY, kind),
        };
        let best = taps(g, axes, &[lowest, none], |g, tap, best| {
            let ([iy, ix], inside) = reads(g, axes, input, [row, column], tap);
            g.choose(inside, best, |g| {
                let place = g.times(iy, xs[3]);
                let place = g.b.addi(place, ix);
                let at = g.b.addi(first, place);
                let new = g.get(x, at);
                let (unset, above) = (g.equal(best[1], none), g.less(best[0], new));
                let mut takes = g.b.ori(unset, above);
                if dtype.is_float() {
                    let nan = g.b.compare(Predicate::Uno, new, new);
                    takes = g.b.ori(takes, nan);
                }
                vec![
                    g.b.select(takes, new, best[0]),
                    g.b.select(takes, place, best[1]),
                ]
            })
        });
        let zero = g.b.long(0);
        let index = g.b.maxsi(best[1], zero);
        let [y, indices] = [0, 1].map(|j| g.result(j));
        g.put(y, i, best[0]);
        g.put(indices, i, index);
    });
}

/// The coordinates of element `i` of planes of two dimensions.
fn three(g: &mut Grid, i: Value, [rows, columns]: [u64; 2]) -> [Value; 3] {
    let [row, column] = g.divided(i, columns);
    let [plane, row] = g.divided(row, rows);
    [plane, row, column]
}

/// Each element gets the gradients of the windows whose maximum it is. They are added in the order
/// of the windows, and sums are rounded one by one, as in the plain kernel.
pub(super) fn max_pool2d_bwd(k: &mut Kernel<'_>, a: &PoolBwd) {
    let (ys, xs) = (k.x().shape().to_vec(), k.y().shape().to_vec());
    let lists = [&a.dilation, &a.kernel, &a.padding, &a.stride];
    let axes = pooled(lists.map(Vec::as_slice), &xs, &ys);
    let dtype = k.y().dtype();
    k.elements(k.y().numel(), |g, i| {
        let (dy, indices, dx) = (g.operand(0), g.operand(1), g.result(0));
        let [plane, row, column] = three(g, i, [xs[2], xs[3]]);
        let first = g.times(plane, ys[2] * ys[3]);
        let own = g.times(row, xs[3]);
        let own = g.b.addi(own, column);
        let zero = g.float(0.0, wide(dtype));
        let sum = taps(g, axes, &[zero], |g, tap, sum| {
            // The last tap is that of the first window.
            let tap = [0, 1].map(|d| {
                let last = g.b.long(axes[d].taps - 1);
                g.b.subi(last, tap[d])
            });
            let ([oy, ox], inside) = reads(g, axes, output, [row, column], tap);
            g.choose(inside, sum, |g| {
                let at = g.times(oy, ys[3]);
                let at = g.b.addi(at, ox);
                let at = g.b.addi(first, at);
                let (index, x) = (g.get(indices, at), g.get(dy, at));
                let is_own = g.equal(index, own);
                let with = g.add(sum[0], x);
                let with = g.stored(with, dtype);
                vec![g.b.select(is_own, with, sum[0])]
            })
        });
        g.put(dx, i, sum[0]);
    });
}

// --- convolutions ---

/// The position of an element.
fn place(g: &mut Grid, at: [Value; 4], sizes: [u64; 4]) -> Value {
    let mut place = at[0];
    for (at, size) in at.into_iter().zip(sizes).skip(1) {
        let above = g.times(place, size);
        place = g.b.addi(above, at);
    }
    place
}

fn four(g: &mut Grid, i: Value, sizes: [u64; 4]) -> [Value; 4] {
    let at = g.coordinates(i, &sizes);
    [at[0], at[1], at[2], at[3]]
}

pub(super) fn convolution(k: &mut Kernel<'_>, a: &Convolution) {
    let s = Windows::forward(a, [k.x(), &k.operands[1], k.y()]);
    if s.on_tensor_cores() {
        return tensor_windows::forward(k, &s);
    }
    let (kind, has_bias) = (wide(k.y().dtype()), k.operands.len() == 3);
    k.elements(k.y().numel(), |g, i| {
        let [image, o, oy, ox] = four(g, i, s.y());
        let [group, _] = g.divided(o, s.outputs);
        let first = g.times(group, s.inputs);
        let zero = g.float(0.0, kind);
        let sum = g.count(s.inputs, &[zero], |g, c, sum| {
            let channel = g.b.addi(first, c);
            taps(g, s.axes, sum, |g, tap, sum| {
                let ([iy, ix], inside) = reads(g, s.axes, input, [oy, ox], tap);
                g.choose(inside, sum, |g| {
                    let from = place(g, [image, channel, iy, ix], s.x());
                    let by = place(g, [o, c, tap[0], tap[1]], s.w());
                    let (x, w) = (g.operand(0), g.operand(1));
                    let (x, w) = (g.get(x, from), g.get(w, by));
                    vec![g.b.fma(x, w, sum[0])]
                })
            })
        });
        let mut sum = sum[0];
        if has_bias {
            let b = g.operand(2);
            let b = g.get(b, o);
            sum = g.add(sum, b);
        }
        let y = g.result(0);
        g.put(y, i, sum);
    });
}

/// (dy, x, w) -> dx, dw, db, as far as the mask is 1.
pub(super) fn convolution_bwd(k: &mut Kernel<'_>, a: &ConvolutionBwd) {
    let s = Windows::backward(a, [1, 2, 0].map(|i| &k.operands[i]));
    let by_tensor_cores = s.on_tensor_cores();
    if by_tensor_cores && a.mask[1] == 1 {
        k.scratch_bytes = s.weight_scratch();
    }
    let place = |i: usize| (a.mask[i] == 1).then(|| a.mask[..i].iter().sum::<i64>() as usize);
    match place(0) {
        Some(j) if by_tensor_cores => tensor_windows::inputs(k, &s, j),
        Some(j) => of_inputs(k, &s, j),
        None => {}
    }
    match place(1) {
        Some(j) if by_tensor_cores => tensor_windows::weights(k, &s, j),
        Some(j) => of_weights(k, &s, j),
        None => {}
    }
    if let Some(j) = place(2) {
        of_biases(k, &s, j);
    }
}

fn of_inputs(k: &mut Kernel<'_>, s: &Windows, j: usize) {
    let kind = wide(k.results[j].dtype());
    k.elements(s.x().iter().product(), |g, i| {
        let [image, c, iy, ix] = four(g, i, s.x());
        let [group, c] = g.divided(c, s.inputs);
        let first = g.times(group, s.outputs);
        let zero = g.float(0.0, kind);
        let sum = g.count(s.outputs, &[zero], |g, o, sum| {
            let o = g.b.addi(first, o);
            taps(g, s.axes, sum, |g, tap, sum| {
                let ([oy, ox], inside) = reads(g, s.axes, output, [iy, ix], tap);
                g.choose(inside, sum, |g| {
                    let from = place(g, [image, o, oy, ox], s.y());
                    let by = place(g, [o, c, tap[0], tap[1]], s.w());
                    let (dy, w) = (g.operand(0), g.operand(2));
                    let (dy, w) = (g.get(dy, from), g.get(w, by));
                    vec![g.b.fma(dy, w, sum[0])]
                })
            })
        });
        let dx = g.result(j);
        g.put(dx, i, sum[0]);
    });
}

/// Adds up a block's threads, and writes the sum as element `i` of result `j`.
fn put_total(g: &mut Grid, sum: Value, room: Tensor, (j, i): (usize, Value)) {
    let total = g.total(sum, room);
    g.once(|g| {
        let result = g.result(j);
        let total = g.rounded(total, result.dtype);
        g.put(result, i, total);
    });
}

/// A block has a weight: its threads share the outputs. Sums are f64.
fn of_weights(k: &mut Kernel<'_>, s: &Windows, j: usize) {
    let n = s.w().iter().product();
    let outputs = [s.batch, s.axes[0].output, s.axes[1].output];
    k.phase(THREADS, n, |g| {
        g.parts(n, |g, weight| {
            let room = g.shared(THREADS.into(), DType::F64);
            let [o, c, ky, kx] = four(g, weight, s.w());
            let [group, _] = g.divided(o, s.outputs);
            let first = g.times(group, s.inputs);
            let channel = g.b.addi(first, c);
            let zero = g.float(0.0, Kind::F64);
            let sum = g.share(outputs.iter().product(), &[zero], |g, i, sum| {
                let at = g.coordinates(i, &outputs);
                let ([iy, ix], inside) = reads(g, s.axes, input, [at[1], at[2]], [ky, kx]);
                g.choose(inside, sum, |g| {
                    let from = place(g, [at[0], o, at[1], at[2]], s.y());
                    let of = place(g, [at[0], channel, iy, ix], s.x());
                    let (dy, x) = (g.operand(0), g.operand(1));
                    let (dy, x) = (g.get(dy, from), g.get(x, of));
                    let (dy, x) = (g.double(dy), g.double(x));
                    vec![g.b.fma(dy, x, sum[0])]
                })
            });
            put_total(g, sum[0], room, (j, weight));
        });
    });
}

/// A block has a channel of outputs.
fn of_biases(k: &mut Kernel<'_>, s: &Windows, j: usize) {
    let channels = s.y()[1];
    let outputs = [s.batch, s.axes[0].output, s.axes[1].output];
    k.phase(THREADS, channels, |g| {
        g.parts(channels, |g, o| {
            let room = g.shared(THREADS.into(), DType::F64);
            let zero = g.float(0.0, Kind::F64);
            let sum = g.share(outputs.iter().product(), &[zero], |g, i, sum| {
                let at = g.coordinates(i, &outputs);
                let from = place(g, [at[0], o, at[1], at[2]], s.y());
                let dy = g.operand(0);
                let dy = g.get(dy, from);
                let dy = g.double(dy);
                vec![g.add(sum[0], dy)]
            });
            put_total(g, sum[0], room, (j, o));
        });
    });
}
