"""A rank's checkpoints, every some steps: one that is not made is said so, and training goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from dsx.checkpoint.checksums import MANIFEST

EVERY = 25  # steps
_AT_AN_END = "preempted_step"


class Log(Protocol):
    """Where a rank writes what it does."""

    def write(self, what: str, **fields: Any) -> None:
        """Write a line."""
        ...


class Saves:
    """One rank's, below `folder`; `save(base, tag)` is the engine's (engines/engine.py)."""

    def __init__(
        self, save: Callable[[Path, str], None], folder: Path, is_first: bool, log: Log
    ) -> None:
        self._save, self._folder, self._is_first, self._log = save, folder, is_first, log
        self._last: str | None = None

    def save_if_due(self, step: int) -> None:
        """Save, every so many steps, and delete what was saved before. On every rank."""
        if step % EVERY:
            return
        tag = f"step_{step}"
        try:
            self._save(self._folder.parent, tag)
        except OSError as error:
            self._log.write("not_saved", step=step, why=str(error))
            return
        self._log.write("saved", step=step)
        if self._is_first and self._last is not None:
            shutil.rmtree(self._folder / self._last, ignore_errors=True)
        self._last = tag


def steps_of_ends(folder: Path) -> list[int]:
    """Return the steps at which a cluster has saved all it has because it was told to end."""
    found = folder.glob(f"{_AT_AN_END}*/{MANIFEST}")
    return sorted(int(path.parent.name.removeprefix(_AT_AN_END)) for path in found)
