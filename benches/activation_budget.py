"""The memory of `torch.compile` at falling budgets: this backend beside PyTorch's `activation_memory_budget`.

usage: activation_budget.py [--models gpt2 ...] [--budgets 1.0 0.8 ...] [--steps 8] [--threads 2] [--json FILE]

Each row is a process of its own. `lighterage` is `torch.compile(backend="lighterage", options={"budget": B})`. Its
bytes are the planned peak, which is the measured one, and B is a share of what keeping everything needs. `pytorch` is
`torch.compile` with Inductor and `torch._functorch.config.activation_memory_budget = B`. Its bytes are the most from
malloc during a step above those at the step's start. The two scales differ. What counts is whether memory falls with B.
`step` is `lighterage.compile` at the same share, for the time. An update is PyTorch's fused AdamW, or the step's own.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import models  # noqa: E402 (a file beside this one)

import lighterage  # noqa: E402
from lighterage import backend  # noqa: E402

WAYS = ("lighterage", "pytorch", "step")
WARM_UP = 2


def smaller() -> None:
    """Makes the models of benches/models.py so small that Inductor compiles each in seconds."""
    models.GPT2 = dataclasses.replace(models.GPT2, vocabulary=2048, layers=4, width=256, heads=4)
    models.LLAMA = dataclasses.replace(models.LLAMA, vocabulary=2048, layers=4, width=256, heads=4, kv_heads=4)
    models.BERT = dataclasses.replace(models.BERT, vocabulary=2048, layers=4, width=256, heads=4)
    models.VOCABULARY = 2048


def heap_function(name: str) -> Callable[[], int] | None:
    """A function of heap.so, if that is preloaded."""
    library = ctypes.CDLL(None)
    if not hasattr(library, name):
        return None
    function = getattr(library, name)
    function.restype = ctypes.c_long
    return function


def call_of(way: str, name: str, budget: float, threads: int) -> tuple[Callable[..., Any], Callable[[], int]]:
    """A whole step, and a function that says its bytes."""
    model = models.build(name)
    model.load_state_dict(models.weights(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=models.LEARNING_RATE, weight_decay=0.01, fused=True)
    share = f"{100 * budget:g}%"
    if way == "step":
        inputs = list(models.batches(name).values())
        half = len(inputs) // 2
        step = lighterage.compile(model, optimizer, example=(inputs[0], inputs[half]), budget=share, threads=threads)
        return step, lambda: step.plan.peak
    if way == "lighterage":
        options: dict[str, Any] = {"budget": share, "threads": threads, "strict": True}
        compiled = torch.compile(model, backend=backend.backend, options=options)
    else:
        torch._functorch.config.activation_memory_budget = budget
        compiled = torch.compile(model)

    def step_of(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = compiled(*batch)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss

    if way == "lighterage":
        return step_of, lambda: max(plan.peak for plan in lighterage.stats().plans)
    peak = heap_function("heap_peak")
    return step_of, lambda: 0 if peak is None else peak()


def row(way: str, name: str, budget: float, steps: int, threads: int) -> dict[str, Any]:
    """Trains a model for some steps."""
    torch.set_num_threads(threads)
    step, bytes_of = call_of(way, name, budget, threads)
    batches = models.batches(name)
    names = sorted({path.split(".")[2] for path in batches}, key=lambda name: name == "labels")
    reset, peak = heap_function("heap_reset"), heap_function("heap_peak")
    before = 0
    millis, losses = [], []
    for i in range(steps):
        batch = [batches[f"batch.{i % models.N_BATCHES}.{name}"] for name in names]
        if i == WARM_UP and reset is not None and peak is not None:
            reset()
            before = peak()
        start = time.perf_counter()
        loss = step(*batch)
        millis.append((time.perf_counter() - start) * 1e3)
        losses.append(float(loss))
    return {"bytes": bytes_of() - before, "ms": statistics.median(millis[WARM_UP:]), "losses": losses}


def ran(args: argparse.Namespace, way: str, name: str, budget: float, heap: Path) -> dict[str, Any]:
    """A row from a process of its own."""
    command = [sys.executable, __file__, "--row", way, name, str(budget)]
    command += ["--steps", str(args.steps), "--threads", str(args.threads)]
    environment = {**os.environ, "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
    if way == "pytorch":
        environment["LD_PRELOAD"] = str(heap)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        return {"error": done.stderr.strip().splitlines()[-1][:200] if done.stderr.strip() else "failed"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def table(name: str, budgets: list[float], rows: dict[tuple[str, float], dict[str, Any]]) -> None:
    """Prints a model's rows, and whether memory falls with the budget."""
    print(f"\n{name}\n\n| budget | lighterage | ms | of the whole step's | pytorch | ms |\n|---|---|---|---|---|---|")
    for budget in budgets:
        ours, theirs, step = (rows[way, budget] for way in WAYS)
        cells = [f"{budget:.0%}"]
        for found in (ours, theirs):
            if "error" in found:
                cells += [found["error"], "-"]
            else:
                cells += [f"{found['bytes'] / 2**20:.2f} MiB", f"{found['ms']:.1f}"]
        ratio = "-" if "error" in ours or "error" in step else f"{ours['ms'] / step['ms']:.2f}"
        cells.insert(3, ratio)
        print(f"| {' | '.join(cells)} |")
    for way in WAYS[:2]:
        all_sizes = [rows[way, budget].get("bytes") for budget in budgets]
        sizes = [size for size in all_sizes if size is not None]
        rises = sum(later > earlier for earlier, later in itertools.pairwise(sizes))
        print(f"{way}: memory rises {rises} times while the budget falls")


def main() -> None:
    """Read the arguments; measure; print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2", "llama", "bert"], choices=models.NAMES)
    parser.add_argument("--budgets", nargs="+", type=float, default=[1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    smaller()
    if args.row:
        way, name, budget = args.row
        print(json.dumps(row(way, name, float(budget), args.steps, args.threads)))
        return
    with tempfile.TemporaryDirectory() as folder:
        heap = Path(folder) / "heap.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", heap, HERE / "heap.c"], check=True)
        everything = {}
        for name in args.models:
            rows = {}
            for budget in args.budgets:
                for way in WAYS:
                    rows[way, budget] = ran(args, way, name, budget, heap)
                    print(f"{name} {budget:g} {way}", file=sys.stderr)
            table(name, args.budgets, rows)
            everything[name] = [{"way": way, "budget": budget, **found} for (way, budget), found in rows.items()]
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
