"""What a handle saves and loads, and the name of the last checkpoint, for whatever ends a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from dsx.checkpoint.checksums import MANIFEST, UNFINISHED, read_manifest
from dsx.checkpoint.outer_state import load_state, take_snapshot
from dsx.checkpoint.remote import Remote, open_remote
from dsx.comm.world import World
from dsx.config.schema import DsxConfig
from dsx.core.transport import PeerLost
from dsx.outer.loop import OuterLoop
from dsx.outer.recovery import NonFiniteError, ParityError
from dsx.telemetry.sync_records import SyncRecords
from dsx.training.beside import Beside, named
from dsx.training.copying import Copying
from dsx.training.dealing import deal_tracked, restore_data
from dsx.training.keeping import Keeping
from dsx.training.notices import Notices
from dsx.training.positions import Resumable
from dsx.training.records import Records

logger = logging.getLogger(__name__)
_DEALS = "dsx.deals"  # what all clusters know of who reads what
_COUNTERS = "dsx.counters"  # travels beside what a script tracks


class Saving:
    """One rank's outer state, to and from the directories of checkpoints."""

    def __init__(
        self,
        loop: OuterLoop,
        world: World,
        config: DsxConfig,
        records: Records,
        syncs: SyncRecords,
        notices: Notices,
    ) -> None:
        keep, is_first = config.checkpoints.keep, world.rank == 0
        self.remote = open_remote(config.checkpoints)
        copying = None
        if self.remote is not None and is_first:
            copying = Copying(
                notices, lambda: loop.transport.seat.ids, self.remote, config.checkpoints, records,
                lambda: loop.stop_place is not None and loop.stop_place.reason is not None,
            )  # fmt: skip
        self.keeping = Keeping(
            notices, lambda: loop.transport.seat.ids, is_first, keep, records.deleted, copying
        )
        self.tracked: dict[str, Resumable] = {}
        self.takes_others = False  # whether this cluster is about to take what others hold
        self.own: Path | None = None  # then: a checkpoint of its own, which may hold some of it
        self._loop, self._world = loop, world
        wanted = config.checkpoints.beside_training
        self.beside = Beside(world, wanted, self._completed, self.not_saved)
        self.complete: Callable[[Path, int], object] = self.saved  # told of those written beside
        loop.state.before_write = self.beside.release
        self._axes, self._num_shards = config.axes, config.clusters.data_shards
        self._records = records
        self._syncs = syncs
        self.last: Path | None = None
        self.last_complete: dict[str, Any] | None = None  # that this run has saved
        self._before_last: tuple[Path | None, dict[str, Any] | None] = None, None
        self._keeps_data = False
        self.before: int | None = None
        self._of_step: dict[str, Callable[[], Any] | None] = {}  # how to save it again
        self._failed: set[Path] = set()  # what a script has tried to save to

    def track(self, objects: Mapping[str, Resumable]) -> None:
        """Save and load these, too; what can be is dealt between the clusters that are there."""
        self.tracked.update(objects)
        deal_tracked(self._loop, self._world, self._num_shards, objects)

    @property
    def at_end(self) -> tuple[bool, bool]:
        """What clusters tell each other at the end: whether this one saves once more what it has
        saved at this step, and whether a library has saved here, whose deletions wait.
        """
        return any(self._of_step.values()), self.keeping.is_of_library

    def pass_boundary(self) -> None:
        """Forget what was saved at the step before."""
        self._of_step = {}
        self.beside.pass_boundary()
        self.keeping.pass_boundary()

    def save(
        self,
        directory: Path,
        is_finished: bool,
        own_masters: Sequence[Tensor] | None,
        save_again: Callable[[], Any] | None,
    ) -> None:
        """Write this rank's outer state; `own_masters` while the engine holds the average."""
        if is_finished and own_masters is None:
            raise RuntimeError(
                f"{directory}: after finish() a checkpoint holds the finished model; save the "
                "weights and the outer state inside `with handle.saving():`"
            )
        if not is_finished:
            self._of_step[str(directory).removesuffix(UNFINISHED)] = save_again
        loop = self._loop
        self._records.saving()
        self._syncs.flush()
        if any(refusals.in_a_row for refusals in loop.history.refusals):
            logger.warning(
                "the checkpoint of step %d is of a time when rounds are refused: a cluster's "
                "weights or moments may not be finite in it", loop.history.step,
            )  # fmt: skip
        states = {name: thing.state_dict() for name, thing in self.tracked.items()}
        states[_COUNTERS] = {
            "bytes_sent": self._syncs.bytes_sent,
            "skipped_steps": loop.totals.skipped_steps,
            "is_finished": is_finished,
        }
        if deals := loop.notices.places.saved_state():
            states[_DEALS] = deals
        rank_info, session = self._world.rank_info, self._world.session
        is_told = loop.stop_place is not None and loop.stop_place.reason is not None
        with self.naming_last():
            snapshot = take_snapshot(
                loop, directory, rank_info, session, self._axes, states, own_masters,
                keeps_last=is_told,
            )  # fmt: skip
        self.beside.write(snapshot)

    def attempt(self, directory: Path, save: Callable[[], None]) -> bool:
        """Let every rank of the cluster save to a script's directory; return whether all have.

        Where one cannot, all are told, and the run goes on. Collective in the cluster.
        """
        trouble = None
        try:
            self.beside.wait()
            self.beside.drop()
            save()
        except OSError as error:
            trouble = str(error)
        everyone = self._world.in_cluster().gather(f"the outer state in {directory}", trouble)
        wrong = named(everyone)
        self._failed.discard(directory)
        if wrong:
            self._failed.add(directory)
            self.not_saved(
                directory,
                f"the outer state is not saved to {directory}: {wrong}; training "
                "goes on: free some space, or save elsewhere",
            )
        return not wrong

    def load(
        self, directory: Path, is_new: bool, is_other_number: bool, is_repartitioned: bool
    ) -> bool:
        """Restore this rank's outer state; return whether it is of a finished run."""
        if self.takes_others:
            logger.warning("%s: the outer state is that of the run that goes on", directory)
            self.own = directory
            return False
        loop, rank_info = self._loop, self._world.rank_info
        loop.before_change()
        manifest = directory / MANIFEST
        is_preempted = manifest.is_file() and read_manifest(manifest).get("is_preempted", False)
        states = dict(
            load_state(loop, directory, rank_info, self._axes, is_repartitioned, is_preempted)
        )
        counters = states.pop(_COUNTERS)
        self._syncs.bytes_sent = 0 if is_new else counters["bytes_sent"]
        loop.totals.skipped_steps = 0 if is_new else counters.get("skipped_steps", 0)
        deals = states.pop(_DEALS, {})
        if not self._keeps_data:
            restore_data(loop, self.tracked, directory, states, deals, is_new, is_other_number)
        self._of_step = {}
        self.last = directory
        self.keeping.loaded(directory, loop.history.step)
        self._records.begin(loop.history.step, loop.totals, directory)
        with self.naming_last():
            loop.settle()  # whoever lacks a mean that is held here gets it at once
        return counters.get("is_finished", False)

    def saved(self, directory: Path, step: int | None = None) -> bool:
        """Enter a complete checkpoint, of this step or an earlier one, which messages then name;
        return whether it is one.
        """
        if directory in self._failed:
            return False  # all have been told
        if directory != self.last:
            self._before_last = self.last, self.last_complete
        self.last = directory
        step = self._loop.history.step if step is None else step
        self.last_complete = {"step": step, "path": str(directory)}
        self._records.saved(directory, step)
        self.keeping.saved(directory, step)
        return True

    def not_saved(
        self, directory: Path, why: str, step: int | None = None, was_entered: bool = False
    ) -> None:
        """Take back a checkpoint that could not be completed, and tell of it.

        `was_entered`: what dsx writes of it was complete, and is deleted since.
        """
        self._of_step.pop(str(directory), None)
        if was_entered:
            self.keeping.take_back(directory)
            if self.last == directory:
                self.last, self.last_complete = self._before_last
        step = self._loop.history.step if step is None else step
        self.keeping.failed(directory, step)
        self._records.not_saved(directory, step, why)

    def _completed(self, directory: Path, step: int) -> None:
        self.complete(directory, step)

    def close(self) -> None:
        """Return once what was begun is written and deleted, or its time is over."""
        self.beside.close()
        self.keeping.close()

    @property
    def for_engines(self) -> tuple[Any, Beside, Remote | None, Keeping]:
        """What engines save and load with, beside the outer state itself."""
        return self.not_saved, self.beside, self.remote, self.keeping

    @property
    def base(self) -> Path | None:
        """Where this run has saved or loaded tags, each cluster in its own directory."""
        last = self.last
        return last.parents[1] if last and last.parent.name.startswith("cluster_") else None

    @contextmanager
    def going_back(self, keeps_data: bool, before: int) -> Generator[None, None, None]:
        """Load inside what was saved before a step; without the positions of the data, if so."""
        self._keeps_data, self.before = keeps_data, before
        try:
            yield
        finally:
            self._keeps_data, self.before = False, None

    def save_again(self, gather: Callable[[Any], list[Any]], is_of_library: bool) -> None:
        """Save what was saved at this step before the run was finished once more.

        Then a library's deletions, if any cluster has one, need not wait any more. Collective over
        all clusters.
        """
        self.beside.close()
        for name, save in self._of_step.items():
            if save is not None:
                save()
            elif self._world.rank == 0:
                logger.warning(
                    "%s was saved at this step before finish(): it holds the cluster's own "
                    "weights; for the finished model save again, inside `with "
                    "handle.saving():`", name,
                )  # fmt: skip
        self._of_step = {}
        if is_of_library:
            self.keeping.end_of_library(gather)

    @contextmanager
    def naming_last(self) -> Generator[None, None, None]:
        """Add to the message of what ends a run what it can be resumed from."""
        try:
            yield
        except (PeerLost, ParityError, NonFiniteError) as error:
            is_usable = self.last is not None and not isinstance(error, NonFiniteError)
            advice = f"resume from {self.last}" if is_usable else self.last or "none saved"
            told = type(error)(f"{error}; last checkpoint: {advice}")
            how = f"{type(error).__name__}: {told}"
            self._records.end(self._loop.history.step, how, isinstance(error, PeerLost))
            raise told from None
