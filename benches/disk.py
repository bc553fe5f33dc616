"""Train a language model whose states are three times the process's memory: lighterage with --disk, and PyTorch.

usage: disk.py [--size small|medium] [--sequence 256] [--steps 4] [--share 3] [--folder DIR] [--lighterage FILE]
               [--profile FILE] [--no-peer] [--limit-peer BYTES]

needs root and a memory control group of version 1 that can be written: /sys/fs/cgroup/memory.

1. The states are 12 bytes for each parameter: AdamW in f32. The limit is a third of them; the kernel ends a process
   that needs more. It counts the pages of files, too.
2. Lighterage plans for the limit, with times that `lighterage profile` and a test of the disk measure. It trains inside
   the group. The largest resident set of the process is compared with the plan, its median step with the prediction.
3. The same step is compiled for memory, without a limit, and trained as long. All states must have the same bytes.
4. PyTorch trains the same model, by torch.optim.AdamW over tensors that are mapped to files, inside such a group. Each
   parameter is updated as soon as its gradient is complete, and blocks are computed again if they do not fit otherwise.

Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GROUPS = Path("/sys/fs/cgroup/memory")
SIZES = {"small": (768, 12, 12), "medium": (1024, 24, 16)}  # width, layers, heads of GPT-2
VOCABULARY = 50257
POSITIONS = 1024
WARM_UP = 1  # steps that are not counted

PEER = '''
import json, os, resource, sys, time
import torch
from transformers import GPT2Config, GPT2LMHeadModel
config, folder, tokens, steps, threads, again = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])
torch.set_num_threads(threads)
config = GPT2Config.from_json_file(config)
config._attn_implementation = "sdpa"
with torch.device("meta"):
    model = GPT2LMHeadModel(config)

def mapped(name, like, std=0.0):
    """A tensor whose bytes are a file's."""
    path = os.path.join(folder, name)
    tensor = torch.from_file(path, shared=True, size=like.numel(), dtype=torch.float32).view(like.shape)
    if std:
        tensor.normal_(0.0, std)
    return tensor

of = {}
for i, (name, parameter) in enumerate(list(model.named_parameters())):
    module, _, leaf = name.rpartition(".")
    of[name] = torch.nn.Parameter(mapped(f"p{i}", parameter, 0.02))
    setattr(model.get_submodule(module), leaf, of[name])
model.tie_weights()
for name, buffer in list(model.named_buffers()):
    module, _, leaf = name.rpartition(".")
    model.get_submodule(module).register_buffer(leaf, torch.zeros(buffer.shape, dtype=buffer.dtype), persistent=False)
model.train()
if again:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
for i, (name, parameter) in enumerate(model.named_parameters()):
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    optimizer.state[parameter] = {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": mapped(f"m{i}", parameter),
        "exp_avg_sq": mapped(f"v{i}", parameter),
    }

    def update(parameter, optimizer=optimizer):
        optimizer.step()
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(update)
ids = torch.randint(0, config.vocab_size, (1, tokens))
for _ in range(steps):
    start = time.perf_counter()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    ms = 1e3 * (time.perf_counter() - start)
    print(json.dumps({"ms": ms, "loss": float(loss)}), flush=True)
print(json.dumps({"rss": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))
'''


class Group:
    """A control group whose processes have at most this many bytes of memory."""

    def __init__(self, name: str, limit: int) -> None:
        self.path = GROUPS / f"{name}-{os.getpid()}"
        self.path.mkdir()
        (self.path / "memory.limit_in_bytes").write_text(str(limit))

    def run(self, command: list[str]) -> tuple[int, str, str, int]:
        """Run a command in it: its exit code, output, errors, and largest resident set."""

        def enter() -> None:
            (self.path / "cgroup.procs").write_text(str(os.getpid()))

        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = subprocess.Popen(command, stdout=out, stderr=err, preexec_fn=enter, text=True)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            err.seek(0)
            return child.returncode, out.read(), err.read(), 1024 * usage.ru_maxrss

    def most_used(self) -> int:
        """The most bytes that its processes had at once."""
        return int((self.path / "memory.max_usage_in_bytes").read_text())

    def close(self) -> None:
        """Remove it."""
        # The group is empty when the kernel has noticed that its last process ended.
        for _ in range(50):
            try:
                return self.path.rmdir()
            except OSError:
                time.sleep(0.1)


def lines(text: str) -> list[dict[str, Any]]:
    """The lines of JSON in a command's output."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def run(command: list[str]) -> str:
    """The output of a command."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nfailed with {done.returncode}:\n{done.stderr}")
    return done.stdout


def written(folder: Path, size: str, tokens: int) -> Path:
    """Write the model's description and a batch."""
    import safetensors.torch
    import torch

    width, layers, heads = SIZES[size]
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": VOCABULARY,
        "n_positions": POSITIONS,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": True,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    ids = torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
    batch = {"batch.0.input_ids": ids, "batch.0.labels": ids.clone()}
    safetensors.torch.save_file(batch, folder / "batches.safetensors")
    return path


def parameters(size: str) -> int:
    """The number of a model's parameters."""
    width, layers, _ = SIZES[size]
    return (VOCABULARY + POSITIONS) * width + layers * (12 * width**2 + 13 * width) + 2 * width


def same(a: Path, b: Path) -> bool:
    """Whether two files have the same bytes."""
    return subprocess.run(["cmp", "-s", str(a), str(b)], check=False).returncode == 0


def peer(folder: Path, config: Path, args: argparse.Namespace, least: int) -> dict[str, object]:
    """PyTorch inside the limit, or a larger one if it is killed; in small ones, blocks are computed again."""
    script = folder / "peer.py"
    script.write_text(PEER)
    killed: list[int] = []
    for times, again in ((1.0, 1), (1.25, 1), (1.5, 1), (2.0, 0), (3.0, 0)):
        limit = int(times * least)
        files = folder / f"peer-{times}"
        files.mkdir()
        group = Group("torch", limit)
        command = [sys.executable, str(script), str(config), str(files)]
        command += [str(n) for n in (args.sequence, args.steps, args.threads, again)]
        code, out, err, _ = group.run(command)
        most = group.most_used()
        group.close()
        for file in files.iterdir():
            file.unlink()
        if code == 0:
            steps = [line["ms"] for line in lines(out) if "ms" in line][WARM_UP:]
            rss = next(line["rss"] for line in lines(out) if "rss" in line)
            told = {"limit": limit, "killed_at": killed, "rss": rss, "most": most, "again": bool(again)}
            return {"ms": statistics.median(steps), "steps": steps, **told}
        killed.append(limit)
        print(f"PyTorch with {limit} bytes: exit {code} {err[-300:]}", file=sys.stderr)
    return {"killed_at": killed}


def main() -> None:
    """Read the arguments, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--share", type=float, default=3.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--lighterage", type=Path, default=ROOT / "target/release/lighterage")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--limit-peer", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        config = written(folder, args.size, args.sequence)
        states = 12 * parameters(args.size)
        limit = int(states / args.share)
        light = str(args.lighterage)
        model = [str(config), "--dim", f"sequence={args.sequence}", "--optimizer", "adamw"]
        profile = args.profile
        if profile is None:
            profile = folder / "profile.toml"
            run([light, "profile", *model, "-o", str(profile)])
        # The process, without pools, has less than this.
        rest = 48 << 20
        disk = ["--disk", str(folder)]
        step, memory = folder / "disk.lit", folder / "memory.lit"
        plan = [*disk, "--profile", str(profile), "--budget", str(limit - rest)]
        run([light, "compile", *model, *plan, "-o", str(step)])
        run([light, "compile", *model, "-o", str(memory)])
        train = ["--lr", "1e-3", "--init", "normal:0.02", "--batches", str(folder / "batches.safetensors")]
        train += ["--steps", str(args.steps), "--threads", str(args.threads), "--json"]
        group = Group("lighterage", limit)
        ours = [light, "train", str(step), *train, *disk, "--save", str(folder / "disk.safetensors")]
        code, out, err, rss = group.run(ours)
        most = group.most_used()
        group.close()
        if code != 0:
            raise SystemExit(f"{' '.join(ours)}\nfailed with {code}:\n{err}")
        told = lines(out)
        steps = [line["ms"] for line in told if "ms" in line and "loss" in line][WARM_UP:]
        summary = next(line["summary"] for line in told if "summary" in line)
        run([light, "train", str(memory), *train, "--save", str(folder / "memory.safetensors")])
        result = {
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "model": f"GPT-2 {args.size}",
            "tokens": args.sequence,
            "states": states,
            "limit": limit,
            "planned_pool": summary.get("planned_peak_bytes"),
            "rss": rss,
            "most_in_group": most,
            "same_bits": same(folder / "disk.safetensors", folder / "memory.safetensors"),
            "predicted_ms": summary.get("predicted_ms"),
            "ms": statistics.median(steps),
            "steps": steps,
        }
        for file in ("disk.safetensors", "memory.safetensors"):
            (folder / file).unlink()
        if not args.no_peer:
            result["torch"] = peer(folder, config, args, args.limit_peer or limit)
        print(json.dumps(result, indent=2))
        print(json.dumps(summary), file=sys.stderr)


if __name__ == "__main__":
    main()
