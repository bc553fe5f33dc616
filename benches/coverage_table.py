"""The page of benches/coverage.py: docs/coverage.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]

INTRODUCTION = """\
# Coverage

Which models train with the [Python package](python.md), and how far they are from eager PyTorch.
`benches/coverage.py --table` writes this page from what `benches/coverage.py` found, on {date} with torch {torch}
and transformers {transformers}.

Each model is tiny, has random weights, and trains {steps} steps of AdamW on the CPU: in eager mode, by `torch.compile`
with the backend, and by a whole step of `lighterage.compile`; the latter two with all memory, and with 60 % of what
keeping everything needs, or with more where that is too little. Losses and gradients are the same bits at both budgets.

* **Loss** and **gradient** are the largest differences from eager mode: of {steps} losses, relative, and of the first
  gradients, relative to the largest value of each. A model passes with at most {loss:.0e} and {gradient:.0e}. Where it
  amplifies rounding, such as one in bf16, (r) says that it is no more than {rounding:.0f} times as far from float64 as
  eager mode is. (m): dropout has other masks than in eager mode; the first loss is one that eager mode has, too.
* **Graphs** are those of `torch.compile`, with the breaks between them. Between two graphs, PyTorch runs in eager mode.
* **Ops** are the calls that the whole step was traced as. **Externs** are calls that PyTorch computes inside of a plan,
  because the compiler has no kernel: their number in each step. The operators are below.
* **Budget** is the smallest share of keep at which the model trained, of 60 %, 70 %, 80 %, 90 % and 100 %. Parameters,
  gradients and moments are the largest part of many of these models.
* **Planning** is the time of the whole step's plan for one budget, in seconds of the processor, by the package's build
  in use. Where it is not given, the row is of a run that did not measure it.

"""


def passes(row: Row) -> bool:
    """Whether a model trains in both ways."""
    return all(way in row and "error" not in row[way] for way in ("compile", "whole"))


def externs(row: Row) -> dict[str, int]:
    """The calls of a step that PyTorch computes, by operator: of the way with more."""
    found = [row.get(way, {}).get("externs") or {} for way in ("compile", "whole")]
    return max(found, key=lambda each: sum(each.values()))


def page(rows: dict[str, Row], groups: dict[str, list[str]], facts: dict[str, Any]) -> str:
    """The page. groups: the names of models under their titles; facts: what the introduction says."""
    text = [INTRODUCTION.format(**facts)]
    for title, names in groups.items():
        known = [name for name in names if name in rows]
        if not known:
            continue
        right = [name for name in known if passes(rows[name])]
        native = [name for name in right if not externs(rows[name])]
        text.append(f"## {title}\n\n")
        text.append(f"{len(right)} of {len(known)} train in both ways, {len(native)} of them without an extern.\n\n")
        text.append(_table(rows, known))
    text.append(_failures(rows))
    text.append(_operators(rows))
    return "".join(text).rstrip("\n") + "\n"


HEADS = (
    "model",
    "graphs",
    "externs",
    "loss",
    "gradient",
    "budget",
    "ops",
    "externs",
    "loss",
    "gradient",
    "budget",
    "planning",
)


def _table(rows: dict[str, Row], names: Iterable[str]) -> str:
    lines = [
        "| | `torch.compile` | | | | | whole step | | | | | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines.append(f"| {' | '.join(HEADS)} |")
    for name in names:
        row = rows[name]
        if "error" in row:
            lines.append(f"| {name} | failed | | | | | failed | | | | | |")
            continue
        traced, whole = row["compile"], row["whole"]
        graphs = f"{traced.get('graphs', '')}"
        if traced.get("breaks"):
            graphs += f", {traced['breaks']} breaks"
        planning = "" if whole.get("planning") is None else f"{whole['planning']:.1f}"
        cells = [graphs, *_cells(traced, row), str(whole.get("nodes", "")), *_cells(whole, row), planning]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n"


def _cells(way: Row, row: Row) -> list[str]:
    """Externs, loss, gradient and budget."""
    if "error" in way:
        return ["", "failed", "", ""]
    loss, gradient = f"{way['loss']:.0e}", f"{way['gradient']:.0e}"
    if row.get("random"):
        loss, gradient = "(m)", ""
    elif "eager" in way:
        loss += " (r)"
    budget = f"{way['budget']:.0%}" if "budget" in way else ""
    return [str(sum(way["externs"].values())), loss, gradient, budget]


def _failures(rows: dict[str, Row]) -> str:
    lines = []
    for name, row in rows.items():
        for way, title in (("compile", "torch.compile"), ("whole", "whole step")):
            error = row.get("error") or row.get(way, {}).get("error")
            if error:
                short = " ".join(str(error).split())[:280].replace("|", "\\|").replace("<", "&lt;")
                lines.append(f"| {name} | {title} | {short} |")
    if not lines:
        return ""
    return "\n".join(["## What fails", "", "| model | | |", "|---|---|---|", *lines]) + "\n\n"


def _operators(rows: dict[str, Row]) -> str:
    """Which operators PyTorch computes, and in which models."""
    users: dict[str, list[str]] = {}
    calls: Counter[str] = Counter()
    for name, row in rows.items():
        for operator, n in externs(row).items():
            users.setdefault(operator, []).append(name)
            calls[operator] += n
    if not users:
        return ""
    order = sorted(users, key=lambda operator: (-len(users[operator]), operator))
    lines = [f"| `{operator}` | {calls[operator]} | {', '.join(users[operator])} |" for operator in order]
    return "\n".join(["## Externs", "", "| operator | calls | models |", "|---|---|---|", *lines]) + "\n"
