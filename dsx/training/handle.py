"""What a training script holds: the outer loop of one rank, with its records and its end.

`engine.dsx` is one of these. It is called at every inner step boundary, counts, writes metrics, and
has the verbs a script needs: `log_step`, `track`, `finish`, `averaged`, `saving`, `gather`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from dsx.comm.world import World
from dsx.config.schema import DsxConfig
from dsx.core.engine import EngineAdapter
from dsx.method.method import Method
from dsx.outer.loop import Event, OuterLoop
from dsx.outer.memory import OuterMemory
from dsx.outer.recovery import NonFiniteError
from dsx.outer.start import SETTLING
from dsx.outer.transfer import Totals
from dsx.outer.whole_matrices import fragments_sent, plan_matrix_gathers
from dsx.telemetry.sync_records import SyncRecords
from dsx.training import finish
from dsx.training.agreement import layout_of, require_alike, require_number_of_clusters
from dsx.training.coding import resources_of
from dsx.training.divergence import Divergence, refuse_stages
from dsx.training.early_stop import StopAgreement
from dsx.training.gathering import Gathering
from dsx.training.joining import Joining
from dsx.training.memory import memory_of
from dsx.training.notices import Notices
from dsx.training.positions import Resumable
from dsx.training.preemption import Callback, Preemption
from dsx.training.records import Records
from dsx.training.rollback import Rollback
from dsx.training.same_batches import SameBatches
from dsx.training.saving import Saving
from dsx.training.standing import tell_standing
from dsx.training.start import tell_of_start

logger = logging.getLogger(__name__)


class Handle:
    """One rank's outer training: created by `dsx.initialize` and `dsx.attach`."""

    def __init__(
        self,
        adapter: EngineAdapter,
        world: World,
        config: DsxConfig,
        facts: Mapping[str, Any] | None = None,
        keeps_masters: bool = False,
        settings: Mapping[str, Any] | None = None,
        waits: bool = False,
    ) -> None:
        """Compare and connect. All clusters must have equal `facts`, and `settings` but for what
        `clusters.may_differ` names. With `waits` weights that differ stay so until `settle`.
        """
        require_number_of_clusters(config.clusters.num_clusters, world.num_clusters)
        usable = resources_of(config, adapter)  # refuses while nobody waits for this cluster
        self._world, self._config = world, config
        self._own: list[Tensor] | None = None  # masters, while the engine holds the average
        self.is_finished = False  # whether `finish()` has been called since the last step
        self._records = Records(config, world, adapter)
        self.progress = self._records.progress
        self._syncs = SyncRecords(
            world.new_handle_store(), adapter.stage, adapter.ranks.shard, adapter.fragment_numel,
            self._records.sync, world.deadline_seconds, is_enabled=config.metrics.keeps_syncs,
        )  # fmt: skip
        if world.rank == 0 and world.cluster_id == 0:
            config.method.validate(num_clusters=world.num_clusters)  # the one that warns
        # before connecting, because shards of different sizes would not meet
        alike = {"dsx": config.common(), **(facts or {}), **layout_of(adapter)}
        require_alike(world.rendezvous, alike, settings or {}, config.clusters.may_differ)
        matrix_gathers = plan_matrix_gathers(config.method, adapter)
        used = fragments_sent(adapter.fragments, [gather.wire for gather in matrix_gathers])
        transport = world.connect(used, adapter.stage, config.link.streams)
        given = matrix_gathers, self._records.trace, usable(len(used))
        self.loop = OuterLoop(config.method, adapter, transport, self._on_sync, *given)
        self._gathering = Gathering(transport, world.in_cluster())
        self.notices, self._same_batches = Notices.of(world, self.loop), SameBatches(self.loop)
        self._divergence = Divergence(config.divergence, self.notices)
        self._stop = StopAgreement(self.notices, speaks=world.rank == 0)
        self._saving = Saving(self.loop, world, config, self._records, self._syncs, self.notices)
        self.not_saved, self.beside, self.remote, self.keeping = self._saving.for_engines
        self._saving.complete = self.saved
        self.joining = Joining(world, self.loop, config.link, self._saving, self._gathering)
        refuse_stages(config.divergence, adapter.stage.count)
        watch, records = self._divergence, self._records
        self.rollback = Rollback(watch, self._saving, self.loop, world, records, self._gathering)
        # the own are kept where a checkpoint's are loaded, and its state follows
        self.loop.start(keeps_masters or self.joining.is_due, waits)
        self.loop.beginning.is_open = self.loop.beginning.is_open or self.joining.is_due
        self._records.follow(self.loop, self._syncs, self.memory, world)
        tell_of_start(self.loop, world, self.memory, config)
        self._records.begin(self.step, self.totals)
        self.preemption = Preemption(world, config.clusters, self.loop, records, self.notices)
        self.joining.follow(self.preemption.orders, self.preemption.changing.loaded)
        tell_standing(self, world, self._saving, config.link.settings, records.measured)

    @property
    def cluster_id(self) -> int:
        """This cluster, 0..num_clusters-1."""
        return self._world.cluster_id

    @property
    def num_clusters(self) -> int:
        """C."""
        return self._world.num_clusters

    @property
    def members(self) -> tuple[int, ...]:
        """The ids of the clusters that train: all, but for those that have been lost."""
        return self.loop.transport.seat.ids

    @property
    def method(self) -> Method:
        """What runs."""
        return self.loop.method

    @property
    def step(self) -> int:
        """Inner steps taken, skipped ones included; goes on after a resume."""
        return self.loop.history.step

    @property
    def run_dir(self) -> Path | None:
        """The run's folder, the same in all clusters: `metrics.dir`, or the next free name.

        Known once a checkpoint has been loaded, if one is; None without `metrics.dir`.
        """
        return self._records.folder

    @property
    def totals(self) -> Totals:
        """This rank's running sums: bytes sent, seconds waited and blocked, syncs."""
        return self.loop.totals

    @property
    def memory(self) -> OuterMemory:
        """What outer training takes on this rank, by purpose; see outer/memory.py."""
        return memory_of(self.loop)

    def settle(self) -> None:
        """Take cluster 0's weights now, if they differ and have not been sent yet.

        One that joins a run comes to where the others are. With DeepSpeed the first forward does
        so. Collective over all ranks of all clusters.
        """
        with self._saving.naming_last():
            if self.loop.beginning.is_open:
                self._gathering.meet(SETTLING)
            self.joining.heal_if_due(self._records)
            self.loop.beginning.settle()

    def after_inner_step(self, is_skipped: bool = False) -> bool:
        """Pass one step boundary; the engines call it. Returns whether masters were written."""
        finish.require_own(self._own, "an inner step")
        self.preemption.begin_boundary()
        with self._saving.naming_last():
            try:
                was_written = self.loop.after_inner_step(is_skipped)
            except NonFiniteError as error:
                if not self.rollback.survives(error):
                    raise
                was_written = True
            self.notices.pass_boundary(self.step)
            self.rollback.pass_boundary()
        self.is_finished = False
        self._saving.pass_boundary()
        self._syncs.pass_boundary()
        membership = self.loop.transport.seat.membership
        self._records.pass_boundary(self.step, self.totals, self._syncs.bytes_sent, membership)
        self.preemption.pass_boundary()
        return was_written

    def skip_inner_step(self) -> None:
        """Count a step that a `GradScaler` skipped; plain PyTorch only, DeepSpeed's are seen."""
        self.after_inner_step(is_skipped=True)
        self.loop.adapter.end_inner_step()

    def log_step(self, **fields: Any) -> None:
        """Complete the record of the step just taken, e.g. `log_step(loss=2.1, tokens=8192)`."""
        self._records.complete_step(fields)
        if "loss" in fields:
            self._divergence.look_at(fields["loss"], self.step)

    def log(self, kind: str, **fields: Any) -> None:
        """Write a record of any other kind, e.g. `log("validation", loss=2.2)`."""
        self._records.log(kind, {"step": self.step, **fields})

    def track(self, **objects: Resumable) -> None:
        """Let the position of these objects travel with every checkpoint, under their names."""
        self._saving.track(objects)

    @property
    def only_before(self) -> int | None:
        """While going back, the step before which a checkpoint has to be."""
        return self._saving.before

    def on_rollback(self, callback: Callable[[Path], Any]) -> None:
        """Let `callback(directory)` follow where training goes back (`divergence.max_rollbacks`).

        On every rank. A script that saves by itself loads all there, and calls `load(directory)`.
        """
        self.rollback.callback = callback

    def on_preemption(self, callback: Callback) -> None:
        """Let `callback(directory)` save what is the script's own where the run is told to end.

        On every rank, into the checkpoint's directory; with DeepSpeed it may return a client_state.
        """
        self.preemption.callback = callback

    def preempt(self) -> None:
        """Save and end as on a signal; from any thread of any rank."""
        self.preemption.ask()

    def request_stop(self, reason: str) -> None:
        """Ask all clusters to stop early, at one step; from any rank, a signal handler, too."""
        self._stop.request(reason)

    def should_stop(self) -> bool:
        """Whether to leave the training loop: at the same step on every rank of every cluster.

        To be asked once per step, on every rank, where stops may be requested. How long after a
        request that is at most: training/notices.py.
        """
        self.preemption.end_if_due()
        with self._saving.naming_last():
            return self._stop.is_due(self.step)

    def finish(self) -> None:
        """Drain what is in flight, at the end of training. Every cluster calls it.

        Training may go on: progress that has not been launched stays in this cluster's weights and
        goes with the next launch, and rounds that stay under way start anew. Returns once all
        clusters have finished; ValueError if they took different numbers of steps.
        """
        self.preemption.end_if_due()
        finish.require_own(self._own, "finish()")
        self.settle()
        with self._saving.naming_last():
            told = self.preemption.meet_at_end(self._gathering, [self.step, *self._saving.at_end])
            self.loop.drain()
            self._syncs.flush()
            steps = [step for step, *_ in told]
            if len(set(steps)) == 1:
                finish.end_comparison(self.loop, finish.begin_comparison(self.loop))
            # whatever this stage had under way: all stages take part
            self.loop.adapter.sync_model_weights()
        self._records.confirm()
        skipped = self.totals.skipped_steps
        self.log("finish", bytes_sent=self._syncs.bytes_sent, skipped_steps=skipped)
        finish.require_same_steps(self.members, steps)
        self.is_finished = True
        self._world.finish()
        # all clusters hold the average while any saves again: some may have nothing to save
        with self.averaged() if any(again for _, again, _ in told) else nullcontext():
            self._saving.save_again(self.gather, any(of_library for *_, of_library in told))
        self._records.end(self.step, "finished")
        self.preemption.is_finished = True

    @contextmanager
    def averaged(self) -> Generator[None, None, None]:
        """Hold the finished model in the engine: the anchor or the clusters' mean, by method.

        Collective over all ranks of all clusters; the cluster's own weights return on exit. What is
        saved inside holds the finished model, and a cluster that loads it has its own back.
        """
        if self._own is not None:
            yield
            return
        self.settle()
        with ExitStack() as stack:
            with self._saving.naming_last():
                self._own = stack.enter_context(finish.exported(self.loop))
            stack.callback(setattr, self, "_own", None)
            yield

    def saving(self) -> AbstractContextManager[None]:
        """Hold what a checkpoint is to hold: after `finish()` the finished model, as `averaged`.

        Before that it changes nothing. DeepSpeed's `save_checkpoint` does this by itself.
        """
        self.settle()
        return self.averaged() if self.is_finished else nullcontext()

    def gather(self, value: Any) -> list[Any]:
        """Return one small JSON value of each of `members`, in order, on every rank."""
        with self._saving.naming_last():
            return self._gathering.gather("gather()", value)

    def save(self, directory: Path, save_again: Callable[[], Any] | None = None) -> bool:
        """Write this rank's outer state into a checkpoint's directory; return whether all ranks of
        the cluster have. Where one cannot, a line says so, and training goes on. All call it.
        After `finish()` inside `saving()` only, as the weights beside it are, too. `save_again`
        writes the whole checkpoint, for `finish()` to do so where it is called at this step.
        """
        return self._saving.attempt(directory, lambda: self.write(directory, save_again))

    def write(self, directory: Path, save_again: Callable[[], Any] | None = None) -> None:
        """Save as a part of what an engine saves, which agrees on it; OSError of this rank."""
        self.settle()
        self._saving.save(directory, self.is_finished, self._own, save_again)

    def load(
        self,
        directory: Path,
        is_new: bool = False,
        is_other_number: bool = False,
        is_repartitioned: bool = False,
    ) -> None:
        """Restore this rank's outer state; ValueError if a tracked object has no position there.

        `is_new`: the directory is cluster 0's, as this cluster did not take part.
        `is_repartitioned`: the parameters lie on other pipeline stages than they did.
        """
        self.is_finished = self._saving.load(directory, is_new, is_other_number, is_repartitioned)
        self.preemption.loaded(directory)

    def saved(self, directory: Path, step: int | None = None) -> None:
        """Enter a complete checkpoint, of this step or an earlier one; messages name the last."""
        if self._saving.saved(directory, step):
            self.rollback.saved(directory)
            self.preemption.follow(directory)

    def close(self) -> None:
        """Write the last records, release connections, and let go of the engine."""
        if self.preemption.is_over:
            return  # the process ends
        self.preemption.close()
        self.loop.adapter.detach()
        self._saving.close()
        self._records.end(self.step, "closed without finish()")
        self._records.close()
        self._syncs.close()
        self.loop.transport.close()

    def _on_sync(self, event: Event) -> None:
        self._syncs.add(event)
        self._records.progress.note_sync(event)
        self._same_batches.see(event)
