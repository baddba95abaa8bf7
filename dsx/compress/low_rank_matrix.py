"""One matrix of a low-rank channel: its factors, and what their owners do.

Factors are transposed, `[rank, m]` and `[rank, n]`, so that a direction is a row. From call to
call a matrix keeps its warm start and its messages, out of which it makes factors anew where they
are used: in work space that all matrices of a rank take turns with (`Opening.turns`). There are two
vectors of it: P and what it comes to lie in one, Q and what it is made of in the other, and where
the other would lie a block of one factor is scaled, and some rows of others' are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor

from dsx.compress.blocks import Block, Owners
from dsx.compress.factor_products import Products
from dsx.compress.factors import UpCodec
from dsx.compress.low_rank_factor import Factor, in_a_row
from dsx.compress.owners import NUM_PROBES, factor_sizes, of_sums, up_bytes
from dsx.compress.pieces import LOST_NUMEL, rows_at_once
from dsx.compress.warm_start import WarmStart
from dsx.compress.wire.base import Kernels, Wire
from dsx.core.buffers import Buffers, Opening
from dsx.core.membership import Seat
from dsx.core.types import Slot

_TINY = 2.0**-126  # the least normal number
_LEAST_SHARE = 1e-3  # that factors are taken to keep


class FactorSettings(Protocol):
    """What a matrix needs of the configuration."""

    @property
    def factor_format(self) -> Wire:
        """The format of factors on their way to the owner."""
        ...

    @property
    def kernels(self) -> Kernels:
        """How codecs run."""
        ...


class LowRankMatrix:
    """Buffers for ranks up to `max_rank`; one round is begin, encode_p, ..., write_mean."""

    def __init__(
        self,
        slot: Slot,
        max_rank: int,
        seat: Seat,
        owners: Owners,
        opening: Opening,
        settings: FactorSettings,
        messages: Buffers,
        products: Products,
    ) -> None:
        self.name = slot.name
        self.offset, self.numel = slot.offset, slot.numel  # where it lies in the fragment
        self.max_rank = max_rank
        self._owners = owners
        seat.membership.require_equal_weights()
        self._seat = seat
        self._slot = slot
        self._seed = crc32(slot.name.encode())  # the same wherever the matrix is put together
        whole = slot.whole or slot.shape
        self._m, self._n = whole[0], slot.numel // whole[0]
        rows = max_rank + NUM_PROBES
        turns = opening.turns.buffers
        self._work = turns.work
        self._products = products
        self.probed = opening.buffers.zeros(NUM_PROBES, self._m)
        wire, kernels = settings.factor_format, settings.kernels
        self.warm = WarmStart(slot.name, max_rank, self._n, wire.is_exact, opening.state)
        sizes = factor_sizes(max_rank, wire, owners, seat.position)
        sent = messages.zeros(sizes.sent, dtype="uint8")
        received = messages.zeros(seat.num_clusters - 1, sizes.received, dtype="uint8")
        means = [messages.zeros(size, dtype="uint8") for size in (sizes.mean_p, sizes.mean_q)]
        self.p, self.q = (
            Factor(blocks, rows, wire, seat, kernels, turns, (sent, received, mean), roles)
            for blocks, mean, roles in zip(
                (owners.p, owners.q), means, (("p", "q"), ("q", "p")), strict=True
            )
        )
        self._told = messages.zeros(sizes.told, dtype="uint8")
        self._sums_wire = of_sums(wire)
        self._sums = {
            block.length: UpCodec(self._sums_wire, rows, block.length, kernels, turns, "q")
            for block in (owners.p if owners.is_cut else ())
        }
        self._total_square = self._missed_square = 0.0

    def begin(self, x: Tensor, rank: int, round: int) -> None:
        """Start a round on the matrix inside `x`; from random columns where there are no others."""
        slot = self._slot
        self._matrix = x[slot.offset : slot.offset + slot.numel].view(self._m, self._n)
        self.rank, self._round = rank, round
        self._num_warm = min(rank, self.warm.num_directions)

    def probe(self) -> None:
        """Let the probes see the matrix, before a residual is added: what a residual has collected
        says nothing of the rank that pseudo-gradients need.
        """
        self._products.of_rows(self._random()[self.rank :], self._matrix, self.probed)

    def encode_p(self) -> None:
        """Make P = M Q and the codes of it, with the probes'."""
        p = self._work("p", (self.rank + NUM_PROBES, self._m))
        self._products.of_rows(self._start(), self._matrix, p[: self.rank])
        p[self.rank :].copy_(self.probed)
        self.p.encode(p, self.rank, self._round_seed)

    def encode_q(self) -> None:
        """Make Q = M^T P with the mean P, and the codes of it."""
        q = self._work("q", (self.rank, self._n))
        self._products.of_columns(self._decoded_p(), self._matrix, q)
        self.q.encode(q, self.rank, self._round_seed)

    @property
    def averages_p(self) -> bool:
        """Whether this cluster makes P orthonormal, with the probes that `spectrum` needs."""
        return self._owners.qr == self._seat.position

    @property
    def is_cut(self) -> bool:
        """Whether P is averaged in several blocks, and made orthonormal behind that."""
        return self._owners.is_cut

    def average_p(self) -> None:
        """Average the blocks of P that are this cluster's; make P orthonormal, if it is whole."""
        for block, mean in self.p.means():
            if not self.is_cut:
                self._orthonormalise(mean)
                continue
            told = next(data for each, data in self._told_blocks() if each is block)
            self._sums[block.length].encode(mean, told, self._round_seed)

    def average_q(self) -> None:
        """Average the blocks of Q that are this cluster's, and make their codes."""
        for block, mean in self.q.means():
            self.q.encode_mean(block, mean)

    def told(self, sender: int, receiver: int) -> list[Tensor]:
        """Return the means of blocks of P that one cluster sends the one that makes it orthonormal.

        Of this cluster's messages: empty where it is neither, or P is not cut.
        """
        if not self.is_cut or receiver != self._owners.qr or sender == receiver:
            return []
        return [data for block, data in self._told_blocks() if block.owner == sender]

    def gather_p(self) -> None:
        """Make a P that is cut orthonormal, of what all owners of blocks have told."""
        if not self.is_cut or not self.averages_p:
            return
        mean = self._work("p", (self.rank + NUM_PROBES, self._m))
        for block, data in self._told_blocks():
            self._sums[block.length].decode(data, mean[:, block.start : block.stop])
        self._orthonormalise(mean)

    def handed_back(self, sender: int, receiver: int) -> list[Tensor]:
        """Return the codes of blocks of a P that is cut for their owner, who sends them to all."""
        if not self.is_cut or sender != self._owners.qr or receiver == sender:
            return []
        return self.p.means_of(receiver)

    def p_from(self, sender: int, receiver: int) -> list[Tensor]:
        """Return the codes of the mean P that one cluster sends another: but what that has made."""
        has_made_it = self.is_cut and receiver == self._owners.qr
        return [] if has_made_it else self.p.means_of(sender)

    def take_q(self) -> None:
        """Keep the mean Q as the next start."""
        self.warm.take(self.q)
        self._num_warm = self.rank

    def write_mean(self) -> None:
        """Overwrite the matrix with the mean, P Q^T of the integer codes and their scales."""
        (p, scales_p), (q, scales_q) = self._codes(is_p=True), self._codes(is_p=False)
        self._products.mean(p, scales_p, q, scales_q, self._matrix)

    @property
    def lost_at_once(self) -> int:
        """The elements that `write_lost` asks room for at a time, at most."""
        return rows_at_once(self._m, self._n, LOST_NUMEL) * self._n

    def write_lost(self, room: Callable[[int], Tensor]) -> None:
        """Write what the own codes miss of the matrix, rows by rows, to the `room` of each."""
        own = self._work("q", (self.rank, self._n))
        self.q.decode_own(own)
        p, rows = self._decoded_p(), rows_at_once(self._m, self._n, LOST_NUMEL)
        for matrix, left in zip(self._matrix.split(rows), p.split(rows, dim=1), strict=True):
            lost = room(matrix.numel()).view(matrix.shape)
            self._products.lost(matrix, left, own, lost)

    def spectrum(self, has_residual: bool) -> tuple[Tensor, float]:
        """Return the squared singular values of the mean, descending, and |M|_F^2 to match.

        The values are those of the r x r Gram of Q. With a residual that holds what residuals have
        collected, too, of which the probes see nothing: they then tell of the share that is missed.
        """
        warm = self.warm.read(self._work("q", (self.rank, self._n))).double()
        squares = torch.linalg.eigvalsh(warm @ warm.T).flip(0).clamp_(min=0).float()
        kept = float(squares.sum())
        if not has_residual:
            return squares, kept + self._missed_square
        share = 1 - min(self._missed_square / max(self._total_square, _TINY), 1 - _LEAST_SHARE)
        return squares, kept / share

    @property
    def _round_seed(self) -> int:
        return (self._seed * 31 + self._round) * 4_099 + self._seat.cluster_id

    def _orthonormalise(self, mean: Tensor) -> None:
        """Make the codes of an orthonormal P, of its mean with the probes' below."""
        p = mean[: self.rank]
        self._total_square, self._missed_square = self._products.orthonormal(mean, p)
        for block in self.p.blocks:
            self.p.encode_mean(block, p[:, block.start : block.stop])

    def _told_blocks(self) -> Iterator[tuple[Block, Tensor]]:
        """Return the blocks of a cut P whose means are here, own or told, with their codes."""
        here, rows = self._seat.position, self.rank + NUM_PROBES
        blocks = [each for each in self._owners.p if here in (each.owner, self._owners.qr)]
        return in_a_row(
            self._told, blocks, lambda block: up_bytes(self._sums_wire, rows, block.length)
        )

    def _codes(self, is_p: bool) -> tuple[Tensor, Tensor]:
        """Return codes and scales of a mean factor, from the bytes that everybody has."""
        role, factor = ("p", self.p) if is_p else ("q", self.q)
        codes = self._work(role, (self.rank, factor.length))
        return codes, factor.codes(codes)

    def _decoded_p(self) -> Tensor:
        """Return the mean P."""
        codes, scales = self._codes(is_p=True)
        return codes.mul_(scales)

    def _random(self) -> Tensor:
        """Return the round's random directions `[rank, n]`, and the probes below them."""
        generator = torch.Generator().manual_seed(self._seed + 104_729 * self._round)
        return self._work("q", (self.rank + NUM_PROBES, self._n)).normal_(generator=generator)

    def _start(self) -> Tensor:
        """Return the directions `[rank, n]` to start from: those kept, then random ones.

        The kept ones at size 1: M Q would hold squares, which may not be finite.
        """
        count = self._num_warm
        is_warm = count == self.rank
        right = self._work("q", (count, self._n)) if is_warm else self._random()[: self.rank]
        start = self.warm.read(right[:count])
        start.div_(start.abs().amax(dim=1, keepdim=True).clamp_(min=_TINY))
        return right
