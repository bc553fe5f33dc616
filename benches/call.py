"""What a call from Python adds to a step, beside the time that the runtime itself takes for it.

usage: call.py [--layers 2 4 12] [--steps 200] [--json FILE]

The models are GPT-2s of transformers, of width 32 on 16 symbols: 312 traced operations and 28 parameters with 2 layers,
52 parameters with 4, 148 with 12. `step` is a call of what `lighterage.compile` returns; `torch.compile` is a forward
and a backward with the backend, in which Dynamo, AOTAutograd and autograd have a share. The runtime measures itself
within each call, and what is left is what the call adds. Printed are the least and the median of all calls, and how
much of that the package adds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import lighterage
from lighterage import _stats, backend

WARM_UP = 20


def model_of(layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A GPT-2 and a batch."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers,
        n_head=2,
        n_embd=32,
        n_positions=16,
        vocab_size=64,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    ids = torch.randint(64, (2, 16))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


class Timed:
    """Calls of the runtime, with the time that it measures itself: a machine or arenas."""

    def __init__(self, native: Any) -> None:
        self._native, self.ms = native, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def step(self) -> float:
        """As of a machine."""
        self.ms += (ms := self._native.step())
        return ms

    def forward(self, *args: Any) -> Any:
        """As of arenas."""
        ticket = self._native.forward(*args)
        self.ms += ticket.ms
        return ticket

    def backward(self, *args: Any) -> float:
        """As of arenas."""
        self.ms += (ms := self._native.backward(*args))
        return ms


class Clock:
    """The time that goes by in some functions."""

    def __init__(self) -> None:
        self.ms = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.ms += (time.perf_counter() - start) * 1e3

        return timed


def measured(call: Callable[[], Any], runtime: Timed, ours: Clock, steps: int) -> dict[str, float]:
    """Microseconds of the runtime, of all that a call adds to it, and of what the package adds."""
    for _ in range(WARM_UP):
        call()
    rows = []
    for _ in range(steps):
        runtime.ms = ours.ms = 0.0
        start = time.perf_counter()
        call()
        whole = (time.perf_counter() - start) * 1e3
        rows.append((runtime.ms * 1e3, (whole - runtime.ms) * 1e3, (ours.ms - runtime.ms) * 1e3))
    columns = list(zip(*rows, strict=True))
    return {
        "runtime": statistics.median(columns[0]),
        "added": statistics.median(columns[1]),
        "added_least": min(columns[1]),
        "ours": statistics.median(columns[2]),
        "ours_least": min(columns[2]),
    }


def whole_step(layers: int, steps: int) -> dict[str, float]:
    """What a call of a compiled step adds."""
    model, batch = model_of(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = lighterage.compile(model, optimizer, example=batch, threads=1)
    runtime, ours = Timed(step._machine), Clock()
    step._machine = runtime  # type: ignore[assignment]
    return measured(ours.around(lambda: step(**batch)), runtime, ours, steps)


def in_torch_compile(layers: int, steps: int) -> dict[str, float]:
    """What a forward and a backward add."""
    torch._dynamo.reset()
    lighterage.reset()
    model, batch = model_of(layers)
    compiled = torch.compile(model, backend=backend.backend, options={"threads": 1, "strict": True})

    def call() -> None:
        model.zero_grad()
        compiled(**batch).loss.backward()

    call()
    program: Any = next(iter(_stats.counts.programs))
    runtime, ours = Timed(program.arenas), Clock()
    program.arenas = runtime
    program.forward = ours.around(program.forward)
    program.backward = ours.around(program.backward)
    return measured(call, runtime, ours, steps)


WAYS = {"step": whole_step, "torch.compile": in_torch_compile}


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 12])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print("Microseconds: the least of all calls, and their median in parentheses.")
    print("| call | parameters | the runtime | a call adds | of it the package |")
    print("|---|---|---|---|---|")
    for name, way in WAYS.items():
        for layers in args.layers:
            n_parameters = len(list(model_of(layers)[0].parameters()))
            row = way(layers, args.steps)
            rows.append({"call": name, "parameters": n_parameters, **row})
            added = f"{row['added_least']:.0f} ({row['added']:.0f})"
            ours = f"{row['ours_least']:.0f} ({row['ours']:.0f})"
            print(f"| {name} | {n_parameters} | {row['runtime']:.0f} | {added} | {ours} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
