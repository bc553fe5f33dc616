"""Sequences in packed rows have the loss and the gradients that they have alone."""

from __future__ import annotations

import copy

import pytest
import torch
from lighterage.packing import collate, mask, pack
from torch import nn
from torch.nn import functional as F

import lighterage as lt


class Lm(nn.Module):
    """Attention with rows of several sequences, kept apart by numbers or by a mask; predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(50, 16), nn.Embedding(24, 16)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor, places: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids) + self.place(places)
        q, k, v = (x.unflatten(-1, (2, 8)).transpose(1, 2) for x in self.qkv(h).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.head(h + self.out(attended.transpose(1, 2).flatten(2)))


def loss_of(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    logits = model(ids, *rest)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def packed_loss(model: nn.Module, **row: torch.Tensor) -> torch.Tensor:
    seen = mask(row["segment_ids"])
    return loss_of(model, row["input_ids"], row["labels"], row["position_ids"], seen)


def test_packed_sequences_are_alone() -> None:
    torch.manual_seed(0)
    lengths = [9, 24, 5, 13, 7, 11, 3]
    sequences = [torch.randint(50, (n,)) for n in lengths]
    bins = pack(lengths, 24)
    assert bins == [[1], [3, 5], [0, 4, 2, 6]]
    rows = [collate([sequences[i] for i in bin], 24) for bin in bins]
    batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    model = Lm()
    alone = copy.deepcopy(model)
    optimizer, eager = (torch.optim.SGD(m.parameters(), lr=1.0) for m in (model, alone))
    # Each row is a micro-batch, and each has another number of labels.
    step = lt.compile(model, optimizer, packed_loss, example=batch, micro_batches=3, kernels="plain")

    total = sum(n - 1 for n in lengths)
    loss = torch.zeros(())
    for ids in sequences:
        row = collate([ids], len(ids))
        loss = loss + packed_loss(alone, **row) * (len(ids) - 1) / total
    loss.backward()  # type: ignore[no-untyped-call]
    eager.step()
    assert float(step(**batch)) == pytest.approx(float(loss), rel=1e-6)
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-6 * float(theirs.abs().max())
    # Memory for one row of activations: the plan of a step on any row.
    one = lt.plan(model, optimizer, packed_loss, example=rows[2], micro_batches=1)
    gradients = sum(4 * p.numel() for p in model.parameters())
    assert step.plan.keep_peak <= one.keep_peak + gradients + 8192


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(lt.Error, match="a sequence has 9 tokens, and a bin 8"):
        pack([3, 9], 8)
    with pytest.raises(lt.Error, match="the sequences have 9 tokens, and a row 8"):
        collate([torch.arange(4), torch.arange(5)], 8)
    row = collate([torch.arange(3)], 5, pad=7)
    assert row["input_ids"].tolist() == [[0, 1, 2, 7, 7]]
    assert row["labels"].tolist() == [[-100, 1, 2, -100, -100]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert row["segment_ids"].tolist() == [[0, 0, 0, 1, 1]]
