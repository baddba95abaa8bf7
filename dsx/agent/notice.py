"""Whether the machine is about to be taken away: a command that is asked now and then."""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)
_TOLD_FAILURES = 3


class Notice:
    """Asks `command`, of a shell, on a thread of its own; exit status 0 or output is a notice."""

    def __init__(self, command: str, every_seconds: float, heard: Callable[[str], object]) -> None:
        """`heard` is called once, with what the command has said."""
        self._command, self._every, self._heard = command, every_seconds, heard
        self._is_over = threading.Event()
        self._num_failures = 0
        self._thread = threading.Thread(target=self._run, name="dsx-notice", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            said = self._ask()
            if said is not None:
                self._is_over.set()
                self._heard(said)
                return
            self._is_over.wait(self._every)

    def _ask(self) -> str | None:
        limit = max(self._every, 1.0)
        try:
            asked = subprocess.run(
                self._command, shell=True, capture_output=True, text=True, timeout=limit,
                check=False, stdin=subprocess.DEVNULL, errors="replace",
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            self._num_failures += 1
            if self._num_failures <= _TOLD_FAILURES:
                logger.warning("--notice has no answer: %s", error)
            return None
        said = asked.stdout.strip()
        return said or "exit status 0" if asked.returncode == 0 or said else None
