"""What outer training takes on a rank that runs."""

from __future__ import annotations

from dsx.outer.loop import OuterLoop
from dsx.outer.memory import OuterMemory, predict
from dsx.outer.whole_matrices import buffer_bytes


def memory_of(loop: OuterLoop) -> OuterMemory:
    """Return it by purpose; see outer/memory.py."""
    adapter, matrix_gathers = loop.adapter, loop.matrix_gathers
    return predict(
        loop.method,
        adapter.fragments,
        [len(parameters) for parameters in adapter.fragment_parameters],
        [gather.wire for gather in matrix_gathers],
        loop.transport.seat.num_clusters,
        adapter.buffer_bytes + buffer_bytes(matrix_gathers),
        adapter.device.type != "cpu",
        loop.state.is_on_disk,
        loop.state.resources.side is not None,
    )
