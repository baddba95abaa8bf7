"""Before each transfer the clusters tell each other what it is, over a group all fragments share.

The n-th launch of one cluster must be the n-th of all. Clusters that chose different fragments are
so told at once, rather than waiting for each other on different groups. The parity check's header,
which most exchanges begin with, travels in that message.
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
        self._launches = 0

    def close(self) -> None:
        """Let go of the connections."""
        self._group = None

    def take_number(self) -> int:
        """Return the number of a launch; called in launch order."""
        self._launches += 1
        return self._launches

    def agree(self, what: Submission, number: int, header: ExchangeRound | None) -> int:
        """Send every peer what is about to be averaged; PeerLost if one has something else.

        `header` is a round of three int64 that goes along. Returns the bytes sent. Costs a round:
        two one-way latencies, on the fragment's own thread.
        """
        label = what.on(self._stage)
        messages = PointToPoint(
            [self._group], self._seat, label, self._deadline_seconds, number, self._farewells
        )
        own = torch.tensor([what.fragment, what.step, what.purpose, 0, 0, 0])
        theirs = {peer: torch.empty_like(own) for peer in self._seat.others}
        if header is not None and self._seat.others:
            (own[3:],) = header.outgoing[self._seat.others[0]]
        for peer in self._seat.others:
            messages.receive(theirs[peer], peer)
            messages.send(own, peer)
        messages.wait()
        for peer, other in theirs.items():
            if not torch.equal(own[:3], other[:3]):
                other_one = Submission(*other[:3].tolist()).on(self._stage)
                raise PeerLost(
                    f"{what.on(self._stage)}, but cluster {self._seat.ids[peer]} has "
                    f"{other_one}: the clusters have lost step; give all of them the same "
                    "configuration and the same number of batches"
                )
            if header is not None:
                (theirs_of_header,) = header.incoming[peer]
                theirs_of_header.copy_(other[3:])
        return own.numel() * own.element_size() * len(self._seat.others)
