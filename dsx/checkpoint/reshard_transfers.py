"""Transfers in flight for another layout than they were saved under, put together from all ranks.

One whose mean had come keeps the mean. Of one that had not, what the cluster sends is put together,
and all make the attempt anew, as the mean over the clusters there are now: who left has no part in
it, and who is new sends what cluster 0 does. Codes that were made at the launch do not fit other
shards: what is decoded of them is coded once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsx.checkpoint.files import SavedRank, Source, vector_sources
from dsx.checkpoint.transfers import restored_transfer
from dsx.core.types import Fragment, Slot
from dsx.outer.arenas import TransferBuffers
from dsx.outer.loop import OuterLoop
from dsx.outer.parity_check import ParityResult
from dsx.outer.sideband import Sideband
from dsx.outer.transfer import NothingYet, Transfer

Fill = Callable[[Sequence[Slot], Tensor, str, Sequence[Source]], None]


class ReshardedTransfers:
    """Rebuilds what was in flight, one rank's share of it.

    `ranks` are those of the stage that saved, `fill` puts a vector together. `is_first`: this rank
    is its stage's first; `counts`: it takes over the sums of all.
    """

    def __init__(
        self,
        loop: OuterLoop,
        ranks: Sequence[SavedRank],
        fill: Fill,
        is_first: bool,
        counts: bool,
    ) -> None:
        self._loop = loop
        self._ranks = ranks
        self._fill = fill
        self._is_first = is_first
        self._counts = counts

    def rebuild(self, index: int, entry: Mapping[str, Any]) -> Transfer | NothingYet:
        """Rebuild one transfer from what all ranks have saved of it; `entry` is one of them.

        ValueError if its mean had come to a part of the ranks only.
        """
        fragment = self._loop.adapter.fragments[entry["fragment"]]
        if entry["is_empty"]:
            return NothingYet(fragment.id)
        entries = [rank.meta["in_flight"][index] for rank in self._ranks]
        pairs = zip(self._ranks, entries, strict=True)
        arrived = {e["has_arrived"] for rank, e in pairs if self._has_sent(rank, fragment)}
        if len(arrived) > 1:
            name = self._loop.adapter.stage.name_of(fragment.id)
            raise ValueError(
                f"{self._ranks[0].path.parent}: of {name}, launched at step {entry['launched']}, "
                "some ranks hold the mean and others do not: resume with the ranks and the number "
                "of clusters that saved it, save again, and then change them"
            )
        has_arrived = arrived != {False}
        state = self._loop.state
        buffers = state.take_buffers(fragment.id, entry["round"], sends=not has_arrived)
        if buffers.kept is not None:
            self._vector(fragment, fragment.layout, buffers.kept, "layout", f"kept/{index}")
        told = {
            "has_arrived": has_arrived,
            "is_finite": all(e["is_finite"] for e in entries),
            "is_idle": any(e["is_idle"] for e in entries),
            "anchor": 0,  # hashes are of the old shards
            "told": {id: at for e in entries for id, at in e.get("told", {}).items()},
        }
        norms = [rank.read(f"in_flight.norm/{index}") for rank in self._ranks]
        norm = torch.stack(norms).square().sum().sqrt() if self._is_first else torch.tensor(0.0)
        bytes_sent = sum(e["bytes_sent"] for e in entries) if self._counts else 0
        seconds = max(e["seconds"] for e in entries)
        transfer = restored_transfer(
            self._loop, {**entry, **told}, buffers, norm, bytes_sent, seconds
        )
        if has_arrived:
            self._restore_mean(fragment, buffers, index, entries)
        else:
            self._restore_contribution(fragment, transfer, index, entries)
        return transfer

    def _restore_mean(
        self,
        fragment: Fragment,
        buffers: TransferBuffers,
        index: int,
        entries: Sequence[Mapping[str, Any]],
    ) -> None:
        """Bring a mean and what travelled beside it: sums go to one rank, the largest to all."""
        wire = self._loop.matrix_gathers[fragment.id].wire.layout
        ids = self._loop.transport.seat.ids  # others' names are nobody's any more
        buffers.parity = ParityResult.of_saved(
            [e["parity"] for e in entries if e["parity"] is not None], ids
        )
        self._vector(fragment, wire, buffers.wire, "wire", f"mean/{index}")
        sideband, name = buffers.sideband, f"in_flight.sideband/{index}"
        sideband.values.zero_()
        self._restore_averages(fragment, sideband, f"sideband/{index}")
        for by_cluster in self._by_cluster(name, entries):
            if by_cluster.numel():
                largest = by_cluster.amax(1, keepdim=True)
                torch.maximum(sideband.by_cluster, largest, out=sideband.by_cluster)
        if self._is_first and sideband.of_owner.numel():
            for rank in self._ranks:
                end = rank.numel(name)
                sideband.of_owner.add_(rank.read(name, end - sideband.of_owner.numel(), end))

    def _restore_contribution(
        self,
        fragment: Fragment,
        transfer: Transfer,
        index: int,
        entries: Sequence[Mapping[str, Any]],
    ) -> None:
        """Bring what the cluster sends and, beside it, what it has measured itself."""
        wire = self._loop.matrix_gathers[fragment.id].wire.layout
        buffers, posted = transfer.buffers, transfer.buffers.posted
        posted.values.zero_()
        self._restore_averages(fragment, posted, f"posted/{index}")
        own = self._ranks[0].meta["rank_info"]["cluster_id"]
        seconds = [
            by_cluster[:, own] / by_cluster.shape[1]
            for by_cluster in self._by_cluster(f"in_flight.posted/{index}", entries)
            if by_cluster.numel()
        ]
        if seconds:
            largest = torch.stack(seconds).amax(0).tolist()
            posted.post(self._loop.transport.seat.place, largest)
        if not buffers.is_shared:
            self._vector(fragment, wire, buffers.sent, "wire", f"sent/{index}")
        elif self._loop.state.is_sent(fragment.id):
            assert buffers.kept is not None
            buffers.wire.copy_(buffers.kept)
            self._loop.attempts.encode(transfer.attempt)

    def _restore_averages(self, fragment: Fragment, sideband: Sideband, name: str) -> None:
        if self._loop.method.staleness.is_elementwise:
            self._vector(fragment, fragment.layout, sideband.averages, "layout", name)
        elif sideband.averages.numel():
            count = sideband.averages.numel()
            sideband.averages.copy_(self._sender(fragment).read(f"in_flight.{name}", 0, count))

    def _by_cluster(self, name: str, entries: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Return every rank's values by cluster, of those that have sent any."""
        found: list[Tensor] = []
        for rank, entry in zip(self._ranks, entries, strict=True):
            if name in rank:
                shape = entry["sideband"]
                first = shape["averages"]
                last = first + shape["by_cluster"] * shape["num_clusters"]
                values = rank.read(name, first, last)
                found.append(values.view(shape["by_cluster"], shape["num_clusters"]))
        return found

    def _vector(
        self, fragment: Fragment, layout: Sequence[Slot], out: Tensor, kind: str, name: str
    ) -> None:
        full_name = f"in_flight.{name}"
        sources = vector_sources(self._ranks, kind, fragment.id, full_name)
        self._fill(layout, out, full_name, sources)

    def _sender(self, fragment: Fragment) -> SavedRank:
        """Return a rank that has sent something of a fragment: it has a sideband."""
        for rank in self._ranks:
            if self._has_sent(rank, fragment):
                return rank
        return self._ranks[0]

    def _has_sent(self, rank: SavedRank, fragment: Fragment) -> bool:
        return bool(rank.slots("layout", fragment.id) or rank.slots("wire", fragment.id))
