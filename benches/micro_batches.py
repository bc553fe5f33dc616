"""Compare the number of micro-batches that `micro_batches="auto"` chooses with all others.

usage: PYTHONPATH=frontends/python/python benches/micro_batches.py [--simulate] [--measure] [--profiled] [--steps 7]

Prints a row for each model and budget. --simulate: how much slower the plan of the chosen number is than the fastest
plan of all divisors of the batch, by the predicted time, and the numbers that fit. --measure: for two models, the
predicted and the measured time of each number (the fastest of the steps), and how much slower the chosen number is than
the fastest. --profiled: the same, planned by measured times.
"""

from __future__ import annotations

import argparse
import copy
import operator
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import lighterage as lt

# Numbers of micro-batches that are measured, of a batch of 16.
NUMBERS = (1, 2, 4, 8, 16)
# A shared machine has slow phases of seconds. So profiles are short, and of several the fastest is taken.
PROFILES = 12
ROUNDS = 5


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


class Plain(nn.Module):
    """Wide layers one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)))
        self.head = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of vectors."""
        return F.cross_entropy(self.head(self.layers(x)), y)


class Residual(nn.Module):
    """Convolutions with residuals and group norms, and a pool."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, 10)
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of images."""
        h = self.stem(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = h + F.relu(layer(norm(h)))
        return F.cross_entropy(self.head(h.mean((2, 3))), y)


def models() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]]:
    """By name, with a batch. The first two are measured."""
    torch.manual_seed(0)
    ids = torch.randint(256, (16, 64))
    images = torch.randn(16, 3, 32, 32)
    return {
        "attention, 4 layers of 128, 16 x 64 tokens": (Blocks(128, 4), (ids, ids.roll(-1, 1))),
        "convolutions, 16 x 32 x 32": (Convolutions(), (images, torch.randint(10, (16,)))),
        "attention, 2 layers of 64, 24 x 128 tokens": (Blocks(64, 2), _tokens(24, 128)),
        "layers of 512, 96 vectors": (Plain(), (torch.randn(96, 512), torch.randint(10, (96,)))),
        "residuals, 12 x 24 x 24": (Residual(), (torch.randn(12, 3, 24, 24), torch.randint(10, (12,)))),
    }


def _tokens(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(256, (rows, length))
    return ids, ids.roll(-1, 1)


def simulate() -> None:
    """Print how far the chosen number is from the best one."""
    for name, (model, batch) in models().items():
        optimizer = torch.optim.AdamW(model.parameters())
        keep = lt.plan(model, optimizer, example=batch, budget=2**40).keep_peak
        for share in (0.8, 0.6, 0.4):
            options: dict[str, Any] = {"example": batch, "budget": int(share * keep)}
            times: dict[int, float] = {}
            for n in (n for n in range(1, len(batch[0]) + 1) if len(batch[0]) % n == 0):
                try:
                    times[n] = lt.plan(model, optimizer, micro_batches=n, **options).micros
                except lt.Infeasible:
                    continue
            if not times:
                print(f"{name}, {100 * share:.0f} %: nothing fits", flush=True)
                continue
            chosen = lt.plan(model, optimizer, micro_batches="auto", **options).micro_batches
            best = min(times, key=lambda n: times[n])
            slower = 100 * (times[chosen] / times[best] - 1)
            print(
                f"{name}, {100 * share:.0f} %: {chosen} of {list(times)}; {slower:.2f} % slower than {best}", flush=True
            )


def profile(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Path:
    """A profile of the steps with each number."""
    optimizer = torch.optim.AdamW(model.parameters())
    plans = [lt.plan(model, optimizer, micro_batches=n, example=batch) for n in NUMBERS]
    folder = Path(tempfile.mkdtemp())

    def total(file: Path) -> float:
        return sum(plan.profile(file, repeat=ROUNDS, fastest=True)["micros"] for plan in plans)

    return min((folder / f"{k}.prof" for k in range(PROFILES)), key=total)


def measure(n_steps: int, profiled: bool) -> None:
    """Print how much slower steps with the chosen number are than with the fastest one."""
    for name, (model, batch) in list(models().items())[:2]:
        optimizer = torch.optim.AdamW(model.parameters())
        file = profile(model, batch) if profiled else None
        keep = lt.plan(model, optimizer, example=batch, budget=2**40).keep_peak
        for share in (1.0, 0.6, 0.4):
            options: dict[str, Any] = {"example": batch, "budget": int(share * keep), "profile": file}
            chosen = lt.plan(model, optimizer, micro_batches="auto", **options).micro_batches
            steps: dict[int, lt.Step] = {}
            for n in NUMBERS:
                try:
                    steps[n] = lt.compile(model, optimizer, micro_batches=n, check=False, **options)
                except lt.Infeasible:
                    continue
            times: dict[int, list[float]] = {n: [] for n in steps}
            # In turns: a shared machine has slow phases, which then reach all of them.
            for turn in range(n_steps):
                for n in steps if turn % 2 == 0 else reversed(steps):
                    steps[n](*batch)  # takes the parameters back
                    start = time.perf_counter()
                    steps[n](*batch)
                    times[n].append(1e3 * (time.perf_counter() - start))
            slower = {n: statistics.median(map(operator.truediv, times[chosen], times[n])) for n in steps}
            best = max(slower, key=lambda n: slower[n])
            row = ", ".join(f"{n}: {steps[n].plan.micros / 1e3:.1f} / {statistics.median(times[n]):.1f}" for n in steps)
            more = 100 * (slower[best] - 1)
            print(f"{name}, {100 * share:.0f} %: {row}; chosen {chosen}, {more:.1f} % slower than {best}", flush=True)


def main() -> None:
    """Read the arguments; plan, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--profiled", action="store_true")
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    measures = args.measure or args.profiled
    if args.simulate or not measures:
        simulate()
    if measures or not args.simulate:
        measure(args.steps, args.profiled)


if __name__ == "__main__":
    main()
