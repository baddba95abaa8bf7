"""The memberships as each rank of a cluster hears of them: the first one has them from its clerk.

It puts each into the cluster's own store, under its number; the others wait there, and note there
whom they have lost.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from dsx.comm.links.clerk import Told
from dsx.comm.links.link import Link
from dsx.core.leaving import Reason
from dsx.core.membership import Member, Membership
from dsx.core.transport import PeerLost, PeerPreempted

_LOOK_SECONDS = 0.25  # between two looks at what other ranks have noted


class Board:
    """What the first rank's clerk has told, for this process and, through `store`, for the others.

    `store` is the cluster's; None where it has one rank.
    """

    def __init__(self, store: dist.Store | None, clusters: Sequence[int], own: int) -> None:
        self._store = store
        self._others = [id for id in clusters if id != own]
        self._readers: list[queue.Queue[Told]] = []
        self._all: list[Told] = []
        self._lock = threading.Lock()
        self._lost: dict[int, str] = {}
        self._look_at = 0.0

    def tell(self, told: Told) -> None:
        """Put up a membership, or why there will be none."""
        with self._lock:
            self._all.append(told)
            for reader in self._readers:
                reader.put(told)
            if self._store is not None:
                self._store.set(f"view/{len(self._all)}", packed(told))

    def reader(self) -> queue.Queue[Told]:
        """Return what gets all that is told, from the beginning on."""
        with self._lock:
            made: queue.Queue[Told] = queue.Queue()
            for told in self._all:
                made.put(told)
            self._readers.append(made)
            return made

    def note(self, cluster: int, why: str) -> None:
        """Note that this rank has lost its connection to a cluster."""
        self._lost[cluster] = why

    def lost(self) -> Mapping[int, str]:
        """Return the clusters that ranks of this one have lost."""
        if self._store is not None and time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            for cluster in self._others:
                if cluster not in self._lost and self._store.check([f"lost/{cluster}"]):
                    self._lost[cluster] = self._store.get(f"lost/{cluster}").decode()
        return self._lost


class FirstRankViews:
    """Of the rank whose clerk it is."""

    def __init__(self, board: Board, link: Link) -> None:
        self._board, self._link = board, link
        self._told = board.reader()

    def next(self, epoch: int, seconds: float) -> Membership | None:
        """Return the newest membership, if it is later; PeerLost says why there is none."""
        found: Membership | None = None
        try:
            while True:
                told = self._told.get(timeout=0.0 if found is not None else seconds)
                if isinstance(told, PeerLost):
                    raise told
                found = told if told.epoch > epoch else found
        except queue.Empty:
            return found

    def report(self, lost: PeerLost) -> None:
        """Note whom this rank has lost for good."""
        _report(lost, self._link, self._board.note)

    def close(self) -> None:
        """Nothing to do: waits are short."""


class OtherRankViews:
    """Of a rank that hears of them over the cluster's store, by a connection of its own."""

    def __init__(self, store: Any, link: Link) -> None:
        self._store, self._link = store, link
        self._number = 0

    def next(self, epoch: int, seconds: float) -> Membership | None:
        """Return the newest membership, if it is later; PeerLost says why there is none."""
        found: Membership | None = None
        while self._is_there(f"view/{self._number + 1}", 0.0 if found else seconds):
            self._number += 1
            told = unpacked(self._store.get(f"view/{self._number}"))
            if isinstance(told, PeerLost):
                raise told
            found = told if told.epoch > epoch else found
        return found

    def report(self, lost: PeerLost) -> None:
        """Note whom this rank has lost for good, for the clerk to find."""

        def note(cluster: int, why: str) -> None:
            threading.Thread(
                target=lambda: self._store.set(f"lost/{cluster}", why), name="dsx-report",
                daemon=True,
            ).start()  # fmt: skip

        _report(lost, self._link, note)

    def close(self) -> None:
        """Nothing to do: waits are short."""

    def _is_there(self, key: str, seconds: float) -> bool:
        """Look, and look again after so long; the store's own waits print what they miss."""
        try:
            if self._store.check([key]):
                return True
            time.sleep(min(seconds, _LOOK_SECONDS))
            return seconds > 0 and self._store.check([key])
        except RuntimeError as error:
            raise PeerLost(
                "this cluster's store, by which its first rank tells who the members are, does not "
                f"answer: {str(error).splitlines()[0]}"
            ) from error


def _report(lost: PeerLost, link: Link, note: Any) -> None:
    if lost.cluster is not None and (why := link.why_gone((lost.cluster, link.rank))):
        note(lost.cluster, f"rank {link.rank}: {why}")


def packed(told: Told) -> str:
    """Return what is told as a text for the store."""
    if isinstance(told, Membership):
        members = [[member.id, member.weight] for member in told.members]
        others = {"everyone": told.everyone, "left": told.left}
        return json.dumps({"epoch": told.epoch, "members": members, **others})
    of_end = [asdict(told.reason), told.gone] if isinstance(told, PeerPreempted) else None
    return json.dumps({"why": str(told), "cluster": told.cluster, "end": of_end})


def unpacked(text: bytes) -> Told:
    """Return what `packed` has made a text."""
    told = json.loads(text)
    if "epoch" in told:
        members = tuple(Member(id, weight) for id, weight in told["members"])
        return Membership(told["epoch"], members, tuple(told["everyone"]), tuple(told["left"]))
    error = PeerLost(told["why"])
    if told["end"] is not None:
        reason, gone = told["end"]
        error = PeerPreempted(told["why"])
        error.reason, error.gone = Reason(**reason), tuple(gone)
    error.cluster = told["cluster"]
    return error
