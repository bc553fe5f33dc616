"""PyTorch's side of benches/gpu_train.py: reference losses, peers' times and memory, rates of the day.

usage: gpu_torch.py fixtures MODELS NAME ... --out FOLDER
       gpu_torch.py gpt2 --out FOLDER [--batch 64] [--steps 20] [--precision bf16] [--way compile] [--size 124m]
       gpu_torch.py export OUT.pt2 [--batch 64] [--size 124m]
       gpu_torch.py rates

`fixtures` runs the exported graphs MODELS/NAME/joint_core.pt2 on the device with PyTorch's AdamW. It writes
NAME-init.safetensors, and FOLDER/losses.json with the losses of 20 steps. `gpt2` trains the model of examples/gpt2 at
the sizes of a GPT-2. It writes its initial weights and batches, if they are not there, and prints one JSON object:
losses, the step's time in ms, and the peak of memory. Its way is one of PyTorch's: `compile`, whose --budget is the
share of activations that torch.compile keeps, `checkpoint` of each block, `offload` of what the backward needs. Or it
is one of Lighterage's: `step` is lighterage.compile, `backend` is torch.compile(backend="lighterage"). `rates` prints
products, copies and attention.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples/gpt2"))

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPT2 = {"124m": (12, 768, 12), "xl": (48, 1600, 25)}  # layers, width, heads
N_BATCHES = 4
WARM_UP = 5  # steps without a time


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def fixture(folder: Path, out: Path, steps: int) -> list[float]:
    """The losses of an exported graph."""
    from torch.export.passes import move_to_device_pass

    program = move_to_device_pass(torch.export.load(folder / "joint_core.pt2"), DEVICE)
    program.graph_module.recompile()
    meta = json.loads((folder / "meta.json").read_text())
    data = load_file(next(f for f in (folder / "ref.safetensors", folder / "batches.safetensors") if f.exists()))
    state = {name: tensor.detach().clone() for name, tensor in program.state_dict.items()}
    values = {name: tensor.cpu().contiguous() for name, tensor in state.items()}
    save_file(values, out / f"{folder.name}-init.safetensors")
    state |= {name: value.to(DEVICE) for name, value in program.constants.items() if isinstance(value, torch.Tensor)}
    parameters = {name: torch.nn.Parameter(state[name]) for name in meta["parameters"]}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, weight_decay=0.01)
    losses = []
    for step in range(steps):
        batch = {name: data[f"batch.{step % meta['batches']}.{name}"].to(DEVICE) for name in meta["inputs"]}
        given = []
        for spec in program.graph_signature.input_specs:
            kind = spec.kind.name
            if kind == "PARAMETER":
                given.append(parameters[spec.target].detach())
            elif kind in ("BUFFER", "CONSTANT_TENSOR"):
                given.append(state[spec.target])
            else:
                given.append(batch[next(n for n in batch if n == spec.arg.name or spec.arg.name.endswith(n))])
        with torch.no_grad():
            results = program.graph_module(*given)
        for spec, value in zip(program.graph_signature.output_specs, results, strict=True):
            kind = spec.kind.name
            if kind == "LOSS_OUTPUT":
                losses.append(value.item())
            elif kind == "GRADIENT_TO_PARAMETER":
                parameters[spec.target].grad = value.detach().clone()
            elif kind == "BUFFER_MUTATION":
                state[spec.target] = value
        optimizer.step()
    return losses


def fixtures(models: Path, names: list[str], out: Path) -> None:
    """All of them; a failure is said and the others run."""
    result: dict[str, Any] = {}
    for name in names:
        try:
            result[name] = fixture(models / name, out, 20)
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
    (out / "losses.json").write_text(json.dumps(result))
    print(json.dumps(result))


def serve_memory(path: str) -> None:
    """Let the run-time allocator serve all memory of the device."""
    allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "lighterage_malloc", "lighterage_free")
    library = ctypes.CDLL(path)
    for setter, name in (
        ("set_record_stream_fn", "lighterage_record_stream"),
        ("set_reset_fn", "lighterage_empty_cache"),
    ):
        getattr(allocator.allocator(), setter)(ctypes.cast(getattr(library, name), ctypes.c_void_p).value)  # type: ignore[no-untyped-call]
    torch.cuda.memory.change_current_allocator(allocator)


def offloaded(model: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """The model with all that its backward needs on the host."""

    def forward(*batch: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss: torch.Tensor = model(*batch)
            return loss

    return forward


def stepped(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    example: tuple[torch.Tensor, ...],
    args: argparse.Namespace,
) -> tuple[Callable[..., torch.Tensor], Callable[[], dict[str, Any]]]:
    """What a step calls, and figures of its plans afterwards."""
    if args.way == "compile":
        if args.budget:
            torch._functorch.config.activation_memory_budget = float(args.budget)
        return torch.compile(model), dict
    if args.way == "checkpoint":
        from eager import Recomputed

        blocks: Iterable[torch.nn.Module] = model.blocks  # type: ignore[assignment]
        model.blocks = torch.nn.ModuleList(map(Recomputed, blocks))
        return model, dict
    if args.way == "offload":
        return offloaded(model), dict
    if args.way == "eager":
        return model, dict
    sys.path.insert(0, str(ROOT / "frontends/python/python"))
    import lighterage

    if args.way == "step":
        step = lighterage.compile(
            model, optimizer, example=example, budget=args.budget, precision=args.precision, check=args.check
        )

        def of_step() -> dict[str, Any]:
            peaks = {"planned_bytes": step.plan.peak, "measured_bytes": step.measured_peak}
            return {**peaks, "predicted_ms": step.plan.micros / 1e3, "check": step.check and vars(step.check)}

        return step, of_step
    from lighterage.backend import backend

    def of_graphs() -> dict[str, Any]:
        stats = lighterage.stats()
        return {"planned_bytes": [plan.peak for plan in stats.plans], "eager_graphs": stats.eager_graphs}

    options = {"budget": args.budget, "strict": True}
    return torch.compile(model, backend=functools.partial(backend, options=options)), of_graphs


def gpt2(args: argparse.Namespace) -> None:
    """Train it."""
    from model import Config, Gpt2

    if args.allocator:
        serve_memory(args.allocator)
    if args.deterministic:
        torch.use_deterministic_algorithms(True)
    layers, width, heads = GPT2[args.size]
    config = Config(50304, layers, width, heads, args.sequence, args.batch)
    init, data = args.out / f"gpt2-{args.size}-init.safetensors", args.out / f"gpt2-{args.batch}-batches.safetensors"
    with torch.device(DEVICE):
        model = Gpt2(config)
    if not init.exists():
        generator = torch.Generator(DEVICE).manual_seed(0)
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.02, generator=generator)
            else:
                torch.nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
        save_file({name: p.detach().cpu().clone() for name, p in model.named_parameters()}, init)
    else:
        model.load_state_dict(load_file(init, device=DEVICE), strict=False)
    if not data.exists():
        generator = torch.Generator().manual_seed(1)
        # Few of the vocabulary's tokens, so that there is something to learn in 20 steps.
        rows = torch.randint(1000, (N_BATCHES, args.batch, args.sequence + 1), generator=generator) ** 2 % 1009
        tensors = {f"batch.{k}.input_ids": row[:, :-1].clone() for k, row in enumerate(rows)}
        tensors |= {f"batch.{k}.labels": row[:, 1:].clone() for k, row in enumerate(rows)}
        save_file(tensors, data)
    if args.steps == 0:
        return
    batches = {name: tensor.to(DEVICE) for name, tensor in load_file(data).items()}
    fused = DEVICE == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=fused)
    half = torch.autocast(DEVICE, torch.bfloat16) if args.precision == "bf16" else contextlib.nullcontext()
    example = tuple(batches[f"batch.0.{name}"] for name in ("input_ids", "labels"))
    step, planned = stepped(model, optimizer, example, args)
    losses, times = [], []
    for k in range(args.steps):
        ids, labels = (batches[f"batch.{k % N_BATCHES}.{name}"] for name in ("input_ids", "labels"))
        if k == WARM_UP and DEVICE == "cuda" and not args.allocator:
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        start = time.perf_counter()
        if args.way == "step":
            loss = step(ids, labels)
        else:
            optimizer.zero_grad(set_to_none=True)
            with half:
                loss = step(ids, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        losses.append(loss.item())
    result: dict[str, Any] = {
        "way": args.way,
        "budget": args.budget,
        "batch": args.batch,
        "precision": args.precision,
        "losses": losses,
    }
    if len(times) > WARM_UP:
        result["ms"] = median(times[WARM_UP:])
        result["least_ms"] = min(times[WARM_UP:])
    result["first_ms"] = times[0]
    result |= planned()
    if DEVICE == "cuda":
        free, total = torch.cuda.mem_get_info()
        result["used_bytes"] = total - free
        if not args.allocator:
            result["peak_bytes"] = torch.cuda.max_memory_allocated()
            result["reserved_bytes"] = torch.cuda.memory_reserved()
    print(json.dumps(result))


def export(args: argparse.Namespace) -> None:
    """Write the joint graph of the model that `gpt2` trains."""
    sys.path.insert(0, str(ROOT / "frontends/python/python"))
    from lighterage.export import export_joint, save, weightless
    from model import Config, Gpt2

    layers, width, heads = GPT2[args.size]
    with weightless() as mode:
        model = Gpt2(Config(50304, layers, width, heads, args.sequence, args.batch))
    with mode:
        ids, labels = (torch.empty(args.batch, args.sequence, dtype=torch.long) for _ in range(2))
    step = export_joint(model, (ids, labels), level="coarse", attention="fused")
    save(step, args.out, weights=False, name=f"gpt2-{args.size}")


def millis(does: Callable[[], Any], rounds: int = 20) -> float:
    """The median time of a call on the device, by its clock."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]  # type: ignore[no-untyped-call]
    for _ in range(3):
        does()
    for start, end in events:
        start.record()
        does()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events)


def rates() -> None:
    """Products, a copy, attention forward and with its backward."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    result: dict[str, Any] = {"torch": torch.__version__, "bf16_flops": 2 * 8192**3 / millis(lambda: a @ b) * 1e3}
    x = torch.empty(1 << 28, device=DEVICE)
    y = torch.empty_like(x)
    result["copy_bytes_per_second"] = 8 * (1 << 28) / millis(functools.partial(y.copy_, x)) * 1e3
    del x, y
    a32, b32 = (torch.randn(8192, 8192, device=DEVICE) for _ in range(2))
    result["f32_flops"] = 2 * 8192**3 / millis(lambda: a32 @ b32, 5) * 1e3
    torch.backends.cuda.matmul.allow_tf32 = True
    result["tf32_flops"] = 2 * 8192**3 / millis(lambda: a32 @ b32) * 1e3
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for head in (64, 128):
        for length in (1024, 4096):
            n = (1 << 16) // length * (16 if head == 64 else 8) // 16
            q, k, v = (
                torch.randn(n, 16, length, head, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            )
            g = torch.randn_like(q)
            flops = 4 * n * 16 * length * length * head
            for causal in (False, True):
                for name, backend in backends.items():
                    key = f"attention {name} head {head} length {length}{' causal' if causal else ''}"
                    try:
                        with sdpa_kernel(backend):
                            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                            attend = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
                            ahead = millis(attend)
                            grad = functools.partial(torch.autograd.grad, out, (q, k, v), g, retain_graph=True)
                            back = millis(grad)
                        result[key] = {"shape": [n, 16, length, head], "forward_ms": ahead, "backward_ms": back}
                        share = 0.5 if causal else 1.0
                        result[key]["tflops"] = [share * flops / ahead / 1e9, share * 2.5 * flops / back / 1e9]
                    except RuntimeError as error:
                        result[key] = str(error)[:200]
    print(json.dumps(result))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    one = modes.add_parser("fixtures")
    one.add_argument("models", type=Path)
    one.add_argument("names", nargs="+")
    one.add_argument("--out", type=Path, required=True)
    two = modes.add_parser("gpt2")
    two.add_argument("--out", type=Path, required=True)
    two.add_argument("--steps", type=int, default=20)
    two.add_argument("--precision", choices=["f32", "bf16"], default="bf16")
    two.add_argument("--deterministic", action="store_true", help="the same bits in every run")
    two.add_argument("--allocator", help="liblighterage_alloc.so, which serves the device's memory")
    ways = ["eager", "compile", "checkpoint", "offload", "step", "backend"]
    two.add_argument("--way", choices=ways, default="eager")
    two.add_argument("--budget", help="of Lighterage's ways and of torch.compile")
    two.add_argument("--check", action="store_true", help="compare the step with eager mode first")
    three = modes.add_parser("export")
    three.add_argument("out", type=Path)
    for mode in (two, three):
        mode.add_argument("--size", choices=list(GPT2), default="124m")
        mode.add_argument("--batch", type=int, default=64)
        mode.add_argument("--sequence", type=int, default=1024)
    modes.add_parser("rates")
    args = parser.parse_args()
    if args.mode == "fixtures":
        fixtures(args.models, args.names, args.out)
    elif args.mode == "gpt2":
        gpt2(args)
    elif args.mode == "export":
        export(args)
    else:
        rates()


if __name__ == "__main__":
    main()
