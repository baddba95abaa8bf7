"""What outer training takes on a rank that runs."""

from __future__ import annotations

from pathlib import Path

from dsx.outer.loop import OuterLoop
from dsx.outer.memory import OuterMemory, predict

_FREE = "MemAvailable:"


def copied_for_save(loop: OuterLoop) -> int:
    """Return what a save that is written beside training copies at most, masters included."""
    masters = sum(fragment.numel for fragment in loop.adapter.fragments)
    is_saved = loop.method.delay.export == "mean"
    return memory_of(loop).copied_for_save(loop.state.device.type == "cpu") + 4 * masters * is_saved


def free_on_host() -> int | None:
    """Return the bytes of this host that can be had, as Linux tells; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(_FREE)), None)


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
    )
