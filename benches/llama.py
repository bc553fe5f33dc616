"""Write a small LLaMA's loss and gradients, without weights.

For benches/accuracy.py and, larger, for benches/step_time.py; it trains on examples/gpt2's batches.

usage: llama.py --out llama.pt2
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends/python/python"))

from lighterage.export import export_joint, save, weightless


@dataclasses.dataclass(frozen=True)
class Config:
    """4.49 million parameters with these values."""

    vocabulary: int = 256
    layers: int = 6
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 688
    sequence: int = 128
    batch: int = 8


class Norm(nn.Module):
    """Root mean square normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [.., width]."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x: [batch, heads, sequence, width of a head]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with fewer keys than queries."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        head = config.width // config.heads
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, config.kv_heads * head, bias=False)
        self.v = nn.Linear(config.width, config.kv_heads * head, bias=False)
        self.o = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [batch, sequence, width]."""
        config = self.config
        batch, sequence, width = x.shape
        head = width // config.heads
        q = self.q(x).view(batch, sequence, config.heads, head).transpose(1, 2)
        k = self.k(x).view(batch, sequence, config.kv_heads, head).transpose(1, 2)
        v = self.v(x).view(batch, sequence, config.kv_heads, head).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if config.kv_heads < config.heads:
            repeats = config.heads // config.kv_heads
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(batch, sequence, width))


class Block(nn.Module):
    """Attention and a gated MLP, each after a norm and with a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(config.width), Norm(config.width)
        self.attention = Attention(config)
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [batch, sequence, width]."""
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The mean loss of predicting `labels` from `input_ids`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = Norm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """input_ids, labels: [batch, sequence]."""
        head = self.config.width // self.config.heads
        frequencies = torch.exp(torch.arange(0, head, 2, dtype=torch.float32) * (-9.210340371976184 / head))
        angles = torch.arange(self.config.sequence, dtype=torch.float32)[:, None] * frequencies[None, :]
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def main() -> None:
    """Read the arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    config = Config()
    with weightless() as mode:
        model = Llama(config)
    with mode:
        ids, labels = (torch.empty(config.batch, config.sequence, dtype=torch.long) for _ in range(2))
    step = export_joint(model, (ids, labels), level="coarse", attention="fused")
    save(step, args.out, weights=False, name="llama")


if __name__ == "__main__":
    main()
