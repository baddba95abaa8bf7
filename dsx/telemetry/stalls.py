"""A stall explains itself: at half of a deadline a rank writes its stacks and what it waits for.

One thread per process looks at the waits under way (core/waits.py) and reports each that has lasted
half of its deadline, once: a line to the log, and what every thread of this rank is doing, with all
that is waited for, to `stacks.cluster_0.rank_0.txt` in the run's folder. Before the run has one, or
without, a shortened form goes to the log. Ranks do not ask each other: each reports by itself.

`kill -USR2 <rank>` asks for a report at any time, where nobody else has taken that signal. It works
while the main thread is inside a library's call, where no handler in Python would run: faulthandler
notes the signal in a file of its own, which the thread looks at.

Source lines are not read: a file system that hangs may be what is to be explained.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import IO

from dsx.core.waits import Wait, waits_under_way

_POLL_SECONDS = 0.25
_MOST_BYTES = 4 << 20  # of a file: beyond that it starts anew
_FEW_FRAMES = 4  # of a thread, in the log
logger = logging.getLogger(__name__)


class StallWatch:
    """Reports the stalls of this process; `look` does it once, `start` on a thread of its own."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        waits: Callable[[], Sequence[Wait]] = waits_under_way,
    ) -> None:
        self._clock = clock
        self._waits = waits
        self._places: dict[tuple[Path, int, int], None] = {}
        self._noted: IO[bytes] | None = None  # what faulthandler writes at a signal
        self._seen = 0  # bytes of it

    def start(self) -> None:
        """Look from now on, until the process ends; and listen for the signal."""
        self.listen()
        threading.Thread(target=self._run, name="dsx-stalls", daemon=True).start()

    def listen(self) -> None:
        """Take SIGUSR2, if it is nobody's so far."""
        number = getattr(signal, "SIGUSR2", None)
        if number is None or signal.getsignal(number) is not signal.SIG_DFL:
            return
        try:
            self._noted = _file_in_memory()
        except OSError as error:
            logger.info("SIGUSR2 does not ask for stacks: %s", error)
            return
        faulthandler.register(number, self._noted, all_threads=False)

    def write_to(self, folder: Path, cluster: int, rank: int) -> None:
        """Write later reports to a run's folder, too, until `leave`."""
        self._places[folder, cluster, rank] = None

    def leave(self, folder: Path, cluster: int, rank: int) -> None:
        """Write there no more."""
        self._places.pop((folder, cluster, rank), None)

    def look(self) -> None:
        """Report waits that have become due, and what a signal has asked for."""
        now, waits = self._clock(), self._waits()
        due = [wait for wait in waits if not wait.is_reported and wait.due <= now]
        for wait in due:
            wait.is_reported = True
        if due:
            more = f" (and {len(due) - 1} more)" if len(due) > 1 else ""
            self._report(f"{_say_wait(due[0], now)}{more}", waits, now)
        if self._is_asked():
            self._report("SIGUSR2 asks what this rank is doing", waits, now)

    def _run(self) -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            self.look()

    def _is_asked(self) -> bool:
        if self._noted is None:
            return False
        size, before = os.fstat(self._noted.fileno()).st_size, self._seen
        self._seen = size
        return size > before

    def _report(self, why: str, waits: Sequence[Wait], now: float) -> None:
        files = [stacks_path(*place) for place in self._places.copy()]
        if not files:
            logger.warning("%s; threads:\n%s", why, _stacks(waits, now, _FEW_FRAMES))
            return
        names = ", ".join(map(str, files))
        logger.warning("%s; what every thread of this rank does is in %s", why, names)
        text = f"{_head(why)}\n{_say_waits(waits, now)}\n{_stacks(waits, now)}\n\n"
        for file in files:
            try:
                _append(file, text)
            except OSError as error:
                logger.warning(
                    "%s cannot be written: %s; threads:\n%s",
                    file, error.strerror, _stacks(waits, now, _FEW_FRAMES),
                )  # fmt: skip


def stacks_path(folder: Path, cluster: int, rank: int) -> Path:
    """Return the file of one rank's reports."""
    return folder / f"stacks.cluster_{cluster}.rank_{rank}.txt"


_watch: tuple[int, StallWatch] | None = None  # a fork's child has no thread of its parent


def stall_watch() -> StallWatch:
    """Return this process's watch, which looks from the first call on."""
    global _watch  # one per process, as threads and signals are
    if _watch is None or _watch[0] != os.getpid():
        _watch = os.getpid(), StallWatch()
        _watch[1].start()
    return _watch[1]


def _say_wait(wait: Wait, now: float) -> str:
    of = "" if wait.deadline_seconds is None else f" of {wait.deadline_seconds:g} s"
    try:
        what = wait.what
    except Exception as error:  # noqa: BLE001 - a report without it is better than none
        what = f"(cannot be said: {error!r})"
    return f"has waited {now - wait.since:.1f} s{of} for {what}"


def _say_waits(waits: Sequence[Wait], now: float) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [f"{names.get(wait.thread, wait.thread)} {_say_wait(wait, now)}" for wait in waits]
    return "\n".join(["waited for, the longest first:", *(lines or ["nothing that dsx knows of"])])


def _head(why: str) -> str:
    when = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"{when} process {os.getpid()} on {socket.gethostname()}: {why}"


def _stacks(waits: Sequence[Wait], now: float, most: int | None = None) -> str:
    """Return the stack of every thread, innermost call last; of `most` frames each."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own, told = threading.get_ident(), {wait.thread for wait in waits}
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented
    order = sorted(frames, key=lambda ident: (ident not in told, names.get(ident, "")))
    return "\n".join(
        "\n".join([f"thread {names.get(ident, ident)}", *_lines(frames[ident], most)])
        for ident in order
        if ident != own
    )


def _lines(frame: FrameType | None, most: int | None) -> list[str]:
    lines: list[str] = []
    while frame is not None and (most is None or len(lines) < most):
        code = frame.f_code
        lines.append(f"  {code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return lines[::-1]


def _append(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    is_full = file.exists() and file.stat().st_size > _MOST_BYTES
    with file.open("w" if is_full else "a") as stream:
        stream.write(text)


def _file_in_memory() -> IO[bytes]:
    """Return a file that a full disk does not matter to, where the system has such."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("dsx-stacks"), "wb")
    return tempfile.TemporaryFile()
