"""Whether Megatron's own part of a checkpoint can be written, as far as that is seen before.

An error in the midst of Megatron's save is raised on some of its ranks while others wait, and ends
the run. A disk that is full, a folder that is gone or may not be written to, are seen before: then
nothing is saved at that iteration, a line says so, and training goes on.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from dsx.core.units import format_bytes
from dsx.engines.cluster_collectives import from_first
from dsx.engines.megatron.own_part import latest_iteration

_PROBE = "dsx_probe.tmp"
_PROBE_BYTES = 1 << 16


def find_obstacle(directory: Path, is_first: bool) -> str:
    """Say why Megatron could not write there now; "" if it can. Collective in the cluster.

    It needs as much space as the last checkpoint of Megatron's took.
    """
    return from_first(_look(directory) if is_first else "")


def _look(directory: Path) -> str:
    probe = directory / _PROBE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with probe.open("wb", buffering=0) as file:
            file.write(bytes(_PROBE_BYTES))
            os.fsync(file.fileno())
        probe.unlink()
        needed, disk = _size_of_last(directory), shutil.disk_usage(directory)
    except OSError as error:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
        return f"{error.strerror or error} ({error.filename})"
    if disk.total and disk.free < needed:  # a remote file system may tell nothing
        return (
            f"the last one of Megatron's takes {format_bytes(needed)}, and "
            f"{format_bytes(disk.free)} are free at {directory}"
        )
    return ""


def _size_of_last(directory: Path) -> int:
    iteration = latest_iteration(directory)
    folder = directory / f"iter_{iteration or 0:07d}"
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
