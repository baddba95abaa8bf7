"""Why a cluster ends before its training does: it was told to, as by a scheduler's signal."""

from __future__ import annotations

import signal
from dataclasses import dataclass

_SIGNALS = 256  # more than there are
LOST = 250  # in place of a signal: another cluster is lost, and the others cannot go on


@dataclass(frozen=True)
class Reason:
    """What ends a run: `signal` is its number, 0 for none; `cluster` the one that it came to.

    With `LOST`, it is the cluster that is gone, and the others hear of it by themselves.
    """

    cluster: int
    signal: int = signal.SIGTERM

    @property
    def is_loss(self) -> bool:
        """Whether nobody has asked for the end: a cluster is gone."""
        return self.signal == LOST

    @property
    def sentence(self) -> str:
        """Return what has happened."""
        if self.is_loss:
            return f"cluster {self.cluster} is lost, and the run cannot go on without it"
        return f"told to end by {self.name} (cluster {self.cluster})"

    @property
    def name(self) -> str:
        """Return what people call it."""
        if self.is_loss:
            return "the loss of a cluster"
        return signal.Signals(self.signal).name if self.signal else "a request of the script's"

    @property
    def exit_code(self) -> int:
        """Return the exit status of a process that it ended, as shells have it."""
        if self.is_loss:
            return 1
        return 128 + (self.signal or signal.SIGTERM)

    def pack(self) -> int:
        """Return it as one positive number."""
        return self.cluster * _SIGNALS + self.signal + 1

    @classmethod
    def unpack(cls, number: int) -> Reason:
        """Return what `pack` has made a number."""
        return cls(*divmod(number - 1, _SIGNALS))
