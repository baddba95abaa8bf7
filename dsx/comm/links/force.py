"""An operator's word that clusters which are lost do not go on, so that those who wait may."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, cast

from dsx.comm.membership.participant import Participant

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
        self._without, self._view, self._branch = cast("list[int]", ids), view, branch
        self._by = str(request["by"])
        self.done: Future[int] = Future()

    def take(self, log: Participant) -> None:
        """Do it, or refuse it; in the clerk's thread."""
        state = log.state
        try:
            if self._view != state.epoch:
                raise ValueError(f"it is for view {self._view}; view {state.epoch} is in force")
            log.force(self._without, cast("int", self._branch))
        except ValueError as error:
            self.done.set_exception(error)
            return
        log.say(f"forced/{self._branch}", json.dumps([self._by, *self._without]))
        logger.warning(
            "%s has forced a view without cluster(s) %s, in place of view %d of clusters %s (dsx "
            "ctl force-view): whoever of those runs still has to join again", self._by,
            ", ".join(map(str, self._without)), state.epoch,
            ", ".join(str(c.id) for c in state.contributors),
        )  # fmt: skip
        self.done.set_result(state.epoch)
