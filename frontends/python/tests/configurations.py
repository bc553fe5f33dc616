"""Write the fixtures tests/data/config: small models of the families that a config.json can stand for.

usage: configurations.py [--out tests/data/config]

Each folder has what transformers saves, config.json and model.safetensors, and reference.safetensors: batches, and the
loss of eager PyTorch before each of a few AdamW steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parents[3]
STEPS, BATCH, SEQUENCE, VOCABULARY = 4, 2, 12, 37
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
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
NEOX = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {**LLAMA, "head_dim": 8},
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64, **NO_DROPOUT},
    "gpt_neox": {**NEOX, "hidden_dropout": 0.0, "rotary_pct": 0.5, "num_attention_heads": 2},
    "llama": {**LLAMA, "rope_parameters": LLAMA3},
    "mistral": {**LLAMA, "sliding_window": 5},
    "phi3": {**LLAMA, "pad_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "qwen2": {**LLAMA, "tie_word_embeddings": True},
    "qwen3": {**LLAMA, "head_dim": 8},
}


def fixture(family: str, folder: Path) -> None:
    """Write one family's folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, **FAMILIES[family]
    )
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    batches = torch.randint(VOCABULARY, (STEPS, BATCH, SEQUENCE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    losses = []
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tensors = {"losses": torch.stack(losses)}
    for i, batch in enumerate(batches):
        tensors |= {f"batch.{i}.input_ids": batch.clone(), f"batch.{i}.labels": batch.clone()}
    save_file(tensors, folder / "reference.safetensors")
    print(family, sum(t.numel() for t in load_file(folder / "model.safetensors").values()), torch.stack(losses))


def main() -> None:
    """Write all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "tests/data/config")
    out = parser.parse_args().out
    for family in FAMILIES:
        (out / family).mkdir(parents=True, exist_ok=True)
        fixture(family, out / family)


if __name__ == "__main__":
    main()
