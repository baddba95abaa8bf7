"""Whether Megatron's own part of a checkpoint can be written, as far as that is seen before.

An error in the midst of Megatron's save may end the run (failed_save.py). A disk that is full, a
folder that is gone or may not be written to, are seen before: then nothing is saved at that
iteration, a line says so, and training goes on.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from dsx.core.units import format_bytes
from dsx.engines.agreed_save import last_tag, size_of
from dsx.engines.cluster_collectives import from_first
from dsx.engines.megatron.own_part import latest_iteration, tag_of

_PROBE = "dsx_probe.tmp"
_PROBE_BYTES = 1 << 16


def find_obstacle(directory: Path, states: Path, is_first: bool) -> str:
    """Say why Megatron could not write there now; "" if it can. Collective in the cluster.

    It needs as much space as its last checkpoint took, and the outer state, which is written to
    `states` before, as much as its own last one.
    """
    return from_first(_look(directory, states) if is_first else "")


def _look(directory: Path, states: Path) -> str:
    probe = directory / _PROBE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with probe.open("wb", buffering=0) as file:
            file.write(bytes(_PROBE_BYTES))
            os.fsync(file.fileno())
        probe.unlink()
        part, state = _sizes_of_last(directory, states)
        disk = shutil.disk_usage(directory)
    except OSError as error:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
        return f"{error.strerror or error} ({error.filename})"
    if disk.total and disk.free < part + state:  # a remote file system may tell nothing
        return (
            f"the last one of Megatron's takes {format_bytes(part)}, the last outer state "
            f"{format_bytes(state)}, and {format_bytes(disk.free)} are free at {directory}"
        )
    return ""


def _sizes_of_last(directory: Path, states: Path) -> tuple[int, int]:
    """Return the bytes of Megatron's last part and of the last outer state; 0 of what is not."""
    last = last_tag(states)
    part = size_of(directory / tag_of(latest_iteration(directory) or 0))
    return part, size_of(states / last) if last is not None else 0
