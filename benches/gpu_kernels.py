"""Run generated kernels on an NVIDIA GPU: compare them with stored results, and their times with a copy.

usage: gpu_kernels.py FOLDER [--dry-run] [--rounds 20] [--part check|time] [--shard 0/8]

`cargo run -p lighterage-tests --example gpu_kernels -- sm_90 FOLDER` writes FOLDER, on any machine; tests/src/gpu.rs
describes its files; they may be compressed by gzip. This script needs only Python and NVIDIA's driver (libcuda.so.1).
Every kernel runs normally, with other numbers of blocks, and with operands and results at one address. Bytes around
each tensor must not change. Then kernels that move much memory are timed, alternately with a copy of the same number
of bytes, by the GPU's clock; the fastest runs count.

Prints a table in Markdown. Exits with 0 if all kernels are right, with 1 if one is wrong, with 2 if they cannot run
here. With --dry-run it only reads the folder. --part compares or times only; --shard 0/8 takes each eighth case, so
that several processes share the work of comparing.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import json
import random
import struct
import sys
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

ALIGN = 256  # addresses of tensors are multiples of it
GUARD_BYTES, GUARD = 256, 0xA5  # after each tensor
LARGEST = 3.4e38  # from here on, rounding may make an infinity
N_WRONG = 20  # largest number of printed findings

FORMATS = {"bool": "B", "u8": "B", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "f16": "e", "f32": "f", "f64": "d"}
SIZES = {**{name: struct.calcsize(f"<{form}") for name, form in FORMATS.items()}, "bf16": 2}


class CannotRunError(Exception):
    """Why nothing can be run, or which call the driver refused."""


# ------------------------------------------------------------------------------------------------------------- folder


@dataclass(frozen=True)
class Tensor:
    """A tensor; the positions in kernels.bin of its bytes, and of the allowed errors of its numbers (f32)."""

    dtype: str
    shape: tuple[int, ...]
    at: int | None = None
    bounds: int | None = None

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes."""
        return self.numel * SIZES[self.dtype]


@dataclass(frozen=True)
class Launch:
    """A start of a kernel."""

    symbol: str
    blocks: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Case:
    """Kernels, which run in turn, and their tensors."""

    name: str
    ptx: str
    launches: list[Launch]
    operands: list[Tensor]
    results: list[Tensor]
    scratch_bytes: int
    scalars: list[tuple[str, float]]
    inplace: list[tuple[int, int]]
    any_blocks: bool
    flops: float

    @property
    def bytes(self) -> int:
        """Bytes read and written, each tensor once."""
        return sum(tensor.bytes for tensor in self.operands + self.results)


@dataclass(frozen=True)
class Folder:
    """The contents of a folder."""

    target: str
    data: bytes
    cases: list[Case]
    timed: list[Case]


def tensor_of(data: dict[str, Any]) -> Tensor:
    """A tensor of the file."""
    return Tensor(data["dtype"], tuple(data["shape"]), data.get("at"), data.get("bounds"))


def case_of(data: dict[str, Any], modules: list[str]) -> Case:
    """A case of the file."""
    return Case(
        data["name"],
        modules[data["module"]],
        [Launch(**launch) for launch in data["launches"]],
        [tensor_of(tensor) for tensor in data["operands"]],
        [tensor_of(tensor) for tensor in data["results"]],
        data["scratch_bytes"],
        [(kind, number) for kind, number in data["scalars"]],
        [(operand, result) for operand, result in data["inplace"]],
        data["any_blocks"],
        data["flops"],
    )


def content(path: Path) -> bytes:
    """The content of a file, which may be compressed."""
    zipped = path.with_name(f"{path.name}.gz")
    return gzip.decompress(zipped.read_bytes()) if zipped.exists() else path.read_bytes()


def read(path: Path) -> Folder:
    """Read a folder, and check that it is whole."""
    try:
        text = json.loads(content(path / "kernels.json"))
        data = content(path / "kernels.bin")
        cases, timed = ([case_of(case, text["modules"]) for case in text[key]] for key in ("cases", "timed"))
        folder = Folder(text["target"], data, cases, timed)
    except (EOFError, OSError, ValueError, LookupError, TypeError) as error:
        raise CannotRunError(f"{path} is not what the example gpu_kernels wrote: {error!r}") from error
    for case in folder.cases + folder.timed:
        for tensor in case.operands + case.results:
            if tensor.dtype not in SIZES:
                raise CannotRunError(f"{path}: {case.name}: {tensor.dtype} is not known")
            parts = ((tensor.at, tensor.bytes), (tensor.bounds, 4 * tensor.numel))
            if any(start is not None and len(data) < start + n for start, n in parts):
                raise CannotRunError(f"{path}: {case.name}: kernels.bin does not have all of {tensor}")
        for launch in case.launches:
            head = case.ptx.partition(f".entry {launch.symbol}(")[2].partition(")")[0]
            n = len(case.operands) + len(case.results) + (case.scratch_bytes != 0) + len(case.scalars)
            if head.count(".param") != n:
                raise CannotRunError(f"{path}: {case.name}: {launch.symbol} should take {n} arguments")
    return folder


def numbers(data: bytes, dtype: str) -> Sequence[float]:
    """The numbers of bytes."""
    n = len(data) // SIZES[dtype]
    if dtype != "bf16":
        return struct.unpack(f"<{n}{FORMATS[dtype]}", data)
    # The upper half of a float's bytes.
    wide = bytearray(2 * len(data))
    wide[2::4], wide[3::4] = data[0::2], data[1::2]
    return struct.unpack(f"<{n}f", wide)


def near(found: float, expected: float, bound: float) -> bool:
    """Whether both are equal, or NaN, or within the bound, or one is large and the other an infinity."""
    if found == expected or abs(found - expected) <= bound:
        return True
    if found != found or expected != expected:
        return found != found and expected != expected
    one_infinite = (abs(found) == float("inf")) != (abs(expected) == float("inf"))
    return one_infinite and LARGEST < min(abs(found), abs(expected)) and (0 < found) == (0 < expected)


def first_off(data: bytes, result: Tensor, found: bytes) -> str | None:
    """The first wrong number of a result."""
    assert result.at is not None
    expected = data[result.at : result.at + result.bytes]
    if found == expected:
        return None
    bounds: Sequence[float] = [0.0] * result.numel
    if result.bounds is not None:
        bounds = numbers(data[result.bounds : result.bounds + 4 * result.numel], "f32")
    triples = zip(numbers(found, result.dtype), numbers(expected, result.dtype), bounds, strict=True)
    for i, (is_, should_be, bound) in enumerate(triples):
        if not near(is_, should_be, bound):
            return f"element {i}: {is_:.9g}, not {should_be:.9g}, within {bound:.3g}"
    return None


# ------------------------------------------------------------------------------------------------------------- driver

# Of cuda.h: CUdevice_attribute, CUfunction_attribute and CUjit_option.
ATTRIBUTE_MULTIPROCESSORS, ATTRIBUTE_MAJOR, ATTRIBUTE_MINOR = 16, 75, 76
FUNCTION_LOCAL_BYTES, FUNCTION_REGISTERS, FUNCTION_MAX_DYNAMIC_SHARED_BYTES = 3, 4, 8
JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES = 5, 6
MOST_STATIC_SHARED_BYTES = 48 << 10

# Handles (CUcontext, CUmodule, CUfunction, CUstream, CUevent) are pointers, CUdevice is an int, CUdeviceptr 64 bits.
SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuCtxSynchronize": [],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
    "cuModuleLoadDataEx": [POINTER(c_void_p), c_void_p, c_uint, POINTER(c_int), POINTER(c_void_p)],
    "cuModuleUnload": [c_void_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuFuncGetAttribute": [POINTER(c_int), c_int, c_void_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemcpyHtoD_v2": [c_uint64, c_void_p, c_size_t],
    "cuMemcpyDtoH_v2": [c_void_p, c_uint64, c_size_t],
    "cuMemcpyDtoDAsync_v2": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuMemsetD8_v2": [c_uint64, ctypes.c_ubyte, c_size_t],
    "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p)],
    "cuEventCreate": [POINTER(c_void_p), c_uint],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventSynchronize": [c_void_p],
    "cuEventElapsedTime": [POINTER(c_float), c_void_p, c_void_p],
}


class Driver:
    """NVIDIA's driver and its first GPU. Calls are by name, without `cu`; a refused call is an error."""

    def __init__(self, target: str) -> None:
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CannotRunError(f"there is no NVIDIA driver on this machine: {error}") from error
        for name, types in SIGNATURES.items():
            function = getattr(self.library, name)
            function.argtypes, function.restype = types, c_int
        self("Init", 0)
        count, device, context = c_int(), c_int(), c_void_p()
        self("DeviceGetCount", byref(count))
        if count.value == 0:
            raise CannotRunError("NVIDIA's driver is here, and no GPU")
        self("DeviceGet", byref(device), 0)
        self.device = device.value
        major, minor = self.attribute(ATTRIBUTE_MAJOR), self.attribute(ATTRIBUTE_MINOR)
        if major * 10 + minor < int(target.removeprefix("sm_")):
            raise CannotRunError(f"kernels are for {target}, the GPU is sm_{major}{minor}: have them made for it")
        self("DevicePrimaryCtxRetain", byref(context), self.device)
        self("CtxSetCurrent", context)
        text, version = ctypes.create_string_buffer(256), c_int()
        self("DeviceGetName", text, len(text), self.device)
        self("DriverGetVersion", byref(version))
        cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
        n = self.attribute(ATTRIBUTE_MULTIPROCESSORS)
        self.name = f"{text.value.decode()} (sm_{major}{minor}, {n} multiprocessors), driver for CUDA {cuda}"

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver."""
        code = getattr(self.library, full_name(name))(*arguments)
        if code != 0:
            text = c_char_p()
            self.library.cuGetErrorString(code, byref(text))
            raise CannotRunError(f"cu{name}: {(text.value or b'error').decode()} ({code})")

    def attribute(self, attribute: int) -> int:
        """An attribute of the GPU."""
        value = c_int()
        self("DeviceGetAttribute", byref(value), attribute, self.device)
        return value.value

    def upload(self, address: int, data: bytes) -> None:
        """Copy bytes to the GPU."""
        if data:
            self("MemcpyHtoD", address, data, len(data))

    def download(self, address: int, n: int) -> bytes:
        """Copy bytes from the GPU."""
        buffer = ctypes.create_string_buffer(max(n, 1))
        if n:
            self("MemcpyDtoH", buffer, address, n)
        return buffer.raw[:n]

    def event(self) -> c_void_p:
        """A new event."""
        event = c_void_p()
        self("EventCreate", byref(event), 0)
        return event

    def milliseconds(self, start: c_void_p, end: c_void_p) -> float:
        """The time between two events, after the second has happened."""
        time = c_float()
        self("EventSynchronize", end)
        self("EventElapsedTime", byref(time), start, end)
        return time.value


def full_name(name: str) -> str:
    """The function's name in the library, with its version."""
    return next(full for full in (f"cu{name}", f"cu{name}_v2") if full in SIGNATURES)


class Loaded:
    """A case's kernels on the GPU."""

    def __init__(self, driver: Driver, case: Case) -> None:
        self.driver, self.case, self.module = driver, case, c_void_p()
        log = ctypes.create_string_buffer(1 << 14)
        options = (c_int * 2)(JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES)
        values = (c_void_p * 2)(ctypes.cast(log, c_void_p), len(log))
        try:
            driver("ModuleLoadDataEx", byref(self.module), case.ptx.encode() + b"\0", 2, options, values)
        except CannotRunError as error:
            raise CannotRunError(f"{error}: {log.value.decode(errors='replace')}") from error
        self.functions = []
        for launch in case.launches:
            function = c_void_p()
            driver("ModuleGetFunction", byref(function), self.module, launch.symbol.encode())
            if MOST_STATIC_SHARED_BYTES < launch.shared_bytes:
                driver("FuncSetAttribute", function, FUNCTION_MAX_DYNAMIC_SHARED_BYTES, launch.shared_bytes)
            self.functions.append(function)

    def unload(self) -> None:
        """Give them up; after a fault that is refused like all else."""
        self.driver.library.cuModuleUnload(self.module)

    def attribute(self, attribute: int) -> int:
        """The largest attribute of the kernels."""
        value, most = c_int(), 0
        for function in self.functions:
            self.driver("FuncGetAttribute", byref(value), attribute, function)
            most = max(most, value.value)
        return most

    def start(self, addresses: Sequence[int], most_blocks: int | None = None) -> None:
        """Start the kernels on tensors."""
        arguments: list[Any] = [c_uint64(address) for address in addresses]
        arguments += [c_uint(int(n)) if kind == "u32" else c_float(n) for kind, n in self.case.scalars]
        pointers = (c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
        for launch, function in zip(self.case.launches, self.functions, strict=True):
            blocks = min(launch.blocks, most_blocks or launch.blocks, 2**31 - 1)
            if blocks:
                sizes = (blocks, 1, 1, launch.threads, 1, 1, launch.shared_bytes)
                self.driver("LaunchKernel", function, *sizes, None, pointers, None)


class Memory:
    """A case's tensors on the GPU, with bytes around them."""

    def __init__(self, driver: Driver, case: Case) -> None:
        self.driver, self.case = driver, case
        sizes = [tensor.bytes for tensor in case.operands + case.results] + [case.scratch_bytes]
        self.places: list[tuple[int, int]] = []
        end = GUARD_BYTES
        for size in sizes:
            self.places.append((end, size))
            end = -(-(end + size + GUARD_BYTES) // ALIGN) * ALIGN
        base = c_uint64()
        driver("MemAlloc", byref(base), end)
        self.base, self.bytes = base.value, end
        n = len(case.operands) + len(case.results) + (case.scratch_bytes != 0)
        self.addresses = [self.base + at for at, _ in self.places[:n]]

    def free(self) -> None:
        """Give it up; after a fault that is refused like all else."""
        self.driver.library.cuMemFree_v2(self.base)

    def fill(self, data: bytes) -> None:
        """Write the operands, and NaN everywhere else."""
        self.driver("MemsetD8", self.base, GUARD, self.bytes)
        for at, size in self.places[: len(self.case.operands + self.case.results)]:
            if size:
                self.driver("MemsetD8", self.base + at, 0xFF, size)
        for tensor, address in zip(self.case.operands, self.addresses, strict=False):
            if tensor.at is not None:
                self.driver.upload(address, data[tensor.at : tensor.at + tensor.bytes])

    def guards(self) -> Iterator[tuple[int, int]]:
        """The ranges between tensors."""
        ends = [0] + [at + size for at, size in self.places]
        starts = [at for at, _ in self.places] + [self.bytes]
        return zip(ends, starts, strict=True)

    def results(self, inplace: tuple[int, int] | None) -> list[bytes]:
        """The results, after a check that all bytes around tensors are unchanged."""
        everything = self.driver.download(self.base, self.bytes)
        for start, end in self.guards():
            if everything[start:end].strip(bytes([GUARD])):
                raise CannotRunError("it wrote outside of its tensors")
        n = len(self.case.operands)
        places = self.places[n : n + len(self.case.results)]
        if inplace is not None:
            places[inplace[1]] = self.places[inplace[0]]
        return [everything[at : at + size] for at, size in places]


def run(memory: Memory, kernels: Loaded, data: bytes, blocks: int | None, pair: tuple[int, int] | None) -> list[bytes]:
    """Run a case once and return the results."""
    memory.fill(data)
    addresses = list(memory.addresses)
    if pair is not None:
        addresses[len(memory.case.operands) + pair[1]] = addresses[pair[0]]
    kernels.start(addresses, blocks)
    memory.driver("CtxSynchronize")
    return memory.results(pair)


def check(driver: Driver, case: Case, data: bytes) -> list[str]:
    """Run a case in every way and return the errors."""
    wrong = []
    kernels, memory = Loaded(driver, case), Memory(driver, case)
    try:
        found = run(memory, kernels, data, None, None)
        for j, (result, bytes_) in enumerate(zip(case.results, found, strict=True)):
            off = first_off(data, result, bytes_)
            wrong += [f"result {j}, {off}"] if off else []
        most = max((launch.blocks for launch in case.launches), default=1)
        ways: list[tuple[int | None, tuple[int, int] | None]] = [(None, None), *((None, pair) for pair in case.inplace)]
        ways += [(1, None), (-(-most // 3), None)] if case.any_blocks else []
        for blocks, pair in ways:
            if run(memory, kernels, data, blocks, pair) != found:
                wrong.append(f"other bits with {blocks or 'as many'} blocks, {pair or 'nothing'} in place")
    finally:
        memory.free()
        kernels.unload()
    return wrong


# -------------------------------------------------------------------------------------------------------------- times


@dataclass(frozen=True)
class Time:
    """The fastest runs of a kernel, and of copies of the same number of bytes, ms."""

    kernel: float
    copy: float
    registers: int
    local_bytes: int


def timed(driver: Driver, case: Case, data: bytes, rounds: int) -> Time:
    """Time a case, alternately with a copy that reads and writes the same number of bytes."""
    kernels, memory = Loaded(driver, case), Memory(driver, case)
    other, half = c_uint64(), max(case.bytes // 2, 1)
    driver("MemAlloc", byref(other), 2 * half)
    try:
        draws = random.Random(1)
        # Numbers around 1, in the tensor's type.
        drawn = {"bf16": b"".join(struct.pack("<H", 0x3F00 + draws.randrange(256)) for _ in range(1 << 16))}
        drawn["f32"] = b"".join(struct.pack("<f", draws.uniform(0.5, 2.0)) for _ in range(1 << 16))
        for tensor, address in zip(case.operands, memory.addresses, strict=False):
            if tensor.at is not None:
                driver.upload(address, data[tensor.at : tensor.at + tensor.bytes])
                continue
            seed = drawn.get(tensor.dtype, drawn["bf16"])[: tensor.bytes]
            driver.upload(address, seed)
            done = len(seed)
            while done < tensor.bytes:
                part = min(done, tensor.bytes - done)
                driver("MemcpyDtoDAsync", address + done, address, part, None)
                done += part
        driver("MemsetD8", other.value, 1, 2 * half)
        events = [driver.event() for _ in range(3)]
        kernel, copy = [], []
        for _ in range(rounds + 3):
            driver("EventRecord", events[0], None)
            kernels.start(memory.addresses)
            driver("EventRecord", events[1], None)
            driver("MemcpyDtoDAsync", other.value, other.value + half, half, None)
            driver("EventRecord", events[2], None)
            kernel.append(driver.milliseconds(events[0], events[1]))
            copy.append(driver.milliseconds(events[1], events[2]))
        registers, local = kernels.attribute(FUNCTION_REGISTERS), kernels.attribute(FUNCTION_LOCAL_BYTES)
        return Time(min(kernel[3:]), min(copy[3:]), registers, local)
    finally:
        driver.library.cuMemFree_v2(other)
        memory.free()
        kernels.unload()


def row(case: Case, time: Time) -> str:
    """A case's row of the table."""
    rates = [f"{case.bytes / time.kernel / 1e6:.0f}", f"{time.copy / time.kernel:.2f}"]
    if case.flops:
        rates = ["", ""]
    work = f"{case.flops / time.kernel / 1e9:.0f}" if case.flops else ""
    cells = [case.name, f"{time.kernel * 1e3:.1f}", *rates, work, str(time.registers), str(time.local_bytes)]
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    """Read the arguments, run everything, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--part", choices=["all", "check", "time"], default="all")
    parser.add_argument("--shard", default="0/1", help="K/N: each N-th case, from K on")
    args = parser.parse_args()
    shard, shards = map(int, args.shard.split("/"))
    try:
        folder = read(args.folder)
        count = f"{len(folder.cases)} cases to compare, {len(folder.timed)} to time, for {folder.target}"
        if args.dry_run:
            print(count)
            return 0
        driver = Driver(folder.target)
    except CannotRunError as error:
        print(f"gpu_kernels: {error}", file=sys.stderr)
        return 2
    print(f"{driver.name}; {count}\n", flush=True)
    wrong = []
    cases = [] if args.part == "time" else folder.cases[shard::shards]
    for case in cases:
        try:
            wrong += [f"{case.name}: {what}" for what in check(driver, case, folder.data)]
        except CannotRunError as error:
            wrong.append(f"{case.name}: {error}")
            if not alive(driver):
                wrong.append("the GPU takes no more calls after that; the cases behind it were not run")
                break
    for what in wrong[:N_WRONG]:
        print(f"wrong: {what}", file=sys.stderr)
    print(f"{len(cases)} cases, {len(wrong)} findings\n", flush=True)
    if args.part == "check" or not alive(driver):
        return 1 if wrong else 0
    print("| kernel | µs | GB/s | of a copy's speed | TFLOP/s | registers | local bytes |")
    print("|---|---|---|---|---|---|---|")
    for case in folder.timed:
        try:
            print(row(case, timed(driver, case, folder.data, args.rounds)), flush=True)
        except CannotRunError as error:
            print(f"not timed: {case.name}: {error}", file=sys.stderr)
    return 1 if wrong else 0


def alive(driver: Driver) -> bool:
    """Whether the GPU still accepts calls: a fault of a kernel ends its context."""
    try:
        driver("CtxSynchronize")
    except CannotRunError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
