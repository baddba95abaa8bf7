"""What the applied log says. Immutable, so a copy that was sent cannot change under way."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dsx.comm.membership.bounds import LANES, SAID_BYTES, Digest, Key, Lane, Value
from dsx.comm.membership.codec import encode_value
from dsx.comm.membership.entries import (
    Commit,
    Contributors,
    End,
    Entry,
    Join,
    Joiner,
    Said,
    View,
    encoded,
    has_process,
)
from dsx.core.membership import Member, Membership


class LogContradicted(Exception):
    """An entry that cannot stand where it does; whoever is told it stops, and says so."""


@dataclass(frozen=True)
class Remembered:
    """What was said under a key, by whom, and up to which entry it is remembered; 0 for good."""

    value: Value
    by: int
    until: int = 0


@dataclass(frozen=True)
class State:
    """Equal in all clusters at equal `index`, the number of entries applied."""

    index: int = 0
    epoch: int = 0
    contributors: Contributors = ()
    joiners: tuple[Joiner, ...] = ()
    next_numbers: dict[Lane, int] = field(default_factory=dict[str, int])
    said: dict[Key, Remembered] = field(default_factory=dict[str, Remembered])
    committed: int = 0  # entries up to and with the last commit
    forced_at: int = 0  # the epoch of the last view that was forced
    is_ended: bool = False
    digest: Digest = ""  # of all entries so far

    def next_number(self, lane: str) -> int:
        """Return the number of the transfer that the lane commits next; they count from 0."""
        return self.next_numbers.get(lane, 0)

    def has(self, id: int, incarnation: int) -> bool:
        """Return whether that process is a contributor."""
        return has_process(self.contributors, id, incarnation)

    @property
    def membership(self) -> Membership:
        """The contributors, as buffers and means are made from them."""
        return Membership(self.epoch, tuple(Member(c.id, c.weight) for c in self.contributors))

    def after(self, entry: Entry) -> State:
        """Return the state one entry later; LogContradicted if the entry cannot follow."""
        if self.is_ended:
            raise LogContradicted(f"{entry} at {self.index} follows the end of the run")
        changes = self._changes(entry)
        chained = hashlib.sha256(self.digest.encode() + encoded(entry)).hexdigest()[:32]
        return replace(self, index=self.index + 1, digest=chained, **changes)

    def _changes(self, entry: Entry) -> Mapping[str, Any]:
        if isinstance(entry, Said):
            return {"said": self._with(entry)}
        if isinstance(entry, Join):
            others = [j for j in self.joiners if j.id != entry.joiner.id]
            return {"joiners": tuple(sorted([*others, entry.joiner], key=lambda j: j.id))}
        if isinstance(entry, View):
            self._require(entry, "epoch", entry.epoch, self.epoch + 1)
            of_view = {"contributors": entry.contributors, "joiners": entry.joiners}
            forced_at = entry.epoch if entry.is_forced else self.forced_at
            return {"epoch": entry.epoch, "forced_at": forced_at, **of_view}
        self._require(entry, "epoch", entry.epoch, self.epoch)  # S6: none of an older view
        if isinstance(entry, End):
            return {"is_ended": True}
        assert isinstance(entry, Commit)
        self._require(entry, "number", entry.number, self.next_number(entry.lane))
        numbers = {**self.next_numbers, entry.lane: entry.number + 1}
        return {"next_numbers": numbers, "committed": self.index + 1}

    def _require(self, entry: Entry, what: str, found: int, due: int) -> None:
        if found != due:
            raise LogContradicted(f"{entry} at {self.index} has {what} {found}; {due} is due")

    def recalls(self, key: str) -> bool:
        """Return whether a key has been said and is not forgotten yet."""
        known = self.said.get(key)
        return known is not None and not 0 < known.until <= self.index

    def _with(self, entry: Said) -> dict[str, Remembered]:
        if self.recalls(entry.key):
            return self.said
        until = self.index + 1 + entry.lasts if entry.lasts else 0
        kept = {key: known for key, known in self.said.items() if self.recalls(key)}
        return {**kept, entry.key: Remembered(entry.value, entry.by, until)}

    def has_room_for(self, key: str, value: str) -> bool:
        """Return whether that may still be said: a copy of the state has to fit a message (P6)."""
        known = {k: v for k, v in self.said.items() if self.recalls(k)}
        with_it = known | {key: Remembered(value, 0)}
        return len(encode_value(dict[Key, Remembered], with_it)) <= SAID_BYTES

    def has_room_for_lane(self, lane: str) -> bool:
        """Return whether a lane is known, or may be added."""
        return lane in self.next_numbers or len(self.next_numbers) < LANES
