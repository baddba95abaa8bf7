"""Old spellings go on working: one warning per spelling and process names the new one.

What was documented once (a config key, a flag, a field of metrics or checkpoints, a command, an
import path) is read under its old name for two minor releases at least; CHANGELOG.md lists them.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

COMMAND_LINE = "<command line>"
_PACKAGE = str(Path(__file__).parents[1])
_told: set[tuple[str, str]] = set()


class RenamedWarning(FutureWarning):
    """Something was spelled as an earlier version of dsx had it; the message has today's name."""


def warn_renamed(old: str, new: str, file: str | None = None, line: int = 1) -> None:
    """Warn, once per process, that `old` is spelled `new` today.

    The warning points to where it was written: `line` of `file`, which may be `COMMAND_LINE`;
    without one, to the line of the program that called or imported dsx.
    """
    if (old, new) in _told:
        return
    _told.add((old, new))
    message = f"{old} is now {new}; the old spelling still works, until dsx 0.4"
    place = (file, line) if file is not None else _caller()
    warnings.warn_explicit(message, RenamedWarning, *place)


def _caller() -> tuple[str, int]:
    """Return file and line of the innermost frame that is neither dsx's nor the interpreter's."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((f"{_PACKAGE}/", "<frozen ")):
            return file, frame.f_lineno
        frame = frame.f_back
    return COMMAND_LINE, 1
