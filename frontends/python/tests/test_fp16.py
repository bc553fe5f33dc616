"""fp16 with a scaled loss: steps against eager mode under `torch.autocast` with `torch.amp.GradScaler`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

import lighterage as lt

STEPS = 500
Batch = tuple[torch.Tensor, torch.Tensor]


class Products(nn.Module):
    """Sums of at most two products, which have one value in f32, whatever their order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.second(torch.relu(self.first(x))).float(), y)


def batches(steps: int, *shape: int) -> list[Batch]:
    """Batches of which some make gradients in f16 infinite, at any scale of the test."""
    x, y = torch.randn(steps, *shape), torch.randn(steps, *shape)
    x[[k for k in range(steps) if k % 37 == 11 or k % 101 in (60, 61)]] *= 3e4
    return [(x[k], y[k]) for k in range(steps)]


def eager(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, data: list[Batch], clip: float | None = None
) -> tuple[list[float], list[float], list[list[torch.Tensor]]]:
    """Losses, scales and parameters after each step."""
    losses, scales, weights = [], [], []
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
        scales.append(scaler.get_scale())
        weights.append([p.detach().clone() for p in model.parameters()])
    return losses, scales, weights


def skips(weights: list[list[torch.Tensor]], start: list[torch.Tensor]) -> list[bool]:
    """Whether each step left all parameters as they were."""
    before = [start, *weights]
    return [all(map(torch.equal, a, b)) for a, b in zip(before, weights, strict=False)]


@pytest.mark.parametrize("kernels", ["plain", "auto"])
def test_scales_skips_and_weights_have_the_bits_of_grad_scaler(kernels: str) -> None:
    torch.manual_seed(3)
    theirs, data = Products(), batches(STEPS, 2, 2)
    start = [p.detach().clone() for p in theirs.parameters()]
    ours = [copy.deepcopy(theirs) for _ in range(2)]
    scaler = GradScaler("cpu", init_scale=2.0**14, growth_interval=13)
    # The rate is a power of two, so that its product with a gradient is exact.
    _, scales, weights = eager(theirs, torch.optim.SGD(theirs.parameters(), lr=2.0**-7), scaler, data)
    skipped = skips(weights, start)
    # Overflows of the data, and of a scale that has grown too large.
    assert 30 < sum(skipped) < 250
    assert max(scales) > 2.0**14
    for own, budget in zip(ours, ["100%", "80%"], strict=True):
        scaler = GradScaler("cpu", init_scale=2.0**14, growth_interval=13)
        optimizer = torch.optim.SGD(own.parameters(), lr=2.0**-7)
        step = lt.compile(
            own, optimizer, example=data[0], budget=budget, precision="fp16", scaler=scaler, kernels=kernels
        )
        for k, (x, y) in enumerate(data):
            step(x, y)
            assert scaler.get_scale() == scales[k], k
            assert all(map(torch.equal, own.parameters(), weights[k])), k


def test_moments_and_counts_are_those_of_grad_scaler() -> None:
    torch.manual_seed(4)
    theirs, data = Products(), batches(STEPS, 2, 2)
    own = copy.deepcopy(theirs)
    scalers = [GradScaler("cpu", init_scale=2.0**10, growth_interval=29) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (theirs, own)]
    losses, scales, _ = eager(theirs, optimizers[0], scalers[0], data, clip=0.5)
    step = lt.compile(
        own, optimizers[1], example=data[0], precision="fp16", scaler=scalers[1], clip_grad_norm=0.5, kernels="plain"
    )
    found = []
    for k, (x, y) in enumerate(data):
        found.append(float(step(x, y)))
        assert scalers[1].get_scale() == scales[k], k
    assert found == pytest.approx(losses, rel=1e-2)
    assert scalers[0].state_dict() == scalers[1].state_dict()
    for a, b in zip(theirs.parameters(), own.parameters(), strict=True):
        left, right = optimizers[0].state[a], optimizers[1].state[b]
        assert left["step"] == right["step"] < STEPS
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(left[name], right[name], rtol=1e-2, atol=1e-6), name
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)


class Images(nn.Module):
    """Convolutions and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 5),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.body(x), y)


class Mlp(nn.Module):
    """Linear layers with batch norm; two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.SiLU(), nn.Linear(32, 5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.body(x)
        return nn.functional.cross_entropy(logits, y) + 1e-3 * logits.float().square().mean()


class Tied(nn.Module):
    """An embedding that is the head, too, with attention between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.linear(self.layer(self.embed(x)), self.embed.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def images() -> tuple[nn.Module, list[Batch]]:
    return Images(), [(torch.randn(8, 3, 8, 8), torch.randint(5, (8,))) for _ in range(8)]


def mlp() -> tuple[nn.Module, list[Batch]]:
    return Mlp(), [(torch.randn(16, 12), torch.randint(5, (16,))) for _ in range(8)]


def tied() -> tuple[nn.Module, list[Batch]]:
    return Tied(), [(torch.randint(64, (4, 8)), torch.randint(64, (4, 8))) for _ in range(8)]


@pytest.mark.parametrize("make", [images, mlp, tied])
def test_losses_are_those_of_autocast_within_each_budget(make: Any) -> None:
    torch.manual_seed(5)
    theirs, data = make()
    models = [copy.deepcopy(theirs) for _ in range(2)]
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    expected, scales, _ = eager(theirs, optimizer, GradScaler("cpu", growth_interval=3), data)
    found = []
    for own, budget in zip(models, ["100%", "80%"], strict=True):
        scaler = GradScaler("cpu", growth_interval=3)
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3)
        step = lt.compile(own, optimizer, example=data[0], budget=budget, precision="fp16", scaler=scaler)
        losses = []
        for k, (x, y) in enumerate(data):
            losses.append(float(step(x, y)))
            assert scaler.get_scale() == scales[k]
        assert step.measured_peak == step.plan.peak
        found.append((losses, [p.detach().clone() for p in own.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))
    assert found[0][0] == pytest.approx(expected, rel=2e-3)


def test_a_step_of_several_batches_has_one_scale() -> None:
    torch.manual_seed(6)
    theirs, data = Products(), batches(60, 2, 2)
    own = copy.deepcopy(theirs)
    scalers = [GradScaler("cpu", growth_interval=5) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=2.0**-7) for model in (theirs, own)]
    step = lt.compile(own, optimizers[1], example=data[0], accumulate=2, precision="fp16", scaler=scalers[1])
    for pair in zip(data[::2], data[1::2], strict=True):
        optimizers[0].zero_grad()
        for x, y in pair:
            with torch.autocast("cpu", torch.float16):
                loss = theirs(x, y)
            scalers[0].scale(loss / 2).backward()
        scalers[0].step(optimizers[0])
        scalers[0].update()
        step(list(pair))
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert all(map(torch.equal, theirs.parameters(), own.parameters()))


def test_a_scaler_is_kept_with_a_checkpoint_and_checked() -> None:
    torch.manual_seed(7)
    model, data = Products(), batches(12, 2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-7)
    step = lt.compile(model, optimizer, example=data[0], precision="fp16")
    assert step.scaler is not None
    assert step.scaler.get_scale() == 65536
    step(*data[11])
    saved = step.scaler.state_dict()
    assert saved["scale"] == 32768
    step.scaler.load_state_dict({**saved, "scale": 64.0})
    step(*data[11])
    assert step.scaler.get_scale() == 32.0
    step.scaler.set_growth_factor(4.0)
    with pytest.raises(lt.StaleError, match="other factors"):
        step(*data[0])
    with pytest.raises(lt.Error, match="precision='fp16' does"):
        lt.compile(model, optimizer, example=data[0], scaler=GradScaler("cpu"))
    with pytest.raises(lt.Error, match="not enabled"):
        lt.compile(model, optimizer, example=data[0], precision="fp16", scaler=GradScaler("cpu", enabled=False))
