"""Optimizers of torch in the compiler's terms, and their state in the memory of a step.

The user's optimizer stays the place where options and state are read and written: `param_groups[i]["lr"]`,
`state_dict()`, `load_state_dict()`. Its moments are tensors in the step's memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
import struct
import sys
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from . import optim
from ._guard import Places
from ._lighterage import Machine
from .errors import Error, StaleError, Unsupported

# Options that have no counterpart, with the values that they must have.
_FIXED: dict[str, tuple[Any, ...]] = {
    "amsgrad": (False,),
    "dampening": (0, 0.0),
    "differentiable": (False,),
    "maximize": (False,),
    "nesterov": (False,),
}
_FIXED_OF_MUON: dict[str, tuple[Any, ...]] = {
    "nesterov": (True,),
    "ns_coefficients": ((3.4445, -4.775, 2.0315),),
    "ns_steps": (5,),
    "eps": (1e-7,),
    "adjust_lr_fn": (None, "original"),
}
# Of bitsandbytes.optim.AdamW8bit, which is no subclass of torch's optimizers of that name.
_FIXED_OF_8_BITS: dict[str, tuple[Any, ...]] = {
    "optim_bits": (8,),
    "min_8bit_size": (4096,),
    "max_unorm": (0, 0.0),
    "skip_zeros": (False,),
}
# Of transformers' Adafactor, whose steps are relative to these numbers.
_LARGEST_STEP, _WARMUP = 1e-2, 1e-6
RNG = "optimizer.rng"
"""The state of the random numbers of roundings, if nothing else of the step draws any."""
_STEP, _HYPER = "optimizer.step", "optimizer.hyper"
# States of a parameter in half precision beside its moments: an f32 that is updated, or the bits that extend it to one.
_MASTER, _LOW = "master", "low"
# Without moments, a gradient is read from the update. The larger the rate, the fewer of its digits the parameter hides.
PROBE_RATE = 1024.0


@dataclasses.dataclass(frozen=True)
class Kind:
    """An optimizer of the compiler, and the names that torch gives its moments."""

    name: str
    moments: tuple[str, ...]
    counts_steps: bool
    of_vectors: tuple[str, ...] | None = None
    """The moments of parameters with fewer than two dimensions, if they are others."""
    of_large: tuple[str, ...] = ()
    """Further moments of parameters whose moments are in 8 bits."""

    def moments_of(self, parameter: torch.Tensor, *, is_whole: bool = False) -> tuple[str, ...]:
        """The names of a parameter's moments. is_whole: none of them are codes."""
        moments = self.moments if self.of_vectors is None or parameter.dim() > 1 else self.of_vectors
        return moments + self.of_large if parameter.numel() >= optim.FEWEST_IN_CODES and not is_whole else moments

    @property
    def count_type(self) -> torch.dtype:
        """The type of a count of steps: torch's is f32, bitsandbytes' an int."""
        return torch.int64 if self.of_large else torch.float32

    @property
    def shows_gradients(self) -> bool:
        """Whether a step with the options of a probe makes the gradients readable."""
        return self not in (ADAFACTOR, ADAFACTOR_PAPER, ADAFACTOR_PAPER_MOMENTUM, ADAMW_8BIT, ADAMW_BF16)


ADAMW = Kind("adamw", ("exp_avg", "exp_avg_sq"), counts_steps=True)
SGD = Kind("sgd", (), counts_steps=False)
MOMENTUM = Kind("sgd-momentum", ("momentum_buffer",), counts_steps=False)
ADAFACTOR = Kind("adafactor", ("row_var", "col_var"), counts_steps=True, of_vectors=("variance",))
_OF_MATRICES, _OF_VECTORS = ("exp_avg_sq_row", "exp_avg_sq_col"), ("exp_avg_sq",)
ADAFACTOR_PAPER = Kind("adafactor-paper", _OF_MATRICES, counts_steps=True, of_vectors=_OF_VECTORS)
ADAFACTOR_PAPER_MOMENTUM = Kind(
    "adafactor-paper-momentum", (*_OF_MATRICES, "exp_avg"), counts_steps=True, of_vectors=(*_OF_VECTORS, "exp_avg")
)
ADAMW_BF16 = Kind("adamw-bf16", ("exp_avg", "exp_avg_sq"), counts_steps=True)
ADAMW_8BIT = Kind("adamw-8bit", ("state1", "state2"), counts_steps=True, of_large=("absmax1", "absmax2"))
LION = Kind("lion", ("exp_avg",), counts_steps=False)
MUON = Kind("muon", ("momentum_buffer",), counts_steps=False)
_OWN = {optim.AdamWBf16: ADAMW_BF16, optim.AdamW8bit: ADAMW_8BIT, optim.Lion: LION}


def _classes() -> tuple[type[torch.optim.Optimizer], ...]:
    # PyTorch has Muon since 2.9.
    muon = getattr(torch.optim, "Muon", None)
    known = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adafactor)
    return known if muon is None else (*known, muon)


def _is_of_8_bits(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is AdamW8bit or Adam8bit of bitsandbytes, whose updates are the same."""
    library = sys.modules.get("bitsandbytes")
    return library is not None and type(optimizer) in (library.optim.AdamW8bit, library.optim.Adam8bit)


def _is_of_transformers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is Adafactor of transformers, which is that of the paper."""
    library = sys.modules.get("transformers.optimization")
    return library is not None and type(optimizer) is getattr(library, "Adafactor", None)


def _check_8_bits(optimizer: Any) -> None:
    """Raises Unsupported: an option of bitsandbytes has no counterpart."""
    name = type(optimizer).__name__
    for option, allowed in _FIXED_OF_8_BITS.items():
        value = getattr(optimizer.args, option)
        if value not in allowed:
            raise Unsupported(f"{name}({option}={value}) has no counterpart; {allowed[0]} has")
    if optimizer.mng.pid2config or optimizer.mng.index2config or optimizer.mng.module_weight_config_triple:
        raise Unsupported(f"{name} with overrides of GlobalOptimManager has no counterpart")


def kind_of(optimizer: torch.optim.Optimizer) -> Kind:
    """The compiler's optimizer with the same update.

    Raises Unsupported: there is none, or an option has no counterpart.
    """
    name = type(optimizer).__name__
    is_complex = any(parameter.is_complex() for group in optimizer.param_groups for parameter in group["params"])
    if is_complex and type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        raise Unsupported(f"{name} of complex parameters has no counterpart: SGD, Adam and AdamW have")
    if _has_hooks(optimizer):
        raise Unsupported(f"{name} has hooks of its step(), which a compiled step does not call: call them beside it")
    if _is_of_8_bits(optimizer):
        _check_8_bits(optimizer)
        return ADAMW_8BIT
    if _is_of_transformers(optimizer):
        has_first = any(group["beta1"] is not None for group in optimizer.param_groups)
        return ADAFACTOR_PAPER_MOMENTUM if has_first else ADAFACTOR_PAPER
    if (own := _OWN.get(type(optimizer))) is not None:
        return own
    if type(optimizer) not in _classes():
        names, others = (", ".join(known.__name__ for known in classes) for classes in (_classes(), _OWN))
        raise Unsupported(
            f"{name} has no counterpart: of torch.optim, these have: {names}; lighterage.optim has {others}; and "
            f"Adafactor of transformers and AdamW8bit of bitsandbytes have"
        )
    for group in optimizer.param_groups:
        for option, allowed in (_FIXED_OF_MUON if name == "Muon" else _FIXED).items():
            if option in group and group[option] not in allowed:
                raise Unsupported(f"{name}({option}={group[option]}) has no counterpart; {allowed[0]} has")
        # Adam adds the decay to the gradient; the compiler's update takes it from the parameter, as AdamW does.
        if isinstance(optimizer, torch.optim.Adam) and group["weight_decay"] and not group["decoupled_weight_decay"]:
            raise Unsupported(
                f"{name}(weight_decay={group['weight_decay']}) has no counterpart; AdamW has, and Adam without decay"
            )
        if isinstance(optimizer, torch.optim.Adafactor) and group["eps"][0] is not None:
            raise Unsupported(f"{name}(eps={group['eps']}) has no counterpart; (None, {group['eps'][1]}) has")
    if isinstance(optimizer, torch.optim.Adam):
        return ADAMW
    if isinstance(optimizer, torch.optim.Adafactor):
        return ADAFACTOR
    if not isinstance(optimizer, torch.optim.SGD):
        return MUON
    return MOMENTUM if any(group["momentum"] for group in optimizer.param_groups) else SGD


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def groups_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, int]:
    """The group of each of the optimizer's parameters, by every name of the parameter.

    Raises Error: a parameter is not the model's.
    """
    groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    names = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    if strange := len(set(groups) - set(names.values())):
        raise Error(f"the optimizer has {strange} parameters that are not the model's")
    return {name: groups[p] for name, p in names.items() if p in groups}


def whole_groups(optimizer: torch.optim.Optimizer) -> set[int]:
    """The groups whose moments are f32 where the optimizer has codes."""
    return {i for i, group in enumerate(optimizer.param_groups) if group.get("bits") == optim.WHOLE}


def _read(group: dict[str, Any]) -> list[Any]:
    """All options of a group, as they are."""
    return [value for key, value in group.items() if key != "params"]


def _is_number(value: Any) -> bool:
    """Whether an option has a value that cannot change in place, as a tensor can."""
    return all(map(_is_number, value)) if isinstance(value, tuple) else not isinstance(value, torch.Tensor | list)


def _values(group: dict[str, Any]) -> dict[str, float]:
    """The options of a group under the compiler's names."""
    if "scale_parameter" in group:
        return _values_of_transformers(group)
    names = ("lr", "momentum", "weight_decay", "beta2_decay", "d")
    values: dict[str, float] = {key: float(group[key]) for key in names if key in group}
    if "betas" in group:
        values["beta1"], values["beta2"] = map(float, group["betas"])
    match group.get("eps"):
        case (_, eps2):
            values["eps2"] = float(eps2)
        case float() | int() as eps:
            values["eps"] = float(eps)
    # Muon's step has AdamW for vectors, of which its optimizer has none.
    return {"beta1": 0.0, "beta2": 0.0, **values} if "ns_steps" in group else values


def _values_of_transformers(group: dict[str, Any]) -> dict[str, float]:
    """The same of transformers' Adafactor."""
    eps1, eps2 = group["eps"]
    return {
        "lr": _LARGEST_STEP if group["relative_step"] else float(group["lr"]),
        "beta2_decay": float(group["decay_rate"]),
        "eps1": float(eps1),
        "eps2": float(eps2),
        "d": float(group["clip_threshold"]),
        "weight_decay": float(group["weight_decay"]),
        "scale_parameter": float(bool(group["scale_parameter"])),
        "relative_step": float(bool(group["relative_step"])),
        "warmup_init": _WARMUP if group["warmup_init"] else 1.0,
        # A group without a first moment has that of its last change, which is the change.
        "beta1": float(group["beta1"] or 0.0),
    }


def lent(machine: Machine, kind: str, name: str, like: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor of an `input`, an `output` or a `state` in the machine's memory, which it keeps alive.

    like: the tensor that it stands for, if that may be complex.
    """
    tensor: torch.Tensor = from_dlpack(machine.view(kind, name))
    is_pairs = like is not None and like.is_complex() and tensor.dim() == like.dim() + 1
    return torch.view_as_complex(tensor) if is_pairs else tensor


def write_bytes(tensor: torch.Tensor, data: bytes) -> None:
    """Write all bytes of a tensor."""
    if tensor.device.type == "cpu":
        ctypes.memmove(tensor.data_ptr(), data, tensor.nbytes)
    else:
        tensor.copy_(torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape))


class Cell:
    """A few bytes of a step's memory. On the host they are read and written without a call of torch."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # The tensor keeps the memory alive.
        self._tensor = tensor
        self._memory: memoryview | None = None
        if tensor.device.type == "cpu":
            array = ctypes.c_char * tensor.nbytes
            is_empty = tensor.nbytes == 0
            self._memory = memoryview(b"" if is_empty else array.from_address(tensor.data_ptr())).cast("B")

    def read(self) -> bytes:
        """The bytes."""
        if self._memory is None:
            return Cell(self._tensor.cpu()).read()
        return bytes(self._memory)

    def write(self, data: bytes) -> None:
        """Replace the bytes."""
        if self._memory is None:
            write_bytes(self._tensor, data)
        else:
            self._memory[:] = data


class Hyper:
    """The inputs of a step that have the options of the optimizer's groups."""

    def __init__(self, optimizer: torch.optim.Optimizer, machine: Machine) -> None:
        inputs = {group: _HYPER + (f".{group}" if group else "") for group in range(len(optimizer.param_groups))}
        # A group in which nothing is trained has no input.
        self.rows = {g: Cell(lent(machine, "input", name)) for g, name in inputs.items() if name in machine.inputs}
        """The options of each group."""


class State:
    """The options and the moments of an optimizer, in the memory of a step."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, kind: Kind, machine: Machine, options: list[str], paths: dict[str, Any]
    ) -> None:
        """paths: the trained parameters, by the path of their state."""
        self._optimizer, self._kind, self._options = optimizer, kind, options
        self._trained_groups = list(Hyper(optimizer, machine).rows)
        # The options of the last step, as they were read, and what they became.
        self._options_read: list[list[Any]] = []
        self._rows: list[tuple[int, bytes]] = []
        states = {path for path, _ in machine.states}
        self._whole = whole_groups(optimizer)
        whole = {id(p) for group in self._whole for p in optimizer.param_groups[group]["params"]}
        self._moments = {}
        for path, parameter in paths.items():
            moments = kind.moments_of(parameter, is_whole=id(parameter) in whole)
            names = [*moments, *(name for name in (_MASTER, _LOW) if f"{name}.{path}" in states)]
            self._moments[path] = {name: lent(machine, "state", f"{name}.{path}", parameter) for name in names}
        if any(view.dtype != paths[path].dtype for path, views in self._moments.items() for view in views.values()):
            optim.keep_types(optimizer)
        # What the user gets of them: other tensors, which a program may move without moving ours.
        self._given = {
            path: {name: view.detach() for name, view in views.items()} for path, views in self._moments.items()
        }
        self._parameters: dict[str, nn.Parameter] = paths
        self._count = lent(machine, "state", _STEP) if _STEP in states else torch.zeros((), dtype=torch.int64)
        self._count_cell = Cell(self._count)
        # Torch has the count for each parameter, on the CPU unless its own update reads it beside the parameter. These
        # are views of one tensor, so that one write sets all.
        is_beside = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        on = next((p.device for p in paths.values() if is_beside), torch.device("cpu"))
        self._counts = torch.zeros(len(paths), dtype=kind.count_type, device=on)
        self._counts_cell = Cell(self._counts)
        self._views = list(self._counts)
        self._seen = self._counts_cell.read()
        self._members = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        # Where all was when it was last adopted.
        self._state: dict[Any, Any] | None = None
        self._lists: list[list[Any]] = []
        self._places = Places([], [], [])

    def write_options(self, hyper: Hyper, probe: bool = False) -> None:
        """Write the options for the next step: those of the user's groups, or those of a probe.

        hyper: the step's inputs for them.

        Raises StaleError: they are no longer those of the update that was compiled. Unsupported: there is no update
        with them.
        """
        if _has_hooks(self._optimizer):
            kind_of(self._optimizer)
        groups = self._optimizer.param_groups
        options = [_read(group) for group in groups]
        if probe or options != self._options_read:
            self._take_options(groups, probe)
            is_fixed = not probe and all(map(_is_number, chain.from_iterable(options)))
            self._options_read = options if is_fixed else []
        # Always, because the step may have used the memory of its inputs for other tensors.
        for group, row in self._rows:
            hyper.rows[group].write(row)

    def _take_options(self, groups: list[dict[str, Any]], probe: bool) -> None:
        if kind_of(self._optimizer) != self._kind and self._kind not in (MOMENTUM, ADAFACTOR_PAPER_MOMENTUM):
            raise StaleError("the optimizer has momentum now, and the step was compiled without; compile again")
        if whole_groups(self._optimizer) != self._whole:
            raise StaleError("moments of a group have other bits than when the step was compiled; compile again")
        self._rows = []
        for group in self._trained_groups:
            values = {**_values(groups[group]), **(self._probe() if probe else {})}
            self._rows.append((group, struct.pack(f"{len(self._options)}d", *map(values.__getitem__, self._options))))

    def adopt(self) -> None:
        """Copy what the user's optimizer has into the step's memory, and put the step's tensors in its place.

        Where they are there already this does nothing, so it is called before each step.

        Raises StaleError: the optimizer has other parameters than those that were compiled, or lost bits of masters.
        """
        if not self._is_adopted():
            self._adopt()
        if self._kind.counts_steps:
            self._take_count()

    def _is_adopted(self) -> bool:
        """Whether the optimizer has the parameters and the tensors that it had after the last `_adopt`."""
        lists = [group["params"] for group in self._optimizer.param_groups]
        return (
            self._optimizer.state is self._state
            and list(map(id, lists)) == list(map(id, self._lists))
            and self._places.are_same()
        )

    def _adopt(self) -> None:
        lists = [group["params"] for group in self._optimizer.param_groups]
        if [[id(p) for p in parameters] for parameters in lists] != self._members:
            raise StaleError("the optimizer has other parameters than when the step was compiled; compile again")
        state = self._optimizer.state
        for i, (path, parameter) in enumerate(self._parameters.items()):
            theirs = state[parameter]
            for name, given in self._given[path].items():
                value, view = theirs.get(name), self._moments[path][name]
                if value is not None and value.dtype != view.dtype and name in (_MASTER, _LOW):
                    raise StaleError(
                        f"{name} of {path} is {value.dtype}: load_state_dict() of torch casts states to the types of "
                        f"parameters; load after compile(), or call lighterage.optim.keep_types(optimizer) before"
                    )
                if value is not given or given.data_ptr() != view.data_ptr():
                    with torch.no_grad():
                        view.zero_() if value is None else view.copy_(value)
                    given.data, theirs[name] = view, given
            if self._kind.counts_steps and (count := theirs.get("step")) is not self._views[i]:
                self._views[i].fill_(0.0 if count is None else float(count))
                theirs["step"] = self._views[i]
            if self._kind in (ADAFACTOR_PAPER, ADAFACTOR_PAPER_MOMENTUM):
                # What transformers has beside the moments; it writes it before it reads it.
                theirs.setdefault("RMS", 0)
            if "absmax1" in theirs and (maps := getattr(self._optimizer, "name2qmap", None)):
                # What a step of bitsandbytes' optimizer looks for.
                theirs["qmap1"], theirs["qmap2"] = maps["dynamic"], maps["udynamic"]
        self._state, self._lists = state, lists
        moments = [given for tensors in self._given.values() for given in tensors.values()]
        self._places = Places([state, *(state[p] for p in self._parameters.values())], lists, moments)

    def _take_count(self) -> None:
        """The count is torch's if the user changed it, by a load or a step of the optimizer itself."""
        if self._counts_cell.read() == self._seen:
            return
        counts = self._counts.tolist()
        if counts.count(counts[0]) != len(counts):
            raise StaleError("parameters differ in their number of steps; the compiled step has one count for all")
        self._count.fill_(int(counts[0]))
        self._seen = self._counts_cell.read()

    def stepped(self) -> None:
        """Tell the user's optimizer, and its schedulers, that a step was made."""
        if self._kind.counts_steps:
            count = int.from_bytes(self._count_cell.read(), sys.byteorder)
            self._seen = struct.pack("q" if self._kind.of_large else "f", count) * len(self._views)
            self._counts_cell.write(self._seen)
        # Schedulers warn if they see no call of `step` before their own.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    # One step with the options of a probe makes each gradient readable.

    @property
    def paths(self) -> list[str]:
        """The trained parameters."""
        return list(self._parameters)

    @property
    def probe_moves(self) -> bool:
        """Whether a probe changes parameters."""
        return not self._kind.moments

    def gradients(self, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The gradients of the last step, by path, if it was a probe. before: parameters, if a probe changes them."""
        if self._kind.moments:
            return {path: moments[self._kind.moments[0]].clone() for path, moments in self._moments.items()}
        return {path: (before[path] - p.detach()) / PROBE_RATE for path, p in self._parameters.items()}

    def _probe(self) -> dict[str, float]:
        """Options with which the first moment becomes the gradient; without moments, the update is a multiple of it."""
        match self._kind.name:
            case "adamw":
                return {"lr": 0.0, "beta1": 0.0, "beta2": 0.0, "eps": 1.0, "weight_decay": 0.0}
            case "lion":
                return {"lr": 0.0, "beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0}
            case "sgd-momentum" | "muon":
                return {"lr": 0.0, "momentum": 0.0, "weight_decay": 0.0}
            case _:
                return {"lr": PROBE_RATE, "weight_decay": 0.0}

    def reset(self) -> None:
        """Moments and count as before the first step."""
        for moments in self._moments.values():
            for moment in moments.values():
                moment.zero_()
        self._count.zero_()
