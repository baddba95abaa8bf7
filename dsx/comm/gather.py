"""Small values that the ranks of one number tell each other over their own connections.

JSON, over the group of the launch handshakes: no store is asked, and none needs to live on once the
clusters have met. The n-th gather of one is the n-th of all; its tag is above those of the
launches, which count from 1, and what it is called goes along, so that clusters that do different
things are told so.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from dsx.comm.farewell import Farewells
from dsx.comm.point_to_point import PointToPoint
from dsx.core.membership import Seat
from dsx.core.transport import PeerLost

_FIRST_TAG = 1 << 30


class Gathers:
    """What this rank and its peers tell each other, one value after another."""

    def __init__(
        self,
        group: Any,
        seat: Seat,
        deadline: float,
        farewells: Farewells | None,
        first_tag: int = _FIRST_TAG,
        setting: str = "clusters.deadline_seconds",
    ) -> None:
        """Two of them share a group only if their tags, from `first_tag` on, are far apart.

        `setting` is where the deadline comes from.
        """
        self._setting = setting
        self._group = group
        self._seat = seat
        self._deadline_seconds = deadline
        self._farewells = farewells
        self._first_tag = first_tag
        self._count = 0

    def close(self) -> None:
        """Let go of the connections."""
        self._group = None

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Return the value of each member, by position; PeerLost names who does not tell."""
        self._count += 1
        seat, own = self._seat, json.dumps([what, value]).encode()
        lengths = {peer: torch.zeros(1, dtype=torch.int64) for peer in seat.others}
        messages = self._messages(what)
        for peer, length in lengths.items():
            messages.receive(length, peer)
            messages.send(torch.tensor([len(own)]), peer)
        messages.wait()
        texts = {p: torch.empty(int(n), dtype=torch.uint8) for p, n in lengths.items()}
        messages = self._messages(what)
        for peer, text in texts.items():
            messages.receive(text, peer)
            messages.send(torch.frombuffer(bytearray(own), dtype=torch.uint8), peer)
        messages.wait()
        values: list[Any] = [value] * seat.num_clusters
        for peer, text in texts.items():
            theirs, values[peer] = json.loads(text.numpy().tobytes())
            if theirs != what:
                raise PeerLost(
                    f"{what}, but cluster {seat.ids[peer]} is at {theirs}: the clusters have lost "
                    "step; let all of them call the same, in the same order"
                )
        return values

    def _messages(self, what: str) -> PointToPoint:
        tag = self._first_tag + self._count
        deadline = self._deadline_seconds
        farewells, setting = self._farewells, self._setting
        return PointToPoint([self._group], self._seat, what, deadline, tag, farewells, setting)
