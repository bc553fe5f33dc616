"""Sequences of different lengths in rows of one length: first-fit decreasing.

    for bin in pack(map(len, sequences), limit=4096):
        batch = collate([sequences[i] for i in bin], length=4096)
        loss = step(**batch)

A row has no padding but at its end. The model keeps its sequences apart, by `position_ids` that begin with 0 in each of
them, by `segment_ids` that number them, or by a mask that `mask(segment_ids)` makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from . import _lighterage
from .errors import Error

IGNORED = -100


def pack(lengths: Iterable[int], limit: int) -> list[list[int]]:
    """The numbers of the sequences in each bin of at most `limit` tokens, the longest first.

    Raises Error: a sequence is longer than the limit.
    """
    given = list(lengths)
    bins = _lighterage.first_fit_decreasing(given, limit)
    if bins is None:
        raise Error(f"pack: a sequence has {max(given)} tokens, and a bin {limit}; cut it first")
    return bins


def collate(
    sequences: Sequence[torch.Tensor],
    length: int,
    labels: Sequence[torch.Tensor] | None = None,
    pad: int = 0,
) -> dict[str, torch.Tensor]:
    """One row of `length` tokens: `input_ids`, `labels`, `position_ids` and `segment_ids`, each int64[1, length].

    labels: of the tokens; by default the tokens, for a model that shifts labels itself. The first of a sequence does
        not count then, because the token before it is of another sequence. pad: the token at the row's end, which is a
        sequence of its own without labels.

    Raises Error: the sequences are longer than the row.
    """
    rest = length - sum(map(len, sequences))
    if rest < 0:
        raise Error(f"collate: the sequences have {length - rest} tokens, and a row {length}")
    if labels is None:
        labels = [torch.cat([torch.tensor([IGNORED]), ids[1:].long()]) for ids in sequences]
    parts = [*(len(ids) for ids in sequences), rest]
    row = {
        "input_ids": [*sequences, torch.full((rest,), pad)],
        "labels": [*labels, torch.full((rest,), IGNORED)],
        "position_ids": [torch.arange(n) for n in parts],
        "segment_ids": [torch.full((n,), k) for k, n in enumerate(parts)],
    }
    return {name: torch.cat([part.long() for part in values])[None] for name, values in row.items()}


def mask(segment_ids: torch.Tensor) -> torch.Tensor:
    """bool[rows, 1, length, length]: each token sees those of its sequence up to itself."""
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    length = segment_ids.shape[-1]
    return same & torch.ones(length, length, dtype=torch.bool).tril()
