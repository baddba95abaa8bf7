"""What the kernels of the group formats need to know of one."""

from __future__ import annotations

import math
from dataclasses import dataclass

FP32_MAX = 3.4028234663852886e38


def largest_scale(top_value: float) -> float:
    """Return the largest bf16 number, of 8 bits, whose product with `top_value` is finite."""
    mantissa, exponent = math.frexp(FP32_MAX / top_value)
    return math.ldexp(math.floor(mantissa * 2**8), exponent - 8)


@dataclass(frozen=True)
class GroupFormat:
    """What the kernels need to know of a format.

    `parts` codes of base `base` share a byte: the byte j of a block holds the j-th element of each
    of its `parts` equal pieces, the first piece in the lowest digit. Of base 8 it is 8 codes
    in `word_bytes` 3: base 4 twice, and base 2 of all. `mantissa_bits` is None for
    equally spaced grids, else the grid is that of a small float, in units of its least normal.
    `levels` are the positive numbers of a grid without zero.
    """

    group_size: int
    parts: int
    base: int
    top_rank: int
    top_value: float
    mantissa_bits: int | None = None
    is_ternary: bool = False
    is_stochastic: bool = False
    levels: tuple[float, ...] = ()
    word_bytes: int = 1

    @property
    def block(self) -> int:
        """Elements per block: whole groups that fill whole bytes."""
        return self.group_size * (self.parts if self.is_ternary else 1)

    @property
    def width(self) -> int:
        """Bytes of a block's codes; of base 8 a third of them."""
        return self.block // self.parts

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes of `numel` elements."""
        return -(-numel // self.parts) * self.word_bytes

    def num_groups(self, numel: int) -> int:
        """Groups, and scales, of `numel` elements."""
        return -(-numel // self.group_size)

    def num_bytes(self, numel: int) -> int:
        """Bytes of a message of `numel` elements: codes, and 2 for each scale."""
        return self.code_bytes(numel) + 2 * self.num_groups(numel)

    @property
    def decoding_roles(self) -> set[str]:
        """What of `work` decoding takes."""
        roles = {"codes", "scales", "scale", "digits"}
        roles |= {"packed", "value"} if self.is_ternary else set()
        roles |= {"value", "rank"} if self.levels else set()
        return roles | ({"bits", "sign", "exponent"} if self.mantissa_bits is not None else set())

    def work(self, numel: int) -> dict[str, int]:
        """Return what the kernels work in for `numel` elements at a time, by role."""
        groups, words, each = self.num_groups(numel), -(-numel // self.parts), 4 * numel
        work = {"codes": each, "scales": 2 * groups}
        work |= dict.fromkeys(("scale", "inverse", "nonzero"), 4 * groups)
        if not self.levels and not self.is_ternary:
            work["top"] = 4
        if self.parts > 1:
            work["packed"] = 4 * words * (2 if self.base == 8 else 1)
        if self.parts > 1 and not self.is_ternary:
            work["digits"] = 8 * words if self.base == 8 else numel
        if self.is_ternary or self.levels:
            work["count"] = 4 * groups
        if self.is_ternary or self.levels[1:]:
            work["value"] = each
        if self.levels[1:]:
            work |= {"rank": each, "root": 8 * groups}
        if self.mantissa_bits is not None:
            work |= dict.fromkeys(("rank", "value", "bits", "sign", "exponent"), each)
        if self.is_stochastic:
            work |= dict.fromkeys(("noise", "bits", "high"), each)
        return work
