//! The front end for `config.json`: the forward of a language model from its sizes alone.
//!
//! transformers saves such a file beside the weights of every model. It has a family's name
//! (`model_type`) and sizes. From these the reader builds the graph that a trace of the family's
//! `ForCausalLM` would give: the same formulas, and states with the paths of the model's own
//! parameters, so that its safetensors files fit. So a model can be planned, and trained, without
//! PyTorch.
//!
//! The graph is a forward with the output `logits`, in f32. The file does not say how large a batch
//! is: the symbolic sizes `batch` and `sequence` do.

mod attention;
mod decoder;
mod dropout;
mod experts;
mod families;
mod forward;
mod mlp;
mod net;
mod norm;
mod rotary;
mod settings;

use ir::Graph;
/// Why a file could not be read.
pub use lower::FileError as Error;
pub use lower::Tensor;
use settings::Settings;
use std::collections::BTreeMap;
use std::path::Path;

/// The names of the symbolic sizes: sequences of a step, and tokens of a sequence.
pub const DIMS: [&str; 2] = ["batch", "sequence"];

/// A model from its configuration.
#[derive(Clone, Debug)]
pub struct Model {
    /// The forward: inputs `input_ids`, and for packed documents `position_ids` and `segment_ids`;
    /// output `logits`.
    pub graph: Graph,
    /// Values of buffers, by path.
    pub tensors: BTreeMap<String, Tensor>,
    /// What the file asks for and the graph leaves out.
    pub notes: Vec<String>,
}

/// The families that can be read.
pub fn families() -> Vec<&'static str> {
    families::FAMILIES.iter().map(|(name, _)| *name).collect()
}

/// What a file leaves open.
#[derive(Clone, Default, Debug)]
pub struct Options {
    /// The values of [`DIMS`]; without a value a batch is one sequence.
    pub dims: BTreeMap<String, u64>,
    /// A sequence consists of documents that do not see each other: each token has a position in
    /// its document, and the number of its document, as inputs.
    pub packed: bool,
    /// Elements are dropped where the file asks for it.
    pub dropout: bool,
}

/// Reads a file.
pub fn read(path: &Path, options: &Options) -> Result<Model, Error> {
    let of = |e: Error| e.of(path.display().to_string());
    let bytes = std::fs::read(path).map_err(|e| of(Error::new("", e.to_string())))?;
    let text = String::from_utf8(bytes).map_err(|_| of(Error::new("", "not a text file")))?;
    parse(&text, options).map_err(of)
}

/// The same for the text of a file.
pub fn parse(text: &str, options: &Options) -> Result<Model, Error> {
    let dims = &options.dims;
    if let Some(name) = dims.keys().find(|name| !DIMS.contains(&name.as_str())) {
        let known = DIMS.join(" and ");
        return Err(Error::new(
            "",
            format!("has no size {name}; its sizes are {known}"),
        ));
    }
    let settings = Settings::parse(text)?;
    let (decoder, notes) = families::decoder(settings, options.dropout)?;
    let batch = dims.get("batch").copied().unwrap_or(1);
    let Some(&sequence) = dims.get("sequence") else {
        return Err(Error::new("", "does not say how long a sequence is")
            .help("set it, such as --dim sequence=1024"));
    };
    if batch == 0 || sequence == 0 {
        return Err(Error::new("", "batch and sequence should be 1 or more"));
    }
    let (graph, tensors) = decoder.graph((batch, sequence), options.packed)?;
    Ok(Model {
        graph,
        tensors,
        notes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(sequence: u64) -> Options {
        Options {
            dims: BTreeMap::from([("sequence".to_string(), sequence)]),
            ..Options::default()
        }
    }

    fn refused(text: &str, options: &Options) -> String {
        parse(text, options).unwrap_err().to_string()
    }

    #[test]
    fn what_is_wrong_is_named() {
        let says = |text: &str, words: &str| {
            let error = refused(text, &dims(8));
            assert!(error.contains(words), "{error}");
        };
        says("{", "line 1");
        says("[]", "not an object");
        says("{}", "no model_type");
        says(r#"{"model_type": "bert"}"#, "known are apertus, arcee");
        says(
            r#"{"model_type": "llama", "hidden_size": null}"#,
            "has no hidden_size",
        );
        says(r#"{"model_type": "gpt2", "n_embd": -1}"#, "n_embd: -1");
        says(r#"{"model_type": "gpt2", "n_embd": 770}"#, "cannot divide");
        says(r#"{"model_type": "gpt2", "n_layer": 1000000}"#, "n_layer");
        // Positions have a number for each head, or for each element of a head.
        let heads = r#"{"model_type": "bloom", "hidden_size": 4294967296, "n_head": 4294967296}"#;
        says(heads, "n_head");
        let head = r#"{"model_type": "qwen3", "hidden_size": 8, "head_dim": 4294967296}"#;
        says(head, "larger than 65536");
        let norms = r#"{"model_type": "stablelm", "hidden_size": 262144, "qk_layernorm": true,
            "num_attention_heads": 32768, "num_hidden_layers": 10000}"#;
        says(norms, "more than 100000");
        says(
            r#"{"model_type": "falcon", "alibi": true}"#,
            "trace the model in PyTorch",
        );
        says(
            r#"{"model_type": "gpt2", "activation_function": "mish"}"#,
            "mish is not known",
        );
        says(r#"{"model_type": "gpt2", "n_positions": 4}"#, "for 4");
        let llama = |more: &str| {
            format!(
                r#"{{"model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
                "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9, {more}}}"#
            )
        };
        says(&llama(r#""pad_token_id": 9"#), "9 is no token");
        says(&llama(r#""num_key_value_heads": 4"#), "cannot share");
        let scaled = r#""rope_scaling": {"rope_type": "llama3", "factor": 0,
            "low_freq_factor": 1, "high_freq_factor": 4,
            "original_max_position_embeddings": 2}"#;
        says(&llama(scaled), "not finite");
        // Sizes that are allowed one by one, and too large together.
        let large = r#"{"model_type": "gpt2", "n_embd": 4294967296, "vocab_size": 4294967296}"#;
        assert!(!refused(large, &dims(8)).is_empty());
        let gpt2 = r#"{"model_type": "gpt2"}"#;
        assert!(refused(gpt2, &Options::default()).contains("--dim sequence="));
        assert!(refused(gpt2, &dims(0)).contains("1 or more"));
        let other = Options {
            dims: BTreeMap::from([("tokens".to_string(), 8)]),
            ..Options::default()
        };
        assert!(refused(gpt2, &other).contains("batch and sequence"));
    }

    /// A setting that changes what a model computes is read, or refused by its name.
    #[test]
    fn what_has_no_graph_is_named() {
        for (settings, words) in [
            (r#""falcon", "alibi": true"#, "alibi: true"),
            (
                r#""falcon", "new_decoder_architecture": true, "parallel_attn": false"#,
                "parallel_attn",
            ),
            (
                r#""opt", "do_layer_norm_before": false"#,
                "do_layer_norm_before",
            ),
            (
                r#""opt", "word_embed_proj_dim": 512"#,
                "word_embed_proj_dim",
            ),
            (r#""mpt", "attn_config": {"qk_ln": true}"#, "qk_ln"),
            (r#""mpt", "attn_config": {"alibi": false}"#, "alibi"),
            (
                r#""gemma2", "use_bidirectional_attention": true"#,
                "use_bidirectional",
            ),
            (
                r#""gemma2", "attn_logit_softcapping": 0"#,
                "attn_logit_softcapping",
            ),
            (
                r#""gemma3_text", "rope_parameters": {"rope_type": "linear"}"#,
                "rope_parameters",
            ),
            (
                r#""llama", "rope_scaling": {"type": "dynamic", "factor": 2}"#,
                "dynamic is not",
            ),
            (
                r#""llama", "partial_rotary_factor": 0.5"#,
                "partial_rotary_factor",
            ),
            (
                r#""phi3", "rope_scaling": {"type": "yarn", "factor": 2}"#,
                "yarn is not",
            ),
            (
                r#""cohere2", "layer_types": ["full_attention"]"#,
                "1 kinds for 40 layers",
            ),
            (
                r#""bloom", "apply_residual_connection_post_layernorm": true"#,
                "post_layernorm",
            ),
            (r#""codegen", "n_head": 2"#, "n_head"),
            (r#""helium", "head_dim": 64"#, "head_dim"),
            (r#""granite", "hidden_act": "mish""#, "hidden_act"),
            (r#""phimoe""#, "trace the model in PyTorch"),
            (
                r#""deepseek_v2", "num_experts_per_tok": 2, "topk_method": "noaux_tc""#,
                "topk_method",
            ),
            (r#""deepseek_v3", "num_key_value_heads": 8"#, "8 is not 128"),
            (r#""hunyuan_v1_moe", "moe_topk": [1, 2]"#, "moe_topk"),
        ] {
            let text = format!(r#"{{"model_type": {settings}}}"#);
            let error = refused(&text, &dims(8));
            assert!(error.contains(words), "{error}");
        }
        let kinds = r#"{"model_type": "olmo3", "num_hidden_layers": 1,
            "layer_types": ["chunked_attention"]}"#;
        assert!(refused(kinds, &dims(8)).contains("chunked_attention"));
    }

    /// The experts of a token are some of all, and of some groups.
    #[test]
    fn experts_that_cannot_be_chosen_are_named() {
        for (settings, words) in [
            (
                r#""mixtral", "num_experts_per_tok": 9"#,
                "num_experts_per_tok: a token cannot have 9 of 8 experts",
            ),
            (
                r#""glm4_moe", "head_dim": 128, "n_group": 3"#,
                "n_group: 128 experts cannot be 3 groups",
            ),
            (
                r#""glm4_moe", "head_dim": 128, "n_group": 64, "topk_group": 3"#,
                "topk_group: a token cannot have 8 experts of 3 of 64 groups of 2",
            ),
            (
                r#""qwen2_moe", "num_experts": 100000"#,
                "num_experts: 100000 experts are more than 65536",
            ),
            (r#""dots1", "n_routed_experts": 8"#, "num_experts_per_tok"),
            (
                r#""olmoe", "num_experts_per_tok": 0"#,
                "num_experts_per_tok: 0",
            ),
        ] {
            let text = format!(r#"{{"model_type": {settings}}}"#);
            let error = refused(&text, &dims(8));
            assert!(error.contains(words), "{error}");
        }
    }

    /// A family's file may list the layers that mix; the others have an MLP.
    #[test]
    fn layers_without_experts_have_an_mlp() {
        let text = r#"{"model_type": "qwen3_moe", "num_hidden_layers": 3, "mlp_only_layers": [1],
            "use_sliding_window": false, "sliding_window": 0,
            "num_experts": 4, "num_experts_per_tok": 2}"#;
        let graph = parse(text, &dims(8)).unwrap().graph;
        let has = |path: &str| graph.states.values().any(|state| state.path == path);
        for (i, mixes) in [true, false, true].into_iter().enumerate() {
            let experts = format!("model.layers.{i}.mlp.experts.down_proj");
            let dense = format!("model.layers.{i}.mlp.down_proj.weight");
            assert_eq!([has(&experts), has(&dense)], [mixes, !mixes]);
        }
    }

    /// In packed rows, frequencies that depend on the longest document are refused.
    #[test]
    fn long_frequencies_need_whole_rows() {
        let text = r#"{"model_type": "phi3", "hidden_size": 8, "num_attention_heads": 2,
            "num_hidden_layers": 1, "vocab_size": 9, "pad_token_id": null,
            "original_max_position_embeddings": 8, "rope_scaling": {"type": "longrope",
            "short_factor": [1, 2], "long_factor": [3, 4]}}"#;
        let packed = |sequence| Options {
            packed: true,
            ..dims(sequence)
        };
        assert!(parse(text, &packed(8)).is_ok());
        assert!(parse(text, &dims(9)).is_ok());
        let error = parse(text, &packed(9)).unwrap_err().to_string();
        assert!(error.contains("pack at most 8"), "{error}");
    }

    /// A file that says how large a head is may have heads that do not divide the columns.
    #[test]
    fn heads_need_not_divide_the_columns() {
        let text = r#"{"model_type": "qwen3", "hidden_size": 10, "head_dim": 8,
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
            "intermediate_size": 6, "vocab_size": 9}"#;
        assert!(parse(text, &dims(8)).is_ok());
    }

    #[test]
    fn what_is_left_out_is_noted() {
        let text = r#"{"model_type": "gpt2", "n_layer": 1, "resid_pdrop": 0.2}"#;
        let notes = parse(text, &dims(8)).unwrap().notes;
        // The others are what transformers takes for a file without them.
        assert_eq!(notes.len(), 3);
        assert!(notes[2].contains("resid_pdrop 0.2"));
        let dropped = parse(
            text,
            &Options {
                dropout: true,
                ..dims(8)
            },
        );
        assert!(dropped.unwrap().notes.is_empty());
        let text = r#"{"model_type": "mixtral", "num_hidden_layers": 1,
            "output_router_logits": true, "router_jitter_noise": 0.1}"#;
        let notes = parse(text, &dims(8)).unwrap().notes;
        assert!(notes[0].contains("router_jitter_noise 0.1"), "{notes:?}");
        assert!(notes[1].contains("output_router_logits"), "{notes:?}");
    }
}
