"""What the backend of `torch.compile` did in this process."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Protocol

from . import _foreign
from ._lighterage import Arenas, Plan
from ._pool import Pool


@dataclasses.dataclass
class Stats:
    """What the backend did in this process, since it began or since `reset`."""

    graphs: int = 0
    """Graphs with a backward that were planned."""
    inference_graphs: int = 0
    """Graphs without a backward that were planned."""
    eager_graphs: int = 0
    """Graphs that run in eager mode, because they cannot be planned."""
    eager_frames: int = 0
    """Functions that run in eager mode, because Dynamo gives them up. It tries the functions that they call."""
    breaks: list[str] = dataclasses.field(default_factory=list)
    """Why Dynamo ended a graph, ran a call in eager mode, and began another graph."""
    externs: int = 0
    """Calls of the planned graphs that have no kernel, and that PyTorch computes."""
    extern_runs: int = 0
    """How many such calls ran, in planned graphs and in steps of `lighterage.compile`."""
    forwards: int = 0
    backwards: int = 0
    """Runs of planned graphs."""
    plans: list[Plan] = dataclasses.field(default_factory=list)
    """The plan of each planned graph, while it is in use."""
    arenas: int = 0
    """Blocks of memory that were made for these plans: one for each forward that waits at the same time."""
    waiting: int = 0
    """Forwards whose backward has not run."""
    gradient_bytes: int = 0
    """Bytes of large gradients on the CPU, in use or waiting for the next backward."""


class Counted(Protocol):
    """A planned graph."""

    plan: Plan
    arenas: Arenas
    pool: Pool


class _Counts:
    """The counters behind `stats`."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.extern_runs_before = 0
        self.programs: weakref.WeakSet[Counted] = weakref.WeakSet()


counts = _Counts()


def stats() -> Stats:
    """How many graphs of `torch.compile` were planned, how many run in eager mode, and what ran."""
    found = dataclasses.replace(counts.stats, breaks=list(counts.stats.breaks))
    programs = list(counts.programs)
    found.plans = [program.plan for program in programs]
    found.extern_runs = _foreign.counts.ran - counts.extern_runs_before
    blocks = [program.arenas.counts for program in programs]
    found.arenas, found.waiting = sum(made for made, _ in blocks), sum(waiting for _, waiting in blocks)
    found.gradient_bytes = sum(program.pool.n_bytes for program in programs)
    return found


def reset() -> None:
    """Start counting anew, without the plans so far, and give back the memory that waits for gradients."""
    for program in list(counts.programs):
        program.pool.clear()
    counts.stats = Stats()
    counts.extern_runs_before = _foreign.counts.ran
    counts.programs = weakref.WeakSet()
