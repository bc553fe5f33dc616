"""What the file of a profile lacks."""

from __future__ import annotations

import logging
from os import PathLike

from ._lighterage import Plan

logger = logging.getLogger("lighterage")

# Ops in a message.
MOST_NAMED = 3


def tell(profile: str | PathLike[str] | None, plan: Plan) -> None:
    """Warn of ops of a plan whose times are guesses, because the profile lacks them.

    No profile has what PyTorch computes. `_foreign` warns of it.
    """
    guessed = [op for op in plan.guessed if not op.startswith("extern ")]
    if guessed:
        more = f" and {len(guessed) - MOST_NAMED} more" if len(guessed) > MOST_NAMED else ""
        named = "; ".join(guessed[:MOST_NAMED])
        logger.warning(
            "profile %s lacks %s%s: their times are guesses. plan.profile(FILE) adds them", profile, named, more
        )
