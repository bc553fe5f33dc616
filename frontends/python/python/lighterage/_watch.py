"""What Dynamo leaves in eager mode without a word: done away with where Dynamo has a setting for it, or else said.

A backend is called for the graphs that Dynamo makes. A function that Dynamo gives up runs in eager mode, and no backend
hears of it. So the calls in which Dynamo converts a function are watched, for this backend alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._dynamo import convert_frame, eval_frame, external_utils
from torch._dynamo.decorators import skip
from torch._dynamo.utils import counters
from torch.nn.utils.rnn import pad_packed_sequence

from . import _compat
from ._stats import counts
from .errors import Unsupported

_TORCH = os.path.dirname(torch.__file__) + os.sep
_MODULES = os.path.dirname(nn.modules.__file__) + os.sep
# Torch's modules that compute nothing themselves.
_CONTAINERS = nn.modules.container.__file__
# A function in which Dynamo calls a model of torch's classes.
_AROUND = external_utils.__file__


class _Logged(set[Any]):
    """Dynamo's logging functions that break no graph, and `warning_once`, which models of transformers call.

    Dynamo asks for a function when it traces a call, which it then leaves out. So the warning is said at that moment.
    """

    def __contains__(self, function: object) -> bool:
        if super().__contains__(function):
            return True
        is_once = getattr(function, "__name__", "") == "warning_once"
        if not is_once or not isinstance(getattr(function, "__self__", None), logging.Logger):
            return False
        traced = sys._getframe(1).f_locals
        try:
            words = [argument.as_python_constant() for argument in traced["args"]]
        except Exception:  # the words depend on a tensor, or Dynamo is another one: the call breaks the graph
            return False
        assert callable(function)
        function(*words)
        return True


def begin(backend: Callable[..., Any]) -> None:
    """Let Dynamo trace what it can, and say what it cannot, if `backend` is the one that it compiles for."""
    config = torch._dynamo.config
    # Each part of a graph has its own plan, so no graph should break at a warning.
    setting = _compat.logging_functions()
    setattr(config, setting, _Logged(getattr(config, setting)))
    # Otherwise nn.LSTM, nn.GRU and nn.RNN run in eager mode.
    config.allow_rnn = True
    # Dynamo leaves it out where recurrent layers run in eager mode. Where they do not, it fails on the lengths.
    skip(pad_packed_sequence)
    convert = convert_frame.CatchErrorsWrapper.__call__

    @functools.wraps(convert)
    def watched(self: Any, frame: Any, *args: Any) -> Any:
        options = _options(getattr(self._torchdynamo_orig_backend, "_torchdynamo_orig_backend", None), backend)
        if options is None:
            return convert(self, frame, *args)
        before = {kind: counters[kind].copy() for kind in ("unimplemented", "graph_break")}
        converted = convert(self, frame, *args)
        breaks, failures = (list(counters[kind] - before[kind]) for kind in ("graph_break", "unimplemented"))
        counts.stats.breaks += breaks
        if converted.guarded_code is None and (_is_module(frame) or (failures and _is_users(frame))):
            counts.stats.eager_frames += 1
            _tell(frame, failures or (counts.stats.breaks[-1:] if _is_after_a_break() else []), options)
        return converted

    convert_frame.CatchErrorsWrapper.__call__ = watched  # type: ignore[assignment,method-assign]


def _options(compiler: Any, backend: Callable[..., Any]) -> Mapping[str, Any] | None:
    """The options of a call of torch.compile with this backend; None if it has another one."""
    if getattr(compiler, "compiler_fn", None) is backend:
        return compiler.kwargs.get("options", {})
    return {} if inspect.unwrap(compiler) is backend else None


def _is_module(frame: Any) -> bool:
    """Whether a function is the forward of a module of torch. Dynamo runs it in eager mode if it comes alone."""
    code = frame.f_code
    is_forward = code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module)
    return is_forward and code.co_filename.startswith(_MODULES) and code.co_filename != _CONTAINERS


def _is_users(frame: Any) -> bool:
    """Whether a function is the program's, not torch's, and computes something when it is called."""
    code = frame.f_code
    is_generator = code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)
    is_torchs = code.co_filename.startswith(_TORCH) and code.co_filename != _AROUND
    return not is_generator and not is_torchs


def _is_after_a_break() -> bool:
    """Whether the function that Dynamo gave up was called by a compiled one, and not by torch.compile itself."""
    caller: FrameType | None = sys._getframe(2)
    while caller is not None and caller.f_code.co_filename != eval_frame.__file__:
        if caller.f_code.co_filename == _AROUND or not caller.f_code.co_filename.startswith(_TORCH):
            return True
        caller = caller.f_back
    return False


def _tell(frame: Any, reasons: list[str], options: Mapping[str, Any]) -> None:
    """Say that a function runs in eager mode, and why.

    Raises Unsupported in strict mode.
    """
    # Dynamo's reason, and then a context for its developers.
    words = [" ".join(reason.split("\n\n")[0].split()) for reason in reasons]
    why = "; ".join(words) or "`compile()` of a module does nothing for classes of torch, and torch.compile(model) does"
    message = f'torch.compile(backend="lighterage") runs {_name(frame)} in eager mode, without a budget: {why}'
    if options.get("strict"):
        raise Unsupported(message)
    warnings.warn(f'{message}. options={{"strict": True}} makes this an error', stacklevel=3)


def _name(frame: Any) -> str:
    """`Linear.forward (FILE:130)`."""
    code, owner = frame.f_code, frame.f_locals.get("self")
    if code.co_filename == _AROUND:
        return "the model"
    name = code.co_name if owner is None else f"{type(owner).__name__}.{code.co_name}"
    return f"{name} ({code.co_filename}:{code.co_firstlineno})"
