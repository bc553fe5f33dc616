"""A compiled step trains as eager PyTorch does, on the same bytes, and refuses what it was not compiled for."""

from __future__ import annotations

import copy
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lighterage.export import weightless
from torch import nn
from torch.nn import functional as F

import lighterage as lt
from lighterage import _lighterage

Batch = tuple[torch.Tensor, ...]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Mlp(nn.Module):
    """Two hidden layers; the first is normalised over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 32), nn.BatchNorm1d(32)
        self.second, self.last = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.norm(self.first(x)))
        return F.cross_entropy(self.last(torch.relu(self.second(h))), y)


class Tied(nn.Module):
    """A language model whose last layer is its embedding."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=p, batch_first=True)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(self.embed(ids))).flatten(0, 1), labels.flatten())


class Recurrent(nn.Module):
    """A layer that keeps a list of its parameters in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.layer(x)[0], y)


class Frozen(nn.Module):
    """A parameter that is not trained, one that nothing reads, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unread, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.first.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(self.first(x)) * self.scale).square().mean()


def made(kind: type[nn.Module]) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model = kind()
    batches: dict[type[nn.Module], Batch] = {
        Mlp: (torch.randn(24, 16), torch.randint(4, (24,))),
        Tied: (torch.randint(16, (4, 6)), torch.randint(16, (4, 6))),
        Recurrent: (torch.randn(2, 3, 4), torch.randn(2, 3, 4)),
        Frozen: (torch.randn(3, 4),),
    }
    return model, batches[kind]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # With a smaller eps, gradients that are zero but for rounding would move their parameters by the rate.
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def eager(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, norm: float | None = None) -> float:
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    if norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), norm)
    optimizer.step()
    return loss.item()


def compiled(kind: type[nn.Module] = Mlp, make: Make = adamw, **options: object) -> tuple[lt.Step, nn.Module, Batch]:
    model, batch = made(kind)
    options = {"example": batch, "kernels": "plain", **options}
    return lt.compile(model, make(list(model.parameters())), **options), model, batch  # type: ignore[arg-type]


# The same as eager ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Mlp, Tied, Recurrent, Frozen])
@pytest.mark.parametrize("budget", ["100%", "60%"])
def test_losses_and_parameters_are_eagers(kind: type[nn.Module], budget: str) -> None:
    if kind is Frozen and budget == "60%":
        budget = "90%"  # what is left of it is parameters and moments
    reference, batch = made(kind)
    optimizer = adamw(list(reference.parameters()))
    step, model, _ = compiled(kind, budget=budget)
    for _ in range(5):
        assert step(*batch).item() == pytest.approx(eager(reference, optimizer, batch), abs=1e-4)
    for (name, value), expected in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-4, msg=name)
    assert step.measured_peak == step.plan.peak
    assert step.plan.budget is not None
    assert step.plan.peak <= step.plan.budget


@pytest.mark.parametrize("make", [adamw, adam, sgd, momentum])
@pytest.mark.parametrize("norm", [None, 0.5])
def test_every_optimizer_updates_as_torch_does(make: Make, norm: float | None) -> None:
    reference, batch = made(Tied)
    optimizer = make(list(reference.parameters()))
    step, model, _ = compiled(Tied, make, clip_grad_norm=norm)
    for _ in range(5):
        assert step(*batch).item() == pytest.approx(eager(reference, optimizer, batch, norm), abs=1e-5)
    torch.testing.assert_close(model.get_parameter("embed.weight"), reference.get_parameter("embed.weight"))


class Doubles(nn.Module):
    """A layer in float64, and one in another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 8).double(), nn.Linear(8, 4).to(dtype)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.first(x.double()).tanh().to(self.last.weight.dtype)
        return 100 * F.cross_entropy(self.last(h), y)


@pytest.mark.parametrize("make", [adamw, adam, sgd, momentum])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-7)])
def test_a_norm_clips_doubles_as_such(make: Make, dtype: torch.dtype, bound: float) -> None:
    batch, model = made(Mlp)[1], Doubles(dtype)
    reference = copy.deepcopy(model)
    optimizer = make(list(reference.parameters()))
    step = lt.compile(model, make(list(model.parameters())), example=batch, kernels="plain", clip_grad_norm=0.5)
    for _ in range(5):
        step(*batch)
        eager(reference, optimizer, batch, 0.5)
    torch.testing.assert_close(model.first.weight, reference.first.weight, atol=bound, rtol=0)


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


@pytest.mark.parametrize(
    ("make", "bound"),
    [
        (lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05, weight_decay=0.1), 1e-5),
        # The products of Muon are in bf16.
        (lambda model: torch.optim.Muon(_matrices(model), lr=0.02), 2e-3),
    ],
    ids=["adafactor", "muon"],
)
def test_optimizers_with_other_states(make: Any, bound: float) -> None:
    check_other_states(make, bound, lambda group: {"lr": group["lr"] * 0.95})


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({}, {"weight_decay": 0.2}),
        ({"beta1": 0.9, "warmup_init": True, "weight_decay": 0.1}, {"warmup_init": False}),
        ({"lr": 1e-2, "relative_step": False, "scale_parameter": False}, {"lr": 5e-3}),
    ],
    ids=["relative", "momentum", "fixed"],
)
def test_adafactor_of_transformers(options: Any, changed: Any) -> None:
    adafactor = pytest.importorskip("transformers.optimization").Adafactor
    check_other_states(lambda model: adafactor(model.parameters(), **options), 1e-5, lambda _: changed)


def check_other_states(make: Any, bound: float, change: Any) -> None:
    """12 steps are those of eager mode, with options that change, and so are states. change: new options of a group."""
    torch.manual_seed(3)
    x, y = torch.randn(8, 6), torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    eager = copy.deepcopy(model)

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), y)

    optimizer, reference = make(model), make(eager)
    step = lt.compile(model, optimizer, loss_fn, example=(x, y))
    assert step.check is not None
    for k in range(12):
        for group in optimizer.param_groups + reference.param_groups:
            group.update(change(group))
        reference.zero_grad()
        expected: Any = loss_fn(eager, x, y)
        expected.backward()
        reference.step()
        assert abs(float(step(x, y)) - float(expected)) <= bound, k
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=bound), name
    # The states are torch's: its optimizer goes on with them.
    ours, theirs = optimizer.state_dict()["state"], reference.state_dict()["state"]
    for k in theirs:
        assert ours[k].keys() == theirs[k].keys()
        for name in theirs[k]:
            if name != "RMS":
                one, other = torch.as_tensor(ours[k][name]), torch.as_tensor(theirs[k][name])
                assert torch.allclose(one.float(), other.float(), atol=bound), (k, name)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_groups_of_parameters_have_their_own_options(make: Any) -> None:
    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        parameters = dict(model.named_parameters())
        frozen = parameters.pop("body.norm1.weight").requires_grad_(False)
        one = [p for p in parameters.values() if p.ndim == 1]
        two = [p for p in parameters.values() if p.ndim != 1]
        options = {"eps": 1e-4} if make is torch.optim.AdamW else {"momentum": 0.5}
        return make(
            [
                {"params": [frozen]},
                {"params": two, "weight_decay": 0.3},
                {"params": one, "weight_decay": 0.0, "lr": 0.03, **options},
            ],
            lr=0.01,
        )

    reference, batch = made(Tied)
    torchs = grouped(reference)
    model, _ = made(Tied)
    optimizer = grouped(model)
    step = lt.compile(model, optimizer, example=batch, kernels="plain")
    for k in range(6):
        if k == 3:
            optimizer.param_groups[2]["lr"] = torchs.param_groups[2]["lr"] = 0.001
        assert step(*batch).item() == pytest.approx(eager(reference, torchs, batch), abs=1e-5)
    for name, value in model.state_dict().items():
        if "in_proj" not in name:  # without eps in SGD and here, gradients that are zero but for rounding move it
            torch.testing.assert_close(value, reference.state_dict()[name], atol=1e-4, rtol=1e-3, msg=name)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(lt.StaleError, match="other parameters"):
        step(*batch)


@pytest.mark.parametrize(("budget", "norm"), [("100%", None), ("70%", 0.1)])
def test_gradients_accumulate_over_batches(budget: str, norm: float | None) -> None:
    n = 3
    torch.manual_seed(1)
    rounds = [[(torch.randn(24, 16), torch.randint(4, (24,))) for _ in range(n)] for _ in range(4)]
    reference, _ = made(Mlp)
    optimizer = adamw(list(reference.parameters()))
    step, model, _ = compiled(accumulate=n, budget=budget, clip_grad_norm=norm)
    assert step.check is not None
    for batches in rounds:
        optimizer.zero_grad()
        losses = [reference(*batch) / n for batch in batches]
        for loss in losses:
            loss.backward()
        if norm is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), norm)
        optimizer.step()
        assert step(list(batches)).item() == pytest.approx(sum(loss.item() for loss in losses), abs=1e-5)
    # Running means of the norm too, which each batch moves.
    for (name, value), expected in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-4, msg=name)
    assert step.measured_peak == step.plan.peak

    with pytest.raises(lt.ShapeError, match="call it with a list of 3"):
        step(*rounds[0][0])
    with pytest.raises(lt.ShapeError, match="2 batches, and the step accumulates over 3"):
        step(rounds[0][:2])
    with pytest.raises(lt.ShapeError, match="x is float32"):
        step([(x[:8], y[:8]) for x, y in rounds[0]])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_of_new_shapes_get_plans_of_their_own(accumulate: int) -> None:
    torch.manual_seed(1)
    reference, _ = made(Mlp)
    optimizer = adamw(list(reference.parameters()))
    step, model, batch = compiled(accumulate=accumulate, max_plans=3)
    ours = step._state._optimizer
    for n in (24, 8, 24, 5, 8, 24):
        x, y = torch.randn(n, 16), torch.randint(4, (n,))
        loss = step(x, y) if accumulate == 1 else step([(x, y)] * accumulate)
        optimizer.zero_grad()
        for _ in range(accumulate):
            theirs = reference(x, y)
            (theirs / accumulate).backward()
        optimizer.step()
        assert loss.item() == pytest.approx(theirs.item(), abs=1e-4)
    for (name, value), expected in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-4, msg=name)
    for (name, mine), its in zip(model.named_parameters(), reference.parameters(), strict=True):
        for key, value in optimizer.state[its].items():
            torch.testing.assert_close(ours.state[mine][key], value, atol=1e-5, rtol=1e-4, msg=name)
    # Three plans are all. Another type of element, or another structure, is no other shape.
    wrong = [(torch.randn(3, 16), torch.randint(4, (3,))), (batch[0].double(), batch[1]), (batch[0],)]
    for given in wrong:
        with pytest.raises(lt.ShapeError):
            step(*given) if accumulate == 1 else step([given] * accumulate)


@pytest.mark.parametrize("budget", ["100%", "60%", "40%"])
def test_plans_for_smaller_batches_share_the_memory_of_the_example(budget: str) -> None:
    step, model, _ = compiled(Tied, budget=budget, max_plans=4)
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    apart, twin, (ids, labels) = compiled(Tied, budget="100%", max_plans=1)
    alone = {len(ids): apart}
    twin.load_state_dict(model.state_dict())
    for n in (len(ids), 2, 3, 2, len(ids)):
        if n not in alone:
            alone[n] = lt.compile(twin, apart._state._optimizer, example=(ids[:n], labels[:n]), kernels="plain")
        assert step(ids[:n], labels[:n]).item() == alone[n](ids[:n], labels[:n]).item()
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses
    assert len(step.plans) == 3
    assert step.measured_peak == step.plan.peak == max(plan.peak for plan in step.plans)
    for value, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(value, expected)


def test_a_batch_larger_than_the_example_has_memory_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    step, _, (ids, labels) = compiled(Tied, max_plans=2)
    with caplog.at_level("WARNING", logger="lighterage"):
        assert step(ids.repeat(2, 1), labels.repeat(2, 1)).isfinite()
    assert "the largest batch as the example" in caplog.text
    assert len(step.plans) == 1


def test_batches_of_one_step_have_one_shape() -> None:
    step, _, (x, y) = compiled(accumulate=2, max_plans=2)
    for batches in ([(x, y), (x[:8], y[:8])], [(x[:8], y[:8]), (x, y)], []):
        with pytest.raises(lt.ShapeError):
            step(batches)
    # None of them took a plan.
    assert step([(x[:8], y[:8])] * 2).isfinite()


def test_plans_for_two_shapes_draw_one_sequence_of_random_numbers() -> None:
    def states(sizes: list[int]) -> list[list[int]]:
        torch.manual_seed(0)
        model = Tied(0.5)
        ids = torch.randint(16, (4, 6))
        step = lt.compile(
            model, sgd(list(model.parameters())), example=(ids, ids), kernels="plain", seed=3, max_plans=2
        )
        for n in sizes:
            step(ids[:n], ids[:n])
        return [state.tolist() for state in step.rng_state().values()]

    assert states([4, 4, 4]) == states([4, 2, 4])
    assert states([4, 4]) != states([4, 4, 4])


def test_accumulating_takes_the_activations_of_one_batch() -> None:
    model, batch = made(Tied)
    optimizer = adamw(list(model.parameters()))
    wide = tuple(torch.cat([x] * 4) for x in batch)
    one, four = lt.plan(model, optimizer, example=batch), lt.plan(model, optimizer, example=batch, accumulate=4)
    assert one.keep_peak < four.keep_peak < lt.plan(model, optimizer, example=wide).keep_peak


def test_bits_are_the_same_at_every_budget() -> None:
    def losses(budget: str) -> list[float]:
        step, _, batch = compiled(Tied, budget=budget)
        return [step(*batch).item() for _ in range(4)]

    assert losses("100%") == losses("75%") == losses("60%")


def test_loss_may_be_a_function_and_the_batch_a_dict() -> None:
    reference, (x, y) = made(Mlp)
    optimizer = sgd(list(reference.parameters()))
    model = copy.deepcopy(reference)

    def half(model: nn.Module, *, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x, y) / 2

    step = lt.compile(model, sgd(list(model.parameters())), half, example={"x": x, "y": y}, kernels="plain")
    expected = eager(reference, optimizer, (x, y)) / 2
    assert step(x=x, y=y).item() == pytest.approx(expected, abs=1e-6)


def test_self_check_compares_and_leaves_everything_as_it_was() -> None:
    for make in (adamw, sgd, momentum):
        before, _ = made(Mlp)
        step, model, _ = compiled(Mlp, make)
        assert step.check is not None
        assert step.check.loss < 1e-5
        assert step.check.gradient < 1e-4
        for name, value in before.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name


class Impure(Mlp):
    """Computes something else at each call, which a trace cannot know."""

    calls = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        Impure.calls += 1
        return super().forward(x, y) * Impure.calls


def test_step_that_computes_something_else_is_a_mismatch() -> None:
    model, batch = Impure(), made(Mlp)[1]
    with pytest.raises(lt.MismatchError, match="differs from eager"):
        lt.compile(model, adamw(list(model.parameters())), example=batch, kernels="plain")


# The same bytes ------------------------------------------------------------------------------------------------------


def test_model_and_optimizer_are_the_steps_bytes() -> None:
    model, batch = made(Mlp)
    parameters = list(model.parameters())
    optimizer = adamw(parameters)
    step = lt.compile(model, optimizer, example=batch, kernels="plain")
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    step(*batch)
    # Eager evaluation sees the update, and the step sees what a program writes.
    assert model(*batch).item() < 1.4
    assert optimizer.state[parameters[0]]["step"] == 1
    with torch.no_grad():
        for p in parameters:
            p.zero_()
    assert step(*batch).item() == pytest.approx(torch.tensor(4.0).log().item(), abs=1e-6)


def test_states_go_through_torch_save_and_training_goes_on() -> None:
    step, model, batch = compiled(Mlp, make=adamw)
    optimizer = step._state._optimizer
    for _ in range(3):
        step(*batch)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    onward = [step(*batch).item() for _ in range(3)]
    # A parameter is written as its own bytes, not as the whole pool.
    assert file.tell() < 3 * 4 * sum(p.numel() for p in model.parameters()) + 20_000

    file.seek(0)
    saved = torch.load(file)
    # Into a new step, into this one, and into eager PyTorch.
    other, twin, _ = compiled(Mlp, make=adamw)
    twin.load_state_dict(saved["model"])
    other._state._optimizer.load_state_dict(saved["optimizer"])
    assert [other(*batch).item() for _ in range(3)] == onward
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert [step(*batch).item() for _ in range(3)] == onward
    plain, _ = made(Mlp)
    torchs = adamw(list(plain.parameters()))
    plain.load_state_dict(saved["model"])
    torchs.load_state_dict(saved["optimizer"])
    assert [eager(plain, torchs, batch) for _ in range(3)] == pytest.approx(onward, abs=1e-4)


def test_eager_steps_and_compiled_steps_may_alternate() -> None:
    reference, batch = made(Tied)
    torchs = adamw(list(reference.parameters()))
    step, model, _ = compiled(Tied)
    optimizer = step._state._optimizer
    for k in range(6):
        ours = step(*batch).item() if k % 2 else eager(model, optimizer, batch)
        assert ours == pytest.approx(eager(reference, torchs, batch), abs=1e-4)


def test_state_of_an_optimizer_that_has_trained_is_taken_over() -> None:
    reference, batch = made(Tied)
    torchs = adamw(list(reference.parameters()))
    for _ in range(2):
        eager(reference, torchs, batch)
    model = copy.deepcopy(reference)
    optimizer = adamw(list(model.parameters()))
    optimizer.load_state_dict(torchs.state_dict())
    step = lt.compile(model, optimizer, example=batch, kernels="plain")
    for _ in range(3):
        assert step(*batch).item() == pytest.approx(eager(reference, torchs, batch), abs=1e-4)


@pytest.mark.filterwarnings("error")
def test_schedule_of_the_rate_is_followed() -> None:
    def run(losses: Callable[[nn.Module, torch.optim.Optimizer, Batch], Callable[[], float]]) -> list[float]:
        model, batch = made(Tied)
        optimizer = adamw(list(model.parameters()))
        step = losses(model, optimizer, batch)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        found = []
        for _ in range(6):
            found.append(step())
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-5)
        return found

    def ours(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Callable[[], float]:
        step = lt.compile(model, optimizer, example=batch, kernels="plain")
        return lambda: step(*batch).item()

    expected = run(lambda model, optimizer, batch: lambda: eager(model, optimizer, batch))
    assert run(ours) == pytest.approx(expected, abs=1e-4)


def test_two_steps_of_one_model_serve_two_shapes() -> None:
    reference, (ids, labels) = made(Tied)
    torchs = adamw(list(reference.parameters()))
    model, _ = made(Tied)
    optimizer = adamw(list(model.parameters()))
    whole = lt.compile(model, optimizer, example=(ids, labels), kernels="plain")
    half = lt.compile(model, optimizer, example=(ids[:2], labels[:2]), kernels="plain")
    for step, batch in ((whole, (ids, labels)), (half, (ids[:2], labels[:2]))) * 3:
        assert step(*batch).item() == pytest.approx(eager(reference, torchs, batch), abs=1e-4)


def test_two_models_live_in_one_process() -> None:
    first, _, batch = compiled(Mlp)
    second, _, ids = compiled(Tied)
    alone, _, _ = compiled(Mlp)
    expected = [alone(*batch).item() for _ in range(3)]
    found = []
    for _ in range(3):
        found.append(first(*batch).item())
        second(*ids)
    assert found == expected


def test_parameters_outlive_their_step() -> None:
    step, model, batch = compiled(Mlp)
    step(*batch)
    before = model(*batch).item()
    del step
    gc.collect()
    filler = [torch.full((1 << 16,), 7.0) for _ in range(16)]
    assert model(*batch).item() == pytest.approx(before)
    assert len(filler) == 16


def test_backward_over_a_step_is_refused() -> None:
    step, model, batch = compiled(Mlp)
    loss = model(*batch)
    step(*batch)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Random numbers ------------------------------------------------------------------------------------------------------


class Dropping(Tied):
    """The same with dropout."""

    def __init__(self) -> None:
        super().__init__(p=0.3)


def dropping(**options: object) -> lt.Step:
    torch.manual_seed(0)
    model = Dropping()
    step = lt.compile(
        model,
        sgd(list(model.parameters())),
        example=made(Tied)[1],
        kernels="plain",
        **options,  # type: ignore[arg-type]
    )
    assert step.check is None
    return step


def test_dropout_repeats_with_its_seed_at_every_budget_and_goes_on_from_its_state() -> None:
    batch = made(Tied)[1]
    step = dropping(seed=5, budget="100%")
    losses = [step(*batch).item() for _ in range(2)]
    assert losses[0] != losses[1]
    state, model = step.rng_state(), copy.deepcopy(step._model.state_dict())
    onward = [step(*batch).item() for _ in range(2)]

    again = dropping(seed=5, budget="70%")
    assert [again(*batch).item() for _ in range(2)] == losses
    other = dropping(seed=6)
    assert [other(*batch).item() for _ in range(2)] != losses
    other._model.load_state_dict(model)
    other.set_rng_state(state)
    assert [other(*batch).item() for _ in range(2)] == onward
    # Without a seed, torch's generator decides.
    torch.manual_seed(1)
    assert dropping()(*batch).item() == dropping()(*batch).item()


# What is refused -----------------------------------------------------------------------------------------------------


def test_budget_that_nothing_fits_is_infeasible_and_says_what_fits() -> None:
    with pytest.raises(lt.Infeasible) as caught:
        compiled(Mlp, budget=1000)
    smallest = caught.value.smallest
    assert caught.value.budget == 1000
    assert str(smallest) in str(caught.value)
    step, _, batch = compiled(Mlp, budget=smallest)
    assert step(*batch).isfinite()
    with pytest.raises(lt.Infeasible):
        compiled(Mlp, budget=step.plan.smallest - 1)


class Bessel(Mlp):
    """Calls what has no kernel."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y) + torch.special.bessel_j0(self.first(x).detach()).mean()


def test_call_without_a_kernel_is_named_and_can_be_planned() -> None:
    model, batch = Bessel(), made(Mlp)[1]
    before = copy.deepcopy(model.state_dict())
    optimizer = adamw(list(model.parameters()))
    with pytest.raises(lt.Unsupported, match="bessel_j0") as caught:
        lt.compile(model, optimizer, example=batch, fallback="error")
    assert caught.value.ops[0][0] == "aten.special_bessel_j0.default"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    plan = lt.plan(model, optimizer, example=batch, device="h100", budget="80%")
    assert plan.unsupported == caught.value.ops
    assert plan.peak <= (plan.budget or 0)
    assert plan.kernels == "generated"


def test_model_without_memory_can_be_planned() -> None:
    with weightless():
        model = Tied()
    plan = lt.plan(model, "adamw", example=made(Tied)[1], device="a100-80g", budget="70%")
    assert plan.peak < plan.keep_peak
    with pytest.raises(lt.Error):
        plan.load()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.Adam(p, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True),
        torch.optim.Adagrad,
    ],
)
def test_optimizer_without_a_counterpart_is_refused_by_name(make: Make) -> None:
    name = type(make([nn.Parameter(torch.zeros(1))])).__name__
    with pytest.raises(lt.Unsupported, match=name):
        compiled(Mlp, make)


def test_other_batches_are_refused_by_name() -> None:
    step, _, (x, y) = compiled(Mlp)
    with pytest.raises(lt.ShapeError, match=r"x is float32\[12, 16\], and .* float32\[24, 16\]"):
        step(x[:12], y[:12])
    with pytest.raises(lt.ShapeError, match="y is int32"):
        step(x, y.int())
    with pytest.raises(lt.ShapeError, match=r"is \(float32\[24, 16\]\), and .* \(float32\[24, 16\], int64\[24\]\)$"):
        step(x)
    with pytest.raises(lt.ShapeError, match=r"x is of the type ndarray, and .* float32\[24, 16\]$"):
        step(x.numpy(), y)
    assert step(x, y).isfinite()


@pytest.mark.parametrize(
    "options", [{"budget": [1]}, {"budget": True}, {"threads": 0}, {"threads": -1}, {"threads": True}]
)
def test_options_that_are_no_numbers_are_refused_by_name(options: dict[str, Any]) -> None:
    model, batch = made(Mlp)
    with pytest.raises(lt.Error, match=rf"^{next(iter(options))}="):
        lt.compile(model, sgd(list(model.parameters())), example=batch, **options)


def test_models_that_torch_compile_has_compiled_are_refused() -> None:
    model, batch = made(Mlp)
    optimizer = sgd(list(model.parameters()))
    compiled: Any = torch.compile(model)
    with pytest.raises(lt.CaptureError, match=r"the model is compiled by torch\.compile: give"):
        lt.compile(compiled, optimizer, example=batch)
    model.get_submodule("second").compile()
    with pytest.raises(lt.CaptureError, match="the module second is compiled in place"):
        lt.compile(model, optimizer, example=batch)


def test_after_a_bad_batch_the_step_says_that_it_has_stopped() -> None:
    step, _, (x, y) = compiled(Mlp)
    with pytest.raises(lt.Error, match=r"^line .* index 11 is not in 0\.\.4"):
        step(x, torch.full_like(y, 11))
    for _ in range(2):
        with pytest.raises(lt.Error, match=r"an earlier batch stopped the step.* compile again .*index 11"):
            step(x, y)


def test_changed_models_are_refused_or_taken_back() -> None:
    step, model, batch = compiled(Mlp)
    model.eval()
    with pytest.raises(lt.StaleError, match=r"call train\(\)"):
        step(*batch)
    model.train()
    first = model.get_submodule("first")
    first.requires_grad_(False)
    with pytest.raises(lt.StaleError, match=r"first.weight.requires_grad is False"):
        step(*batch)
    first.requires_grad_(True)
    # The same parameter with its values elsewhere comes back; another parameter does not.
    weight = model.get_parameter("first.weight")
    weight.data = torch.zeros(32, 16)
    step(*batch)
    assert weight.detach().abs().max() == pytest.approx(1e-2, rel=0.1)
    model.load_state_dict(model.state_dict(), assign=True)
    with pytest.raises(lt.StaleError, match="another tensor"):
        step(*batch)


def replace_module(model: nn.Module) -> None:
    model.second = nn.Linear(32, 32)


def remove_parameter(model: nn.Module) -> None:
    del model.get_submodule("second")._parameters["bias"]


def replace_parameter(model: nn.Module) -> None:
    model.get_submodule("second").weight = nn.Parameter(model.get_parameter("second.weight").detach().clone())


def replace_buffer(model: nn.Module) -> None:
    model.get_submodule("norm").running_mean = torch.zeros(32)


CHANGES: list[tuple[Callable[[nn.Module], object], str]] = [
    (replace_module, "second: another module"),
    (lambda model: model.add_module("more", nn.Linear(4, 4)), "more: another module"),
    (lambda model: model.get_submodule("second").add_module("more", nn.Linear(4, 4)), "second.more: another module"),
    (remove_parameter, "second.bias is another tensor"),
    (replace_parameter, "second.weight is another tensor"),
    (replace_buffer, "norm.running_mean is another tensor"),
    (lambda model: model.get_parameter("last.bias").requires_grad_(False), "last.bias.requires_grad is False"),
    (lambda model: model.get_submodule("norm").eval(), r"norm was compiled in train mode"),
    (lambda model: model.half(), "float16"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_change_after_steps_is_noticed_at_each_call(change: Callable[[nn.Module], object], message: str) -> None:
    step, model, batch = compiled(Mlp)
    step(*batch)
    step(*batch)
    change(model)
    # An error is not forgotten.
    for _ in range(2):
        with pytest.raises(lt.StaleError, match=message):
            step(*batch)


def swap_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def swap_buffer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    mean = model.get_buffer("norm.running_mean")
    mean.data = mean + 1.0


def swap_moment(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        optimizer.state[p]["exp_avg"].data = optimizer.state[p]["exp_avg"] * 2.0


def replace_moment(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        optimizer.state[p]["exp_avg_sq"] = optimizer.state[p]["exp_avg_sq"] * 2.0


def clear_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def load_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for moments in state["state"].values():
        moments["exp_avg"] *= 3.0
        moments["step"] += 5
    state["param_groups"][0]["lr"] = 3e-3
    optimizer.load_state_dict(state)


def set_options(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0].update(lr=1e-3, betas=(0.5, 0.5), weight_decay=0.5)


def change_tensor_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups[0]
    if not isinstance(group["lr"], torch.Tensor):
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    group["lr"] *= 0.5


def change_betas_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups[0]
    group["betas"] = betas = group["betas"] if isinstance(group["betas"], list) else list(group["betas"])
    betas[0] *= 0.5


@pytest.mark.parametrize(
    "change",
    [
        swap_parameter,
        swap_buffer,
        swap_moment,
        replace_moment,
        clear_state,
        load_states,
        set_options,
        change_tensor_rate,
        change_betas_in_place,
    ],
)
def test_change_of_values_between_steps_counts_as_in_eager_mode(
    change: Callable[[nn.Module, torch.optim.Optimizer], None],
) -> None:
    reference, batch = made(Mlp)
    torchs = adamw(list(reference.parameters()))
    step, model, _ = compiled(Mlp)
    optimizer = step._state._optimizer
    for k in range(8):
        if k in (2, 4, 5):
            change(reference, torchs)
            change(model, optimizer)
        assert step(*batch).item() == pytest.approx(eager(reference, torchs, batch), abs=1e-4)
    for (name, value), expected in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, atol=1e-4, rtol=1e-3, msg=name)


def test_other_parameters_of_the_optimizer_are_noticed() -> None:
    step, _, batch = compiled(Mlp)
    step(*batch)
    parameters = step._state._optimizer.param_groups[0]["params"]
    parameters.append(parameters.pop(0))
    for _ in range(2):
        with pytest.raises(lt.StaleError, match="other parameters"):
            step(*batch)
    parameters.insert(0, parameters.pop())
    assert step(*batch).isfinite()


def test_batch_of_any_kind_of_tensor_is_taken() -> None:
    step, _, (x, y) = compiled(Mlp)
    other, _, _ = compiled(Mlp)
    wide = torch.zeros(24, 32)
    wide[:, ::2] = x
    batches = [(x, y), (wide[:, ::2], y), (x.clone().requires_grad_(), y), (nn.Parameter(x), y)]
    for batch in batches:
        assert step(*batch).item() == other(x, y).item()
    with pytest.raises(lt.ShapeError, match="the batch is"):
        step(x, y=y)


def test_changed_optimizers_are_refused() -> None:
    model, batch = made(Mlp)
    optimizer = sgd(list(model.parameters()))
    step = lt.compile(model, optimizer, example=batch, kernels="plain")
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(lt.StaleError, match="momentum"):
        step(*batch)
    optimizer.param_groups[0].update(momentum=0.0, nesterov=True)
    with pytest.raises(lt.Unsupported, match="nesterov"):
        step(*batch)
    optimizer.param_groups[0]["nesterov"] = False
    assert step(*batch).isfinite()


def test_failed_line_is_told_and_the_model_can_be_compiled_again() -> None:
    step, model, (ids, labels) = compiled(Tied)
    step(ids, labels)
    with pytest.raises(lt.Error, match="index"):
        step(ids + 100, labels)
    with pytest.raises(lt.Error):
        step(ids, labels)
    expected = model(ids, labels).item()
    again = lt.compile(model, adamw(list(model.parameters())), example=(ids, labels), kernels="plain")
    assert again(ids, labels).item() == pytest.approx(expected, abs=1e-5)


# Threads, signals, reports -------------------------------------------------------------------------------------------


def test_threads_compile_one_after_the_other() -> None:
    models = [Mlp() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    together, losses = threading.Barrier(len(models)), []

    def train(model: nn.Module) -> None:
        together.wait()
        step = lt.compile(model, sgd(list(model.parameters())), example=(x, y), kernels="plain")
        losses.append([step(x, y).item() for _ in range(3)])

    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(losses) == 3
    assert losses[0] == losses[1] == losses[2]


def test_other_threads_run_while_a_step_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    x = torch.randn(512, 512)
    step = lt.compile(
        model, sgd(list(model.parameters())), lambda model, x: model(x).square().mean(), example=x, kernels="plain"
    )
    counted, done = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not done.is_set():
            counted += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    before = counted
    for _ in range(10):
        step._machine.step()
    after = counted
    done.set()
    thread.join()
    # With the GIL held, the other thread would have its turn only between steps.
    assert after - before > 100


SIGNALLED = """
import os, signal, threading, time, torch
import lighterage as lt
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
x = torch.randn(4, 8)
loss = lambda model, x: model(x).square().mean()
step = lt.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss, example=x, kernels="plain")
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
start, steps = time.time(), 0
try:
    while time.time() - start < 20:
        step(x)
        steps += 1
except KeyboardInterrupt:
    assert time.time() - start < 5
    count = float(step._state._count)
    assert count - steps in (0, 1), (count, steps)
    step(x)
    assert float(step._state._count) == count + 1
    print("went on")
"""


def test_interrupt_comes_between_steps_and_the_step_goes_on() -> None:
    python = str(Path(lt.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": python}
    run = subprocess.run(
        [sys.executable, "-c", SIGNALLED], env=environment, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "went on\n"), run.stderr
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Deep(nn.Module):
    """Layers enough for a search of some hundred milliseconds."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        layers = [(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(depth)]
        self.layers = nn.ModuleList(nn.Sequential(*layer) for layer in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def interrupted(work: Callable[[], object]) -> None:
    """Run something that answers the third signal that arrives meanwhile."""
    signals = 0

    def answer(*_: object) -> None:
        nonlocal signals
        signals += 1
        if signals == 3:
            raise KeyboardInterrupt

    # Signals that nothing looks at until the end are one signal.
    before = signal.signal(signal.SIGALRM, answer)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_interrupt_ends_the_search_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Deep(12), torch.randn(4, 8)
    optimizer = adamw(list(model.parameters()))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    places = [p.data_ptr() for p in model.parameters()]
    real, plans = _lighterage.compile, []

    def search(*args: Any, **kwargs: Any) -> None:
        interrupted(lambda: plans.append(real(*args, **kwargs)))
        raise KeyboardInterrupt

    monkeypatch.setattr(_lighterage, "compile", search)
    with pytest.raises(KeyboardInterrupt):
        lt.compile(model, optimizer, example=x, budget="40%", kernels="plain")
    monkeypatch.undo()
    assert plans == []
    assert places == [p.data_ptr() for p in model.parameters()]
    assert not optimizer.state

    step = lt.compile(model, optimizer, example=x, budget="40%", kernels="plain")
    assert step.plan.peak < step.plan.keep_peak
    twin = Deep(12)
    twin.load_state_dict(before)
    theirs = adamw(list(twin.parameters()))
    for _ in range(2):
        assert float(step(x)) == pytest.approx(eager(twin, theirs, (x,)), rel=1e-5)


def test_interrupted_curve_is_planned_again() -> None:
    torch.manual_seed(0)
    model, x = Deep(5), torch.randn(4, 8)
    plan = lt.plan(model, "adamw", example=x, budget="40%")
    interrupted(lambda: plan.curve)
    assert plan.curve == lt.plan(model, "adamw", example=x, budget="40%").curve
    assert plan.smallest <= plan.peak


def test_plan_tells_what_it_needs_and_why(tmp_path: Path) -> None:
    step, _, _ = compiled(Mlp, budget="60%")
    plan = step.plan
    assert plan.smallest <= plan.peak < plan.keep_peak
    assert plan.micros > 0
    assert plan.curve[-1][0] == plan.smallest
    assert [micros for _, micros in plan.curve] == sorted(micros for _, micros in plan.curve)
    assert "p_second_weight" in step.explain("second")
    assert "f32[32,32]" in step.explain("second.weight")
    with pytest.raises(lt.Error, match="no value, state or module"):
        step.explain("nothing.like.that")
    step.report(tmp_path / "plan.html")
    assert "<!DOCTYPE html>" in (tmp_path / "plan.html").read_text()
    assert "<svg" in step._repr_html_()
    assert f"({plan.peak} bytes)" in repr(plan)


def test_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "python.md").read_text()
    example = page.split("## A whole example")[1].split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert (tmp_path / "checkpoint.pt").exists()


def test_options_that_mean_nothing_are_refused() -> None:
    for options in (
        {"budget": "lots"},
        {"budget": -1.0},
        {"device": "abacus"},
        {"planner": "best"},
        {"kernels": "all"},
        {"accumulate": 0},
        {"max_plans": 0},
    ):
        with pytest.raises(lt.Error):
            compiled(Mlp, **options)
    model, batch = made(Mlp)
    with pytest.raises(lt.Error, match="lambda model"):
        lt.compile(model, adamw(list(model.parameters())), nn.CrossEntropyLoss(), example=batch)
