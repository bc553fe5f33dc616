"""Time a training step on the CPU: lighterage and PyTorch, eager and compiled, in one run on one machine.

usage: step_time.py [--models gpt2 llama bert vit resnet t5 moe] [--threads 2] [--rounds 3] [--steps 6]
                    [--budgets 0.8 0.6 0.4 0.2] [--quick] [--precision bf16]

Models, weights and batches come from benches/models.py, written into target/bench. For each model:

1. Memory: each program runs once with a library that counts allocated bytes (benches/heap.c), in steps after the first
   two. `inductor, budget` uses the largest of --budgets whose peak is at most lighterage's at 50 %, else the smallest;
   lighterage also runs at this peak.
2. Losses: the first steps must agree with eager PyTorch's, from the same weights on the same batches.
3. Time: the programs run in turn, round by round, so that a slow period of the machine affects all of them. A figure is
   the fastest step, without the first two of each turn: other programs can only make a step slower.

Lighterage's 50 % is the share of its memory other than parameters, moments and inputs; it has no host memory for swaps.
With `--precision bf16`, PyTorch computes with `torch.autocast`. Its allocator is tuned by GLIBC_TUNABLES: large pages
and no return of memory to the system. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ROOT / "target/bench"
LIGHTERAGE = ROOT / "target/release/lighterage"
WARM_UP = 2  # steps that are not counted: pages are touched, caches fill, torch.compile compiles
TUNED = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"
HOST = "4MiB"  # for batches
AGREE = {"f32": 2e-3, "bf16": 1e-2}  # relative difference of losses


@dataclass
class Way:
    """A program that trains and prints its steps."""

    name: str
    command: list[str]
    light: list[str] = field(default_factory=list)  # the same without a file of weights in memory, if possible
    environment: dict[str, str] = field(default_factory=dict)
    heap_bytes: int = 0
    rss_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    best_ms: float = float("inf")

    def run(self, command: list[str], environment: dict[str, str]) -> tuple[list[dict[str, float]], str]:
        """Run it; return its output lines and its errors."""
        merged = os.environ | self.environment | environment
        result = subprocess.run(command, env=merged, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\nfailed with {result.returncode}:\n{result.stderr}")
        return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")], result.stderr

    def weigh(self, heap: Path) -> None:
        """Measure the largest number of bytes."""
        environment = {"LD_PRELOAD": str(heap), "HEAP_REPORT": "1"}
        lines, errors = self.run([*(self.light or self.command), "--steps", "5"], environment)
        reported = [int(line.split()[1]) for line in errors.splitlines() if line.startswith("heap_peak")]
        self.heap_bytes = int(lines[-1].get("heap_bytes", max(reported, default=0)))
        self.rss_bytes = int(lines[-1].get("rss_bytes", 0))

    def time(self, steps: int) -> None:
        """Run some steps and keep the fastest."""
        lines, _ = self.run([*self.command, "--steps", str(steps)], {})
        timed = [line for line in lines if "ms" in line and "loss" in line]
        self.losses = [line["loss"] for line in timed]
        self.best_ms = min([self.best_ms, *(line["ms"] for line in timed[WARM_UP:])])


def machine() -> str:
    """The processor's name and the number of usable cores."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


GENERATED = ["--kernels", "generated"]
PLAIN = ["--kernels", "plain"]


def half_budget(model: str, precision: str) -> int:
    """The bytes of a budget for the states, and for half of the other memory of a step.

    Or the smallest feasible budget, if that is larger.
    """
    model_file = str(FILES / f"{model}.pt2")
    plan = [str(LIGHTERAGE), "plan", model_file, "--optimizer", "adamw", "--host", HOST, "--json", *GENERATED]
    plan += ["--precision", precision]
    result = subprocess.run([*plan, "--budget", "100%"], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(plan)}\nfailed with {result.returncode}:\n{result.stderr}")
    report = json.loads(result.stdout)
    states = 3 * (FILES / f"{model}.safetensors").stat().st_size  # parameters and two moments
    half = states + (int(report["keep_peak_bytes"]) - states) // 2
    return max(half, int(report["smallest_feasible_bytes"]))


def lighterage(model: str, budget: str, name: str, args: argparse.Namespace, threads: int, kernels: list[str]) -> Way:
    """Compile the model for a budget, to a file, and train that."""
    import models

    lit = FILES / f"{model}-{name.replace(' ', '').replace('%', '')}.lit"
    model_file = str(FILES / f"{model}.pt2")
    compiled = [str(LIGHTERAGE), "compile", model_file, "--optimizer", "adamw", "--host", HOST, *kernels]
    compiled += ["--precision", args.precision]
    result = subprocess.run(
        [*compiled, "--budget", budget, "-o", str(lit)], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(compiled)} --budget {budget}\nfailed with {result.returncode}:\n{result.stderr}")
    batches = ["--batches", str(FILES / f"{model}-batches.safetensors"), "--json"]
    rate = ["--lr", str(models.LEARNING_RATE), "--threads", str(threads), "--init"]
    train = [str(LIGHTERAGE), "train", str(lit), *batches, *rate]
    return Way(f"lighterage {name}", [*train, str(FILES / f"{model}.safetensors")], [*train, "normal:0.02"])


def peer(model: str, threads: int, way: str, precision: str, activations: float = 1.0) -> Way:
    """PyTorch's way to train it."""
    script = [sys.executable, str(ROOT / "benches/torch_step.py"), model, "--files", str(FILES)]
    command = [*script, "--threads", str(threads), "--way", way, "--activations", str(activations)]
    command += ["--precision", precision]
    environment = {"OMP_NUM_THREADS": str(threads), "GLIBC_TUNABLES": TUNED}
    name = way if activations == 1.0 else f"inductor, budget {activations:g}"
    return Way(name, command, environment=environment)


def compare(model: str, threads: int, args: argparse.Namespace, heap: Path) -> None:
    """Measure one model with this number of threads and print its table."""
    half = half_budget(model, args.precision)
    ways = [
        lighterage(model, "100%", "100%", args, threads, GENERATED),
        lighterage(model, str(half), "50%", args, threads, GENERATED),
        lighterage(model, "100%", "100%, plain kernels", args, threads, PLAIN),
    ]
    ways += [peer(model, threads, way, args.precision) for way in ["eager", "checkpoint", "inductor"]]
    for way in ways:
        say(f"{model}, {threads} threads: memory of {way.name}")
        way.weigh(heap)
    for activations in [] if args.quick else args.budgets:
        way = peer(model, threads, "inductor", args.precision, activations)
        say(f"{model}, {threads} threads: memory of {way.name}")
        way.weigh(heap)
        if way.heap_bytes <= ways[1].heap_bytes or activations == args.budgets[-1]:
            # The memory of lighterage outside of the plan is added to a budget.
            budget = way.heap_bytes - (ways[1].heap_bytes - half)
            same = lighterage(model, str(budget), f"at the peak of {activations:g}", args, threads, GENERATED)
            say(f"{model}, {threads} threads: memory of {same.name}")
            same.weigh(heap)
            ways += [way, same]
            break
    for turn in range(args.rounds):
        for way in ways:
            say(f"{model}, {threads} threads, round {turn + 1} of {args.rounds}: {way.name}")
            way.time(args.steps)
    eager = next(way for way in ways if way.name == "eager")
    for way in ways:
        for step, (ours, theirs) in enumerate(zip(way.losses, eager.losses, strict=True)):
            if abs(ours - theirs) > AGREE[args.precision] * abs(theirs):
                raise SystemExit(f"{model}: {way.name} has the loss {ours} in step {step}, eager PyTorch {theirs}")
    inductor = next(way for way in ways if way.name == "inductor")
    print(f"\n{model}, {threads} threads\n")
    print("| | ms a step | / inductor | / eager | heap MB | / inductor | RSS MB |\n|---|---|---|---|---|---|---|")
    for way in ways:
        ratios = [way.best_ms / inductor.best_ms, way.best_ms / eager.best_ms]
        heap_ratio = way.heap_bytes / inductor.heap_bytes
        rss = f"{way.rss_bytes / 1e6:.0f}" if way.rss_bytes else ""
        cells = [way.name, f"{way.best_ms:.0f}", *(f"{ratio:.2f}" for ratio in ratios)]
        print("| " + " | ".join([*cells, f"{way.heap_bytes / 1e6:.0f}", f"{heap_ratio:.2f}", rss]) + " |", flush=True)


def main() -> None:
    """Read the arguments, measure, print the tables."""
    import models
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models.NAMES, default=["gpt2", "llama"])
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="of a turn")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.8, 0.6, 0.4, 0.2], help="to try, falling")
    parser.add_argument("--quick", action="store_true", help="without inductor's activation_memory_budget")
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    args = parser.parse_args()
    models.prepare(FILES, tuple(args.models))
    heap = FILES / "heap.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(heap), str(ROOT / "benches/heap.c")], check=True)
    print(f"{machine()}; fastest of {args.rounds} x {args.steps - WARM_UP} steps; PyTorch {torch.__version__}")
    for model in args.models:
        for threads in args.threads:
            compare(model, threads, args, heap)


if __name__ == "__main__":
    main()
