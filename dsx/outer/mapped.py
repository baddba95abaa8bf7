"""Memory of files in a folder, mapped: what is seldom touched need not lie in the host's memory.

The system brings pages in when they are used, writes those back that were changed, and gives the
memory they take in between to whoever asks for it. The files have no name, so nothing is left of
them when a run is killed, and all of their room is taken at the start: a disk that is full refuses
then, and not in the middle of a run, which would be ended by a signal.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from dsx.core.units import format_bytes

if TYPE_CHECKING:  # what only looks at a folder is started without torch
    from torch import Tensor

logger = logging.getLogger(__name__)
_READ_AT_A_TIME = 1 << 26  # so that torch looks at the pages of a piece with one thread
_IN_MEMORY = ("tmpfs", "ramfs")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MOUNTS = Path("/proc/self/mountinfo")


class MappedMemory:
    """Gives memory of files in `folder`, `[num_bytes]` uint8 and zero; it goes with its tensors."""

    def __init__(self, folder: Path) -> None:
        """ValueError for what is no folder that files can be made in."""
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            what = "cannot be written to" if folder.is_dir() else "is no folder on this host"
            raise ValueError(
                f"state.dir={str(folder)!r} {what}: make it on every host, on a disk of its own, "
                'or keep the outer state in memory: "state": {"device": "host"}'
            )
        self._folder = folder
        kind = _file_system(folder)
        if kind in _IN_MEMORY:
            logger.warning(
                "state.dir=%r is on a %s, which is memory itself: nothing is saved there; name a "
                "folder on a disk", str(folder), kind,
            )  # fmt: skip

    def __call__(self, num_bytes: int) -> Tensor:
        """Return so many bytes; RuntimeError, with what to do, if there is no room for them."""
        import torch

        if not num_bytes:
            return torch.zeros(0, dtype=torch.uint8)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            self._take_room(file, num_bytes)
            # which opens the file once more; the mapping holds it from then on
            path = f"/proc/self/fd/{file.fileno()}"
            return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)

    def _take_room(self, file: IO[bytes], num_bytes: int) -> None:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            usage = os.fstatvfs(file.fileno())
            raise RuntimeError(
                f"state.dir={str(self._folder)!r} has no room for {format_bytes(num_bytes)} more: "
                f"{format_bytes(usage.f_bavail * usage.f_frsize)} are free "
                f"({os.strerror(error.errno)}); `dsx memory` tells what each rank takes there: "
                "free as much, name another folder, or use a cluster of more ranks"
            ) from error


def read_ahead(tensors: Iterable[Tensor]) -> None:
    """Return once what they hold is in memory; who then works with it waits for no disk.

    Where memory is short, the system may have taken it away again by then.
    """
    import torch

    for tensor in tensors:
        for piece in tensor.reshape(-1).view(torch.uint8).split(_READ_AT_A_TIME):
            if piece.numel():
                piece[:: mmap.PAGESIZE].amax()  # one byte of each page, and the last one's, too
                piece[-1].item()


def _file_system(folder: Path) -> str:
    """Return the kind of file system that a folder lies on; nothing if the system does not say."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return ""
    kinds = [fields[fields.index("-") + 1] for fields in mounts if fields[2] == number]
    return kinds[0] if kinds else ""
