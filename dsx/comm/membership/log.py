"""The entries that a cluster holds: from `base` on, those before are in the state alone."""

from __future__ import annotations

from collections.abc import Sequence

from dsx.comm.membership.entries import Contributors, Entry, View, encoded


class Log:
    """Entry i of the run is `entries[i - base]`; how many of them are applied, the state says."""

    def __init__(self, base: int = 0, entries: Sequence[Entry] = ()) -> None:
        self.base = base
        self.entries: list[Entry] = []
        self._sizes = [0]  # bytes of the first i entries, and of those that were cut
        for entry in entries:
            self.append(entry)

    @property
    def end(self) -> int:
        """The number of entries from the beginning of the run."""
        return self.base + len(self.entries)

    def at(self, index: int) -> Entry:
        """Return entry `index` of the run."""
        return self.entries[index - self.base]

    def tail(self, start: int) -> tuple[Entry, ...]:
        """Return the entries from `start` on, which must not lie before the base."""
        return tuple(self.entries[start - self.base :])

    def append(self, entry: Entry) -> None:
        """Add one."""
        self.entries.append(entry)
        self._sizes.append(self._sizes[-1] + len(encoded(entry)))

    def extend(self, start: int, entries: Sequence[Entry]) -> None:
        """Add those of `entries`, which begin at `start`, that are not here yet."""
        for entry in entries[self.end - start :]:
            self.append(entry)

    def joined(self, start: int, tail: Sequence[Entry]) -> Log:
        """Return the entries before `start` with `tail` in place of all that follow."""
        kept = self.entries[: max(start - self.base, 0)]
        return Log(self.base, [*kept, *tail[max(self.base - start, 0) :]])

    def cut(self, index: int) -> None:
        """Forget the entries before `index`."""
        if index > self.base:
            del self.entries[: index - self.base], self._sizes[: index - self.base]
            self.base = index

    def num_bytes(self, start: int) -> int:
        """Return the size of the entries from `start` on."""
        return self._sizes[-1] - self._sizes[max(start - self.base, 0)]

    def views(self, start: int) -> list[Contributors]:
        """Return the contributors of each view from `start` on."""
        return [e.contributors for e in self.tail(start) if isinstance(e, View)]
