"""What outer training takes on a rank that runs."""

from __future__ import annotations

from dsx.outer.loop import OuterLoop
from dsx.outer.memory import OuterMemory, predict


def memory_of(loop: OuterLoop) -> OuterMemory:
    """Return it by purpose; see outer/memory.py."""
    adapter, matrix_gathers = loop.adapter, loop.matrix_gathers
    return predict(
        loop.method,
        adapter.fragments,
        [len(parameters) for parameters in adapter.fragment_parameters],
        [gather.wire for gather in matrix_gathers],
        loop.transport.seat.num_clusters,
        adapter.buffer_bytes + sum(gather.buffer_bytes for gather in matrix_gathers),
        adapter.device.type != "cpu",
        loop.state.is_on_disk,
        loop.state.resources.side is not None,
    )
