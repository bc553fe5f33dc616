"""Batches that are cut into micro-batches along their first dimension."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from . import _lighterage
from ._lighterage import Plan
from .errors import Error, Infeasible

logger = logging.getLogger("lighterage")

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def number(given: int | str, batch: Arguments, plan: Callable[[int, bool], Plan]) -> int:
    """The number of micro-batches; for `auto`, the one with the fastest plan.

    plan: the plan for a number, or, if its second argument is true, a plan for one micro-batch alone that keeps
    everything.

    Raises Error: the batch cannot be cut. Infeasible: no plan fits, whatever the number.
    """
    if given == "auto":
        return _fastest(rows(batch), plan)
    if not isinstance(given, int) or given < 1:
        raise Error(f"micro_batches={given!r}: it is a number, from 1, or 'auto'")
    if given > 1 and (n := rows(batch)) % given:
        raise Error(f"micro_batches={given}: the batch has {n} rows, which cannot be cut into {given} equal parts")
    return given


def _fastest(n_rows: int, plan: Callable[[int, bool], Plan]) -> int:
    errors: list[Infeasible] = []

    def least(n: int) -> float:
        return n * plan(n, True).kernel_micros

    def micros(n: int) -> float | None:
        try:
            found = plan(n, False).micros
        except Infeasible as error:
            errors.append(error)
            logger.info("micro-batches: %d of %d do not fit", n, n_rows // n)
            return None
        logger.info("micro-batches: %d of %d take %.0f us", n, n_rows // n, found)
        return found

    found = _lighterage.fastest_micro_batches(n_rows, least, micros)
    if found is None:
        raise min(errors, key=lambda error: error.smallest)
    return found


def rows(batch: Arguments) -> int:
    """The first size that all tensors of a batch have.

    Raises Error: they have none, or several.
    """
    sizes = {leaf.size(0) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes))) or "no tensor"
        raise Error(f"micro_batches: the tensors of a batch are cut along their first dimension, and it has {found}")
    return sizes.pop()


def cut(leaves: list[Any], n: int) -> list[list[Any]]:
    """The leaves of each micro-batch. What has no rows is in each of them."""
    if n == 1:
        return [leaves]

    def part(leaf: Any, k: int) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return leaf
        n_rows = leaf.size(0) // n
        return leaf.narrow(0, k * n_rows, n_rows)

    return [[part(leaf, k) for leaf in leaves] for k in range(n)]


def first(batch: Arguments, n: int) -> Arguments:
    """The first of `n` micro-batches."""
    leaves, spec = pytree.tree_flatten(batch)
    args, kwargs = pytree.tree_unflatten(cut(leaves, n)[0], spec)
    return args, kwargs
