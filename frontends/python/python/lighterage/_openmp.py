"""torch's OpenMP, whose threads sleep while a step runs on the processor: `openmp.rs`."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from ._lighterage import use_openmp

MAPS = Path("/proc/self/maps")


@functools.cache
def find() -> None:
    """Say where torch's OpenMP is, on Linux: the library beside torch's, or the only one of this process."""
    if not MAPS.exists():
        return
    paths = {line.split(maxsplit=5)[5] for line in MAPS.read_text().splitlines() if "omp" in line}
    libraries = {path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
    own = {path for path in libraries if path.startswith(str(Path(torch.__file__).parent))}
    found = own or libraries
    if len(found) != 1:
        return
    try:
        function = ctypes.CDLL(found.pop()).GOMP_parallel
    except (OSError, AttributeError):
        return
    use_openmp(ctypes.cast(function, ctypes.c_void_p).value or 0)
