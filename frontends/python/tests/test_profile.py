"""Measured times, in the place of a device's figures."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lighterage.backend import backend
from torch import nn

import lighterage as lt
from lighterage import Plan

BATCH = (torch.randn(8, 64, generator=torch.Generator().manual_seed(1)),)


class Net(nn.Module):
    """Linear layers, and a loss."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of x."""
        loss: torch.Tensor = (self.layers(x) - x).square().mean()
        return loss


def compiled(model: nn.Module, example: Any = BATCH, **options: Any) -> lt.Step:
    """A step with the kernels that need no generator."""
    optimizer = torch.optim.AdamW(model.parameters())
    return lt.compile(model, optimizer, example=example, kernels="plain", **options)


def test_a_step_is_planned_by_its_measured_times(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "step.prof"
    first = compiled(Net())
    measured = first.plan.profile(file)
    n_ops, micros = measured["ops"], measured["micros"]
    assert n_ops > 5
    assert micros > 0
    assert measured["fastest_micros"] > 0
    assert measured["seconds"] > 0
    assert measured["refused"] == {}
    with caplog.at_level(logging.WARNING, logger="lighterage"):
        step = compiled(Net(), profile=file, budget="60%")
    assert step.plan.guessed == []
    assert not caplog.records
    # The same kernels, of which the device's file says other times. Updates are the rest of the step.
    whole = compiled(Net(), profile=str(file))
    assert 0 < whole.plan.kernel_micros < micros
    assert whole.plan.kernel_micros != first.plan.kernel_micros
    assert [step(*BATCH).item() for _ in range(3)] == [first(*BATCH).item() for _ in range(3)]
    assert "predicted step" in repr(step.plan)
    assert step.plan.html()

    # What it has is not measured again, and what it lacks is added.
    before = file.read_text()
    assert first.plan.profile(file, fastest=True)["ops"] == n_ops
    wide = torch.randn(24, 64)
    with caplog.at_level(logging.WARNING, logger="lighterage"):
        other = compiled(Net(3), example=wide, profile=file)
    assert other.plan.guessed
    assert "are guesses" in caplog.text
    assert other.plan.profile(file, repeat=2)["ops"] > n_ops
    ops = [line for line in before.splitlines() if line.startswith('[ops."')]
    assert ops
    assert all(line in file.read_text() for line in ops)
    assert compiled(Net(3), example=wide, profile=file).plan.guessed == []


def test_graphs_of_the_backend_too(tmp_path: Path) -> None:
    file = tmp_path / "step.prof"
    compiled(Net()).plan.profile(file)
    model = Net()
    options: dict[str, Any] = {"kernels": "plain", "profile": file}
    planned = torch.compile(model, backend=backend, options=options)
    loss = planned(*BATCH)
    loss.backward()
    assert loss.item() == pytest.approx(Net()(*BATCH).item(), abs=1e-6)


def test_a_profile_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "step.prof"
    with pytest.raises(lt.Error, match=r"step\.prof"):
        compiled(Net(), profile=file)
    plan: Plan = compiled(Net()).plan
    plan.profile(file)
    with pytest.raises(lt.Error, match="plain kernels"):
        lt.plan(Net(), "adamw", example=BATCH, profile=file)
    assert lt.plan(Net(), "adamw", example=BATCH, profile=file, kernels="plain").guessed == []
    with pytest.raises(lt.Error, match="describes cpu, not h100"):
        compiled(Net(), device="h100").plan.profile(file)
    with pytest.raises(lt.Error, match="cpu"):
        compiled(Net(), device="h100", profile=file)
    whole = file.read_text()
    for text in (whole[: len(whole) // 2], "", "no profile"):
        file.write_text(text)
        with pytest.raises(lt.Error, match=r"step\.prof"):
            compiled(Net(), profile=file)
        with pytest.raises(lt.Error, match=r"step\.prof"):
            plan.profile(file)
        assert file.read_text() == text
    for repeat in (0, -1, 1001):
        with pytest.raises(lt.Error, match="from 1 to 1000"):
            plan.profile(file, repeat=repeat)
    for absent in (tmp_path / "missing" / "step.prof", tmp_path):
        with pytest.raises(lt.Error, match="a folder that exists"):
            plan.profile(absent)
