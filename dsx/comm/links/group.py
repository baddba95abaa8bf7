"""Messages of one lane to the same rank in every other cluster: what a gloo group offers.

A lane is a name that both ends have: a transport, a rank, a fragment. The code above does not know
which of the two it has, and so the bytes that are averaged are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as WaitedTooLong
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from dsx.comm.links.frames import lane_of
from dsx.comm.links.link import Link
from dsx.core.membership import Seat

_LOOK_SECONDS = 1.0


class LinkWork:
    """A message under way. `is_lost`: whether its peer is not reached, and may come back."""

    def __init__(self, ended: Future[None], is_lost: Callable[[], bool] = lambda: False) -> None:
        self._ended, self._is_lost = ended, is_lost

    @property
    def has_failed(self) -> bool:
        """Whether its peer is not reached, has gone, or has closed the lane."""
        if not self._ended.done():
            return self._is_lost()
        return self._ended.cancelled() or self._ended.exception() is not None

    def wait(self, timeout: timedelta) -> float:
        """Block until it is there; RuntimeError says why it will not be.

        The time in which its peer is lost, and may come back, is none of that; it is returned, in
        seconds.
        """
        until, lost_seconds = time.monotonic() + timeout.total_seconds(), 0.0
        while True:
            began = time.monotonic()
            try:
                self._ended.result(max(min(until - began, _LOOK_SECONDS), 0.0))
                return lost_seconds
            except CancelledError:
                raise RuntimeError("nothing has come") from None
            except WaitedTooLong:
                if self._is_lost():
                    passed = time.monotonic() - began
                    until, lost_seconds = until + passed, lost_seconds + passed
                elif time.monotonic() >= until:
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
        name = self._name(peer)
        ended = self._link.send(name, self.lane, tag, _bytes(tensors))
        return LinkWork(ended, lambda: self._link.is_lost(name))

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> LinkWork:
        """Post a place for a tensor."""
        name = self._name(peer)
        ended = self._link.receive(name, self.lane, tag, _bytes(tensors))
        return LinkWork(ended, lambda: self._link.is_lost(name))

    def close(self) -> Future[None]:
        """End what is under way, and tell the peers; done once no tensor is read any more."""
        return self._link.close_lane(self.lane)

    def _name(self, peer: int) -> tuple[int, int]:
        return self._seat.ids[peer], self._link.rank


def _bytes(tensors: Sequence[Tensor]) -> memoryview:
    (tensor,) = tensors
    bytes_of_it: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(bytes_of_it)
