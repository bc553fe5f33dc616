"""Calls the C interface like PyTorch, on host memory: python3 abi.py target/release/liblighterage_alloc.so

Records a small training step, plans it by hand, serves it from two threads, and looks for bytes that two blocks share.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

# A step's requests: bytes, and after how many further requests each is freed.
STEP = [(4096, 3), (1000, 1), (65536, 2), (512, 4), (300_000, 1), (1000, 1)]
STEPS = 50


class Library:
    """The functions of the library, with their types."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self.malloc = library.lighterage_malloc
        self.malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.malloc.restype = ctypes.c_void_p
        self.free = library.lighterage_free
        self.free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.free.restype = None
        self.record_stream = library.lighterage_record_stream
        self.record_stream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.record_stream.restype = None
        self.enter, self.leave = library.lighterage_enter, library.lighterage_leave
        self._stats = library.lighterage_stats
        self._stats.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
        self._stats.restype = ctypes.c_size_t
        self.empty_cache = library.lighterage_empty_cache

    def stats(self) -> dict[str, int]:
        """The statistics of device 0."""
        text = ctypes.create_string_buffer(self._stats(0, None, 0))
        assert self._stats(0, text, len(text)) == len(text)
        return json.loads(text.value)


def step(library: Library, extra: bool) -> None:
    """One step; every block is filled with its own byte, which must still be there when it is freed."""
    ends: list[list[tuple[int, int, int]]] = [[] for _ in range(2 * len(STEP))]

    def release(i: int) -> None:
        for address, size, value in ends[i]:
            assert ctypes.string_at(address, size) == bytes([value]) * size, "another block has these bytes"
            library.free(address, size, 0, None)

    for i, (size, span) in enumerate(STEP):
        # Autograd frees and allocates in other threads.
        thread = threading.Thread(target=release, args=(i,))
        thread.start()
        thread.join()
        for bytes_ in [size, 777] if extra and i == 3 else [size]:
            address = library.malloc(bytes_, 0, None)
            assert address, "the host should have the memory"
            ctypes.memset(address, i + 1, bytes_)
            ends[i + span].append((address, bytes_, i + 1))
    for i in range(len(STEP), 2 * len(STEP)):
        release(i)


def child(mode: str, path: str) -> None:
    """Runs in a separate process, because the library reads the environment once."""
    library = Library(path)
    assert library.malloc(0, 0, None) is None
    assert library.malloc(1 << 62, 0, None) is None, "nobody has this much"
    library.free(None, 0, 0, None)
    library.enter(b"layers.0", 0)
    for i in range(STEPS):
        step(library, extra=mode == "plan" and i == 20)
    library.leave(b"layers.0")
    if mode == "plan":
        other = library.malloc(4096, 0, 64)
        library.record_stream(other, 128)
        library.free(other, 4096, 0, 64)
        library.free(other, 4096, 0, 64)
        library.free(12345, 1, 0, None)
        library.empty_cache()
        stats = library.stats()
        n = STEPS * len(STEP)
        assert stats["planned"] == n and stats["steps"] == STEPS, stats
        # The requests for 2^62 and for 777 bytes.
        assert stats["extra"] == 2 and stats["other_stream"] == 1 and stats["fallback"] == 2, stats
        assert stats["unknown_frees"] == 2 and stats["cache_bytes"] == 0, stats


def main() -> None:
    """Records, then serves a plan, then tests a wrong plan."""
    path = os.path.abspath(sys.argv[1])
    if len(sys.argv) == 3:
        child(sys.argv[2], path)
        return
    with tempfile.TemporaryDirectory() as directory:
        trace, plan, stats = (Path(directory, name) for name in ["trace-%d", "plan", "stats"])
        settings = {"POOL": "host", "TRACE": str(trace), "STATS": str(stats), "PLAN": str(plan)}
        environment = os.environ | {f"LIGHTERAGE_ALLOC_{name}": value for name, value in settings.items()}

        def run(mode: str) -> str:
            command = [sys.executable, __file__, path, mode]
            environment["LIGHTERAGE_ALLOC_MODE"] = mode
            return subprocess.run(command, env=environment, check=True, stderr=subprocess.PIPE, text=True).stderr

        run("profile")
        lines = Path(str(trace).replace("%d", "0")).read_text().splitlines()
        assert lines[:3] == ["lighterage-trace 1", "enter layers.0", "alloc 0 4096 stream=0"], lines[:3]
        assert lines[-1] == "leave layers.0", lines[-1]
        assert sum(line.startswith("alloc") for line in lines) == STEPS * len(STEP)
        assert sum(line.startswith("free") for line in lines) == STEPS * len(STEP)

        offset, requests = 0, ""
        for i, (size, span) in enumerate(STEP):
            requests += f"s {size} 0 {offset} {i + min(span, len(STEP) - i)}\n"
            offset += -(-size // 512) * 512
        plan.write_text(f"lighterage-plan 1\npool {offset} 512\nrequests {len(STEP)} 0\n{requests}end\n")
        run("plan")
        served = json.loads(stats.read_text())
        assert served["native"] > 0 and served["pool_bytes"] == offset, served

        plan.write_text("lighterage-plan 7\n")
        told = run("cache")
        assert "out of memory" in told, told
        told = subprocess.run(
            [sys.executable, __file__, path, "broken"],
            env=environment | {"LIGHTERAGE_ALLOC_MODE": "plan"},
            check=True,
            stderr=subprocess.PIPE,
            text=True,
        ).stderr
        assert "line 1: this program reads version 1" in told, told
    print("the C interface serves, records and reports")


if __name__ == "__main__":
    main()
