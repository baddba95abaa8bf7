"""What one cluster reads of others' sequences, before it goes on with its own: see deal.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dsx.data.deal import Stretch

Order = npt.NDArray[np.int64]


class Others:
    """Stretches of others' sequences, read in the order in which they have been dealt."""

    def __init__(self, read: int = 0, left: Sequence[Stretch] = ()) -> None:
        self.read = read  # samples, since the cluster came
        self._left = [*left]
        self._orders: dict[tuple[int, int], tuple[int, Order]] = {}  # of the epoch read last

    def add(self, stretches: Sequence[Stretch]) -> None:
        """Read these, too, behind what there is."""
        self._left += stretches

    def take(self, count: int) -> list[Stretch]:
        """Return which samples are next, each a stretch of its own; fewer where no more are."""
        taken: list[Stretch] = []
        while self._left and len(taken) < count:
            first = self._left[0]
            stop = min(first.stop, first.start + count - len(taken))
            taken += _one_by_one(replace(first, stop=stop))
            self._left[:1] = [replace(first, start=stop)] if stop < first.stop else []
        self.read += len(taken)
        return taken

    def upcoming(self) -> list[Stretch]:
        """Return all that `take` would, without taking it."""
        return [one for stretch in self._left for one in _one_by_one(stretch)]

    def left(self) -> list[Stretch]:
        """Return what is still to be read."""
        return [*self._left]

    def skip(self, count: int) -> int:
        """Count so many as read; return how many of them there were."""
        return len(self.take(count))

    def order_of(self, cluster: int, among: int, epoch: int, make: Callable[[], Order]) -> Order:
        """Return a cluster's order in an epoch, `make()` where it is not the one read last."""
        of = cluster, among
        if of not in self._orders or self._orders[of][0] != epoch:
            self._orders[of] = epoch, make()
        return self._orders[of][1]

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values; nothing where nothing has been dealt."""
        if not self.read and not self._left:
            return {}
        return {"read": self.read, "left": [s.plain() for s in self._left]}

    @classmethod
    def of_state(cls, state: Mapping[str, Any] | None) -> Others:
        """Return what `state_dict` is of."""
        if not state:
            return cls()
        return cls(state["read"], [Stretch(*stretch) for stretch in state["left"]])


def _one_by_one(stretch: Stretch) -> list[Stretch]:
    return [
        replace(stretch, start=place, stop=place + 1)
        for place in range(stretch.start, stretch.stop)
    ]
