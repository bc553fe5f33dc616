"""The backend of `torch.compile`: activations within a budget, in any training loop.

    model = torch.compile(model, backend="lighterage", options={"budget": "60%"})

Forward and backward of a graph are one plan. What autograd keeps between them is a ticket: a tensor with one number,
whose memory stands for the activations. When autograd frees it, after the backward or because the loss was dropped, the
next forward takes the memory. Nothing that a program holds lies in planned memory: outputs and gradients are tensors of
PyTorch's. Parameters are read where they are.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import operator
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext
from torch.utils.dlpack import from_dlpack

from . import _foreign, _lighterage
from ._joint import ALIGN, Joint, Result, Source, aligned, joint, module_path
from ._lighterage import Arenas, Plan
from .errors import Error, Unsupported
from .export import coarse

logger = logging.getLogger("lighterage")
aten = torch.ops.aten

# The key of a graph module's metadata with its program.
PROGRAM = "lighterage"


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the backend.

    budget: as in `lighterage.compile`; it covers activations and workspaces, not parameters, gradients and moments.
    strict: raise Unsupported for a graph that cannot be planned, instead of one warning and eager mode.
    fallback: `torch`, which has PyTorch compute calls without a kernel inside of a plan, or `error`, which raises
        Unsupported for them, and for a graph that cannot be planned.
    The others are those of `lighterage.compile`.
    """

    budget: str | int | float | None = None
    strict: bool = False
    fallback: str = "torch"
    device: str = "cpu"
    host: str | None = None
    kernels: str = "auto"
    planner: str = "auto"
    threads: int | None = None

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> Options:
        """The options that a user gave.

        Raises Error: there is no such option.
        """
        names = [field.name for field in dataclasses.fields(Options)]
        for name in given or {}:
            if name not in names:
                raise Error(f"options: {name!r} is none of {', '.join(names)}")
        return Options(**(given or {}))


@dataclasses.dataclass
class Stats:
    """What the backend did in this process, since it began or since `reset`."""

    graphs: int = 0
    """Graphs with a backward that were planned."""
    inference_graphs: int = 0
    """Graphs without a backward that were planned."""
    eager_graphs: int = 0
    """Graphs that run in eager mode, because they cannot be planned."""
    externs: int = 0
    """Calls of the planned graphs that have no kernel, and that PyTorch computes."""
    extern_runs: int = 0
    """How many such calls ran, in planned graphs and in steps of `lighterage.compile`."""
    forwards: int = 0
    backwards: int = 0
    """Runs of planned graphs."""
    plans: list[Plan] = dataclasses.field(default_factory=list)
    """The plan of each planned graph, while it is in use."""
    arenas: int = 0
    """Blocks of memory that were made for these plans: one for each forward that waits at the same time."""
    waiting: int = 0
    """Forwards whose backward has not run."""


class _Counts:
    """The counters behind `stats`."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.extern_runs_before = 0
        self.programs: weakref.WeakSet[Program] = weakref.WeakSet()


_counts = _Counts()


def stats() -> Stats:
    """How many graphs of `torch.compile` were planned, how many run in eager mode, and what ran.

    A model that Dynamo never hands to a backend counts nowhere: `graphs` stays 0. Known cases are nn.LSTM and nn.GRU,
    `nn.Sequential(...).compile()` instead of `torch.compile`, DistributedDataParallel inside of the compiled module,
    full backward hooks, and with `dynamic=False` more shapes than Dynamo's limit.
    """
    found = dataclasses.replace(_counts.stats)
    programs = list(_counts.programs)
    found.plans = [program.plan for program in programs]
    found.extern_runs = _foreign.counts.ran - _counts.extern_runs_before
    counts = [program.arenas.counts for program in programs]
    found.arenas, found.waiting = sum(made for made, _ in counts), sum(waiting for _, waiting in counts)
    return found


def reset() -> None:
    """Start counting anew, without the plans so far."""
    _counts.stats = Stats()
    _counts.extern_runs_before = _foreign.counts.ran
    _counts.programs = weakref.WeakSet()


# A graph with its plan -----------------------------------------------------------------------------------------------


class Program:
    """A planned graph: its forward, and its backward if it has one."""

    def __init__(self, described: Joint, options: Options) -> None:
        self._joint = described
        _foreign.check(described.graph)
        calls = _foreign.Calls(described.graph, options.fallback)
        self.plan = _lighterage.compile(
            described.file,
            optimizer="none",
            budget=options.budget,
            device=options.device,
            host=options.host,
            kernels=options.kernels,
            planner=options.planner,
            parts=(described.late, described.early),
            calls=calls,
            command=f'torch.compile(..., backend="lighterage", options={{"budget": {options.budget!r}}})',
        )
        self.arenas: Arenas = self.plan.arenas(options.threads)
        self._states = [described.states[name] for name in self.arenas.states]
        self._inputs = [[described.inputs[name] for name in names] for names in self.arenas.inputs]
        results = [*described.forward, *(value for _, value in described.mutations), *described.backward]
        like = {result.output: result.like for result in results if result.output is not None}
        self._outputs = [[_Made.of(name, like[name]) for name in names] for names in self.arenas.outputs]
        self._forward = [_Fill.of(result, self._outputs[0]) for result in described.forward]
        self._mutations = [(i, _Fill.of(value, self._outputs[0])) for i, value in described.mutations]
        self._backward = [_Fill.of(result, self._outputs[1]) for result in described.backward]
        self._staged: dict[int, torch.Tensor] = {}
        self._random = self.arenas.is_random
        late_states = [described.states[name] for name in self.arenas.read_late]
        returned = [r.source for r in described.backward if r.source is not None]
        late = [source for source in [*late_states, *self._inputs[1], *returned] if source.kind == "primal"]
        # The primals that the backward needs. Autograd keeps them, and sees when one is changed meanwhile.
        self.saved = sorted({source.index for source in late})
        self._late_states = late_states
        changed = {index for index, _ in described.mutations} & set(self.saved)
        if changed:
            raise Unsupported(f"the backward reads a tensor that the forward changes (primals_{min(changed) + 1})")
        _counts.programs.add(self)
        _counts.stats.externs += len(self.plan.externs)
        calls.warn(self.plan)
        logger.info("planned %d operations; %r", described.nodes, self.plan)

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        """AOTAutograd copies the module of the backward before it compiles it."""
        return self

    def forward(self, primals: list[Any]) -> tuple[list[Any], _lighterage.Ticket]:
        """The outputs for the graph's inputs, and what stands for the saved activations."""
        _counts.stats.forwards += 1
        held: list[torch.Tensor] = []
        states = [self._state(source, primals) for source in self._states]
        inputs = [self._address(self._find(source, primals, ()), held) for source in self._inputs[0]]
        made = [torch.empty(output.shape, dtype=output.dtype) for output in self._outputs[0]]
        seed = int(torch.randint(2**62, ())) if self._random else 0
        ticket = self.arenas.forward(states, inputs, [tensor.data_ptr() for tensor in made], seed)
        results = [self._filled(fill, made, primals, ()) for fill in self._forward]
        for index, value in self._mutations:
            primals[index].copy_(self._filled(value, made, primals, ()))
        return results, ticket

    def backward(self, number: int, saved: list[Any], tangents: list[Any]) -> list[Any]:
        """The gradients, for the saved primals and the gradients of the outputs."""
        _counts.stats.backwards += 1
        primals = dict(zip(self.saved, saved, strict=True))
        held: list[torch.Tensor] = []
        states = [self._state(source, primals) for source in self._late_states]
        inputs = [self._address(self._find(source, primals, tangents), held) for source in self._inputs[1]]
        made = [torch.empty(output.shape, dtype=output.dtype) for output in self._outputs[1]]
        self.arenas.backward(number, states, inputs, [tensor.data_ptr() for tensor in made])
        return [self._filled(fill, made, primals, tangents) for fill in self._backward]

    def _find(self, source: Source, primals: Any, tangents: Any) -> torch.Tensor:
        if source.kind == "constant":
            return self._joint.constants[source.index]
        return tangents[source.index] if source.kind == "tangent" else primals[source.index]

    def _state(self, source: Source, primals: Any) -> int:
        """The address of a tensor that kernels read where it is."""
        tensor = self._find(source, primals, ())
        address = tensor.data_ptr()
        if address % ALIGN == 0 and tensor.is_contiguous():
            return address
        # One copy for all calls: addresses of states should not change.
        if source.index not in self._staged:
            self._staged[source.index] = aligned(tensor.detach().contiguous())
        staged = self._staged[source.index]
        staged.copy_(tensor.detach())
        return staged.data_ptr()

    def _address(self, tensor: torch.Tensor, held: list[torch.Tensor]) -> int:
        """The address of a tensor with its elements in order; `held` keeps a copy that this needs."""
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().contiguous().resolve_conj().resolve_neg()
            held.append(tensor)
        return tensor.data_ptr()

    def _filled(self, fill: _Fill, made: list[torch.Tensor], primals: Any, tangents: Any) -> Any:
        if fill.source is not None:
            return self._find(fill.source, primals, tangents)
        if fill.output is None:
            return fill.constant
        tensor = made[fill.output]
        if fill.strides is None:
            return tensor
        return _laid_out(tensor, fill.strides)


@dataclasses.dataclass(frozen=True)
class _Made:
    """A tensor that a part of the step fills."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @staticmethod
    def of(name: str, like: torch.Tensor | None) -> _Made:
        assert like is not None, "an output has a type"
        return _Made(name, like.shape, like.dtype)


@dataclasses.dataclass(frozen=True)
class _Fill:
    """How a result of the graph comes about."""

    output: int | None = None
    strides: tuple[int, ...] | None = None  # if its elements are in another order
    source: Source | None = None
    constant: Any = None

    @staticmethod
    def of(result: Result, outputs: list[_Made]) -> _Fill:
        if result.output is None or result.like is None:
            return _Fill(source=result.source, constant=result.constant)
        names = [output.name for output in outputs]
        strides = None if result.like.is_contiguous() else tuple(result.like.stride())
        return _Fill(output=names.index(result.output), strides=strides)


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same values with these strides. Where a stride is 0, all elements along the dimension are one."""
    result = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
    place = result
    for dim, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dim] > 1:
            place, tensor = place.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    place.copy_(tensor)
    return result


# AOTAutograd's callbacks ---------------------------------------------------------------------------------------------


class _Compiler:
    """Plans the graphs of one call of the backend."""

    def __init__(self, options: Options, names: list[str]) -> None:
        self.options, self.names = options, names

    def partition(
        self, gm: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan a joint graph whole. The two modules only say what goes in and out."""
        static = kwargs.get("static_lifetime_input_indices")
        program = self._plan(gm, num_fwd_outputs, static, self.options)
        if program is None:
            return default_partition(gm, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
        _counts.stats.graphs += 1
        return _stubs(gm, num_fwd_outputs, program)

    def forward(self, gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        program = gm.meta.get(PROGRAM)
        if program is None:
            return _boxed(fx.Interpreter(gm).boxed_run)

        def forward(args: list[Any]) -> list[Any]:
            primals = list(args)
            args.clear()
            results, ticket = program.forward(primals)
            return [*results, *(primals[index] for index in program.saved), from_dlpack(ticket)]

        return _boxed(forward)

    def backward(self, gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        program = gm.meta.get(PROGRAM)
        if program is None:
            return _boxed(fx.Interpreter(gm).boxed_run)
        n = len(program.saved)

        def backward(args: list[Any]) -> list[Any]:
            saved, ticket, tangents = args[:n], args[n], args[n + 1 :]
            args.clear()
            return program.backward(int(ticket), saved, tangents)

        return _boxed(backward)

    def inference(self, gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        (end,) = [node for node in gm.graph.nodes if node.op == "output"]
        # Nothing waits for a backward: there is nothing to drop. A share is one of what a step with a backward keeps.
        budget = self.options.budget
        is_share = isinstance(budget, float) or (isinstance(budget, str) and budget.strip().endswith("%"))
        options = dataclasses.replace(self.options, budget=None if is_share else budget)
        program = self._plan(gm, len(end.args[0]), None, options)
        if program is None:
            return _boxed(fx.Interpreter(gm).boxed_run)
        _counts.stats.inference_graphs += 1

        def inference(args: list[Any]) -> list[Any]:
            primals = list(args)
            args.clear()
            return program.forward(primals)[0]

        return _boxed(inference)

    def _plan(self, gm: fx.GraphModule, n_forward: int, static: Any, options: Options) -> Program | None:
        """The plan of a graph. None if it should run in eager mode: after a warning, or because it computes nothing.

        Raises Unsupported in strict mode, and Infeasible.
        """
        if static is None:
            context = TracingContext.try_get()
            static = context.fw_metadata.static_input_indices if context and context.fw_metadata else []
        try:
            described = joint(gm, n_forward, set(static), self._paths(gm))
            return None if described is None else Program(described, options)
        except Unsupported as error:
            if self.options.strict or self.options.fallback == "error":
                raise
            _counts.stats.eager_graphs += 1
            warnings.warn(
                f'a graph of torch.compile(backend="lighterage") runs in eager mode, without a budget: {error}. '
                f'options={{"strict": True}} makes this an error; lighterage.stats() counts such graphs',
                stacklevel=2,
            )
            return None

    def _paths(self, gm: fx.GraphModule) -> dict[int, str]:
        """Names of primals, as far as they are known."""
        holders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        primals = [node for node in holders if not node.name.startswith("tangents")]
        paths = {}
        for i, node in enumerate(primals):
            index = getattr(node.meta.get("desc"), "idx", None)
            if index is not None and index < len(self.names):
                paths[i] = self.names[index]
        return paths


def _boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that takes its arguments in a list, which it empties."""

    def boxed(args: list[Any]) -> Any:
        return function(args)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def _stub(*_: Any) -> Any:
    raise RuntimeError("the modules of a planned graph are never run")


def _stubs(gm: fx.GraphModule, n_forward: int, program: Program) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The signatures of forward and backward.

    Forward: the primals to the outputs, the saved primals and the ticket. Backward: the saved primals, the ticket and
    the tangents to the gradients.
    """
    holders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    primals = [node for node in holders if not node.name.startswith("tangents")]
    tangents = [node for node in holders if node.name.startswith("tangents")]
    (end,) = [node for node in gm.graph.nodes if node.op == "output"]
    results = list(end.args[0])
    tensors = [node.meta["val"] for node in primals if isinstance(node.meta.get("val"), torch.Tensor)]
    with tensors[0].fake_mode:
        number = torch.empty(1, dtype=torch.int64)

    graph = fx.Graph()
    given = {node: _placeholder(graph, node) for node in primals}
    call = graph.call_function(_stub, tuple(given.values()))
    outputs = _items(graph, call, results[:n_forward], given)
    ticket = graph.call_function(operator.getitem, (call, n_forward))
    ticket.meta = {"val": number}
    graph.output((*outputs, *(given[primals[index]] for index in program.saved), ticket))
    forward = fx.GraphModule({}, graph)

    graph = fx.Graph()
    given = {primals[index]: _placeholder(graph, primals[index]) for index in program.saved}
    ticket = graph.placeholder("ticket")
    ticket.meta = {"val": number}
    given |= {node: _placeholder(graph, node) for node in tangents}
    call = graph.call_function(_stub, (*given.values(), ticket))
    graph.output(tuple(_items(graph, call, results[n_forward:], given)))
    backward = fx.GraphModule({}, graph)
    forward.meta[PROGRAM] = backward.meta[PROGRAM] = program
    return forward, backward


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    made = graph.placeholder(node.name)
    made.meta = dict(node.meta)
    return made


def _items(graph: fx.Graph, call: fx.Node, results: list[Any], given: dict[fx.Node, fx.Node]) -> list[Any]:
    items: list[Any] = []
    for i, result in enumerate(results):
        if not isinstance(result, fx.Node):
            items.append(result)
        elif result in given:
            items.append(given[result])
        else:
            node = graph.call_function(operator.getitem, (call, i))
            node.meta = {"val": result.meta["val"]}
            items.append(node)
    return items


# The entry point -----------------------------------------------------------------------------------------------------


def backend(
    gm: fx.GraphModule, example_inputs: list[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """What `torch.compile(..., backend="lighterage")` calls for each graph.

    options: the fields of `Options`.

    Raises Error: an unknown option. Infeasible: no plan fits. Unsupported: in strict mode, a graph cannot be planned;
    with fallback="error", an operation has no kernel.
    """
    if mode not in (None, "default"):
        raise Error(f"mode={mode!r}: the backend has no modes; give it options={{'budget': ...}}")
    chosen = Options.of(options)
    _ignore_warnings()
    if any(isinstance(value, torch.SymInt) for value in example_inputs):
        return _by_shape(gm, chosen)
    return _compiled(gm, example_inputs, chosen)


def _ignore_warnings() -> None:
    """Keep Dynamo from breaking the graphs of transformers at a warning: each part of a graph has its own plan."""
    once = getattr(logging.Logger, "warning_once", None)
    if once is not None:
        torch._dynamo.config.ignore_logging_functions.add(once)


# When torch.compile looks up the backend by its name, it imports this file before it traces anything.
_ignore_warnings()


def _compiled(gm: fx.GraphModule, inputs: list[Any], options: Options) -> Callable[..., Any]:
    holders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    sources = [getattr(node, "_dynamo_source", None) for node in holders]
    names = [node.name if s is None else module_path(s.name) for node, s in zip(holders, sources, strict=True)]
    compiler = _Compiler(options, names)
    return aot_autograd(
        fw_compiler=compiler.forward,
        bw_compiler=compiler.backward,
        inference_compiler=compiler.inference,
        partition_fn=compiler.partition,
        decompositions=coarse(),
        keep_inference_input_mutations=True,
    )(gm, inputs)


def _by_shape(gm: fx.GraphModule, options: Options) -> Callable[..., Any]:
    """A graph with symbolic sizes: a plan for each list of sizes that comes."""
    plans: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def run(*args: Any) -> Any:
        key = tuple(arg.shape if isinstance(arg, torch.Tensor) else arg for arg in args)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if key not in plans:
            plans[key] = _compiled(_specialised(gm, args), tensors, options)
        return plans[key](*tensors)

    return torch._dynamo.disable(run, reason="chooses a plan")  # type: ignore[no-untyped-call]


def _specialised(gm: fx.GraphModule, args: tuple[Any, ...]) -> fx.GraphModule:
    """The graph for these sizes: placeholders of sizes become numbers."""
    special = copy.deepcopy(gm)
    holders = [node for node in special.graph.nodes if node.op == "placeholder"]
    for node, value in zip(holders, args, strict=True):
        if isinstance(value, torch.Tensor):
            continue

        def number(operand: fx.Node, node: fx.Node = node, value: Any = value) -> Any:
            return value if operand is node else operand

        for user in list(node.users):
            user.args = fx.node.map_arg(user.args, number)
            user.kwargs = fx.node.map_arg(user.kwargs, number)
        special.graph.erase_node(node)
    for node in special.graph.nodes:
        node.meta.pop("example_value", None)
    special.recompile()
    return special
