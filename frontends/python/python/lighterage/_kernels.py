"""The kernel generator: where the package `lighterage-kernels` puts it, and a note where there is none."""

from __future__ import annotations

import logging
import os
import sysconfig
from pathlib import Path

from ._lighterage import Plan, generator_at

logger = logging.getLogger("lighterage")

PROGRAM = "lighterage-mlir"
_told = False


def installed() -> Path | None:
    """The program that pip installed: in this environment, for this user, or beside this package (`--target`)."""
    user = sysconfig.get_preferred_scheme("user")
    folders = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", user)]
    programs = [Path(folder, PROGRAM) for folder in [*folders, str(Path(__file__).parents[1] / "bin")]]
    return next((program for program in programs if os.access(program, os.X_OK) and program.is_file()), None)


def tell(asked: str, plan: Plan) -> None:
    """Say once that steps get other kernels than they could have."""
    global _told
    if asked == "auto" and plan.kernels == "plain" and not _told:
        _told = True
        logger.warning(
            "there is no kernel generator here, so steps have the package's own kernels, which take longer: "
            "the package lighterage-kernels has one (./make wheel-kernels), and kernels='plain' needs none"
        )


if (program := installed()) is not None:
    generator_at(program)
