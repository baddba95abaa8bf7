"""What a matrix starts its next round from: the directions of the last mean Q, in its codes.

A mean Q comes as int8 codes with a scale per column (factors.py), and is nothing but their
products, of 7 bits and 8: exact in fp32. So its codes are kept, in a quarter of the memory, and
every value is the same. Where factors travel in fp32, values are kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsx.compress.factors import DownCodec
from dsx.compress.low_rank_factor import Factor
from dsx.compress.owners import CODES, SCALES, down_bytes
from dsx.core.buffers import Buffers

_LARGEST_CODE = 127


class WarmStart:
    """Directions `[max_rank, length]` of a matrix; zeros until there are any.

    `slots` are what a checkpoint keeps: codes, int8, and scales `[length]`, fp32; or `is_exact`,
    values in fp32.
    """

    def __init__(
        self, name: str, max_rank: int, length: int, is_exact: bool, state: Buffers
    ) -> None:
        kind = "float32" if is_exact else "int8"
        self._codes = state.zeros(max_rank, length, dtype=kind)
        self._scales = None if is_exact else state.zeros(length)
        self.slots: Mapping[str, Tensor] = {f"{CODES}{name}": self._codes}
        if self._scales is not None:
            self.slots = {**self.slots, f"{SCALES}{name}": self._scales}

    @property
    def num_directions(self) -> int:
        """How many there are."""
        return int(self._codes.any(dim=1).sum())

    def take(self, mean: Factor) -> None:
        """Keep the mean of a round, as it has come."""
        self._codes.zero_()
        scales = mean.codes(self._codes[: mean.rank])
        if self._scales is not None:
            self._scales.copy_(scales)

    def read(self, out: Tensor) -> Tensor:
        """Write the first directions to `out`, fp32 `[count, length]`, and return it."""
        out.copy_(self._codes[: out.shape[0]])
        return out if self._scales is None else out.mul_(self._scales)


def in_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes `[r, length]`, int8, and scales `[length]`, fp32, that values are made of.

    Of what was kept in fp32 of means that came in codes: products that are exact, so these have the
    same values. Columns that are of no codes are rounded, as a mean is.
    """
    largest = values.abs().amax(dim=0)
    scales, found = torch.zeros_like(largest), largest == 0
    for code in range(_LARGEST_CODE, 0, -1):  # the largest of a column, usually 127 or 126
        scale = largest / code
        (maybe,) = torch.nonzero(~found & (scale.bfloat16().float() == scale), as_tuple=True)
        ratio = (values[:, maybe] / scale[maybe]).round_()
        fits = maybe[(ratio * scale[maybe] == values[:, maybe]).all(dim=0)]
        scales[fits], found[fits] = scale[fits], True
    rounded = ~found
    if rounded.any():
        scales[rounded] = _rounded(values[:, rounded])
    codes = torch.where(scales > 0, values / scales, 0.0).round_()
    return codes.clamp_(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int8), scales


def _rounded(values: Tensor) -> Tensor:
    """Return the scales that a mean of these values would come with."""
    rows, length = values.shape
    codec = DownCodec(length, is_exact=False)
    message = torch.empty(down_bytes(False, rows, length), dtype=torch.uint8)
    codec.encode(values, message)
    return codec.decode(message, torch.empty_like(values))
