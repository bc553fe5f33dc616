"""Tensors whose number of rows depends on data: steps against eager mode, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lighterage.export import export_joint
from torch import nn
from torch.nn import functional as F

import lighterage as lt

EXPERTS, WIDTH, CHOSEN, VOCABULARY = 4, 16, 2, 32


class Experts(nn.Module):
    """Each expert computes the tokens that chose it, as Mixtral's block does. `limit`: at most one row a token."""

    def __init__(self, limit: bool) -> None:
        super().__init__()
        self.limit = limit
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(_expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(F.softmax(self.gate(x), -1), CHOSEN, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        mask, out = F.one_hot(chosen, EXPERTS).permute(2, 1, 0), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            slot, token = torch.where(mask[e])
            if self.limit:
                torch._check(token.size(0) <= x.size(0))  # type: ignore[no-untyped-call]
            out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Grouped(nn.Module):
    """Experts whose tokens are sorted: a product of groups of rows, by PyTorch (bf16) or by transformers (f32)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 24, WIDTH, dtype=dtype) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 24, dtype=dtype) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(F.softmax(self.gate(x), -1), CHOSEN, -1)
        expert, order = torch.sort(chosen.flatten())
        ends = torch.histc(expert.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        token = order // CHOSEN
        rows = self.product(x[token].to(self.up.dtype), self.up, ends)
        rows = self.product(F.silu(rows), self.down, ends).to(x.dtype) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token, rows)

    def product(self, x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if matrices.dtype == torch.bfloat16:
            return F.grouped_mm(x, matrices.transpose(1, 2), offs=ends)
        pytest.importorskip("transformers.integrations.moe")
        product: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(x, matrices.transpose(1, 2), ends)
        return product


def _expert() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, WIDTH))


class Mixture(nn.Module):
    """A model of words with a mixture of experts. `experts`: the middle."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.embed, self.experts = nn.Embedding(VOCABULARY, WIDTH), experts
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids).flatten(0, 1)
        return F.cross_entropy(self.head(h + self.experts(h)), labels.flatten())


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (2, 8), generator=generator)
    return ids, ids.roll(-1, 1)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, step: Any, n: int = 20) -> list[float]:
    losses = []
    for seed in range(n):
        if step is not None:
            losses.append(step(*batch(seed)).item())
            continue
        optimizer.zero_grad()
        loss = model(*batch(seed))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def both(make: Callable[[], nn.Module], lr: float = 0.3) -> tuple[list[float], list[float], Any]:
    """Losses of eager mode and of a step, from the same start."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for model in models]
    step = lt.compile(models[1], optimizers[1], example=batch(0), fallback="error")
    return trained(models[0], optimizers[0], None), trained(models[1], optimizers[1], step), step


@pytest.mark.parametrize("limit", [False, True], ids=["all", "limit"])
def test_experts_train_as_in_eager_mode(limit: bool) -> None:
    eager, ours, step = both(lambda: Mixture(Experts(limit)))
    assert eager[-1] < eager[0] - 0.1
    assert ours == pytest.approx(eager, abs=2e-6)
    assert step.plan.unsupported == []


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-3)])
def test_sorted_experts_train_as_in_eager_mode(dtype: torch.dtype, close: float) -> None:
    eager, ours, step = both(lambda: Mixture(Grouped(dtype)))
    assert eager[-1] < eager[0] - 0.1
    assert ours == pytest.approx(eager, abs=close)
    assert step.plan.unsupported == []
    assert not step.plan.externs


@pytest.mark.parametrize("experts", [lambda: Experts(limit=True), lambda: Grouped(torch.float32)])
def test_a_budget_changes_no_bit(experts: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    losses = []
    for budget in (None, "70%"):
        torch.manual_seed(0)
        model = Mixture(experts())
        optimizer = torch.optim.AdamW(model.parameters())
        losses.append(trained(model, optimizer, lt.compile(model, optimizer, example=batch(0), budget=budget)))
    assert losses[0] == losses[1]


def test_a_limit_makes_room_for_as_many_rows() -> None:
    sizes = {}
    for limit in (False, True):
        program = export_joint(Mixture(Experts(limit)), batch(0)).program
        shapes = [node.meta["val"].shape for node in program.graph.nodes if node.target == torch.ops.aten.silu.default]
        sizes[limit] = {shape[0] for shape in shapes}
    assert sizes == {False: {2 * 16}, True: {16}}


class OfMask(nn.Module):
    """A function of the rows that a mask chooses, added to all."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.detach().sum(-1) > 0.5
        return x + self.function(self.linear(x[mask]))


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda rows: rows.sum(0),
    "sum of all": lambda rows: rows.tanh().sum(),
    "product over rows": lambda rows: (rows.T @ rows.exp()).mean(0),
    "softmax of each": lambda rows: rows.softmax(-1).sum(0),
    "rows beside each other": lambda rows: torch.cat([rows, rows + 1], 1).amax(1).sum(),
    "division": lambda rows: (1 / rows.square().add(1).sum(1)).sum(),
    "mean": lambda rows: rows.mean(0),
    "mean of all": lambda rows: rows.square().mean(),
    "mean that keeps a dimension": lambda rows: rows.tanh().mean((0, 1), keepdim=True).squeeze(),
    "mean of each": lambda rows: rows.mean(1).exp().mean(),
    "their number": lambda rows: rows.sum(0) / rows.size(0) + rows.sum() / rows.numel(),
    "loss": lambda rows: F.cross_entropy(rows, rows.detach().argmax(1)),
    "sum of losses": lambda rows: F.cross_entropy(rows, rows.detach().argmin(1), reduction="sum"),
    "smooth loss": lambda rows: F.cross_entropy(rows, rows.detach().argmin(1), label_smoothing=0.1),
    "mean square": lambda rows: F.mse_loss(rows, rows.detach().tanh()),
    "sum of squares": lambda rows: F.mse_loss(rows, rows.detach().tanh(), reduction="sum"),
    "squares": lambda rows: F.mse_loss(rows, rows.detach().tanh(), reduction="none").sum(0),
    "other losses": lambda rows: F.huber_loss(rows, -rows.detach()) + F.smooth_l1_loss(rows, 2 * rows.detach()),
    "entropy": lambda rows: (
        F.binary_cross_entropy_with_logits(rows, rows.detach().sigmoid())
        + F.binary_cross_entropy(rows.sigmoid(), (rows.detach() > 0).float())
    ),
    "magnitude": lambda rows: F.l1_loss(rows, rows.detach().exp()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_rows(name: str) -> None:
    eager, ours, _ = both(lambda: Mixture(OfMask(FUNCTIONS[name])), lr=1e-3)
    assert ours == pytest.approx(eager, abs=5e-6, rel=1e-5)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "softmax over rows": (lambda rows: rows.softmax(0).sum(0), "softmax.*reads all of them"),
    "largest": (lambda rows: rows.amax(), "amax.*reads all of them"),
    "their number": (lambda rows: rows.sum(0) * rows.size(0), "number is computed with"),
    "twice as many": (lambda rows: rows.reshape(-1, 8).sum(), "number is computed with"),
    "sorted": (lambda rows: rows.sort(0).values[:1].sum(), "sort.*not known"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_read_the_filling_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(lt.CaptureError, match=f"in experts: .*{message}"):
        export_joint(Mixture(OfMask(function)), batch(0))
