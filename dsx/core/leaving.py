"""Why a cluster ends before its training does: it was told to, as by a scheduler's signal."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

_SIGNALS = 256  # more than there are
LOST = 250  # in place of a signal: another cluster is lost, and the others cannot go on
ORDERED = 251  # a member's tool has ended the run for all, at one step, or one cluster's part in it
_ORDERS = {True: "dsx ctl leave", False: "dsx ctl stop"}  # by whether the others go on


@dataclass(frozen=True)
class Reason:
    """What ends a run: `signal` is its number, 0 for none; `cluster` the one that it came to.

    With `LOST`, it is the cluster that is gone, and the others hear of it by themselves. `leaves`:
    it ends this cluster's part alone, and the others go on.
    """

    cluster: int
    signal: int = signal.SIGTERM
    leaves: bool = False

    @property
    def is_loss(self) -> bool:
        """Whether nobody has asked for the end: a cluster is gone."""
        return self.signal == LOST

    @property
    def is_order(self) -> bool:
        """Whether all end by an order, which all have from one step on."""
        return self.signal == ORDERED and not self.leaves

    @property
    def sentence(self) -> str:
        """Return what has happened."""
        if self.is_loss:
            return f"cluster {self.cluster} is lost, and the run cannot go on without it"
        if self.leaves:
            return f"leaving the others, told to by {self.name} (cluster {self.cluster})"
        return f"told to end by {self.name} (cluster {self.cluster})"

    @property
    def name(self) -> str:
        """Return what people call it."""
        if self.is_loss:
            return "the loss of a cluster"
        if self.signal == ORDERED:
            return _ORDERS[self.leaves]
        return signal.Signals(self.signal).name if self.signal else "a request of the script's"

    @property
    def exit_code(self) -> int:
        """Return the exit status of a process that it ended, as shells have it."""
        if self.is_loss:
            return 1
        if self.leaves or self.is_order:
            return 0
        return 128 + (self.signal or signal.SIGTERM)

    def for_all(self) -> Reason:
        """Return it where the others cannot go on: all save, and end."""
        number = signal.SIGTERM if self.signal == ORDERED else self.signal
        return replace(self, signal=number, leaves=False) if self.leaves else self

    def pack(self) -> int:
        """Return it as one positive number."""
        return self.cluster * _SIGNALS + self.signal + 1

    @classmethod
    def unpack(cls, number: int) -> Reason:
        """Return what `pack` has made a number."""
        return cls(*divmod(number - 1, _SIGNALS))
