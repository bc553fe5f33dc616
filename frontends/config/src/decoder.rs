//! The forward of a decoder: blocks of attention and an MLP, and a head over the vocabulary.

use crate::net::Net;
use crate::rotary::Rotary;
use crate::{Error, Tensor};
use ir::graph::Output;
use ir::op::Number;
use ir::op::attrs::{Arange, Attention, Embedding, Gelu};
use ir::{DType, Graph, Op, Value};
use std::collections::BTreeMap;

/// What a decoder is made of. Names are paths of modules; those of a block are relative to it.
pub(crate) struct Decoder {
    pub(crate) name: String,
    pub(crate) vocabulary: u64,
    pub(crate) width: u64,
    /// Queries' heads, keys' and values' heads, and elements of a head.
    pub(crate) heads: u64,
    pub(crate) shared_heads: u64,
    pub(crate) head: u64,
    /// The factor of attention's scores.
    pub(crate) scale: f64,
    /// For each block: how many positions a query sees, itself included; `None` for all before it.
    pub(crate) blocks: Vec<Option<u64>>,
    pub(crate) positions: Positions,
    /// The token whose embedding is not trained.
    pub(crate) padding: Option<u64>,
    /// The factor of the embeddings.
    pub(crate) embedding_scale: f64,
    pub(crate) norm: Norm,
    pub(crate) names: Names,
    pub(crate) projections: Projections,
    /// Whether queries, keys and values, and attention's result, have biases.
    pub(crate) biases: [bool; 2],
    /// Whether queries and keys of each head are normalised.
    pub(crate) head_norms: bool,
    pub(crate) mlp: Mlp,
    /// Columns inside the MLP.
    pub(crate) inner: u64,
    pub(crate) mlp_bias: bool,
    pub(crate) activation: Activation,
    /// Whether attention and MLP read the same input.
    pub(crate) parallel: bool,
    /// Weights are `[in, out]`.
    pub(crate) conv: bool,
    /// The head's path; `None` if it is the table of embeddings.
    pub(crate) head_path: Option<&'static str>,
}

/// The paths of a family's modules.
#[derive(Clone, Copy)]
pub(crate) struct Names {
    pub(crate) embeddings: &'static str,
    /// The list of blocks.
    pub(crate) blocks: &'static str,
    pub(crate) first_norm: &'static str,
    pub(crate) attention: &'static str,
    /// Attention's last product, in attention.
    pub(crate) output: &'static str,
    pub(crate) second_norm: &'static str,
    pub(crate) last_norm: &'static str,
    /// The module with the frequencies of rotary positions.
    pub(crate) rotary: &'static str,
}

/// How positions enter.
pub(crate) enum Positions {
    /// A table of this many rows is added to the embeddings.
    Table(&'static str, u64),
    /// Queries and keys are turned.
    Rotary(Rotary),
}

/// What norms are.
#[derive(Clone, Copy)]
pub(crate) enum Norm {
    /// By mean and deviation.
    Layer { eps: f64 },
    /// By the root of the mean square; the factor is the weight plus an offset.
    Rms { eps: f64, offset: f64 },
}

/// The products that make queries, keys and values.
#[derive(Clone, Copy)]
pub(crate) enum Projections {
    /// Three.
    Separate,
    /// One; its columns are all queries, all keys, all values.
    Joint(&'static str),
    /// One; its columns are query, key and value of the first head, then of the next.
    ByHead(&'static str),
}

/// The products of the MLP.
#[derive(Clone, Copy)]
pub(crate) enum Mlp {
    /// `down(f(up(x)))`.
    Plain {
        up: &'static str,
        down: &'static str,
    },
    /// `down(f(gate(x)) up(x))`.
    Gated,
    /// The same with gate and up as one product.
    JointGate,
}

/// The MLP's function.
#[derive(Clone, Copy)]
pub(crate) enum Activation {
    Gelu { tanh: bool },
    Silu,
    Relu,
}

impl Activation {
    /// By transformers' name.
    pub(crate) fn parse(name: &str) -> Result<Activation, Error> {
        Ok(match name {
            "gelu" => Activation::Gelu { tanh: false },
            "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Activation::Gelu { tanh: true },
            "silu" | "swish" => Activation::Silu,
            "relu" => Activation::Relu,
            other => {
                let why = format!("the activation {other} is not known");
                return Err(Error::new("", why).help("known are gelu, gelu_new, silu and relu"));
            }
        })
    }

    fn op(self) -> Op {
        match self {
            Activation::Gelu { tanh } => Op::Gelu(Gelu { tanh }),
            Activation::Silu => Op::Silu,
            Activation::Relu => Op::Relu,
        }
    }
}

/// What all blocks share.
struct Shared {
    /// Cosine and sine of each position and turning element.
    turns: Option<[Value; 2]>,
    /// The place of each token in its row: `[sequence]`.
    places: Value,
    /// The number of each token's document, if a row has several: `[batch, sequence]`.
    documents: Option<Value>,
    /// The masks, by the size of the window if there is one.
    masks: BTreeMap<Option<u64>, Value>,
}

impl Decoder {
    /// The graph for `batch` sequences of `sequence` tokens, and the values of its buffers. `packed`
    /// says that a sequence has several documents.
    pub(crate) fn graph(
        &self,
        (batch, sequence): (u64, u64),
        packed: bool,
    ) -> Result<(Graph, BTreeMap<String, Tensor>), Error> {
        let mut net = Net::new(&self.name);
        let names = &self.names;
        let ids = net.input("input_ids", &[batch, sequence])?;
        let mut of_documents = |name: &str| match packed {
            true => net.input(name, &[batch, sequence]).map(Some),
            false => Ok(None),
        };
        let given = of_documents("position_ids")?;
        let documents = of_documents("segment_ids")?;
        net.module = names.embeddings.to_string();
        let table = format!("{}.weight", names.embeddings);
        let table = net.parameter(&table, &[self.vocabulary, self.width])?;
        let padding = self.padding.map_or(-1, |token| token as i64);
        let mut x = net.op(Op::Embedding(Embedding { padding }), &[table, ids])?;
        if self.embedding_scale != 1.0 {
            x = net.by(Op::MulScalar, x, self.embedding_scale)?;
        }
        let places = net.op(Op::Arange(counted(sequence)), &[])?;
        let positions = match given {
            Some(positions) => positions,
            None => net.reshape(places, &[1, sequence])?,
        };
        let mut turns = None;
        match &self.positions {
            Positions::Table(path, rows) => {
                if *rows < sequence {
                    return Err(too_long(sequence, *rows));
                }
                net.module = path.to_string();
                let weight = net.parameter(&format!("{path}.weight"), &[*rows, self.width])?;
                let embedding = Op::Embedding(Embedding { padding: -1 });
                let added = net.op(embedding, &[weight, positions])?;
                x = net.op(Op::Add, &[x, added])?;
            }
            Positions::Rotary(rotary) => {
                net.module = names.rotary.to_string();
                turns = Some(self.turns(&mut net, rotary, positions)?);
            }
        }
        let mut shared = Shared {
            turns,
            places,
            documents,
            masks: BTreeMap::new(),
        };
        for (i, window) in self.blocks.iter().enumerate() {
            let window = window.filter(|&size| size < sequence);
            let mask = shared.mask(&mut net, window)?;
            x = self.block(&mut net, i, x, &shared, mask)?;
        }
        x = self.normalised(&mut net, names.last_norm, x)?;
        let logits = match self.head_path {
            Some(path) => net.linear(path, x, self.vocabulary, false, false)?,
            None => {
                net.module = "lm_head".to_string();
                net.product(x, table, false, None)?
            }
        };
        net.graph.outputs.push(Output {
            name: "logits".into(),
            value: logits,
        });
        Ok((net.graph, net.tensors))
    }

    fn normalised(&self, net: &mut Net, path: &str, x: Value) -> Result<Value, Error> {
        match self.norm {
            Norm::Layer { eps } => net.layer_norm(path, x, eps),
            Norm::Rms { eps, offset } => net.rms_norm(path, x, eps, offset),
        }
    }

    /// Cosine and sine of positions times frequencies: `[rows, 1, sequence, turning]`.
    fn turns(&self, net: &mut Net, rotary: &Rotary, positions: Value) -> Result<[Value; 2], Error> {
        let half = rotary.frequencies.len() as u64;
        let path = format!("{}.inv_freq", self.names.rotary);
        let frequencies = net.buffer(&path, &rotary.frequencies)?;
        let row = net.reshape(frequencies, &[1, half])?;
        let (rows, sequence) = (net.shape(positions)[0], net.shape(positions)[1]);
        let positions = net.cast(positions, DType::F32)?;
        let column = net.reshape(positions, &[rows * sequence, 1])?;
        let angles = net.op(Op::Mul, &[column, row])?;
        let angles = net.cat(&[angles, angles])?;
        let mut turned = |op: Op| {
            let of = net.op(op, &[angles])?;
            net.reshape(of, &[rows, 1, sequence, 2 * half])
        };
        Ok([turned(Op::Cos)?, turned(Op::Sin)?])
    }

    fn block(
        &self,
        net: &mut Net,
        i: usize,
        x: Value,
        shared: &Shared,
        mask: Option<Value>,
    ) -> Result<Value, Error> {
        let names = &self.names;
        let block = format!("{}.{i}", names.blocks);
        let normal = self.normalised(net, &format!("{block}.{}", names.first_norm), x)?;
        net.module = format!("{block}.{}", names.attention);
        let attended = self.attention(net, normal, shared, mask)?;
        net.module = block.clone();
        let middle = net.op(Op::Add, &[x, attended])?;
        let input = if self.parallel { x } else { middle };
        let normal = self.normalised(net, &format!("{block}.{}", names.second_norm), input)?;
        net.module = format!("{block}.mlp");
        let result = self.mlp(net, normal)?;
        net.module = block;
        net.op(Op::Add, &[middle, result])
    }

    fn attention(
        &self,
        net: &mut Net,
        x: Value,
        shared: &Shared,
        mask: Option<Value>,
    ) -> Result<Value, Error> {
        let path = net.module.clone();
        let (batch, sequence) = match net.shape(x) {
            [batch, sequence, ..] => (*batch, *sequence),
            _ => (1, 1),
        };
        let [q, k, v] = self.projected(net, &path, x)?;
        let mut parts = vec![];
        for (part, heads, norm) in [
            (q, self.heads, Some("q_norm")),
            (k, self.shared_heads, Some("k_norm")),
            (v, self.shared_heads, None),
        ] {
            let mut part = net.reshape(part, &[batch, sequence, heads, self.head])?;
            if let (true, Some(norm)) = (self.head_norms, norm) {
                part = self.normalised(net, &format!("{path}.{norm}"), part)?;
            }
            part = net.permute(part, &[0, 2, 1, 3])?;
            if let (Some(turns), Some(_)) = (&shared.turns, norm) {
                part = turned(net, part, *turns)?;
            }
            parts.push(part);
        }
        let op = Op::Sdpa(Attention {
            causal: mask.is_none(),
            scale: self.scale,
        });
        parts.extend(mask);
        let result = net.op(op, &parts)?;
        let rows = net.permute(result, &[0, 2, 1, 3])?;
        let rows = net.reshape(rows, &[batch, sequence, self.heads * self.head])?;
        let output = format!("{path}.{}", self.names.output);
        net.linear(&output, rows, self.width, self.biases[1], self.conv)
    }

    /// Queries, keys and values: `[batch, sequence, heads times head]` each.
    fn projected(&self, net: &mut Net, path: &str, x: Value) -> Result<[Value; 3], Error> {
        let columns = [self.heads, self.shared_heads, self.shared_heads].map(|n| n * self.head);
        let all = columns.iter().sum();
        let bias = self.biases[0];
        match self.projections {
            Projections::Separate => {
                let mut product = |name: &str, columns: u64| {
                    net.linear(&format!("{path}.{name}"), x, columns, bias, self.conv)
                };
                Ok([
                    product("q_proj", columns[0])?,
                    product("k_proj", columns[1])?,
                    product("v_proj", columns[2])?,
                ])
            }
            Projections::Joint(name) => {
                let joint = net.linear(&format!("{path}.{name}"), x, all, bias, self.conv)?;
                let (first, second) = (columns[0], columns[0] + columns[1]);
                Ok([
                    net.columns(joint, 0, first)?,
                    net.columns(joint, first, second)?,
                    net.columns(joint, second, all)?,
                ])
            }
            Projections::ByHead(name) => {
                let joint = net.linear(&format!("{path}.{name}"), x, all, bias, self.conv)?;
                let (batch, sequence) = (net.shape(joint)[0], net.shape(joint)[1]);
                let joint = net.reshape(joint, &[batch, sequence, self.heads, 3 * self.head])?;
                let mut part = |i: u64| net.columns(joint, i * self.head, (i + 1) * self.head);
                Ok([part(0)?, part(1)?, part(2)?])
            }
        }
    }

    fn mlp(&self, net: &mut Net, x: Value) -> Result<Value, Error> {
        let path = net.module.clone();
        let (bias, conv, inner) = (self.mlp_bias, self.conv, self.inner);
        let at = |name: &str| format!("{path}.{name}");
        match self.mlp {
            Mlp::Plain { up, down } => {
                let up = net.linear(&at(up), x, inner, bias, conv)?;
                let active = net.op(self.activation.op(), &[up])?;
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
        let active = net.op(self.activation.op(), &[gate])?;
        let gated = net.op(Op::Mul, &[active, up])?;
        let down = format!("{}.down_proj", net.module);
        net.linear(&down, gated, self.width, self.mlp_bias, self.conv)
    }
}

impl Shared {
    /// The mask of attention, true where a query sees a key: those of its document up to itself,
    /// and with a window of `size` positions no earlier ones. `None` if it is only causal.
    fn mask(&mut self, net: &mut Net, size: Option<u64>) -> Result<Option<Value>, Error> {
        if size.is_none() && self.documents.is_none() {
            return Ok(None);
        }
        if let Some(&mask) = self.masks.get(&size) {
            return Ok(Some(mask));
        }
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
        self.masks.insert(size, mask);
        Ok(Some(mask))
    }
}

/// Turns the first elements of each head, in pairs of an element of the first half and one of the
/// second: `x cos + (-x2, x1) sin`.
fn turned(net: &mut Net, x: Value, [cos, sin]: [Value; 2]) -> Result<Value, Error> {
    let last = |net: &Net, x: Value| net.shape(x)[3];
    let (turning, all) = (last(net, cos), last(net, x));
    let part = net.columns(x, 0, turning)?;
    let straight = net.op(Op::Mul, &[part, cos])?;
    let first = net.columns(part, 0, turning / 2)?;
    let second = net.columns(part, turning / 2, turning)?;
    let minus = net.op(Op::Neg, &[second])?;
    let swapped = net.cat(&[minus, first])?;
    let across = net.op(Op::Mul, &[swapped, sin])?;
    let turned = net.op(Op::Add, &[straight, across])?;
    if turning == all {
        return Ok(turned);
    }
    let rest = net.columns(x, turning, all)?;
    net.cat(&[turned, rest])
}

/// 0, 1, 2, ..
fn counted(n: u64) -> Arange {
    Arange {
        dtype: DType::I64,
        shape: vec![n as i64],
        start: Number::Int(0),
        step: Number::Int(1),
    }
}

fn too_long(sequence: u64, rows: u64) -> Error {
    let why = format!("a sequence of {sequence} tokens; the model has positions for {rows}");
    Error::new("", why)
}
