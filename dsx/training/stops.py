"""The stops of one process: the place of the next one, and who asks for it.

A cluster that has stopped to wait for others may go on, and stop again: each stop has a key space
of its own, in which the ranks agree on its place (comm/stop_place.py).
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

from dsx.comm.stop_place import StopPlace
from dsx.comm.world import World
from dsx.core.at_exit import close_at_exit, has_closed
from dsx.outer.loop import OuterLoop

_LOOK_SECONDS = 0.5
_END_SECONDS = 5.0  # in which a store that is asked answers
logger = logging.getLogger(__name__)


class Stops:
    """One rank's. `store` is a key space of the cluster's, None of one rank."""

    def __init__(self, world: World, loop: OuterLoop, grace_seconds: float) -> None:
        self.store = world.connect_own_store("stop_place") if world.world_size > 1 else None
        self._world, self._loop, self._grace_seconds = world, loop, grace_seconds
        self._number = 0
        self._closed: Future[None] = Future()
        self._listening: threading.Thread | None = None
        self.place = self._make()

    def begin_next(self, step: int) -> None:
        """Be ready for another one, at the boundary of a step, which has not been left."""
        self._number += 1
        self.place = self._make()
        self.place.begin(step)

    def wait_for_one(self) -> bool:
        """Wait until a rank of this cluster asks for a stop; False if nobody is to hear of it."""
        place, self._listening = self.place, threading.current_thread()
        close_at_exit(self)
        try:
            while not place.is_asked_within(_LOOK_SECONDS, self._closed):
                if self._closed.done():
                    return False
                place.look()
        except RuntimeError as error:
            if self._closed.done():
                return False
            logger.debug("the cluster's store does not answer: %s", error)
            while not place.is_asked_within(_LOOK_SECONDS, self._closed):
                if self._closed.done():
                    return False  # what comes later cannot be agreed on, which is said then
        finally:
            self._listening = None
        return True

    def close(self) -> None:
        """Wait for no stop any more; returns once no store is asked for one."""
        has_closed(self)
        if not self._closed.done():
            self._closed.set_result(None)
        listening = self._listening
        if listening is not None:
            listening.join(_END_SECONDS)

    def _make(self) -> StopPlace:
        rank, num_ranks = self._world.rank, self._world.world_size
        place = StopPlace(self.store, rank, num_ranks, self._grace_seconds, self._number)
        self._loop.stop_place = place
        return place
