"""How a cluster that is started again finds a run that goes on, and is let in.

The first rank of each cluster that trains keeps a door: it says which run this is, and where its
ranks are called. A first rank that starts knocks at all that it reaches, while it waits for
clusters to meet: where a run answers, it joins that, and tells where its own ranks are.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from dsx.comm.links.link import Link
from dsx.comm.links.meeting import address_to_call
from dsx.comm.links.places import Place, Ranks
from dsx.comm.links.requests import Answer, Name
from dsx.comm.links.settings import LinkSettings

DOOR, RECORDS = b"J", b"R"  # how requests begin
_ASK_AGAIN_SECONDS = 1.0


@dataclass(frozen=True)
class GoingOn:
    """A run that goes on: its name, and of who trains, by id, where their ranks are; those are
    known to the first rank alone.
    """  # fmt: skip

    session: str
    clusters: dict[int, Ranks]


class Door:
    """Of a first rank whose cluster trains; answers in the link's thread."""

    def __init__(
        self,
        link: Link,
        session: str,
        hello: Mapping[str, Any],
        own: Ranks,
        members: Callable[[], Sequence[int]],
        come: Callable[[int, Ranks], object],
    ) -> None:
        """`hello` is what clusters compare when they meet. `come` is told of ranks to expect."""
        self._told = {"session": session, "hello": dict(hello), "places": own.places}
        self._link, self._members, self._come = link, members, come
        self._num_ranks = len(own.places)
        link.serve(self._serve, DOOR)

    def _serve(self, asker: Name, body: bytes, answer: Answer) -> None:
        try:
            verb, *operands = json.loads(body[1:])
            if verb == "run":
                answer(json.dumps({**self._told, "members": [*self._members()]}).encode())
                return
            if verb != "come":
                raise ValueError(f"verb {verb!r:.40}")
            ranks = Ranks.of(operands[0])
            if len(ranks.places) != self._num_ranks:
                raise ValueError(
                    f"cluster {asker[0]} has {len(ranks.places)} ranks, and each one of this run "
                    f"has {self._num_ranks}; start it with {self._num_ranks}"
                )
        except (ValueError, TypeError, KeyError, IndexError) as error:
            answer(json.dumps({"error": f"a request that cannot be done: {error}"}).encode())
            return

        def let_in() -> None:
            self._come(asker[0], ranks)
            self._link.soon(lambda: answer(b"{}"))  # sockets are of the link's thread

        threading.Thread(target=let_in, name="dsx-door", daemon=True).start()


class Knock:
    """Of a first rank that starts: asks whoever it reaches whether a run goes on."""

    def __init__(self, link: Link, settings: LinkSettings) -> None:
        self._link, self._own = link, link.cluster_id
        addresses = {m: settings.address_of(m) for m in range(len(settings.members))}
        self._others = [m for m in addresses if m != self._own]
        self._asked: dict[int, Future[bytes]] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._ask_at: dict[int, float] = {}
        for other in self._others:
            address = address_to_call(self._own, other, addresses)
            if address is not None:
                link.expect(other, 0, address)

    def is_decided(self, other: int) -> bool:
        """Look; whether a run is found, or a cluster has said that it knows of none."""
        return self.look() is not None or other in self._ask_at

    def look(self) -> dict[int, dict[str, Any]] | None:
        """Return what all that train have answered, by cluster; None while no run is known."""
        now = time.monotonic()
        for other in self._others:
            asked = self._asked.get(other)
            if asked is None:
                is_due = now >= self._ask_at.get(other, 0.0)
                if is_due and self._link.process_at((other, 0)) is not None:
                    self._asked[other] = self._link.ask((other, 0), DOOR + b'["run"]')
            elif asked.done():
                del self._asked[other]
                self._ask_at[other] = now + _ASK_AGAIN_SECONDS
                told = _answer(asked)
                if "session" in told:
                    self._answers[other] = told
        found = {m: told for m, told in self._answers.items() if m in told["members"]}
        for told in found.values():
            if all(m in found for m in told["members"] if m != self._own):
                return {m: found[m] for m in told["members"] if m != self._own}
        return None


def going_on_of(found: Mapping[int, Mapping[str, Any]]) -> GoingOn:
    """Return the run whose clusters have answered so."""
    clusters = {id: Ranks.of(told["places"]) for id, told in sorted(found.items())}
    return GoingOn(found[min(found)]["session"], clusters)


def enter(link: Link, clusters: Sequence[int], own: Ranks, seconds: float) -> None:
    """Tell the doors of all clusters where this one's ranks are; RuntimeError if one is silent."""
    body = DOOR + json.dumps(["come", own.places]).encode()
    asked = [link.ask((cluster, 0), body) for cluster in clusters]
    for cluster, answer in zip(clusters, asked, strict=True):
        told = json.loads(answer.result(seconds))
        if "error" in told:
            raise RuntimeError(f"cluster {cluster}: {told['error']}")


def meet_rank(link: Link, cluster: int, place: Place, own_address: str | None) -> None:
    """Expect the rank of this one's number of another cluster; either calls, by their ids."""
    theirs, slot, process = place
    addresses = {cluster: theirs, link.cluster_id: own_address}
    address = address_to_call(link.cluster_id, cluster, addresses)
    link.expect(cluster, link.rank, address, process, slot)


def packed_records(records: Sequence[Any]) -> bytes:
    """Return what a rank has compared with others, as a message."""
    return zlib.compress(json.dumps(records).encode())


def unpacked_records(message: bytes) -> list[Any]:
    """Return what `packed_records` has packed."""
    return json.loads(zlib.decompress(message))


def _answer(asked: Future[bytes]) -> dict[str, Any]:
    try:
        told = json.loads(asked.result(0))
    except Exception:  # noqa: BLE001 - it has gone: another one may come
        return {}
    return told if isinstance(told, dict) else {}
