"""cuBLASLt's algorithms for products: the one that it proposes first beside the fastest of 32, on an NVIDIA GPU.

usage: gpu_products.py FILE.algorithms ... [--json OUT.json]

The files are those that `lighterage train step.lit` keeps beside a step: each line has the shape of a product. For
each shape the library proposes 32 algorithms that give the same bits in every run. Each computes random numbers five
times in turn; the least time by the GPU's clock counts. This script needs Python, NVIDIA's driver and cuBLASLt
(LIGHTERAGE_CUDA and LIGHTERAGE_CUBLASLT name their files). It prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import sys
from ctypes import byref, c_float, c_int, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from pathlib import Path
from typing import Any

# Numbers of cublasLt.h, as in runtime/src/cuda/products.rs.
TYPES = {"F32": (0, 4), "BF16": (14, 2)}
COMPUTE = {"": 68, "-tf32": 77}
TRANSPOSE = {"A": 3, "B": 4}
EPILOGUE, BIAS_POINTER, EPILOGUE_BIAS = 7, 8, 4
BATCH_COUNT, BATCH_OFFSET = 5, 6
WORKSPACE, REDUCTIONS, ALIGNMENTS, ALIGN, IN_ORDER = 1, 3, (5, 6, 7, 8), 64, 6
PROPOSED, ROUNDS = 32, 5
SHAPE = re.compile(r"(\w+)-(\w+)-(\w+)-([tn])([tn])-(\d+)x(\d+)x(\d+)x(\d+)-(\d+)(-tf32)?")


class Choice(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Gpu:
    """The driver and the library."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL(os.environ.get("LIGHTERAGE_CUDA", "libcuda.so.1"))
        self.library = ctypes.CDLL(os.environ.get("LIGHTERAGE_CUBLASLT", "libcublasLt.so.13"))
        context = c_void_p()
        self.cuda("cuInit", 0)
        self.cuda("cuDevicePrimaryCtxRetain", byref(context), 0)
        self.cuda("cuCtxSetCurrent", context)
        self.handle = c_void_p()
        self.lt("cublasLtCreate", byref(self.handle))
        self.stream = c_void_p()
        self.cuda("cuStreamCreate", byref(self.stream), 1)
        self.events = [c_void_p(), c_void_p()]
        for event in self.events:
            self.cuda("cuEventCreate", byref(event), 0)

    def cuda(self, name: str, *args: Any) -> None:
        """Call the driver."""
        if status := getattr(self.driver, name)(*args):
            raise RuntimeError(f"{name}: status {status}")

    def lt(self, name: str, *args: Any) -> None:
        """Call the library."""
        if status := getattr(self.library, name)(*args):
            raise RuntimeError(f"{name}: status {status}")

    def memory(self, n: int) -> c_uint64:
        """Memory with numbers around 1 in bf16, or in f32."""
        at = c_uint64()
        self.cuda("cuMemAlloc_v2", byref(at), c_size_t(n))
        block = (os.urandom(1) + b"\x3f" for _ in range(1 << 15))  # 0x3f00 to 0x3fff
        seed = b"".join(block)[:n]
        self.cuda("cuMemcpyHtoDAsync_v2", at, seed, c_size_t(len(seed)), self.stream)
        done = len(seed)
        while done < n:
            part = min(done, n - done)
            self.cuda("cuMemcpyDtoDAsync_v2", c_uint64(at.value + done), at, c_size_t(part), self.stream)
            done += part
        self.cuda("cuCtxSynchronize")
        return at

    def layout(self, kind: int, rows: int, columns: int, batch: int) -> c_void_p:
        """A matrix whose columns follow each other."""
        out = c_void_p()
        made = (c_uint64(rows), c_uint64(columns), ctypes.c_int64(rows))
        self.lt("cublasLtMatrixLayoutCreate", byref(out), kind, *made)
        if batch > 1:
            count, offset = c_int(batch), ctypes.c_int64(rows * columns)
            self.lt("cublasLtMatrixLayoutSetAttribute", out, BATCH_COUNT, byref(count), c_size_t(4))
            self.lt("cublasLtMatrixLayoutSetAttribute", out, BATCH_OFFSET, byref(offset), c_size_t(8))
        return out

    def product(self, line: str) -> dict[str, Any]:
        """Times of the algorithms of a shape, ms, in the order in which they were proposed."""
        found = SHAPE.fullmatch(line)
        if not found:
            raise RuntimeError(f"{line}: no shape")
        factors, result, addend, ta, tb = found.groups()[:5]
        batch, m, n, k, workspace = map(int, found.groups()[5:10])
        (kind, width), (out_kind, out_width) = TYPES[factors], TYPES[result]
        a, b = self.memory(batch * m * k * width), self.memory(batch * k * n * width)
        c, room, bias = self.memory(batch * m * n * out_width), self.memory(max(workspace, 256)), self.memory(n * 4)
        operation = c_void_p()
        self.lt("cublasLtMatmulDescCreate", byref(operation), COMPUTE[found.group(11) or ""], TYPES["F32"][0])

        def put(which: int, value: Any) -> None:
            self.lt("cublasLtMatmulDescSetAttribute", operation, which, byref(value), c_size_t(sizeof(value)))

        put(TRANSPOSE["A"], c_int(tb == "t"))
        put(TRANSPOSE["B"], c_int(ta == "t"))
        if addend == "Bias":
            put(EPILOGUE, c_uint32(EPILOGUE_BIAS))
            put(BIAS_POINTER, bias)
        layouts = [
            self.layout(kind, *((k, n) if tb == "t" else (n, k)), batch),
            self.layout(kind, *((m, k) if ta == "t" else (k, m)), batch),
            self.layout(out_kind, n, m, batch),
        ]
        preference = c_void_p()
        self.lt("cublasLtMatmulPreferenceCreate", byref(preference))
        for which, value in [
            (WORKSPACE, c_uint64(workspace)),
            (REDUCTIONS, c_uint32(IN_ORDER)),
            *((each, c_uint32(ALIGN)) for each in ALIGNMENTS),
        ]:
            self.lt("cublasLtMatmulPreferenceSetAttribute", preference, which, byref(value), c_size_t(sizeof(value)))
        choices, count = (Choice * PROPOSED)(), c_int()
        ends = (layouts[2], layouts[2])
        self.lt(
            "cublasLtMatmulAlgoGetHeuristic",
            *(self.handle, operation, layouts[0], layouts[1], *ends, preference, PROPOSED, choices, byref(count)),
        )
        one, beta = c_float(1), c_float(1 if addend == "Matrix" else 0)

        def run(choice: Choice) -> float:
            self.cuda("cuEventRecord", self.events[0], self.stream)
            self.lt(
                "cublasLtMatmul",
                *(self.handle, operation, byref(one), b, layouts[0], a, layouts[1], byref(beta), c, layouts[2]),
                *(c, layouts[2], byref(choice.algorithm), room, c_size_t(workspace), self.stream),
            )
            self.cuda("cuEventRecord", self.events[1], self.stream)
            self.cuda("cuEventSynchronize", self.events[1])
            took = c_float()
            self.cuda("cuEventElapsedTime", byref(took), *self.events)
            return took.value

        times = [[float("inf")] for _ in range(count.value)]
        for _ in range(ROUNDS + 1):
            for choice, each in zip(choices, times, strict=False):
                try:
                    each.append(run(choice))
                except RuntimeError:
                    each.append(float("inf"))
        least = [min(each[2:]) for each in times]
        for at in (a, b, c, room, bias):
            self.cuda("cuMemFree_v2", at)
        best = min(range(len(least)), key=least.__getitem__)
        flops = 2 * batch * m * n * k
        return {
            "shape": line,
            "first_ms": least[0],
            "best_ms": least[best],
            "best": best,
            "n": len(least),
            "tflops": flops / least[0] / 1e9,
            "words": list(choices[best].algorithm),
            "all_ms": least,
        }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, help="write the times here")
    args = parser.parse_args()
    shapes = {line.split(" ")[0] for file in args.files for line in file.read_text().splitlines()[1:]}
    gpu, rows = Gpu(), []
    print("| shape | first, ms | TFLOP/s | the fastest, ms | its place |\n|---|---|---|---|---|")
    for shape in sorted(shapes):
        row = gpu.product(shape)
        rows.append(row)
        cells = [shape, f"{row['first_ms']:.3f}", f"{row['tflops']:.0f}", f"{row['best_ms']:.3f}"]
        print("| " + " | ".join([*cells, f"{row['best'] + 1} of {row['n']}"]) + " |", flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
