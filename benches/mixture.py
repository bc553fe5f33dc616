"""A LLaMA whose MLPs are mixtures of experts, for benches/step_time.py. Tokens are sorted by expert."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 (it has a grouped product that torch.compile takes in f32)
from llama import Attention, Config, Llama, Norm
from torch import nn

grouped_mm = torch.ops.transformers.grouped_mm_fallback


@dataclasses.dataclass(frozen=True)
class MixtureConfig(Config):
    """`hidden` is the width inside an expert; each token has `chosen` of the `experts`."""

    experts: int = 32
    chosen: int = 4


class Experts(nn.Module):
    """The weighted sum of the experts that a router chooses for each token."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.hidden, config.width))
        self.down = nn.Parameter(torch.empty(config.experts, config.width, config.hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, sequence, width]."""
        config, tokens = self.config, x.flatten(0, 1)
        shares, experts = torch.topk(F.softmax(self.router(tokens), dim=-1), config.chosen, dim=-1)
        shares = shares / shares.sum(-1, keepdim=True)
        expert, order = torch.sort(experts.flatten())
        ends = torch.histc(expert.float(), config.experts, 0, config.experts - 1).cumsum(0, dtype=torch.int32)
        token = order // config.chosen
        gate, up = grouped_mm(tokens[token], self.gate_up.transpose(1, 2), ends).chunk(2, dim=-1)
        rows = grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), ends) * shares.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, token, rows).view(x.shape)


class Block(nn.Module):
    """Attention and experts, each after a norm and with a residual."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(config.width), Norm(config.width)
        self.attention = Attention(config)
        self.experts = Experts(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [batch, sequence, width]."""
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.experts(self.norm2(x))


class Mixture(Llama):
    """The mean loss of predicting `labels` from `input_ids`."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(dataclasses.replace(config, layers=0))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
