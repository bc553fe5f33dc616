"""The example with torch.compile trains as its twin in eager mode does, with half the memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from entry_point import name_the_backend

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/transformers/train.py"
# The same random weights in both runs, and what was planned.
RUN = """
import runpy, sys, torch
torch.manual_seed(0)
runpy.run_path(sys.argv[1])
import lighterage
print([(plan.peak, plan.keep_peak) for plan in lighterage.stats().plans], lighterage.stats().eager_graphs)
"""


def losses(script: Path, path: list[Path]) -> tuple[list[float], str]:
    """The losses that a script prints, and what was planned."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-c", RUN, str(script)]
    ran = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return [float(loss) for loss in re.findall(r"loss (\S+)", ran.stdout)], ran.stdout.splitlines()[-1]


def test_the_example_trains_as_in_eager_mode(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    name_the_backend(tmp_path)
    path = [ROOT / "frontends/python/python", tmp_path]
    text = EXAMPLE.read_text()
    assert text.count("range(20)") == 1
    # As it is, with fewer steps.
    short = tmp_path / "short.py"
    short.write_text(text.replace("range(20)", "range(6)"))
    ours, planned = losses(short, path)
    lines = short.read_text().splitlines()
    # Beside the docstring.
    assert sum(bool(line) for line in lines[1:]) <= 12
    twin = tmp_path / "twin.py"
    twin.write_text("\n".join(line for line in lines if "compile" not in line))
    theirs, nothing = losses(twin, path)
    assert nothing == "[] 0"
    assert len(ours) == 6
    assert ours[-1] < ours[0] - 1
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=2e-4)
    ((peak, keep),) = re.findall(r"\((\d+), (\d+)\)\] 0", planned)
    assert int(peak) <= int(keep) / 2


def test_the_example_of_a_whole_step_trains(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = [ROOT / "frontends/python/python"]
    text = EXAMPLE.with_name("step.py").read_text()
    assert text.count("range(20)") == 1
    short = tmp_path / "short.py"
    short.write_text(text.replace("range(20)", "range(6)"))
    ours, _ = losses(short, path)
    assert len(ours) == 6
    assert ours[-1] < ours[0] - 1


def test_the_notebook_runs() -> None:
    pytest.importorskip("transformers")
    cells = json.loads((ROOT / "examples/report.ipynb").read_text())["cells"]
    namespace: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
    assert namespace["plan"].peak <= namespace["plan"].budget
    assert namespace["plan"]._repr_html_().startswith("<div><table>")
