//! LLaMA with other norms: OLMo, and EXAONE 4.

use super::llama::head_norms;
use super::{by_layer, like_llama, like_llama_by, sliding, sliding_but_each};
use crate::Error;
use crate::decoder::{Decoder, HeadNorms, Over};
use crate::norm::Norm;
use crate::settings::Settings;

/// Norms of the results of attention and MLP, instead of what they read.
const BEHIND: [Option<&str>; 4] = [
    None,
    Some("post_attention_layernorm"),
    None,
    Some("post_feedforward_layernorm"),
];

/// OLMo: norms without parameters. (Groeneveld et al., 2024)
pub(super) fn olmo(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.mlp_bias = false;
    decoder.norm = Norm {
        offset: None,
        bias: false,
        ..Norm::layer(1e-5)
    };
    decoder.clip = s.number_or_none("clip_qkv")?;
    Ok(decoder)
}

/// OLMo 2: norms behind attention and MLP, and of all queries and all keys.
pub(super) fn olmo2(s: &Settings) -> Result<Decoder, Error> {
    normed_behind(like_llama(s, false)?)
}

/// OLMo 3: windows in most layers.
pub(super) fn olmo3(s: &Settings) -> Result<Decoder, Error> {
    let base = s.number_or("rope_theta", 5e5)?;
    let mut decoder = normed_behind(like_llama_by(s, by_layer(s, [base, 5e5])?)?)?;
    let slides = sliding_but_each(s, decoder.blocks.len(), 4)?;
    decoder.slide(&slides, s.size_or_none("sliding_window")?);
    decoder.turn_by_layer(&slides);
    Ok(decoder)
}

/// EXAONE 4: the norms of OLMo 2, but of each head. Only layers with windows know positions.
pub(super) fn exaone4(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.biases = [false; 2];
    decoder.mlp_bias = false;
    decoder.names.norms = BEHIND;
    decoder.head_norms = Some(head_norms(decoder.norm));
    let Some(size) = s.size_or_none("sliding_window")? else {
        return Ok(decoder);
    };
    let layers = decoder.blocks.len();
    let slides = match s.has("layer_types") {
        true => sliding(s, layers, |_| false)?,
        false => sliding_but_each(s, layers, s.size("sliding_window_pattern")?)?,
    };
    decoder.slide(&slides, Some(size));
    decoder.turn_only(&slides);
    Ok(decoder)
}

pub(super) fn normed_behind(mut decoder: Decoder) -> Result<Decoder, Error> {
    decoder.mlp_bias = false;
    decoder.names.norms = BEHIND;
    decoder.head_norms = Some(HeadNorms {
        over: Over::Heads,
        ..head_norms(decoder.norm)
    });
    Ok(decoder)
}
