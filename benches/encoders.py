"""Transformers with an encoder for benches/models.py: a BERT and a T5, with their training losses."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of both."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    sequence: int
    batch: int


class BertBlock(nn.Module):
    """Attention in both directions and an MLP, each normalised after its sum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, sequence, width]."""
        q, k, v = (_heads(layer(x), self.heads) for layer in (self.q, self.k, self.v))
        x = self.norm1(x + self.out(_joined(F.scaled_dot_product_attention(q, k, v))))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """A BERT whose output layer is its embedding, as a masked language model."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.sequence, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.blocks = nn.ModuleList(BertBlock(config.width, config.heads) for _ in range(config.layers))
        self.dense, self.last = nn.Linear(config.width, config.width), nn.LayerNorm(config.width)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of all labels. Both: [batch, sequence]."""
        x = self.norm(self.tokens(input_ids) + self.positions.weight)
        for block in self.blocks:
            x = block(x)
        x = self.last(F.gelu(self.dense(x)))
        logits = F.linear(x, self.tokens.weight, self.bias)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Rms(nn.Module):
    """Root mean square normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [.., width]."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class T5Attention(nn.Module):
    """Attention without biases and without a scale, to which a position's bias is added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, memory: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Both: [batch, sequence, width]; bias: [1, heads, queries, keys]."""
        q, k, v = _heads(self.q(x), self.heads), _heads(self.k(memory), self.heads), _heads(self.v(memory), self.heads)
        scores = q @ k.transpose(2, 3)
        if bias is not None:
            scores = scores + bias
        return self.o(_joined(scores.softmax(-1) @ v))


class T5Block(nn.Module):
    """A block of the encoder, or of the decoder, which also attends to the encoder's result."""

    def __init__(self, width: int, heads: int, cross: bool) -> None:
        super().__init__()
        self.norm1, self.attention = Rms(width), T5Attention(width, heads)
        self.norm2 = Rms(width) if cross else None
        self.cross = T5Attention(width, heads) if cross else None
        self.norm3, self.up, self.down = (
            Rms(width),
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: torch.Tensor, bias: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """x, memory: [batch, sequence, width]."""
        y = self.norm1(x)
        x = x + self.attention(y, y, bias)
        if self.norm2 is not None and self.cross is not None and memory is not None:
            x = x + self.cross(self.norm2(x), memory, None)
        return x + self.down(F.relu(self.up(self.norm3(x))))


class T5(nn.Module):
    """A T5 whose output layer is its embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.scale, self.sequence = config.width**-0.5, config.sequence
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.from_both, self.from_left = (nn.Embedding(BUCKETS, config.heads) for _ in range(2))
        sizes = (config.width, config.heads)
        self.encoder = nn.ModuleList(T5Block(*sizes, cross=False) for _ in range(config.layers))
        self.decoder = nn.ModuleList(T5Block(*sizes, cross=True) for _ in range(config.layers))
        self.norm1, self.norm2 = Rms(config.width), Rms(config.width)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of all labels. Both: [batch, sequence]."""
        at = torch.arange(self.sequence)
        apart = at[None, :] - at[:, None]
        both = self.from_both(_buckets(apart, two_ways=True)).permute(2, 0, 1)[None]
        left = self.from_left(_buckets(apart, two_ways=False)).permute(2, 0, 1)[None]
        left = left + torch.where(apart > 0, -1e9, 0.0)

        x = self.tokens(input_ids)
        for block in self.encoder:
            x = block(x, both)
        memory = self.norm1(x)
        start = torch.zeros_like(labels[:, :1])
        y = self.tokens(torch.cat([start, labels[:, :-1]], 1))
        for block in self.decoder:
            y = block(y, left, memory)
        logits = F.linear(self.norm2(y) * self.scale, self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


BUCKETS, FAR = 32, 128


def _buckets(apart: torch.Tensor, *, two_ways: bool) -> torch.Tensor:
    """Return the bucket of each distance: one for each small distance, ever larger ones up to FAR."""
    buckets, first = BUCKETS, torch.zeros_like(apart)
    if two_ways:
        buckets //= 2
        first = (apart > 0) * buckets
        distance = apart.abs()
    else:
        distance = (-apart).clamp(min=0)
    exact = buckets // 2
    far = torch.log(distance.clamp(min=1) / exact) / math.log(FAR / exact) * (buckets - exact)
    far = (exact + far.long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, far)


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[batch, sequence, width] to [batch, heads, sequence, width of a head]."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _joined(x: torch.Tensor) -> torch.Tensor:
    """Undo `_heads`."""
    return x.transpose(1, 2).flatten(2)
