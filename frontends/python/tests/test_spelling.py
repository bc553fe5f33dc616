"""Compositions of operators that have no op: they compute what PyTorch's operators compute."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lighterage._spelling import OWN
from lighterage.backend import backend
from torch import nn
from torch.nn import functional as F

import lighterage as lt

aten = torch.ops.aten


def close(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


INDICES = torch.tensor([1, 4, 2, 2, 0, 5, 2])
# The third and the last bag are empty.
OFFSETS = torch.tensor([0, 2, 5, 5, 7])


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("padding_idx", [-1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_bags_of_embeddings(mode: int, padding_idx: int, last: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 3)
    scale = torch.rand(7) if mode == 0 else None
    arguments = (weight, INDICES, OFFSETS, False, mode, False, scale, last, padding_idx)
    theirs = aten._embedding_bag(*arguments)
    ours = OWN[aten._embedding_bag.default](*arguments)
    close(ours[:1], theirs[:1])
    grad = torch.randn_like(theirs[0])
    # PyTorch's derivative reads what PyTorch's forward saved.
    saved = (grad, INDICES, OFFSETS, *theirs[1:], 6, False, mode, False, scale, padding_idx)
    close([OWN[aten._embedding_bag_backward.default](*saved)], [aten._embedding_bag_backward(*saved)])
    if scale is not None:
        saved = (grad, weight, INDICES, OFFSETS, theirs[1], mode, padding_idx)
        name = aten._embedding_bag_per_sample_weights_backward
        close([OWN[name.default](*saved)], [name(*saved)])


@pytest.mark.parametrize("dim", [0, 2])
def test_weights_as_length_and_direction(dim: int) -> None:
    torch.manual_seed(0)
    v, g = torch.randn(4, 3, 2), torch.rand([4, 1, 1] if dim == 0 else [1, 1, 2]) + 1
    theirs = aten._weight_norm_interface(v, g, dim)
    close(OWN[aten._weight_norm_interface.default](v, g, dim), theirs)
    grad = torch.randn_like(v)
    backward = aten._weight_norm_interface_backward
    close(OWN[backward.default](grad, v, g, theirs[1], dim), backward(grad, v, g, theirs[1], dim))


def test_views_by_strides_are_views() -> None:
    """Every view that narrows, selects and permutes is expressed, and reads the same elements."""
    rng = random.Random(0)
    for _ in range(300):
        x = torch.randn([rng.randint(1, 4) for _ in range(rng.randint(1, 4))])
        view = x
        for dim in range(x.dim()):
            start = rng.randrange(view.shape[dim])
            view = view.narrow(dim, start, rng.randint(1, view.shape[dim] - start))
        view = view.permute(rng.sample(range(view.dim()), view.dim()))
        if view.dim() > 1 and rng.random() < 0.5:
            view = view.select(0, rng.randrange(view.shape[0]))
        place = (view.shape, view.stride(), view.storage_offset())
        assert torch.equal(OWN[aten.as_strided.default](x, *place), view)
        src = torch.randn(view.shape)
        assert torch.equal(
            OWN[aten.as_strided_scatter.default](x, src, *place), torch.as_strided_scatter(x, src, *place)
        )


def test_other_views_by_strides_are_left_to_pytorch() -> None:
    x = torch.randn(4, 6)
    for size, stride, offset in [((3, 2), (1, 1), 0), ((2, 2), (6, 4), 0), ((2, 2), (0, 1), 0), ((4, 6), (6, 1), 1)]:
        assert OWN[aten.as_strided.default](x, size, stride, offset) is NotImplemented
    assert OWN[aten.as_strided.default](x[1:], (2, 2), (6, 1), 0) is NotImplemented


VOLUMES: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride": {"stride": (2, 1, 2)},
    "padding": {"padding": (2, 1, 0)},
    "dilation": {"dilation": (2, 1, 1), "padding": (1, 0, 1)},
}


@pytest.mark.parametrize("case", VOLUMES)
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_of_volumes(case: str, groups: int) -> None:
    torch.manual_seed(0)
    options = {"stride": (1, 1, 1), "padding": (0, 0, 0), "dilation": (1, 1, 1), **VOLUMES[case]}
    stride, padding, dilation = (list(options[name]) for name in ("stride", "padding", "dilation"))
    x, weight, bias = torch.randn(2, 4, 7, 6, 8), torch.randn(6, 4 // groups, 3, 2, 3), torch.randn(6)
    rest = (stride, padding, dilation, False, [0, 0, 0], groups)
    theirs = aten.convolution(x, weight, bias, *rest)
    ours = OWN[aten.convolution.default](x, weight, bias, *rest)
    close([ours], [theirs])
    # A model may call `view` on it.
    assert ours.stride() == theirs.stride()
    arguments = (torch.randn_like(theirs), x, weight, [6], *rest, [True, True, True])
    for ours, expected in zip(
        OWN[aten.convolution_backward.default](*arguments), aten.convolution_backward(*arguments), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arguments", [([2], [], [0], [1]), ([3, 2, 2], [2, 1, 2], [1, 1, 0], [1, 2, 1])])
def test_maxima_of_volumes(arguments: Any) -> None:
    torch.manual_seed(0)
    x = torch.randint(-9, 9, (2, 3, 7, 6, 8)).float()  # many maxima are equal
    value, at = aten.max_pool3d_with_indices(x, *arguments)
    ours, here = OWN[aten.max_pool3d_with_indices.default](x, *arguments)
    assert torch.equal(value, ours)
    assert torch.equal(at, here)
    assert (ours.stride(), here.stride()) == (value.stride(), at.stride())
    saved = (torch.randn_like(value), x, *arguments, False, at)
    backward = aten.max_pool3d_with_indices_backward
    close([OWN[backward.default](*saved)], [backward(*saved)])


@pytest.mark.parametrize("shape", [(4, 6), (4, 1), (6,)])
def test_elements_by_a_mask(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, mask, source = torch.randn(4, 6), torch.rand(shape) < 0.5, torch.randn(30)
    close([OWN[aten.masked_scatter.default](x, mask, source)], [aten.masked_scatter(x, mask, source)])
    saved = (torch.randn(4, 6), mask.expand(4, 6), [5, 6])
    name = aten.masked_scatter_backward
    close([OWN[name.default](*saved)], [name(*saved)])


@pytest.mark.parametrize("arguments", [(), (1.0, 2.0, -3.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_are_none(arguments: tuple[float, ...], dtype: torch.dtype) -> None:
    x = torch.tensor([1.5, torch.nan, torch.inf, -torch.inf], dtype=dtype)
    ours, theirs = OWN[aten.nan_to_num.default](x, *arguments), aten.nan_to_num(x, *arguments)
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)


POOLS: dict[str, tuple[Any, ...]] = {
    "a rest": ([3], [2], [0], True, True, None),
    "a rest and padding": ([3, 4], [2, 3], [1, 2], True, True, None),
    "padding that does not count": ([3], [1], [1], False, False, None),
    "both": ([3, 2], [2, 2], [1, 0], True, False, None),
    "gaps": ([2], [3], [1], True, False, None),
}


@pytest.mark.parametrize("case", POOLS)
@pytest.mark.parametrize("size", [(8, 9), (7, 6), (10, 11)])
def test_averages_of_unequal_windows(case: str, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, *size)
    theirs = aten.avg_pool2d(x, *POOLS[case])
    close([OWN[aten.avg_pool2d.default](x, *POOLS[case])], [theirs])
    saved = (torch.randn_like(theirs), x, *POOLS[case])
    close([OWN[aten.avg_pool2d_backward.default](*saved)], [aten.avg_pool2d_backward(*saved)])


@pytest.mark.parametrize("to", [(4, 5), (7, 7), (1, 8)])
def test_adaptive_averages(to: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 9)
    theirs = aten._adaptive_avg_pool2d(x, to)
    close([OWN[aten._adaptive_avg_pool2d.default](x, to)], [theirs])
    grad = torch.randn_like(theirs)
    backward = aten._adaptive_avg_pool2d_backward
    close([OWN[backward.default](grad, x)], [backward(grad, x)])


@pytest.mark.parametrize("window", [([3, 2], [1, 1], [1, 0], [1, 1]), ([2, 3], [2, 1], [1, 2], [2, 3])])
def test_columns_of_images(window: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 9)
    theirs = aten.im2col(x, *window)
    assert torch.equal(OWN[aten.im2col.default](x, *window), theirs)
    columns = torch.randn_like(theirs)
    close([OWN[aten.col2im.default](columns, [6, 9], *window)], [aten.col2im(columns, [6, 9], *window)])


@pytest.mark.parametrize("weights", [True, False])
def test_group_norms_of_other_types(weights: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 4, 3, 3).bfloat16(), torch.randn(4), torch.randn(4)
    given = (x, weight, bias if weights else None, 2, 4, 9, 2, 1e-5)
    (ours, mean, rstd), theirs = OWN[aten.native_group_norm.default](*given), aten.native_group_norm(*given)
    torch.testing.assert_close(ours, theirs[0], rtol=1e-2, atol=1e-2)
    close([mean, rstd], theirs[1:])
    saved = (torch.randn_like(x), x, mean, rstd, weight, 2, 4, 9, 2, [True, True, weights])
    backward = aten.native_group_norm_backward
    for a, b in zip(OWN[backward.default](*saved), backward(*saved), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


class Net(nn.Module):
    """A function of a linear layer and of other modules; the loss is a mean of squares."""

    def __init__(self, function: Callable[..., torch.Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.first, self.rest, self.function = nn.Linear(6, 8), nn.ModuleList(modules), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.first(x), *self.rest).square().mean()


def written(h: torch.Tensor) -> torch.Tensor:
    """Part of a tensor with a history is replaced in place: its derivative views memory by strides."""
    copy = h * 2
    copy[:, 2:5] = h[:, :3].tanh()
    copy[1:3, 0].mul_(3)
    return copy


NETS: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], list[nn.Module]]]] = {
    "bags": (
        lambda h, bag: bag(torch.arange(8).view(4, 2) % 5) * h,
        lambda: [nn.EmbeddingBag(5, 8, mode="mean", padding_idx=1)],
    ),
    "weight_norm": (
        lambda h, layer: layer(h),
        lambda: [nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))],
    ),
    "volumes": (
        lambda h, conv: F.max_pool3d(conv(h.reshape(1, 1, 4, 4, 2)), (3, 2, 1)),
        lambda: [nn.Conv3d(1, 2, 2, padding=1)],
    ),
    "windows": (
        lambda h: F.adaptive_avg_pool2d(F.avg_pool2d(h.reshape(1, 2, 4, 4), 3, 1, 1, count_include_pad=False), 3),
        list,
    ),
    "columns": (lambda h: F.fold(F.unfold(h.reshape(1, 2, 4, 4), 3, padding=1).tanh(), (4, 4), 3, padding=1), list),
    "written": (written, list),
    "logits": (
        lambda h: F.binary_cross_entropy_with_logits(h, h.detach().sigmoid()) + F.logsigmoid(h),
        list,
    ),
    "mask": (lambda h: h.masked_scatter(h.detach() > 0, (3 * h).tanh()), list),
    "finite": (lambda h: torch.nan_to_num(h + torch.where(h.detach() > 0.5, torch.inf, 0.0), posinf=2.0), list),
    "triangles": (lambda h: h[:, torch.tril_indices(4, 4, -1)[0]] + h[:, torch.triu_indices(4, 4, 1)[1]], list),
}


@pytest.mark.parametrize("case", NETS)
def test_models_need_no_externs(case: str) -> None:
    """`lighterage.compile` compares the gradients with eager mode itself."""
    function, modules = NETS[case]
    torch.manual_seed(0)
    model, x = Net(function, *modules()), torch.randn(4, 6)
    torch._dynamo.reset()
    lt.reset()
    loss = torch.compile(model, backend=backend, options={"strict": True, "fallback": "error"})(x)
    loss.backward()
    ours = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    eager = model(x)
    eager.backward()
    close([loss], [eager])
    close(ours, [parameter.grad for parameter in model.parameters()])
    assert lt.stats().graphs == 1
    step = lt.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), example=(x,), fallback="error")
    close([step(x)], [eager.detach()])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_reach_the_backend(kind: type[nn.Module]) -> None:
    torch._dynamo.reset()
    lt.reset()
    torch.manual_seed(0)
    layer, x = kind(4, 4, batch_first=True), torch.randn(2, 3, 4)
    eager = layer(x)[0].square().mean()
    loss = torch.compile(layer, backend=backend, options={"strict": True, "fallback": "error"})(x)[0].square().mean()
    close([loss], [eager])
    close(torch.autograd.grad(loss, list(layer.parameters())), torch.autograd.grad(eager, list(layer.parameters())))
    assert lt.stats().graphs == 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
        (nn.LSTM, {"proj_size": 3}),
        (nn.GRU, {"num_layers": 2}),
        (nn.RNN, {"bidirectional": True}),
    ],
)
@pytest.mark.parametrize("shape", [(5, 2, 4), (5, 1, 4), (5, 4)])
def test_last_states_of_recurrent_layers(
    kind: type[nn.Module], options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    """Torch's own decomposition leaves a dimension of size 1 in those of a batch of an LSTM."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, x = kind(4, 4, **options), torch.randn(shape)

    def states(layer: Any) -> list[torch.Tensor]:
        _, last = layer(x)
        return list(last) if isinstance(last, tuple) else [last]

    eager = states(layer)
    ours = states(torch.compile(layer, backend=backend, options={"strict": True, "fallback": "error"}))
    assert [state.shape for state in ours] == [state.shape for state in eager]
    close(ours, eager)

    def weighted(states: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(state.flatten() * torch.arange(state.numel())).sum() for state in states]).sum()

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return weighted([state.transpose(0, -1).contiguous() for state in states(self.layer)])

    step = lt.compile(Last(), torch.optim.SGD(layer.parameters(), lr=0.1), example=(x,), fallback="error")
    close([step(x)], [weighted([state.transpose(0, -1).contiguous() for state in eager])])


@pytest.mark.parametrize("of", [torch.linalg.det, torch.logdet, lambda a: torch.linalg.slogdet(a)[1]])
def test_determinants_of_matrices_with_contiguous_columns(of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Their derivative is that of the factors of the matrix or of its transpose, as PyTorch factorizes either."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    a = torch.randn(4, 4) + 4 * torch.eye(4)
    expected = a.clone().requires_grad_()
    of(expected.T).backward()  # type: ignore[no-untyped-call]

    class Of(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(a.clone())

        def forward(self) -> torch.Tensor:
            return of(self.a.T)

    model = Of()
    torch.compile(model, backend=backend)().backward()
    close([model.a.grad], [expected.grad])
    model = Of()
    lt.compile(model, torch.optim.SGD(model.parameters(), lr=1.0), example=())()
    close([a - model.a.detach()], [expected.grad])


def test_gradients_that_are_expanded() -> None:
    """The gradient of a sum has strides of 0, and so may what a graph returns."""
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    compiled = torch.compile(lambda x: (model(x).sum(), x.mean(0, keepdim=True).expand(3, 4)), backend=backend)
    total, mean = compiled(x)
    (total + (mean * 2).sum()).backward()
    close([x.grad], [model.weight.detach().sum(0).expand(3, 4) + 2])
