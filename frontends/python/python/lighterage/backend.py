"""The backend of `torch.compile`: activations within a budget, in any training loop.

    model = torch.compile(model, backend="lighterage", options={"budget": "60%"})

Forward and backward of a graph are one plan. What autograd keeps between them is a ticket: a tensor with one number,
whose memory stands for the activations. When autograd frees it, after the backward or because the loss was dropped, the
next forward takes the memory. Nothing that a program holds lies in planned memory: outputs and gradients are tensors of
PyTorch's. Parameters are read where they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack

from . import _compat, _watch
from ._capture import as_planned, attention_in_parts, draws_in_attention
from ._joint import joint, module_path
from ._program import Options, Program
from ._stats import counts
from .errors import Error, Infeasible, Unsupported
from .export import coarse

# The key of a graph module's metadata with its program.
PROGRAM = "lighterage"

# Calls of two operands that compute the same with a number and with a tensor that holds it.
ARITHMETIC: set[Any] = {operator.add, operator.sub, operator.mul, operator.truediv}
ARITHMETIC |= {operator.iadd, operator.isub, operator.imul, operator.itruediv}
ARITHMETIC |= {torch.add, torch.sub, torch.mul, torch.div, "add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_"}

# How many plans of a graph may differ in nothing but numbers, such as the step that a model is told. Each has memory.
MOST_NUMBERS = 8

# AOTAutograd's callbacks ---------------------------------------------------------------------------------------------


class _Compiler:
    """Plans the graphs of one call of the backend."""

    def __init__(self, options: Options, names: list[str], programs: list[Program]) -> None:
        """programs: gets what was planned."""
        self.options, self.names, self.programs = options, names, programs

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
                program = Program(described, options)
            except Infeasible as error:
                if options.strict or not options.is_share:
                    raise
                warnings.warn(
                    f'a graph of torch.compile(backend="lighterage") gets the {error.smallest} bytes that it needs at '
                    f"least: its budget, {options.budget}, is {error.budget} bytes. "
                    f'options={{"strict": True}} makes this an error',
                    stacklevel=2,
                )
                program = Program(described, dataclasses.replace(options, budget=error.smallest))
            self.programs.append(program)
            return program
        except Unsupported as error:
            _tell(error, self.options)
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


def _tell(why: Unsupported, options: Options) -> None:
    """Say that a graph runs in eager mode.

    Raises Unsupported in strict mode.
    """
    if options.strict or options.fallback == "error":
        raise why
    counts.stats.eager_graphs += 1
    warnings.warn(
        f'a graph of torch.compile(backend="lighterage") runs in eager mode, without a budget: {why}. '
        f'options={{"strict": True}} makes this an error; lighterage.stats() counts such graphs',
        stacklevel=2,
    )


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
    values = pytree.tree_leaves([example_inputs, [node.meta.get("example_value") for node in gm.graph.nodes]])
    if any(isinstance(value, torch.Tensor) and value.is_nested for value in values):
        _tell(Unsupported("nested tensors have no fixed sizes. Padded ones have a plan for each size"), chosen)
        return gm
    if any(isinstance(value, torch.SymInt) for value in example_inputs):
        return _by_shape(gm, chosen)
    return _by_flags(gm, example_inputs, chosen)


@_compat.alone
def _compiled(
    gm: fx.GraphModule, inputs: list[Any], options: Options, programs: list[Program] | None = None
) -> Callable[..., Any]:
    """The graph, compiled. programs: gets what was planned of it."""
    holders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    sources = [getattr(node, "_dynamo_source", None) for node in holders]
    names = [
        node.name if s is None else module_path(_compat.source_name(s))
        for node, s in zip(holders, sources, strict=True)
    ]
    compiler = _Compiler(options, names, [] if programs is None else programs)
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
    first, others = _compiled(gm, inputs, options), _by_shape(gm, options)
    frozen: list[int] | None = None

    def run(*args: Any) -> Any:
        nonlocal frozen
        if frozen is None:
            frozen = [i for i, arg in enumerate(args) if isinstance(arg, nn.Parameter) and not arg.requires_grad]
        return (others if any(args[i].requires_grad for i in frozen) else first)(*args)

    return run


def _by_shape(gm: fx.GraphModule, options: Options) -> Callable[..., Any]:
    """A graph with symbols: a plan for each list of sizes that comes, and a few for numbers that are no sizes."""
    numbers = _Numbers(gm)
    plans: dict[Any, dict[tuple[Any, ...], Callable[..., Any] | Unsupported]] = {}
    too_many = Unsupported(
        f"a number in it differs from call to call, and each needs a plan: {MOST_NUMBERS} are the most. A tensor with "
        f"the number in its place needs one"
    )
    turns = _Turns()
    is_told = False

    def run(*args: Any) -> Any:
        nonlocal is_told
        values, sizes, others = numbers.of(args)
        tensors = [torch.tensor(value, dtype=torch.float64) for value in values]
        tensors += [arg for arg in args if isinstance(arg, torch.Tensor)]
        # Dynamo does not notice parameters that are unfrozen.
        alike = plans.setdefault((sizes, *((tensor.shape, tensor.requires_grad) for tensor in tensors)), {})
        if others not in alike and len(alike) < MOST_NUMBERS:
            try:
                programs: list[Program] = []
                made = _compiled(numbers.specialised((*sizes, *others)), tensors, options, programs)
                alike[others] = turns.of(made, programs)
            except (DataDependentOutputException, GuardOnDataDependentSymNode) as error:
                alike[others] = Unsupported(f"it looks at the values of tensors ({str(error).splitlines()[0]})")
        plan = alike.get(others, too_many)
        if not isinstance(plan, Unsupported):
            return plan(*tensors)
        if not is_told or options.strict:
            _tell(plan, options)
            is_told = True
        return gm(*args)

    return torch._dynamo.disable(run, reason="chooses a plan")  # type: ignore[no-untyped-call]


class _Turns:
    """Plans that take turns. Together they keep at most twice the memory of the largest; others give theirs back."""

    def __init__(self) -> None:
        # The last used is the last.
        self._programs: dict[Callable[..., Any], list[Program]] = {}

    def of(self, plan: Callable[..., Any], programs: list[Program]) -> Callable[..., Any]:
        """A plan that gives back the memory of others when its turn begins."""

        def run(*args: Any) -> Any:
            if next(reversed(self._programs), None) is not run:
                self._programs.pop(run, None)
                self._programs[run] = programs
                self._release()
            return plan(*args)

        return run

    def _release(self) -> None:
        n_bytes = [sum(program.plan.peak for program in programs) for programs in self._programs.values()]
        left = 2 * max(n_bytes)
        for needed, programs in reversed(list(zip(n_bytes, self._programs.values(), strict=True))):
            left -= needed
            if left < 0:
                for program in programs:
                    program.arenas.release()


class _Numbers:
    """The numbers of a graph with symbols: those that it is given, and those that it computes of them alone."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm, self._found = gm, set[fx.Node]()
        uses, shaping = [], set()
        for node in gm.graph.nodes:
            if _is_number(node, self._found):
                self._found.add(node)
            else:
                uses += [(number, node) for number in node.all_input_nodes if number in self._found]
                for tensor in pytree.tree_leaves(node.meta.get("example_value")):
                    shaping |= _symbols(*tensor.shape) if isinstance(tensor, torch.Tensor) else set()
        # A plan reads these as tensors. The others are a part of it.
        self._values = list(dict.fromkeys(number for number, user in uses if _takes_tensor(user, number)))
        constants = dict.fromkeys(number for number, user in uses if not _takes_tensor(user, number))
        self._sizes = [number for number in constants if shaping & _symbols(number.meta.get("example_value"))]
        self._others = [number for number in constants if number not in self._sizes]
        self._compute = self._computed()

    def _computed(self) -> Callable[..., Any]:
        """The numbers alone, as a function of all inputs of the graph."""
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for node in self._gm.graph.nodes:
            if node.op == "placeholder" or node in self._found:
                made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(tuple(tuple(made[number] for number in of) for of in (self._values, self._sizes, self._others)))
        return fx.GraphModule(self._gm, graph).forward

    def of(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """In a call: those that a plan is given, sizes, and others that are a part of the plan."""
        values, sizes, others = self._compute(*args)
        return values, sizes, others

    def specialised(self, constants: tuple[Any, ...]) -> fx.GraphModule:
        """The graph for these sizes and other numbers. It is given the values, as tensors, and then its tensors."""
        graph = fx.Graph()
        given = {number: graph.placeholder(f"number_{i}") for i, number in enumerate(self._values)}
        made: dict[fx.Node, Any] = dict(zip([*self._sizes, *self._others], constants, strict=True))
        for node in self._gm.graph.nodes:
            if node in self._found:
                continue
            of_node: dict[fx.Node, Any] = {
                number: graph.call_method("to", (given[number], node.meta["example_value"].dtype))
                for number in node.all_input_nodes
                if number in given and _takes_tensor(node, number)
            }
            made[node] = graph.node_copy(node, ChainMap(of_node, made).__getitem__)
            made[node].meta.pop("example_value", None)
        return fx.GraphModule(self._gm, graph)


def _is_number(node: fx.Node, known: set[fx.Node]) -> bool:
    """Whether a node is a number that does not depend on what tensors the graph computes."""
    if node.op == "call_method" and node.target == "item":
        # Dynamo gives a graph a tensor for a float.
        return all(operand.op == "placeholder" for operand in node.all_input_nodes)
    value = node.meta.get("example_value")
    is_number = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))
    is_computed = node.op == "call_function" and known.issuperset(node.all_input_nodes)
    return is_number and (node.op == "placeholder" or is_computed)


def _takes_tensor(user: fx.Node, number: fx.Node) -> bool:
    """Whether a call may have a tensor in the place of a number: one of the type of its result."""
    if user.target not in ARITHMETIC or len(user.args) != 2 or user.kwargs:
        return False
    tensors = [node.meta.get("example_value") for node in (*user.args, user) if isinstance(node, fx.Node)]
    types = {tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor)}
    # Half precision is computed with more digits of a number than a tensor would have.
    return types in ({torch.float32}, {torch.float64})


def _symbols(*numbers: Any) -> set[Any]:
    return {s for n in numbers if isinstance(n, (torch.SymInt, torch.SymFloat)) for s in n.node.expr.free_symbols}


# When torch.compile looks up the backend by its name, it imports this file before it traces anything.
_watch.begin(backend)
