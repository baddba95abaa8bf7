"""Controllers: what may change H (and later the rank) while training, from shared values only.

Every cluster must take the same decision, so a controller reads nothing but the `History` and
the method's initial knobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dsx.types import History, Knobs


class Control(Protocol):
    """Returns the knobs in force at this boundary."""

    def knobs(self, initial: Knobs, history: History) -> Knobs:
        """Decide from values that are equal on every rank."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The configured values, for ever."""

    def knobs(self, initial: Knobs, history: History) -> Knobs:
        """Return the initial knobs."""
        return initial
