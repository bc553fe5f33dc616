//! Attention: heads, positions, and what a query sees.

use crate::Error;
use crate::decoder::{Block, Decoder, HeadNorms, Latent, Over, Projections};
use crate::net::Net;
use crate::norm::{Norm, Weights};
use ir::op::Number;
use ir::op::attrs::{Along, Attention, Clamp, Product, Sizes};
use ir::{DType, Op, Value};
use std::collections::BTreeMap;

/// The score of a key that a query does not see.
const LOWEST: f64 = f32::MIN as f64;

/// What all blocks share.
pub(crate) struct Shared {
    /// For each kind of rotary positions: cosine and sine of each position and turning element.
    pub(crate) turns: Vec<Turns>,
    /// What is added to scores, by head and key: `[1, heads, 1, sequence]`.
    pub(crate) bias: Option<Value>,
    /// The place of each token in its row: `[sequence]`.
    pub(crate) places: Value,
    /// The number of each token's document, if a row has several: `[batch, sequence]`.
    pub(crate) documents: Option<Value>,
    /// What attention is given, by the size of the window if there is one.
    pub(crate) masks: BTreeMap<Option<u64>, Option<Value>>,
}

/// Cosine and sine: `[rows, 1, sequence, turning]`.
#[derive(Clone, Copy)]
pub(crate) struct Turns {
    pub(crate) cos: Value,
    pub(crate) sin: Value,
    /// Whether the elements of a pair are neighbours.
    pub(crate) neighbours: bool,
}

impl Decoder {
    /// Whether attention is made of products and a softmax, and keeps its scores.
    pub(crate) fn keeps_scores(&self) -> bool {
        self.score_cap.is_some() || self.sinks
    }

    pub(crate) fn attention(
        &self,
        net: &mut Net,
        x: Value,
        block: Block,
        shared: &Shared,
    ) -> Result<Value, Error> {
        let path = net.module.clone();
        let (batch, sequence) = (net.shape(x)[0], net.shape(x)[1]);
        let turns = block.rotary.map(|i| shared.turns[i]);
        let [q, k, v] = match self.projections {
            Projections::Latent(latent) => self.latent(net, &path, latent, x, turns)?,
            _ => self.heads(net, &path, x, turns)?,
        };
        let mask = shared.masks.get(&block.window).copied().flatten();
        let result = match self.keeps_scores() {
            true => {
                let mask = mask.expect("attention that keeps its scores should have a mask");
                self.scored_attention(net, &path, [q, k, v], mask)?
            }
            false => {
                let causal = block.window.is_none() && shared.documents.is_none();
                let scale = self.scale;
                let key = net.dropout_key(self.dropout.weights)?;
                let parts: Vec<Value> = [q, k, v].into_iter().chain(mask).chain(key).collect();
                net.op(Op::Sdpa(Attention { causal, scale }), &parts)?
            }
        };
        let columns = self.heads * net.shape(result)[3];
        let rows = net.permute(result, &[0, 2, 1, 3])?;
        let rows = net.reshape(rows, &[batch, sequence, columns])?;
        let output = format!("{path}.{}", self.names.output);
        net.linear(&output, rows, self.width, self.biases[1], self.conv)
    }

    /// Queries, keys and values by head: `[batch, heads, sequence, head]` each.
    fn heads(
        &self,
        net: &mut Net,
        path: &str,
        x: Value,
        turns: Option<Turns>,
    ) -> Result<[Value; 3], Error> {
        let (batch, sequence) = (net.shape(x)[0], net.shape(x)[1]);
        let [q, k, v] = self.projected(net, path, x)?;
        let mut parts = vec![];
        for (i, (part, heads)) in [
            (q, self.heads),
            (k, self.shared_heads),
            (v, self.shared_heads),
        ]
        .into_iter()
        .enumerate()
        {
            // Values are neither normalised nor turned.
            let norms = self.head_norms.filter(|_| i < 2);
            let norm = |net: &mut Net, norms: HeadNorms, x: Value| {
                let weights = match norms.over {
                    Over::Head | Over::Heads => Weights::Row,
                    Over::EachHead => Weights::Heads(heads),
                    Over::HeadModules => Weights::Modules(heads),
                };
                let path = format!("{path}.{}", norms.names[i]);
                norms.norm.of(net, &path, x, weights)
            };
            let mut part = part;
            if let Some(norms) = norms.filter(|norms| norms.over == Over::Heads) {
                part = norm(net, norms, part)?;
            }
            if let Some(bound) = self.clip {
                part = clipped(net, part, bound)?;
            }
            part = net.reshape(part, &[batch, sequence, heads, self.head])?;
            let norms = norms.filter(|norms| norms.over != Over::Heads);
            if let Some(norms) = norms.filter(|norms| !norms.turned) {
                part = norm(net, norms, part)?;
            }
            part = net.permute(part, &[0, 2, 1, 3])?;
            if let Some(turns) = turns.filter(|_| i < 2) {
                part = turned(net, part, turns)?;
            }
            if let Some(norms) = norms.filter(|norms| norms.turned) {
                part = norm(net, norms, part)?;
            }
            parts.push(part);
        }
        Ok([parts[0], parts[1], parts[2]])
    }

    /// The same from narrow rows. All heads of keys have the same turning elements.
    fn latent(
        &self,
        net: &mut Net,
        path: &str,
        latent: Latent,
        x: Value,
        turns: Option<Turns>,
    ) -> Result<[Value; 3], Error> {
        let Latent {
            plain,
            turning,
            values,
            ..
        } = latent;
        let (batch, sequence, heads) = (net.shape(x)[0], net.shape(x)[1], self.heads);
        let at = |name: &str| format!("{path}.{name}");
        let bias = self.biases[0];
        // The norms of narrow rows have the default of the class, whatever the file says.
        let norm = Norm::rms(1e-6);
        let all = heads * (plain + turning);
        let q = match latent.queries {
            None => net.linear(&at("q_proj"), x, all, false, false)?,
            Some(columns) => {
                let narrow = net.linear(&at("q_a_proj"), x, columns, bias, false)?;
                let normal = norm.of(net, &at("q_a_layernorm"), narrow, Weights::Row)?;
                net.linear(&at("q_b_proj"), normal, all, false, false)?
            }
        };
        let q = net.reshape(q, &[batch, sequence, heads, plain + turning])?;
        let q = net.permute(q, &[0, 2, 1, 3])?;
        let joint = latent.keys + turning;
        let joint = net.linear(&at("kv_a_proj_with_mqa"), x, joint, bias, false)?;
        let narrow = net.columns(joint, 0, latent.keys)?;
        let normal = norm.of(net, &at("kv_a_layernorm"), narrow, Weights::Row)?;
        let both = net.linear(
            &at("kv_b_proj"),
            normal,
            heads * (plain + values),
            false,
            false,
        )?;
        let both = net.reshape(both, &[batch, sequence, heads, plain + values])?;
        let both = net.permute(both, &[0, 2, 1, 3])?;
        let mut turning_q = net.columns(q, plain, plain + turning)?;
        let mut turning_k = net.columns(joint, latent.keys, latent.keys + turning)?;
        turning_k = net.reshape(turning_k, &[batch, 1, sequence, turning])?;
        if let Some(turns) = turns {
            turning_q = turned(net, turning_q, turns)?;
            turning_k = turned(net, turning_k, turns)?;
        }
        let shape = [batch, heads, sequence, turning].map(|size| size as i64);
        let shape = shape.to_vec();
        let turning_k = net.op(Op::Expand(Sizes { shape }), &[turning_k])?;
        let plain_q = net.columns(q, 0, plain)?;
        let plain_k = net.columns(both, 0, plain)?;
        Ok([
            net.cat(&[plain_q, turning_q])?,
            net.cat(&[plain_k, turning_k])?,
            net.columns(both, plain, plain + values)?,
        ])
    }

    /// Attention with scores that stay within a cap or have sinks beside them. The queries that
    /// share a head of keys are rows of one product. The mask says which scores count, or is added
    /// to them.
    fn scored_attention(
        &self,
        net: &mut Net,
        path: &str,
        [q, k, v]: [Value; 3],
        mask: Value,
    ) -> Result<Value, Error> {
        let (batch, sequence) = (net.shape(q)[0], net.shape(q)[2]);
        let groups = batch * self.shared_heads;
        let rows = self.heads / self.shared_heads * sequence;
        let whole = [batch, self.heads, sequence, sequence];
        let [head, columns] = [q, v].map(|x| net.shape(x)[3]);
        let q = net.reshape(q, &[groups, rows, head])?;
        let k = net.reshape(k, &[groups, sequence, head])?;
        let v = net.reshape(v, &[groups, sequence, columns])?;
        let product = |tb: bool| Op::Matmul(Product { ta: false, tb });
        let scores = net.op(product(true), &[q, k])?;
        let scores = net.by(Op::MulScalar, scores, self.scale)?;
        let scores = match self.score_cap {
            Some(cap) => net.capped(scores, cap)?,
            None => scores,
        };
        let scores = net.reshape(scores, &whole)?;
        let mut scores = match net.graph.values[mask].ty.dtype() {
            DType::Bool => net.or(mask, scores, LOWEST)?,
            _ => net.op(Op::Add, &[scores, mask])?,
        };
        if self.sinks {
            let sinks = net.parameter(&format!("{path}.sinks"), &[self.heads])?;
            let sinks = net.reshape(sinks, &[1, self.heads, 1, 1])?;
            let shape = [batch, self.heads, sequence, 1].map(|size| size as i64);
            let shape = shape.to_vec();
            let sinks = net.op(Op::Expand(Sizes { shape }), &[sinks])?;
            scores = net.cat(&[scores, sinks])?;
        }
        let shares = net.op(Op::Softmax(Along { dim: 3 }), &[scores])?;
        let shares = net.columns(shares, 0, sequence)?;
        let shares = net.dropped(shares, self.dropout.weights)?;
        let shares = net.reshape(shares, &[groups, rows, sequence])?;
        let result = net.op(product(false), &[shares, v])?;
        net.reshape(result, &[batch, self.heads, sequence, columns])
    }

    /// Queries, keys and values: `[batch, sequence, heads times head]` each. The last size may be
    /// two.
    fn projected(&self, net: &mut Net, path: &str, x: Value) -> Result<[Value; 3], Error> {
        let columns = [self.heads, self.shared_heads, self.shared_heads].map(|n| n * self.head);
        let bias = self.biases[0];
        match self.projections {
            Projections::Separate | Projections::Latent(_) => {
                let mut product = |name: &str, columns: u64| {
                    net.linear(&format!("{path}.{name}"), x, columns, bias, self.conv)
                };
                Ok([
                    product("q_proj", columns[0])?,
                    product("k_proj", columns[1])?,
                    product("v_proj", columns[2])?,
                ])
            }
            Projections::Joint {
                name,
                groups,
                values_first,
            } => {
                let all = columns.iter().sum();
                let mut joint = net.linear(&format!("{path}.{name}"), x, all, bias, self.conv)?;
                if 1 < groups {
                    let (batch, sequence) = (net.shape(joint)[0], net.shape(joint)[1]);
                    joint = net.reshape(joint, &[batch, sequence, groups, all / groups])?;
                }
                // Keys and values have as many columns.
                let (first, second) = (columns[0] / groups, (columns[0] + columns[1]) / groups);
                let q = net.columns(joint, 0, first)?;
                let k = net.columns(joint, first, second)?;
                let v = net.columns(joint, second, all / groups)?;
                Ok(match values_first {
                    true => [q, v, k],
                    false => [q, k, v],
                })
            }
        }
    }
}

impl Shared {
    /// Adds what attention with a window is given besides queries, keys and values. `alone` says
    /// that it is given it instead of being causal.
    pub(crate) fn prepare(
        &mut self,
        net: &mut Net,
        window: Option<u64>,
        alone: bool,
    ) -> Result<(), Error> {
        if self.masks.contains_key(&window) {
            return Ok(());
        }
        let is_causal = window.is_none() && self.documents.is_none() && !alone;
        let added = match (is_causal, self.bias) {
            (true, bias) => bias,
            (false, None) => Some(self.mask(net, window)?),
            (false, Some(bias)) => {
                let mask = self.mask(net, window)?;
                Some(net.or(mask, bias, LOWEST)?)
            }
        };
        self.masks.insert(window, added);
        Ok(())
    }

    /// The mask of attention, true where a query sees a key: those of its document up to itself,
    /// and with a window of `size` positions no earlier ones.
    fn mask(&self, net: &mut Net, size: Option<u64>) -> Result<Value, Error> {
        let sequence = net.shape(self.places)[0];
        let keys = net.reshape(self.places, &[1, sequence])?;
        let queries = net.reshape(self.places, &[sequence, 1])?;
        let mut mask = net.op(Op::Le, &[keys, queries])?;
        if let Some(size) = size {
            let first = net.by(Op::AddScalar, queries, -(size as f64))?;
            let within = net.op(Op::Gt, &[keys, first])?;
            mask = net.op(Op::BitwiseAnd, &[mask, within])?;
        }
        mask = net.reshape(mask, &[1, 1, sequence, sequence])?;
        if let Some(documents) = self.documents {
            let batch = net.shape(documents)[0];
            let keys = net.reshape(documents, &[batch, 1, 1, sequence])?;
            let queries = net.reshape(documents, &[batch, 1, sequence, 1])?;
            let same = net.op(Op::Eq, &[queries, keys])?;
            mask = net.op(Op::BitwiseAnd, &[same, mask])?;
        }
        Ok(mask)
    }
}

/// Keeps elements within `bound` of 0.
fn clipped(net: &mut Net, x: Value, bound: f64) -> Result<Value, Error> {
    let clamp = Clamp {
        max: Number::Float(bound),
        min: Number::Float(-bound),
    };
    net.op(Op::Clamp(clamp), &[x])
}

/// What is added to a score for each place of the key: `[1, heads, 1, sequence]`. Only differences
/// of scores count, so that it stands for the distance of query and key.
/// (Press et al., ALiBi, 2022)
pub(crate) fn bias(net: &mut Net, slopes: &[f32], places: Value) -> Result<Value, Error> {
    let (heads, sequence) = (slopes.len() as u64, net.shape(places)[0]);
    let slopes = net.buffer("alibi.slopes", &[heads], slopes)?;
    let slopes = net.reshape(slopes, &[1, heads, 1, 1])?;
    let places = net.cast(places, DType::F32)?;
    let places = net.reshape(places, &[1, 1, 1, sequence])?;
    net.op(Op::Mul, &[slopes, places])
}

/// Turns the first elements of each head, in pairs: `x cos + (-x2, x1) sin`.
fn turned(net: &mut Net, x: Value, turns: Turns) -> Result<Value, Error> {
    let last = |net: &Net, x: Value| net.shape(x)[3];
    let (turning, all) = (last(net, turns.cos), last(net, x));
    let part = net.columns(x, 0, turning)?;
    let straight = net.op(Op::Mul, &[part, turns.cos])?;
    let shape = net.shape(part).to_vec();
    let (pairs, middle) = match turns.neighbours {
        true => {
            let pairs = [&shape[..3], &[turning / 2, 2]].concat();
            (net.reshape(part, &pairs)?, 1)
        }
        false => (part, turning / 2),
    };
    let first = net.columns(pairs, 0, middle)?;
    let second = net.columns(pairs, middle, 2 * middle)?;
    let minus = net.op(Op::Neg, &[second])?;
    let mut swapped = net.cat(&[minus, first])?;
    if turns.neighbours {
        swapped = net.reshape(swapped, &shape)?;
    }
    let across = net.op(Op::Mul, &[swapped, turns.sin])?;
    let turned = net.op(Op::Add, &[straight, across])?;
    if turning == all {
        return Ok(turned);
    }
    let rest = net.columns(x, turning, all)?;
    net.cat(&[turned, rest])
}
