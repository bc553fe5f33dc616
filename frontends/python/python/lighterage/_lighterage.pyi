"""The native module. Its classes are written in Rust, in `frontends/python/src`."""

from collections.abc import Callable
from os import PathLike
from typing import Any, final

__all__ = [
    "Arenas",
    "Machine",
    "Plan",
    "Ticket",
    "View",
    "compile",
    "devices",
    "dynamic_map",
    "fastest_micro_batches",
    "first_fit_decreasing",
    "generator_at",
    "have",
    "have_at",
    "nf4",
    "nf4_numbers",
]

@final
class Plan:
    """The plan of a step: what it needs, what it takes, and why."""

    @property
    def peak(self) -> int:
        """Bytes of the device's memory that a step needs: parameters, moments, activations, everything."""

    @property
    def keep_peak(self) -> int:
        """Bytes that a step needs if nothing is swapped or recomputed."""

    @property
    def smallest(self) -> int:
        """The smallest budget for which a plan was found, bytes. The first use plans for all budgets."""

    @property
    def budget(self) -> int | None:
        """The budget, bytes."""

    @property
    def micros(self) -> float:
        """The predicted time of a step on the device, in microseconds."""

    @property
    def kernel_micros(self) -> float:
        """The time of the kernels of the forward and the backward in microseconds, if each runs once."""

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a step has."""

    @property
    def loss_kind(self) -> str:
        """What the loss is a function of, if a step has several batches: `mean`, `sum` or `mixed`."""

    @property
    def recomputed_micros(self) -> float:
        """The part of it in which something is computed again, in microseconds."""

    @property
    def swapped_bytes(self) -> int:
        """Bytes that a step moves between the device's memory and the host's, both ways."""

    @property
    def curve(self) -> list[tuple[int, float]]:
        """The plans that no other beats in both memory and time: (bytes, microseconds), fastest first."""

    @property
    def kernels(self) -> str:
        """`generated`, or `plain` where the kernel generator is not installed."""

    @property
    def options(self) -> list[str]:
        """The optimizer's options, in the order of the step's input."""

    @property
    def tied(self) -> list[list[str]]:
        """Names of one parameter, for each parameter with several."""

    @property
    def unsupported(self) -> list[tuple[str, str, str, str]]:
        """Calls that have no kernel: operator, node, module, reason. PyTorch computes them if the step runs."""

    @property
    def externs(self) -> list[tuple[str, str, str, int, int]]:
        """What PyTorch computes in a step: operator, node, module, how often, bytes of its results."""

    @property
    def guessed(self) -> list[str]:
        """Ops that the profile lacks, each once: their times are guesses. Empty without a profile."""

    def profile(self, file: str | PathLike[str], *, repeat: int | None = None, fastest: bool = False) -> dict[str, Any]:
        """Measure the step's ops, the link, and what they cost each other on the machine that runs the step.

        file: gets the times, for `profile=` of `lighterage.compile` and for `--profile` of the command. A file that is
            there keeps what it has; the processor's ops in it are not measured again.
        repeat: how often each op is run; by default 2 to 4 times, so that all takes about as long as four steps.
        fastest: the times are those of the fastest round, not medians over rounds. On a machine with other load, give a
            larger `repeat` too, so that the rounds last longer than the load.

        Returns the number of `ops` in the file, the time of a step in `micros`, and in the fastest round in
        `fastest_micros`, how many `seconds` it took, and the ops that were `refused`, with the reasons: they could not
        be run, and their times will be guesses.

        Raises Error: the file is of another machine or of other kernels, the step cannot be run, or `repeat` is not a
            number from 1 to 1000.
        """

    def explain(self, name: str) -> str:
        """Why a tensor is where it is, and what the alternatives would cost.

        name: a value, the path of a state, or the path of a module, which lists the module's tensors.

        Raises Error: there is no such name; the message lists near ones.
        """

    def html(self) -> str:
        """A page for the browser that shows the whole plan."""

    def load(self, threads: int | None = None, beside: Machine | None = None) -> Machine:
        """The step in memory, on this machine's processor or its GPU.

        threads: how many share a kernel, by default all that the process may use.
        beside: the machine of the plan that it was planned beside. Both have one memory, and run in turn.

        Raises Error: there is too little memory, or a kernel cannot be made.
        """

    def arenas(self, threads: int | None = None) -> Arenas:
        """The machines of a step in two parts. They are made when they are needed.

        Raises Error: the step has no parts, or a kernel cannot be made.
        """

    def _repr_html_(self) -> str: ...

@final
class Machine:
    """A step in memory. Its memory lives as long as it, or as any tensor that was made of a view."""

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs."""

    @property
    def loss(self) -> str:
        """The name of the output that is the loss."""

    @property
    def states(self) -> list[tuple[str, str]]:
        """Path and kind of each state: `param`, `buffer`, `const`, `moment` or `rng`."""

    @property
    def measured_peak_bytes(self) -> int:
        """One past the last byte of the device's pool that was touched."""

    @property
    def pool_bytes(self) -> int:
        """Bytes of the device's pool, allocated once."""

    def view(self, kind: str, name: str) -> View:
        """The tensor of an `input`, an `output` or a `state`, where it lies.

        Raises KeyError: there is no such tensor.
        """

    def written(self, path: str) -> None:
        """Say that a state has its value now."""

    def initialise(self, seed: int) -> None:
        """Give moments zeros and random numbers their seed."""

    def step(self) -> float:
        """Run one step, without the GIL, on the inputs as they are. Returns its time in milliseconds.

        Raises Error: a line failed, or a state has no value. The machine runs no more steps after a failed line.
        """

@final
class Arenas:
    """The machines of a step in two parts: one for each forward that waits for its backward.

    Tensors are given by addresses, in the order of the names here. They are contiguous, and stay until the call ends;
    states start at multiples of 64 bytes.
    """

    @property
    def states(self) -> list[str]:
        """Names of the states, which kernels read where they are."""

    @property
    def read_late(self) -> list[str]:
        """Names of the states that the second part reads."""

    @property
    def inputs(self) -> tuple[list[str], list[str]]:
        """Names of the inputs of each part."""

    @property
    def outputs(self) -> tuple[list[str], list[str]]:
        """Names of the outputs of each part."""

    @property
    def is_random(self) -> bool:
        """Whether the step draws random numbers."""

    @property
    def counts(self) -> tuple[int, int]:
        """Number of machines, and of forwards that wait."""

    def release(self) -> None:
        """Give back the memory of machines that wait for a forward. The next forward makes another."""

    def forward(
        self, states: list[int], storages: list[int], inputs: list[int], outputs: list[int], seed: int
    ) -> Ticket:
        """Run the first part, without the GIL, on tensors at these addresses.

        storages: a number for each state, which tells its storage from others.

        Raises Error: a line failed. The next call is not affected.
        """

    def backward(
        self, number: int, states: list[int], storages: list[int], inputs: list[int], outputs: list[int]
    ) -> float:
        """Run the second part of a forward, by the number in its ticket. Returns its time in milliseconds.

        A storage may have other memory than in the forward. Raises Error: it has run, a line failed, or a state that it
        reads lies in another storage at another address.
        """

@final
class Ticket:
    """What stands for a forward: a tensor `int64[1]` with its number, for `torch.from_dlpack`.

    When the tensor's memory is freed, the next forward may take the machine.
    """

    @property
    def ms(self) -> float:
        """The time of the first part, in milliseconds."""

    def __dlpack__(self, **options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class View:
    """A tensor in the memory of a machine, for `torch.from_dlpack`."""

    def __dlpack__(self, **options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

def compile(
    pt2: bytes,
    *,
    optimizer: str,
    budget: int | float | str | None = None,
    device: str = "cpu",
    host: str | None = None,
    kernels: str = "auto",
    planner: str = "auto",
    clip_norm: float | None = None,
    groups: dict[str, int] | None = None,
    parts: tuple[set[str], set[str]] | None = None,
    calls: Callable[[list[tuple[str, str, str, str]]], Callable[[str, list[Any], list[Any]], None]] | None = None,
    precision: str = "f32",
    loss_scale: tuple[float, float, float, int] | None = None,
    micro_batches: int | None = None,
    reduction: str = "auto",
    master: str = "none",
    rounding: str = "nearest",
    base: str = "whole",
    whole_groups: set[int] | None = None,
    beside: Plan | None = None,
    gpu: int | None = None,
    profile: str | PathLike[str] | None = None,
    command: str = "",
) -> Plan:
    """Compile a traced step, the bytes of a joint `.pt2` file.

    groups: the group of options of a parameter, by its path; group 0 if it has none.
    parts: of a step in two parts, the inputs that come at the pause and the outputs that leave there.
    precision: `f32`, `tf32`, `bf16` or `fp16`, as of `lighterage.compile`.
    loss_scale: of fp16, the first scale, its growth, its backoff, and the updates until it grows.
    micro_batches: how many batches a step takes, whose inputs get the suffixes `.0`, `.1` and so on.
    reduction, master, rounding, base: as of `lighterage.compile`.
    whole_groups: the groups whose moments are f32 where the optimizer has codes.
    beside: the plan of a step on larger batches in whose memory this one is to run, in turn with it.
    gpu: the number of the GPU that runs the step; without it, this machine's processor does.
    calls: for a step that is to run. It gets the calls without a kernel (operator, node,
        module, reason), and raises an exception or returns what computes them: `compute(node, operands, results)`,
        with capsules of DLPack. Without it, the step is planned for the device.

    Raises Infeasible, Error, and what `calls` raises.
    """

def fastest_micro_batches(batch: int, least: Callable[[int], float], plan: Callable[[int], float | None]) -> int | None:
    """The number of micro-batches, a divisor of `batch`, with the fastest plan; None if no plan fits.

    least: what kernels of that number of micro-batches take at least, in microseconds.
    plan: the predicted time of the plan for a number, in microseconds, or None if nothing fits.

    Raises what the functions raise.
    """

def first_fit_decreasing(lengths: list[int], limit: int) -> list[list[int]] | None:
    """The numbers of the sequences in each bin of at most `limit` tokens; None if one is longer."""

def devices() -> list[str]:
    """Names of the devices that come with Lighterage."""

def dynamic_map(signed: bool) -> list[float]:
    """The numbers of 8-bit codes, of both signs or not negative."""

def generator_at(program: str | PathLike[str]) -> None:
    """Says where the kernel generator is, if `LIGHTERAGE_MLIR` does not."""

def have(tables: list[dict[Any, Any]], lists: list[list[Any]], objects: list[Any]) -> bool:
    """Whether some dicts, and then some lists, have these objects in this order. Only identities count."""

def have_at(tables: list[dict[str, Any]], key: str, values: list[Any]) -> bool:
    """Whether each of some dicts has the value with its number under a key. Only identities count."""

def nf4(numbers: bytes) -> list[bytes]:
    """The four states of a matrix in NF4, from its numbers in f32."""

def nf4_numbers(n: int, codes: bytes, sizes: bytes, largest: bytes, offset: float) -> bytes:
    """The first `n` numbers, in f32, that the four states of a matrix stand for.

    Raises Error: there are too few codes.
    """

def use_openmp(address: int) -> None:
    """Say where `GOMP_parallel` of torch's OpenMP is."""
