"""Models with complex numbers train as eager PyTorch does. In a step, a complex tensor is two real ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lighterage.backend import backend
from torch import nn
from torch.nn import functional as F

import lighterage as lt

STEPS = 4


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    lt.reset()
    torch.manual_seed(0)


class Rotary(nn.Module):
    """Attention whose queries and keys are turned by a complex buffer, as in LLaMA's own code."""

    turns: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.head = nn.Embedding(19, 16), nn.Linear(16, 48), nn.Linear(16, 19)
        angles = torch.outer(torch.arange(12.0), 1 / 100 ** torch.linspace(0, 1, 4))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[: x.shape[1]].view(1, x.shape[1], 1, 4)).flatten(3).type_as(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.words(ids)).unflatten(2, (3, 2, 8)).unbind(2)
        q, k, v = (x.transpose(1, 2) for x in (self.turned(q), self.turned(k), v))
        y = self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return F.cross_entropy(y[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Fourier(nn.Module):
    """A Fourier neural operator: complex parameters filter the lowest frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1, 5), nn.Linear(5, 1)
        self.low, self.high = (nn.Parameter(torch.randn(5, 5, 3, 3, dtype=torch.cfloat) / 5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).movedim(3, 1)
        spectrum = torch.fft.rfft2(h)
        kept = torch.zeros_like(spectrum)
        kept[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :3, :3], self.low)
        kept[:, :, -3:, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -3:, :3], self.high)
        h = F.gelu(torch.fft.irfft2(kept, s=h.shape[2:]) + h)
        return self.down(h.movedim(1, 3)).square().mean()


class StateSpace(nn.Module):
    """S4D: a convolution with a kernel of powers of complex parameters, by Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.complex(-torch.rand(3, 4), torch.randn(3, 4)))
        self.out, self.step = nn.Parameter(torch.randn(3, 4, dtype=torch.cfloat)), nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, scaled = x.shape[1], self.decay * self.step[:, None]
        powers = torch.exp(scaled[..., None] * torch.arange(n))
        kernel = 2 * torch.einsum("dn,dnl->dl", self.out * (torch.exp(scaled) - 1) / self.decay, powers).real
        spectrum = torch.fft.rfft(x.transpose(1, 2), n=2 * n) * torch.fft.rfft(kernel, n=2 * n)
        return (torch.fft.irfft(spectrum, n=2 * n)[..., :n] - 1).square().mean()


class Mixing(nn.Module):
    """FNet: the real part of a Fourier transform takes the place of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x + torch.fft.fftn(self.first(x), dim=(1, 2)).real)).square().mean()


class Signals(nn.Module):
    """A complex batch, lengths and angles."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5, dtype=torch.cfloat))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        y = z @ self.weight + (1 - 0.5j)
        return y.abs().mean() + y.angle().square().mean() + (y / (2j + y.conj() * y)).real.mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "rotary": (Rotary, lambda: torch.randint(19, (4, 12))),
    "fourier": (Fourier, lambda: torch.randn(4, 8, 10, 1)),
    "state space": (StateSpace, lambda: torch.randn(4, 9, 3)),
    "mixing": (Mixing, lambda: torch.randn(4, 5, 6)),
    "signals": (Signals, lambda: torch.randn(4, 7, dtype=torch.cfloat)),
}


def trained(model: Any, batch: torch.Tensor) -> list[float]:
    """The losses of a loop in PyTorch, with a model as it is or compiled."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_a_step_trains_as_in_eager_mode(name: str) -> None:
    make, draw = MODELS[name]
    model, batch = make(), draw()
    expected = trained(copy.deepcopy(model), batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    types = {path: tensor.dtype for path, tensor in model.state_dict().items()}
    step = lt.compile(model, optimizer, example=(batch,), budget="90%", kernels="plain")
    assert step.check is not None
    assert not step.plan.externs
    assert [step(batch).item() for _ in range(STEPS)] == pytest.approx(expected, rel=1e-5)
    assert {path: tensor.dtype for path, tensor in model.state_dict().items()} == types
    for parameter in model.parameters():
        assert optimizer.state[parameter]["exp_avg"].dtype == parameter.dtype


@pytest.mark.parametrize("name", MODELS)
def test_torch_compile_trains_as_in_eager_mode(name: str) -> None:
    make, draw = MODELS[name]
    model, batch = make(), draw()
    expected = trained(copy.deepcopy(model), batch)
    compiled = torch.compile(model, backend=backend, options={"fallback": "error", "kernels": "plain"})
    assert trained(compiled, batch) == pytest.approx(expected, rel=1e-5)
    assert lt.stats().eager_graphs == 0


def test_a_complex_batch_is_cut_into_micro_batches() -> None:
    make, draw = MODELS["signals"]
    model, batch = make(), draw()
    expected = trained(copy.deepcopy(model), batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = lt.compile(model, optimizer, example=(batch,), micro_batches=2, kernels="plain")
    conjugate = batch.conj().clone().conj()
    assert conjugate.is_conj()
    assert [step(conjugate).item() for _ in range(STEPS)] == pytest.approx(expected, rel=1e-5)


def test_complex_results_leave_a_graph() -> None:
    weight = torch.randn(3, 4, dtype=torch.cfloat, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x) * weight

    x = torch.randn(3, 4, requires_grad=True)
    found = torch.compile(function, backend=backend, options={"strict": True, "kernels": "plain"})(x)
    torch.testing.assert_close(found, function(x))
    gradient = torch.randn(3, 4, dtype=torch.cfloat)
    theirs = torch.autograd.grad(function(x), [x, weight], gradient)
    torch.testing.assert_close(torch.autograd.grad(found, [x, weight], gradient), theirs)


def test_an_optimizer_of_real_numbers_is_refused() -> None:
    make, draw = MODELS["signals"]
    model = make()
    with pytest.raises(lt.Unsupported, match="Adafactor of complex parameters has no counterpart"):
        lt.compile(model, torch.optim.Adafactor(model.parameters()), example=(draw(),))
