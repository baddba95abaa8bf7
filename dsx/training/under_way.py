"""Says of each transfer when it is launched, has come and is applied, as far as this rank knows.

A launch is told at once, as training may stand still for it; the rest with the record of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dsx.outer.loop import OuterLoop
from dsx.outer.transfer import Transfer

Tell = Callable[[Mapping[str, Any]], object]


class UnderWay:
    """One rank's transfers, from their launch until they have been applied."""

    def __init__(self, loop: OuterLoop, tell: Tell) -> None:
        """`tell` hears of each launch."""
        self._loop, self._tell = loop, tell
        self._transfers: list[Transfer] = []
        self._have_come: set[int] = set()  # by identity, of those
        loop.at_launch = self._launched

    def begin(self) -> None:
        """Forget what was under way: training goes on from elsewhere."""
        self._transfers, self._have_come = [], set()

    def pass_boundary(self) -> dict[str, Any]:
        """Return what a step's record says: `arrived` and `applied`, each (fragment, launched)."""
        if not self._transfers:
            return {}
        left = {id(transfer) for transfer in self._loop.in_flight}
        applied = [t for t in self._transfers if id(t) not in left]
        self._transfers = [t for t in self._transfers if id(t) in left]
        self._have_come &= left
        arrived = [t for t in self._transfers if id(t) not in self._have_come and self._is_here(t)]
        self._have_come |= {id(t) for t in arrived}
        told = {"arrived": arrived, "applied": applied}
        return {what: [[t.fragment, t.launched] for t in ts] for what, ts in told.items() if ts}

    def _launched(self, transfer: Transfer) -> None:
        self._transfers.append(transfer)
        self._tell({"step": transfer.launched, "fragment": transfer.fragment})

    def _is_here(self, transfer: Transfer) -> bool:
        """Whether the mean has come: not of what other ranks alone have a part in."""
        return self._loop.state.is_sent(transfer.fragment) and transfer.pending.has_arrived
