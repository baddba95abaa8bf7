"""The way of every fragment from this rank's masters to the wire and back."""

from __future__ import annotations

from dsx.backends.base import Backend
from dsx.method import Method
from dsx.redistribution import Redistribution
from dsx.types import Slot


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


def factored(method: Method, backend: Backend) -> list[tuple[list[str], list[str]]]:
    """Return, per fragment, the matrices that travel in factors and those that do not, by name.

    Of the whole model, so the same on every rank; vectors and small matrices are left out. Empty
    unless the codec makes factors.
    """
    if not method.compression.needs_whole_matrices:
        return []
    found: list[tuple[list[str], list[str]]] = []
    for parameters in backend.fragment_parameters:
        slots = [Slot(p.name, p.shape, 0) for p in parameters]
        taken = [s.name for s in slots if method.compression.takes(s)]
        rest = [s.name for s in slots if not s.is_small and s.name not in taken]
        found.append((taken, rest))
    return found
