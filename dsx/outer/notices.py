"""Notices that travel beside the transfers, and what the ranks of a stage so come to know alike.

A rank's notice goes with the launch handshake of its next transfer to the ranks of its number in
all other clusters (`Submission.notes`). Where that transfer is applied, at one step on all ranks of
the stage in all clusters, the ranks of each cluster tell each other what has come: all so know the
same, from the same step on. Whether there is anything to tell goes along in the collective of
recovery.py, which is there in any case.

A rank may own nothing that is sent: what it has not said by then is told in that collective, too,
and the ranks that send take it along.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dsx.core.engine import ClusterRanks
from dsx.outer.places import Places

MOST_BYTES = 4096  # of one notice


@dataclass(frozen=True, order=True)
class Notice:
    """What one rank tells all: the `number`-th of this rank; `text` is JSON."""

    cluster: int
    rank: int
    number: int
    kind: str
    text: str

    @property
    def payload(self) -> Any:
        """The plain values that were posted."""
        return json.loads(self.text)


class NoticeCarrier:
    """One rank's notices on their way, and those that its stage has agreed on."""

    def __init__(self, ranks: ClusterRanks) -> None:
        self._ranks = ranks
        self.places = Places()
        self._unsaid: list[Notice] = []  # appended to by signal handlers
        self._said: dict[Notice, None] = {}  # under way, in order
        self._heard: dict[Notice, None] = {}  # by the transfer that is being applied
        self._known: set[Notice] = set()  # agreed on in this stage
        self._agreed: list[Notice] = []

    def post(self, notice: Notice) -> None:
        """Have the next launch carry it; only notes it, so it may be called by a signal handler.

        ValueError if it is longer than a handshake should be.
        """
        size = len(_pack([notice]))
        if size > MOST_BYTES:
            raise ValueError(
                f"a notice {notice.kind!r} of {size} bytes: at most {MOST_BYTES} go with a transfer"
            )
        self._unsaid.append(notice)

    def to_say(self, place: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        """Return what a launch takes along, which is said with it; `place` is of places.py."""
        taken = [self._unsaid.pop(0) for _ in range(len(self._unsaid))]
        fresh = [notice for notice in taken if notice not in self._known | self._said.keys()]
        self._said |= dict.fromkeys(fresh)
        return _pack(fresh, place) if fresh or place else b""

    def hear(self, notes: Mapping[int, bytes]) -> bool:
        """Take what came beside a transfer; whether this rank has anything to tell its stage."""
        heard = (notice for text in notes.values() for notice in _unpack(text))
        self._heard = dict.fromkeys(heard)
        return bool(self._heard or self._unsaid)

    def agree(self) -> None:
        """Make what a transfer carried the stage's. Collective over its ranks, if one has any."""
        everyone = self._ranks.gather((list(self._heard), list(self._unsaid)))
        heard = {notice for had, _ in everyone for notice in had} - self._known
        self._agreed += sorted(heard)
        self._known |= heard
        waiting = [notice for _, unsaid in everyone for notice in unsaid]
        on_the_way = self._known | self._said.keys() | set(self._unsaid)
        self._unsaid += [notice for notice in waiting if notice not in on_the_way]

    def take_agreed(self) -> list[Notice]:
        """Return what has been agreed on since the last call, in an order that all share."""
        agreed, self._agreed = self._agreed, []
        return agreed

    def drop(self, is_stale: Callable[[Notice], bool]) -> None:
        """Tell nothing more of what is stale, by whichever rank: it takes effect nowhere.

        On all ranks of all clusters, where a checkpoint has been loaded and nothing launched since.
        """
        for notice in [*self._unsaid]:
            if is_stale(notice):
                self._unsaid.remove(notice)  # one by one: a signal handler may append meanwhile
        self._said = {notice: None for notice in self._said if not is_stale(notice)}
        self._agreed = [notice for notice in self._agreed if not is_stale(notice)]

    def begin_anew(self) -> None:
        """Say again what was under way: a checkpoint has been loaded, whose transfers tell none."""
        self._unsaid[:0] = [notice for notice in self._said if notice not in self._known]
        self._said.clear()


def places_in(notes: Mapping[int, bytes]) -> dict[int, dict[str, Any]]:
    """Return what clusters have told of their places, by id."""
    told = {id: json.loads(text) for id, text in notes.items()}
    return {id: one for id, entries in told.items() for one in entries if isinstance(one, dict)}


def _pack(notices: Iterable[Notice], place: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    entries = [[n.cluster, n.rank, n.number, n.kind, n.text] for n in notices]
    return json.dumps([*entries, place] if place else entries).encode()


def _unpack(text: bytes) -> list[Notice]:
    return [Notice(*fields) for fields in json.loads(text) if isinstance(fields, list)]
