"""A cluster that cannot go on without those who are lost has saved, and waits for them.

They are reached again as the same processes, or have been started again, and the log knows that
this is enough; or nobody has come back in time, and the run ends. All ranks of the cluster wait on
their training threads at the boundary where they have saved, and ask each other four times a second
what is to be done: the first rank knows of the others, and any rank may be told to end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsx.comm.world import World
from dsx.core.leaving import LOST, ORDERED, Reason
from dsx.core.waits import waiting_for
from dsx.outer.loop import OuterLoop
from dsx.training.orders import Order, Orders
from dsx.training.records import Records
from dsx.training.stops import Stops

if TYPE_CHECKING:  # libzmq is an extra
    from dsx.comm.links.quorum import Waiting as Lost

_TICK_SECONDS = 0.25
_TELL_SECONDS = 60.0
_WAITS, _GOES_ON = "waits", "goes on"
Verb = Callable[[Mapping[str, Any]], Mapping[str, Any]]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Asked:
    """An order of a member's tool that ends this cluster; `instead`, if it goes on after all."""

    reason: Reason
    order: Order
    instead: Callable[[], object]


class Waiting:
    """One rank's part in it. `told` returns why this rank is told to end, if it is."""

    def __init__(
        self,
        world: World,
        loop: OuterLoop,
        seconds: float,
        orders: Orders,
        records: Records,
        stops: Stops,
        told: Callable[[], Reason | None],
        can_wait: Callable[[], bool],
    ) -> None:
        """`seconds`: how long it waits at most. `can_wait`: whether training can stand still here,
        which a loop of an engine's own cannot.
        """
        self._world, self._loop, self._orders, self._told = world, loop, orders, told
        self._records = records
        self.seconds = seconds if world.coming is not None else 0.0
        self._stops, self._lock = stops, threading.Lock()
        self._asked: _Asked | None = None  # of the first rank
        self._told_at = 0.0
        self.is_on = False
        self.is_past = False  # what has been drained is nothing to go on from: no wait any more
        if world.clerk is not None:

            def patience() -> float:
                is_served = can_wait() and world.num_handles == 1 and not self.is_past
                return seconds if is_served else 0.0

            world.clerk.quorum.seconds = patience
        if world.desk is not None:
            orders.standing_still = self._take_order
            leave = world.desk.verbs.get("leave")
            if leave is not None:
                world.desk.verbs["leave"] = lambda request: self._leave(request, leave)

    @property
    def lost(self) -> Lost | None:
        """For whom this cluster waits, or is about to; known on the first rank."""
        return None if self._world.clerk is None else self._world.clerk.quorum.waiting

    @property
    def gone(self) -> tuple[int, ...]:
        """The clusters that it waits for; known on the first rank."""
        lost = self.lost  # once: the clerk's thread may take it back
        return () if lost is None else tuple(lost.gone)

    @property
    def reason(self) -> Reason | None:
        """Why this cluster is to stop and save, before it waits; known on the first rank."""
        gone = self.gone
        return Reason(gone[0], LOST) if gone else None

    def wait(self, path: Path | None, seconds: float) -> Reason | None:
        """Wait, having saved to `path`, if at all; return None to go on, or why to end.

        Collective over the ranks of the cluster.
        """
        self.is_on = True
        saved = "nothing is saved" if path is None else f"saved in {seconds:.1f} s: {path}"
        if self.lost is not None:
            self._tell_all(self.lost, saved)
        in_cluster, step = self._world.in_cluster(), self._loop.history.step
        lasts = waiting_for("clusters that are lost, to go on", 2 * self.seconds)
        try:
            with self._records.standing_still(step, self.gone, self.seconds), lasts:
                while True:
                    told = in_cluster.gather("what a lost quorum comes to", self._own())
                    ends = [one for one in told if isinstance(one, dict)]
                    if ends:
                        reason = Reason(**ends[0])
                        self._end(reason, path, seconds)
                        return reason
                    if told[0] == _GOES_ON:
                        self._go_on()
                        return None
                    time.sleep(_TICK_SECONDS)
        finally:
            self.is_on = False

    def _own(self) -> dict[str, Any] | str:
        """Return what this rank knows: why to end, as a JSON value, or what to do."""
        asked = self._asked if self.gone else None  # else it has come too late: all follow it
        told = self._told() if asked is None else asked.reason
        clerk = self._world.clerk
        if told is None and clerk is not None:
            farewells = self._loop.transport.farewells
            heard = None if farewells is None else farewells.heard_reason()
            if heard is not None and heard.is_order:
                told = heard
            elif clerk.end is not None:
                gone = getattr(clerk.end, "gone", ()) or (self._world.cluster_id,)
                told = Reason(gone[0], LOST)
        if told is not None:
            return asdict(told)
        if clerk is None:
            return _WAITS
        self._tell_now_and_then()
        return _WAITS if clerk.quorum.waiting is not None else _GOES_ON

    def _tell_all(self, lost: Lost, saved: str) -> None:
        self._told_at = time.monotonic()
        gone = ", ".join(map(str, lost.gone))
        own = self._world.cluster_id
        logger.warning(
            "%s; cluster %d waits for cluster(s) %s, for up to %.0f s "
            "(clusters.quorum_wait_seconds). It goes on once they are reached again; of two "
            "clusters also once the other has been started again, with the same command; dsx ctl "
            "force-view has it go on without, and dsx ctl stop ends it", saved, own, gone,
            lost.left_seconds,
        )  # fmt: skip

    def _tell_now_and_then(self) -> None:
        lost, now = self.lost, time.monotonic()
        if lost is not None and now > self._told_at + _TELL_SECONDS:
            self._told_at = now
            gone = ", ".join(map(str, lost.gone))
            logger.warning("waiting for cluster(s) %s, for %.0f s more", gone, lost.left_seconds)

    def _end(self, reason: Reason, path: Path | None, seconds: float) -> None:
        """Tell what has come of the order by which this cluster ends: all is saved by now."""
        asked = self._asked
        if asked is not None and asked.reason == reason:
            self._orders.note(asked.order, "done", path=str(path or ""), seconds=seconds)

    def _go_on(self) -> None:
        """Follow an order that has come too late to end the wait as all clusters do."""
        with self._lock:
            asked, self._asked = self._asked, None
        if asked is not None:
            try:
                asked.instead()
            except ValueError as error:
                logger.warning("dsx ctl %s is not followed: %s", asked.order.do, error)
                self._orders.note(asked.order, "failed", why=str(error))

    def _take_order(self, do: str, request: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Answer an order while this cluster waits, else None; ValueError for what has to wait."""
        if do == "stop":
            reason = Reason(self._world.cluster_id, ORDERED)
            return self._ask(do, request, reason, self._orders.pass_on)
        if gone := self.gone:
            named = ", ".join(map(str, gone))
            raise ValueError(
                f"this cluster waits for cluster(s) {named}, and trains no step meanwhile: dsx ctl "
                f"{do} is for later; dsx ctl stop ends it, saved as it is"
            )
        return None

    def _leave(self, request: Mapping[str, Any], leave: Verb) -> Mapping[str, Any]:
        reason = Reason(self._world.cluster_id, ORDERED, leaves=True)
        answer = self._ask("leave", request, reason, lambda order: leave(request))
        return leave(request) if answer is None else {**answer, "waits": True}

    def _ask(
        self,
        do: str,
        request: Mapping[str, Any],
        reason: Reason,
        instead: Callable[[Order], object],
    ) -> Mapping[str, Any] | None:
        """End this cluster where it waits, or is about to, once it has saved; None if it is not."""
        with self._lock:
            if not (gone := self.gone):
                return None
            if self._asked is not None:  # it ends by that one
                return {"id": self._asked.order.id, "interval": self._orders.interval}
            order = self._orders.take_alone(do, request, self._loop.history.step)
            self._asked = _Asked(reason, order, lambda: instead(order))
            self._stops.place.ask(Reason(gone[0], LOST))
        logger.warning("%s has asked to %s (dsx ctl): this cluster does so alone", order.by, do)
        return {"id": order.id, "interval": self._orders.interval}
