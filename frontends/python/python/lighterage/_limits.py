"""What a user may give as a budget and as a number of threads."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from .errors import Error


def check(budget: Any, threads: Any = None) -> None:
    """Refuse what is neither. The compiler reads the text of a budget.

    Raises Error.
    """
    if isinstance(budget, bool) or not isinstance(budget, (str, Real, type(None))):
        raise Error(f"budget={budget!r}: it is a number of bytes, such as 4096 or '20GiB', or a share, '60%' or 0.6")
    is_number = isinstance(threads, Integral) and not isinstance(threads, bool)
    if threads is not None and not (is_number and threads > 0):
        raise Error(f"threads={threads!r}: it is a number of threads, from 1; None stands for all")
