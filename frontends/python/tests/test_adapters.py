"""Adapters that the command saves, in PEFT; 8-bit AdamW of bitsandbytes."""

from __future__ import annotations

import copy
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lighterage as lt

ROOT = Path(__file__).parents[3]
IDS = torch.arange(4 * 64).reshape(4, 64) % 251


def command() -> str:
    """The command of this checkout."""
    built = [ROOT / f"target/{profile}/lighterage" for profile in ("debug", "release")]
    found = [str(path) for path in built if path.exists()]
    if not found:
        pytest.skip("this is a test of the command: cargo build -p lighterage-cli")
    return found[0]


def test_peft_reads_adapters_of_the_command(tmp_path: Path) -> None:
    """A LLaMA of the example is trained by the command; PEFT reads its adapters, and computes the command's loss."""
    peft = pytest.importorskip("peft", reason="this is a test of PEFT")
    adapted = runpy.run_path(str(ROOT / "examples/lora/export.py"))["adapted"]
    script = [sys.executable, "-W", "ignore", str(ROOT / "examples/lora/export.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "frontends/python/python")}
    options = ["--out", str(tmp_path), "--dtype", "float32", "--layers", "1"]
    subprocess.run([*script, *options], check=True, env=env)
    data = ["--batches", str(tmp_path / "batches.safetensors"), "--kernels", "plain"]
    train = [command(), "train", str(tmp_path / "lora.pt2"), "--optimizer", "adamw", "--lr", "1e-2", *data]
    adapters = str(tmp_path / "adapters")
    subprocess.run([*train, "--steps", "5", "--save-adapters", adapters], check=True)
    again = subprocess.run([*train, "--steps", "1", "--adapters", adapters, "--json"], check=True, capture_output=True)
    ours = float(again.stdout.split(b'"loss":')[1].split(b",")[0])

    base = adapted(1, 64, 4, torch.float32).unload()
    model = peft.PeftModel.from_pretrained(base, adapters)
    from safetensors.torch import load_file

    ids = load_file(tmp_path / "batches.safetensors")["batch.0.input_ids"]
    with torch.no_grad():
        theirs = model(input_ids=ids, labels=ids).loss.item()
    assert abs(ours - theirs) <= 1e-5 * theirs
    untrained = adapted(1, 64, 4, torch.float32)
    with torch.no_grad():
        assert untrained(input_ids=ids, labels=ids).loss.item() > theirs + 0.01


def test_peft_reads_adapters_that_the_command_adds(tmp_path: Path) -> None:
    """From the files of a published mixture of experts alone; PEFT computes the command's loss."""
    peft = pytest.importorskip("peft", reason="this is a test of PEFT")
    from safetensors.torch import save_file
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    base, ids = str(tmp_path / "base"), torch.randint(97, (2, 16))
    MixtralForCausalLM(config).bfloat16().save_pretrained(base, max_shard_size="40KB")
    assert (tmp_path / "base/model.safetensors.index.json").exists()
    save_file({"batch.0.input_ids": ids, "batch.0.labels": ids.clone()}, tmp_path / "batches.safetensors")
    train = [command(), "train", f"{base}/config.json", "--dim", "sequence=16", "--dim", "batch=2", "--init", base]
    train += ["--batches", str(tmp_path / "batches.safetensors"), "--optimizer", "adamw", "--lr", "1e-2"]
    train += ["--kernels", "plain", "--json"]
    adapters = str(tmp_path / "adapters")
    added = ["--steps", "5", "--add-lora", "r=4,alpha=16", "--save-adapters", adapters]
    first = subprocess.run([*train, *added], check=True, capture_output=True)
    read = ["--steps", "1", "--add-lora", adapters, "--adapters", adapters]
    again = subprocess.run([*train, *read], check=True, capture_output=True)
    before, ours = (float(run.stdout.split(b'"loss":')[1].split(b",")[0]) for run in (first, again))

    model = MixtralForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        assert abs(before - model(input_ids=ids, labels=ids).loss.item()) <= 1e-5 * before
        theirs = peft.PeftModel.from_pretrained(model, adapters)(input_ids=ids, labels=ids).loss.item()
    assert abs(ours - theirs) <= 1e-5 * theirs
    assert ours < before


def mean_square(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss."""
    y: torch.Tensor = net(x)
    return y.square().mean()


def test_eight_bit_adamw_of_bitsandbytes() -> None:
    """Losses, states under its names, and its own steps in between."""
    library: Any = pytest.importorskip("bitsandbytes", reason="this is a test of bitsandbytes")
    torch.manual_seed(0)
    eager = torch.nn.Sequential(torch.nn.Linear(72, 72), torch.nn.Tanh(), torch.nn.Linear(72, 3))
    model = copy.deepcopy(eager)
    x = torch.randn(8, 72)

    options = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    theirs, ours = (library.optim.AdamW8bit(m.parameters(), **options) for m in (eager, model))
    step = lt.compile(model, ours, example=(x,), loss_fn=mean_square, kernels="plain")

    def own(net: torch.nn.Module, optimizer: Any) -> float:
        optimizer.zero_grad()
        loss = mean_square(net, x)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.item()

    for k in range(12):
        expected = own(eager, theirs)
        # Both update the same bytes and the same count.
        loss = own(model, ours) if k == 5 else step(x).item()
        assert abs(loss - expected) <= 2e-2 * abs(expected), k
    weight = model[0].weight
    state = ours.state[weight]
    assert state["state1"].dtype == torch.uint8
    assert state["absmax1"].shape == (21,)
    assert int(state["step"]) == 12
    assert ours.state[model[0].bias]["state1"].dtype == torch.float32
    small = library.optim.AdamW8bit(model.parameters(), min_8bit_size=16)
    with pytest.raises(lt.Unsupported, match="min_8bit_size"):
        lt.compile(model, small, example=(x,), loss_fn=mean_square)
