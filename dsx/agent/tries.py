"""Whether a command that has ended is started again, and when: a number of tries in a window."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

DONE, HOPELESS, CANNOT_RUN, NOT_FOUND = 0, 2, 126, 127
_SIGNALLED = 128
_ENDED_IN_ORDER = {143, 138}  # saved, and to be started again: by SIGTERM, by SIGUSR1
_WHY = {
    HOPELESS: "a mistake in what it was given, which another start does not mend",
    CANNOT_RUN: "it cannot be run",
    NOT_FOUND: "there is no such command",
}


@dataclass(frozen=True)
class Verdict:
    """What follows an end: start again after `wait_seconds`, or end with `status`, and `why`."""

    why: str
    wait_seconds: float | None = None
    status: int = 0


class Tries:
    """Judges the ends of one command. Times are seconds that only go forward."""

    def __init__(
        self, most: int, window_seconds: float, wait_seconds: float, most_wait_seconds: float
    ) -> None:
        """`most` failures within a window; each wait is twice the one before, to a bound."""
        self._most, self._window = most, window_seconds
        self._first_wait, self._most_wait = wait_seconds, most_wait_seconds
        self._failures: list[tuple[float, int]] = []  # when, and with which exit status

    def judge(self, status: int, now: float, lasted_seconds: float) -> Verdict:
        """Return what follows: `status` as a shell has it, after running for so long."""
        ended = f"it has ended with exit status {status} after {lasted_seconds:.0f} s"
        if status == DONE:
            return Verdict(f"it has done its work, or was told to stop: {ended}")
        if status in _WHY:
            return Verdict(f"{ended}: {_WHY[status]}", status=status)
        if status in _ENDED_IN_ORDER:
            return Verdict(f"{ended}: saved and ended with the others", self._first_wait)
        self._failures = [f for f in self._failures if now - f[0] < self._window]
        if lasted_seconds >= self._window:
            self._failures = []
        self._failures.append((now, status))
        count = len(self._failures)
        if count >= self._most:
            which = Counter(status for _, status in self._failures)
            listed = ", ".join(f"{s} ({times} times)" for s, times in which.most_common())
            same = "the same failure each time: " if len(which) == 1 else ""
            return Verdict(
                f"{ended}; {same}{count} failures within {self._window:g} s, exit statuses "
                f"{listed}: given up, look at what it has printed",
                status=status,
            )
        wait = min(self._first_wait * 2 ** (count - 1), self._most_wait)
        return Verdict(f"{ended}; failure {count} of {self._most - 1} that are tried again", wait)


def as_shell(returncode: int) -> int:
    """Return the exit status of a process as a shell has it: 128 and the signal's number."""
    return _SIGNALLED - returncode if returncode < 0 else returncode
