"""The errors that Lighterage raises. Each says what failed, where, and what would help."""

from __future__ import annotations


class LighterageError(RuntimeError):
    """The class of all errors of Lighterage."""


class CaptureError(LighterageError):
    """The model cannot be traced, or the trace would not compute what the model computes."""


class UnsupportedError(LighterageError):
    """The traced step calls what has no kernel, or the optimizer has no counterpart.

    `ops`: for each call the operator, the node of the traced graph, the path of its module, and the reason.
    """

    def __init__(self, message: str, ops: list[tuple[str, str, str, str]] | None = None) -> None:
        super().__init__(message)
        self.ops: list[tuple[str, str, str, str]] = ops or []


class InfeasibleError(LighterageError):
    """No plan fits the budget.

    `budget_bytes` is the budget, and `smallest_bytes` the smallest one for which a plan was found.
    """

    def __init__(self, message: str, budget_bytes: int, smallest_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes


class MismatchError(LighterageError):
    """The compiled step differs from eager PyTorch in its loss or its gradients."""


class StaleError(LighterageError):
    """The model or the optimizer is no longer what was compiled: moved parameters, other flags, other groups."""


class ShapeError(LighterageError):
    """A batch has another structure, other shapes or other element types than the compiled step."""
