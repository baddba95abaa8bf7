"""Connections that stand and carry nothing.

TCP takes them for sound: a firewall has forgotten one and lets what comes go, or a byte that was
changed on the way makes the reader wait for the rest of a frame that has none. It shows by silence,
or by a chunk whose acknowledgement is due and does not come. Then they are made anew, and what was
under way is sent again; each time in a row after twice as long, as a line may just be slow.
"""

from __future__ import annotations


class Stall:
    """Of one peer; times are of the monotonic clock, in seconds."""

    def __init__(self, patience: float, now: float) -> None:
        """`patience`: for how long nothing may come through before connections are made anew."""
        self._patience, self._since = patience, now
        self._in_a_row = 0

    def seconds(self, now: float, heard_at: float, owed_since: float) -> float | None:
        """Return for how long nothing has come through, if that is too long."""
        waited = now - max(self._since, min(heard_at, owed_since))
        limit = self._patience * 2**self._in_a_row
        if waited <= limit and now > self._since + 2 * limit:
            self._in_a_row = 0
        return waited if waited > limit else None

    def excuse(self, seconds: float, now: float) -> None:
        """Do not count a time in which this process itself has not looked."""
        self._since = min(self._since + seconds, now)

    def renewed(self, now: float) -> None:
        """Count anew, with twice the patience, if this is not the first time in a row."""
        self._in_a_row += 1
        self._since = now
