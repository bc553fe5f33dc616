"""Calls that have no kernel: PyTorch computes them inside of planned steps, and the rest is refused by name."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lighterage.backend import backend
from torch import nn
from torch.nn import functional as F

import lighterage as lt

pytestmark = pytest.mark.filterwarnings("ignore:PyTorch computes")

Function = Callable[..., torch.Tensor]
TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    lt.reset()
    yield
    gc.collect()


class Net(nn.Module):
    """A convolution, then a function of its result and of other modules; the loss is a mean of squares."""

    def __init__(self, function: Function, *modules: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.rest, self.function = nn.Conv2d(3, 6, 3, padding=1), nn.ModuleList(modules), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.first(x), *self.rest).float().square().mean()


def batch(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 3, 9, 11, generator=torch.Generator().manual_seed(1)).to(dtype)


def sampled(h: torch.Tensor) -> torch.Tensor:
    theta = torch.tensor([[[1.0, 0.1, 0.0], [0.0, 0.9, 0.1]]], dtype=h.dtype).expand(2, 2, 3)
    return F.grid_sample(h, F.affine_grid(theta, [2, 6, 9, 11], align_corners=False), align_corners=False)


def bags(h: torch.Tensor, bag: nn.Module) -> torch.Tensor:
    return bag(torch.arange(12).view(3, 4)).sum() * h


# Each has operators in it that the compiler has no kernel for.
CASES: dict[str, tuple[Function, Callable[[], list[nn.Module]], set[str]]] = {
    "grid_sample": (sampled, list, {"grid_sampler_2d_backward"}),
    "maxima so far": (lambda h: h.cummax(1).values.cummax(2).values.cummax(3).values, list, {"cummax"}),
    "histogram": (
        lambda h: h * torch.histogram(h.detach().float(), 6, range=(-2, 2)).hist.to(h.dtype)[:, None, None] / 999,
        list,
        {"histogram.bin_ct"},
    ),
    "embedding bags": (bags, lambda: [nn.EmbeddingBag(12, 6, mode="max")], {"_embedding_bag"}),
    "order statistics": (
        lambda h: torch.mode(h, dim=1).values + h.nanmedian(dim=1).values,
        list,
        {"mode", "nanmedian.dim"},
    ),
    "pdist": (
        lambda h: F.pdist(h.flatten(0, 1).flatten(1).float()),
        list,
        {"_pdist_forward", "_pdist_backward"},
    ),
    "transposed convolution over volumes": (
        lambda h, conv: conv(h[:, None]),
        lambda: [nn.ConvTranspose3d(1, 3, 3)],
        {"convolution", "convolution_backward"},
    ),
    "the layout of memory": (
        lambda h: torch.as_strided(h, (2, 3, 9, 4), (594, 198, 11, 2)),
        list,
        {"as_strided", "as_strided_scatter"},
    ),
    "functions": (
        lambda h: torch.lgamma(h.abs() + 1) + torch.erfinv(h.tanh() / 2),
        list,
        {"lgamma", "digamma", "erfinv"},
    ),
    "complex numbers": (lambda h: (torch.fft.rfft(h.float()) / 9).tanh().abs(), list, {"tanh"}),
    "a list of results": (
        lambda h: torch.cat(torch._foreach_mul([h, h * 2], 2.0)),
        list,
        {"_foreach_mul.Scalar"},
    ),
}


def net(case: str, dtype: torch.dtype = torch.float32) -> Net:
    function, modules, _ = CASES[case]
    torch.manual_seed(0)
    return Net(function, *modules()).to(dtype)


def operators(plan: lt.Plan) -> set[str]:
    return {name.removeprefix("aten.").removesuffix(".default") for name, *_ in plan.externs}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def compiled(model: nn.Module, x: torch.Tensor, budget: str = "100%", **options: Any) -> lt.Step:
    try:
        return lt.compile(model, sgd(model), example=(x,), budget=budget, **options)
    except lt.Infeasible as error:
        return lt.compile(model, sgd(model), example=(x,), budget=error.smallest, **options)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_eagers_at_every_budget(case: str, dtype: torch.dtype) -> None:
    """`lighterage.compile` compares the gradients itself; losses after updates are the same bits at each budget."""
    x, eager = batch(dtype), net(case, dtype)
    losses = []
    for budget in ("100%", "60%"):
        step = compiled(net(case, dtype), x, budget)
        assert step.check is not None
        assert step.measured_peak == step.plan.peak
        assert CASES[case][2] <= operators(step.plan)
        losses.append(torch.stack([step(x) for _ in range(3)]))
    assert torch.equal(losses[0], losses[1])
    optimizer = sgd(eager)
    for loss in losses[0]:
        optimizer.zero_grad()
        expected = eager(x)
        expected.backward()
        optimizer.step()
        rtol = 1e-4 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(loss, expected.detach(), rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", CASES)
def test_a_graph_of_torch_compile_is_planned(case: str, dtype: torch.dtype) -> None:
    x, eager = batch(dtype), net(case, dtype)
    model = copy.deepcopy(eager)
    loss = torch.compile(model, backend=backend, options={"budget": "100%", "strict": True})(x)
    loss.backward()
    expected = eager(x)
    expected.backward()
    stats = lt.stats()
    assert (stats.graphs, stats.eager_graphs) == (1, 0)
    assert stats.externs == sum(n for *_, n, _ in stats.plans[0].externs) == stats.extern_runs > 0
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=1e-5)
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        largest = float(q.grad.abs().max())
        assert float((p.grad - q.grad).abs().max()) <= tolerance * largest + 1e-6


def test_what_is_known_to_be_pure_runs_again() -> None:
    """A plan within little memory repeats calls of PyTorch's operators, but none that draws random numbers."""

    def chain(h: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            h = torch.lgamma(F.rrelu(h, training=True).abs() * 0.3 + 1)
        return h

    # Where nothing can be swapped, something must be computed again.
    step = compiled(Net(chain), batch(), check=False, host="4KiB")
    least = compiled(Net(chain), batch(), str(step.plan.smallest), host="4KiB")
    runs: dict[str, int] = {}
    for name, _, _, n, _ in least.plan.externs:
        runs[name] = max(n, runs.get(name, 0))
    assert least.plan.peak < step.plan.peak
    assert runs["aten.lgamma.default"] > 1
    assert runs["aten.rrelu_with_noise_functional.default"] == 1
    assert least.check is None, "PyTorch's generator goes on with each call"
    losses = []
    for each in (step, least):
        torch.manual_seed(3)
        losses.append(each(batch()))
    assert torch.equal(*losses)


# Operators of others -------------------------------------------------------------------------------------------------


@torch.library.custom_op("lighterage_tests::mix", mutates_args=())
def mix(xs: list[torch.Tensor], w: torch.Tensor | None, f: float, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of `f * x`, times w, and the means of all x."""
    assert how == "sum"
    total = torch.stack([x * f for x in xs]).sum(0)
    return total if w is None else total * w, torch.stack([x.mean() for x in xs])


@mix.register_fake
def _(xs: list[torch.Tensor], w: torch.Tensor | None, f: float, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(xs[0]), xs[0].new_empty(len(xs))


def _keep_factor(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.n, ctx.w, ctx.f = len(inputs[0]), inputs[1], inputs[2]


def _mix_backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:
    grad = grad * ctx.f if ctx.w is None else grad * ctx.f * ctx.w
    return [grad] * ctx.n, None, None, None


mix.register_autograd(_mix_backward, setup_context=_keep_factor)


@torch.library.custom_op("lighterage_tests::bump", mutates_args={"x"})
def bump(x: torch.Tensor) -> None:
    x.add_(1)


# What `watched` does with its operand.
act: Callable[[torch.Tensor], None] = lambda x: None  # noqa: E731


@torch.library.custom_op("lighterage_tests::watched", mutates_args=())
def watched(x: torch.Tensor) -> torch.Tensor:
    act(x)
    return x * 1


@watched.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Watched(nn.Module):
    """A named module that calls `watched` on what needs no gradient."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * watched(h.detach())


def watching(acting: Callable[[torch.Tensor], None], monkeypatch: pytest.MonkeyPatch) -> lt.Step:
    """A step that calls `acting` in the middle."""
    step = compiled(Net(lambda h, watch: watch(h), Watched()), batch())
    monkeypatch.setattr(f"{__name__}.act", acting)
    return step


def test_lists_of_tensors_optional_ones_and_several_results() -> None:
    def mixed(h: torch.Tensor) -> torch.Tensor:
        both, _ = mix([h, h * 2], h.detach().tanh(), 0.5, "sum")
        again, means = mix([both], None, 2.0, "sum")
        return again * means.sum().detach()

    step = compiled(Net(mixed), batch())
    assert step.check is not None
    assert [name for name, *_ in step.plan.externs] == ["lighterage_tests.mix.default"] * 2


def test_an_exception_names_operator_node_and_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ValueError("no such luck")

    step = watching(fail, monkeypatch)
    named = r"lighterage_tests\.watched\.default in rest\.0 \(node watched\): ValueError: no such luck"
    with pytest.raises(lt.Error, match=named) as caught:
        step(batch())
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(lt.Error, match="no such luck"):
        step(batch())

    monkeypatch.undo()
    model = Net(lambda h, watch: watch(h), Watched())
    run = torch.compile(model, backend=backend, options={"strict": True})
    expected = run(batch()).detach()
    monkeypatch.setattr(f"{__name__}.act", fail)
    with pytest.raises(lt.Error, match=named):
        run(batch())
    monkeypatch.undo()
    loss = run(batch())
    loss.backward()
    assert torch.equal(loss.detach(), expected)


def test_wrong_results_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tracing without values promised is what a call has to give."""
    cut = torch.library.Library("lighterage_tests", "FRAGMENT")  # type: ignore[no-untyped-call]
    cut.define("cut(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
    cut.impl("cut", lambda x: x[:1].clone(), "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake("lighterage_tests::cut", torch.empty_like, lib=cut)
    model = Net(lambda h: h * torch.ops.lighterage_tests.cut(h.detach()))
    with pytest.raises(lt.Error, match=r"a result is float32\[1, 6, 9, 11\], .* float32\[2, 6, 9, 11\]"):
        compiled(model, batch(), check=False)(batch())


def test_a_call_runs_on_planned_memory_and_may_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    step = watching(kept.append, monkeypatch)
    with torch.no_grad():
        for parameter in step._model.parameters():
            parameter.fill_(0.5)
    step(batch())
    (operand,) = kept
    assert (operand.shape, operand.requires_grad) == ((2, 6, 9, 11), False)
    value = operand.clone()
    del step
    gc.collect()
    torch.randn(1 << 16)
    assert torch.equal(operand, value)


def test_threads_take_turns_and_other_threads_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's lock is taken for the call alone: nobody who waits for a step keeps it."""
    step = watching(lambda _: time.sleep(0.05), monkeypatch)
    losses: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: losses.append(step(batch()))) for _ in range(4)]
    before = time.perf_counter()
    for thread in threads:
        thread.start()
    ticks = 0
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.001)
        ticks += 1
    for thread in threads:
        thread.join()
    assert len(losses) == 4
    assert ticks > 50, f"other threads run meanwhile: {ticks} in {time.perf_counter() - before:.2f} s"


def test_ctrl_c_is_answered_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)

    step = watching(interrupt, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        step(batch())
    monkeypatch.setattr(f"{__name__}.act", lambda _: None)
    assert step(batch()).isfinite()


# Policy and refusals -------------------------------------------------------------------------------------------------


def test_one_warning_lists_operators_calls_and_bytes() -> None:
    model, operator = net("maxima so far"), r"aten\.cummax\.default \(3 calls, results of 13\.9 KiB"
    said = f"PyTorch computes 3 calls .* {operator}"
    with pytest.warns(UserWarning, match=said) as caught:
        step = lt.compile(model, sgd(model), example=(batch(),))
    assert [warning.filename for warning in caught if "PyTorch" in str(warning.message)] == [__file__]
    assert "by PyTorch       3 calls a step, results of 13.9 KiB at most" in repr(step.plan)
    assert {name for name, *_ in step.plan.unsupported} == {"aten.cummax.default"}
    torch._dynamo.reset()
    run = torch.compile(net("maxima so far"), backend=backend, options={"strict": True})
    with pytest.warns(UserWarning, match=said):
        run(batch()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(batch()).backward()


def test_the_policy_may_forbid_pytorch() -> None:
    model = net("pdist")
    with pytest.raises(lt.Unsupported, match="pdist") as caught:
        compiled(model, batch(), fallback="error")
    assert {name for name, *_ in caught.value.ops} == {"aten._pdist_forward.default", "aten._pdist_backward.default"}
    with pytest.raises(Exception, match="pdist"):
        torch.compile(model, backend=backend, options={"fallback": "error"})(batch())
    with pytest.raises(lt.Error, match=r"'eager' is none of torch, error"):
        compiled(model, batch(), fallback="eager")


REFUSED: dict[str, tuple[Function, str]] = {
    "a number of the data": (lambda h: h * h.detach().sum().item(), r"a number, depends on the data"),
    "a function as an operand": (
        lambda h: torch.cond(h.sum() > 0, torch.sinh, torch.cosh, (h,)),
        r"cond .*an operation over functions",
    ),
    "an operand that changes": (
        lambda h: h * (z := h.detach().clone(), bump(z))[0],
        r"lighterage_tests\.bump\.default .*changes an operand",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_called_is_refused_by_name(case: str) -> None:
    function, said = REFUSED[case]
    with pytest.raises(lt.Unsupported, match=said):
        compiled(Net(function), batch())


def test_a_sparse_gradient_is_refused_by_name() -> None:
    def looked_up(h: torch.Tensor, bag: nn.Module) -> torch.Tensor:
        return h * bag(torch.arange(4).view(2, 2)).sum()

    with pytest.raises(lt.Unsupported, match=r"aten\._embedding_bag_\w*backward.*sparse"):
        compiled(Net(looked_up, nn.EmbeddingBag(4, 6, sparse=True)), batch())


def test_a_graph_that_cannot_be_planned_runs_in_eager_mode_or_is_an_error() -> None:
    model = Net(REFUSED["a function as an operand"][0])
    with pytest.raises(Exception, match="true_graph_0"):
        torch.compile(model, backend=backend, options={"strict": True})(batch())
    torch._dynamo.reset()
    run = torch.compile(model, backend=backend)
    with pytest.warns(UserWarning, match=r"(?s)eager mode.*true_graph_0"):
        loss = run(batch())
    torch.testing.assert_close(loss, model(batch()))
    assert (lt.stats().eager_graphs, lt.stats().graphs) == (1, 0)
