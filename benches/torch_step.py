"""Train a model of benches/models.py in PyTorch. Prints a line of JSON for each step (loss, ms) and for the peak.

usage: torch_step.py MODEL --files FOLDER [--threads 2] [--steps 8] [--way eager] [--activations 1.0]
                     [--precision bf16]

A step is the loss, its gradients and PyTorch's fused AdamW. With heap.so preloaded the last line has the most bytes
that were allocated during a step after the first two (`heap_bytes`); `rss_bytes` is the most that the process ever had.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import models
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

WARM_UP = 2


class Recomputed(nn.Module):
    """A block that keeps only its input and runs again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """x: [batch, sequence, width]."""
        return checkpoint(self.block, x, *others, use_reentrant=False)


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=models.NAMES)
    parser.add_argument("--files", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--way", choices=["eager", "checkpoint", "inductor"], default="eager")
    parser.add_argument(
        "--activations", type=float, default=1.0, help="torch._functorch.config.activation_memory_budget"
    )
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32", help="bf16: torch.autocast")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = models.build(args.model)
    model.load_state_dict(load_file(args.files / f"{args.model}.safetensors"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=models.LEARNING_RATE, weight_decay=0.01, fused=True)
    if args.way == "checkpoint":
        for name, blocks in list(model.named_children()):
            if isinstance(blocks, nn.ModuleList):
                setattr(model, name, nn.ModuleList(Recomputed(block) for block in blocks))
    step: Callable[..., torch.Tensor] = model
    if args.way == "inductor":
        torch._functorch.config.activation_memory_budget = args.activations
        step = torch.compile(model)
    batches = load_file(args.files / f"{args.model}-batches.safetensors")
    inputs = [path.split(".")[2] for path in batches if path.startswith("batch.0.")]
    # The model's input comes first, then the expected output.
    inputs.sort(key=lambda name: name == "labels")
    heap = ctypes.CDLL(None)
    counted = hasattr(heap, "heap_peak")
    for i in range(args.steps):
        batch = [batches[f"batch.{i % models.N_BATCHES}.{name}"] for name in inputs]
        if counted and i == WARM_UP:
            heap.heap_reset()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
            loss = step(*batch)
        torch.autograd.backward(loss)
        optimizer.step()
        millis = (time.perf_counter() - start) * 1e3
        print(json.dumps({"loss": loss.item(), "ms": round(millis, 2)}), flush=True)
    most = {"rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if counted:
        heap.heap_peak.restype = ctypes.c_long
        most["heap_bytes"] = heap.heap_peak()
    print(json.dumps(most))


if __name__ == "__main__":
    main()
