"""Steps on a GPU: are they right, how fast, how much memory. scripts/gpu.sh calls it.

usage: gpu_train.py pack --device h100 [--gpt2] FOLDER [MODEL ...]
       gpu_train.py run FOLDER --out gpu.json [--dry] [--only SECTION ...]

`pack` compiles steps and makes batches, with the command FOLDER/lighterage. `run` needs Python, the folder and NVIDIA's
driver; with PyTorch it also compares losses and times with PyTorch's. It writes one JSON object with a part for each
section. Sections without times run at once, then the others one by one. A section has a time limit; one that fails says
why, and the others still run. Exits with 0 if all sections that could run are right, with 1 if one is wrong. With --dry
the driver is the library that replaces it in tests, and what takes a GPU's time or memory is left out.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import lzma
import mmap
import os
import random
import shutil
import struct
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = ("100%", "60%", "30%")
TINY = "frontends/cli/tests/data/mlp.ir"
FIXTURES = ("bert-tiny", "gpt2-tiny", "llama-tiny", "moe-tiny", "resnet-tiny")  # with losses of PyTorch
TINY_MODELS = (*FIXTURES, "dropout-tiny")
GPT2 = {"f32": 4, "bf16": 64}  # batches of 1024 tokens for a GPT-2 124M
LADDER = ("100%", "90%", "80%", "75%", "60%", "45%", "30%")
CHUNKS = "8"  # of the loss at every budget: with other chunks the head's products have other shapes, and other bits
LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
}
LENGTH = 1024  # tokens of a sequence


def llama(width: int, inner: int, layers: int) -> dict[str, Any]:
    """The config.json of a LLaMA with heads of 128 numbers."""
    heads = width // 128
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**LLAMA, **sizes, "num_attention_heads": heads, "num_key_value_heads": heads}


@dataclass(frozen=True)
class Model:
    """A model in bf16 with AdamW: a size of gpu_torch.py's GPT-2, or a config.json; sequences; budgets."""

    source: str | dict[str, Any]
    batch: int
    budgets: tuple[str, ...] = ("100%",)
    host: str | None = None  # the host's memory for states and activations
    ways: tuple[str, ...] = ("compile",)  # PyTorch's


WAYS = ("compile 1", "compile 0.5", "compile 0.2", "compile 0.05", "checkpoint", "offload")
OFFLOADED = ("deepspeed", "fsdp-offload")
MODELS = {
    "124m": Model("124m", 64, LADDER, ways=WAYS),
    "xl": Model("xl", 16, LADDER, ways=WAYS),
    "1b": Model(llama(2048, 5632, 20), 16),
    "3b": Model(llama(3200, 8640, 26), 8, LADDER, ways=WAYS),
    "7b": Model(llama(4096, 11008, 32), 16, ("74GiB",), "110GiB", OFFLOADED),
    "13b": Model(llama(5120, 13824, 40), 16, ("74GiB",), "110GiB", OFFLOADED),
    "20b": Model(llama(6144, 16384, 44), 8, ("134GiB",), "112GiB", ()),  # for an H200
}
BITS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1, "U8": 1}
TOKENS = 64  # token ids are below it: every vocabulary and table of positions has as many
STEPS = 20  # of a timed run
STEPS_FILE = "steps.tar.xz"
# Sections that may share the device, because no time in them counts; and the others.
TOGETHER = {"machine": 60, "kernels": 240, "tiny": 240, "sanitizer": 100, "faults": 60, "compiling": 90}
ALONE = {
    "torch": 120,
    "times": 120,
    "gpt2": 240,
    "compiled": 120,
    "python": 150,
    "models": 300,
    "memory": 60,
    "allocator": 120,
    "link": 60,
    "profile": 90,
    "predicted": 180,
    "large": 420,
}
WORKERS = 6  # processes of a section at once


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


def train(command: str, folder: Path, step: dict[str, str], n: int, *rest: str, init: str = "normal:0.02") -> list[str]:
    """The command that trains a packed step."""
    args = [command, "train", str(folder / step["lit"]), "--batches", str(folder / step["batches"]), "--steps", str(n)]
    return [*args, "--init", init, "--lr", "1e-3", "--trust", "--json", *rest]


def losses(text: str) -> list[float]:
    """The losses of a run, from its lines of JSON."""
    lines = [json.loads(line) for line in text.splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def exported(out: Path, size: str, batch: int) -> Path:
    """A GPT-2 as a file."""
    program = [os.environ.get("PYTHON", sys.executable), str(ROOT / "benches/gpu_torch.py")]
    checked([*program, "export", str(out), "--batch", str(batch), "--size", size], 600)
    return out


def planned(folder: Path, command: str, name: str, device: str) -> list[dict[str, str]]:
    """Compile one of MODELS at its budgets; what `run` needs to know of each step."""
    model, steps = MODELS[name], []
    dims: list[str] = []
    if isinstance(model.source, str):
        path = exported(folder / f"{name}.pt2", model.source, model.batch)
    else:
        path = folder / f"{name}.json"
        path.write_text(json.dumps(model.source))
        dims = ["--dim", f"batch={model.batch}", "--dim", f"sequence={LENGTH}"]
    for budget in model.budgets:
        lit = folder / f"{name}-{budget.rstrip('%')}.lit"
        args = [command, "compile", str(path), *dims, "--optimizer", "adamw", "--device", device, "--precision", "bf16"]
        # Parameters that wait on the host come in half the bytes if they are stored in bf16.
        beyond = ["--host", model.host, "--master", "split"] if model.host else []
        args += ["--budget", budget, *beyond, "-o", str(lit)]
        checked(args, 1200)
        steps.append({"name": name, "budget": budget, "lit": lit.name, "batches": f"{name}.safetensors"})
    batches(command, folder / steps[0]["lit"], folder / f"{name}.safetensors")
    if path.suffix == ".pt2":
        path.unlink()
    return steps


def pack(folder: Path, device: str, models: list[Path], gpt2: bool, beside: list[str]) -> None:
    """Make the folder."""
    # The kernel generator lies beside the command that was built.
    command = os.environ["LIGHTERAGE"]
    tiny: dict[str, tuple[Path, Path | None]] = {"mlp": (ROOT / TINY, None)}
    if os.environ.get("DRY") is None:
        for name in TINY_MODELS:
            data = ROOT / "tests/data/models" / name
            found = [data / file for file in ("ref.safetensors", "batches.safetensors") if (data / file).exists()]
            tiny[name] = (data / "joint_core.pt2", found[0])
    manifest: dict[str, Any] = {"device": device, "tiny": [], "large": [], "gpt2": [], "reference": {}}
    manifest["models"] = {name: planned(folder, command, name, device) for name in beside}
    for name, (model, batch) in tiny.items():
        manifest["tiny"] += packed(folder, command, name, model, device, batch)
        cpu = {"lit": f"{name}-cpu.lit", "batches": f"{name}.safetensors"}
        args = [command, "compile", str(model), "--optimizer", "adamw", "-o", str(folder / cpu["lit"])]
        checked(args, 600)
        manifest["reference"][name] = losses(checked(train(command, folder, cpu, 3), 600))
        (folder / cpu["lit"]).unlink()
    for precision, n in GPT2.items() if gpt2 else ():
        model = exported(folder / f"gpt2-{n}.pt2", "124m", n)
        for budget, chunks in [("100%", "auto"), *((budget, CHUNKS) for budget in BUDGETS)]:
            lit = f"gpt2-{precision}-{chunks}-{budget.rstrip('%')}.lit"
            args = [command, "compile", str(model), "--optimizer", "adamw", "--device", device, "--budget", budget]
            args += ["--precision", precision, "--loss-chunks", chunks, "-o", str(folder / lit)]
            checked(args, 1200)
            manifest["gpt2"].append({"precision": precision, "batch": n, "chunks": chunks, "lit": lit})
    newer = [command, "compile", str(ROOT / TINY), "--optimizer", "adamw", "--target", "sm_100"]
    checked([*newer, "--device", device, "-o", str(folder / "newer.lit")], 600)
    (folder / "llama.json").write_text(json.dumps(LLAMA))
    for model in models:
        manifest["large"] += packed(folder, command, f"large-{model.stem}", model, device, None)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    with tarfile.open(folder / STEPS_FILE, "w:xz") as archive:
        for path in [
            each for form in ("*.lit", "*.safetensors", "*b.json", "llama.json") for each in folder.glob(form)
        ]:
            archive.add(path, path.name)
            path.unlink()


# ---------------------------------------------------------------------------------------------------------------- run


def unpacked(program: Path) -> Path:
    """A program, which is carried compressed."""
    zipped = program.with_name(f"{program.name}.xz")
    if zipped.exists() and not program.exists():
        program.write_bytes(lzma.decompress(zipped.read_bytes()))
        program.chmod(0o755)
    return program


def library() -> str | None:
    """Where PyTorch's packages have cuBLASLt."""
    for folder in map(Path, sys.path):
        for found in sorted(folder.glob("nvidia/cu*/lib/libcublasLt.so.1[23]")):
            return str(found)
    return None


class Run:
    """A run of all sections."""

    def __init__(self, folder: Path, dry: bool) -> None:
        self.folder, self.dry = folder, dry
        self.command = str(unpacked(folder / "lighterage"))
        generator = unpacked(folder / "lighterage-mlir")
        if generator.exists():
            os.environ.setdefault("LIGHTERAGE_MLIR", str(generator.resolve()))
        # Else the system's folders are searched.
        if not dry and (found := library()):
            os.environ.setdefault("LIGHTERAGE_CUBLASLT", found)
        with tarfile.open(folder / STEPS_FILE) as archive:
            archive.extractall(folder, filter="data")
        os.environ.setdefault("LIGHTERAGE_CUDA_TIMEOUT", "30")
        self.manifest = json.loads((folder / "manifest.json").read_text())
        self.found: dict[str, dict[str, Any]] = {}
        self.scratch = folder / "scratch"
        self.scratch.mkdir(exist_ok=True)
        self.has_torch = not dry and call([sys.executable, "-c", "import torch"], 120).returncode == 0

    def peer(self, seconds: float, *args: str) -> dict[str, Any]:
        """The last line of benches/gpu_torch.py."""
        text = checked([sys.executable, str(ROOT / "benches/gpu_torch.py"), *args], seconds)
        return dict(json.loads(text.strip().splitlines()[-1]))

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
        """Every kernel against stored results."""
        folder = self.folder / "kernels"
        if not folder.exists():
            return {"skipped": "no folder kernels"}
        for name in ("kernels.bin", "kernels.json"):
            unpacked(folder / name)
        args = [sys.executable, str(ROOT / "benches/gpu_kernels.py"), str(folder), "--part", "check"]
        if self.dry:
            return {"says": checked([*args, "--dry-run"], seconds)}
        shards = [f"{i}/{WORKERS}" for i in range(WORKERS)]
        with ThreadPoolExecutor(WORKERS) as pool:
            done = list(pool.map(lambda shard: call([*args, "--shard", shard], seconds), shards))
        wrong = [line for each in done for line in each.stderr.splitlines()]
        result: dict[str, Any] = {"says": [each.stdout.strip() for each in done], "wrong": wrong}
        if any(each.returncode != 0 for each in done):
            result["error"] = f"{len(wrong)} findings, the first: {wrong[:3]}"
        return result

    def times(self, seconds: float) -> dict[str, Any]:
        """Memory-bound kernels beside a copy, attention."""
        folder = self.folder / "kernels"
        if not folder.exists() or self.dry:
            return {"skipped": "no folder kernels"}
        args = [sys.executable, str(ROOT / "benches/gpu_kernels.py"), str(folder), "--part", "time"]
        done = call(args, seconds)
        result = {"table": done.stdout.splitlines(), "says": done.stderr.splitlines()}
        return result if done.returncode == 0 else {**result, "error": done.stderr[-800:]}

    def tiny(self, seconds: float) -> dict[str, Any]:
        """The same bits in two runs and at every budget; losses near the processor's and PyTorch's."""
        end, result = time.monotonic() + seconds, {}
        theirs: dict[str, Any] = {}
        if self.has_torch:
            models = str(ROOT / "tests/data/models")
            theirs = self.peer(seconds, "fixtures", models, *FIXTURES, "--out", str(self.scratch))

        def one(work: tuple[dict[str, str], int]) -> tuple[list[float], str, dict[str, Any]]:
            step, turn = work
            state = self.scratch / f"{step['lit']}-{turn}.safetensors"
            init = self.scratch / f"{step['name']}-init.safetensors"
            given = str(init) if init.exists() else "normal:0.02"
            args = train(self.command, self.folder, step, 3 if self.dry else STEPS, "--save", str(state), init=given)
            # The third turn has no library for products.
            text = checked(args, end - time.monotonic(), **({"LIGHTERAGE_CUBLASLT": "0"} if turn == 2 else {}))
            return losses(text), hashlib.sha256(state.read_bytes()).hexdigest(), json.loads(text.splitlines()[-1])

        work = [(step, turn) for step in self.manifest["tiny"] for turn in range(2)]
        if not self.dry:
            work += [(step, 2) for step in self.manifest["tiny"] if step["budget"] == "100%"]
        wrong: list[str] = []
        bits: dict[tuple[str, bool], tuple[list[float], str]] = {}
        with ThreadPoolExecutor(1 if self.dry else WORKERS) as pool:
            runs = [(step, turn, pool.submit(one, (step, turn))) for step, turn in work]
        for step, turn, future in runs:
            name = f"{step['lit']}, run {turn + 1}"
            try:
                ours, state, last = future.result()
            except (SectionError, subprocess.TimeoutExpired) as error:
                wrong.append(f"{name}: {error}")
                continue
            summary = last["summary"]
            if summary["planned_peak_bytes"] != summary["measured_peak_bytes"]:
                wrong.append(f"{name}: the measured peak is not the planned one: {summary}")
            first = bits.setdefault((step["name"], turn == 2), (ours, state))
            if (ours, state) != first:
                wrong.append(f"{name}: other bits: {ours}, {first[0]}")
            result[name] = summary["measured_ms"]
        differences = {}
        for (name, own), (ours, _) in bits.items():
            of_torch = theirs.get(name)
            expected = of_torch if isinstance(of_torch, list) else self.manifest["reference"][name]
            pairs = list(zip(ours, expected, strict=False))
            differences[f"{name}{' without cuBLASLt' if own else ''}"] = max(abs(a - b) for a, b in pairs)
            for k, (a, b) in enumerate(pairs):
                if not abs(a - b) <= 1e-4 * max(1.0, abs(b)):
                    wrong.append(f"{name}: loss {k} is {a}, not {b}")
                    break
        found = {"measured_ms": result, "differences": differences, "torch": theirs, "wrong": wrong}
        return {**found, "error": f"{len(wrong)}: {wrong[:2]}"} if wrong else found

    def gpt2(self, seconds: float) -> dict[str, Any]:
        """GPT-2 124M beside PyTorch, from the same weights on the same batches."""
        if not self.manifest["gpt2"] or not self.has_torch:
            return {"skipped": "no GPT-2 was packed, or no PyTorch"}
        end, result, wrong = time.monotonic() + seconds, {}, []
        at = str(self.scratch)
        peers: dict[str, dict[str, Any]] = {}
        for precision in dict.fromkeys(step["precision"] for step in self.manifest["gpt2"]):
            n = GPT2[precision]
            try:
                args = ["gpt2", "--out", at, "--batch", str(n), "--precision", precision]
                peers[precision] = self.peer(max(1.0, end - time.monotonic()), *args)
            except (SectionError, subprocess.TimeoutExpired) as error:
                wrong.append(f"PyTorch, {precision}: {error}")
            torch_losses = peers.get(precision, {}).get("losses")
            bits: dict[str, tuple[list[float], str]] = {}
            for step in self.manifest["gpt2"]:
                if step["precision"] != precision:
                    continue
                files = {**step, "batches": f"scratch/gpt2-{n}-batches.safetensors"}
                state, trace = self.scratch / "state.safetensors", self.scratch / f"{step['lit']}.trace.json"
                init = f"{at}/gpt2-124m-init.safetensors"
                args = train(self.command, self.folder, files, STEPS, "--save", str(state), init=init)
                try:
                    text = checked(args, max(1.0, end - time.monotonic()))
                    if step["lit"].endswith(("auto-100.lit", "-30.lit")):
                        traced = train(self.command, self.folder, files, 4, "--trace", str(trace))
                        checked(traced, max(1.0, end - time.monotonic()))
                except (SectionError, subprocess.TimeoutExpired) as error:
                    wrong.append(f"{step['lit']}: {error}")
                    continue
                each = json.loads(text.splitlines()[-1])["summary"]
                each["ms"] = [json.loads(line)["ms"] for line in text.splitlines() if '"ms"' in line]
                ours = (losses(text), hashlib.sha256(state.read_bytes()).hexdigest())
                each["losses"] = ours[0]
                if trace.exists():
                    each["copies"] = overlap(trace)
                first = bits.setdefault(step["chunks"], ours)
                if ours != first:
                    wrong.append(f"{step['lit']}: other bits: {ours[0]}, {first[0]}")
                if torch_losses:
                    each["difference"] = max(abs(a - b) for a, b in zip(ours[0], torch_losses, strict=True))
                    if precision == "f32" and not each["difference"] <= 1e-4 * max(torch_losses):
                        wrong.append(f"{step['lit']}: losses differ by {each['difference']}")
                result[step["lit"]] = each
        found = {"steps": result, "torch": peers, "wrong": wrong}
        return {**found, "error": f"{len(wrong)}: {wrong[:2]}"} if wrong else found

    def compiled(self, seconds: float) -> dict[str, Any]:
        """torch.compile of the GPT-2 124M in bf16."""
        if not self.manifest["gpt2"] or not self.has_torch:
            return {"skipped": "no GPT-2 was packed, or no PyTorch"}
        args = ["gpt2", "--out", str(self.scratch), "--batch", str(GPT2["bf16"]), "--way", "compile"]
        result = self.peer(seconds, *args)
        ours = self.found.get("gpt2", {}).get("steps", {})
        for lit, each in ours.items():
            if "bf16" in lit:
                off = max(abs(a - b) for a, b in zip(each["losses"], result["losses"], strict=True))
                result[f"difference of {lit}"] = off
                if not off <= 2e-3 * max(result["losses"]):
                    result["error"] = f"{lit}: losses differ by {off}"
        return result

    def python(self, seconds: float) -> dict[str, Any]:
        """GPT-2 124M in bf16 by the Python package: whole steps, and the backend of torch.compile."""
        packed = [self.folder / f"_lighterage.abi3.so{end}" for end in ("", ".xz")]
        if not any(path.exists() for path in packed) or not self.has_torch or "LIGHTERAGE_MLIR" not in os.environ:
            return {"skipped": "no _lighterage.abi3.so, no kernel generator, or no PyTorch"}
        shutil.copy(unpacked(packed[0]), ROOT / "frontends/python/python/lighterage")
        end, result, wrong = time.monotonic() + seconds, {}, []
        common = ["gpt2", "--out", str(self.scratch), "--batch", str(GPT2["bf16"])]
        expected = self.found.get("compiled", {}).get("losses")
        for way, budgets in (("step", (None, "60%")), ("backend", (None, "50%"))):
            for budget in budgets:
                # One comparison with eager mode is enough: it takes long.
                more = ["--budget", budget] if budget else ["--check"]
                args = [*common, "--way", way, "--steps", "15", *more]
                name = f"{way} {budget or '100%'}"
                try:
                    each = result[name] = self.peer(max(1.0, end - time.monotonic()), *args)
                except (SectionError, subprocess.TimeoutExpired) as error:
                    wrong.append(f"{name}: {error}")
                    continue
                if expected:
                    off = max(abs(a - b) for a, b in zip(each["losses"], expected, strict=False))
                    each["difference"] = off
                    if not off <= 2e-3 * max(expected):
                        wrong.append(f"{name}: losses differ by {off}")
                if way == "step" and each["measured_bytes"] != each["planned_bytes"]:
                    wrong.append(f"{name}: {each['measured_bytes']} bytes measured, {each['planned_bytes']} planned")
        return {**result, "error": "; ".join(wrong)} if wrong else result

    def models(self, seconds: float) -> dict[str, Any]:
        """The packed ones of MODELS: Lighterage's plans at their budgets, and PyTorch's ways."""
        end, result, wrong = time.monotonic() + seconds, {}, []
        for name, steps in self.manifest["models"].items():
            model = MODELS[name]
            tokens = model.batch * LENGTH
            for step in steps:
                trace = self.scratch / f"{step['lit']}.trace.json"
                args = train(self.command, self.folder, step, 8 if model.host is None else 4)
                try:
                    began = time.monotonic()
                    text = checked([*args, "--trace", str(trace)] if model.host else args, max(1.0, end - began))
                    each = result[step["lit"]] = json.loads(text.splitlines()[-1])["summary"]
                    each["ms"] = [json.loads(line)["ms"] for line in text.splitlines() if '"ms"' in line]
                    each["tokens_per_second"] = tokens / each["measured_ms"] * 1e3
                    each["seconds"] = time.monotonic() - began
                    if trace.exists():
                        each["copies"] = overlap(trace)
                    if each["planned_peak_bytes"] != each["measured_peak_bytes"]:
                        wrong.append(f"{step['lit']}: the measured peak is not the planned one")
                except (SectionError, subprocess.TimeoutExpired) as error:
                    wrong.append(f"{step['lit']}: {error}")
            for way in model.ways if self.has_torch else ():
                if way.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
                    result[f"{name}: {way}"] = {"skipped": "no DeepSpeed"}
                    continue
                try:
                    result[f"{name}: PyTorch, {way}"] = self.way(max(1.0, end - time.monotonic()), name, way)
                except (SectionError, subprocess.TimeoutExpired) as error:
                    wrong.append(f"{name}: PyTorch, {way}: {error}")
        if not result and not wrong:
            return {"skipped": "no models were packed"}
        return {**result, "error": "; ".join(wrong)} if wrong else result

    def way(self, seconds: float, name: str, way: str) -> dict[str, Any]:
        """One of MODELS by one of PyTorch's ways; a number after it is the share of activations that is kept."""
        model, (way, *share) = MODELS[name], way.split()
        which = ["llama", "--config", str(self.folder / f"{name}.json")]
        if isinstance(model.source, str):
            which = ["gpt2", "--size", model.source, "--out", str(self.scratch)]
        args = [*which, "--batch", str(model.batch), "--way", way, *(["--budget", *share] if share else [])]
        return self.peer(seconds, *args, "--steps", "12" if model.host is None else "5")

    def compiling(self, seconds: float) -> dict[str, Any]:
        """Fills the cache of torch.compile, which takes processors and not the GPU."""
        if not self.manifest["gpt2"] or not self.has_torch:
            return {"skipped": "no GPT-2 was packed, or no PyTorch"}
        out = self.scratch / "compiling"
        out.mkdir(exist_ok=True)
        args = ["gpt2", "--out", str(out), "--batch", str(GPT2["bf16"]), "--way", "compile", "--steps", "1"]
        return {"says": self.peer(seconds, *args)["first_ms"]}

    def allocator(self, seconds: float) -> dict[str, Any]:
        """The run-time allocator in PyTorch: record, plan, serve; PyTorch's own allocators beside it."""
        served = self.folder / "liblighterage_alloc.so"
        if not served.exists() or not self.has_torch:
            return {"skipped": "no liblighterage_alloc.so, or no PyTorch"}
        end, at = time.monotonic() + seconds, self.scratch.resolve()
        args = ["gpt2", "--out", str(at), "--batch", "16", "--deterministic", "--steps", "12"]
        ours = [*args, "--allocator", str(served.resolve())]
        trace, plan, stats = at / "run.trace", at / "run.plan", at / "stats.json"

        def one(*args: str, **variables: str) -> dict[str, Any]:
            program = [sys.executable, str(ROOT / "benches/gpu_torch.py"), *args]
            variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # the same bits in every run
            text = checked(program, max(1.0, end - time.monotonic()), **variables)
            return dict(json.loads(text.strip().splitlines()[-1]))

        result: dict[str, Any] = {
            "caching": one(*args),
            "expandable": one(*args, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
            "record": one(*ours, "--steps", "4", LIGHTERAGE_ALLOC_MODE="profile", LIGHTERAGE_ALLOC_TRACE=str(trace)),
        }
        result["plan"] = checked([self.command, "alloc", "plan", str(trace), "--serve", str(plan)], 60)
        result["serve"] = one(*ours, LIGHTERAGE_ALLOC_PLAN=str(plan), LIGHTERAGE_ALLOC_STATS=str(stats))
        result["stats"] = stats.read_text()
        if result["serve"]["losses"] != result["caching"]["losses"]:
            result["error"] = "other losses"
        return result

    def memory(self, seconds: float) -> dict[str, Any]:
        """The device's used memory while a step trains and after it was killed; too little memory for a step."""
        if self.dry or not shutil.which("nvidia-smi"):
            return {"skipped": "no nvidia-smi"}

        def used() -> int:
            query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            return int(checked(query, 20).split()[0])

        before = used()
        step = next(step for step in self.manifest["tiny"] if step["budget"] == "60%")
        samples = []
        with subprocess.Popen(
            train(self.command, self.folder, step, 1_000_000), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout
            lines: list[bytes] = []
            reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
            reader.start()
            end = time.monotonic() + min(5.0, seconds)
            while process.poll() is None and time.monotonic() < end:
                samples.append(used())
                time.sleep(0.2)
            was_running = process.poll() is None
            process.kill()
            reader.join()
        time.sleep(1.0)
        result: dict[str, Any] = {"steps": len(lines), "samples_mib": samples, "killed": was_running}
        result["before_mib"], result["after_mib"] = before, used()
        if result["after_mib"] != before or not was_running:
            result["error"] = f"{result['after_mib']} MiB are used after, {before} before"
        if self.manifest["gpt2"]:
            # All but 4 GiB is taken.
            link = Link(self.dry)
            link.do("cuInit", 0)
            link.do("cuCtxSetCurrent", link.pointer("cuDevicePrimaryCtxRetain", 0))
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            link.do("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            taken = link.pointer("cuMemAlloc_v2", ctypes.c_size_t(free.value - (4 << 30)))
            large = {**self.manifest["gpt2"][-1], "batches": f"scratch/gpt2-{GPT2['bf16']}-batches.safetensors"}
            done = call(train(self.command, self.folder, large, 1), 60)
            link.do("cuMemFree_v2", taken)
            result["too little"] = {"code": done.returncode, "says": done.stderr.strip().splitlines()}
            if done.returncode != 1 or "device memory" not in done.stderr:
                result["error"] = f"with 4 GiB free: exit code {done.returncode}: {done.stderr[-500:]}"
        return result

    def predicted(self, seconds: float) -> dict[str, Any]:
        """Models by their own profiles: predicted steps beside measured ones."""
        if "LIGHTERAGE_MLIR" not in os.environ or self.dry:
            return {"skipped": "no kernel generator: LIGHTERAGE_MLIR names it, or it lies in the folder"}
        end, result = time.monotonic() + seconds, {}
        draw = random.Random(2)
        models = [("llama.json", "bf16", 8, ["--dim", "batch=8", "--dim", "sequence=1024"])]
        models += [(f"gpt2-{n}.pt2", name, n, []) for name, n in GPT2.items()]
        wrong = []
        for name, precision, n, dims in models:
            model = unpacked(self.folder / name)
            if not model.exists():
                continue
            prof, data = self.scratch / f"{name}.prof", self.scratch / f"{name}.safetensors"
            names = ("batch.0.input_ids", "batch.0.labels")
            tensors_file(data, {each: ("I64", [n, 1024], numbers("I64", n * 1024, draw)) for each in names})
            how = [str(model), *dims, "--device", "cuda:0", "--precision", precision, "--optimizer", "adamw"]
            try:
                text = checked(
                    [self.command, "profile", *how, "-o", str(prof), "--json"], max(1, end - time.monotonic())
                )
                result[f"{name} profile"] = json.loads(text)
                for budget in BUDGETS:
                    args = [self.command, "train", *how, "--budget", budget, "--profile", str(prof), "--json"]
                    args += ["--batches", str(data), "--init", "normal:0.02", "--steps", "12"]
                    text = checked(args, max(1.0, end - time.monotonic()))
                    each = json.loads(text.splitlines()[-1])["summary"]
                    result[f"{name} {precision} {budget}"] = each
                    if not 0.9 <= each["predicted_ms"] / each["measured_ms"] <= 1.1:
                        wrong.append(f"{name} at {budget}: {each['predicted_ms']} ms, measured {each['measured_ms']}")
            except (SectionError, subprocess.TimeoutExpired) as error:
                wrong.append(f"{name}: {error}")
        return {**result, "error": f"{len(wrong)}: {wrong[:3]}"} if wrong else result

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
        """The rates of the day by PyTorch: products, a copy, attention."""
        return self.peer(seconds, "rates") if self.has_torch else {"skipped": "no PyTorch"}

    def link(self, seconds: float) -> dict[str, Any]:
        """Rates of copies by their size, of both directions at once, and the time to pin memory."""
        end = time.monotonic() + seconds
        return Link(self.dry).measure(end)

    def profile(self, seconds: float) -> dict[str, Any]:
        """`lighterage profile` of the smallest model: the figures that the planner takes."""
        if "LIGHTERAGE_MLIR" not in os.environ:
            return {"skipped": "no kernel generator: LIGHTERAGE_MLIR names it, or it lies in the folder"}
        out = self.scratch / "gpu.prof"
        args = [self.command, "profile", str(ROOT / TINY), "--device", "cuda:0", "--repeat", "3", "-o", str(out)]
        return dict(json.loads(checked([*args, "--json"], seconds)))

    def sanitizer(self, seconds: float) -> dict[str, Any]:
        """compute-sanitizer on a tiny step."""
        tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if self.dry or not Path(tool).exists():
            return {"skipped": "no compute-sanitizer"}
        # Of each model the plan with the most copies and reruns that was made.
        steps = list({step["name"]: step for step in self.manifest["tiny"]}.values())
        work = [(check, step) for step in steps for check in ("memcheck", "racecheck")]

        end = time.monotonic() + seconds

        def one(case: tuple[str, dict[str, str]]) -> dict[str, Any]:
            args = [tool, "--tool", case[0], "--error-exitcode", "9"]
            try:
                done = call([*args, *train(self.command, self.folder, case[1], 1)], max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                return {"code": None, "says": "not finished in time"}
            return {"code": done.returncode, "says": (done.stdout + done.stderr).strip()[-1500:]}

        with ThreadPoolExecutor(4) as pool:
            result = {
                f"{check} {step['lit']}": done for (check, step), done in zip(work, pool.map(one, work), strict=True)
            }
        wrong = {name: done for name, done in result.items() if done["code"] not in (0, None)}
        return {**result, "error": json.dumps(wrong)[:1500]} if wrong else result

    def faults(self, seconds: float) -> dict[str, Any]:
        """What is refused, with its exit code and its text."""
        step = self.manifest["tiny"][0]
        args = train(self.command, self.folder, step, 1)
        cases = {
            "no driver": (2, args, {"LIGHTERAGE_CUDA": "/nowhere/libcuda.so.1"}),
            "no such GPU": (2, [*args, "--device", "cuda:63"], {}),
        }
        if not self.dry:
            newer = train(self.command, self.folder, {**step, "lit": "newer.lit"}, 1)
            cases["a newer GPU's kernels"] = (2, newer, {})
            cases["no cuBLASLt"] = (2, args, {"LIGHTERAGE_CUBLASLT": "/nowhere/libcublasLt.so.13"})
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
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
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


def run(folder: Path, out: Path, dry: bool, only: list[str]) -> int:
    """All sections; the exit code."""
    the_run = Run(folder, dry)
    result: dict[str, Any] = {"dry": dry, "sections": {}}
    wrong: list[str] = []

    def one(name: str, seconds: float) -> None:
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
        result["sections"][name] = the_run.found[name] = found
        state = "wrong" if "error" in found else "skipped" if "skipped" in found else "ok"
        print(f"{name:10} {state:8} {found['seconds']:8.2f} s  {found.get('error', '')}", flush=True)
        # So that what is known is there if the machine goes away.
        out.write_text(json.dumps(result, indent=1))

    together, alone = ({n: s for n, s in part.items() if not only or n in only} for part in (TOGETHER, ALONE))
    with ThreadPoolExecutor(1 if dry else len(TOGETHER)) as pool:
        list(pool.map(one, together.keys(), together.values()))
    for name, seconds in alone.items():
        one(name, seconds)
    return 1 if wrong else 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    packing = modes.add_parser("pack")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--device", default="h100")
    packing.add_argument("--gpt2", action="store_true", help="steps of a GPT-2 124M; PYTHON names one with PyTorch")
    packing.add_argument("--beside", nargs="*", choices=list(MODELS), default=[], help="models beside PyTorch's ways")
    packing.add_argument("models", type=Path, nargs="*")
    running = modes.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--dry", action="store_true")
    running.add_argument("--only", nargs="*", default=[], help="sections")
    args = parser.parse_args()
    if args.mode == "pack":
        pack(args.folder, args.device, args.models, args.gpt2, args.beside)
        return 0
    return run(args.folder, args.out, args.dry, args.only)


if __name__ == "__main__":
    sys.exit(main())
