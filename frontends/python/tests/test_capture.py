"""The trace of a live module: everything that eager autograd does, and errors where a trace cannot follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fixtures import MAX_ERROR, error
from lighterage.errors import CaptureError
from lighterage.export import export_joint
from torch import nn
from torch.utils.checkpoint import checkpoint

import lighterage as lt

X = torch.linspace(-1, 1, 32).view(4, 8)


class Regression(nn.Module):
    """The mean square of what `body` computes of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 8)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.fc(x)).square().mean()


class Round(torch.autograd.Function):
    """A straight-through estimator: its gradient is not that of its operations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 3 * gradients[0]


class Rounded(Regression):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return Round.apply(4 * x)  # type: ignore[no-untyped-call]


class Hooked(Regression):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda gradient: 5 * gradient)  # type: ignore[no-untyped-call]
        return x


class Checkpointed(Regression):
    reentrant = False

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.tanh, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize("kind", [Rounded, Hooked, Checkpointed, Reentrant])
def test_gradient_is_what_eager_autograd_computes(kind: type[Regression]) -> None:
    loss_of = kind()
    assert error(export_joint(loss_of, (X,)), loss_of, (X,)) <= MAX_ERROR


def test_straight_through_estimator_has_a_gradient_at_all() -> None:
    step = export_joint(Rounded(), (X,))
    assert step.info["parameters_with_gradient"] == ["fc.weight", "fc.bias"]


@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_checkpointed_forward_is_recorded_once(kind: type[Regression]) -> None:
    nodes = export_joint(kind(), (X,)).program.graph.nodes
    assert [node.target for node in nodes].count(torch.ops.aten.tanh.default) == 1


def test_backward_hook_of_a_module_counts() -> None:
    loss_of = Regression()
    loss_of.fc.register_full_backward_pre_hook(lambda module, gradients: (2 * gradients[0],))
    assert error(export_joint(loss_of, (X,)), loss_of, (X,)) <= MAX_ERROR


class Autocast(Regression):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.fc(x)
        return y.float().square().mean()


def test_autocast_casts_what_eager_casts() -> None:
    loss_of = Autocast()
    step = export_joint(loss_of, (X,))
    products = [node for node in step.program.graph.nodes if node.target == torch.ops.aten.addmm.default]
    assert [node.meta["val"].dtype for node in products] == [torch.bfloat16]
    assert error(step, loss_of, (X,)) <= MAX_ERROR


class Shared(nn.Module):
    """One module under two names, whose weight has a third name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 4)
        self.again = self.embed
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embed(ids) + self.again(ids.flip(0))), ids)


def test_weight_of_a_module_with_two_names_stays_the_users() -> None:
    loss_of, ids = Shared(), torch.arange(8)
    before = list(loss_of.parameters())
    step = export_joint(loss_of, (ids,))
    assert [id(parameter) for parameter in loss_of.parameters()] == [id(parameter) for parameter in before]
    assert step.info["tied"] == [["embed.weight", "again.weight", "head.weight"]]
    assert error(step, loss_of, (ids,)) <= MAX_ERROR


class Cache(Regression):
    """Keeps the last activation in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = torch.zeros(4, 8)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.kept
        self.kept = x.detach()
        return y


class CacheInList(Cache):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.zeros(4, 8)]

    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.kept[0]
        self.kept = [x.detach()]
        return y


class CacheInPlace(Cache):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.kept
        self.kept += 1
        return y


@pytest.mark.parametrize(("kind", "name"), [(Cache, "block.kept"), (CacheInList, r"block.kept\[0\]")])
def test_tensor_that_forward_replaces_is_refused_by_name(kind: type[Cache], name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = kind()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x)

    loss_of = Model()
    kept = loss_of.block.kept
    with pytest.raises(CaptureError, match=f"{name}: .*register_buffer"):
        export_joint(loss_of, (X,))
    assert loss_of.block.kept is kept


def test_tensor_that_forward_writes_to_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"writes to kept.*register_buffer"):
        export_joint(CacheInPlace(), (X,))


class Counts(Regression):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls = 1

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


def test_number_that_forward_changes_is_told() -> None:
    with pytest.warns(UserWarning, match="calls: forward"):
        export_joint(Counts(), (X,))


class Branches(Regression):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_branch_on_data_is_refused_with_its_module() -> None:
    loss_of = nn.Sequential(nn.Linear(8, 8), Branches())
    with pytest.raises(CaptureError, match=r"in 1: .*depends on the values"):
        export_joint(loss_of, (X,))


class Draws(Regression):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(8, generator=torch.Generator())


def test_what_cannot_be_traced_is_refused_with_its_module() -> None:
    with pytest.raises(CaptureError, match=r"in 1: .*cannot be traced .*Generator"):
        export_joint(nn.Sequential(nn.Linear(8, 8), Draws()), (X,))


class Divergence(Regression):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        own = torch.distributions.Normal(x, x.exp())
        return torch.distributions.kl_divergence(own, torch.distributions.Normal(torch.zeros(8), torch.ones(8)))


def test_distributions_are_traced_without_their_checks() -> None:
    # Dynamo switches the checks off for a whole process.
    torch.distributions.Distribution.set_default_validate_args(True)
    loss_of = Divergence()
    assert error(export_joint(loss_of, (X,)), loss_of, (X,)) <= MAX_ERROR
    assert torch.distributions.Normal(0.0, 1.0)._validate_args


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weights_that_a_hook_computes_are_no_state(norm: Callable[[nn.Module], nn.Module]) -> None:
    ours, theirs = Regression(), Regression()
    torch.manual_seed(0)
    norm(ours.fc)
    torch.manual_seed(0)
    norm(theirs.fc)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    step = lt.compile(ours, optimizers[0], example=(X,), kernels="plain")
    for _ in range(3):
        loss = theirs(X)
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        torch.testing.assert_close(step(X), loss.detach())
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)


def test_arguments_may_be_named_and_nested() -> None:
    class Model(Regression):
        def forward(self, x: torch.Tensor, more: Any = None, scale: float = 1.0) -> torch.Tensor:
            return (self.fc(x) * scale + more["y"][0]).square().mean()

    step = export_joint(Model(), (), {"x": X, "more": {"y": [X.clone()]}, "scale": 2.0})
    assert step.program.graph_signature.user_inputs == ("x", "more_y_0")


def test_loss_may_be_computed_outside_of_the_model() -> None:
    fc, labels = nn.Linear(8, 3), torch.tensor([0, 1, 2, 1])
    step = export_joint(fc, (X, labels), loss=lambda model, x, labels: F.cross_entropy(model(x), labels))
    assert step.program.graph_signature.user_inputs == ("x", "labels")
    assert step.info["parameters_with_gradient"] == ["weight", "bias"]


def test_frozen_parameters_have_no_gradient() -> None:
    loss_of = Regression()
    step = export_joint(loss_of, (X,), trainable=lambda parameter: parameter is not loss_of.fc.bias)
    assert step.info["parameters_with_gradient"] == ["fc.weight"]


def test_layer_that_lists_its_parameters_is_traced_and_gets_them_back() -> None:
    layer = nn.LSTM(4, 4)
    x, y = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    export_joint(layer, (x, y), loss=lambda model, x, y: (model(x)[0] - y).square().mean())
    assert all(kept is own for kept, own in zip(layer._flat_weights, layer.parameters(), strict=True))


class AddsHooks(nn.Module):
    """A model that adds a hook in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 1)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "is_hooked"):
            self.is_hooked = True
            self.fc.register_forward_hook(lambda *_: self.seen.append(1))
        return self.fc(x).sum()


def test_a_model_that_adds_hooks_adds_them_once() -> None:
    model = AddsHooks()
    export_joint(model, (torch.randn(2, 4),))
    model.seen = []
    model(torch.randn(2, 4))
    assert model.seen == [1]
