"""Orders of members' tools (`dsx ctl`): what all clusters do at one step, and what came of it.

An order is a notice (notices.py), so all ranks of all clusters have it from the same step on, who
asked for it included. The first rank of each cluster keeps the last ones for those who ask.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dsx.training.notices import Notices

_KIND = "order"
_KEPT = 32
logger = logging.getLogger(__name__)


class Desk(Protocol):
    """Where members' tools ask."""

    verbs: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]]
    facts: list[Callable[[], Mapping[str, Any]]]


@dataclass(frozen=True)
class Order:
    """What to do, such as "save", asked for by member `by` at cluster `cluster`."""

    id: str
    do: str
    by: str
    step: int
    cluster: int
    more: Mapping[str, Any]

    @property
    def sentence(self) -> str:
        """Return what all clusters do."""
        do = " ".join([self.do, *(f"{value}" for value in self.more.values())])
        return f"all clusters {do} at step {self.step}, as {self.by} has asked (dsx ctl)"


class Orders:
    """One rank's. `record` enters an order into the records, on the rank that tells of it."""

    def __init__(
        self,
        notices: Notices,
        desk: Desk | None,
        speaks: bool,
        interval: int,
        record: Callable[[Mapping[str, Any]], object],
    ) -> None:
        """`interval` is H; `desk` is the first rank's, if the run has one."""
        self._notices, self._speaks, self.interval = notices, speaks, interval
        self._record = record
        self._kept: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._desk = desk
        self.why_not: Callable[[], str] = str  # why no order may be given now; empty if one may
        self.standing_still: Callable[[str, Mapping[str, Any]], Mapping[str, Any] | None] = (
            lambda do, request: None
        )  # answers in place of a boundary to come, where there is none
        if desk is not None:
            desk.verbs["progress"] = self._tell
            desk.facts.append(lambda: {"orders": self._under_way()})

    def offer(
        self, do: str, check: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda asked: {}
    ) -> None:
        """Take orders of a kind; `check` returns what goes along, or raises ValueError."""
        if self._desk is not None:
            self._desk.verbs[do] = lambda request: self._take(do, request, check)

    def due(self) -> list[Order]:
        """Return the orders that take effect now; at every boundary, on every rank."""
        found: list[Order] = []
        for notice in self._notices.due(_KIND):
            id, do, by, more = notice.payload
            order = Order(id, do, by, notice.step, notice.cluster, more)
            found.append(order)
            self.note(order, "agreed", step=order.step)
            if self._speaks:
                logger.warning("%s", order.sentence)
                self._record({"step": order.step, "do": do, "by": by, **more})
        return found

    def note(self, order: Order, state: str, **more: Any) -> None:
        """Keep how far an order has come here."""
        with self._lock:
            self._kept.setdefault(order.id, {"do": order.do, "by": order.by})
            self._kept[order.id].update(state=state, **more)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)

    def take_alone(self, do: str, request: Mapping[str, Any], step: int) -> Order:
        """Enter an order that this cluster alone follows, from this step on."""
        id, by = uuid.uuid4().hex[:12], str(request["by"])
        order = Order(id, do, by, step, self._notices.cluster, {})
        self.note(order, "agreed", step=step)
        return order

    def pass_on(self, order: Order) -> None:
        """Have all clusters follow one that this cluster was to follow alone."""
        self._notices.post(_KIND, [order.id, order.do, order.by, dict(order.more)])

    def _take(
        self,
        do: str,
        request: Mapping[str, Any],
        check: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ) -> Mapping[str, Any]:
        if (answer := self.standing_still(do, request)) is not None:
            return answer
        why = "" if do == "stop" else self.why_not()
        if why:
            raise ValueError(f"dsx ctl {do} is for all clusters at one step, and {why}")
        return self._post(do, request, check(request))

    def _post(
        self, do: str, request: Mapping[str, Any], more: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        id = uuid.uuid4().hex[:12]
        with self._lock:
            self._kept[id] = {"do": do, "by": request["by"], "state": "asked"}
        self._notices.post(_KIND, [id, do, request["by"], dict(more)])
        return {"id": id, "interval": self.interval}

    def _tell(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._lock:
            return dict(self._kept.get(str(request.get("id")), {"state": "not heard yet"}))

    def _under_way(self) -> list[dict[str, Any]]:
        with self._lock:
            kept = [{"id": id, **order} for id, order in self._kept.items()]
        return [order for order in kept if order["state"] not in ("done", "failed")]
