"""What one cluster reads of others' sequences, before it goes on with its own: see deal.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        self._orders: dict[int, tuple[int, Order]] = {}  # by cluster, of the epoch read last

    def add(self, stretches: Sequence[Stretch]) -> None:
        """Read these, too, behind what there is."""
        self._left += stretches

    def take(self, count: int) -> list[tuple[int, int]]:
        """Return whose samples are next, and at which places there; fewer where no more are."""
        taken: list[tuple[int, int]] = []
        while self._left and len(taken) < count:
            first = self._left[0]
            stop = min(first.stop, first.start + count - len(taken))
            taken += [(first.of, place) for place in range(first.start, stop)]
            self._left[:1] = [Stretch(first.of, stop, first.stop)] if stop < first.stop else []
        self.read += len(taken)
        return taken

    def upcoming(self) -> list[tuple[int, int]]:
        """Return all that `take` would, without taking it."""
        return [(s.of, place) for s in self._left for place in range(s.start, s.stop)]

    def skip(self, count: int) -> int:
        """Count so many as read; return how many of them there were."""
        return len(self.take(count))

    def order_of(self, cluster: int, epoch: int, make: Callable[[], Order]) -> Order:
        """Return a cluster's order in an epoch, `make()` where it is not the one read last."""
        if cluster not in self._orders or self._orders[cluster][0] != epoch:
            self._orders[cluster] = epoch, make()
        return self._orders[cluster][1]

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values; nothing where nothing has been dealt."""
        if not self.read and not self._left:
            return {}
        return {"read": self.read, "left": [[s.of, s.start, s.stop] for s in self._left]}

    @classmethod
    def of_state(cls, state: Mapping[str, Any] | None) -> Others:
        """Return what `state_dict` is of."""
        if not state:
            return cls()
        return cls(state["read"], [Stretch(*stretch) for stretch in state["left"]])
