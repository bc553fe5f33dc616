//! GPT and what is like it: no gate, layer norms, biases.

use super::{LLAMA, SIZES, activation, plain, sizes};
use crate::Error;
use crate::decoder::{Activation, Decoder, HeadNorms, Mlp, Names, Over, Positions, Projections};
use crate::norm::Norm;
use crate::rotary::Rotary;
use crate::settings::{Settings, no_graph};

const GPT: Names = Names {
    embeddings: "transformer.wte",
    embedding_norm: None,
    blocks: "transformer.h",
    attention: "attn",
    output: "c_proj",
    mlp: "mlp",
    norms: [Some("ln_1"), None, Some("ln_2"), None],
    last_norm: Some("transformer.ln_f"),
    rotary: "transformer.rotary",
    head: "lm_head",
};

/// Keys of sizes.
const GPT_SIZES: [&str; 4] = ["n_embd", "n_head", "n_layer", "n_inner"];

/// GPT-2. (Radford et al., 2019)
pub(super) fn gpt2(s: &Settings) -> Result<Decoder, Error> {
    s.only_flag("scale_attn_by_inverse_layer_idx", false)?;
    let mut decoder = like_gpt2(s)?;
    decoder.conv = true;
    Ok(decoder)
}

/// StarCoder 1 and SantaCoder: GPT-2 with one head of keys and values.
pub(super) fn gpt_bigcode(s: &Settings) -> Result<Decoder, Error> {
    let mut decoder = like_gpt2(s)?;
    match s.flag_or("multi_query", true)? {
        true => decoder.shared_heads = 1,
        false => decoder.projections = Projections::by_group("c_attn", decoder.heads),
    }
    Ok(decoder)
}

fn like_gpt2(s: &Settings) -> Result<Decoder, Error> {
    s.only_flag("add_cross_attention", false)?;
    let sizes = sizes(s, GPT_SIZES)?;
    let norm = Norm::layer(s.number("layer_norm_epsilon")?);
    let mut decoder = plain(s, &sizes, norm, GPT)?;
    if !s.flag_or("scale_attn_weights", true)? {
        decoder.scale = 1.0;
    }
    decoder.positions = table("transformer.wpe", s.size("n_positions")?);
    decoder.projections = Projections::joint("c_attn");
    decoder.biases = [true; 2];
    decoder.mlp = CONV;
    decoder.mlp_bias = true;
    decoder.activation = activation(s, "activation_function")?;
    Ok(decoder)
}

/// GPT-Neo and TinyStories: windows in some layers, and scores without a factor.
pub(super) fn gpt_neo(s: &Settings) -> Result<Decoder, Error> {
    let keys = [
        "hidden_size",
        "num_heads",
        "num_layers",
        "intermediate_size",
    ];
    let sizes = sizes(s, keys)?;
    let names = Names {
        attention: "attn.attention",
        output: "out_proj",
        ..GPT
    };
    let norm = Norm::layer(s.number("layer_norm_epsilon")?);
    let mut decoder = plain(s, &sizes, norm, names)?;
    decoder.scale = 1.0;
    let rows = s.size("max_position_embeddings")?;
    decoder.positions = table("transformer.wpe", rows);
    decoder.biases = [false, true];
    decoder.mlp = CONV;
    decoder.mlp_bias = true;
    decoder.activation = activation(s, "activation_function")?;
    let slides = local_layers(s, sizes.layers)?;
    decoder.slide(&slides, Some(s.size("window_size")?));
    Ok(decoder)
}

/// Whether each layer of a GPT-Neo slides: lists of kinds, each with how often it is repeated.
fn local_layers(s: &Settings, layers: usize) -> Result<Vec<bool>, Error> {
    let key = "attention_types";
    let Some(kinds) = s.repeated_texts(key)? else {
        return Ok((0..layers).map(|i| i % 2 == 1).collect());
    };
    if kinds.len() != layers {
        let why = format!("{} kinds for {layers} layers", kinds.len());
        return Err(Error::new(key, why));
    }
    let of = |kind: &str| match kind {
        "global" => Ok(false),
        "local" => Ok(true),
        other => Err(no_graph(key, other)),
    };
    kinds.into_iter().map(of).collect()
}

/// GPT-NeoX and Pythia. (Black et al., 2022)
pub(super) fn gpt_neox(s: &Settings) -> Result<Decoder, Error> {
    let sizes = sizes(s, SIZES)?;
    let names = Names {
        embeddings: "gpt_neox.embed_in",
        blocks: "gpt_neox.layers",
        attention: "attention",
        output: "dense",
        last_norm: Some("gpt_neox.final_layer_norm"),
        rotary: "gpt_neox.rotary_emb",
        head: "embed_out",
        ..LLAMA
    };
    let mut decoder = by_head(s, &sizes, names, s.number("layer_norm_eps")?)?;
    let base = s.number_or("rotary_emb_base", s.number("rope_theta")?)?;
    let share = s.number_or("rotary_pct", s.number("partial_rotary_factor")?)?;
    let named = Settings::default()
        .or_number("rope_theta", base)
        .or_number("partial_rotary_factor", share);
    let s = &s.clone().with(named);
    decoder.positions = Positions::Rotary(vec![Rotary::of(s, sizes.head, true)?]);
    decoder.turn_only(&vec![true; sizes.layers]);
    decoder.biases = [s.flag_or("attention_bias", true)?; 2];
    decoder.activation = activation(s, "hidden_act")?;
    decoder.parallel = s.flag_or("use_parallel_residual", true)?;
    Ok(decoder)
}

/// Persimmon: GPT-NeoX with norms of queries and keys, one after the other.
pub(super) fn persimmon(s: &Settings) -> Result<Decoder, Error> {
    let sizes = sizes(s, SIZES)?;
    let names = Names {
        output: "dense",
        last_norm: Some("model.final_layernorm"),
        ..LLAMA
    };
    let mut decoder = by_head(s, &sizes, names, s.number("layer_norm_eps")?)?;
    decoder.positions = Positions::Rotary(vec![Rotary::of(s, sizes.head, true)?]);
    decoder.turn_only(&vec![true; sizes.layers]);
    decoder.padding = s.token("pad_token_id")?;
    decoder.activation = activation(s, "hidden_act")?;
    if s.flag_or("qk_layernorm", true)? {
        decoder.head_norms = Some(HeadNorms {
            names: ["q_layernorm", "k_layernorm"],
            norm: decoder.norm,
            over: Over::Head,
            turned: false,
        });
    }
    Ok(decoder)
}

/// Bloom: scores fall by distance, and the embeddings have a norm.
pub(super) fn bloom(s: &Settings) -> Result<Decoder, Error> {
    s.only_flag("apply_residual_connection_post_layernorm", false)?;
    let mut sizes = sizes(s, ["hidden_size", "n_head", "n_layer", ""])?;
    sizes.inner = 4 * sizes.width;
    let names = Names {
        embeddings: "transformer.word_embeddings",
        embedding_norm: Some("transformer.word_embeddings_layernorm"),
        blocks: "transformer.h",
        attention: "self_attention",
        output: "dense",
        last_norm: Some("transformer.ln_f"),
        ..LLAMA
    };
    let mut decoder = by_head(s, &sizes, names, s.number("layer_norm_epsilon")?)?;
    decoder.positions = Positions::Slopes(slopes(sizes.heads));
    Ok(decoder)
}

/// What these three share: one product makes query, key and value of a head, then of the
/// next.
fn by_head(s: &Settings, sizes: &super::Sizes, names: Names, eps: f64) -> Result<Decoder, Error> {
    let mut decoder = plain(s, sizes, Norm::layer(eps), names)?;
    decoder.projections = Projections::by_group("query_key_value", sizes.heads);
    decoder.biases = [true; 2];
    decoder.mlp = Mlp::Plain {
        up: "dense_h_to_4h",
        down: "dense_4h_to_h",
    };
    decoder.mlp_bias = true;
    Ok(decoder)
}

/// The slopes of ALiBi: powers of a number for the largest power of 2 of heads, and for the other
/// heads every second one of twice as many.
fn slopes(heads: u64) -> Vec<f32> {
    let most = 1 << heads.ilog2();
    let base = |n: u64| (-8.0 / n as f64).exp2() as f32;
    let first = (1..=most).map(|i| base(most).powf(i as f32));
    let others = (0..heads - most).map(|i| base(2 * most).powf((2 * i + 1) as f32));
    first.chain(others).collect()
}

/// MPT: Bloom's positions, and norms without biases.
pub(super) fn mpt(s: &Settings) -> Result<Decoder, Error> {
    let attention = s.group("attn_config")?;
    for (group, key, only) in [
        (s, "no_bias", true),
        (&attention, "alibi", true),
        (&attention, "qk_ln", false),
        (&attention, "prefix_lm", false),
        (&attention, "attn_uses_sequence_id", false),
    ] {
        group.only_flag(key, only)?;
    }
    let only = |group: &Settings, key: &str, only: f64| match group.number_or(key, only)? {
        number if number == only => Ok(()),
        other => Err(no_graph(key, other)),
    };
    only(s, "expansion_ratio", 4.0)?;
    only(&attention, "alibi_bias_max", 8.0)?;
    if s.has("logit_scale") {
        return Err(no_graph("logit_scale", "a factor of logits"));
    }
    if attention.text_or("attn_type", "multihead_attention")? != "multihead_attention" {
        return Err(Error::new("attn_type", "known is multihead_attention"));
    }
    let mut sizes = sizes(s, ["d_model", "n_heads", "n_layers", ""])?;
    sizes.inner = 4 * sizes.width;
    let norm = Norm {
        bias: false,
        ..Norm::layer(s.number("layer_norm_epsilon")?)
    };
    let names = Names {
        blocks: "transformer.blocks",
        output: "out_proj",
        mlp: "ffn",
        norms: [Some("norm_1"), None, Some("norm_2"), None],
        last_norm: Some("transformer.norm_f"),
        ..GPT
    };
    let mut decoder = plain(s, &sizes, norm, names)?;
    decoder.scale = attention.number_or("softmax_scale", decoder.scale)?;
    decoder.clip = attention
        .number_or_none("clip_qkv")?
        .filter(|&clip| clip != 0.0);
    decoder.positions = Positions::Slopes(mpt_slopes(sizes.heads));
    decoder.projections = Projections::joint("Wqkv");
    decoder.mlp = Mlp::Plain {
        up: "up_proj",
        down: "down_proj",
    };
    decoder.activation = Activation::Gelu { tanh: false };
    Ok(decoder)
}

/// The slopes of ALiBi as MPT has them: if heads are no power of 2, every second one of the next
/// power comes first.
fn mpt_slopes(heads: u64) -> Vec<f32> {
    let most = heads.next_power_of_two();
    let slope = |i: u64| (-8.0 * i as f64 / most as f64).exp2() as f32;
    match most == heads {
        true => (1..=heads).map(slope).collect(),
        false => {
            let (even, odd) = ((2..=most).step_by(2), (1..=most).step_by(2));
            even.chain(odd).take(heads as usize).map(slope).collect()
        }
    }
}

/// GPT-J: attention and MLP side by side, rotary positions of neighbours, a head with a bias.
pub(super) fn gptj(s: &Settings) -> Result<Decoder, Error> {
    let sizes = sizes(s, GPT_SIZES)?;
    let names = Names {
        output: "out_proj",
        norms: [Some("ln_1"), None, None, None],
        ..GPT
    };
    let norm = Norm::layer(s.number("layer_norm_epsilon")?);
    let mut decoder = plain(s, &sizes, norm, names)?;
    let rotary = Rotary::plain(1e4, s.size("rotary_dim")?, sizes.head)?;
    decoder.positions = Positions::Rotary(vec![rotary]);
    decoder.turn_only(&vec![true; sizes.layers]);
    decoder.turn_neighbours();
    decoder.parallel = true;
    decoder.mlp = Mlp::Plain {
        up: "fc_in",
        down: "fc_out",
    };
    decoder.mlp_bias = true;
    decoder.head_bias = true;
    decoder.activation = activation(s, "activation_function")?;
    Ok(decoder)
}

/// CodeGen: GPT-J with one product for four groups of heads.
pub(super) fn codegen(s: &Settings) -> Result<Decoder, Error> {
    const GROUPS: u64 = 4;
    let mut decoder = gptj(s)?;
    if !decoder.heads.is_multiple_of(GROUPS) {
        let why = format!("{} heads are not {GROUPS} groups", decoder.heads);
        return Err(Error::new("n_head", why));
    }
    decoder.projections = Projections::Joint {
        name: "qkv_proj",
        groups: GROUPS,
        values_first: true,
    };
    Ok(decoder)
}

/// OPT. (Zhang et al., 2022)
pub(super) fn opt(s: &Settings) -> Result<Decoder, Error> {
    s.only_flag("do_layer_norm_before", true)?;
    let keys = [
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "ffn_dim",
    ];
    let sizes = sizes(s, keys)?;
    let columns = s.size_or("word_embed_proj_dim", sizes.width)?;
    if columns != sizes.width {
        let width = sizes.width;
        let what = format!("a table of {columns} columns for a width of {width}");
        return Err(no_graph("word_embed_proj_dim", what));
    }
    let last_norm = match s.flag_or("_remove_final_layer_norm", false)? {
        true => None,
        false => Some("model.decoder.final_layer_norm"),
    };
    let names = Names {
        embeddings: "model.decoder.embed_tokens",
        blocks: "model.decoder.layers",
        output: "out_proj",
        mlp: "",
        norms: [
            Some("self_attn_layer_norm"),
            None,
            Some("final_layer_norm"),
            None,
        ],
        last_norm,
        ..LLAMA
    };
    let mut norm = Norm::layer(1e-5);
    if !s.flag_or("layer_norm_elementwise_affine", true)? {
        (norm.offset, norm.bias) = (None, false);
    }
    let mut decoder = plain(s, &sizes, norm, names)?;
    decoder.positions = Positions::Table {
        path: "model.decoder.embed_positions",
        rows: s.size("max_position_embeddings")?,
        first: 2,
    };
    decoder.padding = s.token("pad_token_id")?;
    let bias = s.flag_or("enable_bias", true)?;
    decoder.biases = [bias; 2];
    decoder.mlp = Mlp::Plain {
        up: "fc1",
        down: "fc2",
    };
    decoder.mlp_bias = bias;
    decoder.activation = activation(s, "activation_function")?;
    Ok(decoder)
}

const CONV: Mlp = Mlp::Plain {
    up: "c_fc",
    down: "c_proj",
};

fn table(path: &'static str, rows: u64) -> Positions {
    Positions::Table {
        path,
        rows,
        first: 0,
    }
}
