"""Record one training step of a live module: the loss, and autograd's gradients, in one graph.

The module itself runs, under `make_fx`, with parameters and inputs that have no memory. So everything that autograd
does in eager mode is in the graph: `torch.autograd.Function`, hooks of tensors and modules, autocast. `torch.export`
would drop the first two. Each operation is tagged with its phase, its autograd sequence number and the module that
made it; backward operations get those of their forward.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch._decomp import decompositions
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._dynamo.eval_frame import OptimizedModule
from torch._export.serde import serialize
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import stateless
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import _pytree as pytree

from . import _compat
from ._spelling import zero_tensor
from ._values import Refusal, unread
from .errors import CaptureError, Error, unsupported

Tag = dict[str, Any]
# The loss of a model for a batch: loss(model, *args, **kwargs).
Loss = Callable[..., torch.Tensor]

# The tables of a module's hooks.
HOOKS = {name for name in vars(nn.Module()) if name.startswith("_forward_") and "hooks" in name}


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of a recorded step: a parameter, a buffer, a constant or a tensor of the batch."""

    spec: InputSpec
    value: torch.Tensor  # without memory


@dataclasses.dataclass(frozen=True)
class Captured:
    """A recorded step. Its graph has a placeholder for each input, and gives the loss, then the gradients."""

    graph: fx.GraphModule
    inputs: list[Input]
    trained: list[str]  # parameters with a gradient, in its order
    dropped: list[str]  # parameters that nothing reads
    tied: list[list[str]]  # groups of names of one parameter
    state: dict[str, torch.Tensor]  # parameters and buffers, by every name
    constants: dict[str, torch.Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ranges: dict[Any, Any]  # of symbolic sizes


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    trainable: Callable[[nn.Parameter], bool] | None = None,
    dynamic_shapes: Sequence[Any] | None = None,
    on: torch.device | None = None,
) -> Captured:
    """Record `loss(model, *args, **kwargs)` and its gradients.

    loss: by default the model is called, and its result is the loss, or has it as `loss`.
    trainable: which parameters get a gradient, by default those that require one.
    dynamic_shapes: for each of `args`, None or a dict from dimension to `torch.export.Dim`.
    on: the device on which operations are recorded, by default where the tensors are.

    Raises CaptureError: the model cannot be traced, or keeps state where a trace cannot follow.
    """
    _compat.check()
    _refuse_compiled(model)
    _refuse_wrappers(model)
    tied = _tied(model)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    batch = _Batch.of(signature(model, loss), tuple(args), dict(kwargs or {}))
    mode, values, ranges = _fakes(batch.tensors, dynamic_shapes, on)
    owned = {name: _fake(value, mode, on) for name, value in {**parameters, **buffers}.items()}
    may_train = trainable or (lambda parameter: True)
    candidates = [name for name, p in parameters.items() if p.requires_grad and may_train(p)]
    specs = [_spec(InputKind.PARAMETER, "p_", name) for name in parameters]
    specs += [_spec(InputKind.BUFFER, "b_", name) for name in buffers]
    specs += [InputSpec(InputKind.USER_INPUT, TensorArgument(name=name), None) for name in batch.names]
    step = _Step(model, loss or call_model, batch, list(owned), candidates)
    with _unchanged(model, step.stand_ins), _without_checkpointing(model):
        graph = _record(step, [*owned.values(), *values], mode)
        if draws_in_attention(graph.graph):
            with attention_in_parts():
                graph = _record(step, [*owned.values(), *values], mode)
    _refuse_calls(graph.graph)
    inputs = [Input(spec, value) for spec, value in zip(specs, [*owned.values(), *values], strict=True)]
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    inputs, constants = _constants_to_inputs(graph, inputs, model, mode)
    inputs, dropped = _used(graph, inputs)
    _tag_paths(graph.graph)
    return Captured(
        graph, inputs, step.trained, dropped, tied, state, constants, tuple(args), dict(kwargs or {}), ranges
    )


def call_model(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The loss that the model returns: a scalar, or what a result of Hugging Face's models has as `loss`."""
    result = model(*args, **kwargs)
    if isinstance(result, Mapping):
        result = result.get("loss", result)
    elif not isinstance(result, torch.Tensor):
        result = getattr(result, "loss", result)
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        raise CaptureError("the model should return one scalar, its loss; `loss_fn` computes one of another result")
    return result


# The batch -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Batch:
    """The arguments of a step. Tensors become inputs, and everything else stays as it is."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    names: list[str]  # of the tensors

    @staticmethod
    def of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Batch:
        named = names_of(signature, args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        names = [name for name, leaf in zip(named, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
        batch = _Batch(leaves, spec, names)
        tensors = [id(tensor) for tensor in batch.tensors]
        if len(set(tensors)) < len(tensors):
            raise CaptureError("two of the step's inputs are one tensor, and tracing would make them one input")
        return batch

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


def names_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """A name for each leaf of the arguments: that of its parameter, and the path in it."""
    positional = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    paths: list[tuple[Any, ...]] = [path for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]
    names: list[str] = []
    for path in paths:
        keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path[1:]]
        if path[0].idx == 0 and path[1].idx < len(positional):
            keys[0] = positional[path[1].idx].name
        elif path[0].idx == 0:
            keys[0] = f"args_{keys[0]}"
        name = re.sub(r"\W", "_", "_".join(keys))
        while name in names:
            name += "_"
        names.append(name)
    return names


def signature(model: nn.Module, loss: Loss | None) -> inspect.Signature:
    """The parameters of the batch."""
    if loss is None:
        return inspect.signature(model.forward)
    signature = inspect.signature(loss)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _fakes(
    tensors: list[torch.Tensor], dynamic_shapes: Sequence[Any] | None, on: torch.device | None
) -> tuple[FakeTensorMode, list[torch.Tensor], dict[Any, Any]]:
    """Tensors of the same types without memory, their mode, and the ranges of symbolic sizes."""
    if dynamic_shapes is None:
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        return mode, [_fake(tensor, mode, on) for tensor in tensors], {}

    class Symbols(nn.Module):
        """Torch's exporter gives equal `Dim`s one symbol, and knows their ranges."""

        def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
            return [tensor + 1 for tensor in tensors]

    program = torch.export.export(Symbols(), tuple(tensors), dynamic_shapes=(tuple(dynamic_shapes),), strict=False)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    mode = values[0].fake_mode
    mode.allow_non_fake_inputs = True
    return mode, values, dict(program.range_constraints)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, on: torch.device | None = None) -> torch.Tensor:
    device = on or tensor.device
    with mode:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return empty.requires_grad_(tensor.requires_grad)


def _spec(kind: InputKind, prefix: str, name: str) -> InputSpec:
    argument = TensorArgument(name=prefix + re.sub(r"\W", "_", name))
    return InputSpec(kind, argument, name, persistent=True if kind == InputKind.BUFFER else None)


def _tied(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


# What a trace cannot follow ------------------------------------------------------------------------------------------


def _refuse_compiled(model: nn.Module) -> None:
    """Refuse what torch.compile has compiled: it would be traced twice, and Dynamo's code is not what a trace needs."""
    for name, module in model.named_modules():
        whose = f"the module {name}" if name else "the model"
        if isinstance(module, OptimizedModule):
            raise CaptureError(
                f"{whose} is compiled by torch.compile: give the one that is not compiled, its `_orig_mod`"
            )
        if module._compiled_call_impl is not None:
            raise CaptureError(f"{whose} is compiled in place, by compile(): give one that is not compiled")


# Classes of modules with parameters that several processes train.
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def _refuse_wrappers(model: nn.Module) -> None:
    """Refuse what acts on gradients where they arrive in `grad`: a step has gradients, but no `grad`.

    So do wrappers that average gradients over processes, or divide parameters between them.
    """
    instead = "module.compile(backend='lighterage') plans the activations of such a model: docs/python.md"
    for name, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__name__ in WRAPPERS]
        if kinds:
            raise CaptureError(
                f"{name or 'the model'}: a step exchanges nothing with other processes, as {kinds[0]} would. {instead}"
            )
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise CaptureError(f"{name}: a step has no parts of other processes, as a DTensor would. {instead}")
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"{name} has a hook for its accumulated gradient (register_post_accumulate_grad_hook), which a step "
                f"would not call. Hooks of register_hook become a part of the step; so does the update"
            )


@contextlib.contextmanager
def _unchanged(model: nn.Module, stand_ins: list[torch.Tensor]) -> Iterator[None]:
    """Refuse a model whose forward replaces tensors in plain attributes: a trace would freeze their values.

    stand_ins: what the trace had for parameters and buffers. Attributes that list them may change: nn.LSTM has one.
    The attributes get their former values back in any case, so that no tensor without memory stays in the model.
    """
    before = {module: dict(vars(module)) for module in model.modules()}
    # Models of transformers add hooks in their first call, and an attribute that says so.
    hooks = [(table, dict(table)) for module in before for name, table in vars(module).items() if name in HOOKS]
    leaves = {module: _attributes(module) for module in before}
    failed = True
    try:
        yield
        failed = False
    finally:
        names = {module: name for name, module in model.named_modules()}
        known = {id(tensor) for tensor in stand_ins}
        changed = []
        for module, values in before.items():
            after = _attributes(module)
            for path, leaf in {**leaves[module], **after}.items():
                was, now = leaves[module].get(path), after.get(path)
                if was is not now and id(now) not in known and _is_state(leaf, was):
                    changed.append((f"{names[module]}.{path}".lstrip("."), leaf))
            for attribute in set(vars(module)) - set(values):
                del vars(module)[attribute]
            vars(module).update(values)
        for table, kept in hooks:
            table.clear()
            table.update(kept)
        if not failed:
            _refuse(changed)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Tensors and numbers in plain attributes, also in lists and dicts, by their path."""
    found = {}
    # `torch.nn.utils.weight_norm` computes its attribute anew before each call of the module.
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, (WeightNorm, SpectralNorm))]
    computed = {hook.name for hook in hooks}
    for name, value in vars(module).items():
        if name in computed or (name.startswith("_") and name in nn.Module().__dict__):
            continue
        if isinstance(value, (torch.Tensor, int, float)):
            found[name] = value
        elif isinstance(value, (list, tuple, dict)):
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                if isinstance(leaf, (torch.Tensor, int, float)):
                    found[name + pytree.keystr(path)] = leaf
    return found


def _is_state(leaf: Any, before: Any) -> bool:
    """A tensor, or a number with another value."""
    return isinstance(leaf, torch.Tensor) or isinstance(before, torch.Tensor) or leaf != before


def _refuse(changed: list[tuple[str, Any]]) -> None:
    tensors = [path for path, leaf in changed if isinstance(leaf, torch.Tensor)]
    if tensors:
        more = f", and {len(tensors) - 1} others" if len(tensors) > 1 else ""
        raise CaptureError(
            f"{tensors[0]}{more}: forward() keeps a tensor in a plain attribute, which a trace would freeze. "
            f"Make it a buffer (register_buffer) and write to it in place, or do not keep it in forward()"
        )
    if changed:
        warnings.warn(
            f"{changed[0][0]}: forward() changes a number in a plain attribute; the compiled step uses the value of "
            f"the traced call in every step",
            stacklevel=2,
        )


@contextlib.contextmanager
def _without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Record the plain forward where the model asks for recomputation: what is recomputed is the plan's decision."""

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return function(*args)

    def nothing(*_: Any, **__: Any) -> Iterator[None]:
        yield

    patches: dict[str, Any] = dict.fromkeys(_compat.checkpoint_generators(), nothing)
    with mock.patch.multiple(torch.utils.checkpoint, CheckpointFunction=Plain, **patches):
        yield


# Forward and backward in one graph -----------------------------------------------------------------------------------


class _Step:
    """The step as a function of parameters, buffers and the tensors of the batch."""

    def __init__(self, model: nn.Module, loss: Loss, batch: _Batch, owned: list[str], candidates: list[str]) -> None:
        self.model, self.loss, self.batch, self.owned, self.candidates = model, loss, batch, owned, candidates
        self.trained: list[str] = []
        self.stand_ins: list[torch.Tensor] = []
        self.failed_in: str | None = None
        # Hooks of parameters, which their stand-ins get.
        self.hooks = {name: list((p._backward_hooks or {}).values()) for name, p in model.named_parameters()}
        names = {id(tensor): name for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
        # Each module once: where one module has two names, a swap of both would leave the second's stand-in behind.
        self.names = {
            f"{prefix}.{key}" if prefix else key: names[id(tensor)]
            for prefix, module in model.named_modules()
            for table in (module._parameters, module._buffers)
            for key, tensor in table.items()
            if tensor is not None
        }

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        given = dict(zip(self.owned, values, strict=False))
        self.stand_ins[:] = given.values()
        args, kwargs = self.batch.filled(values[len(self.owned) :])
        stand_ins = {alias: given[name] for alias, name in self.names.items()}
        with stateless._reparametrize_module(self.model, stand_ins), self._paths():
            loss = self.loss(self.model, *args, **kwargs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise CaptureError("the loss should be one scalar")
        if loss.grad_fn is None:
            raise CaptureError("the loss depends on no parameter that requires a gradient")
        for name in self.candidates:
            for hook in self.hooks[name]:
                given[name].register_hook(hook)  # type: ignore[no-untyped-call]
        _tag_backward(loss.grad_fn)
        with _compat.annotate({"phase": "bwd"}):
            gradients = torch.autograd.grad(loss, [given[name] for name in self.candidates], allow_unused=True)
        reached = [(n, g) for n, g in zip(self.candidates, gradients, strict=True) if g is not None]
        self.trained[:] = [name for name, _ in reached]
        return [loss.detach(), *(gradient for _, gradient in reached)]

    @contextlib.contextmanager
    def _paths(self) -> Iterator[None]:
        """Operations of the forward get the module that makes them."""
        paths = {module: name for name, module in self.model.named_modules()}
        stack: list[str] = [""]

        def tag() -> None:
            traceback.get_current_meta().update(custom={"phase": "fwd", "path": stack[-1]})

        def enter(module: nn.Module, _: Any) -> None:
            stack.append(paths.get(module, stack[-1]))
            tag()

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            stack.pop()
            tag()

        hooks = []
        for module in paths:
            hooks.append(module.register_forward_pre_hook(enter, prepend=True))
            hooks.append(module.register_forward_hook(leave))
        tag()
        try:
            yield
        except Exception:
            # The hooks of the modules that failed have not run.
            self.failed_in = stack[-1]
            raise
        finally:
            for hook in hooks:
                hook.remove()


def _record(step: _Step, values: Sequence[torch.Tensor], mode: FakeTensorMode) -> fx.GraphModule:
    """The joint graph of the loss and the gradients, in autograd's own operations."""
    with (
        quiet(),
        mode,
        enable_python_dispatcher(),
        traceback.preserve_node_meta(),
        # Libraries then take the ways that can be traced, such as masks without a look at their values.
        _compiling_state_context(),
        unread(),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
        as_planned(),
    ):
        try:
            graph = make_fx(step, {torch.ops.aten._efficientzerotensor.default: zero_tensor})(*values)
        except (GuardOnDataDependentSymNode, DynamicOutputShapeException, DataDependentOutputException) as error:
            raise CaptureError(
                f"in {step.failed_in or 'the model'}: what runs next depends on the values of tensors, and a plan is "
                f"made before there are any ({str(error).splitlines()[0]}). Known cases: LayerDrop in train mode (set "
                f"it to 0); a loop over experts (transformers: model.set_experts_implementation('grouped_mm')); "
                f"`if tensor.max() > ...`"
            ) from error
        except Refusal as error:
            raise CaptureError(f"in {step.failed_in or 'the model'}: {error}") from error
        except (Error, torch.OutOfMemoryError):
            raise
        except Exception as error:
            text = str(error).splitlines() or [""]
            raise CaptureError(
                f"in {step.failed_in or 'the model'}: the model cannot be traced ({type(error).__name__}: {text[0]})"
            ) from error
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.meta["custom"] = dict(node.meta.get("custom") or {"phase": "fwd", "path": ""})
            node.meta.setdefault("seq_nr", -1)
    return graph


def draws_in_attention(graph: fx.Graph) -> bool:
    """Whether an attention that is one operation drops some of its weights, as it may on a GPU.

    Which ones only PyTorch's kernel knows. Attention in parts has a dropout that is an operation like any other, and
    becomes one operation again when the graph is simplified.
    """
    return any(_dropout_of(node) > 0 for node in graph.nodes if node.op == "call_function")


def _dropout_of(node: fx.Node) -> float:
    names: tuple[str, ...]
    if node.target is torch._C._nn.scaled_dot_product_attention:
        names = ("query", "key", "value", "attn_mask", "dropout_p")
    elif isinstance(node.target, torch._ops.OpOverload) and "scaled_dot_product" in node.target._schema.name:
        names = tuple(argument.name for argument in node.target._schema.arguments)
    else:
        return 0.0
    at = names.index("dropout_p") if "dropout_p" in names else len(node.args)
    value = node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _refuse_calls(graph: fx.Graph) -> None:
    """Refuse calls that cannot be made functional, or that no plan can have.

    Raises Unsupported.
    """
    found = []
    for node in graph.nodes:
        why, target = None, node.target
        # PyTorch knows what its own operators do without changing an operand.
        is_foreign = isinstance(target, torch._ops.OpOverload) and target.namespace != "aten"
        if isinstance(target, torch._ops.HigherOrderOperator):
            why = "it is an operation over functions, not over tensors"
        elif is_foreign and target._schema.is_mutable:
            why = "it changes an operand: a step is made of calls that change nothing"
        elif is_foreign and target.namespace == "c10d":
            why = "it exchanges tensors in place; torch.distributed._functional_collectives has calls for a step"
        tensors = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
        if any(tensor.layout != torch.strided for tensor in tensors) and node.op == "call_function":
            why = "a result of it is sparse, and only dense tensors have a place"
        if why is not None:
            found.append((str(node.target), node.name, node.meta["custom"].get("path", ""), why))
    if found:
        raise unsupported(found)


def _constants_to_inputs(
    graph: fx.GraphModule, inputs: list[Input], model: nn.Module, mode: FakeTensorMode
) -> tuple[list[Input], dict[str, torch.Tensor]]:
    """Make inputs of the tensors that tracing met outside of parameters and buffers. They come before the batch."""
    paths = {
        id(leaf): f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name, leaf in _attributes(module).items()
        if isinstance(leaf, torch.Tensor)
    }
    at = next((i for i, input in enumerate(inputs) if input.spec.kind == InputKind.USER_INPUT), len(inputs))
    holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    end = next(node for node in graph.graph.nodes if node.op != "placeholder")
    before = holders[at] if at < len(holders) else end
    constants: dict[str, torch.Tensor] = {}
    made: dict[int, fx.Node] = {}
    lifted = []
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        value = getattr(graph, node.target)
        if id(value) not in made:
            name = paths.get(id(value), f"lifted_tensor_{len(constants)}")
            spec = _spec(InputKind.CONSTANT_TENSOR, "c_", name)
            with graph.graph.inserting_before(before):
                made[id(value)] = graph.graph.placeholder(spec.arg.name)
            constants[name] = value
            lifted.append(Input(spec, _fake(value, mode)))
        node.replace_all_uses_with(made[id(value)])
        graph.graph.erase_node(node)
    graph.recompile()
    return [*inputs[:at], *lifted, *inputs[at:]], constants


def _used(graph: fx.GraphModule, inputs: list[Input]) -> tuple[list[Input], list[str]]:
    """The inputs that the step keeps, and the parameters that nothing reads.

    Tensors of the batch stay, read or not: they are the order of the step's arguments.
    """
    holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    kept, dropped = [], []
    for input, holder in zip(inputs, holders, strict=True):
        if holder.users or input.spec.kind == InputKind.USER_INPUT:
            kept.append(input)
            continue
        graph.graph.erase_node(holder)
        if input.spec.kind == InputKind.PARAMETER:
            assert input.spec.target is not None, "a parameter has a name"
            dropped.append(input.spec.target)
    graph.recompile()
    return kept, dropped


# Tags ----------------------------------------------------------------------------------------------------------------


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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
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


@contextlib.contextmanager
def written_only() -> Iterator[None]:
    """Save exported programs without what torch does beside.

    It brings a copy into a canonical form, which it throws away, and prints the graph for a log that is not written.
    Of a large graph this takes two thirds of the time.
    """

    def nothing(*_: Any, **__: Any) -> str:
        return ""

    with (
        quiet(),
        mock.patch.object(serialize, "canonicalize", nothing),
        mock.patch.object(fx.GraphModule, "print_readable", nothing),
    ):
        yield


class _Layers(int):
    """The number of recurrent layers, in a function of torch's."""

    def __lt__(self, _: int) -> bool:
        """True: torch (2.11) asks here whether a layer is followed by a dropout, and has both sides exchanged."""
        return True


@contextlib.contextmanager
def attention_in_parts() -> Iterator[None]:
    """Trace attention as products, a softmax and a dropout, in the type of its operands.

    By default torch casts operands in half precision to f32 for it. Here the parts become one kernel, which computes in
    f32 by itself.
    """
    allows = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allows)


@contextlib.contextmanager
def recurrent_in_parts() -> Iterator[None]:
    """Trace layers of nn.LSTM as many operations: oneDNN's one operation for each has no counterpart.

    torch's own decomposition (2.11) has no dropout between layers, and leaves a dimension of size 1 in the last states
    of a batch. Here it is as the layer.
    """
    # `torch.backends.mkldnn.flags` would set other flags too, and warn about them.
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    helper, one_layer = decompositions._rnn_helper, decompositions.one_layer_lstm

    def with_dropout(x: Any, hidden: Any, params: Any, biases: Any, num_layers: int, *rest: Any) -> Any:
        return helper(x, hidden, params, biases, _Layers(num_layers), *rest)  # type: ignore[no-untyped-call]

    def with_states(*args: Any, **kwargs: Any) -> Any:
        out, states = one_layer(*args, **kwargs)  # type: ignore[no-untyped-call]
        return out, tuple(state.squeeze(0) if state.dim() == 3 else state for state in states)

    try:
        with (
            mock.patch.object(decompositions, "_rnn_helper", with_dropout),
            mock.patch.object(decompositions, "one_layer_lstm", with_states),
        ):
            yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextlib.contextmanager
def determinants_of_rows() -> Iterator[None]:
    """Trace determinants of matrices whose rows are contiguous.

    PyTorch factorizes a matrix or its transpose, as its memory has rows or columns, and the derivative is that of
    the one or the other. In a plan every matrix has rows.
    """
    with contextlib.ExitStack() as stack:
        for op in (torch.ops.aten._linalg_det.default, torch.ops.aten._linalg_slogdet.default):

            def of_rows(matrix: torch.Tensor, op: Any = op) -> Any:
                matrix = matrix.contiguous()
                with no_python_dispatcher():
                    return op(matrix)

            keys = (torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradCUDA)
            stack.callback(op._dispatch_cache.clear)
            stack.enter_context(mock.patch.dict(op.py_kernels, dict.fromkeys(keys, of_rows)))
            op._dispatch_cache.clear()
        yield


@contextlib.contextmanager
def as_planned() -> Iterator[None]:
    """Trace layers as a plan computes them."""
    with recurrent_in_parts(), determinants_of_rows():
        yield


def is_fake(tensor: torch.Tensor) -> bool:
    """True if the tensor has no memory."""
    return isinstance(tensor, FakeTensor)
