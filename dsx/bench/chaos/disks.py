"""A small disk for each cluster's checkpoints, which can be full."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

from dsx.bench.chaos.job import checkpoints_path

_SIZE = "16m"
_BLOCK = 4096
_FILLER = "filler"


class Disks:
    """The disks of all clusters, in memory; OSError where this process may not mount them."""

    def __init__(self, directory: Path, num_clusters: int) -> None:
        self._folders: list[Path] = []
        try:
            for cluster in range(num_clusters):
                folder = checkpoints_path(directory, cluster)
                folder.mkdir(parents=True)
                _mount(folder)
                self._folders.append(folder)
        except BaseException:
            self.close()
            raise

    def fill(self, cluster: int) -> None:
        """Leave no byte on a cluster's disk; again, where something has been deleted since."""
        filler = self._folders[cluster] / _FILLER
        with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(_BLOCK))

    def free(self, cluster: int) -> None:
        """Let there be space again."""
        (self._folders[cluster] / _FILLER).unlink()

    def close(self) -> None:
        """Take them away."""
        while self._folders:
            subprocess.run(["umount", "-l", str(self._folders.pop())], check=True)


def may_mount() -> bool:
    """Return whether this process may have disks of its own."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            _mount(Path(folder))
        except OSError:
            return False
        subprocess.run(["umount", "-l", folder], check=True)
    return True


def _mount(folder: Path) -> None:
    if os.geteuid():
        raise PermissionError(f"{folder}: only root mounts a disk")
    command = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "dsx-chaos", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"{folder}: no disk can be mounted there: {done.stderr.strip()}")
