"""The backend of `torch.compile`: activations within a budget, in any training loop.

    model = torch.compile(model, backend="lighterage", options={"budget": "60%"})

Forward and backward of a graph are one plan. What autograd keeps between them is a ticket: a tensor with one number,
whose memory stands for the activations. When autograd frees it, after the backward or because the loss was dropped, the
next forward takes the memory. Nothing that a program holds lies in planned memory: outputs and gradients are tensors of
PyTorch's. Parameters are read where they are.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils.dlpack import from_dlpack

from . import _compat, _watch
from ._capture import as_planned, attention_in_parts, draws_in_attention
from ._joint import joint, module_path
from ._program import Options, Program
from ._stats import counts
from .errors import Error, Infeasible, StaleError, Unsupported
from .export import coarse

# The key of a graph module's metadata with its program.
PROGRAM = "lighterage"

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
        counts.stats.graphs += 1
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
        options = dataclasses.replace(self.options, budget=None) if self.options.is_share else self.options
        program = self._plan(gm, len(end.args[0]), None, options)
        if program is None:
            return _boxed(fx.Interpreter(gm).boxed_run)
        counts.stats.inference_graphs += 1

        def inference(args: list[Any]) -> list[Any]:
            primals = list(args)
            args.clear()
            return program.forward(primals)[0]

        return _boxed(inference)

    def _plan(self, gm: fx.GraphModule, n_forward: int, static: Any, options: Options) -> Program | None:
        """The plan of a graph. None if it should run in eager mode: after a warning, or because it computes nothing.

        A graph that cannot run in its share gets the least memory with which it can: eager mode would take more.

        Raises Unsupported in strict mode, and Infeasible if the budget is in bytes, or in strict mode.
        """
        if static is None:
            context = TracingContext.try_get()
            static = context.fw_metadata.static_input_indices if context and context.fw_metadata else []
        try:
            described = joint(gm, n_forward, set(static), self._paths(gm))
            if described is None:
                return None
            try:
                return Program(described, options)
            except Infeasible as error:
                if options.strict or not options.is_share:
                    raise
                warnings.warn(
                    f'a graph of torch.compile(backend="lighterage") gets the {error.smallest} bytes that it needs at '
                    f"least: its budget, {options.budget}, is {error.budget} bytes. "
                    f'options={{"strict": True}} makes this an error',
                    stacklevel=2,
                )
                return Program(described, dataclasses.replace(options, budget=error.smallest))
        except Unsupported as error:
            if self.options.strict or self.options.fallback == "error":
                raise
            counts.stats.eager_graphs += 1
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
    if any(isinstance(value, torch.SymInt) for value in example_inputs):
        return _by_shape(gm, chosen)
    return _by_flags(gm, example_inputs, chosen)


def _compiled(gm: fx.GraphModule, inputs: list[Any], options: Options) -> Callable[..., Any]:
    holders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    sources = [getattr(node, "_dynamo_source", None) for node in holders]
    names = [
        node.name if s is None else module_path(_compat.source_name(s))
        for node, s in zip(holders, sources, strict=True)
    ]
    compiler = _Compiler(options, names)
    compile = aot_autograd(
        fw_compiler=compiler.forward,
        bw_compiler=compiler.backward,
        inference_compiler=compiler.inference,
        partition_fn=compiler.partition,
        decompositions=coarse(),
        keep_inference_input_mutations=True,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_planned())
        if draws_in_attention(gm.graph):
            stack.enter_context(attention_in_parts())
        return compile(gm, inputs)


def _by_flags(gm: fx.GraphModule, inputs: list[Any], options: Options) -> Callable[..., Any]:
    """A graph, and another plan where parameters have been unfrozen, which Dynamo does not notice."""
    first = _compiled(gm, inputs, options)
    frozen: list[int] | None = None
    others: dict[tuple[int, ...], Callable[..., Any]] = {}

    def run(*args: Any) -> Any:
        nonlocal frozen
        if frozen is None:
            frozen = [i for i, arg in enumerate(args) if isinstance(arg, nn.Parameter) and not arg.requires_grad]
        trained = tuple(i for i in frozen if args[i].requires_grad) if frozen else ()
        if not trained:
            return first(*args)
        if trained not in others:
            try:
                others[trained] = _compiled(_specialised(gm, args), list(args), options)
            except DataDependentOutputException as error:
                # With dynamic=True, numbers of the model are tensors, and their values are not in the graph.
                raise StaleError(
                    "parameters were unfrozen after torch.compile traced the model: torch._dynamo.reset() has it "
                    "traced again"
                ) from error
        return others[trained](*args)

    return run


def _by_shape(gm: fx.GraphModule, options: Options) -> Callable[..., Any]:
    """A graph with symbolic sizes: a plan for each list of sizes that comes."""
    plans: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def run(*args: Any) -> Any:
        # Dynamo does not notice parameters that are unfrozen.
        key = tuple((arg.shape, arg.requires_grad) if isinstance(arg, torch.Tensor) else arg for arg in args)
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


# When torch.compile looks up the backend by its name, it imports this file before it traces anything.
_watch.begin(backend)
