"""Export one training step, the loss and its gradient for every parameter, as a joint `.pt2` file.

    with weightless():                                   # for models larger than memory
        model = build()
    step = export_joint(model, (ids, labels), level="coarse", attention="fused")
    save(step, "step.pt2", weights=False)

Torch has a call for this, `torch.export.experimental._export_forward_backward`. It is not used: in torch 2.11 it gives
wrong gradients for attention on the CPU (it decomposes the forward and keeps the fused backward), refuses tied and
unused parameters, and loses the module that each operation came from. Here the step is traced twice instead:

1. `capture` runs the module and then autograd under `make_fx`, and tags each operation with where it comes from.
2. `_lower` replays that graph through `torch.func.functionalize` and a decomposition table, and keeps the tags.

Random operations stay operations of the graph. The backward is recorded with the forward, and uses the forward's mask.
This module needs torch, and nothing of Lighterage's compiled code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch import fx, nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
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
from torch.utils import _pytree as pytree

from . import _ragged
from ._capture import Captured, Loss, capture, is_fake, quiet, written_only
from ._compat import alone
from ._spelling import OWN
from .errors import CaptureError

aten = torch.ops.aten

Level = Literal["core", "coarse"]
Attention = Literal["math", "fused"]

# Operations that simpler ones can express. Lowering them reduces the set of operations that a reader has
# to know, and splits no real kernel: norms, softmax, losses, attention, activations and dropout stay whole if the
# compiler has an op for them. A forward and its backward are both here, or neither is.
SPELLINGS: list[Any] = [
    aten._native_batch_norm_legit.no_stats,
    aten._prelu_kernel,
    aten._prelu_kernel_backward,
    aten._safe_softmax,
    aten._unsafe_view,
    aten.arange.default,
    aten.arange.start,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.elu,
    aten.elu_backward,
    aten.empty_like,
    aten.fill,
    aten.glu,
    aten.glu_backward,
    aten.hardsigmoid,
    aten.hardsigmoid_backward,
    aten.hardswish,
    aten.hardswish_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.index_add,
    aten.log_sigmoid_backward,
    aten.log_sigmoid_forward,
    aten.masked_fill,
    aten.mish,
    aten.mish_backward,
    aten.new_empty,
    aten.new_full,
    aten.new_ones,
    aten.new_zeros,
    aten.ones,
    aten.ones_like,
    aten.pixel_shuffle,
    aten.pixel_unshuffle,
    aten.reflection_pad2d,
    aten.reflection_pad2d_backward,
    aten.rsub,
    aten.diagonal_backward,
    aten.select_backward,
    aten.slice_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.softplus,
    aten.softplus_backward,
    aten.split.Tensor,
    aten.squeeze.dim,
    aten.t,
    aten.transpose,
    aten.tril,
    aten.tril_indices,
    aten.triu,
    aten.triu_indices,
    aten.unbind,
    aten.unsafe_split,
    aten.xlogy,
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


@alone
def export_joint(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    level: Level = "coarse",
    attention: Attention = "fused",
    trainable: Callable[[nn.Parameter], bool] | None = None,
    dynamic_shapes: Sequence[Any] | None = None,
    on: torch.device | None = None,
) -> Step:
    """Trace the loss of `model(*args, **kwargs)`, and its gradients.

    loss: computes the loss of another result, `loss(model, *args, **kwargs)`. By default the model returns it.
    level: "core" has the fewest kinds of operations, "coarse" the fewest operations.
    attention: "math" spells attention out; "fused" keeps one operation forward and one backward.
    trainable: which parameters get a gradient, by default all that require one.
    dynamic_shapes: for each of `args`, None or a dict from dimension to `torch.export.Dim`.
    on: the device on which operations are recorded, by default where the tensors are.

    Raises CaptureError, with the path of a module and a remedy where they are known.
    """
    with contextlib.ExitStack() as stack:
        if attention == "math":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        shapes = dynamic_shapes
        captured = capture(model, args, kwargs, loss=loss, trainable=trainable, dynamic_shapes=shapes, on=on)
        with quiet():
            lowered = _lower(captured, _decompositions(level))
            program = _program(captured, lowered)
    info = {
        "format": "joint-step/1",
        "torch": torch.__version__,
        "level": level,
        "attention": attention,
        "tied": captured.tied,
        "dropped_parameters": captured.dropped,
        "parameters_with_gradient": captured.trained,
        "nodes": sum(node.op == "call_function" for node in program.graph.nodes),
    }
    return Step(program, info)


@alone
def save(step: Step, path: Path | str | IO[bytes], *, weights: bool = True, **extra: Any) -> None:
    """Write the step. Without weights every parameter has 0 bytes; buffers and constants are always written."""
    program = step.program if weights else _without_weights(step.program)
    present = not any(is_fake(value) for value in program.state_dict.values())
    info = {**step.info, **extra, "weights": present}
    with written_only():
        torch.export.save(program, path, extra_files={"joint_step.json": json.dumps(info)})


@contextlib.contextmanager
def weightless() -> Iterator[FakeTensorMode]:
    """Modules that are built inside have parameters without memory; buffers, such as RoPE tables, stay real.

    Tensors that are made inside the yielded mode have no memory either, and can stand for a batch.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    register = nn.Module.register_parameter

    def register_fake(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not is_fake(parameter):
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


# Lowering ------------------------------------------------------------------------------------------------------------


def coarse() -> dict[Any, Callable[..., Any]]:
    """The decompositions of graphs that are to run here."""
    table = _decompositions("coarse")
    # Invariant: an attention and its backward are both decomposed or both kept. The table has only the forward.
    table.pop(aten._scaled_dot_product_flash_attention_for_cpu.default, None)
    return table


def _decompositions(level: Level) -> dict[Any, Callable[..., Any]]:
    match level:
        case "core":  # Torch's own table keeps dropout whole; here it is a draw, a comparison and products.
            return {**core_aten_decompositions(), **get_decompositions([aten.native_dropout])}
        case "coarse":
            return {**get_decompositions(SPELLINGS), **OWN}
    raise ValueError(f"no level {level!r}; there are core and coarse")


def _lower(captured: Captured, table: dict[Any, Callable[..., Any]]) -> fx.GraphModule:
    """The same graph without mutation, aliases and the operations in `table`."""
    # Invariant: an attention and its backward are both decomposed or both kept. The table has only the forward.
    table.pop(aten._scaled_dot_product_flash_attention_for_cpu.default, None)
    values = [input.value.detach() for input in captured.inputs]
    # What autocast did is in the graph. It must not happen again.
    plain = [torch.autocast(device, enabled=False) for device in ("cpu", "cuda")]
    with torch.no_grad(), plain[0], plain[1]:
        lowered = _trace(torch.func.functionalize(_replay(captured.graph)), values, table)
    graph = lowered.graph
    for node in list(graph.nodes):
        if is_alias(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in CHECKS:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return lowered


def _replay(module: fx.GraphModule) -> Callable[..., Any]:
    """The module as a function. When it is traced, its operations get the metadata of their original nodes."""
    if _ragged.is_ragged(module.graph):
        return _ragged.Filled(module).run

    class Replay(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            with traceback.set_current_meta(n):
                return super().run_node(n)

    return Replay(module).run


def _trace(function: Callable[..., Any], values: Sequence[Any], table: dict[Any, Callable[..., Any]]) -> fx.GraphModule:
    mode = next(value.fake_mode for value in values if is_fake(value))
    with mode, enable_python_dispatcher(), traceback.preserve_node_meta():
        return make_fx(function, decomposition_table=table)(*values)


def _program(captured: Captured, lowered: fx.GraphModule) -> ExportedProgram:
    """The lowered graph under the signature of a training step: mutated buffers, the loss, the gradients."""
    graph, inputs = lowered.graph, captured.inputs
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    for input, node in zip(inputs, holders, strict=True):
        node.target = input.spec.arg.name
        node._rename(input.spec.arg.name)
    outputs, results = _outputs(graph, {node: input.spec for input, node in zip(inputs, holders, strict=True)})
    (end,) = [node for node in graph.nodes if node.op == "output"]
    loss, *gradients = end.args[0]
    results += [loss, *gradients]
    outputs.append(_output(OutputKind.LOSS_OUTPUT, loss, None))
    for name, gradient in zip(captured.trained, gradients, strict=True):
        outputs.append(_output(OutputKind.GRADIENT_TO_PARAMETER, gradient, name))
    end.args = (tuple(results),)
    for node in graph.nodes:
        keep = {"val", "custom"} if node.op == "call_function" else {"val"}
        node.meta = {key: value for key, value in node.meta.items() if key in keep}
        if "val" in node.meta:
            node.meta["val"] = written(node.meta["val"])
        if node.target is operator.getitem:
            node.meta["custom"] = node.args[0].meta["custom"]
        elif "custom" in node.meta:
            node.meta["custom"] = {**node.meta["custom"], "pure": is_pure(node.target)}
    graph.lint()  # type: ignore[no-untyped-call]
    specs = [input.spec for input in inputs]
    read = {_name(spec) for spec in specs if spec.kind != InputKind.USER_INPUT}
    return ExportedProgram(
        root=fx.GraphModule(dict(lowered.named_modules()), graph),
        graph=graph,
        graph_signature=ExportGraphSignature(specs, outputs),
        # Parameters that nothing reads stay in the table of weights, so that tied names still share one payload.
        state_dict={n: value for n, value in captured.state.items() if n in read or isinstance(value, nn.Parameter)},
        range_constraints=captured.ranges,
        module_call_graph=[_call(captured)],
        example_inputs=(captured.args, captured.kwargs),
        constants={name: value for name, value in captured.constants.items() if name in read},
    )


def written(value: Any) -> Any:
    """The type of a node's results in a file, where torch writes no uint64.

    Flash attention has the state of its dropout in this type, which nothing but its own backward reads.
    """

    def known(leaf: Any) -> Any:
        is_unknown = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.uint64
        return leaf.view(torch.int64) if is_unknown else leaf

    return pytree.tree_map(known, value)


def _outputs(graph: fx.Graph, owner: dict[fx.Node, InputSpec]) -> tuple[list[OutputSpec], list[fx.Node]]:
    """The buffers that the step changes, and their new values.

    A functional graph writes the new values of mutated inputs at its end: these writes are outputs of the step.
    """
    outputs, results = [], []
    for node in list(graph.nodes):
        if node.target == aten.copy_.default and node.args[0] in owner:
            place, value = owner[node.args[0]], node.args[1]
            if place.kind != InputKind.BUFFER:
                raise CaptureError(
                    f"the model writes to {place.target or place.arg.name}, and a step may write to buffers only; "
                    f"register_buffer makes one of a tensor in an attribute"
                )
            results.append(value)
            outputs.append(_output(OutputKind.BUFFER_MUTATION, value, place.target))
            graph.erase_node(node)
    return outputs, results


def _call(captured: Captured) -> ModuleCallEntry:
    """How the module is called, for torch's own reader. Its result is the loss."""
    arguments, loss = pytree.tree_structure((captured.args, captured.kwargs)), pytree.tree_structure(0)
    signature = ModuleCallSignature(inputs=[], outputs=[], in_spec=arguments, out_spec=loss)
    return ModuleCallEntry(fqn="", signature=signature)


def _output(kind: OutputKind, node: fx.Node, target: str | None) -> OutputSpec:
    return OutputSpec(kind=kind, arg=TensorArgument(name=node.name), target=target)


def _name(spec: InputSpec | OutputSpec) -> str:
    assert spec.target is not None, "a parameter, a buffer and a constant have names"
    return spec.target


def is_random(target: Any) -> bool:
    """Whether an operator draws numbers from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def is_alias(node: fx.Node) -> bool:
    """Whether the result of a call equals its first operand in a functional graph.

    A clone with its operand's strides does; a clone that changes them is for a later view. So does the result of
    waiting for a collective, because PyTorch has waited for it when it computes one here.
    """
    is_clone = node.target == aten.clone.default and not node.kwargs
    return node.target in ALIASES or is_clone or is_wait(node.target)


def is_collective(target: Any) -> bool:
    """Whether a call begins communication between ranks, whose result is there once somebody has waited for it."""
    return isinstance(target, OpOverload) and target.namespace == "_c10d_functional" and not is_wait(target)


def is_wait(target: Any) -> bool:
    """Whether a call waits for communication between ranks."""
    return isinstance(target, OpOverload) and target._schema.name == "_c10d_functional::wait_tensor"


def is_pure(target: Any) -> bool:
    """Whether a second call with the same operands is known to give the same bits.

    Of operators outside of PyTorch nothing is known.
    """
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    return not (is_random(target) or target._schema.is_mutable or torch.Tag.nondeterministic_bitwise in target.tags)


# Weights -------------------------------------------------------------------------------------------------------------


def _fake(parameter: nn.Parameter, mode: FakeTensorMode) -> nn.Parameter:
    with mode:
        empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _without_weights(program: ExportedProgram) -> ExportedProgram:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = {
        name: _fake(value, mode) if isinstance(value, nn.Parameter) and not is_fake(value) else value
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
