"""Accuracy of predictions: planned and measured peak, predicted and measured step, for planners and budgets.

usage: accuracy.py [--models gpt2 llama] [--link 1GB/s] [--steps 8] [--rounds 16] [--work DIR]

For each model: `lighterage profile`, then for each planner and budget `compile` and `train`. Each round trains every
configuration once. Other work on the machine can only increase a time, so a configuration's time is its fastest step,
and its rounds end when the two fastest agree. The profiles use `--fastest` for the same reason. Prints a table in
Markdown, then the median and the worst error, and how much slower `auto` is than the fastest measured configuration
that fits its budget. Progress goes to stderr. Exits with 1 if a measured peak differs from the planned peak, or if
losses differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
from pathlib import Path

from step_time import machine

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/gpt2"
LIGHTERAGE = str(ROOT / "target/release/lighterage")
WARM_UP = 2  # steps that are not counted
AGREE = 0.015  # largest relative difference of the two fastest rounds
FEWEST = 3  # smallest number of rounds
CONFIGURATIONS = [
    ("keep", 100),
    ("auto", 100),
    ("auto", 80),
    ("auto", 65),
    ("auto", 50),
    ("auto", 30),
    ("auto", 15),
    ("greedy", 65),
    ("protrain", 65),
    ("protrain", 40),
]  # planner, and budget in % of what `keep` needs


def run(command: list[str]) -> str:
    """Runs a command and returns its standard output."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nfailed with {result.returncode}:\n{result.stderr}")
    return result.stdout


def settled(times: list[float]) -> bool:
    """Whether the two fastest rounds agree."""
    fastest = sorted(times)[:2]
    return FEWEST <= len(times) and fastest[1] <= (1 + AGREE) * fastest[0]


@dataclasses.dataclass
class Configuration:
    """A compiled step, with predicted and measured figures."""

    model: str
    planner: str
    budget: int
    link: str
    file: Path
    rounds: list[float] = dataclasses.field(default_factory=list)
    times: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    summary: dict[str, float] = dataclasses.field(default_factory=dict)

    def train(self, steps: int) -> None:
        """Runs some steps and records their times."""
        files = [str(self.file), "--batches", str(EXAMPLE / "batches.safetensors")]
        options = ["--link", self.link, "--steps", str(steps), "--init", "normal:0.02", "--seed", "0", "--json"]
        lines = [json.loads(line) for line in run([LIGHTERAGE, "train", *files, *options]).splitlines()]
        # The last step overlaps no later step.
        times = [line["ms"] for line in lines if "ms" in line][WARM_UP:-1]
        self.rounds.append(min(times))
        self.times += times
        self.losses = [line["loss"] for line in lines if "loss" in line]
        self.summary = lines[-1]["summary"]

    def exact(self) -> bool:
        """Whether the measured peak equals the planned peak."""
        return self.summary["measured_peak_bytes"] == self.summary["planned_peak_bytes"]

    def error(self) -> float:
        """The prediction's error, relative to the measured time."""
        return self.summary["predicted_ms"] / min(self.times) - 1

    def row(self) -> str:
        """A line of the table."""
        summary, measured = self.summary, min(self.times)
        peak = f"{summary['measured_peak_bytes']:.0f}" + ("" if self.exact() else " (planned another)")
        moved = summary["swapped_bytes"] / 2**20
        recomputed = summary["recomputed_ms"]
        return (
            f"| {self.model} | {self.planner} | {self.budget} % | {peak} | {moved:.0f} | {recomputed:.1f} "
            f"| {summary['predicted_ms']:.1f} | {measured:.1f} | {100 * self.error():+.1f} % "
            f"| {statistics.median(self.times):.1f} | {len(self.rounds)} |"
        )


def prepare(model: str, args: argparse.Namespace) -> list[Configuration]:
    """Profiles a model and compiles its configurations."""
    file = EXAMPLE / "gpt2.pt2"
    if model != "gpt2":
        file = args.work / f"{model}.pt2"
        if not file.exists():
            run([sys.executable, str(ROOT / f"benches/{model}.py"), "--out", str(file)])
    times: list[float] = []
    fastest = None
    while len(times) < args.rounds and not settled(times):
        profile = args.work / f"{model}.{len(times)}.prof"
        command = [LIGHTERAGE, "profile", str(file), "--repeat", str(args.repeat), "--fastest", "-o", str(profile)]
        report = json.loads(run([*command, "--json"]))
        times.append(report["step_ms"])
        fastest = profile if report["step_ms"] == min(times) else fastest
        cost = report["profiling_ms"] / report["step_ms"]
        print(f"{model}: profiled in {cost:.1f} steps, a step's ops take {report['step_ms']:.1f} ms", file=sys.stderr)
    configurations = []
    for planner, budget in CONFIGURATIONS:
        step = Configuration(model, planner, budget, args.link, args.work / f"{model}-{planner}-{budget}.lit")
        options = ["--optimizer", "adamw", "--device", "cpu", "--budget", f"{budget}%", "--planner", planner]
        paths = ["--profile", str(fastest), "-o", str(step.file)]
        run([LIGHTERAGE, "compile", str(file), *options, "--link", args.link, *paths])
        configurations.append(step)
    return configurations


def behind(configurations: list[Configuration]) -> float:
    """The worst ratio, minus 1, of auto's measured step to the fastest measured step within the same budget."""
    worst = 0.0
    for auto in (step for step in configurations if step.planner == "auto"):
        others = (step for step in configurations if step.model == auto.model and step.budget <= auto.budget)
        worst = max(worst, min(auto.times) / min(min(step.times) for step in others) - 1)
    return worst


def main() -> None:
    """Read the arguments, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["gpt2", "llama"], default=["gpt2", "llama"])
    parser.add_argument("--link", default="1GB/s")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=16, help="at most")
    parser.add_argument("--repeat", type=int, default=10, help="rounds of a profile")
    parser.add_argument("--work", type=Path, default=ROOT / "target/accuracy")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    configurations = [step for model in args.models for step in prepare(model, args)]
    for turn in range(args.rounds):
        unsettled = [step for step in configurations if not settled(step.rounds)]
        for step in unsettled:
            step.train(args.steps)
        print(f"round {turn + 1}: {len(unsettled)} configurations", file=sys.stderr)
    n_steps = args.steps - WARM_UP - 1
    print(f"{machine()}; link {args.link}; measured: the fastest of {n_steps} steps a round\n")
    columns = ["model", "planner", "budget", "peak, bytes", "swapped, MiB", "recomputed, ms", "predicted, ms"]
    columns += ["measured, ms", "error", "median, ms", "rounds"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for step in configurations:
        print(step.row())
    errors = [abs(step.error()) for step in configurations]
    exact = sum(step.exact() for step in configurations)
    equal = all(len({tuple(s.losses) for s in configurations if s.model == model}) == 1 for model in args.models)
    print(f"\nerror: median {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %")
    print(f"auto: at worst {100 * behind(configurations):.1f} % behind the fastest that fits its budget")
    print(f"measured peak = planned peak in {exact} of {len(configurations)}")
    print("losses are bit-identical" if equal else "LOSSES DIFFER")
    if exact < len(configurations) or not equal:
        sys.exit(1)


if __name__ == "__main__":
    main()
