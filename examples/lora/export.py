"""Export a LLaMA with LoRA adapters of PEFT: lora.pt2, the adapters' folder, and batches of the GPT-2 example's text.

usage: export.py [--out FOLDER] [--layers 2] [--width 64] [--rank 4] [--dtype bfloat16] [--sequence 64] [--batch 4]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from lighterage.export import export_joint, save
from peft import LoraConfig, get_peft_model
from safetensors.numpy import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

TEXT = Path(__file__).parent.parent / "gpt2/text.txt"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Loss(nn.Module):
    """The model's loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: [batch, sequence], bytes."""
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        return loss


def adapted(layers: int, width: int, rank: int, dtype: torch.dtype) -> nn.Module:
    """A LLaMA over bytes whose weights are frozen, with adapters in f32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    base = LlamaForCausalLM(config).to(dtype)
    return get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS))


def main() -> None:
    """Read the arguments and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    for name, default in {"layers": 2, "width": 64, "rank": 4, "sequence": 64, "batch": 4, "batches": 40}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()

    model = adapted(args.layers, args.width, args.rank, getattr(torch, args.dtype))
    args.out.mkdir(exist_ok=True, parents=True)
    model.save_pretrained(str(args.out / "adapters"))
    text = np.frombuffer(TEXT.read_bytes(), dtype=np.uint8).astype(np.int64)
    n = args.batch * args.sequence
    batches = {f"batch.{k}.input_ids": text[k * n : (k + 1) * n].reshape(args.batch, -1) for k in range(args.batches)}
    save_file(batches, args.out / "batches.safetensors")
    ids = torch.from_numpy(batches["batch.0.input_ids"])
    save(export_joint(Loss(model), (ids,), level="coarse", attention="fused"), args.out / "lora.pt2")


if __name__ == "__main__":
    main()
