"""Writes block.pt2: the GPT block of the post "Memory Management for Optimizing LLMs", between embeddings and a loss.

Pre-norm, attention by its parts (scores, softmax, dropout), an MLP four times as wide with GeLU, dropout before both
residual adds; bf16. The file has no weights. Run it again after a change: `python gen_block.py`.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from lighterage.export import export_joint, save, weightless
from torch import nn

# No two of the formula's terms have the same number of elements by chance: s, b, d, a.
TOKENS, BATCH, WIDTH, HEADS, WORDS, DROPPED = 24, 2, 32, 4, 8, 0.1


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, tokens, width]."""
        y = self.norm1(x)
        q, k, v = (
            part(y).view(BATCH, TOKENS, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(2, 3) * (1 / math.sqrt(WIDTH // HEADS))
        probabilities = F.dropout(F.softmax(scores, -1), DROPPED)
        y = (probabilities @ v).transpose(1, 2).reshape(BATCH, TOKENS, WIDTH)
        x = x + F.dropout(self.out(y), DROPPED)
        y = self.down(F.gelu(self.up(self.norm2(x))))
        return x + F.dropout(y, DROPPED)


class Model(nn.Module):
    """The block's input is made in the forward, and its result is read."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(WORDS, WIDTH), Block()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [batch, tokens]."""
        return self.block(self.words(ids)).float().mean()


def main() -> None:
    """Write the file."""
    torch.set_default_dtype(torch.bfloat16)
    with weightless() as mode:
        model = Model()
    with mode:
        ids = torch.empty(BATCH, TOKENS, dtype=torch.long)
    step = export_joint(model, (ids,), level="coarse", attention="math")
    save(step, Path(__file__).with_name("block.pt2"), weights=False, name="block")


if __name__ == "__main__":
    main()
