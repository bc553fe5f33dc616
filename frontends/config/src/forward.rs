//! The forward of a decoder.

use crate::attention::{self, Shared, Turns};
use crate::decoder::{Block, Decoder, Positions};
use crate::net::Net;
use crate::norm::Weights;
use crate::rotary::Rotary;
use crate::{Error, Tensor};
use ir::graph::Output;
use ir::op::Number;
use ir::op::attrs::{Arange, Embedding};
use ir::{DType, Graph, Op, Value};
use std::collections::BTreeMap;

impl Decoder {
    /// The graph for `batch` sequences of `sequence` tokens, and the values of its buffers.
    /// `packed` says that a sequence has several documents.
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
        x = scaled(&mut net, x, self.embedding_scale)?;
        x = self.normalised(&mut net, names.embedding_norm.map(str::to_string), x)?;
        let places = net.op(Op::Arange(counted(sequence)), &[])?;
        let positions = match given {
            Some(positions) => positions,
            None => net.reshape(places, &[1, sequence])?,
        };
        let mut shared = Shared {
            turns: vec![],
            bias: None,
            places,
            documents,
            masks: BTreeMap::new(),
        };
        match &self.positions {
            Positions::Table { path, rows, first } => {
                if *rows < sequence {
                    return Err(too_long(sequence, *rows));
                }
                net.module = path.to_string();
                let shape = [*first + *rows, self.width];
                let weight = net.parameter(&format!("{path}.weight"), &shape)?;
                let row = match first {
                    0 => positions,
                    first => net.by(Op::AddScalar, positions, *first as f64)?,
                };
                let embedding = Op::Embedding(Embedding { padding: -1 });
                let added = net.op(embedding, &[weight, row])?;
                x = net.op(Op::Add, &[x, added])?;
            }
            Positions::Rotary(kinds) => {
                net.module = names.rotary.to_string();
                for rotary in kinds {
                    let frequencies = rotary.reaching(sequence, packed)?;
                    let turns = self.turns(&mut net, rotary, frequencies, positions)?;
                    shared.turns.push(turns);
                }
            }
            Positions::Slopes(slopes) => {
                net.module = names.embeddings.to_string();
                shared.bias = Some(attention::bias(&mut net, slopes, places)?);
            }
        }
        x = net.dropped(x, self.dropout.embedding)?;
        let blocks = self.blocks.iter().map(|block| Block {
            window: block.window.filter(|&size| size < sequence),
            ..*block
        });
        for block in blocks.clone() {
            shared.prepare(&mut net, block.window, self.keeps_scores())?;
        }
        for (i, block) in blocks.enumerate() {
            x = self.block(&mut net, i, x, block, &shared)?;
        }
        x = self.normalised(&mut net, names.last_norm.map(str::to_string), x)?;
        let logits = self.head(&mut net, x, table)?;
        net.graph.outputs.push(Output {
            name: "logits".into(),
            value: logits,
        });
        net.finish()
    }

    fn head(&self, net: &mut Net, x: Value, table: Value) -> Result<Value, Error> {
        let path = self.names.head;
        let mut logits = match self.tied {
            false => net.linear(path, x, self.vocabulary, self.head_bias, false)?,
            true => {
                net.module = path.to_string();
                let bias = match self.head_bias {
                    true => Some(net.parameter(&format!("{path}.bias"), &[self.vocabulary])?),
                    false => None,
                };
                net.product(x, table, false, bias)?
            }
        };
        logits = scaled(net, logits, self.logit_scale)?;
        match self.logit_cap {
            Some(cap) => net.capped(logits, cap),
            None => Ok(logits),
        }
    }

    /// x behind a norm, if there is one.
    fn normalised(&self, net: &mut Net, path: Option<String>, x: Value) -> Result<Value, Error> {
        match path {
            Some(path) => self.norm.of(net, &path, x, Weights::Row),
            None => Ok(x),
        }
    }

    /// Cosine and sine of positions times frequencies.
    fn turns(
        &self,
        net: &mut Net,
        rotary: &Rotary,
        frequencies: &[f32],
        positions: Value,
    ) -> Result<Turns, Error> {
        let half = frequencies.len() as u64;
        let path = format!("{}.{}", self.names.rotary, rotary.name);
        let frequencies = net.buffer(&path, &[half], frequencies)?;
        let row = net.reshape(frequencies, &[1, half])?;
        let (rows, sequence) = (net.shape(positions)[0], net.shape(positions)[1]);
        let positions = net.cast(positions, DType::F32)?;
        let column = net.reshape(positions, &[rows * sequence, 1])?;
        let mut angles = net.op(Op::Mul, &[column, row])?;
        if rotary.neighbours {
            angles = net.reshape(angles, &[rows * sequence, half, 1])?;
        }
        let angles = net.cat(&[angles, angles])?;
        let mut turned = |op: Op| {
            let of = net.op(op, &[angles])?;
            let of = scaled(net, of, rotary.factor)?;
            net.reshape(of, &[rows, 1, sequence, 2 * half])
        };
        Ok(Turns {
            cos: turned(Op::Cos)?,
            sin: turned(Op::Sin)?,
            neighbours: rotary.neighbours,
        })
    }

    fn block(
        &self,
        net: &mut Net,
        i: usize,
        x: Value,
        block: Block,
        shared: &Shared,
    ) -> Result<Value, Error> {
        let names = &self.names;
        let path = format!("{}.{i}", names.blocks);
        let [before, after, before_mlp, after_mlp] = names
            .norms
            .map(|name| name.map(|name| format!("{path}.{name}")));
        let normal = self.normalised(net, before, x)?;
        net.module = format!("{path}.{}", names.attention);
        let attended = self.attention(net, normal, block, shared)?;
        let attended = self.normalised(net, after, attended)?;
        net.module = path.clone();
        let attended = net.dropped(attended, self.dropout.attention)?;
        let attended = scaled(net, attended, self.residual_scale)?;
        let middle = net.op(Op::Add, &[x, attended])?;
        let input = match (self.parallel, &before_mlp) {
            (true, Some(_)) => x,
            (true, None) => normal,
            (false, _) => middle,
        };
        let input = self.normalised(net, before_mlp, input)?;
        net.module = match names.mlp {
            "" => path.clone(),
            mlp => format!("{path}.{mlp}"),
        };
        let result = match self.mixture.as_ref().filter(|_| block.mixes) {
            Some(mixture) => self.mixture(net, mixture, input)?,
            None => self.dense(net, input, self.inner)?,
        };
        let result = self.normalised(net, after_mlp, result)?;
        net.module = path;
        let result = net.dropped(result, self.dropout.mlp)?;
        let result = scaled(net, result, self.residual_scale)?;
        if self.dropout.both != 0.0 {
            let both = net.op(Op::Add, &[attended, result])?;
            let both = net.dropped(both, self.dropout.both)?;
            return net.op(Op::Add, &[x, both]);
        }
        net.op(Op::Add, &[middle, result])
    }
}

/// x times a factor.
fn scaled(net: &mut Net, x: Value, factor: f64) -> Result<Value, Error> {
    match factor {
        1.0 => Ok(x),
        factor => net.by(Op::MulScalar, x, factor),
    }
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
