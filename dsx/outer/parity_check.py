"""Before a transfer: does everybody send finite numbers, and did all apply the same mean last time?

A header goes to every peer ahead of a fragment's codes, in the launch handshake: whether this
cluster's values are finite and it took a step at all, the round and a 64-bit hash of the mean it
decoded last. Everyone so knows the same:

- a cluster with a NaN or an infinity: the round is refused by all, nothing is applied, and the
  message names it;
- a cluster that skipped every inner step of the round, its gradients not being finite: it has
  nothing new, and recovery.py tells of it;
- a different hash: a mean was decoded differently, so outer parameters have diverged, which no
  later round would mend. The message names fragment, round and clusters; the fragment's outer
  state is sent again, in fp32, by the first member, or the run stops, as the configuration says.

The hash is `sum_i w_i * (bits of element pair i) mod 2^64` with fixed odd weights: integers only,
so it is the same for any number of threads; a single wrong bit always changes it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsx.core.exchange import HEADER, ExchangeRound, to_all
from dsx.core.membership import Seat

_TILE = 1 << 16  # pairs of elements
_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15  # odd: 2^64 over the golden ratio


@dataclass
class ParityResult:
    """What the headers of one transfer said: clusters by id.

    A round may be refused because of a cluster that has left since.
    """

    refused_by: list[int] = field(default_factory=list[int])
    differing: list[int] = field(default_factory=list[int])
    round: int = 0  # of the mean that differed
    is_refused: bool = False
    idle_in: list[int] = field(default_factory=list[int])  # took no inner step in the round
    is_idle: bool = False  # this cluster's own


class ParityCheck:
    """One fragment's headers; `memory` `[round, hash]` int64 belongs to the checkpoint."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self.memory = torch.zeros(2, dtype=torch.int64)
        self._own = torch.zeros(3, dtype=torch.int64)
        self._theirs = [torch.zeros(3, dtype=torch.int64) for _ in range(seat.num_clusters)]
        self._weights = torch.empty(0, dtype=torch.int64)
        self._products = torch.empty(0, dtype=torch.int64)

    def exchange(
        self, is_finite: bool, parity: ParityResult
    ) -> Generator[ExchangeRound, None, None]:
        """Tell the peers, and fill `parity` from what they told."""
        self._own[0] = is_finite | parity.is_idle << 1
        self._own[1:] = self.memory
        self._theirs[self._seat.position].copy_(self._own)
        if self._seat.num_clusters > 1:
            yield to_all([self._own], [[header] for header in self._theirs], HEADER)
        headers = {
            id: header.tolist() for id, header in zip(self._seat.ids, self._theirs, strict=True)
        }
        parity.refused_by = [id for id, header in headers.items() if not header[0] & 1]
        parity.idle_in = [id for id, header in headers.items() if header[0] & 2]
        parity.is_refused = bool(parity.refused_by)
        first = headers[self._seat.ids[0]][1:]
        parity.differing = [id for id, header in headers.items() if header[1:] != first]
        parity.round = first[0]

    def remember(self, round: int, mean: Tensor) -> None:
        """Keep round and hash of the mean just decoded, for the next header."""
        self.memory[0] = round
        self.memory[1] = _signed(self.hash_of(mean))

    def hash_of(self, x: Tensor) -> int:
        """Return the hash of a vector, fp32 `[n]` on the CPU; allocates nothing after the first."""
        if not self._weights.numel():
            self._weights, self._products = _weights(), torch.empty(_TILE, dtype=torch.int64)
        even = x.numel() // 2 * 2
        pairs = x[:even].view(torch.int64)
        total = x.numel()
        for start in range(0, pairs.numel(), _TILE):
            tile = pairs[start : start + _TILE]
            products = self._products[: tile.numel()]
            torch.mul(tile, self._weights[: tile.numel()], out=products)
            total = (total * _FACTOR + int(products.sum())) & _MASK
        if even < x.numel():
            total = (total * _FACTOR + int(x[even:].view(torch.int32))) & _MASK
        return total


def _weights() -> Tensor:
    """Return odd multipliers, one per place in a tile."""
    values = (torch.arange(_TILE, dtype=torch.int64) * 2 + 1) * _signed(_FACTOR)
    return values ^ (values >> 29 << 1)  # still odd


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
