"""The scale of a loss in fp16: the states of a `torch.amp.GradScaler` are states of the step."""

from __future__ import annotations

from typing import Any

from torch.amp.grad_scaler import GradScaler

from ._lighterage import Machine
from ._optimizer import lent
from .errors import Error, StaleError

Numbers = tuple[float, float, float, int]
SCALE, TRACKER = "optimizer.scale", "optimizer.growth_tracker"


def scaler_of(precision: str, given: GradScaler | None, device: str = "cpu") -> GradScaler | None:
    """The scaler of a step: the given one, or one with PyTorch's defaults if the precision needs one.

    device: torch's name of what the model is on.

    Raises Error: one is given that the precision does not use, or that is not enabled.
    """
    if precision != "fp16":
        if given is not None:
            raise Error(f"scaler: precision={precision!r} does not scale the loss; precision='fp16' does")
        return None
    scaler = GradScaler(device) if given is None else given
    if not scaler.is_enabled():
        raise Error(f"scaler: it is not enabled, and fp16 needs a scaled loss; GradScaler({device!r}) is enabled")
    return scaler


def numbers_of(scaler: GradScaler | None) -> Numbers | None:
    """The first scale, its growth, its backoff, and the updates until it grows."""
    if scaler is None:
        return None
    factors = scaler.get_growth_factor(), scaler.get_backoff_factor()
    return float(scaler._init_scale), *factors, int(scaler.get_growth_interval())


class Scaler:
    """A scaler whose scale and count of updates are tensors in the memory of a step."""

    def __init__(self, scaler: GradScaler, machine: Machine) -> None:
        self._scaler: Any = scaler
        self._fixed = (numbers_of(scaler) or ())[1:]
        self._scale, self._tracker = lent(machine, "state", SCALE), lent(machine, "state", TRACKER)
        # Other tensors, which a program may move without moving ours.
        self._given = self._scale.detach(), self._tracker.detach()

    def adopt(self) -> None:
        """Copy what the user's scaler has into the step's memory, and give it the step's tensors.

        Raises StaleError: its factors or its interval are no longer those that were compiled.
        """
        scaler = self._scaler
        if (numbers_of(scaler) or ())[1:] != self._fixed:
            raise StaleError("the scaler has other factors or another interval than when the step was compiled")
        scale, tracker = self._given
        if scaler._scale is not scale or scale.data_ptr() != self._scale.data_ptr():
            self._scale.fill_(float(scaler.get_scale()))
            self._tracker.fill_(int(scaler._get_growth_tracker()))
            scale.data, tracker.data = self._scale, self._tracker
            scaler._scale, scaler._growth_tracker = scale, tracker

    def set(self, scale: float) -> None:
        """Set the step's own scale, for a step of which nothing stays."""
        self._scale.fill_(scale)
        self._tracker.zero_()
