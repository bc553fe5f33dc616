//! The families: which decoder a `model_type` is, by the settings and defaults that transformers
//! gives it.

mod experts;
mod gemma;
mod glm;
mod gpt;
mod llama;
mod olmo;
mod wide;

use crate::Error;
use crate::decoder::{Activation, Block, Decoder, Mlp, Names, Positions, Projections};
use crate::dropout::{self, Dropout};
use crate::norm::Norm;
use crate::rotary::Rotary;
use crate::settings::{Settings, TRACE, no_graph};
use serde_json::{Map, Value as Json};
use std::collections::BTreeMap;

type Family = fn(&Settings) -> Result<Decoder, Error>;

/// Each `model_type` and its decoder.
pub(crate) const FAMILIES: [(&str, Family); 60] = [
    ("apertus", llama::apertus),
    ("arcee", llama::arcee),
    ("bloom", gpt::bloom),
    ("codegen", gpt::codegen),
    ("cohere", wide::cohere),
    ("cohere2", wide::cohere2),
    ("cwm", llama::cwm),
    ("deepseek_v2", experts::deepseek_v2),
    ("deepseek_v3", experts::deepseek_v3),
    ("dots1", experts::dots1),
    ("ernie4_5", glm::ernie4_5),
    ("ernie4_5_moe", experts::ernie4_5_moe),
    ("exaone4", olmo::exaone4),
    ("falcon", wide::falcon),
    ("flex_olmo", experts::flex_olmo),
    ("gemma", gemma::gemma),
    ("gemma2", gemma::gemma2),
    ("gemma3_text", gemma::gemma3_text),
    ("glm", glm::glm),
    ("glm4", glm::glm4),
    ("glm4_moe", experts::glm4_moe),
    ("gpt2", gpt::gpt2),
    ("gpt_bigcode", gpt::gpt_bigcode),
    ("gpt_neo", gpt::gpt_neo),
    ("gpt_neox", gpt::gpt_neox),
    ("gpt_oss", experts::gpt_oss),
    ("gptj", gpt::gptj),
    ("granite", llama::granite),
    ("granitemoe", experts::granitemoe),
    ("helium", glm::helium),
    ("hunyuan_v1_dense", llama::hunyuan_v1_dense),
    ("hunyuan_v1_moe", experts::hunyuan_v1_moe),
    ("hyperclovax", llama::hyperclovax),
    ("jais2", llama::jais2),
    ("llama", llama::llama),
    ("minimax_m2", experts::minimax_m2),
    ("ministral", llama::ministral),
    ("mistral", llama::mistral),
    ("mixtral", experts::mixtral),
    ("mpt", gpt::mpt),
    ("nanochat", llama::nanochat),
    ("nemotron", llama::nemotron),
    ("olmo", olmo::olmo),
    ("olmo2", olmo::olmo2),
    ("olmo3", olmo::olmo3),
    ("olmoe", experts::olmoe),
    ("opt", gpt::opt),
    ("persimmon", gpt::persimmon),
    ("phi", wide::phi),
    ("phi3", llama::phi3),
    ("qwen2", llama::qwen2),
    ("qwen2_moe", experts::qwen2_moe),
    ("qwen3", llama::qwen3),
    ("qwen3_moe", experts::qwen3_moe),
    ("seed_oss", llama::seed_oss),
    ("smollm3", llama::smollm3),
    ("solar_open", experts::solar_open),
    ("stablelm", wide::stablelm),
    ("starcoder2", llama::starcoder2),
    ("vaultgemma", gemma::vaultgemma),
];

/// For each family, the settings that a file may lack, as the family's class in transformers has
/// them: written by `frontends/python/tests/configurations.py`.
const DEFAULTS: &str = include_str!("../defaults.json");

/// The decoder of a file, and what it leaves out. `drops`: elements are dropped.
pub(crate) fn decoder(settings: Settings, drops: bool) -> Result<(Decoder, Vec<String>), Error> {
    let name = settings.text_or("model_type", "")?.to_string();
    let Some((_, family)) = FAMILIES.iter().find(|(known, _)| *known == name) else {
        let known: Vec<&str> = FAMILIES.iter().map(|(known, _)| *known).collect();
        let why = match name.as_str() {
            "" => "has no model_type, so it is not the config.json of a model".to_string(),
            name => format!("the model_type {name} has no graph here"),
        };
        return Err(Error::new("", why).help(format!(
            "known are {}; for others, {TRACE}",
            known.join(", ")
        )));
    };
    let settings = settings.completed(&defaults(&name));
    let mut decoder = family(&settings)?;
    let asked = dropout::asked(&name, &settings)?;
    let mut notes = vec![];
    match drops {
        true => decoder.dropout = Dropout::of(&name, asked, decoder.parallel),
        false => {
            let asked: BTreeMap<&str, f64> = asked.into_iter().flatten().collect();
            notes.extend(
                asked
                    .into_iter()
                    .map(|(key, share)| format!("{key} {share} is left out; --dropout applies it")),
            );
        }
    }
    decoder.name = name;
    decoder.check()?;
    let layers = settings.number_or("layerdrop", 0.0)?;
    if layers != 0.0 {
        notes.push(format!(
            "layerdrop {layers} is left out: no layer is skipped"
        ));
    }
    let jitter = settings.number_or("router_jitter_noise", 0.0)?;
    if jitter != 0.0 {
        notes.push(format!(
            "router_jitter_noise {jitter} is left out: the graph has no noise"
        ));
    }
    if settings.flag_or("output_router_logits", false)? {
        notes.push("output_router_logits: the loss has no term that balances experts".to_string());
    }
    Ok((decoder, notes))
}

fn defaults(family: &str) -> Map<String, Json> {
    let all: Map<String, Json> = serde_json::from_str(DEFAULTS).expect("the file should be JSON");
    match all.get(family) {
        Some(Json::Object(defaults)) => defaults.clone(),
        _ => panic!("{family} should have defaults"),
    }
}

impl Decoder {
    fn check(&self) -> Result<(), Error> {
        let fits = self.heads.is_multiple_of(self.shared_heads) && 0 < self.head;
        if !fits {
            let (heads, shared) = (self.heads, self.shared_heads);
            let why = format!("{heads} heads cannot share {shared} heads of keys and values");
            return Err(Error::new("num_key_value_heads", why));
        }
        if let Some(mixture) = &self.mixture {
            mixture.check()?;
        }
        if let Some(token) = self.padding.filter(|&token| self.vocabulary <= token) {
            let why = format!("{token} is no token of a vocabulary of {}", self.vocabulary);
            return Err(Error::new("pad_token_id", why));
        }
        Ok(())
    }

    /// Gives windows of `size` positions to the layers that slide.
    fn slide(&mut self, slides: &[bool], size: Option<u64>) {
        for (block, &slides) in self.blocks.iter_mut().zip(slides) {
            block.window = size.filter(|_| slides);
        }
    }

    /// Gives them to all layers.
    fn slide_everywhere(&mut self, size: Option<u64>) {
        self.slide(&vec![true; self.blocks.len()], size);
    }

    /// Layers have the first rotary positions where `turns` says so, and the others have none.
    fn turn_only(&mut self, turns: &[bool]) {
        for (block, &turns) in self.blocks.iter_mut().zip(turns) {
            block.rotary = turns.then_some(0);
        }
    }

    /// Layers that slide have the second rotary positions.
    fn turn_by_layer(&mut self, slides: &[bool]) {
        for (block, &slides) in self.blocks.iter_mut().zip(slides) {
            block.rotary = Some(usize::from(slides));
        }
    }

    /// Queries and keys turn the other way.
    fn turn_backwards(&mut self) {
        if let Positions::Rotary(kinds) = &mut self.positions {
            kinds.iter_mut().for_each(Rotary::turn_backwards);
        }
    }

    /// The rotary positions are those of pairs of neighbours.
    fn turn_neighbours(&mut self) {
        if let Positions::Rotary(kinds) = &mut self.positions {
            kinds.iter_mut().for_each(|rotary| rotary.neighbours = true);
        }
    }
}

const LLAMA: Names = Names {
    embeddings: "model.embed_tokens",
    embedding_norm: None,
    blocks: "model.layers",
    attention: "self_attn",
    output: "o_proj",
    mlp: "mlp",
    norms: [
        Some("input_layernorm"),
        None,
        Some("post_attention_layernorm"),
        None,
    ],
    last_norm: Some("model.norm"),
    rotary: "model.rotary_emb",
    head: "lm_head",
};

/// LLaMA's keys of sizes.
const SIZES: [&str; 4] = [
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "intermediate_size",
];

/// Sizes of a decoder.
struct Sizes {
    width: u64,
    heads: u64,
    /// Elements of a head.
    head: u64,
    layers: usize,
    /// Columns inside the MLP.
    inner: u64,
}

/// The sizes under a family's keys: width, heads, layers, and the MLP's columns. The default of the
/// last is four times the width.
fn sizes(s: &Settings, keys: [&str; 4]) -> Result<Sizes, Error> {
    sizes_by(s, keys, None)
}

/// The same with `head` elements of a head, if the file gives them.
fn sizes_by(s: &Settings, keys: [&str; 4], head: Option<u64>) -> Result<Sizes, Error> {
    /// More than any model has; a graph of so many layers would still fit in memory.
    const LAYERS: u64 = 10_000;
    const HEADS: u64 = 1 << 16;
    let most = |key: &str, most: u64| match s.size(key)? {
        n if n <= most => Ok(n),
        n => Err(Error::new(key, format!("{n} are more than {most}"))),
    };
    let (width, heads) = (s.size(keys[0])?, most(keys[1], HEADS)?);
    let head = match head {
        Some(head) => head,
        None if width.is_multiple_of(heads) => width / heads,
        None => {
            let why = format!("{heads} heads cannot divide {width} columns");
            return Err(Error::new("", why));
        }
    };
    if HEADS < head {
        let why = format!("heads of {head} elements are larger than {HEADS}");
        return Err(Error::new("", why));
    }
    Ok(Sizes {
        width,
        heads,
        head,
        layers: most(keys[2], LAYERS)? as usize,
        inner: s.size_or(keys[3], 4 * width)?,
    })
}

/// A decoder in which nothing is special.
fn plain(s: &Settings, sizes: &Sizes, norm: Norm, names: Names) -> Result<Decoder, Error> {
    let block = Block {
        window: None,
        rotary: None,
        mixes: false,
    };
    Ok(Decoder {
        name: String::new(),
        vocabulary: s.size("vocab_size")?,
        width: sizes.width,
        heads: sizes.heads,
        shared_heads: sizes.heads,
        head: sizes.head,
        scale: (sizes.head as f64).powf(-0.5),
        score_cap: None,
        clip: None,
        blocks: vec![block; sizes.layers],
        positions: Positions::Rotary(vec![]),
        padding: None,
        embedding_scale: 1.0,
        norm,
        names,
        projections: Projections::Separate,
        biases: [false; 2],
        head_norms: None,
        sinks: false,
        mlp: Mlp::Gated,
        inner: sizes.inner,
        mlp_bias: false,
        mixture: None,
        activation: Activation::Gelu { tanh: true },
        parallel: false,
        residual_scale: 1.0,
        conv: false,
        tied: s.flag_or("tie_word_embeddings", false)?,
        head_bias: false,
        logit_scale: 1.0,
        logit_cap: None,
        dropout: Dropout::default(),
    })
}

/// LLaMA, on which most families are modelled (Touvron et al., 2023). `part` says that the heads of
/// a family may turn in part.
fn like_llama(s: &Settings, part: bool) -> Result<Decoder, Error> {
    let rotary = Rotary::of(s, head_size(s)?, part)?;
    like_llama_by(s, vec![rotary])
}

/// The same with rotary positions of several kinds; the first one is that of all layers.
fn like_llama_by(s: &Settings, kinds: Vec<Rotary>) -> Result<Decoder, Error> {
    s.size("intermediate_size")?;
    let sizes = llama_sizes(s)?;
    let norm = Norm::rms(s.number_or("rms_norm_eps", 1e-6)?);
    let mut decoder = plain(s, &sizes, norm, LLAMA)?;
    decoder.positions = Positions::Rotary(kinds);
    decoder
        .blocks
        .iter_mut()
        .for_each(|block| block.rotary = Some(0));
    decoder.shared_heads = s.size_or("num_key_value_heads", sizes.heads)?;
    decoder.padding = s.token("pad_token_id")?;
    decoder.biases = [s.flag_or("attention_bias", false)?; 2];
    decoder.mlp_bias = s.flag_or("mlp_bias", false)?;
    if s.has("hidden_act") {
        decoder.activation = activation(s, "hidden_act")?;
    }
    Ok(decoder)
}

fn llama_sizes(s: &Settings) -> Result<Sizes, Error> {
    sizes_by(s, SIZES, s.size_or_none("head_dim")?)
}

/// Elements of a head.
fn head_size(s: &Settings) -> Result<u64, Error> {
    Ok(llama_sizes(s)?.head)
}

fn activation(s: &Settings, key: &str) -> Result<Activation, Error> {
    match s.text_or(key, "")? {
        "" => Err(Error::new("", format!("has no {key}"))),
        name => Activation::parse(name).map_err(|e| e.of(key.to_string())),
    }
}

/// A bound above 0, if there is one.
fn cap(s: &Settings, key: &str) -> Result<Option<f64>, Error> {
    match s.number_or_none(key)? {
        Some(cap) if cap <= 0.0 => Err(Error::new(key, format!("{cap} is not above 0"))),
        cap => Ok(cap),
    }
}

/// Whether each layer slides, by the file or by a pattern.
fn sliding(
    s: &Settings,
    layers: usize,
    slides: impl Fn(usize) -> bool,
) -> Result<Vec<bool>, Error> {
    let Some(kinds) = s.texts("layer_types")? else {
        return Ok((0..layers).map(slides).collect());
    };
    if kinds.len() != layers {
        let why = format!("{} kinds for {layers} layers", kinds.len());
        return Err(Error::new("layer_types", why));
    }
    let of = |kind: &&str| match *kind {
        "full_attention" => Ok(false),
        "sliding_attention" => Ok(true),
        other => Err(no_graph("layer_types", other)),
    };
    kinds.iter().map(of).collect()
}

/// Whether each layer slides, if all but each n-th do.
fn sliding_but_each(s: &Settings, layers: usize, n: u64) -> Result<Vec<bool>, Error> {
    sliding(s, layers, |i| !(i as u64 + 1).is_multiple_of(n))
}

/// The rotary positions of layers that see all positions, and of those that slide, with their
/// default bases.
fn by_layer(s: &Settings, bases: [f64; 2]) -> Result<Vec<Rotary>, Error> {
    let all = s.group("rope_parameters")?;
    let kinds = ["full_attention", "sliding_attention"];
    if !all.is_empty() && !kinds.iter().any(|kind| all.has(kind)) {
        let why = "in this family they are those of full_attention and sliding_attention";
        return Err(Error::new("rope_parameters", why));
    }
    let names = ["full_attention_inv_freq", "sliding_attention_inv_freq"];
    let scaling = [s.group("rope_scaling")?, Settings::default()];
    let of = |((kind, name), (scaling, base)): ((&str, _), (Settings, f64))| {
        let group = all.group(kind)?.with(scaling).or_number("rope_theta", base);
        let mut rotary = Rotary::by(s, &group, head_size(s)?, false)?;
        rotary.name = name;
        Ok(rotary)
    };
    kinds
        .into_iter()
        .zip(names)
        .zip(scaling.into_iter().zip(bases))
        .map(of)
        .collect()
}
