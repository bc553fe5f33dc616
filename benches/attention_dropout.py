"""Attention that drops weights while a model learns, beside eager PyTorch and its compiler.

usage: attention_dropout.py [--lengths 512 1024] [--kinds called written] [--steps 8]

A step is the forward and backward of four layers of attention (8 heads of 64) for 4 sequences in f32, with a dropout of
0.1. `called` is `scaled_dot_product_attention`; `written` has products, `masked_fill`, a softmax and a dropout.
Printed are the median of the steps in ms, and MiB: of PyTorch what autograd keeps for the backward, of ours the peak of
the plan, which has all values of the step but parameters and their gradients.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from lighterage.backend import backend
from torch import nn
from torch.nn import functional as F

import lighterage

WARM_UP = 3
HEADS, WIDTH, LAYERS, BATCH, SHARE = 8, 512, 4, 4, 0.1


class Layer(nn.Module):
    """Causal attention with a residual."""

    def __init__(self, kind: str, share: float) -> None:
        super().__init__()
        self.joint, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind, self.share = kind, share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, sequence, width]."""
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in self.joint(x).split(WIDTH, 2))
        if self.kind == "called":
            rows = F.scaled_dot_product_attention(q, k, v, dropout_p=self.share, is_causal=True)
        else:
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            scores = (q @ k.transpose(2, 3)) * (WIDTH // HEADS) ** -0.5
            rows = F.dropout(scores.masked_fill(~seen, float("-inf")).softmax(-1), self.share) @ v
        return x + self.out(rows.transpose(1, 2).reshape(batch, length, WIDTH))


def measured(kind: str, length: int, how: str, share: float, steps: int) -> tuple[float, float]:
    """The median of some steps, ms, and MiB."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Layer(kind, share) for _ in range(LAYERS)))
    x = torch.randn(BATCH, length, WIDTH)
    if how != "eager":
        model = torch.compile(model, backend=backend if how == "ours" else "inductor")
    times, kept = [], {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    for step in range(WARM_UP + steps):
        start = time.perf_counter()
        if step == 0:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = model(x).square().mean()
        else:
            loss = model(x).square().mean()
        loss.backward()
        times.append((time.perf_counter() - start) * 1e3)
        model.zero_grad(set_to_none=False)
    size = sum(kept.values())
    if how == "ours":
        size = lighterage.stats().plans[0].peak
    return statistics.median(times[WARM_UP:]), size / 2**20


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="*", type=int, default=[512, 1024])
    parser.add_argument("--kinds", nargs="*", default=["called", "written"], choices=["called", "written"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--one", nargs=4, metavar=("KIND", "LENGTH", "HOW", "SHARE"), help="a process of its own")
    options = parser.parse_args()
    if options.one:
        kind, length, how, share = options.one
        print(*measured(kind, int(length), how, float(share), options.steps))
        return
    print("| attention | tokens | eager ms, MiB | inductor | ours | ours without dropout |\n|---|---|---|---|---|---|")
    for kind in options.kinds:
        for length in options.lengths:
            cells = []
            for how, share in (("eager", SHARE), ("inductor", SHARE), ("ours", SHARE), ("ours", 0.0)):
                command = [sys.executable, __file__, "--steps", str(options.steps)]
                command += ["--one", kind, str(length), how, str(share)]
                found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
                cells.append(f"{float(found[0]):.0f}, {float(found[1]):.0f}")
            print(f"| {kind} | {length} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
