"""Accuracy of predictions: planned and measured peak, predicted and measured step, for planners and budgets.

usage: accuracy.py [--models gpt2 llama] [--link 1GB/s|none] [--steps 8] [--rounds 12] [--turns 16] [--work DIR]

For each model: `lighterage profile`, then for each planner and budget `compile` and `train`. A shared machine has fast
and slow phases of seconds to minutes. So each round profiles the model again and trains every configuration once, in
alternating order. A configuration's time is its median over the rounds of the median step, relative to the profile of
the same round, times the first profile. Prints a table in Markdown, then the median and the worst error. Where another
plan that fits the budget was measured more than 1 % faster than `auto`, these two take turns again. Progress goes to
stderr. Exits with 1 if a measured peak differs from the planned peak, or if losses differ.
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


def profile(model: Path, file: Path, args: argparse.Namespace) -> float:
    """Profiles a model into a new file, and returns what the ops of a step take, in ms."""
    file.unlink(missing_ok=True)
    options = ["--repeat", str(args.repeat), "--fastest", *paced(args.link)]
    return json.loads(run([LIGHTERAGE, "profile", str(model), *options, "-o", str(file), "--json"]))["step_ms"]


def paced(link: str) -> list[str]:
    """The options for a link; `none` is as fast as memory copies."""
    return [] if link == "none" else ["--link", link]


@dataclasses.dataclass
class Configuration:
    """A compiled step, with predicted and measured figures."""

    model: str
    planner: str
    budget: int
    link: str
    file: Path
    profiled: float  # what the ops of a step took in the profile that it is planned with, ms
    rounds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    summary: dict[str, float] = dataclasses.field(default_factory=dict)

    def train(self, steps: int, profiled: float) -> None:
        """Runs some steps, and records their median time relative to the ops of a profile that took `profiled` ms."""
        files = [str(self.file), "--batches", str(EXAMPLE / "batches.safetensors")]
        options = [*paced(self.link), "--steps", str(steps), "--init", "normal:0.02", "--seed", "0", "--json"]
        lines = [json.loads(line) for line in run([LIGHTERAGE, "train", *files, *options]).splitlines()]
        # The last step overlaps no later step.
        times = [line["ms"] for line in lines if "ms" in line][WARM_UP:-1]
        self.rounds.append(statistics.median(times) / profiled)
        self.losses = [line["loss"] for line in lines if "loss" in line]
        self.summary = lines[-1]["summary"]

    def exact(self) -> bool:
        """Whether the measured peak equals the planned peak."""
        return self.summary["measured_peak_bytes"] == self.summary["planned_peak_bytes"]

    def plan(self) -> tuple[float, float]:
        """What tells plans apart: the peak and the predicted time."""
        return self.summary["planned_peak_bytes"], self.summary["predicted_ms"]

    def measured(self) -> float:
        """The time of a step at the speed that the machine had for the first profile, in ms."""
        return statistics.median(self.rounds) * self.profiled

    def error(self) -> float:
        """The prediction's error, relative to the measured time."""
        return self.summary["predicted_ms"] / self.measured() - 1

    def row(self) -> str:
        """A line of the table."""
        summary = self.summary
        peak = f"{summary['measured_peak_bytes']:.0f}" + ("" if self.exact() else " (planned another)")
        moved = summary["swapped_bytes"] / 2**20
        recomputed = summary["recomputed_ms"]
        return (
            f"| {self.model} | {self.planner} | {self.budget} % | {peak} | {moved:.0f} | {recomputed:.1f} "
            f"| {summary['predicted_ms']:.1f} | {self.measured():.1f} | {100 * self.error():+.1f} % |"
        )


def path_of(model: str, work: Path) -> Path:
    """The file of a model, which is exported if it is not there."""
    file = EXAMPLE / "gpt2.pt2" if model == "gpt2" else work / f"{model}.pt2"
    if not file.exists():
        run([sys.executable, str(ROOT / f"benches/{model}.py"), "--out", str(file)])
    return file


def prepare(model: str, args: argparse.Namespace) -> list[Configuration]:
    """Profiles a model and compiles its configurations."""
    file = path_of(model, args.work)
    measured = args.work / f"{model}.prof"
    profiled = profile(file, measured, args)
    configurations = []
    for planner, budget in CONFIGURATIONS:
        lit = args.work / f"{model}-{planner}-{budget}.lit"
        step = Configuration(model, planner, budget, args.link, lit, profiled)
        options = ["--optimizer", "adamw", "--device", "cpu", "--budget", f"{budget}%", "--planner", planner]
        paths = ["--profile", str(measured), "-o", str(step.file)]
        run([LIGHTERAGE, "compile", str(file), *options, *paced(args.link), *paths])
        configurations.append(step)
    return configurations


def behind(auto: Configuration, other: Configuration) -> float:
    """By how much `auto` is slower than another plan in the same rounds: the median ratio, minus 1."""
    return statistics.median(a / b for a, b in zip(auto.rounds, other.rounds, strict=True)) - 1


def rivals(configurations: list[Configuration]) -> list[tuple[Configuration, Configuration]]:
    """Each plan of auto's with another plan that fits its budget, and was measured more than 1 % faster."""
    return [
        (auto, other)
        for auto in configurations
        if auto.planner == "auto"
        for other in configurations
        if other.model == auto.model and other.budget <= auto.budget and other.plan() != auto.plan()
        if behind(auto, other) > 0.01
    ]


def contest(auto: Configuration, other: Configuration, args: argparse.Namespace) -> float:
    """`behind` in turns of these two alone. The largest of many noisy ratios is mostly noise; a second look is not."""
    pair = [dataclasses.replace(step, rounds=[]) for step in (auto, other)]
    for turn in range(args.turns):
        for step in pair if turn % 2 == 0 else reversed(pair):
            step.train(args.steps, step.profiled)
    return behind(*pair)


def main() -> None:
    """Read the arguments, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["gpt2", "llama"], default=["gpt2", "llama"])
    parser.add_argument("--link", default="1GB/s")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--turns", type=int, default=16, help="turns of two plans that are measured again")
    parser.add_argument("--repeat", type=int, default=10, help="rounds of a profile")
    parser.add_argument("--work", type=Path, default=ROOT / "target/accuracy")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    configurations = [step for model in args.models for step in prepare(model, args)]
    for turn in range(args.rounds):
        for model in args.models:
            steps = [step for step in configurations if step.model == model]
            profiled = profile(path_of(model, args.work), args.work / "round.prof", args)
            for step in steps if turn % 2 == 0 else reversed(steps):
                step.train(args.steps, profiled)
            print(f"round {turn + 1}, {model}: a step's ops take {profiled:.1f} ms", file=sys.stderr)
    print(f"{machine()}; link {args.link}; {args.rounds} rounds of {args.steps - WARM_UP - 1} steps\n")
    columns = ["model", "planner", "budget", "peak, bytes", "swapped, MiB", "recomputed, ms", "predicted, ms"]
    columns += ["measured, ms", "error"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for step in configurations:
        print(step.row())
    errors = [abs(step.error()) for step in configurations]
    exact = sum(step.exact() for step in configurations)
    equal = all(len({tuple(s.losses) for s in configurations if s.model == model}) == 1 for model in args.models)
    print(f"\nerror: median {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %")
    for auto, other in rivals(configurations):
        name = f"{auto.model}: auto at {auto.budget} % is behind {other.planner} at {other.budget} % by"
        again = contest(auto, other, args)
        print(f"{name} {100 * behind(auto, other):.1f} %, in {args.turns} more turns by {100 * again:.1f} %")
    print(f"measured peak = planned peak in {exact} of {len(configurations)}")
    print("losses are bit-identical" if equal else "LOSSES DIFFER")
    if exact < len(configurations) or not equal:
        sys.exit(1)


if __name__ == "__main__":
    main()
