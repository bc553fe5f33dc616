"""Measure steps with every number of micro-batches, and the number that `micro_batches="auto"` chooses.

usage: PYTHONPATH=frontends/python/python benches/micro_batches.py [--steps 7]

Prints a row for each model, budget and number: the predicted time, the measured one (the fastest of the steps), and
whether it was chosen; then how much slower the chosen number is than the fastest.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import lighterage as lt


class Blocks(nn.Module):
    """Layers of attention over a sequence, and a head."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        one = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(one) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of ids."""
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


class Convolutions(nn.Module):
    """Layers of convolutions without normalisation."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 16), (16, 32)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of images."""
        return F.cross_entropy(self.layers(x), y)


def models() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]]:
    """By name, with a batch."""
    torch.manual_seed(0)
    ids = torch.randint(256, (16, 64))
    images = torch.randn(16, 3, 32, 32)
    return {
        "attention, 4 layers of 128, 16 x 64 tokens": (Blocks(128, 4), (ids, ids.roll(-1, 1))),
        "convolutions, 16 x 32 x 32": (Convolutions(), (images, torch.randint(10, (16,)))),
    }


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    for name, (model, batch) in models().items():
        optimizer = torch.optim.AdamW(model.parameters())
        keep = lt.plan(model, optimizer, example=batch, budget=2**40).keep_peak
        for share in (1.0, 0.6, 0.4):
            options: dict[str, Any] = {"example": batch, "budget": int(share * keep)}
            chosen = lt.plan(model, optimizer, micro_batches="auto", **options).micro_batches
            steps: dict[int, lt.Step] = {}
            for n in (1, 2, 4, 8, 16):
                try:
                    steps[n] = lt.compile(model, optimizer, micro_batches=n, check=False, **options)
                except lt.Infeasible:
                    continue
            times = dict.fromkeys(steps, float("inf"))
            # In turns, so that the machine's moods reach all of them.
            for _ in range(args.steps):
                for n, step in steps.items():
                    step(*batch)  # takes the parameters back
                    start = time.perf_counter()
                    step(*batch)
                    times[n] = min(times[n], 1e3 * (time.perf_counter() - start))
            best = min(times, key=lambda n: times[n])
            row = ", ".join(f"{n}: {steps[n].plan.micros / 1e3:.1f} / {times[n]:.1f}" for n in steps)
            slower = 100 * (times[chosen] / times[best] - 1)
            print(f"{name}, {100 * share:.0f} %: {row}; chosen {chosen}, {slower:.1f} % slower than {best}", flush=True)


if __name__ == "__main__":
    main()
