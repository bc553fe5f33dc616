"""The comparison of a step with eager PyTorch: what rounding explains, and what it does not."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from lighterage._check import Outcome, check
from torch import nn
from torch.nn import functional as F

import lighterage as lt


def outcome(weight: float, bias: float) -> Outcome:
    gradients = {"weight": torch.tensor([weight, 0.1]), "bias": torch.tensor([bias])}
    return Outcome(torch.tensor(1.0), gradients, {})


EXACT = outcome(1.0, 1e-17)
HALF = {torch.bfloat16}


@pytest.mark.parametrize(("ours", "eager"), [(1e-9, 0.06), (0.03, 0.0), (0.05, -0.05)])
def test_a_gradient_that_cancels_is_rounding(ours: float, eager: float) -> None:
    check(outcome(1.001, ours), outcome(1.0, eager), lambda: EXACT, lambda _: outcome(1.0, eager), HALF)


@pytest.mark.parametrize(
    ("ours", "eager", "exact"),
    [
        (outcome(0.0, 0.0), outcome(1.0, 0.0), EXACT),  # missing
        (outcome(1.0, 0.5), outcome(1.0, 0.01), EXACT),  # far more than eager's rounding
        (outcome(1.0, 0.0), outcome(1.0, 0.1), outcome(1.0, 0.1)),  # small, missing
        (outcome(1.0, 0.0), outcome(1.0, 0.5), EXACT),  # eager computes something else
    ],
)
def test_what_rounding_does_not_explain_is_refused(ours: Outcome, eager: Outcome, exact: Outcome) -> None:
    with pytest.raises(lt.MismatchError):
        check(ours, eager, lambda: exact, lambda _: eager, HALF)


def test_in_f32_a_gradient_that_cancels_is_small() -> None:
    small, large = outcome(1.0, 5e-5), outcome(1.0, 0.05)
    check(outcome(1.0, 1e-9), small, lambda: EXACT, lambda _: small, {torch.float32})
    with pytest.raises(lt.MismatchError):
        check(outcome(1.0, 1e-9), large, lambda: EXACT, lambda _: large, {torch.float32})


@pytest.mark.parametrize(("ours", "passes"), [(1.02, True), (1.05, False), (1.2, False), (0.0, False)])
def test_a_gradient_may_jump_as_far_as_eagers_jumps(ours: float, passes: bool) -> None:
    """With parameters that are off by a rounding, eager mode differs from itself by 2 % in one of its runs."""

    def nudged(seed: int) -> Outcome:
        return outcome(0.98 if seed == 2 else 1.0, 0.0)

    eager = outcome(1.0, 0.0)
    if passes:
        check(outcome(ours, 0.0), eager, lambda: EXACT, nudged, {torch.float32})
        return
    with pytest.raises(lt.MismatchError):
        check(outcome(ours, 0.0), eager, lambda: EXACT, nudged, {torch.float32})


class Bent(nn.Module):
    """Batch norm and ReLU6, as in MobileNet: gradients jump where an activation is at a bend."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [3, *[32] * 8]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU6())
                for a, b in pairwise(sizes)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[:, 0].square().mean()


@pytest.mark.parametrize("seed", range(4))
def test_a_model_whose_gradients_jump_is_compiled(seed: int) -> None:
    torch.manual_seed(seed)
    model, batch = Bent(), torch.randn(4, 3, 16, 16)
    lt.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), example=(batch,), kernels="plain")


class Discriminator(nn.Module):
    """Spectral and instance norm: only a few roundings move an activation over the bend of a leaky ReLU."""

    def __init__(self) -> None:
        super().__init__()

        def conv(a: int, b: int, stride: int) -> nn.Module:
            return nn.utils.parametrizations.spectral_norm(nn.Conv2d(a, b, 4, stride, 1))

        self.layers = nn.Sequential(
            conv(3, 64, 2),
            nn.LeakyReLU(0.2),
            *(conv(64, 128, 2), nn.InstanceNorm2d(128, affine=True), nn.LeakyReLU(0.2)),
            *(conv(128, 256, 2), nn.InstanceNorm2d(256, affine=True), nn.LeakyReLU(0.2)),
            conv(256, 1, 1),
        )

    def forward(self, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        return F.relu(1 - self.layers(real)).mean() + F.relu(1 + self.layers(fake)).mean()


@pytest.mark.parametrize("seed", range(4))
def test_a_model_whose_gradients_jump_after_a_few_roundings_is_compiled(seed: int) -> None:
    torch.manual_seed(seed)
    model, batch = Discriminator(), (torch.randn(8, 3, 64, 64), torch.randn(8, 3, 64, 64))
    lt.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), example=batch, kernels="plain")


class Choice(nn.Module):
    """Scores of several answers: their bias cancels in the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.score = nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.score(self.fc(x).tanh() * 0.05).view(-1, 3), y)


@pytest.mark.parametrize("seed", range(8))
def test_a_bias_that_cancels_is_compiled_in_bf16(seed: int) -> None:
    torch.manual_seed(seed)
    model, batch = Choice(), (torch.randn(2, 3, 32), torch.tensor([0, 1]))
    lt.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), example=batch, precision="bf16", kernels="plain")


def test_numbers_that_are_nan_on_both_sides_do_not_differ() -> None:
    ours, eager = outcome(1.0 + 1e-6, 0.5), outcome(1.0, 0.5)
    for of in (ours, eager):
        of.gradients["weight"][1] = torch.nan
    check(ours, eager, lambda: eager, lambda _: eager, {torch.float32})
    ours.gradients["weight"][0] = torch.nan
    with pytest.raises(lt.MismatchError, match="inf in the gradient of weight"):
        check(ours, eager, lambda: eager, lambda _: eager, {torch.float32})


@pytest.mark.parametrize(("ours", "exact", "passes"), [(1e-7, 1e-17, True), (1e-3, 1e-17, False), (1e-7, 1e-8, False)])
def test_where_the_loss_depends_on_nothing_all_gradients_are_rounding(ours: float, exact: float, passes: bool) -> None:
    def all_of(gradient: float) -> Outcome:
        return Outcome(torch.tensor(1.0), {"weight": torch.tensor([gradient])}, {})

    if passes:
        check(all_of(ours), all_of(1e-8), lambda: all_of(exact), lambda _: all_of(1e-8), {torch.float32})
        return
    with pytest.raises(lt.MismatchError):
        check(all_of(ours), all_of(1e-8), lambda: all_of(exact), lambda _: all_of(1e-8), {torch.float32})


def test_a_loss_without_gradients_is_compiled() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lt.compile(model, optimizer, lambda m, x: m(x).softmax(-1).sum(), example=torch.randn(16, 8), kernels="plain")
