"""Optimizers that torch.optim lacks: with small moments, and Lion. Eager mode and compiled steps take them alike.

optimizer = lighterage.optim.AdamW8bit(model.parameters(), lr=3e-4)
step = lighterage.compile(model, optimizer, example=batch)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from ._lighterage import dynamic_map

__all__ = ["AdamW8bit", "AdamWBf16", "Lion", "keep_types"]

BLOCK, FEWEST_IN_CODES = 256, 4096
# Bits of moments that are numbers.
WHOLE = 32


class _Own(Optimizer):
    """An optimizer whose `step` updates one parameter after the other."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        for name, value in defaults.items():
            values = value if isinstance(value, tuple) else (value,)
            if not all(0 <= x < 1 if name == "betas" else x >= 0 for x in values):
                wanted = "each should be at least 0 and less than 1" if name == "betas" else "it should not be negative"
                raise ValueError(f"{name}={value}: {wanted}")
        super().__init__(params, defaults)
        keep_types(self)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(group, parameter, parameter.grad.to(_wide(parameter)))
        return loss

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        raise NotImplementedError


def _wide(parameter: torch.Tensor) -> torch.dtype:
    """The type that an update is computed in."""
    return torch.promote_types(parameter.dtype, torch.float32)


class _AdamW(_Own):
    """AdamW on moments that are read from a state and written to it."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **more: Any,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **more)

    def _start(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def _read(self, state: dict[str, torch.Tensor], parameter: torch.Tensor) -> list[torch.Tensor]:
        raise NotImplementedError

    def _write(self, state: dict[str, torch.Tensor], moments: list[torch.Tensor]) -> None:
        raise NotImplementedError

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self._start(group, parameter))
        state["step"] += 1
        (beta1, beta2), step = group["betas"], int(state["step"])
        first, second = self._read(state, parameter)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (second.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        new = parameter.to(gradient.dtype) * (1 - group["lr"] * group["weight_decay"])
        parameter.copy_(new.addcdiv_(first, denominator, value=-group["lr"] / (1 - beta1**step)))
        self._write(state, [first, second])


class AdamWBf16(_AdamW):
    """AdamW whose moments are rounded to bf16 after each step: 4 bytes a parameter."""

    def _start(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        moments = {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros(()), **moments}

    def _read(self, state: dict[str, torch.Tensor], parameter: torch.Tensor) -> list[torch.Tensor]:
        return [state[name].to(_wide(parameter)) for name in ("exp_avg", "exp_avg_sq")]

    def _write(self, state: dict[str, torch.Tensor], moments: list[torch.Tensor]) -> None:
        state["exp_avg"].copy_(moments[0])
        state["exp_avg_sq"].copy_(moments[1])


class AdamW8bit(_AdamW):
    """AdamW whose moments are 8-bit codes of block-wise dynamic quantisation: 2.03 bytes a parameter.

    Maps, blocks and names of states are those of `bitsandbytes.optim.AdamW8bit`. Parameters of fewer than 4096
    elements have moments in f32, and so do those of groups with `bits=32`: the paper advises it for embeddings.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        bits: int = 8,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bits=bits)
        for group in self.param_groups:
            if group["bits"] not in (8, WHOLE):
                raise ValueError(f"bits={group['bits']}: it should be 8 or {WHOLE}, the bits of each moment")

    def _start(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        step = torch.zeros((), dtype=torch.int64)
        if parameter.numel() < FEWEST_IN_CODES or group["bits"] == WHOLE:
            moments = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
            return {"step": step, **moments}
        codes = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in ("state1", "state2")}
        largest = {name: torch.zeros(-(-parameter.numel() // BLOCK)) for name in ("absmax1", "absmax2")}
        return {"step": step, **codes, **largest}

    def _read(self, state: dict[str, torch.Tensor], parameter: torch.Tensor) -> list[torch.Tensor]:
        if "absmax1" not in state:
            return [state["state1"].to(_wide(parameter)), state["state2"].to(_wide(parameter))]
        pairs = ((state["state1"], state["absmax1"]), (state["state2"], state["absmax2"]))
        decoded = [decode(codes, largest, signed=k == 0) for k, (codes, largest) in enumerate(pairs)]
        return [numbers.to(_wide(parameter)) for numbers in decoded]

    def _write(self, state: dict[str, torch.Tensor], moments: list[torch.Tensor]) -> None:
        for k, moment in enumerate(moments):
            codes, largest = state[f"state{k + 1}"], state.get(f"absmax{k + 1}")
            if largest is None:
                codes.copy_(moment)
            else:
                new = encode(moment, signed=k == 0)
                codes.copy_(new[0])
                largest.copy_(new[1])


class Lion(_Own):
    """Lion (Chen et al., 2023, algorithm 2): the sign of an average of gradients. 4 bytes a parameter."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        (beta1, beta2), before = group["betas"], state["exp_avg"].to(gradient.dtype)
        direction = before + (gradient - before) * (1 - beta1)
        new = parameter.to(gradient.dtype) * (1 - group["lr"] * group["weight_decay"])
        parameter.copy_(new - direction.sign() * group["lr"])
        state["exp_avg"].copy_(before + (gradient - before) * (1 - beta2))


# Codes ---------------------------------------------------------------------------------------------------------------


@functools.cache
def _map(signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of the codes, and those halfway between two neighbours."""
    numbers = torch.tensor(dynamic_map(signed))
    return numbers, (numbers[1:] + numbers[:-1]) * 0.5


def _blocks(numbers: torch.Tensor) -> torch.Tensor:
    """A tensor as rows of a block each; the last one is filled up with zeros."""
    flat = numbers.flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def decode(codes: torch.Tensor, largest: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """The numbers that codes stand for, with the largest magnitude of each block of 256."""
    numbers = _map(signed)[0][_blocks(codes).long()] * largest[:, None]
    return numbers.flatten()[: codes.numel()].view_as(codes)


def encode(numbers: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest codes of numbers, and the largest magnitude of each block."""
    blocks = _blocks(numbers.float())
    largest = blocks.abs().amax(1)
    # The number of middles below it is the code. A block of zeros has code 0, whose number times 0 is 0.
    scaled = blocks / largest[:, None]
    codes = torch.bucketize(scaled, _map(signed)[1]).masked_fill_(scaled.isnan(), 0)
    return codes.to(torch.uint8).flatten()[: numbers.numel()].view_as(numbers), largest


# States of other types than their parameters -------------------------------------------------------------------------

_loaded: weakref.WeakKeyDictionary[Optimizer, dict[str, Any]] = weakref.WeakKeyDictionary()


def keep_types(optimizer: Optimizer) -> None:
    """Let `load_state_dict` of an optimizer keep the types of states, which torch casts to those of parameters.

    The optimizers of this module do, and so does one with which a step was compiled. Before `compile` it is needed for
    states in f32 beside parameters in half precision.
    """
    if _note_states not in optimizer._optimizer_load_state_dict_pre_hooks.values():
        optimizer.register_load_state_dict_pre_hook(_note_states)
        optimizer.register_load_state_dict_post_hook(_take_states)


def _note_states(optimizer: Optimizer, states: dict[str, Any]) -> None:
    _loaded[optimizer] = states


def _take_states(optimizer: Optimizer) -> None:
    saved = _loaded.pop(optimizer, {"param_groups": [], "state": {}})
    for number, parameter in zip(_parameters(saved["param_groups"]), _parameters(optimizer.param_groups), strict=False):
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and value.dtype != optimizer.state[parameter][name].dtype:
                optimizer.state[parameter][name] = value.detach().clone().to(parameter.device)


def _parameters(groups: list[dict[str, Any]]) -> Iterable[Any]:
    return chain.from_iterable(group["params"] for group in groups)
