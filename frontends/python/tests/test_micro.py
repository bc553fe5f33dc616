"""A step over parts of a batch, or over several batches, computes what one over all their samples does."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lighterage as lt

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
WEIGHTS = torch.linspace(0.1, 1.0, 10)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 10))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Of 12 samples, of whose first five, and of one more, the labels do not count."""
    torch.manual_seed(1)
    x, y = torch.randn(12, 16), torch.randint(10, (12,))
    y[:5] = y[7] = -100
    return x, y


def rows(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y.clamp(min=0), reduction="none") * (y >= 0)


# The loss, and what it is a function of.
LOSSES: dict[str, tuple[Loss, str]] = {
    "mean": (lambda m, x, y: F.cross_entropy(m(x), y), "mean"),
    "sum": (lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"), "sum"),
    "weighted": (lambda m, x, y: F.cross_entropy(m(x), y, weight=WEIGHTS), "mean"),
    "weighted-sum": (lambda m, x, y: F.cross_entropy(m(x), y, weight=WEIGHTS, reduction="sum"), "sum"),
    "smooth": (lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1), "mean"),
    "mean-over-all": (lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").mean(), "mean"),
    "masked": (lambda m, x, y: rows(m, x, y).sum() / (y >= 0).sum().clamp(min=1), "mean"),
    "ratio-of-means": (lambda m, x, y: rows(m, x, y).mean() / (y >= 0).float().mean(), "mean"),
    "squares": (lambda m, x, y: F.mse_loss(m(x), x[:, :10]), "mean"),
    "half-squares": (lambda m, x, y: 0.5 * (m(x) - x[:, :10]).square().sum(), "sum"),
    "two": (lambda m, x, y: F.cross_entropy(m(x), y) + 0.1 * F.cross_entropy(2 * m(x), y.abs() % 10), "mean"),
    "mean-and-sum": (lambda m, x, y: F.cross_entropy(m(x), y) + 0.1 * m(x).square().sum(), "mixed"),
}


def difference(ours: nn.Module, theirs: nn.Module) -> float:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("form", ["parts", "batches"])
def test_micro_batches_are_one_batch(name: str, form: str) -> None:
    loss_fn, kind = LOSSES[name]
    x, y = batch()
    ours, theirs = net(), net()
    # A rate of 1, so that the difference of parameters is that of gradients.
    optimizer, eager = (torch.optim.SGD(m.parameters(), lr=1.0) for m in (ours, theirs))
    options: dict[str, Any] = {"example": (x, y), "micro_batches": 4}
    given: tuple[Any, ...] = (x, y)
    if form == "batches":
        options = {"example": (x[:3], y[:3]), "accumulate": 4}
        given = ([(x[k : k + 3], y[k : k + 3]) for k in range(0, 12, 3)],)
    step = lt.compile(ours, optimizer, loss_fn, kernels="plain", **options)
    assert step.plan.loss_kind == kind
    expected = loss_fn(theirs, x, y)
    expected.backward()  # type: ignore[no-untyped-call]
    eager.step()
    assert float(step(*given)) == pytest.approx(float(expected), rel=1e-6)
    assert difference(ours, theirs) < 1e-6


REFUSED: dict[str, tuple[Loss, str]] = {
    "share-of-a-batch": (
        lambda m, x, y: m(x).square().sum() / x.shape[0],
        "divided by what may be the batch's size",
    ),
    "norms": (
        lambda m, x, y: F.cross_entropy(m(x), y) + sum(p.square().sum() for p in m.parameters()),
        "a mean and a sum",
    ),
    "largest": (lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").max(), "amax|max"),
    "batch-mean": (lambda m, x, y: m(x).mean(0).square().sum(), "mixes samples already"),
    "learned-count": (lambda m, x, y: rows(m, x, y).sum() / m(x).exp().sum(), "depends on parameters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_does_not_follow_from_its_parts_is_refused(name: str) -> None:
    loss_fn, why = REFUSED[name]
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(lt.Error, match=why):
        lt.plan(model, optimizer, loss_fn, example=batch(), micro_batches=4)


def test_the_user_says_what_is_not_known() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y) + sum(p.square().sum() for p in model.parameters())

    x, y = batch()[0], torch.arange(12) % 10
    ours, theirs = net(), net()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    step = lt.compile(ours, optimizer, loss_fn, example=(x, y), micro_batches=4, reduction="mean", kernels="plain")
    expected = loss_fn(theirs, x, y)
    expected.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    assert float(step(x, y)) == pytest.approx(float(expected), rel=1e-6)
    assert difference(ours, theirs) < 1e-6


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x, y = batch()
    with pytest.raises(lt.Error, match="12 rows, which cannot be cut into 5 equal parts"):
        lt.plan(model, optimizer, LOSSES["mean"][0], example=(x, y), micro_batches=5)
    with pytest.raises(lt.Error, match="along their first dimension, and it has 11, 12"):
        lt.plan(model, optimizer, LOSSES["mean"][0], example=(x, y[:11]), micro_batches=2)
    with pytest.raises(lt.Error, match="a number, from 1, or 'auto'"):
        lt.plan(model, optimizer, LOSSES["mean"][0], example=(x, y), micro_batches="all")
    with pytest.raises(lt.Infeasible):
        lt.plan(model, optimizer, LOSSES["mean"][0], example=(x, y), micro_batches="auto", budget=1000)


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU()))), (64,)


def convolutions() -> tuple[nn.Module, tuple[int, ...]]:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 12 * 12, 10)), (3, 12, 12)


def attention() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True), (24, 32)


def normalised() -> tuple[nn.Module, tuple[int, ...]]:
    layers = [nn.Linear(32, 128), nn.LayerNorm(128), nn.SiLU(), nn.Linear(128, 128), nn.Softmax(-1)]
    return nn.Sequential(*layers, nn.Linear(128, 32)), (16, 32)


def wide() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(16, 1024), nn.GELU(), nn.Linear(1024, 16)), (16,)


# All of them, with LIGHTERAGE_LONG_TESTS=1, take a minute and a half.
IS_LONG = os.environ.get("LIGHTERAGE_LONG_TESTS") == "1"
MODELS = [wide, convolutions, mlp, attention, normalised] if IS_LONG else [wide]


@pytest.mark.parametrize("made", MODELS)
@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_the_chosen_number_is_the_fastest(made: Callable[[], tuple[nn.Module, tuple[int, ...]]], device: str) -> None:
    torch.manual_seed(0)
    model, shape = made()
    x = torch.randn(8, *shape)

    def plan(n: int | str, budget: int) -> lt.Plan:
        def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return model(x).square().mean()

        return lt.plan(
            model, "adamw", loss_fn, example=x, micro_batches=n, budget=budget, device=device, planner="greedy"
        )

    keep = plan(1, 2**40).keep_peak
    for share in (1.0, 0.6, 0.4):
        times = {}
        for n in (1, 2, 4, 8):
            try:
                times[n] = plan(n, int(share * keep)).micros
            except lt.Infeasible:
                continue
        if not times:
            continue
        chosen = plan("auto", int(share * keep))
        assert chosen.micros <= 1.02 * min(times.values()), (share, chosen.micro_batches, times)
        assert chosen.peak <= share * keep
