"""PyTorch's side of benches/gpu_train.py: reference losses, peers' times and memory, rates of the day.

usage: gpu_torch.py fixtures MODELS NAME ... --out FOLDER
       gpu_torch.py gpt2 --out FOLDER [--batch 64] [--steps 20] [--precision bf16] [--way compile] [--size 124m]
       gpu_torch.py export OUT.pt2 [--batch 64] [--size 124m]
       gpu_torch.py llama --config FILE.json [--batch 4] [--sequence 1024] [--steps 6] [--way fsdp-offload]
       gpu_torch.py resnet [--batch 128] [--steps 12] [--way compile]
       gpu_torch.py rates

`fixtures` runs the exported graphs MODELS/NAME/joint_core.pt2 on the device with PyTorch's AdamW. It writes
NAME-init.safetensors, and FOLDER/losses.json with the losses of 20 steps. `gpt2` trains the model of examples/gpt2 at
the sizes of a GPT-2. It writes its initial weights and batches, if they are not there, and prints one JSON object:
losses, the step's time in ms, and the peak of memory. Its way is one of PyTorch's: `compile`, whose --budget is the
share of activations that torch.compile keeps, `checkpoint` of each block, `offload` of what the backward needs. Or it
is one of Lighterage's: `step` is lighterage.compile, `backend` is torch.compile(backend="lighterage"). `rates` prints
products, copies and attention.

`llama` trains the model of a Hugging Face config.json on random tokens, `resnet` a ResNet-50 on random images. Both
print what `gpt2` prints, and the peaks of host memory. More of `llama`'s ways: `in-backward` updates each weight as
soon as its gradient is there, `fsdp-offload` and `deepspeed` (ZeRO-3) keep weights, gradients and the optimizer's
state on the host, `deepspeed-2` (ZeRO-2) the last two. These four also checkpoint each block.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import importlib
import json
import os
import resource
import socket
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
FEW = min(WARM_UP, 2)  # of the larger models
PLAIN = ["eager", "compile", "checkpoint", "offload", "in-backward"]  # ways of `llama` with the weights on the device
RATE, DECAY, STD = 1e-4, 0.01, 0.02  # of `llama`


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


def offloaded(model: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The model with all that its backward needs on the host."""

    def forward(*batch: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=DEVICE == "cuda"):
            return model(*batch)

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


def timed(step: Callable[[int], torch.Tensor], steps: int, warm_up: int, peak: bool) -> dict[str, Any]:
    """Losses, times in ms, and the peak of memory after the warm-up."""
    losses, times = [], []
    for k in range(steps):
        if k == warm_up and DEVICE == "cuda" and peak:
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        start = time.perf_counter()
        loss = step(k)
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        losses.append(loss.item())
    result: dict[str, Any] = {"losses": losses}
    if len(times) > warm_up:
        result["ms"] = median(times[warm_up:])
        result["least_ms"] = min(times[warm_up:])
    result["first_ms"] = times[0]
    if DEVICE == "cuda":
        free, total = torch.cuda.mem_get_info()
        result["used_bytes"] = total - free
        if peak:
            result["peak_bytes"] = torch.cuda.max_memory_allocated()
            result["reserved_bytes"] = torch.cuda.memory_reserved()
    return result


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

    def one(k: int) -> torch.Tensor:
        ids, labels = (batches[f"batch.{k % N_BATCHES}.{name}"] for name in ("input_ids", "labels"))
        if args.way == "step":
            return step(ids, labels)
        optimizer.zero_grad(set_to_none=True)
        with half:
            loss = step(ids, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    result = {name: getattr(args, name) for name in ("way", "budget", "batch", "precision")}
    result |= timed(one, args.steps, WARM_UP, peak=not args.allocator)
    print(json.dumps(result | planned()))


def host_available() -> int:
    """Bytes of the host's memory that are free."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def trained(
    args: argparse.Namespace, make: Callable[[], Callable[[int], torch.Tensor]], items: tuple[str, int]
) -> None:
    """Make a step, run it, print what was found."""
    start, available = time.perf_counter(), host_available()
    torch.manual_seed(0)
    step = make()
    synchronize()
    result: dict[str, Any] = {name: getattr(args, name, None) for name in ("way", "budget", "batch")}
    result["setup_s"] = time.perf_counter() - start
    result |= timed(step, args.steps, FEW, peak=True)
    name, n = items
    if "ms" in result:
        result[f"{name}_per_second"] = n / result["ms"] * 1e3
    # Pinned memory need not be in the resident set.
    result["host_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result["host_used_bytes"] = available - host_available()
    if DEVICE == "cuda":
        result["pinned_bytes"] = torch.cuda.host_memory_stats().get("allocated_bytes.peak")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # Libraries may have left part of a line.
    print(f"\n{json.dumps(result)}", flush=True)


def group_of_one() -> None:
    """A process group with this process alone, as a launcher would make it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for interface in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(interface, "lo")
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")


def llama_config(path: Path) -> Any:
    """The configuration of a model, without what training does not use."""
    config = importlib.import_module("transformers").LlamaConfig.from_json_file(path)
    config.use_cache = False
    config.pad_token_id = None
    config.tie_word_embeddings = False
    config._attn_implementation = "sdpa"
    # The mask is the causal one. Without a tensor for it, attention takes the causal kernels, under torch.compile too.
    modeling = importlib.import_module("transformers.models.llama.modeling_llama")
    modeling.create_causal_mask = lambda *_, **__: None  # type: ignore[attr-defined]
    return config


def weightless_llama(config: Any) -> Any:
    """The model, nothing of it in memory."""
    with torch.device("meta"):
        return importlib.import_module("transformers").LlamaForCausalLM(config)


@torch.no_grad()
def fill(values: Iterable[torch.Tensor]) -> None:
    """Matrices normal, gains one. On the host, where that takes long, a matrix repeats some values."""
    noise = torch.randn((1 << 20) + 7) * STD
    for value in values:
        flat = value.view(-1)
        if value.dim() < 2:
            flat.fill_(1.0)
        elif value.is_cuda:
            flat.normal_(std=STD)
        else:
            whole = len(flat) // len(noise) * len(noise)
            flat[:whole].view(-1, len(noise)).copy_(noise)
            flat[whole:].copy_(noise[: len(flat) - whole])


def set_rotary(model: Any, config: Any) -> None:
    """Put the rotary embedding's frequencies on the device."""
    modeling = importlib.import_module("transformers.models.llama.modeling_llama")
    for name, buffer in modeling.LlamaRotaryEmbedding(config).named_buffers():
        setattr(model.model.rotary_emb, name, buffer.to(DEVICE))


def plain_llama(args: argparse.Namespace, config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step in f32 under autocast, all weights on the device."""
    model = weightless_llama(config).to_empty(device=DEVICE)
    fill(model.parameters())
    set_rotary(model, config)
    make = functools.partial(torch.optim.AdamW, lr=RATE, weight_decay=DECAY, fused=True)
    optimizer = None
    if args.way == "in-backward":
        optimizers = {parameter: make([parameter]) for parameter in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
    else:
        optimizer = make(model.parameters())
    if args.way in ("checkpoint", "in-backward"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    call = model
    if args.way == "compile":
        if args.budget:
            torch._functorch.config.activation_memory_budget = float(args.budget)
        call = torch.compile(model)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = call(input_ids=ids, labels=ids).loss
        return loss

    if args.way == "offload":
        forward = offloaded(forward)
    # A weight is used once, so a cache of its bf16 copy would only take memory.
    half = torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False)

    def step(ids: torch.Tensor) -> torch.Tensor:
        with half:
            loss = forward(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        if optimizer:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def sharded_llama(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step of FSDP2 with weights, gradients and the optimizer's state on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    group_of_one()
    model = weightless_llama(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policies: dict[str, Any] = {
        "mesh": init_device_mesh(DEVICE, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=DEVICE == "cuda"),
    }
    for block in model.model.layers:
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    model.to_empty(device="cpu")
    fill(p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    set_rotary(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def deepspeed_llama(args: argparse.Namespace, config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step of DeepSpeed's ZeRO-3 or ZeRO-2 with the optimizer on the host, ZeRO-3 with the weights there too."""
    deepspeed = importlib.import_module("deepspeed")
    adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    group_of_one()
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    host = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {"stage": 3 if args.way == "deepspeed" else 2, "offload_optimizer": host}
    zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if args.way == "deepspeed":
        zero["offload_param"] = host
    settings = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "steps_per_print": 1 << 30,
    }
    if args.way == "deepspeed":
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = importlib.import_module("transformers").LlamaForCausalLM(config)
        # DeepSpeed's copy of a matrix is flat. The gains are ones already.
        fill(p.ds_tensor[None] for p in model.parameters() if len(p.ds_shape) >= 2)
    else:
        model = weightless_llama(config).to(torch.bfloat16).to_empty(device=DEVICE)
        fill(model.parameters())
    # A gathered weight has another shape when it is not, which the other kind of checkpoint takes for an error.
    model.gradient_checkpointing_enable({"use_reentrant": True})
    optimizer = adam(model.parameters(), lr=RATE, weight_decay=DECAY, adamw_mode=True)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    set_rotary(engine.module, config)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def llama(args: argparse.Namespace) -> None:
    """Train a model like LLaMA."""

    def make() -> Callable[[int], torch.Tensor]:
        config = llama_config(args.config)
        if args.way in PLAIN:
            step = plain_llama(args, config)
        else:
            step = sharded_llama(config) if args.way == "fsdp-offload" else deepspeed_llama(args, config)
        shape = (N_BATCHES, args.batch, args.sequence)
        tokens = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        return lambda k: step(tokens[k % N_BATCHES])

    trained(args, make, ("tokens", args.batch * args.sequence))


def resnet(args: argparse.Namespace) -> None:
    """Train a ResNet-50."""

    def make() -> Callable[[int], torch.Tensor]:
        models = importlib.import_module("torchvision.models")
        torch.backends.cudnn.benchmark = True
        with torch.device(DEVICE):
            images = torch.randn(args.batch, 3, args.image, args.image).to(memory_format=torch.channels_last)
            labels = torch.randint(1000, (args.batch,))
            model = models.resnet50().to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)
        call = torch.compile(model) if args.way == "compile" else model
        half = torch.autocast(DEVICE, torch.bfloat16)

        def step(_: int) -> torch.Tensor:
            with half:
                loss = F.cross_entropy(call(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    trained(args, make, ("images", args.batch))


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
    five = modes.add_parser("llama")
    five.add_argument("--config", type=Path, required=True, help="a config.json of Hugging Face")
    five.add_argument("--batch", type=int, default=4)
    five.add_argument("--sequence", type=int, default=1024)
    five.add_argument("--steps", type=int, default=6)
    five.add_argument("--way", choices=[*PLAIN, "fsdp-offload", "deepspeed", "deepspeed-2"], default="eager")
    five.add_argument("--budget", help="of torch.compile")
    six = modes.add_parser("resnet")
    six.add_argument("--batch", type=int, default=128)
    six.add_argument("--image", type=int, default=224)
    six.add_argument("--steps", type=int, default=12)
    six.add_argument("--way", choices=["eager", "compile"], default="eager")
    args = parser.parse_args()
    if args.mode == "fixtures":
        fixtures(args.models, args.names, args.out)
    elif args.mode == "gpt2":
        gpt2(args)
    elif args.mode == "export":
        export(args)
    elif args.mode == "llama":
        llama(args)
    elif args.mode == "resnet":
        resnet(args)
    else:
        rates()


if __name__ == "__main__":
    main()
