//! Models of the sizes of published ones have the numbers of parameters that transformers counts.

use ir::StateKind;
use std::collections::BTreeMap;

/// Configurations, and the numbers of parameters of transformers' models with them.
const PUBLISHED: &[(&str, u64)] = &[
    // Apertus 8B.
    (
        r#"{"model_type": "apertus", "hidden_size": 4096, "intermediate_size": 21504,
           "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "vocab_size": 131072}"#,
        8_053_338_176,
    ),
    // AFM 4.5B.
    (
        r#"{"model_type": "arcee", "hidden_size": 2560, "intermediate_size": 18432,
           "num_hidden_layers": 36, "num_attention_heads": 20, "num_key_value_heads": 4,
           "vocab_size": 128004, "head_dim": 128}"#,
        4_619_184_640,
    ),
    // Bloom 560M.
    (
        r#"{"model_type": "bloom", "hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size":
           250880}"#,
        559_214_592,
    ),
    // CodeGen 350M.
    (
        r#"{"model_type": "codegen", "n_embd": 1024, "n_layer": 20, "n_head": 16, "rotary_dim":
           32, "vocab_size": 51200}"#,
        356_712_448,
    ),
    // Command R 35B.
    (
        r#"{"model_type": "cohere", "hidden_size": 8192, "intermediate_size": 22528,
           "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": 64,
           "vocab_size": 256000}"#,
        34_980_831_232,
    ),
    // Command R7B.
    (
        r#"{"model_type": "cohere2", "hidden_size": 4096, "intermediate_size": 14336,
           "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "vocab_size": 256000}"#,
        8_028_033_024,
    ),
    // CWM 32B.
    (
        r#"{"model_type": "cwm", "hidden_size": 6144, "intermediate_size": 21504,
           "num_hidden_layers": 64, "num_attention_heads": 48, "num_key_value_heads": 8,
           "vocab_size": 128256, "head_dim": 128}"#,
        32_581_097_472,
    ),
    // DeepSeek-V2-Lite.
    (
        r#"{"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
           "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
           "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
           "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": null,
           "kv_lora_rank": 512, "vocab_size": 102400}"#,
        15_706_484_224,
    ),
    // DeepSeek-V3.
    (
        r#"{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
           "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
           "num_key_value_heads": 128, "vocab_size": 129280}"#,
        671_026_404_352,
    ),
    // dots.llm1.
    (
        r#"{"model_type": "dots1", "hidden_size": 4096, "intermediate_size": 10944,
           "moe_intermediate_size": 1408, "num_hidden_layers": 62, "num_attention_heads": 32,
           "num_key_value_heads": 32, "n_shared_experts": 2, "n_routed_experts": 128,
           "num_experts_per_tok": 6, "first_k_dense_replace": 1, "norm_topk_prob": true,
           "routed_scaling_factor": 2.5, "vocab_size": 152064}"#,
        142_774_373_888,
    ),
    // ERNIE 4.5 0.3B.
    (
        r#"{"model_type": "ernie4_5", "hidden_size": 1024, "intermediate_size": 3072,
           "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2,
           "vocab_size": 103424, "head_dim": 128}"#,
        360_748_032,
    ),
    // ERNIE 4.5 21B-A3B, without its corrections of scores, which have no gradients.
    (
        r#"{"model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288,
           "moe_intermediate_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 20,
           "num_key_value_heads": 4, "moe_num_experts": 64, "moe_k": 6, "vocab_size": 103424}"#,
        21_825_436_160,
    ),
    // EXAONE 4 1.2B.
    (
        r#"{"model_type": "exaone4", "hidden_size": 2048, "intermediate_size": 4096,
           "num_hidden_layers": 30, "num_attention_heads": 32, "num_key_value_heads": 8,
           "vocab_size": 102400, "head_dim": 64, "tie_word_embeddings": true, "sliding_window":
           null}"#,
        1_279_391_488,
    ),
    // Falcon 40B.
    (
        r#"{"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60,
           "num_attention_heads": 128, "num_kv_heads": 8, "vocab_size": 65024,
           "new_decoder_architecture": true}"#,
        41_303_293_952,
    ),
    // Falcon 7B.
    (
        r#"{"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
           "num_attention_heads": 71, "vocab_size": 65024, "multi_query": true, "parallel_attn":
           true}"#,
        6_921_720_704,
    ),
    // FlexOlmo 7x7B.
    (
        r#"{"model_type": "flex_olmo", "hidden_size": 4096, "intermediate_size": 11008,
           "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
           "num_experts": 7, "num_experts_per_tok": 5, "vocab_size": 100352}"#,
        33_270_665_216,
    ),
    // Gemma 2B.
    (
        r#"{"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "head_dim":
           256, "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1,
           "vocab_size": 256000}"#,
        2_506_172_416,
    ),
    // Gemma 2 2B.
    (
        r#"{"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216,
           "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
           "vocab_size": 256000, "head_dim": 256}"#,
        2_614_341_888,
    ),
    // Gemma 3 1B.
    (
        r#"{"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912,
           "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
           "vocab_size": 262144, "head_dim": 256}"#,
        999_885_952,
    ),
    // GLM-4 9B.
    (
        r#"{"model_type": "glm", "hidden_size": 4096, "intermediate_size": 13696,
           "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2,
           "vocab_size": 151552, "head_dim": 128}"#,
        9_399_951_360,
    ),
    // GLM-4 9B 0414.
    (
        r#"{"model_type": "glm4", "hidden_size": 4096, "intermediate_size": 13696,
           "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2,
           "vocab_size": 151552, "head_dim": 128, "attention_bias": false}"#,
        9_400_094_720,
    ),
    // GLM 4.5 Air.
    (
        r#"{"model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944,
           "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96,
           "num_key_value_heads": 8, "head_dim": 128, "attention_bias": true, "n_routed_experts":
           128, "vocab_size": 151552}"#,
        106_852_245_504,
    ),
    // GPT-2.
    (r#"{"model_type": "gpt2"}"#, 124_439_808),
    // StarCoderBase 1B.
    (
        r#"{"model_type": "gpt_bigcode", "n_embd": 2048, "n_layer": 24, "n_head": 16, "n_inner":
           8192, "n_positions": 8192, "vocab_size": 49152}"#,
        1_137_207_296,
    ),
    // GPT-Neo 125M.
    (
        r#"{"model_type": "gpt_neo", "hidden_size": 768, "num_heads": 12, "num_layers": 12,
           "attention_types": [[["global", "local"], 6]], "vocab_size": 50257}"#,
        125_198_592,
    ),
    // Pythia 1.4B.
    (
        r#"{"model_type": "gpt_neox", "hidden_size": 2048, "intermediate_size": 8192,
           "num_attention_heads": 16, "num_hidden_layers": 24, "rotary_pct": 0.25,
           "rotary_emb_base": 10000, "vocab_size": 50304}"#,
        1_414_647_808,
    ),
    // gpt-oss-20b.
    (
        r#"{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
           "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
           "num_local_experts": 32, "vocab_size": 201088}"#,
        20_914_757_184,
    ),
    // gpt-oss-120b.
    (
        r#"{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
           "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
           "num_local_experts": 128, "vocab_size": 201088}"#,
        116_829_156_672,
    ),
    // GPT-J 6B.
    (
        r#"{"model_type": "gptj", "vocab_size": 50400}"#,
        6_050_882_784,
    ),
    // Granite 3.1 2B.
    (
        r#"{"model_type": "granite", "hidden_size": 2048, "intermediate_size": 8192,
           "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
           "vocab_size": 49155, "tie_word_embeddings": true, "attention_multiplier": 0.015625,
           "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}"#,
        2_533_531_648,
    ),
    // Granite 3.1 3B-A800M.
    (
        r#"{"model_type": "granitemoe", "hidden_size": 1536, "intermediate_size": 512,
           "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8,
           "num_local_experts": 40, "num_experts_per_tok": 8, "tie_word_embeddings": true,
           "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier":
           0.22, "logits_scaling": 6.0, "vocab_size": 49155}"#,
        3_298_793_472,
    ),
    // Helium 1 2B.
    (
        r#"{"model_type": "helium", "hidden_size": 2560, "intermediate_size": 7040,
           "num_hidden_layers": 24, "num_attention_heads": 20, "num_key_value_heads": 20,
           "vocab_size": 48000, "head_dim": 128}"#,
        2_172_643_840,
    ),
    // Hunyuan 0.5B.
    (
        r#"{"model_type": "hunyuan_v1_dense", "hidden_size": 1024, "intermediate_size": 3584,
           "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8,
           "vocab_size": 120818, "head_dim": 128, "tie_word_embeddings": true}"#,
        539_010_048,
    ),
    // Hunyuan A13B.
    (
        r#"{"model_type": "hunyuan_v1_moe", "hidden_size": 4096, "intermediate_size": 3072,
           "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "head_dim": 128, "num_experts": 64, "moe_topk": 8, "tie_word_embeddings": true,
           "vocab_size": 128167}"#,
        80_393_183_232,
    ),
    // HyperCLOVA X SEED 14B.
    (
        r#"{"model_type": "hyperclovax", "hidden_size": 6144, "intermediate_size": 14336,
           "num_hidden_layers": 38, "num_attention_heads": 48, "num_key_value_heads": 8,
           "vocab_size": 110592, "head_dim": 128}"#,
        14_748_112_896,
    ),
    // Jais 2 8B.
    (
        r#"{"model_type": "jais2", "hidden_size": 3328, "intermediate_size": 26624,
           "num_hidden_layers": 32, "num_attention_heads": 26, "num_key_value_heads": 26,
           "vocab_size": 150272}"#,
        8_090_401_280,
    ),
    // Llama 3.1 8B.
    (
        r#"{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
           "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
           "rope_theta": 500000.0, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type":
           "llama3"}, "tie_word_embeddings": false, "vocab_size": 128256}"#,
        8_030_261_248,
    ),
    // MiniMax M2.
    (
        r#"{"model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536,
           "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
           "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": 64,
           "vocab_size": 200064}"#,
        228_689_748_992,
    ),
    // Ministral 8B.
    (
        r#"{"model_type": "ministral", "hidden_size": 4096, "intermediate_size": 12288,
           "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
           "vocab_size": 131072, "head_dim": 128}"#,
        8_019_808_256,
    ),
    // Mistral 7B.
    (
        r#"{"model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32,
           "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8,
           "sliding_window": 4096, "tie_word_embeddings": false, "vocab_size": 32000}"#,
        7_241_732_096,
    ),
    // Mixtral 8x7B.
    (
        r#"{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
           "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}"#,
        46_702_792_704,
    ),
    // MPT 7B.
    (
        r#"{"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size":
           50432}"#,
        6_649_286_656,
    ),
    // nanochat d20.
    (
        r#"{"model_type": "nanochat", "hidden_size": 1280, "intermediate_size": 5120,
           "num_hidden_layers": 20, "num_attention_heads": 10, "num_key_value_heads": 10,
           "vocab_size": 65536}"#,
        560_988_160,
    ),
    // Minitron 4B.
    (
        r#"{"model_type": "nemotron", "hidden_size": 3072, "intermediate_size": 9216,
           "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8,
           "vocab_size": 256000, "head_dim": 128}"#,
        4_190_509_056,
    ),
    // OLMo 1B.
    (
        r#"{"model_type": "olmo", "hidden_size": 2048, "intermediate_size": 8192,
           "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
           "vocab_size": 50304, "tie_word_embeddings": true}"#,
        1_176_764_416,
    ),
    // OLMo 2 1B.
    (
        r#"{"model_type": "olmo2", "hidden_size": 2048, "intermediate_size": 8192,
           "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
           "vocab_size": 100352}"#,
        1_484_916_736,
    ),
    // Olmo 3 7B.
    (
        r#"{"model_type": "olmo3", "hidden_size": 4096, "intermediate_size": 11008,
           "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
           "vocab_size": 100278}"#,
        7_298_011_136,
    ),
    // OLMoE 1B-7B.
    (
        r#"{"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024,
           "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
           "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 50304}"#,
        6_919_161_856,
    ),
    // OPT 125M.
    (
        r#"{"model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12,
           "num_attention_heads": 12, "vocab_size": 50272, "word_embed_proj_dim": 768}"#,
        125_239_296,
    ),
    // Persimmon 8B.
    (
        r#"{"model_type": "persimmon", "hidden_size": 4096, "intermediate_size": 16384,
           "num_hidden_layers": 36, "num_attention_heads": 64, "vocab_size": 262144}"#,
        9_397_175_296,
    ),
    // Phi-2.
    (
        r#"{"model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240,
           "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
           "vocab_size": 51200, "partial_rotary_factor": 0.4}"#,
        2_779_683_840,
    ),
    // Phi 3 mini.
    (
        r#"{"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
           "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
           "tie_word_embeddings": false, "vocab_size": 32064}"#,
        3_821_079_552,
    ),
    // Qwen 2.5 7B.
    (
        r#"{"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
           "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
           "rope_theta": 1000000.0, "tie_word_embeddings": false, "use_sliding_window": false,
           "vocab_size": 152064}"#,
        7_615_616_512,
    ),
    // Qwen 1.5 MoE A2.7B.
    (
        r#"{"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632,
           "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
           "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
           "num_experts": 60, "num_experts_per_tok": 4, "vocab_size": 151936}"#,
        14_315_784_192,
    ),
    // Qwen 3 0.6B.
    (
        r#"{"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "head_dim":
           128, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
           "tie_word_embeddings": true, "vocab_size": 151936}"#,
        596_049_920,
    ),
    // Qwen 3 30B-A3B.
    (
        r#"{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
           "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
           "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
           "norm_topk_prob": true, "vocab_size": 151936}"#,
        30_532_122_624,
    ),
    // Seed-OSS 36B.
    (
        r#"{"model_type": "seed_oss", "hidden_size": 5120, "intermediate_size": 27648,
           "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8,
           "vocab_size": 155136, "head_dim": 128}"#,
        36_151_104_512,
    ),
    // SmolLM3 3B.
    (
        r#"{"model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008,
           "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
           "vocab_size": 128256}"#,
        3_075_098_624,
    ),
    // Solar Open 100B.
    (
        r#"{"model_type": "solar_open", "hidden_size": 4096, "moe_intermediate_size": 1280,
           "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8,
           "head_dim": 128, "n_routed_experts": 128, "num_experts_per_tok": 8, "vocab_size":
           196608}"#,
        102_651_793_408,
    ),
    // StableLM 2 1.6B.
    (
        r#"{"model_type": "stablelm", "hidden_size": 2048, "intermediate_size": 5632,
           "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 32,
           "vocab_size": 100352, "use_qkv_bias": true, "partial_rotary_factor": 0.25}"#,
        1_644_515_328,
    ),
    // StarCoder2 3B.
    (
        r#"{"model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288,
           "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2,
           "vocab_size": 49152, "sliding_window": 4096}"#,
        3_030_371_328,
    ),
    // VaultGemma 1B.
    (
        r#"{"model_type": "vaultgemma", "hidden_size": 1152, "intermediate_size": 6912,
           "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 4,
           "vocab_size": 256000, "head_dim": 256}"#,
        1_038_741_120,
    ),
];

#[test]
fn published_models_have_their_parameters() {
    let options = lighterage_config::Options {
        dims: BTreeMap::from([("sequence".to_string(), 8)]),
        ..Default::default()
    };
    for (text, wanted) in PUBLISHED {
        let model = lighterage_config::parse(text, &options).unwrap();
        let findings = ir::verify::graph(&model.graph);
        assert!(findings.is_empty(), "{findings:?}");
        let states = model.graph.states.values();
        let found: u64 = states
            .filter(|state| state.kind == StateKind::Param)
            .map(|state| model.graph.values[state.before].ty.numel())
            .sum();
        assert_eq!(found, *wanted, "{text}");
    }
}

/// Each family has a model here.
#[test]
fn each_family_is_published() {
    for family in lighterage_config::families() {
        let name = format!("\"model_type\": \"{family}\"");
        assert!(
            PUBLISHED.iter().any(|(text, _)| text.contains(&name)),
            "{family}"
        );
    }
}
