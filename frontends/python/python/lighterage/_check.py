"""The comparison of a compiled step with eager PyTorch: how far its loss, gradients and buffers may be from eager's."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ._capture import Loss
from .errors import MismatchError

logger = logging.getLogger("lighterage")

# A compiled step passes the check if its loss and its gradients differ from eager's by less than this, relative to the
# largest, or by not much more than eager differs from itself in float64. Generated kernels, and products in another
# order, stay below 1e-5 in f32; a gradient that is wrong differs by more than a percent.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Gradients that are zero but for rounding are compared with this share of the largest.
NEGLIGIBLE = 1e-2
# The distance from gradients in float64 that is still rounding: a multiple of eager's own, and the largest one. Batch
# norm over few values amplifies that of half precision to half of a gradient and more; one that is missing is 1 away.
ROUNDING, MOST_ROUNDING, MOST_ROUNDING_OF_HALF = 4.0, 0.5, 0.9
# A share of the largest gradient that may be rounding alone in half precision, in a gradient that cancels.
SMALL_IN_HALF = 0.2
HALF = {torch.bfloat16, torch.float16}
# How often eager mode runs with parameters that are off by some roundings, to see whether its own gradients jump, and
# how many times the largest of these jumps a step may be away. A sum of hundreds of products in another order is off by
# a few roundings.
NUDGES, JUMPS = 8, 2.0
# Gradients of a loss that depends on no parameter are rounding alone: at most some last bits of the loss.
LAST_BITS = 64.0
ROUNDINGS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Check:
    """How far one step was from eager PyTorch, relative to the largest value of each tensor."""

    loss: float
    gradient: float
    worst: str  # the parameter with that gradient
    buffer: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one step computes."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    def clipped(self, norm: float | None) -> Outcome:
        """The same after `torch.nn.utils.clip_grad_norm_`."""
        if norm is None:
            return self
        total = torch.linalg.vector_norm(torch.stack([_doubled(g).norm() for g in self.gradients.values()]))
        factor = min(1.0, norm / (float(total) + 1e-6))
        return dataclasses.replace(self, gradients={path: g * factor for path, g in self.gradients.items()})

    def without(self, paths: set[str]) -> Outcome:
        """The same without the gradients of some parameters."""
        gradients = {path: gradient for path, gradient in self.gradients.items() if path not in paths}
        return dataclasses.replace(self, gradients=gradients)

    def largest(self) -> float:
        """The largest number of all gradients."""
        return max(map(_largest, self.gradients.values()), default=0.0)

    def compared(self, other: Outcome) -> Check:
        """How far this is from another."""
        largest = other.largest()
        gradients = {
            path: distance(self.gradients[path], g, NEGLIGIBLE * largest) for path, g in other.gradients.items()
        }
        worst = max(gradients, key=lambda path: gradients[path], default="")
        # A running mean may be zero but for rounding: it is compared with the running variance beside it.
        modules: dict[str, float] = {}
        for path, value in other.buffers.items():
            module = path.rpartition(".")[0]
            if value.is_floating_point() and value.numel():
                modules[module] = max(modules.get(module, 0.0), _largest(value))
        buffers = [
            distance(value, other.buffers[path], NEGLIGIBLE * modules.get(path.rpartition(".")[0], 0.0))
            for path, value in self.buffers.items()
        ]
        return Check(
            loss=distance(self.loss.reshape(()), other.loss.reshape(())),
            gradient=gradients.get(worst, 0.0),
            worst=worst,
            buffer=max(buffers, default=0.0),
        )


@dataclasses.dataclass(frozen=True)
class Eager:
    """A step in eager mode."""

    model: nn.Module
    loss_fn: Loss
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    trained: list[str]  # parameters
    times: int  # how often it runs, on the same batch
    is_sum: bool = False  # loss and gradients of several runs are sums, else means

    def run(self) -> Outcome:
        """Run the model. Its buffers and attributes are left as they were, and `grad` of parameters is not touched."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        buffers = dict(self.model.named_buffers())
        kept = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        # Autocast has results of other types, which forward may keep.
        attributes = {module: dict(vars(module)) for module in self.model.modules()}
        try:
            losses, found = [], []
            for _ in range(self.times):
                with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                    loss = self.loss_fn(self.model, *self.args, **self.kwargs)
                    losses.append(loss.detach())
                    wanted = [parameters[name] for name in self.trained]
                    found.append(torch.autograd.grad(loss, wanted, allow_unused=True))
            after = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        finally:
            with torch.no_grad():
                for name, buffer in buffers.items():
                    buffer.copy_(kept[name])
            for module, values in attributes.items():
                vars(module).clear()
                vars(module).update(values)
        columns = zip(*found, strict=True)
        factor = self.times if self.is_sum else 1
        gradients = {
            name: factor * _mean(column, parameters[name]) for name, column in zip(self.trained, columns, strict=True)
        }
        return Outcome(factor * torch.stack(losses).mean(0), gradients, after)

    def exact(self) -> Outcome:
        """The same in float64, on a copy of the model."""

        def widened(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.is_complex():
                return leaf.to(torch.complex128)
            return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

        args, kwargs = pytree.tree_map(widened, (self.args, self.kwargs))
        model = copy.deepcopy(self.model)._apply(widened)  # type: ignore[no-untyped-call]
        return dataclasses.replace(self, model=model, args=args, kwargs=kwargs).run()

    def nudged(self, seed: int) -> Outcome:
        """The same with parameters that are off by some roundings.

        A gradient jumps where an activation is at its bend.
        """
        generator = torch.Generator().manual_seed(seed)
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    rounding = ROUNDINGS[seed % len(ROUNDINGS)] * torch.finfo(parameter.dtype).eps
                    off = rounding * torch.randn(parameter.shape, generator=generator)
                    parameter.mul_((1 + off).to(parameter))
        return dataclasses.replace(self, model=model).run()


def check(
    ours: Outcome,
    eager: Outcome,
    exact: Callable[[], Outcome],
    nudged: Callable[[int], Outcome],
    types: set[torch.dtype],
) -> Check:
    """How far a compiled step is from eager mode.

    exact: the outcome in float64, and nudged: outcomes with parameters that are off by some roundings. They are
    computed if rounding may explain the distance. types: of what a step computes.

    Raises MismatchError: the step is further from eager than rounding explains.
    """
    found = ours.compared(eager)
    tolerance = max(TOLERANCE.get(dtype, 0.0) for dtype in types)
    if max(found.loss, found.gradient, found.buffer) <= tolerance:
        return found
    # Some models amplify rounding in their backward: then eager itself is as far from what float64 gives.
    if max(found.loss, found.buffer) <= tolerance:
        try:
            outcome = exact()
        except Exception:  # the user's model may not run in float64
            logger.debug("no comparison in float64", exc_info=True)
        else:
            bit = max((torch.finfo(dtype).eps for dtype in types & HALF), default=0.0)
            small = SMALL_IN_HALF if types & HALF else tolerance
            if _depends_on_nothing(ours, eager, outcome, max(map(_eps, types), default=0.0)):
                return found
            nothing = _nothing_but_rounding(ours, eager, outcome, (small, bit))
            own, other, outcome = ours.without(nothing), eager.without(nothing), outcome.without(nothing)
            if own.compared(other).gradient <= tolerance:
                return found
            most = MOST_ROUNDING_OF_HALF if types & HALF else MOST_ROUNDING
            noise = other.compared(outcome).gradient
            limit = min(ROUNDING * noise, most)
            # Eager may also compute something else than the copy: hooks of parameters are not copied.
            if noise <= most and own.compared(outcome).gradient <= limit:
                return found
            # ReLU6 on batch norm: eager's gradients may be near those in float64 by chance, and jump with one bit more.
            jump = max(nudged(seed).without(nothing).compared(other).gradient for seed in range(NUDGES))
            off = max(own.compared(outcome).gradient, own.compared(other).gradient)
            if max(noise, jump) <= most and off <= min(JUMPS * jump, most):
                return found
    raise MismatchError(
        f"the compiled step differs from eager PyTorch: relative differences are {found.loss:.1e} in the loss, "
        f"{found.gradient:.1e} in the gradient of {found.worst or 'no parameter'}, {found.buffer:.1e} in buffers, "
        f"and rounding explains at most {tolerance:.0e}. A model that draws random numbers outside of torch, or "
        f"keeps state in Python, computes something else in each call; check=False skips this comparison"
    )


def _nothing_but_rounding(ours: Outcome, eager: Outcome, exact: Outcome, shares: tuple[float, float]) -> set[str]:
    """The parameters whose gradients in eager mode are rounding alone, and ours not much more.

    Such a gradient cancels: that of a bias before a softmax, for example. In float64 it is no larger than eager's
    distance from it, which is small beside the largest gradient of all. By chance eager's may be exact: a last bit of
    the largest gradient is always rounding. shares: of the largest gradient, what is small, and that bit.
    """
    most, bit = (share * exact.largest() for share in shares)
    found = set()
    for path, true in exact.gradients.items():
        if not true.numel():
            continue
        size, noise, off = (
            float((_doubled(gradient) - _doubled(true)).abs().max())
            for gradient in (torch.zeros_like(true), eager.gradients[path], ours.gradients[path])
        )
        rounding = max(noise, bit)
        if size <= rounding <= most and off <= ROUNDING * rounding:
            found.add(path)
    return found


def _depends_on_nothing(ours: Outcome, eager: Outcome, exact: Outcome, eps: float) -> bool:
    """Whether the loss depends on no parameter: then all gradients are rounding, in eager mode as well.

    There is no larger gradient to measure them by, so the loss is the measure. In float64 they are zero but for its
    last bits.
    """
    bits = LAST_BITS * abs(float(exact.loss))
    limits = ((exact, bits * _eps(torch.float64)), (eager, bits * eps), (ours, bits * eps))
    return all(_all_below(gradient, limit) for of, limit in limits for gradient in of.gradients.values())


def _all_below(tensor: torch.Tensor, limit: float) -> bool:
    """False if a number is NaN."""
    return bool((_doubled(tensor).abs() <= limit).all())


def _eps(dtype: torch.dtype) -> float:
    """The relative distance of two neighbours; 0 for integers."""
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point or dtype.is_complex else 0.0


def types_of(graph: fx.Graph) -> set[torch.dtype]:
    """The element types of what a graph computes; autocast has some that no parameter has."""
    values = [value for node in graph.nodes for value in pytree.tree_leaves(node.meta.get("val"))]
    return {value.dtype for value in values if isinstance(value, torch.Tensor)}


def _mean(values: Sequence[torch.Tensor | None], parameter: torch.Tensor) -> torch.Tensor:
    """The mean of a parameter's gradients; zeros if it has none."""
    found = [value for value in values if value is not None]
    if len(found) < 2:
        return found[0] if found else torch.zeros_like(parameter)
    return torch.stack(found).mean(0)


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in float64; complex numbers as pairs."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def distance(ours: torch.Tensor, theirs: torch.Tensor, least: float = 0.0) -> float:
    """The largest difference, relative to the largest value. Infinite if only one of both is finite.

    What is infinite or NaN on both sides is no difference.
    """
    ours, theirs = _doubled(ours), _doubled(theirs)
    differs = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    if not differs.any():
        return 0.0
    distance = float((ours - theirs)[differs].abs().max()) / max(_largest(theirs), least, 1e-30)
    return distance if distance == distance else float("inf")


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite number, without its sign."""
    numbers = _doubled(tensor).abs()
    numbers = numbers[numbers.isfinite()]
    return float(numbers.max()) if numbers.numel() else 0.0
