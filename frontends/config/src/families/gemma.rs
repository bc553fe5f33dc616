//! Gemma: LLaMA with scaled embeddings, GeLU with a gate, and norms by 1 + weight.

use super::llama::head_norms;
use super::{activation, by_layer, cap, like_llama, like_llama_by, sliding_but_each};
use crate::Error;
use crate::decoder::{Activation, Decoder};
use crate::settings::Settings;

/// The first one.
pub(super) fn gemma(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_gemma(s, like_llama(s, false)?)?;
    decoder.activation = match (s.has("hidden_activation"), s.text_or("hidden_act", "")?) {
        (true, _) => activation(s, "hidden_activation")?,
        // Older files say `gelu` and mean the approximation.
        (false, "gelu") => Activation::Gelu { tanh: true },
        (false, _) => activation(s, "hidden_act")?,
    };
    Ok(decoder)
}

/// Gemma 2: norms behind attention and MLP too, scores and logits with a cap, and windows in half
/// of the layers.
pub(super) fn gemma2(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = normed_twice(s, like_llama(s, false)?)?;
    decoder.score_cap = cap(s, "attn_logit_softcapping")?;
    let slides = sliding_but_each(s, decoder.blocks.len(), 2)?;
    decoder.slide(&slides, s.size_or_none("sliding_window")?);
    Ok(decoder)
}

/// VaultGemma: Gemma 2 with norms before attention and MLP alone.
pub(super) fn vaultgemma(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = gemma2(s)?;
    let [before, _, before_mlp, _] = decoder.names.norms;
    decoder.names.norms = [before, None, before_mlp, None];
    Ok(decoder)
}

/// Gemma 3: norms of queries and keys instead of a cap of scores, and other rotary positions in
/// the layers with windows.
pub(super) fn gemma3_text(s: &Settings) -> Result<Decoder, Error> {
    let local = s.number_or("rope_local_base_freq", 1e4)?;
    let kinds = by_layer(s, [s.number_or("rope_theta", 1e6)?, local])?;
    let mut decoder = normed_twice(s, like_llama_by(s, kinds)?)?;
    decoder.head_norms = Some(head_norms(decoder.norm));
    let slides = sliding_but_each(
        s,
        decoder.blocks.len(),
        s.size_or("sliding_window_pattern", 6)?,
    )?;
    decoder.slide(&slides, s.size_or_none("sliding_window")?);
    decoder.turn_by_layer(&slides);
    Ok(decoder)
}

fn like_gemma(s: &Settings, mut decoder: Decoder) -> Result<Decoder, Error> {
    s.only_flag("use_bidirectional_attention", false)?;
    decoder.norm.offset = Some(1.0);
    decoder.mlp_bias = false;
    decoder.embedding_scale = (decoder.width as f64).sqrt();
    Ok(decoder)
}

/// What Gemma 2 and 3 share.
fn normed_twice(s: &Settings, decoder: Decoder) -> Result<Decoder, Error> {
    let mut decoder = like_gemma(s, decoder)?;
    decoder.activation = activation(s, "hidden_activation")?;
    decoder.scale = s.number("query_pre_attn_scalar")?.powf(-0.5);
    decoder.logit_cap = cap(s, "final_logit_softcapping")?;
    decoder.names.norms = [
        Some("input_layernorm"),
        Some("post_attention_layernorm"),
        Some("pre_feedforward_layernorm"),
        Some("post_feedforward_layernorm"),
    ];
    Ok(decoder)
}
