"""Optimizers of lighterage.optim, masters and random rounding: whole steps against eager mode."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lighterage as lt
from lighterage import optim

STEPS = 200


class Given(nn.Module):
    """Parameters whose gradients are the inputs, bit for bit."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        # Not a whole number of blocks, and one parameter whose moments are never in codes.
        self.a = nn.Parameter(torch.randn(83, 61).to(dtype))
        self.b = nn.Parameter(torch.randn(40).to(dtype))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return (self.a * a).sum() + (self.b * b).sum()


def gradients(dtype: torch.dtype = torch.float32, n: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of magnitudes from 1e-4 to 1 by element, which change their sign from step to step."""
    torch.manual_seed(1)
    of_a, of_b = (10 ** -(4 * torch.rand(shape)) for shape in ((83, 61), (40,)))
    draw = ((of_a * torch.randn(83, 61) + of_a / 2, of_b * torch.randn(40) + of_b / 2) for _ in itertools.count())
    return [(a.to(dtype), b.to(dtype)) for a, b in itertools.islice(draw, n)]


def given(dtype: torch.dtype = torch.float32) -> Given:
    """A model, the same each time."""
    torch.manual_seed(0)
    return Given(dtype)


def train(model: Given, optimizer: Any, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Steps in eager mode."""
    for a, b in batches:
        model.a.grad, model.b.grad = a.clone(), b.clone()
        optimizer.step()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference as a share of the largest element."""
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())


@pytest.mark.parametrize("kernels", ["plain", "auto"])
@pytest.mark.parametrize(
    ("make", "bound"),
    [
        (lambda model: optim.Lion(model.parameters(), lr=1e-3, weight_decay=0.1), 0.0),
        # A moment that lies between two numbers of bf16 is rounded to another one, now and then.
        (lambda model: optim.AdamWBf16(model.parameters(), lr=1e-3, weight_decay=0.1), 1e-3),
        (lambda model: optim.AdamW8bit(model.parameters(), lr=1e-3, weight_decay=0.1), 1e-3),
        (lambda model: optim.AdamW8bit([{"params": [model.a], "bits": 32}, {"params": [model.b]}], lr=1e-3), 1e-6),
    ],
    ids=["lion", "adamw-bf16", "adamw-8bit", "adamw-8bit-whole"],
)
def test_compiled_steps_are_those_of_eager_mode(make: Any, bound: float, kernels: str) -> None:
    """The same parameters after 200 steps; states have the same types, and eager steps go on from them."""
    eager, model, batches = given(), given(), gradients()
    theirs, ours = make(eager), make(model)
    train(eager, theirs, batches)
    step = lt.compile(model, ours, example=batches[0], kernels=kernels)
    for k, batch in enumerate(batches):
        if k == 7:
            train(model, ours, [batch])
        else:
            step(*batch)
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert distance(p, q) <= bound
        assert {k: (v.dtype, v.shape) for k, v in ours.state[p].items()} == {
            k: (v.dtype, v.shape) for k, v in theirs.state[q].items()
        }


Make = Callable[[Any], Any]
# Optimizers with the largest distance of one step from eager mode, in ulp of the element. With a square root that is
# rounded to the nearest number it is 0. That of MKL, which torch calls on x86, is an ulp off in a fifth of its results.
ULPS: dict[str, tuple[Make, float]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=1e-2, foreach=False), 0),
    "sgd, decay": (lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1, foreach=False), 0),
    "momentum": (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=False), 0),
    "momentum, decay": (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, foreach=False), 0),
    "adam": (lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False), 4),
    "adam, small beta1": (lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.3, 0.99), foreach=False), 6),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False), 6),
    "adamw-bf16": (lambda p: optim.AdamWBf16(p, lr=1e-2), 4),
    "adamw-8bit": (lambda p: optim.AdamW8bit(p, lr=1e-2), 6),
    "lion": (lambda p: optim.Lion(p, lr=1e-3, weight_decay=0.1), 0),
}


def nearest_root(x: torch.Tensor) -> torch.Tensor:
    """The square root, rounded once."""
    return x.double().pow(0.5).to(x.dtype)


def ulps(one: torch.Tensor, other: torch.Tensor, start: torch.Tensor) -> float:
    """The largest distance of new parameters, in ulp of the larger one of the old and the new number."""
    size = torch.maximum(other.detach().abs(), start.abs()).float()
    ulp = torch.nextafter(size, torch.tensor(torch.inf)) - size
    return float(((one.detach().double() - other.detach().double()).abs() / ulp).max())


def copy_step(ours: Any, model: Given, theirs: Any, eager: Given) -> None:
    """Let the next step begin with the numbers of eager mode."""
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        with torch.no_grad():
            p.copy_(q)
        for key, value in theirs.state[q].items():
            if key not in ("step", "RMS"):
                ours.state[p][key].copy_(value)


@pytest.mark.parametrize("kernels", ["plain", "auto"])
@pytest.mark.parametrize("root", ["torch", "nearest"])
@pytest.mark.parametrize("name", ULPS)
def test_each_of_200_steps(name: str, root: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step begins with the numbers of eager mode, and ends with the same bits, up to torch's square root."""
    make, bound = ULPS[name]
    if root == "nearest":
        monkeypatch.setattr(torch.Tensor, "sqrt", nearest_root)
        bound = 0
    eager, model, batches = given(), given(), gradients()
    theirs, ours = make(eager.parameters()), make(model.parameters())
    step = lt.compile(model, ours, example=batches[0], kernels=kernels)
    most = 0.0
    for batch in batches:
        starts = [p.detach().clone() for p in eager.parameters()]
        train(eager, theirs, [batch])
        step(*batch)
        trios = zip(model.parameters(), eager.parameters(), starts, strict=True)
        most = max(most, *(ulps(p, q, start) for p, q, start in trios))
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            for key in {"exp_avg", "exp_avg_sq", "momentum_buffer"} & theirs.state[q].keys():
                assert torch.equal(ours.state[p][key], theirs.state[q][key]), key
        copy_step(ours, model, theirs, eager)
    print(f"{name}, root {root}, {kernels}: {most}")
    assert most <= bound


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), weight_decay=0.1)


def adafactor_paper(model: nn.Module, beta1: float | None = None) -> torch.optim.Optimizer:
    library = pytest.importorskip("transformers.optimization")
    made: torch.optim.Optimizer = library.Adafactor(model.parameters(), weight_decay=0.1, beta1=beta1)
    return made


def adafactor_paper_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return adafactor_paper(model, 0.9)


@pytest.mark.parametrize("kernels", ["plain", "auto"])
@pytest.mark.parametrize(
    ("make", "from_exact", "from_theirs"),
    [(adafactor, 6, 15), (adafactor_paper, 7, 16), (adafactor_paper_momentum, 6, 15)],
)
def test_each_of_200_steps_of_adafactor(make: Any, from_exact: int, from_theirs: int, kernels: str) -> None:
    """Sums of squares are in f64, so a step is nearer to one in f64 than eager mode is."""
    eager, model, wide, batches = given(), given(), given().double(), gradients()
    theirs, ours, exact = (make(m) for m in (eager, model, wide))
    step = lt.compile(model, ours, example=batches[0], kernels=kernels)
    most = {"ours from exact": 0.0, "ours from theirs": 0.0, "theirs from exact": 0.0}
    for batch in batches:
        starts = [p.detach().clone() for p in eager.parameters()]
        train(eager, theirs, [batch])
        train(wide, exact, [(batch[0].double(), batch[1].double())])
        step(*batch)
        for p, q, w, start in zip(model.parameters(), eager.parameters(), wide.parameters(), starts, strict=True):
            for pair, one, other in zip(most, (p, p, q), (w, q, w), strict=True):
                most[pair] = max(most[pair], ulps(one, other, start))
        copy_step(ours, model, theirs, eager)
        copy_step(exact, wide, theirs, eager)
    print(f"{make.__name__}, {kernels}: {most}")
    assert most["ours from exact"] <= from_exact
    assert most["ours from theirs"] <= from_theirs


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """What Muon makes of a matrix with at most as many rows as columns, without rounding to bf16."""
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize("kernels", ["plain", "auto"])
def test_each_of_200_steps_of_muon(kernels: str) -> None:
    """Its products are in bf16, in an order that differs between machines: changes are as near to exact as torch's."""
    eager, model, batches = given(), given(), gradients()
    theirs, ours = (torch.optim.Muon([m.a], lr=1e-2) for m in (eager, model))
    step = lt.compile(model, ours, example=batches[0], kernels=kernels)
    most, before = [0.0, 0.0], torch.zeros(83, 61)
    for batch in batches:
        start, gradient = eager.a.detach().double(), batch[0].double()
        train(eager, theirs, [batch])
        step(*batch)
        direction = orthogonal(gradient.lerp(before.double().lerp(gradient, 0.05), 0.95).T).T
        exact = -1e-2 * (83 / 61) ** 0.5 * direction
        for k, p in enumerate((model.a, eager.a)):
            change = p.detach().double() - start * (1 - 1e-2 * 0.1)
            most[k] = max(most[k], float((change - exact).norm() / exact.norm()))
        before = theirs.state[eager.a]["momentum_buffer"].clone()
        assert distance(ours.state[model.a]["momentum_buffer"], before) <= 1e-7
        copy_step(ours, model, theirs, eager)
    print(f"muon, {kernels}: {most}")
    assert most[0] <= 0.02
    assert most[1] <= 0.02


def test_codes_after_200_steps() -> None:
    """Few codes differ from those of eager mode, and by one: where a number lies between two."""
    eager, model, batches = given(), given(), gradients()
    theirs, ours = (optim.AdamW8bit(m.parameters(), lr=1e-3) for m in (eager, model))
    train(eager, theirs, batches)
    step = lt.compile(model, ours, example=batches[0], kernels="plain")
    for batch in batches:
        step(*batch)
    for name in ("state1", "state2"):
        differences = (ours.state[model.a][name].int() - theirs.state[eager.a][name].int()).abs()
        assert differences.max() <= 1, name
        assert (differences > 0).float().mean() <= 0.01, name
    assert distance(ours.state[model.a]["absmax1"], theirs.state[eager.a]["absmax1"]) <= 1e-2


def test_states_of_other_types_are_loaded_as_they_are() -> None:
    """`load_state_dict` of torch would make numbers of codes."""
    model, batches = given(), gradients(n=6)
    ours = optim.AdamW8bit(model.parameters())
    train(model, ours, batches)
    saved = copy.deepcopy(ours.state_dict())
    again = optim.AdamW8bit(given().parameters())
    again.load_state_dict(saved)
    for state, other in zip(again.state.values(), ours.state.values(), strict=True):
        assert all(
            torch.equal(state[name], value) and state[name].dtype == value.dtype for name, value in other.items()
        )


@pytest.mark.parametrize(
    ("make", "master", "bound"),
    [
        (lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=False), "full", 2e-7),
        (lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=False), "split", 2e-7),
        (lambda p: torch.optim.SGD(p, lr=1e-3), "full", 2e-6),
        (lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), "full", 2e-6),
        (lambda p: optim.AdamW8bit(p, lr=1e-4), "full", 1e-3),
    ],
    ids=["adamw-full", "adamw-split", "sgd-full", "momentum-full", "8bit-full"],
)
def test_masters_are_what_f32_would_be(make: Any, master: str, bound: float) -> None:
    """Parameters in bf16 with masters against the same optimizer on parameters in f32; a checkpoint in between."""
    wide, model, batches = given(torch.bfloat16).float(), given(torch.bfloat16), gradients(torch.bfloat16)
    train(wide, make(wide.parameters()), [(a.float(), b.float()) for a, b in batches])
    optimizer = make(model.parameters())
    step = lt.compile(model, optimizer, example=batches[0], master=master)
    for batch in batches[:100]:
        step(*batch)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for batch in batches[100:]:
        step(*batch)

    def masters(model: Given, optimizer: Any) -> list[torch.Tensor]:
        if master == "full":
            return [optimizer.state[p]["master"] for p in model.parameters()]
        halves = [(p.detach().view(torch.int16).int(), optimizer.state[p]["low"].int()) for p in model.parameters()]
        return [((high << 16) + low).view(torch.float32) for high, low in halves]

    for p, held, q in zip(model.parameters(), masters(model, optimizer), wide.parameters(), strict=True):
        assert distance(held, q) <= bound
        assert distance(p, q) <= 2**-8
        if master == "full":
            assert torch.equal(p, held.bfloat16())

    for is_before in (True, False):
        other = given(torch.bfloat16)
        again = make(other.parameters())
        other.load_state_dict(saved[0])
        if is_before:
            optim.keep_types(again)
            again.load_state_dict(saved[1])
        step = lt.compile(other, again, example=batches[0], master=master)
        if not is_before:
            again.load_state_dict(saved[1])
        for batch in batches[100:]:
            step(*batch)
        for one, same in zip(masters(other, again), masters(model, optimizer), strict=True):
            assert torch.equal(one, same)


def test_masters_that_torch_has_cast_are_refused() -> None:
    """`load_state_dict` before `compile` rounds them to the type of the parameters."""
    model, batch = given(torch.bfloat16), gradients(torch.bfloat16, n=1)[0]
    optimizer = torch.optim.AdamW(model.parameters())
    lt.compile(model, optimizer, example=batch, master="full")(*batch)
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(optimizer.state_dict())
    with pytest.raises(lt.StaleError, match="keep_types"):
        lt.compile(model, again, example=batch, master="full")


def test_a_parameter_that_was_changed_is_its_master() -> None:
    """A master follows what a program writes to its parameter, and keeps its bits elsewhere."""
    model, batches = given(torch.bfloat16), gradients(torch.bfloat16, n=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    step = lt.compile(model, optimizer, example=batches[0], master="full")
    step(*batches[0])
    before = optimizer.state[model.a]["master"].clone()
    with torch.no_grad():
        model.a[0] = 3.0
    optimizer.param_groups[0]["lr"] = 0.0
    step(*batches[1])
    after = optimizer.state[model.a]["master"]
    assert torch.equal(after[1:], before[1:])
    assert (after[0] == 3.0).all()
    assert (model.a[0] == 3.0).all()


def test_random_rounding_keeps_small_updates() -> None:
    """Updates of a hundredth of the distance of two numbers: rounding to the nearest loses them."""
    moved = {}
    for rounding in ("nearest", "stochastic"):
        model = given(torch.bfloat16)
        with torch.no_grad():
            model.a.fill_(1.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-7 / 100)
        ones = torch.ones(83, 61).bfloat16(), torch.zeros(40).bfloat16()
        step = lt.compile(model, optimizer, example=ones, rounding=rounding, seed=5)
        assert step.check is not None
        for _ in range(100):
            step(*ones)
        moved[rounding] = 1.5 - model.a.float().mean().item()
    assert moved["nearest"] == 0
    assert abs(moved["stochastic"] - 2**-7) <= 0.05 * 2**-7


def test_random_rounding_has_the_same_bits_again() -> None:
    """For one seed, at two budgets, and going on from a saved state of the random numbers."""
    batches = gradients(torch.bfloat16, n=6)
    results = []
    for kernels, at in (("plain", None), ("auto", None), ("plain", 3)):
        model = given(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        options: dict[str, Any] = {"example": batches[0], "rounding": "stochastic", "seed": 5, "kernels": kernels}
        step = lt.compile(model, optimizer, **options)
        assert optimizer.state[model.a]["exp_avg"].dtype == torch.float32
        for k, batch in enumerate(batches):
            if k == at:
                random = step.rng_state()
                step = lt.compile(model, optimizer, **{**options, "seed": 9})
                step.set_rng_state(random)
            step(*batch)
        results.append(model.a.detach().clone())
    assert torch.equal(results[0], results[2])
    assert distance(results[0], results[1]) <= 2**-7


def test_what_does_not_go_together_is_refused() -> None:
    """With the compiler's message, in the words of the package."""
    model, batch = given(torch.bfloat16), gradients(torch.bfloat16, n=1)[0]
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    said = '^master="split" is for adamw alone, not for sgd; master="full" is for all optimizers'
    with pytest.raises(lt.Error, match=said):
        lt.compile(model, sgd, example=batch, master="split")
    with pytest.raises(lt.Error, match="leave precision out"):
        lt.compile(model, sgd, example=batch, master="full", precision="bf16")
    with pytest.raises(lt.Error, match="without masters"):
        lt.compile(model, sgd, example=batch, master="full", rounding="stochastic")
    with pytest.raises(lt.Error, match='"half" is none of none, split, full'):
        lt.compile(model, sgd, example=batch, master="half")
    with pytest.raises(lt.Error, match="no matrix can be stored in nf4"):
        lt.plan(model, sgd, example=batch, base="nf4")
    with pytest.raises(lt.Error, match="there is one"):
        lt.compile(model, sgd, example=batch, base="nf4", max_plans=2)
    with pytest.raises(ValueError, match="betas"):
        optim.Lion(model.parameters(), betas=(0.9, 1.0))
