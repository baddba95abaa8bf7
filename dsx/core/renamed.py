"""Old spellings go on working: one warning per spelling and process names the new one.

What was documented once (a config key, a flag, a field of metrics or checkpoints, a command, an
import path) is read under its old name for two minor releases at least; CHANGELOG.md lists them.
"""

from __future__ import annotations

import warnings
from functools import cache


class RenamedWarning(FutureWarning):
    """Something was spelled as an earlier version of dsx had it; the message has today's name."""


@cache
def warn_renamed(old: str, new: str) -> None:
    """Warn, once per process, that `old` is spelled `new` today."""
    message = f"{old} is now {new}; the old spelling still works, until dsx 0.4"
    warnings.warn(message, RenamedWarning, stacklevel=3)
