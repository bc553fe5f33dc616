"""Write the fixtures tests/data/config: small models of the families that a config.json can stand for.

usage: configurations.py [--out tests/data/config] [--defaults frontends/config/src/defaults.json] [FAMILY ..]

Each folder has what is published, config.json and model.safetensors, and reference.safetensors: batches, and the loss
of eager PyTorch before each of a few AdamW steps. packed.safetensors is the same for rows of two documents, the folder
adapters for adapters of PEFT, and dropout.safetensors for dropout.json, which asks for dropout: PyTorch then drops the
elements that Lighterage drops. The file of defaults says what the families' classes take for settings that a
config.json lacks.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ROOT = Path(__file__).parents[3]
STEPS, BATCH, SEQUENCE, VOCABULARY = 4, 2, 12, 37
# Packed rows are two documents: where the second one begins.
PACKED_STEPS, CUT = 2, 5
LLAMA = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "original_max_position_embeddings": 16,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0],
}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
SIX = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
ALTERNATING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
GPT = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64, **NO_DROPOUT}
PAD = {"pad_token_id": 0}
ROUTED = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "pad_token_id": None,
    "num_experts_per_tok": 2,
}
MIXED = {**ROUTED, "moe_intermediate_size": 8}
# Of two groups of three experts a token has one.
GROUPS = {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
NARROW = {
    **MIXED,
    "num_key_value_heads": 2,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
DEEP = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {**LLAMA, **PAD},
    "arcee": {**LLAMA, "mlp_bias": True, "rope_parameters": YARN},
    "bloom": {"hidden_size": 18, "n_layer": 2, "n_head": 6},
    "codegen": {**GPT, "n_inner": 40, "n_head": 4, "rotary_dim": 4},
    "cohere": {**LLAMA, **PAD, "use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": {**LLAMA, **PAD, **ALTERNATING, "attention_bias": True, "logit_scale": 1.0},
    "cwm": {**LLAMA, **ALTERNATING, "head_dim": 8, "bos_token_id": 1, "rope_parameters": LLAMA3},
    "deepseek_v2": {
        **NARROW,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "group_limited_greedy",
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {**NARROW, **GROUPS, "q_lora_rank": 10, "first_k_dense_replace": 1, "rope_parameters": DEEP},
    "dots1": {**MIXED, **GROUPS, **ALTERNATING},
    "ernie4_5": {**LLAMA, **PAD, "head_dim": 8, "use_bias": True},
    "ernie4_5_moe": {**MIXED, "use_bias": True, "moe_num_experts": 5, "moe_num_shared_experts": 2},
    "exaone4": {**LLAMA, **ALTERNATING},
    "falcon": {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 40,
        "new_decoder_architecture": True,
        "bias": True,
    },
    "flex_olmo": {**ROUTED, "num_experts": 4},
    "gemma": {**LLAMA, "head_dim": 8},
    "gemma2": {
        **LLAMA,
        **PAD,
        "head_dim": 8,
        "sliding_window": 5,
        "query_pre_attn_scalar": 6,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**LLAMA, **PAD, **ALTERNATING, "head_dim": 8, "query_pre_attn_scalar": 6},
    "glm": {**LLAMA, **PAD, "head_dim": 8},
    "glm4": {**LLAMA, **PAD, "head_dim": 8, "attention_bias": False},
    "glm4_moe": {**MIXED, **GROUPS, "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1},
    "gpt2": GPT,
    "gpt_bigcode": {**GPT, "n_inner": 40},
    "gpt_neo": {
        "hidden_size": 24,
        "num_layers": 2,
        "num_heads": 3,
        "intermediate_size": 40,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 5,
        "max_position_embeddings": 64,
    },
    "gpt_neox": {**SIX, "hidden_dropout": 0.0, "rotary_pct": 0.5, "num_attention_heads": 2},
    "gptj": {**GPT, "n_inner": 40, "rotary_dim": 4},
    "gpt_oss": {
        **ROUTED,
        "hidden_size": 32,
        "intermediate_size": 32,
        "head_dim": 8,
        "num_local_experts": 4,
        "sliding_window": 5,
        "swiglu_limit": 0.05,
    },
    "granite": {
        **LLAMA,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "granitemoe": {
        **ROUTED,
        "num_local_experts": 4,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "helium": {**LLAMA, **PAD, "head_dim": 6},
    "hunyuan_v1_dense": {
        **LLAMA,
        **PAD,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 10.0, "factor": 1.0},
    },
    "hunyuan_v1_moe": {
        **{key: value for key, value in ROUTED.items() if key != "num_experts_per_tok"},
        "head_dim": 8,
        "num_experts": 4,
        "moe_topk": 2,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 10.0, "factor": 1.0},
    },
    "hyperclovax": {
        **LLAMA,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 0.5,
    },
    "jais2": LLAMA,
    "llama": {**LLAMA, "rope_parameters": LLAMA3},
    "minimax_m2": {**ROUTED, "head_dim": 8, "num_local_experts": 5, "rotary_dim": 4},
    "ministral": {**LLAMA, **ALTERNATING, "head_dim": 8},
    "mistral": {**LLAMA, "sliding_window": 5},
    "mixtral": {**ROUTED, "num_local_experts": 4, "sliding_window": 5},
    "mpt": {"d_model": 18, "n_layers": 2, "n_heads": 6, "max_seq_len": 64, "attn_config": {"clip_qkv": 0.3}},
    "nanochat": {**LLAMA, **PAD},
    "nemotron": {**LLAMA, "num_attention_heads": 2},
    "olmo": {**LLAMA, **PAD, "clip_qkv": 0.3},
    "olmo2": {**LLAMA, **PAD},
    "olmo3": {
        **LLAMA,
        **PAD,
        **ALTERNATING,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}},
    },
    "olmoe": {**ROUTED, "num_experts": 4, "clip_qkv": 0.3},
    "opt": {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "ffn_dim": 40,
        "max_position_embeddings": 64,
        "dropout": 0.0,
    },
    "persimmon": {**SIX, "num_attention_heads": 2},
    "phi": {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3, "qk_layernorm": True},
    "phi3": {
        **LLAMA,
        **PAD,
        "num_attention_heads": 6,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "original_max_position_embeddings": 8,
        "rope_parameters": LONG,
    },
    "qwen2": {**LLAMA, "tie_word_embeddings": True},
    "qwen2_moe": {
        **MIXED,
        "num_experts": 4,
        "shared_expert_intermediate_size": 10,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 5,
    },
    "qwen3": {**LLAMA, "head_dim": 8},
    "qwen3_moe": {**MIXED, "head_dim": 6, "num_experts": 4, "decoder_sparse_step": 2, "norm_topk_prob": True},
    "seed_oss": {
        **LLAMA,
        **PAD,
        "head_dim": 8,
        "intermediate_size": 32,
        "attention_out_bias": True,
        "residual_dropout": 0.0,
    },
    "smollm3": {**LLAMA, **PAD, "no_rope_layer_interval": 2},
    "solar_open": {**{key: MIXED[key] for key in MIXED if key != "intermediate_size"}, **GROUPS, "head_dim": 8},
    "stablelm": {
        **LLAMA,
        "head_dim": None,
        "partial_rotary_factor": 0.5,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "use_qkv_bias": True,
        "qk_layernorm": True,
    },
    "starcoder2": {**LLAMA, "sliding_window": 5},
    "vaultgemma": {
        **LLAMA,
        **PAD,
        "head_dim": 8,
        "sliding_window": 5,
        "query_pre_attn_scalar": 6,
        "attn_logit_softcapping": 2.0,
    },
}
# Families whose weights stay near 0. Those of the others are large, so that attention is sharp.
QUIET = """
    ernie4_5_moe gemma gpt2 gpt_neox gpt_oss helium llama mistral mpt nemotron qwen2 qwen3
""".split()  # noqa: SIM905
# Families whose file is not what transformers saves by default: experts of a layer in one tensor, as in the model; the
# names of a model without its head, as OpenAI's file has them; experts in numbers of 4 bits; matrices of 8 bits.
JOINED, HEADLESS, OF_4_BITS, OF_8_BITS = ("olmoe",), ("gpt2",), ("gpt_oss",), ("deepseek_v3", "qwen3")
# Families with a file of adapters, and the modules that have some.
ADAPTED = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn"]}
# Settings of dropout, with other shares for embeddings and attention than for the rest.
DROPOUT = {
    "embd_pdrop": 0.1,
    "embed_dropout": 0.1,
    "embedding_dropout": 0.1,
    "attn_pdrop": 0.2,
    "attention_dropout": 0.2,
}
DROPOUT |= dict.fromkeys(("dropout", "hidden_dropout", "resid_dropout", "resid_pdrop", "residual_dropout"), 0.3)
# The eager attention of these families drops no weights, and that of the default does.
KEEPS_WEIGHTS = ("falcon",)
# Families that know the longest document of a batch; its rows are not packed.
WHOLE = ("phi3",)
# Settings that change no numbers, or that belong to other classes of a family.
UNUSED = """
    initializer_range init_std init_device use_cache bos_token_id eos_token_id eod_token_id classifier_dropout
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout is_decoder n_ctx
    pretraining_tp slow_but_exact reorder_and_upcast_attn attention_softmax_in_fp32 scale_attention_softmax_in_fp32
""".split()  # noqa: SIM905


def defaults(family: str) -> dict[str, Any]:
    """Return what a family's class takes for settings that a file lacks."""
    kind: Any = CONFIG_MAPPING[family]
    shared = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    fields = [field for field in dataclasses.fields(kind) if field.name not in {*shared, *UNUSED}]
    renamed = kind.attribute_map
    settings = {renamed.get(field.name, field.name): field.default for field in fields}
    config = kind()
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in rope:
        settings["rope_theta"] = rope["rope_theta"]
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        settings["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if rope.get("rope_type", "default") != "default":
        settings["rope_parameters"] = rope
    if renamed:
        settings["attribute_map"] = renamed
    return settings


def fixture(family: str, folder: Path) -> None:
    """Write one family's folder."""
    torch.manual_seed(0)
    settings = {"bos_token_id": None, "eos_token_id": None, **FAMILIES[family]}
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **settings)
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32, experts_implementation="eager")
    noise = 0.05 if family in QUIET else 0.3
    corrections = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for parameter in [*model.parameters(), *corrections]:
            parameter.add_(torch.randn_like(parameter) * noise)
    codes = rounded_to_4_bits(model) if family in OF_4_BITS else {}
    if family in OF_8_BITS:
        round_to_8_bits(model)
    saved = model.base_model if family in HEADLESS else model
    saved.save_pretrained(folder, save_original_format=family not in JOINED)
    if codes:
        file = folder / "model.safetensors"
        kept = {name: tensor for name, tensor in load_file(file).items() if f"{name}_blocks" not in codes}
        save_file({**kept, **codes}, file)
    if family in OF_8_BITS:
        save_8_bits(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    batches = torch.randint(VOCABULARY, (STEPS, BATCH, SEQUENCE))
    inputs = [{"input_ids": batch, "labels": batch} for batch in batches]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = save_steps(model, inputs, lambda batch: model(**batch).loss, folder / "reference.safetensors")
    if family not in WHOLE:
        save_documents(model, weights, folder / "packed.safetensors")
    if family in ADAPTED:
        model.load_state_dict(weights)
        save_adapters(model, ADAPTED[family], inputs, folder / "adapters")
    save_dropped(config, weights, inputs, folder)
    print(family, sum(t.numel() for t in load_file(folder / "model.safetensors").values()), losses)


def rounded_to_4_bits(model: Any) -> dict[str, Tensor]:
    """Give the matrices of experts numbers that 4 bits and a scale of 32 numbers can have; return codes and scales."""
    stored: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = parameter.shape
            codes = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 126, (experts, rows, columns // 32), dtype=torch.uint8)
            with torch.no_grad():
                parameter.copy_(convert_moe_packed_tensors(codes, scales, dtype=torch.float32))
            stored |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    return stored


def in_8_bits(name: str, tensor: Tensor) -> bool:
    """Return whether DeepSeek's and Qwen's published files have numbers of 8 bits for this tensor."""
    return ".layers." in name and tensor.ndim > 1 and not name.endswith("mlp.gate.weight")


def codes_of_8_bits(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, and the scale of the one block that a small matrix has: a power of 2, so that codes are exact."""
    scale = torch.exp2(torch.ceil(torch.log2(matrix.abs().max() / 448)))
    return (matrix / scale).to(torch.float8_e4m3fn), scale.reshape(1, 1)


def round_to_8_bits(model: Any) -> None:
    """Give matrices numbers that 8 bits and a scale can have."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if in_8_bits(name, parameter):
                parts = 2 if name.endswith("gate_up_proj") else 1
                for matrix in parameter.view(-1, parameter.shape[-2] // parts, parameter.shape[-1]):
                    codes, scale = codes_of_8_bits(matrix)
                    matrix.copy_(codes.float() * scale)


def save_8_bits(folder: Path) -> None:
    """Store matrices as codes and scales, as transformers' quantiser of 8 bits does."""
    file = folder / "model.safetensors"
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        if in_8_bits(name, tensor):
            codes, scale = codes_of_8_bits(tensor)
            assert torch.equal(codes.float() * scale, tensor), name
            stored |= {name: codes, f"{name}_scale_inv": scale}
        else:
            stored[name] = tensor
    save_file(stored, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_adapters(model: Any, targets: list[str], batches: list[dict[str, Tensor]], folder: Path) -> None:
    """Write adapters of PEFT, and the losses while they alone are trained."""
    config = LoraConfig(
        r=4, lora_alpha=6, lora_dropout=0.2, target_modules=targets, init_lora_weights=False, use_rslora=True
    )
    adapted: Any = get_peft_model(model, config)
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink()
    save_steps_with_masks(adapted, batches, folder / "reference.safetensors")


def save_dropped(config: Any, weights: dict[str, Tensor], batches: list[dict[str, Tensor]], folder: Path) -> None:
    """Write a configuration with dropout, and its losses."""
    config = copy.deepcopy(config)
    for group in (config, getattr(config, "attn_config", None)):
        for name, share in DROPOUT.items():
            if hasattr(group, name):
                kept = config.model_type in KEEPS_WEIGHTS and name == "attention_dropout"
                # MPT's class takes whole numbers alone.
                vars(group)[name] = 0.0 if kept else share
    (folder / "dropout.json").write_text(json.dumps(config.to_diff_dict(), indent=2, sort_keys=True) + "\n")
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32, experts_implementation="eager", attn_implementation="eager")
    model.load_state_dict(weights)
    model.train()
    save_steps_with_masks(model, batches, folder / "dropout.safetensors")


def save_steps_with_masks(model: Any, batches: list[dict[str, Tensor]], file: Path) -> None:
    """Train, and drop what Lighterage drops: each call of a step has a stream of its own."""
    step, stream = -1, 0

    def dropped(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        nonlocal stream
        if p == 0.0 or not training:
            return x
        words = random_words(x.numel(), stream, step)
        stream += 1
        kept = torch.from_numpy(words >= int(p * 2**32)).reshape(x.shape)
        return x * kept * torch.tensor(1 / (1 - p), dtype=torch.float32)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        nonlocal step, stream
        step, stream = step + 1, 0
        return model(**batch).loss

    with mock.patch("torch.nn.functional.dropout", dropped):
        save_steps(model, batches, loss_of, file)


def random_words(n: int, stream: int, step: int) -> Any:
    """Return words of Philox 4x32-10 with the key 0, as runtime/src/kernels/random.rs makes them."""
    blocks = np.arange(-(-n // 4), dtype=np.uint64)
    counter = [blocks, np.zeros_like(blocks), np.full_like(blocks, stream), np.full_like(blocks, step)]
    key = [0, 0]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        first, second = (b >> np.uint64(32)) ^ counter[1], (a >> np.uint64(32)) ^ counter[3]
        counter = [first ^ np.uint64(key[0]), b & low, second ^ np.uint64(key[1]), a & low]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return np.stack(counter, axis=1).reshape(-1)[:n]


def save_documents(model: Any, weights: dict[str, Tensor], file: Path) -> None:
    """Write packed rows and their losses.

    AdamW's first step magnifies the rounding of gradients near 0. So of a few rows these are the ones whose losses are
    nearest to those in f64.
    """

    def distance(packed: list[dict[str, Tensor]]) -> float:
        losses = []
        for dtype in (torch.float64, torch.float32):
            model.to(dtype).load_state_dict(weights)
            losses.append(save_steps(model, packed, lambda batch: loss_of_documents(model, batch), file))
        return float((losses[0] - losses[1]).abs().max())

    drawn = torch.randint(VOCABULARY, (8, PACKED_STEPS, BATCH, SEQUENCE))
    distance(min(([packed_inputs(batch) for batch in batches] for batches in drawn), key=distance))


def packed_inputs(batch: Tensor) -> dict[str, Tensor]:
    """Let each row be two documents; the first token of a document is no label."""
    places = torch.arange(SEQUENCE).expand_as(batch)
    segments = (places >= CUT).long()
    positions = places - segments * CUT
    labels = batch.masked_fill(positions == 0, -100)
    return {"input_ids": batch, "labels": labels, "position_ids": positions, "segment_ids": segments}


def loss_of_documents(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Run each document alone."""
    logits, labels = [], []
    for document in (slice(CUT), slice(CUT, None)):
        ids = batch["input_ids"][:, document]
        logits.append(model(input_ids=ids).logits[:, :-1].reshape(-1, VOCABULARY))
        labels.append(ids[:, 1:].flatten())
    return torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(labels))


def save_steps(
    model: Any, batches: list[dict[str, Tensor]], loss_of: Callable[[dict[str, Tensor]], Tensor], file: Path
) -> Tensor:
    """Train, and write the batches and the loss before each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    losses = []
    for batch in batches:
        loss = loss_of(batch)
        losses.append(loss.detach())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    named = {f"batch.{i}.{name}": t.clone() for i, batch in enumerate(batches) for name, t in batch.items()}
    save_file({"losses": torch.stack(losses), **named}, file)
    return torch.stack(losses)


def main() -> None:
    """Write all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "tests/data/config")
    parser.add_argument("--defaults", type=Path, default=ROOT / "frontends/config/src/defaults.json")
    parser.add_argument("families", nargs="*", help="all by default")
    options = parser.parse_args()
    out = options.out
    lines = [f"  {json.dumps(family)}: {json.dumps(defaults(family))}" for family in FAMILIES]
    options.defaults.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for family in options.families or FAMILIES:
        (out / family).mkdir(parents=True, exist_ok=True)
        fixture(family, out / family)


if __name__ == "__main__":
    main()
