"""Saves that a member's tool asks for (`dsx ctl save`), at one step of all; training goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from dsx.checkpoint.tags import NotSaved
from dsx.training.orders import Order, Orders

WITHOUT_CALLBACK = "how model and optimizer are saved, says handle.on_preemption(callback)"
logger = logging.getLogger(__name__)


class Owner(Protocol):
    """What knows how this run saves by itself."""

    engine: Any
    callback: Callable[[Path], Any] | None

    @property
    def folder(self) -> Path | None:
        """Where it saves to, if that is known."""
        ...

    @property
    def step(self) -> int:
        """Inner steps taken."""
        ...


class AskedSaves:
    """One rank's."""

    def __init__(self, orders: Orders, owner: Owner, speaks: bool) -> None:
        self._orders, self._owner, self._speaks = orders, owner, speaks
        self._due: list[Order] = []
        self.is_saving = False
        orders.offer("save", lambda request: self.require() or {})

    def add(self, order: Order) -> None:
        """Save once the step that has been taken is complete."""
        self._due.append(order)

    def save_due(self) -> None:
        """Save what is due, where a step is complete. On every rank of the cluster."""
        due, self._due = self._due, []
        for order in due:
            self._save(order)

    def require(self) -> None:
        """Raise ValueError where this run cannot save and go on."""
        owner = self._owner
        if not getattr(owner.engine, "saves_when_asked", False):
            raise ValueError(
                "this run saves in a loop of its framework's own: set there how often it saves; "
                "dsx ctl stop has it save and end"
            )
        if owner.engine.needs_callback and owner.callback is None:
            raise ValueError(f"this run saves nothing by itself: {WITHOUT_CALLBACK}")
        if owner.folder is None:
            raise ValueError(
                "this run has nowhere to save: it has not saved or loaded a checkpoint yet, and "
                "metrics.dir is not set"
            )

    def warn_of_what_is_missing(self) -> None:
        """Say so where a run that is told to end would save nothing."""
        owner = self._owner
        needs_callback = owner.engine is None or owner.engine.needs_callback
        if needs_callback and owner.callback is None:
            logger.warning(
                "told to end by a signal (clusters.preemption_signals), this run saves nothing: %s",
                getattr(owner.engine, "without_callback", WITHOUT_CALLBACK),
            )
        elif owner.folder is None:
            logger.warning(
                "told to end by a signal (clusters.preemption_signals) before it has saved or "
                "loaded a checkpoint, this run has nowhere to save: set metrics.dir"
            )

    def _save(self, order: Order) -> None:
        started, orders = time.monotonic(), self._orders
        orders.note(order, "saving")
        self.is_saving = True
        try:
            self.require()
            path = self._owner.engine.save(self._owner.folder, f"asked_step{self._owner.step}")
        except (OSError, ValueError) as error:  # on all ranks: they agree on it
            orders.note(order, "failed", why=str(error))
            if self._speaks and not isinstance(error, NotSaved):  # of which all have been told
                logger.error("the save that %s has asked for is not made: %s", order.by, error)
            return
        finally:
            self.is_saving = False
        seconds = time.monotonic() - started
        orders.note(order, "done", path=str(path), seconds=seconds)
        if self._speaks:
            logger.warning("saved in %.1f s, as %s has asked: %s", seconds, order.by, path)
