//! The families: which decoder a `model_type` is, by the settings and defaults that transformers
//! gives it.

use crate::Error;
use crate::decoder::{Activation, Decoder, Mlp, Names, Norm, Positions, Projections};
use crate::rotary::Rotary;
use crate::settings::Settings;

type Family = fn(&Settings) -> Result<Decoder, Error>;

/// Each `model_type` and its decoder.
pub(crate) const FAMILIES: [(&str, Family); 8] = [
    ("gemma", gemma),
    ("gpt2", gpt2),
    ("gpt_neox", gpt_neox),
    ("llama", llama),
    ("mistral", mistral),
    ("phi3", phi3),
    ("qwen2", qwen2),
    ("qwen3", qwen3),
];

/// Probabilities of dropout, by family.
const DROPOUT: [&str; 6] = [
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "hidden_dropout",
    "embed_dropout",
];

/// The decoder of a file, and what it leaves out.
pub(crate) fn decoder(settings: &Settings) -> Result<(Decoder, Vec<String>), Error> {
    let name = settings.text_or("model_type", "")?;
    let Some((_, family)) = FAMILIES.iter().find(|(known, _)| *known == name) else {
        let known: Vec<&str> = FAMILIES.iter().map(|(known, _)| *known).collect();
        let why = match name {
            "" => "has no model_type, so it is not the config.json of a model".to_string(),
            name => format!("the model_type {name} has no graph here"),
        };
        return Err(Error::new("", why).help(format!(
            "known are {}; trace other models in PyTorch, by lighterage.export",
            known.join(", ")
        )));
    };
    let mut decoder = family(settings)?;
    decoder.name = name.to_string();
    decoder.check()?;
    let mut notes = vec![];
    for key in DROPOUT {
        let p = settings.number_or(key, 0.0)?;
        if p != 0.0 {
            notes.push(format!("{key} {p} is left out: the graph has no dropout"));
        }
    }
    Ok((decoder, notes))
}

impl Decoder {
    fn check(&self) -> Result<(), Error> {
        let fits = self.heads.is_multiple_of(self.shared_heads) && 0 < self.head;
        if !fits {
            let (heads, shared) = (self.heads, self.shared_heads);
            let why = format!("{heads} heads cannot share {shared} heads of keys and values");
            return Err(Error::new("num_key_value_heads", why));
        }
        if let Some(token) = self.padding.filter(|&token| self.vocabulary <= token) {
            let why = format!("{token} is no token of a vocabulary of {}", self.vocabulary);
            return Err(Error::new("pad_token_id", why));
        }
        Ok(())
    }
}

const LLAMA: Names = Names {
    embeddings: "model.embed_tokens",
    blocks: "model.layers",
    first_norm: "input_layernorm",
    attention: "self_attn",
    output: "o_proj",
    second_norm: "post_attention_layernorm",
    last_norm: "model.norm",
    rotary: "model.rotary_emb",
};

/// LLaMA, on which most families are modelled. (Touvron et al., 2023)
fn llama(s: &Settings) -> Result<Decoder, Error> {
    let (width, heads) = (s.size("hidden_size")?, s.size("num_attention_heads")?);
    let head = head_size(s, width, heads)?;
    let bias = s.flag_or("attention_bias", false)?;
    Ok(Decoder {
        name: String::new(),
        vocabulary: s.size("vocab_size")?,
        width,
        heads,
        shared_heads: s.size_or("num_key_value_heads", heads)?,
        head,
        scale: (head as f64).powf(-0.5),
        blocks: vec![None; layers(s, "num_hidden_layers")?],
        positions: Positions::Rotary(Rotary::of(s, head)?),
        padding: s.token("pad_token_id")?,
        embedding_scale: 1.0,
        norm: Norm::Rms {
            eps: s.number_or("rms_norm_eps", 1e-6)?,
            offset: 0.0,
        },
        names: LLAMA,
        projections: Projections::Separate,
        biases: [bias; 2],
        head_norms: false,
        mlp: Mlp::Gated,
        inner: s.size("intermediate_size")?,
        mlp_bias: s.flag_or("mlp_bias", false)?,
        activation: Activation::parse(s.text_or("hidden_act", "silu")?)?,
        parallel: false,
        conv: false,
        head_path: head_path(s, false, "lm_head")?,
    })
}

/// Mistral: LLaMA with a window in each layer.
fn mistral(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = llama(s)?;
    decoder.biases = [false; 2];
    decoder.mlp_bias = false;
    decoder.blocks.fill(s.size_or_none("sliding_window")?);
    Ok(decoder)
}

/// Qwen 2 and 2.5: LLaMA with biases of queries, keys and values.
fn qwen2(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = llama(s)?;
    decoder.biases = [true, false];
    decoder.mlp_bias = false;
    decoder.blocks = windows(s, decoder.blocks.len())?;
    Ok(decoder)
}

/// Qwen 3: LLaMA with norms of queries and keys.
fn qwen3(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = llama(s)?;
    if s.size_or_none("head_dim")?.is_none() {
        return Err(Error::new("", "has no head_dim"));
    }
    decoder.head_norms = true;
    decoder.mlp_bias = false;
    decoder.blocks = windows(s, decoder.blocks.len())?;
    Ok(decoder)
}

/// Gemma: LLaMA with scaled embeddings, GeLU, and norms by 1 + weight.
fn gemma(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = llama(s)?;
    let eps = s.number_or("rms_norm_eps", 1e-6)?;
    decoder.norm = Norm::Rms { eps, offset: 1.0 };
    // Older files say `gelu` and mean the approximation, which is what runs for them.
    let activation = match s.text_or("hidden_activation", "")? {
        "" => "gelu_pytorch_tanh",
        name => name,
    };
    decoder.activation = Activation::parse(activation)?;
    decoder.padding = decoder.padding.or(Some(0));
    decoder.embedding_scale = (decoder.width as f64).sqrt();
    decoder.head_path = head_path(s, true, "lm_head")?;
    Ok(decoder)
}

/// Phi 3: LLaMA with joint products.
fn phi3(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = llama(s)?;
    decoder.projections = Projections::Joint("qkv_proj");
    decoder.mlp = Mlp::JointGate;
    decoder.biases = [false; 2];
    decoder.mlp_bias = false;
    decoder.blocks.fill(s.size_or_none("sliding_window")?);
    Ok(decoder)
}

/// GPT-2. (Radford et al., 2019)
fn gpt2(s: &Settings) -> Result<Decoder, Error> {
    let (width, heads) = (s.size_or("n_embd", 768)?, s.size_or("n_head", 12)?);
    let head = head_size(s, width, heads)?;
    if s.flag_or("scale_attn_by_inverse_layer_idx", false)? {
        let why = "scores that are scaled by the layer's number have no graph here";
        return Err(Error::new("scale_attn_by_inverse_layer_idx", why));
    }
    let scale = match s.flag_or("scale_attn_weights", true)? {
        true => (head as f64).powf(-0.5),
        false => 1.0,
    };
    let n_layer = match s.size_or_none("n_layer")? {
        Some(_) => layers(s, "n_layer")?,
        None => 12,
    };
    Ok(Decoder {
        name: String::new(),
        vocabulary: s.size_or("vocab_size", 50257)?,
        width,
        heads,
        shared_heads: heads,
        head,
        scale,
        blocks: vec![None; n_layer],
        positions: Positions::Table("transformer.wpe", s.size_or("n_positions", 1024)?),
        padding: None,
        embedding_scale: 1.0,
        norm: Norm::Layer {
            eps: s.number_or("layer_norm_epsilon", 1e-5)?,
        },
        names: Names {
            embeddings: "transformer.wte",
            blocks: "transformer.h",
            first_norm: "ln_1",
            attention: "attn",
            output: "c_proj",
            second_norm: "ln_2",
            last_norm: "transformer.ln_f",
            rotary: "",
        },
        projections: Projections::Joint("c_attn"),
        biases: [true; 2],
        head_norms: false,
        mlp: Mlp::Plain {
            up: "c_fc",
            down: "c_proj",
        },
        inner: s.size_or("n_inner", 4 * width)?,
        mlp_bias: true,
        activation: Activation::parse(s.text_or("activation_function", "gelu_new")?)?,
        parallel: false,
        conv: true,
        head_path: head_path(s, true, "lm_head")?,
    })
}

/// GPT-NeoX and Pythia. (Black et al., 2022)
fn gpt_neox(s: &Settings) -> Result<Decoder, Error> {
    let (width, heads) = (s.size("hidden_size")?, s.size("num_attention_heads")?);
    let head = head_size(s, width, heads)?;
    Ok(Decoder {
        name: String::new(),
        vocabulary: s.size("vocab_size")?,
        width,
        heads,
        shared_heads: heads,
        head,
        scale: (head as f64).powf(-0.5),
        blocks: vec![None; layers(s, "num_hidden_layers")?],
        positions: Positions::Rotary(Rotary::of(s, head)?),
        padding: None,
        embedding_scale: 1.0,
        norm: Norm::Layer {
            eps: s.number_or("layer_norm_eps", 1e-5)?,
        },
        names: Names {
            embeddings: "gpt_neox.embed_in",
            blocks: "gpt_neox.layers",
            first_norm: "input_layernorm",
            attention: "attention",
            output: "dense",
            second_norm: "post_attention_layernorm",
            last_norm: "gpt_neox.final_layer_norm",
            rotary: "gpt_neox.rotary_emb",
        },
        projections: Projections::ByHead("query_key_value"),
        biases: [s.flag_or("attention_bias", true)?; 2],
        head_norms: false,
        mlp: Mlp::Plain {
            up: "dense_h_to_4h",
            down: "dense_4h_to_h",
        },
        inner: s.size("intermediate_size")?,
        mlp_bias: true,
        activation: Activation::parse(s.text_or("hidden_act", "gelu")?)?,
        parallel: s.flag_or("use_parallel_residual", true)?,
        conv: false,
        head_path: head_path(s, false, "embed_out")?,
    })
}

fn layers(s: &Settings, key: &str) -> Result<usize, Error> {
    /// More layers than any model has; a graph of them would still fit in memory.
    const MOST: u64 = 10_000;
    match s.size(key)? {
        n if n <= MOST => Ok(n as usize),
        n => Err(Error::new(key, format!("{n} layers are more than {MOST}"))),
    }
}

/// Elements of a head.
fn head_size(s: &Settings, width: u64, heads: u64) -> Result<u64, Error> {
    match s.size_or_none("head_dim")? {
        Some(head) => Ok(head),
        None if width.is_multiple_of(heads) => Ok(width / heads),
        None => Err(Error::new(
            "",
            format!("{heads} heads cannot divide {width} columns"),
        )),
    }
}

/// Where the head's weight is. It is the table of embeddings if `tie_word_embeddings` says so, or,
/// if nothing does, by the family's default.
fn head_path(s: &Settings, tied: bool, path: &'static str) -> Result<Option<&'static str>, Error> {
    Ok((!s.flag_or("tie_word_embeddings", tied)?).then_some(path))
}

/// The window of each layer of a Qwen model.
fn windows(s: &Settings, layers: usize) -> Result<Vec<Option<u64>>, Error> {
    if !s.flag_or("use_sliding_window", false)? {
        return Ok(vec![None; layers]);
    }
    let size = s.size_or_none("sliding_window")?;
    if let Some(kinds) = s.texts("layer_types")? {
        if kinds.len() != layers {
            let why = format!("{} kinds for {layers} layers", kinds.len());
            return Err(Error::new("layer_types", why));
        }
        let of = |kind: &&str| size.filter(|_| *kind == "sliding_attention");
        return Ok(kinds.iter().map(of).collect());
    }
    let whole = s.size_or("max_window_layers", 28)? as usize;
    Ok((0..layers).map(|i| size.filter(|_| whole <= i)).collect())
}
