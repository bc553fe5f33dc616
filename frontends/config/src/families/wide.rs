//! Attention and MLP side by side, with layer norms: Falcon, Phi, Cohere, StableLM.

use super::{LLAMA, activation, like_llama, plain, sizes, sliding_but_each};
use crate::Error;
use crate::decoder::{Decoder, HeadNorms, Mlp, Names, Over, Positions, Projections};
use crate::norm::Norm;
use crate::rotary::Rotary;
use crate::settings::{Settings, no_graph};

/// One norm, which attention and MLP read.
const SHARED: [Option<&str>; 4] = [Some("input_layernorm"), None, None, None];

/// Phi 1 and 2.
pub(super) fn phi(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, true)?;
    decoder.norm = Norm::layer(s.number("layer_norm_eps")?);
    decoder.names = Names {
        output: "dense",
        norms: SHARED,
        last_norm: Some("model.final_layernorm"),
        ..LLAMA
    };
    decoder.parallel = true;
    decoder.biases = [true; 2];
    decoder.mlp = Mlp::Plain {
        up: "fc1",
        down: "fc2",
    };
    decoder.mlp_bias = true;
    decoder.head_bias = true;
    if s.flag_or("qk_layernorm", false)? {
        decoder.head_norms = Some(HeadNorms {
            names: ["q_layernorm", "k_layernorm"],
            norm: decoder.norm,
            over: Over::Head,
            turned: false,
        });
    }
    Ok(decoder)
}

/// StableLM: side by side or one after the other.
pub(super) fn stablelm(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, true)?;
    decoder.norm = Norm::layer(s.number("layer_norm_eps")?);
    decoder.biases = [s.flag_or("use_qkv_bias", false)?, false];
    decoder.mlp_bias = false;
    if s.flag_or("use_parallel_residual", false)? {
        decoder.parallel = true;
        decoder.names.norms = SHARED;
    }
    if s.flag_or("qk_layernorm", false)? {
        /// More than any model has; each is a parameter of its own.
        const NORMS: u64 = 100_000;
        let norms = decoder.heads * decoder.blocks.len() as u64;
        if NORMS < norms {
            let why = format!("norms of {norms} heads in all layers are more than {NORMS}");
            return Err(Error::new("qk_layernorm", why));
        }
        decoder.head_norms = Some(HeadNorms {
            names: ["q_layernorm", "k_layernorm"],
            norm: Norm {
                bias: false,
                ..decoder.norm
            },
            over: Over::HeadModules,
            turned: false,
        });
    }
    Ok(decoder)
}

/// Cohere's Command R: norms without biases, rotary positions of neighbours, scaled logits.
pub(super) fn cohere(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.turn_neighbours();
    decoder.norm = Norm {
        bias: false,
        ..Norm::layer(s.number("layer_norm_eps")?)
    };
    decoder.parallel = true;
    decoder.names.norms = SHARED;
    decoder.mlp_bias = false;
    decoder.logit_scale = s.number("logit_scale")?;
    if s.flag_or("use_qk_norm", false)? {
        decoder.head_norms = Some(HeadNorms {
            names: ["q_norm", "k_norm"],
            norm: decoder.norm,
            over: Over::EachHead,
            turned: false,
        });
    }
    Ok(decoder)
}

/// Command R7B: windows in most layers. The others know no positions.
pub(super) fn cohere2(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = cohere(s)?;
    let each = s.size_or("sliding_window_pattern", 4)?;
    let slides = sliding_but_each(s, decoder.blocks.len(), each)?;
    let size = s.size_or_none("sliding_window")?;
    decoder.slide(&slides, size);
    let turns: Vec<bool> = slides
        .iter()
        .map(|&slides| slides && size.is_some())
        .collect();
    decoder.turn_only(&turns);
    Ok(decoder)
}

/// Falcon. Its 7B shares one head of keys and values; later ones share some, and have two norms.
pub(super) fn falcon(s: &Settings) -> Result<Decoder, Error> {
    s.only_flag("alibi", false)?;
    let keys = [
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "ffn_hidden_size",
    ];
    let sizes = sizes(s, keys)?;
    let (is_new, parallel) = (
        s.flag_or("new_decoder_architecture", false)?,
        s.flag_or("parallel_attn", true)?,
    );
    let norms = match (
        s.number_or_none("num_ln_in_parallel_attn")?,
        is_new,
        parallel,
    ) {
        (None, true, true) => 2.0,
        (given, _, true) => given.unwrap_or(1.0),
        (_, true, false) => {
            let why = "false has no meaning with new_decoder_architecture";
            return Err(Error::new("parallel_attn", why));
        }
        (_, false, false) => 0.0,
    };
    let norms = match (norms, is_new) {
        (2.0, true) => [Some("ln_attn"), None, Some("ln_mlp"), None],
        (1.0, _) => SHARED,
        (0.0, false) if !parallel => LLAMA.norms,
        (n, _) => {
            return Err(no_graph("num_ln_in_parallel_attn", n));
        }
    };
    let names = Names {
        embeddings: "transformer.word_embeddings",
        blocks: "transformer.h",
        attention: "self_attention",
        output: "dense",
        norms,
        last_norm: Some("transformer.ln_f"),
        rotary: "transformer.rotary_emb",
        ..LLAMA
    };
    let norm = Norm::layer(s.number("layer_norm_epsilon")?);
    let mut decoder = plain(s, &sizes, norm, names)?;
    decoder.positions = Positions::Rotary(vec![Rotary::of(s, sizes.head, false)?]);
    decoder.turn_only(&vec![true; sizes.layers]);
    let shared = match (is_new, s.flag_or("multi_query", true)?) {
        (true, _) => s.size_or("num_kv_heads", sizes.heads)?,
        (false, true) => 1,
        (false, false) => sizes.heads,
    };
    decoder.shared_heads = shared;
    decoder.projections = Projections::by_group("query_key_value", shared);
    decoder.parallel = parallel;
    let bias = s.flag_or("bias", false)?;
    decoder.biases = [bias; 2];
    decoder.mlp = Mlp::Plain {
        up: "dense_h_to_4h",
        down: "dense_4h_to_h",
    };
    decoder.mlp_bias = bias;
    decoder.activation = activation(s, "activation")?;
    Ok(decoder)
}
