"""Steps of large layers and few rows, whose gradients take longer to allocate than to compute.

usage: large_layers.py [--turns 3] [--steps 12]

A step is a forward, a backward and `zero_grad`, in eager mode, with inductor, and with the backend: once as it is, and
once with new memory for each gradient, as in eager mode. Printed is the median step in ms, and in brackets the ratio to
eager mode's in the same turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from step_time import machine
from torch import nn

from lighterage import _stats, backend

# Layers, their width, rows of the batch.
SIZES = ((8, 1024, 16), (4, 2048, 4), (4, 4096, 4), (4, 4096, 64))
KINDS = ("eager", "inductor", "new memory", "ours")


def median(kind: str, sizes: tuple[int, int, int], steps: int) -> float:
    """The median of some steps, ms."""
    layers, width, rows = sizes
    torch.manual_seed(0)
    torch._dynamo.reset()
    _stats.reset()
    model = nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())])
    run: Any = model
    if kind != "eager":
        run = torch.compile(model, backend="inductor" if kind == "inductor" else backend.backend)
    x, times = torch.randn(rows, width), []
    for _ in range(steps + 2):
        start = time.perf_counter()
        run(x).square().mean().backward()
        model.zero_grad()
        times.append(time.perf_counter() - start)
        if kind == "new memory":
            for program in _stats.counts.programs:
                program.pool.clear()
    return 1e3 * statistics.median(times[2:])


def main() -> None:
    """Read the arguments, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(2)
    print(f"{machine()}; PyTorch {torch.__version__}; {args.turns} turns\n")
    print(f"| layers x width, rows | {' | '.join(KINDS)} |\n|---{'|---' * len(KINDS)}|")
    for sizes in SIZES:
        turns = [[median(kind, sizes, args.steps) for kind in KINDS] for _ in range(args.turns)]
        cells = []
        for i, times in enumerate(zip(*turns, strict=True)):
            ratios = ", ".join(f"{turn[i] / turn[0]:.2f}" for turn in turns)
            cells.append(f"{statistics.median(times):.1f}" + (f" ({ratios})" if i else ""))
        print(f"| {sizes[0]} x {sizes[1]}, {sizes[2]} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
