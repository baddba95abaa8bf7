"""Going back to the last good checkpoint, on every rank of every cluster at one step.

An engine that can load in place does so; a script that saves by itself does it in its callback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsx.checkpoint.health import find_trouble
from dsx.comm.world import World
from dsx.outer.loop import OuterLoop
from dsx.outer.recovery import NonFiniteError
from dsx.training.divergence import Divergence
from dsx.training.gathering import Gathering
from dsx.training.records import Records
from dsx.training.saving import Saving

logger = logging.getLogger(__name__)


class Rollback:
    """One rank's part; `load` is the engine's, from the directory of all tags."""

    def __init__(
        self,
        divergence: Divergence,
        saving: Saving,
        loop: OuterLoop,
        world: World,
        records: Records,
        gathering: Gathering,
    ) -> None:
        self._divergence = divergence
        self._saving = saving
        self._loop = loop
        self._world = world
        self._records = records
        self._gathering = gathering
        self._in_cluster = world.in_cluster() if divergence.may_go_back else None
        self._of_script: dict[int, Path] = {}  # good ones by step
        self.load: Callable[[str], Any] | None = None
        self.callback: Callable[[Path], Any] | None = None

    def saved(self, path: Path) -> None:
        """Note what a script has saved, if all is finite on this rank."""
        if self._divergence.may_go_back and self.load is None:
            moments = getattr(self._loop.adapter, "moments", list[Any])()
            trouble = find_trouble(self._loop, moments)
            if not trouble:
                self._of_script[self._loop.history.step] = path

    def survives(self, error: NonFiniteError) -> bool:
        """Whether the run goes back instead of ending with an error that all clusters have."""
        return self._can and self._divergence.take_up(str(error), self._loop.history.step)

    def pass_boundary(self) -> None:
        """Take up what has been posted; NonFiniteError where the run does not go back."""
        self._divergence.pass_boundary(self._loop.history.step, self._can)

    def go_back_if_due(self) -> None:
        """Go back, where a step is complete; the engines call it on every rank."""
        due = self._divergence.take_due()
        if due is None:
            return
        why, step = due.why, self._loop.history.step
        divergence, speaks = self._divergence, self._world.rank == 0
        if speaks:
            logger.error("%s: all clusters go back from step %d", why, step)
        with self._saving.naming_last(), self._saving.going_back(divergence.keeps_data, due.since):
            try:
                path = self._load(due.since)
            except (FileNotFoundError, ValueError) as error:
                raise NonFiniteError(f"{why}; there is nothing to go back to: {error}") from error
        if speaks:
            logger.warning(
                "gone back from step %d to %s (%s); the data goes on %s", step, path,
                divergence.counted(),
                "where it is" if divergence.keeps_data else "where the checkpoint has it",
            )  # fmt: skip
        self._records.rolled_back(why, step)
        now = self._loop.history.step
        told = {"step": now, "from_step": step, "why": why, "checkpoint": str(path)}
        self._records.log("rollback", told)

    @property
    def _can(self) -> bool:
        return self.load is not None or self.callback is not None

    def _load(self, before: int) -> Path:
        if self.load is not None:
            if self._saving.base is None:
                raise FileNotFoundError("this run has saved no checkpoint yet")
            self.load(str(self._saving.base))
            path = self._saving.last
            assert path is not None
            if self.callback is not None:
                self.callback(path)
            return path
        path = self._newest_of_script(before)
        assert self.callback is not None
        self.callback(path)
        if self._saving.last != path or self._loop.history.step >= before:
            raise RuntimeError(
                f"on_rollback's callback has not called handle.load({str(path)!r}): load the model "
                "and the optimizer from there, and the outer state by that"
            )
        return path

    def _newest_of_script(self, before: int) -> Path:
        """Return the last one that is good on all ranks of all clusters. Collective over all."""
        assert self._in_cluster is not None
        own = sorted(step for step in self._of_script if step < before)
        ranks = self._in_cluster.gather("checkpoints to go back to", own)
        common = sorted(set[int].intersection(*map(set, ranks)))
        clusters = self._gathering.gather("checkpoints to go back to", common)
        both = set[int].intersection(*map(set, clusters))
        if not both:
            raise FileNotFoundError(
                f"no checkpoint of before step {before} that was entered by handle.saved() and is "
                f"good in all clusters (by cluster: {clusters})"
            )
        return self._of_script[max(both)]
