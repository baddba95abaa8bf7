"""The last message of a transfer: what each cluster holds, before anybody applies it.

Every cluster sends every other one 64 bits of its mean and of the sideband beside it. Where all are
the same the transfer is committed: all hold the same bytes, and each goes on. Where they are not,
nobody applies anything, and the attempt is made again, from the same contribution and state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator

import torch
from torch import Tensor

from dsx.core.exchange import COMMIT, ExchangeRound, to_all
from dsx.core.membership import Seat
from dsx.outer.parity_check import Sides

ATTEMPTS = 2  # at one transfer: what goes wrong twice is a machine that is broken


class Commit:
    """One fragment's last messages."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._own = torch.zeros(1, dtype=torch.int64)
        self._theirs = [torch.zeros(1, dtype=torch.int64) for _ in range(seat.num_clusters)]

    def exchange(
        self, mean_hash: int, sideband: Tensor
    ) -> Generator[ExchangeRound, None, list[int]]:
        """Tell all what is held here; return the ids of those who hold something else than most.

        Empty if all hold the same. `sideband` is fp32 `[n]` on the CPU. Where none is what most
        hold, it is those who differ from the first one.
        """
        if self._seat.num_clusters == 1:
            return []
        told = hashlib.blake2b(sideband.numpy().tobytes(), digest_size=8)
        told.update(mean_hash.to_bytes(8, "little", signed=True))
        self._own[0] = int.from_bytes(told.digest(), "little", signed=True)
        self._theirs[self._seat.position].copy_(self._own)
        yield to_all([self._own], [[theirs] for theirs in self._theirs], COMMIT)
        held = dict(zip(self._seat.ids, (int(theirs) for theirs in self._theirs), strict=True))
        apart = {(a, b) for a in held for b in held if a < b and held[a] != held[b]}
        return Sides.of(self._seat.ids, apart, ()).wrong
