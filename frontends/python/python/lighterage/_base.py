"""Frozen matrices in NF4: codes in the memory of a step, and in the model the numbers that they stand for."""

from __future__ import annotations

import ctypes
from itertools import chain

import torch
from torch import nn

from ._lighterage import Machine, nf4, nf4_numbers
from ._optimizer import lent, write_bytes

# The states of a matrix are these names, a dot, and its path.
_STATES = ("nf4", "nf4_sizes", "nf4_largest", "nf4_offset")


def matrices(machine: Machine) -> list[str]:
    """The paths of the matrices that a step stores in NF4."""
    codes = f"{_STATES[0]}."
    return [path.removeprefix(codes) for path, _ in machine.states if path.startswith(codes)]


class Base:
    """The matrices of a model that a step stores in NF4.

    The model's own tensors get the numbers of the codes, so that eager mode computes what the step does.
    """

    def __init__(self, model: nn.Module, machine: Machine, keep: bool) -> None:
        """keep: whether `restore` may be called."""
        tensors = dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers()))
        self._tensors = {path: tensors[path].detach() for path in matrices(machine)}
        self._before = {path: tensor.clone() for path, tensor in self._tensors.items() if keep}
        for path, tensor in self._tensors.items():
            states = nf4(_bytes(tensor.float()))
            for name, state in zip(_STATES, states, strict=True):
                view = lent(machine, "state", f"{name}.{path}")
                write_bytes(view, state)
                machine.written(f"{name}.{path}")
            codes, sizes, largest, offset = states
            numbers = nf4_numbers(tensor.numel(), codes, sizes, largest, ctypes.c_float.from_buffer_copy(offset).value)
            tensor.copy_(torch.frombuffer(bytearray(numbers), dtype=torch.float32).view(tensor.shape))

    def restore(self) -> None:
        """Give the model the numbers that it had."""
        for path, before in self._before.items():
            self._tensors[path].copy_(before)

    def forget(self) -> None:
        """Free what `restore` needs."""
        self._before = {}

    @property
    def paths(self) -> list[str]:
        """Of the matrices."""
        return list(self._tensors)


def _bytes(tensor: torch.Tensor) -> bytes:
    tensor = tensor.cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
