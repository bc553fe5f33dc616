//! The sizes of convolutions, which of them tensor cores compute, and in how many parts.

use super::attrs::{Convolution, ConvolutionBwd};
use crate::types::{DType, TensorType};

/// A spatial dimension: inputs, outputs, and the taps of a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Axis {
    /// Numbers of x.
    pub input: u64,
    /// Numbers of y.
    pub output: u64,
    /// Numbers of a window.
    pub taps: u64,
    /// From a window to the next.
    pub stride: u64,
    /// Zeros before the first number of x.
    pub padding: i64,
    /// From a tap to the next.
    pub dilation: u64,
}

/// x\[N,C,..\], w\[O,C/groups,..\], y\[N,O,..\]. One spatial dimension is treated as two, the first
/// of size 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Windows {
    /// N.
    pub batch: u64,
    /// Channels of x in a group.
    pub inputs: u64,
    /// Channels of y in a group.
    pub outputs: u64,
    /// Groups of channels.
    pub groups: u64,
    /// The spatial dimensions.
    pub axes: [Axis; 2],
    /// Whether x, w and y are bf16.
    is_bf16: bool,
}

/// Rows and columns of a tile of a product on tensor cores.
pub const TILE: u64 = 128;
/// The depth of its factors' tiles.
pub const DEPTH: u64 = 64;

impl Windows {
    /// Of a convolution.
    pub fn forward(a: &Convolution, [x, w, y]: [&TensorType; 3]) -> Windows {
        Windows::new([x, w, y], a.groups, [&a.stride, &a.padding, &a.dilation])
    }

    /// Of the gradients of a convolution.
    pub fn backward(a: &ConvolutionBwd, [x, w, dy]: [&TensorType; 3]) -> Windows {
        Windows::new([x, w, dy], a.groups, [&a.stride, &a.padding, &a.dilation])
    }

    fn new(types: [&TensorType; 3], groups: i64, lists: [&[i64]; 3]) -> Windows {
        let [x, w, y] = types.map(TensorType::shape);
        let missing = 4 - x.len();
        let [stride, padding, dilation] = lists;
        let axis = |d: usize| match d.checked_sub(missing) {
            Some(i) => Axis {
                input: x[i + 2],
                output: y[i + 2],
                taps: w[i + 2],
                stride: stride[i] as u64,
                padding: padding[i],
                dilation: dilation[i] as u64,
            },
            None => Axis {
                input: 1,
                output: 1,
                taps: 1,
                stride: 1,
                padding: 0,
                dilation: 1,
            },
        };
        let groups = groups as u64;
        Windows {
            batch: x[0],
            inputs: w[1],
            outputs: w[0] / groups,
            groups,
            axes: [axis(0), axis(1)],
            is_bf16: types.iter().all(|ty| ty.dtype() == DType::BF16),
        }
    }

    /// The shape of x.
    pub fn x(&self) -> [u64; 4] {
        let [y, x] = self.axes;
        [self.batch, self.groups * self.inputs, y.input, x.input]
    }

    /// The shape of w.
    pub fn w(&self) -> [u64; 4] {
        let [y, x] = self.axes;
        [self.groups * self.outputs, self.inputs, y.taps, x.taps]
    }

    /// The shape of y.
    pub fn y(&self) -> [u64; 4] {
        let [y, x] = self.axes;
        [self.batch, self.groups * self.outputs, y.output, x.output]
    }

    /// True if a GPU's tensor cores compute it: bf16 without groups, and places that 32-bit
    /// integers count.
    pub fn on_tensor_cores(&self) -> bool {
        /// Below this, sums of two places or steps do not overflow.
        const MOST: u64 = 1 << 27;
        let numbers = |shape: [u64; 4]| shape.iter().try_fold(1, |n: u64, &d| n.checked_mul(d));
        let fits = |shape| numbers(shape).is_some_and(|n| 0 < n && n < 1 << 30);
        let near = |axis: &Axis| {
            let reach = axis.taps.checked_mul(axis.dilation);
            let span = axis.output.checked_mul(axis.stride);
            let most = [reach, span, Some(axis.padding.unsigned_abs())];
            most.iter().all(|n| n.is_some_and(|n| n < MOST))
                && axis.input < MOST
                // A phase for each remainder of a position by the stride.
                && axis.stride <= 4
        };
        let shapes = [self.x(), self.w(), self.y()];
        self.is_bf16
            && self.groups == 1
            && shapes.into_iter().all(fits)
            && self.axes.iter().all(near)
    }

    /// The number of parts in which tensor cores sum the gradient of the weights: enough blocks for
    /// a GPU, and terms enough for a block. It does not depend on the GPU, so the bits do not
    /// either.
    pub fn weight_parts(&self) -> u64 {
        /// Blocks that keep a GPU busy.
        const BLOCKS: u64 = 256;
        /// The fewest rounds of a part.
        const ROUNDS: u64 = 8;
        let [o, c, h, w] = self.w();
        let tiles = o.div_ceil(TILE) * (c * h * w).div_ceil(TILE);
        let [n, _, h, w] = self.y();
        let rounds = (n * h * w).div_ceil(DEPTH);
        (BLOCKS / tiles).min(rounds / ROUNDS).max(1)
    }

    /// Bytes of the parts' sums, f32; none if there is one part.
    pub fn weight_scratch(&self) -> u64 {
        match self.weight_parts() {
            1 => 0,
            parts => (4 * parts * self.w().iter().product::<u64>()).next_multiple_of(64),
        }
    }
}
