"""What an engine, and a script, do about the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from dsx.checkpoint.tags import NotSaved

Callback = Callable[[Path], Mapping[str, Any] | None]


class Engine(Protocol):
    """What an engine does about the end of a run."""

    needs_callback: bool  # whether the script saves what is trained
    ends_elsewhere: bool  # whether a loop of the engine's own saves and leaves
    saves_when_asked: bool  # whether it can save and go on

    def save(self, base: Path, tag: str) -> Path:
        """Save everything as a tag below `base`; return what a script loads. On every rank.

        `NotSaved` on all of them where one cannot write.
        """
        ...


def save_at_end(engine: Engine, base: Path, step: int) -> Path | None:
    """Save what a run that is told to end goes on from; None where it could not be written."""
    with suppress(NotSaved):  # of which all have been told: the run ends all the same
        return engine.save(base, f"preempted_step{step}")
    return None
