"""One matrix of a low-rank channel: its factors, its codes, and what their owners do.

Factors are transposed, `[rank, m]` and `[rank, n]`, so that a direction is a row. From call to
call a matrix keeps its warm start and its messages, out of which it makes factors anew where they
are used: in work space that all matrices of a channel share.
"""

from __future__ import annotations

from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor

from dsx.compress.factors import DownCodec, UpCodec, product
from dsx.compress.owners import NUM_PROBES, Owners, factor_sizes
from dsx.compress.wire.base import Kernels, Wire
from dsx.core.buffers import Opening
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
    ) -> None:
        self.name = slot.name
        self.max_rank = max_rank
        self._owners = owners
        seat.membership.require_equal_weights()
        self._seat = seat
        self._is_p = True  # whether P is in turn, or Q
        self._slot = slot
        self._seed = crc32(slot.name.encode())  # the same wherever the matrix is put together
        whole = slot.whole or slot.shape
        self._m, self._n = whole[0], slot.numel // whole[0]
        rows = max_rank + NUM_PROBES
        buffers = opening.buffers
        self._work = buffers.work
        self.warm = opening.state.zeros(max_rank, self._n)
        self._probed = buffers.zeros(NUM_PROBES, self._m)
        wire = settings.factor_format
        self._up = {
            k: UpCodec(wire, rows, k, settings.kernels, buffers) for k in {self._m, self._n}
        }
        self._down = {k: DownCodec(k, wire.is_exact) for k in {self._m, self._n}}
        sizes = factor_sizes(self._m, self._n, max_rank, wire, owners, seat.position)
        self._sent = buffers.zeros(sizes.sent, dtype="uint8")
        self._received = buffers.zeros(seat.num_clusters - 1, sizes.received, dtype="uint8")
        self._mean_p = buffers.zeros(sizes.mean_p, dtype="uint8")
        self._mean_q = buffers.zeros(sizes.mean_q, dtype="uint8")
        self._total_square = self._missed_square = 0.0

    def begin(self, x: Tensor, rank: int, round: int) -> None:
        """Start a round on the matrix inside `x`; from random columns where there are no others.

        The probes see the matrix before a residual is added: what a residual has collected says
        nothing of the rank that pseudo-gradients need.
        """
        slot = self._slot
        self._matrix = x[slot.offset : slot.offset + slot.numel].view(self._m, self._n)
        self.rank, self._round = rank, round
        self._num_warm = min(rank, self._warm_rank())
        torch.mm(self._random()[rank:], self._matrix.T, out=self._probed)

    def encode_p(self) -> None:
        """Make P = M Q and the codes of it, with the probes'."""
        p = self._work("p", (self.rank + NUM_PROBES, self._m))
        torch.mm(self._start(), self._matrix.T, out=p[: self.rank])
        p[self.rank :].copy_(self._probed)
        self._encode(p, self._m)

    def encode_q(self) -> None:
        """Make Q = M^T P with the mean P, and the codes of it."""
        q = self._work("q", (self.rank, self._n))
        torch.mm(self._decoded_p(), self._matrix, out=q)
        self._encode(q, self._n)

    @property
    def owner(self) -> int:
        """The cluster that averages the factor in turn, by position."""
        return self._owners.p if self._is_p else self._owners.q

    @property
    def is_owned(self) -> bool:
        """Whether this cluster averages the factor in turn."""
        return self.owner == self._seat.position

    @property
    def averages_p(self) -> bool:
        """Whether this cluster averages P, with the probes that `spectrum` needs."""
        return self._owners.p == self._seat.position

    @property
    def sent(self) -> Tensor:
        """This cluster's codes of the factor in turn."""
        return self._sent[: self._size]

    @property
    def received(self) -> list[Tensor]:
        """The clusters' codes of the factor in turn; for the owner, whose own are among them."""
        if not self.is_owned:
            return []
        received = [data[: self._size] for data in self._received]
        received.insert(self.owner, self.sent)
        return received

    @property
    def mean(self) -> Tensor:
        """The codes of the mean factor in turn: the owner's to send, the others' to receive."""
        return self._message(self._is_p)

    def average(self) -> None:
        """As the owner: sum in cluster order, orthonormalise P, encode the mean."""
        length, up = self._length, self._up[self._length]
        rows = self._rows
        mean = self._work("sum of a factor", (rows, length))
        received = self.received
        up.decode(received[0], mean)
        for data in received[1:]:
            up.decode_add(data, mean)
        mean.div_(len(received))
        if self._is_p:
            probes = mean[self.rank :]
            mean = torch.linalg.qr(mean[: self.rank].T).Q.T.contiguous()
            missed = probes - probes @ mean.T @ mean
            self._total_square = float(probes.square().sum()) / NUM_PROBES
            self._missed_square = float(missed.square().sum()) / NUM_PROBES
        self._down[length].encode(mean, self.mean)

    def take_q(self) -> None:
        """Keep the mean Q as the next start."""
        codes, scales = self._codes(is_p=False)
        self.warm.zero_()
        torch.mul(codes, scales, out=self.warm[: self.rank])
        self._num_warm = self.rank

    def write_mean(self) -> None:
        """Overwrite the matrix with the mean, P Q^T of the integer codes and their scales."""
        (p, scales_p), (q, scales_q) = self._codes(is_p=True), self._codes(is_p=False)
        product(p, q, self._matrix)
        self._matrix.mul_(scales_p.unsqueeze(1)).mul_(scales_q)

    def write_lost(self, residual: Tensor, start: int, stop: int) -> None:
        """Write what the own codes miss of the matrix to its place in a residual of start..stop."""
        slot = self._slot
        if not start <= slot.offset < stop:
            return
        place = slot.offset - start
        lost = residual[place : place + slot.numel].view(self._m, self._n)
        own = self._work("q", (self.rank, self._n))
        self._up[self._n].decode(self.sent, own)
        torch.mm(self._decoded_p().T, own, out=lost)
        torch.sub(self._matrix, lost, out=lost)

    def spectrum(self, has_residual: bool) -> tuple[Tensor, float]:
        """Return the squared singular values of the mean, descending, and |M|_F^2 to match.

        The values are those of the r x r Gram of Q. With a residual that holds what residuals have
        collected, too, of which the probes see nothing: they then tell of the share that is missed.
        """
        warm = self.warm[: self.rank].double()
        squares = torch.linalg.eigvalsh(warm @ warm.T).flip(0).clamp_(min=0).float()
        kept = float(squares.sum())
        if not has_residual:
            return squares, kept + self._missed_square
        share = 1 - min(self._missed_square / max(self._total_square, _TINY), 1 - _LEAST_SHARE)
        return squares, kept / share

    def _encode(self, factor: Tensor, length: int) -> None:
        self._rows, self._length = factor.shape
        self._is_p = factor.shape[0] > self.rank
        self._size = self._up[length].num_bytes(self._rows)
        seed = (self._seed * 31 + self._round) * 4_099 + self._seat.cluster_id
        self._up[length].encode(factor, self.sent, seed)

    def _message(self, is_p: bool) -> Tensor:
        length, data = (self._m, self._mean_p) if is_p else (self._n, self._mean_q)
        return data[: self._down[length].num_bytes(self.rank)]

    def _codes(self, is_p: bool) -> tuple[Tensor, Tensor]:
        """Return codes and scales of a mean factor, from the bytes that everybody has."""
        role, length = ("codes of p", self._m) if is_p else ("codes of q", self._n)
        codes = self._work(role, (self.rank, length))
        return codes, self._down[length].decode(self._message(is_p), codes)

    def _decoded_p(self) -> Tensor:
        """Return the mean P."""
        codes, scales = self._codes(is_p=True)
        return torch.mul(codes, scales, out=self._work("p", (self.rank, self._m)))

    def _random(self) -> Tensor:
        """Return the round's random directions `[rank, n]`, and the probes below them."""
        generator = torch.Generator().manual_seed(self._seed + 104_729 * self._round)
        return self._work("right", (self.rank + NUM_PROBES, self._n)).normal_(generator=generator)

    def _start(self) -> Tensor:
        """Return the directions `[rank, n]` to start from: those kept, then random ones.

        The kept ones at size 1: M Q would hold squares, which may not be finite.
        """
        count = self._num_warm
        is_warm = count == self.rank
        right = self._work("right", (count, self._n)) if is_warm else self._random()[: self.rank]
        start = right[:count].copy_(self.warm[:count])
        start.div_(start.abs().amax(dim=1, keepdim=True).clamp_(min=_TINY))
        return right

    def _warm_rank(self) -> int:
        """Return how many directions are kept from the last round."""
        return int(self.warm.any(dim=1).sum())
