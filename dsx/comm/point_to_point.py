"""The sends and receives of one phase over gloo groups, and how a lost peer is told."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from dsx.comm.farewell import Farewells
from dsx.comm.multistream import pieces
from dsx.core.membership import Seat
from dsx.core.transport import PeerLost, PeerPreempted
from dsx.core.waits import waiting_for


class PointToPoint:
    """Sends and receives of one phase, striped over `groups`; their failures become `PeerLost`.

    Peers are given by position in the membership. `farewells` knows who was lost first.
    """

    def __init__(
        self,
        groups: Sequence[Any],
        seat: Seat,
        label: str,
        deadline_seconds: float,
        tag: int = 0,
        farewells: Farewells | None = None,
        setting: str = "clusters.deadline_seconds",
    ) -> None:
        self._setting = setting
        self._groups = groups
        self._seat = seat
        self._tag = tag
        self._label = label
        self._until = time.monotonic() + deadline_seconds
        self._deadline_seconds = deadline_seconds
        self._farewells = farewells
        self._posted: list[tuple[int, Any]] = []
        self._at = 0  # of those posted: the one that is waited for

    def send(self, tensor: Tensor, peer: int) -> None:
        """Post a send; nothing for an empty tensor."""
        for group, piece in self._striped(tensor):
            self._post(group.send, piece, peer)

    def receive(self, tensor: Tensor, peer: int) -> None:
        """Post a receive into `tensor`, in place; nothing for an empty one."""
        for group, piece in self._striped(tensor):
            self._post(group.recv, piece, peer)

    def wait(self) -> None:
        """Wait for all that was posted, until the phase's deadline."""
        with waiting_for(self._say, self._deadline_seconds):
            for place, (peer, work) in enumerate(self._posted):
                self._at = place
                try:
                    lost_seconds = work.wait(self._left())
                except RuntimeError as error:
                    raise self._lost(peer, error) from None
                if isinstance(lost_seconds, float):  # over links; gloo returns True
                    self._until += lost_seconds

    def _left(self) -> timedelta:
        """Return the time up to the deadline in whole milliseconds, up: gloo waits no part of one.

        So whoever waits in vain comes back behind the deadline, and is told so.
        """
        left = max(self._until - time.monotonic(), 0.0)
        return timedelta(milliseconds=math.floor(1000 * left) + 1)

    def _say(self) -> str:
        """Return what is waited for now."""
        if not self._posted:
            return self._label
        return f"{self._label}, cluster {self._seat.ids[self._posted[self._at][0]]}"

    def _striped(self, tensor: Tensor) -> Iterator[tuple[Any, Tensor]]:
        parts = pieces(tensor, len(self._groups)) if tensor.numel() else []
        return zip(self._groups, parts, strict=False)

    def _post(self, operation: Callable[..., Any], tensor: Tensor, peer: int) -> None:
        try:
            self._posted.append((peer, operation([tensor], peer, self._tag)))
        except RuntimeError as error:  # gloo says at once that the connection is gone
            raise self._lost(peer, error) from None

    def _lost(self, peer: int, error: RuntimeError) -> PeerLost:
        what = "closed its connection"
        if time.monotonic() >= self._until:
            what = f"did not answer within {self._deadline_seconds:g} s ({self._setting})"
        gone = self._seat.ids[peer]
        lost, told_by = (
            (gone, gone) if self._farewells is None else self._farewells.first_lost(peer)
        )
        error_told = self._told(gone, lost, told_by, what, error)
        error_told.cluster = lost
        return error_told

    def _told(self, gone: int, lost: int, told_by: int, what: str, error: RuntimeError) -> PeerLost:
        told = None if self._farewells is None else self._farewells.heard_reason()
        if told is not None:
            why = told.sentence
            if not told.is_loss:
                why = f"as cluster {told.cluster} was told to end by {told.name}"
            error_told = PeerPreempted(f"{self._label}: cluster {gone} {what}, {why}")
            error_told.reason = told
            return error_told
        if lost == gone:
            return PeerLost(f"{self._label}: cluster {gone} {what} ({reason_of(error)})")
        by = "another rank here" if told_by == self._seat.cluster_id else f"cluster {told_by}"
        return PeerLost(
            f"{self._label}: cluster {lost} was lost first, says {by}, and cluster {gone} "
            f"{what} after it ({reason_of(error)})"
        )


def reason_of(error: RuntimeError) -> str:
    """Return what gloo, or a link, says of a connection, in few words."""
    text = str(error).splitlines()[0]
    of_gloo = text.partition("] ")[2].partition(". ")[0]
    return f"gloo: {of_gloo}" if of_gloo else text
