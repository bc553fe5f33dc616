//! The MLP of a block, and its functions.

use crate::Error;
use crate::decoder::{Activation, Decoder, Mlp};
use crate::net::Net;
use ir::op::attrs::Gelu;
use ir::{Op, Value};

impl Activation {
    pub(crate) fn of(self, net: &mut Net, x: Value) -> Result<Value, Error> {
        match self {
            Activation::Gelu { tanh } => net.op(Op::Gelu(Gelu { tanh }), &[x]),
            Activation::Silu => net.op(Op::Silu, &[x]),
            Activation::Relu => net.op(Op::Relu, &[x]),
            Activation::Relu2 => {
                let positive = net.op(Op::Relu, &[x])?;
                net.op(Op::Mul, &[positive, positive])
            }
            Activation::Xielu => xielu(net, x),
        }
    }
}

/// `p x² + beta x` where x is positive, and `n (exp(min(x, eps)) - 1 - x) + beta x` elsewhere.
/// p and n are positive, because the parameters are what softplus makes them of.
fn xielu(net: &mut Net, x: Value) -> Result<Value, Error> {
    let path = format!("{}.act_fn", net.module);
    let beta = net.buffer(&format!("{path}.beta"), &[], &[0.5])?;
    let eps = net.buffer(&format!("{path}.eps"), &[], &[-1e-6])?;
    let mut softplus = |name: &str| {
        let raw = net.parameter(&format!("{path}.{name}"), &[1])?;
        let exp = net.op(Op::Exp, &[raw])?;
        let sum = net.by(Op::AddScalar, exp, 1.0)?;
        net.op(Op::Log, &[sum])
    };
    let (p, n) = (softplus("alpha_p")?, softplus("alpha_n")?);
    let n = net.op(Op::Add, &[n, beta])?;
    let linear = net.op(Op::Mul, &[x, beta])?;
    let square = net.op(Op::Mul, &[x, x])?;
    let above = net.op(Op::Mul, &[square, p])?;
    let negative = net.op(Op::Minimum, &[x, eps])?;
    let exp = net.op(Op::Exp, &[negative])?;
    let exp = net.by(Op::AddScalar, exp, -1.0)?;
    let rest = net.op(Op::Sub, &[exp, x])?;
    let below = net.op(Op::Mul, &[rest, n])?;
    let is_positive = net.by(Op::GtScalar, x, 0.0)?;
    let curve = net.op(Op::Where, &[is_positive, above, below])?;
    net.op(Op::Add, &[curve, linear])
}

impl Decoder {
    /// The MLP of the module that is built, with this many columns inside.
    pub(crate) fn dense(&self, net: &mut Net, x: Value, inner: u64) -> Result<Value, Error> {
        let path = net.module.clone();
        let (bias, conv) = (self.mlp_bias, self.conv);
        let at = |name: &str| format!("{path}.{name}");
        match self.mlp {
            Mlp::Plain { up, down } => {
                let up = net.linear(&at(up), x, inner, bias, conv)?;
                let active = self.activation.of(net, up)?;
                net.linear(&at(down), active, self.width, bias, conv)
            }
            Mlp::Gated => {
                let gate = net.linear(&at("gate_proj"), x, inner, bias, conv)?;
                let up = net.linear(&at("up_proj"), x, inner, bias, conv)?;
                self.gated(net, gate, up)
            }
            Mlp::JointGate => {
                let joint = net.linear(&at("gate_up_proj"), x, 2 * inner, bias, conv)?;
                let gate = net.columns(joint, 0, inner)?;
                let up = net.columns(joint, inner, 2 * inner)?;
                self.gated(net, gate, up)
            }
        }
    }

    /// `down(f(gate) up)`.
    fn gated(&self, net: &mut Net, gate: Value, up: Value) -> Result<Value, Error> {
        let active = self.activation.of(net, gate)?;
        let gated = net.op(Op::Mul, &[active, up])?;
        let down = format!("{}.down_proj", net.module);
        net.linear(&down, gated, self.width, self.mlp_bias, self.conv)
    }
}
