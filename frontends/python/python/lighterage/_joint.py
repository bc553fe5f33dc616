"""The graphs of `torch.compile` as files for the compiler.

AOTAutograd gives forward and backward as one functional graph, the joint graph. Here it becomes an exported program
whose parameters stay where PyTorch has them, and a description of what crosses the border between forward and backward.
"""

from __future__ import annotations

import dataclasses
import io
import re
from typing import Any

import torch
from torch import fx, nn
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
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ._capture import is_fake, written_only
from .errors import Unsupported
from .export import CHECKS, is_alias, is_collective, is_pure, is_wait, written

aten = torch.ops.aten

# Bytes by which the addresses of states are aligned: kernels read these tensors where they are.
ALIGN = 64


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a tensor of the graph comes from: a primal or a tangent by its number, or a constant."""

    kind: str  # `primal`, `tangent` or `constant`
    index: int


@dataclasses.dataclass(frozen=True)
class Result:
    """A result of the graph: the name of an output, an input that it is, or a constant such as None."""

    output: str | None = None
    source: Source | None = None
    constant: Any = None
    like: torch.Tensor | None = None  # without memory


@dataclasses.dataclass
class Joint:
    """A joint graph as a file, and what its names mean."""

    file: bytes
    graph: fx.Graph  # what is in the file
    states: dict[str, Source]
    inputs: dict[str, Source]
    late: set[str]  # inputs that come with the backward
    early: set[str]  # outputs that leave with the forward
    forward: list[Result]
    backward: list[Result]
    mutations: list[tuple[int, Result]]  # primals that the forward changes, and their new values
    constants: list[torch.Tensor]
    awaited: list[Source]  # results of collectives that other graphs or eager operations began
    nodes: int

    def given(self) -> list[tuple[str, torch.Tensor]]:
        """Names and types of what the graph reads: those on a GPU, if any are.

        A graph for a GPU may also read numbers that are on the CPU.
        """
        holders = [node for node in self.graph.nodes if node.op == "placeholder"]
        tensors = [(node.name, node.meta["val"]) for node in holders]
        return [(name, tensor) for name, tensor in tensors if tensor.is_cuda] or tensors


def joint(gm: fx.GraphModule, n_forward: int, static: set[int], paths: dict[int, str]) -> Joint | None:
    """Describe a graph whose first results are the forward's. None if it computes nothing: its results are its inputs.

    static: numbers of the primals that stay at one address from step to step: parameters and buffers.
    paths: names of primals.

    Raises Unsupported: the graph has something that no plan can express.
    """
    return _Reader(gm, n_forward, static, paths).read()


class _Reader:
    def __init__(self, gm: fx.GraphModule, n_forward: int, static: set[int], paths: dict[int, str]) -> None:
        self.gm, self.n_forward, self.static, self.paths = gm, n_forward, static, paths
        self.graph = fx.Graph()
        self.constants: list[torch.Tensor] = []
        self.states: dict[str, Source] = {}
        self.inputs: dict[str, Source] = {}
        self.specs: list[InputSpec] = []
        self.values: dict[str, torch.Tensor] = {}
        self.source: dict[fx.Node, Source] = {}
        self.made: dict[fx.Node, fx.Node] = {}
        self.mutated: list[tuple[int, fx.Node]] = []
        self.awaited: list[Source] = []

    def read(self) -> Joint | None:
        nodes = list(self.gm.graph.nodes)
        (end,) = [node for node in nodes if node.op == "output"]
        self._holders(nodes)
        for node in nodes:
            if node.op == "call_function":
                self._call(node)
        results = [self.made.get(r, r) if isinstance(r, fx.Node) else r for r in pytree.tree_leaves(end.args[0])]
        mutations = [(index, self.made[value]) for index, value in self.mutated]
        forward, backward = results[: self.n_forward], results[self.n_forward :]
        early = [r for r in [*forward, *(value for _, value in mutations)] if isinstance(r, fx.Node)]
        self._tag(early)
        outputs = self._outputs([*early, *(r for r in backward if isinstance(r, fx.Node))])
        if not outputs:
            return None
        late = {name for name, source in self.inputs.items() if source.kind == "tangent"}
        return Joint(
            file=self._file(outputs),
            graph=self.graph,
            states=self.states,
            inputs=self.inputs,
            late=late,
            early={node.name for node in early if node.name in outputs},
            forward=[self._result(r) for r in forward],
            backward=[self._result(r) for r in backward],
            mutations=[(index, self._result(value)) for index, value in mutations],
            constants=self.constants,
            awaited=list(dict.fromkeys(self.awaited)),
            nodes=sum(node.op == "call_function" for node in self.graph.nodes),
        )

    # Inputs ----------------------------------------------------------------------------------------------------------

    def _holders(self, nodes: list[fx.Node]) -> None:
        """Placeholders of the primals, the tangents and the constants, in this order."""
        mutated = {node.args[0] for node in nodes if node.op == "call_function" and node.target == aten.copy_.default}
        n_primals = n_tangents = 0
        for node in nodes:
            if node.op == "placeholder":
                if node.name.startswith("tangents"):
                    source = Source("tangent", n_tangents)
                    n_tangents += 1
                else:
                    source = Source("primal", n_primals)
                    n_primals += 1
                self._holder(node, source, node.meta.get("val"), fixed=node not in mutated)
        known: dict[int, fx.Node] = {}
        for node in nodes:
            if node.op != "get_attr":
                continue
            value = self.gm
            for part in str(node.target).split("."):
                value = getattr(value, part)
            if not isinstance(value, torch.Tensor):
                raise _refused("get_attr", node, f"{node.target} is a {type(value).__name__}, not a tensor")
            if id(value) in known:
                self.made[node] = known[id(value)]
                continue
            with _disable_current_modes():
                self.constants.append(aligned(value.detach()))
            self._holder(node, Source("constant", len(self.constants) - 1), node.meta.get("val", value), fixed=True)
            known[id(value)] = self.made[node]

    def _holder(self, node: fx.Node, source: Source, value: Any, *, fixed: bool) -> None:
        if not isinstance(value, torch.Tensor):
            if node.users:
                raise _refused(
                    "placeholder", node, f"is {value!r}: sizes should be known; torch.compile(dynamic=False)"
                )
            return
        if not node.users:
            return
        name = re.sub(r"\W", "_", node.name)
        made = self.graph.placeholder(name)
        made.meta = {"val": value}
        self.made[node], self.source[made] = made, source
        is_static = source.kind == "constant" or (source.kind == "primal" and source.index in self.static)
        if is_static and fixed and value.is_contiguous() and value.numel():
            path = self.paths.get(source.index, name) if source.kind == "primal" else f"constant_{source.index}"
            while path in self.states:
                path += "_"
            self.states[path] = source
            self.values[path] = value
            self.specs.append(InputSpec(InputKind.PARAMETER, TensorArgument(name=made.name), path))
        else:
            self.inputs[made.name] = source
            self.specs.append(InputSpec(InputKind.USER_INPUT, TensorArgument(name=made.name), None))

    # Calls -----------------------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> None:
        if node.target == aten.copy_.default and self.made.get(_operand(node)) in self.source:
            place, value = _operand(node), node.args[1]
            source = self.source[self.made[place]]
            if source.kind != "primal" or not isinstance(value, fx.Node):
                raise _refused(str(node.target), node, "writes to what is no input")
            self.mutated.append((source.index, value))
            self.made[node] = self.made[value]
            return
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            raise _refused(str(node.target), node, "changes its operand, and the graph should be functional")
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            # What changes its operands comes wrapped, with its name as the first argument.
            name = next((str(a) for a in node.args if isinstance(a, torch._ops.OpOverload)), str(node.target))
            changes = "changes its operand, and the graph should be functional"
            raise _refused(name, node, changes if name != str(node.target) else "is an operation over functions")
        if is_wait(node.target):
            self._wait(self.made[_operand(node)])
        if is_alias(node):
            self.made[node] = self.made[_operand(node)]
        elif node.target not in CHECKS:
            made = self.graph.node_copy(node, lambda operand: self.made[operand])
            made.meta = {
                "val": written(node.meta.get("val")),
                "custom": {"path": _path(node)},
                "seq_nr": node.meta.get("seq_nr"),
            }
            self.made[node] = made

    def _wait(self, node: fx.Node) -> None:
        """Note the input that a part should wait for before it begins: the node is one, or a view of one.

        The graph's own collectives are complete when they return.
        """
        while node not in self.source and node.all_input_nodes and not is_collective(node.target):
            node = node.all_input_nodes[0]
        if node in self.source:
            self.awaited.append(self.source[node])

    def _tag(self, early: list[fx.Node]) -> None:
        """Give each call its phase, and calls of the backward the module of their forward."""
        needed, stack = set(), list(early)
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack += node.all_input_nodes
        paths: dict[int, str] = {}
        for node in self.graph.nodes:
            if node.op == "call_function" and node in needed and node.meta["seq_nr"] is not None:
                paths[node.meta["seq_nr"]] = node.meta["custom"]["path"]
        for node in self.graph.nodes:
            if node.op == "call_function":
                number = node.meta.pop("seq_nr")
                is_early = node in needed
                path = node.meta["custom"]["path"] if is_early else paths.get(number, "")
                seq = -1 if number is None else number
                phase, pure = "fwd" if is_early else "bwd", is_pure(node.target)
                node.meta["custom"] = {"phase": phase, "path": path, "seq": seq, "pure": pure}

    # Outputs ---------------------------------------------------------------------------------------------------------

    def _outputs(self, results: list[fx.Node]) -> list[str]:
        """The names of what the step computes."""
        computed = dict.fromkeys(node for node in results if node not in self.source)
        self.graph.output(tuple(computed))
        return [node.name for node in computed]

    def _result(self, result: Any) -> Result:
        if not isinstance(result, fx.Node):
            return Result(constant=result)
        value = result.meta["val"]
        if result in self.source:
            return Result(source=self.source[result], like=value)
        return Result(output=result.name, like=value)

    # The file --------------------------------------------------------------------------------------------------------

    def _file(self, outputs: list[str]) -> bytes:
        self.graph.eliminate_dead_code()
        self.graph.lint()  # type: ignore[no-untyped-call]
        tensors = [node.meta["val"] for node in self.graph.nodes if node.op == "placeholder"]
        mode = next((t.fake_mode for t in tensors if is_fake(t)), FakeTensorMode(allow_non_fake_inputs=True))
        weights: dict[str, torch.Tensor | nn.Parameter] = {p: _weight(value, mode) for p, value in self.values.items()}
        spec = pytree.tree_structure(((), {}))
        call = ModuleCallEntry(
            fqn="",
            signature=ModuleCallSignature(inputs=[], outputs=[], in_spec=spec, out_spec=pytree.tree_structure(0)),
        )
        kind = OutputKind.USER_OUTPUT
        program = ExportedProgram(
            root=fx.GraphModule({}, self.graph),
            graph=self.graph,
            graph_signature=ExportGraphSignature(
                self.specs, [OutputSpec(kind=kind, arg=TensorArgument(name=name), target=None) for name in outputs]
            ),
            state_dict=weights,
            range_constraints={},
            module_call_graph=[call],
            example_inputs=((), {}),
            constants={},
        )
        file = io.BytesIO()
        try:
            with written_only():
                torch.export.save(program, file)
        except Exception as error:  # of many kinds: an argument that files cannot hold
            raise Unsupported(f"torch.export cannot write the graph: {type(error).__name__}: {error}") from error
        return file.getvalue()


def _weight(value: torch.Tensor, mode: FakeTensorMode) -> nn.Parameter:
    with mode:
        return nn.Parameter(torch.empty(value.shape, dtype=value.dtype), requires_grad=False)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at an address that kernels can work on."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGN == 0:
        return tensor
    room = torch.empty(tensor.numel() * tensor.element_size() + ALIGN, dtype=torch.uint8, device=tensor.device)
    start = -room.data_ptr() % ALIGN
    place = room[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
    return place.copy_(tensor)


def _operand(node: fx.Node) -> fx.Node:
    """The first operand of a call over tensors."""
    operand = node.args[0]
    assert isinstance(operand, fx.Node), "the first operand is a tensor"
    return operand


def _path(node: fx.Node) -> str:
    """The module that made a call of the forward."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [name for name, _ in stack.values()]
    return module_path(names[-1]) if names else ""


def module_path(name: str) -> str:
    """`h.0.mlp` of the name by which Dynamo knows a module or a tensor: `L['self']._modules['h'][0].mlp`."""
    name = re.sub(r"^L\['self'\]\.?", "", name)
    name = re.sub(r"_(modules|parameters|buffers)\['([^']*)'\]", r"\2", name)
    name = re.sub(r"\[['\"]?([^'\"\]]*)['\"]?\]", r".\1", name)
    return name.strip(".")


def _refused(target: str, node: fx.Node, why: str) -> Unsupported:
    path = _path(node)
    place = f" in {path}" if path else ""
    message = f"the step calls what has no kernel:\n  {target}{place} (node {node.name}): {why}"
    return Unsupported(message, [(target, node.name, path, why)])
