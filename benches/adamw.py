"""Time AdamW's update on the CPU: the kernel, a memory-bound loop, and PyTorch's fused AdamW, in one run.

usage: adamw.py [--elements 33554432] [--threads 1 2] [--rounds 5]

All three read the parameter, the gradient and two moments and write the parameter and the moments in place, f32: 28
bytes an element. `streams` does this with almost no arithmetic, so it shows the limit of the memory. They run in turn,
round by round. A figure is the best time, with the bandwidth in brackets: by the clock, and by processor time per
thread, which other programs disturb less. Prints a table in Markdown; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from step_time import machine

ROOT = Path(__file__).parents[1]
BYTES = 28  # read p, g, m, v and write p, m, v: four bytes each
REPEATS = 3  # measurements of each program in a round


def ours(elements: int, threads: int) -> list[dict[str, float]]:
    """Times of the kernel and of the streams."""
    bench = ["cargo", "bench", "-q", "-p", "lighterage-runtime", "--bench", "adamw"]
    command = [*bench, "--", str(elements), str(threads), str(REPEATS)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nfailed with {result.returncode}:\n{result.stderr}")
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def fused(elements: int, threads: int) -> list[dict[str, float]]:
    """Times of PyTorch's fused AdamW, without its first step."""
    torch.set_num_threads(threads)
    parameter = torch.nn.Parameter(torch.full((elements,), 0.5))
    parameter.grad = torch.full((elements,), 1e-3)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    times = []
    for _ in range(REPEATS + 1):
        start, cpu = time.perf_counter(), time.process_time()
        optimizer.step()
        end, cpu_end = time.perf_counter(), time.process_time()
        times.append({"fused_ms": (end - start) * 1e3, "fused_cpu_ms": (cpu_end - cpu) * 1e3 / threads})
    return times[1:]


def main() -> None:
    """Read the arguments, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 25)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    count = args.rounds * REPEATS
    print(f"{machine()}; {args.elements} elements, best of {count}, ms (GB/s); PyTorch {torch.__version__}\n")
    print("| threads | time | streams | lighterage | of streams | PyTorch, fused |\n|---|---|---|---|---|---|")
    for threads in args.threads:
        times: dict[str, list[float]] = {}
        for turn in range(args.rounds):
            print(f"round {turn + 1} of {args.rounds}, {threads} threads", file=sys.stderr)
            for line in ours(args.elements, threads) + fused(args.elements, threads):
                for key, value in line.items():
                    times.setdefault(key, []).append(value)
        for name, key in [("clock", "ms"), ("processor", "cpu_ms")]:
            streams, kernel, torchs = (min(times[f"{what}_{key}"]) for what in ["streams", "kernel", "fused"])
            cells = [f"{ms:.1f} ({BYTES * args.elements / ms / 1e6:.1f})" for ms in [streams, kernel, torchs]]
            cells.insert(2, f"{100 * streams / kernel:.0f} %")
            print(f"| {threads} | {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
