"""Before each transfer the clusters tell each other what it is, over a group all fragments share.

The n-th launch of one cluster must be the n-th of all, counted from the beginning of the run, so
that clusters which resume at different steps meet where they launched the same. Clusters that chose
different fragments are so told at once, rather than waiting for each other on different groups. The
parity check's header, which most exchanges begin with, travels in that message. What a cluster
tells beside a transfer follows as a message of its own, where it has anything to tell.
"""

from __future__ import annotations

from typing import Any

import torch

from dsx.comm.farewell import Farewells
from dsx.comm.point_to_point import PointToPoint
from dsx.core.exchange import ExchangeRound
from dsx.core.membership import Seat
from dsx.core.transport import PeerLost, Submission
from dsx.core.types import Stage

_PURPOSE_BITS = 8  # above them: the bytes of notes that follow


class LaunchHandshake:
    """What is about to be averaged, told to all peers before every transfer, in launch order.

    The number of a launch is the message's tag, so fragments' threads need not take turns.
    """

    def __init__(
        self, group: Any, seat: Seat, deadline: float, stage: Stage, farewells: Farewells
    ) -> None:
        self._group = group
        self._farewells = farewells
        self._stage = stage
        self._seat = seat
        self._deadline_seconds = deadline
        self._others = 0  # that are no launches

    def close(self) -> None:
        """Let go of the connections."""
        self._group = None

    def take_number(self, what: Submission) -> int:
        """Return the tag of its messages: even for launches, else odd, counted in this order."""
        if what.number:
            return 2 * what.number
        self._others += 1
        return 2 * self._others - 1

    def agree(
        self,
        what: Submission,
        number: int,
        header: ExchangeRound | None,
        notes: dict[int, bytes],
    ) -> int:
        """Send every peer what is about to be averaged; PeerLost if one has something else.

        `header` is a round of three int64 that goes along; `notes` are filled in, by cluster's id.
        Returns the bytes sent. Costs a round: two one-way latencies, on the fragment's own thread.
        """
        label = what.on(self._stage)
        messages = self._messages(label, number)
        purpose = what.purpose | len(what.notes) << _PURPOSE_BITS
        own = torch.tensor([what.fragment, what.step, purpose, 0, 0, 0])
        theirs = {peer: torch.empty_like(own) for peer in self._seat.others}
        if header is not None and self._seat.others:
            (own[3:],) = header.outgoing[self._seat.others[0]]
        for peer in self._seat.others:
            messages.receive(theirs[peer], peer)
            messages.send(own, peer)
        messages.wait()
        lengths: dict[int, int] = {}
        for peer, other in theirs.items():
            fragment, step, packed = other[:3].tolist()
            purpose = packed & (1 << _PURPOSE_BITS) - 1
            other_one = Submission(fragment, step, purpose, what.number)  # whose tag it came under
            if other_one != what:
                raise PeerLost(
                    f"{what.on(self._stage)}, but cluster {self._seat.ids[peer]} has "
                    f"{other_one.on(self._stage)}: the clusters have lost step; give all of them "
                    "the same configuration and the same number of batches"
                )
            lengths[peer] = packed >> _PURPOSE_BITS
            if header is not None:
                (theirs_of_header,) = header.incoming[peer]
                theirs_of_header.copy_(other[3:])
        notes |= self._exchange_notes(self._messages(label, number), what.notes, lengths)
        in_bytes = own.numel() * own.element_size() + len(what.notes)
        return in_bytes * len(self._seat.others)

    def _messages(self, label: str, number: int) -> PointToPoint:
        return PointToPoint(
            [self._group], self._seat, label, self._deadline_seconds, number, self._farewells
        )

    def _exchange_notes(
        self, messages: PointToPoint, own: bytes, lengths: dict[int, int]
    ) -> dict[int, bytes]:
        """Send this cluster's notes to all, and return everybody's that has some, by id."""
        buffers = {
            peer: torch.empty(length, dtype=torch.uint8)
            for peer, length in lengths.items()
            if length
        }
        for peer, buffer in buffers.items():
            messages.receive(buffer, peer)
        for peer in self._seat.others if own else ():
            messages.send(torch.frombuffer(bytearray(own), dtype=torch.uint8), peer)
        messages.wait()
        told = {self._seat.ids[peer]: bytes(buffer.tolist()) for peer, buffer in buffers.items()}
        return told | ({self._seat.cluster_id: own} if own else {})
