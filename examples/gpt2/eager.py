"""Train the example's model in PyTorch, for comparison. Prints a line of JSON for each step: step, loss, ms.

usage: eager.py [--steps 60] [--threads 1] [--init FILE] [--save-init FILE] [--compile | --checkpoint] ...
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from model import Config, Gpt2
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

HERE = Path(__file__).parent


class Recomputed(nn.Module):
    """A block that keeps only its input and runs again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, sequence, width]."""
        return checkpoint(self.block, x, use_reentrant=False)


def initialise(model: nn.Module, std: float, seed: int) -> None:
    """Matrices normal, layer norms' weights one, biases zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if 2 <= parameter.dim():
            nn.init.normal_(parameter, std=std, generator=generator)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=Path, default=HERE / "batches.safetensors")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights, without --init")
    parser.add_argument("--init", type=Path, help="safetensors with the initial weights, by parameter name")
    parser.add_argument("--save-init", type=Path, help="write the initial weights there")
    parser.add_argument("--save", type=Path, help="write the final weights there")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--compile", action="store_true", help="torch.compile; the first step includes compiling")
    how.add_argument("--checkpoint", action="store_true", help="recompute each block in the backward")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = Gpt2(Config())
    if args.init:
        model.load_state_dict(load_file(args.init))
    else:
        initialise(model, 0.02, args.seed)
    weights = dict(model.named_parameters())
    if args.save_init:
        save_file({name: weight.detach() for name, weight in weights.items()}, args.save_init)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    if args.checkpoint:
        model.blocks = nn.ModuleList(Recomputed(block) for block in model.blocks)
    step = torch.compile(model) if args.compile else model
    batches = load_file(args.batches)
    n_batches = len(batches) // 2
    for i in range(args.steps):
        ids, labels = (batches[f"batch.{i % n_batches}.{name}"] for name in ("input_ids", "labels"))
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = step(ids, labels)
        loss.backward()
        optimizer.step()
        millis = (time.perf_counter() - start) * 1e3
        print(json.dumps({"step": i, "loss": loss.item(), "ms": round(millis, 2)}), flush=True)
    if args.save:
        save_file({name: weight.detach() for name, weight in weights.items()}, args.save)


if __name__ == "__main__":
    main()
