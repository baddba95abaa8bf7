"""Messages of one lane to the same rank in every other cluster: what a gloo group offers.

A lane is a name that both ends have: a transport, a rank, a fragment. The code above does not know
which of the two it has, and so the bytes that are averaged are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as WaitedTooLong
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from dsx.comm.links.frames import lane_of
from dsx.comm.links.link import Link
from dsx.core.membership import Seat


class LinkWork:
    """A message under way."""

    def __init__(self, ended: Future[None]) -> None:
        self._ended = ended

    @property
    def has_failed(self) -> bool:
        """Whether it is over and not there: the peer has gone, or has closed the lane."""
        return self._ended.done() and (
            self._ended.cancelled() or self._ended.exception() is not None
        )

    def wait(self, timeout: timedelta) -> None:
        """Block until it is there; RuntimeError says why it will not be."""
        try:
            self._ended.result(timeout.total_seconds())
        except (WaitedTooLong, CancelledError):
            raise RuntimeError("nothing has come") from None
        except Exception as error:
            raise RuntimeError(str(error)) from None


class LinkGroup:
    """The peers of one rank on one lane; peers are given by position in the membership."""

    def __init__(self, link: Link, name: str, seat: Seat) -> None:
        self._link, self._seat = link, seat
        self.lane = lane_of(name)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> LinkWork:
        """Post a tensor, contiguous and on the host; it must stay until it is there."""
        return LinkWork(self._link.send(self._name(peer), self.lane, tag, _bytes(tensors)))

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> LinkWork:
        """Post a place for a tensor."""
        return LinkWork(self._link.receive(self._name(peer), self.lane, tag, _bytes(tensors)))

    def close(self) -> Future[None]:
        """End what is under way, and tell the peers; done once no tensor is read any more."""
        return self._link.close_lane(self.lane)

    def _name(self, peer: int) -> tuple[int, int]:
        return self._seat.ids[peer], self._link.rank


def _bytes(tensors: Sequence[Tensor]) -> memoryview:
    (tensor,) = tensors
    bytes_of_it: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(bytes_of_it)
