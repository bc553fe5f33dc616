"""What differs between the releases of torch with which the package was run. It uses private names of torch's."""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback

from .errors import CaptureError

# The oldest and the newest release with which the tests were run, and the one with which the committed graphs were
# written. Others may have other private names, or trace other operations.
OLDEST, NEWEST, EXACT = (2, 9), (2, 15), (2, 11)


# Without a GPU, torch (2.11) keeps something of the first thread that traces. When this thread has ended, others that
# trace crash, in torch.compile too. So the thread that loads the package is the first: it is most often the main one.
with FakeTensorMode():
    pass

P = ParamSpec("P")
T = TypeVar("T")


def alone(function: Callable[P, T]) -> Callable[P, T]:
    """A function that one thread runs at a time, because tracing replaces functions of torch's meanwhile.

    The lock is Dynamo's, so that tracing by torch.compile waits too. With two locks, two threads could wait for each
    other: Dynamo holds its own when it calls a backend, and traces a compiled part of a model that is being recorded.
    """

    @functools.wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        with compile_lock:
            return function(*args, **kwargs)

    return locked


def release() -> tuple[int, int]:
    """Of torch: 2.11 is `(2, 11)`."""
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)


def check() -> None:
    """Refuse releases that were not tried.

    Raises CaptureError.
    """
    if not OLDEST <= release() <= NEWEST:
        oldest, newest = (f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
        raise CaptureError(f"tracing needs torch {oldest} to {newest}, and this is {torch.__version__}")


def checkpoint_generators() -> list[str]:
    """The functions of `torch.utils.checkpoint` that keep what a block needs to be computed again."""
    # Since 2.15, `checkpoint` itself calls the second one.
    names = ["_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"]
    return [name for name in names if hasattr(torch.utils.checkpoint, name)]


@contextlib.contextmanager
def annotate(tag: dict[str, Any]) -> Iterator[None]:
    """Nodes that are made meanwhile have the tag among their own: `torch.fx.traceback.annotate` since 2.10."""
    meta = traceback.get_current_meta()
    before = meta.get("custom")
    meta["custom"] = {**(before or {}), **tag}
    try:
        yield
    finally:
        if before is None:
            meta.pop("custom", None)
        else:
            meta["custom"] = before


def called(node: fx.Node) -> fx.Node:
    """The call that a node of a file stands for."""
    # Before 2.10, files have no names of calls; one with several results has the name of the first.
    return node.args[0] if node.target is operator.getitem and isinstance(node.args[0], fx.Node) else node


def source_name(source: Any) -> str:
    """Where Dynamo found an input: `L['self']._modules['fc']._parameters['weight']`."""
    # Before 2.11 it is a method.
    return source.name() if callable(source.name) else source.name


def logging_functions() -> str:
    """Dynamo's setting with the logging functions that break no graph."""
    config: Any = torch._dynamo.config
    # Before 2.11 it has methods of loggers alone, and does not ask a set of another class for them.
    return "ignore_logging_functions" if hasattr(config, "ignore_logging_functions") else "ignore_logger_methods"
