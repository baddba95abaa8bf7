"""How a cluster leaves a run whose others go on: what it has launched is handed over, then it goes.

Told to end, it says so in the log and trains on for a while, as others may be told, too. If so many
are that the rest could not go on, all save and end (comm/links/departures.py). Otherwise it stops
at a boundary and saves; meanwhile its transfers under way are committed, which the others have to
come to, and then a view leaves it out. The others wait for no more than that.

The first rank has the clerk; the others hear of it over the cluster's own store, on this thread.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsx.checkpoint.tags import note_left
from dsx.comm.world import World
from dsx.config.sections import ClustersConfig
from dsx.core.at_exit import close_at_exit, has_closed
from dsx.core.leaving import ORDERED, Reason
from dsx.core.transport import Pending

if TYPE_CHECKING:  # libzmq is an extra
    from dsx.comm.links.clerk import Clerk

_TICK_SECONDS = 0.1
_LOG_SECONDS = 3.0  # in which the log takes up what a cluster says, if a majority is there
_TOLD, _HANDED, _OUTCOME = "told", "handed_over", "outcome"
LEFT, ALL_END, UNHEARD = "left", "all end", "not heard"
logger = logging.getLogger(__name__)


def _refuse(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Answer a member's tool where the others cannot go on; raises ValueError."""
    raise ValueError(
        "this cluster cannot leave: the others would be no majority of those that train, nor have "
        "the arbiter (link.arbiter); dsx ctl stop has all save and end"
    )


class Leaving:
    """One rank's part. `stop` is called once, with the reason that this cluster stops for."""

    def __init__(
        self,
        clerk: Clerk | None,
        store: Any,
        num_ranks: int,
        wait_seconds: float,
        stop: Callable[[Reason], object],
    ) -> None:
        """`clerk` is the first rank's; `store` a key space of the cluster's, None of one rank.

        `wait_seconds`: how long after a signal others may be told to end, too.
        """
        self._clerk, self._store, self._num_ranks = clerk, store, num_ranks
        self._wait_seconds, self._stop = wait_seconds, stop
        self._told: Future[Reason] = Future()
        self._due: Future[tuple[Sequence[Pending], float]] = Future()
        self._outcome: Future[str] = Future()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="dsx-leaving", daemon=True)
        self._thread.start()
        close_at_exit(self)

    @classmethod
    def of(
        cls, world: World, clusters: ClustersConfig, stop: Callable[[Reason], object]
    ) -> Leaving | None:
        """Return that of a rank of a run whose others may go on; None where they never could."""
        desk = world.desk
        if not world.others_may_go_on:
            if desk is not None:
                desk.verbs["leave"] = _refuse
            return None
        store = world.connect_own_store("leaving") if world.world_size > 1 else None
        seconds = clusters.leave_after_seconds
        seconds = clusters.grace_seconds / 6 if seconds is None else seconds
        made = cls(world.clerk, store, world.world_size, seconds, stop)
        if desk is not None:
            desk.verbs["leave"] = lambda request: made.order(world.cluster_id, request)
        return made

    def ask(self, reason: Reason) -> None:
        """Note that this cluster is told to end; the first reason counts. Waits for nothing."""
        with self._lock:
            if not self._told.done():
                self._told.set_result(reason)

    def order(self, own: int, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leave, as a member's tool asks. ValueError where the others could not go on."""
        if self._clerk is None or not self._clerk.may_leave():
            _refuse(request)
        self.ask(Reason(own, ORDERED, leaves=True))
        return {"reason": self._told.result().name}

    @property
    def all_end(self) -> Reason | None:
        """Why all clusters save and end, if they have to; known on the first rank."""
        return None if self._clerk is None else self._clerk.departures.all_end

    def wait_seconds(self, reason: Reason) -> float:
        """Return how long a cluster trains on after it was told to leave."""
        return 0.0 if reason.signal == ORDERED else self._wait_seconds

    def begin(self, under_way: Sequence[Pending], until: float) -> None:
        """Hand over what is under way, this cluster having stopped; give up at `until`."""
        if not self._due.done():
            self._due.set_result((under_way, until))

    def end(self, reason: Reason, path: Path | None, until: float) -> tuple[Reason, str]:
        """Wait until the others have left this cluster out, which has saved to `path`.

        Returns why it ends in the end, and what has come of it.
        """
        wait([self._outcome], max(until - time.monotonic(), 0.0))
        outcome = self._outcome.result() if self._outcome.done() else UNHEARD
        if outcome == ALL_END:
            reason = reason.for_all()
            told = f"others are told to end meanwhile, and so all are: {reason.sentence}"
        else:
            told = "the others go on without this cluster"
            if outcome != LEFT:
                told = f"by now the others have not confirmed that {told}"
            if self._clerk is not None and path is not None:
                note_left(path)
        if self._clerk is not None:
            logger.warning("%s", told)
        return reason, told

    def close(self) -> None:
        """Look no more; returns once no store is asked (core/at_exit.py)."""
        self._is_closed = True
        has_closed(self)
        self._thread.join(10 * _TICK_SECONDS)

    def _run(self) -> None:
        try:
            if self._clerk is None:
                self._pass_on()
                self._hand_over()
            else:
                self._decide(self._clerk)
                self._hand_over()
        except RuntimeError as error:
            if not self._is_closed:
                logger.debug("the cluster's store does not answer: %s", error)

    def _is_told_or_due(self) -> bool:
        """Wait a tick; whether this rank is told to end, or has stopped."""
        either: list[Future[Any]] = [self._told, self._due]
        return bool(wait(either, 2 * _TICK_SECONDS, FIRST_COMPLETED).done)

    def _pass_on(self) -> None:
        """Tell the first rank that this one was told to end, until this cluster stops."""
        while not (self._is_closed or self._is_told_or_due()):
            pass
        if self._told.done() and self._store is not None:
            self._store.compare_set(_TOLD, "", json.dumps(asdict(self._told.result())))

    def _decide(self, clerk: Clerk) -> None:
        """Wait until a rank is told to end; say so in the log, and what comes of it."""
        while not self._is_told_or_due():
            if self._is_closed:
                return
            if self._store is not None and self._store.check([_TOLD]):
                self.ask(Reason(**json.loads(self._store.get(_TOLD))))
        if self._due.done():
            return
        told, began = self._told.result(), time.monotonic()
        if not clerk.may_leave(alone=True):
            self._end_all(told)
            return
        seconds = self.wait_seconds(told)
        logger.warning(
            "%s: training on for %.1f s, then saving and leaving, unless so many others are told "
            "to end that the rest could not go on", told.sentence, seconds,
        )  # fmt: skip
        clerk.say_told_to_end(told)
        while not self._is_closed and clerk.departures.all_end is None:
            passed = time.monotonic() - began
            if passed >= seconds and clerk.has_said_told:
                self._stop(replace(told, leaves=True))
                return
            if passed > seconds + _LOG_SECONDS:
                logger.warning("the others have not heard that this cluster is to leave")
                self._end_all(told)
                return
            time.sleep(_TICK_SECONDS)
        if (end := clerk.departures.all_end) is not None:
            self._stop(end)

    def _end_all(self, told: Reason) -> None:
        self._stop(replace(told, leaves=True).for_all())

    def _hand_over(self) -> None:
        """Wait until what is under way is committed on all ranks, then have the first one leave."""
        while not self._due.done():
            if self._is_closed:
                return
            wait([self._due], 2 * _TICK_SECONDS)
        under_way, until = self._due.result()
        now = time.monotonic()
        limit = now + (until - now) / 2
        while time.monotonic() < limit and not self._is_over():
            if all(pending.has_arrived for pending in under_way):
                break
            time.sleep(_TICK_SECONDS / 2)
        late = sum(not pending.has_arrived for pending in under_way)
        if late and self.all_end is None:
            logger.warning(
                "%d of %d transfers under way are not committed in time: the others make them "
                "without this cluster", late, len(under_way),
            )  # fmt: skip
        if self._store is not None:
            self._store.add(_HANDED, 1)
        if self._clerk is not None:
            told = self._leave(self._clerk, limit, until)
            if self._store is not None:
                self._store.set(_OUTCOME, told)
        else:
            assert self._store is not None, "a rank that is not the first has a store"
            while not (self._is_closed or self._store.check([_OUTCOME])):
                time.sleep(_TICK_SECONDS)
            if self._is_closed:
                return
            told = self._store.get(_OUTCOME).decode()
        self._outcome.set_result(told)

    def _leave(self, clerk: Clerk, limit: float, until: float) -> str:
        while self._store is not None and time.monotonic() < limit and not self._is_over():
            if self._store.add(_HANDED, 0) >= self._num_ranks:
                break
            time.sleep(_TICK_SECONDS / 2)
        clerk.leave()
        while time.monotonic() < until:
            if clerk.has_left.is_set():
                return LEFT
            if self._is_over():
                return ALL_END
            time.sleep(_TICK_SECONDS / 2)
        return UNHEARD

    def _is_over(self) -> bool:
        """Whether all are to end meanwhile."""
        if self._clerk is not None:
            return self._clerk.departures.all_end is not None
        return self._store.check([_OUTCOME])
