"""The errors that Lighterage raises. Each says what failed, where, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

# A call: operator, node, path of the module, reason.
Lacking = tuple[str, str, str, str]

# The largest number of calls that a message lists.
LISTED = 10


class Error(RuntimeError):
    """The class of all errors of Lighterage."""


class CaptureError(Error):
    """The model cannot be traced, or the trace would not compute what the model computes."""


class Unsupported(Error):  # noqa: N818
    """The step calls what has no kernel, or the optimizer has no counterpart.

    `ops`: for each call the operator, the node of the traced graph, the path of its module, and the reason.
    """

    def __init__(self, message: str, ops: list[Lacking] | None = None) -> None:
        super().__init__(message)
        self.ops: list[Lacking] = ops or []


def unsupported(calls: Sequence[Lacking]) -> Unsupported:
    """The error of calls that cannot be run."""
    lines = [f"\n  {op}{f' in {path}' if path else ''} (node {node}): {why}" for op, node, path, why in calls[:LISTED]]
    rest = f"\n  and {len(calls) - LISTED} more" if len(calls) > LISTED else ""
    return Unsupported(f"the step calls what has no kernel:{''.join(lines)}{rest}", list(calls))


class Infeasible(Error):  # noqa: N818
    """No plan fits the budget.

    `budget` is the budget, and `smallest` the smallest one for which a plan was found, both in bytes.
    """

    def __init__(self, message: str, budget: int, smallest: int) -> None:
        super().__init__(message)
        self.budget = budget
        self.smallest = smallest


class MismatchError(Error):
    """The compiled step differs from eager PyTorch in its loss, its gradients or its buffers."""


class StaleError(Error):
    """The model or the optimizer is no longer what was compiled: moved parameters, other flags, other groups."""


class ShapeError(Error):
    """A batch has another structure, other shapes or other element types than the compiled step."""
