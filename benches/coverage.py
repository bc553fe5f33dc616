"""Which models train with the Python package, and how far they are from eager PyTorch.

usage: coverage.py [--only NAME ...] [--out target/coverage.json] [--kernels auto] [--limit 300]
       coverage.py --table docs/coverage.md

Each model of `families*.py` trains some steps three times, in a process of its own: in eager mode, by
`torch.compile(backend="lighterage")` and by `lighterage.compile`; the latter two with all memory and with 60 %
of it, or the least with which a plan is found. A row has the differences from eager mode. Rows of earlier runs stay in
the file, so that `--only` replaces what it names. `--table` writes the page of the rows instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import logging
import math
import multiprocessing
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import coverage_table
import families_more
import torch
from families import CASES, Case
from lighterage._check import distance
from lighterage.backend import backend as lighterage_backend
from lighterage.export import export_joint
from torch import nn

import lighterage
from lighterage import _lighterage

ROOT = Path(__file__).parents[1]
GROUPS = {
    "Families": families_more.FIRST,
    "More models": [name for name in CASES if name not in families_more.FIRST],
}
STEPS, RATE = 5, 1e-3
BETA = 0.9
# The largest differences from eager mode, relative to the largest value of a tensor.
LOSS, GRADIENT = 1e-4, 1e-3
# Gradients that are zero but for rounding are compared with this share of the largest.
NEGLIGIBLE = 1e-2
# A model that amplifies rounding may be this much further from float64 than eager mode is.
ROUNDING = 4.0
# The seeds whose first losses in eager mode say how far other random numbers may lead.
SEEDS = range(12)
SHARES = (0.6, 0.7, 0.8, 0.9, 1.0)
SEED = 7


@dataclasses.dataclass
class Run:
    """What some training steps gave."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]  # of the first step
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


# Three ways to train --------------------------------------------------------------------------------------------------


def built(name: str) -> Case:
    """The case, with the same weights each time."""
    torch.manual_seed(0)
    case = CASES[name]()
    case.model.train()
    return case


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of the parameters to be trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=RATE, betas=(BETA, 0.999))


def looped(case: Case, model: Any) -> Run:
    """A training loop as users write it. model: the case's, or what was made of it."""
    optimizer = adamw(case.model)
    losses, gradients = [], {}
    torch.manual_seed(SEED)
    for i in range(STEPS):
        loss = case.loss_of(model)
        torch.autograd.backward(loss)
        if i == 0:
            gradients = {n: p.grad.clone() for n, p in case.model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return Run(losses, gradients)


def eager(name: str) -> Run:
    """The loop in eager mode."""
    case = built(name)
    return looped(case, case.model)


def exact(name: str) -> Run:
    """The same in float64."""
    case = built(name)
    case.model.double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in case.batch.items()}
    with torch.autocast("cpu", enabled=False), _without_autocast():
        return looped(dataclasses.replace(case, batch=batch), case.model)


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Autocast regions of a case do nothing."""
    enter = torch.autocast.__enter__
    torch.autocast.__enter__ = lambda self: self  # type: ignore[method-assign]
    leave = torch.autocast.__exit__
    torch.autocast.__exit__ = lambda self, *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__, torch.autocast.__exit__ = enter, leave  # type: ignore[method-assign]


def backend(name: str, budget: Any, kernels: str) -> Run:
    """The loop with `torch.compile`. A budget holds for each graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    lighterage.reset()
    case = built(name)
    options = {"budget": budget, "kernels": kernels, "threads": 1}
    run = looped(case, torch.compile(case.model, backend=lighterage_backend, options=options))
    stats = lighterage.stats()
    run.facts = {
        "graphs": stats.graphs,
        "eager_graphs": stats.eager_graphs,
        "breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "reasons": [str(reason).splitlines()[0] for reason in torch._dynamo.utils.counters["graph_break"]],
        "externs": _externs(stats.plans),
    }
    return run


def whole(name: str, budget: Any, kernels: str) -> Run:
    """Steps of `lighterage.compile`."""
    case = built(name)
    optimizer = adamw(case.model)
    torch.manual_seed(SEED)
    with _observed() as seen:
        step = lighterage.compile(
            case.model,
            optimizer,
            case.loss,
            example=case.batch,
            budget=budget,
            kernels=kernels,
            check=budget is None,
            seed=SEED,
            threads=1,
        )
    torch.manual_seed(SEED)
    losses, gradients = [], {}
    for i in range(STEPS):
        losses.append(float(step(**case.batch)))
        if i == 0:
            gradients = {
                n: optimizer.state[p]["exp_avg"] / (1 - BETA)
                for n, p in case.model.named_parameters()
                if "exp_avg" in optimizer.state.get(p, {})
            }
    plan = step.plan
    facts = {
        "nodes": seen["operations"],
        "planning": seen["planning"],
        "externs": _externs([plan]),
        "share": plan.peak / plan.keep_peak,
        "measured": step.measured_peak == plan.peak,
        "kernels": plan.kernels,
    }
    return Run(losses, gradients, facts)


def _externs(plans: list[Any]) -> dict[str, int]:
    """How often a step calls PyTorch, by operator."""
    found: Counter[str] = Counter()
    for plan in plans:
        for operator, _, _, times, _ in plan.externs:
            found[operator.removeprefix("torch.ops.")] += times
    return dict(found)


@contextmanager
def _observed() -> Iterator[dict[str, Any]]:
    """How many operations a step was traced as, and how many seconds of the processor its plan took."""
    seen: dict[str, Any] = {"operations": None, "planning": None}
    plan = _lighterage.compile

    def planned(*args: Any, **options: Any) -> Any:
        start = time.process_time()
        result = plan(*args, **options)
        seen["planning"] = time.process_time() - start
        return result

    def exported(*args: Any, **options: Any) -> Any:
        result = export_joint(*args, **options)
        seen["operations"] = result.info["nodes"]
        return result

    with (
        mock.patch.object(_lighterage, "compile", planned),
        mock.patch("lighterage.step.export_joint", exported),
    ):
        yield seen


# Comparisons ---------------------------------------------------------------------------------------------------------


def distances(ours: Run, theirs: Run) -> tuple[float, float, str]:
    """The largest differences of losses and gradients, and the parameter with the latter."""
    pairs = zip(ours.losses, theirs.losses, strict=True)
    loss = max(abs(a - b) / max(abs(b), 1e-30) if math.isfinite(a) else math.inf for a, b in pairs)
    if ours.gradients.keys() != theirs.gradients.keys():
        (other, *_) = ours.gradients.keys() ^ theirs.gradients.keys()
        return loss, math.inf, other
    largest = max(float(g.abs().max()) for g in theirs.gradients.values() if g.numel())
    each = {n: distance(ours.gradients[n], g, NEGLIGIBLE * largest) for n, g in theirs.gradients.items()}
    worst = max(each, key=lambda name: each[name])
    return loss, each[worst], worst


def compared(name: str, ours: Run, theirs: Run, is_random: bool) -> dict[str, Any]:
    """The differences, and what is wrong with them if anything."""
    loss, gradient, worst = distances(ours, theirs)
    found: dict[str, Any] = {"loss": loss, "gradient": gradient, "worst": worst}
    if is_random:
        low, high = spread(name)
        if not 2 * low - high <= ours.losses[0] <= 2 * high - low:
            found["error"] = f"the first loss is {ours.losses[0]}, and eager mode's are from {low} to {high}"
        return found
    if loss <= LOSS and gradient <= GRADIENT:
        return found
    try:
        truth = exact(name)
    except Exception as error:
        found["error"] = f"differs by {loss:.0e} in the loss, {gradient:.0e} in {worst}; no float64: {_said(error)}"
        return found
    our, their = distances(ours, truth), distances(theirs, truth)
    found["eager"] = {"loss": their[0], "gradient": their[1]}
    limits = max(LOSS, ROUNDING * their[0]), max(GRADIENT, ROUNDING * their[1])
    if not (our[0] <= limits[0] and our[1] <= limits[1] and math.isfinite(gradient)):
        found["error"] = (
            f"differs by {loss:.0e} in the loss, {gradient:.0e} in {worst}; "
            f"from float64: {our[0]:.0e}, {our[1]:.0e}, and eager mode {their[0]:.0e}, {their[1]:.0e}"
        )
    return found


def spread(name: str) -> tuple[float, float]:
    """The smallest and the largest first loss of eager mode with several random numbers."""
    losses = []
    for seed in SEEDS:
        case = built(name)
        torch.manual_seed(seed)
        losses.append(float(case.loss_of(case.model)))
    return min(losses), max(losses)


def same_bits(a: Run, b: Run) -> bool:
    """Whether two runs gave the same losses and gradients."""
    return a.losses == b.losses and all(torch.equal(a.gradients[n], g) for n, g in b.gradients.items())


def tried(name: str, way: Callable[[str, Any, str], Run], theirs: Run, is_random: bool, kernels: str) -> dict[str, Any]:
    """One way to train, with all memory and with little."""
    found: dict[str, Any] = {}
    try:
        full = way(name, None, kernels)
        found |= full.facts | compared(name, full, theirs, is_random)
        if found.get("graphs") == 0:
            found["error"] = "no graph reached the backend"
        for share in SHARES:
            try:
                little = way(name, share, kernels)
            except Exception as error:
                if "no plan fits" not in str(error):
                    raise
                continue
            found["budget"] = share
            found["share"] = little.facts.get("share")
            found["externs_little"] = little.facts["externs"]
            if not same_bits(full, little):
                found.setdefault("error", f"other bits at {share:.0%}: {little.losses} and {full.losses}")
            break
    except Exception as error:
        found["error"] = _said(error)
        found["trace"] = traceback.format_exc()[-3000:]
    return found


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:600]


def row(name: str, kernels: str) -> dict[str, Any]:
    """All of one model."""
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # More threads would wait for each other where other programs run.
    torch.set_num_threads(1)
    theirs = eager(name)
    is_random = built(name).is_random
    whole_step = tried(name, whole, theirs, is_random, kernels)
    return {
        "whole": whole_step,
        "compile": tried(name, backend, theirs, is_random, kernels),
        "random": is_random,
    }


# Processes -----------------------------------------------------------------------------------------------------------


def _work(name: str, kernels: str, out: Connection) -> None:
    try:
        out.send(row(name, kernels))
    except Exception as error:
        out.send({"error": _said(error), "trace": traceback.format_exc()[-3000:]})


def in_process(name: str, kernels: str, limit: float) -> dict[str, Any]:
    """The row of a model from a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._inductor.utils", "transformers.utils.logging", "lighterage.backend"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(name, kernels, theirs))
    start = time.monotonic()
    process.start()
    theirs.close()
    found: dict[str, Any]
    try:
        found = ours.recv() if ours.poll(limit) else {"error": f"took longer than {limit:.0f} s"}
    except EOFError:
        process.join()
        found = {"error": f"the process ended with {process.exitcode}"}
    process.kill()
    process.join()
    return {**found, "seconds": round(time.monotonic() - start, 1)}


def line(name: str, found: dict[str, Any]) -> str:
    """A row for the terminal."""
    if "error" in found:
        return f"{name:18} FAILED {found['error'][:300]}"
    ways = []
    for way in ("whole", "compile"):
        it = found[way]
        if "error" in it:
            ways.append(f"{way} FAILED {it['error'][:250]}")
        else:
            externs = sum(it["externs"].values())
            ways.append(f"{way} ok loss {it['loss']:.0e} gradient {it['gradient']:.0e} externs {externs}")
    return f"{name:18} {'; '.join(ways)} ({found['seconds']} s)"


def facts() -> dict[str, Any]:
    """What the page says about all rows."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    limits = {"steps": STEPS, "loss": LOSS, "gradient": GRADIENT, "rounding": ROUNDING}
    return {**versions, **limits, "date": datetime.date.today().isoformat()}


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="models; by default all")
    parser.add_argument("--out", type=Path, default=ROOT / "target/coverage.json", help="where rows are kept")
    parser.add_argument("--kernels", default="auto", choices=["auto", "plain", "generated"])
    parser.add_argument("--limit", type=float, default=300, help="seconds for a model")
    parser.add_argument("--table", type=Path, help="write the page of the rows here, and run nothing")
    options = parser.parse_args()
    rows = json.loads(options.out.read_text()) if options.out.exists() else {}
    if options.table:
        options.table.write_text(coverage_table.page(rows, GROUPS, facts()), encoding="utf-8")
        return
    for name in options.only or CASES:
        rows[name] = in_process(name, options.kernels, options.limit)
        print(line(name, rows[name]), flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
