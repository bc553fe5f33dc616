"""Mixed precision as an option: steps of models in f32 against eager mode under `torch.autocast`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lighterage as lt

transformers = pytest.importorskip("transformers")

STEPS = 6
Batches = list[dict[str, torch.Tensor]]


def _ids(vocabulary: int) -> Batches:
    batches = torch.randint(vocabulary, (STEPS, 4, 16))
    return [{"input_ids": ids, "labels": ids} for ids in batches]


def gpt2() -> tuple[nn.Module, Batches]:
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=64, n_positions=16, vocab_size=96, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config), _ids(96)


def llama() -> tuple[nn.Module, Batches]:
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config), _ids(96)


def bert() -> tuple[nn.Module, Batches]:
    config = transformers.BertConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return transformers.BertForMaskedLM(config), _ids(96)


class Images(nn.Module):
    """A network of convolutions with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, groups=2),
            nn.GroupNorm(4, 32),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.body(x), y)


def images() -> tuple[nn.Module, Batches]:
    x, y = torch.randn(STEPS, 8, 3, 12, 12), torch.randint(10, (STEPS, 8))
    return Images(), [{"x": x[k], "y": y[k]} for k in range(STEPS)]


class Regression(nn.Module):
    """Linear layers with the mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.body(x).float(), y)


def regression() -> tuple[nn.Module, Batches]:
    x = torch.randn(STEPS, 16, 12)
    return Regression(), [{"x": x[k], "y": x[k, :, :3] * 0.5} for k in range(STEPS)]


class Encoder(nn.Module):
    """PyTorch's own encoder layer, with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layer(x)).flatten(0, 1), y.flatten())


def encoder() -> tuple[nn.Module, Batches]:
    x, y = torch.randn(STEPS, 4, 8, 32), torch.randint(5, (STEPS, 4, 8))
    return Encoder(), [{"x": x[k], "y": y[k]} for k in range(STEPS)]


def _loss(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result.loss


@pytest.mark.parametrize("make", [gpt2, llama, bert, images, regression, encoder])
def test_losses_are_those_of_autocast(make: Any) -> None:
    torch.manual_seed(5)
    model, batches = make()
    models = [copy.deepcopy(model) for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected = []
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss: Any = _loss(model(**batch))
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    found = []
    for own, budget in zip(models, ["100%", "70%"], strict=True):
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3)
        step = lt.compile(own, optimizer, example=batches[0], budget=budget, precision="bf16")
        found.append([float(step(**batch)) for batch in batches])
        assert all(p.dtype == torch.float32 for p in own.parameters())
    # The same bits within each budget.
    assert found[0] == found[1]
    assert found[0] == pytest.approx(expected, rel=2e-3)


def test_precision_is_one_of_four() -> None:
    model, batches = regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(lt.Error, match="none of f32, tf32, bf16, fp16"):
        lt.compile(model, optimizer, example=batches[0], precision="fp8")


class Foreign(nn.Module):
    """A model with a call that has no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cummax(self.fc(x), 1).values.square().mean()


@pytest.mark.filterwarnings("ignore:PyTorch computes")
def test_calls_without_a_kernel_stay_in_f32() -> None:
    model, x = Foreign(), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x).item()
    step = lt.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), example=(x,), precision="bf16")
    assert step(x).item() == pytest.approx(expected, rel=1e-2)


class Kept(nn.Module):
    """A model that keeps a tensor in the type of its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(8, 8), torch.ones(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        if self.scale.dtype != h.dtype:
            self.scale = self.scale.to(h.dtype)
        return (h * self.scale).square().mean()


def test_the_comparison_leaves_attributes_as_they_were() -> None:
    model = Kept()
    scale = model.scale
    lt.compile(model, torch.optim.SGD(model.parameters()), example=(torch.randn(4, 8),), precision="bf16")
    assert model.scale is scale
