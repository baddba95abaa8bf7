"""Small values of all clusters, told to every rank over connections that are there already.

Rank 0 of each cluster tells the others' over its own connections and passes on to its cluster what
it heard, or why it heard nothing. The store where the clusters met is not asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsx.comm.in_cluster import InCluster
from dsx.core.transport import PeerLost, Transport


class Gathering:
    """One rank's part; every rank of every cluster calls the same, in the same order."""

    def __init__(self, transport: Transport, in_cluster: InCluster) -> None:
        self._transport = transport
        # raises where this cluster has no part yet in what all do together
        self.require_part: Callable[[str], object] = lambda what: None
        self._in_cluster = in_cluster

    def gather(self, what: str, value: Any) -> list[Any]:
        """Return one JSON value per cluster, rank 0's, in cluster order; PeerLost on all ranks."""
        self.require_part(what)
        lost, values = None, []
        if self._in_cluster.rank == 0:
            try:
                values = list(self._transport.gather(what, value)())
            except PeerLost as error:
                lost = str(error)
        lost, values = self._in_cluster.from_first(what, (lost, values))
        if lost is not None:
            raise PeerLost(lost)
        return values

    def meet(self, what: str) -> None:
        """Wait for all ranks of the cluster; the error of one that does not come begins `what`."""
        self._in_cluster.any(what, False)
