"""Every wire format by its name, what it is and the bytes it takes.

fp32 (exact), bf16 and fp16 are a cast of each element. The others have one bf16 scale per group:

| name     | grid, times the scale                  | bytes per element, full groups |
|----------|----------------------------------------|--------------------------------|
| int8     | -127 .. 127                            | 1 + 2 / group_size             |
| int4     | -7 .. 7                                | 1/2 + 2 / group_size           |
| fp8      | the 253 numbers of e4m3                | 1 + 2 / group_size             |
| fp4_e2m1 | 0 .5 1 1.5 2 3 4 6 and negatives       | 1/2 + 2 / group_size           |
| fp4_e3m0 | 0 1 2 4 8 16 32 64 and negatives       | 1/2 + 2 / group_size           |
| ternary  | -1 0 1                                 | 1/5 + 2 / group_size           |
| 3bit     | .2451 .7560 1.344 2.152 and negatives  | 3/8 + 2 / group_size           |
| 2bit     | .4528 1.510 and negatives              | 1/4 + 2 / group_size           |
| 1bit     | -1 1                                   | 1/8 + 2 / group_size           |

A code is the rank of its number in the grid, 0 for zero. One byte holds: an 8-bit rank, two's
complement; or two 4-bit ranks, two's complement, the low nibble from the first half of the group,
the high one from the second; or five base-3 digits (rank + 1), the lowest from the first of five
consecutive groups. The last three have no zero: ranks lie half-way between whole numbers, and the
half below is sent, two's complement: four of them in a byte, or eight, the lowest digit from the
first of so many equal parts of a group. 3bit is 2bit of what is left of ranks without their signs'
+-2, first of the first half of a group, and behind it 1bit of the signs. See group_codec.py for
the message as a whole.

Sources: e4m3 is that of arXiv:2209.05433, e2m1 that of the OCP Microscaling formats 1.0, e3m0 that
of Streaming DiLoCo (arXiv:2501.18512); ternary weights arXiv:1605.04711, whose threshold of 0.7
times the mean magnitude is kept, with the mean of what exceeds it as the scale; the last three are
the quantizers of least squared error for a Gaussian (Max 1960, Lloyd 1982), for the group's root
mean square as the scale, and for 1 bit its mean magnitude, the best one for any distribution.
Deviations: e4m3 codes are ranks, not the standard's bits, so that one grid serves all small floats.

Nearest rounding sends ties to the upper neighbour; stochastic rounding takes either neighbour and
is unbiased. With nearest, for every element, s being the scale of its group:
`|x - decoded| <= s / 2` for the integers, `<= |x| / 3 + s / 2` for e3m0.

Nothing here needs torch before a codec is opened: plans read these declarations, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

from dsx.compress.wire.base import TILE, Codec, Kernels, Rounding, Wire
from dsx.compress.wire.group_format import GroupFormat
from dsx.compress.wire.kernel_choice import choose_kernels, is_native
from dsx.core.checks import require_choice

if TYPE_CHECKING:
    import torch

    from dsx.core.buffers import Buffers

GROUP_SIZES = (32, 64, 128, 256)
Storage = Literal["fp32", "bf16", "int8"]  # of residuals


class _Cast:
    """What follows from a dtype alone, the same for every cast."""

    name: ClassVar[str]
    dtype: ClassVar[str]  # torch's name
    itemsize: ClassVar[int]
    is_exact = False
    granularity = 1

    def validate(self) -> None:
        """Nothing to check."""

    def num_bytes(self, numel: int) -> int:
        """Return the exact size of a message of `numel` elements."""
        return self.itemsize * numel

    def work(self, numel: int, kernels: Kernels = "auto") -> Mapping[str, int]:
        """Return what a codec works in, by role: a tile in fp32."""
        return {} if self.is_exact else {"value": 4 * min(numel, TILE)}

    def codec(
        self,
        numel: int,
        device: torch.device,
        kernels: Kernels = "auto",
        buffers: Buffers | None = None,
    ) -> Codec:
        """Return a codec for vectors of up to `numel` elements on `device`."""
        from dsx.compress.wire.casts import CastCodec

        return CastCodec(self.dtype, numel, device, kernels, buffers)


@dataclass(frozen=True)
class FP32(_Cast):
    """The values themselves."""

    name = "fp32"
    dtype = "float32"
    itemsize = 4
    is_exact = True


@dataclass(frozen=True)
class BF16(_Cast):
    """8 significant bits, the range of fp32."""

    name = "bf16"
    dtype = "bfloat16"
    itemsize = 2


@dataclass(frozen=True)
class FP16(_Cast):
    """11 significant bits between 6e-5 and 65504."""

    name = "fp16"
    dtype = "float16"
    itemsize = 2


class _Grouped(ABC):
    """What follows from a `GroupFormat` alone, the same for every format here."""

    is_exact = False
    name: str
    group_size: int

    @property
    @abstractmethod
    def form(self) -> GroupFormat:
        """What the kernels need to know."""

    @property
    def granularity(self) -> int:
        """Elements of a block: whole groups that fill whole bytes."""
        return self.form.block

    def validate(self) -> None:
        """Require a known group size and rounding."""
        if self.group_size not in GROUP_SIZES:
            nearest = min(GROUP_SIZES, key=lambda size: abs(size - self.group_size))
            raise ValueError(
                f"{self.name}.group_size={self.group_size} must be one of "
                f"{', '.join(map(str, GROUP_SIZES))}; try {nearest}"
            )
        require_choice(f"{self.name}.rounding", getattr(self, "rounding", "nearest"), Rounding)

    def num_bytes(self, numel: int) -> int:
        """Return the exact size of a message of `numel` elements."""
        return self.form.num_bytes(numel)

    def work(self, numel: int, kernels: Kernels = "auto") -> Mapping[str, int]:
        """Return what a codec works in, by role: of the kernels, over a tile, or in nothing."""
        return {} if is_native(kernels) else self.form.work(min(numel, TILE))

    def codec(
        self,
        numel: int,
        device: torch.device,
        kernels: Kernels = "auto",
        buffers: Buffers | None = None,
    ) -> Codec:
        """Return a codec for vectors of up to `numel` elements on `device`."""
        chosen = choose_kernels(self.name, numel, device.type, kernels)
        if chosen == "native":
            from dsx.compress.wire.native_codec import NativeCodec

            return NativeCodec(self.name, self.form, numel)
        from dsx.compress.wire.group_codec import GroupCodec

        return GroupCodec(self.form, numel, device, chosen, buffers)


@dataclass(frozen=True)
class _Grid(_Grouped):
    """Codes of `bits` each, on equally spaced numbers or those of a small float."""

    group_size: int = 64
    rounding: Rounding = "nearest"

    bits: ClassVar[int]
    top_rank: ClassVar[int]
    top_value: ClassVar[float]  # of a small float, in units of its least normal number
    mantissa_bits: ClassVar[int | None] = None

    @cached_property  # a plan asks for it a hundred thousand times
    def form(self) -> GroupFormat:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What the kernels need to know."""
        return GroupFormat(
            self.group_size,
            parts=8 // self.bits,
            base=2**self.bits,
            top_rank=self.top_rank,
            top_value=self.top_value,
            mantissa_bits=self.mantissa_bits,
            is_stochastic=self.rounding == "stochastic",
        )


@dataclass(frozen=True)
class Int8(_Grid):
    """8-bit integers; the error is invisible next to that of the averaging itself."""

    group_size: int = 256

    name = "int8"
    bits, top_rank, top_value = 8, 127, 127.0


@dataclass(frozen=True)
class Int4(_Grid):
    """4-bit integers, the default: an eighth of fp32, less error than either fp4."""

    name = "int4"
    bits, top_rank, top_value = 4, 7, 7.0


@dataclass(frozen=True)
class FP8(_Grid):
    """e4m3, 4 exponent and 3 mantissa bits: for groups whose values span orders of magnitude."""

    group_size: int = 256

    name = "fp8"
    bits, top_rank, mantissa_bits = 8, 126, 3
    top_value = 28672.0  # 448 over 2^-6


@dataclass(frozen=True)
class FP4E2M1(_Grid):
    """The usual 4-bit float."""

    name = "fp4_e2m1"
    bits, top_rank, top_value, mantissa_bits = 4, 7, 6.0, 1


@dataclass(frozen=True)
class FP4E3M0(_Grid):
    """Powers of two: what Streaming DiLoCo sends; three times the squared error of int4."""

    name = "fp4_e3m0"
    bits, top_rank, top_value, mantissa_bits = 4, 7, 64.0, 0


@dataclass(frozen=True)
class Ternary(_Grouped):
    """Signs of what is large, 1.9 bits per element at groups of 64; nearest rounding only."""

    group_size: int = 64

    name = "ternary"

    @property
    def form(self) -> GroupFormat:
        """Five digits per byte."""
        return GroupFormat(self.group_size, 5, 3, 1, 1.0, is_ternary=True)


@dataclass(frozen=True)
class _LloydMax(_Grouped):
    """Signs and the nearest of 1, 2 or 4 levels, best for a Gaussian; nearest rounding only."""

    group_size: int = 64

    levels: ClassVar[tuple[float, ...]]  # for a variance of 1

    @cached_property  # as that of other grids
    def form(self) -> GroupFormat:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Whole bytes: of 3 bits three hold eight codes."""
        count = len(self.levels)
        is_odd = count == 4
        return GroupFormat(
            self.group_size,
            parts=8 if is_odd else 8 // count,
            base=2 * count,
            top_rank=count,
            top_value=self.levels[-1],
            levels=tuple(round(level * 2**14) / 2**14 for level in self.levels),
            word_bytes=3 if is_odd else 1,
        )


@dataclass(frozen=True)
class ThreeBits(_LloydMax):
    """Three times the squared error of int4, at three quarters of the bytes."""

    name = "3bit"
    levels = 0.2450942, 0.7560053, 1.3439093, 2.1519457


@dataclass(frozen=True)
class TwoBits(_LloydMax):
    """2.25 bits per element, less error than ternary's 1.85."""

    name = "2bit"
    levels = 0.4527800, 1.5104176


@dataclass(frozen=True)
class OneBit(_LloydMax):
    """Signs and a mean magnitude: 1.06 bits per element at groups of 256."""

    group_size: int = 256

    name = "1bit"
    levels = (1.0,)


FORMATS: dict[str, type[Wire]] = {
    kind.name: kind
    for kind in (
        *(FP32, BF16, FP16, Int8, Int4, FP8, FP4E2M1, FP4E3M0, Ternary),
        *(ThreeBits, TwoBits, OneBit),
    )
}


def is_made_in_place(storage: str, decay: float) -> bool:
    """Whether a residual in this storage needs no fp32 of its own where values are used up."""
    return storage not in ("none", "fp32") and decay == 1


def decoding_work(wire: Wire, numel: int, kernels: Kernels = "auto") -> Mapping[str, int]:
    """Return what of `wire.work` a codec takes that only decodes."""
    work = wire.work(numel, kernels)
    roles = wire.form.decoding_roles if isinstance(wire, _Grouped) else work.keys()
    return {role: size for role, size in work.items() if role in roles}
