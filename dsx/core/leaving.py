"""Why a cluster ends before its training does: it was told to, as by a scheduler's signal."""

from __future__ import annotations

import signal
from dataclasses import dataclass

_SIGNALS = 256  # more than there are


@dataclass(frozen=True)
class Reason:
    """What ends a run: `signal` is its number, 0 for none; `cluster` the one that it came to."""

    cluster: int
    signal: int = signal.SIGTERM

    @property
    def name(self) -> str:
        """Return what people call it."""
        return signal.Signals(self.signal).name if self.signal else "a request of the script's"

    @property
    def exit_code(self) -> int:
        """Return the exit status of a process that it ended, as shells have it."""
        return 128 + (self.signal or signal.SIGTERM)

    def pack(self) -> int:
        """Return it as one positive number."""
        return self.cluster * _SIGNALS + self.signal + 1

    @classmethod
    def unpack(cls, number: int) -> Reason:
        """Return what `pack` has made a number."""
        return cls(*divmod(number - 1, _SIGNALS))
