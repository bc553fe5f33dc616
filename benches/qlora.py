"""Train adapters of a LLaMA of 30M parameters over a base in bf16 and over the same base in NF4.

usage: PYTHONPATH=frontends/python/python qlora.py [--pretrain 600] [--steps 300] [--batch 4] [--sequence 32]

The base is trained first, in f32 on the first half of the GPT-2 example's text, and rounded to bf16. Adapters are
trained on the second half. Losses are means over the last tenth of the steps. Bytes are those of base, adapters,
gradients of adapters and moments, beside 0.82 of the base's parameters. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lighterage.export import export_joint, save
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[1]
FILES = ROOT / "target/bench/qlora"
LIGHTERAGE = ROOT / "target/release/lighterage"
EXAMPLE = runpy.run_path(str(ROOT / "examples/lora/export.py"))


def run(*options: str) -> str:
    """The output of the command."""
    result = subprocess.run([str(LIGHTERAGE), *options], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"lighterage {' '.join(options)}\nfailed with {result.returncode}:\n{result.stderr}")
    return result.stdout


def base_model(layers: int, width: int) -> LlamaForCausalLM:
    """A LLaMA over bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def export(model: nn.Module, file: Path, ids: torch.Tensor, weights: bool) -> None:
    """Write the step of a model."""
    step = export_joint(EXAMPLE["Loss"](model), (ids,), level="coarse", attention="fused")
    save(step, file, weights=weights)


def losses(lines: str, steps: int) -> float:
    """The mean loss of the last tenth of a run."""
    found = [json.loads(line) for line in lines.splitlines() if '"step"' in line]
    last = [line["loss"] for line in found if "loss" in line][-max(steps // 10, 1) :]
    return sum(last) / len(last)


def tensors(file: Path) -> dict[str, Any]:
    """The header of a safetensors file."""
    with file.open("rb") as stream:
        header: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return header


def stored(file: Path) -> tuple[int, int]:
    """The bytes of a file's states, and those of the gradients of its adapters."""
    states = gradients = 0
    for name, tensor in tensors(file).items():
        if name == "__metadata__" or name.startswith("optimizer."):
            continue
        start, end = tensor["data_offsets"]
        states += end - start
        gradients += end - start if ".lora_" in name and not name.startswith("exp_avg") else 0
    return states, gradients


def main() -> None:
    """Read the arguments, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"pretrain": 600, "steps": 300, "batch": 4, "sequence": 32, "layers": 9, "width": 512, "rank": 6}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()

    FILES.mkdir(parents=True, exist_ok=True)
    text = np.frombuffer((ROOT / "examples/gpt2/text.txt").read_bytes(), dtype=np.uint8)
    halves = [FILES / "first.npy", FILES / "second.npy"]
    for file, half in zip(halves, (text[: len(text) // 2], text[len(text) // 2 :]), strict=True):
        np.save(file, half)
    ids = torch.zeros(args.batch, args.sequence, dtype=torch.long)
    common = ["--optimizer", "adamw", "--shuffle-data", "--json", "--tokens"]

    base = base_model(args.layers, args.width)
    n = sum(p.numel() for p in base.parameters())
    export(base, FILES / "base.pt2", ids, weights=True)
    options = ["--lr", "3e-4", "--warmup", "50", "--schedule", "cosine", "--steps", str(args.pretrain)]
    lines = run("train", str(FILES / "base.pt2"), *common, str(halves[0]), *options, "--save", str(FILES / "base.st"))
    print(f"{n / 1e6:.1f}M parameters; the base's loss after {args.pretrain} steps: {losses(lines, args.pretrain):.4f}")
    weights = {name.removeprefix("model."): value for name, value in load_file(FILES / "base.st").items()}
    base.load_state_dict({name: weights[name] for name in base.state_dict() if name in weights}, strict=False)

    adapters = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=EXAMPLE["TARGETS"])
    rounded: Any = base.to(torch.bfloat16)  # type: ignore[arg-type]
    model = get_peft_model(rounded, adapters)
    n_adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(
        f"adapters: {100 * n_adapters / n:.2f} % of them; {args.steps} steps of {args.batch} x {args.sequence} tokens"
    )
    export(model, FILES / "lora.pt2", ids, weights=True)
    print("\n| base | mean loss of the last steps | of the first one's | bytes | of the base's parameters |")
    print("|---|---|---|---|---|", flush=True)
    first = 0.0
    for kind in ("whole", "nf4"):
        file = FILES / f"{kind}.st"
        options = ["--base", kind, "--lr", "1e-3", "--steps", str(args.steps), "--save", str(file)]
        loss = losses(run("train", str(FILES / "lora.pt2"), *common, str(halves[1]), *options), args.steps)
        first = first or loss
        total = sum(stored(file))
        print(f"| {kind} | {loss:.4f} | {100 * loss / first:.2f} % | {total} | {total / n:.3f} |", flush=True)


if __name__ == "__main__":
    main()
