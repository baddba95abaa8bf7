"""An operator's word that clusters which are lost do not go on, so that those who wait may."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from typing import Any, cast

from dsx.comm.membership.bounds import CLUSTERS, INTEGER
from dsx.comm.membership.participant import Participant

LAST_BRANCH = INTEGER - 1
_MOST_NAME = 200  # characters of who asks

logger = logging.getLogger(__name__)


class Force:
    """One request of a member's tool: `without` whom, in which `view`, by its `branch`.

    `done` has the number of that view, or ValueError if it is refused.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        without, view, branch = (request.get(name) for name in ("without", "view", "branch"))
        ids: list[Any] = cast("list[Any]", without) if isinstance(without, list) else []
        if not ids or any(type(one) is not int for one in [*ids, view, branch]):
            raise ValueError("say without which clusters, in which view, and by which branch")
        self._without, self._view = sorted({*cast("list[int]", ids)}), cast("int", view)
        self._branch = cast("int", branch)
        if len(self._without) > CLUSTERS or not 0 < self._branch <= LAST_BRANCH:
            raise ValueError(
                f"{len(self._without)} clusters to leave out and branch {self._branch}: at most "
                f"{CLUSTERS} clusters, and a branch from 1 to {LAST_BRANCH}"
            )
        self._by = str(request["by"])[:_MOST_NAME]
        self.done: Future[int] = Future()

    def result(self, seconds: float) -> int:
        """Wait for it; ValueError if it is refused, or not taken by then, and then never."""
        try:
            return self.done.result(seconds)
        except WaitedTooLong:
            if self.done.cancel():
                raise ValueError(
                    f"this cluster has not taken it within {seconds:g} s, and will not: ask again"
                ) from None
            return self.done.result(seconds)

    def take(self, log: Participant) -> None:
        """Do it, or refuse it; in the clerk's thread."""
        if not self.done.set_running_or_notify_cancel():
            return
        state = log.state
        try:
            if self._view != state.epoch:
                raise ValueError(f"it is for view {self._view}; view {state.epoch} is in force")
            log.force(self._without, self._branch)
            log.say(f"forced/{self._branch}", json.dumps([self._by, *self._without]))
        except ValueError as error:
            self.done.set_exception(error)
            return
        logger.warning(
            "%s has forced a view without cluster(s) %s, in place of view %d of clusters %s (dsx "
            "ctl force-view): whoever of those runs still has to join again", self._by,
            ", ".join(map(str, self._without)), state.epoch,
            ", ".join(str(c.id) for c in state.contributors),
        )  # fmt: skip
        self.done.set_result(state.epoch)
