"""Frozen matrices in NF4, and adapters beside them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lighterage as lt
from lighterage import step as module


class Adapted(nn.Module):
    """Two frozen layers, the second with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 64)
        self.down, self.up = nn.Linear(96, 4, bias=False), nn.Linear(4, 64, bias=False)
        for layer in (self.first, self.second):
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        h = torch.tanh(self.first(x))
        loss: torch.Tensor = (self.second(h) + self.up(self.down(h)) - x).square().mean()
        return loss


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]


def test_a_step_computes_with_the_numbers_of_the_codes() -> None:
    """The model's matrices are those numbers, so that eager mode has the step's losses."""
    torch.manual_seed(0)
    model = Adapted()
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = torch.randn(16, 64)
    ours = torch.optim.AdamW(trained(model), lr=1e-2)
    step = lt.compile(model, ours, example=x, base="nf4", budget="70%")
    assert sorted(step.base) == ["first.weight", "second.weight"]
    assert step.check is not None
    for name, p in model.named_parameters():
        share = float((p - whole[name]).abs().max() / whole[name].abs().max())
        assert (0.01 < share < 0.2) if name in step.base else share == 0, name

    eager = copy.deepcopy(model)
    theirs = torch.optim.AdamW(trained(eager), lr=1e-2)
    for _ in range(20):
        theirs.zero_grad()
        expected = eager(x)
        expected.backward()
        theirs.step()
        assert abs(step(x).item() - expected.item()) <= 1e-5 * expected.item()
    # Steps do not read the model's matrices: their memory may be given back.
    for path in step.base:
        model.get_parameter(path).data = torch.empty(0)
    theirs.zero_grad()
    assert abs(step(x).item() - eager(x).item()) <= 1e-5 * eager(x).item()


def test_bytes() -> None:
    """4 bits, and the scales, instead of 32 bits."""
    model = Adapted()
    options: dict[str, Any] = {"example": torch.randn(16, 64), "planner": "keep"}
    whole, stored = (lt.plan(model, "adamw", base=base, **options) for base in ("whole", "nf4"))
    n = 64 * 96
    # Of one matrix all numbers are there at one moment. The second scales are one f32 a matrix, and so is the mean.
    # Between tensors are gaps.
    assert abs((whole.keep_peak - stored.keep_peak) - 2 * (4 * n - n // 2 - n // 64 - 8)) <= 4 * n + 256


def test_a_model_that_fails_the_comparison_has_its_numbers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had been compiled."""

    def fail(*_: Any) -> None:
        raise lt.MismatchError("for a test")

    monkeypatch.setattr(module.Step, "_compared", fail)
    model = Adapted()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(lt.MismatchError):
        lt.compile(model, torch.optim.AdamW(trained(model)), example=torch.randn(16, 64), base="nf4")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_of_peft(tmp_path: Path, dora: bool) -> None:
    """PEFT writes the adapters that a step over NF4 trains, and reads them into a compiled model."""
    peft = pytest.importorskip("peft", reason="this is a test of PEFT")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    base = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    targets = ["q_proj", "v_proj", "down_proj"]
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=targets, use_dora=dora))
    ids = torch.randint(96, (4, 16))
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    step = lt.compile(model, optimizer, example=batch, base="nf4")
    # Four matrices of attention and three of the MLP in each layer.
    assert len(step.base) == 14
    first = step(**batch).item()
    for _ in range(9):
        step(**batch)
    model.save_pretrained(str(tmp_path))
    with torch.no_grad():
        reached = model(**batch).loss.item()
    assert reached < first - 0.05
    after = step(**batch).item()
    assert abs(after - reached) <= 2e-2 * reached

    # The adapters of the file again, into the memory of the step.
    for _ in range(5):
        step(**batch)
    from safetensors.torch import load_file

    peft.set_peft_model_state_dict(model, load_file(tmp_path / "adapter_model.safetensors"))
    assert step(**batch).item() == after
