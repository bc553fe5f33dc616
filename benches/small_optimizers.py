"""Train a GPT-2 of 10M parameters with AdamW in f32 and with 8-bit moments, and compare losses and bytes.

usage: PYTHONPATH=frontends/python/python:examples/gpt2 small_optimizers.py [--steps 1000] [--batch 4] [--sequence 32]

Losses are means over the last tenth of the steps. Bytes are those of the moments alone, beside the formula
2 P + P / 32 for parameters of 4096 elements and more, and 8 P for smaller ones. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import numpy as np
import torch
from lighterage.export import export_joint, save, weightless
from model import Config, Gpt2

ROOT = Path(__file__).parents[1]
FILES = ROOT / "target/bench"
LIGHTERAGE = ROOT / "target/release/lighterage"
BLOCK, SMALLEST = 256, 4096


def export(file: Path, batch: int, sequence: int) -> list[int]:
    """Write the model of the GPT-2 example with 12 layers. Returns the elements of each parameter."""
    config = Config(layers=12, batch=batch, sequence=sequence)
    with weightless() as mode:
        model = Gpt2(config)
    with mode:
        ids, labels = (torch.empty(batch, sequence, dtype=torch.long) for _ in range(2))
    save(export_joint(model, (ids, labels), level="coarse", attention="fused"), file, weights=False, name="gpt2")
    return [parameter.numel() for parameter in model.parameters()]


def formula(optimizer: str, parameters: list[int]) -> int:
    """The bytes of the moments."""
    eight_bits = optimizer == "adamw-8bit"
    return sum(2 * n + 2 * 4 * -(-n // BLOCK) if eight_bits and n >= SMALLEST else 8 * n for n in parameters)


def run(*options: str) -> str:
    """The output of the command."""
    result = subprocess.run([str(LIGHTERAGE), *options], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"lighterage {' '.join(options)}\nfailed with {result.returncode}:\n{result.stderr}")
    return result.stdout


def main() -> None:
    """Read the arguments, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "adamw-8bit"])
    for name, default in {"steps": 1000, "batch": 4, "sequence": 32, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()

    FILES.mkdir(parents=True, exist_ok=True)
    model, tokens = FILES / "small.pt2", FILES / "text.npy"
    parameters = export(model, args.batch, args.sequence)
    np.save(tokens, np.frombuffer((ROOT / "examples/gpt2/text.txt").read_bytes(), dtype=np.uint8))
    print(f"{sum(parameters) / 1e6:.2f}M parameters, {args.steps} steps of {args.batch} x {args.sequence} tokens\n")
    print("| optimizer | mean loss of the last steps | of the first one's | bytes of the moments | by the formula |")
    print("|---|---|---|---|---|", flush=True)
    first = 0.0
    for optimizer in args.optimizers:
        states = FILES / f"{optimizer}.safetensors"
        data = ["--tokens", str(tokens), "--token-labels", "next", "--shuffle-data", "--init", "normal:0.02"]
        options = [*data, "--optimizer", optimizer, "--lr", "3e-4", "--steps", str(args.steps)]
        lines = run("train", str(model), *options, "--threads", str(args.threads), "--save", str(states), "--json")
        steps = [json.loads(line) for line in lines.splitlines() if '"step"' in line]
        last = [step["loss"] for step in steps if "loss" in step][-max(args.steps // 10, 1) :]
        loss = sum(last) / len(last)
        first = first or loss
        header = json.loads(states.read_bytes()[8 : 8 + int.from_bytes(states.read_bytes()[:8], "little")])
        moments = ("exp_avg", "exp_avg_sq", "state1", "state2", "absmax1", "absmax2")
        stored = [tensor["data_offsets"] for name, tensor in header.items() if name.partition(".")[0] in moments]
        found, expected = sum(end - start for start, end in stored), formula(optimizer, parameters)
        print(f"| {optimizer} | {loss:.4f} | {100 * loss / first:.2f} % | {found} | {expected} |", flush=True)


if __name__ == "__main__":
    main()
