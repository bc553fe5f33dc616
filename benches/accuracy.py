"""How near predictions come: planned and measured peak, predicted and measured step, for budgets and links.

usage: accuracy.py [--models gpt2 llama] [--budgets 100% ..] [--links 250MB/s ..] [--steps 8] [--rounds 3] [--work DIR]

For each model: `lighterage profile` once, then for each budget and link `compile` and `train`. Training takes turns over
the configurations, round by round; a configuration's time is the least of its rounds' medians, for whatever else runs on
the machine only adds to it. Prints a table in Markdown and, below it, the median and the worst error; progress goes to
stderr. Exits with 1 if a measured peak is not the planned one.
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


def run(command: list[str]) -> str:
    """Runs a command and returns its standard output."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nfailed with {result.returncode}:\n{result.stderr}")
    return result.stdout


@dataclasses.dataclass
class Configuration:
    """A compiled step, and what it was predicted and measured to take."""

    model: str
    budget: str
    link: str
    file: Path
    times: list[float] = dataclasses.field(default_factory=list)
    summary: dict[str, float] = dataclasses.field(default_factory=dict)

    def train(self, steps: int) -> None:
        """Runs some steps and notes the median of their times."""
        files = [str(self.file), "--batches", str(EXAMPLE / "batches.safetensors")]
        options = ["--link", self.link, "--steps", str(steps), "--init", "normal:0.02", "--seed", "0", "--json"]
        lines = [json.loads(line) for line in run([LIGHTERAGE, "train", *files, *options]).splitlines()]
        # The last step is followed by nothing that it could overlap.
        times = [line["ms"] for line in lines if "ms" in line][WARM_UP:-1]
        self.times.append(statistics.median(times))
        self.summary = lines[-1]["summary"]

    def exact(self) -> bool:
        """Whether the measured peak is the planned one."""
        return self.summary["measured_peak_bytes"] == self.summary["planned_peak_bytes"]

    def error(self) -> float:
        """The prediction's, relative to what was measured."""
        return self.summary["predicted_ms"] / min(self.times) - 1

    def row(self) -> str:
        """A line of the table."""
        summary, measured = self.summary, min(self.times)
        peak = f"{summary['measured_peak_bytes']:.0f}" + ("" if self.exact() else " (planned another)")
        moved = summary["swapped_bytes"] / 2**20
        return (
            f"| {self.model} | {self.budget} | {self.link} | {peak} | {moved:.0f} | {summary['recomputed_ms']:.1f} "
            f"| {summary['predicted_ms']:.1f} | {measured:.1f} | {100 * self.error():+.1f} % |"
        )


def prepare(model: str, args: argparse.Namespace) -> list[Configuration]:
    """Profiles a model and compiles its configurations."""
    file = EXAMPLE / "gpt2.pt2"
    if model != "gpt2":
        file = args.work / f"{model}.pt2"
        if not file.exists():
            run([sys.executable, str(ROOT / f"benches/{model}.py"), "--out", str(file)])
    profile = args.work / f"{model}.prof"
    command = [LIGHTERAGE, "profile", str(file), "--repeat", str(args.repeat), "-o", str(profile), "--json"]
    report = json.loads(run(command))
    cost = report["profiling_ms"] / report["step_ms"]
    print(f"{model}: profiled in {cost:.1f} steps, a step's ops take {report['step_ms']:.1f} ms", file=sys.stderr)
    configurations = []
    for budget in args.budgets:
        for link in args.links:
            name = f"{model}-{budget}-{link}".replace("/", "").replace("%", "")
            step = Configuration(model, budget, link, args.work / f"{name}.lit")
            options = ["--optimizer", "adamw", "--device", "cpu", "--budget", budget, "--link", link]
            run([LIGHTERAGE, "compile", str(file), *options, "--profile", str(profile), "-o", str(step.file)])
            configurations.append(step)
    return configurations


def main() -> None:
    """Read the arguments, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["gpt2", "llama"], default=["gpt2", "llama"])
    parser.add_argument("--budgets", nargs="+", default=["100%", "80%", "65%", "55%", "50%"])
    parser.add_argument("--links", nargs="+", default=["500MB/s", "2GB/s"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=5, help="of the profile")
    parser.add_argument("--work", type=Path, default=ROOT / "target/accuracy")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    configurations = [step for model in args.models for step in prepare(model, args)]
    for turn in range(args.rounds):
        for step in configurations:
            step.train(args.steps)
        print(f"round {turn + 1} of {args.rounds} done", file=sys.stderr)
    print(f"{machine()}; the least of {args.rounds} medians of {args.steps - WARM_UP - 1} steps\n")
    print("| model | budget | link | peak, bytes | swapped, MiB | recomputed, ms | predicted, ms | measured, ms | error |")
    print("|---" * 9 + "|")
    for step in configurations:
        print(step.row())
    errors = [abs(step.error()) for step in configurations]
    exact = sum(step.exact() for step in configurations)
    print(f"\nerror: median {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %")
    print(f"measured peak = planned peak in {exact} of {len(configurations)}")
    if exact < len(configurations):
        sys.exit(1)


if __name__ == "__main__":
    main()
