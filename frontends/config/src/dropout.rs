//! Which elements a family drops while it learns.

use crate::Error;
use crate::net::Net;
use crate::settings::Settings;
use ir::{Op, Value};

/// The shares of elements that are dropped, from 0 to less than 1.
#[derive(Clone, Copy, Default)]
pub(crate) struct Dropout {
    /// Of the embeddings with their positions.
    pub(crate) embedding: f64,
    /// Of the weights of values in attention.
    pub(crate) weights: f64,
    /// Of what attention adds to a row, and of what the MLP adds.
    pub(crate) attention: f64,
    pub(crate) mlp: f64,
    /// Of the sum of these two.
    pub(crate) both: f64,
}

/// The settings of a family: of the embeddings, the weights of attention, and what attention and
/// MLP add.
fn keys(family: &str) -> [Option<&'static str>; 4] {
    const WEIGHTS: Option<&str> = Some("attention_dropout");
    let residual = |embedding, residual| [embedding, WEIGHTS, Some(residual), Some(residual)];
    match family {
        "codegen" | "gpt2" | "gpt_bigcode" | "gptj" => {
            ["embd_pdrop", "attn_pdrop", "resid_pdrop", "resid_pdrop"].map(Some)
        }
        "bloom" => residual(None, "hidden_dropout"),
        "gpt_neo" => residual(Some("embed_dropout"), "resid_dropout"),
        "gpt_neox" => residual(Some("hidden_dropout"), "hidden_dropout"),
        "opt" => residual(None, "dropout"),
        "phi" => residual(Some("embd_pdrop"), "resid_pdrop"),
        "phi3" => residual(None, "resid_pdrop"),
        "seed_oss" => residual(None, "residual_dropout"),
        "starcoder2" => residual(Some("embedding_dropout"), "residual_dropout"),
        "falcon" => [None, WEIGHTS, WEIGHTS, Some("hidden_dropout")],
        "persimmon" | "stablelm" => [None, WEIGHTS, None, Some("hidden_dropout")],
        "mpt" => [
            None,
            Some("attn_pdrop"),
            Some("attn_pdrop"),
            Some("attn_pdrop"),
        ],
        // The class has attention_dropout, and does not read it.
        "ernie4_5" | "ernie4_5_moe" => [None; 4],
        _ => [None, WEIGHTS, None, None],
    }
}

/// A setting that asks for dropout, and the share.
pub(crate) type Asked = (&'static str, f64);

/// The settings of a family that ask for dropout: of the embeddings, the weights of attention, and
/// what attention and MLP add. A share of 0 asks for none.
pub(crate) fn asked(family: &str, settings: &Settings) -> Result<[Option<Asked>; 4], Error> {
    let group = match family {
        "mpt" => &settings.group("attn_config")?,
        _ => settings,
    };
    let mut asked = [None; 4];
    for (asked, key) in asked.iter_mut().zip(keys(family)) {
        let Some(key) = key else { continue };
        let share = group.number_or(key, 0.0)?;
        if !(0.0..1.0).contains(&share) {
            return Err(Error::new(
                key,
                format!("{share} is not at least 0 and less than 1"),
            ));
        }
        *asked = Some((key, share)).filter(|_| share != 0.0);
    }
    Ok(asked)
}

impl Dropout {
    /// What a family's class in transformers drops. `parallel`: attention and MLP are side by side.
    pub(crate) fn of(family: &str, asked: [Option<Asked>; 4], parallel: bool) -> Dropout {
        let shares = asked.map(|asked| asked.map_or(0.0, |(_, share)| share));
        let [embedding, weights, mut attention, mut mlp] = shares;
        let mut both = 0.0;
        if family == "falcon" && parallel {
            (attention, mlp, both) = (0.0, 0.0, mlp);
        }
        Dropout {
            embedding,
            weights,
            attention,
            mlp,
            both,
        }
    }
}

impl Net {
    /// x with a share of its elements dropped, and the others the larger for it.
    pub(crate) fn dropped(&mut self, x: Value, p: f64) -> Result<Value, Error> {
        if p == 0.0 {
            return Ok(x);
        }
        let (rng, stream) = self.generator.draw(&mut self.graph);
        self.op(Op::Dropout(ir::op::attrs::Dropout { p, stream }), &[x, rng])
    }

    /// What drops a share of the weights of attention, if it drops any.
    pub(crate) fn dropout_key(&mut self, p: f64) -> Result<Option<Value>, Error> {
        if p == 0.0 {
            return Ok(None);
        }
        let (rng, stream) = self.generator.draw(&mut self.graph);
        let op = Op::DropoutKey(ir::op::attrs::Dropout { p, stream });
        self.op(op, &[rng]).map(Some)
    }
}
