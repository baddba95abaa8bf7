"""A cluster as the log sees it: attempts at transfers, copies for joiners, following commits.

A small model of what drives a participant, so that its invariants are tested with results that
are held, thrown away, fetched and chained. A contribution is made once per transfer and kept until
the commit. `training` is what it trains: combine(lane, n, [(id, weight, bytes)]) -> bytes,
apply(lane, n, result), snapshot() -> {lane: bytes}, load({lane: bytes}).
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from dsx.comm.membership.actions import Applied, Copy, Dropped, Send, Stopped
from dsx.comm.membership.codec import MessageRefused
from dsx.comm.membership.entries import Commit, Contributor, Join, View
from dsx.comm.membership.messages import decode, encode
from dsx.comm.membership.participant import Participant
from dsx.comm.membership.state import State

ASK = 5  # ticks until what has not come is asked for again
STALL = 40  # ticks without progress after which a joiner begins anew
NUM_SLICES = 4
KEPT_RESULTS = 16  # per lane, for those who follow; while one copies, MOST_RESULTS
MOST_RESULTS = 500


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass
class Attempt:
    n: int
    epoch: int
    members: dict[int, Contributor]
    parts: dict[int, bytes] = field(default_factory=dict)
    age: int = 0


@dataclass
class CopySoFar:
    index: int  # of the log that it belongs to
    request: int
    tables: dict[int, Any] = field(default_factory=dict)
    table: dict[str, list[str]] | None = None
    slices: dict[tuple[str, int], bytes] = field(default_factory=dict)


@dataclass
class Missing:
    """A commit whose result was made without this cluster."""

    lane: str
    n: int
    digest: str
    index: int
    result: bytes | None = None
    is_asked: bool = False


class Cluster:
    """`out` holds what it sends: (peer, None, a log message's bytes) or (peer, header, data)."""

    def __init__(self, participant: Participant, lanes: list[str], training: Any) -> None:
        self.log, self.lanes, self.training = participant, lanes, training
        self.me: int = participant._replica.me.id
        self.out: list[tuple[int, list[Any] | None, bytes]] = []
        self.attempts: dict[str, Attempt] = {}
        self.kept: dict[str, tuple[int, bytes]] = {}  # the contribution to transfer n
        self.held: dict[str, tuple[int, int, str, bytes]] = {}  # n, epoch, digest, result
        self.early: dict[tuple[int, str], tuple[int, int, bytes]] = {}  # epoch, n, data
        self.recent: dict[str, deque[Any]] = {x: deque() for x in lanes}
        self.snapshots: dict[int, Any] = {}  # joiner: index, table, slices
        self.missing: deque[Missing] = deque()
        self.copy: CopySoFar | None = None
        self.is_synced = True
        self.idle = self.turn = self.request = 0
        self.index = 0  # entries whose effects have been taken up here

    # events

    def up(self, peer: int, incarnation: int) -> None:
        self.log.up(peer, incarnation)
        for lane, attempt in self.attempts.items():
            if peer in attempt.members and peer not in attempt.parts:
                self.send(peer, ["ask", lane, attempt.n, attempt.epoch])
        self.drain()

    def down(self, peer: int) -> None:
        self.log.down(peer)
        self.drain()

    def receive(
        self, peer: int, incarnation: int, header: list[Any] | None, data: bytes = b""
    ) -> None:
        if self.log.stopped:
            return
        if header is None:
            self.log.receive(peer, incarnation, decode(data))
        elif self.log.links.get(peer) == incarnation:
            getattr(self, f"_on_{header[0]}")(peer, data, *header[1:])
        self.drain()

    def tick(self) -> None:
        if self.log.stopped:
            return
        self.log.tick()
        for lane, attempt in self.attempts.items():
            attempt.age += 1
            if attempt.age % ASK == 0:
                for peer in attempt.members.keys() - attempt.parts.keys():
                    self.send(peer, ["ask", lane, attempt.n, attempt.epoch])
        if not self.is_synced or self.missing:
            self.idle += 1
            if self.idle > STALL and self.log.request:
                self.idle = 0
                self.log.ask_again()
            elif self.idle % ASK == 0:
                self._fetch()
        self.drain()

    # the training side

    def due(self, lane: str) -> int | None:
        """The number of the transfer that a lane's next contribution is for, if it may come."""
        if not self.is_whole or lane in self.kept or self.log.state.is_ended:
            return None
        return self.log.state.next_number(lane)

    @property
    def is_whole(self) -> bool:
        """Whether this is a contributor with all that is committed."""
        may_go_on = self.log.is_contributor and not self.log.stopped
        return may_go_on and self.is_synced and not self.missing

    def offer(self, lane: str, n: int, data: bytes) -> None:
        self.kept[lane] = (n, data)
        self._start()
        self.drain()

    # the log

    def drain(self) -> None:
        while self.log.actions:
            while self.log.actions:
                self._take_up(self.log.actions.popleft())
            self._start()  # only once all that is applied has been taken up: the last view counts

    def _take_up(self, action: Any) -> None:
        if isinstance(action, Send):
            self.out.append((action.peer, None, self._encoded(action)))
        elif isinstance(action, Copy):
            self._begin_copy(action.state, action.request)
        elif isinstance(action, Dropped | Stopped):
            self._abandon()
        else:
            self._follow_entry(action)

    def _encoded(self, action: Send) -> bytes:
        try:
            return encode(action.message)
        except MessageRefused as refused:
            raise AssertionError(f"{self.me} sends what nobody takes: {refused}") from None

    def _follow_entry(self, applied: Applied) -> None:
        self.index, entry = applied.index + 1, applied.entry
        if isinstance(entry, View):
            self.attempts, self.held = {}, {}
            joiners = {joiner.id for joiner in applied.state.joiners}
            self.snapshots = {m: s for m, s in self.snapshots.items() if m in joiners}
        elif isinstance(entry, Join):
            self._keep_snapshot(entry.joiner.id)
        elif isinstance(entry, Commit):
            if applied.is_contributor:
                held = self.held.get(entry.lane, (-1, -1, "nothing", b""))
                due = (entry.number, entry.epoch, entry.digest)
                assert held[:3] == due, f"{self.me} is told to apply {due} and holds {held[:3]}"
                self._apply(entry.lane, entry.number, entry.digest, held[3])
            else:
                missing = Missing(entry.lane, entry.number, entry.digest, applied.index)
                self.missing.append(missing)

    def _apply(self, lane: str, n: int, digest: str, result: bytes) -> None:
        self.training.apply(lane, n, result)
        recent = self.recent[lane]
        recent.append((n, digest, result))
        while len(recent) > (MOST_RESULTS if self.snapshots else KEPT_RESULTS):
            recent.popleft()
        for known in (self.attempts, self.held, self.kept):
            known.pop(lane, None)

    def _abandon(self) -> None:
        self.attempts, self.held, self.kept, self.snapshots = {}, {}, {}, {}
        self.is_synced = False

    # attempts

    def _start(self) -> None:
        """Begin what has been offered, or begin it again under a new view."""
        if not self.is_whole:
            return
        state = self.log.state
        for lane in self.lanes:
            n = state.next_number(lane)
            if lane in self.attempts or self.kept.get(lane, (-1,))[0] != n:
                continue
            attempt = Attempt(n, state.epoch, {c.id: c for c in state.contributors})
            self.attempts[lane] = attempt
            attempt.parts[self.me] = self.kept[lane][1]
            for peer in attempt.members.keys() - {self.me}:
                self.send(peer, ["data", lane, n, state.epoch], attempt.parts[self.me])
                epoch, early_n, data = self.early.get((peer, lane), (0, 0, b""))
                if (epoch, early_n) == (state.epoch, n):
                    attempt.parts[peer] = data
            self._finish(lane, attempt)

    def _finish(self, lane: str, attempt: Attempt) -> None:
        if lane in self.held or attempt.parts.keys() != attempt.members.keys():
            return
        parts = [(m, attempt.members[m].weight, attempt.parts[m]) for m in sorted(attempt.parts)]
        result = self.training.combine(lane, attempt.n, parts)
        self.held[lane] = (attempt.n, attempt.epoch, digest_of(result), result)
        self.log.done(lane, attempt.n, attempt.epoch, self.held[lane][2])

    def _on_data(self, peer: int, data: bytes, lane: str, n: int, epoch: int) -> None:
        attempt = self.attempts.get(lane)
        if attempt and (attempt.n, attempt.epoch) == (n, epoch):
            if peer in attempt.members and peer not in attempt.parts:
                attempt.parts[peer] = data
                self._finish(lane, attempt)
        elif (epoch, n) >= (self.log.state.epoch, self.log.state.next_number(lane)):
            self.early[peer, lane] = (epoch, n, data)

    def _on_ask(self, peer: int, _: bytes, lane: str, n: int, epoch: int) -> None:
        attempt = self.attempts.get(lane)
        if attempt and (attempt.n, attempt.epoch) == (n, epoch):
            self.send(peer, ["data", lane, n, epoch], attempt.parts[self.me])

    # joining

    def _keep_snapshot(self, joiner: int) -> None:
        if joiner == self.me or not self.is_synced or self.missing:
            return
        slices = {}
        for lane, data in self.training.snapshot().items():
            cuts = [len(data) * i // NUM_SLICES for i in range(NUM_SLICES + 1)]
            slices[lane] = [data[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        table = {lane: [digest_of(s) for s in parts] for lane, parts in slices.items()}
        self.snapshots[joiner] = (self.index, table, slices)

    def _begin_copy(self, state: State, request: int) -> None:
        self._abandon()
        self.copy, self.idle, self.index = CopySoFar(state.index, request), 0, state.index
        self.missing.clear()
        self._fetch()

    def _sources(self) -> list[int]:
        links = self.log.links
        return [c.id for c in self.log.state.contributors if links.get(c.id) == c.incarnation]

    def _fetch(self, again: bool = True) -> None:
        """Ask for what is missing next, spread over the contributors, others each time."""
        sources = self._sources()
        self.turn += 1
        if not sources:
            return
        if self.copy and self.copy.table is None:
            for peer in sources:
                self.send(peer, ["want", "table", self.copy.index])
        elif self.copy and self.copy.table is not None:
            wanted = [(x, i) for x, hashes in self.copy.table.items() for i in range(len(hashes))]
            for number, (lane, i) in enumerate(w for w in wanted if w not in self.copy.slices):
                peer = sources[(number + self.turn) % len(sources)]
                self.send(peer, ["want", "slice", self.copy.index, lane, i])
        else:
            for number, missing in enumerate(list(self.missing)[:KEPT_RESULTS]):
                if missing.result is None and (again or not missing.is_asked):
                    missing.is_asked = True
                    peer = sources[(number + self.turn) % len(sources)]
                    self.send(peer, ["want", "result", missing.lane, missing.n])

    def _on_want(self, peer: int, _: bytes, kind: str, *which: Any) -> None:
        snapshot = self.snapshots.get(peer)
        if kind == "result":
            for n, _digest, result in self.recent[which[0]]:
                if n == which[1]:
                    self.send(peer, ["result", *which], result)
        elif snapshot and snapshot[0] == which[0]:
            if kind == "table":
                self.send(peer, ["table", which[0], snapshot[1]])
            else:
                _, lane, i = which
                self.send(peer, ["slice", *which], snapshot[2][lane][i])

    def _on_table(self, peer: int, _: bytes, index: int, table: Any) -> None:
        copy = self.copy
        if copy is None or copy.index != index or copy.table is not None:
            return
        if peer not in self._sources():
            return
        copy.tables[peer] = table
        alike = sum(t == table for t in copy.tables.values())
        if 2 * alike > len(self.log.state.contributors):
            copy.table, self.idle = table, 0
            self._fetch()

    def _on_slice(self, peer: int, data: bytes, index: int, lane: str, i: int) -> None:
        copy = self.copy
        if copy is None or copy.index != index or copy.table is None:
            return
        if digest_of(data) != copy.table[lane][i]:
            return  # asked again, of another
        copy.slices[lane, i], self.idle = data, 0
        if len(copy.slices) == sum(len(hashes) for hashes in copy.table.values()):
            slices = copy.slices
            self.training.load(
                {x: b"".join(slices[x, j] for j in range(len(h))) for x, h in copy.table.items()}
            )
            self.is_synced, self.copy, self.request = True, None, copy.request
            self._follow()

    def _on_result(self, peer: int, data: bytes, lane: str, n: int) -> None:
        for missing in self.missing:
            if (missing.lane, missing.n, missing.result) == (lane, n, None):
                if missing.digest == digest_of(data):
                    missing.result = data
                    self._follow()
                return

    def _follow(self) -> None:
        """Apply the results that are here, in the log's order."""
        if not self.is_synced:
            return
        while self.missing and self.missing[0].result is not None:
            first = self.missing.popleft()
            self._apply(first.lane, first.n, first.digest, first.result)
            self.idle = 0
        if self.missing:
            self._fetch(again=False)
        if self.log.request:
            self.log.ready(self.request, self.missing[0].index if self.missing else self.index)
        else:
            self._start()

    def send(self, peer: int, header: list[Any], data: bytes = b"") -> None:
        self.out.append((peer, header, data))
