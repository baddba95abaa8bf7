"""Outer state for another layout than it was saved under: another ZeRO stage, other ranks, other C.

A run may go on with another ZeRO stage or number of ranks inside its clusters, or with another
number of clusters. Every vector is put together from the files of all ranks, element by element,
so anchor, outer state, buffers of policies, and what transfers in flight carry and keep have the
same bits as before. The rest follows these rules:

- a transfer in flight that has come is applied by everybody at its due step, as the mean of those
  that sent it; of one that has not, the contributions are averaged by the clusters there are now
  (reshard_transfers.py);
- a residual stays with its cluster, element by element; stored in less than fp32 it is coded anew.
  So does one of means, where the same cluster goes on encoding them. Of those that another rank's
  slice or another cluster's holds from now on it goes, times C, into what this cluster sends next,
  so that the mean gets it all the same: into the residual of what is sent, or where the delay keeps
  what is unsent in the local masters (`shift`), into these. Where there is neither it is lost, and
  a warning says how much;
- a cluster that is new is cluster 0's copy without its residuals; those of a cluster that is gone
  are lost, and a warning says so;
- warm starts belong to whole matrices and go where these are put together;
- a pipeline may be cut into other stages, too, with nothing in flight (pipeline_repartition.py);
- the parity check's memory of the last mean starts empty everywhere: its hash is of the old shards.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from dsx.checkpoint.files import (
    SavedCluster,
    Source,
    error_sources,
    put_together,
    shard_ranges,
    vector_sources,
)
from dsx.checkpoint.pipeline_repartition import Origin, find_origins, merged_history
from dsx.checkpoint.reshard_transfers import ReshardedTransfers
from dsx.checkpoint.rounds import restore_rounds
from dsx.checkpoint.transfers import Restored
from dsx.checkpoint.warm_starts import read_slot, saved_with
from dsx.comm.topology import RankInfo
from dsx.compress.owners import CODES
from dsx.core.types import Fragment, History, Slot
from dsx.outer.loop import OuterLoop
from dsx.outer.transfer import NothingYet, Totals, Transfer

logger = logging.getLogger(__name__)


class Resharding:
    """Brings a cluster's saved state into the layout of a running loop, one rank's share of it."""

    def __init__(
        self,
        loop: OuterLoop,
        saved: SavedCluster,
        rank_info: RankInfo,
        is_repartitioned: bool = False,
    ) -> None:
        self._loop = loop
        self._is_repartitioned = is_repartitioned
        self._ranks = saved.ranks()
        self._reference = saved.reference(rank_info.rank)
        self._saved = saved
        self._rank_info = rank_info
        self._is_new = rank_info.cluster_id not in saved.members
        self._is_first = loop.adapter.ranks.shard[0] == 0
        fragments = loop.adapter.fragments
        self._origins = [[Origin(self._ranks, fragment.id)] for fragment in fragments]
        self._num_clusters = loop.transport.seat.num_clusters
        self._keeps_unsent = loop.method.delay.keeps_unsent
        self._unsent: dict[int, Tensor] = {}  # by fragment, what local masters are to send next
        if is_repartitioned:
            self._is_first = self._is_first and loop.adapter.stage.index == 0
            self._origins = find_origins(saved, loop.adapter.fragment_parameters)

    def restore(self) -> Restored:
        """Fill the loop's buffers; what is tracked is this rank's, or the first one's.

        Masters that the engine has loaded get what they keep for the next launch.
        """
        self._tell()
        for fragment in self._loop.adapter.fragments:
            self._restore_slots(fragment)
            self._restore_codec(fragment)
        if self._keeps_unsent and not self._saved.has_average:
            self._leave_unsent()
        left_at = self._reference.meta["left_at"]
        if self._is_repartitioned:
            fragments, delay = self._loop.adapter.fragments, self._loop.method.delay
            nothing = [NothingYet(f.id) for f in fragments for _ in range(delay.rounds_under_way)]
            history = merged_history(self._loop, self._origins)
            in_flight: list[Transfer | NothingYet] = [*nothing]
        else:
            history = History.from_state_dict(self._reference.meta["history"])
            transfers = ReshardedTransfers(
                self._loop, self._ranks, self._fill, self._is_first, self._counts
            )
            entries = enumerate(self._reference.meta["in_flight"])
            in_flight = [transfers.rebuild(index, entry) for index, entry in entries]
        restore_rounds(self._loop, history, in_flight)
        tracked = self._reference.meta["tracked"]
        return Restored(history, in_flight, [], left_at, self._totals(), tracked)

    def masters(self, fragment: Fragment) -> Tensor:
        """Put together the cluster's own masters of a fragment, where they have been saved."""
        out = torch.empty(fragment.numel)
        self._fill(fragment.layout, out, "local", self._sources(fragment.id, "local"))
        unsent = self._unsent.get(fragment.id)
        return out if unsent is None else out.sub_(unsent)

    def _tell(self) -> None:
        saved, rank_info = self._saved, self._rank_info
        if rank_info.rank:
            return
        logger.info(
            "%s: outer state of %d rank(s) in %d cluster(s) is put together for %d in %d",
            saved.directory, saved.num_ranks, saved.num_clusters, rank_info.world_size,
            rank_info.num_clusters,
        )  # fmt: skip
        if self._loop.method.compression.is_exact:
            return
        dropped = [m for m in saved.members if m not in self._loop.transport.seat.ids]
        if rank_info.cluster_id == 0 and dropped:
            logger.warning(
                "the residuals of cluster(s) %s are dropped: what coding has lost of their "
                "progress will not be sent", ", ".join(map(str, dropped)),
            )  # fmt: skip
        if self._is_new and any(meta for meta in self._reference.meta["codec_errors"]):
            logger.warning("cluster %d is new: its residuals start from zero", rank_info.cluster_id)

    def _restore_slots(self, fragment: Fragment) -> None:
        """Put anchor, outer state and the policies' buffers together."""
        is_elementwise = self._loop.method.staleness.is_elementwise
        for name, tensor in self._loop.state.named_state(fragment.id).items():
            if name.startswith(("codec.", "parity_check.")) or not tensor.numel():
                continue
            sizes = name in ("staleness.first_step", "staleness.last_update")
            if sizes and not is_elementwise:  # of whole tensors: equal on all ranks
                self._restore_sizes(fragment.id, name, tensor)
            else:
                self._fill(fragment.layout, tensor, name, self._sources(fragment.id, name))
        self._loop.state.channels[fragment.id].parity_check.memory.zero_()

    def _restore_sizes(self, fragment: int, name: str, out: Tensor) -> None:
        """Put together what is kept per parameter."""
        found: dict[str, Tensor] = {}
        for origin in self._origins[fragment]:
            full_name = f"{name}/{origin.fragment}"
            values = next(rank.read(full_name) for rank in origin.ranks if full_name in rank)
            found.update(zip(origin.names, values, strict=True))
        for index, parameter in enumerate(self._loop.adapter.fragment_parameters[fragment]):
            out[index] = found[parameter.name]

    def _restore_codec(self, fragment: Fragment) -> None:
        """Put residuals together; bring warm starts, and the rank they are of, where they go."""
        channel = self._loop.state.channels[fragment.id].codec
        self._restore_errors(fragment)
        for name, tensor in channel.slots.items():
            if name in channel.errors or not tensor.numel():
                continue
            kept = saved_with(f"codec.{name}")
            holders = [
                (rank, f"codec.{name}/{origin.fragment}")
                for origin in self._origins[fragment.id]
                for rank in origin.ranks
                if f"{kept}/{origin.fragment}" in rank
            ]
            if name == "rank":
                ranks = [rank.read(full_name) for rank, full_name in holders]
                tensor.copy_(torch.stack(ranks).amax(0))
                continue
            tensor.zero_()
            if not holders:
                if kept == f"codec.{name}":
                    logger.warning(
                        "no rank has saved the factors of %s: they start anew",
                        name.removeprefix(CODES),
                    )
                continue
            rank, full_name = holders[0]
            warm = read_slot(rank, full_name, tensor)
            rows = min(len(warm), len(tensor))
            tensor[:rows].copy_(warm[:rows])
            if len(warm) > rows:
                logger.warning("%s keeps %d of %d saved directions", name, rows, len(warm))

    def _restore_errors(self, fragment: Fragment) -> None:
        """Put this cluster's residuals together; see the module for those of means."""
        errors = self._loop.state.channels[fragment.id].codec.errors.values()
        for error in errors:
            error.residual.stored.zero_()
        if self._is_new:
            return
        wire, num_clusters = self._loop.matrix_gathers[fragment.id].wire, self._num_clusters
        means = torch.zeros(wire.numel)
        put_together(shard_ranges(wire.layout), means, self._error_sources(fragment.id, True))
        for error in errors:
            if error.is_of_mean:
                kept = means[error.start : error.stop]
                error.residual.write(kept)
                kept.zero_()
        of_sent = self._error_sources(fragment.id, False)
        missing, moved = 0, int(means.count_nonzero())
        for error in errors:
            if not error.is_of_mean:
                wanted = shard_ranges(wire.layout, error.start, error.stop)
                values = torch.zeros(error.residual.numel)
                missing += put_together(wanted, values, of_sent)
                kept = means[error.start : error.stop]
                error.residual.write(values.add_(kept, alpha=num_clusters))
                kept.zero_()
        if moved and self._keeps_unsent:  # means lie as masters do: nothing is factored there
            self._unsent[fragment.id] = means.mul(num_clusters)
            means.zero_()
        self._tell_of_errors(fragment, missing, moved, means)

    def _error_sources(self, fragment: int, is_of_mean: bool) -> list[Source]:
        return [
            source
            for origin in self._origins[fragment]
            for source in error_sources(origin.ranks, origin.fragment, is_of_mean)
        ]

    @torch.no_grad()
    def _leave_unsent(self) -> None:
        """Let the engine's masters keep what is sent next, `anchor - local`. Collective."""
        adapter = self._loop.adapter
        for fragment, unsent in self._unsent.items():
            local = torch.empty(unsent.numel(), device=adapter.device)
            adapter.read(fragment, local)
            adapter.write(fragment, local.sub_(unsent.to(adapter.device)))
        adapter.sync_model_weights()

    def _tell_of_errors(self, fragment: Fragment, missing: int, moved: int, lost: Tensor) -> None:
        errors = self._loop.state.channels[fragment.id].codec.errors.values()
        name = self._loop.adapter.stage.name_of(fragment.id)
        has_saved = any(
            not entry["is_of_mean"]
            for origin in self._origins[fragment.id]
            for rank in origin.ranks
            for entry in rank.meta["codec_errors"][origin.fragment].values()
        )
        is_used = any(not error.is_of_mean for error in errors)
        if has_saved and not is_used and self._rank_info.rank == 0:
            logger.warning("%s: the saved residuals are not used", name)
        if missing:
            logger.warning(
                "%s: %d elements have no residual in %s; theirs start from zero",
                name, missing, self._saved.directory,
            )  # fmt: skip
        num_lost = int(lost.count_nonzero())
        if moved > num_lost:
            logger.warning(
                "%s: the residuals of %d elements of means, which are encoded elsewhere "
                "from now on, go into what this cluster sends next",
                name, moved - num_lost,
            )  # fmt: skip
        if num_lost:
            logger.warning(
                "%s: %d elements of means are encoded elsewhere from now on, and their residuals, "
                "of norm %.3g, are lost: this method keeps nothing of what a cluster sends; to "
                "keep them, resume with compression.error_feedback='fp32'",
                name, num_lost, float(torch.linalg.vector_norm(lost)),
            )  # fmt: skip
        if any(error.residual.storage == "int8" for error in errors) and self._rank_info.rank == 0:
            logger.warning(
                "%s: residuals stored in int8 have been coded anew in other groups",
                name,
            )

    def _sources(self, fragment: int, name: str) -> list[Source]:
        """Return a buffer of a fragment, as all who held any of it have saved it."""
        return [
            source
            for origin in self._origins[fragment]
            for source in vector_sources(
                origin.ranks, "layout", origin.fragment, f"{name}/{origin.fragment}"
            )
        ]

    def _fill(
        self, layout: Sequence[Slot], out: Tensor, name: str, sources: Sequence[Source]
    ) -> None:
        """Put a vector together; ValueError if part of it has not been saved."""
        if not out.numel():
            return
        missing = put_together(shard_ranges(layout), out, sources)
        if missing:
            raise ValueError(
                f"{self._saved.directory} lacks {missing} of {out.numel()} elements of {name} that "
                f"rank {self._rank_info.rank} needs: the files are not of one cluster"
            )

    @property
    def _counts(self) -> bool:
        """Whether this rank takes over the sums of all: one does, and none of a new cluster."""
        return self._is_first and not self._is_new

    def _totals(self) -> Totals:
        saved = [Totals(**rank.meta["totals"]) for rank in self._ranks]
        if self._is_new:
            return Totals()
        return Totals(
            bytes_sent=sum(t.bytes_sent for t in saved) if self._counts else 0,
            wait_seconds=max(t.wait_seconds for t in saved),
            blocked_seconds=max(t.blocked_seconds for t in saved),
            syncs=saved[0].syncs,
            refused=saved[0].refused,
        )
