"""Memory-planned training steps for PyTorch.

    step = lighterage.compile(model, optimizer, example=(ids, labels), budget="60%")
    for ids, labels in batches:
        loss = step(ids, labels)

`compile` needs torch and the native module; `lighterage.export` needs torch alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import CaptureError, Error, Infeasible, MismatchError, ShapeError, StaleError, Unsupported

if TYPE_CHECKING:
    from ._check import Check
    from ._lighterage import Plan, devices
    from ._stats import Stats, reset, stats
    from .step import Step, compile, plan

__all__ = [
    "CaptureError",
    "Check",
    "Error",
    "Infeasible",
    "MismatchError",
    "Plan",
    "ShapeError",
    "StaleError",
    "Stats",
    "Step",
    "Unsupported",
    "compile",
    "devices",
    "plan",
    "reset",
    "stats",
]

# Torch and the native module are loaded by the first use of one of these names.
_LAZY = {"Check": "_check", "Plan": "_lighterage", "Step": "step"}
_LAZY |= {"compile": "step", "devices": "_lighterage", "plan": "step"}
_LAZY |= {"Stats": "_stats", "reset": "_stats", "stats": "_stats"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
