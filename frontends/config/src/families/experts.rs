//! Mixtures of experts: decoders whose MLPs are those of a few experts for each token.

use super::glm::ernie4_5;
use super::llama::{head_norms, hunyuan_v1_dense};
use super::olmo::normed_behind;
use super::{like_llama, like_llama_by, sliding};
use crate::Error;
use crate::decoder::{Decoder, HeadNorms, Latent, Over, Projections};
use crate::experts::{Correction, Form, Groups, Mixture, Scores, Shared, Total};
use crate::rotary::{self, Rotary};
use crate::settings::{Settings, no_graph};

/// Mixtral: Mistral with experts; the weights of a token's experts have the sum 1.
/// (Jiang et al., 2024)
pub(super) fn mixtral(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = super::llama::mistral(s)?;
    mix(&mut decoder, of_sum_one(s)?, |_| true);
    Ok(decoder)
}

/// Qwen 1.5 and 2 with experts: in addition an MLP for all tokens, whose share is a sigmoid.
pub(super) fn qwen2_moe(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.biases = [s.flag_or("qkv_bias", true)?, false];
    decoder.mlp_bias = false;
    let mixture = Mixture {
        inner: s.size("moe_intermediate_size")?,
        shared: Some(Shared {
            name: "shared_expert",
            inner: s.size("shared_expert_intermediate_size")?,
            gate: Some("shared_expert_gate"),
        }),
        ..by_softmax(s, "num_experts")?
    };
    let mixes = sparse(s)?;
    mix(&mut decoder, mixture, mixes);
    let most = s.number_or("max_window_layers", 28.0)?;
    let layers = decoder.blocks.len();
    let windows = sliding(s, layers, |i| i % 2 == 0 && (i as f64) < most)?;
    decoder.slide(&windows, window(s)?);
    Ok(decoder)
}

/// Qwen 3 with experts.
pub(super) fn qwen3_moe(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.head_norms = Some(head_norms(decoder.norm));
    decoder.mlp_bias = false;
    let mixture = Mixture {
        inner: s.size("moe_intermediate_size")?,
        ..by_softmax(s, "num_local_experts")?
    };
    let mixes = sparse(s)?;
    mix(&mut decoder, mixture, mixes);
    decoder.slide_everywhere(window(s)?);
    Ok(decoder)
}

/// OLMoE: norms of all queries and all keys. (Muennighoff et al., 2024)
pub(super) fn olmoe(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.mlp_bias = false;
    decoder.clip = s.number_or_none("clip_qkv")?;
    decoder.head_norms = Some(HeadNorms {
        over: Over::Heads,
        ..head_norms(decoder.norm)
    });
    mix(&mut decoder, by_softmax(s, "num_experts")?, |_| true);
    Ok(decoder)
}

/// FlexOlmo: OLMo 2 with experts.
pub(super) fn flex_olmo(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = normed_behind(like_llama(s, false)?)?;
    mix(&mut decoder, by_softmax(s, "num_experts")?, |_| true);
    Ok(decoder)
}

/// Granite with experts: shares of the chosen experts alone.
pub(super) fn granitemoe(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = super::llama::granite(s)?;
    decoder.names.mlp = "block_sparse_moe";
    let mixture = Mixture {
        router: "router",
        scores: Scores::SoftmaxOfChosen,
        ..plain(s, "num_local_experts", "intermediate_size")?
    };
    mix(&mut decoder, mixture, |_| true);
    Ok(decoder)
}

/// Hunyuan with experts: in addition an MLP for all tokens.
pub(super) fn hunyuan_v1_moe(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = hunyuan_v1_dense(s)?;
    let mixture = Mixture {
        router: "gate.wg",
        chosen: s.same_size("moe_topk")?,
        shared: Some(Shared {
            name: "shared_mlp",
            inner: decoder.inner,
            gate: None,
        }),
        total: Total::Sum(0.0),
        ..plain(s, "num_experts", "intermediate_size")?
    };
    mix(&mut decoder, mixture, |_| true);
    Ok(decoder)
}

/// Ernie 4.5 with experts. A correction takes part in the choice.
pub(super) fn ernie4_5_moe(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = ernie4_5(s)?;
    decoder.head_bias = decoder.mlp_bias;
    let n_shared = s.count_or("moe_num_shared_experts", 0)?;
    let plain = plain(s, "moe_num_experts", "moe_intermediate_size")?;
    let mixture = Mixture {
        chosen: s.size("moe_k")?,
        correction: Some(Correction {
            name: "gate.moe_statics.e_score_correction_bias",
            is_row: true,
        }),
        total: Total::AtLeast(s.number_or("moe_norm_min", 1e-12)?),
        shared: shared(n_shared, plain.inner),
        ..plain
    };
    let interval = s.size("moe_layer_interval")?;
    let first = s.count_or("moe_layer_start_index", 0)?;
    let last = match s.number_or("moe_layer_end_index", -1.0)? {
        -1.0 => f64::INFINITY,
        last => last,
    };
    mix(&mut decoder, mixture, |i| {
        (i + 1).is_multiple_of(interval) && first <= i && i as f64 <= last
    });
    Ok(decoder)
}

/// GLM 4.5: dense layers first, then experts of groups.
pub(super) fn glm4_moe(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, true)?;
    decoder.biases[1] = false;
    decoder.mlp_bias = false;
    if s.flag_or("use_qk_norm", false)? {
        decoder.head_norms = Some(head_norms(decoder.norm));
    }
    let first = s.count_or("first_k_dense_replace", 0)?;
    mix(&mut decoder, by_sigmoid(s)?, |i| first <= i);
    Ok(decoder)
}

/// dots.llm1: norms of queries and keys, and experts of groups.
pub(super) fn dots1(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.mlp_bias = false;
    decoder.head_norms = Some(head_norms(decoder.norm));
    let whole = s.number_or("max_window_layers", 62.0)?;
    let slides = sliding(s, decoder.blocks.len(), |i| whole <= i as f64)?;
    decoder.slide(&slides, s.size_or_none("sliding_window")?);
    let first = s.count_or("first_k_dense_replace", 0)?;
    mix(&mut decoder, by_sigmoid(s)?, |i| first <= i);
    Ok(decoder)
}

/// Solar Open: GLM 4.5 without dense layers.
pub(super) fn solar_open(s: &Settings) -> Result<Decoder, Error> {
    let inner = s.size("moe_intermediate_size")?;
    glm4_moe(&s.clone().or_number("intermediate_size", inner))
}

/// MiniMax M2: norms of all queries and all keys, and scores of each expert alone.
pub(super) fn minimax_m2(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = match s.number_or_none("rotary_dim")? {
        None => like_llama(s, true)?,
        Some(turning) => {
            let share = turning / super::head_size(s)? as f64;
            like_llama(&s.clone().or_number("partial_rotary_factor", share), true)?
        }
    };
    decoder.biases = [false; 2];
    decoder.mlp_bias = false;
    decoder.head_norms = Some(HeadNorms {
        over: Over::Heads,
        ..head_norms(decoder.norm)
    });
    let mixture = Mixture {
        scores: Scores::Sigmoid,
        correction: Some(Correction {
            name: "e_score_correction_bias",
            is_row: false,
        }),
        total: Total::Sum(0.0),
        ..plain(s, "num_local_experts", "intermediate_size")?
    };
    mix(&mut decoder, mixture, |_| true);
    Ok(decoder)
}

/// gpt-oss: biases everywhere, sinks beside the scores, and experts with a function of their own.
/// (OpenAI, 2025)
pub(super) fn gpt_oss(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_llama(s, false)?;
    decoder.mlp_bias = false;
    decoder.sinks = true;
    let slides = sliding(s, decoder.blocks.len(), |i| i % 2 == 0)?;
    decoder.slide(&slides, s.size_or_none("sliding_window")?);
    let mixture = Mixture {
        router: "router",
        router_bias: true,
        form: Form::Pairs {
            alpha: s.number_or("swiglu_alpha", 1.702)?,
            limit: s.number_or("swiglu_limit", 7.0)?,
        },
        scores: Scores::SoftmaxOfChosen,
        ..plain(s, "num_local_experts", "intermediate_size")?
    };
    mix(&mut decoder, mixture, |_| true);
    Ok(decoder)
}

/// DeepSeek-V3: keys and values by way of narrow rows; dense layers first.
pub(super) fn deepseek_v3(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = narrow(s, s.flag_or("rope_interleave", true)?)?;
    let first = s.count_or("first_k_dense_replace", 0)?;
    mix(&mut decoder, by_sigmoid(s)?, |i| first <= i);
    Ok(decoder)
}

/// DeepSeek-V2: a token's weights are shares of all experts; the best score of a group counts.
pub(super) fn deepseek_v2(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = narrow(s, true)?;
    let plain = plain(s, "n_routed_experts", "moe_intermediate_size")?;
    let groups = match s.text_or("topk_method", "greedy")? {
        "greedy" => plain.groups,
        "group_limited_greedy" => Groups {
            count: s.size("n_group")?,
            chosen: s.size("topk_group")?,
            best: 1,
        },
        other => return Err(no_graph("topk_method", other)),
    };
    let mixture = Mixture {
        chosen: s.size("num_experts_per_tok")?,
        groups,
        factor: s.number_or("routed_scaling_factor", 1.0)?,
        shared: shared(s.size("n_shared_experts")?, plain.inner),
        ..plain
    };
    let first = s.count_or("first_k_dense_replace", 0)?;
    mix(&mut decoder, mixture, |i| first <= i);
    Ok(decoder)
}

/// LLaMA with keys and values by way of narrow rows.
fn narrow(s: &Settings, neighbours: bool) -> Result<Decoder, Error> {
    let turning = s.size("qk_rope_head_dim")?;
    let latent = Latent {
        queries: s.size_or_none("q_lora_rank")?,
        keys: s.size("kv_lora_rank")?,
        plain: s.size("qk_nope_head_dim")?,
        turning,
        values: s.size("v_head_dim")?,
    };
    for (key, size) in [
        ("qk_nope_head_dim", latent.plain),
        ("qk_rope_head_dim", turning),
        ("v_head_dim", latent.values),
    ] {
        const MOST: u64 = 1 << 16;
        if MOST < size {
            return Err(Error::new(
                key,
                format!("{size} elements are more than {MOST}"),
            ));
        }
    }
    let mut rotary = Rotary::of(s, turning, false)?;
    rotary.neighbours = neighbours;
    let mut decoder = like_llama_by(s, vec![rotary])?;
    decoder.projections = Projections::Latent(latent);
    if decoder.shared_heads != decoder.heads {
        let (heads, shared) = (decoder.heads, decoder.shared_heads);
        let why = format!("{shared} is not {heads}: each head of this family has keys of its own");
        return Err(Error::new("num_key_value_heads", why));
    }
    decoder.head = latent.plain + turning;
    let grown = rotary::growth_of_scores(&rotary::parameters(s)?)?;
    decoder.scale = (decoder.head as f64).powf(-0.5) * grown;
    Ok(decoder)
}

/// Gives a mixture to the layers that mix.
fn mix(decoder: &mut Decoder, mixture: Mixture, mixes: impl Fn(u64) -> bool) {
    for (block, i) in decoder.blocks.iter_mut().zip(0..) {
        block.mixes = mixes(i);
    }
    decoder.mixture = Some(mixture);
}

/// The window of a Qwen model. Without one, a file may have the size 0.
fn window(s: &Settings) -> Result<Option<u64>, Error> {
    match s.flag_or("use_sliding_window", false)? {
        true => s.size_or_none("sliding_window"),
        false => Ok(None),
    }
}

/// Which layers mix: each n-th, except some.
fn sparse(s: &Settings) -> Result<impl Fn(u64) -> bool + use<>, Error> {
    let step = s.size("decoder_sparse_step")?;
    let dense = match s.has("mlp_only_layers") {
        true => s.numbers("mlp_only_layers")?,
        false => vec![],
    };
    Ok(move |i: u64| (i + 1).is_multiple_of(step) && !dense.contains(&(i as f64)))
}

/// Experts by the keys of their number and of their columns; a token's weights are shares of all
/// experts.
fn plain(s: &Settings, experts: &str, inner: &str) -> Result<Mixture, Error> {
    Ok(Mixture {
        router: "gate",
        router_bias: false,
        experts: s.size(experts)?,
        chosen: s.size_or("num_experts_per_tok", 1)?,
        inner: s.size(inner)?,
        form: Form::Halves,
        scores: Scores::Softmax,
        correction: None,
        groups: Groups {
            count: 1,
            chosen: 1,
            best: 2,
        },
        total: Total::Any,
        factor: 1.0,
        shared: None,
    })
}

/// The same; `norm_topk_prob` says whether a token's weights have the sum 1.
fn by_softmax(s: &Settings, experts: &str) -> Result<Mixture, Error> {
    Ok(Mixture {
        total: match s.flag_or("norm_topk_prob", false)? {
            true => Total::Sum(0.0),
            false => Total::Any,
        },
        ..plain(s, experts, "intermediate_size")?
    })
}

/// Mixtral's experts.
fn of_sum_one(s: &Settings) -> Result<Mixture, Error> {
    Ok(Mixture {
        total: Total::Sum(0.0),
        ..plain(s, "num_local_experts", "intermediate_size")?
    })
}

/// The experts of DeepSeek-V3: a score for each expert alone, a correction that takes part in the
/// choice, groups, and in addition an MLP for all tokens.
fn by_sigmoid(s: &Settings) -> Result<Mixture, Error> {
    let plain = plain(s, "n_routed_experts", "moe_intermediate_size")?;
    Ok(Mixture {
        chosen: s.size("num_experts_per_tok")?,
        scores: Scores::Sigmoid,
        correction: Some(Correction {
            name: "gate.e_score_correction_bias",
            is_row: false,
        }),
        groups: Groups {
            count: s.size_or("n_group", 1)?,
            chosen: s.size_or("topk_group", 1)?,
            best: 2,
        },
        total: match s.flag_or("norm_topk_prob", true)? {
            true => Total::Sum(1e-20),
            false => Total::Any,
        },
        factor: s.number_or("routed_scaling_factor", 1.0)?,
        shared: shared(s.size("n_shared_experts")?, plain.inner),
        ..plain
    })
}

/// An MLP as large as so many experts, for all tokens.
fn shared(n: u64, inner: u64) -> Option<Shared> {
    (0 < n).then_some(Shared {
        name: "shared_experts",
        inner: n.saturating_mul(inner),
        gate: None,
    })
}
