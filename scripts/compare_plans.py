#!/usr/bin/env python3
"""Writes one line per plan, or compares two builds of `lighterage` plan by plan.

    scripts/compare_plans.py record BINARY FILE.jsonl [--quick] [--models FILE ...]
    scripts/compare_plans.py diff OLD.jsonl NEW.jsonl

A refactoring of the planner must leave every plan as it was. Each line holds the peak, the step
time, the curve and a hash of the final program (schedule, addresses, simulated times) for one
model, device, budget and planner.
"""

import argparse
import glob
import hashlib
import json
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DEVICES = ["cpu", "a100-80g", "h200"]
BUDGETS = ["100%", "80%", "60%", "40%", "1"]
PLANNERS = ["auto", "keep", "greedy", "offload", "protrain"]


def models():
    found = glob.glob(os.path.join(HERE, "tests/data/models/*/joint_*.pt2"))
    return sorted(found) + [os.path.join(HERE, "examples/gpt2/gpt2.pt2")]


def run(binary, model, device, budget, planner, more):
    command = [binary, "plan", model, "--device", device, "--budget", budget]
    command += ["--planner", planner, "--dump-ir-after", "sync", *more]
    report = subprocess.run([*command, "--json"], capture_output=True, text=True)
    # The dump comes first, the report is the last line.
    dump, _, last = report.stdout.rstrip("\n").rpartition("\n")
    figures = {}
    if report.returncode == 0:
        data = json.loads(last)
        figures = {k: data[k] for k in sorted(data) if k not in IGNORED}
    # Only the numbers: the words of an error may change.
    first = report.stderr.partition("\n")[0]
    error = "" if report.returncode == 0 else " ".join(re.findall(r"\d+ bytes", first))
    line = {
        "model": os.path.relpath(model, HERE) if model.startswith(HERE) else model,
        "device": device,
        "budget": budget,
        "planner": planner,
        "more": more,
        "code": report.returncode,
        "program": hashlib.sha256(dump.encode()).hexdigest()[:16],
        "error": error,
        "figures": figures,
    }
    smallest = re.search(r"needs .*?\((\d+) bytes\)", first)
    return line, smallest and smallest.group(1)


# Figures that do not depend on the plan.
IGNORED = {"device", "model", "optimizer", "planner", "unsupported", "update"}


def cases(quick, files):
    for model in files:
        dim = ["--dim", "batch=4"] if "dynbatch" in model else []
        coarse = "coarse" in model
        for device in DEVICES if not quick else ["cpu", "h200"] if coarse else ["a100-80g"]:
            for budget in BUDGETS:
                for planner in PLANNERS if not quick or budget == "60%" else ["auto"]:
                    for kernels in ["generated", "plain"] if budget == "60%" and planner == "auto" else ["generated"]:
                        more = ["--optimizer", "adamw", "--kernels", kernels, *dim]
                        yield model, device, budget, planner, more


def record(args):
    with open(args.out, "w") as out:
        for model, device, budget, planner, more in cases(args.quick, args.models or models()):
            line, smallest = run(args.binary, model, device, budget, planner, more)
            print(json.dumps(line, sort_keys=True), file=out, flush=True)
            if smallest:
                line, _ = run(args.binary, model, device, smallest, planner, more)
                line["budget"] = "smallest"
                print(json.dumps(line, sort_keys=True), file=out, flush=True)


def diff(args):
    def read(path):
        rows = (json.loads(line) for line in open(path))
        keys = ["model", "device", "budget", "planner", "more"]
        return {json.dumps([row[k] for k in keys]): row for row in rows}

    old, new = read(args.old), read(args.new)
    worse = 0
    shared = [key for key in old if key in new]
    for key in shared:
        parts = [k for k in old[key] if old[key][k] != new[key].get(k)]
        if parts:
            worse += 1
            print(key, "differs in", ", ".join(parts))
            for part in parts:
                print("   old", str(old[key][part])[:300])
                print("   new", str(new[key].get(part))[:300])
    print(f"{len(shared)} plans compared, {worse} differ; only old {len(old) - len(shared)}")
    sys.exit(1 if worse or not shared else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("record")
    one.add_argument("binary")
    one.add_argument("out")
    one.add_argument("--quick", action="store_true")
    one.add_argument("--models", nargs="*")
    one.set_defaults(run=record)
    two = commands.add_parser("diff")
    two.add_argument("old")
    two.add_argument("new")
    two.set_defaults(run=diff)
    args = parser.parse_args()
    args.run(args)


main()
