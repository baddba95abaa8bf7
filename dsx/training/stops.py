"""The stops of one process: the place of the next one, and who asks for it.

A cluster that has stopped to wait for others may go on, and stop again: each stop has a key space
of its own, in which the ranks agree on its place (comm/stop_place.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dsx.comm.stop_place import StopPlace
from dsx.comm.world import World
from dsx.outer.loop import OuterLoop

_LOOK_SECONDS = 0.5
logger = logging.getLogger(__name__)


class Stops:
    """One rank's. `store` is a key space of the cluster's, None of one rank."""

    def __init__(self, world: World, loop: OuterLoop, grace_seconds: float) -> None:
        self.store = world.connect_own_store("stop_place") if world.world_size > 1 else None
        self._world, self._loop, self._grace_seconds = world, loop, grace_seconds
        self._number = 0
        self.place = self._make()

    def begin_next(self, step: int) -> None:
        """Be ready for another one, at the boundary of a step, which has not been left."""
        self._number += 1
        self.place = self._make()
        self.place.begin(step)

    def wait_for_one(self, is_closed: Callable[[], bool]) -> bool:
        """Wait until a rank of this cluster asks for a stop; False if nobody is to hear of it."""
        place = self.place
        try:
            while not place.is_asked_within(_LOOK_SECONDS):
                if is_closed():
                    return False
                place.look()
        except RuntimeError as error:
            if is_closed():
                return False
            logger.debug("the cluster's store does not answer: %s", error)
            while not place.is_asked_within(_LOOK_SECONDS):
                pass  # what comes now cannot be agreed on, which is said then
        return True

    def _make(self) -> StopPlace:
        rank, num_ranks = self._world.rank, self._world.world_size
        place = StopPlace(self.store, rank, num_ranks, self._grace_seconds, self._number)
        self._loop.stop_place = place
        return place
