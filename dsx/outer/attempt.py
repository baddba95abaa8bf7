"""An attempt of a transfer: from what a cluster contributes, and its codec's state, to the mean.

A transfer is launched once, and what it sends is kept until it has been applied. Attempts at it may
be several: one that did not end (the run was stopped meanwhile, or a cluster is gone) is made again
from the same contribution and the same state of before, and gives the bits of an undisturbed one.
What it changes beside its result (residuals, warm starts, what the parity check remembers) holds
once it has ended, and is undone otherwise (state_before.py).

Where codes are made at the launch, they are what is kept: residuals have taken in what they lost.
Who asks for them before the mean is there has them made at once; else the transfer's thread does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor

from dsx.compress.base import Launch
from dsx.core.cores import turn_inside
from dsx.core.exchange import Exchange
from dsx.core.on_device import on_device
from dsx.core.recorder import Recorder
from dsx.core.transport import Pending, Submission, Transport
from dsx.core.types import SyncParams
from dsx.method.method import Method
from dsx.outer.arenas import TransferBuffers
from dsx.outer.channel import FragmentChannel
from dsx.outer.guard import square_of
from dsx.outer.measurements import Measurements
from dsx.outer.notices import NoticeCarrier
from dsx.outer.parity_check import ParityResult
from dsx.outer.state import StateStore
from dsx.outer.transfer import Arrived

Measure = Callable[[Tensor], Tensor]
OnResult = Callable[["Attempt", FragmentChannel, Tensor], object]
Follow = Callable[["Attempt", FragmentChannel], Tensor | None]


@dataclass
class Attempt:
    """One rank's part in averaging one launch, under the channel's membership.

    `what.number` counts launches from the beginning of the run, `launch.round` those of the
    fragment. `buffers` hold what is sent, which no attempt changes, and get the result. `is_finite`
    returns once the contribution is there; `is_idle` and `anchor` are for the parity check's header
    as of the launch; `place` is where the cluster was in its data then (places.py).
    """

    what: Submission
    launch: Launch
    buffers: TransferBuffers
    is_finite: Callable[[], bool]
    is_idle: bool = False
    anchor: int | Tensor = 0
    place: Mapping[str, Any] = field(default_factory=dict[str, Any])
    pending: Pending | None = None  # of the attempts at it
    notes: Mapping[int, bytes] | None = None  # what came beside a result of others
    told: Mapping[str, Any] = field(default_factory=dict[str, Any])  # see saved_places.py
    square: float | None = None  # of what is sent: of codes, where they are made at the launch
    is_coded: bool = True  # or has to be, before anybody looks at what is kept
    turn: AbstractContextManager[bool] = field(default_factory=Lock, repr=False)

    @property
    def round(self) -> int:
        """The launch, counted over those of the fragment."""
        return self.launch.round

    def anchor_hash(self) -> int:
        """Return the hash of the anchor at the launch; waits for the contribution, with which it
        comes.
        """
        if not isinstance(self.anchor, int):
            self.is_finite()
            self.anchor = int(self.anchor)
        return self.anchor

    def exchange(self, channel: FragmentChannel, measure: Measure | None) -> Exchange:
        """Average what is sent; the mean, its sideband and parity result are in the buffers then.

        `measure` is what this cluster adds to the sideband, of the mean.
        """
        buffers, is_finite, anchor = self.buffers, self.is_finite(), self.anchor_hash()
        num_members = channel.seat.num_clusters
        square = self.own_square() if is_finite else 0.0
        buffers.parity = ParityResult(is_idle=self.is_idle, anchor=anchor, square=square)
        return (
            yield from channel.exchange(
                buffers.sent, lambda: is_finite, self.launch, buffers.parity, buffers.sideband,
                measure, lambda: self._lay_out(num_members),
            )
        )  # fmt: skip

    def own_square(self) -> float:
        """Return that of this cluster's share; what was coded at a launch before is in `kept`.

        Taken once: what is sent takes in what was lost before, when an attempt has ended.
        """
        if self.square is None:
            is_kept = self.buffers.is_shared and self.buffers.kept is not None
            self.square = square_of(
                cast(Tensor, self.buffers.kept) if is_kept else self.buffers.sent
            )
        return self.square

    def _lay_out(self, num_members: int) -> Tensor:
        """Lay out what is sent, where an attempt works on it; return where that is."""
        buffers = self.buffers
        wire = buffers.begin()
        if not buffers.is_shared:
            wire.copy_(buffers.sent)
        buffers.sideband.lay_out(buffers.posted, num_members)
        return wire


class Attempts:
    """Makes attempts at one rank's transfers: over its channels, under the present membership."""

    def __init__(
        self,
        method: Method,
        state: StateStore,
        transport: Transport,
        measurements: Measurements,
        trace: Recorder,
        notices: NoticeCarrier,
    ) -> None:
        self._method = method
        self._state = state
        self._transport = transport
        self._measurements = measurements
        self._trace = trace
        self._notices = notices
        self.places = notices.places
        is_on_cuda = state.device.type == "cuda"
        self._stream = torch.cuda.Stream(state.device) if is_on_cuda else None
        self.on_result: OnResult = lambda attempt, channel, mean: None  # on the transfer's thread
        self.follow: Follow = lambda attempt, channel: None  # there, too: a result of others
        transport.follow_views(state.reopen)

    def require_coded(self, attempt: Attempt) -> None:
        """Encode what was to be encoded at the launch, unless that has been done; any thread.

        Waits for the contribution to be on the host, and for another thread that encodes it.
        """
        with attempt.turn:
            if not attempt.is_coded:
                self.encode(attempt)
                attempt.is_coded = True

    def encode(self, attempt: Attempt) -> None:
        """Encode, and keep what the wire carries of this cluster; waits for the copy to the host.

        What is not finite is sent as such, and refused by all.
        """
        buffers = attempt.buffers
        assert buffers.kept is not None
        if attempt.is_finite():
            channel = self._state.channels[attempt.what.fragment]
            channel.read_ahead()
            with turn_inside(channel.gate, self._state.resources.turn):
                channel.encode(buffers.wire, attempt.launch)
            attempt.square = square_of(buffers.wire)  # there, not where the masters are
        if self._stream is None:
            buffers.kept.copy_(buffers.wire)
            return
        # all that was given to the device before the launch is done: the contribution has come
        with on_device(self._state.device), torch.cuda.stream(self._stream):
            buffers.kept.copy_(buffers.wire, non_blocking=True)
        self._stream.synchronize()

    def submit(self, attempt: Attempt, sync_params: SyncParams) -> Pending:
        """Start an attempt, a first one or another; `sync_params` are the launch's."""
        fragment = attempt.what.fragment
        if not self._state.is_sent(fragment):
            attempt.buffers.parity = ParityResult(is_idle=attempt.is_idle)
            return Arrived(attempt.buffers.begin())

        def begin() -> Exchange:
            exchange = self._exchange(attempt, sync_params)
            return self._trace.follow(exchange, fragment, attempt.what.step)

        what = replace(attempt.what, notes=self._notices.to_say(attempt.place))
        attempt.pending = self._transport.submit(what, begin(), begin)
        return attempt.pending

    def take_back(self, attempt: Attempt) -> None:
        """Give what a refused round carried back to the residuals, if it was encoded before."""
        kept, parity = attempt.buffers.kept, attempt.buffers.parity
        own = self._transport.seat.cluster_id
        was_encoded = own not in (*parity.refused_by, *parity.differing)
        if self._method.encodes_at_launch and was_encoded and kept is not None:
            channel = self._state.channels[attempt.what.fragment]
            with channel.gate:
                channel.take_back(kept)

    def _exchange(self, attempt: Attempt, sync_params: SyncParams) -> Exchange:
        """Make an attempt under the membership in force when its first round is due."""
        fragment = attempt.what.fragment
        attempt.buffers.mean_norm = None
        self.require_coded(attempt)
        attempt.is_finite()  # what was copied out of its buffers before has been: they are written
        channel = self._state.channels[fragment]
        if (mean := self.follow(attempt, channel)) is None:
            measure = self._measurements.owner_measure(
                fragment, sync_params, channel.codec, channel.seat
            )
            mean = yield from attempt.exchange(channel, measure)
            self.on_result(attempt, channel, mean)
        if self._state.device.type == "cpu":  # else it is taken where the mean is copied to
            attempt.buffers.mean_norm = torch.linalg.vector_norm(mean)
        return mean
