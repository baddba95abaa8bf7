"""Transfers of a cluster that have been launched, and whose record has not come yet.

A record of a sync comes some steps behind the end; until then the launch is known, and from the
records of steps whether the mean has come, and was applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsx.telemetry.run_folder import Record

_MOST = 256  # more are not under way, but where their records have been lost
Place = tuple[int, int, int]  # stage, fragment, and the step of the launch


@dataclass
class OpenTransfer:
    """When it was launched, has come, and was applied, in seconds since 1970."""

    launched: float
    arrived: float | None = None
    applied: float | None = None


class OpenTransfers:
    """One cluster's, in the order of their launches."""

    def __init__(self) -> None:
        self._transfers: dict[Place, OpenTransfer] = {}

    def __iter__(self) -> Iterator[tuple[Place, OpenTransfer]]:
        return iter([*self._transfers.items()])

    def take_launch(self, record: Record, when: float) -> None:
        """Take a launch."""
        place = int(record.get("stage", 0)), int(record["fragment"]), int(record["step"])
        self._transfers[place] = OpenTransfer(when)
        if len(self._transfers) > _MOST:
            self._transfers.pop(next(iter(self._transfers)))

    def take_step(self, record: Record, when: float) -> None:
        """Take what a step's record says of those of the first stage."""
        for name in ("arrived", "applied"):
            for fragment, launched in record.get(name) or ():
                if transfer := self._transfers.get((0, fragment, launched)):
                    setattr(transfer, name, when)

    def take_sync(self, record: Record) -> None:
        """Take the record of one that has ended, and so have those of its fragment before it."""
        stage, fragment = int(record.get("stage", 0)), int(record["fragment"])
        launched = int(record["launched_step"])
        self._keep(lambda p: p[:2] != (stage, fragment) or p[2] > launched)

    def go_back(self, step: int) -> None:
        """Training goes on from before a step: what was under way was launched elsewhere."""
        self._keep(lambda place: place[2] < step)

    def clear(self) -> None:
        """Nothing is under way."""
        self._transfers = {}

    def _keep(self, is_kept: Callable[[Place], bool]) -> None:
        self._transfers = {p: t for p, t in self._transfers.items() if is_kept(p)}
