"""Steps on a GPU: are they right, how fast, how much memory. scripts/gpu.sh calls it.

usage: gpu_train.py pack --device h100 FOLDER [MODEL ...]
       gpu_train.py run FOLDER --out gpu.json [--dry]

`pack` compiles steps and makes batches, with the command FOLDER/lighterage. `run` needs Python, the folder and NVIDIA's
driver. It writes one JSON object with a part for each section. A section has a time limit; one that fails says why, and
the others still run. Exits with 0 if all sections that could run are right, with 1 if one is wrong. With --dry the
driver is the library that replaces it in tests, and what takes a GPU's time or memory is left out.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import hashlib
import json
import mmap
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = ("100%", "60%", "30%")
TINY = "frontends/cli/tests/data/mlp.ir"
TINY_MODELS = ("gpt2-tiny", "llama-tiny")
BITS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1, "U8": 1}
TOKENS = 64  # token ids are below it: every vocabulary and table of positions has as many
STEPS = 20  # of a timed run
SECONDS = {
    "machine": 60,
    "kernels": 300,
    "tiny": 240,
    "large": 420,
    "torch": 240,
    "link": 120,
    "profile": 180,
    "sanitizer": 240,
    "faults": 60,
}


class SectionError(Exception):
    """Why a section is wrong, or cannot run."""


# -------------------------------------------------------------------------------------------------------------- files


def tensors_file(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """Write a safetensors file."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def numbers(dtype: str, n: int, draw: random.Random) -> bytes:
    """Drawn numbers: small floats, token ids."""
    if dtype in ("F32", "F64"):
        form = "f" if dtype == "F32" else "d"
        return struct.pack(f"<{n}{form}", *(draw.uniform(-1, 1) for _ in range(n)))
    if dtype in ("I64", "I32"):
        return b"".join(draw.randrange(TOKENS).to_bytes(BITS[dtype], "little") for _ in range(n))
    return bytes(n * BITS[dtype])


def call(args: list[str], seconds: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program with a time limit."""
    environment = {**os.environ, **variables}
    return subprocess.run(args, capture_output=True, text=True, timeout=seconds, env=environment, check=False)


def checked(args: list[str], seconds: float, **variables: str) -> str:
    """Run a program that should succeed; its output."""
    done = call(args, seconds, **variables)
    if done.returncode != 0:
        raise SectionError(f"{' '.join(args)}: exit code {done.returncode}: {done.stderr.strip()[-800:]}")
    return done.stdout


# --------------------------------------------------------------------------------------------------------------- pack


def batches(command: str, lit: Path, out: Path) -> None:
    """A file with a batch of drawn numbers for a step."""
    info = json.loads(checked([command, "inspect", str(lit), "--json"], 60))
    draw, tensors = random.Random(1), {}
    for each in info["inputs"]:
        if each["name"].startswith("optimizer."):
            continue
        dtype, sizes = each["type"].rstrip("]").split("[")  # f32[16,16]
        dtype, shape = dtype.upper(), [int(size) for size in sizes.split(",") if size]
        n = 1
        for size in shape:
            n *= size
        tensors[f"batch.0.{each['name']}"] = (dtype, shape, numbers(dtype, n, draw))
    tensors_file(out, tensors)


def packed(folder: Path, command: str, name: str, model: Path, device: str, batch: Path | None) -> list[dict[str, str]]:
    """Compile a model at each budget; what `run` needs to know of each step."""
    steps = []
    for budget in BUDGETS:
        lit = folder / f"{name}-{budget.rstrip('%')}.lit"
        args = [command, "compile", str(model), "--optimizer", "adamw", "--device", device, "--budget", budget]
        done = call([*args, "-o", str(lit)], 1200)
        if done.returncode == 3:  # the budget is too small for this model
            continue
        if done.returncode != 0:
            raise SectionError(f"{name} at {budget}: {done.stderr.strip()[-800:]}")
        steps.append({"name": name, "budget": budget, "lit": lit.name, "batches": f"{name}.safetensors"})
    data = folder / f"{name}.safetensors"
    if batch is None:
        batches(command, folder / steps[0]["lit"], data)
    else:
        shutil.copy(batch, data)
    return steps


def train(command: str, folder: Path, step: dict[str, str], n: int, *rest: str) -> list[str]:
    """The command that trains a packed step."""
    args = [command, "train", str(folder / step["lit"]), "--batches", str(folder / step["batches"]), "--steps", str(n)]
    return [*args, "--init", "normal:0.02", "--lr", "1e-3", "--trust", "--json", *rest]


def losses(text: str) -> list[float]:
    """The losses of a run, from its lines of JSON."""
    lines = [json.loads(line) for line in text.splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def pack(folder: Path, device: str, models: list[Path]) -> None:
    """Make the folder."""
    # The kernel generator lies beside the command that was built, and is not carried.
    command = os.environ["LIGHTERAGE"]
    tiny: dict[str, tuple[Path, Path | None]] = {"mlp": (ROOT / TINY, None)}
    if os.environ.get("DRY") is None:
        for name in TINY_MODELS:
            data = ROOT / "tests/data/models" / name
            found = [data / file for file in ("ref.safetensors", "batches.safetensors") if (data / file).exists()]
            tiny[name] = (data / "joint_core.pt2", found[0])
    manifest: dict[str, Any] = {"device": device, "tiny": [], "large": [], "reference": {}}
    for name, (model, batch) in tiny.items():
        manifest["tiny"] += packed(folder, command, name, model, device, batch)
        cpu = {"lit": f"{name}-cpu.lit", "batches": f"{name}.safetensors"}
        args = [command, "compile", str(model), "--optimizer", "adamw", "-o", str(folder / cpu["lit"])]
        checked(args, 600)
        manifest["reference"][name] = losses(checked(train(command, folder, cpu, 3), 600))
    for model in models:
        manifest["large"] += packed(folder, command, f"large-{model.stem}", model, device, None)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


# ---------------------------------------------------------------------------------------------------------------- run


def unpacked(command: Path) -> Path:
    """The command, which is carried compressed."""
    zipped = command.with_name(f"{command.name}.gz")
    if zipped.exists():
        command.write_bytes(gzip.decompress(zipped.read_bytes()))
        command.chmod(0o755)
    return command


class Run:
    """A run of all sections."""

    def __init__(self, folder: Path, dry: bool) -> None:
        self.folder, self.dry = folder, dry
        self.command = str(unpacked(folder / "lighterage"))
        self.manifest = json.loads((folder / "manifest.json").read_text())
        self.scratch = folder / "scratch"
        self.scratch.mkdir(exist_ok=True)

    def machine(self, seconds: float) -> dict[str, Any]:
        """What is there."""
        found = json.loads(checked([self.command, "devices", "--json"], seconds))
        result: dict[str, Any] = {"gpus": found["gpus"], "cuda_version": found.get("cuda_version")}
        if not found["gpus"]:
            raise SectionError(found.get("why_none", "no GPU"))
        if shutil.which("nvidia-smi"):
            query = (
                "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,power.limit,pcie.link.gen.current"
            )
            text = checked(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], seconds)
            result["nvidia_smi"] = dict(zip(query.split(","), map(str.strip, text.split(",")), strict=False))
        return result

    def kernels(self, seconds: float) -> dict[str, Any]:
        """Every kernel against stored results; memory-bound ones against a copy."""
        folder = self.folder / "kernels"
        if not folder.exists():
            return {"skipped": "no folder kernels"}
        args = [sys.executable, str(ROOT / "benches/gpu_kernels.py"), str(folder)]
        done = call([*args, "--dry-run"] if self.dry else args, seconds)
        if done.returncode != 0:
            raise SectionError(f"exit code {done.returncode}: {(done.stdout + done.stderr).strip()[-2000:]}")
        return {"table": done.stdout}

    def tiny(self, seconds: float) -> dict[str, Any]:
        """The same bits in two runs and at every budget; losses near the processor's."""
        end, result = time.monotonic() + seconds, {}
        bits: dict[str, tuple[list[float], str]] = {}
        for step in self.manifest["tiny"]:
            for again in range(2):
                state = self.scratch / "state.safetensors"
                args = train(self.command, self.folder, step, 3, "--save", str(state))
                text = checked(args, end - time.monotonic())
                summary = json.loads(text.splitlines()[-1])["summary"]
                if summary["planned_peak_bytes"] != summary["measured_peak_bytes"]:
                    raise SectionError(f"{step['lit']}: the measured peak is not the planned one: {summary}")
                left = (losses(text), hashlib.sha256(state.read_bytes()).hexdigest())
                first = bits.setdefault(step["name"], left)
                if left != first:
                    raise SectionError(f"{step['lit']}, run {again + 1}: other bits: {left} and {first}")
                result[f"{step['name']} {step['budget']}"] = summary["measured_ms"]
        for name, (ours, _) in bits.items():
            for a, b in zip(ours, self.manifest["reference"][name], strict=True):
                if abs(a - b) > 1e-3 * max(1.0, abs(b)):
                    raise SectionError(f"{name}: loss {a}, the processor's is {b}")
        return {"measured_ms": result, "losses": {name: ours for name, (ours, _) in bits.items()}}

    def large(self, seconds: float) -> dict[str, Any]:
        """Time and memory of the models that were given, and how much of the copies kernels hide."""
        end = time.monotonic() + seconds
        result: dict[str, Any] = {}
        for step in self.manifest["large"]:
            left = end - time.monotonic()
            if left < 20:
                result[step["lit"]] = {"skipped": "no time left"}
                continue
            text = checked(train(self.command, self.folder, step, 2 if self.dry else STEPS), left)
            each = json.loads(text.splitlines()[-1])["summary"]
            trace = self.scratch / "trace.json"
            args = train(self.command, self.folder, step, 4, "--trace", str(trace))
            checked(args, max(20.0, end - time.monotonic()))
            each["copies"] = overlap(trace)
            result[step["lit"]] = each
        return result or {"skipped": "no models were packed"}

    def torch(self, seconds: float) -> dict[str, Any]:
        """The rates of the day by torch: a product and a copy."""
        code = (
            "import json, torch, time\n"
            "def rate(work, does):\n"
            "    for _ in range(3): does()\n"
            "    torch.cuda.synchronize(); t = time.perf_counter()\n"
            "    for _ in range(20): does()\n"
            "    torch.cuda.synchronize(); return 20 * work / (time.perf_counter() - t)\n"
            "a, b = (torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16) for _ in range(2))\n"
            "x = torch.empty(1 << 28, device='cuda', dtype=torch.float32); y = torch.empty_like(x)\n"
            "print(json.dumps({'torch': torch.__version__, 'bf16_flops': rate(2 * 8192 ** 3, lambda: a @ b),\n"
            "  'copy_bytes_per_second': rate(8 * (1 << 28), lambda: y.copy_(x))}))\n"
        )
        done = call([sys.executable, "-c", code], seconds)
        if done.returncode != 0:
            return {"skipped": done.stderr.strip().splitlines()[-1:]}
        return dict(json.loads(done.stdout))

    def link(self, seconds: float) -> dict[str, Any]:
        """Rates of copies by their size, of both directions at once, and the time to pin memory."""
        end = time.monotonic() + seconds
        return Link(self.dry).measure(end)

    def profile(self, seconds: float) -> dict[str, Any]:
        """`lighterage profile` of the smallest model: the figures that the planner takes."""
        generator = Path(os.environ.get("LIGHTERAGE_MLIR") or self.folder / "lighterage-mlir")
        if not generator.exists():
            return {"skipped": "no kernel generator: LIGHTERAGE_MLIR names it, or it lies in the folder"}
        out = self.scratch / "gpu.prof"
        args = [self.command, "profile", str(ROOT / TINY), "--device", "cuda:0", "--repeat", "3", "-o", str(out)]
        return dict(json.loads(checked([*args, "--json"], seconds, LIGHTERAGE_MLIR=str(generator))))

    def sanitizer(self, seconds: float) -> dict[str, Any]:
        """compute-sanitizer on a tiny step."""
        tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if self.dry or not Path(tool).exists():
            return {"skipped": "no compute-sanitizer"}
        result = {}
        for check in ("memcheck", "racecheck"):
            args = [tool, "--tool", check, "--error-exitcode", "9"]
            done = call([*args, *train(self.command, self.folder, self.manifest["tiny"][0], 1)], seconds / 2)
            result[check] = {"code": done.returncode, "says": done.stdout.strip()[-800:]}
            if done.returncode == 9:
                raise SectionError(f"{check}: {done.stdout.strip()[-2000:]}")
        return result

    def faults(self, seconds: float) -> dict[str, Any]:
        """What is refused, with its exit code and its text."""
        step = self.manifest["tiny"][0]
        args = train(self.command, self.folder, step, 1)
        cases = {
            "no driver": (2, args, {"LIGHTERAGE_CUDA": "/nowhere/libcuda.so.1"}),
            "no such GPU": (2, [*args, "--device", "cuda:63"], {}),
        }
        result = {}
        for name, (code, case, variables) in cases.items():
            done = call(case, seconds, **variables)
            lines = done.stderr.strip().splitlines()
            result[name] = {"code": done.returncode, "says": lines}
            if done.returncode != code or len(lines) != 1:
                raise SectionError(f"{name}: exit code {done.returncode}, not {code}: {lines}")
        return result


def overlap(trace: Path) -> dict[str, float]:
    """The time of copies in a trace, and the share of it in which kernels run."""
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    work = [event for event in events if event["ph"] == "X" and event["cat"] != "wait"]
    spans = [(names[event["tid"]], event["ts"], event["ts"] + event["dur"]) for event in work]
    kernels = sorted((start, end) for stream, start, end in spans if stream == "compute")
    copies = [(start, end) for stream, start, end in spans if stream in ("h2d", "d2h")]
    total = sum(end - start for start, end in copies)
    hidden = 0.0
    for start, end in copies:
        hidden += sum(max(0.0, min(end, b) - max(start, a)) for a, b in kernels)
    return {"copy_ms": total / 1e3, "hidden_share": hidden / total if total else 1.0}


class Link:
    """The driver's copies, by ctypes."""

    def __init__(self, dry: bool) -> None:
        self.cuda = ctypes.CDLL(os.environ.get("LIGHTERAGE_CUDA") or "libcuda.so.1")
        self.sizes = [1 << 16] if dry else [1 << 20, 4 << 20, 16 << 20, 64 << 20]
        self.pinned_bytes = 1 << 20 if dry else 1 << 30
        self.rounds = 2 if dry else 20

    def do(self, name: str, *args: Any) -> None:
        """Call the driver."""
        status = getattr(self.cuda, name)(*args)
        if status != 0:
            raise SectionError(f"{name}: status {status}")

    def pointer(self, name: str, *args: Any) -> ctypes.c_void_p:
        """Call a function that gives something."""
        out = ctypes.c_void_p()
        self.do(name, ctypes.byref(out), *args)
        return out

    def measure(self, end: float) -> dict[str, Any]:
        """Everything, until the time is over."""
        self.do("cuInit", 0)
        context = self.pointer("cuDevicePrimaryCtxRetain", 0)
        self.do("cuCtxSetCurrent", context)
        most = max(self.sizes)
        hosts = [self.pointer("cuMemHostAlloc", ctypes.c_size_t(most), 0) for _ in range(2)]
        blocks = [self.pointer("cuMemAlloc_v2", ctypes.c_size_t(most)) for _ in range(2)]
        streams = [self.pointer("cuStreamCreate", 1) for _ in range(2)]
        result: dict[str, Any] = {}
        for size in self.sizes:
            ways = {"h2d": [0], "d2h": [1], "both": [0, 1]}
            for name, which in ways.items():
                if time.monotonic() < end:
                    result[f"{name} {size >> 10} KiB"] = self.rate(size, which, hosts, blocks, streams)
        for name, advice in (("pin", None), ("pin with huge pages", 14)):  # MADV_HUGEPAGE
            result[f"{name}, seconds per GiB"] = self.pin(advice)
        self.do("cuCtxSynchronize")
        return result

    def rate(self, size: int, which: list[int], hosts: Any, blocks: Any, streams: Any) -> float:
        """Bytes per second of copies to the device (0), from it (1), or both at once."""
        n, times = ctypes.c_size_t(size), []
        for _ in range(self.rounds):
            began = time.perf_counter()
            for way in which:
                if way == 0:
                    self.do("cuMemcpyHtoDAsync_v2", blocks[0], hosts[0], n, streams[0])
                else:
                    self.do("cuMemcpyDtoHAsync_v2", hosts[1], blocks[1], n, streams[1])
            for way in which:
                self.do("cuStreamSynchronize", streams[way])
            times.append(time.perf_counter() - began)
        return len(which) * size / median(times)

    def pin(self, advice: int | None) -> float:
        """Seconds per GiB to pin memory that is touched."""
        memory = mmap.mmap(-1, self.pinned_bytes)
        if advice is not None:
            memory.madvise(advice)
        for at in range(0, self.pinned_bytes, 4096):
            memory[at] = 1
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        began = time.perf_counter()
        self.do("cuMemHostRegister_v2", ctypes.c_void_p(start), ctypes.c_size_t(self.pinned_bytes), 1)
        taken = time.perf_counter() - began
        self.do("cuMemHostUnregister", ctypes.c_void_p(start))
        return taken * (1 << 30) / self.pinned_bytes


def run(folder: Path, out: Path, dry: bool) -> int:
    """All sections; the exit code."""
    the_run = Run(folder, dry)
    result: dict[str, Any] = {"dry": dry, "sections": {}}
    wrong: list[str] = []
    for name, seconds in SECONDS.items():
        section: Callable[[float], dict[str, Any]] = getattr(the_run, name)
        began = time.monotonic()
        try:
            found = section(seconds)
        except subprocess.TimeoutExpired as error:
            found = {"error": f"longer than {error.timeout:.0f} s: {error.cmd}"}
        except (SectionError, OSError, ValueError, KeyError) as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        if "error" in found:
            wrong.append(name)
        found["seconds"] = round(time.monotonic() - began, 2)
        result["sections"][name] = found
        state = "wrong" if "error" in found else "skipped" if "skipped" in found else "ok"
        print(f"{name:10} {state:8} {found['seconds']:8.2f} s  {found.get('error', '')}", flush=True)
        # So that what is known is there if the machine goes away.
        out.write_text(json.dumps(result, indent=1))
    shutil.rmtree(the_run.scratch, ignore_errors=True)
    return 1 if wrong else 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    packing = modes.add_parser("pack")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--device", default="h100")
    packing.add_argument("models", type=Path, nargs="*")
    running = modes.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if args.mode == "pack":
        pack(args.folder, args.device, args.models)
        return 0
    return run(args.folder, args.out, args.dry)


if __name__ == "__main__":
    sys.exit(main())
