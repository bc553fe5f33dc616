"""Writes forwards of `torch.export.export`, without a backward, and the losses of eager training.

Usage: gen_forward.py   (torch 2.11.0; writes beside itself)

`lm.pt2` returns logits: a causal model with tied embeddings, a padding row, attention by
`scaled_dot_product_attention`, a frozen parameter, and a part without gradients. `cnn.pt2` returns its loss:
convolutions, a batch norm that writes its running statistics, and a ReLU in place. `edges.pt2` has functions of numbers
where a formula for them has no derivative. `detached.pt2` detaches a value that depends on its parameters.
The `.safetensors` files have the batches (`batch.K.INPUT`), the losses of AdamW with its defaults, one for each step
(`losses`), and each parameter and buffer after the last step (`after.PATH`).
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

BATCH, TOKENS, WORDS, WIDTH, HEADS = 3, 8, 23, 16, 2
IMAGE, CLASSES = 8, 5
STEPS, BATCHES = 10, 3
PADDING, IGNORED = 0, -100


class Language(nn.Module):
    """One block of a causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=PADDING)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.norm1, self.norm2, self.last = (nn.LayerNorm(WIDTH) for _ in range(3))
        # A bias of keys has the gradient 0, so AdamW would follow its rounding errors.
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.out.bias.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [batch, tokens]."""
        with torch.no_grad():
            wave = torch.cos(torch.arange(TOKENS, dtype=torch.float32))[:, None] * 0.1 + 1
        x = self.words(ids) * wave + self.places(torch.arange(TOKENS))
        q, k, v = self.qkv(self.norm1(x)).view(BATCH, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))
        x = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return self.head(self.last(x))


class Images(nn.Module):
    """A small network for images, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        # The norm takes out a bias of the convolution before it.
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.head = nn.Conv2d(4, 6, 3, stride=2, bias=False), nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [batch, 3, height, width]; label: [batch]."""
        x = F.max_pool2d(F.relu(self.norm(self.first(x)), inplace=True), 2)
        logits = self.head(self.second(x).mean((2, 3)))
        return F.cross_entropy(logits, label), logits


class Detached(nn.Module):
    """The mean counts as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, 2]."""
        y = self.layer(x)
        return (y * y.mean().detach()).sum()


class Edges(nn.Module):
    """log1p near 0, where its argument disappears beside 1, and expm1 where tanh is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Parameter(torch.tensor([0.0, 1e-10, -1e-9, 0.3, -0.5]))
        self.large = nn.Parameter(torch.tensor([18.0, 25.0, -30.0, 0.0, 0.2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [5]."""
        return (torch.log1p(self.near) * x).sum() + (torch.expm1(self.large) * x).mean().log1p()


def write(name: str, model: nn.Module, batches: list[dict[str, torch.Tensor]], n_inputs: int, loss) -> None:
    """Export a model and train it; `loss` computes it from the forward's results and a batch."""
    here = Path(__file__).parent
    model.train()
    inputs = tuple(batches[0].values())[:n_inputs]
    torch.export.save(torch.export.export(model, inputs), here / f"{name}.pt2")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(STEPS):
        batch = batches[step % BATCHES]
        value = loss(model(*tuple(batch.values())[:n_inputs]), batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    tensors = {f"batch.{i}.{key}": x for i, batch in enumerate(batches) for key, x in batch.items()}
    tensors["losses"] = torch.stack(losses)
    tensors |= {f"after.{path}": x.detach().clone() for path, x in model.state_dict().items()}
    save_file(tensors, here / f"{name}.safetensors")


def language_batch() -> dict[str, torch.Tensor]:
    """Ids with some padding, which does not count."""
    ids = torch.randint(1, WORDS, (BATCH, TOKENS))
    ids[1, 5:] = PADDING
    labels = torch.where(ids == PADDING, IGNORED, ids)
    return {"ids": ids, "labels": labels}


def next_word(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Each position predicts the next word."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), batch["labels"][:, 1:].reshape(-1))


def main() -> None:
    """Write all models."""
    torch.manual_seed(1)
    write("lm", Language(), [language_batch() for _ in range(BATCHES)], 1, next_word)
    images = [
        {"x": torch.randn(BATCH, 3, IMAGE, IMAGE), "label": torch.randint(CLASSES, (BATCH,))} for _ in range(BATCHES)
    ]
    write("cnn", Images(), images, 2, lambda results, _: results[0])
    numbers = [{"x": torch.rand(5) + 0.5} for _ in range(BATCHES)]
    write("edges", Edges(), numbers, 1, lambda result, _: result)
    torch.export.save(torch.export.export(Detached(), (torch.ones(3, 2),)), Path(__file__).with_name("detached.pt2"))


if __name__ == "__main__":
    main()
