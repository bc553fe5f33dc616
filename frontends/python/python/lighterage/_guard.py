"""What a step was compiled for: the structure of its batches, the modules, the parameters and buffers.

A check before each step has two forms. The whole one names what differs, or takes back what moved. The short one only
says that nothing has changed since the whole one passed. It compares identities, addresses and flags in lists that were
prepared then, which takes nanoseconds for each.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ._capture import Loss, names_of, signature
from ._lighterage import have, have_at
from .errors import ShapeError, StaleError

_requires_grad = operator.attrgetter("requires_grad")
_hooks_of = operator.attrgetter("_backward_hooks")
# The most letters of a value that an error shows; of a longer one it shows the type. And the most parts of a batch.
MOST_TOLD, MOST_LISTED = 40, 8
# A module's tables of hooks.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Places:
    """The objects in some dicts and lists, and the addresses of some tensors, as they were at one moment."""

    def __init__(self, tables: list[dict[Any, Any]], lists: list[list[Any]], tensors: list[torch.Tensor]) -> None:
        self._tables, self._lists = tables, lists
        self._objects = [*chain.from_iterable(map(dict.values, tables)), *chain.from_iterable(lists)]
        self._tensors = list[torch.Tensor | int](tensors)
        self._addresses: list[int | None] = [tensor.data_ptr() for tensor in tensors]
        self._numbers = list(range(len(tensors)))

    def are_same(self) -> bool:
        """Whether all of them are still the same objects, and lie at the same addresses."""
        return have(self._tables, self._lists, self._objects) and torch._C._tensors_data_ptrs_at_indices_equal(
            self._tensors, self._addresses, self._numbers
        )


class Guard:
    """The modules, parameters and buffers of a compiled model."""

    def __init__(self, model: nn.Module, views: dict[str, torch.Tensor]) -> None:
        """Copy the parameters and buffers into the step's memory, and let them lie there.

        views: the places of parameters and buffers in that memory, by path.
        """
        self.bound = [Bound.of(model, path, view) for path, view in views.items()]
        self._tensors = [bound.tensor for bound in self.bound]
        self._flags = [bound.requires_grad for bound in self.bound]
        self._modules = [(path, module, module.training) for path, module in model.named_modules()]
        self._live = [module for _, module, _ in self._modules]
        # Modules without a mode of their own, such as those that torch.compile returns, have that of another one.
        self._attributes = [vars(module) for module in self._live if "training" in vars(module)]
        self._modes = [attributes["training"] for attributes in self._attributes]
        self._children = [(path, module, list(module._modules.items())) for path, module, _ in self._modules]
        self._hooks = self._called()
        for bound in self.bound:
            bound.bind()
        self._note()

    def _note(self) -> None:
        # Each hook that is added takes a number from this count. So tables without hooks need no look before each step.
        self._n_hooks = RemovableHandle.next_id
        tables: list[dict[Any, Any]] = [table for table in map(_hooks_of, self._tensors) if table]
        for module in self._live:
            tables.append(module._modules)
            others = [module._parameters, module._buffers, *(getattr(module, name) for name in _HOOKS)]
            tables += [table for table in others if table]
        self._places = Places(tables, [], self._tensors)

    def _called(self) -> list[tuple[str, list[Any]]]:
        """The hooks of each module and each parameter."""
        hooks = [
            (path, [hook for name in _HOOKS for hook in getattr(module, name).values()])
            for path, module, _ in self._modules
        ]
        hooks += [(bound.path, list((_hooks_of(bound.tensor) or {}).values())) for bound in self.bound]
        # Models of transformers add hooks in their first call, which note what modules return.
        return [(path, [h for h in found if not _module_of(h).startswith("transformers.")]) for path, found in hooks]

    def check(self) -> None:
        """Refuse a model that is not the one that was compiled, and take back what moved.

        Raises StaleError.
        """
        if (
            RemovableHandle.next_id == self._n_hooks
            and self._places.are_same()
            and have_at(self._attributes, "training", self._modes)
            and list(map(_requires_grad, self._tensors)) == self._flags
        ):
            return
        self._check_modules()
        for bound in self.bound:
            bound.check()
        for (path, were), (_, are) in zip(self._hooks, self._called(), strict=True):
            if list(map(id, were)) != list(map(id, are)):
                raise StaleError(
                    f"{path or 'the model'} has other hooks than when the step was compiled, and the step would not "
                    f"call them; compile again"
                )
        self._note()

    def _check_modules(self) -> None:
        for path, module, training in self._modules:
            if module.training != training:
                mode = "train" if training else "eval"
                raise StaleError(f"{path or 'the model'} was compiled in {mode} mode: call {mode}(), or compile again")
        for path, module, children in self._children:
            if names := _changed(children, module._modules.items()):
                paths = ", ".join(f"{path}.{name}" if path else name for name in names)
                raise StaleError(f"{paths}: another module than when the step was compiled; compile again")


def _module_of(function: Any) -> str:
    return str(getattr(function, "__module__", ""))


def _changed(before: Iterable[tuple[str, Any]], now: Iterable[tuple[str, Any]]) -> list[str]:
    """Names of modules that were added, removed or replaced."""
    old, new = dict(before), dict(now)
    return [name for name in old | new if old.get(name) is not new.get(name)]


@dataclasses.dataclass
class Bound:
    """A parameter or a buffer of the model, and its place in the step's memory."""

    path: str
    table: dict[str, torch.Tensor | None]  # of its module
    key: str
    tensor: torch.Tensor
    view: torch.Tensor
    requires_grad: bool
    is_buffer: bool

    @staticmethod
    def of(model: nn.Module, path: str, view: torch.Tensor) -> Bound:
        """The parameter or buffer of this path."""
        prefix, _, key = path.rpartition(".")
        module = model.get_submodule(prefix)
        is_buffer = key in module._buffers
        table: dict[str, Any] = module._buffers if is_buffer else module._parameters
        tensor = table[key]
        return Bound(path, table, key, tensor, view, tensor.requires_grad, is_buffer)

    def bind(self) -> None:
        """Copy the value into the step's memory, and let the tensor lie there."""
        self.view.copy_(self.tensor.detach())
        self.tensor.data = self.view

    def check(self) -> None:
        """Raise StaleError if the tensor is another one now, and take it back if it only moved."""
        if self.table.get(self.key) is not self.tensor:
            raise StaleError(
                f"{self.path} is another tensor than when the step was compiled (load_state_dict(assign=True) and "
                f"assignments do that); copy into it in place, or compile again"
            )
        if self.tensor.requires_grad != self.requires_grad:
            raise StaleError(
                f"{self.path}.requires_grad is {self.tensor.requires_grad}, and the step was compiled with "
                f"{self.requires_grad}; compile again"
            )
        if self.tensor.data_ptr() == self.view.data_ptr():
            return
        if (self.tensor.shape, self.tensor.dtype) != (self.view.shape, self.view.dtype):
            raise StaleError(
                f"{self.path} is {_type(self.tensor)} now, and the step was compiled for {_type(self.view)}; "
                f"compile again"
            )
        self.bind()


class Batch:
    """The structure of a batch, and the names of its tensors."""

    def __init__(self, model: nn.Module, loss_fn: Loss | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._given = _described(args, kwargs)
        self._expected = [_type(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self.names: list[str] = names_of(signature(model, loss_fn), args, kwargs)
        """Of all leaves."""
        self.likes = [leaf.to("meta") if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        """Types and shapes of all leaves, without their elements."""
        # A batch that is nothing but tensors can be compared without its tree.
        given = [*args, *kwargs.values()]
        self._is_flat = all(self._tensors) and list(map(id, given)) == list(map(id, leaves))
        self._count, self._keys = len(args), list(kwargs)
        self._types = [(leaf.dtype, leaf.shape) for leaf in leaves] if self._is_flat else []

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """What a batch has, in the order of `names`. Its tensors have no history.

        Raises ShapeError.
        """
        if self._is_flat and len(args) == self._count and list(kwargs) == self._keys:
            leaves = [*args, *kwargs.values()]
            if all(map(_is_plain, leaves, self._types)):
                return leaves
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._spec:
            raise ShapeError(f"the batch is {_described(args, kwargs)}, and the step was compiled for {self._given}")
        for name, leaf, expected, is_tensor in zip(self.names, leaves, self._expected, self._tensors, strict=True):
            if isinstance(leaf, torch.Tensor) and is_tensor:
                if _type(leaf) != expected:
                    raise ShapeError(
                        f"{name} is {_type(leaf)}, and the step was compiled for {expected}; pad it (or drop the last "
                        f"batch), or allow plans for other shapes (max_plans)"
                    )
            elif is_tensor or isinstance(leaf, torch.Tensor) or leaf != expected:
                like = expected if is_tensor else _told(expected)
                raise ShapeError(f"{name} is {_told(leaf)}, and the step was compiled for {like}")
        return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Size, ...] | None:
        """The shapes of a batch's tensors, if the batch differs from the example in nothing but sizes."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._spec:
            return None
        shapes = []
        for leaf, expected, is_tensor in zip(leaves, self._expected, self._tensors, strict=True):
            if isinstance(leaf, torch.Tensor):
                if not is_tensor or _kind(_type(leaf)) != _kind(expected):
                    return None
                shapes.append(leaf.shape)
            elif is_tensor or leaf != expected:
                return None
        return tuple(shapes)


def _kind(text: str) -> tuple[str, int]:
    """The element type and the commas of a type's text."""
    return text.partition("[")[0], text.count(",")


def _is_plain(leaf: Any, expected: tuple[torch.dtype, torch.Size]) -> bool:
    """Whether a leaf is a tensor of this type, of no class of its own and without history."""
    return (
        type(leaf) is torch.Tensor
        and leaf.dtype is expected[0]
        and leaf.shape == expected[1]
        and not leaf.requires_grad
    )


def _described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """`(float32[2, 16], labels=int64[2])`."""
    return f"({_listed([*map(_told, args), *(f'{name}={_told(value)}' for name, value in kwargs.items())])})"


def _listed(parts: list[str]) -> str:
    return ", ".join(parts if len(parts) <= MOST_LISTED else [*parts[:MOST_LISTED], ".."])


def _told(value: Any) -> str:
    """A part of a batch, in few words."""
    if isinstance(value, torch.Tensor):
        return _type(value)
    if isinstance(value, Mapping):
        return f"{{{_listed([f'{key}: {_told(part)}' for key, part in value.items()])}}}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({_listed(list(map(_told, value)))})"
    text = repr(value)
    return text if len(text) <= MOST_TOLD and "\n" not in text else f"of the type {type(value).__qualname__}"


def _type(tensor: torch.Tensor) -> str:
    """`float32[2, 16]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
