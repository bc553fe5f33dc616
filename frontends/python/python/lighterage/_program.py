"""A planned graph of `torch.compile`, and what happens at each of its calls."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from itertools import starmap
from os import PathLike
from typing import Any

import torch

from . import _device, _foreign, _kernels, _lighterage, _limits, _openmp, _profile
from ._joint import ALIGN, Joint, Result, Source, aligned
from ._lighterage import Arenas
from ._pool import Pool, Spec, empty
from ._stats import counts
from .errors import Error, Unsupported

logger = logging.getLogger("lighterage")

_data_ptr = torch.Tensor.data_ptr


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the backend.

    budget: as in `lighterage.compile`; it covers activations and workspaces, not parameters, gradients and moments.
        A graph that cannot run in its share gets the least memory with which it can, and a warning says so.
    strict: raise Unsupported for a graph that cannot be planned, instead of one warning and eager mode; and Infeasible
        for one that cannot run in its share.
    fallback: `torch`, which has PyTorch compute calls without a kernel inside of a plan, or `error`, which raises
        Unsupported for them, and for a graph that cannot be planned.
    The others are those of `lighterage.compile`.
    """

    budget: str | int | float | None = None
    strict: bool = False
    fallback: str = "torch"
    device: str | None = None
    host: str | None = None
    kernels: str = "auto"
    planner: str = "auto"
    profile: str | PathLike[str] | None = None
    threads: int | None = None

    @property
    def is_share(self) -> bool:
        """Whether the budget is a share of what a graph keeps, not a number of bytes."""
        budget = self.budget
        return isinstance(budget, float) or (isinstance(budget, str) and budget.strip().endswith("%"))

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> Options:
        """The options that a user gave.

        Raises Error: there is no such option, or it has no such value.
        """
        names = [field.name for field in dataclasses.fields(Options)]
        for name in given or {}:
            if name not in names:
                raise Error(f"options: {name!r} is none of {', '.join(names)}")
        options = Options(**(given or {}))
        _limits.check(options.budget, options.threads)
        if not isinstance(options.strict, bool):
            raise Error(f"options: strict={options.strict!r}: it is True or False")
        return options


class Program:
    """A planned graph: its forward, and its backward if it has one."""

    def __init__(self, described: Joint, options: Options) -> None:
        self._joint = described
        given = described.given()
        self._place = place = _device.Place.of(given, options.device)
        # Where the caller's tensors are.
        self._on = on = given[0][1].device if given else place.on
        described.constants[:] = [aligned(constant.to(on)) for constant in described.constants]
        _foreign.check(described.graph)
        calls = _foreign.Calls(described.graph, options.fallback)
        self.plan = _lighterage.compile(
            described.file,
            optimizer="none",
            budget=options.budget,
            device=place.device,
            gpu=place.gpu,
            host=options.host,
            kernels=options.kernels,
            planner=options.planner,
            profile=options.profile,
            parts=(described.late, described.early),
            calls=calls,
            command=f'torch.compile(..., backend="lighterage", options={{"budget": {options.budget!r}}})',
        )
        calls.check(self.plan)
        _kernels.tell(options.kernels, self.plan)
        _openmp.find()
        _profile.tell(options.profile, self.plan)
        self.arenas: Arenas = self.plan.arenas(options.threads)
        self._inputs = [[described.inputs[name] for name in names] for names in self.arenas.inputs]
        results = [*described.forward, *(value for _, value in described.mutations), *described.backward]
        like = {result.output: result.like for result in results if result.output is not None}
        self._outputs = [[_made_of(like[name]) for name in names] for names in self.arenas.outputs]
        self.pool = Pool()
        self._forward = _Results(described.forward, self.arenas.outputs[0], on)
        self._mutations = [index for index, _ in described.mutations]
        self._mutated = _Results([value for _, value in described.mutations], self.arenas.outputs[0], on)
        self._backward = _Results(described.backward, self.arenas.outputs[1], on)
        self._random = self.arenas.is_random
        awaited = described.awaited
        self._awaited = {kind: [s.index for s in awaited if s.kind == kind] for kind in ("primal", "tangent")}
        late_states = [described.states[name] for name in self.arenas.read_late]
        returned = [r.source for r in described.backward if r.source is not None]
        late = [source for source in [*late_states, *self._inputs[1], *returned] if source.kind == "primal"]
        # The primals that the backward needs. Autograd keeps them, and sees when one is changed meanwhile.
        self.saved = sorted({source.index for source in late})
        states = [described.states[name] for name in self.arenas.states]
        staged: dict[int, torch.Tensor] = {}
        rest = (described.constants, staged, on)
        self._states = _States(states, {s.index: s.index for s in states}, *rest)
        at = {index: i for i, index in enumerate(self.saved)}
        self._late_states = _States(late_states, at, *rest)
        changed = {index for index, _ in described.mutations} & set(self.saved)
        if changed:
            raise Unsupported(f"the backward reads a tensor that the forward changes (primals_{min(changed) + 1})")
        counts.programs.add(self)
        counts.stats.externs += len(self.plan.externs)
        calls.warn(self.plan)
        logger.info("planned %d operations; %r", described.nodes, self.plan)

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        """AOTAutograd copies the module of the backward before it compiles it."""
        return self

    def forward(self, primals: list[Any]) -> tuple[list[Any], _lighterage.Ticket]:
        """The outputs for the graph's inputs, and what stands for the saved activations."""
        counts.stats.forwards += 1
        for index in self._awaited["primal"]:
            _foreign.await_collective(primals[index])
        held: list[torch.Tensor] = []
        states, storages = self._states.find(primals)
        inputs = [self._address(self._find(source, primals, ()), held) for source in self._inputs[0]]
        made = self._made(0)
        self._place.settle()
        seed = int(torch.randint(2**62, ())) if self._random else 0
        ticket = self.arenas.forward(states, storages, inputs, list(map(_data_ptr, made)), seed)
        results = self._filled(self._forward, made, primals, ())
        if self._mutations:
            for index, value in zip(self._mutations, self._filled(self._mutated, made, primals, ()), strict=True):
                primals[index].copy_(value)
        return results, ticket

    def backward(self, number: int, saved: list[Any], tangents: list[Any]) -> list[Any]:
        """The gradients, for the saved primals and the gradients of the outputs."""
        counts.stats.backwards += 1
        for index in self._awaited["tangent"]:
            _foreign.await_collective(tangents[index])
        primals = dict(zip(self.saved, saved, strict=True))
        held: list[torch.Tensor] = []
        states, storages = self._late_states.find(saved)
        inputs = [self._address(self._find(source, primals, tangents), held) for source in self._inputs[1]]
        made = self._made(1)
        self._place.settle()
        self.arenas.backward(number, states, storages, inputs, list(map(_data_ptr, made)))
        return self._filled(self._backward, made, primals, tangents)

    def _made(self, part: int) -> list[torch.Tensor]:
        """Tensors for the outputs of a part."""
        if self._on.type == "cpu":
            return self.pool.made(self._outputs[1]) if part == 1 else list(starmap(empty, self._outputs[0]))
        # The other function takes the current device.
        return [torch.empty_strided(*sizes, dtype=dtype, device=self._on) for *sizes, dtype in self._outputs[part]]

    def _find(self, source: Source, primals: Any, tangents: Any) -> torch.Tensor:
        if source.kind == "constant":
            return self._joint.constants[source.index]
        return tangents[source.index] if source.kind == "tangent" else primals[source.index]

    def _address(self, tensor: torch.Tensor, held: list[torch.Tensor]) -> int:
        """The address of a tensor with its elements in order; `held` keeps a copy that this needs."""
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg() or tensor.device != self._on:
            tensor = tensor.detach().to(self._on).contiguous().resolve_conj().resolve_neg()
            held.append(tensor)
        return tensor.data_ptr()

    def _filled(self, results: _Results, made: list[torch.Tensor], primals: Any, tangents: Any) -> list[Any]:
        found = results.of(made)
        for i, source in results.given:
            found[i] = self._find(source, primals, tangents)
        return found


class _States:
    """The addresses of tensors that kernels read where they are: primals, and constants of the graph."""

    def __init__(
        self,
        sources: list[Source],
        at: dict[int, int],
        constants: list[torch.Tensor],
        staged: dict[int, torch.Tensor],
        on: torch.device,
    ) -> None:
        """At: where each primal is in the list that a call gets. staged: copies of primals, for both parts.

        on: where kernels read them.
        """
        self._on = on
        self._sources, self._at, self._constants, self._staged = sources, at, constants, staged
        self._addresses: list[int] = []
        self._storages: list[int] = []
        # The addresses of the last call, by their index in its list, in the form that torch compares.
        self._known: list[int | None] = []
        self._indices: list[int] = []
        self._tensors: list[int] = []

    def find(self, primals: list[Any]) -> tuple[list[int], list[int]]:
        """The addresses, in the order of the sources, and what tells their storages from each other."""
        # Parameters of another layer may lie where this one's were before they were freed.
        tensors = [id(primals[index]) for index in self._indices]
        is_known = self._known and tensors == self._tensors
        if not is_known or not torch._C._tensors_data_ptrs_at_indices_equal(primals, self._known, self._indices):
            self._look(primals)
        return self._addresses, self._storages

    def _look(self, primals: list[Any]) -> None:
        addresses, storages, indices, is_staged = [], [], [], False
        known: list[int | None] = [None] * len(primals)
        for source in self._sources:
            if source.kind == "constant":
                addresses.append(self._constants[source.index].data_ptr())
                storages.append(0)
                continue
            index = self._at[source.index]
            tensor = primals[index]
            known[index] = tensor.data_ptr()
            indices.append(index)
            is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
            if tensor.data_ptr() % ALIGN or not is_plain or tensor.device != self._on:
                tensor, is_staged = self._copied(source.index, tensor), True
            addresses.append(tensor.data_ptr())
            storages.append(tensor.untyped_storage()._cdata)
        self._storages, self._tensors = storages, [id(primals[index]) for index in indices]
        # A copy is made anew at each call.
        self._addresses, self._indices, self._known = addresses, indices, [] if is_staged else known

    def _copied(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        # One copy for all calls: addresses of states should not change.
        if index not in self._staged:
            self._staged[index] = aligned(tensor.detach().to(self._on).contiguous())
        staged = self._staged[index]
        staged.copy_(tensor.detach())
        return staged


def _made_of(like: torch.Tensor | None) -> Spec:
    """A tensor that a part of the step fills, with its elements in order."""
    assert like is not None, "an output has a type"
    plain = torch.empty(like.shape, dtype=like.dtype, device="meta")
    return tuple(plain.shape), plain.stride(), plain.dtype


class _Results:
    """How the results of a part come about: most are outputs of the plan."""

    def __init__(self, results: list[Result], outputs: list[str], on: torch.device) -> None:
        """on: where outputs are."""
        index = {name: i for i, name in enumerate(outputs)}
        # Constants stand behind the outputs.
        self._constants: list[Any] = []
        self._order: list[int] = []
        self._strides: list[tuple[int, tuple[int, ...]]] = []
        # Results without elements.
        self._empty: list[tuple[int, torch.Size, torch.dtype, torch.device]] = []
        # The results of a GPU that a program expects on the CPU.
        self._devices: dict[int, torch.device] = {}
        self.given: list[tuple[int, Source]] = []
        """Which results are tensors that the part was given."""
        for i, result in enumerate(results):
            if result.output is None or result.like is None:
                self._order.append(len(outputs) + len(self._constants))
                self._constants.append(result.constant)
                if result.source is not None:
                    self.given.append((i, result.source))
                continue
            if result.output not in index:
                # A plan has no place for it.
                self._order.append(len(outputs) + len(self._constants))
                self._constants.append(None)
                self._empty.append((i, result.like.shape, result.like.dtype, result.like.device))
                continue
            self._order.append(index[result.output])
            if not result.like.is_contiguous():
                self._strides.append((i, tuple(result.like.stride())))
            if on.type != "cpu" and result.like.device.type == "cpu":
                self._devices[i] = result.like.device

    def of(self, made: list[torch.Tensor]) -> list[Any]:
        """The results, without those that were given."""
        found = list(map([*made, *self._constants].__getitem__, self._order))
        for i, strides in self._strides:
            found[i] = _laid_out(found[i], strides)
        for i, device in self._devices.items():
            found[i] = found[i].to(device)
        for i, shape, dtype, device in self._empty:
            found[i] = torch.empty(shape, dtype=dtype, device=device)
        return found


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same values with these strides. Where a stride is 0, all elements along the dimension are one."""
    result = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    place = result
    for dim, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dim] > 1:
            place, tensor = place.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    place.copy_(tensor)
    return result
