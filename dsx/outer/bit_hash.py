"""A 64-bit hash of a vector's bits: the same on every device, a single wrong bit changes it.

`sum_i w_i * (bits of element pair i) mod 2^64` with fixed odd weights over tiles, which a
polynomial joins: integers only, so any number of threads and any order give the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsx.core.buffers import Buffers
from dsx.core.exchange import HASHED_ON_ACCELERATOR, HASHED_PAIRS

_ROWS_ON_HOST = 1  # tiles at a time
_FACTOR = 0x9E3779B97F4A7C15  # odd: 2^64 over the golden ratio


class BitHash:
    """Hashes vectors on one device; allocates nothing after the first. For one thread."""

    def __init__(self, buffers: Buffers | None = None) -> None:
        self._work = (buffers or Buffers()).work
        self._weights = torch.empty(0, dtype=torch.int64)
        self._products = torch.empty(0, dtype=torch.int64)
        self._powers = torch.empty(0, dtype=torch.int64)

    def of(self, x: Tensor) -> Tensor:
        """Return the hash of fp32 `[n]` as int64, 0-dim, on its device and without waiting."""
        if not x.numel():
            return torch.zeros((), dtype=torch.int64, device=x.device)
        rows = _ROWS_ON_HOST if x.device.type == "cpu" else HASHED_ON_ACCELERATOR
        if not self._weights.numel():
            self._weights = self._work("weights of a hash", (HASHED_PAIRS,), torch.int64)
            self._weights.copy_(_weights(x.device))
            self._products = self._work("products", (rows, HASHED_PAIRS), torch.int64)
            self._powers = torch.empty(rows, dtype=torch.int64, device=x.device)
            for row in range(rows):  # one by one: a copy from the host would wait for the device
                self._powers[row].fill_(signed(pow(_FACTOR, rows - 1 - row, 1 << 64)))
        pairs = x[: x.numel() // 2 * 2].view(torch.int64)
        total = torch.full((), x.numel(), dtype=torch.int64, device=x.device)
        whole = pairs.numel() // HASHED_PAIRS * HASHED_PAIRS
        tiles = pairs[:whole].view(-1, HASHED_PAIRS)
        for start in range(0, tiles.shape[0], rows):
            block = tiles[start : start + rows]
            products = torch.mul(block, self._weights, out=self._products[: block.shape[0]])
            sums = products.sum(dim=1).mul_(self._powers[rows - block.shape[0] :])
            total.mul_(signed(pow(_FACTOR, block.shape[0], 1 << 64))).add_(sums.sum())
        rest = pairs[whole:]
        if rest.numel():
            products = self._products[0, : rest.numel()]
            torch.mul(rest, self._weights[: rest.numel()], out=products)
            total.mul_(signed(_FACTOR)).add_(products.sum())
        if x.numel() % 2:
            total.mul_(signed(_FACTOR)).add_(x[-1:].view(torch.int32)[0])
        return total


def signed(value: int) -> int:
    """Return the int64 of the same bits."""
    return value - (1 << 64) if value >> 63 else value


def _weights(device: torch.device) -> Tensor:
    """Return odd multipliers, one per place in a tile."""
    places = torch.arange(HASHED_PAIRS, dtype=torch.int64, device=device)
    values = (places * 2 + 1) * signed(_FACTOR)
    return values ^ (values >> 29 << 1)  # still odd
