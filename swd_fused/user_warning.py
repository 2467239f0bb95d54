"""Warnings that point at the line of the user's program, however many frames of this package and torch are between."""

import sys
import warnings

NOT_THE_USERS = ("swd_fused", "torch")


def warn_user(message: str) -> None:
    """Issues a warning located at the nearest caller that is neither this package nor torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
