"""A simulated GPU: the library that replaces NVIDIA's driver in tests, with memory that PyTorch's CPU can use."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

_FOLDER = Path(__file__).parents[3] / "target/debug"
_LIBRARY, _GENERATOR = _FOLDER / "liblighterage_standin.so", _FOLDER / "lighterage-mlir"


@contextmanager
def gpu() -> Iterator[Gpu]:
    """The GPU `cuda:0`, for as long as a module's tests run. It keeps its state from one to the next."""
    for file in (_LIBRARY, _GENERATOR):
        if not file.is_file():
            pytest.skip(f"there is no {file}; `make native` builds it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTERAGE_CUDA", str(_LIBRARY))
        patch.setenv("LIGHTERAGE_MLIR", str(_GENERATOR))
        # The library reads these at its first call.
        for name, value in {"UNIFIED": 1, "REMEMBERS": 1, "BYTES": 1 << 30}.items():
            patch.setenv(f"STANDIN_{name}", str(value))
        yield Gpu(ctypes.CDLL(str(_LIBRARY)))


class Gpu:
    """Its memory, and what it found wrong."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def races(self) -> list[str]:
        """Races within kernels, and accesses outside of all memory.

        Commands of several streams are not judged: the library does not see how threads of a program wait for each
        other.
        """
        room = ctypes.create_string_buffer(1 << 16)
        n = self._library.standin_findings(room, ctypes.c_size_t(len(room)))
        return [line for line in room.raw[:n].decode().splitlines() if "without waiting for" not in line]

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in its memory, which is never freed. Without elements it has no memory."""
        n_bytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        if not n_bytes:
            return torch.empty(shape, dtype=dtype)
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        self._library.cuCtxSetCurrent(context)
        assert self._library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(n_bytes)) == 0
        memory = (ctypes.c_char * n_bytes).from_address(address.value)
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in its memory."""
        strides = torch.empty(tensor.shape, device="meta").stride()
        return self.empty(tuple(tensor.shape), strides, tensor.dtype).copy_(tensor.detach())
