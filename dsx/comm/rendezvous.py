"""Small values that all clusters agree on at the start, over the store where they have met.

Rank 0 of a cluster reads for it, and passes on what it has read over the cluster's own store: what
the shared store is asked grows with the number of clusters, not with that of ranks.

Every wait has a deadline and says which clusters were missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from dsx.comm.topology import RankInfo
from dsx.core.transport import PeerLost
from dsx.core.waits import waiting_for

_RELAY_SECONDS = 30.0  # for rank 0 to say that a cluster did not answer it in time
_EARLY_SECONDS = 0.1  # a store counts in whole milliseconds
Value = TypeVar("Value")
logger = logging.getLogger(__name__)


class Rendezvous:
    """Small values agreed between clusters after they have met; one per process."""

    def __init__(
        self,
        store: dist.Store,
        rank_info: RankInfo,
        session: str,
        deadline_seconds: float,
        own: dist.Store | None = None,
    ):
        """`own` is a key space of the cluster's; without one it is in `store`."""
        self._store = dist.PrefixStore(f"dsx/{session}", store)
        cluster = f"cluster_{rank_info.cluster_id}"
        self._own = dist.PrefixStore(f"dsx/{session}/{cluster}", store if own is None else own)
        self.session = session
        self.rank_info = rank_info
        self._deadline_seconds = deadline_seconds
        self._exchanges = 0
        self.records: list[tuple[str, list[Any]]] = []  # what all have told, in order

    def skip(self, names: Collection[str]) -> None:
        """Pass over what others have told under these names next; nothing where clusters meet."""

    def group_store(self, name: str) -> dist.Store:
        """Return a key space for one group's own connection setup."""
        return dist.PrefixStore(name, self._store)

    @property
    def cluster_id(self) -> int:
        """This cluster."""
        return self.rank_info.cluster_id

    @property
    def is_speaker(self) -> bool:
        """Whether this rank speaks for its cluster."""
        return self.rank_info.rank == 0

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            with waiting_for(f"the rendezvous store: {name}", self._deadline_seconds):
                return call()
        except RuntimeError as error:
            raise PeerLost(
                f"{name}: the rendezvous store does not answer: {str(error).splitlines()[0]}"
            ) from error

    def gather(self, name: str, value: Any) -> list[Any]:
        """Return one JSON value per cluster, in cluster order, on every rank of every cluster.

        Rank 0 of a cluster speaks for it, and reads for it. Every rank calls it, in the same order.
        Nobody returns before all have read, so that a store's host may exit afterwards.
        """
        self._exchanges += 1
        values = self._among_first(f"gather/{self._exchanges}", name, value)
        self.records.append((name, values))
        return values

    def compare(self, name: str, value: Any) -> list[Any]:
        """Return the values of the ranks with this rank's number, one per cluster, in order.

        Every rank calls it, in the same order. Where all clusters hold the same, as they should,
        no more than a hash is sent for each of them.
        """
        self._exchanges += 1
        prefix, rank = f"compare/{self._exchanges}", self.rank_info.rank
        told, same = json.dumps(value), f"{prefix}/same"
        own = hashlib.sha256(told.encode()).hexdigest()
        hashes = self._relaying(same, lambda: self._hashes(f"{prefix}/hash", name, own))
        if len({*self._among_first(same, name, hashes, 2 * self._deadline_seconds)}) == 1:
            values = [json.loads(told) for _ in range(self.rank_info.num_clusters)]
        else:
            packed = zlib.compress(told.encode()).hex()
            packets = self._read(f"{prefix}/{rank}", name, packed)
            values = [json.loads(zlib.decompress(bytes.fromhex(p.decode()))) for p in packets]
        self.records.append((name, values))
        return values

    def _hashes(self, prefix: str, name: str, own: str) -> str:
        """Return a hash of the hashes of all ranks of this cluster, on rank 0; "" elsewhere."""
        self._call(name, lambda: self._own.set(f"{prefix}/{self.rank_info.rank}", own))
        if self.rank_info.rank:
            return ""
        ranks = [f"{prefix}/{rank}" for rank in range(self.rank_info.world_size)]
        until = self._until()
        try:
            with waiting_for(f"{name}, from all ranks of this cluster", self._deadline_seconds):
                self._own.wait(ranks, timedelta(seconds=self._deadline_seconds))
            found = self._own.multi_get(ranks)
        except RuntimeError as error:
            raise PeerLost(self._explain_own(name, until, self._missing(ranks))) from error
        return hashlib.sha256(b"".join(found)).hexdigest()

    def _missing(self, ranks: list[str]) -> str:
        """Return which of the own cluster's ranks have said nothing, in words."""
        try:
            missing = [str(rank) for rank, key in enumerate(ranks) if not self._own.check([key])]
        except RuntimeError:  # the store has gone
            missing = []
        return f"its rank(s) {', '.join(missing)}" if missing else "its other ranks"

    def _relaying(self, key: str, do: Callable[[], Value]) -> Value:
        """Do it; where rank 0 loses somebody, its cluster's ranks read why under `key`."""
        try:
            return do()
        except PeerLost as error:
            if self.rank_info.rank == 0:
                with suppress(RuntimeError):  # then they learn from their own store
                    self._own.set(key, json.dumps(str(error)))
            raise

    def _among_first(
        self, prefix: str, name: str, value: Any, first_seconds: float | None = None
    ) -> list[Any]:
        """Return what the first ranks of all clusters give, on every rank of this one.

        `first_seconds` are those of rank 0 until it has read them all; by default the deadline.
        """
        if self.rank_info.rank == 0:
            own = json.dumps(value)
            read = self._relaying(prefix, lambda: self._read(prefix, name, own))
            values = [json.loads(v) for v in read]
            self._call(name, lambda: self._own.set(prefix, json.dumps(values)))
        else:
            values = self._from_first(prefix, name, first_seconds or self._deadline_seconds)
        self._linger(self._own, prefix, self.rank_info.world_size, self._until())
        return values

    def _from_first(self, prefix: str, name: str, first_seconds: float) -> list[Any]:
        """Return what rank 0 has read; PeerLost where it has lost a cluster, or does not come."""
        seconds = first_seconds + _RELAY_SECONDS
        until = time.monotonic() + seconds
        try:
            with waiting_for(f"{name}, which rank 0 reads", seconds):
                self._own.wait([prefix], timedelta(seconds=seconds))
            values = json.loads(self._own.get(prefix))
        except RuntimeError as error:
            raise PeerLost(self._explain_own(name, until, "its rank 0", seconds)) from error
        if isinstance(values, str):
            raise PeerLost(values)
        return values

    def _read(self, prefix: str, name: str, own: str) -> list[bytes]:
        """Give this cluster's value, and read one of each cluster; a rank of each calls it."""
        until, num_clusters = self._until(), self.rank_info.num_clusters
        self._call(name, lambda: self._store.set(f"{prefix}/{self.rank_info.cluster_id}", own))
        keys = [f"{prefix}/{cluster}" for cluster in range(num_clusters)]
        seconds = self._deadline_seconds
        try:
            with waiting_for(f"{name}, from all clusters", seconds):
                self._store.wait(keys, timedelta(seconds=seconds))
                values = self._store.multi_get(keys)
        except RuntimeError as error:
            raise PeerLost(self._explain(name, keys, until)) from error
        self._linger(self._store, prefix, num_clusters, until)
        return values

    def _until(self) -> float:
        return time.monotonic() + self._deadline_seconds

    def _linger(self, store: dist.Store, prefix: str, readers: int, until: float) -> None:
        """Stay until all have read, for this process may host the store."""
        left = max(until - time.monotonic(), 0.001)
        try:
            if store.add(f"{prefix}/read", 1) == readers:
                store.set(f"{prefix}/all", "")
                return
            with waiting_for(f"all to have read at {prefix}", left):
                store.wait([f"{prefix}/all"], timedelta(seconds=left))
        except RuntimeError:
            logger.debug("the store's host has left, which it does once all have read")

    def _explain(self, name: str, keys: list[str], until: float) -> str:
        """Say who has given no value; all others, if the store has gone, too."""
        is_early = time.monotonic() < until - _EARLY_SECONDS
        try:
            silent = [str(cluster) for cluster, k in enumerate(keys) if not self._store.check([k])]
        except RuntimeError:
            silent = []
        who = f"cluster {', '.join(silent)}" if silent else "the other clusters"
        if is_early:
            return f"{name}: the rendezvous store closed while waiting for {who}"
        return (
            f"{name}: {who} did not answer within {self._deadline_seconds:g} s "
            "(clusters.deadline_seconds)"
        )

    def _explain_own(self, name: str, until: float, who: str, seconds: float | None = None) -> str:
        if time.monotonic() < until - _EARLY_SECONDS:
            return f"{name}: the store of cluster {self.cluster_id} closed while waiting for {who}"
        return (
            f"{name}: cluster {self.cluster_id} waits for {who}, which did not answer within "
            f"{self._deadline_seconds if seconds is None else seconds:g} s "
            "(clusters.deadline_seconds)"
        )


class Recorded(Rendezvous):
    """Of a rank whose cluster joins a run that goes on: the others have told all before.

    `records` are those of the rank of its number in another cluster.
    """

    def __init__(
        self,
        store: dist.Store,
        rank_info: RankInfo,
        session: str,
        deadline_seconds: float,
        records: Sequence[tuple[str, list[Any]]],
    ) -> None:
        super().__init__(store, rank_info, session, deadline_seconds)
        self._told = [*records]

    def skip(self, names: Collection[str]) -> None:
        """Pass over what others have told under these names next."""
        while self._told and self._told[0][0] in names:
            self.records.append(self._told.pop(0))

    def gather(self, name: str, value: Any) -> list[Any]:
        """Return what the others told then, and the own value of now."""
        if not self._told or self._told[0][0] != name:
            due = f"{self._told[0][0]!r} is due" if self._told else "nothing more was compared"
            raise ValueError(
                f"{name}: the clusters of the run that goes on have compared other things before "
                f"they trained ({due}): start this cluster with the same script and configuration"
            )
        values = self._told.pop(0)[1]
        values[self.cluster_id] = json.loads(json.dumps(value))
        self.records.append((name, values))
        return values

    compare = gather
