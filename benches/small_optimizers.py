"""Train a GPT-2 of 10M parameters with AdamW in f32 and with 8-bit moments, and compare losses and bytes.

usage: PYTHONPATH=frontends/python/python:examples/gpt2 small_optimizers.py [--steps 1000] [--batch 4] [--sequence 32]

Gradients are clipped to a norm of 1, and the rate falls to 0 as a cosine after a warm-up of a twentieth of the steps.
Without clipping, the loss rises once, and runs that begin alike then differ by up to 20 %. Losses are means over the
last tenth of the steps. Bytes are those of the moments alone, beside the formula 2 P + P / 32 for parameters of 4096
elements and more, and 8 P for smaller ones. The third row has the moments of embeddings in f32, as the paper of 8-bit
optimizers advises. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import numpy as np
import torch
from lighterage.export import export_joint, save, weightless
from model import Config, Gpt2

ROOT = Path(__file__).parents[1]
FILES = ROOT / "target/bench"
LIGHTERAGE = ROOT / "target/release/lighterage"
BLOCK, SMALLEST = 256, 4096


def export(file: Path, batch: int, sequence: int) -> dict[str, int]:
    """Write the model of the GPT-2 example with 12 layers. Returns the elements of each parameter."""
    config = Config(layers=12, batch=batch, sequence=sequence)
    with weightless() as mode:
        model = Gpt2(config)
    with mode:
        ids, labels = (torch.empty(batch, sequence, dtype=torch.long) for _ in range(2))
    save(export_joint(model, (ids, labels), level="coarse", attention="fused"), file, weights=False, name="gpt2")
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def formula(optimizer: str, whole: str, parameters: dict[str, int]) -> int:
    """The bytes of the moments."""

    def of(name: str, n: int) -> int:
        is_whole = optimizer != "adamw-8bit" or n < SMALLEST or any(map(partial(fnmatch, name), whole.split("|")))
        return 8 * n if is_whole else 2 * n + 2 * 4 * -(-n // BLOCK)

    return sum(of(name, n) for name, n in parameters.items())


def run(*options: str) -> str:
    """The output of the command."""
    result = subprocess.run([str(LIGHTERAGE), *options], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"lighterage {' '.join(options)}\nfailed with {result.returncode}:\n{result.stderr}")
    return result.stdout


def main() -> None:
    """Read the arguments, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows = ["adamw", "adamw-8bit", "adamw-8bit wte*|wpe*"]
    parser.add_argument("--rows", nargs="+", default=rows, help="an optimizer, and patterns of moments in f32")
    for name, default in {"steps": 1000, "batch": 4, "sequence": 32, "threads": 2, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()

    FILES.mkdir(parents=True, exist_ok=True)
    model, tokens = FILES / "small.pt2", FILES / "text.npy"
    parameters = export(model, args.batch, args.sequence)
    np.save(tokens, np.frombuffer((ROOT / "examples/gpt2/text.txt").read_bytes(), dtype=np.uint8))
    total = sum(parameters.values()) / 1e6
    print(f"{total:.2f}M parameters, {args.steps} steps of {args.batch} x {args.sequence} tokens, seed {args.seed}\n")
    print("| optimizer | mean loss of the last steps | of the first one's | bytes of the moments | by the formula |")
    print("|---|---|---|---|---|", flush=True)
    first = 0.0
    for row in args.rows:
        optimizer, _, whole = row.partition(" ")
        states = FILES / f"{optimizer}.safetensors"
        data = [
            "--tokens",
            str(tokens),
            "--token-labels",
            "next",
            "--shuffle-data",
            "--init",
            "normal:0.02",
            "--seed",
            str(args.seed),
        ]
        options = [*data, "--optimizer", optimizer, "--lr", "3e-4", "--steps", str(args.steps)]
        options += ["--schedule", "cosine", "--warmup", str(args.steps // 20), "--clip-norm", "1"]
        options += ["--group", f"{whole}:bits=32"] if whole else []
        lines = run("train", str(model), *options, "--threads", str(args.threads), "--save", str(states), "--json")
        steps = [json.loads(line) for line in lines.splitlines() if '"step"' in line]
        last = [step["loss"] for step in steps if "loss" in step][-max(args.steps // 10, 1) :]
        loss = sum(last) / len(last)
        first = first or loss
        header = json.loads(states.read_bytes()[8 : 8 + int.from_bytes(states.read_bytes()[:8], "little")])
        moments = ("exp_avg", "exp_avg_sq", "state1", "state2", "absmax1", "absmax2")
        stored = [tensor["data_offsets"] for name, tensor in header.items() if name.partition(".")[0] in moments]
        found, expected = sum(end - start for start, end in stored), formula(optimizer, whole, parameters)
        print(
            f"| {row.replace('|', ', ')} | {loss:.4f} | {100 * loss / first:.2f} % | {found} | {expected} |", flush=True
        )


if __name__ == "__main__":
    main()
