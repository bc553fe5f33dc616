"""Export one training step, the loss and its gradient for every parameter, as a joint `.pt2` file.

    with weightless():                                   # for models larger than memory
        model = build()
    step = export_joint(model, (ids, labels), level="coarse", attention="fused")
    save(step, "step.pt2", weights=False)

Torch has a call for this, `torch.export.experimental._export_forward_backward`. It is not used: in torch 2.11 it gives
wrong gradients for attention on the CPU (it decomposes the forward and keeps the fused backward), refuses tied and
unused parameters, and loses the module that each operation came from. Here the step is traced twice instead:

1. `_record` runs the exported forward and then autograd under `make_fx`. Each operation is tagged with its phase, its
   autograd sequence number and the module that made it; backward operations get those of their forward.
2. `_lower` replays that graph through `torch.func.functionalize` and a decomposition table, and keeps the tags.

Random operations stay operations of the graph. The backward is recorded with the forward, and uses the forward's mask.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import json
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx, nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

aten = torch.ops.aten

Level = Literal["core", "coarse"]
Attention = Literal["math", "fused"]
Tag = dict[str, Any]

# The private names that are imported above, and the tags of `_record`, were checked with this release only.
TORCH = "2.11"

# Operations that simpler ones can express. Lowering them reduces the set of operations that a reader has
# to know, and splits no real kernel: norms, softmax, losses, attention, activations and dropout stay whole.
SPELLINGS: list[Any] = [
    aten._safe_softmax,
    aten._unsafe_view,
    aten.arange.default,
    aten.arange.start,
    aten.empty_like,
    aten.fill,
    aten.index_add,
    aten.masked_fill,
    aten.new_empty,
    aten.new_full,
    aten.new_ones,
    aten.new_zeros,
    aten.ones,
    aten.ones_like,
    aten.rsub,
    aten.select_backward,
    aten.slice_backward,
    aten.split.Tensor,
    aten.squeeze.dim,
    aten.t,
    aten.transpose,
    aten.tril,
    aten.triu,
    aten.unbind,
    aten.zeros,
    aten.zeros_like,
]

# Results that equal their first operand in a functional graph, and checks of facts that tracing has fixed.
ALIASES = (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
CHECKS = (aten._assert_tensor_metadata.default,)


@dataclasses.dataclass(frozen=True)
class Step:
    """A traced training step, and the additional information in its file."""

    program: ExportedProgram
    info: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Result:
    """The results of one run of a step."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def export_joint(
    model: nn.Module,
    args: Sequence[Any],
    *,
    level: Level = "coarse",
    attention: Attention = "fused",
    dynamic_shapes: Any = None,
) -> Step:
    """Trace `model(*args)`, which returns a scalar loss, and its gradients.

    level: "core" has the fewest kinds of operations, "coarse" the fewest operations.
    attention: "math" spells attention out; "fused" keeps one operation forward and one backward.
    """
    if not torch.__version__.startswith(TORCH + "."):
        raise RuntimeError(f"the exporter needs torch {TORCH}, and this is {torch.__version__}")
    tensors = [id(value) for value in torch.utils._pytree.tree_leaves(tuple(args)) if isinstance(value, torch.Tensor)]
    if len(set(tensors)) < len(tensors):
        raise ValueError("two of the step's inputs are one tensor, and tracing would make them one input")
    with _quiet(), contextlib.ExitStack() as stack:
        if attention == "math":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        forward = torch.export.export(model, tuple(args), dynamic_shapes=dynamic_shapes, strict=False)
        inputs, dropped = _used_inputs(forward)
        recorded, trained = _record(forward, inputs)
        lowered = _lower(recorded, _values(inputs), _decompositions(level))
        program = _program(forward, inputs, trained, lowered)
    info = {
        "format": "joint-step/1",
        "torch": torch.__version__,
        "level": level,
        "attention": attention,
        "tied": _tied(model),
        "dropped_parameters": dropped,
        "parameters_with_gradient": trained,
        "nodes": sum(node.op == "call_function" for node in program.graph.nodes),
    }
    return Step(program, info)


def save(step: Step, path: Path | str, *, weights: bool = True, **extra: Any) -> None:
    """Write the step. Without weights every parameter has 0 bytes; buffers and constants are always written."""
    program = step.program if weights else _without_weights(step.program)
    present = not any(isinstance(value, FakeTensor) for value in program.state_dict.values())
    info = {**step.info, **extra, "weights": present}
    with _quiet():
        torch.export.save(program, path, extra_files={"joint_step.json": json.dumps(info)})


@contextlib.contextmanager
def weightless() -> Iterator[FakeTensorMode]:
    """Modules that are built inside have parameters without memory; buffers, such as RoPE tables, stay real.

    Tensors that are made inside the yielded mode have no memory either, and can stand for a batch.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    register = nn.Module.register_parameter

    def register_fake(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not isinstance(parameter, FakeTensor):
            parameter = _fake(parameter, mode)
        register(module, name, parameter)

    nn.Module.register_parameter = register_fake  # type: ignore[method-assign, assignment]
    try:
        yield mode
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def run(
    step: Step, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], args: Sequence[Any]
) -> Result:
    """Interpret the step's graph, operation by operation. Slow; for tests."""
    program, rest = step.program, iter(args)
    flat = []
    for spec in program.graph_signature.input_specs:
        match spec.kind:
            case InputKind.PARAMETER:
                flat.append(parameters[_name(spec)])
            case InputKind.BUFFER:
                flat.append(buffers[_name(spec)])
            case InputKind.USER_INPUT:
                flat.append(next(rest))
            case _:
                flat.append(program.constants[_name(spec)])
    with torch.no_grad():
        values = fx.Interpreter(program.graph_module).run(*flat)
    result = Result(torch.empty(0), {}, {})
    for output, value in zip(program.graph_signature.output_specs, values, strict=True):
        match output.kind:
            case OutputKind.LOSS_OUTPUT:
                result = dataclasses.replace(result, loss=value)
            case OutputKind.GRADIENT_TO_PARAMETER:
                result.gradients[_name(output)] = value
            case OutputKind.BUFFER_MUTATION:
                result.buffers[_name(output)] = value
    return result


# The forward ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Input:
    spec: InputSpec
    node: fx.Node  # its placeholder in the forward

    @property
    def trained(self) -> bool:
        value = self.node.meta["val"]
        return self.spec.kind == InputKind.PARAMETER and value.requires_grad


def _used_inputs(forward: ExportedProgram) -> tuple[list[_Input], list[str]]:
    """The inputs that the step keeps, and the parameters that nothing reads.

    Export gives each name of a tied parameter an input, and reads one of them. User inputs stay, read or not: they are
    the order of the step's arguments.
    """
    nodes = [node for node in forward.graph.nodes if node.op == "placeholder"]
    inputs, dropped = [], []
    for spec, node in zip(forward.graph_signature.input_specs, nodes, strict=True):
        if node.users or spec.kind == InputKind.USER_INPUT:
            inputs.append(_Input(spec, node))
        elif spec.kind == InputKind.PARAMETER:
            dropped.append(_name(spec))
    return inputs, dropped


def _values(inputs: Sequence[_Input]) -> list[Any]:
    """Tensors of the inputs' types, without memory."""
    return [input.node.meta["val"] for input in inputs]


def _tied(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if 1 < len(group)]


# Forward and backward in one graph -----------------------------------------------------------------------------------


def _record(forward: ExportedProgram, inputs: Sequence[_Input]) -> tuple[fx.GraphModule, list[str]]:
    """The joint graph of the loss and the gradients, in autograd's own operations, and the names of the gradients."""
    loss_of = _replay(forward.graph_module)
    places = {input.node: i for i, input in enumerate(inputs)}
    holders = [node for node in forward.graph.nodes if node.op == "placeholder"]
    for node in forward.graph.nodes:
        node.meta["custom"] = {"phase": "fwd", **_path(node)}
    candidates = [i for i, input in enumerate(inputs) if input.trained]
    trained: list[str] = []

    def step(*values: Any) -> list[torch.Tensor]:
        outputs = loss_of(*(values[places[node]] if node in places else None for node in holders))
        if len(outputs) != 1 or not isinstance(outputs[0], torch.Tensor) or outputs[0].numel() != 1:
            raise ValueError("the model should return one scalar, its loss")
        loss = outputs[0]
        if loss.grad_fn is None:
            raise ValueError("the loss depends on no parameter")
        _tag_backward(loss.grad_fn)
        with traceback.annotate({"phase": "bwd"}):
            gradients = torch.autograd.grad(loss, [values[i] for i in candidates], allow_unused=True)
        reached = [(i, gradient) for i, gradient in zip(candidates, gradients, strict=True) if gradient is not None]
        trained[:] = [_name(inputs[i].spec) for i, _ in reached]
        return [loss, *(gradient for _, gradient in reached)]

    recorded = _trace(step, _values(inputs))
    _tag_paths(recorded.graph)
    return recorded, trained


def _path(node: fx.Node) -> Tag:
    stack = node.meta.get("nn_module_stack")
    return {"path": list(stack.values())[-1][0]} if stack else {}


def _tag_backward(root: Any) -> None:
    """Make autograd tag each function's operations with the sequence number of the forward that made the function.

    Between two functions it adds up the gradients of a value with several readers.
    """

    def tag(custom: Tag) -> Callable[..., None]:
        return lambda *_: traceback.get_current_meta().update(custom=custom)

    functions = [root]
    seen = {root}
    for function in functions:
        function.register_prehook(tag({"phase": "bwd", "seq": function._sequence_nr()}))
        function.register_hook(tag({"phase": "bwd", "acc": True}))
        later = [next for next, _ in function.next_functions if next is not None and next not in seen]
        seen.update(later)
        functions.extend(dict.fromkeys(later))


def _tag_paths(graph: fx.Graph) -> None:
    """Number the sequence from 0, and give a backward operation the path of its forward."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    paths: dict[int, str] = {}
    for node in calls:
        tag = node.meta["custom"]
        if tag["phase"] == "fwd":
            tag["seq"] = node.meta["seq_nr"]
            # The first operation with a number made it; later operations that autograd does not track repeat it.
            paths.setdefault(tag["seq"], tag.get("path", ""))
    order = sorted(paths)
    for node in calls:
        tag = node.meta["custom"]
        # The backward's first operation belongs to the loss, and sums have no number: both get the last. A function of
        # autograd without an operation in the forward gets the number before it.
        rank = max(bisect.bisect_right(order, tag.get("seq", order[-1])) - 1, 0)
        whose = {"acc": True} if "acc" in tag else {"path": tag.get("path", paths[order[rank]])}
        node.meta["custom"] = {"phase": tag["phase"], "seq": rank, **whose}


def _replay(module: fx.GraphModule) -> Callable[..., Any]:
    """The module as a function. When it is traced, its operations get the metadata of their original nodes."""

    class Replay(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            with traceback.set_current_meta(n):
                return super().run_node(n)

    return Replay(module).run


def _trace(
    function: Callable[..., Any], values: Sequence[Any], table: dict[Any, Callable[..., Any]] | None = None
) -> fx.GraphModule:
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    with mode, enable_python_dispatcher(), traceback.preserve_node_meta():
        return make_fx(function, decomposition_table=table)(*values)


# Lowering ------------------------------------------------------------------------------------------------------------


def _decompositions(level: Level) -> dict[Any, Callable[..., Any]]:
    match level:
        case "core":  # Torch's own table keeps dropout whole; here it is a draw, a comparison and products.
            return {**core_aten_decompositions(), **get_decompositions([aten.native_dropout])}
        case "coarse":
            return dict(get_decompositions(SPELLINGS))
    raise ValueError(f"no level {level!r}; there are core and coarse")


def _lower(recorded: fx.GraphModule, values: Sequence[Any], table: dict[Any, Callable[..., Any]]) -> fx.GraphModule:
    """The same graph without mutation, aliases and the operations in `table`."""
    # Invariant: an attention and its backward are both decomposed or both kept. The table has only the forward.
    table.pop(aten._scaled_dot_product_flash_attention_for_cpu.default, None)
    with torch.no_grad():
        lowered = _trace(torch.func.functionalize(_replay(recorded)), values, table)
    graph = lowered.graph
    for node in list(graph.nodes):
        # A clone with its operand's strides equals the operand; a clone that changes them is for a later view.
        if node.target in ALIASES or (node.target == aten.clone.default and not node.kwargs):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in CHECKS:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return lowered


def _program(
    forward: ExportedProgram, inputs: Sequence[_Input], trained: Sequence[str], lowered: fx.GraphModule
) -> ExportedProgram:
    """The lowered graph under the signature of a training step: mutated buffers, the loss, the gradients."""
    graph = lowered.graph
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    for input, node in zip(inputs, holders, strict=True):
        node.target = input.spec.arg.name
        node._rename(input.spec.arg.name)
    owner = {node: input.spec for input, node in zip(inputs, holders, strict=True)}
    results, outputs = [], []
    # A functional graph writes the new values of mutated inputs at its end: these writes are outputs of the step.
    for node in list(graph.nodes):
        if node.target == aten.copy_.default and node.args[0] in owner:
            place, value = node.args[:2]
            if owner[place].kind != InputKind.BUFFER:
                raise ValueError(f"the model writes to {place.name}; a step may write to buffers only")
            results.append(value)
            outputs.append(_output(OutputKind.BUFFER_MUTATION, value, owner[place].target))
            graph.erase_node(node)
    (end,) = [node for node in graph.nodes if node.op == "output"]
    loss, *gradients = end.args[0]
    results += [loss, *gradients]
    outputs.append(_output(OutputKind.LOSS_OUTPUT, loss, None))
    for name, gradient in zip(trained, gradients, strict=True):
        outputs.append(_output(OutputKind.GRADIENT_TO_PARAMETER, gradient, name))
    end.args = (tuple(results),)
    for node in graph.nodes:
        keep = {"val", "custom"} if node.op == "call_function" else {"val"}
        node.meta = {key: value for key, value in node.meta.items() if key in keep}
        if node.target is operator.getitem:
            node.meta["custom"] = node.args[0].meta["custom"]
    graph.lint()  # type: ignore[no-untyped-call]
    specs = [input.spec for input in inputs]
    read = {_name(spec) for spec in specs if spec.kind != InputKind.USER_INPUT}
    parameters = {name for name, value in forward.state_dict.items() if isinstance(value, nn.Parameter)}
    return ExportedProgram(
        root=fx.GraphModule(dict(lowered.named_modules()), graph),
        graph=graph,
        graph_signature=ExportGraphSignature(specs, outputs),
        # Parameters that nothing reads stay in the table of weights, so that tied names still share one payload.
        state_dict={name: value for name, value in forward.state_dict.items() if name in read | parameters},
        range_constraints=forward.range_constraints,
        module_call_graph=forward.module_call_graph,
        example_inputs=forward.example_inputs,
        constants={name: value for name, value in forward.constants.items() if name in read},
    )


def _output(kind: OutputKind, node: fx.Node, target: str | None) -> OutputSpec:
    return OutputSpec(kind=kind, arg=TensorArgument(name=node.name), target=target)


def _name(spec: InputSpec | OutputSpec) -> str:
    assert spec.target is not None, "a parameter, a buffer and a constant have names"
    return spec.target


# Weights -------------------------------------------------------------------------------------------------------------


def _fake(parameter: nn.Parameter, mode: FakeTensorMode) -> nn.Parameter:
    with mode:
        empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _without_weights(program: ExportedProgram) -> ExportedProgram:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = {
        name: _fake(value, mode) if isinstance(value, nn.Parameter) and not isinstance(value, FakeTensor) else value
        for name, value in program.state_dict.items()
    }
    return ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=program.graph_signature,
        state_dict=state,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence export's warnings about its internals; it raises an exception if it fails."""
    logger = logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
