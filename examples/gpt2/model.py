"""A small GPT-2 over bytes, with its loss. The example exports it, and eager PyTorch trains it for comparison."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Config:
    """3.26 million parameters; a step is about 2e10 floating-point operations."""

    vocabulary: int = 256
    layers: int = 4
    width: int = 256
    heads: int = 4
    sequence: int = 128
    batch: int = 8
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, sequence, width]."""
        batch, sequence, width = x.shape
        q, k, v = (
            part.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(batch, sequence, width))


class Mlp(nn.Module):
    """Two layers with a GELU between them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc = nn.Linear(config.width, 4 * config.width)
        self.proj = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, sequence, width]."""
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each after a layer norm and with a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln2 = nn.LayerNorm(config.width)
        self.mlp = Mlp(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, sequence, width]."""
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.drop(self.mlp(self.ln2(x)))


class Gpt2(nn.Module):
    """The mean loss of predicting `labels` from `input_ids`; the head is the token embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = nn.Parameter(torch.zeros(config.sequence, config.width))
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln = nn.LayerNorm(config.width)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """input_ids, labels: [batch, sequence]; label i is the byte after input i."""
        x = self.drop(self.wte(input_ids) + self.wpe)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
