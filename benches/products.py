"""Time products and attention on the CPU, alternately with PyTorch's (MKL, and its fused attention), in one run.

usage: products.py [--threads 1 2] [--rows 2048] [--rounds 5] [--repeats 15] [--dtype bf16]

A figure is the fastest run, with operands that are in no cache, as in a training step. Shapes are those of both models
of benches/models.py. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from step_time import machine

ROOT = Path(__file__).parents[1]
GPT2 = [(384, 1152), (384, 384), (384, 1536), (1536, 384), (384, 8192)]
LLAMA = [(384, 1024), (1024, 384)]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
EVICTED_BYTES = 128 << 20  # more than the last cache of most machines


def cases(rows: int) -> list[str]:
    """Each layer's forward (nt), gradient of its input (nn) and of its weight (tn), batched products, attention."""
    layers = [
        case
        for inner, outer in GPT2 + LLAMA
        for case in (f"1x{rows}x{inner}x{outer}:nt", f"1x{rows}x{outer}x{inner}:nn", f"1x{outer}x{rows}x{inner}:tn")
    ]
    batched = ["48x256x64x256:nt", "48x256x256x64:nn", "48x256x256x64:tn"]
    return [*layers, *batched, "8x6x256x64:fwd", "8x6x256x64:bwd", "1x8x1024x64:fwd", "1x8x1024x64:bwd"]


def work(case: str) -> float:
    """Floating-point operations; for attention only the causal half."""
    a, b, c, d = map(int, case.split(":")[0].split("x"))
    if case.endswith("fwd"):
        return 2.0 * a * b * c * c * d
    return 5.0 * a * b * c * c * d if case.endswith("bwd") else 2.0 * a * b * c * d


def peer(case: str, dtype: torch.dtype) -> Callable[[], object]:
    """The function that PyTorch runs."""
    sizes, what = case.split(":")
    a, b, c, d = map(int, sizes.split("x"))
    if what in ("fwd", "bwd"):
        q, k, v, dout = (torch.randn(a, b, c, d, dtype=dtype) for _ in range(4))
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        if what == "fwd":
            return lambda: forward(q, k, v, is_causal=True)
        out, logsumexp = forward(q, k, v, is_causal=True)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return lambda: backward(dout, q, k, v, out, logsumexp, 0.0, True)
    shapes = [(a, c, b) if what[0] == "t" else (a, b, c), (a, d, c) if what[1] == "t" else (a, c, d)]
    x, w = (torch.randn(shape, dtype=dtype) for shape in shapes)
    x, w = x.transpose(1, 2) if what[0] == "t" else x, w.transpose(1, 2) if what[1] == "t" else w
    y = torch.empty(a, b, d, dtype=dtype)
    if a == 1:
        x, w, y = x[0], w[0], y[0]
        return lambda: torch.mm(x, w, out=y)
    return lambda: torch.bmm(x, w, out=y)


def best(run: Callable[[], object], repeats: int, other: torch.Tensor) -> float:
    """The fastest of several runs, ms; before each, other memory passes through the caches."""
    times = []
    for _ in range(repeats):
        other += 1
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times)


def ours(case: str, threads: int, repeats: int, dtype: str) -> float:
    """The fastest run of our kernel, ms."""
    bench = ["cargo", "bench", "-q", "-p", "lighterage-runtime", "--bench", "products", "--"]
    bench += [str(threads), str(repeats), case, "--cold", f"--{dtype}"]
    result = subprocess.run(bench, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(bench)}\nfailed with {result.returncode}:\n{result.stderr}")
    return float(json.loads(result.stdout)["ms"])


def main() -> None:
    """Read the arguments, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--cases", nargs="+", help="instead of those of the models")
    args = parser.parse_args()
    other = torch.zeros(EVICTED_BYTES, dtype=torch.uint8)
    print(f"{machine()}; fastest of {args.rounds} x {args.repeats} runs, PyTorch {torch.__version__}\n")
    print("| threads | case | lighterage ms (GFLOP/s) | PyTorch ms (GFLOP/s) | ratio |\n|---|---|---|---|---|")
    for threads in args.threads:
        torch.set_num_threads(threads)
        for case in args.cases or cases(args.rows):
            run, pairs = peer(case, DTYPES[args.dtype]), []
            for _ in range(args.rounds):
                pairs.append((ours(case, threads, args.repeats, args.dtype), best(run, args.repeats, other)))
            kernel, torchs = (min(times) for times in zip(*pairs, strict=True))
            cells = [f"{ms:.3g} ({work(case) / ms / 1e6:.0f})" for ms in (kernel, torchs)]
            print(f"| {threads} | {case} | " + " | ".join(cells) + f" | {kernel / torchs:.2f} |", flush=True)


if __name__ == "__main__":
    main()
