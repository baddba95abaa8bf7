"""All clusters come to the end of training: they wait for each other before anything is drained.

What is under way has come, and all have said that they are there: what `finish()` does from then on
waits for hardly anything. While it waits here a cluster may be told to end, or lose its quorum, as
at any boundary: it saves as it is, with what is under way, and ends or waits. Later a lost quorum
ends the run by name, as what has been drained is nothing to go on from.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from dsx.comm.world import World
from dsx.core.transport import PeerLost
from dsx.outer.loop import OuterLoop
from dsx.outer.transfer import Transfer
from dsx.training.gathering import Gathering
from dsx.training.stops import Stops
from dsx.training.waiting import Waiting

_WHAT = "end of training"
_TICK_SECONDS = 0.05
_NOTICE_SECONDS = 2.0  # in which the log notices for what a message has failed


class EndMeeting:
    """One rank's. `stop` saves, and ends the process or comes back to go on."""

    def __init__(
        self, world: World, loop: OuterLoop, stops: Stops, waiting: Waiting, stop: Callable[[], Any]
    ) -> None:
        self._world, self._loop, self._stops = world, loop, stops
        self._waiting, self._stop = waiting, stop
        self._failed_at = 0.0

    def meet(self, gathering: Gathering, value: Any) -> list[Any]:
        """Return one JSON value per cluster, rank 0's; PeerLost on all ranks.

        On every rank of every cluster, at the boundary of the last step.
        """
        gathering.require_part(_WHAT)
        self._await_transfers()
        in_cluster, told, is_first = self._world.in_cluster(), Future[list[Any]](), False
        if in_cluster.rank == 0:
            is_first, args = True, (told, self._loop, value)
            threading.Thread(target=_ask, args=args, name="dsx-end-meeting", daemon=True).start()
        while True:
            wait([told], _TICK_SECONDS)
            is_over = is_first and self._is_over(told)
            own = [is_over, self._stops.place.reason is not None]
            everyone = in_cluster.gather(_WHAT, own)
            if everyone[0][0]:
                break
            if any(stops for _, stops in everyone):
                self._stop()
        error = told.exception() if is_first else None
        own = None if error is None else str(error), [] if error or not is_first else told.result()
        lost, values = in_cluster.from_first(_WHAT, own)
        if lost is not None:
            raise PeerLost(lost)
        self._waiting.is_past = True
        return values

    def _await_transfers(self) -> None:
        """Wait until all that is under way is here, on all ranks."""
        while True:
            place = self._stops.place
            under_way = [t.pending for t in self._loop.in_flight if isinstance(t, Transfer)]
            is_there = all([place.may_receive(pending) for pending in under_way])
            if not self._world.in_cluster().any("what is under way at the end", not is_there):
                for pending in under_way:
                    pending.wait()  # has ended, and may have failed
                return
            self._stop()

    def _is_over(self, told: Future[list[Any]]) -> bool:
        """Whether the first rank has heard all, or why it will not; nothing yet if that is a loss
        for which this cluster is to save, and to wait.
        """  # fmt: skip
        if not told.done() or told.exception() is None:
            return told.done()
        self._failed_at = self._failed_at or time.monotonic()
        if (reason := self._waiting.reason) is not None:
            self._stops.place.ask(reason)
            return False
        clerk = self._world.clerk
        may_notice = clerk is not None and clerk.end is None and self._waiting.seconds > 0
        return not may_notice or time.monotonic() > self._failed_at + _NOTICE_SECONDS


def _ask(told: Future[list[Any]], loop: OuterLoop, value: Any) -> None:
    """Tell the other clusters, and wait for theirs, beside the thread that may have to stop."""
    try:
        told.set_result([*loop.transport.gather(_WHAT, value)()])
    except Exception as error:
        told.set_exception(error)
