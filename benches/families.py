"""Models of many families for benches/coverage.py, as small as their structure allows, with random weights.

Each is a function that builds a `Case`. Dropout is off, except in the cases that are named for it: the masks of
PyTorch's generator are not those of a step.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]

VOCABULARY, ROWS, LENGTH, CLASSES = 96, 2, 16, 5


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, a batch for it, and what computes the loss of both unless the model does."""

    model: nn.Module
    batch: Batch
    loss: Callable[..., torch.Tensor] | None = None
    is_random: bool = False  # another generator draws other numbers

    def loss_of(self, model: Any) -> torch.Tensor:
        """The loss of the batch. model: that of the case, or what was made of it."""
        if self.loss is not None:
            return self.loss(model, **self.batch)
        result = model(**self.batch)
        return result if isinstance(result, torch.Tensor) else result.loss


CASES: dict[str, Callable[[], Case]] = {}


def case(name: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Add a case under this name."""

    def add(build: Callable[[], Case]) -> Callable[[], Case]:
        CASES[name] = build
        return build

    return add


def library(name: str) -> Any:
    """A library that is imported when a case needs it."""
    return importlib.import_module(name)


# Batches -------------------------------------------------------------------------------------------------------------


def integers(shape: tuple[int, ...], low: int = 3, high: int = VOCABULARY, seed: int = 1) -> torch.Tensor:
    """Random integers in [low, high)."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def normal(*shape: int, seed: int = 2) -> torch.Tensor:
    """Random numbers around 0."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(labels: tuple[int, ...] = (ROWS, LENGTH)) -> Batch:
    """Symbols with a label for each, or labels of another shape."""
    return {"input_ids": integers((ROWS, LENGTH)), "labels": integers(labels, seed=3)}


def padded(batch: Batch) -> Batch:
    """The same with a shorter second row."""
    mask, labels = torch.ones_like(batch["input_ids"]), batch["labels"].clone()
    mask[1, 10:], labels[1, 10:] = 0, -100
    return {**batch, "attention_mask": mask, "labels": labels}


def pixels(size: int = 16) -> Batch:
    """Images with a class for each."""
    return {"pixel_values": normal(ROWS, 3, size, size), "labels": torch.tensor([0, 4])}


# Language models of transformers -------------------------------------------------------------------------------------

# The sizes by the names that most configurations have.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
CAUSAL: dict[str, Any] = {
    **SIZES,
    "attention_dropout": 0.0,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ENCODER: dict[str, Any] = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {"num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def transformer(model: str, config: str, **sizes: Any) -> nn.Module:
    """A model of transformers by the names of its classes."""
    transformers = library("transformers")
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    return made


def causal(family: str, config: str | None = None, **sizes: Any) -> Case:
    """A model that predicts the next symbol, by the name of its family."""
    model = transformer(f"{family}ForCausalLM", config or f"{family}Config", **{**CAUSAL, **sizes})
    return Case(model, tokens())


def mixture(family: str, **sizes: Any) -> Case:
    """The same with experts. Tokens are sorted by expert: a product of groups of rows."""
    made = causal(family, **sizes)
    made.model.set_experts_implementation("grouped_mm")  # type: ignore[operator]
    return made


def masked(family: str, **sizes: Any) -> Case:
    """A model that predicts hidden symbols."""
    return Case(transformer(f"{family}ForMaskedLM", f"{family}Config", **{**ENCODER, **sizes}), tokens())


@case("recurrent_gemma")
def _() -> Case:
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 8, "lru_width": 32}
    made = causal("RecurrentGemma", **sizes, attention_window_size=8)
    return dataclasses.replace(made, loss=stateless_loss)


def stateless_loss(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
    """The loss of a model that keeps states for generation in attributes. Training starts without them each time."""
    loss: torch.Tensor = model(**batch).loss
    for module in model.modules():
        for name in ("recurrent_states", "conv1d_state"):
            if hasattr(module, name):
                setattr(module, name, None)
    return loss


def add_families(build: Callable[..., Case], families: dict[str, tuple[str, dict[str, Any]]]) -> None:
    """Add a case for each name: what `build` makes of a family and its sizes."""

    def later(family: str, sizes: dict[str, Any]) -> Callable[[], Case]:
        return lambda: build(family, **sizes)

    for name, (family, sizes) in families.items():
        CASES[name] = later(family, sizes)


@case("gpt2")
def _() -> Case:
    return Case(transformer("GPT2LMHeadModel", "GPT2Config", **GPT2, **WITHOUT_DROPOUT, use_cache=False), tokens())


@case("gpt2-dropout")
def _() -> Case:
    model = transformer("GPT2LMHeadModel", "GPT2Config", **GPT2, use_cache=False)
    return Case(model, tokens(), is_random=True)


@case("gpt2-masked")
def _() -> Case:
    made = CASES["gpt2"]()
    return dataclasses.replace(made, batch=padded(made.batch))


@case("llama-masked")
def _() -> Case:
    made = CASES["llama"]()
    return dataclasses.replace(made, batch=padded(made.batch))


@case("llama-bf16")
def _() -> Case:
    made = CASES["llama"]()
    return dataclasses.replace(made, model=made.model.bfloat16())


@case("llama-gc")
def _() -> Case:
    made = CASES["llama"]()
    made.model.gradient_checkpointing_enable()  # type: ignore[operator]
    return made


SLIDING = {**GROUPED, "sliding_window": 8}
NARROW = {**SLIDING, "head_dim": 8}
LATENT = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "first_k_dense_replace": 1,
}
CAUSAL_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 8}),
    "mistral": ("Mistral", SLIDING),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 8}),
    "gemma2": ("Gemma2", NARROW),
    "gemma3": ("Gemma3", {**NARROW, "config": "Gemma3TextConfig"}),
    "phi": ("Phi", {"resid_pdrop": 0.0}),
    "phi3": ("Phi3", GROUPED),
    "gpt_neox": ("GPTNeoX", {"hidden_dropout": 0.0}),
    "olmo2": ("Olmo2", GROUPED),
    "granite": ("Granite", GROUPED),
    "cohere": ("Cohere", GROUPED),
    "starcoder2": ("Starcoder2", {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "stablelm": ("StableLm", GROUPED),
    "smollm3": ("SmolLM3", GROUPED),
    "glm4": ("Glm4", {**GROUPED, "head_dim": 8}),
    "llama4": (
        "Llama4",
        {
            **GROUPED,
            "config": "Llama4TextConfig",
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": 8,
        },
    ),
    "lfm2": ("Lfm2", {**GROUPED, "layer_types": ["conv", "full_attention"]}),
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("GptOss", {**NARROW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 8}),
    "olmoe": ("Olmoe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "num_key_value_heads": 4, "moe_intermediate_size": 32}),
    "jamba": (
        "Jamba",
        {
            **GROUPED,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
        },
    ),
}
add_families(causal, CAUSAL_FAMILIES)
add_families(mixture, MIXTURES)

# Those whose configurations have names of their own: model, configuration, sizes.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "max_position_embeddings": 64,
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**GPT2, **WITHOUT_DROPOUT, "rotary_dim": 8}),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {**SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0, "new_decoder_architecture": False},
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0},
    ),
    "mpt": ("MptForCausalLM", "MptConfig", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "rwkv": (
        "RwkvForCausalLM",
        "RwkvConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "context_length": 64},
    ),
}


def _other(model: str, config: str, sizes: dict[str, Any]) -> Callable[[], Case]:
    return lambda: Case(transformer(model, config, **{"vocab_size": VOCABULARY, **sizes}, use_cache=False), tokens())


for _name, _other_sizes in OTHERS.items():
    CASES[_name] = _other(*_other_sizes)

MASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"pad_token_id": 1}),
    "albert": ("Albert", {"embedding_size": 16}),
    "electra": ("Electra", {"embedding_size": 16}),
    "deberta_v2": (
        "DebertaV2",
        {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
    ),
    "modernbert": (
        "ModernBert",
        {
            "attn_implementation": "sdpa",
            "reference_compile": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
        },
    ),
}
add_families(masked, MASKED)


@case("bert-masked")
def _() -> Case:
    made = CASES["bert"]()
    return dataclasses.replace(made, batch=padded(made.batch))


@case("bert-cls")
def _() -> Case:
    sizes = {**ENCODER, "num_labels": 3, "problem_type": "single_label_classification"}
    model = transformer("BertForSequenceClassification", "BertConfig", **sizes)
    return Case(model, {"input_ids": integers((ROWS, LENGTH)), "labels": torch.tensor([0, 2])})


@case("distilbert")
def _() -> Case:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "dropout": 0.0, "attention_dropout": 0.0}
    return Case(transformer("DistilBertForMaskedLM", "DistilBertConfig", vocab_size=VOCABULARY, **sizes), tokens())


@case("xlnet")
def _() -> Case:
    sizes = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "dropout": 0.0, "use_mems_train": False}
    return Case(transformer("XLNetLMHeadModel", "XLNetConfig", vocab_size=VOCABULARY, **sizes), tokens())


T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "use_cache": False,
    "decoder_start_token_id": 0,
}
SEQUENCES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dropout": 0.0,
    "use_cache": False,
}


@case("t5")
def _() -> Case:
    return Case(transformer("T5ForConditionalGeneration", "T5Config", **T5), tokens((ROWS, 10)))


@case("t5-gated")
def _() -> Case:
    sizes = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return Case(transformer("T5ForConditionalGeneration", "T5Config", **sizes), tokens((ROWS, 10)))


@case("bart")
def _() -> Case:
    sizes = {**SEQUENCES, "max_position_embeddings": 64, "attention_dropout": 0.0}
    return Case(transformer("BartForConditionalGeneration", "BartConfig", **sizes), tokens((ROWS, 10)))


@case("whisper")
def _() -> Case:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
    sizes = {**SEQUENCES, **special, **lengths, "suppress_tokens": None, "begin_suppress_tokens": None}
    model = transformer("WhisperForConditionalGeneration", "WhisperConfig", **sizes)
    return Case(model, {"input_features": normal(ROWS, 8, 32), "labels": integers((ROWS, 10), seed=3)})


def _autocast(name: str) -> Callable[[], Case]:
    return lambda: autocast(CASES[name]())


def autocast(made: Case) -> Case:
    """A case whose forward runs in bfloat16 where PyTorch thinks it safe."""

    def loss(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return dataclasses.replace(made, batch=batch).loss_of(model)

    return dataclasses.replace(made, loss=loss)


for _name in ("gpt2", "llama", "vit", "bert", "t5", "unet2d", "qwen2", "mistral"):
    CASES[f"{_name}-ac"] = _autocast(_name)


@case("lora-llama")
def _() -> Case:
    peft = library("peft")
    made = CASES["llama"]()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(made.model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)  # zeros would hide wrong gradients
    return dataclasses.replace(made, model=model)


@case("frozen-llama")
def _() -> Case:
    made = CASES["llama"]()
    for name, parameter in made.model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    return made
