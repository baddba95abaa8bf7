"""The memberships as each rank of a cluster hears of them: the first one has them from its clerk.

It puts each into the cluster's own store, under its number, and clusters that come again between
them; the others look there, by one request each time, and note there whom they do not reach.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from dsx.comm.links.clerk import Told
from dsx.comm.links.link import Link
from dsx.comm.links.places import Ranks
from dsx.comm.views import Waits
from dsx.core.leaving import Reason
from dsx.core.membership import Member, Membership
from dsx.core.transport import PeerLost, PeerPreempted

_LOOK_SECONDS = 0.25  # between two looks at what other ranks have noted
_NOTED = "num_lost"  # how often any of them has


class Board:
    """What the first rank's clerk has told, for this process and, through `store`, for the others.

    `store` is the cluster's; None where it has one rank.
    """

    def __init__(self, store: dist.Store | None, num_ranks: int = 1) -> None:
        self._store, self._num_ranks = store, num_ranks
        self._readers: list[queue.Queue[Told]] = []
        self._all: list[Told] = []
        self._lock = threading.Lock()
        self._num_put = 0  # in the store
        self._lost: dict[int, tuple[int, str]] = {}  # how often it had come by then, and why
        self._look_at, self._num_noted = 0.0, 0
        self._come: dict[int, int] = {}  # how often a cluster has been let in again
        self._process: dict[int, int] = {}  # of its first rank, the last that was

    def tell(self, told: Told) -> None:
        """Put up a membership, whom this cluster waits for, or why there will be none."""
        with self._lock:
            self._all.append(told)
            for reader in self._readers:
                reader.put(told)
            self._put(packed(told))

    def reader(self) -> queue.Queue[Told]:
        """Return what gets all that is told, from the beginning on."""
        with self._lock:
            made: queue.Queue[Told] = queue.Queue()
            for told in self._all:
                made.put(told)
            self._readers.append(made)
            return made

    def let_in(self, cluster: int, ranks: str) -> None:
        """Have the other ranks expect those of a cluster's new processes; the old ones are gone.

        `ranks` says where they are.
        """
        with self._lock:
            self._come[cluster] = self._come.get(cluster, 0) + 1
            self._process[cluster] = Ranks.unpack(ranks).places[0][2]
            self._put(json.dumps({"come": [cluster, self._come[cluster], ranks]}))

    def lost(self) -> Mapping[int, tuple[int, str]]:
        """Return whom other ranks have lost: which process of its first rank that has been let in
        again (0: none was), and why.
        """  # fmt: skip
        with self._lock:
            if self._store is not None and time.monotonic() > self._look_at:
                self._look_at = time.monotonic() + _LOOK_SECONDS
                self._look_who_is_lost(self._store)
            return {
                id: (self._process.get(id, 0), why) for id, (come, why) in self._lost.items()
                if come == self._come.get(id, 0)
            }  # fmt: skip

    def _put(self, told: str) -> None:
        if self._store is not None:
            self._num_put += 1
            self._store.set(f"told/{self._num_put}", told)

    def _look_who_is_lost(self, store: Any) -> None:
        num_noted = store.add(_NOTED, 0)
        if num_noted == self._num_noted:
            return
        self._num_noted, self._lost = num_noted, {}
        for key in (f"lost/{rank}" for rank in range(1, self._num_ranks)):
            if store.check([key]):
                noted: dict[str, tuple[int, str]] = json.loads(store.get(key))
                for id, (come, why) in noted.items():
                    if come >= self._lost.get(int(id), (0, ""))[0]:
                        self._lost[int(id)] = come, why


class _Views:
    """What a rank does with what is told, however it hears of it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.waits = False

    def report(self, lost: PeerLost) -> None:
        """Nothing to do: the clerk, or `next`, looks at the link."""

    def close(self) -> None:
        """Nothing to do: waits are short."""

    def _take(self, told: Told) -> Membership | None:
        """Follow it; return the membership that it is, if it is one."""
        if isinstance(told, PeerLost):
            self._link.hold_nobody()
            raise told
        if isinstance(told, Waits):
            self.waits = bool(told.gone)
            return None
        self._link.hold(told.ids, told.epoch)
        return told


class FirstRankViews(_Views):
    """Of the rank whose clerk it is."""

    def __init__(self, board: Board, link: Link) -> None:
        super().__init__(link)
        self._told = board.reader()

    def next(self, epoch: int, seconds: float) -> Membership | None:
        """Return the newest membership, if it is later; PeerLost says why there is none."""
        found: Membership | None = None
        try:
            while True:
                told = self._take(self._told.get(timeout=0.0 if found is not None else seconds))
                found = told if told is not None and told.epoch > epoch else found
        except queue.Empty:
            return found


class OtherRankViews(_Views):
    """Of a rank that hears of them over the cluster's store, by a connection of its own."""

    def __init__(
        self,
        store: Any,
        link: Link,
        members: Sequence[int] = (),
        expect: Callable[[int, str], object] = lambda m, ranks: None,
    ) -> None:
        """`members`: those of the first membership, as far as they are known. `expect` is told of a
        cluster's new processes, and where they are.
        """
        super().__init__(link)
        self._store, self._expect = store, expect
        self._members = members
        self._noted: dict[str, tuple[int, str]] = {}  # whom this rank does not reach, and why
        self._number = 0
        self._come: dict[int, int] = {}  # how often a cluster has been let in again

    def next(self, epoch: int, seconds: float) -> Membership | None:
        """Return the newest membership, if it is later; PeerLost says why there is none."""
        found: Membership | None = None
        while (text := self._next_text(0.0 if found else seconds)) is not None:
            if text.startswith(b'{"come"'):
                cluster, self._come[cluster], ranks = json.loads(text)["come"]
                self._expect(cluster, ranks)
            elif (told := self._take(unpacked(text))) is not None:
                self._members = told.ids
                found = told if told.epoch > epoch else found
        self._look_who_is_lost()
        return found

    def _look_who_is_lost(self) -> None:
        """Note whom of the members this rank does not reach, for the clerk to find."""
        rank, noted = self._link.rank, dict[str, tuple[int, str]]()
        for cluster in self._members:
            if why := self._link.why_gone((cluster, rank)):
                noted[str(cluster)] = self._come.get(cluster, 0), f"rank {rank}: {why}"
        before = {id: come for id, (come, _) in self._noted.items()}
        if before == {id: come for id, (come, _) in noted.items()}:
            return
        self._noted = noted
        try:
            self._store.set(f"lost/{rank}", json.dumps(noted))
            self._store.add(_NOTED, 1)
        except RuntimeError as error:
            raise _no_store(error) from error

    def _next_text(self, seconds: float) -> bytes | None:
        """Look; None, after a while, if there is nothing. The store's own waits print what they
        miss.
        """  # fmt: skip
        key = f"told/{self._number + 1}"
        try:
            if self._store.check([key]):
                self._number += 1
                return self._store.get(key)
        except RuntimeError as error:
            raise _no_store(error) from error
        time.sleep(min(seconds, _LOOK_SECONDS))
        return None


def _no_store(error: RuntimeError) -> PeerLost:
    return PeerLost(
        "this cluster's store, by which its first rank tells who the members are, does not "
        f"answer: {str(error).splitlines()[0]}"
    )


def packed(told: Told) -> str:
    """Return what is told as a text for the store."""
    if isinstance(told, Membership):
        members = [[member.id, member.weight, member.process] for member in told.members]
        others = {"everyone": told.everyone, "left": told.left}
        return json.dumps({"epoch": told.epoch, "members": members, **others})
    if isinstance(told, Waits):
        return json.dumps({"waits": told.gone})
    of_end = [asdict(told.reason), told.gone] if isinstance(told, PeerPreempted) else None
    return json.dumps({"why": str(told), "cluster": told.cluster, "end": of_end})


def unpacked(text: bytes) -> Told:
    """Return what `packed` has made a text."""
    told = json.loads(text)
    if "epoch" in told:
        members = tuple(Member(*fields) for fields in told["members"])
        return Membership(told["epoch"], members, tuple(told["everyone"]), tuple(told["left"]))
    if "waits" in told:
        return Waits(tuple(told["waits"]))
    error = PeerLost(told["why"])
    if told["end"] is not None:
        reason, gone = told["end"]
        error = PeerPreempted(told["why"])
        error.reason, error.gone = Reason(**reason), tuple(gone)
    error.cluster = told["cluster"]
    return error
