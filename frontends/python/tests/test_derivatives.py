"""Losses that contain derivatives: of an equation's solution, of a penalty, for each sample, of an inner step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jvp, vmap

import lighterage as lt

X = torch.randn(24, 2, generator=torch.Generator().manual_seed(0))

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def equation(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Burgers' equation, as in networks that solve equations."""
    x = x.detach().requires_grad_()
    u = model(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (first[:, 1] + u[:, 0] * first[:, 0] - 0.1 * second[:, 0]).square().mean()


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The penalty for a critic's gradients."""
    x = x.detach().requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + 10 * (gradient.norm(2, dim=1) - 1).square().mean()


def samples(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Gradients of each sample."""
    weights = dict(model.named_parameters())
    of_one = grad(lambda weights, x: functional_call(model, weights, (x[None],)).sum())
    found = vmap(of_one, in_dims=(None, 0))(weights, x)
    return torch.stack([gradient.square().mean() for gradient in found.values()]).sum()


def laplacian(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Second derivatives, forward over reverse."""
    found = vmap(hessian(lambda x: model(x).squeeze()))(x)
    return found.diagonal(dim1=-2, dim2=-1).sum(-1).square().mean()


def forward_mode(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Derivatives along a direction, and along each axis."""
    y, along = jvp(model, (x,), (torch.ones_like(x),))  # type: ignore[misc]
    return (y * along).mean() + vmap(jacfwd(lambda x: model(x).squeeze()))(x).square().mean()


def inner_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss after a step of gradient descent."""
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    loss = functional_call(model, weights, (x,)).square().mean()
    found = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), found, strict=True)}
    return (functional_call(model, weights, (x,)) - 1).square().mean()


@pytest.mark.parametrize("loss", [equation, penalty, samples, laplacian, forward_mode, inner_step])
@pytest.mark.parametrize("function", [nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Softplus])
def test_derivatives_in_losses_are_trained(loss: Loss, function: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(2, 16), function(), nn.Linear(16, 16), function(), nn.Linear(16, 1)]
    eager = nn.Sequential(*layers)
    model = copy.deepcopy(eager)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, eager)]
    step = lt.compile(model, optimizers[0], loss, example=(X,), fallback="error", kernels="plain")
    for _ in range(4):
        optimizers[1].zero_grad()
        expected = loss(eager, X)
        torch.autograd.backward(expected)
        optimizers[1].step()
        torch.testing.assert_close(step(X), expected.detach(), atol=1e-5, rtol=1e-4)
