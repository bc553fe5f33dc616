"""Where a step runs: on the GPU that a model is on, or on the processor."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .errors import Error


@dataclasses.dataclass(frozen=True)
class Place:
    """What a step is planned for, and what runs it."""

    device: str
    """The name of a device, the path of a `.toml` file, or a GPU of this machine, such as `cuda:0`."""
    gpu: int | None
    """The number of the GPU that runs the step; else the processor does."""
    on: torch.device
    """Where the operations of the model are recorded: where it is, or the CPU if it is in two places."""

    @staticmethod
    def of(tensors: Iterable[tuple[str, torch.Tensor]], device: str | None) -> Place:
        """The place of a step on these tensors, each with its name.

        device: what the user wants planned for; None stands for where the tensors are. A model that is in part on the
            named GPU and in part on the CPU is recorded on the CPU.

        Raises Error: the tensors are on devices that no step can have.
        """
        found: dict[torch.device, str] = {}
        for name, tensor in tensors:
            found.setdefault(tensor.device, name)
        for where, name in found.items():
            if where.type not in ("cpu", "cuda"):
                raise Error(f"{name} is on {where}; steps run on the processor or on a GPU of NVIDIA: model.to('cuda')")
        named = number(device)
        gpus = {where.index or 0 for where in found if where.type == "cuda"}
        # A step before this one may have offloaded a part of the model.
        is_offloaded = named is not None and gpus == {named}
        if len(found) > 1 and not is_offloaded:
            (one, first), (other, second) = list(found.items())[:2]
            raise Error(
                f"{first} is on {one} and {second} on {other}; a step takes a model that is on one device, or with "
                f"device='cuda:0' one that is in part on that GPU and in part on the CPU"
            )
        if named is not None and gpus - {named}:
            raise Error(f"device={device!r}: the model is on {next(iter(found))}")
        at = next(iter(gpus)) if gpus else None
        on = torch.device("cpu") if len(found) > 1 or at is None else torch.device("cuda", at)
        default = "cpu" if at is None else f"cuda:{at}"
        return Place(device or default, at if named is None else named, on)

    def settle(self) -> None:
        """Wait for what torch has queued on the GPU, so that a step finds it done."""
        if self.gpu is not None and _is_used():
            torch.cuda.current_stream(self.gpu).synchronize()

    def give_back(self) -> None:
        """Let the GPU's driver have the memory that torch has freed and keeps."""
        if self.gpu is not None and _is_used():
            torch.cuda.empty_cache()


def _is_used() -> bool:
    """Whether torch has done something on a GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def number(device: str | None) -> int | None:
    """The number of a GPU of this machine, from `cuda` or `cuda:1`; None for other devices."""
    named = re.fullmatch(r"cuda(?::(\d+))?", device or "")
    return int(named[1] or 0) if named else None


def moved(tree: Any, device: torch.device) -> Any:
    """The same tree with its tensors on a device."""
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, tree)
