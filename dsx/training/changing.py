"""Settings that a member's tool changes while training goes on (`dsx ctl set`), at one step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dsx.comm.world import World
from dsx.method.changes import OF_METHOD, require_change
from dsx.outer.loop import OuterLoop
from dsx.training.orders import Order, Orders

_LINE_RATE = "link.rate_mbit"
SETTABLE = (*OF_METHOD, _LINE_RATE)
logger = logging.getLogger(__name__)


class Changing:
    """One rank's."""

    def __init__(self, world: World, loop: OuterLoop, orders: Orders) -> None:
        self._world, self._loop, self._orders = world, loop, orders
        orders.offer("set", self._check)

    def take(self, order: Order) -> None:
        """Change a setting, on every rank of every cluster at this boundary."""
        key, value = order.more["key"], order.more["value"]
        before = self._loop.history.changed.get(key)
        try:
            value = self._require(key, value)  # what was set since it was asked for counts
        except ValueError as error:
            self._orders.note(order, "failed", why=str(error))
            if self._world.rank == 0:
                logger.error("%s=%g is not set: %s", key, value, error)
            return
        self._loop.history.changed[key] = value
        self._follow()
        self._orders.note(order, "done", value=value, before=before)
        if self._world.rank == 0:
            logger.warning("step %d: %s=%g from here on", order.step, key, value)

    def loaded(self) -> None:
        """Go on with what a checkpoint has, or the run that this cluster has joined."""
        self._follow()
        changed = self._loop.history.changed
        if changed and self._world.rank == 0:
            named = ", ".join(f"{key}={value:g}" for key, value in changed.items())
            logger.warning(
                "going on with %s, as dsx ctl has set it; dsx ctl set changes it again", named,
            )  # fmt: skip

    def _follow(self) -> None:
        rate = self._loop.history.changed.get(_LINE_RATE)
        if rate is not None:
            self._world.limit_rate(rate)

    def _check(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        key, value = request.get("key"), request.get("value")
        if key not in SETTABLE:
            raise ValueError(
                f"{key!r} cannot change in a run that goes on; these can: {', '.join(SETTABLE)}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{key}={value!r} must be a number")
        return {"key": key, "value": self._require(key, value)}

    def _require(self, key: str, value: float) -> float:
        if key == _LINE_RATE:
            if not 0 < value <= 1e7:
                raise ValueError(f"{key}={value:g} must be above 0, and 1e7 Mbit/s at most")
            return float(value)
        loop = self._loop
        stages, fragments = loop.adapter.stage.count, len(loop.adapter.fragments)
        return require_change(loop.method, loop.history.changed, key, value, fragments, stages)
