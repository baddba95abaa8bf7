"""Going back to the last good checkpoint, on every rank of every cluster at one step.

An engine that can load in place does so; a script that saves by itself does it in its callback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from dsx.checkpoint.checksums import MANIFEST
from dsx.checkpoint.diverged import mark_diverged, trouble_since
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
        self._directories: set[Path] = set()  # of this cluster's tags
        self.load: Callable[[str], Any] | None = None
        self.callback: Callable[[Path], Any] | None = None

    def saved(self, path: Path) -> None:
        """Note where tags are, and what a script has saved, if all is good on this rank."""
        if (path / MANIFEST).is_file():
            self._directories.add(path.parent)
        if self._divergence.may_go_back and self.load is None:
            moments = getattr(self._loop.adapter, "moments", list[Any])()
            if not self.judge(moments)[0]:
                self._of_script[self._loop.history.step] = path

    def saved_whole(self, folder: Path, step: int) -> None:
        """Take a library's folder as one checkpoint, and tell all clusters of it (whole.py)."""
        self.saved(folder)
        self._saving.keeping.hold(folder, step)

    def judge(self, moments: Iterable[Tensor]) -> tuple[str, bool]:
        """Say what is wrong on this rank with what is about to be saved, and whether it is doubted.

        "" where nothing is; see `Manifest`.
        """
        trouble, since = find_trouble(self._loop, moments), self._divergence.bad_since
        if not trouble and since is not None:
            trouble = trouble_since(since)
        return trouble, self._divergence.is_doubtful

    def survives(self, error: NonFiniteError) -> bool:
        """Whether the run goes back instead of ending with an error that all clusters have."""
        obstacle = self._find_obstacle()
        if obstacle and self._world.rank == 0:
            logger.error("%s", obstacle)
        return not obstacle and self._divergence.take_up(str(error), self._loop.history.step)

    def pass_boundary(self) -> None:
        """Take up what has been posted; NonFiniteError where the run does not go back."""
        try:
            self._divergence.pass_boundary(self._loop.history.step, self._find_obstacle)
        except NonFiniteError:
            self._mark(self._divergence.bad_since)
            raise

    def go_back_if_due(self) -> None:
        """Go back, where a step is complete; the engines call it on every rank."""
        due = self._divergence.take_due()
        if due is None:
            return
        why, step = due.why, self._loop.history.step
        divergence, speaks = self._divergence, self._world.rank == 0
        self._mark(due.since)
        if speaks:
            logger.error("%s: all clusters go back from step %d", why, step)
        with self._saving.naming_last(), self._saving.going_back(divergence.keeps_data, due.since):
            try:
                path = self._load(due.since)
            except (FileNotFoundError, ValueError) as error:
                raise NonFiniteError(f"{why}; there is nothing to go back to: {error}") from error
        divergence.has_gone_back()
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

    def _find_obstacle(self) -> str:
        """Say which clusters cannot go back, the same on all ranks. Collective over all."""
        if self._in_cluster is None or self._divergence.is_exhausted:
            return ""
        what, can = "whether training can go back", self.load is not None or bool(self.callback)
        of_cluster = all(self._in_cluster.gather(what, can))
        seat = self._loop.transport.seat
        clusters = zip(seat.ids, self._gathering.gather(what, of_cluster), strict=True)
        if gone := [id for id in seat.membership.places if id not in seat.ids]:
            named = ", ".join(f"cluster {id}" for id in gone)
            return f"{named} has been lost, and a checkpoint is gone back to by all"
        lacking = ", ".join(f"cluster {m}" for m, can in clusters if not can)
        return f"handle.on_rollback(callback) has not been called in {lacking}" if lacking else ""

    def _mark(self, since: int | None) -> None:
        """Let what this cluster has saved since a step be nothing to go on from."""
        if since is None:
            return
        try:
            self._saving.beside.wait()  # a tag that is complete later would not be marked
        except TimeoutError as error:
            logger.error("%s; if it is complete later, delete it by hand", error)
        self._of_script = {step: path for step, path in self._of_script.items() if step < since}
        for directory in sorted(self._directories) if self._world.rank == 0 else ():
            try:
                marked = mark_diverged(directory, since, self._world.session)
            except OSError as error:
                logger.error(
                    "what was saved below %s since step %d, when training had diverged, could not "
                    "be marked (%s): delete it by hand, else a new start takes it", directory,
                    since, error,
                )  # fmt: skip
                continue
            if marked:
                logger.warning(
                    "saved when training had diverged, since step %d, and not to be gone on from: "
                    "%s", since, ", ".join(marked),
                )  # fmt: skip
                for tag in marked:
                    self._saving.keeping.marked(directory / tag)

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
