"""What a killed process has left of a save or a deletion, which the next save removes.

A cluster's directory names the process that writes there. What is unfinished goes at once where
that process is known to be dead, else after an hour in which nothing was written to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from pathlib import Path

from dsx.checkpoint.checksums import REMOVED, UNFINISHED, WRITER

_QUIET_SECONDS = 3600.0


def begin_writing(directory: Path) -> None:
    """Remove what is left over, and say that this process writes; ends with `end_writing`."""
    is_dead = _is_writer_dead(directory)
    for path in directory.glob(f"*{REMOVED}"):
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob(f"*{UNFINISHED}"):
        if is_dead or time.time() - _written_last(path) > _QUIET_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    own = {"host": socket.gethostname(), "process": os.getpid()}
    (directory / WRITER).write_text(json.dumps(own))


def end_writing(directory: Path) -> None:
    """Say that nothing is being written any more."""
    with contextlib.suppress(OSError):
        (directory / WRITER).unlink(missing_ok=True)


def _is_writer_dead(directory: Path) -> bool:
    """Whether the process that wrote here last is this one, or one of this host that has ended."""
    try:
        told = json.loads((directory / WRITER).read_text())
        host, process = told["host"], int(told["process"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if host != socket.gethostname():
        return False
    if process == os.getpid():
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # of another user
    return False


def _written_last(folder: Path) -> float:
    times = [folder.stat().st_mtime]
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times)
