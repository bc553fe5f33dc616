"""Memory of gradients on the CPU, which the next backward takes again.

A gradient that a program frees is often returned to the operating system, which then clears each of its pages anew for
the next backward. For large layers this takes longer than computing the gradients.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

import torch

Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and type of a tensor."""

# As `torch.empty_strided`. A backward makes a tensor for each gradient, and this takes a fraction of the time;
# inductor's programs call it too.
empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
empty = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
_use_count: Callable[[int], int] = torch._C._storage_Use_Count

# Smaller tensors come from memory that the C library keeps.
LEAST_BYTES = 128 << 10
# Memory that was not handed out in so many backwards is given up. A layer that is compiled once and called several
# times has as many backwards in a step.
MOST_BACKWARDS = 64


@dataclasses.dataclass
class _Entry:
    """Memory of one tensor."""

    base: torch.Tensor
    address: int
    storage: int
    own: int
    """References to the storage without the program's."""
    backward: int
    """The backward that had it last."""

    def is_free(self) -> bool:
        """Whether no tensor of the program has it, and it is where it was.

        Memory moves when a program shares it with another process, or changes its size.
        """
        return _use_count(self.storage) == self.own and self.base.data_ptr() == self.address


class Pool:
    """Memory of the gradients of one planned graph, by their shape and type."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The last handed out stands last.
        self._entries: dict[Spec, list[_Entry]] = {}
        self._backward = 0

    def made(self, specs: Sequence[Spec]) -> list[torch.Tensor]:
        """Tensors for the gradients of a backward, with any numbers."""
        with self._lock:
            self._backward += 1
            made = [self._one(spec) if LEAST_BYTES <= _bytes(spec) else empty(*spec) for spec in specs]
            oldest = self._backward - MOST_BACKWARDS
            for spec, entries in self._entries.items():
                if entries and entries[0].backward < oldest:
                    self._entries[spec] = [entry for entry in entries if oldest <= entry.backward]
            return made

    @property
    def n_bytes(self) -> int:
        """The bytes of all gradients that it knows, whether the program uses them or not."""
        with self._lock:
            return sum(entry.base.nbytes for entries in self._entries.values() for entry in entries)

    def clear(self) -> None:
        """Give all memory back that the program does not use."""
        with self._lock:
            self._entries = {}

    def _one(self, spec: Spec) -> torch.Tensor:
        entries = self._entries.setdefault(spec, [])
        for i in reversed(range(len(entries))):
            entry = entries[i]
            if entry.backward != self._backward and entry.is_free():
                entry.backward = self._backward
                entries.append(entries.pop(i))
                return entry.base.detach()
        base = empty(*spec)
        storage = base.untyped_storage()._cdata
        entries.append(_Entry(base, base.data_ptr(), storage, _use_count(storage), self._backward))
        return base.detach()


def _bytes(spec: Spec) -> int:
    shape, _, dtype = spec
    n = dtype.itemsize
    for size in shape:
        n *= size
    return n
