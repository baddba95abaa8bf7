"""The way of every fragment from this rank's masters to the wire and back."""

from __future__ import annotations

from dsx.backends.base import Backend
from dsx.method import Method
from dsx.redistribution import Redistribution


def plan_routes(method: Method, backend: Backend) -> list[Redistribution]:
    """Return one route per fragment. Collective over the cluster's ranks."""
    layouts, rank = [backend.fragments], 0
    if method.compression.needs_whole_matrices:
        layouts, rank = backend.cluster_layouts()
    return [
        Redistribution(
            [fragments[index] for fragments in layouts],
            rank,
            method.compression.takes,
            backend.device,
        )
        for index in range(len(backend.fragments))
    ]
