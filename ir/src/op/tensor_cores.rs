//! Which convolutions and attention a GPU's tensor cores compute. Other kernels of these ops are
//! much slower, so a machine's rates depend on it.

use super::Op;
use super::attention::{Attending, Beside};
use super::windows::Windows;
use crate::types::TensorType;

impl Op {
    /// Whether tensor cores compute it, if it is a convolution or attention; none if it is neither.
    /// Before: the types fit.
    pub fn on_tensor_cores(&self, ins: &[&TensorType], outs: &[TensorType]) -> Option<bool> {
        let attention = |it: Option<Attending>, q: usize, operands: usize| {
            let beside = Beside::of(operands, ins[operands..].iter().copied());
            it.is_some_and(|it| it.on_tensor_cores(ins[q].dtype(), beside))
        };
        let plain = |q: usize| Some(Attending::plain(ins[q].shape(), ins[q + 2].shape()));
        let shapes = |q: usize| [q, q + 1, q + 2].map(|i| ins[i].shape());
        Some(match self {
            Op::Convolution(a) => Windows::forward(a, [ins[0], ins[1], &outs[0]]).on_tensor_cores(),
            Op::ConvolutionBwd(a) => {
                Windows::backward(a, [ins[1], ins[2], ins[0]]).on_tensor_cores()
            }
            Op::Sdpa(_) => attention(plain(0), 0, 3),
            Op::SdpaBwd(_) => attention(plain(1), 1, 6),
            Op::SdpaRows(a) => attention(Attending::rows(a, shapes(0), 0).ok(), 0, 3),
            Op::SdpaRowsBwd(a) => attention(Attending::rows(a, shapes(1), 1).ok(), 1, 6),
            _ => return None,
        })
    }
}
