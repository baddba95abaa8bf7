"""Clusters as threads of one process, joined by gloo's own connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from dsx.comm.gloo import GlooTransport
from dsx.comm.gloo_groups import connect_gloo, open_device
from dsx.core.membership import Seat

_Result = TypeVar("_Result")


def over_gloo(
    num_clusters: int,
    cluster: Callable[[GlooTransport], _Result],
    fragments: Sequence[int] = (0,),
    streams: int = 1,
    deadline_seconds: float = 20.0,
) -> list[_Result]:
    """Return `cluster(transport)` of every cluster, in their order, each on a thread of its own."""
    store = dist.HashStore()

    def run(m: int) -> _Result:
        seat, device = Seat.of(m, num_clusters), open_device("lo")

        def connect(what: str, number: int) -> list[Any]:
            named = dist.PrefixStore(what, store)
            return connect_gloo(named, seat, timedelta(seconds=20), device, number)

        transport = GlooTransport(fragments, connect, seat, deadline_seconds, streams=streams)
        try:
            return cluster(transport)
        finally:
            transport.close()

    with ThreadPoolExecutor(num_clusters) as threads:
        return list(threads.map(run, range(num_clusters)))
