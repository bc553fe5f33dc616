"""Time a training step of the example: lighterage beside eager PyTorch, in one run on one machine.

usage: step_time.py [--threads 1 2] [--budgets 100% 50%] [--steps 20] [--rounds 3] [--compile]

The programs take turns, round by round, so that a slow spell of the machine meets all of them. A figure is the median
over the rounds' steps without the first ones of each round. Prints a table in Markdown; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/gpt2"
WARM_UP = 3  # steps that are not counted: pages are touched, caches fill, torch.compile compiles


def lighterage(budget: str, steps: int) -> list[str]:
    """The command that trains the example with lighterage, whose kernels run on one thread, and prints JSON lines."""
    files = [str(EXAMPLE / "gpt2.pt2"), "--batches", str(EXAMPLE / "batches.safetensors")]
    optimizer = ["--optimizer", "adamw", "--lr", "1e-3", "--init", "normal:0.02", "--seed", "0"]
    run = ["--device", "cpu", "--budget", budget, "--steps", str(steps), "--json"]
    return [str(ROOT / "target/release/lighterage"), "train", *files, *optimizer, *run]


def eager(flags: Sequence[str], threads: int, steps: int) -> list[str]:
    """The command that trains the example with PyTorch and prints a line of JSON a step."""
    return [sys.executable, str(EXAMPLE / "eager.py"), "--threads", str(threads), "--steps", str(steps), *flags]


def millis(command: Sequence[str], threads: int) -> list[float]:
    """The times of the counted steps."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nfailed with {result.returncode}:\n{result.stderr}")
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    times = [line["ms"] for line in lines if "ms" in line]
    if len(times) <= WARM_UP:
        raise SystemExit(f"{' '.join(command)}\nprinted {len(times)} step times; more than {WARM_UP} are needed")
    return times[WARM_UP:]


def machine() -> str:
    """The processor's name and the number of its cores that may be used."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def main() -> None:
    """Read the arguments, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--budgets", nargs="+", default=["100%", "50%"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="measure torch.compile too; needs a C++ compiler")
    args = parser.parse_args()
    ways = {"eager": [], "eager, checkpoint": ["--checkpoint"]} | ({"compiled": ["--compile"]} if args.compile else {})
    print(f"{machine()}; median of {args.rounds} x {args.steps - WARM_UP} steps, ms; in brackets: times eager\n")
    print("| threads | " + " | ".join([*(f"lighterage {budget}" for budget in args.budgets), *ways]) + " |")
    print("|---" * (1 + len(args.budgets) + len(ways)) + "|")
    for threads in args.threads:
        commands = {f"lighterage {budget}": lighterage(budget, args.steps) for budget in args.budgets}
        commands |= {name: eager(flags, threads, args.steps) for name, flags in ways.items()}
        times: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(args.rounds):
            for name, command in commands.items():
                print(f"round {turn + 1} of {args.rounds}, {threads} threads: {name}", file=sys.stderr)
                times[name] += millis(command, threads)
        medians = {name: statistics.median(measured) for name, measured in times.items()}
        cells = [f"{median:.1f} ({median / medians['eager']:.2f})" for median in medians.values()]
        print(f"| {threads} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
