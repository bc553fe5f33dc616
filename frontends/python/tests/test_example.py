"""The committed files of examples/ equal the output of their scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data import batches
from fixtures import write_dropout
from model import Config, Gpt2
from safetensors.numpy import load_file

from lighterage import _compat

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/gpt2"
DROPOUT = ROOT / "tests/data/models/dropout-tiny"


def program(path: Path) -> tuple[Any, Any]:
    """The graph of a file, and what its inputs and outputs are."""
    with zipfile.ZipFile(path) as archive:
        module = json.loads(archive.read(f"{path.stem}/models/model.json"))["graph_module"]
    return module["graph"], module["signature"]


def python(*args: str) -> str:
    command = [sys.executable, *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "frontends/python/python")}
    return subprocess.run(command, cwd=EXAMPLE, env=env, check=True, capture_output=True, text=True).stdout


same_torch = pytest.mark.skipif(_compat.release() != _compat.EXACT, reason="another torch traces other operations")


@same_torch
def test_gpt2_file_is_the_models(tmp_path: Path) -> None:
    assert python("export.py", "--out", str(tmp_path / "gpt2.pt2")) == ""
    assert program(tmp_path / "gpt2.pt2") == program(EXAMPLE / "gpt2.pt2")


def test_example_has_at_least_three_million_parameters() -> None:
    assert 3_000_000 <= sum(parameter.numel() for parameter in Gpt2(Config()).parameters())


def test_batches_are_the_texts() -> None:
    committed = load_file(EXAMPLE / "batches.safetensors")
    expected = batches((EXAMPLE / "text.txt").read_bytes(), Config(), 40, 0)
    assert committed.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(committed[name], value)


def test_label_is_the_byte_after_its_input() -> None:
    committed = load_file(EXAMPLE / "batches.safetensors")
    np.testing.assert_array_equal(committed["batch.0.input_ids"][:, 1:], committed["batch.0.labels"][:, :-1])


@same_torch
def test_dropout_fixture_is_the_scripts(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_dropout(tmp_path / "dropout-tiny")
    for file in ("joint_core.pt2", "joint_coarse.pt2"):
        assert program(tmp_path / "dropout-tiny" / file) == program(DROPOUT / file)


def test_eager_trains_and_starts_from_given_weights(tmp_path: Path) -> None:
    start = str(tmp_path / "start.safetensors")
    first = [json.loads(line) for line in python("eager.py", "--steps", "3", "--save-init", start).splitlines()]
    again = [json.loads(line) for line in python("eager.py", "--steps", "3", "--init", start).splitlines()]
    assert [line["loss"] for line in first] == [line["loss"] for line in again]
    assert first[2]["loss"] < first[0]["loss"]
    assert first[0].keys() == {"step", "loss", "ms"}
