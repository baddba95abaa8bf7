"""The mean over clusters, exact or of coded data: one order, one rounding, the same bits for all.

A vector of n elements is cut into C slices at multiples of what the wire format keeps together;
into more, some owners having two, where codes that were made for more clusters are sent.

- exact (fp32): each cluster sends every other one its copy of that one's slice, sums the C copies
  of its own slice in cluster order, divides by C, and sends the result to all: 2 (C-1)/C * 4n
  bytes per cluster, as a ring, in two rounds of an exchange. Two clusters exchange whole vectors in
  one, which is as many bytes and the same sums: both compute them, in cluster order.
- coded, C <= 3: everybody sends its codes of the whole vector to all; each decodes them all, its
  own too, and sums in cluster order. One round, one error of the order 1/C.
- coded, C >= 4: codes of each slice go to its owner, who decodes, sums in cluster order, divides,
  encodes the mean anew (8 bit by default, since this error is common to all and does not shrink
  with C) and sends it to all, who apply what they decode, the owner too.

Never a requantizing ring (its error grows with C), never a sum in the narrow type (it wraps).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsx.compress.error_feedback import Anew, ErrorFeedback, Residual
from dsx.compress.slices import (
    GATHERED_UP_TO,
    LOST_TOGETHER,
    SENT,
    coded_sizes,
    exact_rounds,
    lasting_slices,
    slice_bounds,
)
from dsx.compress.wire.base import Codec, Kernels, Wire
from dsx.compress.wire.parts import has_places, places_of
from dsx.core.buffers import Buffers, Opening, one_behind_another
from dsx.core.exchange import Exchange, ExchangeRound, to_all
from dsx.core.membership import Seat

if TYPE_CHECKING:
    from dsx.compress.base import CodingError, Launch


class ExactMean:
    """The fp32 mean of vectors; its receive buffers are kept from call to call."""

    def __init__(self, seat: Seat, what: str = "codes", buffers: Buffers | None = None) -> None:
        seat.membership.require_equal_weights()
        self._seat = seat
        self._what = what
        self._buffers = buffers or Buffers()

    def bytes_sent(self, numel: int) -> int:
        """Return the payload bytes this cluster sends for a mean of `numel` values."""
        rounds = exact_rounds(numel, self._seat.num_clusters)
        return int(rounds[:, self._seat.position, SENT].sum())

    def exchange(self, x: Tensor) -> Exchange:
        """Average `x`, fp32 `[n]` on the CPU, in place."""
        seat, num_clusters = self._seat, self._seat.num_clusters
        if num_clusters == 1:
            return x
        if num_clusters == 2:
            return (yield from self._of_two(x))
        slices = [x[a:b] for a, b in slice_bounds(x.numel(), num_clusters)]
        own = slices[seat.position]
        copies = list(self._received(num_clusters * own.numel()).view(num_clusters, -1))
        yield ExchangeRound([[s] for s in slices], [[c] for c in copies], self._what)
        copies[seat.position].copy_(own)
        total = copies[0]
        for copy in copies[1:]:
            total.add_(copy)
        own.copy_(total.div_(num_clusters))
        yield to_all([own], [[s] for s in slices], self._what)
        return x

    def _of_two(self, x: Tensor) -> Exchange:
        theirs = self._received(x.numel())
        yield to_all([x], [[theirs], [theirs]], self._what)
        first, second = (x, theirs) if self._seat.position == 0 else (theirs, x)
        return torch.add(first, second, out=x).div_(2)

    def _received(self, numel: int) -> Tensor:
        return self._buffers.work(f"received, {self._what}", (numel,))


class CodedMean:
    """The mean of vectors of up to `numel` elements that travel in a wire format.

    `mean_wire` is the format of the owner's mean where C >= 4, unless everybody is to gather all
    codes for any C (`is_gathered`, for what is short). Buffers are allocated here, once. Where the
    opening says so, messages are made by `encode`, ahead of their exchanges, and for whoever is
    there by then; else by these.
    """

    def __init__(
        self,
        numel: int,
        wire: Wire,
        mean_wire: Wire,
        seat: Seat,
        kernels: Kernels = "auto",
        is_gathered: bool = False,
        opening: Opening | None = None,
    ) -> None:
        seat.membership.require_equal_weights()
        self._seat = seat
        self._is_gathered = is_gathered or seat.num_clusters <= GATHERED_UP_TO
        opening = opening or Opening()
        cpu, buffers, num_clusters = torch.device("cpu"), opening.buffers, seat.num_clusters
        self._wire, self._codec = wire, wire.codec(numel, cpu, kernels, buffers)
        self.num_slices = lasting_slices(seat) if opening.at_launch else num_clusters
        sizes = coded_sizes(
            numel, wire, mean_wire, num_clusters, seat.position, is_gathered, self.num_slices
        )
        self._bounds, self._owners = sizes.bounds, sizes.owners

        self._outgoing = [
            [buffers.zeros(size, dtype="uint8") for size in sizes.outgoing]
            for _ in range(max(opening.at_launch, 1))
        ]
        # codes that come are used up when the first mean is made
        received = buffers.zeros(sizes.received_bytes(num_clusters), dtype="uint8")
        copies = one_behind_another(received, sizes.incoming * (num_clusters - 1))
        count = len(sizes.incoming)
        self._incoming = [copies[k * count : (k + 1) * count] for k in range(num_clusters - 1)]
        self._means = one_behind_another(received, sizes.means)
        # a launch may be encoded while this channel's thread decodes another
        self._encoder = (
            wire.codec(numel, cpu, kernels, opening.encoding) if opening.at_launch else None
        )
        if not self._is_gathered:
            longest = max(stop - start for start, stop in sizes.bounds)
            self._mean_codec = mean_wire.codec(longest, cpu, kernels, buffers)

    def encode(
        self, x: Tensor, residual: ErrorFeedback | None = None, seed: int = 0, number: int = 0
    ) -> None:
        """Encode launch `number` now; `x`, in place, becomes what is decoded of it everywhere.

        On any thread, one at a time. `residual` is as for `exchange`.
        """
        assert self._encoder is not None, "opened for codes that are made by the exchange"
        outgoing = self._outgoing_of(number)
        self._encode(self._encoder, x, residual, seed, outgoing)
        for data, (start, stop) in zip(outgoing, self._bounds, strict=True):
            self._encoder.decode(data, x[start:stop])

    def exchange(
        self,
        x: Tensor,
        residual: ErrorFeedback | None = None,
        seed: int = 0,
        of_mean: ErrorFeedback | None = None,
        number: int = 0,
    ) -> Exchange:
        """Average `x`, fp32 `[numel]` on the CPU, in place; launch `number`, if encoded before.

        With a residual, it is added before encoding and becomes what encoding lost; so is
        `of_mean` to the mean that this cluster encodes, of as many elements.
        """
        outgoing = self._outgoing_of(number)
        if self._encoder is None:
            self._encode(self._codec, x, residual, seed, outgoing)
        position, owners = self._seat.position, self._owners
        own, incoming = owners[position], list(self._incoming)
        incoming.insert(position, [outgoing[s] for s in own])
        yield ExchangeRound([[outgoing[s] for s in theirs] for theirs in owners], incoming)
        for copies, s in zip(zip(*incoming, strict=True), own, strict=True):
            start, stop = self._bounds[s]
            self._decode_mean(copies, x[start:stop])
        if self._is_gathered:
            return x
        pieces = [(*self._bounds[s], self._means[s], seed) for s in own]
        _encode(self._mean_codec, x, of_mean, pieces)
        means = [[self._means[s] for s in theirs] for theirs in owners]
        yield to_all(means[position], means)
        for (start, stop), mean in zip(self._bounds, self._means, strict=True):
            self._mean_codec.decode(mean, x[start:stop])
        return x

    def messages(self, number: int) -> list[Tensor]:
        """Return the codes of launch `number`, encoded before."""
        return self._outgoing_of(number)

    def recode(self, x: Tensor, residual: ErrorFeedback | None = None, seed: int = 0) -> None:
        """Make the codes that the exchange of `x`, used up, has sent, and `residual` what it would
        have left.
        """
        if self._encoder is None:
            self._encode(self._codec, x, residual, seed, self._outgoing_of(0))

    def write_lost(self, x: Tensor, anew: Anew) -> None:
        """Make anew what the codes made last miss of `x`, fp32 `[numel]`."""
        together = self._wire.granularity
        at_a_time = max(LOST_TOGETHER // together, 1) * together
        for data, (start, stop) in zip(self._outgoing_of(0), self._bounds, strict=True):
            longest = at_a_time if has_places(self._wire) else max(stop - start, 1)
            for first in range(0, stop - start, longest):
                last = min(first + longest, stop - start)
                lost = anew.room(last - first)
                places = places_of(self._wire, stop - start, first, last)
                self._codec.decode(torch.cat([data[place] for place in places]), lost)
                torch.sub(x[start + first : start + last], lost, out=lost)

    def _outgoing_of(self, number: int) -> list[Tensor]:
        return self._outgoing[number % len(self._outgoing)]

    def _encode(
        self,
        codec: Codec,
        x: Tensor,
        residual: ErrorFeedback | None,
        seed: int,
        outgoing: list[Tensor],
    ) -> None:
        pieces = [
            (start, stop, outgoing[m], seed + 7_919 * m)
            for m, (start, stop) in enumerate(self._bounds)
        ]
        _encode(codec, x, residual, pieces)

    def _decode_mean(self, incoming: Sequence[Tensor], out: Tensor) -> None:
        """Write the mean of the received codes into `out`, summed in cluster order."""
        self._codec.decode(incoming[0], out)
        for data in incoming[1:]:
            self._codec.decode_add(data, out)
        out.div_(self._seat.num_clusters)


def _encode(
    codec: Codec,
    x: Tensor,
    residual: ErrorFeedback | None,
    pieces: Sequence[tuple[int, int, Tensor, int]],
) -> None:
    """Encode pieces of `x` in a row, used up: each from where, to where, its message and seed.

    `residual` is of all of them together.
    """
    if residual is None:
        for start, stop, out, seed in pieces:
            codec.encode(x[start:stop], out, seed)
        return
    first, last = pieces[0][0], pieces[-1][1]
    if isinstance(residual, Residual) and residual.is_in_place:
        run = x[first:last]
        residual.add_to(run)
        for start, stop, out, seed in pieces:
            codec.encode(x[start:stop], out, seed)
        run.neg_()
        for start, stop, out, _ in pieces:
            codec.decode_add(out, x[start:stop])
        residual.write(torch.sub(0.0, run, out=run))  # no -0: as of a difference
        return
    with residual.opened() as lost:
        for start, stop, out, seed in pieces:
            part = lost[start - first : stop - first]
            codec.encode_with_feedback(x[start:stop], part, out, seed)


class DenseChannel:
    """`Dense`'s channel: the exact mean."""

    def __init__(self, seat: Seat, opening: Opening) -> None:
        self.slots: Mapping[str, Tensor] = {}
        self.errors: Mapping[str, CodingError] = {}
        self.probes: Mapping[str, Tensor] = {}
        self.settled: Collection[str] = ()
        self._mean = ExactMean(seat, buffers=opening.buffers)
        self.spectrum = None

    def take_in(self, x: Tensor, launch: Launch) -> None:
        """Nothing to do: nothing is lost."""

    def settle(self, x: Tensor, launch: Launch) -> None:
        """Nothing to do."""

    def can_recode(self, launch: Launch) -> bool:
        """Always: it has no state."""
        return True

    def recode(self, x: Tensor, launch: Launch) -> None:
        """Nothing to do."""

    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        """Average `x` in fp32, in place."""
        return self._mean.exchange(x)
