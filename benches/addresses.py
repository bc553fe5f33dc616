"""Compare address planners on traces: gaps to the largest number of live bytes, and times, on one machine.

usage: addresses.py TRACE... [--align 512] [--threads 2] [--limit 60] [--rounds 3] [--minimalloc PATH] [--idealloc PATH]
       addresses.py TRACE... --ablation [--effort normal]

Prints a table in Markdown: for each trace and planner the gap in % (0 is proved to be optimal), the seconds of the
whole program, including reading and writing, and in brackets its processor time (user). It is the fastest of --rounds
runs; a long run is not repeated. `lighterage alloc check` checks every plan; idealloc prints no plan, so its peak is
the one that it reports, for the same number of live bytes.

A trace whose name ends in .BYTES.csv, as minimalloc's, has this capacity: `max` and minimalloc look for a plan that
fits it. Minimalloc needs a capacity, so for other traces it gets 1.5 times the bound, then less and less until --limit
is over; its time ends at its best plan. idealloc runs once with its defaults, then in the same way with more and more
lives. The other planners skip traces with several pools, gaps, alignments or blocks in others' bytes.

--ablation shows the effect of each of lighterage's methods: the same plans without it. Progress goes to stderr.
Build lighterage first (./make build); for example:

  python3 benches/addresses.py A.1048576.csv snapshot.pickle --minimalloc PATH/minimalloc --idealloc PATH/idealloc

and build the other planners by

  git clone --recursive https://github.com/google/minimalloc && cd minimalloc &&
    cmake -B build -DCMAKE_BUILD_TYPE=Release && cmake --build build --target minimalloc
  git clone https://github.com/cappadokes/idealloc && cd idealloc && cargo build --release -p coreba --bin idealloc
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from step_time import machine

ROOT = Path(__file__).parents[1]
LIGHTERAGE = str(ROOT / "target/release/lighterage")
EFFORTS = ["fast", "normal", "max"]
METHODS = ["sweeps", "orders", "restarts", "best-fit", "coarse", "repair", "search"]
LONG = 10.0  # seconds; longer runs are not repeated
STEPS = [50, 20, 10, 5, 2, 1, 0.5, 0.2, 0.1, 0]  # gaps that minimalloc has to reach, %
MEMORY = 12 << 30  # limit for other planners, bytes


@dataclasses.dataclass
class Run:
    """A finished command: its output, time and memory."""

    out: str
    code: int
    wall: float
    user: float


def run(command: list[str], limit: float | None = None) -> Run:
    """Runs a command and ends it after `limit` seconds. With a limit, its memory is limited too."""

    def within() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    with tempfile.TemporaryFile("w+") as out:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, preexec_fn=None if limit is None else within
        )
        timer = threading.Timer(limit or 1e6, process.kill)
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        return Run(out.read(), process.returncode, wall, usage.ru_utime)


@dataclasses.dataclass
class Trace:
    """A trace, as planners get it."""

    path: Path
    align: int
    capacity: int | None
    bound: int = 0
    rows: list[dict[str, str]] = dataclasses.field(default_factory=list)

    def name(self) -> str:
        """The file's name without its capacity and ending."""
        return re.sub(r"(\.\d+)?\.[^.]*$", "", self.path.name)

    def sizes(self) -> list[int]:
        """The blocks' planned sizes."""
        return [-(-int(row["size"]) // self.align) * self.align for row in self.rows]

    def for_peers(self) -> str | None:
        """Why other planners cannot use it."""
        if not self.rows:
            return "no blocks"
        odd = {"pool", "alignment", "gaps", "in"} & self.rows[0].keys()
        return f"has {', '.join(sorted(odd))}" if odd else None

    def write(self, path: Path) -> None:
        """Writes the table for other planners: numbers for ids, sizes rounded up."""
        with path.open("w") as file:
            file.write("id,lower,upper,size\n")
            for i, (row, size) in enumerate(zip(self.rows, self.sizes(), strict=True)):
                file.write(f"{i},{row['lower']},{row['upper']},{size}\n")

    def check(self, plan: Path) -> int:
        """The peak of a plan, after a check, with planned sizes. A wrong plan is a ValueError."""
        checked = run([LIGHTERAGE, "alloc", "check", str(self.path), str(plan), "--align", str(self.align), "--json"])
        if checked.code != 0:
            raise ValueError(f"{self.path}: a plan is wrong: {checked.out}")
        with plan.open() as file:
            offsets = [int(row["offset"]) for row in csv.DictReader(file)]
        return max((at + size for at, size in zip(offsets, self.sizes(), strict=True)), default=0)

    def gap(self, peak: int) -> float:
        """The gap between a peak and the bound, in %."""
        return 100 * (peak / max(1, self.bound) - 1)

    def cell(self, peak: int, wall: float, user: float, asked: bool = False) -> str:
        """A planner's result. `asked`: it looked for a plan that fits the capacity."""
        fits = asked and self.capacity is not None and peak <= self.capacity
        return f"{'fits' if fits else f'{self.gap(peak):.2f}'} / {wall:.2f} ({user:.2f})"


def plan(trace: Trace, options: list[str], rounds: int, folder: Path) -> tuple[int, Run]:
    """Ours: the peak and the fastest run."""
    target = folder / "plan.csv"
    fastest: Run | None = None
    for _ in range(rounds):
        target.unlink(missing_ok=True)
        command = [LIGHTERAGE, "alloc", "plan", str(trace.path), "--align", str(trace.align), "-o", str(target)]
        here = run([*command, *options, "--json"])
        # 3: no plan that fits was found; the peak counts all the same.
        if here.code not in (0, 3):
            raise SystemExit(f"{trace.path}: {here.out}")
        fastest = here if fastest is None or here.wall < fastest.wall else fastest
        if LONG < here.wall:
            break
    assert fastest is not None
    told = json.loads(fastest.out.splitlines()[0])
    trace.bound = trace.bound or told["lower_bound_bytes"]
    if not target.exists():  # A plan that does not fit is not written.
        return told["peak_bytes"], fastest
    with target.open() as file:
        trace.rows = list(csv.DictReader(file))
    peak = trace.check(target)
    if told["peak_bytes"] < peak:
        raise SystemExit(f"{trace.path}: the peak is {peak}, and lighterage says {told['peak_bytes']}")
    return told["peak_bytes"], fastest


def minimalloc(binary: str, trace: Trace, limit: float, folder: Path) -> str:
    """A cell: its best plan within the limit."""
    table, found = folder / "peer.csv", folder / "found.csv"
    trace.write(table)
    asked = [trace.capacity or int(trace.bound * (1 + gap / 100)) for gap in (STEPS if trace.capacity is None else [0])]
    start, user, best, taken, why = time.perf_counter(), 0.0, None, (0.0, 0.0), ""
    for capacity in asked:
        left = limit - (time.perf_counter() - start)
        if left <= 0.1 or (best is not None and best <= capacity):
            continue
        found.unlink(missing_ok=True)
        # It checks the clock only now and then.
        options = [f"--capacity={capacity}", f"--input={table}", f"--output={found}", f"--timeout={left}s"]
        here = run([binary, *options], left + 1)
        user += here.user
        if here.code != 0 or not found.exists():
            why = failed(here)
            print(f"{trace.path.name}: minimalloc, capacity {capacity}: {why}", file=sys.stderr)
            break
        with found.open() as file:
            offsets = {int(row["id"]): row["offset"] for row in csv.DictReader(file)}
        whole = folder / "whole.csv"
        with whole.open("w") as file:
            file.write("id,lower,upper,size,offset\n")
            for i, row in enumerate(trace.rows):
                file.write(f"{row['id']},{row['lower']},{row['upper']},{row['size']},{offsets[i]}\n")
        taken = (time.perf_counter() - start, user)
        try:
            best = trace.check(whole)
        except ValueError as wrong:
            print(wrong, file=sys.stderr)
            return "refused"
    return f"{why} / {time.perf_counter() - start:.1f}" if best is None else trace.cell(best, *taken, asked=True)


def idealloc(binary: str, trace: Trace, limit: float, folder: Path) -> str:
    """A cell: its best peak within the limit, as it reports it."""
    table = folder / "peer.csv"
    trace.write(table)
    start, user, best, taken, why, lives = time.perf_counter(), 0.0, None, (0.0, 0.0), "", 1
    while (left := limit - (time.perf_counter() - start)) > 0.1:
        here = run([binary, "-i", str(table), "ex-csv", "-l", str(lives)], left)
        user += here.user
        told = re.search(r"Makespan:\s*(\d+) bytes\s+LOAD:\s*(\d+) bytes", here.out)
        if told is not None and int(told[2]) != trace.bound:
            return "another problem"  # Streams, for example.
        if here.code != 0 or told is None:
            why = failed(here)
            print(f"{trace.path.name}: idealloc, {lives} lives: {why}", file=sys.stderr)
            break
        if best is None or int(told[1]) < best:
            best, taken = int(told[1]), (time.perf_counter() - start, user)
        if best <= trace.bound:
            break
        lives *= 4
    return f"{why} / {time.perf_counter() - start:.1f}" if best is None else trace.cell(best, *taken)


def failed(here: Run) -> str:
    """Why a run gave no result, in a word or two."""
    for sign, why in [("panicked", "panics"), ("DEADLINE_EXCEEDED", "no plan"), ("bad_alloc", "memory")]:
        if sign in here.out:
            return why
    return "no plan" if here.code == -9 else f"exit code {here.code}"


def table(columns: list[str], traces: list[Trace], row: Callable[[Trace], list[str]]) -> None:
    """Prints rows as they come."""
    print(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|", flush=True)
    for trace in traces:
        print(f"{trace.path.name}", file=sys.stderr)
        print(f"| {' | '.join(row(trace))} |", flush=True)


def main() -> None:
    """Read the arguments, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--align", type=int, help="default: 512 for snapshots (.pickle), else 1")
    parser.add_argument("--threads", type=int, default=2, help="lighterage's")
    parser.add_argument("--limit", type=float, default=60, help="a peer's time for a trace, seconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minimalloc", metavar="PATH", help="its binary")
    parser.add_argument("--idealloc", metavar="PATH", help="its binary")
    parser.add_argument("--ablation", action="store_true", help="without each method of ours in turn")
    parser.add_argument("--effort", choices=EFFORTS, default="normal", help="of --ablation")
    args = parser.parse_args()
    traces = []
    for path in args.traces:
        capacity = re.search(r"\.(\d+)\.csv$", path.name)
        align = args.align or (512 if path.suffix == ".pickle" else 1)
        traces.append(Trace(path, align, int(capacity[1]) if capacity else None))
    binaries = {"minimalloc": (args.minimalloc, minimalloc), "idealloc": (args.idealloc, idealloc)}
    peers = {name: peer for name, peer in binaries.items() if peer[0]}
    threads = ["--threads", str(args.threads)]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)

        def compared(trace: Trace) -> list[str]:
            cells = []
            for effort in EFFORTS:
                asked = effort == "max" and trace.capacity is not None
                options = ["--capacity", str(trace.capacity)] if asked else []
                peak, here = plan(trace, ["--effort", effort, *threads, *options], args.rounds, folder)
                cells.append(trace.cell(peak, here.wall, here.user, asked))
            for binary, peer in peers.values():
                why = trace.for_peers()
                cells.append(why or peer(binary, trace, args.limit, folder))
            return [trace.name(), str(len(trace.rows)), *cells]

        def without(trace: Trace) -> list[str]:
            cells = []
            for method in ["", *METHODS]:
                options = ["--without", method] if method else []
                peak, here = plan(trace, ["--effort", args.effort, *threads, *options], args.rounds, folder)
                cells.append(trace.cell(peak, here.wall, here.user))
            return [trace.name(), str(len(trace.rows)), *cells]

        print(f"{machine()}; gap % / seconds (user)\n")
        if args.ablation:
            table(["trace", "blocks", args.effort, *(f"no {method}" for method in METHODS)], traces, without)
        else:
            table(["trace", "blocks", *EFFORTS, *peers], traces, compared)


if __name__ == "__main__":
    main()
