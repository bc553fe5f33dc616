"""Steps of a few milliseconds between eager operations, beside eager PyTorch.

usage: small_steps.py [--models mlp cnn encoder ..] [--turns 2] [--steps 40]

A step is a forward and a backward of `torch.compile` with the backend, and eager operations: the loss, the update of
SGD, zeros for gradients. `shared` is the same while the threads of torch's OpenMP poll for work on the cores of the
step, as they do by themselves; otherwise they sleep (`frontends/python/src/openmp.rs`). The layers of `blocks` are
compiled one by one. `whole` is the step by `lighterage.compile`. Printed is the median of all steps in ms, and its
ratio to that of eager mode in the same turn.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import lighterage
from lighterage import _openmp, backend

WARM_UP = 5


class Encoder(nn.Module):
    """A transformer that classifies sequences."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        return self.head(self.encoder(x)[:, 0])


class Recurrent(nn.Module):
    """An LSTM that classifies sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(128, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        return self.head(self.layer(x)[0][:, -1])


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a sequence."""
        return self.layer(x)


def mlp(width: int) -> nn.Module:
    """Layers of one width, with batch norms."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def cnn() -> nn.Module:
    """Two convolutions."""
    first = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(64, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp 64": (lambda: mlp(64), (256, 64)),
    "mlp": (lambda: mlp(512), (256, 512)),
    "cnn": (cnn, (16, 3, 32, 32)),
    "encoder": (Encoder, (8, 64, 128)),
    "lstm": (Recurrent, (8, 128, 128)),
    "blocks": (lambda: nn.Sequential(*(Block() for _ in range(8)), nn.Flatten(), nn.Linear(8192, 10)), (2, 64, 128)),
}
KINDS = ("eager", "shared", "asleep", "whole")


def median(name: str, kind: str, steps: int) -> float:
    """The median of some steps of a model, ms."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x, y = make(), torch.randn(shape), torch.randint(10, shape[:1])
    if kind == "shared":
        _openmp.find = lambda: None  # type: ignore[assignment]
    run: Any = model
    if name == "blocks" and kind in ("shared", "asleep"):
        for block in model.children():
            if isinstance(block, Block):
                block.compile(backend=backend.backend)
    elif kind in ("shared", "asleep"):
        run = torch.compile(model, backend=backend.backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(loss(run, x, y))
        optimizer.step()

    if kind == "whole":
        step = lighterage.compile(model, optimizer, loss, example=(x, y))  # type: ignore[assignment]
    times = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        step(x, y)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[WARM_UP:])


def loss(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch."""
    return F.cross_entropy(model(x), y)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "KIND"), help="one figure, in a process of its own")
    options = parser.parse_args()
    if options.one:
        name, kind = options.one
        print(median(name, kind, options.steps))
        return
    print("| model | eager ms | shared | asleep | whole |\n|---|---|---|---|---|")
    for name in options.models:
        for _ in range(options.turns):
            figures = []
            for kind in KINDS:
                command = [sys.executable, __file__, "--one", name, kind, "--steps", str(options.steps)]
                ran = subprocess.run(command, capture_output=True, check=True, text=True)
                figures.append(float(ran.stdout.split()[-1]))
            eager, *ours = figures
            shares = " | ".join(f"{figure / eager:.2f}" for figure in ours)
            print(f"| {name} | {eager:.2f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
