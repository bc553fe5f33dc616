//! Norms.

use crate::Error;
use crate::net::Net;
use ir::{Op, Value};

/// What a norm is.
#[derive(Clone, Copy)]
pub(crate) struct Norm {
    /// Whether the mean is subtracted: by mean and deviation, or by the root of the mean square.
    pub(crate) centred: bool,
    pub(crate) eps: f64,
    /// What is added to the weight; `None` if there is no weight.
    pub(crate) offset: Option<f64>,
    pub(crate) bias: bool,
}

/// The weights of a norm.
#[derive(Clone, Copy)]
pub(crate) enum Weights {
    /// One for each element.
    Row,
    /// One for each element of each head, of this many: `[heads, head]`.
    Heads(u64),
    /// The same, as a module for each head.
    Modules(u64),
}

impl Norm {
    /// A layer norm with weight and bias.
    pub(crate) fn layer(eps: f64) -> Norm {
        Norm {
            centred: true,
            eps,
            offset: Some(0.0),
            bias: true,
        }
    }

    /// An RMS norm.
    pub(crate) fn rms(eps: f64) -> Norm {
        Norm {
            centred: false,
            bias: false,
            ..Norm::layer(eps)
        }
    }

    /// Normalises the last dimension of x.
    pub(crate) fn of(
        self,
        net: &mut Net,
        path: &str,
        x: Value,
        weights: Weights,
    ) -> Result<Value, Error> {
        let outer = std::mem::replace(&mut net.module, path.to_string());
        let y = self.inside(net, path, x, weights)?;
        net.module = outer;
        Ok(y)
    }

    fn inside(self, net: &mut Net, path: &str, x: Value, weights: Weights) -> Result<Value, Error> {
        let width = *net.shape(x).last().unwrap_or(&1);
        let mut weight = match self.offset {
            Some(_) => Some(weight(net, path, width, weights)?),
            None => None,
        };
        if let (Some(w), Some(offset)) = (weight, self.offset.filter(|&offset| offset != 0.0)) {
            weight = Some(net.by(Op::AddScalar, w, offset)?);
        }
        let bias = match self.bias {
            true => Some(net.parameter(&format!("{path}.bias"), &[width])?),
            false => None,
        };
        if self.centred && matches!(weights, Weights::Row) {
            let factors: Vec<Value> = weight.into_iter().chain(bias).collect();
            return net.layer_norm(x, self.eps, &factors);
        }
        let normal = match self.centred {
            true => net.layer_norm(x, self.eps, &[])?,
            false => net.rms_norm(x, self.eps)?,
        };
        match weight {
            Some(weight) => net.op(Op::Mul, &[weight, normal]),
            None => Ok(normal),
        }
    }
}

fn weight(net: &mut Net, path: &str, width: u64, weights: Weights) -> Result<Value, Error> {
    match weights {
        Weights::Row => net.parameter(&format!("{path}.weight"), &[width]),
        Weights::Heads(heads) => net.parameter(&format!("{path}.weight"), &[heads, width]),
        Weights::Modules(heads) => {
            let rows = (0..heads)
                .map(|i| net.parameter(&format!("{path}.norms.{i}.weight"), &[width]))
                .collect::<Result<Vec<Value>, Error>>()?;
            let joint = net.cat(&rows)?;
            net.reshape(joint, &[heads, width])
        }
    }
}
