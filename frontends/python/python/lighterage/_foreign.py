"""Calls that PyTorch computes while a step runs, because the compiler has no kernel for them.

The compiler plans such a call like any other. When the step reaches it, the runtime gives this file the call's name,
and its operands and results as capsules over planned memory. Operands are row-major, whatever layout was traced. What
PyTorch allocates meanwhile lies in its own allocator, outside of the budget.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack

from . import _compat
from ._lighterage import Plan
from .errors import Error, Lacking, Unsupported, unsupported
from .export import is_collective, is_random

# What to do with calls that have no kernel.
POLICIES = ("torch", "error")
# The element types that planned memory and PyTorch have in common.
TYPES = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
# Tensors of these are lent as pairs of real numbers.
COMPLEX = {torch.complex64, torch.complex128}
# The compiler has two more, but they cannot be lent.
PLANNED = TYPES | COMPLEX | {torch.float8_e4m3fn, torch.float8_e5m2}
# The largest number of results of a launch.
MOST_RESULTS = 62
# The largest number of operators that a warning lists.
LISTED = 10


class _Refusal(Exception):  # noqa: N818
    """Why a call cannot be PyTorch's."""


class Calls:
    """What PyTorch computes of one step. The compiler calls it with what has no kernel."""

    def __init__(self, graph: fx.Graph, fallback: str) -> None:
        """graph: the traced step. fallback: one of `POLICIES`.

        Raises Error: there is no such policy.
        """
        if fallback not in POLICIES:
            raise Error(f"fallback: {fallback!r} is none of {', '.join(POLICIES)}")
        self._nodes = {node.name: _compat.called(node) for node in graph.nodes if node.op == "call_function"}
        # Ranks that run them in different orders wait for each other for ever, or exchange the wrong values.
        self._collectives = [name for name, node in self._nodes.items() if is_collective(node.target)]
        self._fallback = fallback
        self._calls: dict[str, _Call] = {}

    def __call__(self, lacking: list[Lacking]) -> Callable[[str, list[Any], list[Any]], None]:
        """Take the calls that have no kernel. Returns the function that computes them.

        Raises Unsupported: the policy forbids it, or a call cannot be PyTorch's.
        """
        if self._fallback == "error":
            raise unsupported(lacking)
        refused = []
        for operator, name, path, why in lacking:
            place = f" in {path}" if path else ""
            try:
                self._calls[name] = _Call.of(self._nodes[name], f"{operator}{place} (node {name})")
            except _Refusal as refusal:
                refused.append((operator, name, path, f"{why}, and {refusal}"))
        self._nodes = {}  # nothing else of the graph is needed
        if refused:
            raise unsupported(refused)
        return self.compute

    def compute(self, name: str, operands: list[Any], results: list[Any]) -> None:
        """Compute a call: from capsules of its operands into capsules of its results.

        Raises Error, from what the operator raised.
        """
        call = self._calls[name]
        counts.ran += 1
        try:
            # Modes of PyTorch belong to threads, and this is one of the runtime's.
            with torch.no_grad():
                places = [from_dlpack(result) for result in results]
                call.run([from_dlpack(operand) for operand in operands], places)
            if places[0].is_cuda:
                torch.cuda.current_stream(places[0].device).synchronize()
        except Exception as error:
            raise Error(f"{call.label}: {type(error).__name__}: {error}") from error

    @property
    def is_random(self) -> bool:
        """Whether a call draws numbers from PyTorch's generator."""
        return any(is_random(call.target) for call in self._calls.values())

    def check(self, plan: Plan) -> None:
        """Refuse a plan whose collectives have another order than those of the traced step.

        Raises Unsupported.
        """
        runs = {node: n for _, node, _, n, _ in plan.externs if node in self._collectives}
        # Each runs once, or once for each micro-batch.
        if list(runs) != self._collectives or len(set(runs.values())) > 1:
            raise Unsupported(
                "the plan has its collectives in another order than the traced step, so processes could wait for each "
                "other for ever. This is a fault of Lighterage"
            )

    def warn(self, plan: Plan, stacklevel: int = 3) -> None:
        """Say what PyTorch computes of a planned step, if anything. stacklevel: of the caller's caller, by default."""
        text = summary(plan)
        if text:
            warnings.warn(f'{text}. fallback="error" makes this an error', stacklevel=stacklevel)


class _Counts:
    """How many calls PyTorch has computed in this process."""

    ran = 0


counts = _Counts()


def summary(plan: Plan) -> str:
    """Which operators PyTorch computes in a step, how often, and how many bytes their results have."""
    runs: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for operator, _, _, n, size in plan.externs:
        runs[operator] += n
        sizes[operator] = max(sizes[operator], size)
    if not runs:
        return ""
    each = [f"{op} ({n} {_plural(n)}, results of {_bytes(sizes[op])})" for op, n in runs.most_common(LISTED)]
    rest = f" and {len(runs) - LISTED} other operators" if len(runs) > LISTED else ""
    return (
        f"PyTorch computes {runs.total()} {_plural(runs.total())} of each step, which have no kernel: "
        f"{', '.join(each)}{rest}. What it allocates for them is not in the budget"
    )


def _plural(n: int) -> str:
    return "call" if n == 1 else "calls"


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"


def check(graph: fx.Graph) -> None:
    """Refuse a graph with tensors for which there is no memory: sparse ones, and those of unknown sizes.

    Raises Unsupported.
    """
    found: list[Lacking] = []
    strange: set[fx.Node] = set()
    for node in graph.nodes:
        why = next((why for why in map(_why_not, pytree.tree_leaves(node.meta.get("val"))) if why), None)
        if why is None or node.op == "output":
            continue
        # The call that such a tensor comes from is the one to name.
        if not strange.intersection(node.all_input_nodes):
            found.append((str(node.target), node.name, (node.meta.get("custom") or {}).get("path", ""), why))
        strange.add(node)
    if found:
        raise unsupported(found)


def _why_not(value: Any) -> str | None:
    """Why a tensor has no place in planned memory, or a number is not known."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None if _number(value) is not None else "its result, a number, depends on the data of each step"
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout != torch.strided:
        return f"its layout is {str(value.layout).removeprefix('torch.')}, and only dense tensors have a place"
    if value.dtype not in PLANNED:
        return f"its elements are {str(value.dtype).removeprefix('torch.')}, for which there is no memory"
    if any(_number(size) is None for size in value.shape):
        return "the size of a result depends on the data of each step"
    return None


def _number(value: Any) -> Any:
    """A size or another number, if tracing knows it."""
    match value:
        case torch.SymInt():
            return value.node.maybe_as_int()
        case torch.SymFloat():
            return value.node.maybe_as_float()
        case torch.SymBool():
            return value.node.maybe_as_bool()
        case _:
            return value


# One call ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Operand:
    """An operand by its number, and the strides that the operator needs, if it reads them."""

    number: int
    is_complex: bool
    strides: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call with its arguments, in which operands are numbers."""

    label: str
    target: OpOverload
    leaves: list[Any]
    spec: pytree.TreeSpec
    out: tuple[OpOverload, list[str]] | None
    complex_results: list[bool]

    @staticmethod
    def of(node: fx.Node, label: str) -> _Call:
        """The call of a node.

        Raises _Refusal.
        """
        target = node.target
        if not isinstance(target, OpOverload):
            raise _Refusal("it is an operation over functions, not over tensors")
        if target._schema.is_mutable:
            raise _Refusal("it changes an operand: a step is made of calls that change nothing")
        values = pytree.tree_leaves(node.meta.get("val"))
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if not tensors:
            raise _Refusal("it has no result")
        if len(tensors) > MOST_RESULTS:
            raise _Refusal(f"it has {len(tensors)} results; {MOST_RESULTS} are the most")
        n_results = len(tensors)
        numbers = iter(range(1 << 20))

        def operand(read: fx.Node) -> Any:
            value = read.meta.get("val")
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                number = next(numbers)
                return _Operand(number, value.is_complex(), _strides(target, number, value))
            known = _number(value)
            if isinstance(known, (bool, int, float)):
                return known
            raise _Refusal(f"its argument {read.name} depends on the data of each step")

        kwargs = {a.name: node.kwargs[a.name] for a in target._schema.arguments if a.name in node.kwargs}
        arguments = fx.node.map_arg((node.args, kwargs), operand)
        for value in tensors:
            if value.device.type not in ("cpu", "cuda") or value.dtype not in TYPES | COMPLEX or _why_not(value):
                kind = f"{str(value.dtype).removeprefix('torch.')} on {value.device}"
                raise _Refusal(f"a tensor of it, {kind}, cannot be lent to PyTorch")
        leaves, spec = pytree.tree_flatten(arguments)
        only_tensors = all(isinstance(value, torch.Tensor) for value in values)
        out = _out(target) if only_tensors else None
        return _Call(label, target, leaves, spec, out, [value.is_complex() for value in tensors[:n_results]])

    def run(self, operands: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Compute the results."""
        pairs = zip(results, self.complex_results, strict=True)
        results = [torch.view_as_complex(place) if is_complex else place for place, is_complex in pairs]

        def given(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                # Where it was traced. A model that was on the CPU then may be on a GPU now.
                return results[0].device
            if not isinstance(leaf, _Operand):
                return leaf
            tensor = operands[leaf.number]
            if leaf.is_complex:
                tensor = torch.view_as_complex(tensor)
            if leaf.strides is None:
                return tensor
            empty = torch.empty_strided(tensor.shape, leaf.strides, dtype=tensor.dtype, device=tensor.device)
            return empty.copy_(tensor)

        args, kwargs = pytree.tree_unflatten([given(leaf) for leaf in self.leaves], self.spec)
        if self.out is not None:
            overload, names = self.out
            overload(*args, **kwargs, **dict(zip(names, results, strict=True)))
            return
        made = [leaf for leaf in pytree.tree_leaves(self.target(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        if is_collective(self.target):
            made = list(map(await_collective, made))
        for result, place in zip(made, results, strict=True):
            if (result.shape, result.dtype) != (place.shape, place.dtype):
                expected, found = _type(place), _type(result)
                raise ValueError(f"a result is {found}, and tracing it without values gave {expected}")
            place.copy_(result)


def await_collective(result: torch.Tensor) -> torch.Tensor:
    """The result of a collective, when it is there. Another tensor is returned as it is."""
    return torch.ops._c10d_functional.wait_tensor(result)


def _strides(target: OpOverload, number: int, value: torch.Tensor) -> tuple[int, ...] | None:
    """The traced strides of an operand that are not row-major, if the operator's results depend on them."""
    is_base = number == 0 and "as_strided" in target._schema.name
    reads_layout = is_base or torch.Tag.needs_exact_strides in target.tags
    if not reads_layout or value.is_contiguous():
        return None
    if not torch._prims_common.is_non_overlapping_and_dense_or_false(value):
        raise _Refusal("it reads the layout of an operand that has gaps or repeats elements")
    return tuple(value.stride())


def _out(target: OpOverload) -> tuple[OpOverload, list[str]] | None:
    """The overload that writes its results into given tensors, and the names of these arguments."""
    schema = target._schema
    inputs = _signature(schema.arguments)
    if any(str(result.type) != "Tensor" for result in schema.returns):
        return None
    for name in target.overloadpacket.overloads():
        overload = getattr(target.overloadpacket, name)
        arguments = overload._schema.arguments
        outs = [argument.name for argument in arguments if argument.is_out]
        rest = _signature(argument for argument in arguments if not argument.is_out)
        if len(outs) == len(schema.returns) and rest == inputs:
            return overload, outs
    return None


def _signature(arguments: Iterable[Any]) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in arguments]


def _type(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
