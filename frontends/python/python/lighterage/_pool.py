"""Memory of gradients on the CPU, which the next backward takes again.

A gradient that a program frees is often returned to the operating system, which then clears each of its pages anew for
the next backward. For large layers this takes longer than computing the gradients.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
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
# A tensor that is still in use at so many backwards is the program's: its memory is not taken again.
MOST_MISSES = 2


@dataclasses.dataclass
class _Entry:
    """Memory of one tensor."""

    base: torch.Tensor
    storage: int
    own: int
    """References to the storage without the program's."""
    call: int
    """The last backward that looked at it."""
    misses: int = 0
    """Backwards in a row at which a tensor of the program had it."""


class Pool:
    """Memory of gradients, by their shape and type."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Spec, deque[_Entry]] = {}
        self._call = 0

    def made(self, specs: Sequence[Spec]) -> list[torch.Tensor]:
        """Tensors for the gradients of a backward, with any numbers."""
        with self._lock:
            self._call += 1
            return [self._one(spec) if LEAST_BYTES <= _bytes(spec) else empty(*spec) for spec in specs]

    @property
    def n_bytes(self) -> int:
        """The bytes of all gradients that it knows, whether a program uses them or not."""
        return sum(entry.base.nbytes for entries in self._entries.values() for entry in entries)

    def clear(self) -> None:
        """Give all memory back that no program uses."""
        with self._lock:
            self._entries.clear()

    def _one(self, spec: Spec) -> torch.Tensor:
        entries = self._entries.setdefault(spec, deque())
        while entries and entries[0].call != self._call:
            entry = entries.popleft()
            entry.call = self._call
            if _use_count(entry.storage) == entry.own:
                entry.misses = 0
                entries.append(entry)
                return entry.base.detach()
            entry.misses += 1
            if entry.misses < MOST_MISSES:
                entries.append(entry)
        base = empty(*spec)
        storage = base.untyped_storage()._cdata
        entries.append(_Entry(base, storage, _use_count(storage), self._call))
        return base.detach()


def _bytes(spec: Spec) -> int:
    shape, _, dtype = spec
    n = dtype.itemsize
    for size in shape:
        n *= size
    return n


pool = Pool()
