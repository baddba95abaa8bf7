"""One command, looked after: started again where it fails, told of signals, ended in time."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from dsx.agent.tries import NOT_FOUND, Tries, Verdict, as_shell

_LOOK_SECONDS = 0.2
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
logger = logging.getLogger(__name__)


class Agent:
    """Looks after a command, in a process group of its own. `tell` may be called by any thread."""

    def __init__(
        self, command: Sequence[str], tries: Tries, grace_seconds: float, notice_signal: int
    ) -> None:
        """`grace_seconds`: how long it may take to end once it is told to; then it is killed."""
        self._command, self._tries = list(command), tries
        self._grace_seconds, self._notice_signal = grace_seconds, notice_signal
        self._told: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._group: int | None = None
        self._ends_by: float | None = None  # since the command was told to end
        self._ended_by = 0
        self.was_noticed = False

    def tell(self, number: int, why: str) -> None:
        """Pass a signal on; of SIGTERM, SIGINT and SIGHUP it is not started again after that."""
        self._told.put((number, why))

    def notice(self, said: str) -> None:
        """End the command, as the machine is about to be taken away."""
        self.was_noticed = True
        self._told.put((self._notice_signal, f"the machine is about to be taken away ({said})"))

    def run(self) -> int:
        """Return the exit status, once the command is done, is given up or was told to end."""
        while True:
            began = time.monotonic()
            status = self._run_once()
            if self._ends_by is not None:
                logger.warning("the command was told to end, and has, with exit status %d", status)
                return 128 + self._ended_by
            now = time.monotonic()
            verdict = self._tries.judge(status, now, now - began)
            if verdict.wait_seconds is None:
                level = logging.INFO if verdict.status == 0 else logging.ERROR
                logger.log(level, "%s", verdict.why)
                return verdict.status
            if not self._wait(verdict):
                return 128 + self._ended_by

    def _run_once(self) -> int:
        """Run the command to the end of all of its processes; return its exit status."""
        try:
            process = subprocess.Popen(self._command, start_new_session=True)
        except FileNotFoundError:
            return NOT_FOUND
        except OSError as error:
            logger.error("%s", error)
            return 126
        self._group = process.pid
        while process.poll() is None:
            self._take_signals(_LOOK_SECONDS)
            if self._ends_by is not None and time.monotonic() > self._ends_by:
                break
        self._end_group()
        return as_shell(process.wait())

    def _end_group(self) -> None:
        """Wait for what the command has left, as ranks that are saving; then kill it."""
        patience = time.monotonic() + self._grace_seconds
        while self._is_anyone_left():
            self._take_signals(_LOOK_SECONDS)
            if time.monotonic() > (self._ends_by or patience):
                logger.error("processes of the command are left after its end: killing them")
                self._signal(signal.SIGKILL)
                time.sleep(_LOOK_SECONDS)
        self._group = None

    def _is_anyone_left(self) -> bool:
        assert self._group is not None
        try:
            os.killpg(self._group, 0)
        except ProcessLookupError:
            return False
        return not _are_all_zombies(self._group)

    def _wait(self, verdict: Verdict) -> bool:
        """Wait before another start; whether to start."""
        assert verdict.wait_seconds is not None
        logger.warning("%s; starting it again in %g s", verdict.why, verdict.wait_seconds)
        until = time.monotonic() + verdict.wait_seconds
        while (left := until - time.monotonic()) > 0:
            self._take_signals(min(left, _LOOK_SECONDS))
            if self._ends_by is not None:
                return False
        return True

    def _take_signals(self, seconds: float) -> None:
        """Pass on what has come, or comes within so long."""
        try:
            number, why = self._told.get(timeout=seconds)
        except queue.Empty:
            return
        name = signal.Signals(number).name
        is_end = number in _ENDING or self.was_noticed
        if is_end and self._ends_by is None:
            self._ended_by, self._ends_by = number, time.monotonic() + self._grace_seconds
            logger.warning("%s: %s is passed on; it has %g s", why, name, self._grace_seconds)
        else:
            logger.info("%s: %s is passed on", why, name)
        self._signal(number)

    def _signal(self, number: int) -> None:
        if self._group is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._group, number)


def _are_all_zombies(group: int) -> bool:
    """Whether nothing of a process group runs any more, where /proc tells."""
    states: list[str] = []
    for folder in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if folder.isdecimal():
            with suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{folder}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                if int(fields[2]) == group:
                    states.append(fields[0])
    return bool(states) and all(state in "ZX" for state in states)
