//! Mixtures of experts: each token is multiplied by the matrices of a few experts, which a router
//! chooses (Shazeer et al., 2017). The rows of one expert lie behind each other, so that all
//! experts are products of groups of rows.
//!
//! Every size is static: a batch of n tokens with k experts each has n k rows, however they are
//! distributed.

use crate::Error;
use crate::decoder::Decoder;
use crate::net::Net;
use ir::op::Number;
use ir::op::attrs::{
    Along, Arange, Clamp, Full, GroupedProduct, IndexPut, Reduction, ScatterValue, Sizes, Slice,
    TopK,
};
use ir::{DType, Op, Value};

/// The score of an expert that no token may choose.
const LOWEST: f64 = f32::MIN as f64;

/// What a mixture of experts is made of. Names are paths inside the module of the MLP.
#[derive(Clone)]
pub(crate) struct Mixture {
    /// The module with the router's weight.
    pub(crate) router: &'static str,
    /// Whether the router adds a bias.
    pub(crate) router_bias: bool,
    /// The number of experts, and how many a token has.
    pub(crate) experts: u64,
    pub(crate) chosen: u64,
    /// Columns inside an expert.
    pub(crate) inner: u64,
    pub(crate) form: Form,
    pub(crate) scores: Scores,
    /// What is added to scores while experts are chosen. It is not trained by gradients.
    pub(crate) correction: Option<Correction>,
    pub(crate) groups: Groups,
    pub(crate) total: Total,
    /// The factor of the weights.
    pub(crate) factor: f64,
    /// An MLP that all tokens have in addition.
    pub(crate) shared: Option<Shared>,
}

/// What an expert computes.
#[derive(Clone, Copy)]
pub(crate) enum Form {
    /// `down(f(gate(x)) up(x))`. A matrix is `[out, in]`; the columns of gate are the first half.
    Halves,
    /// `down(g sigmoid(alpha g) (u + 1))`, where g is gate(x) and at most `limit`, and u is up(x)
    /// and within `limit` of 0. Matrices are `[in, out]` and have biases; gate and up alternate.
    Pairs { alpha: f64, limit: f64 },
}

/// What a router makes of its logits.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Scores {
    /// Shares of all experts.
    Softmax,
    /// Shares of the chosen experts.
    SoftmaxOfChosen,
    /// A number from 0 to 1 for each expert, whatever the others have.
    Sigmoid,
}

/// The numbers that are added to scores.
#[derive(Clone, Copy)]
pub(crate) struct Correction {
    pub(crate) name: &'static str,
    /// Whether the tensor is `[1, experts]` instead of `[experts]`.
    pub(crate) is_row: bool,
}

/// Groups of experts with consecutive numbers. A token has experts of a few groups: those with the
/// largest sums of their best scores. (DeepSeek-AI, DeepSeek-V3, 2024)
#[derive(Clone, Copy)]
pub(crate) struct Groups {
    pub(crate) count: u64,
    pub(crate) chosen: u64,
    /// How many scores of a group count.
    pub(crate) best: u64,
}

/// What the weights of a token's experts are divided by.
#[derive(Clone, Copy)]
pub(crate) enum Total {
    /// By nothing.
    Any,
    /// By their sum and this number.
    Sum(f64),
    /// By their sum, or by this number if it is larger.
    AtLeast(f64),
}

/// The MLP that all tokens share.
#[derive(Clone, Copy)]
pub(crate) struct Shared {
    pub(crate) name: &'static str,
    /// Its columns.
    pub(crate) inner: u64,
    /// The product whose sigmoid is a token's factor of the MLP's result.
    pub(crate) gate: Option<&'static str>,
}

/// Which experts a token has, and their weights: `[tokens, chosen]` each.
#[derive(Clone, Copy)]
struct Route {
    experts: Value,
    weights: Value,
}

/// The rows of the experts, sorted by expert and then by token.
#[derive(Clone, Copy)]
struct Rows {
    /// The place of each row in the weights of all tokens: `[rows]`.
    places: Value,
    /// The token of each row: `[rows]`.
    tokens: Value,
    /// Where the rows of each expert end: `[experts]`.
    ends: Value,
}

impl Mixture {
    /// An error if the sizes do not fit.
    pub(crate) fn check(&self) -> Result<(), Error> {
        /// More than any model has.
        const EXPERTS: u64 = 1 << 16;
        let (experts, chosen) = (self.experts, self.chosen);
        let Groups {
            count,
            chosen: groups,
            best,
        } = self.groups;
        let of_group = experts / count;
        let (key, why) = if EXPERTS < experts {
            let why = format!("{experts} experts are more than {EXPERTS}");
            ("num_experts", why)
        } else if experts < chosen {
            let why = format!("a token cannot have {chosen} of {experts} experts");
            ("num_experts_per_tok", why)
        } else if !experts.is_multiple_of(count) || (1 < count && of_group < best) {
            let why = format!("{experts} experts cannot be {count} groups of {best} or more");
            ("n_group", why)
        } else if count < groups || groups * of_group < chosen {
            let why = format!(
                "a token cannot have {chosen} experts of {groups} of {count} groups of {of_group}"
            );
            ("topk_group", why)
        } else {
            return Ok(());
        };
        Err(Error::new(key, why))
    }

    /// Chooses the experts of each token. x is `[tokens, width]`.
    fn route(&self, net: &mut Net, path: &str, x: Value) -> Result<Route, Error> {
        let module = format!("{path}.{}", self.router);
        let outer = std::mem::replace(&mut net.module, module.clone());
        let width = net.shape(x)[1];
        let weight = net.parameter(&format!("{module}.weight"), &[self.experts, width])?;
        let bias = match self.router_bias {
            true => Some(net.parameter(&format!("{module}.bias"), &[self.experts])?),
            false => None,
        };
        let logits = net.product(x, weight, false, bias)?;
        let along = || Along { dim: 1 };
        let scores = match self.scores {
            Scores::Softmax => net.op(Op::Softmax(along()), &[logits])?,
            Scores::SoftmaxOfChosen => logits,
            Scores::Sigmoid => net.op(Op::Sigmoid, &[logits])?,
        };
        let preferred = self.preferred(net, path, scores)?;
        let [best, experts] = largest(net, preferred, self.chosen)?;
        let mut weights = match preferred == scores {
            true => best,
            false => net.op(Op::Gather(along()), &[scores, experts])?,
        };
        if self.scores == Scores::SoftmaxOfChosen {
            weights = net.op(Op::Softmax(along()), &[weights])?;
        }
        weights = self.divided(net, weights)?;
        if self.factor != 1.0 {
            weights = net.by(Op::MulScalar, weights, self.factor)?;
        }
        net.module = outer;
        Ok(Route { experts, weights })
    }

    /// The numbers by which experts are chosen.
    fn preferred(&self, net: &mut Net, path: &str, scores: Value) -> Result<Value, Error> {
        let mut preferred = scores;
        if let Some(correction) = self.correction {
            let zeros = vec![0.0; self.experts as usize];
            let shape = match correction.is_row {
                true => vec![1, self.experts],
                false => vec![self.experts],
            };
            let bias = net.buffer(&format!("{path}.{}", correction.name), &shape, &zeros)?;
            let row = net.reshape(bias, &[1, self.experts])?;
            preferred = net.op(Op::Add, &[preferred, row])?;
        }
        let Groups {
            count,
            chosen,
            best,
        } = self.groups;
        if chosen == count {
            return Ok(preferred);
        }
        let tokens = net.shape(preferred)[0];
        let members = self.experts / count;
        let grouped = net.reshape(preferred, &[tokens * count, members])?;
        let [best, _] = largest(net, grouped, best)?;
        let sums = sum_of_rows(net, best)?;
        let sums = net.reshape(sums, &[tokens, count])?;
        let [_, groups] = largest(net, sums, chosen)?;
        let allowed = marked(net, groups, count)?;
        let allowed = net.by(Op::GtScalar, allowed, 0.0)?;
        let allowed = net.reshape(allowed, &[tokens, count, 1])?;
        let grouped = net.reshape(preferred, &[tokens, count, members])?;
        let left = net.or(allowed, grouped, LOWEST)?;
        net.reshape(left, &[tokens, self.experts])
    }

    /// The weights over their total.
    fn divided(&self, net: &mut Net, weights: Value) -> Result<Value, Error> {
        let total = match self.total {
            Total::Any => return Ok(weights),
            Total::Sum(0.0) => sum_of_rows(net, weights)?,
            Total::Sum(more) => {
                let sum = sum_of_rows(net, weights)?;
                net.by(Op::AddScalar, sum, more)?
            }
            Total::AtLeast(least) => {
                let sum = sum_of_rows(net, weights)?;
                let clamp = Clamp {
                    max: Number::Float(f64::INFINITY),
                    min: Number::Float(least),
                };
                net.op(Op::Clamp(clamp), &[sum])?
            }
        };
        net.op(Op::Div, &[weights, total])
    }

    /// Sorts the rows by counting: the rows of an expert begin behind those of the experts before
    /// it, in the order of their tokens. This needs sums over tokens, and no comparisons.
    fn sorted(&self, net: &mut Net, experts: Value) -> Result<Rows, Error> {
        let [tokens, chosen] = [net.shape(experts)[0], net.shape(experts)[1]];
        let n = tokens.saturating_mul(chosen);
        let along = |dim: i64| Along { dim };
        // How many tokens up to each one have each expert.
        let marks = marked(net, experts, self.experts)?;
        let counts = counted(net, marks)?;
        let all = row(net, counts, tokens - 1)?;
        let ends = net.op(Op::Cumsum(along(1)), &[all])?;
        let starts = net.op(Op::Sub, &[ends, all])?;
        let places = net.op(Op::Add, &[counts, starts])?;
        let places = net.by(Op::AddScalar, places, -1.0)?;
        let places = net.op(Op::Gather(along(1)), &[places, experts])?;
        let places = net.reshape(places, &[n])?;
        // The places are a permutation; its inverse says which row comes first.
        let every = numbers(net, n)?;
        let zeros = zeros(net, DType::I64, &[n])?;
        let put = Op::IndexPut(IndexPut { accumulate: false });
        let inverse = net.op(put, &[zeros, every, places])?;
        let token = numbers(net, tokens)?;
        let token = net.reshape(token, &[tokens, 1])?;
        let shape = vec![tokens as i64, chosen as i64];
        let token = net.op(Op::Expand(Sizes { shape }), &[token])?;
        let token = net.reshape(token, &[n])?;
        Ok(Rows {
            places: inverse,
            tokens: net.op(Op::Index, &[token, inverse])?,
            ends: net.reshape(ends, &[self.experts])?,
        })
    }
}

impl Decoder {
    /// The mixture of experts of the module that is built.
    pub(crate) fn mixture(
        &self,
        net: &mut Net,
        mixture: &Mixture,
        x: Value,
    ) -> Result<Value, Error> {
        let path = net.module.clone();
        let shape = net.shape(x).to_vec();
        let tokens = shape[..shape.len() - 1].iter().product();
        let rows = net.reshape(x, &[tokens, self.width])?;
        let route = mixture.route(net, &path, rows)?;
        net.module = format!("{path}.experts");
        let mut result = self.experts(net, mixture, rows, route)?;
        if let Some(shared) = mixture.shared {
            net.module = format!("{path}.{}", shared.name);
            let mut added = self.dense(net, rows, shared.inner)?;
            net.module = path.clone();
            if let Some(gate) = shared.gate {
                let gate = net.linear(&format!("{path}.{gate}"), rows, 1, false, false)?;
                let share = net.op(Op::Sigmoid, &[gate])?;
                added = net.op(Op::Mul, &[share, added])?;
            }
            result = net.op(Op::Add, &[result, added])?;
        }
        net.module = path;
        net.reshape(result, &shape)
    }

    /// The sum of each token's experts: `[tokens, width]`.
    fn experts(
        &self,
        net: &mut Net,
        mixture: &Mixture,
        x: Value,
        route: Route,
    ) -> Result<Value, Error> {
        let path = net.module.clone();
        let (experts, inner) = (mixture.experts, mixture.inner);
        let outer = inner.saturating_mul(2);
        let (tb, shapes) = match mixture.form {
            Form::Halves => (true, [[outer, self.width], [self.width, inner]]),
            Form::Pairs { .. } => (false, [[self.width, outer], [inner, self.width]]),
        };
        let [joint, down] = [("gate_up_proj", shapes[0]), ("down_proj", shapes[1])]
            .map(|(name, [p, q])| net.parameter(&format!("{path}.{name}"), &[experts, p, q]));
        let (joint, down) = (joint?, down?);
        let rows = mixture.sorted(net, route.experts)?;
        let n = net.shape(rows.places)[0];
        let product = || Op::GroupedMatmul(GroupedProduct { tb });
        let read = net.op(Op::Index, &[x, rows.tokens])?;
        let both = net.op(product(), &[read, joint, rows.ends])?;
        let (gated, bias) = match mixture.form {
            Form::Halves => {
                let gate = net.columns(both, 0, inner)?;
                let up = net.columns(both, inner, outer)?;
                let active = self.activation.of(net, gate)?;
                (net.op(Op::Mul, &[active, up])?, None)
            }
            Form::Pairs { alpha, limit } => {
                let numbers = net.reshape(route.experts, &[n])?;
                let numbers = net.op(Op::Index, &[numbers, rows.places])?;
                let bias =
                    net.parameter(&format!("{path}.gate_up_proj_bias"), &[experts, outer])?;
                let bias = net.op(Op::Index, &[bias, numbers])?;
                let both = net.op(Op::Add, &[both, bias])?;
                let bias = [experts, self.width];
                let bias = net.parameter(&format!("{path}.down_proj_bias"), &bias)?;
                let bias = net.op(Op::Index, &[bias, numbers])?;
                (pairs(net, both, alpha, limit)?, Some(bias))
            }
        };
        // The last product is linear, so that a row has its weight before it: there it has fewer
        // columns, and the backward needs no result of the product.
        let weights = net.reshape(route.weights, &[n])?;
        let weights = net.op(Op::Index, &[weights, rows.places])?;
        let weights = net.reshape(weights, &[n, 1])?;
        let gated = net.op(Op::Mul, &[gated, weights])?;
        let mut result = net.op(product(), &[gated, down, rows.ends])?;
        if let Some(bias) = bias {
            let bias = net.op(Op::Mul, &[bias, weights])?;
            result = net.op(Op::Add, &[result, bias])?;
        }
        let shape = net.shape(x).to_vec();
        let zeros = zeros(net, DType::F32, &shape)?;
        let add = Op::IndexPut(IndexPut { accumulate: true });
        net.op(add, &[zeros, result, rows.tokens])
    }
}

/// The function of [`Form::Pairs`].
fn pairs(net: &mut Net, both: Value, alpha: f64, limit: f64) -> Result<Value, Error> {
    let end = net.shape(both)[1] as i64;
    let mut alternate = |start: i64, least: f64| {
        let slice = Slice {
            dim: 1,
            start,
            end,
            step: 2,
        };
        let part = net.op(Op::Slice(slice), &[both])?;
        let clamp = Clamp {
            max: Number::Float(limit),
            min: Number::Float(least),
        };
        net.op(Op::Clamp(clamp), &[part])
    };
    let gate = alternate(0, f64::NEG_INFINITY)?;
    let up = alternate(1, -limit)?;
    let steep = net.by(Op::MulScalar, gate, alpha)?;
    let share = net.op(Op::Sigmoid, &[steep])?;
    let active = net.op(Op::Mul, &[gate, share])?;
    let up = net.by(Op::AddScalar, up, 1.0)?;
    net.op(Op::Mul, &[up, active])
}

/// The largest numbers of each row, and where they are.
fn largest(net: &mut Net, x: Value, k: u64) -> Result<[Value; 2], Error> {
    let top = TopK {
        dim: 1,
        k: k as i64,
        largest: true,
    };
    let results = net.results(Op::TopK(top), &[x])?;
    Ok([results[0], results[1]])
}

/// The sum of each row: `[rows, 1]`.
fn sum_of_rows(net: &mut Net, x: Value) -> Result<Value, Error> {
    let over = Reduction {
        dims: vec![1],
        keepdim: true,
    };
    net.op(Op::Sum(over), &[x])
}

/// For each row of numbers below n: ones at them, zeros elsewhere.
fn marked(net: &mut Net, numbers: Value, n: u64) -> Result<Value, Error> {
    let rows = net.shape(numbers)[0];
    let zeros = zeros(net, DType::I64, &[rows, n])?;
    let ones = ScatterValue {
        dim: 1,
        value: Number::Int(1),
    };
    net.op(Op::ScatterValue(ones), &[zeros, numbers])
}

/// Sums over the rows up to each one, of `[rows, columns]`. They are sums within blocks of rows and
/// sums of blocks: threads that share the work have the blocks.
fn counted(net: &mut Net, x: Value) -> Result<Value, Error> {
    let [rows, columns] = [net.shape(x)[0], net.shape(x)[1]];
    let blocks = (1..=rows.isqrt())
        .rev()
        .find(|&n| rows.is_multiple_of(n))
        .unwrap_or(1);
    if blocks == 1 {
        return net.op(Op::Cumsum(Along { dim: 0 }), &[x]);
    }
    let x = net.reshape(x, &[blocks, rows / blocks, columns])?;
    let within = net.op(Op::Cumsum(Along { dim: 1 }), &[x])?;
    let last = Slice {
        dim: 1,
        start: (rows / blocks - 1) as i64,
        end: (rows / blocks) as i64,
        step: 1,
    };
    let of_block = net.op(Op::Slice(last), &[within])?;
    let up_to = net.op(Op::Cumsum(Along { dim: 0 }), &[of_block])?;
    let before = net.op(Op::Sub, &[up_to, of_block])?;
    let sums = net.op(Op::Add, &[within, before])?;
    net.reshape(sums, &[rows, columns])
}

/// Row i: `[1, columns]`.
fn row(net: &mut Net, x: Value, i: u64) -> Result<Value, Error> {
    let slice = Slice {
        dim: 0,
        start: i as i64,
        end: i as i64 + 1,
        step: 1,
    };
    net.op(Op::Slice(slice), &[x])
}

/// 0, 1, 2, ..
fn numbers(net: &mut Net, n: u64) -> Result<Value, Error> {
    let numbers = Arange {
        dtype: DType::I64,
        shape: vec![n as i64],
        start: Number::Int(0),
        step: Number::Int(1),
    };
    net.op(Op::Arange(numbers), &[])
}

fn zeros(net: &mut Net, dtype: DType, shape: &[u64]) -> Result<Value, Error> {
    let zeros = Full {
        dtype,
        shape: shape.iter().map(|&size| size as i64).collect(),
        value: match dtype.is_float() {
            true => Number::Float(0.0),
            false => Number::Int(0),
        },
    };
    net.op(Op::Full(zeros), &[])
}
