"""What one cluster holds goes to others along a chain of clusters, in pieces.

Each one passes a piece on as soon as it has it, so however many clusters there are, the giver's
line carries everything once, and all take little longer than one does. Several pieces are
on their way at a time, dealt out to the connections; memory is the tensor's own, on an accelerator
that and a few pieces on the host.

There is no deadline for the whole: a wait fails when no piece has moved for the deadline, however
long all of them take, and says which piece it is, between whom, and how far they have come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from dsx.comm.farewell import Farewells
from dsx.comm.point_to_point import reason_of
from dsx.core.membership import Seat
from dsx.core.transport import PeerLost
from dsx.core.units import format_bytes
from dsx.core.waits import waiting_for

LEAST_PIECE_BYTES = 256 << 10
# a connection sends at most one message's size in a round trip: gloo sets its buffer to that
MOST_PIECE_BYTES = 16 << 20
_PIECES = 64  # of a tensor between those sizes
_AHEAD = 4  # receives that are posted, and sends that are not waited for
_TAG = 1  # exchanges have 0


def cut(numel: int) -> list[tuple[int, int]]:
    """Return where each piece of a fp32 vector starts and stops; by its length alone."""
    size = min(max(4 * numel // _PIECES, LEAST_PIECE_BYTES), MOST_PIECE_BYTES) // 4
    return [(start, min(start + size, numel)) for start in range(0, numel, size)]


@dataclass(frozen=True)
class Way:
    """Whom a tensor goes along, places in the membership.

    `moved` hears of each piece that has come or gone: its bytes, 0 of one that is passed on.
    """

    chain: Sequence[int]
    moved: Callable[[int], None]


class Spread:
    """One tensor's way along a chain: this cluster's part in it.

    `groups` are connections to every peer.
    """

    def __init__(
        self,
        groups: Sequence[Any],
        seat: Seat,
        label: str,
        deadline_seconds: float,
        farewells: Farewells | None,
        way: Way,
    ) -> None:
        self._groups = groups
        self._seat = seat
        self._label = label
        self._deadline_seconds = deadline_seconds
        self._farewells = farewells
        place = way.chain.index(seat.position)
        self._giver = way.chain[place - 1] if place else None
        self._taker = way.chain[place + 1] if place + 1 < len(way.chain) else None
        self._moved = way.moved
        self._cuts: list[tuple[int, int]] = []
        self._done = self._total = 0

    def run(self, tensor: Tensor) -> int:
        """Fill `tensor`, fp32 `[n]`, in place, and pass it on; return the bytes sent."""
        cuts = self._cuts = cut(tensor.numel())
        self._total = 4 * tensor.numel()
        pieces = _Pieces(tensor, cuts)
        receives: deque[Any] = deque()
        sends: deque[tuple[int, Any]] = deque()
        posted = 0
        for number in range(len(cuts)):
            while self._giver is not None and posted < min(number + _AHEAD, len(cuts)):
                group = self._groups[posted % len(self._groups)]
                into = pieces.on_host(posted)
                receives.append(self._post(posted, group.recv, into, self._giver))
                posted += 1
            if self._giver is None:
                pieces.stage(number)
            else:
                self._wait(number, receives.popleft(), self._giver)
                pieces.deliver(number)
            if self._taker is not None:
                group = self._groups[number % len(self._groups)]
                sends.append(
                    (number, self._post(number, group.send, pieces.on_host(number), self._taker))
                )
                if len(sends) == _AHEAD:
                    self._wait(*sends.popleft(), self._taker)
        for number, work in sends:
            assert self._taker is not None
            self._wait(number, work, self._taker)
        return self._total if self._taker is not None else 0

    def _post(self, number: int, operation: Callable[..., Any], piece: Tensor, peer: int) -> Any:
        try:
            return operation([piece], peer, _TAG)
        except RuntimeError as error:  # gloo says at once that the connection is gone
            raise self._lost(number, peer, error, 0.0) from None

    def _wait(self, number: int, work: Any, peer: int) -> None:
        """Wait for one piece; since the one before it something has moved."""
        since = time.monotonic()
        what = lambda: self._describe(number, peer)  # noqa: E731
        try:
            with waiting_for(what, self._deadline_seconds):
                work.wait(timedelta(seconds=self._deadline_seconds))
        except RuntimeError as error:
            raise self._lost(number, peer, error, time.monotonic() - since) from None
        start, stop = self._cuts[number]
        is_passed_on = peer == self._taker and self._giver is not None  # has been counted
        num_bytes = 0 if is_passed_on else 4 * (stop - start)
        self._done += num_bytes
        self._moved(num_bytes)

    def _describe(self, number: int, peer: int) -> str:
        ids, own = self._seat.ids, self._seat.cluster_id
        ends = (ids[peer], own) if peer == self._giver else (own, ids[peer])
        return (
            f"{self._label}: piece {number + 1} of {len(self._cuts)} from cluster {ends[0]} to "
            f"cluster {ends[1]}, {format_bytes(self._done)} of {format_bytes(self._total)} so far"
        )

    def _lost(self, number: int, peer: int, error: RuntimeError, seconds: float) -> PeerLost:
        gone = self._seat.ids[peer]
        what = f"cluster {gone} closed its connection"
        if seconds >= self._deadline_seconds:
            what = f"nothing has moved for {self._deadline_seconds:g} s (clusters.deadline_seconds)"
        lost, told_by = (
            (gone, gone) if self._farewells is None else self._farewells.first_lost(peer)
        )
        if lost != gone:
            by = "another rank here" if told_by == self._seat.cluster_id else f"cluster {told_by}"
            what = f"cluster {lost} was lost first, says {by}, and {what}"
        return PeerLost(f"{self._describe(number, peer)}: {what} ({reason_of(error)})")


class _Pieces:
    """The pieces of a tensor as connections take them: where they lie, or copies on the host.

    A copy's place is free again once `_AHEAD` later ones have been sent.
    """

    def __init__(self, tensor: Tensor, cuts: Sequence[tuple[int, int]]) -> None:
        self._tensor = tensor
        self._cuts = cuts
        self._places: Tensor | None = None
        if tensor.device.type != "cpu" and cuts:
            longest = cuts[0][1] - cuts[0][0]
            count = min(2 * _AHEAD, len(cuts))
            self._places = torch.empty(count, longest, pin_memory=tensor.is_cuda)

    def on_host(self, number: int) -> Tensor:
        """Return where a piece is on the host."""
        start, stop = self._cuts[number]
        if self._places is None:
            return self._tensor[start:stop]
        return self._places[number % len(self._places)][: stop - start]

    def stage(self, number: int) -> None:
        """Copy a piece to the host, where it does not lie there."""
        if self._places is not None:
            self.on_host(number).copy_(self._tensor[slice(*self._cuts[number])])

    def deliver(self, number: int) -> None:
        """Copy a piece that has come to where it belongs."""
        if self._places is not None:
            self._tensor[slice(*self._cuts[number])].copy_(self.on_host(number))
