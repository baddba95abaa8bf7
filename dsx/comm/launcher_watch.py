"""End a rank whose launcher is gone, so that no orphan keeps a device or another cluster waiting.

`deepspeed` starts `deepspeed.launcher.launch`, which starts the ranks; killing either of the two
outright leaves the ranks training on as orphans, and the other clusters believe all is well. A
daemon thread watches the parent, and the runner above it where there is one. SIGTERM to `deepspeed`
itself, on one host, ends that runner alone, whose ranks so learn of it here and save.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_POLL_SECONDS = 1.0
_AGENTS = {  # one process over the ranks: programs, and modules that Python runs
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate",
    "accelerate-launch", "accelerate.commands.launch", "accelerate.commands.accelerate_cli",
}  # fmt: skip
_OF_DEEPSPEED = {
    "deepspeed", "deepspeed.pt", "ds", "deepspeed.launcher.runner", "deepspeed.launcher.launch",
}  # fmt: skip
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # of Python's own options
_grace_seconds = 10.0
logger = logging.getLogger(__name__)


def launcher_processes() -> list[tuple[int, str]]:
    """Return `(pid, start time)` of this rank's launcher processes; empty where /proc is absent."""
    parent = os.getppid()
    found: list[tuple[int, str]] = []
    program = program_of(_command(parent))
    if program in _OF_DEEPSPEED:
        found.append((parent, _start_time(parent)))
        above = _parent_of(parent)
        if above > 1 and program_of(_command(above)) in _OF_DEEPSPEED:
            found.append((above, _start_time(above)))
    elif program in _AGENTS:
        found.append((parent, _start_time(parent)))
    return found


def program_of(command: Sequence[str]) -> str:
    """Return what a command runs: a program's name, or the script or module that Python is given.

    Its other arguments, and the folders that it lies in, may have any name.
    """
    if not command:
        return ""
    program, rest = Path(command[0]).name, list(command[1:])
    if not program.startswith("python"):
        return program
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option in _WITH_VALUE:
            rest = rest[1:]
        elif option.startswith(("-W", "-X", "--")):
            continue
        elif option.endswith("m"):  # the last of some letters
            return rest[0] if rest else ""
        elif "c" in option:
            return ""
    return Path(rest[0]).name if rest else ""


def allow_seconds(seconds: float) -> None:
    """Let a rank that handles SIGTERM take so long to save before it is ended."""
    global _grace_seconds  # one process has one launcher
    _grace_seconds = max(_grace_seconds, seconds)


def end_with_launcher() -> None:
    """Start the watch; SIGTERM to this process, then a hard exit, once a launcher is gone."""
    watched = launcher_processes()
    if watched:
        threading.Thread(
            target=_watch, args=(watched,), name="dsx-launcher-watch", daemon=True
        ).start()


def _watch(watched: list[tuple[int, str]]) -> None:
    while all(_start_time(pid) == started for pid, started in watched):
        time.sleep(_POLL_SECONDS)
    logger.error("the launcher of this rank is gone: ending it too")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_grace_seconds)
    os._exit(1)


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/pid/stat after the command name; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _parent_of(pid: int) -> int:
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else 0


def _start_time(pid: int) -> str:
    fields = _stat_fields(pid)
    is_zombie = bool(fields) and fields[0] == "Z"
    return "" if is_zombie or not fields else fields[19]
