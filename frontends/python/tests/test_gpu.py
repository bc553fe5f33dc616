"""Steps on a GPU, which is simulated: the same losses as on the processor, within the budget."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lighterage._capture import draws_in_attention
from lighterage._joint import joint
from lighterage.backend import backend
from standin import Gpu
from standin import gpu as simulated
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.dlpack import from_dlpack

import lighterage as lt
from lighterage import _device, _pool, _program, optim

BATCH = torch.randint(50, (2, 2, 8), generator=torch.Generator().manual_seed(0)).unbind(0)


@pytest.fixture(scope="module", name="gpu")
def _gpu() -> Iterator[Gpu]:
    with simulated() as gpu:
        yield gpu
        assert not gpu.races()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    lt.reset()


class Net(nn.Module):
    """An embedding, two layers with a norm and dropout, and the loss over a small vocabulary."""

    def __init__(self, dropout: float = 0.0, function: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.first, self.norm = nn.Embedding(50, 32), nn.Linear(32, 64), nn.LayerNorm(64)
        self.second, self.dropout, self.function = nn.Linear(64, 50), nn.Dropout(dropout), function

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.function(self.first(self.embedding(ids)))
        logits = self.second(self.dropout(self.norm(hidden)))
        return F.cross_entropy(logits.view(-1, 50), labels.view(-1))


def trained(model: nn.Module, n: int = 4, batch: Any = BATCH, **options: Any) -> tuple[lt.Step, list[float]]:
    optimizer = options.pop("optimizer", torch.optim.AdamW)(model.parameters(), lr=1e-2)
    step = lt.compile(model, optimizer, example=batch, seed=3, **options)
    return step, [step(*batch).item() for _ in range(n)]


# Whole steps ---------------------------------------------------------------------------------------------------------


def test_losses_are_the_processors_and_equal_bits_at_every_budget(gpu: Gpu) -> None:
    _, expected = trained(Net())
    found = []
    for budget in (None, "80%", "50%"):
        model = Net()
        step, losses = trained(model, device="cuda", budget=budget)
        assert losses == pytest.approx(expected, abs=1e-5)
        assert step.measured_peak == step.plan.peak
        assert step.check is not None
        found.append((losses, model.first.weight.tolist()))
    assert found[1:] == found[:1] * 2


def test_model_and_optimizer_are_the_steps_bytes(gpu: Gpu) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = lt.compile(model, optimizer, example=BATCH, device="cuda")
    step(*BATCH)
    state = optimizer.state[model.first.weight]
    assert int(state["step"]) == 1
    assert float(state["exp_avg"].abs().sum()) > 0
    # A step of PyTorch's, and then one of ours on what it left.
    twin = copy.deepcopy(model)
    twins = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    twins.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, owner in ((model, optimizer), (twin, twins)):
        each(*BATCH).backward()
        owner.step()
        owner.zero_grad()
    assert step(*BATCH).item() == pytest.approx(twin(*BATCH).item(), abs=1e-5)
    assert int(state["step"]) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"clip_grad_norm": 0.1},
        {"micro_batches": 2},
        {"optimizer": optim.AdamW8bit},
        {"optimizer": torch.optim.Adafactor},
        {"optimizer": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9)},
    ],
    ids=["bf16", "fp16", "clipped", "micro-batches", "8-bit", "adafactor", "momentum"],
)
def test_options_mean_the_same(gpu: Gpu, options: dict[str, Any]) -> None:
    (_, expected), (step, losses) = trained(Net(), **options), trained(Net(), device="cuda", **options)
    tolerance = 2e-2 if "precision" in options else 1e-3
    assert losses == pytest.approx(expected, abs=tolerance)
    assert step.measured_peak == step.plan.peak


def test_a_step_is_measured_where_it_runs(gpu: Gpu, tmp_path: Path) -> None:
    file = tmp_path / "gpu.prof"
    step, expected = trained(Net(), device="cuda")
    found = step.plan.profile(file)
    assert found["ops"] > 5
    assert found["micros"] > 0
    assert not found["refused"]
    measured, losses = trained(Net(), device="cuda", profile=file, budget="70%")
    assert losses == expected
    assert measured.plan.guessed == []
    with pytest.raises(lt.Error, match="not for cpu"):
        lt.plan(Net(), "adamw", example=BATCH, profile=file)


def test_batches_accumulate(gpu: Gpu) -> None:
    losses = []
    for device in (None, "cuda"):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = lt.compile(model, optimizer, example=BATCH, accumulate=3, device=device)
        losses.append([step([BATCH] * 3).item() for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_smaller_batches_share_the_memory(gpu: Gpu) -> None:
    losses = []
    small = tuple(tensor[:1] for tensor in BATCH)
    for device in (None, "cuda"):
        step, found = trained(Net(), device=device, max_plans=2)
        losses.append([*found, step(*small).item(), step(*BATCH).item()])
        assert len(step.plans) == 2
        assert step.measured_peak == step.plan.peak
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_dropout_repeats_with_its_seed(gpu: Gpu) -> None:
    expected = trained(Net(0.2))[1]
    assert trained(Net(0.2), device="cuda", budget="60%")[1] == pytest.approx(expected, abs=1e-5)


def test_frozen_matrices_have_codes(gpu: Gpu) -> None:
    losses = []
    for device in (None, "cuda"):
        model = Net()
        for parameter in (model.first.weight, model.second.weight):
            parameter.requires_grad_(False)
        step, found = trained(model, device=device, base="nf4")
        assert sorted(step.base) == ["first.weight", "second.weight"]
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


@pytest.mark.filterwarnings("ignore:PyTorch computes")
def test_pytorch_computes_what_has_no_kernel(gpu: Gpu) -> None:
    (plain, expected), (step, losses) = (trained(Net(function=torch.special.i0e), device=d) for d in (None, "cuda"))
    assert plain.plan.externs
    assert [call[:2] for call in step.plan.externs] == [call[:2] for call in plain.plan.externs]
    assert losses == pytest.approx(expected, abs=1e-5)
    with pytest.raises(lt.Unsupported, match="i0e"):
        trained(Net(function=torch.special.i0e), device="cuda", fallback="error")


def test_what_no_step_can_have_is_refused_by_name(gpu: Gpu) -> None:
    for options, why in (
        ({"device": "cuda:7"}, "this machine has 1 GPUs"),
        ({"device": "cuda", "kernels": "plain"}, "a GPU has no plain ones"),
        ({"device": "cuda", "budget": 4096}, "no plan"),
    ):
        with pytest.raises(lt.Error, match=why):
            trained(Net(), **options)
    step, _ = trained(Net(), device="cuda")
    with pytest.raises(lt.Error, match="index 99"):
        step(torch.full_like(BATCH[0], 99), BATCH[1])


def test_without_a_generator_there_are_no_kernels(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTERAGE_MLIR", "/nowhere/lighterage-mlir")
    with pytest.raises(lt.Error, match="the package lighterage-kernels has what generates them"):
        trained(Net(), device="cuda")


# Where a step runs ---------------------------------------------------------------------------------------------------


def test_a_step_runs_where_its_model_is() -> None:
    def on(*devices: str) -> list[tuple[str, torch.Tensor]]:
        with FakeTensorMode():
            return [(f"p{i}", torch.empty(1, device=device)) for i, device in enumerate(devices)]

    of = _device.Place.of
    assert (of(on("cpu"), None).device, of(on("cpu"), None).gpu) == ("cpu", None)
    assert (of(on("cuda:1", "cuda:1"), None).device, of(on("cuda:1"), None).gpu) == ("cuda:1", 1)
    # What is planned for does not change what runs it, unless it is a GPU of this machine.
    assert (of(on("cpu"), "h100").device, of(on("cpu"), "h100").gpu) == ("h100", None)
    assert (of(on("cuda:1"), "h100").device, of(on("cuda:1"), "h100").gpu) == ("h100", 1)
    assert (of(on("cpu"), "cuda").device, of(on("cpu"), "cuda").gpu) == ("cuda", 0)
    # What an earlier step has offloaded.
    assert of(on("cuda:0", "cpu"), "cuda") == _device.Place("cuda", 0, torch.device("cpu"))
    assert of(on("cuda:1"), None).on == torch.device("cuda:1")
    for devices, device, why in (
        (("cuda:1",), "cuda:0", "the model is on cuda:1"),
        (("cpu", "cuda:0"), None, "p0 is on cpu and p1 on cuda:0"),
        (("cpu", "cuda:0"), "cuda:1", "p0 is on cpu and p1 on cuda:0"),
        (("xpu:0",), None, "p0 is on xpu:0"),
    ):
        with pytest.raises(lt.Error, match=why):
            of(on(*devices), device)


# The backend of torch.compile ----------------------------------------------------------------------------------------


@pytest.fixture(name="tensors")
def _tensors(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """What a step makes for PyTorch lies in the GPU's memory."""
    for module in (_program, _pool):
        monkeypatch.setattr(module, "empty", gpu.empty)
    return gpu


def losses_of(model: nn.Module, on: Gpu | None, n: int = 4, **options: Any) -> list[float]:
    put: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone if on is None else on.copy
    for parameter in model.parameters():
        parameter.data = put(parameter)
    given = {"strict": True, **({} if on is None else {"device": "cuda"}), **options}
    compiled: Any = torch.compile(model, backend=backend, options=given)
    optimizer, batch = torch.optim.AdamW(model.parameters(), lr=1e-2), [put(tensor) for tensor in BATCH]
    losses = []
    torch.manual_seed(5)
    for _ in range(n):
        loss = compiled(*batch)
        loss.backward(put(torch.ones(())))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_graphs_of_torch_compile_run_on_the_gpu(tensors: Gpu, dropout: float) -> None:
    expected = losses_of(Net(dropout), None)
    for budget in (None, "75%"):
        torch._dynamo.reset()
        lt.reset()
        assert losses_of(Net(dropout), tensors, budget=budget) == pytest.approx(expected, abs=1e-5)
        stats = lt.stats()
        assert (stats.graphs, stats.eager_graphs, stats.arenas) == (1, 0, 1)
        (plan,) = stats.plans
        # Nothing crosses the link but what the plan swaps.
        assert budget is not None or plan.swapped_bytes == 0


def test_two_forwards_may_wait_for_their_backwards(tensors: Gpu) -> None:
    results = []
    for on in (None, tensors):
        torch._dynamo.reset()
        put: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone if on is None else on.copy
        model = Net()
        for parameter in model.parameters():
            parameter.data = put(parameter)
        options: dict[str, Any] = {"strict": True, "budget": "75%", "device": None if on is None else "cuda"}
        compiled: Any = torch.compile(model, backend=backend, options=options)
        first, second = (compiled(*map(put, batch)) for batch in (BATCH, BATCH[::-1]))
        for loss in (second, first):
            loss.backward(put(torch.ones(())))
        results.append([parameter.grad for parameter in model.parameters()])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


class Layer(nn.Module):
    """Kernels, products and indices that read parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear, self.norm = nn.Embedding(8, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.register_buffer("places", torch.randint(8, (4,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x + self.table(self.places))))


@pytest.mark.parametrize("library", [False, True])
def test_layers_of_a_class_share_a_plan(tensors: Gpu, library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine finds the parameters of the layer that it runs, which are elsewhere in each step."""
    if library:
        monkeypatch.setenv("LIGHTERAGE_CUBLASLT", os.environ["LIGHTERAGE_CUDA"])
    torch.manual_seed(0)
    eager = nn.Sequential(*(Layer() for _ in range(3)))
    layers, x = copy.deepcopy(eager), torch.randn(4, 32, requires_grad=True)
    for layer in layers:
        layer.compile(backend=backend, options={"device": "cuda", "strict": True})
    torch._dynamo.reset()
    lt.reset()
    for _ in range(3):
        for tensor in (*layers.parameters(), *layers.buffers()):
            before, tensor.data = tensor.data, tensors.copy(tensor)
            # Nothing is there any more that could be read.
            before.fill_(99)
        eager(x).backward(x)
        layers(tensors.copy(x).requires_grad_()).backward(tensors.copy(x))
    for found, expected in zip(layers.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, atol=1e-5, rtol=1e-4)
    assert (lt.stats().graphs, lt.stats().arenas) == (1, 3)
    second: Any = layers[1]
    second.places.fill_(8)
    with pytest.raises(lt.Error, match="index 8"):
        second(tensors.copy(x).requires_grad_())


def test_parameters_that_the_gpu_cannot_read_are_refused(tensors: Gpu) -> None:
    compiled: Any = torch.compile(Net(), backend=backend, options={"device": "cuda", "strict": True})
    with pytest.raises(lt.Error, match="not in the GPU's memory"):
        compiled(*map(tensors.copy, BATCH))


# Operators that PyTorch has on GPUs alone ----------------------------------------------------------------------------

aten = torch.ops.aten


def flash(q: Any, k: Any, v: Any, dy: Any) -> Any:
    out, lse, *lengths, state, unused, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    rest = (out, lse, *lengths, 0.0, True, state, unused)
    return out, *aten._scaled_dot_product_flash_attention_backward(dy, q, k, v, *rest)


def efficient(q: Any, k: Any, v: Any, dy: Any) -> Any:
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
    rest = (None, out, lse, seed, offset, 0.0, [True, True, True, False], True)
    return out, *aten._scaled_dot_product_efficient_attention_backward(dy, q, k, v, *rest)[:3]


def cudnn(q: Any, k: Any, v: Any, dy: Any) -> Any:
    out, lse, *lengths, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
    rest = (out, lse, seed, offset, None, *lengths, 0.0, True)
    return out, *aten._scaled_dot_product_cudnn_attention_backward(dy, q, k, v, *rest)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    leaves = q, k, v = [tensor.float().requires_grad_() for tensor in (q, k, v)]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return [out, *torch.autograd.grad(out, leaves, dy.float())]


def rms(x: Any, weight: Any, _: Any, dy: Any) -> Any:
    out, rstd = aten._fused_rms_norm(x, [x.shape[-1]], weight, 1e-6)
    return out, *aten._fused_rms_norm_backward(dy, x, [x.shape[-1]], rstd, weight, [True, True])


def plain_rms(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.float().requires_grad_(), weight.float().requires_grad_()]
    out = F.rms_norm(leaves[0], [x.shape[-1]], leaves[1], 1e-6)
    return [out, *torch.autograd.grad(out, leaves, dy.float())]


@pytest.mark.parametrize(
    ("function", "reference", "dtype"),
    [
        (flash, plain, torch.bfloat16),
        (efficient, plain, torch.float32),
        (efficient, plain, torch.bfloat16),
        (cudnn, plain, torch.bfloat16),
        (rms, plain_rms, torch.float32),
        (rms, plain_rms, torch.bfloat16),
    ],
)
def test_operators_of_gpus_are_planned(
    tensors: Gpu, monkeypatch: pytest.MonkeyPatch, function: Any, reference: Any, dtype: torch.dtype
) -> None:
    shapes: list[tuple[int, ...]] = [(2, 3, 20, 16)] * 4
    if function is rms:
        shapes[1] = (16,)
    with FakeTensorMode():
        fakes = [torch.empty(shape, device="cuda", dtype=dtype) for shape in shapes]
        graph = make_fx(function)(*fakes)
    holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, name in zip(holders, ("primals_1", "primals_2", "primals_3", "tangents_1"), strict=True):
        node._rename(name)
    described = joint(graph, 1, set(), {})
    assert described is not None
    # The tensors that it is run on are the CPU's.
    monkeypatch.setattr(described, "given", lambda: [("q", torch.empty(0))])
    program = _program.Program(described, _program.Options(device="cuda", fallback="error"))
    assert not program.plan.unsupported
    torch.manual_seed(0)
    values = [torch.randn(shape).to(dtype) for shape in shapes]
    given = [tensors.copy(value) for value in values]
    results, ticket = program.forward(given[:3])
    number = int(from_dlpack(ticket))
    gradients = program.backward(number, [given[i] for i in program.saved], [given[3]])
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    for found, expected in zip([*results, *gradients], reference(*values), strict=True):
        torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def test_attention_that_draws_is_recognised() -> None:
    for p in (0.0, 0.1):
        with FakeTensorMode():
            q = torch.empty(1, 2, 8, 16, device="cuda", dtype=torch.bfloat16)
            by_cudnn = {"attn_bias": None, "compute_log_sumexp": True, "dropout_p": p}
            calls = [
                partial(aten._scaled_dot_product_flash_attention, dropout_p=p),
                partial(aten._scaled_dot_product_cudnn_attention, **by_cudnn),
            ]
            graphs = [make_fx(call)(q, q, q).graph for call in calls]
        # What Dynamo records.
        graph = torch.fx.Graph()
        node = graph.placeholder("q")
        graph.call_function(torch._C._nn.scaled_dot_product_attention, (node, node, node), {"dropout_p": p})
        assert [draws_in_attention(each) for each in [*graphs, graph]] == [p > 0] * 3
