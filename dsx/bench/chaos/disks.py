"""A small disk for each cluster's checkpoints, which can be full.

They are mounted by the process that forks ranks, in a namespace of its own: nobody else sees them,
and they are gone with the last of its processes, however that ends. The driver gets at them through
that process.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dsx.bench.chaos.job import checkpoints_path

APART: Sequence[str] = ("unshare", "--mount", "--")  # before a command that is to mount some
_MOUNT = ("mount", "-t", "tmpfs", "-o", "size=16m", "dsx-chaos")
_BLOCK = 4096
_FILLER = "filler"


class Disks:
    """The disks of all clusters of a run, as a process that has them sees them."""

    def __init__(self, process: int, directory: Path) -> None:
        self._root = Path(f"/proc/{process}/root")
        self._directory = directory.absolute()

    def folder(self, cluster: int) -> Path:
        """Return where a cluster's disk is for this process."""
        own = checkpoints_path(self._directory, cluster)
        return self._root / own.relative_to("/")

    def fill(self, cluster: int) -> None:
        """Leave no byte on a cluster's disk; again, where something has been deleted since."""
        filler = self.folder(cluster) / _FILLER
        with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(_BLOCK))

    def free(self, cluster: int) -> None:
        """Let there be space again."""
        (self.folder(cluster) / _FILLER).unlink()


def mount_disks(directory: Path, num_clusters: int) -> None:
    """Mount all; of a process that was started `APART`. CalledProcessError if that may not be."""
    for cluster in range(num_clusters):
        folder = checkpoints_path(directory, cluster)
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([*_MOUNT, str(folder)], check=True, stdin=subprocess.DEVNULL)


def may_mount() -> bool:
    """Return whether this process may have disks of its own."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run([*APART, *_MOUNT, folder], capture_output=True)
        except FileNotFoundError:
            return False
    return not done.returncode
