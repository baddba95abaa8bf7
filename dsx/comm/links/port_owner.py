"""Who listens on a port of this machine, as far as /proc says."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_LISTENS = "0A"
_MOST_CHARACTERS = 120


def who_listens(port: int) -> str:
    """Return the process that listens on a TCP port in words, or that it cannot be told."""
    numbers = _sockets(port)
    if not numbers:
        return "another process"
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for file in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(file) in numbers:
                        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                        text = command.decode(errors="replace").strip()[:_MOST_CHARACTERS]
                        return f"process {folder.name} ({text or 'without a command line'})"
    return "a process of another user"


def _sockets(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found
