//! LLaMA, and what differs from it in little.

use super::{like_llama, sliding};
use crate::Error;
use crate::decoder::{Decoder, HeadNorms, Mlp, Over, Projections};
use crate::norm::Norm;
use crate::rotary::{self, Rotary};
use crate::settings::Settings;

/// LLaMA.
pub(super) fn llama(s: &Settings) -> Result<Decoder, Error> {
    like_llama(s, false)
}

/// Mistral: LLaMA with a window in each layer.
pub(super) fn mistral(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = without_biases(s)?;
    decoder.slide_everywhere(s.size_or_none("sliding_window")?);
    Ok(decoder)
}

/// Ministral: Mistral with windows in some layers.
pub(super) fn ministral(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = without_biases(s)?;
    let slides = sliding(s, decoder.blocks.len(), |_| true)?;
    decoder.slide(&slides, s.size_or_none("sliding_window")?);
    Ok(decoder)
}

/// CWM: LLaMA with windows in most layers.
pub(super) fn cwm(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.biases = [false; 2];
    let slides = sliding(s, decoder.blocks.len(), |i| i % 4 != 0)?;
    decoder.slide(&slides, s.size_or_none("sliding_window")?);
    Ok(decoder)
}

/// Qwen 2 and 2.5: LLaMA with biases of queries, keys and values.
pub(super) fn qwen2(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.biases = [true, false];
    decoder.mlp_bias = false;
    slide_above(s, &mut decoder)?;
    Ok(decoder)
}

/// Qwen 3: LLaMA with norms of queries and keys.
pub(super) fn qwen3(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.head_norms = Some(head_norms(decoder.norm));
    decoder.mlp_bias = false;
    slide_above(s, &mut decoder)?;
    Ok(decoder)
}

/// Phi 3: LLaMA with joint products.
pub(super) fn phi3(s: &Settings) -> Result<Decoder, Error> {
    let group = rotary::parameters(s)?;
    let kind = rotary::kind(&group)?;
    if !["default", "longrope", "su"].contains(&kind) {
        let why = format!("{kind} is not of this family");
        return Err(Error::new("rope_type", why).help("it has default and longrope"));
    }
    let mut decoder = like_llama(s, true)?;
    decoder.projections = Projections::joint("qkv_proj");
    decoder.mlp = Mlp::JointGate;
    decoder.biases = [false; 2];
    decoder.mlp_bias = false;
    decoder.slide_everywhere(s.size_or_none("sliding_window")?);
    Ok(decoder)
}

/// Granite: LLaMA with factors.
pub(super) fn granite(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.scale = s.number("attention_multiplier")?;
    decoder.embedding_scale = s.number("embedding_multiplier")?;
    decoder.residual_scale = s.number("residual_multiplier")?;
    decoder.logit_scale = 1.0 / s.number("logits_scaling")?;
    Ok(decoder)
}

/// HyperCLOVA X: LLaMA with factors, and norms behind attention and MLP too.
pub(super) fn hyperclovax(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.scale = s.number_or("attention_multiplier", decoder.scale)?;
    decoder.embedding_scale = s.number("embedding_multiplier")?;
    decoder.residual_scale = s.number("residual_multiplier")?;
    decoder.logit_scale = s.number("logits_scaling")?;
    if s.flag_or("use_post_norm", true)? {
        let [before, _, before_mlp, _] = decoder.names.norms;
        decoder.names.norms = [before, Some("post_norm1"), before_mlp, Some("post_norm2")];
    }
    Ok(decoder)
}

/// SmolLM 3: LLaMA with layers that know no positions.
pub(super) fn smollm3(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    let layers = decoder.blocks.len();
    let interval = s.size("no_rope_layer_interval")?;
    let turns: Vec<bool> = match s.has("no_rope_layers") {
        // Despite the name, 1 says that a layer knows positions.
        true => s
            .numbers("no_rope_layers")?
            .iter()
            .map(|&n| n != 0.0)
            .collect(),
        false => (0..layers)
            .map(|i| !(i as u64 + 1).is_multiple_of(interval))
            .collect(),
    };
    if turns.len() != layers {
        let why = format!("{} numbers for {layers} layers", turns.len());
        return Err(Error::new("no_rope_layers", why));
    }
    let slides = s.flag_or("use_sliding_window", false)?;
    let slides = sliding(s, layers, |i| slides && !turns[i])?;
    decoder.slide(&slides, s.size_or_none("sliding_window")?);
    for (block, turns) in decoder.blocks.iter_mut().zip(turns) {
        block.rotary = block.rotary.filter(|_| turns);
    }
    Ok(decoder)
}

/// Seed-OSS: LLaMA with biases.
pub(super) fn seed_oss(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.biases[1] = s.flag_or("attention_out_bias", false)?;
    Ok(decoder)
}

/// Hunyuan: LLaMA with norms of queries and keys behind the turn by positions.
pub(super) fn hunyuan_v1_dense(s: &Settings) -> Result<Decoder, Error> {
    let head = super::head_size(s)?;
    let group = rotary::parameters(s)?;
    let rotary = match group.number_or_none("alpha")? {
        Some(alpha) if rotary::kind(&group)? == "dynamic" && alpha != 0.0 && 2 < head => {
            let base = group.number_or("rope_theta", s.number("rope_theta")?)?;
            let power = head as f64 / (head - 2) as f64;
            Rotary::plain(base * alpha.powf(power), head, head)?
        }
        _ => Rotary::of(s, head, false)?,
    };
    let mut decoder = super::like_llama_by(s, vec![rotary])?;
    decoder.mlp_bias = false;
    decoder.head_norms = Some(HeadNorms {
        names: ["query_layernorm", "key_layernorm"],
        turned: true,
        ..head_norms(decoder.norm)
    });
    Ok(decoder)
}

/// Arcee: LLaMA without a gate.
pub(super) fn arcee(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.mlp = UP;
    Ok(decoder)
}

/// Apertus: LLaMA without a gate, with norms of queries and keys, and an MLP whose function is
/// trained.
pub(super) fn apertus(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.mlp = UP;
    decoder.mlp_bias = false;
    decoder.head_norms = Some(head_norms(decoder.norm));
    decoder.names.norms = [
        Some("attention_layernorm"),
        None,
        Some("feedforward_layernorm"),
        None,
    ];
    Ok(decoder)
}

/// Jais 2: no gate, and layer norms.
pub(super) fn jais2(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.mlp = UP;
    decoder.norm = Norm::layer(s.number("layer_norm_eps")?);
    Ok(decoder)
}

/// nanochat: no gate, norms without parameters, also of the embeddings and of turned queries and
/// keys, and logits with a cap.
pub(super) fn nanochat(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.norm.offset = None;
    decoder.names.embedding_norm = decoder.names.last_norm;
    decoder.head_norms = Some(HeadNorms {
        turned: true,
        ..head_norms(decoder.norm)
    });
    decoder.mlp = Mlp::Plain {
        up: "fc1",
        down: "fc2",
    };
    decoder.mlp_bias = false;
    decoder.logit_cap = super::cap(s, "final_logit_softcapping")?;
    decoder.turn_backwards();
    Ok(decoder)
}

/// Nemotron: no gate, and layer norms by 1 + weight.
pub(super) fn nemotron(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, true)?;
    decoder.mlp = UP;
    decoder.norm = Norm {
        offset: Some(1.0),
        ..Norm::layer(s.number("norm_eps")?)
    };
    Ok(decoder)
}

/// StarCoder 2: layer norms, biases, no gate, and a window in each layer.
pub(super) fn starcoder2(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    let bias = s.flag_or("use_bias", true)?;
    decoder.norm = Norm::layer(s.number("norm_epsilon")?);
    decoder.biases = [bias; 2];
    decoder.mlp_bias = bias;
    decoder.mlp = Mlp::Plain {
        up: "c_fc",
        down: "c_proj",
    };
    decoder.slide_everywhere(s.size_or_none("sliding_window")?);
    Ok(decoder)
}

const UP: Mlp = Mlp::Plain {
    up: "up_proj",
    down: "down_proj",
};

fn without_biases(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.biases = [false; 2];
    decoder.mlp_bias = false;
    Ok(decoder)
}

/// Norms of each head's queries and keys.
pub(super) fn head_norms(norm: Norm) -> HeadNorms {
    HeadNorms {
        names: ["q_norm", "k_norm"],
        norm,
        over: Over::Head,
        turned: false,
    }
}

/// The windows of a Qwen model.
fn slide_above(s: &Settings, decoder: &mut Decoder) -> Result<(), Error> {
    let size = match s.flag_or("use_sliding_window", false)? {
        true => s.size_or_none("sliding_window")?,
        false => None,
    };
    let whole = s.number_or("max_window_layers", 28.0)?;
    let slides = sliding(s, decoder.blocks.len(), |i| whole <= i as f64)?;
    decoder.slide(&slides, size);
    Ok(())
}
