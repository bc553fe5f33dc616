//! LLaMA with rotary positions of neighbours: GLM, Ernie and Helium.

use super::like_llama;
use crate::Error;
use crate::decoder::{Decoder, Mlp};
use crate::settings::Settings;

/// GLM 4: heads turn in part, and gate and up are one product.
pub(super) fn glm(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, true)?;
    decoder.turn_neighbours();
    decoder.biases[1] = false;
    decoder.mlp = Mlp::JointGate;
    decoder.mlp_bias = false;
    Ok(decoder)
}

/// GLM 4 of April 2025: norms behind attention and MLP too.
pub(super) fn glm4(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = glm(s)?;
    decoder.names.norms = [
        Some("input_layernorm"),
        Some("post_self_attn_layernorm"),
        Some("post_attention_layernorm"),
        Some("post_mlp_layernorm"),
    ];
    Ok(decoder)
}

/// Ernie 4.5: biases everywhere, or nowhere.
pub(super) fn ernie4_5(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    let bias = s.flag_or("use_bias", false)?;
    decoder.turn_neighbours();
    decoder.biases = [bias; 2];
    decoder.mlp_bias = bias;
    Ok(decoder)
}

/// Helium.
pub(super) fn helium(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    if decoder.heads * decoder.head != decoder.width {
        let (heads, head, width) = (decoder.heads, decoder.head, decoder.width);
        let why = format!("{heads} heads of {head} elements are not {width} columns");
        return Err(Error::new("head_dim", why));
    }
    decoder.turn_neighbours();
    decoder.biases[1] = false;
    Ok(decoder)
}
